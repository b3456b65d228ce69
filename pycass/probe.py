"""Measuring a model's draft: how often it is right, and what its passes and the target's cost. For study and tune."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .bench import Count, generate, prompt_ids

# ---- how often the draft is right -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Text:
    """A prompt and the model's own greedy answer, as token ids."""

    prompt: list[int]
    answer: list[int]


def answers(model, prompts: Sequence[str], n: int, tick=lambda: None) -> list[Text]:
    """The model's greedy answers of n tokens, past end tokens, through its chat template. tick() after each."""
    found = []
    for text in prompts:
        ids = prompt_ids(model, text)
        model.reset()
        found.append(Text(ids, list(model.generate(ids, max_tokens=n, ignore_eos=True, spec="auto").token_ids)))
        tick()
    return found


@dataclass(frozen=True)
class Agreement:
    """Over `positions` tokens of answers: how often the draft's most likely token is the target's; the mean of
    sum(min(p, q)), the acceptance of rejection sampling at temperature 1; and how often the target's is the answer's
    (1 unless the file changes the model)."""

    positions: int
    greedy: float
    sampled: float
    target: float


def agreement(model, texts: Sequence[Text], limit: float = float("inf")) -> Agreement:
    """Teacher-forced: at every position both see the same tokens, the texts'. No text is begun after `limit` seconds, but
    two are measured at least."""
    begin = time.monotonic()
    total, n_token = np.zeros(4), model.config.n_token  # the rows behind are padding, which is never sampled
    for n, t in enumerate(texts):
        if n >= 2 and time.monotonic() - begin > limit:
            break
        ids, start = (t.prompt + t.answer)[:-1], len(t.prompt) - 1
        target = model.logits(ids, start)[:, :n_token]
        draft = model.draft_logits(ids, start)[:, :n_token]
        best = target.argmax(1)
        overlap = np.minimum(_softmax(target), _softmax(draft)).sum()
        total += len(t.answer), (best == draft.argmax(1)).sum(), overlap, (best == np.asarray(t.answer)).sum()
    n = int(total[0])
    return Agreement(n, *(float(x) / n for x in total[1:]))


def _softmax(logits):
    x = np.exp(logits - logits.max(axis=1, keepdims=True))
    return x / x.sum(axis=1, keepdims=True)


# ---- what steps bring and cost --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Steps:
    """Steps of a fixed draft length: prefixes[n] of them accepted n tokens. Milliseconds of a draft pass and of a
    verification of length + 1 tokens."""

    prefixes: tuple[int, ...]
    draft_ms: float
    verify_ms: float

    @property
    def length(self) -> int:
        """Tokens drafted in a step."""
        return len(self.prefixes) - 1

def together(some: Sequence[Steps]) -> Steps:
    """Steps of several texts, of one length: their prefixes added up, and the shortest of their times, since whatever
    disturbs only adds to them."""
    prefixes = tuple(sum(column) for column in zip(*(s.prefixes for s in some), strict=True))
    return Steps(prefixes, min(s.draft_ms for s in some), min(s.verify_ms for s in some))


def steps(model, prompt: Sequence[int], n: int, length: int) -> Steps:
    """Generates n tokens greedily with drafts of exactly `length` tokens and no look-ups. A step that had no room for
    its draft, the last one, is not counted among the prefixes, and the first token is the prompt's pass's."""
    model.reset()
    stream = model.stream(
        list(prompt), n, ignore_eos=True, spec="on", draft_max=length, draft_fixed=True, spec_ngram=False
    )
    sizes = [len(delta.token_ids) for delta in stream if delta.token_ids]
    prefixes, left = [0] * (length + 1), n - 1
    s = model.stats()
    for size in sizes[1:] if s["drafted"] else []:
        if left > length:  # the whole draft fitted
            prefixes[size - 1] += 1
        left -= size
    return Steps(
        tuple(prefixes), s["draft_ms"] / s["drafted"] if s["drafted"] else 0.0, s["verify_ms"] / max(1, s["steps"])
    )


def pass_ms(model, ids: Sequence[int], n: int, repeats: int = 3) -> float:
    """Milliseconds of a target pass over the first n of ids, with logits of each: the fastest of some."""

    def once():
        begin = time.perf_counter()
        model.logits(ids[:n])
        return 1000 * (time.perf_counter() - begin)

    return min(once() for _ in range(repeats))


@dataclass(frozen=True)
class Verify:
    """Milliseconds of a target pass over n tokens, measured for some n; between them linear, beyond them the nearest
    measured slope."""

    ms: dict[int, float]

    def __call__(self, n: int) -> float:
        known = sorted(self.ms)
        if len(known) == 1:
            return self.ms[known[0]]
        high = next((k for k in known[1:] if k >= n), known[-1])
        low = known[known.index(high) - 1]
        slope = (self.ms[high] - self.ms[low]) / (high - low)
        return max(self.ms[low] + slope * (n - low), 0.0)


def decode(model, texts: Sequence[Sequence[int]], n: int, **options):
    """A bench.Count of n tokens behind each prompt, greedily, each from an empty cache."""
    total = Count()
    for ids in texts:
        model.reset()
        total += generate(model, list(ids), n, temperature=0.0, **options)
    return total
