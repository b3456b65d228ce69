"""Speculation, batches, threads and kernel sets change neither a token nor a bit of the logits behind it."""

import numpy as np
import pytest
import tiny_models as tiny
from running import KERNELS, each_kernel, each_model, seen

from pycass import Model
from pycass._pycass import ffi, lib

GREEDY = {}
SAMPLED = {"temperature": 0.9, "top_k": 40, "top_p": 0.95, "seed": 7}
HOT = {"temperature": 1.4, "min_p": 0.02, "seed": 2**63 + 5}
PENALIZED = {"repeat_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3, "logit_bias": {5: 2.5, 9: -4.0}}
MODES = {"greedy": GREEDY, "sampled": SAMPLED, "hot": HOT, "penalized": PENALIZED, "both": SAMPLED | PENALIZED}
each_mode = pytest.mark.parametrize("mode", MODES)
N = 60


def run(model, prompt, **options):
    """A generation from an empty cache."""
    model.reset()
    return model.generate(prompt, N, ignore_eos=True, logprobs=True, **options)


def drafted(completions):
    """Some drafts were taken and some were not, so that both ways have been gone."""
    all_drafted, accepted = (sum(getattr(c.spec, key) for c in completions) for key in ("drafted", "accepted"))
    return 0 < accepted < all_drafted


@each_model
@each_mode
@pytest.mark.parametrize("codec", ["nest", "hot"])
def test_speculation_changes_nothing(name, mode, codec, tiny_model):
    model, prompt, options = tiny_model(name, codec), tiny.ids(name, 9), MODES[mode]
    plain = run(model, prompt, spec="off", **options)
    assert len(plain.token_ids) == len(plain.logprobs) == N and plain.spec.drafted == 0
    fixed = [run(model, prompt, spec="on", draft_max=n, draft_fixed=True, **options) for n in range(1, 17)]
    free = [run(model, prompt, spec=s, draft_max=n, **options) for s in ("on", "auto") for n in (1, 4, 16)]
    for c in fixed + free:
        assert seen(c) == seen(plain)
    assert drafted(fixed) and drafted(free)


@each_mode
def test_fixed_drafts_are_as_long_as_asked(mode, tiny_model):
    model, prompt = tiny_model("llama3_rope"), tiny.ids("llama3_rope", 9)
    for n in (1, 5, 16):
        c = run(model, prompt, spec="on", draft_max=n, draft_fixed=True, **MODES[mode])
        # the last steps have less room; the first token needs no step
        assert n * (c.spec.steps - n) <= c.spec.drafted <= n * c.spec.steps
        assert len(c.token_ids) == 1 + c.spec.steps + c.spec.accepted
        assert c.spec.mean_len == pytest.approx((N - 1) / c.spec.steps)
        assert c.spec.acceptance == pytest.approx(c.spec.accepted / c.spec.drafted)


@each_model
@each_kernel
def test_kernel_sets_agree(name, kernel, tiny_model):
    model, prompt = tiny_model(name, kernel=kernel), tiny.ids(name, 9)
    for options in (GREEDY, SAMPLED):
        plain = run(model, prompt, spec="off", **options)
        for n in (1, 3, 16):
            assert seen(run(model, prompt, spec="on", draft_max=n, draft_fixed=True, **options)) == seen(plain)
        if kernel != "amx":  # which has its own order of sums
            assert seen(plain) == seen(run(tiny_model(name, kernel="scalar"), prompt, spec="off", **options))


@pytest.mark.parametrize("name", ["llama_untied", "qwen2", "qwen3_untied"])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_change_nothing(name, threads, tiny_model):
    one, prompt = tiny_model(name), tiny.ids(name, 40)
    plain = {mode: seen(run(one, prompt, spec="off", **MODES[mode])) for mode in ("greedy", "both")}
    for batch_size, spec, mode in ((1, "on", "both"), (7, "on", "greedy"), (512, "off", "greedy"), (512, "on", "both")):
        many = tiny_model(name, threads=threads, threads_batch=4 - threads, batch_size=batch_size)
        assert many.threads == threads
        assert seen(run(many, prompt, spec=spec, draft_max=5, draft_fixed=True, **MODES[mode])) == plain[mode]


@pytest.mark.parametrize("codec", ["nest", "raw"])
@each_kernel
def test_batches_of_a_long_prompt_change_nothing(codec, kernel, tiny_model):
    """Prompts longer than a batch, through both ways: all logits, and those of the last token."""
    name, prompt = "qwen3_untied", tiny.ids("qwen3_untied", 530, "long prompt")
    models = [tiny_model(name, codec, kernel=kernel, batch_size=b) for b in (512, 1, 7)]
    logits = models[0].logits(prompt).view(np.uint32)
    completion = seen(run(models[0], prompt))
    for model in models[1:]:
        assert np.array_equal(model.logits(prompt).view(np.uint32), logits)
        assert seen(run(model, prompt)) == completion


def eval_pieces(model, ids, cuts):
    """Logits of ids through the C interface, in pieces of the sizes `cuts` in turn."""
    rows, at, turn = [], 0, 0
    with model._use() as session:
        assert lib.pycass_session_trim(session, 0) == lib.PYCASS_OK
        while at < len(ids):
            piece = ids[at : at + cuts[turn % len(cuts)]]
            out = np.empty((len(piece), model.config.n_vocab), np.float32)
            pointer = ffi.cast("float *", ffi.from_buffer(out))
            assert lib.pycass_session_eval(session, ffi.new("int32_t[]", piece), len(piece), pointer) == lib.PYCASS_OK
            rows.append(out)
            at, turn = at + len(piece), turn + 1
    return np.concatenate(rows)


@each_model
@each_kernel
def test_pieces_of_a_prompt_give_equal_logits(name, kernel, tiny_model):
    model, ids = tiny_model(name, kernel=kernel), tiny.ids(name, 75)
    whole = model.logits(ids).view(np.uint32)
    for cuts in ([1], [2, 3], [7], [16, 17], [31, 1, 33], [75]):
        assert np.array_equal(eval_pieces(model, ids, cuts).view(np.uint32), whole)


@each_model
def test_recorded_logits_are_those_of_an_evaluation(name, tiny_model):
    """The checksum and the log probabilities under speculation, computed again from Model.logits."""
    model, prompt = tiny_model(name), tiny.ids(name, 9)
    c = run(model, prompt, spec="on", draft_max=6, draft_fixed=True, **SAMPLED)
    rows = model.logits(prompt + c.token_ids)[len(prompt) - 1 : -1]
    chain = 0
    for row in rows:
        crc = lib.pycass_crc32c(0, ffi.from_buffer(np.ascontiguousarray(row)), row.nbytes)
        chain = lib.pycass_crc32c(chain, crc.to_bytes(4, "little"), 4)
    assert c.logits_hash == f"{chain:08x}"
    known = rows[:, : model.config.n_token].astype(np.float64)
    known -= known.max(axis=1, keepdims=True)
    expected = known - np.log(np.exp(known).sum(axis=1, keepdims=True))
    assert np.allclose(c.logprobs, expected[np.arange(N), c.token_ids], atol=2e-5)


@each_model
def test_greedy_tokens_are_the_largest_logits(name, tiny_model):
    model, prompt = tiny_model(name), tiny.ids(name, 9)
    c = run(model, prompt, spec="on", draft_max=6, draft_fixed=True)
    rows = model.logits(prompt + c.token_ids)[len(prompt) - 1 : -1, : model.config.n_token]
    assert c.token_ids == rows.argmax(axis=1).tolist()


@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_the_end_of_the_context(options, tiny_model):
    """Drafts stop at the end of the cache; every length of prompt meets it differently."""
    model = tiny_model("mistral", n_ctx=48)
    for n in range(20, 49):
        prompt = tiny.ids("mistral", n)
        plain, fast = (
            model.generate(prompt, None, ignore_eos=True, logprobs=True, spec=s, draft_fixed=True, **options)
            for s in ("off", "on")
        )
        assert seen(plain) == seen(fast) and len(plain.token_ids) == 49 - n and plain.finish_reason == "length"


@each_mode
def test_any_limit_cuts_the_same_tokens(mode, tiny_model):
    model, prompt = tiny_model("qwen3"), tiny.ids("qwen3", 9)
    whole = run(model, prompt, spec="off", **MODES[mode])
    for limit in range(20):
        c = model.generate(prompt, limit, ignore_eos=True, logprobs=True, spec="on", draft_fixed=True, **MODES[mode])
        assert c.token_ids == whole.token_ids[:limit] and c.logprobs == whole.logprobs[:limit]


def test_reading_instead_of_mapping_changes_nothing(tiny_model):
    prompt = tiny.ids("llama_linear", 9)
    mapped, read = tiny_model("llama_linear"), tiny_model("llama_linear", mmap=False)
    assert seen(run(mapped, prompt)) == seen(run(read, prompt))


def test_logits_hash_tells_models_apart(tiny_model):
    """What the comparisons above rest on: another model, another prompt or another token gives another hash."""
    hashes = set()
    for name in tiny.SPECS:
        model = tiny_model(name)
        hashes |= {run(model, tiny.ids(name, n), **SAMPLED).logits_hash for n in (8, 9)}
        hashes.add(run(model, tiny.ids(name, 9), **HOT).logits_hash)
    assert len(hashes) == 3 * len(tiny.SPECS)


# ---- look-ups ----

FEW = {5: 60.0, 9: 60.0, 14: 58.0}  # text of a few tokens: there is always something to look up, right or wrong
REPEATS = {"greedy": {"logit_bias": FEW}, "sampled": {"logit_bias": FEW, "temperature": 8.0, "seed": 7}, "free": SAMPLED}


def lookups(completions):
    """Some look-ups were right and some were not."""
    looked_up, accepted = (sum(getattr(c.spec, k) for c in completions) for k in ("ngram_drafted", "ngram_accepted"))
    for s in (c.spec for c in completions):
        assert s.ngram_accepted <= s.accepted <= s.drafted and s.ngram_drafted <= s.drafted
    return 0 < accepted < looked_up


@each_model
@pytest.mark.parametrize("mode", REPEATS)
@pytest.mark.parametrize("codec", ["nest", "raw"])
def test_lookups_change_nothing(name, mode, codec, tiny_model):
    model, prompt, options = tiny_model(name, codec), tiny.ids(name, 9) * 3, REPEATS[mode]
    plain = run(model, prompt, spec="off", **options)
    found = [
        run(model, prompt, spec=s, draft_max=n, draft_fixed=fixed, spec_ngram=True, **options)
        for n in (1, 4, 16)
        for s, fixed in (("on", True), ("on", False), ("auto", False))
    ]
    without = run(model, prompt, spec="on", spec_ngram=False, **options)
    for c in [*found, without]:
        assert seen(c) == seen(plain)
    assert plain.spec.drafted == without.spec.ngram_drafted == 0
    assert mode != "sampled" or lookups(found)
    assert mode != "greedy" or sum(c.spec.ngram_accepted for c in found) > 0
    assert codec == "nest" or all(c.spec.drafted == c.spec.ngram_drafted for c in [*found, without])


@pytest.mark.parametrize("ngram", [True, False])
def test_an_end_within_a_step_ends_the_same(ngram, tiny_model):
    """End tokens and stop strings among the guesses; the next generation goes on from what is left of the cache."""
    model, prompt = tiny_model("qwen3"), tiny.ids("qwen3", 9) * 3
    (end,) = model.tokenizer.eos_token_ids
    options = {"logit_bias": FEW | {end: 52.0}, "temperature": 8.0, "draft_fixed": True, "spec_ngram": ngram}
    lengths = set()
    for seed in range(20):
        stop = model.detokenize([5, 14]) if seed % 2 else None
        plain, fast = (
            run_to_end(model, prompt, spec=s, seed=seed, stop=stop, **options) for s in ("off", "on")
        )
        assert [seen(c) for c in fast] == [seen(c) for c in plain]
        lengths |= {len(c.token_ids) for c in plain if c.finish_reason == "stop"}
    assert len(lengths) > 5


def run_to_end(model, prompt, **options):
    """A generation from an empty cache, and one that continues it."""
    model.reset()
    first = model.generate(prompt, N, logprobs=True, **options)
    return first, model.generate(prompt + first.token_ids + [7], N, logprobs=True, **options)


# ---- SmolLM2 ----


@pytest.fixture(scope="module")
def smollm2(smollm2_cass):
    with Model.load(smollm2_cass, n_ctx=512, threads=1) as model:
        yield model


TEXT = "def fibonacci(n):\n    if n < 2:\n        return n\n    return"


@pytest.fixture(scope="module")
def smollm2_plain(smollm2):
    """{mode: what plain decoding of TEXT sees}."""
    return {mode: seen(short(smollm2, spec="off", **MODES[mode])) for mode in ("greedy", "both")}


def short(model, **options):
    model.reset()
    return model.generate(TEXT, 24, ignore_eos=True, logprobs=True, **options)


@pytest.mark.parametrize("mode", ["greedy", "both"])
@pytest.mark.parametrize("draft", [1, 2, 5, 16, "auto"])
def test_smollm2_speculation_changes_nothing(mode, draft, smollm2, smollm2_plain):
    how = {"spec": "auto"} if draft == "auto" else {"spec": "on", "draft_max": draft, "draft_fixed": True}
    c = short(smollm2, **how, **MODES[mode])
    assert seen(c) == smollm2_plain[mode]
    assert draft == "auto" or c.spec.accepted > 0


@pytest.mark.parametrize("options", [GREEDY, {"temperature": 0.3, "seed": 7}], ids=["greedy", "sampled"])
def test_smollm2_copies_by_lookups(options, smollm2):
    line = "The quick brown fox jumps over the lazy dog near the old stone bridge.\n"
    plain, fast = (copy(smollm2, line * 4, spec=s, **options) for s in ("off", "on"))
    assert seen(fast) == seen(plain)
    assert fast.spec.ngram_accepted > 20 and fast.spec.mean_len > 5


def copy(model, text, **options):
    model.reset()
    return model.generate(text, 48, ignore_eos=True, logprobs=True, **options)


@pytest.mark.parametrize("threads,batch_size", [(1, 1), (2, 7), (2, 512)])
def test_smollm2_threads_and_batches_change_nothing(threads, batch_size, smollm2_cass, smollm2_plain):
    with Model.load(smollm2_cass, n_ctx=512, threads=threads, batch_size=batch_size) as model:
        assert seen(short(model, spec="on")) == smollm2_plain["greedy"]


def test_smollm2_kernel_sets_agree(smollm2_cass):
    """A few tokens: the scalar set takes its time."""
    found = {}
    for kernel in KERNELS:
        with Model.load(smollm2_cass, n_ctx=512, threads=2, kernel=kernel) as model:
            prompt = model.tokenize("def f(")
            plain = model.generate(prompt, 3, logprobs=True, spec="off")
            model.reset()
            fast = model.generate(prompt, 3, logprobs=True, spec="on", draft_max=1, draft_fixed=True)
            assert seen(plain) == seen(fast) and fast.spec.drafted > 0
            found[kernel] = seen(plain)
    assert all(found[k] == found["scalar"] for k in KERNELS if k != "amx")
