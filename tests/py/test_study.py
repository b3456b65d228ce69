"""pycass study: what is measured, what a folder keeps, what the report says."""

import contextlib
import os
import shutil
import sys

import numpy as np
import pytest

import pycass.convert
from pycass import CassFile, cli, memory, study, study_report, theory
from pycass.console import Console
from pycass.errors import InvalidArgument, IOFailure, Unsupported


@pytest.fixture
def copies(monkeypatch):
    """convert() copies; the list of what it was asked for. It knows nest only."""
    asked = []

    def convert(src, out, **arguments):
        asked.append(arguments)
        if arguments["codec"] != "nest":
            raise Unsupported("not in this build")
        shutil.copy(src, out)

    monkeypatch.setattr(pycass.convert, "convert", convert)
    monkeypatch.setattr(study, "calibrated", lambda path, *a: contextlib.nullcontext(path))
    return asked


@pytest.fixture
def plan(tiny_cass, tmp_path, monkeypatch):
    """(**changes) -> a Plan for a tiny model and two development prompts."""
    monkeypatch.setattr(study, "DEVELOPMENT", {"a": "hi", "b": "you"})

    def make(**o):
        o = {"folder": tmp_path / "report", "tokens": 10, "threads": 1, "plots": False} | o
        return study.Plan(str(tiny_cass("llama_tied")), "tiny", **o)

    return make


def test_the_points():
    for grid, n in (("small", 9 + 3 + 1 + 3 + 8 + 8), ("full", 9 + 3 + 1 + 7 + 14 + 40)):
        found = study.points(grid)
        names = [p.name for p in found]
        repeated = {"cass1 prune 0.4 mantissa 3", "cass1 prune 0.4 mantissa 3 half"} if grid == "full" else set()
        assert len(set(names)) == len(names) == n - len(repeated)
        assert names[:5] == ["nest", "nest hot 16 bias", "cass1 prune 0.4 mantissa 3", "cass1 prune 0.4 mantissa 3 half",
                             "cass2 prune 0.4 mantissa 3"]  # fmt: skip
        assert [p.speed for p in found[:5]] == [True, True, True, False, True]
        assert {p.group for p in found} == set(study_report.GROUPS)
        assert found[0].arguments == {"codec": "nest", "calibrate": None} and "nest weighted" in names
        hot = {(p.arguments["hot"], p.arguments["bias"]) for p in found[1:] if p.group == "nest"}
        assert hot == {(h, b) for h in (0, 16, 32, 64) for b in (False, True)}
        assert all(p.arguments["mantissa_bits"] == 7 for p in found if p.group == "pruning")
        assert all(p.arguments["prune"] == 0 for p in found if p.group == "truncation")


def test_exponents_of_a_file(tiny_cass):
    path = tiny_cass("qwen3_untied")
    rows = {r["tensor"]: r for r in study.tensors(path)}
    with CassFile(path) as f:
        for name, t in f.tensors.items():
            if len(t.shape) == 1:
                assert name not in rows
                continue
            counts = np.bincount(f.bf16(name).ravel() >> 7 & 255, minlength=256)
            r = rows.pop(name)
            assert r["entropy"] == theory.entropy(counts) < r["huffman"] <= r["unary"] < 8
            bits = 8 * (t.speculation_bytes + t.verification_bytes) / counts.sum()
            assert r["stored_exponent_bits"] == bits - 8 and r["codec"] == "nest" and r["weights"] == counts.sum()
            layer = int(name.split(".")[2]) if "layers" in name else None
            assert (r["layer"], r["kind"]) == (layer, name.split(".")[-2])
    assert not rows


def test_means_by_kind():
    rows = [{"kind": k, "weights": w, "entropy": x, "huffman": x, "unary": 3.0, "stored_bits": 11.0,
             "stored_exponent_bits": 3.0, "draft_bits": 4.0}
            for k, w, x in (("q", 100, 2.0), ("q", 300, 3.0), ("v", 400, 4.0))]  # fmt: skip
    q, v, both = study_report.by_kind(rows)
    assert (q["entropy"], q["tensors"], v["entropy"], both["entropy"], both["weights"]) == (2.75, 2, 4, 3.375, 800)


def test_a_study_and_its_continuation(plan, copies, tmp_path):
    path = study.run(plan(), Console())
    text = path.read_text()
    folder = sorted(os.listdir(tmp_path / "report"))
    assert folder == ["cache.csv", "memory.csv", "points.csv", "ratios.csv", "report.md", "study.json", "tensors.csv"]
    assert len(copies) == 32 and "| nest bias" in text and "(10 tokens each, 20 positions;" in text
    for words in ("## Exponents", "## Acceptance", "## Speed", "## Memory", "EAGLE-3", "| tiny |", "11.59", "assumed: cass1 11.2"):
        assert words in text
    assert "| cass1 prune" not in text and "Every target gave the model's own token" in text and "No plots" not in text
    del copies[:]
    again = study.run(plan(), Console())
    assert len(copies) == 23 and {a["codec"] for a in copies} == {"cass1", "cass2"}  # only what was left out
    assert again.read_text() == text


def test_the_cache_is_measured(plan, copies):
    study.run(plan(tokens=100, budget=1e-9), Console())
    rows = {r["cache"]: r for r in study.Folder(plan().folder, {}).rows("cache.csv")}
    assert list(rows) == ["nest", "cass1", "cass2"] and {r["positions"] for r in rows.values()} == {192}
    assert all(4 < r["draft_bits"] < r["bits"] for r in rows.values())
    memory_rows = study.Folder(plan().folder, {}).rows("memory.csv")
    own = {r["scheme"]: r for r in memory_rows if r["model"] == "tiny"}
    ratio = own["nest, cache too"]["bytes_per_token"] / own["nest"]["bytes_per_token"]
    assert ratio == pytest.approx(rows["nest"]["bits"] / 16) and "nest, cache too" in (plan().folder / "report.md").read_text()


def test_rows_say_what_was_measured(plan, copies):
    study.run(plan(), Console())
    rows = study.Folder(plan().folder, {}).rows("points.csv")
    with CassFile(plan().model) as f:
        draft = sum(t.speculation_bytes for t in f.tensors.values() if len(t.shape) == 2)
        n = sum(t.shape[0] * t.shape[1] for t in f.tensors.values() if len(t.shape) == 2)
    assert {r["draft_bits"] for r in rows} == {8 * draft / n} and {r["positions"] for r in rows} == {20}
    assert all(0 < r["agreement"] <= 1 and r["target"] == 1 for r in rows)
    fast = [r for r in rows if r["spec_tps"]]
    assert [r["point"] for r in fast] == ["nest", "nest hot 16 bias"]
    for r in fast:
        tokens = theory.tokens_per_step(r["agreement"], 5)
        assert r["ideal_speedup"] == pytest.approx(tokens * r["target_bytes"] / (5 * r["draft_bytes"] + r["target_bytes"]))
        assert r["measured_speedup"] == pytest.approx(r["spec_tps"] / r["plain_tps"])


def test_real_encodings(plan, monkeypatch):
    some = [p for p in study.points("small") if p.name in ("nest", "nest hot 16 bias") or p.group in ("cass2", "truncation")]
    monkeypatch.setattr(study, "points", lambda grid: some)
    calls, convert = [], pycass.convert.convert
    monkeypatch.setattr(pycass.convert, "convert", lambda *a, **o: calls.append(o) or convert(*a, **o))
    study.run(plan(), Console())
    assert len(calls) == len(some) + 1 and calls[0]["codec"] == "nest"  # one calibration for all
    rows = {r["point"]: r for r in study.Folder(plan().folder, {}).rows("points.csv")}
    assert list(rows) == [p.name for p in some]
    assert rows["nest hot 16 bias"]["draft_bits"] > rows["nest"]["draft_bits"]
    cut = [rows[f"cass1 prune 0 mantissa {n} half"] for n in (1, 2, 3, 4)]
    assert [r["draft_bits"] for r in cut] == sorted(r["draft_bits"] for r in cut) and cut[0]["agreement"] < cut[3]["agreement"]
    assert all(r["target"] == 1 for r in rows.values() if r["codec"] != "cass2" and not r["hot"])  # else sums have an order
    assert not [n for n in os.listdir(plan().folder) if n.startswith(".")]
    source = plan().folder.parent / "c.cass"
    convert(plan().model, source)
    with study.calibrated(str(source), plan().folder, Console()) as path:
        assert path == str(source)  # keeps its own statistics


def test_the_budget_ends_it(plan, copies, capsys):
    study.run(plan(budget=1e-9), Console())
    assert len(copies) == 1 and "31 of 32 points are left" in capsys.readouterr().err
    study.run(plan(budget=1e-9), Console())
    assert len(copies) == 2


def test_an_interrupt_leaves_what_was_measured(plan, copies, monkeypatch):
    measure, calls = study.measure, []

    def stops(*a):
        calls.append(a)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return measure(*a)

    monkeypatch.setattr(study, "measure", stops)
    with pytest.raises(KeyboardInterrupt):
        study.run(plan(), Console())
    folder = study.Folder(plan().folder, {})
    assert len(folder.rows("points.csv")) == 1 and "| nest *" in (folder.path / "report.md").read_text()
    assert not [n for n in os.listdir(folder.path) if n.startswith(".point")]


def test_folders_of_other_studies_are_refused(plan, copies, tmp_path):
    study.run(plan(budget=1e-9), Console())
    with pytest.raises(InvalidArgument, match="another tokens"):
        study.run(plan(tokens=11), Console())
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").touch()
    with pytest.raises(InvalidArgument, match="holds other files"):
        study.run(plan(folder=tmp_path / "mine"), Console())
    with pytest.raises(IOFailure, match="mine/file"):
        study.run(plan(folder=tmp_path / "mine" / "file"), Console())
    for text, words in (("{", "cannot be read"), ('{"pycass_study": 9}', "version")):
        (tmp_path / "report" / "study.json").write_text(text)
        with pytest.raises((IOFailure, InvalidArgument), match=words):
            study.run(plan(), Console())


@pytest.mark.parametrize("name", ["points.csv", "tensors.csv"])
def test_damaged_tables_are_refused(plan, copies, tmp_path, name):
    study.run(plan(), Console())
    path = tmp_path / "report" / name
    whole = path.read_bytes()
    path.write_bytes(whole[:50] + b"\xff\xfe\x80" + whole[50:])
    with pytest.raises(IOFailure, match=name):
        study.run(plan(), Console())
    if name == "points.csv":
        header, row, rest = whole.split(b"\n", 2)
        cells = row.split(b",")
        for column, value in ((b"codec", b"bogus"), (b"draft_bits", b"4.x"), (b"agreement", b"")):
            damaged = cells.copy()
            damaged[header.split(b",").index(column)] = value
            damaged = b",".join(damaged)
            path.write_bytes(header + b"\n" + damaged + b"\n" + rest)
            with pytest.raises(InvalidArgument, match="damaged row"):
                study.run(plan(), Console())


def test_without_matplotlib(plan, copies, monkeypatch, capsys):
    for name in [n for n in sys.modules if n.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "pycass.study_plots", raising=False)
    monkeypatch.delattr("pycass.study_plots", raising=False)
    path = study.run(plan(plots=True, budget=1e-9), Console())
    assert "pip install 'pycass[study]'" in capsys.readouterr().err
    assert "No plots: plots need matplotlib" in path.read_text() and "![" not in path.read_text()


def test_plots(plan, copies):
    pytest.importorskip("matplotlib")
    folder = study.Folder(plan().folder, {"tokens": 10})
    folder.keep_texts([])
    row = {"codec": "cass1", "draft_bits": 5.0, "total_bits": 11.0, "draft_bytes": 5, "target_bytes": 11, "positions": 20,
           "agreement": 0.9, "sampled": 0.9, "target": 0.9, "hot": None, "bias": None}  # fmt: skip
    points = [row | {"point": "nest", "group": "nest", "codec": "nest", "spec_tps": 2.0, "plain_tps": 1.0, "ideal_speedup": 3.0,
                     "measured_speedup": 2.0, "ideal_over_bf16": 3.5, "gamma": 5, "accept": 0.8, "adaptive_tps": 2.0}]  # fmt: skip
    for group, values in (("pruning", (0.2, 0.4)), ("truncation", (2, 3))):
        points += [row | {"point": f"{group} {v}", "group": group, "prune": v, "mantissa_bits": v, "half": h}
                   for v in values for h in (False, True)]  # fmt: skip
    folder.keep_rows("points.csv", points)
    folder.keep_rows("tensors.csv", study.tensors(plan().model))
    study._keep_memory(plan(), folder)
    path = study_report.write(folder, plan(plots=True), Console())
    text, stems = path.read_text(), ("exponents", "layers", "pruning", "truncation", "tradeoff", "speed", "memory")
    for stem in stems:
        assert f"![{stem}]({stem}.png)" in text
        assert (folder.path / f"{stem}.png").read_bytes()[:4] == b"\x89PNG"
        assert b"<svg" in (folder.path / f"{stem}.svg").read_bytes()[:1000]
    assert "not always the most likely token" in text and "pruning 0.2: 0.900" in text and "cass1 11.00" in text


def test_the_verdict_on_the_papers_ratios():
    ratios = [r | {"GB": unit} for unit, size in (("24 GB", 24e9), ("24 GiB", 24 * 2**30))
              for r in memory.paper_comparison(budget=size)]  # fmt: skip
    text = study_report._verdict(ratios)
    assert "11.59 against a separate draft model is not reproduced" in text and "14.32, +24 %" in text
    assert "lies between 7.77 and 14.32" in text and "1.81 against EAGLE-3 is reproduced" in text and "1.68, -7 %" in text


def test_the_command(plan, copies, tmp_path, capsys, monkeypatch):
    path = plan().model
    assert cli.main(["study", path, "-o", str(tmp_path / "new"), "--tokens", "8", "-t", "1", "--no-plots", "--budget", "1e-6"]) == 0
    out = capsys.readouterr()
    assert out.out.strip() == str(tmp_path / "new" / "report.md") and "left" in out.err
    assert (tmp_path / "new" / "report.md").read_text().startswith(f"# A study of {os.path.basename(path)}\n")
    monkeypatch.chdir(tmp_path)
    assert cli.main(["study", path, "--tokens", "8", "-t", "1", "--no-plots", "--budget", "1e-6"]) == 0
    assert (tmp_path / capsys.readouterr().out.strip()).is_file()
