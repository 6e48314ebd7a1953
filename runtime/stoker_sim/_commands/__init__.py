"""``stoker plan``, ``simulate`` and ``allocate``."""
