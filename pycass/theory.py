"""Formulas without measurements: code lengths, what speculation can gain, trade-offs. Nothing here reads a model."""

import heapq
import math
from collections.abc import Iterable, Sequence

import numpy as np

from .errors import InvalidArgument

BITS = 16  # of a BF16 value
FIXED_BITS = 8  # of them: sign and mantissa, which no exponent code can save

# ---- codes for exponents --------------------------------------------------------------------------------------------


def exponent_counts(bits: np.ndarray) -> np.ndarray:
    """How often each of the 256 biased exponents occurs among BF16 words (uint16): int64 [256]."""
    words = np.zeros(1 << 16, np.int64)
    flat = bits.reshape(-1)
    for at in range(0, flat.size, 1 << 22):  # bincount turns its input to 8 bytes a value
        words += np.bincount(flat[at : at + (1 << 22)], minlength=1 << 16)
    return words.reshape(2, 256, 128).sum(axis=(0, 2))


def entropy(counts: Iterable[int]) -> float:
    """Bits a symbol that no code can go below, for symbols that occur this often."""
    counts = _positive(counts)
    total = sum(counts)
    return sum(c / total * math.log2(total / c) for c in counts)


def huffman(counts: Iterable[int]) -> float:
    """Bits a symbol of the best prefix code: Huffman's. A lone symbol takes one."""
    heap = _positive(counts)
    total = sum(heap)
    if len(heap) == 1:
        return 1.0
    heapq.heapify(heap)
    spent = 0
    while len(heap) > 1:
        both = heapq.heappop(heap) + heapq.heappop(heap)
        spent += both  # every symbol below this node gets one bit longer
        heapq.heappush(heap, both)
    return spent / total


def rank_unary(counts: Iterable[int]) -> float:
    """Bits a symbol if the most frequent one is written 1, the next 01, then 001, ..."""
    ranked = sorted(_positive(counts), reverse=True)
    return sum(length * c for length, c in enumerate(ranked, 1)) / sum(ranked)


def _positive(counts) -> list[int]:
    counts = [int(c) for c in counts if c]
    if not counts or min(counts) < 0:
        raise InvalidArgument("counts of symbols must not be negative, nor all zero")
    return counts


# ---- what speculation gains ----------------------------------------------------------------------------------------


def tokens_per_step(alpha: float, gamma: int) -> float:
    """Tokens of a step with gamma drafted ones, each right with probability alpha if those before it are:
    (1 - alpha^(gamma + 1)) / (1 - alpha). The target's own token is counted."""
    if not 0 <= alpha <= 1 or gamma < 0:
        raise InvalidArgument(f"alpha = {alpha}, gamma = {gamma}: a probability and a length are needed")
    return sum(alpha**i for i in range(gamma + 1))


def tokens_of_prefixes(prefixes: Sequence[int], gamma: int) -> float:
    """The same, measured: prefixes[n] steps accepted n tokens of len(prefixes) - 1 drafted ones; with the first gamma
    of them alone a step has 1 + the mean of min(n, gamma) tokens."""
    if not 0 <= gamma < len(prefixes) or sum(prefixes) <= 0:
        raise InvalidArgument(f"gamma = {gamma} of {len(prefixes) - 1} drafted tokens in {sum(prefixes)} steps")
    return 1 + sum(min(n, gamma) * count for n, count in enumerate(prefixes)) / sum(prefixes)


def speed_up(tokens: float, gamma: int, draft: float, target: float, plain: float | None = None) -> float:
    """How much faster a token comes: tokens * plain / (gamma * draft + target). The prices of a draft pass, of a
    verification and of a plain pass (None: as the verification) are in one unit: bytes, or milliseconds."""
    cost = gamma * draft + target
    if cost <= 0:
        raise InvalidArgument("passes that cost nothing have no speed")
    return tokens * (target if plain is None else plain) / cost


def best_length(alpha: float, draft: float, target: float, longest: int = 16) -> int:
    """The draft length 1..longest of the greatest ideal speed-up."""
    return max(range(1, longest + 1), key=lambda g: speed_up(tokens_per_step(alpha, g), g, draft, target))


def paper_objective(
    alpha: float, weights: float, weight_bits: float, cache: float = 0.0, cache_bits: float = float(BITS)
) -> float:
    """J = alpha / (Sw (1 - wp) (B - wt) + Skv (1 - kvp) (B - kvt)), per gigabit: acceptance over what a draft pass
    reads. weights, cache: numbers of values, Sw and Skv; *_bits: the draft's bits for each, for the paper's codec
    (1 - pruned share) (16 - truncated bits)."""
    read = weights * weight_bits + cache * cache_bits
    if read <= 0:
        raise InvalidArgument("a draft that reads nothing has no objective")
    return 1e9 * alpha / read


def pareto(points: Sequence[tuple[float, float]]) -> list[int]:
    """Indices of the points (cost, worth) that no other one beats: none is as cheap and worth more, or cheaper and
    worth as much. By cost; of equal points the first."""
    order = sorted(range(len(points)), key=lambda i: (points[i][0], -points[i][1], i))
    front, best = [], -math.inf
    for i in order:
        if points[i][1] > best:
            front.append(i)
            best = points[i][1]
    return front
