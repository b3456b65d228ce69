"""Conversion: a Hugging Face directory, a GGUF or a .cass file -> a .cass file, bit for bit where the source is BF16."""

import os
import shutil
import stat
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from .._pycass import ffi, lib
from ..calibration_text import BUILTIN
from ..calibration_text import samples as calibration_text
from ..errors import ConversionError, PycassError
from . import arch, writer
from . import calibration as calibrate_
from .cass import open_cass
from .cass_parts import CODECS as CASS
from .cass_parts import CassOptions, round_cass2
from .gguf import open_gguf
from .hf import open_hf
from .source import require_regular

__all__ = ["Report", "Rounding", "convert", "open_source", "verify_against"]

CODECS = ("nest", "raw", *CASS)


@dataclass
class Report:
    """What a conversion did. Sizes in bytes."""

    out: str
    name: str
    family: str
    codec: str
    source_format: str
    source_dtype: str
    source_sha256: str
    n_weights: int
    n_tensors: int
    n_ctx_train: int
    tied: bool
    changed_values: int  # not exactly BF16 in the source (or after dequantisation) and rounded; by cass2 too
    quantized: bool
    file_bytes: int
    speculation_bytes: int
    verification_bytes: int
    seconds: float
    notes: list = field(default_factory=list)  # what the user should know, in sentences

    @property
    def speculation_bits(self):
        """Bits per weight that the draft reads."""
        return 8 * self.speculation_bytes / self.n_weights

    @property
    def bits(self):
        """Bits per weight of the whole model."""
        return 8 * (self.speculation_bytes + self.verification_bytes) / self.n_weights


def open_source(src, allow_missing_tokenizer=False):
    """Source of a Hugging Face directory, of a GGUF or of a .cass file. Close it, or use it in a with statement."""
    path = Path(src)
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        raise ConversionError(f"{path}: no such file or folder") from None
    except (OSError, ValueError) as e:
        raise ConversionError(f"{path}: {getattr(e, 'strerror', None) or e}") from None
    if stat.S_ISDIR(mode):
        ggufs = sorted(path.glob("*.gguf"))
        if ggufs and not (path / "config.json").exists():
            raise ConversionError(
                f"{path}: no config.json; give one of the GGUF files by name, such as {ggufs[0].name}"
            )
        return open_hf(path, allow_missing_tokenizer)
    require_regular(path)
    if path.suffix == ".cass":
        return open_cass(path)
    if path.suffix in (".safetensors", ".json"):
        raise ConversionError(f"{path}: give the folder that holds config.json, the weights and the tokenizer")
    return open_gguf(path)


def _default_threads():
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(8, cpus)


def _target(out):
    """Where to write: what `out` is a link to, else itself. Only a regular file may be replaced."""
    _refuse_special(out)
    target = Path(os.path.realpath(out)) if out.is_symlink() else out
    if not target.parent.is_dir():
        raise ConversionError(f"{target.parent}: no such folder")
    return target


def _refuse_special(out):
    try:
        mode = os.stat(out).st_mode  # of what it is a link to, /dev/stdout included
    except FileNotFoundError:
        return
    except NotADirectoryError:
        raise ConversionError(f"{out.parent}: no such folder") from None
    except (OSError, ValueError) as e:
        raise ConversionError(f"{out}: {getattr(e, 'strerror', None) or e}") from None
    if stat.S_ISDIR(mode):
        raise ConversionError(f"{out}: is a folder")
    if not stat.S_ISREG(mode):
        raise ConversionError(f"{out}: is not a regular file (a device or pipe, say) and cannot be the new file")


def _refuse_overwriting(source, src, out):
    """No file of the source is replaced, under whatever name; an older .cass file in its folder may be."""
    try:
        there = os.stat(out)
    except OSError:
        return
    paths = [f.path for f in source.files]
    for folder, _, names in os.walk(src) if os.path.isdir(src) else ():
        paths += [os.path.join(folder, n) for n in names if not n.endswith(".cass")]
    for path in paths:
        try:
            same = os.path.samestat(os.stat(path), there)
        except OSError:
            continue
        if same:
            raise ConversionError(f"{out}: is the source itself ({os.path.basename(path)})")


def _read_back(file):
    """A file that the engine would refuse is not given its name."""
    from ..file import CassFile

    try:
        CassFile(file.path).close()
    except PycassError as e:
        raise ConversionError(f"{file.out}: the new file cannot be read back, so it is not kept: {e}") from e


def _require_room(out, needed):
    try:
        free = shutil.disk_usage(out.parent).free
    except OSError as e:
        raise ConversionError(f"{out.parent}: {e.strerror}") from e
    if free < needed:
        raise ConversionError(f"{out}: no room: at least {needed} bytes are needed, {free} are free")


def _provenance(source, digest, changed):
    return {
        "source": source.name,
        "source_sha256": digest,
        "source_format": source.format,
        "source_dtype": source.dtypes(),
        "changed_values": changed,
        "pycass": ffi.string(lib.pycass_version()).decode(),
        "notes": source.notes,
    }


def convert(
    src,
    out,
    codec="nest",
    progress=None,
    allow_missing_tokenizer=False,
    threads=None,
    *,
    calibrate="auto",
    samples=128,
    hot=16,
    bias=True,
    weighted=True,
    prune=0.4,
    mantissa_bits=3,
    half=True,
    pruned="coded",
):
    """Converts a checkpoint into a .cass file.

    src: folder with config.json, safetensors and a tokenizer, or a GGUF or .cass file. out: path of the new file; an older
    file of that name is replaced only when the new one is whole, and nothing but a regular file ever is.
    codec: "nest", "raw" for BF16 as it is, "cass1", or "cass2", which alone does not keep every bit.
    progress(done, total, what): bytes of BF16 weights, and the tensor; what it raises ends the conversion.
    threads: that read, encode and compute; default: the machine's, at most 8.
    calibrate: text that tells which input channels are large: "builtin", or a UTF-8 file (see calibration_text.samples);
    "auto": what the source keeps of an earlier one, else "builtin"; None: without. samples: how many of the text, at most.
    hot, bias, weighted: what nest makes of it, see writer.NestOptions. prune, mantissa_bits, half, pruned: see
    cass_parts.CassOptions; cass codecs weigh columns by the calibration when they choose what the draft keeps.
    Returns a Report. Raises ConversionError; then, as on any interrupt, nothing is left behind.
    """
    if codec not in CODECS:
        raise ConversionError(f"codec '{codec}' is not known; known: {', '.join(CODECS)}")
    if hot not in (0, 16, 32, 48, 64):
        raise ConversionError(f"{hot} hot columns; 0, 16, 32, 48 and 64 are possible")
    options = writer.NestOptions(hot, bool(bias), bool(weighted))
    if codec in CASS:
        options = CassOptions(prune, mantissa_bits, bool(half), pruned)
        options.check(codec)
    out = _target(Path(out))
    threads = threads or _default_threads()
    begin = time.monotonic()
    with open_source(src, allow_missing_tokenizer) as source:
        file = None
        _refuse_overwriting(source, src, out)
        try:
            calibration = None
            if codec != "raw" and calibrate is not None:
                calibration, progress = _calibration(source, out, calibrate, samples, progress, threads)
            plans, speculation = writer.make_plan(source.tensors, codec, calibration, options)
            _require_room(out, writer.minimum_bytes(plans, speculation))
            file = writer.PartialFile(out)
            made = {"calibration": calibration.about} if calibration else {}
            if codec in CASS or (calibration and codec == "nest"):
                made["cass" if codec in CASS else "nest"] = asdict(options)
            report = _write(source, file, plans, speculation, made, progress, threads, codec)
            _read_back(file)
            _refuse_special(out)
            file.commit()
        finally:
            if file is not None:
                file.discard()
    report.codec, report.seconds = codec, time.monotonic() - begin
    return report


def _calibration(source, out, text, samples, progress, threads):
    """(Calibration of the source, or None with a note if the engine cannot run it; the progress of what is left)."""
    if text == "auto" and source.calibration:
        return source.calibration, progress
    text = BUILTIN if text == "auto" else text
    texts = calibration_text(text)[:samples]
    first, second, third = _steps(progress, 3, sum(2 * t.rows * t.cols for t in source.tensors.values()))
    name = text if text == BUILTIN else os.path.basename(text)
    if source.format == "cass":
        return _measure(source, source.name, texts, name, second, threads), third
    plans, speculation = writer.make_plan(source.tensors, "raw")
    _require_room(out, 2 * speculation)
    file = writer.PartialFile(out)
    try:
        tensors = writer.TensorWriter(file, plans, speculation, first, threads)
        tensors.run()
        cfg = source.config
        writer.finish(file, tensors, speculation, cfg, arch.FLAG_TIED if cfg.tied else 0, source.json)
        return _measure(source, file.path, texts, name, second, threads), third
    finally:
        file.discard()


def _measure(source, path, texts, name, progress, threads):
    from ..model import Model

    try:
        with Model.load(path, threads=threads, mmap=True) as model:
            return calibrate_.measure(model, texts, name, lambda done, total: progress and progress(done, total, "calibration"))
    except PycassError as e:
        source.notes.append(f"not calibrated: {e}")
        return None


def _steps(progress, n, size):
    """Callbacks of n steps of the same size for progress."""

    def step(i):
        return lambda done, total, what: progress(i * size + done * size // total, n * size, what)

    return [step(i) if progress else None for i in range(n)]


def _write(source, file, plans, speculation, made, progress, threads, codec):
    """Everything between opening and renaming the file; the source's digest is made beside it."""
    cfg, stopped = source.config, False
    with ThreadPoolExecutor(1) as beside:
        digest = beside.submit(source.sha256, lambda: stopped)
        try:
            tensors = writer.TensorWriter(file, plans, speculation, progress, threads)
            tensors.run()
        except BaseException:
            stopped = True
            raise
        digest = digest.result()
    flags = (arch.FLAG_TIED if cfg.tied else 0) | (arch.FLAG_ROUNDED if tensors.changed or source.rounded else 0)
    flags |= arch.FLAG_QUANTIZED if source.quantized else 0
    speculation = tensors.speculation
    notes = _closing_notes(source, tensors.changed, codec)
    provenance = source.json.get("provenance") or _provenance(source, digest, 0)
    provenance = provenance | {"changed_values": provenance.get("changed_values", 0) + tensors.changed}
    blob = source.json | {"rope": cfg.rope, "provenance": provenance} | made
    size = writer.finish(file, tensors, speculation, cfg, flags, blob)
    return Report(
        out=str(file.out),
        name=source.json.get("name") or source.name,
        family=cfg.family,
        codec="",
        source_format=source.format,
        source_dtype=source.dtypes(),
        source_sha256=digest,
        n_weights=sum(p.ref.rows * p.ref.cols for p in plans),
        n_tensors=len(plans),
        n_ctx_train=cfg.n_ctx_train,
        tied=cfg.tied,
        changed_values=tensors.changed,
        quantized=source.quantized,
        file_bytes=size,
        speculation_bytes=speculation,
        verification_bytes=tensors.verification,
        seconds=0.0,
        notes=notes,
    )


def _closing_notes(source, changed, codec):
    notes = source.notes
    if codec == "cass2":
        notes.append(f"cass2 is near-lossless: {changed} values are not exactly the source's, and what is left is the model")
        return notes
    if source.format == "cass":
        return notes
    if source.quantized:
        notes.append("the source is quantised: its values, rounded to BF16, are the model that is kept exactly")
    elif changed:
        notes.append(f"{changed} values were not exactly BF16 and were rounded to nearest even")
    return notes


# ---- verification ----------------------------------------------------------------------------------------------


@dataclass
class Rounding:
    """What cass2 changed, summed over tensors. Relative errors are those of values that are not zero."""

    values: int = 0
    changed: int = 0
    largest: float = 0.0
    total: float = 0.0  # of absolute errors
    largest_relative: float = 0.0
    total_relative: float = 0.0
    nonzero: int = 0
    square_error: float = 0.0
    square: float = 0.0

    def add(self, source, stored):
        """BF16 bits of the source, and what is left of them."""
        a, b = ((x.astype(np.uint32) << 16).view(np.float32).astype(np.float64) for x in (source, stored))
        error, size = np.abs(a - b), np.abs(a)
        relative = error[size > 0] / size[size > 0]
        self.values += a.size
        self.changed += int((source != stored).sum())
        self.largest, self.total = max(self.largest, float(error.max())), self.total + float(error.sum())
        self.largest_relative = max(self.largest_relative, float(relative.max(initial=0)))
        self.total_relative, self.nonzero = self.total_relative + float(relative.sum()), self.nonzero + relative.size
        self.square_error += float((error**2).sum())
        self.square += float((size**2).sum())

    def sentence(self):
        """For people."""
        norm = (self.square_error / self.square) ** 0.5 if self.square else 0.0
        return (
            f"near-lossless: {self.changed} of {self.values} values differ from the source; absolute error at most "
            f"{self.largest:.3g}, {self.total / self.values:.3g} on average; relative at most {self.largest_relative:.3g}, "
            f"{self.total_relative / max(self.nonzero, 1):.3g} on average, {norm:.3g} of the norm"
        )


def verify_against(cass_path, src, rounding=None):
    """Differences between a .cass file and a source, as sentences; an empty list when every bit is the same. Tensors of cass2
    must be the source's as cass2 rounds it; what that changed is added to `rounding`, a Rounding.

    Reads the source as convert() does and compares tensors, BF16 bits and hyperparameters. Raises ConversionError
    for a source that cannot be read, and the errors of CassFile for the file.
    """
    from ..file import CassFile

    with open_source(src, allow_missing_tokenizer=True) as source, CassFile(cass_path) as cass:
        differences = _config_differences(cass.config, source.config)
        differences += [f"{name}: only in the source" for name in source.tensors if name not in cass.tensors]
        differences += [f"{name}: only in the .cass file" for name in cass.tensors if name not in source.tensors]
        for name, ref in source.tensors.items():
            if name in cass.tensors:
                differences += _tensor_differences(name, ref, cass, rounding or Rounding())
    return differences


def _config_differences(stored, cfg):
    same = ("n_vocab", "n_ctx_train", "n_embd", "n_ff", "n_layer", "n_head", "n_head_kv", "head_dim")
    out = [
        f"{k}: {getattr(stored, k)} in the .cass file, {getattr(cfg, k)} in the source"
        for k in same
        if getattr(stored, k) != getattr(cfg, k)
    ]
    for k in ("rms_eps", "rope_attention_factor"):
        if np.float32(getattr(stored, k)) != np.float32(getattr(cfg, k)):
            out.append(f"{k}: {getattr(stored, k)} in the .cass file, {getattr(cfg, k)} in the source")
    if not np.array_equal(np.asarray(stored.rope_inv_freq, np.float32), cfg.rope_inv_freq):
        out.append("rope_inv_freq: the frequencies differ")
    return out


def _tensor_differences(name, ref, cass, rounding):
    stored = cass.bf16(name)
    if tuple(stored.shape) != ref.shape:
        return [f"{name}: shape {list(stored.shape)} in the .cass file, {list(ref.shape)} in the source"]
    stored, wrong, first = stored.reshape(ref.rows, ref.cols), 0, None
    for r0, r1 in ref.chunks():
        wanted = ref.read(r0, r1)[0]
        if cass.tensors[name].codec == "cass2":
            source, wanted = wanted, np.ascontiguousarray(wanted).copy()
            round_cass2(wanted)
            rounding.add(source, stored[r0:r1])
        unequal = wanted != stored[r0:r1]
        if unequal.any():
            first = first or tuple(int(i) for i in np.argwhere(unequal)[0] + (r0, 0))
            wrong += int(unequal.sum())
    return [f"{name}: {wrong} of {stored.size} values differ, first at [{first[0]}, {first[1]}]"] if wrong else []
