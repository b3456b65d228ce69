"""bench and perplexity: what is counted and how it is shown; no speeds."""

import csv
import io
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from fake_model import FakeModel, byte_level

import pycass.cli as cli
from pycass import CassFile, Model, bench, perplexity, prompts, tokenizer
from pycass.console import Console
from pycass.errors import InvalidArgument

PLAN = bench.Plan(prompts=[64], gens=[8], threads=[0], specs=["off", "on", "draft"], repetitions=2, draft_max=8)
NAMES = list(prompts.PROMPTS)


# ---- bench, with made-up numbers ----


def rows_of(output, monkeypatch):
    about = {"model": "m", "model_size": 1 << 20, "model_n_params": 2000000, "cpu_info": "a, b", "power_mode": None}
    monkeypatch.setattr("pycass.model.Model", SimpleNamespace(load=lambda *a, **k: FakeModel("0" * 9)))
    monkeypatch.setattr(bench, "_about", lambda *a: about)
    monkeypatch.setattr(bench, "_owed", lambda *a: (100, 2))
    monkeypatch.setattr(bench, "read_gbps", lambda threads: 10.0)
    out = io.StringIO()
    bench.run("path", "m", PLAN, output, out, Console())
    return out.getvalue()


def test_bench_json(monkeypatch):
    rows = json.loads(rows_of("json", monkeypatch))
    pp, off, on, draft = rows
    assert [(r["test"], r["spec"]) for r in rows] == [("pp64", None), ("tg8", "off"), ("tg8", "on"), ("tg8", "draft")]
    assert pp["avg_ts"] == 64000 and pp["gbps"] is None and pp["prompts"] is None
    # of nine tokens the first one is the prompt's
    assert off["avg_ts"] == 4000 and off["stddev_ts"] == 0 and off["samples_ts"] == [4000, 4000]
    assert off["bytes_per_token"] == 125 and off["gbps"] == 0.001 and list(off["prompts"]) == NAMES[:1]
    assert on["accept"] == 0.75 and on["mean_len"] == 2.5 and list(on["prompts"]) == NAMES and "chat" in on["text"]
    assert on["prompts"]["maths"]["tokens"] == 16 and on["prompts"]["maths"]["mean_len"] == 2.5
    assert draft["bytes_per_token"] == 109 and draft["accept"] is None
    assert all(r["read_gbps"] == 10 for r in rows) and {tuple(r) for r in rows} == {tuple(pp)}


def test_bench_json_lines(monkeypatch):
    rows = [json.loads(line) for line in rows_of("jsonl", monkeypatch).splitlines()]
    assert [r["test"] for r in rows] == ["pp64", "tg8", "tg8", "tg8"]


def test_bench_tables(monkeypatch):
    lines = rows_of("md", monkeypatch).splitlines()
    table = [line.split("|")[1:-1] for line in lines[: lines.index("")]]
    assert len(table) == 6 and {len(row) for row in table} == {len(bench.TITLES)}
    assert table[2][6].strip() == "pp64" and "64000.00 ± 0.00" in table[2][7]
    notes = "\n".join(lines[lines.index("") :])
    assert "1 thread: a plain read loop reaches 10.0 GB/s" in notes and "greedy" in notes and "maths, prose, chat" in notes
    found = list(csv.DictReader(io.StringIO(rows_of("csv", monkeypatch))))
    assert [r["test"] for r in found] == ["pp64", "tg8", "tg8", "tg8"] and found[0]["accept"] == ""
    assert found[0]["cpu_info"] == "a, b"


def test_what_auto_turned_off_is_said(monkeypatch):
    monkeypatch.setattr(bench, "generate", lambda *a, **k: bench.Count(8, 1.0, 100, 4, 8, 4, 1))
    assert "auto turned the draft off for code, maths, prose, chat" in rows_of("md", monkeypatch)


def test_counts_add_up():
    total = bench.Count(10, 1.0, 5, steps=2, drafted=4, accepted=3) + bench.Count(30, 3.0, 5, steps=3, drafted=6, accepted=2)
    assert (total.tps, total.accept, total.mean_len, total.bytes) == (10, 0.5, 2, 10)
    assert (bench.Count().tps, bench.Count().accept, bench.Count().mean_len) == (0, None, None)


def test_memory_is_read(monkeypatch):
    monkeypatch.setattr(bench, "READ_BYTES", 1 << 20)
    assert bench.read_gbps(1) > 0 and bench.read_gbps(3) > 0


# ---- bench, on tiny models ----


@pytest.fixture
def measured(monkeypatch, capsys):
    """Runs `pycass bench`: (stdout, stderr)."""
    monkeypatch.setattr(bench, "READ_BYTES", 1 << 20)

    def run(path, *args):
        assert cli.main(["bench", str(path), "-t", "1", "-r", "2", *args]) == 0
        return capsys.readouterr()

    return run


def owed(path, part):
    """Bytes of weights that a pass of the draft or the target reads, and of cache per token."""
    with CassFile(path) as f:
        c, infos = f.config, [t for n, t in f.tensors.items() if f.config.tied_embedding or "embed_tokens" not in n]
    vectors = sum(2 * t.shape[0] for t in infos if len(t.shape) == 1)
    return vectors + sum(part(t) for t in infos if len(t.shape) == 2), 2 * 2 * c.n_layer * c.n_head_kv * c.head_dim


@pytest.mark.parametrize("name", ["llama_tied", "qwen3_untied"])
def test_bytes_owed(tiny_cass, measured, name):
    path, n = tiny_cass(name), 6
    off, draft = json.loads(measured(path, "-p", "0", "-n", str(n), "--spec", "off,draft", "-o", "json").out)
    weights, cache = owed(path, lambda t: t.speculation_bytes + t.verification_bytes)
    with Model.load(path) as model:
        past = len(bench.prompt_ids(model, prompts.PROMPTS["code"]))
    assert off["bytes_per_token"] == round(weights + cache * (past + (n + 1) / 2))
    assert off["prompts"]["code"]["bytes"] == 2 * (n * weights + cache * sum(range(past + 1, past + n + 1)))
    assert off["accept"] is None and off["mean_len"] is None and off["gbps"] > 0
    weights, cache = owed(path, lambda t: t.speculation_bytes)
    assert draft["bytes_per_token"] == round(weights + cache * (n + 1) / 2) and draft["avg_ts"] > 0


def test_speculation_is_counted(tiny_cass, measured):
    args = ("-p", "8,16", "-n", "24", "--spec", "on,auto", "--temp", "0.8", "--draft-max", "4", "-o", "jsonl")
    rows = [json.loads(line) for line in measured(tiny_cass("llama_tied"), *args).out.splitlines()]
    assert [(r["test"], r["spec"]) for r in rows] == [("pp8", None), ("pp16", None), ("tg24", "on"), ("tg24", "auto")]
    assert len(rows[0]["samples_ts"]) == 2 and rows[0]["avg_ts"] > 0
    for r in rows[2:]:
        assert r["temp"] == 0.8 and r["seed"] == 1 and list(r["prompts"]) == NAMES
        assert 0 <= r["accept"] <= 1 and 1 <= r["mean_len"] <= 17
        for p in r["prompts"].values():
            assert p["tokens"] == 48 == p["steps"] + p["accepted"] and p["bytes"] > 0


@pytest.mark.parametrize("output", ["md", "csv", "json", "jsonl"])
def test_stdout_is_the_table_only(tiny_cass, measured, output):
    found = measured(tiny_cass("qwen2"), "-p", "8", "-n", "2", "-n", "3", "-o", output)
    rows = {
        "md": lambda t: t.split("\n\n")[0].splitlines()[2:],
        "csv": lambda t: list(csv.DictReader(io.StringIO(t))),
        "json": json.loads,
        "jsonl": lambda t: [json.loads(line) for line in t.splitlines()],
    }[output](found.out)
    assert len(rows) == 1 + 2 * 3 and found.err == ""


def test_a_file_without_a_draft(tiny_cass, measured):
    found = measured(tiny_cass("llama_tied", "raw"), "-p", "0", "-n", "4", "-o", "json", "-v")
    off, auto = json.loads(found.out)
    assert "no draft" in found.err and "tg4 spec auto" in found.err
    assert off["accept"] is None and auto["bytes_per_token"] > 0 and off["spec"] == "off"


def test_sampling_is_that_of_run():
    defaults = {p.name: p.default for p in cli.app.commands["run"].params}
    assert bench.sampling(0.8, 3) == {"temperature": 0.8, "seed": 3} | {k: defaults[k] for k in bench.SAMPLING}
    assert bench.sampling(0.0, 3) == {"temperature": 0.0, "seed": 3}


LLAMA_BENCH = """\
import json, sys
value = dict(zip(sys.argv[1::2], sys.argv[2::2]))
tests = [(int(value["-p"]), 0), (0, int(value["-n"]))]
print(json.dumps([{"model_type": "llama 1B " + value["-m"], "n_prompt": p, "n_gen": n, "avg_ts": 10.0, "build_commit": "abc"}
                  for p, n in tests if p or n]))
"""


def test_beside_llama(tiny_cass, tmp_path):
    peer, out = tmp_path / "llama-bench", tmp_path / "results.md"
    peer.write_text(f"#!{sys.executable}\n{LLAMA_BENCH}")
    peer.chmod(0o755)
    script = Path(__file__).parents[2] / "bench" / "against_llama.py"
    command = [sys.executable, script, tiny_cass("llama_tied"), "--llama-bench", peer, "--gguf", "BF16", "Q8_0",
               "--rounds", "2", "-n", "4", "-p", "8", "--threads", "1", "--kernel", "scalar", "--out", out]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0 and done.stdout == "", done.stderr
    text = out.read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert "2 interleaved" in text and "| of llama.cpp BF16, tg4 | of llama.cpp Q8_0, tg4 |" in text
    assert "| llama.cpp BF16, pp8 | 10.0 (10.0..10.0) |" in text and "Q8_0, pp8" not in text
    assert len([line for line in lines if line.startswith("| pycass scalar, ")]) == 2 * (2 + 2 * 5)


# ---- perplexity ----


class Logits:
    """A model that gives each next token the probability of 1/2, the rest sharing the other half."""

    def __init__(self, n_ctx=1000):
        self.tokenizer, self.n_ctx = tokenizer.Tokenizer(byte_level()), n_ctx
        self.n = self.tokenizer.vocab_size

    def logits(self, ids):
        p = np.full((len(ids), self.n), 0.5 / (self.n - 1))
        p[np.arange(len(ids) - 1), ids[1:]] = 0.5
        return np.log(p).astype(np.float32) + 3

    def draft_logits(self, ids):
        return np.zeros((len(ids), self.n), np.float32)


@pytest.mark.parametrize("n_ctx", [1000, 70, 2])
def test_perplexity(n_ctx):
    model = Logits(n_ctx)
    found = perplexity.perplexity(model, bench.TEXT, draft=True)
    assert found["perplexity"] == pytest.approx(2, rel=1e-6)
    assert found["draft_perplexity"] == pytest.approx(model.n, rel=1e-6)
    half = 0.5 * np.log(0.5 * model.n) + 0.5 * np.log(0.5 / (model.n - 1) * model.n)
    assert found["kl_divergence"] == pytest.approx(half, rel=1e-5)
    assert "same most likely token" in perplexity.as_text(found)
    windows = -(-found["tokens"] // n_ctx)
    assert found["tokens"] - windows - 1 <= found["predicted"] <= found["tokens"] - windows


def test_perplexity_of_nothing():
    with pytest.raises(InvalidArgument):
        perplexity.perplexity(Logits(), "")


def test_perplexity_needs_two_tokens_of_context():
    with pytest.raises(InvalidArgument, match="at least 2"):
        perplexity.perplexity(Logits(1), bench.TEXT)


def test_nothing_to_measure_is_an_error(tiny_cass, capsys):
    assert cli.main(["bench", str(tiny_cass("llama_tied", "raw")), "-p", "0", "-n", "2", "--spec", "draft"]) == 1
    out, err = capsys.readouterr()
    assert not out and "nothing to measure: this file has no draft" in err
