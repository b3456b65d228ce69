"""Speed of pycass beside llama.cpp's on one machine, in interleaved rounds.

    python bench/against_llama.py MODEL.cass --llama-bench PATH --gguf BF16.gguf [Q8_0.gguf Q4_K_M.gguf ...]
        [--rounds 5] [-n 128] [-p 512] [--threads N] [--kernel avx2 ...] [--out bench/results.md]

The first GGUF file is the one that llama.cpp's prompt speed is measured on: the same weights in BF16. Every round runs
each contender once, one after the other, every second round in reverse: llama-bench on each file in a process of its
own, then pycass with its best kernel set and each --kernel: a prompt of p tokens, n tokens without speculation, and n
tokens with it for each prompt below, greedily and sampled. Each has a warm-up that is not measured. Ratios are of
figures of the same round, since other work on a machine slows down both. The table goes to stdout or --out, progress
to stderr.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from contextlib import ExitStack

import pycass
from pycass import bench
from pycass.machine import cpu_name

PROMPTS = {
    "code": "Write a Python function that merges two sorted lists.",
    "explanation": "Explain in a few sentences how a refrigerator works.",
    "story": "Tell me a short story about a lighthouse keeper.",
    "Chinese": "用三句话介绍一下长城。",
}
TEMPERATURE, SEED = 0.8, 1
FLAGS = ("avx2", "fma", "avx_vnni", "avx512f", "avx512bw", "avx512vbmi", "avx512_vbmi2", "avx512_vnni", "avx512_bf16",
         "amx_tile", "amx_int8", "amx_bf16")  # fmt: skip
MEMORY = "memory"  # the read loop's figures, in GB/s, among the speeds


class Found:
    """Figures by contender, one a round."""

    def __init__(self):
        self.speeds, self.counts = {}, {}
        self.llama_version = ""

    def add(self, name, speed):
        """A speed: tokens a second."""
        self.speeds.setdefault(name, []).append(speed)

    def add_count(self, name, count):
        """The same from a Count."""
        self.add(name, count.tps)
        self.counts[name] = self.counts.get(name, bench.Count()) + count


def llama(args, gguf, threads, found):
    """One run of llama-bench; the first file's with a prompt."""
    p = args.p if gguf == args.gguf[0] else 0
    command = [args.llama_bench, "-m", gguf, "-t", threads, "-p", p, "-n", args.n, "-r", 1, "-o", "json"]
    done = subprocess.run(list(map(str, command)), check=True, stdout=subprocess.PIPE)
    for row in json.loads(done.stdout):
        kind = row["model_type"].split(" ", 2)[-1]  # of "qwen2 1.5B BF16"
        found.add(f"llama.cpp {kind}, {f'pp{p}' if row['n_prompt'] else f'tg{args.n}'}", row["avg_ts"])
        found.llama_version = row["build_commit"]


def ours(args, model, found):
    """One round of a model. Speculation must not change what is said: that is checked on the way."""
    label = f"pycass {model.kernel}, "
    text = model.tokenizer.encode(bench.TEXT)
    found.add_count(f"{label}pp{args.p}", bench.prompt(model, (text * (args.p // len(text) + 1))[: args.p]))
    prompts = {name: bench.prompt_ids(model, prompt) for name, prompt in PROMPTS.items()}
    generate(args, model, prompts["code"], found, f"{label}plain", spec="off")
    plain = model.tokens
    for temperature in (0.0, TEMPERATURE):
        kind = f"{label}speculative" + (f" at {temperature}" if temperature else "")
        whole = bench.Count()
        for name, ids in prompts.items():
            whole += generate(args, model, ids, found, f"{kind}, {name}", "auto", temperature)
            if name == "code" and not temperature and model.tokens != plain:
                sys.exit("speculation has changed the text")
        found.add_count(f"{kind}, all four", whole)


def generate(args, model, ids, found, name, spec, temperature=0.0):
    """Counts args.n tokens."""
    bench.generate(model, ids, 1)  # wakes the threads, and leaves the prompt in the cache
    count = bench.generate(model, ids, args.n, spec=spec, **bench.sampling(temperature, SEED))
    found.add_count(name, count)
    return count


def measure(args):
    """All rounds."""
    found, load = Found(), os.getloadavg()[0]
    with ExitStack() as stack:
        models = [stack.enter_context(pycass.Model.load(args.model, threads=args.threads, kernel=k, mmap=False))
                  for k in (None, *args.kernel)]  # fmt: skip
        models = list({m.kernel: m for m in models}.values())
        threads = models[0].threads
        for m in models:
            bench.prompt(m, bench.prompt_ids(m, PROMPTS["code"]))  # brings the file into memory
        steps = [lambda: found.add(MEMORY, bench.read_gbps(threads))]
        steps += [lambda g=g: llama(args, g, threads, found) for g in args.gguf]
        steps += [lambda m=m: ours(args, m, found) for m in models]
        for i in range(args.rounds):
            for k, step in enumerate(steps[:: 1 if i % 2 == 0 else -1]):
                print(f"round {i + 1} of {args.rounds}: {k + 1} of {len(steps)}", file=sys.stderr, flush=True)
                step()
    return found, threads, load


# ---- what comes out ----


def report(args, found, threads, load):
    """Markdown: the machine, speeds, ratios."""
    reads = found.speeds.pop(MEMORY)
    lines = ["# Beside llama.cpp", "", f"`bench/against_llama.py`, {len(reads)} interleaved round(s).", ""]
    lines += [f"- {line}" for line in machine(threads, reads, load)]
    lines += [f"- llama.cpp: {found.llama_version}; files: {', '.join(map(os.path.basename, args.gguf))}"]
    lines += [f"- pycass: {pycass.__version__}; file: {os.path.basename(args.model)}"]
    lines += ["", *description(args), "", "## Tokens a second", "", *speeds(found), "", "## Ratios", ""]
    lines += ["Of each round's own figures: median (smallest..largest).", ""]
    lines += [*ratios(found, prompts=False), "", *ratios(found, prompts=True)]
    return "\n".join(lines) + "\n"


def machine(threads, reads, load):
    """The machine in a few lines."""
    with open("/proc/cpuinfo", encoding="utf-8") as f:
        flags = next((line for line in f if line.startswith("flags")), "").split()
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    yield f"{cpu_name()}, {len(os.sched_getaffinity(0))} CPUs, {memory:.1f} GiB of memory; {threads} threads used"
    yield f"instructions: {', '.join(f for f in FLAGS if f in flags) or 'none of ' + ', '.join(FLAGS)}"
    yield f"a plain read loop: {spread(reads, 1)} GB/s ({bench.read_method()})"
    yield f"load average at the start: {load:.2f} (what else runs here slows down every contender, and not alike)"


def description(args):
    """What was measured, in words."""
    s = bench.SAMPLING
    yield f"pp{args.p}: tokens of a prompt. All else: {args.n} tokens decoded, batch 1. Speculation is `auto`; each prompt"
    yield "is a message through the chat template, and end tokens are passed over. All four: all tokens over all time,"
    yield f"the harmonic mean. At {TEMPERATURE}: sampled at this temperature, top-k {s['top_k']}, top-p {s['top_p']}, min-p"
    yield f"{s['min_p']}, seed {SEED}."


def spread(values, digits):
    """Median (smallest..largest)."""
    middle, low, high = (f"{f(values):.{digits}f}" for f in (statistics.median, min, max))
    return f"{middle} ({low}..{high})"


def speeds(found):
    """The table of speeds."""
    yield "| | tokens/s | accepted | tokens a step | MB/token | GB/s |"
    yield "|---|---:|---:|---:|---:|---:|"
    for name, values in found.speeds.items():
        c = found.counts.get(name, bench.Count())
        cells = [f"{c.accept:.2f}", f"{c.mean_len:.2f}"] if c.drafted else ["", ""]
        cells += [f"{c.bytes / c.tokens / 1e6:.0f}", f"{c.bytes / c.seconds / 1e9:.1f}"] if c.bytes else ["", ""]
        yield f"| {name} | {spread(values, 1)} | {' | '.join(cells)} |"


def ratios(found, prompts):
    """The table of ratios, of prompt speeds or of the others: each of our figures over each peer's."""
    names = [name for name in found.speeds if (", pp" in name) == prompts]
    peers = [name for name in names if name.startswith("llama.cpp")]
    yield f"| | {' | '.join(f'of {p}' for p in peers)} |"
    yield "|---|" + "---:|" * len(peers)
    for name in names[len(peers) :]:
        over = [[a / b for a, b in zip(found.speeds[name], found.speeds[p], strict=True)] for p in peers]
        yield f"| {name} | {' | '.join(spread(o, 2) for o in over)} |"


def main():
    """The program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="the .cass file of the same weights")
    parser.add_argument("--llama-bench", required=True, metavar="PATH")
    parser.add_argument("--gguf", nargs="+", required=True, metavar="FILE")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("-n", type=int, default=128, metavar="N", help="tokens to generate (128)")
    parser.add_argument("-p", type=int, default=512, metavar="N", help="tokens of the long prompt (512)")
    parser.add_argument("--threads", type=int, default=0, metavar="N", help="of both; 0: physical cores")
    parser.add_argument("--kernel", action="append", default=[], metavar="NAME", help="also this kernel set")
    parser.add_argument("--out", metavar="FILE", help="write the table there")
    args = parser.parse_args()
    if min(args.rounds, args.n, args.p) < 1:
        parser.error("--rounds, -n and -p are at least 1")
    text = report(args, *measure(args))
    if args.out:
        with open(args.out, "w", encoding="utf-8") as f:
            f.write(text)
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
