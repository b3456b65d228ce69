"""Settings files: what `pycass tune` chose, for `convert` and for the engine. A small JSON object, strictly read."""

import dataclasses
import json
import math
import os
from dataclasses import dataclass, field

from .errors import InvalidArgument, IOFailure, PycassError

VERSION = 1
MAX_BYTES = 1 << 20  # no settings file is as long
CODECS = ("nest", "cass1", "cass2")


@dataclass(frozen=True)
class Settings:
    """How a model is encoded and drafted. None: not said, the default of whoever reads it.

    codec, hot (columns that the draft keeps exactly), bias (of the draft), prune (share of the weights), mantissa_bits
    (kept), half (dropped bits are read as a half): for `convert`. draft_max (tokens) and draft_full (patterns of the
    names of tensors that the draft reads wholly): for the engine. measured, machine: for people.
    """

    codec: str
    hot: int | None = None
    bias: bool | None = None
    prune: float | None = None
    mantissa_bits: int | None = None
    half: bool | None = None
    draft_max: int | None = None
    draft_full: tuple[str, ...] = ()
    measured: dict = field(default_factory=dict)
    machine: dict = field(default_factory=dict)

    def __post_init__(self):
        for name, check in _CHECKS.items():
            value = getattr(self, name)
            if value is None and name != "codec":
                continue
            wrong = check(value)
            if wrong:
                raise InvalidArgument(f"{name}: {wrong}, not {_shown(value)}")
        object.__setattr__(self, "draft_full", tuple(self.draft_full))

    def convert_arguments(self) -> dict:
        """Arguments of `pycass.convert.convert`: those that are said."""
        names = ("codec", "hot", "bias", "prune", "mantissa_bits", "half")
        return {n: getattr(self, n) for n in names if getattr(self, n) is not None}

    def as_object(self) -> dict:
        """What save() writes."""
        said = {k: v for k, v in dataclasses.asdict(self).items() if v is not None}
        return {"pycass_settings": VERSION} | said | {"draft_full": list(self.draft_full)}


def _shown(value) -> str:
    text = json.dumps(value) if isinstance(value, (str, int, float, bool, list, dict)) else type(value).__name__
    return text if len(text) <= 60 else text[:57] + "..."


def _integer(low, high):
    def check(v):
        ok = isinstance(v, int) and not isinstance(v, bool) and low <= v <= high
        return None if ok else f"an integer from {low} to {high} is needed"

    return check


def _boolean(v):
    return None if isinstance(v, bool) else "true or false is needed"


def _share(v):
    ok = isinstance(v, (int, float)) and not isinstance(v, bool) and math.isfinite(v) and 0 <= v < 1
    return None if ok else "a number from 0 to less than 1 is needed"


def _patterns(v):
    ok = isinstance(v, (list, tuple)) and all(isinstance(p, str) and p for p in v)
    return None if ok else "a list of names or patterns is needed"


_CHECKS = {
    "codec": lambda v: None if isinstance(v, str) and v in CODECS else f"one of {', '.join(CODECS)} is needed",
    "hot": _integer(0, 1 << 16),
    "bias": _boolean,
    "prune": _share,
    "mantissa_bits": _integer(0, 7),
    "half": _boolean,
    "draft_max": _integer(1, 16),
    "draft_full": _patterns,
    "measured": lambda v: None if isinstance(v, dict) else "an object is needed",
    "machine": lambda v: None if isinstance(v, dict) else "an object is needed",
}


def parse(text: str) -> Settings:
    """Settings from JSON text. Raises InvalidArgument in words: no JSON, another version, an unknown key, a wrong
    value."""
    try:
        found = json.loads(text, parse_constant=_no_constant, object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"not JSON: {error}") from None
    if not isinstance(found, dict) or "pycass_settings" not in found:
        raise InvalidArgument('not a settings file: an object with "pycass_settings" is needed')
    version = found.pop("pycass_settings")
    if version != VERSION or isinstance(version, bool):
        raise InvalidArgument(f"settings of version {_shown(version)}; this program reads version {VERSION}")
    unknown = sorted(set(found) - set(_CHECKS))
    if unknown:
        raise InvalidArgument(f"unknown key {unknown[0]!r}; known: {', '.join(_CHECKS)}")
    if "codec" not in found:
        raise InvalidArgument("codec is missing")
    empty = sorted(k for k, v in found.items() if v is None)
    if empty:
        raise InvalidArgument(f"{empty[0]}: null is no value; leave the key out")
    return Settings(**found)


def _no_constant(name):
    raise ValueError(f"{name} is no number")


def _object(pairs):
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key occurs twice")
    return found


def load(path) -> Settings:
    """The settings of a file. Raises IOFailure or InvalidArgument, with the file's name."""
    path = os.fsdecode(path)
    try:
        with open(path, "rb") as f:
            data = f.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        raise IOFailure(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    if len(data) > MAX_BYTES:
        raise InvalidArgument(f"{path}: too long for a settings file")
    try:
        return parse(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"{path}: not UTF-8 text (byte {error.start})") from None
    except PycassError as error:
        raise InvalidArgument(f"{path}: {error}") from None


def save(settings: Settings, path) -> None:
    """Writes a settings file, whole or not at all."""
    from .model import write_whole

    text = json.dumps(settings.as_object(), indent=1, ensure_ascii=False) + "\n"
    write_whole(os.fsdecode(path), text.encode())


def of(value) -> Settings | None:
    """Settings from what a caller has: a path, Settings, the object of a settings file, or None."""
    if value is None or isinstance(value, Settings):
        return value
    return parse(json.dumps(value)) if isinstance(value, dict) else load(value)
