"""`python -m pycass`: the command line."""

import sys

from pycass.cli import main

if __name__ == "__main__":
    sys.exit(main())
