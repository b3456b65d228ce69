"""Sampling: the distribution of tokens with every option, plain and under speculation, against numpy; and what is
refused. Seeds are fixed, so a test that has passed passes again: the thresholds are for whoever changes the sampler."""

import math

import numpy as np
import pytest
import tiny_models as tiny
from running import seen

from pycass.errors import InvalidArgument

NAME = "qwen3"
PROMPT = tiny.ids(NAME, 9)


def survivors(logits, top_k=0, top_p=1.0, min_p=0.0):
    """Tokens that may be chosen, best first: top-k, top-p and min-p in turn, each at temperature 1 of what is left."""
    x = logits.astype(np.float64)
    order = np.lexsort((np.arange(len(x)), -x))
    if top_k:
        order = order[:top_k]
    p = np.exp(x[order] - x.max())
    if top_p < 1:
        before = np.cumsum(p) - p
        order = order[(before < top_p * p.sum()) | (np.arange(len(p)) == 0)]
    return order[np.exp(x[order] - x.max()) >= min_p]


def distribution(logits, temperature=1.0, **filters):
    """{token: probability}."""
    tokens = survivors(logits, **filters)
    z = logits[tokens].astype(np.float64) / temperature
    p = np.exp(z - z.max())
    return dict(zip(tokens.tolist(), (p / p.sum()).tolist()))


def chi_square(counts, expected):
    """(statistic, degrees of freedom) after pooling what is expected fewer than 8 times."""
    pairs = [(counts.get(k, 0), e) for k, e in expected.items() if e >= 8]
    rest = sum(e for e in expected.values() if e < 8)
    if rest >= 8:
        pairs.append((sum(counts.get(k, 0) for k, e in expected.items() if e < 8), rest))
    return sum((o - e) ** 2 / e for o, e in pairs), len(pairs) - 1


def assert_follows(counts, probabilities):
    """Counts of independent draws come from these probabilities: 4.5 standard deviations (of chi-square, by Wilson and
    Hilferty) is passed by 3 of a million samples of the right distribution."""
    n = sum(counts.values())
    assert set(counts) <= set(probabilities), "a token that no filter lets through"
    statistic, freedom = chi_square(counts, {k: n * p for k, p in probabilities.items()})
    assert freedom >= 1
    z = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    assert z < 4.5, f"chi-square {statistic:.1f} at {freedom} degrees of freedom"


def count(items):
    values, counts = np.unique(list(items), return_counts=True)
    return dict(zip(values.tolist(), counts.tolist()))


@pytest.fixture(scope="module")
def model(tiny_cass):
    from pycass import Model

    with Model.load(tiny_cass(NAME), threads=1, n_ctx=256) as m:
        yield m


FILTERS = {
    "none": {},
    "top_k": {"top_k": 7},
    "top_k larger than the vocabulary": {"top_k": 100_000},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.1},
    "top_k, top_p": {"top_k": 20, "top_p": 0.7},
    "top_k, min_p": {"top_k": 12, "min_p": 0.05},
    "all": {"top_k": 30, "top_p": 0.95, "min_p": 0.03},
}


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("filters", FILTERS.values(), ids=FILTERS)
def test_first_token(temperature, filters, model):
    logits = model.logits(PROMPT)[-1, : model.config.n_token]
    tokens = (
        model.generate(PROMPT, 1, temperature=temperature, seed=seed, ignore_eos=True, **filters).token_ids[0]
        for seed in range(8000)
    )
    assert_follows(count(tokens), distribution(logits, temperature, **filters))


SAME = {20: 100.0, 70: 100.0, 120: 100.0}  # always the same three: their noise must differ from place to place


def joint(model, length, temperature, logit_bias=(), **filters):
    """{tokens: probability} of all continuations of that length."""
    out = {(): 1.0}
    for _ in range(length):
        longer = {}
        for tokens, p in out.items():
            logits = model.logits([*PROMPT, *tokens])[-1, : model.config.n_token].copy()
            for t in logit_bias:
                logits[t] += np.float32(logit_bias[t])
            longer |= {(*tokens, t): p * q for t, q in distribution(logits, temperature, **filters).items()}
        out = longer
    return out


@pytest.mark.parametrize("spec", ["off", "on"])
@pytest.mark.parametrize(
    "length,options",
    [
        (3, {"top_k": 4, "temperature": 1.5}),
        (4, {"top_k": 5, "top_p": 0.8, "temperature": 2.0}),
        (4, {"logit_bias": SAME, "top_k": 3, "temperature": 3.0}),
    ],
    ids=["top_k", "top_p", "same tokens"],
)
def test_continuations(length, options, spec, model):
    """Several tokens at once: each follows its distribution given those before it, under speculation too."""
    expected = joint(model, length, **options)
    assert len(expected) > 40
    found, accepted, drafted = {}, 0, 0
    for seed in range(3000):
        c = model.generate(
            PROMPT, length, seed=seed, spec=spec, draft_max=length - 1, draft_fixed=True, ignore_eos=True, **options
        )
        found[tuple(c.token_ids)] = found.get(tuple(c.token_ids), 0) + 1
        accepted, drafted = accepted + c.spec.accepted, drafted + c.spec.drafted
    assert_follows(found, expected)
    assert drafted == 0 if spec == "off" else 0.2 * drafted < accepted < 0.95 * drafted


def test_positions_are_independent(model):
    """One seed, many positions: what is left of the noise after the model must look like fresh draws. Each token's
    place in the cumulative distribution at its position is uniform, and unrelated to the place before it."""
    options = {"temperature": 3.0, "logit_bias": SAME, "spec": "on"}
    ids = model.generate(PROMPT, 240, seed=11, **options).token_ids
    rows = model.logits(PROMPT + ids)[len(PROMPT) - 1 : -1, list(SAME)].astype(np.float64) / 3.0
    ids = [list(SAME).index(i) for i in ids]
    p = np.exp(rows - rows.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    n = np.arange(len(ids))
    place = np.cumsum(p, axis=1)[n, ids] - p[n, ids] * np.random.default_rng(0).random(len(ids))
    assert_follows(count((place * 8).astype(int)), dict.fromkeys(range(8), 1 / 8))
    assert abs(np.corrcoef(place[1:], place[:-1])[0, 1]) < 4 / math.sqrt(len(ids))


def test_chi_square_can_fail(model):
    """The test itself: a slightly wrong temperature, a filter that is off by one, a missing token."""
    logits = model.logits(PROMPT)[-1, : model.config.n_token]
    right = distribution(logits, 1.0, top_k=20)
    for wrong in (distribution(logits, 1.15, top_k=20), distribution(logits, 1.0, top_k=8)):
        draws = np.random.default_rng(1).choice(list(wrong), 5000, p=list(wrong.values()))
        with pytest.raises(AssertionError):
            assert_follows(count(draws), right)
    with pytest.raises(AssertionError):
        assert_follows({list(right)[0]: 4999, 299: 1}, {list(right)[0]: 1.0})


@pytest.mark.parametrize("spec", ["off", "on", "auto"])
def test_a_seed_repeats(spec, model):
    options = {"temperature": 1.0, "top_p": 0.95, "spec": spec, "ignore_eos": True, "logprobs": True}
    first = seen(model.generate(PROMPT, 80, seed=5, **options))
    assert all(seen(model.generate(PROMPT, 80, seed=5, **options)) == first for _ in range(3))
    others = {tuple(model.generate(PROMPT, 80, seed=s, **options).token_ids) for s in range(8)}
    assert len(others) == 8


def test_without_a_seed_each_run_differs(model):
    runs = {tuple(model.generate(PROMPT, 20, temperature=1.5, ignore_eos=True).token_ids) for _ in range(4)}
    assert len(runs) == 4


def test_every_bit_of_a_seed_counts(model):
    """64 bits of it; a larger one is refused (test_model_api), not wrapped to another one."""
    ids = [model.generate(PROMPT, 20, temperature=1.5, seed=s).token_ids for s in (0, 1, 2**32, 2**63, 2**64 - 1)]
    assert all(a != b for i, a in enumerate(ids) for b in ids[:i])


@pytest.mark.parametrize("options", [{"top_k": 1}, {"top_p": 0.0}, {"min_p": 1.0}, {"temperature": 1e-6}, {}])
def test_what_is_greedy(options, model):
    greedy = model.generate(PROMPT, 30, temperature=0, ignore_eos=True).token_ids
    if options:
        options = {"temperature": 1.0} | options
    assert model.generate(PROMPT, 30, ignore_eos=True, seed=3, **options).token_ids == greedy


# ---- penalties and biases, against numpy ----


def penalized(logits, history, repeat, last_n, presence, frequency, bias):
    x = logits.astype(np.float64).copy()
    for token, value in bias.items():
        x[token] += value
    seen_tokens = history if last_n < 0 else history[len(history) - min(last_n, len(history)) :]
    for token, n in count(seen_tokens).items() if seen_tokens else ():
        x[token] = x[token] / repeat if x[token] > 0 else x[token] * repeat
        x[token] -= n * frequency + presence
    return x


@pytest.mark.parametrize("repeat,last_n", [(1.0, 64), (1.8, 64), (1.8, 12), (1.8, 0), (1.8, -1), (0.7, 10)])
@pytest.mark.parametrize("presence,frequency", [(0.0, 0.0), (1.5, 0.0), (0.0, 0.8), (0.5, -0.3)])
def test_penalties_and_bias(repeat, last_n, presence, frequency, model):
    bias = {7: 5.0, 8: -2.0, 11: 1.0}
    c = model.generate(
        PROMPT, 40, repeat_penalty=repeat, repeat_last_n=last_n, presence_penalty=presence,
        frequency_penalty=frequency, logit_bias=bias, ignore_eos=True, spec="on",
    )  # fmt: skip
    history = list(PROMPT)
    for token, row in zip(c.token_ids, model.logits(PROMPT + c.token_ids)[len(PROMPT) - 1 :]):
        x = penalized(row[: model.config.n_token], history, repeat, last_n, presence, frequency, bias)
        assert x[token] >= x.max() - 1e-4
        history.append(token)


def test_penalties_change_the_tokens(model):
    """What the test above rests on."""
    plain = model.generate(PROMPT, 40, ignore_eos=True).token_ids
    for options in (
        {"repeat_penalty": 1.8}, {"repeat_penalty": 1.8, "repeat_last_n": 12}, {"presence_penalty": 1.5},
        {"frequency_penalty": 0.8}, {"logit_bias": {7: 5.0}},
    ):  # fmt: skip
        assert model.generate(PROMPT, 40, ignore_eos=True, **options).token_ids != plain


@pytest.mark.parametrize("spec", ["off", "on"])
def test_bias_forces_and_bans(spec, model):
    options = {"ignore_eos": True, "spec": spec}
    assert model.generate(PROMPT, 12, logit_bias={42: 1e4}, **options).token_ids == [42] * 12
    plain = model.generate(PROMPT, 12, **options).token_ids
    banned = dict.fromkeys(plain, -math.inf)
    for temperature in (0.0, 1.0):
        ids = model.generate(PROMPT, 60, logit_bias=banned, temperature=temperature, seed=1, **options).token_ids
        assert not set(ids) & set(plain)


@pytest.mark.parametrize("filters", FILTERS.values(), ids=FILTERS)
def test_bias_comes_before_filters(filters, model):
    logits = model.logits(PROMPT)[-1, : model.config.n_token].copy()
    bias = {int(t): 6.0 for t in logits.argsort()[:5]} | {3: -1.0}
    options = {"temperature": 1.2, "logit_bias": bias, "ignore_eos": True} | filters
    tokens = (model.generate(PROMPT, 1, seed=seed, **options).token_ids[0] for seed in range(1500))
    for token, value in bias.items():
        logits[token] += np.float32(value)
    assert_follows(count(tokens), distribution(logits, 1.2, **filters))


# ---- what is refused ----

NAN, INF = math.nan, math.inf
REFUSED = [
    {"temperature": NAN}, {"temperature": -1}, {"temperature": INF}, {"temperature": -0.01}, {"temperature": 1e39},
    {"temperature": "hot"}, {"temperature": None},
    {"top_k": -1}, {"top_k": 2**31}, {"top_k": -(2**31) - 1}, {"top_k": 1.5}, {"top_k": NAN}, {"top_k": None},
    {"top_p": NAN}, {"top_p": -0.1}, {"top_p": 1.1}, {"top_p": INF}, {"top_p": "most"},
    {"min_p": NAN}, {"min_p": -0.1}, {"min_p": 1.5},
    {"repeat_penalty": 0}, {"repeat_penalty": -1}, {"repeat_penalty": NAN}, {"repeat_penalty": INF},
    {"repeat_last_n": -2}, {"repeat_last_n": 2**31}, {"repeat_last_n": 0.5},
    {"presence_penalty": NAN}, {"presence_penalty": INF}, {"frequency_penalty": NAN}, {"frequency_penalty": -INF},
    {"logit_bias": {-1: 1.0}}, {"logit_bias": {300: 1.0}}, {"logit_bias": {2**31: 1.0}}, {"logit_bias": {3: NAN}},
    {"logit_bias": {3: "x"}}, {"logit_bias": {"3": 1.0}}, {"logit_bias": [3]},
    {"draft_max": 0}, {"draft_max": 17}, {"draft_max": -1}, {"draft_max": 2**31}, {"draft_max": 2.5},
    {"spec": "maybe"}, {"spec": None}, {"spec": True},
    {"seed": "x"}, {"seed": 1.5},
    {"max_tokens": -2}, {"max_tokens": 1.5}, {"max_tokens": NAN}, {"max_tokens": "all"},
    {"stop": ""}, {"stop": [""]}, {"stop": [1]}, {"stop": 3},
]  # fmt: skip


@pytest.mark.parametrize("options", REFUSED, ids=repr)
def test_silly_numbers_are_refused_in_words(options, model):
    before = seen(model.generate(PROMPT, 8, logprobs=True))
    with pytest.raises(InvalidArgument) as error:
        model.generate(PROMPT, **options)
    assert next(iter(options)) in str(error.value) or "integer" in str(error.value) or len(str(error.value)) > 15
    assert seen(model.generate(PROMPT, 8, logprobs=True)) == before, "the session goes on"


@pytest.mark.parametrize(
    "prompt", ["", [], [-1], [300], [2**31], [2**40], [-(2**40)], [1.5], ["a"], [None], [1, 2, 10**6]], ids=repr
)
def test_silly_prompts_are_refused_in_words(prompt, model):
    before = seen(model.generate(PROMPT, 8, logprobs=True))
    with pytest.raises(InvalidArgument):
        model.generate(prompt, 4)
    with pytest.raises(InvalidArgument):
        model.logits(prompt)
    with pytest.raises(InvalidArgument):
        model.draft_logits(prompt)
    assert seen(model.generate(PROMPT, 8, logprobs=True)) == before


@pytest.mark.parametrize(
    "options",
    [{"top_k": 0}, {"top_k": 2**31 - 1}, {"top_p": 0}, {"top_p": 1}, {"min_p": 0}, {"temperature": 0},
     {"temperature": 1e-30}, {"temperature": 1e6}, {"repeat_last_n": -1}, {"repeat_last_n": 2**31 - 1},
     {"presence_penalty": -2}, {"max_tokens": 2**31}, {"max_tokens": 2**70}, {"max_tokens": np.int64(5)},
     {"top_k": np.int32(4)}, {"temperature": np.float32(0.7)}, {"logit_bias": {3: -math.inf}}, {"logit_bias": None}],
    ids=repr,
)  # fmt: skip
def test_extreme_numbers_that_make_sense_work(options, model):
    options = {"max_tokens": 16, "temperature": 0.8, "seed": 1, "ignore_eos": True} | options
    c = model.generate(PROMPT, **options)
    assert len(c.token_ids) == min(options["max_tokens"], model.n_ctx + 1 - len(PROMPT))
