"""What a model's activations are like on a text: which input channels are large, and their means.

The statistics are those of the engine's own forward pass with the target (pycass_session_observe). Matrices that get the
same activations share them: q, k and v; gate and up.
"""

from dataclasses import dataclass

import numpy as np

from ..errors import ConversionError

PART_RMS, PART_MEAN = 0x80000001, 0x80000002  # part types; readers may ignore them
PASS_TOKENS = 512  # samples are joined to texts of about so many tokens: long passes are fast
_LAYER = "model.layers.{}."
_PRODUCTS = (  # inputs of a layer in the order of the channels, and the matrices that they go into
    ("n_embd", ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight")),
    ("n_q", ("self_attn.o_proj.weight",)),
    ("n_embd", ("mlp.gate_proj.weight", "mlp.up_proj.weight")),
    ("n_ff", ("mlp.down_proj.weight",)),
)


@dataclass
class Channels:
    """Of the input of a matrix [rows, n]: root mean square and mean of each channel, float32 [n]."""

    rms: np.ndarray
    mean: np.ndarray

    def hot(self, n):
        """The n channels of largest activations, ascending; n is made to fit: a multiple of 16, at most 64."""
        n = min(n, 64, len(self.rms)) // 16 * 16
        return np.sort(np.argsort(-self.rms, kind="stable")[:n]).astype(np.uint32)


@dataclass
class Calibration:
    """`channels`: tensor name -> Channels, for every matrix that the model multiplies with. `about`: text, samples, tokens."""

    channels: dict
    about: dict

    def keeper(self, name):
        """Whether this matrix's tensor keeps the statistics in a file: the first of those that share them."""
        return not name.endswith(("k_proj.weight", "v_proj.weight", "up_proj.weight"))


def inputs(config):
    """[(number of channels, names of the matrices)] of a file.Config, in the order of pycass_model_n_channel."""
    width = {"n_embd": config.n_embd, "n_q": config.n_head * config.head_dim, "n_ff": config.n_ff}
    found = [
        (width[n], [_LAYER.format(layer) + name for name in names])
        for layer in range(config.n_layer)
        for n, names in _PRODUCTS
    ]
    output = "model.embed_tokens.weight" if config.tied_embedding else "lm_head.weight"
    return [*found, (config.n_embd, [output])]


def from_sums(config, total, square, count, about):
    """Calibration of Model.observe's sums over count tokens."""
    channels, at = {}, 0
    for n, names in inputs(config):
        mean = (total[at : at + n] / count).astype(np.float32)
        rms = np.sqrt(square[at : at + n] / count).astype(np.float32)
        channels.update(dict.fromkeys(names, Channels(rms, mean)))
        at += n
    if not all(np.isfinite(c.rms).all() and np.isfinite(c.mean).all() for c in channels.values()):
        raise ConversionError("the model's activations on the calibration text are not finite")
    return Calibration(channels, about)


def join(model, samples):
    """Token ids of the samples, one after the other, in lists of about PASS_TOKENS that fit the model's context."""
    most, texts = min(PASS_TOKENS, model.n_ctx), [[]]
    for sample in samples:
        ids = model.tokenize(sample + "\n\n", add_special=not texts[-1])[:most]
        if len(texts[-1]) + len(ids) > most:
            texts.append([])
            ids = model.tokenize(sample + "\n\n")[:most]
        texts[-1] += ids
    return [t for t in texts if len(t) > 1]


def measure(model, samples, name, progress=lambda done, total: None):
    """Calibration of a loaded Model on some samples of text. name: what the file says that the text was."""
    texts = join(model, samples)
    total = square = count = 0
    for i, text in enumerate(texts):
        a, b, n = model.observe([text])
        total, square, count = total + a, square + b, count + n
        progress(i + 1, len(texts))
    if not count:
        raise ConversionError("the calibration text has no two tokens")
    return from_sums(model.config, total, square, count, {"text": name, "samples": len(samples), "tokens": count})


def of_file(file):
    """The Calibration that a CassFile keeps, or None."""
    channels = {}
    for n, names in inputs(file.config):
        parts = [file.part(names[0], kind) for kind in (PART_RMS, PART_MEAN)]
        if any(p is None or len(p) != 4 * n for p in parts):
            return None
        stats = Channels(*(np.frombuffer(p, "<f4") for p in parts))
        if not (np.isfinite(stats.rms).all() and np.isfinite(stats.mean).all() and (stats.rms >= 0).all()):
            return None
        channels.update(dict.fromkeys(names, stats))
    return Calibration(channels, file.json.get("calibration") or {})
