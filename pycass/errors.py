"""One hierarchy of errors: whatever goes wrong in pycass is a `PycassError` with the reason in words."""

from pycass._pycass import ffi, lib


class PycassError(Exception):
    """Base of all errors of pycass."""


class InvalidArgument(PycassError, ValueError):
    """A parameter is out of its range."""


class OutOfMemory(PycassError, MemoryError):
    """There was no memory for what was asked."""


class IOFailure(PycassError, OSError):
    """A file cannot be opened, read, mapped or written."""


class FormatError(PycassError):
    """The file is not a .cass file, or truncated, damaged, or of another version."""


class Unsupported(PycassError):
    """A codec, tensor or shape that this build does not run."""


class ContextFull(PycassError):
    """The tokens do not fit the context."""


class StateMismatch(PycassError):
    """The saved state belongs to another model or version."""


class KernelUnavailable(PycassError):
    """The kernel set asked for does not exist or cannot run on this machine."""


class DeviceUnavailable(PycassError):
    """There is no library or driver for the GPU, or it failed."""


class ConversionError(PycassError):
    """The checkpoint cannot be converted."""


class DownloadError(PycassError):
    """A model cannot be fetched."""


class TemplateError(PycassError):
    """The chat template is missing, or refuses the messages."""


_BY_STATUS = {
    lib.PYCASS_ERR_INVALID_ARGUMENT: InvalidArgument,
    lib.PYCASS_ERR_OUT_OF_MEMORY: OutOfMemory,
    lib.PYCASS_ERR_IO: IOFailure,
    lib.PYCASS_ERR_NOT_CASS: FormatError,
    lib.PYCASS_ERR_VERSION: FormatError,
    lib.PYCASS_ERR_TRUNCATED: FormatError,
    lib.PYCASS_ERR_TRAILING: FormatError,
    lib.PYCASS_ERR_CORRUPT: FormatError,
    lib.PYCASS_ERR_CHECKSUM: FormatError,
    lib.PYCASS_ERR_UNSUPPORTED: Unsupported,
    lib.PYCASS_ERR_CONTEXT_FULL: ContextFull,
    lib.PYCASS_ERR_STATE_MISMATCH: StateMismatch,
    lib.PYCASS_ERR_KERNEL: KernelUnavailable,
    lib.PYCASS_ERR_DEVICE: DeviceUnavailable,
}


def check(status: int, where: str = "") -> None:
    """Raises the error of a `pycass_status`, with the C library's detail; `where` names a file."""
    if status == lib.PYCASS_OK:
        return
    detail = ffi.string(lib.pycass_error_detail()).decode("utf-8", "replace")
    phrase = ffi.string(lib.pycass_status_string(status)).decode()
    message = f"{phrase}: {detail}" if detail else phrase
    if where and where not in message:
        message = f"{where}: {message}"
    raise _BY_STATUS.get(status, PycassError)(message)
