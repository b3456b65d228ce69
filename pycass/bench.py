"""`pycass bench`: tokens a second in llama-bench's shape, what speculation does, and how near memory speed that is."""

import csv
import json
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from fnmatch import fnmatchcase

import numpy as np

from . import machine
from .errors import InvalidArgument
from .file import CassFile
from .prompts import PROMPTS
from .settings import Settings

# What prompt processing reads, over and over: its speed does not depend on the text.
TEXT = """\
The lighthouse stood at the end of the long stone pier, and every evening the keeper walked out to light the lamp.
He had done so for thirty years, through storms that threw whole waves over the wall and through summer nights so
still that the stars lay in the water. Children from the village asked him what he saw out there. He told them about
the ships: where they came from, what they carried, and how each captain had a different way of greeting the light.
One winter a letter arrived. The harbour office had decided that a machine would light the lamp from now on, and that
the keeper could stay in the house as long as he liked. He read the letter twice, put it in the drawer under the
window, and went out to the pier as usual. The machine was a small grey box with a green lamp and a clock inside.
"""
SPECS = ("off", "on", "auto", "draft")
SAMPLING = {"top_k": 40, "top_p": 0.95, "min_p": 0.05}  # with a temperature: what `run` and `chat` do by default
ROOM = 1024  # tokens of context for a prompt and its template
READ_BYTES = 512 << 20  # more than caches hold
READ_PASSES = 5


@dataclass
class Plan:
    """What to measure."""

    prompts: list
    gens: list
    threads: list
    specs: list
    repetitions: int
    draft_max: int
    temperature: float = 0.0
    seed: int = 1
    batch_size: int = 0
    kernel: str | None = None
    device: str = "cpu"
    ngram: bool = True
    mmap: bool = False  # read before anything is measured
    settings: Settings | None = None


@dataclass
class Count:
    """What was measured; adds up over prompts and repetitions. `bytes` are those of weights and KV cache that the
    passes owe."""

    tokens: int = 0
    seconds: float = 0.0
    bytes: int = 0
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    disabled: int = 0  # runs in which auto turned speculation off

    def __add__(self, other):
        return Count(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    @property
    def tps(self):
        """Tokens a second."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def accept(self):
        """Accepted tokens of those drafted; None if there were none."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def mean_len(self):
        """Tokens per pass of the target; None if nothing was drafted."""
        return (self.steps + self.accepted) / self.steps if self.drafted else None


def run(path, name, plan, output, out, console):
    """Measures and writes the table."""
    from .model import Model

    about, owed = _about(path, name), _owed(path, plan.settings.draft_full if plan.settings else ())
    specs = [s for s in plan.specs if s != "draft" or owed]
    if specs != plan.specs:
        console.note("this file has no draft: nothing to measure for --spec draft")
    if not plan.prompts and not specs:
        raise InvalidArgument("nothing to measure: this file has no draft")
    write = _Writer(output, out, plan)
    n_ctx = max([*plan.prompts, *(n + ROOM for n in plan.gens)]) + 1
    try:
        for threads in plan.threads:
            options = {"batch_size": plan.batch_size, "kernel": plan.kernel, "mmap": plan.mmap, "settings": plan.settings,
                       "device": plan.device}  # fmt: skip
            with (
                Model.load(path, n_ctx=n_ctx, threads=threads, **options) as model,
                machine.Tegrastats(console.detail) as tegrastats,
            ):
                console.status("reading memory")
                shared = about | {"kernel": model.kernel if model.device == "cpu" else model.device, "n_threads": model.threads}
                shared["read_gbps"] = round(read_gbps(model.threads), 2)
                tegrastats.take()
                for row in _measure(model, plan, specs, owed, console):
                    console.status("")
                    write.row(shared | row | {"tegrastats": tegrastats.take()})
    finally:
        console.status("")
    write.end()


def _about(path, name):
    with CassFile(path) as f:
        infos = list(f.tensors.values())
        name = f.json.get("name") or name
    return {
        "model": name,
        "model_size": int(sum(t.speculation_bytes + t.verification_bytes for t in infos)),
        "model_n_params": sum(_product(t.shape) for t in infos),
        "cpu_info": machine.cpu_name(),
        "power_mode": machine.power_mode(),
    }


def _owed(path, draft_full):
    """Bytes that a draft pass owes: (weights, KV cache per token); None for a file without a draft."""
    found = owed(path, draft_full)
    return (found.draft, found.cache_per_token) if found.has_draft else None


@dataclass(frozen=True)
class Owed:
    """Bytes of weights that a pass reads, and of cache for every token before it; bits per weight, of matrices."""

    draft: int
    target: int
    cache_per_token: int
    weights: int
    draft_bits: float
    target_bits: float
    has_draft: bool


def owed(path, draft_full=()):
    """What passes of a file owe; draft_full: patterns of tensors that the draft reads wholly. Vectors are read whole, and
    of an embedding that is not the output matrix too a row only."""
    with CassFile(path) as f:
        c, infos = f.config, list(f.tensors.values())
    vectors = sum(2 * _product(t.shape) for t in infos if len(t.shape) == 1)
    matrices = [t for t in infos if len(t.shape) == 2 and (c.tied_embedding or t.name != "model.embed_tokens.weight")]
    weights = sum(_product(t.shape) for t in matrices)
    whole = {t.name: int(t.speculation_bytes + t.verification_bytes) for t in matrices}
    part = {t.name: int(t.speculation_bytes) for t in matrices}
    part |= {name: n for name, n in whole.items() if any(fnmatchcase(name, p) for p in draft_full)}
    draft, target = sum(part.values()), sum(whole.values())
    return Owed(
        vectors + draft, vectors + target, 4 * c.n_layer * c.n_head_kv * c.head_dim, weights,
        8 * draft / weights, 8 * target / weights, any(t.codec != "raw" for t in infos),
    )  # fmt: skip


def _product(shape):
    n = 1
    for s in shape:
        n *= int(s)
    return n


# ---- measuring ----


def _measure(model, plan, specs, owed, console):
    text = model.tokenizer.encode(TEXT)
    for n in plan.prompts:
        ids = (text * (n // len(text) + 1))[:n]
        runs = _repeat(plan, console, f"pp{n}", lambda ids=ids: {"": prompt(model, ids)})
        yield _row(plan, runs, n_prompt=n, text="shipped text")
    for n in plan.gens:
        for spec in specs:
            if spec == "draft":
                ids = (text * (n // len(text) + 1))[:n]
                runs = _repeat(plan, console, f"tg{n} draft", lambda ids=ids: {"": _draft(model, ids, owed)})
                yield _row(plan, runs, n_gen=n, spec=spec, text="shipped text")
            else:
                yield _generations(model, plan, n, spec, console)


def _generations(model, plan, n, spec, console):
    """A row of generation. With speculation every repetition goes through all prompts; without it the text does not
    matter and one is enough."""
    names = list(PROMPTS) if spec != "off" else list(PROMPTS)[:1]
    ids = {name: prompt_ids(model, PROMPTS[name]) for name in names}
    options = {"spec": spec, "draft_max": plan.draft_max, "spec_ngram": plan.ngram} | sampling(plan.temperature, plan.seed)

    def once(n=n):
        return {name: generate(model, ids[name], n, **options) for name in names}

    runs = _repeat(plan, console, f"tg{n} spec {spec}", once, warm_up=lambda: once(1))
    return _row(plan, runs, n_gen=n, spec=spec, text="shipped prompts: " + ", ".join(names))


def _repeat(plan, console, what, action, warm_up=None):
    """The results of all repetitions, after a run that is not measured: it brings the file into memory."""
    console.status(f"{what}: warming up")
    (warm_up or action)()
    runs = []
    for i in range(plan.repetitions):
        console.status(f"{what}: {i + 1} of {plan.repetitions}")
        runs.append(action())
        console.detail(f"{what}: {sum(runs[-1].values(), Count()).tps:.2f} tokens/s")
    return runs


def sampling(temperature, seed):
    """Model.generate's arguments: greedy, or as `run` samples at this temperature."""
    return {"temperature": temperature, "seed": seed} | (SAMPLING if temperature else {})


def prompt_ids(model, text):
    """A message's tokens, through the model's chat template if it has one."""
    tok = model.tokenizer
    return tok.encode_chat([{"role": "user", "content": text}]) if tok.chat_template else tok.encode(text)


def prompt(model, ids):
    """Counts the evaluation of a prompt."""
    model.reset()
    c = model.generate(ids, max_tokens=1, ignore_eos=True, spec="off")
    return Count(tokens=len(ids), seconds=c.timings.prompt_ms / 1000)


def generate(model, ids, n, **options):
    """Counts n tokens behind a prompt. The first token of an answer costs nothing but its choice, since the prompt's
    pass has computed its logits: it is not counted."""
    c = model.generate(ids, max_tokens=n + 1, ignore_eos=True, **options)
    return Count(
        tokens=len(c.token_ids) - 1,
        seconds=c.timings.decode_ms / 1000,
        bytes=model.stats()["bytes_read"],
        steps=c.spec.steps,
        drafted=c.spec.drafted,
        accepted=c.spec.accepted,
        disabled=int(c.spec.disabled),
    )


def _draft(model, ids, owed):
    """Counts the draft's passes over ids, one token each. draft_logits evaluates ids with the target first, which is
    taken off again."""
    before, start = model.stats()["prompt_ms"], time.perf_counter()
    model.draft_logits(ids)
    seconds = time.perf_counter() - start - (model.stats()["prompt_ms"] - before) / 1000
    n, (weights, kv) = len(ids), owed
    return Count(tokens=n, seconds=seconds, bytes=n * weights + kv * n * (n + 1) // 2)


def read_gbps(threads):
    """GB/s at which memory can be read, by this many threads: the best pass of numpy's maximum over a large buffer."""
    parts = np.array_split(np.ones(READ_BYTES, np.uint8), threads)
    with ThreadPoolExecutor(threads) as pool:

        def seconds():
            start = time.perf_counter()
            list(pool.map(np.max, parts))
            return time.perf_counter() - start

        return READ_BYTES / min(seconds() for _ in range(READ_PASSES)) / 1e9


# ---- rows ----


def _row(plan, runs, *, text, n_prompt=0, n_gen=0, spec=None):
    """A row of the table from the repetitions' counts, {prompt: Count} each. Names are llama-bench's where it has the
    like; gbps is GB/s."""
    tps = [sum(r.values(), Count()).tps for r in runs]
    prompts = {name: sum((r[name] for r in runs), Count()) for name in runs[0]}
    whole = sum(prompts.values(), Count())
    return {
        "n_prompt": n_prompt,
        "n_gen": n_gen,
        "test": f"tg{n_gen}" if n_gen else f"pp{n_prompt}",
        "spec": spec,
        "draft_max": plan.draft_max if spec in ("on", "auto") else None,
        "temp": plan.temperature if n_gen and spec != "draft" else None,
        "seed": plan.seed if n_gen and spec != "draft" else None,
        "text": text,
        "avg_ts": round(statistics.fmean(tps), 3),
        "stddev_ts": round(statistics.stdev(tps), 3) if len(tps) > 1 else 0.0,
        "samples_ts": [round(x, 3) for x in tps],
        "accept": _rounded(whole.accept, 4),
        "mean_len": _rounded(whole.mean_len, 3),
        "bytes_per_token": round(whole.bytes / whole.tokens) if whole.bytes else None,
        "gbps": round(whole.bytes / whole.seconds / 1e9, 3) if whole.bytes else None,
        "prompts": {name: _of_prompt(count) for name, count in prompts.items()} if n_gen and spec != "draft" else None,
    }


def _of_prompt(c):
    figures = {"tps": round(c.tps, 3), "accept": _rounded(c.accept, 4), "mean_len": _rounded(c.mean_len, 3)}
    return figures | asdict(c)


def _rounded(x, digits):
    return None if x is None else round(x, digits)


# ---- output ----

TITLES = (
    *("model", "size", "params", "kernel", "threads", "spec", "test"),
    *("t/s", "accept", "mean_len", "MB/token", "GB/s"),
)
LISTS = ("samples_ts", "prompts", "tegrastats")  # not in csv


class _Writer:
    """Rows as they are measured (md, jsonl, csv), or all at the end (json). md has notes below the table."""

    def __init__(self, output, out, plan):
        self._output, self._out, self._plan = output, out, plan
        self._rows = []

    def row(self, row):
        first = not self._rows
        self._rows.append(row)
        if self._output == "md":
            self._md(row, first)
        elif self._output == "jsonl":
            print(json.dumps(row), file=self._out)
        elif self._output == "csv":
            table = csv.writer(self._out, lineterminator="\n")
            if first:
                table.writerow([k for k in row if k not in LISTS])
            table.writerow(["" if v is None else v for k, v in row.items() if k not in LISTS])
        self._out.flush()

    def _md(self, row, first):
        if first:
            print(f"| {' | '.join(TITLES)} |", file=self._out)
            print("|" + "|".join(["---"] * 7 + ["---:"] * 5) + "|", file=self._out)
        megabytes = _rounded(row["bytes_per_token"] and row["bytes_per_token"] / 1e6, 1)
        cells = [row["model"], f"{row['model_size'] / 2**20:.1f} MiB", f"{row['model_n_params'] / 1e6:.1f} M",
                 row["kernel"], row["n_threads"], row["spec"], row["test"],
                 f"{row['avg_ts']:.2f} ± {row['stddev_ts']:.2f}", row["accept"], row["mean_len"], megabytes,
                 _rounded(row["gbps"], 2)]  # fmt: skip
        print(f"| {' | '.join('' if c is None else str(c).replace('|', '/') for c in cells)} |", file=self._out)

    def end(self):
        if self._output == "json":
            print(json.dumps(self._rows, indent=1), file=self._out)
        elif self._output == "md":
            print("", *notes(self._rows, self._plan), sep="\n", file=self._out)
        self._out.flush()


def notes(rows, plan):
    """What the table does not say, one line each."""
    reads = {r["n_threads"]: r["read_gbps"] for r in rows}
    out = [f"{n} thread{'s' * (n != 1)}: a plain read loop reaches {x:.1f} GB/s ({read_method()})" for n, x in reads.items()]
    if rows and rows[0]["power_mode"]:
        out.append(f"power mode {rows[0]['power_mode']}")
    if any(r["n_gen"] for r in rows):
        choice = f"sampled at temperature {plan.temperature:g}, seed {plan.seed}" if plan.temperature else "greedy"
        texts = dict.fromkeys((r["spec"], r["text"]) for r in rows if r["n_gen"])
        out.append(f"tg: {choice}; " + "; ".join(f"{spec}: {text}" for spec, text in texts))
        out.append("MB/token: weights and KV cache that a token owes; GB/s: the same a second")
    for r in rows:
        off = [name for name, p in (r["prompts"] or {}).items() if p["disabled"]]
        if off:
            out.append(f"{r['test']}, {r['n_threads']} threads: auto turned the draft off for {', '.join(off)}")
        if r["tegrastats"]:
            what = f"{r['test']} {r['spec'] or ''}".rstrip()
            out.append(f"{what}, {r['n_threads']} thread{'s' * (r['n_threads'] != 1)}: {_tegrastats_text(r['tegrastats'])}")
    return [f"- {line}" for line in out]


def _tegrastats_text(t):
    """machine.summary's figures in words."""
    parts = [(t["watts"], "{} W on average"), (t["celsius"], "{} °C at most"), (t["ram_mb"], "{} MB of memory at most")]
    found = ", ".join(words.format(value) for value, words in parts if value is not None)
    return f"{found or 'nothing known'} (tegrastats, {t['samples']} samples)"


def read_method():
    """How read_gbps measures, in words."""
    return f"numpy's maximum over {READ_BYTES >> 20} MiB, best of {READ_PASSES}"
