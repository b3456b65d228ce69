"""Messages to stderr: notes, details for --verbose, progress bars on a terminal only."""

import contextlib
import os
import sys


class Console:
    """Where everything goes that is not the answer."""

    def __init__(self, verbose=False, log_file=None):
        self.verbose = verbose
        self._file = open(log_file, "a", encoding="utf-8", errors="replace") if log_file else None

    def note(self, text):
        """A message for the user."""
        complain(text)
        self._log(text)

    def detail(self, text):
        """A message for --verbose, and always for the log file."""
        if self.verbose:
            complain(text)
        self._log(text)

    def status(self, text):
        """What goes on, on a terminal only: a line that the next one replaces and "" takes away. --verbose says more."""
        if not self.verbose and sys.stderr is not None and sys.stderr.isatty():
            with contextlib.suppress(OSError):
                print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)

    def close(self):
        """Closes the log file."""
        if self._file:
            self._file.close()
            self._file = None

    def _log(self, text):
        if self._file:
            self._file.write(text + "\n")
            self._file.flush()

    @contextlib.contextmanager
    def progress(self, what):
        """A callback(done, total) that draws a bar; None where stderr is no terminal."""
        if sys.stderr is None or not sys.stderr.isatty():
            yield None
            return
        from rich.console import Console as Rich
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"),
                   TimeRemainingColumn())  # fmt: skip
        with Progress(*columns, console=Rich(stderr=True), transient=True) as bar:
            task = bar.add_task(what, total=None, visible=False)
            yield lambda done, total, *rest: bar.update(task, completed=done, total=total, visible=True)


def complain(text):
    """A line to stderr. One that cannot be written is no reason to fail: the answer goes elsewhere."""
    if sys.stderr is None:
        return
    try:
        print(text, file=sys.stderr, flush=True)
    except (OSError, ValueError):
        sys.stderr = open(os.devnull, "w")  # what is held back cannot fail again at the exit


def open_streams():
    """Gives standard streams that were closed by the caller to /dev/null, so that no file of ours gets their numbers.
    Whether stdout was one of them."""
    stdout_closed = sys.stdout is None
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
            os.set_inheritable(null, null == fd)
            setattr(sys, name, open(null, "w" if fd else "r", encoding="utf-8", closefd=False))
    return stdout_closed


def finish_stdout():
    """Flushes now, so that a closed pipe or a full disk is an error of ours and not of the interpreter's exit."""
    if sys.stdout is not None:
        sys.stdout.flush()
