#!/usr/bin/env python3
"""Writes tests/golden/tiny.npz, and with --smollm2 tests/golden/smollm2.json, from what transformers computes.

usage: make.py [--smollm2 HF_FOLDER TEXT_FILE]

Needs torch, transformers, numpy and tokenizers; running the tests does not. Weights have their BF16 values, the
arithmetic is float32, attention is eager. For each tiny model (tests/py/tiny_models.py):

  NAME/crc         checksum of the weights, so that a test sees when it does not write the same checkpoint
  NAME/logits      [6, n_vocab] at Spec.kept of ids(NAME): what transformers computes
  NAME/clean       [16] tokens: of 64 random sequences, that whose keys and values stay farthest from the places where
                   rounding to BF16 jumps; NAME/logits_kv: [16, n_vocab] with keys and values rounded, as pycass does
  NAME/prompt      [12] tokens: of 32 random prompts, that with the clearest continuation
  NAME/greedy      [24] tokens that follow it, padding rows excluded; NAME/gap: how far ahead of the second each was
  NAME/cos, sin    [positions, head_dim / 2] of the rotary embedding
  NAME/long        logits (cache rounded) of the last of 1500 tokens
"""

import argparse
import json
import sys
import tempfile
import zlib
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea, there lived an old clockmaker who",
    'def fibonacci(n):\n    """Return the n-th Fibonacci number."""\n',
    "#include <stdio.h>\n\nint main(void) {\n    for (int i = 0; i < 10; i++) {\n",
    "1, 2, 4, 8, 16, 32, 64,",
    "<|im_start|>system\nYou are a concise coding assistant.<|im_end|>\n<|im_start|>user\n"
    "Write a Python function that reverses a string.<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\n请用一句话介绍你自己 😊🚀, 日本語でもどうぞ。<|im_end|>\n<|im_start|>assistant\n",
]  # of SmolLM2; two of them have choices that rounding of the cache could turn

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "py"))
import tiny_models as tiny  # noqa: E402

POSITIONS = [0, 1, 2, 7, 63, 64, 511, 2047, 32768, 131071]


class RoundingCache(DynamicCache):
    """Keeps keys and values as BF16; attention sees the rounded ones, also of the token itself. `margin`: how close a
    value has come to where rounding jumps, in parts of the largest value; jumps too small to matter do not count."""

    margin = 1.0

    def update(self, key_states, value_states, *args, **kwargs):
        rounded = [x.to(torch.bfloat16).to(torch.float32) for x in (key_states, value_states)]
        for x, r in zip((key_states, value_states), rounded):
            step = torch.exp2(torch.floor(torch.log2(r.abs().clamp(min=1e-30))) - 7)
            distance = step / 2 - (x - r).abs()
            matters = step > 1e-4 * x.abs().max()
            self.margin = min(self.margin, float((distance[matters] / x.abs().max()).min()))
        return super().update(*rounded, *args, **kwargs)


def load(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert model.config._attn_implementation == "eager"
    return model


def logits(model, ids, cache):
    return model(input_ids=torch.tensor([ids]), past_key_values=cache, use_cache=True).logits[0]


def greedy(model, ids, n, n_token):
    """(tokens, distances between the two largest logits)."""
    cache, out, gaps, new = DynamicCache(), [], [], ids
    for _ in range(n):
        value, index = logits(model, new, cache)[-1, :n_token].topk(2)
        new = [int(index[0])]
        out += new
        gaps.append(float(value[0] - value[1]))
    return out, gaps


def clearest(name, model):
    """(prompt, tokens, gaps) whose smallest gap is largest: rounding of the cache then changes no token."""
    prompts = [tiny.ids(name, tiny.N_PROMPT, f"prompt {i}") for i in range(32)]
    found = [(p, *greedy(model, p, tiny.N_GREEDY, tiny.SPECS[name].n_token)) for p in prompts]
    return max(found, key=lambda f: min(f[2]))


def cleanest(name, model):
    """(tokens, logits with a rounded cache) for which another order of sums changes no rounded value."""
    found = []
    for i in range(64):
        cache, ids = RoundingCache(), tiny.ids(name, 16, f"clean {i}")
        found.append((ids, logits(model, ids, cache), cache.margin))
    best = max(found, key=lambda f: f[2])
    print(f"{name}: margin {best[2]:.1e}")
    return best[:2]


def rotary(model, head_dim):
    cos, sin = model.model.rotary_emb(torch.zeros(1, 1, 1), torch.tensor([POSITIONS]))
    return cos[0, :, : head_dim // 2], sin[0, :, : head_dim // 2]


def crc_of(weights):
    return zlib.crc32(b"".join(w.tobytes() for w in weights.values()))


def tiny_goldens(name):
    spec = tiny.SPECS[name]
    with tempfile.TemporaryDirectory() as tmp:
        model = load(tiny.write(name, Path(tmp) / name))
    ids = tiny.ids(name)
    head_dim = spec.config.get("head_dim") or spec.config["hidden_size"] // spec.config["num_attention_heads"]
    out = {"crc": np.uint32(crc_of(tiny.weights(name)))}
    out["logits"] = logits(model, ids, DynamicCache())[list(spec.kept)]
    out["clean"], out["logits_kv"] = cleanest(name, model)
    out["prompt"], tokens, gaps = clearest(name, model)
    out["greedy"], out["gap"] = np.array(tokens, np.int32), np.array(gaps, np.float32)
    out["cos"], out["sin"] = rotary(model, head_dim)
    if name in tiny.LONG:
        out["long"] = logits(model, tiny.ids(name, tiny.N_LONG, "long"), RoundingCache())[-1]
    print(f"{name}: logits sd {float(out['logits'].std()):.2f}, gap {min(gaps):.3f}, {len(set(tokens))} tokens")
    return {f"{name}/{key}": np.asarray(value) for key, value in out.items()}


def smollm2_goldens(folder, text):
    """Greedy continuations and perplexity of SmolLM2-135M-Instruct."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), load(folder)
    out = {"transformers": transformers.__version__, "torch": torch.__version__, "prompts": []}
    for prompt in PROMPTS:
        ids = tokenizer(prompt, add_special_tokens=False).input_ids
        tokens, gaps = greedy(model, ids, 64, model.config.vocab_size)
        gaps = [round(g, 5) for g in gaps]
        print(f"{min(gaps):.4f} {prompt[:50]!r}")
        out["prompts"].append({"prompt": prompt, "ids": ids, "generated": tokens, "gap": gaps})
    ids = tokenizer(text, add_special_tokens=False).input_ids
    row = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1].double()
    nll = torch.nn.functional.cross_entropy(row, torch.tensor(ids[1:])).item()
    return out | {"text": text, "n_tokens": len(ids), "mean_nll": nll}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--smollm2", nargs=2, metavar=("HF_FOLDER", "TEXT_FILE"))
    options = parser.parse_args()
    torch.set_num_threads(2)
    torch.manual_seed(0)
    with torch.inference_mode():
        if options.smollm2:
            folder, text = options.smollm2
            found = smollm2_goldens(folder, Path(text).read_text())
            lines = json.dumps(found, ensure_ascii=False, separators=(",", ":")).replace('{"prompt"', '\n{"prompt"')
            (HERE / "smollm2.json").write_text(lines + "\n")
            return
        arrays = {"positions": np.array(POSITIONS)}
        for name in tiny.SPECS:
            arrays |= tiny_goldens(name)
    np.savez_compressed(HERE / "tiny.npz", **arrays)


if __name__ == "__main__":
    main()
