"""Runs ``python -m stoker.cli`` like ``stoker``."""

import sys

from stoker.cli import main

if __name__ == "__main__":
    sys.exit(main())
