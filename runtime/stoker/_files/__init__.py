"""The files that a packed data set is shown as: their paths, their contents and their sizes."""
