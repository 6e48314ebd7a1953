"""The ring, and how the memory of a rank is divided."""
