"""What a training takes of a data set, and what to change before it starts."""
