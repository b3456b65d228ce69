"""SmolLM2-135M's GGUF file. The golden ids are those of the model's original tokenizer, the checksums those of the
weights that transformers writes when it loads the same file and saves it as BF16."""

import json
from pathlib import Path

import numpy as np
from cass_reader import Reader
from checkpoints import convert
from tokenizers import Tokenizer

from pycass.convert import open_source, verify_against
from pycass.convert.writer import crc32c

GOLDEN = json.loads((Path(__file__).parent.parent / "golden" / "smollm2_convert.json").read_text())


def test_ids_and_weights_are_the_original_ones(smollm2_gguf):
    with open_source(smollm2_gguf) as s:
        t = Tokenizer.from_str(s.json["tokenizer"])
        for text, ids in GOLDEN["ids"]:
            assert t.encode(text, add_special_tokens=False).ids == ids, repr(text)
        for tensor, crc in GOLDEN["bf16_crc32c"].items():
            ref, got = s.tensors[tensor], 0
            for chunk in ref.chunks():
                got = crc32c(ref.read(*chunk)[0], got)
            assert got == crc, tensor


def test_smollm2_from_end_to_end(tmp_path, smollm2_gguf):
    path = smollm2_gguf
    report = convert(path, tmp_path / "m.cass")
    assert report.quantized and report.tied and report.speculation_bits < 4.13 and report.bits < 11.4
    assert verify_against(tmp_path / "m.cass", path) == []
    reader = Reader(tmp_path / "m.cass", check_sections=False)
    with open_source(path) as s:
        for name in (
            "model.layers.3.self_attn.q_proj.weight",
            "model.layers.29.self_attn.k_proj.weight",
            "model.layers.7.mlp.down_proj.weight",
        ):
            ref = s.tensors[name]
            assert np.array_equal(reader.bf16(name), ref.read(0, ref.rows)[0])
