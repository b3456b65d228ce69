"""`pycass perplexity`: how well a model predicts a text, and how close its draft comes."""

import math

import numpy as np

from .errors import InvalidArgument

TOO_SHORT = "a context of at least 2 tokens is needed: each token is predicted from those before it"
_ROWS = 64  # rows of logits turned to float64 at a time


def perplexity(model, text, draft=False, console=None):
    """An object with tokens, mean_nll, perplexity; with draft also the draft's, the KL divergence of the draft from
    the target, and how often their most likely tokens agree."""
    if model.n_ctx < 2:
        raise InvalidArgument(TOO_SHORT)
    ids = model.tokenizer.encode(text)
    windows = [ids[i : i + model.n_ctx] for i in range(0, len(ids), model.n_ctx)]
    windows = [w for w in windows if len(w) > 1]
    if not windows:
        raise InvalidArgument("the text has fewer than two tokens")
    total = np.zeros(5)
    for n, window in enumerate(windows):
        total += _window(model, window, draft)
        if console:
            console.detail(f"window {n + 1} of {len(windows)}: perplexity {math.exp(total[1] / total[0]):.4f}")
    count, nll, draft_nll, kl, agree = total
    found = {"tokens": len(ids), "predicted": int(count), "mean_nll": nll / count, "perplexity": math.exp(nll / count)}
    if draft:
        found |= {
            "draft_perplexity": math.exp(draft_nll / count),
            "kl_divergence": kl / count,
            "agreement": agree / count,
        }
    return found


def _window(model, ids, draft):
    """Sums over the window: tokens, nll, the draft's nll, KL, agreements."""
    targets = np.asarray(ids[1:])
    logits = model.logits(ids)[:-1]
    drafts = model.draft_logits(ids)[:-1] if draft else None
    total = np.zeros(5)
    for i in range(0, len(targets), _ROWS):
        rows = slice(i, i + _ROWS)
        p = _log_softmax(logits[rows])
        n = np.arange(len(p))
        total[:2] += len(p), -p[n, targets[rows]].sum()
        if drafts is not None:
            q = _log_softmax(drafts[rows])
            total[2:] += (
                -q[n, targets[rows]].sum(),
                (np.exp(p) * (p - q)).sum(),
                (p.argmax(1) == q.argmax(1)).sum(),
            )
    return total


def _log_softmax(logits):
    x = logits.astype(np.float64)
    x -= x.max(axis=1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=1, keepdims=True))


def as_text(found):
    """perplexity()'s object for people."""
    lines = [f"perplexity {found['perplexity']:.4f} over {found['predicted']} tokens"]
    if "agreement" in found:
        lines.append(
            f"draft: perplexity {found['draft_perplexity']:.4f}, KL divergence {found['kl_divergence']:.5f}, "
            f"same most likely token {100 * found['agreement']:.2f} %"
        )
    return "\n".join(lines)
