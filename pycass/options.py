"""The command line's options: names that llama.cpp's users know, each with a PYCASS_* variable as its default."""

import functools
import math
import random
import re

import click
from click.core import ParameterSource

MOST_THREADS = 4096
SAMPLING = ("top_k", "top_p", "min_p", "repeat_penalty", "repeat_last_n", "presence_penalty", "frequency_penalty")


def option(*names, **kw):
    """A click option whose default may come from the environment: --ctx-size from PYCASS_CTX_SIZE."""
    long = next(n for n in names if n.startswith("--")).split("/")[0]
    kw.setdefault("envvar", "PYCASS_" + long.lstrip("-").replace("-", "_").upper())
    return click.option(*names, **kw)


def is_preset(name):
    """Whether the running command has this parameter from a variable."""
    ctx = click.get_current_context(silent=True)
    return ctx is not None and ctx.get_parameter_source(name) == ParameterSource.ENVIRONMENT


def prefer_explicit(o, *names):
    """Of options that exclude each other, those of the command line win over presets."""
    given = [n for n in names if o[n] is not None]
    if any(not is_preset(n) for n in given):
        o.update({n: None for n in given if is_preset(n)})


def take(o, values):
    """Values of a settings file for the options that the command line does not give."""
    ctx = click.get_current_context()
    for name, value in values.items():
        if name not in o:
            raise click.UsageError(f"the settings say {name} = {value}, which this version cannot do")
        if ctx.get_parameter_source(name) != ParameterSource.COMMANDLINE:
            o[name] = value


class Finite(click.FloatRange):
    """A number of a range; nan and inf are none."""

    name = "number"

    def convert(self, value, param, ctx):
        """click's."""
        number = click.FLOAT.convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return super().convert(number, param, ctx)


class Line(click.types.StringParamType):
    """A text; of several in a variable, one a line."""

    def split_envvar_value(self, rv):
        """Not at spaces, as click does."""
        return [line for line in rv.split("\n") if line]


def stack(*options):
    """One decorator of several options, in the order in which --help shows them."""
    return lambda f: functools.reduce(lambda g, o: o(g), reversed(options), f)


def _cpu_only(ctx, param, value):
    if value:
        raise click.BadParameter("0 is the only value so far: --device cuda takes all layers to the GPU")
    return value


def _list_devices(ctx, param, value):
    if not value or ctx.resilient_parsing:
        return
    from .model import devices

    for d in devices():
        capability, free, total = ".".join(map(str, d.capability)), d.free_bytes / 2**30, d.total_bytes / 2**30
        click.echo(f"{d.name}, compute capability {capability}, {free:.1f} of {total:.1f} GiB free")
    ctx.exit()


_KV_OPTIONS = ("kv", "cache_type_k", "cache_type_v")
KV_KINDS = ("auto", "raw", "nest", "cass1", "cass2")


def _kv(ctx, param, value):
    kind = value and {"bf16": "raw"}.get(value.lower(), value.lower())
    if kind and kind not in KV_KINDS:
        raise click.BadParameter(f"{value!r} is not one of {', '.join(KV_KINDS)}; bf16 is the same as raw")
    others = {ctx.params.get(name) for name in _KV_OPTIONS} - {None, kind}
    if kind and others:
        raise click.BadParameter(f"keys and values are kept alike: {kind} and {others.pop()} exclude each other")
    return kind


def kv_of(o):
    """How the KV cache is kept; keys and values alike."""
    return next((o[name] for name in _KV_OPTIONS if o[name]), "auto")


def _bias(ctx, param, values):
    """llama.cpp's spelling: 15043+1, 15043-1, 15043-inf."""
    out = {}
    for v in values:
        m = re.fullmatch(r"(\d{1,20})([+-](?:inf|\d+\.?\d*(?:e[+-]?\d+)?))", v.strip())
        if not m:
            raise click.BadParameter(f"{v!r} is not of the form ID+BIAS or ID-BIAS, such as 15043+1 or 15043-inf")
        bias = float(m.group(2))
        if abs(bias) > 1e30 and "inf" not in v:
            raise click.BadParameter(f"{v!r}: the bias is too large a number")
        if int(m.group(1)) >= 2**31:
            raise click.BadParameter(f"{v!r}: no token has such an id")
        out[int(m.group(1))] = bias
    return out


settings = option("--settings", type=click.Path(exists=True, dir_okay=False), default=None, metavar="FILE",
                  help="Draft as `pycass tune` found best: its settings file.")  # fmt: skip

device = option("--device", type=click.Choice(["cpu", "cuda", "auto"]), default="cpu", show_default=True,
                help="What computes: the CPU; the first GPU; that if it can, else the CPU.")  # fmt: skip

model = stack(
    option("-m", "--model", "model_opt", metavar="MODEL", help="The same as MODEL."),
    option("-c", "--ctx-size", type=click.IntRange(0, 1 << 24), default=None, metavar="N",
           help="Tokens of context; 0: the model's own. Without it: the model's, but at most 4096."),
    option("-t", "--threads", type=click.IntRange(0, MOST_THREADS), default=0, metavar="N", help="Threads; 0: physical cores."),
    option("-tb", "--threads-batch", type=click.IntRange(0, MOST_THREADS), default=0, metavar="N",
           help="Threads for prompts; 0: as --threads."),
    option("-b", "--batch-size", type=click.IntRange(0, 4096), default=0, metavar="N",
           help="Prompt tokens per pass; 0: 512."),
    option("--kernel", default=None, metavar="NAME", help="Force a kernel set (see `pycass info`)."),
    option("--mmap/--no-mmap", default=None,
           help="Map the file, or read it into huge pages, which are faster. Without either: map it and, if there is room, "
                "move it in the background."),
    option("--mlock", is_flag=True, help="Keep the weights resident."),
    settings,
    option("--rope-scaling", type=click.Choice(["none", "linear", "yarn"]), default=None,
           help="Replace the model's rope scaling; linear and yarn take their factor from --rope-scale."),
    option("--rope-scale", type=Finite(1), default=None, metavar="X",
           help="Factor of --rope-scaling; without it --ctx-size over the model's own context."),
    option("--rope-freq-base", type=Finite(1), default=None, metavar="X",
           help="The base (theta) for --rope-scaling, if the file does not tell it."),
    option("-ngl", "--n-gpu-layers", "--gpu-layers", type=int, default=0, callback=_cpu_only, metavar="N",
           help="Only 0: --device takes a model as a whole."),
    device,
    option("--list-devices", is_flag=True, is_eager=True, expose_value=False, callback=_list_devices, envvar=None,
           help="Print the GPUs, and end."),
    option("--kv", default=None, callback=_kv, metavar="TYPE",
           help="How older keys and values are kept: raw (BF16), nest (lossless, smaller), cass1 (lossless, slow), cass2 "
                "(near-lossless, slow), auto (raw, or nest where a full context would take half of the memory). Default: auto."),
    option("-ctk", "--cache-type-k", default=None, callback=_kv, metavar="TYPE", help="The same as --kv."),
    option("-ctv", "--cache-type-v", default=None, callback=_kv, metavar="TYPE", help="The same as --kv."),
    option("--no-warmup", is_flag=True, help="Accepted; there is no warm-up to skip."),
)  # fmt: skip

log = stack(
    option("-v", "--verbose", is_flag=True, help="Say on stderr what is loaded and how fast it ran."),
    option("--log-file", type=click.Path(dir_okay=False), default=None, help="Append messages to this file too."),
)

sampling = stack(
    option("-n", "--predict", "--n-predict", type=click.IntRange(-1), default=-1, metavar="N",
           help="At most this many tokens; -1: until the model is done or the context is full."),
    option("-s", "--seed", type=click.IntRange(-1, 2**64 - 1), default=-1, metavar="N", help="-1: random."),
    option("--temp", "--temperature", type=Finite(0, 1e6), default=0.8, show_default=True, metavar="X",
           help="0: always the most likely token."),
    option("--top-k", type=click.IntRange(0, 2**31 - 1), default=40, show_default=True, metavar="N", help="0: off."),
    option("--top-p", type=Finite(0, 1), default=0.95, show_default=True, metavar="X", help="1: off."),
    option("--min-p", type=Finite(0, 1), default=0.05, show_default=True, metavar="X", help="0: off."),
    option("--repeat-penalty", type=Finite(1e-6, 1e6), default=1.0, show_default=True, metavar="X",
           help="1: off."),
    option("--repeat-last-n", type=click.IntRange(-1, 2**31 - 1), default=64, show_default=True, metavar="N",
           help="Tokens that the penalties look at; -1: all."),
    option("--presence-penalty", type=Finite(-1e6, 1e6), default=0.0, metavar="X", help="0: off."),
    option("--frequency-penalty", type=Finite(-1e6, 1e6), default=0.0, metavar="X", help="0: off."),
    option("-l", "--logit-bias", multiple=True, callback=_bias, metavar="ID(+/-)BIAS", help="Such as 15043-inf."),
    option("--ignore-eos", is_flag=True, help="Go on past the end-of-text token."),
    option("-r", "--reverse-prompt", "--stop", "reverse_prompt", multiple=True, type=Line(), metavar="TEXT",
           help="Stop at this text, which is not shown. May be repeated; the variable: one a line."),
)  # fmt: skip

speculation = stack(
    option("--spec", type=click.Choice(["auto", "on", "off"]), default="auto", show_default=True,
           help="Self-speculation. The output is the same; auto turns it off when it does not pay."),
    option("--draft-max", "--spec-draft-n-max", "--draft", "draft_max", type=click.IntRange(1, 16), default=None,
           metavar="N", help="Longest draft. Without it: what the settings say, else 8."),
    option("--ngram/--no-ngram", default=True, show_default=True,
           help="Also guess what followed the last tokens where they stood before; not counted in --draft-max."),
)  # fmt: skip

template = stack(
    option("-sys", "--system-prompt", default=None, metavar="TEXT", help="The system message."),
    option("--chat-template", default=None, metavar="NAME|JINJA",
           help="Instead of the model's: chatml, llama2, llama3, mistral, zephyr, plain, or Jinja text."),
    option("--chat-template-file", type=click.Path(exists=True, dir_okay=False), default=None,
           help="Instead of the model's: a file of Jinja text."),
    option("--jinja", is_flag=True, hidden=True),  # elsewhere this turns Jinja on; here it always is
    option("--think/--no-think", default=None, help="Set the template's enable_thinking, where it has one."),
    option("--reasoning-format", type=click.Choice(["none", "deepseek", "auto"]), default="auto", show_default=True,
           help="<think> text: none leaves it alone, deepseek sets it apart, auto dims it on a terminal."),
)  # fmt: skip


def seed_of(o):
    """The seed to use: a random one, small enough to type again, for -1."""
    return random.getrandbits(32) if o["seed"] == -1 else o["seed"]


def generation(o, seed):
    """Model.generate's arguments from the options."""
    kw = {name: o[name] for name in SAMPLING}
    return kw | {
        "max_tokens": o["predict"],
        "temperature": o["temp"],
        "logit_bias": o["logit_bias"] or None,
        "ignore_eos": o["ignore_eos"],
        "stop": list(o["reverse_prompt"]) or None,
        "spec": o["spec"],
        "spec_ngram": o["ngram"],
        "seed": seed,
    } | ({} if o["draft_max"] is None else {"draft_max": o["draft_max"]})
