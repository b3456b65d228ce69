"""A .cass file as a source: its bits in another codec, or with another calibration."""

from dataclasses import dataclass

import numpy as np

from ..errors import PycassError
from ..file import CassFile
from . import arch, calibration
from .source import RawFile, Source, TensorRef


@dataclass
class CassTensor(TensorRef):
    """A tensor that the engine decodes."""

    cass: CassFile = None

    def read(self, r0, r1):
        """As TensorRef.read."""
        bits = self.cass.bf16(self.name, (r0, r1))
        self._require_finite(bits, r0)
        return bits, 0


@dataclass
class CassSource(Source):
    """`provenance` stays that of the file; `calibration` is what it keeps, or None."""

    cass: CassFile = None

    def close(self):
        super().close()
        self.cass.close()


def open_cass(path):
    """Source of a .cass file whose checksums are right: a conversion would hide damage behind new ones. Raises the errors of
    CassFile."""
    file = CassFile(path)
    try:
        file.check_sections()
        c = file.config
        cfg = arch.ModelConfig(
            **{k: getattr(c, k) for k in ("family", "n_vocab", "n_ctx_train", "n_embd", "n_ff", "n_layer", "n_head")},
            **{k: getattr(c, k) for k in ("n_head_kv", "head_dim", "rms_eps", "rope_attention_factor", "n_token")},
            rope_inv_freq=np.asarray(c.rope_inv_freq, np.float32),
            rope=file.json.get("rope") or {},
            tied=c.tied_embedding,
        )
        json = {k: v for k, v in file.json.items() if k not in ("calibration", "nest", "cass")}
        source = CassSource(str(path), "cass", cfg, json=json, quantized=c.quantized, rounded=c.rounded, cass=file)
        source.calibration = calibration.of_file(file)
        source.files = [RawFile(path)]
        order = [n for n in arch.expected_tensors(cfg) if n in file.tensors]
        for name in [*order, *(n for n in file.tensors if n not in order)]:
            shape = tuple(file.tensors[name].shape)
            source.tensors[name] = CassTensor(name, shape, None, 0, 2 * shape[-1], None, "BF16", cass=file)
    except BaseException:
        file.close()
        raise
    return source
