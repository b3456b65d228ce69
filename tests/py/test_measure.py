"""bench and perplexity, with made-up numbers."""

import csv
import io
import json
from types import SimpleNamespace

import numpy as np
import pytest
from fake_model import FakeModel, byte_level

from pycass import bench, perplexity, tokenizer
from pycass.console import Console
from pycass.errors import InvalidArgument

PLAN = bench.Plan(prompts=[64], gens=[8], threads=[0], specs=["off", "on"], repetitions=2, draft_max=8)


def rows_of(output, monkeypatch):
    monkeypatch.setattr("pycass.model.Model", SimpleNamespace(load=lambda *a, **k: FakeModel("x")))
    monkeypatch.setattr(bench, "_about", lambda *a: {"model": "m", "size_mib": 1.0, "params_m": 2.0})
    out = io.StringIO()
    bench.run("path", "m", PLAN, output, out, Console())
    return out.getvalue()


def test_bench_json(monkeypatch):
    rows = json.loads(rows_of("json", monkeypatch))
    assert [(r["test"], r["spec"]) for r in rows] == [("pp64", ""), ("tg8", "off"), ("tg8", "on")]
    assert rows[0]["tps"] == 100 and rows[0]["gbps"] is None
    assert rows[1]["tps"] == 50 and rows[1]["sd"] == 0 and len(rows[1]["samples_tps"]) == 2
    assert rows[2]["accept"] == 0.75 and rows[2]["mean_len"] == 2.5
    assert [json.loads(line) for line in rows_of("jsonl", monkeypatch).splitlines()] == rows


def test_bench_tables(monkeypatch):
    table = [line.split("|")[1:-1] for line in rows_of("md", monkeypatch).splitlines()]
    assert len(table) == 5 and len({len(row) for row in table}) == 1
    assert table[2][6].strip() == "pp64" and "100.00 ± 0.00" in table[2][7]
    found = list(csv.DictReader(io.StringIO(rows_of("csv", monkeypatch))))
    assert [r["test"] for r in found] == ["pp64", "tg8", "tg8"] and found[0]["accept"] == ""


def test_the_text_is_long_enough():
    assert len(tokenizer.Tokenizer(byte_level()).encode(bench.TEXT)) > 48


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
