"""`pycass study`: what a model's exponents weigh, what a draft's bits buy, and what fits into memory. Writes a folder of
CSV files that a later run goes on with; `study_report` makes Markdown and plots of them."""

import contextlib
import csv
import io
import itertools
import json
import os
import platform
import re
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from . import bench, memory, probe, scratch, theory
from .errors import InvalidArgument, IOFailure, PycassError
from .file import CassFile
from .machine import cpu_name
from .prompts import DEVELOPMENT

VERSION = 1
SPEED_PROMPTS = 2  # of the development prompts, for measured speed
CACHES = ("nest", "cass1", "cass2")
CACHE_TOKENS = 512
POINT_SECONDS = 90  # after which no further answer is compared
GAMMA = 5  # draft length of measured and ideal speed, the paper's for Cassandra-1


# ---- the points -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Point:
    """An encoding to measure: a group of the report, and convert's arguments. speed: decode with it too."""

    group: str
    arguments: dict = field(hash=False)
    speed: bool = False

    @property
    def name(self) -> str:
        """The arguments as one word, by which a row is found again."""
        a = self.arguments
        text = a["codec"]
        text += " weighted" if text == "nest" and a.get("calibrate", "") is not None and not (a["hot"] or a["bias"]) else ""
        text += f" prune {a['prune']:g}" if "prune" in a else ""
        text += f" mantissa {a['mantissa_bits']}" if "mantissa_bits" in a else ""
        text += " half" if a.get("half") else ""
        text += " raw" if a.get("pruned") == "raw" else ""
        text += f" hot {a['hot']}" if a.get("hot") else ""
        return text + (" bias" if a.get("bias") else "")


GRIDS = {
    "small": {"prune": (0.2, 0.4, 0.6), "mantissa": (1, 2, 3, 4), "both": ((0.3, 0.5), (2, 4))},
    "full": {
        "prune": (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7),
        "mantissa": (0, 1, 2, 3, 4, 5, 6),
        "both": ((0.3, 0.4, 0.5, 0.6), (2, 3, 4, 5, 6)),
    },
}


def _cass1(group, prune, mantissa, half=False, speed=False):
    a = {"codec": "cass1", "prune": prune, "mantissa_bits": mantissa, "half": half, "pruned": "coded"}
    return Point(group, a, speed)


def points(grid: str) -> list[Point]:
    """What a grid measures, the most telling first. With all seven mantissa bits kept, `half` changes nothing."""
    g = GRIDS[grid]
    nest = [Point("nest", {"codec": "nest", "calibrate": None}, True)]
    nest += [Point("nest", {"codec": "nest", "hot": h, "bias": b}, (h, b) == (16, True))
             for h, b in itertools.product((0, 16, 32, 64), (False, True))]  # fmt: skip
    cass2 = {"codec": "cass2", "prune": 0.4, "mantissa_bits": 3, "pruned": "coded"}
    first = [p for p in nest if p.speed]
    first += [_cass1("cass1", 0.4, 3, half, not half) for half in (False, True)] + [Point("cass2", cass2, True)]
    stored = {"codec": "cass1", "prune": 0.4, "mantissa_bits": 3, "half": False, "pruned": "raw"}  # as the paper has it
    rest = [Point("cass1", stored)] + [p for p in nest if not p.speed]
    rest += [_cass1("pruning", p, 7) for p in g["prune"]]
    rest += [_cass1("truncation", 0.0, m, half) for m in g["mantissa"] for half in (False, True)]
    rest += [_cass1("both", p, m, half) for p, m in itertools.product(*g["both"]) for half in (False, True)]
    seen = set()
    return [p for p in first + rest if not (p.name in seen or seen.add(p.name))]


# ---- the folder -----------------------------------------------------------------------------------------------------


@dataclass
class Plan:
    """What to do. budget: seconds for points, None: no end. tokens: of each answer."""

    model: str  # path of a .cass file
    name: str
    folder: Path
    grid: str = "small"
    budget: float | None = None
    tokens: int = 48
    threads: int = 0
    kernel: str | None = None
    plots: bool = True


class Folder:
    """The report's folder: rows of CSV files, and study.json, which says what model they are of."""

    def __init__(self, path: Path, about: dict):
        self.path, self.about = path, about
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise IOFailure(f"{path}: {error.strerror}") from error
        there = self._read_json()
        if there is None and any(path.iterdir()):
            raise InvalidArgument(f"{path}: holds other files; a new folder, or one of an earlier study, is needed")
        self.texts = [probe.Text(t["prompt"], t["answer"]) for t in there["texts"]] if there else []
        if there:
            other = [k for k in about if there["about"].get(k) != about[k]]
            if other:
                raise InvalidArgument(f"{path}: holds a study with another {other[0]}; choose another folder")

    def _read_json(self):
        try:
            found = json.loads((self.path / "study.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise IOFailure(f"{self.path / 'study.json'}: cannot be read: {error}") from None
        if not isinstance(found, dict) or found.get("pycass_study") != VERSION:
            raise InvalidArgument(f"{self.path / 'study.json'}: not of a study of this version")
        return found

    def keep_texts(self, texts):
        """Writes study.json."""
        self.texts = texts
        found = {"pycass_study": VERSION, "about": self.about, "texts": [asdict(t) for t in texts]}
        self.write("study.json", json.dumps(found))

    def write(self, name: str, data: str | bytes):
        """A file, whole or not at all."""
        from .model import write_whole

        write_whole(os.fspath(self.path / name), data.encode() if isinstance(data, str) else data)

    def rows(self, name: str) -> list[dict]:
        """The rows of a CSV file; none if there is no such file. Numbers are numbers again."""
        try:
            text = (self.path / name).read_text(encoding="utf-8")
        except FileNotFoundError:
            return []
        except (OSError, UnicodeDecodeError) as error:
            raise IOFailure(f"{self.path / name}: cannot be read: {error}") from None
        rows = [{k: _value(v) for k, v in row.items()} for row in csv.DictReader(io.StringIO(text))]
        if name == "points.csv":
            self._check_points(rows)
        return rows

    def _check_points(self, rows):
        """What the report reckons with has to be numbers, of known codecs."""
        for row in rows:
            numbers = [row.get(k) for k in ("draft_bits", "total_bits", "agreement", "sampled", "positions")]
            if not all(isinstance(x, (int, float)) for x in numbers) or row.get("codec") not in ("nest", "cass1", "cass2"):
                raise InvalidArgument(f"{self.path / 'points.csv'}: a damaged row ({row.get('point')}); delete the file or the row")

    def keep_rows(self, name: str, rows: list[dict]):
        """Writes a CSV file; columns are those of any row."""
        out = io.StringIO()
        columns = dict.fromkeys(k for row in rows for k in row)
        table = csv.DictWriter(out, columns, restval="", lineterminator="\n")
        table.writeheader()
        table.writerows({k: "" if v is None else v for k, v in row.items()} for row in rows)
        self.write(name, out.getvalue())


def _value(text):
    if text is None or text == "":
        return None
    if text in ("True", "False"):
        return text == "True"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


# ---- the steps ------------------------------------------------------------------------------------------------------


def run(plan: Plan, console) -> Path:
    """Does what the folder does not hold yet, and writes the report: its path. Ctrl-C leaves what was measured."""
    from . import study_report

    with CassFile(plan.model) as f:
        about = {
            "model": plan.name,
            "source_sha256": (f.json.get("provenance") or {}).get("source_sha256"),
            "tensors": f"{sum(t.bf16_crc32c for t in f.tensors.values()) & 0xFFFFFFFF:08x}",
            "tokens": plan.tokens,
        }
    folder = Folder(Path(plan.folder), about)
    study_report.require_plots(plan.plots, console)
    try:
        if not folder.rows("tensors.csv"):
            folder.keep_rows("tensors.csv", tensors(plan.model, console))
        if not folder.rows("cache.csv"):
            folder.keep_rows("cache.csv", caches(plan, folder, console))
        _measure(plan, folder, console)
    finally:
        console.status("")
        if folder.rows("tensors.csv"):
            _keep_memory(plan, folder)
            path = study_report.write(folder, plan, console)
    return path


def caches(plan, folder, console) -> list[dict]:
    """A row for each way to keep the cache that encodes it: bits per value, and those that the draft reads, of older
    positions. Measured on the answers, one behind the other."""
    from .model import Model

    _require_texts(plan, folder, console)
    ids = [i for t in folder.texts for i in t.prompt + t.answer][:CACHE_TOKENS]
    with CassFile(plan.model) as f:
        values = 2 * f.config.n_layer * f.config.n_head_kv * f.config.head_dim
    rows = []
    for kv in CACHES:
        console.status(f"cache as {kv}")
        with Model.load(plan.model, n_ctx=CACHE_TOKENS, kv=kv, threads=plan.threads, kernel=plan.kernel, mmap=True) as m:
            m.logits(ids, len(ids) - 1)
            s = m.kv_stats()
        if s["encoded"]:  # else the texts are too short
            n = s["encoded"] * values
            rows.append({"cache": kv, "positions": s["encoded"], "bits": 8 * s["encoded_bytes"] / n,
                         "draft_bits": 8 * s["draft_bytes"] / n})  # fmt: skip
    return rows


LAYER = re.compile(r"model\.layers\.(\d+)\.(?:.*\.)?(\w+)\.weight")


def tensors(path, console=None) -> list[dict]:
    """A row for each matrix of a file: exponent bits by entropy, Huffman's code, rank-unary, and as stored."""
    rows = []
    with CassFile(path) as f:
        matrices = [t for t in f.tensors.values() if len(t.shape) == 2]
        for n, t in enumerate(matrices):
            if console:
                console.status(f"exponents: {n + 1} of {len(matrices)} tensors")
            counts = theory.exponent_counts(f.bf16(t.name))
            weights = int(counts.sum())
            layer = LAYER.fullmatch(t.name)
            stored = 8 * int(t.speculation_bytes + t.verification_bytes) / weights
            rows.append({
                "tensor": t.name, "layer": int(layer[1]) if layer else None,
                "kind": layer[2] if layer else t.name.removesuffix(".weight").split(".")[-1],
                "weights": weights, "entropy": theory.entropy(counts), "huffman": theory.huffman(counts),
                "unary": theory.rank_unary(counts), "codec": t.codec, "stored_bits": stored,
                "stored_exponent_bits": stored - theory.FIXED_BITS,
                "draft_bits": 8 * int(t.speculation_bytes) / weights,
            })  # fmt: skip
    return rows


@contextlib.contextmanager
def calibrated(path, folder, console):
    """A file of the same model that keeps the activations' statistics: path itself, or else a temporary one in folder, so
    that not every encoding needs a calibration of its own."""
    with CassFile(path) as f:
        if f.json.get("calibration"):
            yield path
            return
    from .convert import convert

    with scratch.folder(folder, ".calibrated-") as temporary:
        console.note("calibrating: the file keeps no statistics of activations")
        made = os.path.join(temporary, "calibrated.cass")
        with console.progress("calibrating") as progress:
            convert(path, made, codec="nest", progress=progress)
        yield made


def _require_texts(plan, folder, console):
    """The model's answers to the development prompts; made if the folder has none."""
    from .model import Model

    if not folder.texts:
        console.note(f"the model answers {len(DEVELOPMENT)} development prompts")
        with Model.load(plan.model, threads=plan.threads, kernel=plan.kernel) as m:
            folder.keep_texts(probe.answers(m, list(DEVELOPMENT.values()), plan.tokens))


def _measure(plan, folder, console):
    _require_texts(plan, folder, console)
    options = {"threads": plan.threads, "kernel": plan.kernel, "mmap": False}  # read before anything is measured
    todo, rows = points(plan.grid), folder.rows("points.csv")
    done = {row["point"] for row in rows}
    left = [p for p in todo if p.name not in done]
    begin = time.monotonic()
    if not left:
        return
    with calibrated(plan.model, folder.path, console) as source:
        _measure_points(plan, folder, console, source, left, rows, options, begin, len(todo))


def _measure_points(plan, folder, console, source, left, rows, options, begin, total):
    for n, point in enumerate(left):
        spent = time.monotonic() - begin
        if plan.budget is not None and n and spent * (n + 1) / n > plan.budget:
            console.note(f"the time is up: {len(left) - n} of {total} points are left; a later run goes on with them")
            break
        console.status(f"{point.name}: {total - len(left) + n + 1} of {total} points, {spent / 60:.1f} minutes")
        try:
            rows.append(measure(plan, source, point, folder, options))
        except (PycassError, TypeError) as error:  # a codec or an argument that this build does not have
            if isinstance(error, IOFailure):
                raise
            console.note(f"{point.name}: left out: {error}")
            continue
        folder.keep_rows("points.csv", rows)
        console.note(f"{point.name}: {rows[-1]['draft_bits']:.2f} bits, agreement {rows[-1]['agreement']:.3f}, "
                     f"{rows[-1]['seconds']:.0f} s")  # fmt: skip


def measure(plan, source, point, folder, options) -> dict:
    """A row of points.csv: encodes source into a file that is deleted again, and measures it."""
    from .convert import convert
    from .model import Model

    begin = time.monotonic()
    with scratch.folder(folder.path, ".point-") as temporary:
        path = os.path.join(temporary, "point.cass")
        convert(source, path, **point.arguments)
        encoded = time.monotonic() - begin
        o = bench.owed(path)
        with Model.load(path, **options) as m:
            a = probe.agreement(m, folder.texts, POINT_SECONDS)
            speed = _speed(m, folder.texts[:SPEED_PROMPTS], plan.tokens, a, o) if point.speed else {}
            kernel, threads = m.kernel, m.threads
    arguments = {k: point.arguments.get(k) for k in ("codec", "prune", "mantissa_bits", "half", "hot", "bias")}
    return {"point": point.name, "group": point.group} | arguments | {
        "draft_bits": o.draft_bits, "total_bits": o.target_bits, "draft_bytes": o.draft, "target_bytes": o.target,
        "positions": a.positions, "agreement": a.greedy, "sampled": a.sampled, "target": a.target,
        **speed, "encode_seconds": round(encoded, 1), "seconds": round(time.monotonic() - begin, 1),
        "kernel": kernel, "threads": threads,
    }  # fmt: skip


def _speed(model, texts, n, agreement, owed) -> dict:
    """Decoding without and with speculation, drafts of GAMMA tokens; and what bytes alone would allow, by agreement."""
    prompts = [t.prompt for t in texts]
    fixed = {"spec": "on", "draft_max": GAMMA, "draft_fixed": True, "spec_ngram": False}
    probe.decode(model, prompts[:1], 2, spec="off")  # brings the file into memory
    plain = probe.decode(model, prompts, n, spec="off")
    spec = probe.decode(model, prompts, n, **fixed)
    auto = probe.decode(model, prompts, n, spec="on", draft_max=GAMMA)
    tokens = theory.tokens_per_step(agreement.greedy, GAMMA)
    bf16 = 2 * owed.weights
    return {
        "gamma": GAMMA, "accept": spec.accept, "mean_len": spec.mean_len, "plain_tps": plain.tps, "spec_tps": spec.tps,
        "adaptive_tps": auto.tps, "measured_speedup": spec.tps / plain.tps,
        "ideal_speedup": theory.speed_up(tokens, GAMMA, owed.draft, owed.target),
        "ideal_over_bf16": theory.speed_up(tokens, GAMMA, owed.draft, owed.target, bf16),
    }  # fmt: skip


# ---- memory ---------------------------------------------------------------------------------------------------------

TYPICAL_BITS = {"nest": 11.2, "cass1": 11.2}  # of the whole model, where the study has measured none


def _keep_memory(plan, folder):
    """memory.csv: each scheme's line and the longest context by budget; ratios.csv: beside the paper's."""
    with CassFile(plan.model) as f:
        biased = "model.layers.0.self_attn.q_proj.bias" in f.tensors
        local = memory.shape_of(f.config, plan.name, biased)
    bits = dict(TYPICAL_BITS) | codec_bits(folder.rows("points.csv"))
    cached = {r["cache"]: float(r["bits"]) for r in folder.rows("cache.csv")}
    rows = []
    for shape, draft in (*memory.MODELS, (local, None)):
        for s in memory.schemes(shape, draft, bits, cached):
            rows.append({"model": shape.name, "scheme": s.name, "fixed_bytes": round(s.fixed), "bytes_per_token": s.per_token}
                        | {f"tokens_{b}_GB": s.longest(b * memory.GB) for b in memory.BUDGETS})  # fmt: skip
    folder.keep_rows("memory.csv", rows)
    ratios = [r | {"GB": unit} for unit, size in (("24 GB", 24e9), ("24 GiB", 24 * 2**30))
              for r in memory.paper_comparison(budget=size)]  # fmt: skip
    folder.keep_rows("ratios.csv", ratios)


def codec_bits(rows) -> dict[str, float]:
    """Bits per weight of the whole model, of each codec's first point."""
    found = {}
    for r in rows:
        found.setdefault(r["codec"], float(r["total_bits"]))
    return found


def machine() -> dict:
    """This machine, for people."""
    return {"cpu": cpu_name(), "cpus": os.cpu_count(), "system": platform.platform()}
