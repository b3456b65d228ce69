"""Writes a .cass file: streamed, checked, and only renamed to its name when it is whole."""

import contextlib
import errno
import json
import os
import secrets
import struct
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from .._pycass import ffi, lib
from ..errors import ConversionError
from . import arch, cass_parts
from .calibration import PART_MEAN, PART_RMS

try:
    import fcntl
except ImportError:  # no locks: then leftovers of killed conversions stay
    fcntl = None

MAGIC, VERSION, HEADER = b"\x89CASS\r\n\x1a", 2, 4096
RAW, NEST = 0, 1
SPECULATION, VERIFICATION, CONFIG, DIRECTORY, JSON = range(1, 6)
PART_RAW, PART_A, PART_X, PART_B, PART_SIDE, PART_HOT, PART_HOT_WORDS, PART_BIAS = 1, 16, 17, 18, 19, 20, 21, 22
SIDE_TAIL = 1024  # zero bytes behind the side records, so that a damaged file cannot be read past its end


def _align(n, to=64):
    return (n + to - 1) // to * to


def crc32c(data, crc=0):
    """CRC-32C of a bytes-like object, chained from crc."""
    view = ffi.from_buffer(data)
    return lib.pycass_crc32c(crc, view, len(view))


@dataclass(frozen=True)
class NestOptions:
    """What `nest` makes of a calibration: how many hot columns a matrix has (0, 16, 32, 48 or 64), whether it has a draft
    bias, and whether group exponents are chosen by the columns' activations."""

    hot: int = 16
    bias: bool = True
    weighted: bool = True


@dataclass
class Plan:
    """One tensor's place in the file. Parts: {type: [section, offset in it, size]}."""

    ref: object  # source.TensorRef
    codec: int
    parts: dict
    tiles: int = 0
    side_bytes: int = 0  # of the records so far
    bf16_crc: int = 0
    calibration: object = None  # the pycass_nest_calibration, if any
    hot: object = ()  # uint32, the hot columns
    keep: dict = field(default_factory=dict)  # {part type: bytes}: statistics that go into the file
    cass: object = None  # cass_parts.CassOptions
    norms: object = None  # float32 [cols], of the columns' activations
    open: tuple = ()  # the cass_parts.Part that are being written


def nest_parts(rows, cols):
    """(tiles, sizes of A, X, B) of a [rows, cols] matrix."""
    tiles = -(-rows // 16) * -(-cols // 64)
    return tiles, 512 * tiles, _align(16 * tiles), 768 * tiles


def make_plan(tensors, codec, calibration=None, options=None):
    """([Plan], size of SPECULATION). Verification offsets follow as the side parts' sizes become known.

    Neither do the parts of cass codecs have a place yet: SPECULATION's size is then that of the others, which come first.

    calibration: a calibration.Calibration, or None; options: NestOptions or CassOptions, those of the codec.
    """
    plans, at = [], 0
    for ref in tensors.values():
        if codec == "nest" and len(ref.shape) == 2:
            tiles, a, x, _ = nest_parts(ref.rows, ref.cols)
            plan = Plan(ref, NEST, {PART_A: [1, at, a], PART_X: [1, at + a, x]}, tiles)
            at += a + x
            if calibration and ref.name in calibration.channels:
                at = _plan_calibration(plan, at, calibration, options or NestOptions())
            plans.append(plan)
        elif codec in cass_parts.CODECS and len(ref.shape) == 2:
            plan = Plan(ref, cass_parts.CODECS[codec], {}, cass=options or cass_parts.CassOptions())
            if calibration and ref.name in calibration.channels:
                plan.norms = np.ascontiguousarray(calibration.channels[ref.name].rms, np.float32)
                _plan_keep(plan, calibration)
            plans.append(plan)
        else:
            size = ref.rows * ref.cols * 2
            plans.append(Plan(ref, RAW, {PART_RAW: [1, at, size]}))
            at = _align(at + size)
    return plans, at


def _plan_calibration(plan, at, calibration, options):
    """Adds the parts that a calibration calls for; returns where SPECULATION goes on."""
    stats, padded = calibration.channels[plan.ref.name], _align(plan.ref.rows, 16)
    plan.hot = stats.hot(options.hot)
    for kind, size in (
        (PART_HOT, 4 * len(plan.hot)),
        (PART_HOT_WORDS, 2 * padded * len(plan.hot)),
        (PART_BIAS, 4 * padded * options.bias),
    ):
        if size:
            plan.parts[kind] = [1, at, size]
            at = _align(at + size)
    _plan_keep(plan, calibration)
    c = ffi.new("pycass_nest_calibration *")
    alive = (  # what c points to
        ffi.from_buffer("uint32_t[]", plan.hot),
        ffi.from_buffer("float[]", np.ascontiguousarray(stats.rms**2, np.float32)),
        ffi.from_buffer("float[]", np.ascontiguousarray(stats.mean, np.float32)),
    )
    c.hot, c.n_hot = alive[0], len(plan.hot)
    c.importance = alive[1] if options.weighted else ffi.NULL
    c.mean = alive[2] if options.bias else ffi.NULL
    plan.calibration = (c, alive)
    return at


def _plan_keep(plan, calibration):
    if calibration.keeper(plan.ref.name):
        stats = calibration.channels[plan.ref.name]
        plan.keep = {PART_RMS: stats.rms.astype("<f4").tobytes(), PART_MEAN: stats.mean.astype("<f4").tobytes()}


def minimum_bytes(plans, speculation):
    """Bytes that the file has at least: all but the side parts and the metadata. Cass weights have 10 bits or more."""
    cass = sum(p.ref.rows * p.ref.cols * 10 // 8 for p in plans if p.cass)
    return HEADER + speculation + cass + sum(768 * p.tiles for p in plans)


def encode_nest(bits, calibration=None):
    """The parts (A, X, B, side offsets, side records, hot words, bias) of rows of a matrix, BF16 uint16 [rows, cols].
    calibration: a pycass_nest_calibration, or None."""
    rows, cols = bits.shape
    c = calibration or ffi.new("pycass_nest_calibration *")
    padded = _align(rows, 16)
    hot, bias = np.empty(padded * c.n_hot, np.uint16), np.empty(padded if c.mean else 0, np.float32)
    sizes = ffi.new("pycass_nest_sizes *")
    _check(lib.pycass_nest_bound(rows, cols, sizes))
    a, x, b, side = (np.empty(n, np.uint8) for n in (sizes.a, sizes.x, sizes.b, sizes.side_bound))
    size = ffi.new("size_t *")
    pointers = [ffi.from_buffer("uint8_t[]", p, require_writable=True) for p in (a, x, b, side)]
    extra = (ffi.from_buffer("uint16_t[]", hot), ffi.from_buffer("float[]", bias))
    w = ffi.from_buffer("uint16_t[]", bits)
    _check(lib.pycass_nest_encode_calibrated(w, rows, cols, c, *pointers, size, *extra))
    tiles = nest_parts(rows, cols)[0]
    offsets = side[: 4 * (tiles + 1)].view("<u4").astype(np.int64)
    return a, x[: 16 * tiles], b, offsets - offsets[0], side[offsets[0] : offsets[-1]].copy(), hot, bias


def _check(status):
    if status:
        raise ConversionError("encoding failed: " + ffi.string(lib.pycass_error_detail()).decode())


# ---- the file under construction -------------------------------------------------------------------------------


class PartialFile:
    """OUT.<pid>-<random>.partial, locked while it is written; renamed to OUT by commit(), else removed."""

    def __init__(self, out):
        self.out, self.size = Path(out), 0
        remove_leftovers(self.out)
        while not self._create():
            pass

    def _create(self):
        """False when another process took the file for a leftover before it was locked."""
        self.path = self.out.with_name(f"{self.out.name}.{os.getpid()}-{secrets.token_hex(3)}.partial")
        try:
            self.fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        except OSError as e:
            raise ConversionError(f"{self.path}: {e.strerror}") from e
        if fcntl:
            with contextlib.suppress(OSError):  # file systems without locks
                fcntl.flock(self.fd, fcntl.LOCK_EX)
        if os.fstat(self.fd).st_nlink:
            return True
        os.close(self.fd)
        return False

    def write(self, offset, data):
        """Writes a bytes-like object at an offset; gaps are zero."""
        view, done = memoryview(data).cast("B"), 0
        while done < len(view):
            try:
                done += os.pwrite(self.fd, view[done : done + (1 << 30)], offset + done)
            except OSError as e:
                raise self._failure(e) from e
        self.size = max(self.size, offset + len(view))

    def read(self, offset, size):
        return os.pread(self.fd, size, offset)

    def move_end(self, source, to, size):
        """Moves the bytes at the end of the file forward, to `to` <= source."""
        for at in range(0, size, 16 << 20):
            self.write(to + at, self.read(source + at, min(16 << 20, size - at)))
        try:
            os.ftruncate(self.fd, to + size)
        except OSError as e:
            raise self._failure(e) from e
        self.size = to + size

    def _failure(self, e):
        if e.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return ConversionError(f"{self.out}: no room: {e.strerror} after {self.size} bytes; nothing was kept")
        return ConversionError(f"{self.path}: {e.strerror}")

    def commit(self):
        """Makes the file durable and gives it its name, replacing an older one."""
        try:
            os.fsync(self.fd)
            os.replace(self.path, self.out)
        except OSError as e:
            raise self._failure(e) from e
        os.close(self.fd)
        self.fd = None
        _sync_folder(self.out.parent)

    def discard(self):
        """Removes the file unless it was committed."""
        if self.fd is not None:
            self.path.unlink(missing_ok=True)
            os.close(self.fd)
            self.fd = None


def _sync_folder(folder):
    try:
        fd = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(fd)
    except OSError:
        pass  # some file systems cannot; the file itself is durable
    finally:
        os.close(fd)


def remove_leftovers(out):
    """Removes partial files of conversions to `out` that were killed: those that nobody holds a lock on."""
    for path in out.parent.glob(f"{_glob_escape(out.name)}.*.partial") if fcntl else ():
        try:
            fd = os.open(path, os.O_RDWR)
        except OSError:
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
        except OSError:
            pass  # in use
        finally:
            os.close(fd)


def _glob_escape(name):
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)


# ---- tensors ---------------------------------------------------------------------------------------------------


class TensorWriter:
    """Streams tensors: chunks of rows are read and encoded by threads and written in order."""

    def __init__(self, file, plans, speculation, progress, threads):
        self.file, self.plans, self.progress = file, plans, progress
        self.speculation = speculation  # bytes so far
        room = sum(_align(cass_parts.bounds(p.ref.rows, p.ref.cols)[0]) for p in plans if p.cass)
        self.verification_at = _align(HEADER + speculation + room, 4096)
        self.verification = 0  # bytes so far
        self.changed, self.done = 0, 0  # values that are not the source's, bytes
        self.total = sum(2 * p.ref.rows * p.ref.cols for p in plans)
        self.threads = threads

    def run(self):
        """Writes all tensors. A failure or interrupt leaves no thread behind."""
        work = ((p, c) for p in self.plans for c in p.ref.chunks())
        pool, queue = ThreadPoolExecutor(self.threads), deque()
        try:
            for plan, chunk in work:
                queue.append((plan, chunk, pool.submit(self._encode, plan, chunk)))
                if len(queue) > self.threads + 1:
                    self._finish(*queue.popleft())
            while queue:
                self._finish(*queue.popleft())
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
        self._close_gap()

    def _close_gap(self):
        """Verification data lie behind the most that speculation data may have."""
        to = _align(HEADER + self.speculation, 4096)
        if to < self.verification_at:
            self.file.move_end(self.verification_at, to, self.verification)
        self.verification_at = to

    @staticmethod
    def _encode(plan, chunk):
        bits, changed = plan.ref.read(*chunk)
        if plan.cass:
            if plan.codec == cass_parts.CASS2:
                bits = np.ascontiguousarray(bits)
                changed += cass_parts.round_cass2(bits)
            return bits, changed, cass_parts.encode(bits, plan.codec, plan.cass, plan.norms)
        calibration = plan.calibration[0] if plan.calibration else None
        return bits, changed, encode_nest(bits, calibration) if plan.codec == NEST else None

    def _finish(self, plan, chunk, future):
        bits, changed, parts = future.result()
        self.changed += changed
        plan.bf16_crc = crc32c(bits, plan.bf16_crc)
        if parts is None:
            self.file.write(HEADER + plan.parts[PART_RAW][1] + chunk[0] * plan.ref.cols * 2, bits)
        elif plan.cass:
            self._write_cass(plan, chunk, parts)
        else:
            self._write_nest(plan, chunk, parts)
        self.done += bits.nbytes
        if self.progress:
            self.progress(self.done, self.total, plan.ref.name)

    def _write_nest(self, plan, chunk, parts):
        a, x, b, offsets, records, hot, bias = parts
        if chunk[0] == 0:
            self._place_verification(plan)
            if PART_HOT in plan.parts:
                self.file.write(HEADER + plan.parts[PART_HOT][1], plan.hot)
        for kind, unit, data in ((PART_HOT_WORDS, 2 * len(plan.hot), hot), (PART_BIAS, 4, bias)):
            if kind in plan.parts:
                self.file.write(HEADER + plan.parts[kind][1] + chunk[0] * unit, data)
        tile = chunk[0] // 16 * -(-plan.ref.cols // 64)
        for kind, unit, data in ((PART_A, 512, a), (PART_X, 16, x), (PART_B, 768, b)):
            section, at, _ = plan.parts[kind]
            self.file.write((HEADER if section == 1 else self.verification_at) + at + tile * unit, data)
        table = 4 * (plan.tiles + 1)
        side = self.verification_at + plan.parts[PART_SIDE][1]
        if table + plan.side_bytes + len(records) >= 1 << 32:
            raise ConversionError(f"tensor {plan.ref.name} is too large for its side part")
        self.file.write(side + 4 * tile, (offsets + table + plan.side_bytes).astype("<u4"))
        self.file.write(side + table + plan.side_bytes, records)
        plan.side_bytes += len(records)
        if chunk[1] == plan.ref.rows:
            self._end_side(plan)

    def _place_verification(self, plan):
        """Gives B and side their offsets behind everything written so far, and writes what is to be kept in front."""
        b = nest_parts(plan.ref.rows, plan.ref.cols)[3]
        at = self._write_keep(plan)
        plan.parts |= {PART_B: [2, at, b], PART_SIDE: [2, at + b, 0]}

    def _write_keep(self, plan):
        """Returns where VERIFICATION goes on."""
        at = self.verification
        for kind, data in plan.keep.items():
            plan.parts[kind] = [2, at, len(data)]
            self.file.write(self.verification_at + at, data)
            at = _align(at + len(data))
        return at

    def _write_cass(self, plan, chunk, parts):
        if chunk[0] == 0:
            n_block = -(-plan.ref.rows // 16)
            begins = (HEADER + self.speculation, self.verification_at + self._write_keep(plan))
            heads = (cass_parts.HEADER, 0)
            plan.open = [cass_parts.Part(self.file.write, at, head, n_block) for at, head in zip(begins, heads)]
        for part, data in zip(plan.open, parts):
            part.add(data, chunk[1] - chunk[0])
        if chunk[1] == plan.ref.rows:
            spec, ver = plan.open
            plan.open = ()
            plan.parts[cass_parts.PART_SPEC] = [1, spec.at - HEADER, spec.size]
            plan.parts[cass_parts.PART_VER] = [2, ver.at - self.verification_at, ver.size]
            self.speculation += spec.size
            self.verification = ver.at - self.verification_at + ver.size

    def _end_side(self, plan):
        used = 4 * (plan.tiles + 1) + plan.side_bytes
        size = _align(used + SIDE_TAIL)
        part = plan.parts[PART_SIDE]
        part[2] = size
        self.file.write(self.verification_at + part[1] + used, bytes(size - used))
        self.verification = part[1] + size


# ---- the small sections and the header -------------------------------------------------------------------------


def config_section(cfg, flags):
    """CONFIG's bytes."""
    numbers = (
        arch.FAMILIES[cfg.family],
        cfg.n_vocab,
        cfg.n_token,
        cfg.n_ctx_train,
        cfg.n_embd,
        cfg.n_ff,
        cfg.n_layer,
        cfg.n_head,
        cfg.n_head_kv,
        cfg.head_dim,
        flags,
    )
    return (
        struct.pack("<11I2f12x", *numbers, cfg.rms_eps, cfg.rope_attention_factor)
        + cfg.rope_inv_freq.astype("<f4").tobytes()
    )


def directory_section(plans):
    """DIRECTORY's bytes."""
    out = bytearray(struct.pack("<II", len(plans), 0))
    for p in plans:
        name, shape = p.ref.name.encode(), (*p.ref.shape, 0)[:2]
        out += (
            struct.pack("<HBBB3x2QII", len(name), p.codec, len(p.ref.shape), len(p.parts), *shape, p.bf16_crc, 0) + name
        )
        for kind, (section, at, size) in p.parts.items():
            out += struct.pack("<IIQQ8x", kind, section, at, size)
    return bytes(out)


def json_section(blob):
    """JSON's bytes; texts that have no UTF-8 (lone surrogates) keep their escapes."""
    try:
        return json.dumps(blob, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        return json.dumps(blob).encode("utf-8")


def _section_crc(file, offset, size, tick):
    crc = 0
    for at in range(offset, offset + size, 16 << 20):
        piece = file.read(at, min(16 << 20, offset + size - at))
        crc = crc32c(piece, crc)
        tick()
    return crc


def finish(file, writer, speculation, cfg, flags, blob, tick=lambda: None):
    """Appends CONFIG, DIRECTORY and JSON, and writes the header with all checksums. Returns the file's size."""
    text = json_section(blob)
    sections = [(SPECULATION, HEADER, speculation), (VERIFICATION, writer.verification_at, writer.verification)]
    at = _align(writer.verification_at + writer.verification)
    for kind, data in (
        (CONFIG, config_section(cfg, flags)),
        (DIRECTORY, directory_section(writer.plans)),
        (JSON, text),
    ):
        file.write(at, data)
        sections.append((kind, at, len(data)))
        at = _align(at + len(data))
    size = sections[-1][1] + sections[-1][2]
    header = bytearray(HEADER)
    struct.pack_into("<8sIIQII", header, 0, MAGIC, VERSION, HEADER, size, len(sections), 0)
    for i, (kind, offset, length) in enumerate(sections):
        struct.pack_into("<IIQQ8x", header, 32 + 32 * i, kind, _section_crc(file, offset, length, tick), offset, length)
    struct.pack_into("<I", header, HEADER - 4, crc32c(bytes(header[: HEADER - 4])))
    file.write(0, header)
    return size
