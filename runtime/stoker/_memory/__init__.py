"""The ring buffer, and the memory budget of a rank."""
