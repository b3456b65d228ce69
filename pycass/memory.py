"""How much memory decoding takes against the length of the context, from a model's shape alone.

memory(tokens) = fixed + per_token * tokens, in bytes. Assumptions, of all schemes:

- weights and cache only: no activations, logits, code, allocator or system;
- one sequence; keys and values of every layer are kept for every token, as BF16 unless a scheme says otherwise;
- norms and biases are BF16; all matrices, embeddings included, take a scheme's bits per weight.
"""

from dataclasses import dataclass

from .errors import InvalidArgument

GB = 10**9
BUDGETS = (8, 12, 16, 24, 32, 64)  # GB


@dataclass(frozen=True)
class Shape:
    """A decoder-only transformer with gated feed-forward layers."""

    name: str
    n_layer: int
    n_embd: int
    n_ff: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_vocab: int
    tied: bool = False
    qkv_bias: bool = False

    @property
    def matrix_weights(self) -> int:
        """Weights in matrices."""
        attention = self.n_embd * self.head_dim * (2 * self.n_head + 2 * self.n_head_kv)
        layer = attention + 3 * self.n_embd * self.n_ff
        return self.n_layer * layer + self.n_vocab * self.n_embd * (1 if self.tied else 2)

    @property
    def vector_weights(self) -> int:
        """Weights in norms and biases."""
        bias = self.head_dim * (self.n_head + 2 * self.n_head_kv) if self.qkv_bias else 0
        return self.n_layer * (2 * self.n_embd + bias) + self.n_embd

    @property
    def weights(self) -> int:
        """All weights."""
        return self.matrix_weights + self.vector_weights

    @property
    def kv_values(self) -> int:
        """Values that a token has in the cache."""
        return 2 * self.n_layer * self.n_head_kv * self.head_dim


LLAMA_8B = Shape("Llama-3.1-8B", 32, 4096, 14336, 32, 8, 128, 128256)
QWEN_7B = Shape("Qwen2.5-7B", 28, 3584, 18944, 28, 4, 128, 152064, qkv_bias=True)
QWEN_14B = Shape("Qwen2.5-14B", 48, 5120, 13824, 40, 8, 128, 152064, qkv_bias=True)
LLAMA_1B = Shape("Llama-3.2-1B", 16, 2048, 8192, 32, 8, 64, 128256, tied=True)
LLAMA_3B = Shape("Llama-3.2-3B", 28, 3072, 8192, 24, 8, 128, 128256, tied=True)
QWEN_05B = Shape("Qwen2.5-0.5B", 24, 896, 4864, 14, 2, 64, 151936, tied=True, qkv_bias=True)
MODELS = ((LLAMA_8B, LLAMA_1B), (QWEN_7B, QWEN_05B), (QWEN_14B, QWEN_05B))  # and their draft models
EAGLE_VOCAB = 32000  # rows of an EAGLE-3 head's own output matrix
# Bytes of an encoded KV cache, of BF16: the larger of SmolLM2-135M (heads of 64) and Qwen2.5-Coder-1.5B (128), of 1,024 tokens
# of English; the newest tokens stay BF16.
CACHE_RATIOS = {"raw": 1.0, "nest": 0.705, "cass1": 0.845, "cass2": 0.765}
CACHE_PLAIN = 96  # tokens, at most
PAPER_BITS = 13.9  # per weight of Cassandra-1 as the paper stores it: exponents of verification data untouched
PAPER_RATIOS = {"separate draft model": 11.59, "EAGLE-3": 1.81}  # tokens in 24 GB that it reports


@dataclass(frozen=True)
class Scheme:
    """What a way to decode keeps in memory, in bytes."""

    name: str
    fixed: float
    per_token: float

    def memory(self, tokens: float) -> float:
        """Bytes with this many tokens of context."""
        return self.fixed + self.per_token * tokens

    def longest(self, budget: float) -> int:
        """Tokens that fit into this many bytes; 0 if not even the weights do."""
        return max(0, int((budget - self.fixed) // self.per_token))


def plain(shape: Shape) -> Scheme:
    """BF16, without speculation."""
    return Scheme("BF16", 2 * shape.weights, 2 * shape.kv_values)


def separate(shape: Shape, draft: Shape) -> Scheme:
    """A second model, in BF16, that keeps a cache of its own for the same tokens."""
    a, b = plain(shape), plain(draft)
    return Scheme(f"draft model ({draft.name})", a.fixed + b.fixed, a.per_token + b.per_token)


def eagle_weights(shape: Shape) -> int:
    """Weights of an EAGLE-3 head: a projection of three hidden states to one; a decoder layer whose attention reads the
    token's embedding beside the hidden state, hence twice the width; an output matrix of EAGLE_VOCAB rows; norms. The
    embedding is the target's."""
    fuse = 3 * shape.n_embd * shape.n_embd
    attention = shape.head_dim * (2 * shape.n_embd * (shape.n_head + 2 * shape.n_head_kv) + shape.n_embd * shape.n_head)
    return fuse + attention + 3 * shape.n_embd * shape.n_ff + EAGLE_VOCAB * shape.n_embd + 4 * shape.n_embd


def eagle(shape: Shape) -> Scheme:
    """The target in BF16 and an EAGLE-3 head in BF16, which keeps one layer of cache."""
    a = plain(shape)
    return Scheme("EAGLE-3", a.fixed + 2 * eagle_weights(shape), a.per_token + 2 * shape.kv_values / shape.n_layer)


def codec(shape: Shape, name: str, bits: float, cache_bits: float = 16.0) -> Scheme:
    """A split file: `bits` per matrix weight for draft and target together; no further weights, and one cache, which
    both use, of cache_bits a value."""
    if not 0 < bits or not 0 < cache_bits:
        raise InvalidArgument(f"{name}: {bits} bits a weight, {cache_bits} a cache value")
    return Scheme(name, shape.matrix_weights * bits / 8 + 2 * shape.vector_weights, shape.kv_values * cache_bits / 8)


def schemes(shape: Shape, draft: Shape | None, codecs: dict[str, float], caches: dict[str, float] | None = None) -> list[Scheme]:
    """All schemes of a model: BF16, a draft model if there is one, EAGLE-3, each codec {name: bits per weight}, with a BF16
    cache and, if caches {name: bits per value} has it, with one that is encoded by the same codec; and what the paper
    stores, with a cache that is coded as its weights are."""
    found = [plain(shape), *([separate(shape, draft)] if draft else []), eagle(shape)]
    for name, bits in codecs.items():
        found.append(codec(shape, name, bits))
        if name in (caches or {}):
            found.append(codec(shape, f"{name}, cache too", bits, caches[name]))
    return [*found, codec(shape, "the paper's", PAPER_BITS, PAPER_BITS)]


def cached(config, weights: int, kv: str) -> Scheme:
    """A file of `weights` bytes with that kind of KV cache, and what the engine's attention takes for a token of context: eight
    scores of each head, and its id."""
    values = 4 * config.n_layer * config.n_head_kv * config.head_dim
    ratio = CACHE_RATIOS[kv]
    return Scheme(kv, weights + CACHE_PLAIN * values * (1 - ratio), values * ratio + 32 * config.n_head + 4)


def shape_of(config, name: str, qkv_bias: bool = False) -> Shape:
    """The Shape of a `pycass.file.Config`."""
    fields = ("n_layer", "n_embd", "n_ff", "n_head", "n_head_kv", "head_dim", "n_vocab")
    return Shape(name, *(getattr(config, f) for f in fields), tied=config.tied_embedding, qkv_bias=qkv_bias)


def paper_comparison(shape: Shape = LLAMA_8B, budget: float = 24 * GB) -> list[dict]:
    """The paper's two ratios beside the model's: rows {against, draft, paper, with cache coded, cache BF16}."""
    coded = codec(shape, "", PAPER_BITS, PAPER_BITS).longest(budget)
    bf16 = codec(shape, "", PAPER_BITS).longest(budget)
    others = [("separate draft model", separate(shape, d), d.name) for d in (LLAMA_1B, LLAMA_3B)]
    rows = []
    for against, scheme, draft in [*others, ("EAGLE-3", eagle(shape), "")]:
        n = scheme.longest(budget)
        rows.append(
            {
                "against": against,
                "draft": draft,
                "tokens": n,
                "paper": PAPER_RATIOS[against],
                "cache_coded": coded / n if n else None,
                "cache_bf16": bf16 / n if n else None,
            }
        )
    return rows
