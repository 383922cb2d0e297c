"""``python -m pareback`` is the command ``pareback``."""

import sys

from pareback.cli import main

if __name__ == "__main__":
    sys.exit(main())
