"""``python -m stoker.cli``: the same as ``stoker``."""

import sys

from stoker.cli import main

if __name__ == "__main__":
    sys.exit(main())
