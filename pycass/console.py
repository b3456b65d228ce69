"""Messages to stderr: notes, details for --verbose, progress bars on a terminal only."""

import contextlib
import sys


class Console:
    """Where everything goes that is not the answer."""

    def __init__(self, verbose=False, log_file=None):
        self.verbose = verbose
        self._file = open(log_file, "a", encoding="utf-8") if log_file else None

    def note(self, text):
        """A message for the user."""
        print(text, file=sys.stderr, flush=True)
        self._log(text)

    def detail(self, text):
        """A message for --verbose, and always for the log file."""
        if self.verbose:
            print(text, file=sys.stderr, flush=True)
        self._log(text)

    def _log(self, text):
        if self._file:
            self._file.write(text + "\n")
            self._file.flush()

    @contextlib.contextmanager
    def progress(self, what):
        """A callback(done, total) that draws a bar; None where stderr is no terminal."""
        if not sys.stderr.isatty():
            yield None
            return
        from rich.console import Console as Rich
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"),
                   TimeRemainingColumn())  # fmt: skip
        with Progress(*columns, console=Rich(stderr=True), transient=True) as bar:
            task = bar.add_task(what, total=None, visible=False)
            yield lambda done, total, *rest: bar.update(task, completed=done, total=total, visible=True)


def finish_stdout():
    """Flushes now, so that a closed pipe or a full disk is an error of ours and not of the interpreter's exit."""
    if sys.stdout is not None:
        sys.stdout.flush()
