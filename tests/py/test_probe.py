"""Probes: what is counted of a draft, on tiny models and by hand."""

from types import SimpleNamespace

import numpy as np
import pytest

from pycass import Model, bench, probe
from pycass.errors import InvalidArgument
from pycass.file import CassFile


@pytest.fixture
def model(tiny_cass):
    with Model.load(tiny_cass("qwen2"), threads=1) as m:
        yield m


def test_agreement_is_of_the_answers_tokens(model):
    texts = probe.answers(model, ["a", "bcd"], 12)
    assert [len(t.answer) for t in texts] == [12, 12] and texts[0].prompt == bench.prompt_ids(model, "a")
    a = probe.agreement(model, texts)
    assert (a.positions, a.target) == (24, 1) and 0 < a.sampled < 1
    right = 0
    for t in texts:
        for i in range(12):
            ids = t.prompt + t.answer[:i]
            right += model.draft_logits(ids)[-1].argmax() == t.answer[i]
    assert a.greedy == right / 24


def test_agreement_by_hand():
    target = np.log(np.array([[9, 9, 9], [0.5, 0.25, 0.25], [0.1, 0.8, 0.1]]))
    draft = np.log(np.array([[1, 1, 1], [0.25, 0.5, 0.25], [0.2, 0.6, 0.2]]))
    target, draft = (np.append(x, [[9.0]] * 3, axis=1) for x in (target, draft))  # a row of padding
    fake = SimpleNamespace(logits=lambda ids, start: target[start:], draft_logits=lambda ids, start: draft[start:],
                           config=SimpleNamespace(n_token=3))  # fmt: skip
    a = probe.agreement(fake, [probe.Text([7, 7], [0, 0])])
    assert (a.positions, a.greedy, a.target) == (2, 0.5, 0.5) and a.sampled == pytest.approx((0.75 + 0.8) / 2)
    assert probe.agreement(fake, [probe.Text([7, 7], [0, 0])] * 5, limit=-1).positions == 4


def test_steps_count_prefixes(model):
    prompt, n = bench.prompt_ids(model, "hello"), 40
    s = probe.steps(model, prompt, n, 3)
    assert s.length == 3 and s.draft_ms > 0 and s.verify_ms > 0
    answer = model.generate(prompt, n, ignore_eos=True, spec="off").token_ids
    expected, at = [0, 0, 0, 0], 1  # the first token is the prompt's
    while n - at > 3:
        model.reset()
        c = model.generate(prompt + answer[:at], 5, ignore_eos=True, spec="on", draft_max=3, draft_fixed=True)
        accepted = len(next_step(model, prompt + answer[:at]))
        assert c.token_ids == answer[at : at + 5]
        expected[accepted - 1] += 1
        at += accepted
    assert s.prefixes == tuple(expected) and sum(expected) > 3


def next_step(model, ids):
    """The tokens of the first step behind ids, drafts of three: the pending token is ids' last one."""
    stream = model.stream(ids[:-1], 30, ignore_eos=True, spec="on", draft_max=3, draft_fixed=True, spec_ngram=False)
    first = next(stream)
    assert first.token_ids == ids[-1:]
    return next(stream).token_ids


def test_steps_together():
    both = probe.together([probe.Steps((1, 2, 0), 4.0, 10.0), probe.Steps((0, 1, 5), 3.0, 11.0)])
    assert both == probe.Steps((1, 3, 5), 3.0, 10.0)


def test_verification_times_between_and_beyond():
    v = probe.Verify({1: 10.0, 5: 18.0, 9: 20.0})
    assert [v(n) for n in (1, 3, 5, 7, 9, 13)] == [10, 14, 18, 19, 20, 22]
    assert probe.Verify({4: 7.0})(9) == 7 and probe.Verify({1: 1.0, 2: 0.0})(9) == 0


def test_owed_with_tensors_read_wholly(tiny_cass):
    path = tiny_cass("llama_untied")
    plain, some, all_ = (bench.owed(path, p) for p in ((), ("*.v_proj.weight",), ("*",)))
    with CassFile(path) as f:
        values = sum(int(t.verification_bytes) for n, t in f.tensors.items() if n.endswith("v_proj.weight"))
        matrices = sum(t.shape[0] * t.shape[1] for n, t in f.tensors.items() if len(t.shape) == 2 and "embed" not in n)
    assert some.draft - plain.draft == values > 0 and all_.draft == all_.target == plain.target
    assert all_.draft_bits == plain.target_bits > some.draft_bits > plain.draft_bits and plain.weights == matrices
    assert plain.has_draft and not bench.owed(tiny_cass("llama_untied", "raw")).has_draft


def test_decoding_is_counted(model):
    count = probe.decode(model, [bench.prompt_ids(model, t) for t in "ab"], 6, spec="on", draft_max=2)
    assert count.tokens == 12 and count.drafted > 0 and count.tps > 0


def test_logits_from_a_token_on(model):
    ids = list(range(3, 15))
    for f in (model.logits, model.draft_logits):
        whole = f(ids)
        for start in (0, 1, 7, 11):
            assert (f(ids, start) == whole[start:]).all()
        for start in (-1, 12, 13, 1.5):
            with pytest.raises(InvalidArgument):
                f(ids, start)
