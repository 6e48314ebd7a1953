"""The version of the distribution, the one place that names it."""

__version__ = "0.2.0"
