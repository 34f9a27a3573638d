"""``python -m chainring`` is the command ``chainring``."""

import sys

from chainring.cli import main

if __name__ == "__main__":
    sys.exit(main())
