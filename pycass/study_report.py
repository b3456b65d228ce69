"""The report of `pycass study`: Markdown and plots from the rows that are in the folder."""

import statistics

from . import memory, study, theory
from .errors import PycassError

PAPER = {"entropy": "2.58-2.64", "unary": "2.85"}  # bits of a weight's exponent that the paper reports
GROUPS = {
    "nest": "nest: plain, with hot columns, with a bias",
    "cass1": "cass1, the paper's setting: 40 % pruned, 3 mantissa bits; raw: pruned weights stored as they are, as in the paper",
    "cass2": "cass2, the paper's setting",
    "pruning": "cass1, pruning alone: every mantissa bit of what stays",
    "truncation": "cass1, truncation alone: nothing pruned",
    "both": "cass1, pruned and truncated",
}
NO_PLOTS = "plots need matplotlib: pip install 'pycass[study]'"


def require_plots(wanted: bool, console) -> bool:
    """Whether plots can be made; says so if they were wanted and cannot."""
    if not wanted:
        return False
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        console.note(f"the report will have no plots: {NO_PLOTS}")
        return False
    return True


def write(folder, plan, console):
    """report.md, and plots if matplotlib is there and they are wanted. The report's path."""
    pictures = []
    if plan.plots:
        try:
            from . import study_plots

            pictures = study_plots.draw(folder)
        except ImportError:
            pass  # was said at the start
    text = report(folder, plan.name, pictures, plan.plots and not pictures)
    folder.write("report.md", text)
    return folder.path / "report.md"


def report(folder, name, pictures=(), no_plots=False) -> str:
    """The whole text."""
    tensors, points = folder.rows("tensors.csv"), folder.rows("points.csv")
    machine = study.machine()
    parts = [
        f"# A study of {name}",
        f"Made on {machine['cpu']}, {machine['cpus']} CPUs ({machine['system']}). "
        "The figures stand in the CSV files beside this text." + (f"\n\nNo plots: {NO_PLOTS}." if no_plots else ""),
        exponents(tensors),
        *_show(pictures, "exponents", "layers"),
        trade_off(points, folder.about["tokens"]),
        *_show(pictures, "pruning", "truncation", "tradeoff"),
        speed(points),
        *_show(pictures, "speed"),
        in_memory(folder.rows("memory.csv"), folder.rows("ratios.csv"), study.codec_bits(points), folder.rows("cache.csv")),
        *_show(pictures, "memory"),
    ]
    return "\n\n".join(p for p in parts if p) + "\n"


def _show(pictures, *stems):
    return [f"![{s}]({s}.png)" for s in stems if s in pictures]


def table(titles, rows) -> str:
    """A Markdown table; numbers are given as text, None is empty."""
    lines = [titles, ["---"] + ["---:"] * (len(titles) - 1), *rows]
    return "\n".join("| " + " | ".join("" if c is None else str(c) for c in line) + " |" for line in lines)


def _number(x, digits):
    return None if x is None else f"{x:.{digits}f}"


# ---- exponents ------------------------------------------------------------------------------------------------------


def by_kind(rows) -> list[dict]:
    """Means over the tensors of a kind, by weights; the last one of all."""
    kinds = {}
    for r in rows:
        kinds.setdefault(r["kind"], []).append(r)
    found = [mean_of(kind, some) for kind, some in kinds.items()]
    return [*found, mean_of("all", rows)] if rows else []


def mean_of(kind, rows) -> dict:
    """Means by weights of rows of tensors.csv."""
    columns = ("entropy", "huffman", "unary", "stored_bits", "stored_exponent_bits", "draft_bits")
    weights = sum(r["weights"] for r in rows)
    means = {c: sum(r[c] * r["weights"] for r in rows) / weights for c in columns}
    return {"kind": kind, "tensors": len(rows), "weights": weights} | means


def exponents(rows) -> str:
    """The section on exponents."""
    if not rows:
        return ""
    codecs = sorted({r["codec"] for r in rows})
    lines = [
        [k["kind"], k["tensors"], f"{k['weights'] / 1e6:.1f}", *(_number(k[c], 3) for c in ("entropy", "huffman", "unary")),
         _number(k["stored_exponent_bits"], 3), _number(k["stored_bits"], 3)]
        for k in by_kind(rows)
    ]  # fmt: skip
    lines.append(["the paper", None, None, PAPER["entropy"], None, PAPER["unary"], None, None])
    titles = ["tensors", "number", "M weights", "entropy", "Huffman", "rank-unary", "as stored", "bits per weight"]
    low, high = (f(rows, key=lambda r: r["entropy"]) for f in (min, max))
    return "\n\n".join([
        "## Exponents",
        "Bits that the exponent of a weight takes: the entropy of its distribution in a tensor, Huffman's code, the "
        f"paper's rank-unary code (a code book per tensor), and what this file ({', '.join(codecs)}) spends: all its "
        "bits, draft's and target's, padding included, less sign and seven mantissa bits. Means by weights.",
        table(titles, lines),
        f"Entropy per tensor runs from {low['entropy']:.3f} ({low['tensor']}) to {high['entropy']:.3f} "
        f"({high['tensor']}), with a median of {statistics.median(r['entropy'] for r in rows):.3f}. Every tensor is in "
        "`tensors.csv`.",
    ])  # fmt: skip


# ---- acceptance against compression ---------------------------------------------------------------------------------


def front(points) -> list[dict]:
    """The points that no other one beats in both bits and agreement."""
    return [points[i] for i in theory.pareto([(p["draft_bits"], p["agreement"]) for p in points])]


def trade_off(points, tokens) -> str:
    """The section on agreement against bits."""
    if not points:
        return "## Acceptance against compression\n\nNothing was measured yet."
    best = {p["point"] for p in front(points)}
    n = max(p["positions"] for p in points)
    worst = max((p["agreement"] * (1 - p["agreement"]) / p["positions"]) ** 0.5 for p in points)
    parts = [
        "## Acceptance against compression",
        f"Teacher-forced: over the model's own greedy answers to the development prompts ({tokens} tokens each, {n} "
        "positions; fewer of the first ones where a draft is slow on this machine), how often the draft's most likely token is the target's (greedy), and the mean of sum(min(p, q)), "
        "which is the acceptance of rejection sampling at temperature 1 (sampled). Bits: draft data per matrix weight "
        f"that a pass reads; total: of the whole file. One standard error of the greedy column is at most {worst:.3f}. "
        "A star marks points that no other one beats in both draft bits and greedy agreement. `half`: dropped mantissa "
        "bits are read as a half, not as zero.",
    ]
    for group, title in GROUPS.items():
        some = [p for p in points if p["group"] == group]
        if some:
            lines = [[p["point"] + (" *" if p["point"] in best else ""), _number(p["draft_bits"], 2),
                      _number(p["total_bits"], 2), _number(p["agreement"], 3), _number(p["sampled"], 3), p["positions"]]
                     for p in some]  # fmt: skip
            parts += [f"**{title}**", table(["draft", "bits", "total", "greedy", "sampled", "positions"], lines)]
    changed = [p for p in points if p["target"] < 1]
    if changed:
        text = ", ".join(f"{p['point']}: {p['target']:.3f}" for p in changed)
        parts.append(
            "The token that the file gave as it was is not always the most likely token of these targets; it is this often: "
            f"{text}. cass2 changes weights; with hot columns the weights are the same, but sums have another order, so that "
            "nearly equal logits may change places."
        )
    else:
        parts.append("Every target gave the model's own token at every position.")
    return "\n\n".join(parts)


# ---- speed ----------------------------------------------------------------------------------------------------------


def speed(points) -> str:
    """The section on speed."""
    rows = [p for p in points if p.get("spec_tps")]
    if not rows:
        return ""
    lines = [
        [p["point"], f"{p['draft_bytes'] / 1e6:.1f}", f"{p['target_bytes'] / 1e6:.1f}", _number(p["accept"], 3),
         _number(p["ideal_speedup"], 2), _number(p["measured_speedup"], 2), _number(p["ideal_over_bf16"], 2),
         *(_number(p[k], 2) for k in ("plain_tps", "spec_tps", "adaptive_tps"))]
        for p in rows
    ]  # fmt: skip
    gamma = rows[0]["gamma"]
    titles = ["draft", "draft MB", "target MB", "accepted", "ideal", "measured", "ideal over BF16", "plain t/s",
              "speculative t/s", "adaptive t/s"]  # fmt: skip
    return "\n\n".join([
        "## Speed",
        f"Drafts of gamma = {gamma} tokens. Ideal, by bytes: E P / (gamma D + V), with E = (1 - a^(gamma + 1)) / (1 - a) "
        "tokens of a step, a the greedy agreement of the table above, D and V the bytes of weights of a draft pass and of a "
        "verification; P is V for the ideal over plain decoding of the same file, and two bytes a weight over BF16. "
        "Measured: the engine on this machine, greedy, drafts of exactly gamma tokens and no look-ups, over plain decoding "
        "of the same file; accepted is of the tokens drafted there. Adaptive: the engine chooses the length up to gamma and "
        "looks up too.",
        table(titles, lines),
    ])  # fmt: skip


# ---- memory ---------------------------------------------------------------------------------------------------------


def in_memory(rows, ratios, bits, caches=()) -> str:
    """The section on memory."""
    if not rows:
        return ""
    assumed = {k: v for k, v in study.TYPICAL_BITS.items() if k not in bits}
    cached = ", ".join(f"{r['cache']} {r['bits']:.2f}, of which the draft reads {r['draft_bits']:.2f}" for r in caches)
    spoken = ", ".join(f"{k} {v:.2f}" for k, v in bits.items()) or "none"
    parts = [
        "## Memory against context",
        "From first principles: memory = weights + tokens x cache per token. Assumptions:",
        "\n".join([
            "- weights and cache only: no activations, logits, code, allocator or operating system; GB are 10^9 bytes;",
            "- one sequence; keys and values of every layer are kept for every token, in BF16 unless a scheme says otherwise;",
            "- norms and biases are BF16; every matrix, embeddings included, takes a codec's bits per weight;",
            f"- bits per weight, measured above: {spoken}"
            + (f"; assumed: {', '.join(f'{k} {v:g}' for k, v in assumed.items())};" if assumed else ";"),
            "- a separate draft model is BF16 and keeps a cache of its own for the same tokens: Llama-3.2-1B for Llama, "
            "Qwen2.5-0.5B for Qwen;",
            "- an EAGLE-3 head is BF16: a projection of three hidden states, one decoder layer of the target's sizes whose "
            f"attention reads twice the width, an output matrix of {memory.EAGLE_VOCAB} rows; it keeps one layer of cache;",
            f"- bits per cache value, measured on this model's answers: {cached or 'none'}; \"cache too\" has the cache encoded so, "
            "all of it, though the newest 32 to 95 tokens stay BF16;",
            f"- the paper's own scheme: {memory.PAPER_BITS} bits per weight, and the cache coded in as many per value;",
            "- which three models the paper took is not known here: one of 8B (Llama 3), 7B and 14B (Qwen2.5) are assumed, "
            "by their public shapes.",
        ]),
        "Longest context in tokens, by memory:",
    ]  # fmt: skip
    for model in dict.fromkeys(r["model"] for r in rows):
        lines = [
            [r["scheme"], f"{r['fixed_bytes'] / 1e9:.2f}", f"{r['bytes_per_token'] / 1024:.1f}",
             *(f"{r[f'tokens_{b}_GB']:,}" for b in memory.BUDGETS)]
            for r in rows if r["model"] == model
        ]  # fmt: skip
        titles = [model, "weights, GB", "KiB per token", *(f"{b} GB" for b in memory.BUDGETS)]
        parts.append(table(titles, lines))
    return "\n\n".join([*parts, _ratios(ratios)])


def _ratios(ratios) -> str:
    lines = [
        [r["against"] + (f", {r['draft']}" if r["draft"] else ""), r["GB"], f"{r['tokens']:,}", _number(r["cache_coded"], 2),
         _number(r["cache_bf16"], 2), r["paper"]]
        for r in ratios
    ]  # fmt: skip
    return "\n\n".join([
        "The paper reports 11.59 times the tokens of a separate draft model and 1.81 times those of EAGLE-3 in 24 GB. For "
        f"the 8B model at {memory.PAPER_BITS} bits per weight:",
        table(["against", "memory", "its tokens", "ratio, cache coded", "ratio, cache BF16", "the paper"], lines),
        _verdict(ratios),
    ])  # fmt: skip


def _verdict(ratios) -> str:
    """Where the paper's ratios come out, in sentences."""
    out = []
    for against, said in memory.PAPER_RATIOS.items():
        some = [r for r in ratios if r["against"] == against and r["cache_coded"]]
        near = min(some, key=lambda r: abs(r["cache_coded"] - said))
        off = near["cache_coded"] / said - 1
        how = f"{near['draft']}, {near['GB']}" if near["draft"] else near["GB"]
        word = "is reproduced" if abs(off) <= 0.1 else "is not reproduced"
        out.append(f"{said} against {'a ' * ('draft' in against)}{against} {word}: the nearest assumption ({how}) gives "
                   f"{near['cache_coded']:.2f}, {100 * off:+.0f} %.")  # fmt: skip
        same = sorted(r["cache_coded"] for r in some if r["draft"] == near["draft"])
        if abs(off) > 0.1 and same[0] < said < same[-1]:
            out.append(f"It lies between {same[0]:.2f} and {same[-1]:.2f}, what 24 GiB and 24 GB give.")
    out.append(
        "The first ratio hangs on what the weights of target and draft leave free: with the 3B draft that is "
        "little, so that it moves between the lines for GB and GiB by nearly a factor of two."
    )
    return " ".join(out)


def as_text(path) -> str:
    """What the command prints."""
    if path is None:
        raise PycassError("nothing was measured")
    return str(path)
