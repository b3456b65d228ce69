"""What `pycass info`, `verify` and `convert` say about files and about this build."""

import os
import platform
from importlib import metadata

from . import pull
from .errors import FormatError
from .file import CassFile
from .model import kernels

FLAGS = {
    "tied_embedding": "the output matrix is the embedding",
    "rounded": "some source values were rounded",
    "quantized": "the source was a quantised file",
}
SIZES = ("n_vocab", "n_token", "n_ctx_train", "n_embd", "n_ff", "n_layer", "n_head", "n_head_kv", "head_dim")


def describe(path, tensors=False):
    """A .cass file as a plain object."""
    with CassFile(path) as f:
        infos, c, blob = f.tensors, f.config, f.json
        weights = sum(_count(t.shape) for t in infos.values())
        spec = sum(t.speculation_bytes for t in infos.values())
        total = spec + sum(t.verification_bytes for t in infos.values())
        found = {
            "file": os.fspath(path),
            "name": blob.get("name"),
            "file_bytes": os.path.getsize(path),
            "family": c.family,
            "config": {k: int(getattr(c, k)) for k in SIZES},
            "flags": [text for flag, text in FLAGS.items() if getattr(c, flag)],
            "weights": weights,
            "speculation_bytes": spec,
            "weight_bytes": total,
            "bf16_ratio": round(total / (2 * weights), 4),
            "speculation_ratio": round(spec / (2 * weights), 4),
            "bos_token_id": blob.get("bos_token_id"),
            "eos_token_ids": blob.get("eos_token_ids"),
            "codecs": _codecs(infos.values()),
            "near_lossless": any(t.codec == "cass2" for t in infos.values()),
            "cass": _cass(blob),
            "chat_template": bool(blob.get("chat_template")),
            "generation": blob.get("generation") or {},
            "provenance": blob.get("provenance") or {},
            "calibration": _calibration(blob),
        }
        if tensors:
            found["tensors"] = {name: _tensor(t) for name, t in infos.items()}
    return found


def _calibration(blob):
    """The JSON section's calibration and what was made of it, as far as they are what they should be."""
    about, made = blob.get("calibration"), blob.get("nest")
    return {**about, **(made if isinstance(made, dict) else {})} if isinstance(about, dict) else {}


def _cass(blob):
    """How cass tensors were made, if the JSON section says so."""
    made = blob.get("cass")
    types = {"prune": (int, float), "mantissa_bits": int, "half": bool, "pruned": str}
    return made if isinstance(made, dict) and all(isinstance(made.get(k), t) for k, t in types.items()) else None


def _codecs(infos):
    """By codec of matrices: how many tensors and weights, and bits per weight that the draft and the target read."""
    found = {}
    for t in infos:
        if len(t.shape) == 2:
            c = found.setdefault(t.codec, {"tensors": 0, "weights": 0, "draft_bits": 0, "bits": 0})
            c["tensors"] += 1
            c["weights"] += _count(t.shape)
            c["draft_bits"] += 8 * int(t.speculation_bytes)
            c["bits"] += 8 * int(t.speculation_bytes + t.verification_bytes)
    for c in found.values():
        c["draft_bits"], c["bits"] = round(c["draft_bits"] / c["weights"], 3), round(c["bits"] / c["weights"], 3)
    return found


def _codec_lines(d):
    for name, c in d["codecs"].items():
        yield (
            f"codec        {name}: {c['tensors']} matrices, {c['bits']:.2f} bits per weight, the draft reads {c['draft_bits']:.2f}"
        )
        if name.startswith("cass") and d["cass"]:
            o = d["cass"]
            half = "half" if o["half"] else "zero"
            yield (
                f"draft        without {100 * o['prune']:g} % of each row, {o['mantissa_bits']} of 7 mantissa bits, the others "
                f"as {half}; pruned weights {o['pruned']}"
            )
    if d["near_lossless"]:
        yield "lossless     no: cass2 keeps the source's values only nearly (MX groups of 32); the target is what is left"


def _tensor(t):
    return {
        "shape": [int(n) for n in t.shape],
        "codec": t.codec,
        "speculation_bytes": int(t.speculation_bytes),
        "verification_bytes": int(t.verification_bytes),
    }


def _count(shape):
    n = 1
    for s in shape:
        n *= int(s)
    return n


def describe_text(d):
    """describe()'s object for people."""
    c, p = d["config"], d["provenance"]
    lines = [
        f"{d['file']}: {d['name'] or 'unnamed'} ({d['family']}), {size(d['file_bytes'])}",
        f"weights      {d['weights'] / 1e6:.1f} M in {size(d['weight_bytes'])}, {d['bf16_ratio']:.3f} of BF16; "
        f"the draft reads {size(d['speculation_bytes'])}, {d['speculation_ratio']:.3f} of BF16",
        *_codec_lines(d),
        f"layers       {c['n_layer']} of width {c['n_embd']}, feed-forward {c['n_ff']}, "
        f"{c['n_head']} heads over {c['n_head_kv']}, head size {c['head_dim']}",
        f"context      {c['n_ctx_train']} tokens",
        f"vocabulary   {c['n_token']} tokens, {c['n_vocab']} rows; BOS {d['bos_token_id']}, "
        f"ends {', '.join(map(str, d['eos_token_ids'] or ['none']))}",
        f"chat         {'has a template' if d['chat_template'] else 'no template (--chat-template names one)'}",
    ]
    if d["generation"]:
        defaults = ", ".join(f"{k} {v}" for k, v in d["generation"].items())
        lines.append(f"suggested    {defaults} (not applied by itself)")
    if d["calibration"]:
        k = d["calibration"]
        made = f"; hot columns {k['hot']}, draft bias {'yes' if k.get('bias') else 'no'}" if "hot" in k else ""
        lines.append(f"calibrated   on {k.get('tokens')} tokens of {k.get('text')}{made}")
    lines += [f"note         {text}" for text in d["flags"]]
    if p:
        lines.append(f"source       {p.get('source')} ({p.get('source_format')}, {p.get('source_dtype')})")
        lines.append(f"sha256       {p.get('source_sha256')} of its weights")
    for name, t in d.get("tensors", {}).items():
        shape = " x ".join(map(str, t["shape"]))
        lines.append(f"  {name}  [{shape}]  {t['codec']}  {t['speculation_bytes']} + {t['verification_bytes']} bytes")
    return "\n".join(lines)


def size(n):
    """Bytes for people."""
    return f"{n / 2**30:.2f} GiB" if n >= 2**30 else f"{n / 2**20:.1f} MiB" if n >= 2**20 else f"{n} bytes"


# ---- the build ----


def build():
    """This build: version, machine, kernel sets, known models, the cache."""
    return {
        "version": metadata.version("pycass"),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "kernels": [{"name": name, "runs": runs} for name, runs in kernels()],
        "models": {name: k.about for name, k in pull.NAMES.items()},
        "cache": os.fspath(pull.cache_dir()),
    }


def build_text(b):
    """build()'s object for people."""
    lines = [f"pycass {b['version']} on {b['machine']}, {b['cpus']} CPUs", "kernel sets, best first:"]
    lines += [f"  {k['name']:<10} {'runs here' if k['runs'] else 'not on this machine'}" for k in b["kernels"]]
    lines += ["models that pull knows:", *(f"  {n:<20} {about}" for n, about in b["models"].items())]
    return "\n".join([*lines, f"cache: {b['cache']}"])


# ---- verify and convert ----


def verify(path, against=None):
    """Checks every section and every tensor; a sentence when all is well, else FormatError."""
    pull.refuse_special(path)
    pull.refuse_special(against or path)
    with CassFile(path) as f:
        f.verify()
        n = len(f.tensors)
    if against is None:
        return f"{path}: checksums and {n} tensors are right"
    return _verify_against(path, against, n)


def _verify_against(path, against, n):
    from .convert import Rounding, verify_against

    rounding = Rounding()
    differences = verify_against(path, against, rounding)
    if differences:
        raise FormatError(f"{path} differs from {against}:\n  " + "\n  ".join(differences[:20]))
    if rounding.values:
        return f"{path}: checksums are right, and {n} tensors are {against} as cass2 rounds it\n{rounding.sentence()}"
    return f"{path}: checksums are right, and {n} tensors have the bits of {against}"


def report_text(r, out):
    """A conversion's Report in a few lines."""
    lines = [
        f"{out}: {r.name} ({r.family}), {r.n_tensors} tensors, {size(r.file_bytes)} "
        f"in {r.seconds:.1f} s; {r.bits:.2f} bits per weight, the draft reads {r.speculation_bits:.2f}"
    ]
    return "\n".join([*lines, *(f"note: {text}" for text in r.notes)])
