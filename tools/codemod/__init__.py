"""Moves modules and renames names all over the repository, as a table says; a second run changes nothing."""
