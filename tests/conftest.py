"""The tests run against the installed package.

`python -m pytest` puts the checkout's root on the path, and its pycass/ has no extension module: take it off again, here
and in the programs that tests start. A checkout with the module built in place is left alone.
"""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

if not any((ROOT / "pycass").glob("_pycass.*")):
    sys.path[:] = [p for p in sys.path if Path(p or os.curdir).resolve() != ROOT]
    os.environ["PYTHONSAFEPATH"] = "1"  # python 3.11 and later: no current directory on the path
