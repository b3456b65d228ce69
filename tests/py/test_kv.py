"""The encoded KV cache: the same output as the plain one, whatever is trimmed, saved or restored meanwhile."""

import numpy as np
import pytest
import tiny_models as tiny
from running import each_kernel, each_model, seen

from pycass import Model
from pycass._pycass import ffi, lib
from pycass.errors import InvalidArgument, PycassError, check

KINDS = ("nest", "cass1", "cass2")
LOSSLESS = ("nest", "cass1")


def text(name, n, seed=3):
    return np.random.default_rng(seed).integers(0, tiny.SPECS[name].n_token - 2, n).tolist()


def run(model, prompt, n=40, **options):
    model.reset()
    return seen(model.generate(prompt, n, ignore_eos=True, logprobs=True, **options))


@each_model
@pytest.mark.parametrize("kv", LOSSLESS)
def test_output_is_that_of_a_plain_cache(name, kv, tiny_model):
    prompt = text(name, 150)
    plain = run(tiny_model(name, kv="raw"), prompt, 120)
    for threads in (1, 3):
        model = tiny_model(name, kv=kv, threads=threads)
        assert run(model, prompt, 120, spec="off") == plain
        assert model.kv_stats()["encoded"] == 192  # 64 at a time, and the newest 32 at least stay
        for options in ({"draft_max": 3, "draft_fixed": True}, {"draft_max": 16}):
            assert run(model, prompt, 120, spec="on", **options) == plain


@each_kernel
@pytest.mark.parametrize("kv", KINDS)
def test_kernel_sets_agree(kv, kernel, tiny_model):
    """Drafts too: their keys and values are those of the same view."""
    models = [tiny_model("qwen2", kv=kv, kernel=k, n_ctx=1500) for k in (kernel, "scalar")]
    ids = text("qwen2", 900)  # enough for threads to share the positions
    if kernel == "amx":
        return
    a, b = (m.logits(ids).view(np.uint32) for m in models)
    assert np.array_equal(a, b)
    a, b = (m.draft_logits(ids[:200]).view(np.uint32) for m in models)
    assert np.array_equal(a, b)


@pytest.mark.parametrize("kv", KINDS)
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_long_contexts_do_not_depend_on_threads_or_batches(kv, threads, tiny_model):
    prompt = text("llama_untied", 1000)
    runs = [
        run(tiny_model("llama_untied", kv=kv, threads=t, batch_size=b, n_ctx=1200), prompt, spec=spec)
        for t, b, spec in ((1, 512, "off"), (threads, 77, "on"), (threads, 1000, "auto"))
    ]
    assert runs[0] == runs[1] == runs[2]
    if kv != "cass2":
        assert runs[0] == run(tiny_model("llama_untied", kv="raw", n_ctx=1200), prompt)


def test_cass2_is_near(tiny_model):
    """Rounded keys and values move the logits a little, and do not depend on when a block is encoded."""
    ids = text("qwen3", 300)
    raw, near = (tiny_model("qwen3", kv=kv).logits(ids) for kv in ("raw", "cass2"))
    difference = np.abs(raw - near).max() / np.abs(raw).max()
    assert 0 < difference < 0.2
    assert run(tiny_model("qwen3", kv="cass2"), ids, spec="on") == run(tiny_model("qwen3", kv="cass2"), ids, spec="off")


# ---- trimming, saving ----


class Session:
    """A session at the C library's level."""

    def __init__(self, model):
        self.model, self.session, self.ids = model, model._session, []

    def append(self, ids):
        check(lib.pycass_session_eval(self.session, ids, len(ids), ffi.NULL))
        self.ids += ids

    def trim(self, n):
        check(lib.pycass_session_trim(self.session, n))
        self.ids = self.ids[:n]

    def state(self):
        size = lib.pycass_session_state_size(self.session)
        out = np.empty(size, np.uint8)
        check(lib.pycass_session_save_state(self.session, ffi.from_buffer("uint8_t[]", out), size))
        return out.tobytes()


@pytest.mark.parametrize("kv", KINDS)
@pytest.mark.parametrize("name", ["llama_tied", "qwen3"])
def test_a_thousand_trims_and_appends_end_as_a_fresh_session(kv, name, tiny_model):
    rng = np.random.default_rng(11)
    worn = Session(tiny_model(name, kv=kv, n_ctx=700, threads=2))
    for _ in range(1000):
        if len(worn.ids) > 600 or rng.random() < 0.5:
            worn.trim(int(rng.integers(0, len(worn.ids) + 1)) if rng.random() < 0.3 else max(0, len(worn.ids) - int(rng.integers(80))))
        else:
            worn.append(rng.integers(0, 290, int(rng.integers(1, 60))).tolist())
        stats = worn.model.kv_stats()
        assert stats["encoded"] % 64 == 0 and stats["plain"] + stats["encoded"] == len(worn.ids)
        assert stats["encoded"] == 0 or stats["plain"] >= 0
    worn.append(text(name, 650 - len(worn.ids), 5))
    fresh = Session(tiny_model(name, kv=kv, n_ctx=700))
    fresh.append(worn.ids)
    assert worn.state() == fresh.state()
    stats = worn.model.kv_stats()
    assert stats == fresh.model.kv_stats() and stats["encoded"] == 576
    worn.trim(0)
    assert worn.model.kv_stats() == dict.fromkeys(stats, 0)


@pytest.mark.parametrize("kv", KINDS)
def test_trimming_into_a_block(kv, tiny_model):
    """What is left of it is plain again, bit for bit."""
    ids = text("qwen2", 200)
    for n in (0, 1, 63, 64, 65, 100, 127, 128, 140):
        cut, fresh = Session(tiny_model("qwen2", kv=kv)), Session(tiny_model("qwen2", kv=kv))
        cut.append(ids)
        assert cut.model.kv_stats()["encoded"] == 128
        cut.trim(n)
        assert cut.model.kv_stats()["encoded"] == min(n // 64 * 64, 128)
        if n:
            fresh.append(ids[:n])
            assert cut.state() == fresh.state()
        cut.append(ids[n:])
        fresh.append(ids[n:])
        assert cut.state() == fresh.state() and cut.model.kv_stats() == fresh.model.kv_stats()


@pytest.mark.parametrize("kv", ("raw", *LOSSLESS))
def test_states_do_not_depend_on_how_they_are_kept(kv, tiny_model, tmp_path):
    """Saved with one kind of cache, restored with another."""
    prompt = text("mistral", 300)
    saved, other = tiny_model("mistral", kv=kv), tiny_model("mistral", kv="nest")
    saved.generate(prompt, 1, ignore_eos=True)
    saved.save_state(tmp_path / "s")
    other.load_state(tmp_path / "s")
    assert other.kv_stats()["encoded"] == 256
    c = other.generate(prompt, 30, ignore_eos=True, logprobs=True)
    assert c.usage.reused_tokens >= 299
    assert seen(c) == run(tiny_model("mistral", kv="raw"), prompt, 30)


@pytest.mark.parametrize("kv", ("raw", *KINDS))
def test_drafts_do_not_depend_on_batches_or_threads(kv, tiny_model):
    """Many tokens at once, over encoded blocks, and one at a time; past the length from which all threads share a head."""
    ids = text("qwen2", 900)
    one = tiny_model("qwen2", kv=kv, threads=1, batch_size=1, n_ctx=1000).draft_logits(ids, 700).view(np.uint32)
    for threads, batch in ((1, 512), (2, 5), (3, 512)):
        model = tiny_model("qwen2", kv=kv, threads=threads, batch_size=batch, n_ctx=1000)
        assert np.array_equal(model.draft_logits(ids, 700).view(np.uint32), one)
        assert kv == "raw" or model.kv_stats()["encoded"] > 700


def test_drafts_leave_the_blocks_as_they_were(tiny_model):
    """draft_logits writes into positions of encoded blocks, for a moment."""
    ids = text("qwen2_yarn", 260)
    session = Session(tiny_model("qwen2_yarn", kv="nest"))
    session.model.draft_logits(ids)
    after = session.state(), session.model.kv_stats()
    fresh = Session(tiny_model("qwen2_yarn", kv="nest"))
    fresh.append(ids)
    assert after == (fresh.state(), fresh.model.kv_stats())
    assert session.model.tokens == ids


# ---- what is counted ----


def test_bytes(tiny_model):
    """The cache grows with its tokens; encoded it is smaller, and the draft reads less than half."""
    model = tiny_model("llama3_rope", kv="nest", n_ctx=1500)  # head_dim 16: tiles without padding
    c = model.config
    plain = 4 * c.n_layer * c.n_head_kv * c.head_dim
    model.generate(text("llama3_rope", 1400), 1)
    s = model.kv_stats()
    assert s["encoded"] == 1344 and s["plain"] == 56 and s["bytes"] == 56 * plain + s["encoded_bytes"]
    assert s["encoded_bytes"] < 0.80 * 1344 * plain  # small heads: tables and padding weigh more than on real ones
    assert s["draft_bytes"] < 0.48 * 1344 * plain
    assert model.generate(text("llama3_rope", 20), 5, ignore_eos=True).usage.kv_bytes == 24 * plain


def test_auto_encodes_where_memory_could_become_short(smollm2_cass):
    prompt = "Once upon a time there was a clockmaker. " * 30
    encoded = []
    for n_ctx in (600, 1 << 24):
        with Model.load(smollm2_cass, n_ctx=n_ctx) as model:
            encoded.append((model.generate(prompt, 5).token_ids, model.kv_stats()["encoded"]))
    assert encoded[0][0] == encoded[1][0] and encoded[0][1] == 0 and encoded[1][1] > 100


def test_more_than_memory_holds(smollm2_cass):
    """Is refused in words, before anything is computed, and the session goes on."""
    with Model.load(smollm2_cass, n_ctx=1 << 24) as model:
        first = model.generate("Once upon a time", 5).token_ids
        with pytest.raises(PycassError, match="no memory for 16700000 more tokens"):
            model.generate([5] * 16_700_000, 1)
        session = Session(model)
        with pytest.raises(PycassError, match="keys and values take [0-9]+ MiB"):
            session.append([5] * 16_700_000)
        assert model.generate("Once upon a time", 5).token_ids == first


def test_wrong_kinds(tiny_cass):
    for kv in ("bf16", "", None, 3):
        with pytest.raises(InvalidArgument, match="is not one of"):
            Model.load(tiny_cass("qwen3"), kv=kv)
