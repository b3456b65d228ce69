"""`pycass bench`: tokens a second in llama-bench's shape, and what speculation does."""

import csv
import json
import statistics
from dataclasses import dataclass

from .file import CassFile

# A text in an ordinary style: acceptance, and so the speed of speculation, depends on what is written.
TEXT = """\
The lighthouse stood at the end of the long stone pier, and every evening the keeper walked out to light the lamp.
He had done so for thirty years, through storms that threw whole waves over the wall and through summer nights so
still that the stars lay in the water. Children from the village asked him what he saw out there. He told them about
the ships: where they came from, what they carried, and how each captain had a different way of greeting the light.
One winter a letter arrived. The harbour office had decided that a machine would light the lamp from now on, and that
the keeper could stay in the house as long as he liked. He read the letter twice, put it in the drawer under the
window, and went out to the pier as usual. The machine was a small grey box with a green lamp and a clock inside.
"""


@dataclass
class Plan:
    """What to measure."""

    prompts: list
    gens: list
    threads: list
    specs: list
    repetitions: int
    draft_max: int
    batch_size: int = 0
    kernel: str | None = None


def run(path, name, plan, output, out, console):
    """Measures and writes the table."""
    from .model import Model

    about = _about(path, name)
    rows = []
    write = _Writer(output, out)
    for threads in plan.threads:
        n_ctx = max([*plan.prompts, *(g + 64 for g in plan.gens), 64]) + 1
        with Model.load(path, n_ctx=n_ctx, threads=threads, batch_size=plan.batch_size, kernel=plan.kernel) as model:
            for row in _measure(model, plan, console):
                row = about | {"kernel": model.kernel, "threads": model.threads} | row
                rows.append(row)
                write.row(row)
    write.end(rows)


def _about(path, name):
    with CassFile(path) as f:
        infos = list(f.tensors.values())
        name = f.json.get("name") or name
    size = sum(t.speculation_bytes + t.verification_bytes for t in infos)
    params = sum(_product(t.shape) for t in infos)
    return {"model": name, "size_mib": round(size / 2**20, 1), "params_m": round(params / 1e6, 1)}


def _product(shape):
    n = 1
    for s in shape:
        n *= int(s)
    return n


def _measure(model, plan, console):
    ids = model.tokenizer.encode(TEXT)
    for n in plan.prompts:
        console.detail(f"pp{n}")
        many = (ids * (n // len(ids) + 1))[:n]
        yield _row(f"pp{n}", "", [_prompt(model, many) for _ in range(plan.repetitions + 1)][1:])
    for n in plan.gens:
        for spec in plan.specs:
            console.detail(f"tg{n} spec {spec}")
            runs = [_generate(model, ids[:48], n, spec, plan) for _ in range(plan.repetitions + 1)][1:]
            yield _row(f"tg{n}", spec, runs)


def _prompt(model, ids):
    model.reset()
    c = model.generate(ids, max_tokens=1, temperature=0.0, ignore_eos=True, spec="off")
    return {"tps": c.timings.prompt_tps}


def _generate(model, ids, n, spec, plan):
    model.reset()
    c = model.generate(ids, max_tokens=n, temperature=0.0, ignore_eos=True, spec=spec, draft_max=plan.draft_max)
    seconds = c.timings.decode_ms / 1000
    read = model.stats()["bytes_read"]
    return {
        "tps": c.timings.decode_tps,
        "drafted": c.spec.drafted,
        "accepted": c.spec.accepted,
        "mean_len": c.spec.mean_len,
        "gbps": read / seconds / 1e9 if seconds else 0.0,
    }


def _row(test, spec, runs):
    """Mean and standard deviation; the first, unmeasured run has warmed the caches."""
    tps = [r["tps"] for r in runs]
    row = {"spec": spec, "test": test, "tps": round(statistics.fmean(tps), 2)}
    row["sd"] = round(statistics.stdev(tps), 2) if len(tps) > 1 else 0.0
    row |= {"accept": None, "mean_len": None, "gbps": None, "samples_tps": [round(x, 3) for x in tps]}
    if "gbps" in runs[0]:
        row["gbps"] = round(statistics.fmean(r["gbps"] for r in runs), 2)
    if runs[0].get("drafted"):
        row["accept"] = round(sum(r["accepted"] for r in runs) / sum(r["drafted"] for r in runs), 4)
        row["mean_len"] = round(statistics.fmean(r["mean_len"] for r in runs), 3)
    return row


# ---- output ----

COLUMNS = ("model", "size_mib", "params_m", "kernel", "threads", "spec", "test", "tps", "sd", "accept", "mean_len", "gbps")
TITLES = ("model", "size", "params", "kernel", "threads", "spec", "test", "t/s", "accept", "mean_len", "GB/s")


class _Writer:
    """Rows as they are measured (md, jsonl, csv), or all at the end (json)."""

    def __init__(self, output, out):
        self._output, self._out = output, out
        self._csv = csv.writer(out, lineterminator="\n")
        self._begun = False

    def row(self, row):
        if self._output == "md":
            self._md(row)
        elif self._output == "jsonl":
            print(json.dumps(row), file=self._out)
        elif self._output == "csv":
            if not self._begun:
                self._csv.writerow(COLUMNS)
            self._csv.writerow(["" if row[c] is None else row[c] for c in COLUMNS])
        self._begun = True
        self._out.flush()

    def _md(self, row):
        if not self._begun:
            print(f"| {' | '.join(TITLES)} |", file=self._out)
            print("|" + "|".join(["---"] * 7 + ["---:"] * 4) + "|", file=self._out)
        show = {c: "" if row[c] is None else row[c] for c in COLUMNS}
        cells = [row["model"], f"{row['size_mib']} MiB", f"{row['params_m']} M", row["kernel"], row["threads"],
                 row["spec"], row["test"], f"{row['tps']:.2f} ± {row['sd']:.2f}",
                 show["accept"], show["mean_len"], show["gbps"]]  # fmt: skip
        print(f"| {' | '.join(map(str, cells))} |", file=self._out)

    def end(self, rows):
        if self._output == "json":
            print(json.dumps(rows, indent=1), file=self._out)
            self._out.flush()
