"""What the compiled products cost, without a GPU: registers, spills and the instructions of the hot loops, turned into lane
instructions per weight and the share of memory bandwidth that they leave possible.

    python3 kernels_cuda/static_table.py            the table as text
    python3 kernels_cuda/static_table.py --write    puts it into docs/cuda.md, between the marks
    python3 kernels_cuda/static_table.py --check    fails where the code has become dearer than docs/cuda.md says

It needs nvcc and nvdisasm: `pip install '.[cuda-test]'`, or a CUDA toolkit of the system."""

import argparse
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "kernels_cuda"))
from toolchain import NVCC_FLAGS, find_tool, nvcc  # noqa: E402

DOC = ROOT / "docs" / "cuda.md"
MARKS = "<!-- static table -->", "<!-- end -->"
TILE = 1024 // 32  # weights of a tile that a lane has

# name: architecture, SMs, GHz (boost), GB/s; NVIDIA's data sheets
GPUS = {
    "RTX 4090": ("sm_89", 128, 2.52, 1008.0),
    "Jetson AGX Orin 64 GB": ("sm_87", 16, 1.30, 204.8),
    "H200": ("sm_90", 132, 1.98, 4800.0),
}
# Lanes per clock and SM of an SM's pipes; issue: 4 warps' instructions a clock. CUDA C++ Programming Guide, "Throughput of
# native arithmetic instructions", compute capabilities 8.7 to 9.0.
PIPES = {"issue": 128, "alu": 64, "imad": 64, "convert": 16, "memory": 32}
# Bytes of a weight that a pass reads: A and X; these, B, and 180 bytes of a record and its offset (trained weights).
BYTES = {"draft": (512 + 16) / 1024, "target": (512 + 16 + 768 + 184) / 1024}
# mangled name's part: title, registers at most, instruction of the product, of those in a tile
KERNELS = {
    "matmul_draftILi1E": ("draft, 1 token", 64, "IDP", 16, "draft"),
    "matmul_draftILi2E": ("draft, 2 tokens", 64, "IDP", 32, "draft"),
    "matmul_draftILi4E": ("draft, 4 tokens", 96, "IDP", 64, "draft"),
    "matmul_nestILi1E": ("target, 8 tokens", 128, "HMMA", 4, "target"),
    "matmul_nestILi2E": ("target, 16 tokens", 128, "HMMA", 8, "target"),
    "matmul_nestILi8E": ("target, 64 tokens", 200, "HMMA", 32, "target"),
}


def compile_kernels(arch, folder):
    """The cubin and what ptxas says: {kernel: (registers, bytes of spills)}."""
    cubin = Path(folder) / f"{arch}.cubin"
    command = [*nvcc(), *NVCC_FLAGS, f"-arch={arch}", "-Xptxas", "-v", "-cubin", "-o", cubin, ROOT / "kernels_cuda/backend.cu"]
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    used = {}
    for name, text in re.findall(r"Compiling entry function '(\w+)'(.*?)Used", done.stderr + "Used", flags=re.S):
        spills = sum(map(int, re.findall(r"(\d+) bytes spill", text)))
        after = done.stderr.split(f"function '{name}'", 1)[1]
        used[name] = int(re.search(r"Used (\d+) registers", after)[1]), spills
    return cubin, used


def disassemble(cubin):
    """{kernel: (instructions, {label: index})}."""
    text = subprocess.run([find_tool("nvdisasm"), "-c", str(cubin)], capture_output=True, text=True, check=True).stdout
    kernels = {}
    for part in re.split(r"\n\.text\.", text)[1:]:
        code, labels = [], {}
        for line in part.split("\n"):
            if label := re.match(r"(\.L_x_\d+):", line):
                labels[label[1]] = len(code)
            if instruction := re.search(r"/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", line):
                code.append(instruction[1])
        kernels[part.split(":")[0]] = code, labels
    return kernels


def opcode(instruction):
    return re.sub(r"^@!?U?P\d+\s+", "", instruction).split()[0]


def target_of(instruction, labels):
    found = re.search(r"BRA[^`]*`\((\.L_x_\d+)\)", instruction)
    return labels.get(found[1]) if found else None


def main_loop(code, labels, mark):
    """First and last instruction of the longest loop with the mark in it. What the compiler puts behind the end jumps back,
    too; a loop has no EXIT inside."""
    loops = []
    for end, instruction in enumerate(code):
        start = target_of(instruction, labels)
        if start is None or start > end:
            continue
        body = [opcode(i) for i in code[start : end + 1]]
        if any(o.startswith(mark) for o in body) and "EXIT" not in body:
            loops.append((end - start, start, end))
    return max(loops)[1:]


def cold_places(code, labels):
    """Instructions of tiles in exact form, which read a record byte by byte, and of calls, which only diverged warps take."""
    starts = {0, len(code), *labels.values(), *(i + 1 for i, c in enumerate(code) if "BRA" in c)}
    edges = sorted(starts)
    cold = set()
    for a, b in zip(edges, edges[1:]):
        bytes_read = sum(opcode(c).startswith("LDG.E.U8") for c in code[a:b])
        if bytes_read > 1 or any(opcode(c).startswith("CALL") and c[0] != "@" for c in code[a:b]):
            cold.update(range(a, b))
    return cold


def hot_path(code, labels, mark):
    """The longest way through the main loop, past cold places, each inner loop once."""
    start, end = main_loop(code, labels, mark)
    cold = cold_places(code, labels)
    best = {start: [start]}
    for i in range(start, end):
        if i not in best or i in cold:
            continue
        instruction, target = code[i], target_of(code[i], labels)
        after = [i + 1]
        if "BRA" in opcode(instruction):
            conditional = instruction[0] == "@" or re.search(r"BRA(\.DIV|\.CONV|\S* !?U?P)", instruction)
            after = ([i + 1] if conditional else []) + ([target] if target is not None and i < target <= end else [])
        for j in after:
            if len(best.get(j, ())) < len(best[i]) + 1:
                best[j] = best[i] + [j]
    return [opcode(code[i]) for i in best[end]]


def pipe_of(op):
    name = op.split(".")[0]
    if name in ("I2F", "F2I", "I2FP", "MUFU", "POPC"):
        return "convert"
    if name in ("IMAD", "FFMA", "FMUL", "FADD"):
        return "imad"
    if name in ("LDG", "LDS", "STS", "STG", "SHFL", "LDGSTS", "LDGDEPBAR", "LDC"):
        return "memory"
    if name in ("HMMA", "BRA", "BSSY", "BSYNC", "WARPSYNC", "NOP", "DEPBAR", "CALL") or name.startswith("U"):
        return "other"
    return "alu"


def measure(arch, folder):
    """Of an architecture: [(kernel's title, its kind, registers, bytes of spills, registers at most, lane instructions per weight
    by pipe)], and all kernels' spills."""
    cubin, used = compile_kernels(arch, folder)
    rows = []
    code = disassemble(cubin)
    for part, (title, cap, mark, in_tile, kind) in KERNELS.items():
        name = next(n for n in used if part in n)
        path = hot_path(*code[name], mark)
        weights = sum(op.startswith(mark) for op in path) / in_tile * TILE
        pipes = Counter(pipe_of(op) for op in path)
        pipes["issue"] = len(path)
        rows.append((title, kind, *used[name], cap, {p: pipes[p] / weights for p in PIPES}))
    return rows, {name: spills for name, (_, spills) in used.items()}


def share(gpu, kind, per_weight):
    """Of the memory's bandwidth, what the busiest pipe leaves possible; and which pipe that is."""
    _, sms, ghz, gbs = GPUS[gpu]
    wanted = gbs / BYTES[kind]  # weights per ns
    possible = {p: sms * ghz * lanes / per_weight[p] for p, lanes in PIPES.items() if per_weight[p]}
    pipe = min(possible, key=possible.get)
    return possible[pipe] / wanted, pipe


def table(results):
    lines = ["| kernel | arch | registers | spills | lane instructions per weight | of them alu / imad / memory | GPU "
             "| limit, of bandwidth |", "|---|---|---|---|---|---|---|---|"]
    for gpu, (arch, *_) in GPUS.items():
        for title, kind, registers, spills, _, pipes in results[arch][0]:
            possible, pipe = share(gpu, kind, pipes)
            parts = " / ".join(f"{pipes[p]:.2f}" for p in ("alu", "imad", "memory"))
            lines.append(f"| {title} | {arch} | {registers} | {spills} | {pipes['issue']:.2f} | {parts} | {gpu} "
                         f"| {possible:.2f} ({pipe}) |")
    return "\n".join(lines)


def committed():
    text = DOC.read_text(encoding="utf-8")
    return text.split(MARKS[0], 1)[1].split(MARKS[1], 1)[0].strip()


def check(results):
    """What is worse than the committed table, or over a cap: lines of text."""
    wrong = []
    known = {}
    for line in committed().split("\n")[2:]:
        cells = [c.strip() for c in line.strip("|").split("|")]
        known[cells[0], cells[1]] = float(cells[4])
    for arch, (rows, all_spills) in results.items():
        wrong += [f"{name}, {arch}: {spills} bytes of spills" for name, spills in all_spills.items() if spills]
        for title, _, registers, _, cap, pipes in rows:
            if registers > cap:
                wrong.append(f"{title}, {arch}: {registers} registers, more than {cap}")
            if pipes["issue"] > known[title, arch] + 0.06:
                wrong.append(f"{title}, {arch}: {pipes['issue']:.2f} instructions per weight, the table has {known[title, arch]}")
    return wrong


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results = {arch: measure(arch, folder) for arch in sorted({g[0] for g in GPUS.values()})}
    print(table(results))
    if args.write:
        text = DOC.read_text(encoding="utf-8")
        before, rest = text.split(MARKS[0], 1)
        DOC.write_text(before + MARKS[0] + "\n" + table(results) + "\n" + MARKS[1] + rest.split(MARKS[1], 1)[1], encoding="utf-8")
    if args.check and (wrong := check(results)):
        raise SystemExit("\n".join(wrong))


if __name__ == "__main__":
    main()
