"""BF16 products of torch, for check.sh: ROWS COLS COPIES REPEAT; for each M a row of M, microseconds and GB/s of weights."""

import sys
import time

import torch

rows, cols, copies, repeat = map(int, sys.argv[1:])
weights = [torch.randn(rows, cols, device="cuda", dtype=torch.bfloat16) for _ in range(copies)]
for m in (1, 2, 4, 8, 16):
    x = torch.randn(m, cols, device="cuda", dtype=torch.bfloat16)
    for r in range(repeat + 1):
        if r == 1:  # the first one warms up
            torch.cuda.synchronize()
            start = time.perf_counter()
        for w in weights:
            torch.nn.functional.linear(x, w)
    torch.cuda.synchronize()
    us = (time.perf_counter() - start) * 1e6 / (repeat * copies)
    print(m, f"{us:.2f} {rows * cols * 2 / us * 1e-3:.1f}")
