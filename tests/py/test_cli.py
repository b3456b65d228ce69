"""The command line: output, exit codes, options; without weights."""

import io
import json
import os
import subprocess
import sys

import click
import pytest
from fake_model import FakeModel, byte_level

import pycass.cli as cli
from pycass import options
from pycass.errors import ContextFull, FormatError


@pytest.fixture
def pycass(monkeypatch, capsys):
    """Runs the program with a fake model: (exit code, stdout, stderr)."""

    def run(*args, model=None, stdin=None):
        given = model or FakeModel("Hi 👩‍💻.", "Hi 👩‍💻.")
        monkeypatch.setattr(cli, "load_model", lambda name, o, console: given)
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO((stdin or "").encode()), encoding="utf-8"))
        code = cli.main(list(args))
        out, err = capsys.readouterr()
        return code, out, err

    return run


# ---- run ----


def test_run_answers_on_stdout_only(pycass):
    assert pycass("run", "m", "-p", "hello") == (0, "Hi 👩‍💻.\n", "")


def test_run_json_is_one_object(pycass):
    model = FakeModel("Hi.")
    code, out, err = pycass("run", "-m", "m", "-p", "hello", "--json", "-s", "7", model=model)
    found = json.loads(out)
    assert code == 0 and err == "" and out.count("\n") == 1
    assert found["text"] == "Hi." and found["seed"] == 7 and found["finish_reason"] == "stop"
    assert found["token_ids"] == model.tokenizer.encode("Hi.")
    assert found["prompt_tokens"] == len(found["prompt_token_ids"])
    assert set(found["timings"]) == {"prompt_ms", "prompt_tps", "decode_ms", "decode_tps"}
    assert {"steps", "drafted", "accepted", "acceptance", "mean_len", "ngram_drafted", "ngram_accepted"} <= set(found["spec"])


def test_run_uses_the_template_and_raw_does_not(pycass):
    model = FakeModel("x")
    pycass("run", "m", "-p", "hello", "-sys", "be nice", model=model)
    pycass("run", "m", "-p", "hello", "--raw", model=model)
    pycass("run", "m", "-p", "<|im_end|>", "-no-cnv", "--special", model=model)
    assert "system\nbe nice" in model.prompts[0] and model.prompts[0].endswith("assistant\n")
    assert model.prompts[1:] == ["hello", "<|im_end|>"]


def test_a_model_without_a_template_completes(pycass):
    model = FakeModel("x", blob=byte_level(chat_template=None))
    assert pycass("run", "m", "-p", "hello", model=model)[0] == 0
    assert model.prompts == ["hello"]
    code, _, err = pycass("run", "m", "-p", "hello", "-sys", "s", model=model)
    assert code == 2 and "chat template" in err
    code, _, err = pycass("chat", "m", model=model)
    assert code == 1 and "--chat-template" in err
    assert pycass("run", "m", "-p", "a", "--chat-template", "zephyr", model=model)[0] == 0
    assert model.prompts[-1].startswith("<|user|>\na")


def test_the_prompt_from_a_file_or_a_pipe(pycass, tmp_path):
    model = FakeModel("x")
    (tmp_path / "p").write_bytes("é\n\n".encode())
    pycass("run", "m", "--raw", "-f", str(tmp_path / "p"), model=model)
    pycass("run", "m", "--raw", stdin="from stdin\n", model=model)
    pycass("run", "m", "--raw", "-p", "-", stdin="dash", model=model)
    assert model.prompts == ["é\n", "from stdin", "dash"]
    (tmp_path / "b").write_bytes(b"\xff")
    code, _, err = pycass("run", "m", "-f", str(tmp_path / "b"))
    assert code == 1 and "UTF-8" in err


def test_options_reach_the_model(pycass):
    model = FakeModel("x")
    pycass("run", "m", "-p", "a", "-n", "-1", "-s", "3", "--temp", "0", "-l", "5-inf", "-l", "6+1.5", "-r", "U:", "--stop", "V",
           "--spec-draft-n-max", "4", "--ignore-eos", model=model)  # fmt: skip
    got = model.options[0]
    assert got["max_tokens"] == -1 and got["seed"] == 3 and got["temperature"] == 0
    assert got["logit_bias"] == {5: float("-inf"), 6: 1.5} and got["stop"] == ["U:", "V"]
    assert got["draft_max"] == 4 and got["ignore_eos"] and got["spec"] == "auto" and got["spec_ngram"] is True
    pycass("run", "m", "-p", "a", "--no-ngram", model=model)
    assert model.options[1]["spec_ngram"] is False
    assert (got["top_k"], got["top_p"], got["min_p"], got["repeat_last_n"]) == (40, 0.95, 0.05, 64)


def test_the_environment_presets_options(pycass, monkeypatch):
    model = FakeModel("x")
    monkeypatch.setenv("PYCASS_TEMP", "0.25")
    pycass("run", "m", "-p", "a", model=model)
    pycass("run", "m", "-p", "a", "--temp", "0.5", model=model)
    assert [o["temperature"] for o in model.options] == [0.25, 0.5]


def test_the_command_line_wins_over_presets(pycass, monkeypatch, tmp_path):
    model, file, template = FakeModel("x"), tmp_path / "p", tmp_path / "t"
    file.write_text("from a file")
    template.write_text("[{{ messages[-1]['content'] }}]")

    def last(*args, **presets):
        with monkeypatch.context() as m:
            for name, value in presets.items():
                m.setenv(f"PYCASS_{name}", value)
            code, _, err = pycass("run", *args, model=model)
        assert code == 0, err
        return model.prompts[-1]

    assert "user\nhi<" in last("b", "-p", "hi", MODEL="a")
    assert "user\nhi<" in last("-p", "hi", MODEL="a")
    assert last("m", "--raw", "-f", str(file), PROMPT="preset") == "from a file"
    assert last("m", "--raw", PROMPT="preset") == "preset"
    assert last("m", "-p", "a", "--raw", SYSTEM_PROMPT="s") == "a"
    assert "system\ns" in last("m", "-p", "a", SYSTEM_PROMPT="s")
    assert "system\ns" in last("m", "-p", "a", "-sys", "s", RAW="1")
    assert "user\na<" in last("m", "-p", "a", SPECIAL="1")
    last("m", "-p", "a", REVERSE_PROMPT="two words")
    assert model.options[-1]["stop"] == ["two words"]
    last("m", "-p", "a", REVERSE_PROMPT="two words\nUser:\n")
    assert model.options[-1]["stop"] == ["two words", "User:"]
    last("m", "-p", "a", "-r", "other one", REVERSE_PROMPT="two words")
    assert model.options[-1]["stop"] == ["other one"]
    assert last("m", "-p", "a", "--chat-template-file", str(template), CHAT_TEMPLATE="zephyr") == "[a]"
    assert last("m", "-p", "a", "--chat-template", "zephyr", CHAT_TEMPLATE_FILE=str(template)).startswith("<|user|>")


@pytest.mark.parametrize("name", ["-c", "-t"])
def test_presets_are_checked_alike_everywhere(pycass, monkeypatch, name):
    monkeypatch.setenv({"-c": "PYCASS_CTX_SIZE", "-t": "PYCASS_THREADS"}[name], "-1")
    for command in cli.app.commands.values():
        if name in [o for p in command.params for o in p.opts]:
            needed = ["-f", __file__] if command.name in ("run", "perplexity") else []
            code, _, err = pycass(command.name, "m", *needed)
            assert code == 2 and "-1" in err, command.name


FLOATS = [p for p in cli.app.commands["run"].params if isinstance(p.type, click.types.FloatParamType | click.FloatRange)]


@pytest.mark.parametrize("option", [p.opts[0] for p in FLOATS])
@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1e999"])
def test_numbers_are_finite(pycass, option, value):
    code, _, err = pycass("run", "m", "-p", "x", option, value)
    assert len(FLOATS) >= 8 and code == 2 and "not a finite number" in err


def test_thinking_apart(pycass):
    model = FakeModel("<think>\nhm\n</think>\n\nYes.")
    code, out, err = pycass("run", "m", "-p", "a", "--reasoning-format", "deepseek", model=model)
    assert (code, out, err.strip()) == (0, "Yes.\n", "hm")
    found = json.loads(pycass("run", "m", "-p", "a", "--json", "--reasoning-format", "deepseek", model=model)[1])
    assert (found["text"], found["reasoning"]) == ("Yes.", "hm")
    assert pycass("run", "m", "-p", "a", model=model)[1] == "<think>\nhm\n</think>\n\nYes.\n"


# ---- errors and exit codes ----


@pytest.mark.parametrize(
    "args, words",
    [
        (["run", "-p", "x"], "which model"),
        (["run", "a", "-m", "b", "-p", "x"], "two models"),
        (["run", "m", "-p", "x", "-f", __file__], "exclude"),
        (["run", "m", "-p", "x", "--bogus"], "--bogus"),
        (["run", "m", "-p", "x", "-ngl", "99"], "--device cuda"),
        (["run", "m", "-p", "x", "-ctk", "q8_0"], "bf16"),
        (["run", "m", "-p", "x", "-ctk", "nest", "-ctv", "raw"], "kept alike"),
        (["run", "m", "-p", "x", "--kv", "q4"], "bf16"),
        (["run", "m", "-p", "x", "-l", "nonsense"], "ID+BIAS"),
        (["run", "m", "-p", "x", "--spec", "maybe"], "maybe"),
        (["run", "m", "-p", "x", "--draft-max", "17"], "17"),
        (["run", "m", "-p", "x", "-n", "-2"], "-2"),
        (["run", "m", "-p", "x", "--special"], "--raw"),
        (["run", "m", "-p", "x", "-n", "1e3"], "1e3"),
        (["run", "m", "-f", "/no/such/file"], "/no/such/file"),
        (["bench", "m", "-p", "x"], "n-prompt"),
        (["bench", "m", "--spec", "off,bogus"], "bogus"),
        (["bench", "m", "--spec", ""], "--spec"),
        (["bench", "m", "-p", "0", "-n", "0"], "nothing to measure"),
        (["bench", "m", "-o", "sql"], "sql"),
        (["bench", "m", "-r", "0"], "--repetitions"),
        (["bench", "m", "--temp", "-1"], "--temp"),
        (["bench", "m", "--seed", "x"], "--seed"),
        (["verify-spec", "m", "--lengths", "0"], "1 to 16"),
        (["verify-spec", "m", "--lengths", "1-99999999999"], "1 to 16"),
        (["verify-spec", "m", "--lengths", ",".join(["1-16"] * 100)], "more than"),
        (["bench", "m", "-p", "0-100000000000"], "0 to"),
        (["bench", "m", "-n", "1-100000"], "more than"),
        (["bench", "m", "-t", "-1"], "--threads"),
        (["run", "m", "-p", "x", "-t", "-1"], "--threads"),
        (["run", "m", "-p", "x", "-tb", "5000"], "4096"),
        (["run", "m", "-p", "x", "-c", "99999999999"], "--ctx-size"),
        (["run", "m", "-p", "x", "--top-k", "-1"], "--top-k"),
        (["run", "m", "-p", "x", "--top-k", "99999999999"], "--top-k"),
        (["run", "m", "-p", "x", "--top-p", "1.5"], "--top-p"),
        (["run", "m", "-p", "x", "--min-p", "-1"], "--min-p"),
        (["run", "m", "-p", "x", "--repeat-penalty", "0"], "--repeat-penalty"),
        (["run", "m", "-p", "x", "--temp", "-1"], "--temp"),
        (["run", "m", "-p", "x", "-l", "1+1e999"], "too large"),
        (["run", "m", "-p", "x", "-l", "99999999999+1"], "no token"),
        (["run", "m", "-p", "x", "-l", "9" * 5000 + "+1"], "ID+BIAS"),
        (["perplexity", "m", "-c", "1", "-f", __file__], "at least 2"),
        (["convert", "x"], "--out"),
        (["nonsense"], "nonsense"),
    ],
)
def test_wrong_usage_is_2(pycass, args, words):
    code, out, err = pycass(*args)
    assert code == 2 and out == "" and words in err and "Traceback" not in err


@pytest.mark.parametrize(
    "error, code, words",
    [
        (ContextFull("the prompt has 9 tokens, the context 8"), 1, "pycass: error: the prompt has 9 tokens"),
        (FormatError("x.cass: truncated"), 1, "truncated"),
        (OSError(28, "No space left on device", "f"), 1, "f: No space left on device"),
        (MemoryError(), 1, "out of memory"),
        (KeyboardInterrupt(), 130, ""),
        (ValueError("two\nlines"), 1, "pycass: internal error: ValueError: two lines (PYCASS_TRACEBACK=1"),
        (RecursionError(), 1, "pycass: internal error: RecursionError (PYCASS"),
        (EOFError("short"), 1, "internal error"),
    ],
)
def test_failures_are_words_and_codes(pycass, error, code, words):
    model = FakeModel("x")
    model.stream = lambda *a, **k: (_ for _ in ()).throw(error)
    got, out, err = pycass("run", "m", "-p", "x", model=model)
    assert got == code and out.strip() == "" and words in err and "Traceback" not in err


def test_an_unknown_model_lists_the_known(capsys):
    assert cli.main(["run", "smolm2-135m", "-p", "x"]) == 1
    err = capsys.readouterr().err
    assert "did you mean smollm2-135m?" in err and "qwen2.5-coder-1.5b" in err and "hf:ORG/NAME" in err


def test_help_and_version(capsys):
    for args in ([], ["--help"], *([name, "-h"] for name in cli.app.commands)):
        cli.main(args)
        text = "".join(capsys.readouterr())
        assert "Usage:" in text
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("pycass 0.")


def test_every_option_is_documented_and_has_a_variable():
    for command in cli.app.commands.values():
        for p in command.params:
            if isinstance(p, click.Option) and not p.hidden and p.name not in ("help",):
                assert p.help, f"{command.name} {p.opts}"
    assert "PYCASS_CTX_SIZE" in [p.envvar for p in cli.app.commands["run"].params]


def test_number_lists():
    assert cli.number_list("1,4-6", "x", 1, 16) == [1, 4, 5, 6]
    assert cli.number_list("0-512+128, 1-9*2", "x", 0, 512) == [0, 128, 256, 384, 512, 1, 2, 4, 8]
    wrong = ("", "a", "3-", "6-4", "1,6-4", "17", "-1", "1-" + "9" * 5000, "1+2", "1-4+0", "1-4*1", "0-4*2", "1-4+-1", "1-99*2")
    for text in wrong:
        with pytest.raises(click.BadParameter):
            cli.number_list(text, "x", 1, 16)


def test_seeds():
    assert options.seed_of({"seed": 5}) == 5
    assert options.seed_of({"seed": -1}) != options.seed_of({"seed": -1})


# ---- the proof ----


def test_lossless_and_not(pycass):
    code, out, err = pycass("run", "m", "-p", "x", "--verify-lossless")
    assert code == 0 and out == "Hi 👩‍💻.\n" and "the same with and without" in err
    code, out, err = pycass("run", "m", "-p", "x", "--verify-lossless", model=FakeModel("one", "other"))
    assert code == 1 and "NOT lossless" in err
    code, out, _ = pycass("run", "m", "-p", "x", "--verify-lossless", "--json", model=FakeModel("one", "other"))
    assert code == 1 and json.loads(out)["lossless"]["equal"] is False


def test_verify_spec(pycass):
    code, out, _ = pycass("verify-spec", "m", "-p", "x", "--lengths", "1-3")
    assert code == 0 and out.count("equal, logits") == 3 and "lossless: every run" in out
    code, out, _ = pycass("verify-spec", "m", "-p", "x", "--json", model=FakeModel("a", "b"))
    assert code == 1 and json.loads(out)["equal"] is False
    logits = FakeModel("same")
    logits.generate = _with_hashes(logits, iter("1213"))
    code, out, _ = pycass("verify-spec", "m", "-p", "x", model=logits)
    assert code == 1 and "logits differ" in out


def _with_hashes(model, hashes):
    generate = FakeModel.generate

    def changed(ids, **kw):
        c = generate(model, ids, **kw)
        c.logits_hash = next(hashes)
        return c

    return changed


# ---- pipes ----

SCRIPT = """
import sys; sys.path.insert(0, {here!r})
from fake_model import FakeModel
import pycass.cli as cli
cli.load_model = lambda name, o, console: FakeModel("a line\\n" * 20000)
sys.exit(cli.main(sys.argv[1:]))
"""


def child(*args, **kw):
    script = SCRIPT.format(here=os.path.dirname(__file__))
    return subprocess.Popen([sys.executable, "-c", script, *args], stderr=subprocess.PIPE, cwd=os.path.dirname(__file__), **kw)


def test_a_closed_pipe_is_quiet():
    p = child("run", "m", "-p", "x", stdout=subprocess.PIPE)
    assert p.stdout.readline() == b"a line\n"
    p.stdout.close()
    assert p.stderr.read() == b"" and p.wait(60) == 1
    p.stderr.close()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_an_error():
    with open("/dev/full", "wb") as full:
        p = child("run", "m", "-p", "x", stdout=full)
        err = p.communicate(timeout=60)[1]
    assert p.returncode == 1 and b"No space left" in err and b"Traceback" not in err


def test_chat_from_a_pipe(pycass):
    code, out, err = pycass("chat", "m", stdin="hello\n/regen\n", model=FakeModel("one", "two"))
    assert (code, out, err) == (0, "one\ntwo\n", "")
    code, out, err = pycass("chat", "m", stdin="x" * 900 + "\n", model=FakeModel("one", n_ctx=100))
    assert code == 1 and out == "" and "error: the prompt has" in err


# ---- rope ----


def test_rope_options(monkeypatch):
    from types import SimpleNamespace

    class File(SimpleNamespace):
        def __init__(self, path):
            super().__init__(config=SimpleNamespace(n_ctx_train=1000), json={"rope": {"rope_theta": 1e4}} if path else {})

        def __enter__(self):
            return self

        def __exit__(self, *exc):
            pass

    monkeypatch.setattr("pycass.file.CassFile", File)

    def scaling(kind, path="x", scale=None, ctx=None, base=None):
        o = {"rope_scaling": kind, "rope_scale": scale, "ctx_size": ctx, "rope_freq_base": base}
        return cli.rope_scaling(o, path)

    assert scaling(None) is None
    assert scaling("none") == {"rope_type": "default"}
    assert scaling("linear", scale=4.0)["factor"] == 4
    assert scaling("yarn", ctx=4000) == {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 1000}
    assert scaling("yarn", "", ctx=4000, base=5e5)["rope_theta"] == 5e5
    for kw in ({"kind": None, "scale": 2.0}, {"kind": "yarn"}, {"kind": "linear", "ctx": 500}, {"kind": "none", "path": ""}):
        with pytest.raises(click.UsageError):
            scaling(**kw)


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
def test_an_interrupt_is_130():
    import signal

    p = child("run", "m", "-p", "x", stdout=subprocess.PIPE)
    assert p.stdout.readline() == b"a line\n"  # it has started, and the pipe is too small for the rest
    p.send_signal(signal.SIGINT)
    err = p.communicate(timeout=60)[1]
    assert p.returncode == 130 and err.strip() == b""


# ---- the process ----

posix = pytest.mark.skipif(sys.platform == "win32", reason="POSIX")


def shell(command, script=SCRIPT, **env):
    """(exit code, stdout, stderr) of a shell command in which $PYCASS is the program with a fake model."""
    program = f'"{sys.executable}" -W error -c "$SCRIPT"'
    env = os.environ | {"SCRIPT": script.format(here=os.path.dirname(__file__)).replace(" * 20000", "")} | env
    done = subprocess.run(["sh", "-c", command.replace("$PYCASS", program)], env=env, capture_output=True, text=True,
                          cwd=os.path.dirname(__file__), timeout=60)  # fmt: skip
    return done.returncode, done.stdout, done.stderr


@posix
@pytest.mark.parametrize("command", ["run m -p x", "chat m -p x", "bench m", "info", "--help"])
def test_a_closed_stdout_is_an_error(command):
    code, _, err = shell(f"$PYCASS {command} >&-")
    assert code == 1 and err.startswith("pycass: error: stdout is closed") and err.count("\n") == 1
    assert shell(f"$PYCASS {command} <&- >&- 2>&-")[0] == 1


@posix
@pytest.mark.parametrize("where", ["2>&-", "<&- 2>&-", "2>/dev/full"])
def test_messages_that_cannot_be_written_are_dropped(where):
    if "/dev/full" in where and not os.path.exists("/dev/full"):
        pytest.skip("needs /dev/full")
    assert shell(f"$PYCASS run m -p x -v {where}") == (0, "a line\n", "")
    assert shell(f"$PYCASS run m -p x --bogus {where}") == (2, "", "")


@posix
def test_a_closed_stdin_is_empty():
    assert shell("$PYCASS chat m <&-") == (0, "", "")
    assert shell("$PYCASS run m <&-") == shell("$PYCASS run m </dev/null") == (0, "a line\n", "")


def test_the_log_file_is_closed(tmp_path):
    log = tmp_path / "log"
    for args in ("run m -p x", "run m -p \udcff --special"):
        _, _, err = shell(f"$PYCASS {args} --log-file '{log}'")
        assert "ResourceWarning" not in err
    assert "seed" in log.read_text()


def test_the_module_is_the_program():
    done = subprocess.run([sys.executable, "-m", "pycass", "--version"], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("pycass 0.")


INTERRUPTED = """
import builtins, sys
real = builtins.__import__
def later(name, *args, **kw):
    if {name!r} in (name, *(args[2] or () if len(args) > 2 else ())):
        raise KeyboardInterrupt
    return real(name, *args, **kw)
import pycass
builtins.__import__ = later
from pycass.cli import main
sys.exit(main(["run", "m", "-p", "x"]))
"""


@pytest.mark.parametrize("name", ["click", "oneshot"])
def test_an_interrupt_of_the_imports_is_quiet(name):
    done = subprocess.run([sys.executable, "-c", INTERRUPTED.format(name=name)], capture_output=True, text=True)
    assert done.returncode == 130 and done.stderr.strip() == ""


TERMINATED = """
import contextlib, sys, time
import pycass.cli as cli
@contextlib.contextmanager
def progress(self, what):
    def slow(*args):
        print("started", flush=True)
        time.sleep(0.2)
    yield slow
cli.Console.progress = progress
def fetch(name, folder, log):
    (folder / "part").write_bytes(b"x")
    while True:
        print("started", flush=True)
        time.sleep(0.2)
cli.pull.fetch = fetch
sys.exit(cli.main(sys.argv[1:]))
"""


@posix
@pytest.mark.parametrize("command", ["convert", "pull"])
def test_a_terminated_command_leaves_nothing(command, tmp_path, tiny_hf):
    import signal

    if command == "convert":
        args = ["convert", str(tiny_hf("llama_tied")), "-o", str(tmp_path / "m.cass")]
    else:
        args = ["pull", "smollm2-135m"]
    env = os.environ | {"PYCASS_CACHE": str(tmp_path)}
    p = subprocess.Popen([sys.executable, "-c", TERMINATED, *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env)
    assert p.stdout.readline() == b"started\n"
    assert list(tmp_path.iterdir())
    p.send_signal(signal.SIGTERM)
    p.send_signal(signal.SIGTERM)
    err = p.communicate(timeout=60)[1]
    assert p.returncode == 143 and b"Traceback" not in err
    assert [f.name for f in tmp_path.iterdir() if not f.name.endswith(".lock")] == []
