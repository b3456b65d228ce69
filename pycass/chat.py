"""The chat: a conversation at the terminal, or line by line from a pipe."""

import random
import sys
from dataclasses import dataclass, field

from .errors import ContextFull, InvalidArgument, PycassError

HELP = """\
/regen         answer the last message again, with another seed
/clear         forget the conversation (the system message stays)
/system TEXT   set the system message and start over; without TEXT: show it
/stats         the numbers of the last reply and of the session
/think         fold or unfold what the model thinks
/help          this list
/exit          leave (also Ctrl-D)
Enter sends. Alt-Enter, or a backslash at the end of a line, continues on the next line.
A line of three quotes begins a block, and another one ends it. Ctrl-C stops the reply."""

DIM, RESET = "\x1b[2m", "\x1b[0m"


# ---- thoughts ----


class ThinkSplitter:
    """Splits a streamed reply into ("think" | "text", piece), also when a tag comes in several pieces. Tags and
    the blank lines around them are left out. A reply thinks at its beginning or not at all: a later <think> is
    text about the tag."""

    OPEN, CLOSE = "<think>", "</think>"

    def __init__(self, inside=False):
        self._state = "think" if inside else "start"
        self._held = ""
        self._thought = False

    def push(self, text):
        """The pieces that are certain now."""
        self._held += text
        out = []
        while getattr(self, "_in_" + self._state)(out):
            pass
        return out

    def flush(self):
        """What was held back, at the end."""
        text, self._held = self._held, ""
        if self._state == "think":
            text = text.rstrip()
        if not text or self._state == "gap":
            return []
        return [("think" if self._state == "think" else "text", text)]

    def _in_start(self, out):
        text = self._held.lstrip()
        if text.startswith(self.OPEN):
            self._held, self._state = text[len(self.OPEN) :], "think"
            return True
        if self.OPEN.startswith(text):
            return False
        self._state = "text"
        return True

    def _in_think(self, out):
        if not self._thought:
            self._held = self._held.lstrip()
        at = self._held.find(self.CLOSE)
        thought = self._held[:at].rstrip() if at >= 0 else self._certain()
        if thought:
            self._thought = True
            out.append(("think", thought))
        if at < 0:
            self._held = self._held[len(thought) :]
            return False
        self._held, self._state = self._held[at + len(self.CLOSE) :], "gap"
        return True

    def _certain(self):
        """The held text without an end that may begin the closing tag, or be white space before it."""
        tail = next((k for k in range(len(self.CLOSE) - 1, 0, -1) if self._held.endswith(self.CLOSE[:k])), 0)
        return self._held[: len(self._held) - tail].rstrip()

    def _in_gap(self, out):
        self._held = self._held.lstrip("\n")
        if not self._held:
            return False
        self._state = "text"
        return True

    def _in_text(self, out):
        if self._held:
            out.append(("text", self._held))
        self._held = ""
        return False


def starts_inside(rendered):
    """Whether a rendered prompt leaves the model inside of a thought, as DeepSeek R1's template does."""
    return rendered.rstrip().endswith(ThinkSplitter.OPEN)


class ReplyPrinter:
    """Writes a streamed reply: text as it comes; thoughts dimmed on a terminal, or folded to one note."""

    def __init__(self, out, color, split=True, inside=False, folded=False, think_out=None):
        self._out, self._color, self._folded = out, color, folded
        self._think_out = think_out or out
        self._split = ThinkSplitter(inside) if split else None
        self._kind = None
        self.text, self.thought = "", ""

    def push(self, text):
        """Shows the next piece of the reply."""
        for kind, piece in self._split.push(text) if self._split else [("text", text)]:
            self._show(kind, piece)

    def close(self, complete=True):
        """Ends the reply: what was held back, plain colours, a line end (if anything was shown, when it failed)."""
        for kind, piece in self._split.flush() if self._split else []:
            self._show(kind, piece)
        if self._kind == "think" and self._color:
            self._write(RESET, self._think_out)
        line_open = self._kind != "text" or not self.text.endswith("\n")
        if line_open and (complete or self._kind):
            self._write("\n", self._out)

    def _show(self, kind, piece):
        if not piece:
            return
        if kind != self._kind:
            self._turn(kind)
        if kind == "think":
            self.thought += piece
            if not self._folded:
                self._write(piece, self._think_out)
        else:
            self.text += piece
            self._write(piece, self._out)

    def _turn(self, kind):
        if kind == "think":
            self._write((DIM if self._color else "") + ("(thinks) " if self._folded else ""), self._think_out)
        elif self._kind == "think":
            self._write((RESET if self._color else "") + "\n\n", self._think_out)
        self._kind = kind

    def _write(self, text, stream):
        stream.write(text)
        stream.flush()


# ---- numbers ----


def summary(c, stats=None):
    """One line on a Completion: speeds, and what speculation did."""
    t, u, s = c.timings, c.usage, c.spec
    reused = f" ({u.reused_tokens} reused)" if u.reused_tokens else ""
    parts = [f"prompt {u.prompt_tokens} tokens{reused}, {t.prompt_tps:.1f} t/s"]
    parts.append(f"generated {u.completion_tokens}, {t.decode_tps:.1f} t/s")
    if s.drafted:
        looked_up = f" (looked up {s.ngram_drafted}, accepted {s.ngram_accepted})" if s.ngram_drafted else ""
        parts.append(f"drafted {s.drafted}, accepted {s.accepted}{looked_up}, {s.mean_len:.2f} tokens per step")
    if ratio := _speed_up(stats):
        parts.append(f"{ratio:.2f}x the speed without speculation")
    if s.disabled:
        parts.append("speculation turned itself off: it did not pay here")
    return "; ".join(parts)


def _speed_up(stats):
    plain, spec = (stats or {}).get("plain_ms_per_token"), (stats or {}).get("spec_ms_per_token")
    return plain / spec if plain and spec else None


# ---- the conversation ----


@dataclass
class Conversation:
    """Messages and totals; no input or output."""

    model: object
    generation: dict
    system: str | None = None
    variables: dict = field(default_factory=dict)
    messages: list = field(default_factory=list)
    last: object = None
    replies: int = 0
    tokens: int = 0
    decode_ms: float = 0.0

    def prompt(self, messages):
        """All of a conversation's messages, the system message first."""
        return ([{"role": "system", "content": self.system}] if self.system else []) + messages

    def begin(self, messages):
        """Starts a reply: (whether it begins inside of a thought, the stream)."""
        tok = self.model.tokenizer
        full = self.prompt(messages)
        inside = starts_inside(tok.render_chat(full, **self.variables))
        ids = tok.encode_chat(full, **self.variables)
        return inside, self.model.stream(ids, **self.generation)

    def finish(self, messages, text, completion):
        """Keeps the exchange; a reply that was stopped has no completion."""
        self.messages = messages + [{"role": "assistant", "content": text}]
        if completion is not None:
            self.last = completion
            self.replies += 1
            self.tokens += completion.usage.completion_tokens
            self.decode_ms += completion.timings.decode_ms

    def clear(self):
        """Forgets the messages."""
        self.messages = []

    def regenerate(self):
        """The messages that led to the last reply, or None; the seed becomes another one."""
        if not self.messages:
            return None
        self.generation["seed"] = random.getrandbits(32)
        return self.messages[:-1]


class Chat:
    """The loop: reads messages, shows replies, obeys commands. An error ends a reply, not the session."""

    def __init__(self, conversation, read_line, out, notes, color=False, closing=False, reasoning="auto"):
        self.c, self._read_line, self._out, self._notes = conversation, read_line, out, notes
        self._color, self._closing = color, closing
        self._reasoning, self._folded = reasoning, False
        self.failed = False

    def run(self, first=None, single_turn=False):
        """Runs until the input ends or /exit. With single_turn: one message only."""
        pending = first
        while True:
            text = pending if pending is not None else self._read()
            pending = None
            if text is None:
                return
            if text.startswith("/") and self._command(text):
                if text.split()[0] in ("/exit", "/quit", "/bye"):
                    return
                continue
            if text.strip():
                self.reply(self.c.messages + [{"role": "user", "content": text}])
                if single_turn:
                    return

    def _read(self):
        try:
            return read_message(self._read_line)
        except EOFError:
            return None
        except Abandoned:
            return ""

    def reply(self, messages):
        """Streams one reply. Ctrl-C keeps what there is of it."""
        self.failed = False
        try:
            inside, stream = self.c.begin(messages)
        except PycassError as e:
            return self._fail(e)
        printer = self._printer(inside)
        completion, error = None, None
        try:
            for delta in stream:
                printer.push(delta.text)
            completion = stream.completion
        except KeyboardInterrupt:
            error = "stopped"
        except PycassError as e:
            error = e
        finally:
            if hasattr(stream, "close"):
                stream.close()
        printer.close(complete=not isinstance(error, PycassError))
        if isinstance(error, PycassError):
            return self._fail(error)
        if printer.text or completion is not None:
            self.c.finish(messages, printer.text, completion)
        self._close(completion, error)

    def _printer(self, inside):
        split = self._reasoning != "none" and (self._reasoning == "deepseek" or self._color or inside)
        return ReplyPrinter(self._out, self._color, split, inside, self._folded)

    def _fail(self, error):
        self.failed = True
        self._notes(f"error: {error}")
        if isinstance(error, ContextFull):
            self._notes("/clear starts over; --ctx-size makes the context longer")

    def _close(self, completion, error):
        if error:
            return self._notes(f"[{error}]")
        if completion.finish_reason == "length":
            u = completion.usage
            full = u.prompt_tokens + u.completion_tokens >= self.c.model.n_ctx
            self._notes(f"[the context of {self.c.model.n_ctx} tokens is full]" if full else "[--predict reached]")
        if self._closing:
            self._notes(f"[{summary(completion, _stats(self.c.model))}]")

    # ---- commands ----

    def _command(self, text):
        """Obeys a command; False when the text is not one (a path, say)."""
        name, _, rest = text.partition(" ")
        method = getattr(self, "_do_" + name[1:], None) if name[1:].isalpha() else None
        if method is None:
            if "\n" in text or "/" in name[1:] or not name[1:].isalpha():
                return False
            self._notes(f"no command {name}; /help lists them")
            return True
        method(rest.strip())
        return True

    def _do_exit(self, rest):
        pass

    _do_quit = _do_bye = _do_exit

    def _do_help(self, rest):
        self._notes(HELP)

    def _do_clear(self, rest):
        self.c.clear()
        self._notes("the conversation is forgotten")

    def _do_regen(self, rest):
        messages = self.c.regenerate()
        if messages is None:
            return self._notes("there is no reply to make again")
        self.reply(messages)

    def _do_system(self, rest):
        if not rest:
            return self._notes(f"system: {self.c.system}" if self.c.system else "there is no system message")
        self.c.system = rest
        self.c.clear()
        self._notes("system message set; the conversation starts over")

    def _do_think(self, rest):
        self._folded = not self._folded
        self._notes("thoughts are folded" if self._folded else "thoughts are shown")

    def _do_stats(self, rest):
        if self.c.last is None:
            return self._notes("no complete reply yet")
        c, u = self.c, self.c.last.usage
        rate = 1000 * c.tokens / c.decode_ms if c.decode_ms else 0
        self._notes(f"last reply: {summary(c.last, _stats(c.model))}")
        self._notes(f"session: {c.replies} complete replies, {c.tokens} tokens, {rate:.1f} t/s")
        used = min(u.prompt_tokens + u.completion_tokens, c.model.n_ctx)
        self._notes(f"context: {used} of {c.model.n_ctx} tokens, "
                    f"KV cache {u.kv_bytes / 2**20:.1f} MiB")  # fmt: skip


def _stats(model):
    return model.stats() if hasattr(model, "stats") else None


# ---- input ----


def read_message(read_line):
    """One message from read_line(continuing) -> str: a line, lines joined by backslashes, or a block of three
    quotes. Raises EOFError at the end of the input."""
    line = read_line(False)
    if line.strip().startswith('"""'):
        return _block(line.strip()[3:], read_line)
    lines = [line]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        try:
            lines.append(read_line(True))
        except EOFError:
            break
    return "\n".join(lines)


def _block(line, read_line):
    lines = []
    while not line.rstrip().endswith('"""'):
        lines.append(line)
        try:
            line = read_line(True)
        except EOFError:
            line = '"""'
    lines.append(line.rstrip()[:-3])
    return "\n".join(lines).strip("\n")


class Abandoned(Exception):
    """Ctrl-C in the middle of a message of several lines."""


def plain_reader(stream):
    """read_line for a pipe or a file."""

    def read_line(continuing):
        try:
            line = stream.readline()
        except UnicodeDecodeError as e:
            raise InvalidArgument(f"stdin: not UTF-8 text ({e.reason})") from None
        if not line:
            raise EOFError
        return line.rstrip("\r\n")

    return read_line


def terminal_reader():
    """read_line with editing and history. Ctrl-C empties the line; on an empty line, twice, it ends the input."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()
    keys.add("escape", "enter")(lambda event: event.current_buffer.insert_text("\n"))
    session = PromptSession(key_bindings=keys, prompt_continuation="... ")

    def read_line(continuing):
        armed = False
        while True:
            try:
                return session.prompt("... " if continuing else "> ")
            except KeyboardInterrupt:
                if continuing:
                    raise Abandoned from None
                empty = not session.default_buffer.text
                if armed and empty:
                    raise EOFError from None
                armed = empty
                if empty:
                    print("(Ctrl-C again, Ctrl-D or /exit to leave)", file=sys.stderr)

    return read_line
