"""The version of the distribution, the one place that names it."""

__version__ = "0.1.0"
