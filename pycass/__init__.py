"""Lossless self-speculative inference of large language models from one `.cass` file."""

from pkgutil import extend_path

# in a checkout this folder hides the installed package, which has the compiled module: look there too
__path__ = extend_path(__path__, __name__)

from pycass.errors import PycassError
from pycass.file import CassFile
from pycass.model import Completion, Delta, Model, devices, kernels

__version__ = "0.1.0"
__all__ = ["CassFile", "Completion", "Delta", "Model", "PycassError", "__version__", "devices", "kernels"]
