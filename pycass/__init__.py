"""Lossless self-speculative inference of large language models from one `.cass` file."""

from pycass.errors import PycassError
from pycass.file import CassFile

__version__ = "0.1.0"
__all__ = ["CassFile", "PycassError", "__version__"]
