"""The tests run against the installed package.

`python -m pytest` puts the checkout's root on the path, and its pycass/ has no extension module: take it off again. A
checkout with the module built in place is left alone. Programs that tests start with `python -c` would look for modules
in the current directory, so they start in another one.
"""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

if not any((ROOT / "pycass").glob("_pycass.*")):
    sys.path[:] = [p for p in sys.path if Path(p or os.curdir).resolve() != ROOT]
