"""`pycass tune`: searches the settings with which this machine decodes a model fastest, or the paper's objective."""

import json
import os
import time
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace

from . import bench, probe, scratch, study, theory
from .errors import InvalidArgument, IOFailure, PycassError
from .file import CassFile
from .prompts import DEVELOPMENT
from .settings import Settings, save
from .tune_search import Search, has_optuna

JOURNAL = 1
LONGEST = 12  # draft length at which acceptance is measured; every shorter one follows from it
VERIFIED = (1, 2, 5, 9, 13)  # tokens of the target passes that are timed; others lie between
SECONDS = 40  # of a measurement, after which no further prompt is begun
HOPELESS = 0.8  # draft passes that take so much of a target pass gain nothing: one step is enough to know
PROMPTS = 4  # development prompts of a measurement
DEFAULT_MAX = 8  # the engine's draft_max
GAMMA = 5  # the draft length of the paper's acceptance
CONTEXT = 2048  # tokens of cache in the paper's objective
SHARES = (0.40, 0.75)  # of the budget, at which loads and encodings end
TRIALS = (24, 16)  # of each
FINALISTS = 3  # beside the default
LENGTHS = (4, 8, 16)  # draft_max that the best of them is tried with; the engine drafts less where that pays
ROUNDS = 5  # in which finalists decode, in turn
GAIN = 1.02  # that the chosen one must have over the default
ENCODE_SPEED = 20e6  # bytes a second, before one was timed

PARTS = {  # what the draft may read wholly: patterns of each
    "output": ("lm_head.weight",),
    "v": ("*.v_proj.weight",),
    "k": ("*.k_proj.weight",),
    "o": ("*.o_proj.weight",),
    "down": ("*.down_proj.weight",),
    "first": ("model.layers.0.*_proj.weight",),
    "last": ("model.layers.{last}.*_proj.weight",),
}
ENCODINGS = {
    "codec": ("nest", "cass1", "cass2"),
    "hot": (0, 16, 32, 64),
    "bias": (False, True),
    "prune": (0.0, 0.3, 0.4, 0.5, 0.6),
    "mantissa_bits": (2, 3, 4, 5, 6, 7),
    "half": (False, True),
}


@dataclass
class Plan:
    """What to do. budget: seconds. tokens: of each answer. objective: "speed" or "paper"."""

    model: str  # path of a .cass file
    out: str
    objective: str = "speed"
    budget: float = 900.0
    tokens: int = 32
    threads: int = 0
    kernel: str | None = None
    optuna: bool | None = None  # None: if it is there


@dataclass(frozen=True)
class Candidate:
    """Settings of which the figures are known. encoding: convert's arguments, None: the file as it is."""

    encoding: dict | None = field(default=None, hash=False)
    draft_full: tuple[str, ...] = ()
    draft_max: int = DEFAULT_MAX

    @property
    def key(self) -> str:
        """By which a measurement is found again; the draft length is no part of it."""
        return json.dumps([self.encoding, list(self.draft_full)], sort_keys=True)

    def __str__(self):
        e = self.encoding
        text = "the file as it is" if e is None else study.Point("", e).name
        text += f", the draft reads {', '.join(self.draft_full)} wholly" if self.draft_full else ""
        return text


@dataclass(frozen=True)
class Figures:
    """What was measured of a candidate: accepted prefixes at LONGEST, milliseconds, bits."""

    prefixes: tuple[int, ...]
    draft_ms: float
    verify_ms: dict[int, float]  # by the number of tokens
    draft_bits: float
    target_bits: float
    weights: int
    cache_values: int  # of a token

    def tps(self, length: int) -> float:
        """Predicted tokens a second with drafts of this length."""
        tokens = theory.tokens_of_prefixes(self.prefixes, length)
        return 1000 * tokens / (length * self.draft_ms + probe.Verify(self.verify_ms)(length + 1))

    @property
    def plain_tps(self) -> float:
        """Tokens a second without speculation."""
        return 1000 / self.verify_ms[1]

    @property
    def best_length(self) -> int:
        """The draft length with the highest prediction."""
        return max(range(1, len(self.prefixes)), key=self.tps)

    def acceptance(self, length: int) -> float:
        """Accepted of `length` drafted tokens."""
        return (theory.tokens_of_prefixes(self.prefixes, length) - 1) / length

    def worth(self, objective: str) -> float:
        """Predicted tokens a second; or the paper's J, per gigabit, with a BF16 cache of CONTEXT tokens."""
        if objective == "speed":
            return self.tps(self.best_length)
        length = min(GAMMA, len(self.prefixes) - 1)
        return theory.paper_objective(
            self.acceptance(length), self.weights, self.draft_bits, self.cache_values * CONTEXT
        )


# ---- measuring ------------------------------------------------------------------------------------------------------


class Rig:
    """Measures candidates on this machine. Encoded files lie in a temporary folder beside the output; of them only the
    one of the best candidate is kept."""

    def __init__(self, plan: Plan, console):
        self._plan, self._console = plan, console
        folder = os.path.dirname(os.path.abspath(plan.out))
        self._stack = ExitStack()
        try:
            self._folder = self._stack.enter_context(scratch.folder(folder, ".tune-"))
        except OSError as error:
            raise IOFailure(f"{folder}: {error.strerror}") from error
        self._files: dict[str, str] = {}  # encoding: path
        self._made = 0
        with CassFile(plan.model) as f:
            codecs = sorted({t.codec for t in f.tensors.values() if len(t.shape) == 2})
            self.names, self.n_layer = list(f.tensors), f.config.n_layer
            self.tied = f.config.tied_embedding
            made = f.json.get("nest") or {}  # how it was calibrated
            self.said = {"codec": codecs[0] if codecs[0] != "raw" else codecs[-1]}
            if self.said["codec"] == "nest":
                self.said |= {"hot": int(made.get("hot", 0)), "bias": bool(made.get("bias", False))}
        self.codec, self._source = self.said["codec"], None
        if self.codec == "raw":
            raise InvalidArgument(f"{plan.model} has no draft to tune: convert the model with a codec that has one")
        self.kernel, self.threads = None, None

    def close(self):
        """Deletes the encoded files."""
        self._stack.close()

    def path_of(self, encoding) -> str:
        """The file of an encoding; made if it is not there."""
        if encoding is None:
            return self._plan.model
        key = json.dumps(encoding, sort_keys=True)
        if key not in self._files:
            from .convert import convert

            self._made += 1
            path = os.path.join(self._folder, f"{self._made}.cass")
            if self._source is None:
                again = study.calibrated(self._plan.model, self._folder, self._console)
                self._source = self._stack.enter_context(again)
            convert(self._source, path, **encoding)
            self._files[key] = path
        return self._files[key]

    def keep_only(self, encodings):
        """Deletes the files of all other encodings."""
        keep = {json.dumps(e, sort_keys=True) for e in encodings}
        for key in set(self._files) - keep:
            os.unlink(self._files.pop(key))

    @contextmanager
    def model(self, candidate: Candidate):
        """The candidate's model, loaded."""
        from .model import Model

        o = {"threads": self._plan.threads, "kernel": self._plan.kernel, "mmap": False}
        with Model.load(self.path_of(candidate.encoding), draft_full=candidate.draft_full, **o) as m:
            self.kernel, self.threads = m.kernel, m.threads
            yield m

    def measure(self, candidate: Candidate, base: Figures | None = None) -> Figures:
        """Accepted prefixes and times, over the development prompts. A machine is not always as fast: with the figures of
        the file as it is, times of an encoding of the same codec are set in proportion to what a plain pass took then and
        takes now."""
        owed = bench.owed(self.path_of(candidate.encoding), candidate.draft_full)
        with self.model(candidate) as m:
            prompts = self._prompts(m)
            ids = prompts[0] * (VERIFIED[-1] // len(prompts[0]) + 1)
            probe.pass_ms(m, ids, 1)  # brings the file into memory
            verify = {n: probe.pass_ms(m, ids, n) for n in (VERIFIED if candidate.encoding or not base else (1,))}
            found = self._steps(m, prompts, verify[1])
            now = (verify[1] + probe.pass_ms(m, ids, 1)) / 2
        pace = 1.0
        if base and (candidate.encoding is None or candidate.encoding["codec"] == self.codec):
            pace = base.verify_ms[1] * owed.target_bits / base.target_bits
            verify = {n: ms * pace / verify[1] for n, ms in verify.items()} if candidate.encoding else base.verify_ms
            pace /= now
        return Figures(
            found.prefixes, pace * found.draft_ms, verify, owed.draft_bits, owed.target_bits, owed.weights,
            owed.cache_per_token // 2,
        )  # fmt: skip

    def _steps(self, model, prompts, plain_ms):
        begin, found = time.monotonic(), [probe.steps(model, prompts[0], LONGEST + 2, LONGEST)]
        if self._plan.objective == "speed" and found[0].draft_ms > HOPELESS * plain_ms:
            return found[0]
        for n, ids in enumerate(prompts):
            if n and time.monotonic() - begin > SECONDS:
                break
            found.append(probe.steps(model, ids, self._plan.tokens, LONGEST))
        return probe.together(found)

    def _prompts(self, model):
        return [bench.prompt_ids(model, text) for text in list(DEVELOPMENT.values())[:PROMPTS]]

    def confirm(self, candidates, clock, note) -> list[float]:
        """Tokens a second by real decoding, as users get it: speculation `auto`, with look-ups. Candidates take turns, and
        of each prompt the fastest round counts, since whatever disturbs only slows; a further round begins only if there
        is time."""
        best = [{} for _ in candidates]
        for n in range(ROUNDS):
            if n and not clock.fits(clock.last("confirm")):
                break
            with clock.timed("confirm"):
                for i, candidate in enumerate(candidates):
                    with self.model(candidate) as m:
                        prompts = self._prompts(m)
                        probe.decode(m, prompts[:1], 4)
                        for k, ids in enumerate(prompts):
                            count = probe.decode(m, [ids], 2 * self._plan.tokens, draft_max=candidate.draft_max)
                            best[i][k] = min(count, best[i].get(k, count), key=lambda c: c.seconds)
                    tps = sum(best[i].values(), bench.Count()).tps
                    note(f"round {n + 1}: {tps:.2f} tokens/s: {candidate}, up to {candidate.draft_max} tokens")
        return [sum(counts.values(), bench.Count()).tps for counts in best]


class Clock:
    """The budget, and how long things of a kind take."""

    def __init__(self, budget: float, now=time.monotonic):
        self._now, self._begin, self.budget = now, now(), budget
        self._last: dict[str, float] = {}

    def spent(self) -> float:
        """Seconds."""
        return self._now() - self._begin

    def fits(self, seconds: float, share: float = 1.0) -> bool:
        """Whether something of that length would end within a share of the budget."""
        return self.spent() + seconds <= share * self.budget

    def last(self, kind: str, default: float = 0.0) -> float:
        """Seconds that the latest of a kind took."""
        return self._last.get(kind, default)

    @contextmanager
    def timed(self, kind):
        """Measures what is done in it."""
        begin = self._now()
        yield
        self._last[kind] = self._now() - begin


# ---- the journal ----------------------------------------------------------------------------------------------------


class Journal:
    """Figures by candidate, in a file that is replaced whole; a later run with the same `about` goes on with it."""

    def __init__(self, path: str, about: dict):
        self.path, self._about = path, about
        self.figures: dict[str, Figures] = {}
        try:
            with open(path, encoding="utf-8") as f:
                found = json.load(f)
            if found["pycass_tune"] == JOURNAL and found["about"] == about:
                self.figures = {k: _figures(v) for k, v in found["figures"].items()}
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise IOFailure(f"{path}: not a journal of tune, delete it to begin anew: {error}") from None

    def keep(self, candidate: Candidate, figures: Figures):
        """Adds and writes."""
        from .model import write_whole

        self.figures[candidate.key] = figures
        found = {"pycass_tune": JOURNAL, "about": self._about, "figures": {k: asdict(v) for k, v in self.figures.items()}}
        write_whole(self.path, json.dumps(found).encode())

    def remove(self):
        """Deletes the file: all is done."""
        if os.path.exists(self.path):
            os.unlink(self.path)


def _figures(v) -> Figures:
    times = {int(k): float(x) for k, x in v.pop("verify_ms").items()}
    return Figures(tuple(v.pop("prefixes")), verify_ms=times, **v)


# ---- the search -----------------------------------------------------------------------------------------------------


class Tuner:
    """The stages: the file as it is; what its draft reads wholly; other encodings; then the finalists decode."""

    def __init__(self, plan: Plan, rig, journal: Journal, console, clock: Clock | None = None):
        self.plan, self.rig, self.journal, self.console = plan, rig, journal, console
        self.clock = clock or Clock(plan.budget)
        self.found: dict[str, tuple[Candidate, Figures]] = {}
        self.confirmed: dict[Candidate, float] = {}
        self._optuna = has_optuna() if plan.optuna is None else plan.optuna
        self._refused: set[str] = set()  # codecs that this build does not have

    def figures(self, candidate: Candidate, kind: str) -> Figures:
        """Measured, or from the journal."""
        if candidate.key not in self.journal.figures:
            self.console.status(f"{self.clock.spent() / 60:.1f} minutes: {candidate}")
            with self.clock.timed(kind):
                base = self.journal.figures.get(Candidate().key)
                self.journal.keep(candidate, self.rig.measure(candidate, base))
        f = self.journal.figures[candidate.key]
        self.found[candidate.key] = candidate, f
        self.console.note(f"{f.worth(self.plan.objective):.2f} {self.unit}, {f.tps(f.best_length):.2f} tokens/s with drafts "
                          f"of {f.best_length}, {f.draft_bits:.2f} bits: {candidate}")  # fmt: skip
        return f

    @property
    def unit(self) -> str:
        """Of the objective."""
        return "tokens/s predicted" if self.plan.objective == "speed" else "J"

    def run(self):
        """All stages."""
        self.figures(Candidate(), "load")
        self._stage(self._parts(), lambda p: Candidate(None, self._patterns(p)), 0)
        best = self.best()[0]
        self._stage(self._encodings(), lambda p: Candidate(encoding_of(p), best.draft_full), 1)
        self._confirm()

    def best(self, encoded=None) -> tuple[Candidate, Figures]:
        """The candidate that is worth most so far; encoded: only among the encoded ones, or the file's."""
        some = [c for c in self.found.values() if encoded is None or (c[0].encoding is not None) == encoded]
        return max(some, key=lambda c: c[1].worth(self.plan.objective))

    def _stage(self, search: Search, candidate_of, number):
        kind = ("load", "encode")[number]
        size = os.path.getsize(self.plan.model) if number else 0
        for n, point in enumerate(search):
            guess = self.clock.last(kind, size / ENCODE_SPEED)
            if n >= TRIALS[number] or not self.clock.fits(guess, SHARES[number]):
                break
            candidate = candidate_of(point)
            search.tell(point, self._worth(candidate, kind))

    def _worth(self, candidate, kind) -> float:
        codec = candidate.encoding and candidate.encoding["codec"]
        if codec in self._refused:
            return 0.0
        try:
            worth = self.figures(candidate, kind).worth(self.plan.objective)
        except (PycassError, TypeError) as error:  # a codec or an argument that this build does not have
            if isinstance(error, IOFailure):
                raise
            self.console.note(f"left out: {candidate}: {error}")
            self._refused |= {codec} - {None, self.rig.codec}
            return 0.0
        finally:
            encoded = [c.encoding for c, _ in self.found.values() if c.encoding is not None]
            self.rig.keep_only([self.best(encoded=True)[0].encoding] if encoded else [])
        return worth

    def _parts(self) -> Search:
        """Which parts of the model the draft may read wholly."""
        space = {p: (False, True) for p in PARTS if p != "output" or not self.rig.tied}
        none = dict.fromkeys(space, False)
        first = [none, *(none | {p: True} for p in space)]
        search = Search(space, first, lambda p: tuple(sorted(p.items())), self._optuna)
        search.tell(none, self.found[Candidate().key][1].worth(self.plan.objective))
        return search

    def _patterns(self, point) -> tuple[str, ...]:
        last = self.rig.n_layer - 1
        return tuple(t.replace("{last}", str(last)) for part, on in point.items() if on for t in PARTS[part])

    def _encodings(self) -> Search:
        """Other encodings, the likeliest first."""
        usual = {"codec": "nest", "hot": 16, "bias": True, "prune": 0.4, "mantissa_bits": 3, "half": True}
        changes = [{}, {"hot": 32}, {"hot": 64}, {"hot": 0, "bias": False}, {"hot": 0}, {"codec": "cass2"},
                   {"codec": "cass1"}, {"codec": "cass1", "prune": 0.5}, {"codec": "cass1", "prune": 0.0, "mantissa_bits": 2},
                   {"codec": "cass1", "prune": 0.3}]  # fmt: skip
        if self.plan.objective == "paper":
            changes = changes[5:] + changes[:5]
        return Search(ENCODINGS, [usual | c for c in changes], lambda p: json.dumps(encoding_of(p)), self._optuna)

    def finalists(self) -> list[Candidate]:
        """The default, and the best few; of other encodings the best one, whose file is there."""
        ranked = sorted(self.found.values(), key=lambda c: -c[1].worth(self.plan.objective))
        usable = [c for c, _ in ranked if c.encoding is None or c.encoding == self.best(encoded=True)[0].encoding]
        chosen = [Candidate()]
        for c in usable:
            if len(chosen) <= FINALISTS and c not in chosen:
                chosen.append(c)
        return chosen

    def _confirm(self):
        """The finalists, then the fastest with other draft lengths, each time beside the default."""
        some = self.finalists()
        self._decode(some)
        best = self.choice()
        lengths = [c for c in (replace(best, draft_max=n) for n in LENGTHS) if c not in (best, Candidate())]
        again = list(dict.fromkeys([Candidate(), best, *lengths]))
        if self.clock.fits(self.clock.last("confirm") * len(again) / len(some)):
            self._decode(again)

    def _decode(self, some):
        self.console.note(f"{len(some)} settings decode the development prompts in turn")
        self.confirmed = dict(zip(some, self.rig.confirm(some, self.clock, self.console.note), strict=True))

    # ---- the result ----

    def choice(self) -> Candidate:
        """By speed: the fastest that was confirmed last, if it beats the default clearly; by the paper's objective: its best,
        with the draft length that was fastest. Before anything was confirmed: the best so far."""
        best = self.best()[0]
        if not self.confirmed:
            return best
        if self.plan.objective == "paper":
            same = [c for c in self.confirmed if c.key == best.key]
            return max(same, key=self.confirmed.get, default=best)
        fastest = max(self.confirmed, key=self.confirmed.get)
        return fastest if self.confirmed[fastest] > GAIN * self.confirmed[Candidate()] else Candidate()

    def settings(self) -> Settings:
        """The choice, with its figures."""
        chosen = self.choice()
        f = self.found[chosen.key][1]
        measured = {
            "objective": self.plan.objective, "worth": round(f.worth(self.plan.objective), 4),
            "predicted_tps": round(f.tps(f.best_length), 3), "predicted_length": f.best_length,
            "acceptance": round(f.acceptance(GAMMA), 4), "acceptance_length": GAMMA,
            "draft_ms": round(f.draft_ms, 3), "plain_ms": round(f.verify_ms[1], 3),
            "draft_bits": round(f.draft_bits, 4), "candidates": len(self.found),
        }  # fmt: skip
        if chosen in self.confirmed:
            default = self.confirmed[Candidate()]
            measured |= {"tps": round(self.confirmed[chosen], 3), "default_tps": round(default, 3),
                         "over_default": round(self.confirmed[chosen] / default, 4)}  # fmt: skip
        measured["encode_anew"] = chosen.encoding is not None
        said = chosen.encoding or self.rig.said
        machine = study.machine() | {"kernel": self.rig.kernel, "threads": self.rig.threads}
        return Settings(
            **{k: v for k, v in said.items() if k != "pruned"}, draft_max=chosen.draft_max, draft_full=chosen.draft_full,
            measured=measured, machine=machine,
        )  # fmt: skip


def encoding_of(point: dict) -> dict:
    """convert's arguments of a point of ENCODINGS: those that mean something to its codec."""
    if point["codec"] == "nest":
        return {k: point[k] for k in ("codec", "hot", "bias")}
    names = ("codec", "prune", "mantissa_bits", "half") if point["codec"] == "cass1" else ("codec", "prune", "mantissa_bits")
    return {k: point[k] for k in names} | {"pruned": "coded"}


def run(plan: Plan, console) -> Settings:
    """Tunes, and writes the settings to plan.out. Ctrl-C writes the best so far, if there is any, and goes on up."""
    with CassFile(plan.model) as f:
        about = {
            "tensors": f"{sum(t.bf16_crc32c for t in f.tensors.values()) & 0xFFFFFFFF:08x}",
            "file_bytes": os.path.getsize(plan.model), "tokens": plan.tokens, "threads": plan.threads,
            "kernel": plan.kernel, "machine": study.machine(),
        }  # fmt: skip
    journal = Journal(plan.out + ".journal", about)
    rig = Rig(plan, console)
    tuner = Tuner(plan, rig, journal, console)
    if plan.optuna is None and not has_optuna():
        console.note("a plain grid is searched; pip install 'pycass[tune]' brings optuna, which searches on")
    if hasattr(os, "getloadavg") and os.getloadavg()[0] > 0.5 * (os.cpu_count() or 1):
        console.note("other programs keep the processors busy: what is measured now may not be what is fastest later")
    try:
        tuner.run()
        journal.remove()
    except (KeyboardInterrupt, SystemExit):
        if tuner.found:
            save(tuner.settings(), plan.out)
            console.note(f"{plan.out}: the best so far, not confirmed; a later run goes on")
        raise
    finally:
        console.status("")
        rig.close()
    chosen = tuner.settings()
    save(chosen, plan.out)
    return chosen


def as_text(s: Settings, model: str, out: str) -> str:
    """What was chosen, for people."""
    m, said = s.measured, s.convert_arguments()
    lines = [f"{out}: " + ", ".join(f"{k} {v}" for k, v in said.items()) + f"; drafts of up to {s.draft_max} tokens"
             + (f"; the draft reads {', '.join(s.draft_full)} wholly" if s.draft_full else "")]  # fmt: skip
    if "tps" in m:
        lines.append(f"{m['tps']:.2f} tokens/s, {m['over_default']:.2f} times the default's {m['default_tps']:.2f}; "
                     f"{m['draft_bits']:.2f} draft bits per weight")  # fmt: skip
    if m.get("encode_anew"):
        lines.append(f"encode anew:  pycass convert {model} -o NEW.cass --settings {out}")
        model = "NEW.cass"
    return "\n".join([*lines, f"use:          pycass run {model} --settings {out}"])
