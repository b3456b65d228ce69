"""Saved states: they continue as if nothing had happened, and damaged or foreign ones are refused in words."""

import errno
import os
import struct

import numpy as np
import pytest
import tiny_models as tiny
from running import each_model, seen

from pycass import PycassError
from pycass._pycass import ffi, lib
from pycass.errors import ContextFull, FormatError, IOFailure, StateMismatch

NAME = "qwen2"
PROMPT = tiny.ids(NAME, 15)
HEADER = 32
OPTIONS = {"ignore_eos": True, "logprobs": True, "temperature": 0.9, "seed": 21}


@pytest.fixture
def model(tiny_model):
    return tiny_model(NAME)


@pytest.fixture
def state(model, tmp_path):
    """The path of a saved state, of PROMPT and some more tokens."""
    model.generate(PROMPT, 10, **OPTIONS)
    model.save_state(tmp_path / "state")
    return tmp_path / "state"


@each_model
@pytest.mark.parametrize("spec", ["off", "on"])
def test_a_continued_state_is_the_uninterrupted_run(name, spec, tiny_model, tmp_path):
    first, second = tiny_model(name), tiny_model(name, n_ctx=300, batch_size=7)
    prompt = tiny.ids(name, 15)
    whole = first.generate(prompt, 50, spec=spec, **OPTIONS)
    first.reset()
    half = first.generate(prompt, 20, spec=spec, **OPTIONS)
    first.save_state(tmp_path / "state")
    second.load_state(str(tmp_path / "state"))
    assert second.tokens == (prompt + half.token_ids)[:-1]  # the last token had no pass yet
    rest = second.generate(prompt + half.token_ids, 30, spec=spec, **OPTIONS)
    assert rest.usage.reused_tokens == len(prompt) + 19
    assert half.token_ids + rest.token_ids == whole.token_ids
    assert half.logprobs + rest.logprobs == whole.logprobs
    second.reset()
    assert seen(second.generate(prompt + half.token_ids, 30, spec=spec, **OPTIONS)) == seen(rest)
    second.load_state(tmp_path / "state")  # and from its own last token
    same = second.generate(second.tokens, 31, spec=spec, **OPTIONS)
    assert same.token_ids == whole.token_ids[19:] and same.logprobs == whole.logprobs[19:]


def test_a_state_saves_itself_again(model, tiny_model, state, tmp_path):
    other = tiny_model(NAME, kernel="scalar")
    other.load_state(state)
    other.save_state(tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == state.read_bytes()
    config = model.config
    per_token = 4 + 2 * 2 * config.n_layer * config.n_head_kv * config.head_dim
    assert state.stat().st_size == HEADER + (len(PROMPT) + 9) * per_token


def test_an_empty_state(model, tmp_path):
    model.save_state(tmp_path / "empty")
    assert (tmp_path / "empty").stat().st_size == HEADER
    expected = seen(model.generate(PROMPT, 10, **OPTIONS))
    model.load_state(tmp_path / "empty")
    assert model.tokens == []
    c = model.generate(PROMPT, 10, **OPTIONS)
    assert seen(c) == expected and c.usage.reused_tokens == 0


def test_a_loaded_state_replaces_what_was_there(model, state):
    known = model.tokens[:-1]
    model.generate(tiny.ids(NAME, 200, "long"), 20)
    model.load_state(state)
    assert model.tokens == known
    assert model.generate(known[:-3] + [1, 2], 5).usage.reused_tokens == len(known) - 3


def test_after_drafts_were_rejected(model, tiny_model, tmp_path):
    """Nothing of a rejected draft is in the file."""
    for spec in ("off", "on"):
        model.reset()
        model.generate(PROMPT, 30, spec=spec, draft_max=16, draft_fixed=True, ignore_eos=True)
        model.save_state(tmp_path / spec)
    assert (tmp_path / "off").read_bytes() == (tmp_path / "on").read_bytes()


# ---- what is refused ----


def assert_refused(model, path, kinds, expected):
    """An error of these kinds that says something; and the session is as it was."""
    known = model.tokens
    with pytest.raises(kinds) as error:
        model.load_state(path)
    assert isinstance(error.value, PycassError) and len(str(error.value)) > 20
    assert str(path) in str(error.value) and model.tokens == known
    assert seen(model.generate(PROMPT, 10, **OPTIONS)) == expected


def test_truncated_states(model, state, tmp_path):
    expected = seen(model.generate(PROMPT, 10, **OPTIONS))
    data = state.read_bytes()
    for n in [*range(HEADER + 6), 100, len(data) // 2, len(data) - 4, len(data) - 1]:
        (tmp_path / "cut").write_bytes(data[:n])
        assert_refused(model, tmp_path / "cut", FormatError, expected)


def test_trailing_bytes(model, state, tmp_path):
    expected = seen(model.generate(PROMPT, 10, **OPTIONS))
    for more in (b"\0", b"\0" * 64, state.read_bytes()):
        (tmp_path / "long").write_bytes(state.read_bytes() + more)
        assert_refused(model, tmp_path / "long", FormatError, expected)


def test_any_flipped_bit_of_the_header_and_some_of_the_rest(model, state, tmp_path):
    expected = seen(model.generate(PROMPT, 10, **OPTIONS))
    data = state.read_bytes()
    rest = np.random.default_rng(0).integers(HEADER * 8, len(data) * 8, 60).tolist()
    for bit in [*range(HEADER * 8), *rest]:
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        (tmp_path / "flipped").write_bytes(flipped)
        assert_refused(model, tmp_path / "flipped", (FormatError, StateMismatch, ContextFull), expected)


def test_a_token_that_the_model_has_not(model, state, tmp_path):
    """A right checksum over wrong content: the token would index the embedding."""
    expected = seen(model.generate(PROMPT, 10, **OPTIONS))
    for token in (300, -1, 2**31 - 1, -(2**31)):
        data = bytearray(state.read_bytes())
        struct.pack_into("<i", data, HEADER + 8, token)
        body = bytes(data[HEADER:])
        struct.pack_into("<I", data, 20, lib.pycass_crc32c(0, ffi.from_buffer(body), len(body)))
        (tmp_path / "hostile").write_bytes(data)
        assert_refused(model, tmp_path / "hostile", PycassError, expected)


def test_a_number_of_tokens_that_overflows(model, state, tmp_path):
    expected = seen(model.generate(PROMPT, 10, **OPTIONS))
    for n in (2**32 - 1, 2**31, 2**24, 2049):
        data = bytearray(state.read_bytes())
        struct.pack_into("<I", data, 16, n)
        (tmp_path / "hostile").write_bytes(data)
        assert_refused(model, tmp_path / "hostile", (FormatError, ContextFull), expected)


def test_states_of_other_models(tiny_model, tmp_path):
    """Same shapes but other weights, the other codec, other rope settings."""
    models = {
        "llama_yarn": tiny_model("llama_yarn"),
        "qwen2": tiny_model("qwen2"),
        "raw": tiny_model("qwen2", "raw"),
        "rope": tiny_model("qwen2", rope_scaling={"rope_type": "linear", "factor": 2.0}),
        "yarn": tiny_model(
            "llama_yarn", rope_scaling=tiny.SPECS["llama_yarn"].config["rope_scaling"] | {"factor": 3.0}
        ),
    }
    for name, model in models.items():
        model.generate(PROMPT, 5)
        model.save_state(tmp_path / name)
    for name, model in models.items():
        model.load_state(tmp_path / name)
        for other in models.keys() - {name}:
            with pytest.raises(StateMismatch, match="another model"):
                model.load_state(tmp_path / other)


def test_a_state_longer_than_the_context(tiny_model, state):
    small = tiny_model(NAME, n_ctx=20)
    with pytest.raises(ContextFull) as error:
        small.load_state(state)
    assert "24" in str(error.value) and "20" in str(error.value)
    assert small.generate(PROMPT, 3).token_ids


def test_files_that_are_no_states(model, tmp_path, tiny_cass):
    expected = seen(model.generate(PROMPT, 10, **OPTIONS))
    (tmp_path / "text").write_text("hello" * 30)
    assert_refused(model, tmp_path / "text", FormatError, expected)
    assert_refused(model, tiny_cass(NAME), FormatError, expected)
    assert_refused(model, tmp_path / "missing", IOFailure, expected)
    assert_refused(model, tmp_path, IOFailure, expected)


# ---- writing ----


def test_saving_where_nothing_can_be_saved(model, tmp_path):
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "missing" / "state", tmp_path / "folder"):
        with pytest.raises(IOFailure) as error:
            model.save_state(path)
        assert str(path) in str(error.value)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["folder"] and not list((tmp_path / "folder").iterdir())


@pytest.mark.parametrize("function", ["fsync", "replace"])
def test_a_failed_save_leaves_the_old_file(function, model, state, monkeypatch):
    """A full disk, or a crash before the rename: the old file stays, and nothing beside it."""
    before = state.read_bytes()
    model.generate(PROMPT, 30, ignore_eos=True)

    def fail(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, function, fail)
        with pytest.raises(IOFailure, match="No space left"):
            model.save_state(state)
    assert state.read_bytes() == before and [p.name for p in state.parent.iterdir()] == ["state"]
    model.save_state(state)
    assert len(state.read_bytes()) > len(before)


@pytest.mark.parametrize("kind", ["fifo", "folder"])
def test_only_regular_files_are_replaced(tiny_model, tmp_path, kind):
    model, path = tiny_model("llama_tied"), tmp_path / "x"
    model.logits([1, 2, 3])
    os.mkfifo(path) if kind == "fifo" else path.mkdir()
    before = os.stat(path).st_mode
    with pytest.raises(PycassError, match="not a regular file"):
        model.save_state(path)
    assert os.stat(path).st_mode == before and [p.name for p in tmp_path.iterdir()] == ["x"]


def test_a_link_is_followed(tiny_model, tmp_path):
    model = tiny_model("llama_tied")
    model.logits([1, 2, 3])
    (tmp_path / "link").symlink_to(tmp_path / "target")
    model.save_state(tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "target").is_file()
    model.load_state(tmp_path / "target")
