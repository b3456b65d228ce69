"""Texts for calibration: the shipped one, or a user's file, as a list of samples."""

import os
from importlib import resources

from .errors import InvalidArgument, IOFailure

BUILTIN = "builtin"  # the name of the shipped text
PIECE = 200  # characters of a sample, about, in a file without separators


def samples(source=BUILTIN) -> list[str]:
    """The samples of the shipped text ("builtin") or of a UTF-8 file.

    A file is split at lines of three dashes. One without any is cut into pieces of about PIECE characters, at the ends
    of paragraphs if they are near, else of lines. Raises IOFailure if it cannot be read, InvalidArgument if it holds
    no text.
    """
    if source == BUILTIN:
        text = (resources.files("pycass") / "data" / "calibration.txt").read_text(encoding="utf-8")
    else:
        text = _read(source)
    parts = _at_dashes(text) if "---" in map(str.rstrip, text.split("\n")) else _pieces(text)
    if not parts:
        raise InvalidArgument(f"{source}: the calibration text is empty")
    return parts


def _read(path) -> str:
    path = os.fsdecode(path)
    try:
        with open(path, "rb") as f:
            data = f.read()
    except (OSError, ValueError) as error:
        raise IOFailure(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    if b"\0" in data:
        raise InvalidArgument(f"{path}: not a text: it holds zero bytes")
    try:
        return data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"{path}: not UTF-8 text (byte {error.start})") from None


def _at_dashes(text) -> list[str]:
    """The parts between lines of three dashes that hold something."""
    parts = [[]]
    for line in text.split("\n"):
        if line.rstrip() == "---":
            parts.append([])
        else:
            parts[-1].append(line)
    return [text for text in ("\n".join(part).strip("\n") for part in parts) if text.strip()]


def _pieces(text) -> list[str]:
    """Lines gathered until there are PIECE characters, or half as many at the end of a paragraph. A longer line is cut."""
    found, piece = [], ""
    for line in text.split("\n"):
        if piece and (len(piece) + len(line) > 1.5 * PIECE or (not line.strip() and len(piece) >= PIECE / 2)):
            found.append(piece)
            piece = ""
        piece += line + "\n"
        at = 0
        while len(piece) - at > 1.5 * PIECE:
            found.append(piece[at : at + PIECE])
            at += PIECE
        piece = piece[at:]
        if len(piece) >= PIECE:
            found.append(piece)
            piece = ""
    return [p.strip("\n") for p in [*found, piece] if p.strip()]
