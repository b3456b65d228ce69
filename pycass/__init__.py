"""Lossless self-speculative inference of large language models from one `.cass` file."""

from pycass.errors import PycassError
from pycass.file import CassFile
from pycass.model import Completion, Delta, Model, kernels

__version__ = "0.1.0"
__all__ = ["CassFile", "Completion", "Delta", "Model", "PycassError", "__version__", "kernels"]
