"""pycass tune: what is tried, what is chosen and written. Figures are made up but in the tests on tiny models."""

import contextlib
import json
import os
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest

import pycass.convert
from pycass import Model, cli, settings, study, tune
from pycass.console import Console
from pycass.errors import InvalidArgument, IOFailure, Unsupported
from pycass.tune import Candidate, Clock, Figures, Journal, Tuner
from pycass.tune_search import Search


def figures(right=0.5, draft=1.0, plain=8.0, bits=4.0):
    """Figures of a draft of which each further token is accepted with chance `right`, over 10000 steps."""
    n = tune.LONGEST
    chances = [right**i * (1 - right) for i in range(n)] + [right**n]
    return Figures(tuple(round(10000 * c) for c in chances), draft, {1: plain, 13: 1.5 * plain}, bits, 11.0, 1000, 10)


# ---- figures --------------------------------------------------------------------------------------------------------


def test_predictions_by_hand():
    f = Figures((2, 0, 1, 1), 1.0, {1: 4.0, 3: 6.0, 4: 6.5}, 4.0, 11.0, 10**9, 10)
    assert f.plain_tps == 250
    assert f.tps(1) == pytest.approx(1000 * 1.5 / (1 + 5)) and f.tps(2) == pytest.approx(1000 * 2 / (2 + 6))
    assert f.tps(3) == pytest.approx(1000 * 2.25 / 9.5) and f.best_length == 1
    assert f.acceptance(3) == pytest.approx(1.25 / 3) and f.worth("speed") == f.tps(1)
    assert f.worth("paper") == pytest.approx(1e9 * f.acceptance(3) / (4e9 + 16 * 10 * tune.CONTEXT))


# ---- the search -----------------------------------------------------------------------------------------------------


def explore(search, worth, most=1000):
    tried = []
    for point in search:
        tried.append(point)
        search.tell(point, worth(point))
        if len(tried) == most:
            break
    return tried


def key(point):
    return tuple(sorted(point.items()))


SPACE = {"a": (False, True), "b": (False, True), "c": (False, True), "d": (False, True)}
NONE = dict.fromkeys(SPACE, False)
SINGLES = [NONE, *(NONE | {k: True} for k in SPACE)]


def worth(point):
    return 10 + 3 * point["b"] + 2 * point["d"] - point["a"] - point["c"]


def test_a_grid_unites_what_gains():
    tried = explore(Search(SPACE, SINGLES, key, optuna=False), worth)
    assert tried[:5] == SINGLES and max(tried, key=worth) == NONE | {"b": True, "d": True}
    assert len(tried) == len({key(p) for p in tried}) == 8  # and with a, with c
    search = Search(SPACE, SINGLES, key, optuna=False)
    search.tell(NONE, 10)
    assert explore(search, worth)[0] == SINGLES[1]
    assert explore(Search(SPACE, [], key, optuna=False), worth) == []


def test_optuna_goes_on_and_ends():
    pytest.importorskip("optuna")
    tried = explore(Search(SPACE, SINGLES, key, optuna=True), worth)
    assert tried[:5] == SINGLES and 6 <= len(tried) == len({key(p) for p in tried}) <= 16
    assert max(map(worth, tried)) == 15
    assert explore(Search(SPACE, SINGLES, key, optuna=True), worth) == tried


def test_encodings_say_only_what_counts():
    point = {"codec": "nest", "hot": 16, "bias": True, "prune": 0.4, "mantissa_bits": 3, "half": True}
    assert tune.encoding_of(point) == {"codec": "nest", "hot": 16, "bias": True}
    paper = {"codec": "cass1", "prune": 0.4, "mantissa_bits": 3, "half": True, "pruned": "coded"}
    assert tune.encoding_of(point | {"codec": "cass1"}) == paper
    assert "half" not in tune.encoding_of(point | {"codec": "cass2"})


# ---- the stages -----------------------------------------------------------------------------------------------------


class FakeRig:
    """Figures by a rule; real decoding by another. Time passes with every measurement."""

    def __init__(self, model, rule, decode=None, seconds=1.0):
        self.rule, self.decode, self.seconds = rule, decode or (lambda c, f: f.tps(f.best_length)), seconds
        self.tied, self.n_layer, self.codec, self.kernel, self.threads = False, 3, "nest", "fake", 1
        self.said = {"codec": "nest", "hot": 0, "bias": False}
        self.time, self.asked, self.kept = 0.0, [], []

    def measure(self, candidate, base):
        """Rig's."""
        self.asked.append(candidate)
        self.time += self.seconds
        return self.rule(candidate)

    def keep_only(self, encodings):
        """Rig's."""
        self.kept = list(encodings)

    def confirm(self, candidates, clock, note):
        """Rig's."""
        for c in candidates:
            assert c.encoding is None or c.encoding in self.kept
        with clock.timed("confirm"):
            self.time += self.seconds
        return [self.decode(c, self.rule(c)) for c in candidates]


@pytest.fixture
def tuner(tmp_path):
    """(rule, ...) -> a Tuner with a fake rig."""
    (tmp_path / "m.cass").write_bytes(b"\0" * 1000)

    def make(rule, decode=None, objective="speed", budget=1000.0, about=0, **o):
        plan = tune.Plan(str(tmp_path / "m.cass"), str(tmp_path / "s.json"), objective, budget, optuna=False)
        rig = FakeRig(plan.model, rule, decode, **o)
        journal = Journal(plan.out + ".journal", {"about": about})
        return Tuner(plan, rig, journal, Console(), Clock(budget, lambda: rig.time))

    return make


def rule(c):
    """Best: hot columns 32, and `v` and the last layer read wholly."""
    right = 0.6 + 0.1 * ("*.v_proj.weight" in c.draft_full) + 0.05 * ("model.layers.2.*_proj.weight" in c.draft_full)
    hot = (c.encoding or {}).get("hot", 0)
    codec = (c.encoding or {}).get("codec", "nest")
    return figures(right + {0: 0, 16: 0.05, 32: 0.1, 64: 0.1}[hot], 1.0 + 0.004 * hot + 0.1 * len(c.draft_full),
                   8.0 if codec == "nest" else 30.0)  # fmt: skip


BEST = Candidate({"codec": "nest", "hot": 32, "bias": True}, ("*.v_proj.weight", "model.layers.2.*_proj.weight"))


def test_the_planted_best_is_found(tuner):
    t = tuner(rule)
    t.run()
    assert t.best()[0] == BEST and t.rig.kept == [BEST.encoding]
    assert replace_max(t.choice()) == BEST and Candidate() in t.confirmed
    s = t.settings()
    assert (s.codec, s.hot, s.bias, s.prune, s.draft_full) == ("nest", 32, True, None, BEST.draft_full)
    assert s.measured["over_default"] > 1.02 and s.measured["tps"] > s.measured["default_tps"]
    assert s.machine["kernel"] == "fake" and settings.of(s.as_object()) == s
    loads = [c.encoding is None for c in t.rig.asked]
    assert loads == sorted(loads, reverse=True)  # what needs no encoding comes first


def replace_max(c):
    return Candidate(c.encoding, c.draft_full)


def test_the_fastest_length_is_kept(tuner):
    t = tuner(rule, decode=lambda c, f: f.tps(f.best_length) * (1.2 if c.draft_max == 4 else 1))
    t.run()
    assert t.choice() == Candidate(BEST.encoding, BEST.draft_full, 4) and t.settings().draft_max == 4


@pytest.mark.parametrize("gain", [0.9, 1.0, 1.01])
def test_never_worse_than_the_default(tuner, gain):
    t = tuner(rule, decode=lambda c, f: 100.0 if c == Candidate() else 100.0 * gain)
    t.run()
    assert t.choice() == Candidate() and t.settings().measured["over_default"] == 1
    assert t.settings().convert_arguments() == {"codec": "nest", "hot": 0, "bias": False}
    assert not t.settings().measured["encode_anew"]


def test_the_papers_objective(tuner):
    def paper(c):
        codec = (c.encoding or {}).get("codec", "nest")
        return figures(0.8, bits=3.0 if codec == "cass1" and c.encoding["prune"] == 0.5 else 4.0)

    t = tuner(paper, objective="paper", decode=lambda c, f: 1.0 if c.encoding else 2.0)
    t.run()
    assert t.choice().encoding["prune"] == 0.5 and t.settings().measured["over_default"] == 0.5
    assert "pruned" not in t.settings().as_object()


def test_codecs_that_are_not_there_are_left_out(tuner, capsys):
    def some(c):
        if (c.encoding or {}).get("codec") == "cass1":
            raise Unsupported("no such codec")
        return rule(c)

    t = tuner(some)
    t.run()
    tried = [c for c in t.rig.asked if (c.encoding or {}).get("codec") == "cass1"]
    assert len(tried) == 1 and "left out" in capsys.readouterr().err and t.best()[0] == BEST


def test_the_budget_ends_the_stages(tuner):
    t = tuner(rule, budget=10.0)
    t.run()
    encoded = sum(c.encoding is not None for c in t.rig.asked)
    assert len(t.rig.asked) - encoded == 4 and encoded == 3 and t.confirmed and t.rig.time <= 10


def test_an_interrupt_and_the_journal(tuner, tmp_path):
    t = tuner(rule)
    measure = t.rig.measure

    def stops(c, base):
        if len(t.rig.asked) == 5:
            raise KeyboardInterrupt
        return measure(c, base)

    t.rig.measure = stops
    with pytest.raises(KeyboardInterrupt):
        t.run()
    assert t.choice() == t.best()[0] != Candidate() and "tps" not in t.settings().measured
    again = tuner(rule)
    assert len(again.journal.figures) == 5 and again.journal.figures == t.journal.figures
    again.run()
    assert not set(map(key_of, t.rig.asked)) & set(map(key_of, again.rig.asked)) and again.best()[0] == BEST
    assert not tuner(rule, about=1).journal.figures  # of another model
    (tmp_path / "s.json.journal").write_text("{}")
    with pytest.raises(IOFailure, match="not a journal"):
        tuner(rule)


def key_of(c):
    return c.key


# ---- the whole, on tiny models ----


@pytest.fixture
def tiny(monkeypatch, tiny_cass):
    """A tiny model's path; few trials; convert() copies and knows nest only."""

    def convert(src, out, **arguments):
        if arguments["codec"] != "nest":
            raise Unsupported("not in this build")
        shutil.copy(src, out)

    monkeypatch.setattr(pycass.convert, "convert", convert)
    monkeypatch.setattr(study, "calibrated", lambda path, *a: contextlib.nullcontext(path))
    monkeypatch.setattr(tune, "TRIALS", (3, 3))
    monkeypatch.setattr(tune, "DEVELOPMENT", {"a": "hi", "b": "you"})
    return str(tiny_cass("llama_untied"))


def test_a_rig_measures(tiny, tmp_path):
    plan = tune.Plan(tiny, str(tmp_path / "s.json"), tokens=40, threads=1)
    with contextlib.closing(tune.Rig(plan, Console())) as rig:
        plain = rig.measure(Candidate())
        more = rig.measure(Candidate(draft_full=("model.layers.*", "lm_head.weight")))  # all but the embedding
        assert more.acceptance(8) > plain.acceptance(8) > 0 and plain.draft_bits < more.draft_bits
        assert min(plain.draft_ms, more.draft_ms) > 0 and sum(plain.prefixes) > 2
        assert not sum(rig.measure(Candidate(draft_full=("*",))).prefixes)  # that is no draft
        assert sorted(plain.verify_ms) == list(tune.VERIFIED) and min(plain.verify_ms.values()) > 0
        slow = replace(plain, verify_ms={n: 1000 * ms for n, ms in plain.verify_ms.items()})  # the machine was slower then
        again, other = rig.measure(Candidate(), slow), rig.measure(Candidate({"codec": "nest", "hot": 32}), slow)
        assert again.verify_ms == slow.verify_ms and again.prefixes == plain.prefixes
        assert other.verify_ms[1] == pytest.approx(slow.verify_ms[1]) and min(again.draft_ms, other.draft_ms) > 50 * plain.draft_ms
        for hot in (16, 32, 64):
            rig.path_of({"codec": "nest", "hot": hot})
            rig.keep_only([{"codec": "nest", "hot": 32}])
        path = rig.path_of({"codec": "nest", "hot": 32})
        assert sorted(os.listdir(os.path.dirname(path))) == [os.path.basename(path)]
        some = [Candidate(), Candidate({"codec": "nest", "hot": 32}, draft_max=4)]
        found = rig.confirm(some, Clock(100), lambda text: None)
        assert len(found) == 2 and min(found) > 0
    assert not os.path.exists(path)


def test_the_command(tiny, tmp_path, capsys):
    out = tmp_path / "s.json"
    args = ["tune", tiny, "-o", str(out), "--tokens", "16", "-t", "1", "--budget", "1", "--search", "grid"]
    assert cli.main(args) == 0
    text = capsys.readouterr()
    found = settings.load(out)
    assert found.codec == "nest" and found.measured["tps"] > 0 and str(out) in text.out and "in turn" in text.err
    assert os.listdir(tmp_path) == ["s.json"]
    assert cli.main([*args, "--json"]) == 0
    assert settings.of(json.loads(capsys.readouterr().out)) == settings.load(out)


def test_settings_lie_beside_the_model(tiny, tmp_path, capsys):
    """Without --out."""
    path = str(shutil.copy(tiny, tmp_path / "model.cass"))
    assert cli.main(["tune", path, "--tokens", "16", "-t", "1", "--budget", "1", "--search", "grid"]) == 0
    assert settings.load(path + ".tune.json").measured["tps"] > 0


def test_an_interrupted_command_leaves_settings(tiny, tmp_path, monkeypatch, capsys):
    def interrupted(*a):
        raise KeyboardInterrupt

    monkeypatch.setattr(tune.Rig, "confirm", interrupted)
    out = tmp_path / "s.json"
    assert cli.main(["tune", tiny, "-o", str(out), "--tokens", "16", "-t", "1", "--search", "grid"]) == 130
    assert "not confirmed" in capsys.readouterr().err and "tps" not in settings.load(out).measured
    assert sorted(os.listdir(tmp_path)) == ["s.json", "s.json.journal"]


def test_what_cannot_be_tuned(tiny_cass, tmp_path):
    with pytest.raises(InvalidArgument, match="no draft"):
        tune.run(tune.Plan(str(tiny_cass("qwen2", "raw")), str(tmp_path / "s.json")), Console())
    with pytest.raises(IOFailure, match="none"):
        tune.run(tune.Plan(str(tiny_cass("qwen2")), str(tmp_path / "none" / "s.json")), Console())


# ---- the engine with settings ----


def test_the_engine_reads_settings(tiny_cass, tmp_path):
    path, prompt = tiny_cass("qwen2"), [1, 2, 3]
    chosen = settings.Settings("nest", draft_max=3, draft_full=("*.v_proj.weight", "*.o_proj.weight"))
    settings.save(chosen, tmp_path / "s.json")
    with Model.load(path, draft_full=chosen.draft_full) as a, Model.load(path, settings=tmp_path / "s.json") as b:
        assert (a.draft_logits(prompt) == b.draft_logits(prompt)).all() and (a.draft_max, b.draft_max) == (8, 3)
        with Model.load(path) as c:
            assert (b.draft_logits(prompt) != c.draft_logits(prompt)).any()
        b.generate(prompt, 2, spec="on", draft_fixed=True, ignore_eos=True)
        assert b.stats()["drafted"] == 0  # there was no room
        b.generate(prompt, 5, spec="on", draft_fixed=True, ignore_eos=True)
        assert b.stats()["drafted"] >= 3
        b.generate(prompt, 30, spec="on", draft_fixed=True, draft_max=5, ignore_eos=True)
        assert b.stats()["drafted"] / b.stats()["steps"] > 3
    with Model.load(path, settings={"pycass_settings": 1, "codec": "nest"}) as m:
        assert m.draft_max == 8
    with pytest.raises(InvalidArgument, match="settings are for cass1"):
        Model.load(path, settings=settings.Settings("cass1"))
    with pytest.raises(InvalidArgument, match="no tensor lm_head"):
        Model.load(path, settings=settings.Settings("nest", draft_full=("lm_head*",)))


def test_commands_read_settings(tiny_cass, tmp_path, capsys, monkeypatch):
    path, file = str(tiny_cass("qwen2")), tmp_path / "s.json"
    settings.save(settings.Settings("nest", draft_max=2), file)
    run = ["run", path, "--raw", "-p", "a", "-n", "3", "--json"]
    seen, generate = [], Model.generate
    monkeypatch.setattr(Model, "generate", lambda m, *a, **o: seen.append((m.draft_max, o)) or generate(m, *a, **o))
    for more in ([], ["--draft-max", "9"]):
        assert cli.main([*run, "--settings", str(file), *more]) == 0
    assert [most for most, _ in seen] == [2, 2] and [o.get("draft_max") for _, o in seen] == [None, 9]
    capsys.readouterr()
    monkeypatch.setattr("pycass.bench.run", lambda path, name, plan, *a: seen.append(plan))
    for more, expected in (([], 2), (["--draft-max", "7"], 7)):
        assert cli.main(["bench", path, "--settings", str(file), *more]) == 0
        assert (seen[-1].draft_max, seen[-1].settings.codec) == (expected, "nest")
    file.write_text("{}")
    assert cli.main([*run, "--settings", str(file)]) == 1
    assert "not a settings file" in capsys.readouterr().err


def test_convert_reads_settings(tiny_cass, tmp_path, monkeypatch):
    seen = []

    def do(src, out, progress, **arguments):
        seen.append(arguments)
        raise Unsupported("enough")

    monkeypatch.setattr(pycass.convert, "convert", do)
    file = tmp_path / "s.json"
    settings.save(settings.Settings("nest", hot=32, bias=False, draft_max=2), file)
    args = ["convert", str(tiny_cass("qwen2")), "-o", str(tmp_path / "x.cass")]
    for more in ([], ["--settings", str(file)], ["--settings", str(file), "--hot", "64", "--bias"]):
        assert cli.main([*args, *more]) == 1
    assert [(a["codec"], a["hot"], a["bias"]) for a in seen] == [("nest", 16, True), ("nest", 32, False), ("nest", 64, True)]


def test_what_is_said(tmp_path):
    s = settings.Settings("nest", hot=16, bias=True, draft_max=6, draft_full=("a*",),
                          measured={"tps": 12.0, "default_tps": 10.0, "over_default": 1.2, "draft_bits": 4.35,
                                    "encode_anew": True})  # fmt: skip
    text = tune.as_text(s, "m", "s.json")
    assert "hot 16" in text and "1.20 times" in text and "convert m -o NEW.cass --settings s.json" in text and "reads a*" in text
    plain = tune.as_text(settings.Settings("nest", draft_max=8), "m", "s.json")
    assert "convert" not in plain and "run m --settings" in plain


def test_the_clock():
    clock = SimpleNamespace(t=0.0)
    c = Clock(10, lambda: clock.t)
    with c.timed("x"):
        clock.t = 4
    assert (c.spent(), c.last("x"), c.last("y", 7.0)) == (4, 4, 7)
    assert c.fits(6) and not c.fits(6.1) and not c.fits(2, 0.5) and c.fits(1, 0.5)
