"""Whole models, where they are at hand: set PYCASS_TEST_MODELS to a folder with the GGUF files (default
~/.cache/pycass-test-models). The golden ids are those of the models' original tokenizers, the checksums those of
the weights that transformers writes when it loads the same GGUF file and saves it as BF16."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from cass_reader import Reader
from tokenizers import Tokenizer

from pycass.convert import convert, open_source, verify_against
from pycass.convert.writer import crc32c

FOLDER = Path(os.environ.get("PYCASS_TEST_MODELS") or Path.home() / ".cache" / "pycass-test-models")
GOLDEN = json.loads((Path(__file__).parent.parent / "golden" / "convert_models.json").read_text())


def gguf(name):
    path = FOLDER / GOLDEN[name]["gguf"]
    if not path.is_file():
        pytest.skip(f"{path} is not there")
    return path


@pytest.mark.parametrize("name", GOLDEN)
def test_ids_and_weights_are_the_original_ones(name):
    with open_source(gguf(name)) as s:
        t = Tokenizer.from_str(s.json["tokenizer"])
        for text, ids in GOLDEN[name]["ids"]:
            assert t.encode(text, add_special_tokens=False).ids == ids, repr(text)
        for tensor, crc in GOLDEN[name]["bf16_crc32c"].items():
            ref, got = s.tensors[tensor], 0
            for chunk in ref.chunks():
                got = crc32c(ref.read(*chunk)[0], got)
            assert got == crc, tensor


def test_smollm2_from_end_to_end(tmp_path):
    path = gguf("smollm2-135m")
    report = convert(path, tmp_path / "m.cass")
    assert report.quantized and report.tied and report.speculation_bits < 4.13 and report.bits < 11.25
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
