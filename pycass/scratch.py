"""Temporary folders beside what a command writes, for model files; what a killed one left is removed by the next."""

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

try:
    import fcntl
except ImportError:  # not on this system: then nothing tells a leftover from a folder in use
    fcntl = None


@contextlib.contextmanager
def folder(parent, prefix: str):
    """A new folder parent/<prefix>..., locked while it is there. Removes those of that prefix that nobody holds a lock on.
    Raises OSError."""
    _remove_leftovers(Path(parent), prefix)
    path, fd = _locked(parent, prefix)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(fd)


def _locked(parent, prefix):
    while True:
        path = tempfile.mkdtemp(prefix=prefix, dir=parent)
        with contextlib.suppress(FileNotFoundError):  # another process took it for a leftover before it was locked
            fd = os.open(path, os.O_RDONLY)
            if fcntl:
                with contextlib.suppress(OSError):  # file systems without locks
                    fcntl.flock(fd, fcntl.LOCK_EX)
            if os.path.isdir(path):
                return path, fd
            os.close(fd)


def _remove_leftovers(parent, prefix):
    for path in [p for p in parent.iterdir() if p.name.startswith(prefix)] if fcntl else ():
        try:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        except OSError:
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
        except OSError:
            pass  # in use
        finally:
            os.close(fd)
