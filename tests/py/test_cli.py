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
    assert {"steps", "drafted", "accepted", "acceptance", "mean_len"} <= set(found["spec"])


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
    assert got["draft_max"] == 4 and got["ignore_eos"] and got["spec"] == "auto"
    assert (got["top_k"], got["top_p"], got["min_p"], got["repeat_last_n"]) == (40, 0.95, 0.05, 64)


def test_the_environment_presets_options(pycass, monkeypatch):
    model = FakeModel("x")
    monkeypatch.setenv("PYCASS_TEMP", "0.25")
    pycass("run", "m", "-p", "a", model=model)
    pycass("run", "m", "-p", "a", "--temp", "0.5", model=model)
    assert [o["temperature"] for o in model.options] == [0.25, 0.5]


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
        (["run", "m", "-p", "x", "-ngl", "99"], "CPU only"),
        (["run", "m", "-p", "x", "-ctk", "q8_0"], "bf16"),
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
        (["verify-spec", "m", "--lengths", "0"], "1 to 16"),
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
    for text in ("", "a", "3-", "6-4", "17"):
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
