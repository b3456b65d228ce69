"""Rotary frequencies against those that transformers computes (tests/golden/rope_transformers.json)."""

import json
from pathlib import Path

import numpy as np
import pytest

from pycass.convert import arch, rope
from pycass.errors import ConversionError

CASES = json.loads((Path(__file__).parent.parent / "golden" / "rope_transformers.json").read_text())["cases"]


@pytest.mark.parametrize("case", CASES, ids=[c["name"] for c in CASES])
def test_frequencies_are_those_of_transformers(case):
    cfg = arch.from_hf(case["config"])
    expected, got = np.array(case["inv_freq"], np.uint32), cfg.rope_inv_freq.view(np.uint32)
    # torch's vectorised pow is off by one unit in the last place here and there
    assert np.abs(got.astype(np.int64) - expected).max() <= 1 and (got != expected).sum() <= 2
    assert cfg.rope_attention_factor == case["attention_factor"]


def test_scaling_changes_something_at_long_positions():
    by_name = {c["name"]: arch.from_hf(c["config"]) for c in CASES}
    plain, scaled = by_name["default 5e5 old"], by_name["llama 3.1"]
    angle = 100_000 * np.abs(plain.rope_inv_freq - scaled.rope_inv_freq)
    assert angle.max() > 1 and (plain.rope_inv_freq[:20] == scaled.rope_inv_freq[:20]).all()


def test_yarn_context_and_defaults():
    params = {"rope_type": "yarn", "rope_theta": 1e4, "factor": None, "original_max_position_embeddings": 1024}
    inv_freq, factor = rope.resolve(params, 64, 4096)
    assert factor == 0.1 * np.log(4.0) + 1.0 and inv_freq.dtype == np.float32 and inv_freq.shape == (32,)


@pytest.mark.parametrize(
    "params",
    [
        {"rope_type": "default", "rope_theta": 0.0},
        {"rope_type": "default", "rope_theta": 1.0},
        {"rope_type": "default"},
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 0},
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 1e-300},
        {
            "rope_type": "llama3",
            "rope_theta": 1e4,
            "factor": 8.0,
            "low_freq_factor": 4.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 2.0,
            "original_max_position_embeddings": 64,
            "beta_fast": -1.0,
        },
        {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 2.0,
            "original_max_position_embeddings": 64,
            "beta_slow": "x",
        },
        {"rope_type": "default", "rope_theta": 1e308},
        {"rope_type": ["yarn"], "rope_theta": 1e4},
    ],
)
def test_impossible_parameters(params):
    with pytest.raises(ConversionError):
        rope.resolve(params, 64, 4096)


def test_factors_of_gguf():
    inv_freq = np.float32([1, 0.5])
    assert list(rope.apply_factors(inv_freq, np.float32([1, 8]))) == [1, 0.0625]
    for bad in ([1], [1, 0], [1, np.nan]):
        with pytest.raises(ConversionError):
            rope.apply_factors(inv_freq, np.float32(bad))


HUGE = 10**400


@pytest.mark.parametrize(
    "kind, keys",
    [
        ("default", ["rope_theta"]),
        ("linear", ["factor"]),
        ("llama3", ["factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"]),
        ("yarn", ["factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor"]),
    ],
)
@pytest.mark.parametrize("value", [HUGE, -HUGE, 10**5000, ["x"], {"a": 1}, True], ids=range(6))
def test_numbers_beyond_a_float(kind, keys, value):
    good = {"rope_theta": 1e4, "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    good |= {"rope_type": kind, "original_max_position_embeddings": 64}
    for key in [*keys, "rope_type"]:
        with pytest.raises(ConversionError) as e:
            rope.resolve(good | {key: value}, 64, 4096)
        assert 10 < len(str(e.value)) < 300
