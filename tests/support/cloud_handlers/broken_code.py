"""A module of handlers that cannot be imported."""

raise RuntimeError("this module is broken")
