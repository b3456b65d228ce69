"""Model: generation, streams, stop strings, ends, limits, the cache, threads, errors."""

import gc
import json
import math
import os
import signal
import threading
import time

import numpy as np
import pytest
import tiny_models as tiny
from checkpoints import convert, write_hf
from running import KERNELS, seen

from pycass import CassFile, Completion, Model, PycassError
from pycass.errors import ContextFull, FormatError, InvalidArgument, IOFailure, KernelUnavailable, TemplateError

NAME = "llama_untied"
PROMPT = tiny.ids(NAME, 9)


@pytest.fixture
def model(tiny_model):
    return tiny_model(NAME)


@pytest.fixture(scope="module")
def letters(tiny_cass):
    """A bias that leaves only the letters a-z and the space, so that the random model writes text."""
    with Model.load(tiny_cass(NAME), threads=1) as m:
        texts = {i: m.detokenize([i]) for i in range(m.config.n_token)}
    return {i: 300.0 for i, t in texts.items() if t and set(t) <= set("abcdefghijklmnopqrstuvwxyz ")}


# ---- what a completion says ----


def test_completion_has_what_the_documentation_says(model):
    c = model.generate(PROMPT, 30, ignore_eos=True, spec="on", logprobs=True)
    assert isinstance(c, Completion) and isinstance(c.text, str) and c.finish_reason == "length"
    assert len(c.token_ids) == 30 and all(type(i) is int for i in c.token_ids)
    assert (c.usage.prompt_tokens, c.usage.completion_tokens, c.usage.reused_tokens) == (9, 30, 0)
    config = model.config
    per_token = 2 * 2 * config.n_layer * config.n_head_kv * config.head_dim
    assert c.usage.kv_bytes == model.kv_bytes == per_token * (9 + 30 - 1)  # the last token is not evaluated
    t = c.timings
    assert t.prompt_ms > 0 and t.decode_ms > 0
    assert t.prompt_tps == pytest.approx(9000 / t.prompt_ms) and t.decode_tps == pytest.approx(30000 / t.decode_ms)
    s = c.spec
    assert s.steps + s.accepted + 1 == 30 and 0 < s.accepted <= s.drafted and s.disabled is False
    assert s.acceptance == s.accepted / s.drafted and s.mean_len == (s.steps + s.accepted) / s.steps
    assert len(c.logprobs) == 30 and all(p <= 0 for p in c.logprobs) and len(c.logits_hash) == 8
    assert c.text == model.detokenize(c.token_ids)


def test_logprobs_only_when_asked(model):
    c = model.generate(PROMPT, 5, ignore_eos=True)
    assert c.logprobs is None and c.logits_hash is None


def test_nothing_is_generated_for_zero_tokens(model):
    c = model.generate(PROMPT, 0, logprobs=True)
    assert (c.token_ids, c.text, c.finish_reason, c.logprobs) == ([], "", "length", [])
    assert c.usage.prompt_tokens == 9 and model.tokens == PROMPT
    assert c.spec.steps == 0 and c.spec.acceptance == 0 and c.timings.decode_tps == 0


def test_the_session_knows_its_tokens(model):
    for spec in ("off", "on"):
        c = model.generate(PROMPT, 17, ignore_eos=True, spec=spec, draft_fixed=True)
        assert model.tokens == PROMPT + c.token_ids
    model.reset()
    assert model.tokens == []


def test_no_limit_means_until_the_context_is_full(tiny_model):
    model = tiny_model(NAME, n_ctx=40)
    for limit in (None, -1, 10_000):
        c = model.generate(PROMPT, limit, ignore_eos=True)
        assert len(c.token_ids) == 41 - 9 and c.finish_reason == "length"


def test_text_prompt_equals_its_ids(model):
    text = "The quick brown fox"
    assert seen(model.generate(text, 12)) == seen(model.generate(model.tokenize(text), 12))
    assert seen(model.generate(np.array(model.tokenize(text)), 12)) == seen(model.generate(text, 12))


# ---- streams ----


@pytest.mark.parametrize("spec", ["off", "on"])
@pytest.mark.parametrize("options", [{}, {"temperature": 1.2, "seed": 4}], ids=["greedy", "sampled"])
def test_deltas_join_to_the_completion(spec, options, model):
    """Random byte tokens: most of them are parts of characters, or of none."""
    options = {"spec": spec, "ignore_eos": True, "logprobs": True} | options
    c = model.generate(PROMPT, 150, **options)
    stream = model.stream(PROMPT, 150, **options)
    assert stream.completion is None
    deltas = list(stream)
    assert "".join(d.text for d in deltas) == c.text == model.detokenize(c.token_ids)
    assert [i for d in deltas for i in d.token_ids] == c.token_ids
    assert seen(stream.completion) == seen(c) and "\ufffd" in c.text
    assert spec == "off" or max(len(d.token_ids) for d in deltas) > 1
    with pytest.raises(StopIteration):
        next(stream)


@pytest.mark.parametrize("how", ["keep", "close", "delete"])
def test_an_abandoned_stream_is_no_burden(how, model):
    expected = seen(model.generate(PROMPT, 20, logprobs=True))
    stream = model.stream(tiny.ids(NAME, 20, "other"), 50, ignore_eos=True, spec="on")
    next(stream), next(stream)
    if how == "close":
        stream.close()
    elif how == "delete":
        del stream
        gc.collect()
    assert seen(model.generate(PROMPT, 20, logprobs=True)) == expected
    if how == "keep":
        with pytest.raises(PycassError, match="this stream has ended"):
            next(stream)
        assert stream.completion is None
        assert seen(model.generate(PROMPT, 20, logprobs=True)) == expected


@pytest.mark.parametrize("call", ["logits", "draft_logits", "reset", "save_state", "load_state", "stream"])
def test_every_use_of_the_session_ends_a_stream(call, model, tmp_path):
    model.generate(PROMPT, 2)
    model.save_state(tmp_path / "state")
    stream = model.stream(PROMPT, 50, ignore_eos=True)
    next(stream)
    if call == "stream":
        next(model.stream(PROMPT, 5))
    else:
        argument = {"reset": [], "save_state": [tmp_path / "s"], "load_state": [tmp_path / "state"]}.get(call, [PROMPT])
        getattr(model, call)(*argument)
    with pytest.raises(PycassError, match="this stream has ended"):
        list(stream)


def test_a_stream_that_never_began_is_no_burden(model):
    stream = model.stream(PROMPT, 5)
    expected = seen(model.generate(PROMPT, 5))
    assert [i for d in stream for i in d.token_ids] == expected[0]


def test_an_abandoned_stream_keeps_the_prompt(model):
    """What a stream has evaluated is reused."""
    prompt = tiny.ids(NAME, 100, "long")
    next(model.stream(prompt, 5))
    assert model.generate(prompt, 5).usage.reused_tokens >= 99


# ---- stop strings ----


@pytest.mark.parametrize("spec", ["off", "on"])
@pytest.mark.parametrize("at,length", [(3, 1), (5, 4), (10, 9), (0, 3), (20, 2)])
def test_stop_strings_cut_the_text_and_never_leak(spec, at, length, model, letters):
    options = {"logit_bias": letters, "temperature": 1.0, "seed": 2, "spec": spec}
    whole = model.generate(PROMPT, 60, **options)
    assert len(whole.text) >= 60 and whole.text.isascii()
    stop = whole.text[at : at + length]
    cut = whole.text.index(stop)
    stream = model.stream(PROMPT, 60, stop=[stop, "not there"], **options)
    pieces = [d.text for d in stream]
    c = stream.completion
    assert c.text == "".join(pieces) == whole.text[:cut] and c.finish_reason == "stop"
    assert c.token_ids == whole.token_ids[: len(c.token_ids)]
    text = model.detokenize(c.token_ids)  # ends with the token that completes the stop string
    assert stop in text and stop not in model.detokenize(c.token_ids[:-1])
    assert model.tokens == PROMPT + c.token_ids
    assert seen(model.generate(PROMPT, 60, stop=stop, **options)) == seen(c)


def test_the_first_stop_string_wins(model, letters):
    options = {"logit_bias": letters, "temperature": 1.0, "seed": 2}
    text = model.generate(PROMPT, 60, **options).text
    c = model.generate(PROMPT, 60, stop=[text[30:33], text[12:15], text[40:41]], **options)
    assert c.text == text[: min(text.index(s) for s in (text[30:33], text[12:15], text[40:41]))]


@pytest.mark.parametrize("tail", [1, 2, 5])
def test_the_beginning_of_a_stop_string_is_shown_at_the_end(tail, model, letters):
    """Held back while it may become the stop string; at the limit, and at an end token, it is text after all."""
    options = {"logit_bias": letters, "temperature": 1.0, "seed": 2}
    whole = model.generate(PROMPT, 40, **options)
    stop = whole.text[-tail:] + "~~~"
    stream = model.stream(PROMPT, 40, stop=stop, **options)
    assert "".join(d.text for d in stream) == whole.text == stream.completion.text
    assert stream.completion.finish_reason == "length"
    end = model.tokenizer.token_to_id(tiny.EOS)
    n = len(whole.token_ids)
    early = model.stream(PROMPT + whole.token_ids[: n - 5], 20, stop="~~", logit_bias={end: 1e4})
    assert "".join(d.text for d in early) == "" and early.completion.finish_reason == "stop"


def test_a_stop_prefix_and_then_the_end_token(model, tmp_path):
    """The forced end token follows text that could have become a stop string."""
    end, tilde = model.tokenizer.token_to_id(tiny.EOS), model.tokenize("~")[0]
    plain = model.generate(PROMPT, 6, logit_bias={tilde: 100.0}, frequency_penalty=45.0, repeat_last_n=-1).token_ids
    assert plain[:2] == [tilde, tilde] and plain[3] != tilde
    bias = {tilde: 100.0, end: 70.0}
    c = model.generate(PROMPT, 9, stop="~~~~", logit_bias=bias, frequency_penalty=45.0, repeat_last_n=-1, logprobs=True)
    assert c.token_ids == [tilde, end] and c.text == "~" and c.finish_reason == "stop" and len(c.logprobs) == 2


# ---- end tokens ----


def with_ends(tmp_path, config=None, generation=None, tokenizer=None):
    """A model whose end tokens are given in up to three files."""
    spec = tiny.SPECS[NAME]
    folder = tmp_path / "hf"
    extra = {"generation_config__json": generation} if generation else {}
    settings = {"eos_token": tokenizer} if tokenizer else {}
    write_hf(
        folder, spec.config | {"eos_token_id": config}, tiny.weights(NAME), tokenizer=False,
        tokenizer_config__json=settings, **extra,
    )  # fmt: skip
    tiny.tokenizer_json(spec.n_token).save(str(folder / "tokenizer.json"))
    convert(folder, tmp_path / "m.cass")
    return Model.load(tmp_path / "m.cass", threads=1)


@pytest.mark.parametrize("spec", ["off", "on"])
@pytest.mark.parametrize("where", ["config", "config list", "generation", "generation list", "tokenizer"])
def test_any_end_token_ends(where, spec, tmp_path, golden):
    """End tokens of config.json, generation_config.json and the tokenizer are united."""
    prompt, greedy = golden[f"{NAME}/prompt"], golden[f"{NAME}/greedy"].tolist()
    end = greedy[9]
    with Model.load(tiny_path(tmp_path)) as m:
        spelled = m.tokenizer.id_to_token(end)
    given = {
        "config": {"config": end, "generation": {"eos_token_id": 331}},
        "config list": {"config": [1, end]},
        "generation": {"config": 331, "generation": {"eos_token_id": end}},
        "generation list": {"config": 331, "generation": {"eos_token_id": [331, end]}, "tokenizer": tiny.EOS},
        "tokenizer": {"config": 331, "generation": {"eos_token_id": [330]}, "tokenizer": spelled},
    }[where]
    with with_ends(tmp_path, **given) as model:
        n = greedy.index(end) + 1
        c = model.generate(prompt, 24, spec=spec, draft_fixed=True)
        assert c.token_ids == greedy[:n] and c.finish_reason == "stop" and model.tokens == prompt.tolist() + greedy[:n]
        on = model.generate(prompt, 24, spec=spec, ignore_eos=True)
        assert on.token_ids == greedy and on.finish_reason == "length"


def tiny_path(tmp_path):
    """The model as it is, for its tokenizer."""
    folder = tiny.write(NAME, tmp_path / "plain")
    convert(folder, tmp_path / "plain.cass")
    return tmp_path / "plain.cass"


# ---- the context's end ----


@pytest.mark.parametrize("spec", ["off", "on"])
def test_prompts_around_the_context_length(spec, tiny_model):
    model = tiny_model(NAME, n_ctx=32)
    whole = tiny.ids(NAME, 40)
    for n, tokens in ((31, 2), (32, 1)):
        c = model.generate(whole[:n], None, ignore_eos=True, spec=spec)
        assert len(c.token_ids) == tokens and c.finish_reason == "length"
        assert model.logits(whole[:n]).shape[0] == n
    expected = seen(model.generate(whole[:20], 5))
    for call in (model.generate, model.logits, model.draft_logits, lambda ids: list(model.stream(ids))):
        with pytest.raises(ContextFull) as error:
            call(whole[:33])
        assert "33" in str(error.value) and "32" in str(error.value)
    assert seen(model.generate(whole[:20], 5)) == expected


def test_the_default_context_is_the_models(tiny_model):
    assert tiny_model(NAME).n_ctx == 2048
    assert tiny_model(NAME, n_ctx=77).n_ctx == 77
    assert tiny_model(NAME, n_ctx=5000).n_ctx == 5000


# ---- the vocabulary's end ----


@pytest.mark.parametrize("name", ["llama_tied", "qwen3_untied"])
@pytest.mark.parametrize("spec", ["off", "on"])
def test_padding_rows_are_never_sampled(name, spec, tiny_model):
    model = tiny_model(name)
    n_token = tiny.SPECS[name].n_token
    assert (model.config.n_token, model.config.n_vocab) == (n_token, tiny.SPECS[name].config["vocab_size"])
    prompt = tiny.ids(name, 9)
    for options in ({}, {"temperature": 1.0}, {"temperature": 50.0}, {"temperature": 5.0, "top_k": 320, "min_p": 1e-9}):
        c = model.generate(prompt, 600, seed=1, ignore_eos=True, spec=spec, **options)
        assert len(c.token_ids) == 600 and max(c.token_ids) < n_token
    # without the rule they would have been: some are the most likely of all
    ids = tiny.ids(name, 400, "padding")
    assert (model.logits(ids).argmax(axis=1) >= n_token).any()
    with pytest.raises(InvalidArgument):
        model.generate(prompt, logit_bias={n_token: 100.0})


# ---- reuse of the cache ----


@pytest.mark.parametrize("spec", ["off", "on"])
def test_a_common_prefix_is_reused_and_changes_nothing(spec, tiny_model):
    model, fresh = tiny_model(NAME), tiny_model(NAME)
    options = {"spec": spec, "ignore_eos": True, "logprobs": True, "temperature": 0.8, "seed": 3, "draft_fixed": True}
    a, b = tiny.ids(NAME, 30), tiny.ids(NAME, 20, "b")
    first = model.generate(a, 25, **options)
    turns = [
        (a + first.token_ids + b, 30 + 25 - 1),  # the next turn of a conversation; the last token had no pass
        (a + first.token_ids[:10] + b, 40),  # an edited one
        (a[:12] + b, 12),
        (a[:12] + b, 31),  # the same again: its last logits are gone
        (a[:5], 4),
        (b, 0),
        (b[:1], 0),
    ]
    for prompt, reused in turns:
        c = model.generate(prompt, 25, **options)
        assert c.usage.reused_tokens == reused
        fresh.reset()
        assert seen(fresh.generate(prompt, 25, **options)) == seen(c)


@pytest.mark.parametrize("spec", ["off", "on"])
def test_continuing_from_any_place(spec, model):
    """Back to any length of what was generated, and on: the cache and the last logits are those of that place."""
    options = {"spec": spec, "ignore_eos": True, "logprobs": True, "temperature": 0.8, "seed": 3, "draft_fixed": True}
    whole = model.generate(PROMPT, 40, **options)
    for n in [*range(30), *range(29, -1, -1)]:
        c = model.generate(PROMPT + whole.token_ids[:n], 10, **options)
        assert c.token_ids == whole.token_ids[n : n + 10] and c.logprobs == whole.logprobs[n : n + 10]


@pytest.mark.parametrize("spec", ["off", "on"])
def test_continuing_after_a_stop_in_the_middle_of_a_step(spec, model, letters):
    """Drafted tokens beyond the stop are neither in the cache nor are their logits used."""
    options = {"logit_bias": letters, "temperature": 1.0, "seed": 2, "spec": spec, "draft_fixed": True}
    options["logprobs"] = True
    whole = model.generate(PROMPT, 60, **options)
    for at in range(2, 40):
        c = model.generate(PROMPT, 60, stop=whole.text[at : at + 3], **options)
        n = len(c.token_ids)
        assert c.token_ids == whole.token_ids[:n] and n < 60
        again = model.generate(PROMPT + c.token_ids, 8, **options)
        assert again.usage.reused_tokens >= len(PROMPT) + n - 1
        assert again.token_ids == whole.token_ids[n : n + 8] and again.logprobs == whole.logprobs[n : n + 8]


def test_logits_leave_a_right_cache(model):
    """draft_logits puts the draft's keys aside; what follows must not see them."""
    expected = seen(model.generate(PROMPT, 20, logprobs=True))
    model.draft_logits(PROMPT)
    c = model.generate(PROMPT, 20, logprobs=True)
    assert seen(c) == expected and c.usage.reused_tokens >= len(PROMPT) - 1
    model.logits(PROMPT)
    assert seen(model.generate(PROMPT, 20, logprobs=True)) == expected


# ---- conversations ----

TALK = [
    {"role": "user", "content": "Hello there"},
    {"role": "assistant", "content": "Hi"},
    {"role": "user", "content": "?"},
]


def test_chat_is_generation_from_the_template(model):
    ids = model.tokenizer.encode_chat(TALK)
    end, bos = (model.tokenizer.token_to_id(t) for t in (tiny.EOS, tiny.BOS))
    assert ids.count(end) == 3 and ids.count(bos) == 1 and ids[0] == bos
    c = model.chat(TALK, 12, logprobs=True)
    assert c.usage.prompt_tokens == len(ids) and seen(c) == seen(model.generate(ids, 12, logprobs=True))
    stream = model.stream_chat(TALK, 12, logprobs=True)
    assert "".join(d.text for d in stream) == c.text and seen(stream.completion) == seen(c)


def test_a_conversation_reuses_its_cache(model):
    talk = TALK[:1]
    c = model.chat(talk, 8, ignore_eos=True)
    before = len(model.tokenizer.encode_chat(talk))
    longer = talk + [{"role": "assistant", "content": c.text}, {"role": "user", "content": "and then"}]
    assert model.chat(longer, 8).usage.reused_tokens >= before - 1


@pytest.mark.parametrize(
    "messages", [[], "hi", [{"role": "user"}], [{"content": "x"}], [3], [{"role": "user", "content": 3}]]
)
def test_bad_conversations_are_refused_in_words(messages, model):
    with pytest.raises(PycassError):
        model.chat(messages, 4)
    assert model.chat(TALK, 4).token_ids


def test_a_template_that_refuses(tmp_path):
    spec = tiny.SPECS[NAME]
    template = "{{ raise_exception('only one message') if messages | length > 1 else 'x' }}"
    settings = {"eos_token": tiny.EOS, "chat_template": template}
    write_hf(tmp_path / "hf", spec.config, tiny.weights(NAME), tokenizer=False, tokenizer_config__json=settings)
    tiny.tokenizer_json(spec.n_token).save(str(tmp_path / "hf" / "tokenizer.json"))
    convert(tmp_path / "hf", tmp_path / "m.cass")
    with Model.load(tmp_path / "m.cass", threads=1) as model:
        with pytest.raises(TemplateError, match="only one message"):
            model.chat(TALK, 4)
        assert model.chat(TALK[:1], 4).usage.prompt_tokens == len(model.tokenize("x"))


# ---- several threads of the caller ----


def test_two_threads_at_once(tiny_model):
    """Calls from several threads wait for each other (Model's documentation): each gets its own right answer."""
    model = tiny_model(NAME)
    prompts = [tiny.ids(NAME, 12, f"thread {i}") for i in range(4)]
    options = {"ignore_eos": True, "logprobs": True, "temperature": 0.7, "seed": 9}
    expected = [seen(model.generate(p, 60, **options)) for p in prompts]
    logits = [model.logits(p) for p in prompts]
    failures, start = [], threading.Barrier(len(prompts))

    def work(i):
        try:
            start.wait()
            for _ in range(6):
                assert seen(model.generate(prompts[i], 60, **options)) == expected[i]
                assert np.array_equal(model.logits(prompts[i]), logits[i])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(prompts))]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert not failures, repr(failures[0])


def test_two_models_at_once(tiny_model):
    models = [tiny_model(NAME), tiny_model(NAME), tiny_model("qwen3")]
    expected = [seen(m.generate(PROMPT, 80, logprobs=True)) for m in models]
    found = [[] for _ in models]

    def work(i):
        for _ in range(5):
            models[i].reset()
            found[i].append(seen(models[i].generate(PROMPT, 80, logprobs=True)))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert found == [[e] * 5 for e in expected]


@pytest.mark.parametrize("after", [0.0, 0.003, 0.02])
def test_closing_while_another_thread_generates(after, tiny_model):
    """The other call ends with an error in words, or had ended before; the process lives on."""
    model, errors, begun = tiny_model(NAME), [], threading.Event()

    def work():
        try:
            while True:
                begun.set()
                model.generate(PROMPT, 100, ignore_eos=True)
                time.sleep(0.001)  # locks are not fair
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    begun.wait()
    time.sleep(after)
    model.close()
    thread.join()
    assert isinstance(errors[0], PycassError)


# ---- opening and closing ----


def test_a_closed_model_says_so(model, tmp_path):
    stream = model.stream(PROMPT, 50, ignore_eos=True)
    next(stream)
    with model as same:
        assert same is model
    model.close()  # a second time is fine
    calls = [
        lambda: model.generate(PROMPT), lambda: list(model.stream(PROMPT)), lambda: model.chat(TALK),
        lambda: model.logits(PROMPT), lambda: model.draft_logits(PROMPT), lambda: model.save_state(tmp_path / "s"),
        lambda: model.tokens, lambda: model.kv_bytes, lambda: next(stream), model.reset, model.stats,
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(PycassError):
            call()
    with pytest.raises(InvalidArgument, match="closed"):
        model.generate(PROMPT)
    assert not (tmp_path / "s").exists()
    assert model.detokenize(model.tokenize("still text")) == "still text"


def test_context_manager_closes_after_an_error(tiny_cass):
    with pytest.raises(ZeroDivisionError):
        with Model.load(tiny_cass(NAME)) as model:
            1 / 0
    with pytest.raises(InvalidArgument, match="closed"):
        model.generate(PROMPT)


@pytest.mark.parametrize(
    "options",
    [{"threads": -1}, {"threads": 257}, {"threads": 2**31}, {"threads": 2**32}, {"threads": 1.5},
     {"threads_batch": 999}, {"batch_size": 4097}, {"batch_size": -1}, {"batch_size": 2**40},
     {"n_ctx": -1}, {"n_ctx": 2**32}, {"n_ctx": 2**24 + 1}, {"n_ctx": "many"}, {"n_ctx": math.nan}],
    ids=repr,
)  # fmt: skip
def test_silly_load_options_are_refused_in_words(options, tiny_cass):
    with pytest.raises(InvalidArgument) as error:
        Model.load(tiny_cass(NAME), **options)
    assert str(next(iter(options.values()))) in str(error.value)


def test_files_that_are_no_models(tmp_path):
    (tmp_path / "text").write_text("hello")
    (tmp_path / "empty").write_bytes(b"")
    for path, kind in (("text", FormatError), ("empty", FormatError), ("missing", IOFailure), ("", IOFailure)):
        with pytest.raises(kind) as error:
            Model.load(tmp_path / path)
        assert str(tmp_path / path) in str(error.value)


# ---- kernel sets ----


def test_the_best_kernel_set_is_the_default(tiny_model, monkeypatch):
    monkeypatch.delenv("PYCASS_KERNEL", raising=False)
    assert tiny_model(NAME).kernel == KERNELS[0] and "scalar" in KERNELS


def test_a_kernel_set_can_be_forced(tiny_model, monkeypatch):
    for kernel in KERNELS:
        assert tiny_model(NAME, kernel=kernel).kernel == kernel
        monkeypatch.setenv("PYCASS_KERNEL", kernel)
        assert tiny_model(NAME).kernel == kernel
        assert tiny_model(NAME, kernel="scalar").kernel == "scalar"  # what is said in the call wins


@pytest.mark.parametrize("kernel", ["sse9", "AVX2", "scalar "])
def test_an_unknown_kernel_set_is_named(kernel, tiny_model, monkeypatch):
    with pytest.raises(KernelUnavailable, match=kernel):
        tiny_model(NAME, kernel=kernel)
    monkeypatch.setenv("PYCASS_KERNEL", kernel)
    with pytest.raises(KernelUnavailable, match=kernel):
        tiny_model(NAME)


# ---- rope ----


def test_rope_scaling_can_be_given_when_loading(tmp_path, tiny_model):
    """The same weights converted without their scaling, and loaded with it."""
    name = "llama_linear"
    config = {k: v for k, v in tiny.SPECS[name].config.items() if k != "rope_scaling"}
    write_hf(tmp_path / "hf", config, tiny.weights(name), tokenizer=False)
    tiny.tokenizer_json(tiny.SPECS[name].n_token).save(str(tmp_path / "hf" / "tokenizer.json"))
    convert(tmp_path / "hf", tmp_path / "m.cass")
    ids, expected = tiny.ids(name), tiny_model(name).logits(tiny.ids(name))
    with Model.load(tmp_path / "m.cass", threads=1) as model:
        assert not np.array_equal(model.logits(ids), expected)
    with Model.load(tmp_path / "m.cass", threads=1, rope_scaling={"rope_type": "linear", "factor": 4.0}) as model:
        assert np.array_equal(model.logits(ids), expected)
    with pytest.raises(PycassError, match="bogus"):
        Model.load(tmp_path / "m.cass", rope_scaling={"rope_type": "bogus"})


def test_the_file_keeps_its_provenance(tiny_model):
    model = tiny_model(NAME)
    assert model.json["provenance"]["source_format"] and json.loads(model.json["tokenizer"])["model"]["type"] == "BPE"


# ---- fork, and arguments of the wrong kind ----


def test_a_forked_child_goes_on(tiny_model):
    """The child has no worker threads; one order means that it needs none for the same bits."""
    model = tiny_model("llama_tied", threads=2)
    expected = model.generate([1, 2, 3], max_tokens=8).token_ids
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            signal.alarm(60)
            os.write(write, repr(model.generate([1, 2, 3], max_tokens=8).token_ids).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as f:
        assert f.read() == repr(expected)
    os.waitpid(pid, 0)
    assert model.generate([1, 2, 3], max_tokens=8).token_ids == expected


@pytest.mark.parametrize(
    "call",
    [
        lambda m: m.generate(None),
        lambda m: m.generate(b"hi"),
        lambda m: m.generate([1], spec=[]),
        lambda m: m.generate([1], seed=-1),
        lambda m: m.generate([1], seed=2**64),
        lambda m: m.logits(None),
        lambda m: m.logits([1] * 2_000_000),
        lambda m: m.save_state("a\0b"),
        lambda m: m.load_state("a\0b"),
        lambda m: Model.load(m.path, kernel=5),
        lambda m: Model.load(m.path, kernel="sca\0lar"),
        lambda m: Model.load(m.path, kernel="\ud800"),
        lambda m: Model.load(m.path, rope_scaling="x"),
        lambda m: Model.load(m.path + "\0"),
        lambda m: CassFile(m.path + "\0"),
    ],
)
def test_wrong_kinds_of_arguments_are_errors_in_words(tiny_model, call):
    with pytest.raises(PycassError):
        call(tiny_model("llama_tied"))
