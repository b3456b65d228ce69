"""The command line. Answers go to stdout, everything else to stderr; exit codes: 0 done, 1 failed, 2 wrong usage,
130 interrupted, 143 terminated."""

import sys

try:
    import contextlib
    import io
    import itertools
    import json
    import os
    import re
    import signal
    from pathlib import Path

    import click

    from . import options, pull, settings
    from .console import Console, complain, finish_stdout, open_streams
    from .errors import InvalidArgument, PycassError
    from .options import option
except KeyboardInterrupt:  # Ctrl-C before main() could catch it
    sys.exit(130)

SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 110}
EPILOG = (
    "Every option can be preset by a variable: --ctx-size by PYCASS_CTX_SIZE, and so on. PYCASS_CACHE is the folder "
    "of converted models. MODEL is a .cass file, a Hugging Face folder, a GGUF file, hf:ORG/NAME, or one of: "
    + ", ".join(pull.NAMES)
    + "."
)


class App(click.Group):
    """click takes an EOFError for the user's wish to leave; here it is a fault."""

    def invoke(self, ctx):
        """click's."""
        try:
            return super().invoke(ctx)
        except EOFError as e:
            raise RuntimeError(f"EOFError: {e}") from e


@click.group(cls=App, context_settings=SETTINGS, epilog=EPILOG)
@click.version_option(package_name="pycass", prog_name="pycass", message="%(prog)s %(version)s")
def app():
    """Lossless self-speculative inference of language models."""


# ---- shared ----


def the_model(given, opt, default=None):
    """MODEL from the argument, -m, or the default."""
    if given and options.is_preset("model_opt"):
        opt = None
    if given and opt and given != opt:
        raise click.UsageError(f"two models: {given} and {opt}")
    if not (given or opt or default):
        raise click.UsageError("which model? Give MODEL or --model")
    return given or opt or default


def console_of(o):
    """The command's Console; its log file is closed when the command ends."""
    console = Console(o["verbose"], o["log_file"])
    click.get_current_context().call_on_close(console.close)
    return console


def load_model(name, o, console):
    """Resolves, converts if need be, and loads."""
    from .model import Model

    path = resolve(name, console)
    scaling = rope_scaling(o, path)
    model = Model.load(
        path,
        n_ctx=context_size(o, path),
        threads=o["threads"],
        threads_batch=o["threads_batch"],
        batch_size=o["batch_size"],
        kernel=o["kernel"],
        mmap=o["mmap"],
        mlock=o["mlock"],
        kv=options.kv_of(o),
        device=o["device"],
        **({"rope_scaling": scaling} if scaling else {}),
        **({"settings": o["settings"]} if o["settings"] else {}),
    )
    if o.get("no_warmup"):
        console.note("--no-warmup has no effect: there is no warm-up")
    if model.device_note:
        console.note(f"on the CPU: {model.device_note}")
    trained = model.config.n_ctx_train
    if model.n_ctx > trained and not scaling:
        console.note(f"the context of {model.n_ctx} tokens is longer than the model was made for ({trained})")
    console.detail(f"{path}: {where(model)}, context {model.n_ctx}")
    return model


def where(model):
    """What computes."""
    return f"kernel {model.kernel}, {model.threads} threads" if model.device == "cpu" else f"device {model.device}"


def resolve(name, console):
    """The .cass file of a model's name, with a progress bar if it has to be converted."""
    with console.progress("converting") as progress:
        return pull.resolve(name, progress=progress, log=console.note)


def context_size(o, path):
    """Model.load's n_ctx: an explicit 0 means the model's own context, however long."""
    if o["ctx_size"] != 0:
        return o["ctx_size"] or 0
    from .file import CassFile

    with CassFile(path) as f:
        return f.config.n_ctx_train


def rope_scaling(o, path):
    """Model.load's rope_scaling from --rope-scaling and --rope-scale."""
    kind = o["rope_scaling"]
    if kind is None:
        if o["rope_scale"] or o["rope_freq_base"]:
            raise click.UsageError("--rope-scale and --rope-freq-base go with --rope-scaling")
        return None
    from .file import CassFile

    with CassFile(path) as f:
        trained, stored = f.config.n_ctx_train, f.json.get("rope") or {}
    base = {"rope_theta": o["rope_freq_base"]} if o["rope_freq_base"] else {}
    if not base and "rope_theta" not in stored:
        raise click.UsageError("this file does not tell its rope base: give --rope-freq-base, as in its config.json")
    if kind == "none":
        return base | {"rope_type": "default"}
    factor = o["rope_scale"] or (o["ctx_size"] or 0) / trained
    if factor <= 1:
        raise click.UsageError(f"--rope-scaling {kind} needs --rope-scale, or a --ctx-size over the model's {trained}")
    return base | {"rope_type": kind, "factor": factor, "original_max_position_embeddings": trained}


def set_template(tokenizer, o):
    """Applies --chat-template and --chat-template-file."""
    options.prefer_explicit(o, "chat_template", "chat_template_file")
    if o["chat_template"] and o["chat_template_file"]:
        raise click.UsageError("--chat-template and --chat-template-file exclude each other")
    if o["chat_template_file"]:
        tokenizer.set_chat_template(os.path.abspath(o["chat_template_file"]))
    elif o["chat_template"]:
        tokenizer.set_chat_template(o["chat_template"])


def template_variables(o):
    """What the options pass on to the template."""
    return {} if o["think"] is None else {"enable_thinking": o["think"]}


def read_text(path):
    """The text of a file, or of stdin for "-"."""
    try:
        data = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
        return data.decode("utf-8")
    except UnicodeDecodeError as e:
        raise InvalidArgument(f"{path}: not UTF-8 text (byte {e.start})") from None


def the_prompt(o):
    """The prompt from -p, -f or stdin; the line end at the end of a file or pipe is not part of it."""
    options.prefer_explicit(o, "prompt", "file")
    if o["prompt"] is not None and o["file"] is not None:
        raise click.UsageError("--prompt and --file exclude each other")
    if o["prompt"] is not None:
        return _one_end_less(read_text("-")) if o["prompt"] == "-" else o["prompt"]
    if o["file"] is not None:
        return _one_end_less(read_text(o["file"]))
    if sys.stdin.isatty():
        raise click.UsageError("no prompt: give -p TEXT or -f FILE, or pipe it in")
    return _one_end_less(read_text("-"))


def _one_end_less(text):
    return text.removesuffix("\n").removesuffix("\r")


# ---- run ----


@app.command()
@click.argument("model", required=False)
@option("-p", "--prompt", default=None, metavar="TEXT", help="The prompt; - reads stdin.")
@option("-f", "--file", default=None, type=click.Path(exists=True, dir_okay=False, allow_dash=True), envvar=None,
        help="Read the prompt from a file; one line end at its end is dropped.")
@option("--raw", "-no-cnv", "--no-conversation", "raw", is_flag=True,
        help="Complete the prompt as it is, without the chat template.")
@option("--special", is_flag=True, help="With --raw: control tokens spelled in the prompt are control tokens.")
@option("--json", "as_json", is_flag=True, help="Print one JSON object with text, token ids and timings.")
@option("--verify-lossless", is_flag=True, help="Run with and without speculation and compare ids and logits.")
@options.model
@options.sampling
@options.speculation
@options.template
@options.log
def run(model, **o):
    """Answer one prompt: from -p, -f or stdin.

    A model with a chat template gets the prompt as a user's message; --raw completes the text itself, as does
    any model without a template."""
    from . import oneshot

    name = the_model(model, o["model_opt"])
    prompt = the_prompt(o)
    console = console_of(o)
    with load_model(name, o, console) as m:
        set_template(m.tokenizer, o)
        return oneshot.run(m, prompt, o, template_variables(o), console)


# ---- chat ----


@app.command()
@click.argument("model", required=False)
@option("-p", "--prompt", default=None, metavar="TEXT", help="The first message.")
@option("-f", "--file", default=None, type=click.Path(exists=True, dir_okay=False), envvar=None,
        help="Read the first message from a file.")
@option("-st", "--single-turn", is_flag=True, help="Leave after one reply.")
@options.model
@options.sampling
@options.speculation
@options.template
@options.log
def chat(model, **o):
    """Chat with a model; without MODEL: smollm2-135m. /help lists the commands."""
    from . import chat as c

    name = the_model(model, o["model_opt"], pull.DEFAULT)
    first = the_prompt(o) if o["prompt"] is not None or o["file"] is not None else None
    console = console_of(o)
    with load_model(name, o, console) as m:
        set_template(m.tokenizer, o)
        if not m.tokenizer.chat_template:
            m.tokenizer.render_chat([{"role": "user", "content": ""}])  # raises, and says what to do
        terminal = sys.stdin.isatty() and sys.stdout.isatty()
        talk = c.Conversation(m, options.generation(o, options.seed_of(o)), o["system_prompt"], template_variables(o))
        reader = c.terminal_reader() if terminal else c.plain_reader(sys.stdin)
        if terminal and first is None:
            console.note(f"{name}, context {m.n_ctx}. /help lists the commands, /exit leaves.")
        loop = c.Chat(
            talk, reader, sys.stdout, console.note, terminal, terminal or o["verbose"], o["reasoning_format"]
        )
        loop.run(first, o["single_turn"])
        return 1 if loop.failed and not terminal else 0


# ---- files ----


@app.command()
@click.argument("src")
@option("-o", "--out", required=True, type=click.Path(dir_okay=False), envvar=None, help="The .cass file to write.")
@option("--codec", type=click.Choice(["nest", "raw", "cass1", "cass2"]), default="nest", show_default=True,
        help="nest: speculative and smaller; raw: plain BF16; cass1, cass2: pruned and truncated drafts, cass2 near-lossless.")
@option("--calibrate", default=None, metavar="FILE", envvar=None,
        help="Text that tells which input channels are large: a UTF-8 file, or `builtin`. Default: what a .cass file keeps of "
             "an earlier one, else builtin.")
@option("--no-calibrate", is_flag=True, help="Without: quicker, and the draft guesses right less often.")
@option("--calibrate-samples", type=click.IntRange(1), default=128, show_default=True, metavar="N", help="Most samples of the text.")
@option("--hot", type=click.Choice(["0", "16", "32", "48", "64"]), default="16", show_default=True,
        help="Input channels of a matrix that the draft has exactly.")
@option("--bias/--no-bias", default=True, show_default=True, help="A draft bias: what the draft misses on average.")
@option("--weighted/--no-weighted", default=True, show_default=True, help="Choose group exponents by the channels' activations.")
@option("--prune", type=click.FloatRange(0, 1, max_open=True), default=0.4, show_default=True, metavar="P",
        help="cass1, cass2: the part of each row that the draft does without.")
@option("--mantissa-bits", type=click.IntRange(0, 7), default=3, show_default=True, metavar="N",
        help="cass1, cass2: mantissa bits that the draft reads.")
@option("--half/--no-half", default=True, show_default=True, help="cass1, cass2: the draft takes the other bits for a half.")
@option("--pruned", type=click.Choice(["coded", "raw"]), default="coded", show_default=True,
        help="cass1: exponents of pruned weights coded, or all their 16 bits as they are.")
@option("--settings", default=None, type=click.Path(exists=True, dir_okay=False), metavar="FILE", envvar=None,
        help="Encode as `pycass tune` found best. What the command line says goes before.")
@options.log
def convert(src, out, **o):
    """Convert a Hugging Face folder, a GGUF or a .cass file to a .cass file."""
    from . import inspect_file
    from .convert import convert as do

    if o["settings"]:
        options.take(o, settings.load(o["settings"]).convert_arguments())
    if o["no_calibrate"] and o["calibrate"]:
        raise click.UsageError("--calibrate and --no-calibrate exclude each other")
    how = None if o["no_calibrate"] else o["calibrate"] or "auto"
    console = console_of(o)
    with console.progress("converting") as progress:
        report = do(src, out, codec=o["codec"], progress=progress, calibrate=how, samples=o["calibrate_samples"],
                    hot=int(o["hot"]), bias=o["bias"], weighted=o["weighted"], prune=o["prune"],
                    mantissa_bits=o["mantissa_bits"], half=o["half"], pruned=o["pruned"])
    console.note(inspect_file.report_text(report, out))


@app.command("pull")
@click.argument("name")
@options.log
def pull_command(name, **o):
    """Download a known model, or hf:ORG/NAME, and convert it into the cache. Prints the file's path."""
    console = console_of(o)
    with console.progress("converting") as progress:
        click.echo(pull.pull(name, progress, console.note))


@app.command()
@click.argument("file", required=False)
@option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@option("--tensors", is_flag=True, help="List the tensors too.")
@options.log
def info(file, as_json, tensors, **o):
    """Describe a .cass file; without FILE: this build's kernel sets and the known models."""
    from . import inspect_file

    if file is None:
        found = inspect_file.build()
        click.echo(json.dumps(found) if as_json else inspect_file.build_text(found))
        return
    found = inspect_file.describe(resolve(file, console_of(o)), tensors)
    click.echo(json.dumps(found, ensure_ascii=False) if as_json else inspect_file.describe_text(found))


@app.command()
@click.argument("file", required=False)
@option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@options.log
def doctor(file, as_json, **o):
    """Say what this machine is, what of it this build uses, and what of FILE fits: the longest context here."""
    from . import doctor as d

    console = console_of(o)
    found = d.examine(file and resolve(file, console))
    click.echo(json.dumps(found, ensure_ascii=False) if as_json else d.as_text(found))


@app.command()
@click.argument("file")
@option("--against", default=None, metavar="SRC", envvar=None, help="Compare every weight with this checkpoint's.")
@options.log
def verify(file, against, **o):
    """Check a .cass file: checksums, then every tensor decoded against its recorded hash, or against SRC."""
    from . import inspect_file

    console = console_of(o)
    console.detail(f"verifying {file}")
    path = resolve(file, console) if file in pull.NAMES else file
    click.echo(inspect_file.verify(path, against))


@app.command("verify-spec")
@click.argument("model", required=False)
@option("-p", "--prompt", "prompts", multiple=True, metavar="TEXT", envvar=None, help="A prompt; may be repeated.")
@option("--lengths", default="1,8,16", show_default=True, metavar="LIST", help="Draft lengths to try.")
@option("-n", "--predict", type=click.IntRange(1), default=64, show_default=True, metavar="N", help="Tokens.")
@option("--temp", type=options.Finite(0, 1e6), default=0.0, show_default=True, metavar="X",
        help="0: greedy; else with --seed.")
@option("-s", "--seed", type=click.IntRange(0, 2**64 - 1), default=1, show_default=True, metavar="N", help="Of sampling.")
@option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@options.model
@options.log
def verify_spec(model, prompts, lengths, **o):
    """Show that speculation changes nothing: ids and logits with it and without it are compared bit for bit."""
    from . import oneshot

    name = the_model(model, o["model_opt"])
    drafts = number_list(lengths, "--lengths", 1, 16)
    console = console_of(o)
    with load_model(name, o, console) as m:
        return oneshot.verify_spec(m, prompts, drafts, o)


MOST_NUMBERS = 1000  # in a list; each is a measurement


def number_list(text, name, low, high):
    """A list in llama-bench's spelling: 1,2,8-16; 128-512+128, a step; 1-64*2, a factor."""
    out = []
    try:
        for part in text.split(","):
            numbers = _numbers(part)
            if not low <= numbers[0] <= high or not low <= numbers[-1] <= high:
                raise click.BadParameter(f"numbers from {low} to {high}", param_hint=name)
            if len(out) + len(numbers) > MOST_NUMBERS:
                raise click.BadParameter(f"more than {MOST_NUMBERS} numbers", param_hint=name)
            out += numbers
    except ValueError:
        shown = text if len(text) <= 40 else text[:40] + "..."
        raise click.BadParameter(f"{shown!r} is not a list such as 1,2,8-16", param_hint=name) from None
    return out


def _numbers(part):
    """One part of a list: a sequence that is not empty, or ValueError."""
    m = re.fullmatch(r"(\d+)(?:-(\d+)(?:([+*])(\d+))?)?", part.strip(), re.ASCII)
    if not m:
        raise ValueError(part)
    first, last, by = int(m[1]), int(m[2] or m[1]), int(m[4] or 1)
    if first > last or (m[3] == "*" and (first < 1 or by < 2)):
        raise ValueError(part)
    if m[3] == "*":
        return list(itertools.takewhile(lambda n: n <= last, (first * by**i for i in itertools.count())))
    return range(first, last + 1, by)


# ---- measuring ----


@app.command()
@click.argument("model", required=False)
@option("-p", "--n-prompt", default=("512",), show_default=True, multiple=True, metavar="LIST", envvar=None,
        help="Prompt lengths; 0: none.")
@option("-n", "--n-gen", default=("128",), show_default=True, multiple=True, metavar="LIST", envvar=None,
        help="Tokens to generate; 0: none.")
@option("-r", "--repetitions", type=click.IntRange(1), default=5, show_default=True, metavar="N",
        help="Measured runs of each test, after one that is not measured.")
@option("-t", "--threads", default=("0",), multiple=True, metavar="LIST", help="Thread counts; 0: physical cores.")
@option("-o", "--output", type=click.Choice(["md", "json", "jsonl", "csv"]), default="md", show_default=True,
        help="Format of the table.")
@option("--spec", "specs", default="off,auto,draft", show_default=True, metavar="LIST",
        help="Generate without speculation (off), with it (auto, on), or measure the draft's passes alone (draft).")
@option("--draft-max", type=click.IntRange(1, 16), default=None, metavar="N",
        help="Longest draft. Without it: what the settings say, else 8.")
@options.settings
@option("--ngram/--no-ngram", default=True, show_default=True, help="Look-ups beside the draft, with auto and on.")
@option("--temp", "--temperature", type=options.Finite(0, 1e6), default=0.0, show_default=True, metavar="X",
        help="0: greedy; else as `run` samples by default.")
@option("-s", "--seed", type=click.IntRange(-1, 2**64 - 1), default=1, show_default=True, metavar="N",
        help="Of sampling; -1: random.")
@option("-m", "--model", "model_opt", metavar="MODEL", help="The same as MODEL.")
@option("-b", "--batch-size", type=click.IntRange(0, 4096), default=0, metavar="N", help="Prompt tokens per pass.")
@option("--kernel", default=None, metavar="NAME", help="Force a kernel set.")
@options.device
@option("--mmap/--no-mmap", default=False, show_default=True, help="Map the file, or read it into huge pages first.")
@option("-ngl", "--n-gpu-layers", type=int, default=0, callback=options._cpu_only, metavar="N", help="Only 0.")
@options.log
def bench(model, **o):
    """Measure: prompt tokens (pp512) and generation (tg128) a second, mean and standard deviation.

    A LIST is one as llama-bench takes: 1,2,8-16, or 128-512+128, or 1-64*2. Generation answers built-in prompts of
    code, maths, prose and chat, since what speculation gains depends on what is written."""
    from . import bench as b

    name, chosen = the_model(model, o["model_opt"]), settings.of(o["settings"])
    plan = b.Plan(
        prompts=[n for n in number_list(",".join(o["n_prompt"]), "--n-prompt", 0, 1 << 20) if n],
        gens=[n for n in number_list(",".join(o["n_gen"]), "--n-gen", 0, 1 << 20) if n],
        threads=number_list(",".join(o["threads"]), "--threads", 0, options.MOST_THREADS),
        specs=list(dict.fromkeys(o["specs"].split(","))),
        repetitions=o["repetitions"],
        draft_max=o["draft_max"] or (chosen and chosen.draft_max) or 8,
        settings=chosen,
        temperature=o["temp"],
        seed=options.seed_of(o),
        batch_size=o["batch_size"],
        kernel=o["kernel"],
        device=o["device"],
        ngram=o["ngram"],
        mmap=o["mmap"],
    )
    if not set(plan.specs) <= set(b.SPECS):
        raise click.BadParameter(f"{o['specs']!r} is not a list of {', '.join(b.SPECS)}", param_hint="--spec")
    if not plan.prompts and not plan.gens:
        raise click.UsageError("nothing to measure: --n-prompt and --n-gen are both 0")
    console = console_of(o)
    b.run(resolve(name, console), name, plan, o["output"], sys.stdout, console)


@app.command()
@click.argument("model", required=False)
@option("-f", "--file", required=True, type=click.Path(exists=True, dir_okay=False, allow_dash=True), envvar=None,
        help="UTF-8 text; - reads stdin.")
@option("--draft", is_flag=True, help="Also of the draft: its perplexity, KL divergence and agreement.")
@option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@options.model
@options.log
def perplexity(model, file, draft, as_json, **o):
    """The perplexity of a text: exp of the mean negative log likelihood of its tokens.

    A text over the context is cut into windows of --ctx-size tokens."""
    from . import perplexity as p

    if o["ctx_size"] == 1:
        raise click.BadParameter(p.TOO_SHORT, param_hint="--ctx-size")
    name = the_model(model, o["model_opt"])
    text = read_text(file)
    console = console_of(o)
    with load_model(name, o, console) as m:
        found = p.perplexity(m, text, draft, console)
    click.echo(json.dumps(found) if as_json else p.as_text(found))


threads = option("-t", "--threads", type=click.IntRange(0, options.MOST_THREADS), default=0, metavar="N",
                 help="Threads; 0: physical cores.")  # fmt: skip
kernel = option("--kernel", default=None, metavar="NAME", help="Force a kernel set.")
model_option = option("-m", "--model", "model_opt", metavar="MODEL", help="The same as MODEL.")


@app.command()
@click.argument("model", required=False)
@option("-o", "--out", default=None, type=click.Path(), envvar=None,
        help="The report's folder: a new one, or one to go on with. Without it: NAME.study in the current folder.")
@option("--grid", type=click.Choice(["small", "full"]), default="small", show_default=True, help="Encodings to measure.")
@option("--budget", type=options.Finite(0), default=30.0, show_default=True, metavar="MINUTES",
        help="No encoding is begun that would end later; 0: no end.")
@option("--tokens", type=click.IntRange(8, 1024), default=48, show_default=True, metavar="N", help="Of each answer.")
@option("--plots/--no-plots", default=True, show_default=True, help="PNG and SVG; needs pip install 'pycass[study]'.")
@model_option
@threads
@kernel
@options.log
def study(model, **o):
    """Study a model: what its exponents weigh, what a draft's bits buy, and what fits into memory.

    Writes a report with tables and plots, and prints its path. Each encoding is a temporary file in the same folder.
    A later run on the folder goes on where one stopped."""
    from . import study as s

    name = the_model(model, o["model_opt"])
    console = console_of(o)
    budget = 60 * o["budget"] or None
    short = os.path.basename(name.rstrip("/"))
    plan = s.Plan(resolve(name, console), short, Path(o["out"] or f"{short}.study"), o["grid"], budget, o["tokens"],
                  o["threads"], o["kernel"], o["plots"])  # fmt: skip
    click.echo(s.run(plan, console))


@app.command()
@click.argument("model", required=False)
@option("-o", "--out", default=None, type=click.Path(dir_okay=False), envvar=None,
        help="The settings file. Without it: MODEL.tune.json beside a .cass file, else in the current folder.")
@option("--objective", type=click.Choice(["speed", "paper"]), default="speed", show_default=True,
        help="speed: tokens a second on this machine; paper: acceptance over the bits that a draft reads.")
@option("--budget", type=options.Finite(0.1), default=15.0, show_default=True, metavar="MINUTES", help="Time, about.")
@option("--tokens", type=click.IntRange(16, 1024), default=32, show_default=True, metavar="N",
        help="Of each answer that a setting is measured on.")
@option("--search", type=click.Choice(["auto", "optuna", "grid"]), default="auto", show_default=True,
        help="optuna needs pip install 'pycass[tune]'; grid does without.")
@option("--json", "as_json", is_flag=True, help="Print the settings.")
@model_option
@threads
@kernel
@options.log
def tune(model, **o):
    """Find the settings with which this machine decodes a model fastest; convert and the engine read them.

    Ctrl-C leaves the best so far, and a later run goes on from the journal beside the settings file."""
    from . import tune as t

    name = the_model(model, o["model_opt"])
    console = console_of(o)
    if o["search"] == "optuna" and not t.has_optuna():
        raise InvalidArgument("optuna is not installed: pip install 'pycass[tune]', or --search grid")
    path = resolve(name, console)
    out = o["out"] or (name if name.endswith(".cass") else os.path.basename(name.rstrip("/"))) + ".tune.json"
    plan = t.Plan(os.fspath(path), out, o["objective"], 60 * o["budget"], o["tokens"], o["threads"], o["kernel"],
                  None if o["search"] == "auto" else o["search"] == "optuna")  # fmt: skip
    found = t.run(plan, console)
    click.echo(json.dumps(found.as_object()) if o["as_json"] else t.as_text(found, name, out))


# ---- entry ----


def main(argv=None):
    """The `pycass` program; returns the exit code."""
    try:
        with _sigterm_exits():
            return _main(argv)
    except KeyboardInterrupt:
        return 130
    except SystemExit as e:
        return e.code if isinstance(e.code, int) else 1


def _main(argv):
    stdout_closed = open_streams()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError):
            stream.reconfigure(errors="replace")  # a terminal that cannot show a character is no reason to stop
    try:
        if stdout_closed:
            raise PycassError("stdout is closed, and the answer goes there; >/dev/null drops it")
        code = app.main(args=argv, prog_name="pycass", standalone_mode=False)
        finish_stdout()
        return code if isinstance(code, int) else 0
    except click.ClickException as e:
        text = io.StringIO()
        e.show(text)
        complain(text.getvalue().rstrip())
        return 2 if isinstance(e, click.UsageError) else 1
    except click.Abort:
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # so that the last flush is quiet too
        return 1
    except Exception as e:
        if os.environ.get("PYCASS_TRACEBACK"):
            raise
        known = isinstance(e, (PycassError, OSError, MemoryError))
        complain(f"pycass: error: {words(e)}" if known else internal(e))
        return 1


@contextlib.contextmanager
def _sigterm_exits():
    """While it lasts, SIGTERM ends the program as Ctrl-C does: partial files are removed. Further ones are ignored:
    `timeout` sends two."""

    def end(*_):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        sys.exit(143)

    try:
        before = signal.signal(signal.SIGTERM, end) if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL else None
    except ValueError:  # only the main thread may
        before = None
    try:
        yield
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)


def internal(e):
    """One line on an exception that nobody expected."""
    text = " ".join(str(e).split())
    what = type(e).__name__ + (f": {text}" if text else "")
    return f"pycass: internal error: {what} (PYCASS_TRACEBACK=1 shows where)"


def words(e):
    """An exception as a sentence."""
    if isinstance(e, MemoryError) and not isinstance(e, PycassError):
        return "out of memory"
    if isinstance(e, OSError) and not isinstance(e, PycassError) and e.strerror:
        return f"{e.filename}: {e.strerror}" if e.filename else e.strerror
    return str(e) or type(e).__name__
