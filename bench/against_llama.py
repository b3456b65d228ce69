"""Decode speed of pycass beside llama.cpp's, interleaved on one machine.

    python bench/against_llama.py MODEL.cass --llama-bench PATH --gguf FILE.gguf [FILE.gguf ...] [--rounds 5] [-n 64]

Each round runs every contender once: llama-bench's generation (tg) of n tokens on each GGUF file, then pycass without
and with speculation on each prompt below. Prints medians in tokens a second with their range, and ratios to the first
GGUF file, which are medians of the rounds' own ratios. Speculation depends on the text, so there are four kinds of it.
"""

import argparse
import json
import statistics
import subprocess

import pycass

PROMPTS = {
    "code": "Write a Python function that merges two sorted lists.",
    "explain": "Explain in a few sentences how a refrigerator works.",
    "story": "Tell me a short story about a lighthouse keeper.",
    "chinese": "用三句话介绍一下长城。",
}


def llama(program, gguf, n, threads):
    command = [program, "-m", gguf, "-t", str(threads), "-p", "0", "-n", str(n), "-r", "1", "-o", "json"]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return json.loads(out)[0]["avg_ts"]


def ours(model, prompt, n, spec):
    model.reset()
    ids = model.tokenizer.encode_chat([{"role": "user", "content": prompt}])
    c = model.generate(ids, max_tokens=n, ignore_eos=True, spec=spec)
    return c.timings.decode_tps, c.spec.acceptance, c.spec.mean_len


def one_round(args, model, found):
    for gguf in args.gguf:
        found.setdefault(gguf.split("/")[-1], []).append(llama(args.llama_bench, gguf, args.n, model.threads))
    for spec in ("off", "auto"):
        for name, prompt in PROMPTS.items():
            tps, acceptance, mean_len = ours(model, prompt, args.n, spec)
            found.setdefault(f"pycass {name}, speculation {spec}", []).append(tps)
            if spec == "auto":
                print(f"  {name}: {tps:.1f} t/s, acceptance {acceptance:.2f}, {mean_len:.2f} tokens a step", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--llama-bench", required=True)
    parser.add_argument("--gguf", nargs="+", required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("-n", type=int, default=64)
    args = parser.parse_args()
    found = {}
    with pycass.Model.load(args.model) as model:
        ours(model, "Warm up.", 8, "on")
        for i in range(args.rounds):
            print(f"round {i + 1}", flush=True)
            one_round(args, model, found)
    base = found[args.gguf[0].split("/")[-1]]
    for name, speeds in found.items():
        ratio = statistics.median(s / b for s, b in zip(speeds, base, strict=True))
        print(f"{name:45} {statistics.median(speeds):6.1f} t/s ({min(speeds):.1f}-{max(speeds):.1f}), x{ratio:.2f}")


if __name__ == "__main__":
    main()
