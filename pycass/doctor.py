"""`pycass doctor`: what this machine is, what of it this build uses, and what of a file fits."""

import os
import platform
from importlib import metadata
from pathlib import Path

from . import machine, memory
from .file import CassFile
from .inspect_file import size
from .model import kernels

SPARE = 512 << 20  # bytes that are left to everything else, as the loader does
MOST_TOKENS = 1 << 24  # of a session
CUDA_LIBRARIES = "libpycass_cuda*.so"  # beside the package: the backend is loaded when it is wanted


def examine(path=None, root="/", libcuda="libcuda.so.1") -> dict:
    """All of it as a plain object; `root` stands for /."""
    found = {
        "pycass": metadata.version("pycass"),
        "machine": platform.machine(),
        "board": machine.board(root),
        "l4t": machine.l4t(root),
        "power_mode": machine.power_mode(root),
        "cpu": machine.cpus(root),
        "kernels": [{"name": name, "runs": runs} for name, runs in kernels()],
        "kernel": chosen(),
        "cuda": machine.cuda(libcuda) | {"built": built()},
        "memory": machine.memory(root),
    }
    if path is not None:
        found["file"] = fit(path, room(found["memory"]))
    return found | {"advice": advice(found)}


def chosen() -> str | None:
    """The kernel set that the engine takes: PYCASS_KERNEL, else the best that runs here."""
    forced = os.environ.get("PYCASS_KERNEL")
    return next((name for name, runs in kernels() if (name == forced if forced else runs)), None)


def built() -> list[str]:
    """Names of the CUDA backend's libraries in this installation."""
    return sorted(p.name for p in Path(__file__).parent.glob(CUDA_LIBRARIES))


def room(found: dict) -> int:
    """Bytes that a model may take: what is available, or less by a control group, and some left for everything else."""
    known = [n for n in (found["available"], found["limit"]) if n is not None]
    return max(min(known) - SPARE, 0) if known else 0


def fit(path, budget: int) -> dict:
    """A file in so many bytes: whether its weights fit, and the longest context with each kind of KV cache. `longest` may be
    past what the model was made for, `n_ctx_train`."""
    with CassFile(path) as f:
        c, draft = f.config, sum(int(t.speculation_bytes) for t in f.tensors.values())
    weights = os.path.getsize(path)
    ways = {kv: memory.cached(c, weights, kv) for kv in memory.CACHE_RATIOS}
    return {
        "file": os.fspath(path),
        "bytes": weights,
        "draft_bytes": draft,
        "resident": machine.resident(path),
        "budget": budget,
        "fits": weights <= budget,
        "n_ctx_train": c.n_ctx_train,
        "context": {kv: {"bytes_per_token": round(s.per_token), "longest": min(s.longest(budget), MOST_TOKENS)} for kv, s in ways.items()},
    }


# ---- advice ----


def advice(d: dict) -> list[str]:
    """What could be better, in sentences."""
    return [*_processor(d), *_gpu(d["cuda"]), *_memory(d["memory"]), *_file(d.get("file"))]


def _processor(d):
    cpu, kernel = d["cpu"], d["kernel"]
    if kernel is None:
        yield f"PYCASS_KERNEL is {os.environ.get('PYCASS_KERNEL')}, which this build does not have"
    elif kernel == "scalar":
        yield "only the scalar kernels are used: right, but many times slower than this machine's memory"
    elif not next(k["runs"] for k in d["kernels"] if k["name"] == kernel):
        yield f"PYCASS_KERNEL is {kernel}, which this CPU does not run"
    if d["l4t"] and not (d["power_mode"] or "").startswith("MAXN"):
        yield f"the power mode is {d['power_mode'] or 'unknown'}, not MAXN: jetson/run.sh sets it"
    if cpu["mhz"] and cpu["most_mhz"] and cpu["mhz"] < cpu["most_mhz"]:
        yield f"cores are held at {cpu['mhz']} of {cpu['most_mhz']} MHz"
    if cpu["usable"] < cpu["cores"]:
        yield f"this process may use {cpu['usable']} of {cpu['cores']} cores"


def _gpu(cuda):
    if cuda["devices"] and not cuda["built"]:
        yield "there is a GPU, but this build of pycass has no CUDA backend"
    if cuda["built"] and cuda["error"]:
        yield f"the CUDA backend is here, but {cuda['error']}"


def _memory(m):
    if m["zram"]:
        yield "swap is compressed memory (zram): what is swapped out still takes room, and models should not be"
    if m["limit"] is not None and m["available"] is not None and m["limit"] < m["available"]:
        yield f"a control group leaves {size(m['limit'])} of the {size(m['available'])} that are available"


def _file(f):
    if not f:
        return
    if not f["fits"]:
        yield f"the weights do not fit: {size(f['bytes'])} against {size(f['budget'])}; they would come from disk for every token"
    elif f["context"]["raw"]["longest"] < f["n_ctx_train"]:
        yield f"with a BF16 KV cache {f['context']['raw']['longest']} of the model's {f['n_ctx_train']} tokens fit; --kv nest holds more"


# ---- for people ----


def as_text(d: dict) -> str:
    """examine()'s object for people."""
    lines = [
        f"pycass       {d['pycass']} on {d['board'] or d['machine']}",
        *([f"Jetson       L4T {d['l4t']}, power mode {d['power_mode'] or 'unknown'}"] if d["l4t"] else []),
        f"CPU          {_cpu_text(d['cpu'])}",
        f"kernels      {', '.join(_kernel_text(k, d['kernel']) for k in d['kernels'])}",
        f"CUDA         {_cuda_text(d['cuda'])}",
        *(f"             {_device_text(g)}" for g in d["cuda"]["devices"]),
        f"memory       {_memory_text(d['memory'])}",
        *(_file_lines(d["file"]) if "file" in d else []),
        *(f"note         {sentence}" for sentence in d["advice"]),
    ]
    return "\n".join(lines)


def _cpu_text(c):
    clock = f", up to {c['mhz']} MHz ({', '.join(c['governors']) or 'no governor'})" if c["mhz"] else ""
    return f"{c['name']}, {c['cores']} cores{clock}"


def _kernel_text(k, kernel):
    return k["name"] + (" (used)" if k["name"] == kernel else "" if k["runs"] else " (not here)")


def _cuda_text(c):
    have = f"backend {', '.join(c['built'])}" if c["built"] else "this build has no backend"
    return f"{have}; " + (c["error"] or f"driver for CUDA {c['driver']}, {len(c['devices']) or 'no'} device" + "s" * (len(c["devices"]) > 1))


def _device_text(g):
    return f"{g['name']}, {g['arch']}, {size(g['bytes'])}{', shared with the CPU' if g['integrated'] else ''}"


def _memory_text(m):
    if m["total"] is None:
        return "unknown: there is no /proc/meminfo"
    swap = f"swap {size(m['swap_total'])}, {size(m['swap_free'])} free" if m["swap_total"] else "no swap"
    return f"{size(m['total'])}, available {size(m['available'])}, page cache {size(m['cached'])}; {swap}"


def _file_lines(f):
    here = "" if f["resident"] is None else f", {100 * f['resident'] / f['bytes']:.0f} % of it in the page cache"
    yield f"file         {f['file']}: {size(f['bytes'])}{here}; the draft reads {size(f['draft_bytes'])} of it"
    yield f"fits         {'yes' if f['fits'] else 'no'}: {size(f['budget'])} can be used; the model's context is {f['n_ctx_train']} tokens"
    for kv, c in f["context"].items():
        whole = ", all of the model's context" if c["longest"] >= f["n_ctx_train"] else ""
        yield f"--kv {kv:<8}{c['longest']} tokens at {c['bytes_per_token'] / 1024:.1f} KiB{whole}"
