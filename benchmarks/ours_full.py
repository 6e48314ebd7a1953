"""As `benchmarks.ours`, with a uniform permutation of all samples instead of the default window."""

from __future__ import annotations

from benchmarks.ours import program

if __name__ == "__main__":
    program("full")
