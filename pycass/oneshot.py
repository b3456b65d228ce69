"""`pycass run` and `pycass verify-spec`: one prompt, one answer, and the proof that speculation changes nothing."""

import json
import sys

import click

from . import options
from .chat import ReplyPrinter, ThinkSplitter, starts_inside, summary
from .errors import PycassError

PROMPTS = (
    "Once upon a time, in a small village by the sea, there lived an old clockmaker who",
    'def fibonacci(n):\n    """Return the n-th Fibonacci number."""\n',
    "请用一句话介绍你自己 😊。",
)


def prompt_ids(model, prompt, o, variables):
    """(ids, whether the reply begins inside of a thought)."""
    tok = model.tokenizer
    if o["raw"] or not tok.chat_template:
        return tok.encode(prompt, parse_special=o["special"]), False
    messages = [{"role": "user", "content": prompt}]
    if o["system_prompt"]:
        messages.insert(0, {"role": "system", "content": o["system_prompt"]})
    return tok.encode_chat(messages, **variables), starts_inside(tok.render_chat(messages, **variables))


def run(model, prompt, o, variables, console):
    """Answers on stdout. The exit code."""
    check_options(model, o)
    ids, inside = prompt_ids(model, prompt, o, variables)
    seed = options.seed_of(o)
    kw = options.generation(o, seed)
    console.detail(f"seed {seed}, {len(ids)} prompt tokens")
    if o["verify_lossless"]:
        return _run_both(model, ids, kw, o, inside, seed, console)
    if o["as_json"]:
        completion = model.generate(ids, **kw)
        click.echo(json.dumps(as_object(completion, ids, seed, o, inside), ensure_ascii=False))
    else:
        completion = _stream(model, ids, kw, o, inside)
    console.detail(summary(completion, model.stats()))
    return 0


def check_options(model, o):
    """Refuses what would be ignored; of what a variable presets and the command line contradicts, nothing stays."""
    if o["raw"] and o["system_prompt"] and options.is_preset("raw") and not options.is_preset("system_prompt"):
        o["raw"] = False
    if o["system_prompt"] and (o["raw"] or not model.tokenizer.chat_template) and options.is_preset("system_prompt"):
        o["system_prompt"] = None
    if o["special"] and not o["raw"] and options.is_preset("special"):
        o["special"] = False
    if o["special"] and not o["raw"]:
        raise click.UsageError("--special goes with --raw")
    if o["system_prompt"] and (o["raw"] or not model.tokenizer.chat_template):
        raise click.UsageError("--system-prompt needs a chat template" + (" (without --raw)" if o["raw"] else ""))


def _stream(model, ids, kw, o, inside):
    color = sys.stdout.isatty()
    apart = o["reasoning_format"] == "deepseek"
    split = apart or (color and o["reasoning_format"] == "auto")
    aside = sys.stderr if apart and not color else sys.stdout
    printer = ReplyPrinter(sys.stdout, color, split, inside, think_out=aside)
    stream = model.stream(ids, **kw)
    try:
        for delta in stream:
            printer.push(delta.text)
    except BaseException:
        printer.close(complete=False)
        raise
    printer.close()
    return stream.completion


def as_object(c, ids, seed, o, inside=False):
    """The object of --json."""
    found = {"text": c.text}
    if o["reasoning_format"] == "deepseek":
        split = ThinkSplitter(inside)
        pieces = split.push(c.text) + split.flush()
        found["text"] = "".join(p for kind, p in pieces if kind == "text")
        found["reasoning"] = "".join(p for kind, p in pieces if kind == "think")
    t, s = c.timings, c.spec
    found |= {
        "token_ids": list(c.token_ids),
        "prompt_token_ids": list(ids),
        "prompt_tokens": c.usage.prompt_tokens,
        "completion_tokens": c.usage.completion_tokens,
        "finish_reason": c.finish_reason,
        "seed": seed,
        "timings": {k: getattr(t, k) for k in ("prompt_ms", "prompt_tps", "decode_ms", "decode_tps")},
        "spec": {k: getattr(s, k) for k in ("steps", "drafted", "accepted", "acceptance", "mean_len", "disabled",
                                            "ngram_drafted", "ngram_accepted")},
    }
    return found


# ---- the proof ----


def compare(model, ids, kw, draft_max):
    """Generates without and with speculation: (plain completion, speculative one, what differs or None)."""
    plain = completion_of(model, ids, kw | {"spec": "off"})
    spec = completion_of(model, ids, kw | {"spec": "on", "draft_max": draft_max})
    return plain, spec, difference(plain, spec)


def completion_of(model, ids, kw):
    """A completion from an empty cache, with what is needed to compare logits."""
    model.reset()
    return model.generate(ids, **kw, logprobs=True)


def difference(plain, spec):
    """In words, what differs between two completions; None when nothing does."""
    a, b = list(plain.token_ids), list(spec.token_ids)
    if a != b:
        at = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
        return f"token {at} differs: {a[at : at + 1]} without speculation, {b[at : at + 1]} with it"
    if plain.logits_hash != spec.logits_hash:
        return f"the logits differ: {plain.logits_hash} without speculation, {spec.logits_hash} with it"
    if plain.text != spec.text:
        return "the texts differ"
    return None


def _run_both(model, ids, kw, o, inside, seed, console):
    plain, spec, wrong = compare(model, ids, kw, o["draft_max"])
    verdict = wrong or f"{len(spec.token_ids)} tokens and their logits are the same with and without speculation"
    if o["as_json"]:
        lossless = {"equal": wrong is None, "detail": verdict, "logits_hash": spec.logits_hash,
                    "plain_decode_tps": plain.timings.decode_tps}  # fmt: skip
        click.echo(json.dumps(as_object(spec, ids, seed, o, inside) | {"lossless": lossless}, ensure_ascii=False))
    else:
        click.echo(spec.text)
    console.note(("NOT lossless: " if wrong else "lossless: ") + verdict)
    console.detail(f"without speculation {plain.timings.decode_tps:.1f} t/s; with it: {summary(spec)}")
    return 1 if wrong else 0


def verify_spec(model, prompts, drafts, o):
    """Compares every prompt and draft length, one line each. The exit code."""
    rows = []
    for n, prompt in enumerate(prompts or PROMPTS):
        rows += _verify_prompt(model, n, prompt, drafts, o)
    equal = all(r["equal"] for r in rows)
    if o["as_json"]:
        click.echo(json.dumps({"equal": equal, "runs": rows}, ensure_ascii=False))
    else:
        click.echo("lossless: every run is equal, tokens and logits" if equal else "NOT lossless")
    return 0 if equal else 1


def _verify_prompt(model, n, prompt, drafts, o):
    ids = model.tokenizer.encode(prompt)
    if not ids:
        raise PycassError("an empty prompt proves nothing")
    kw = {"max_tokens": o["predict"], "temperature": o["temp"], "seed": o["seed"], "ignore_eos": True}
    plain = completion_of(model, ids, kw | {"spec": "off"})
    rows = []
    for k in drafts:
        spec = completion_of(model, ids, kw | {"spec": "on", "draft_max": k})
        wrong = difference(plain, spec)
        rows.append({"prompt": n, "draft_max": k, "tokens": len(plain.token_ids), "equal": wrong is None,
                     "detail": wrong, "logits_hash": spec.logits_hash, "mean_len": spec.spec.mean_len})  # fmt: skip
        if not o["as_json"]:
            verdict = wrong or f"equal, logits {spec.logits_hash}, {spec.spec.mean_len:.2f} tokens per step"
            click.echo(f"prompt {n}, {len(plain.token_ids)} tokens, draft length {k}: {verdict}")
    return rows
