"""A plug-in that fails when it is imported."""

tier = 1 // 0
