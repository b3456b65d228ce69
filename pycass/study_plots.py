"""The plots of `pycass study`, each as PNG and SVG. Needs matplotlib."""

import io

import matplotlib

from . import memory, study_report

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402

STYLES = {  # group: marker, colour
    "nest": ("o", "tab:blue"),
    "cass1": ("*", "tab:red"),
    "cass2": ("P", "tab:purple"),
    "pruning": ("v", "tab:orange"),
    "truncation": ("s", "tab:green"),
    "both": ("D", "tab:gray"),
}


def draw(folder) -> list[str]:
    """Draws what there are rows for: the stems of the files."""
    tensors, points, lines = (folder.rows(f"{n}.csv") for n in ("tensors", "points", "memory"))
    plots = {
        "exponents": (exponents, tensors),
        "layers": (layers, [r for r in tensors if r["layer"] is not None]),
        "pruning": (pruning, _with_nest(points, "pruning")),
        "truncation": (truncation, _with_nest(points, "truncation")),
        "tradeoff": (trade_off, points),
        "speed": (speed, [p for p in points if p.get("spec_tps")]),
        "memory": (in_memory, lines),
    }
    done = []
    for stem, (plot, rows) in plots.items():
        if not rows:
            continue
        figure = plot(rows)
        for kind in ("png", "svg"):
            data = io.BytesIO()
            figure.savefig(data, format=kind, dpi=120, bbox_inches="tight")
            folder.write(f"{stem}.{kind}", data.getvalue())
        plt.close(figure)
        done.append(stem)
    return done


def _with_nest(points, group):
    """The points of a group, and nest's to compare with; none if the group has none."""
    some = [p for p in points if p["group"] == group]
    return some and some + [p for p in points if p["group"] == "nest"]


def _axes(x, y, title, size=(7, 4.5)):
    figure, axes = plt.subplots(figsize=size)
    axes.set(xlabel=x, ylabel=y, title=title)
    axes.grid(alpha=0.3)
    return figure, axes


def exponents(rows):
    """Bars by kind of tensor."""
    kinds = study_report.by_kind(rows)
    figure, axes = _axes("", "bits per exponent", "What an exponent takes", (9, 4.5))
    series = (("entropy", "entropy"), ("huffman", "Huffman"), ("unary", "rank-unary"), ("stored_exponent_bits", "as stored"))
    for i, (column, label) in enumerate(series):
        axes.bar([n + 0.2 * (i - 1.5) for n in range(len(kinds))], [k[column] for k in kinds], 0.2, label=label)
    axes.set_xticks(range(len(kinds)), [k["kind"] for k in kinds], rotation=30, ha="right")
    axes.axhspan(2.58, 2.64, color="black", alpha=0.15, label="entropy, the paper")
    axes.axhline(2.85, color="black", ls=":", lw=1, label="rank-unary, the paper")
    axes.set_ylim(0, 1.3 * axes.get_ylim()[1])
    axes.legend(ncols=3, fontsize=8)
    return figure


def layers(rows):
    """Lines over the layers, means of each layer's tensors."""
    by_layer = {}
    for r in rows:
        by_layer.setdefault(r["layer"], []).append(r)
    means = [study_report.mean_of(n, by_layer[n]) for n in sorted(by_layer)]
    figure, axes = _axes("layer", "bits per exponent", "Exponents by layer")
    series = (("entropy", "entropy"), ("huffman", "Huffman"), ("unary", "rank-unary"), ("stored_exponent_bits", "as stored"))
    for column, label in series:
        axes.plot([m["kind"] for m in means], [m[column] for m in means], marker=".", label=label)
    axes.legend(fontsize=8)
    return figure


def _against(rows, key, x, title):
    """Agreement against one setting, with the draft's bits written at the points, and nest as level lines."""
    figure, axes = _axes(x, "greedy agreement", title)
    for half in (False, True):
        some = sorted((p for p in rows if p["group"] != "nest" and bool(p["half"]) == half), key=lambda p: p[key])
        if some:
            axes.plot([p[key] for p in some], [p["agreement"] for p in some], marker="os"[half],
                      label="dropped bits read as a half" if half else "cass1")  # fmt: skip
            for p in some:
                axes.annotate(f"{p['draft_bits']:.1f} b", (p[key], p["agreement"]), fontsize=7, xytext=(3, 4),
                              textcoords="offset points")  # fmt: skip
    for n, p in enumerate(q for q in rows if q["group"] == "nest" and q["point"] in ("nest", "nest hot 16 bias")):
        axes.axhline(p["agreement"], ls=("--", ":")[n], color="tab:blue", lw=1, label=f"{p['point']}, {p['draft_bits']:.2f} b")
    axes.legend(fontsize=8)
    return figure


def pruning(rows):
    """Agreement against the pruned share."""
    return _against(rows, "prune", "share of weights pruned from the draft", "Pruning alone")


def truncation(rows):
    """Agreement against the kept mantissa bits."""
    return _against(rows, "mantissa_bits", "mantissa bits of the draft", "Truncation alone")


def trade_off(points):
    """Agreement against bits: all points and the front."""
    figure, axes = _axes("draft bits per weight", "greedy agreement", "Acceptance against compression", (8, 5))
    for group, (marker, colour) in STYLES.items():
        for half in (False, True):
            some = [p for p in points if p["group"] == group and bool(p["half"]) == half]
            if some:
                axes.scatter([p["draft_bits"] for p in some], [p["agreement"] for p in some], marker=marker, edgecolor=colour,
                             facecolor=colour if half or group == "nest" else "none", s=90 if group in ("cass1", "cass2") else 40,
                             label=group + (", half" if half else ""))  # fmt: skip
    best = study_report.front(points)
    axes.step([p["draft_bits"] for p in best], [p["agreement"] for p in best], where="post", color="black", lw=0.8, alpha=0.6,
              label="best")  # fmt: skip
    axes.legend(fontsize=8, loc="lower right")
    return figure


def speed(rows):
    """Ideal and measured speed-up."""
    figure, axes = _axes("", "times plain decoding of the same file", "Speed-up", (8, 4.5))
    for i, (column, label) in enumerate((("ideal_speedup", "ideal, by bytes"), ("measured_speedup", "measured"))):
        axes.bar([n + 0.35 * (i - 0.5) for n in range(len(rows))], [r[column] for r in rows], 0.35, label=label)
    axes.set_xticks(range(len(rows)), [r["point"] for r in rows], rotation=20, ha="right", fontsize=8)
    axes.axhline(1, color="black", lw=0.8)
    axes.legend(fontsize=8)
    return figure


def in_memory(rows):
    """Memory against context, a panel for each model."""
    models = list(dict.fromkeys(r["model"] for r in rows))
    rows_of_panels = (len(models) + 1) // 2
    figure, panels = plt.subplots(rows_of_panels, 2, figsize=(10, 4.3 * rows_of_panels), squeeze=False)
    for axes, model in zip(panels.flat, models, strict=False):
        some = [r for r in rows if r["model"] == model]
        end = 1.6 * max(some[0]["fixed_bytes"] / some[0]["bytes_per_token"], 1024)
        for r in some:
            axes.plot([0, end / 1000], [r["fixed_bytes"] / 1e9, (r["fixed_bytes"] + r["bytes_per_token"] * end) / 1e9],
                      label=r["scheme"], lw=1.2)  # fmt: skip
        top = axes.get_ylim()[1]
        for b in (b for b in memory.BUDGETS if b < top):
            axes.axhline(b, color="black", lw=0.5, ls=":")
        axes.set(title=model, xlabel="thousands of tokens", ylabel="GB", ylim=(0, None), xlim=(0, None))
        axes.grid(alpha=0.3)
    panels[0][0].legend(fontsize=7)
    figure.tight_layout()
    return figure
