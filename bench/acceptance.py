"""What a converted model must show, measured: equal output with and without speculation, draft acceptance, sizes.

    python bench/acceptance.py MODEL.cass [--tokens 64] [--against SOURCE]

Prints one line a check and exits with 1 if one fails. The speed is bench's affair (`pycass bench`).
"""

import argparse
import itertools
import sys

import numpy as np

import pycass

PROMPTS = (
    "Write a Python function that checks whether a number is prime.",
    "Explain in three sentences why the sky is blue.",
    "Write a C function that reverses a string in place.",
    "What is the difference between a list and a tuple in Python?",
)


def sizes(path):
    with pycass.CassFile(path) as f:
        bf16 = sum(2 * np.prod(t.shape) for t in f.tensors.values())
        draft = sum(t.speculation_bytes for t in f.tensors.values())
        total = draft + sum(t.verification_bytes for t in f.tensors.values())
    print(f"sizes: weights {total / bf16:.4f} of BF16 (at most 0.715), draft {draft / bf16:.4f} (at most 0.27)")
    return total / bf16 <= 0.715 and draft / bf16 <= 0.27


def generate(model, ids, n, **options):
    model.reset()
    c = model.generate(ids, max_tokens=n, ignore_eos=True, logprobs=True, **options)
    return c.token_ids, c.logits_hash, c.logprobs


def prompts_of(model):
    return [model.tokenizer.encode_chat([{"role": "user", "content": p}]) for p in PROMPTS]


def lossless(path, n):
    """Every combination of threads, prompt batch and draft length gives the plain ids and logits."""
    reference, ok = None, True
    for threads, batch in itertools.product((1, 2), (1, 7, 512)):
        with pycass.Model.load(path, threads=threads, batch_size=batch) as model:
            ids = prompts_of(model)[0]
            plain = generate(model, ids, n, spec="off")
            reference = reference or plain
            same = [plain == reference]
            same += [generate(model, ids, n, spec="on", draft_max=k, draft_fixed=True) == reference for k in range(1, 17)]
            same += [generate(model, ids, n, spec=s) == reference for s in ("on", "auto")]
            print(f"lossless: threads {threads}, batch {batch}: {sum(same)} of {len(same)} runs equal", flush=True)
            ok &= all(same)
    return ok


def sampled(path, n):
    """A fixed seed gives the same ids again, with and without speculation."""
    with pycass.Model.load(path) as model:
        options = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05, "seed": 7}
        ids = prompts_of(model)[0]
        runs = [generate(model, ids, n, spec=s, **options) for s in ("off", "on", "auto", "on")]
    same = sum(r == runs[0] for r in runs)
    print(f"sampled: {same} of {len(runs)} runs with one seed equal")
    return same == len(runs)


def acceptance(path, n):
    """How often the draft's first choice is the target's, on the model's own greedy text."""
    agree = count = 0
    with pycass.Model.load(path) as model:
        for ids in prompts_of(model):
            text = ids + generate(model, ids, n, spec="on")[0]
            target, draft = (f(text)[len(ids) - 1 : -1].argmax(1) for f in (model.logits, model.draft_logits))
            agree, count = agree + int((target == draft).sum()), count + len(target)
    print(f"acceptance: {agree / count:.3f} of {count} positions")
    return True


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--against", help="the checkpoint: compare every weight")
    args = parser.parse_args()
    checks = [sizes(args.model), acceptance(args.model, args.tokens), sampled(args.model, args.tokens)]
    if args.against:
        from pycass.convert import verify_against

        differences = verify_against(args.model, args.against)
        print(f"against {args.against}: {'; '.join(differences) or 'every weight is equal'}")
        checks.append(not differences)
    checks.append(lossless(args.model, args.tokens))
    sys.exit(0 if all(checks) else 1)


if __name__ == "__main__":
    main()
