"""``stoker warm``."""
