"""The chat loop: commands, thoughts, input of several lines, errors and interrupts."""

import io
import os
import re
import select
import sys
import time

import pytest
from fake_model import FakeModel, byte_level
from hypothesis import given, settings
from hypothesis import strategies as st

from pycass import chat as c
from pycass.errors import ContextFull, InvalidArgument


def play(model, lines, **kw):
    """(stdout, notes, the chat) after the lines were typed."""
    out, notes = io.StringIO(), []
    system = kw.pop("system", None)
    talk = c.Conversation(model, {"seed": 1}, system)
    chat = c.Chat(talk, c.plain_reader(io.StringIO(lines)), out, notes.append, **kw)
    chat.run()
    return out.getvalue(), notes, chat


# ---- the loop ----


def test_a_conversation_keeps_its_history():
    model = FakeModel("one", "two")
    out, notes, _ = play(model, "a\nb\n", system="be brief")
    assert out == "one\ntwo\n" and not notes
    assert "system\nbe brief" in model.prompts[0] and "user\na" in model.prompts[0]
    assert "assistant\none<|im_end|>\n<|im_start|>user\nb<|im_end|>" in model.prompts[1]


def test_empty_lines_and_the_end_of_input():
    model = FakeModel("x")
    assert play(model, "\n  \n")[0] == "" and not model.prompts


def test_commands():
    model = FakeModel("one", "two", "three")
    out, notes, _ = play(model, "/stats\na\n/stats\n/help\n/system\n/system hi\n/system\n/nonsense\nb\n/exit\nnever\n")
    assert out == "one\ntwo\n"
    text = "\n".join(notes)
    assert "no complete reply yet" in text and "4 drafted" not in text and "accepted 3" in text
    assert "/regen" in text and "system: hi" in text and "no command /nonsense" in text
    assert "2.00x" in text
    assert len(model.prompts) == 2 and "one" not in model.prompts[1]


def test_clear_forgets():
    model = FakeModel("one", "two")
    play(model, "a\n/clear\nb\n", system="s")
    assert "one" not in model.prompts[1] and "system\ns" in model.prompts[1]


def test_regen_answers_again_with_another_seed():
    model = FakeModel("one", "two", "three")
    out, notes, chat = play(model, "/regen\na\n/regen\n")
    assert out == "one\ntwo\n" and "no reply" in notes[0]
    assert model.prompts[0] == model.prompts[1]
    assert model.options[0]["seed"] != model.options[1]["seed"]
    assert [m["content"] for m in chat.c.messages] == ["a", "two"]


def test_a_path_is_a_message():
    model = FakeModel("x")
    play(model, "/etc/passwd is a file\n/usr\\\n/lib\n")
    assert len(model.prompts) == 2


def test_single_turn():
    model = FakeModel("one", "two")
    out = io.StringIO()
    talk = c.Conversation(model, {"seed": 1})
    c.Chat(talk, c.plain_reader(io.StringIO("b\n")), out, print).run("a", single_turn=True)
    assert out.getvalue() == "one\n"


def test_the_context_overflows_and_the_session_goes_on():
    model = FakeModel("one", "two", n_ctx=60)
    out, notes, chat = play(model, "a" * 200 + "\nhi\n")
    assert out == "one\n"
    assert re.search(r"the prompt has \d+ tokens, the context 60", notes[0]) and "/clear" in notes[1]
    assert len(chat.c.messages) == 2


def test_an_error_in_the_stream_is_not_the_end():
    model = FakeModel(ContextFull("full"), "two")
    out, notes, _ = play(model, "a\nb\n")
    assert out.endswith("two\n") and "full" in notes[0]


def test_a_strict_template_and_the_session_goes_on():
    strict = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}{{ messages[-1]['content'] }}"
    out, notes, _ = play(FakeModel("one", blob=byte_level(chat_template=strict)), "a\n/system x\nb\n")
    assert out == "one\n" and "no system role" in notes[-1]


def test_an_interrupt_keeps_what_there_is():
    model = FakeModel("half a reply^C", "two")
    out, notes, chat = play(model, "a\nb\n")
    assert out == "half a reply\ntwo\n" and notes == ["[stopped]"]
    assert chat.c.messages[1]["content"] == "half a reply"


def test_an_interrupt_before_the_first_token_forgets_the_message():
    _, notes, chat = play(FakeModel("^C"), "a\n")
    assert notes == ["[stopped]"] and chat.c.messages == []


# ---- thoughts ----


def split(pieces, inside=False):
    s = c.ThinkSplitter(inside)
    out = []
    for p in pieces:
        out += s.push(p)
    out += s.flush()
    return ["".join(t for k, t in out if k == kind) for kind in ("think", "text")]


@pytest.mark.parametrize(
    "text, think, rest",
    [
        ("<think>\nhm\n\nhm\n</think>\n\nYes.", "hm\n\nhm", "Yes."),
        ("\n<think></think>Yes.\n", "", "Yes.\n"),
        ("No <think> here", "", "No <think> here"),
        ("  <thin ice", "", "  <thin ice"),
        ("<think>never ends </thi", "never ends </thi", ""),
        ("<think>a</think>b<think>c</think>", "a", "b<think>c</think>"),
        ("", "", ""),
    ],
)
def test_thoughts_are_split_off_however_the_text_is_cut(text, think, rest):
    assert split([text]) == [think, rest] == split(list(text))
    for i in range(len(text)):
        assert split([text[:i], text[i:]]) == [think, rest]


def test_a_reply_may_begin_inside_of_a_thought():
    assert split(["hm</th", "ink>\n\nYes."], inside=True) == ["hm", "Yes."]
    assert c.starts_inside("<|Assistant|><think>\n") and not c.starts_inside("<think></think>\n\n")


@settings(max_examples=300, deadline=None)
@given(st.text("<>/think \na", max_size=40), st.booleans(), st.integers(0, 40))
def test_cuts_do_not_matter(text, inside, at):
    assert split([text], inside) == split(list(text), inside) == split([text[:at], text[at:]], inside)


THOUGHT = "<think>\nhm\n</think>\n\nYes."


def test_thoughts_on_a_terminal_are_dim_and_not_kept():
    out, _, chat = play(FakeModel(THOUGHT), "a\n", color=True)
    assert out == c.DIM + "hm" + c.RESET + "\n\nYes.\n"
    assert chat.c.messages[1]["content"] == "Yes."


def test_thoughts_fold():
    out, notes, _ = play(FakeModel(THOUGHT), "/think\na\n", color=True)
    assert "hm" not in out and "Yes." in out and "folded" in notes[0]


def test_reasoning_format_none_leaves_the_text_alone():
    out, _, chat = play(FakeModel(THOUGHT), "a\n", color=True, reasoning="none")
    assert out == THOUGHT + "\n" and chat.c.messages[1]["content"] == THOUGHT


# ---- input ----


@pytest.mark.parametrize(
    "typed, messages",
    [
        ("a\nb\n", ["a", "b"]),
        ("a\\\nb\\\n\\\nc\nd\n", ["a\nb\n\nc", "d"]),
        ('"""\na\n\n b\n"""\nc', ["a\n\n b", "c"]),
        ('"""a b"""\n', ["a b"]),
        ('"""a\nb"""\n', ["a\nb"]),
        ('"""\nno end', ["no end"]),
        ("ends\\", ["ends"]),
        ("crlf\r\n", ["crlf"]),
    ],
)
def test_messages_of_several_lines(typed, messages):
    read, got = c.plain_reader(io.StringIO(typed)), []
    with pytest.raises(EOFError):
        while True:
            got.append(c.read_message(read))
    assert got == messages


def test_input_that_is_no_text():
    read = c.plain_reader(io.TextIOWrapper(io.BytesIO(b"a\xff\n"), encoding="utf-8"))
    with pytest.raises(InvalidArgument, match="UTF-8"):
        read(False)


# ---- a real terminal ----

SCRIPT = """
import sys; sys.path.insert(0, {here!r})
from fake_model import FakeModel
import pycass.cli as cli
cli.load_model = lambda name, o, console: FakeModel("one 👩‍💻", "two^C", "three")
sys.exit(cli.main(["chat"]))
"""


PROMPT = "\x1b[?2004h"  # the line editor turns bracketed paste on when it begins to read


class Terminal:
    """A child process on a pseudo-terminal."""

    def __init__(self, script):
        import fcntl
        import pty
        import struct
        import termios

        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.environ["TERM"] = "xterm"
            os.chdir(os.path.dirname(__file__))
            os.execv(sys.executable, [sys.executable, "-c", script])
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.seen = ""

    def wait_for(self, text, seconds=30):
        end = time.monotonic() + seconds
        while text not in self.seen:
            assert time.monotonic() < end, f"{text!r} did not appear in {self.seen!r}"
            if select.select([self.fd], [], [], 0.2)[0]:
                data = os.read(self.fd, 65536)
                if b"\x1b[6n" in data:  # the line editor asks where the cursor is
                    os.write(self.fd, b"\x1b[1;1R")
                self.seen += data.decode(errors="replace")
        self.seen = self.seen.split(text, 1)[1]

    def type(self, text):
        os.write(self.fd, text.encode())
        time.sleep(0.2)

    def exit_code(self):
        for _ in range(150):
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            if select.select([self.fd], [], [], 0.1)[0]:
                try:
                    os.read(self.fd, 65536)
                except OSError:
                    pass
        os.kill(self.pid, 9)
        os.waitpid(self.pid, 0)
        raise AssertionError("the chat did not end")


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
@pytest.mark.parametrize("leave", ["/exit\r", "\x04", "\x03"])
def test_the_chat_at_a_terminal(leave):
    t = Terminal(SCRIPT.format(here=os.path.dirname(__file__)))
    t.wait_for(PROMPT)
    t.type("hello\r")
    t.wait_for("one 👩‍💻")
    t.wait_for("t/s")
    t.wait_for(PROMPT)
    t.type("a\x1b\rb\r")  # Alt-Enter
    t.wait_for("[stopped]")
    t.wait_for(PROMPT)
    t.type("half\x03")  # Ctrl-C empties the line
    t.wait_for(PROMPT)
    t.type(leave)
    if leave == "\x03":
        t.wait_for("Ctrl-C again")
        t.wait_for(PROMPT)
        t.type(leave)
    assert t.exit_code() == 0
