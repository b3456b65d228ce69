"""Formulas against values worked out by hand."""

import math
from fractions import Fraction

import numpy as np
import pytest

from pycass import memory, theory
from pycass.errors import InvalidArgument


def test_exponents_are_counted():
    words = np.array([[0x3F80, 0xBF80, 0x3FFF], [0x0000, 0x8001, 0x7F80]], np.uint16)
    counts = theory.exponent_counts(words)
    assert counts.shape == (256,) and counts.sum() == 6
    assert (counts[127], counts[0], counts[255]) == (3, 2, 1)


def test_code_lengths():
    halves = [1, 1, 2, 4]  # probabilities 1/8, 1/8, 1/4, 1/2
    assert theory.entropy(halves) == theory.huffman(halves) == 1.75
    assert theory.rank_unary(halves) == (1 * 4 + 2 * 2 + 3 + 4) / 8 == 1.875
    assert theory.entropy([5, 0, 5, 5, 5]) == 2 and theory.rank_unary([5, 5, 5, 5]) == 2.5
    # 6: 1 bit; 5: 2 bits; 2 and 2: 3 bits
    assert theory.huffman([2, 5, 2, 6]) == (6 + 10 + 6 + 6) / 15
    assert theory.entropy([1, 2]) == pytest.approx(math.log2(3) - 2 / 3, abs=1e-15)
    assert theory.huffman([1, 2]) == 1
    assert (theory.entropy([7]), theory.huffman([7]), theory.rank_unary([7])) == (0, 1, 1)


@pytest.mark.parametrize("counts", [[], [0, 0], [3, -1]])
def test_what_is_no_count(counts):
    for f in (theory.entropy, theory.huffman, theory.rank_unary):
        with pytest.raises(InvalidArgument):
            f(counts)


def test_tokens_per_step():
    assert theory.tokens_per_step(0.5, 3) == 1.875 == (1 - 0.5**4) / (1 - 0.5)
    assert theory.tokens_per_step(1, 5) == 6 and theory.tokens_per_step(0, 5) == 1 and theory.tokens_per_step(0.3, 0) == 1
    for alpha, gamma in ((1.1, 2), (-0.1, 2), (0.5, -1)):
        with pytest.raises(InvalidArgument):
            theory.tokens_per_step(alpha, gamma)


def test_tokens_of_prefixes():
    prefixes = [2, 0, 1, 1]  # of four steps two accepted none of three tokens
    assert [theory.tokens_of_prefixes(prefixes, g) for g in range(4)] == [1, 1.5, 2, 2.25]
    for bad, gamma in (([0, 0], 1), ([1, 1], 2), ([1, 1], -1)):
        with pytest.raises(InvalidArgument):
            theory.tokens_of_prefixes(bad, gamma)


def test_speed_up():
    assert theory.speed_up(3, 4, draft=25, target=100) == 1.5
    assert theory.speed_up(3, 4, draft=25, target=100, plain=200) == 3
    assert theory.best_length(0.0, 1, 4) == 1 and theory.best_length(1.0, 1, 4) == 16
    # 1.5 * 4 / 5 = 1.2, 1.75 * 4 / 6 = 1.167
    assert theory.best_length(0.5, 1, 4) == 1
    with pytest.raises(InvalidArgument):
        theory.speed_up(1, 0, 0, 0)


def test_the_papers_objective():
    # 40 % pruned, 4 bits truncated: 0.6 * 12 = 7.2 bits of 1e9 weights, 16 of 1e8 cache values
    assert theory.paper_objective(0.9, 1e9, 0.6 * 12) == pytest.approx(0.125)
    assert theory.paper_objective(0.88, 1e9, 7.2, 1e8) == pytest.approx(0.1)
    with pytest.raises(InvalidArgument):
        theory.paper_objective(0.9, 0, 4)


def test_the_front():
    points = [(4, 0.9), (3, 0.8), (5, 0.9), (3, 0.7), (2, 0.85), (4, 0.9), (6, 0.95)]
    assert theory.pareto(points) == [4, 0, 6]
    assert theory.pareto([]) == []


# ---- memory ---------------------------------------------------------------------------------------------------------


TINY = memory.Shape("tiny", n_layer=2, n_embd=8, n_ff=10, n_head=4, n_head_kv=2, head_dim=3, n_vocab=20)


def test_weights_of_known_models():
    known = {
        memory.LLAMA_8B: 8030261248,
        memory.QWEN_7B: 7615616512,
        memory.QWEN_14B: 14770033664,
        memory.LLAMA_1B: 1235814400,
        memory.LLAMA_3B: 3212749824,
        memory.QWEN_05B: 494032768,
    }  # as their checkpoints count them
    assert {shape: shape.weights for shape in known} == known


def test_memory_of_a_tiny_model():
    matrices = 2 * (8 * 12 * 2 + 8 * 6 * 2 + 3 * 80) + 2 * 160
    vectors = 2 * 16 + 8
    assert (TINY.matrix_weights, TINY.vector_weights, TINY.kv_values) == (matrices, vectors, 24) == (1376, 40, 24)
    plain = memory.plain(TINY)
    assert (plain.fixed, plain.per_token, plain.memory(10)) == (2832, 48, 3312)
    assert [plain.longest(b) for b in (2831, 2832, 2879, 2880, 3312)] == [0, 0, 0, 1, 10]
    both = memory.separate(TINY, TINY)
    assert (both.fixed, both.per_token) == (5664, 96)
    assert memory.eagle_weights(TINY) == 3 * 64 + (16 * 12 + 2 * 16 * 6 + 8 * 12) + 240 + 32000 * 8 + 32
    head = memory.eagle(TINY)
    assert (head.fixed, head.per_token) == (2832 + 2 * memory.eagle_weights(TINY), 48 + 24)
    split = memory.codec(TINY, "c", 10, cache_bits=12)
    assert (split.fixed, split.per_token) == (1376 * 10 / 8 + 80, 36)
    with pytest.raises(InvalidArgument):
        memory.codec(TINY, "c", 0)


def test_bias_and_tying_count():
    other = memory.Shape("o", 2, 8, 10, 4, 2, 3, 20, tied=True, qkv_bias=True)
    assert TINY.matrix_weights - other.matrix_weights == 160 and other.vector_weights - TINY.vector_weights == 2 * 24


def test_schemes_of_a_model():
    found = memory.schemes(TINY, TINY, {"nest": 11})
    assert [s.name for s in found] == ["BF16", "draft model (tiny)", "EAGLE-3", "nest", "the paper's"]
    assert len(memory.schemes(TINY, None, {})) == 3
    assert found[3].per_token == found[0].per_token > found[4].per_token
    both = memory.schemes(TINY, None, {"nest": 11, "c": 10}, {"nest": 12.0})
    assert [s.name for s in both[2:]] == ["nest", "nest, cache too", "c", "the paper's"] and both[3].per_token == 36


def test_the_papers_ratios():
    by_draft = {r["draft"]: r for r in memory.paper_comparison()}
    assert set(by_draft) == {"Llama-3.2-1B", "Llama-3.2-3B", ""}
    coded = Fraction(139, 160)  # of BF16's bytes
    weights = Fraction(2 * 8030261248) * coded  # norms are nearly nothing
    tokens = (24 * 10**9 - weights) / (131072 * coded)
    for draft, row in by_draft.items():
        assert row["cache_coded"] == pytest.approx(float(tokens) / row["tokens"], rel=1e-3), draft
    assert by_draft[""]["tokens"] == (24 * 10**9 - 2 * 8030261248 - 2 * memory.eagle_weights(memory.LLAMA_8B)) // (33 * 4096)
    none = memory.paper_comparison(budget=10**9)
    assert {r["cache_coded"] for r in none} == {None}
