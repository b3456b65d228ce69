"""Text <-> token ids, chat templates, streaming decoding and stop strings.

The ids are those of the `tokenizers` library; decoding is done here, byte by byte, so that a stream of tokens
gives the same text as decoding them at once.
"""

import codecs
import json
import numbers
import operator
import re
import secrets
import threading
from collections import Counter
from functools import lru_cache

import tokenizers

from . import template as _template
from .errors import FormatError, InvalidArgument, TemplateError

_NO_TEMPLATE = (
    "this model has no chat template; name one with --chat-template (built in: {}; or a file), "
    "or use plain completion (`pycass run --raw`, `Model.generate`)"
)


class Tokenizer:
    """The tokenizer in a .cass file's JSON object (docs/format.md, "JSON"). Safe to share between threads."""

    def __init__(self, json_blob):
        try:
            self._read(json_blob)
        except FormatError:
            raise
        except BaseException as e:  # the tokenizers library takes some contradictions for its own bugs
            if isinstance(e, Exception) or type(e).__name__ == "PanicException":
                raise FormatError(f"the file's tokenizer cannot be used: {type(e).__name__}: {e}") from None
            raise

    def _read(self, json_blob):
        if not isinstance(json_blob, dict):
            raise FormatError("the file's JSON is not an object")
        self._text = _tokenizer_text(json_blob)
        self._plain = None  # the same tokenizer, blind to control tokens; made when first needed
        self._lock = threading.Lock()
        self._anchor = f"\ufdd0{secrets.token_hex(8)}\ufdd0"  # no text can know it
        self._tok = _parse(self._text)
        self._config = json_blob.get("tokenizer_config")
        self._config = {} if self._config is None else self._config
        if not isinstance(self._config, dict):
            raise FormatError("tokenizer_config in the file's JSON is not an object")
        self._read_added_tokens()
        self._read_ids(json_blob)
        self._model_template = _default_template(json_blob.get("chat_template"))
        self._override = None
        self._bytes_of = _token_bytes(self._tok, self._added)
        self._prefix, self._suffix = self._affixes()

    def _read_added_tokens(self):
        self._added = {i: t for i, t in self._tok.get_added_tokens_decoder().items() if t.content}
        self._special = {i: t for i, t in self._added.items() if t.special}
        self._special_ids = frozenset(self._special)
        names = sorted((t.content for t in self._special.values()), key=len, reverse=True)
        self._special_re = re.compile("|".join(map(re.escape, names))) if names else None
        self._special_names = names
        model = json.loads(self._text)["model"]
        unknown = model.get("unk_token")
        unknown = self._tok.token_to_id(unknown) if isinstance(unknown, str) else model.get("unk_id")
        self._control_ids = self._special_ids - {unknown}  # the model itself gives an unknown word that id

    def _read_ids(self, blob):
        bos, eos = blob.get("bos_token_id"), blob.get("eos_token_ids")
        eos = eos if isinstance(eos, list) else [] if eos is None else [eos]
        ids = [*eos, *([] if bos is None else [bos])]
        if not all(type(i) is int for i in ids):
            raise FormatError("bos_token_id and eos_token_ids in the file's JSON are not integers")
        size = max(self._tok.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        for i in ids:
            if not 0 <= i < size:
                raise FormatError(
                    f"bos_token_id or eos_token_ids in the file's JSON: the tokenizer's ids are below {size}, "
                    + (f"not {i}" if i.bit_length() < 64 else "not a number of so many digits")
                )
        self.bos_token_id = bos
        self.eos_token_ids = set(eos)
        self.bos_token = self._token_text("bos_token", bos)
        self.eos_token = self._token_text("eos_token", eos[0] if eos else None)

    def _token_text(self, key, token_id):
        text = self._config.get(key)
        if isinstance(text, dict):
            text = text.get("content")
        if isinstance(text, str):
            return text
        return (self._tok.id_to_token(token_id) or "") if token_id is not None else ""

    def _affixes(self):
        """The ids that add_special puts before and after a text."""
        plain = self._tok.encode("a", add_special_tokens=False).ids
        full = self._tok.encode("a", add_special_tokens=True).ids
        at = next((i for i in range(len(full)) if full[i : i + len(plain)] == plain), 0)
        prefix, suffix = full[:at], full[at + len(plain) :]
        if isinstance(self._config.get("add_bos_token"), bool):
            wanted = self._config["add_bos_token"] and self.bos_token_id is not None
            prefix = [self.bos_token_id] if wanted else []
        if self._config.get("add_eos_token") is False:
            suffix = []
        return prefix, suffix

    @property
    def vocab_size(self):
        """Token ids are below this number."""
        return self._tok.get_vocab_size(with_added_tokens=True)

    def token_to_id(self, token):
        """The id of a token's own spelling, or None."""
        return self._tok.token_to_id(token)

    def id_to_token(self, token_id):
        """The token's own spelling, or None."""
        return self._tok.id_to_token(token_id)

    # ---- text -> ids ----

    def encode(self, text, add_special=True, parse_special=False):
        """The ids of a text. Control tokens spelled in it stay text unless parse_special; add_special adds what
        the tokenizer adds to every text, a BOS say, but not a second time."""
        if not isinstance(text, str):
            raise InvalidArgument(f"text is a {type(text).__name__}, not a string")
        text = _valid_unicode(text)
        ids = self._tok.encode(text, add_special_tokens=False).ids
        if not parse_special and not self._special_ids.isdisjoint(ids):
            ids = self._blind_ids(text)
        if not add_special:
            return ids
        doubled = parse_special and self._prefix and ids[: len(self._prefix)] == self._prefix
        return ([] if doubled else self._prefix) + ids + self._suffix

    def _blind(self):
        with self._lock:
            if self._plain is None:
                plain = _parse(self._text)
                plain.encode_special_tokens = True
                plain.add_tokens([tokenizers.AddedToken(self._anchor, normalized=False, special=False)])
                self._plain = plain
            return self._plain

    def _blind_ids(self, text, anchor=""):
        """The ids of a text in which nothing is a control token; anchor: what the text is encoded behind."""
        found = self._blind().encode(anchor + text, add_special_tokens=False)
        bad = [o for i, o in zip(found.ids, found.offsets) if i in self._control_ids]
        if not bad:
            return found.ids[1 if anchor else 0 :]
        # a vocabulary can hold a control token as a word (Unigram's often do): cut the text inside of it
        cuts = [begin - len(anchor) + 1 for begin, end in bad if end - begin > 1 and begin >= len(anchor)]
        if len(cuts) < len(bad):
            raise InvalidArgument(f"this tokenizer has no ids for the text {text[:40]!r} but control tokens")
        pieces = [text[x:y] for x, y in zip([0, *cuts], [*cuts, len(text)])]
        return sum((self._blind_ids(p, self._anchor if n else anchor) for n, p in enumerate(pieces)), [])

    # ---- ids -> text ----

    def decode(self, ids, skip_special=True):
        """The text of ids; control tokens are left out unless skip_special is False."""
        decoder = StreamDecoder(self, skip_special)
        return decoder.push(ids) + decoder.flush()

    def stream_decoder(self, skip_special=True):
        """A new StreamDecoder of this tokenizer."""
        return StreamDecoder(self, skip_special)

    # ---- chat ----

    @property
    def chat_template(self):
        """The Jinja source in use: the override if there is one, else the model's, else None."""
        return self._override or self._model_template

    def set_chat_template(self, name_or_text):
        """Replaces the model's template by a built-in one (by name), a file's, or Jinja text. None: the model's."""
        self._override = None if name_or_text is None else _template.template_source(name_or_text)

    def render_chat(self, messages, /, add_generation_prompt=True, **variables):
        """The conversation as one text, control tokens included. Raises TemplateError in words."""
        messages, variables = _checked(messages, variables)
        return self._render(messages, add_generation_prompt, variables)

    def _render(self, messages, add_generation_prompt, variables):
        if not self.chat_template:
            raise TemplateError(_NO_TEMPLATE.format(", ".join(_template.BUILTIN)))
        given = {"bos_token": self.bos_token, "eos_token": self.eos_token, "tools": None, "documents": None}
        given |= variables | {"messages": messages, "add_generation_prompt": add_generation_prompt}
        return _valid_unicode(_template.render(self.chat_template, given))

    def encode_chat(self, messages, /, add_generation_prompt=True, **variables):
        """The conversation's ids. Only the template makes control tokens: spelled in a message they stay text.
        Raises TemplateError when the template turns a message into one that cannot be told from its own."""
        messages, variables = _checked(messages, variables)
        ids = self._chat_ids(messages, add_generation_prompt, variables)
        # transformers adds nothing to a template's output; a foreign template may not know this model's BOS
        if self._override and self._prefix and ids[: len(self._prefix)] != self._prefix:
            ids = self._prefix + ids
        return ids

    def _chat_ids(self, messages, add_generation_prompt, variables):
        """Compares what the template makes of the messages with what it makes of the same ones veiled: in those
        nothing can be, or become, a part of a control token, so that all control tokens are the template's."""

        def rendered(copy):
            given = {k: v if k in _TRUSTED else copy.value(v) for k, v in variables.items()}
            return self._render([copy.message(m) for m in messages], add_generation_prompt, given)

        shield = _Shield([messages, variables], self._special_names, self.chat_template or "")
        text = rendered(shield)
        if self._special_re is None:
            return self._tok.encode(text, add_special_tokens=False).ids
        own, veils = self._controls(text), []
        for thorough in (True, False):
            veil = _Veil([messages, variables], self._special_names, self.chat_template, thorough)
            try:
                veils.append((veil, rendered(veil)))
            except TemplateError:  # a template may insist on what a message says
                continue
            if own == self._controls(veils[-1][1]) and not shield.used:
                return self._ids_of(text, "", own)
        real = self._render(messages, add_generation_prompt, variables)
        for veil, hidden in veils:
            if _valid_unicode(veil.lift(hidden)) == real:  # every control token's place is known
                return self._counted(self._encode_parts(hidden, veil.lift), self._controls(hidden))
        if shield.used and any(own == self._controls(hidden) for _, hidden in veils):
            return self._ids_of(text, shield.mark, own)
        raise TemplateError(
            "the chat template would turn text of a message into control tokens "
            f"({', '.join(self._surplus(own, veils))}), so it is not used on this conversation"
        )

    def _controls(self, text):
        """The control tokens in a template's output."""
        return [m.group() for m in self._special_re.finditer(text)]

    def _surplus(self, own, veils):
        """The control tokens that are there too often, for a message."""
        expected = Counter(self._controls(veils[0][1])) if veils else Counter()
        return sorted((Counter(own) - expected) or set(own)) or ["some are missing"]

    def _ids_of(self, text, mark, controls):
        """Ids of template output that has no control tokens but the template's own, `controls`."""
        if not mark:
            ids = self._tok.encode(text, add_special_tokens=False).ids
            if not self._too_many(ids, controls):
                return ids  # else the tokenizer's normaliser made more of them
        return self._counted(self._encode_shielded(text, mark), controls)

    def _too_many(self, ids, controls):
        allowed = Counter(map(self._tok.token_to_id, controls))
        return Counter(i for i in ids if i in self._control_ids) - allowed

    def _counted(self, ids, controls):
        for i in self._too_many(ids, controls):
            raise TemplateError(f"text of a message would become the control token {self.id_to_token(i)}")
        return ids

    def _encode_shielded(self, text, mark):
        """Encodes template output in which `mark` breaks every control token that a message spelled."""
        return self._encode_parts(text, lambda t: t.replace(mark, "") if mark else t)

    def _encode_parts(self, text, restore):
        """Encodes template output whose control tokens are all the template's; restore undoes what was done to
        messages. Segments between the control tokens are encoded blind, behind an anchor that stands for the token
        in front, since some pre-tokenizers treat the start of a text differently."""
        ids, at, left = [], 0, None
        for match in self._special_re.finditer(text):
            token = self._added[self._tok.token_to_id(match.group())]
            ids += self._segment(restore(text[at : match.start()]), left, token)
            ids.append(self._tok.token_to_id(token.content))
            at, left = match.end(), token
        return ids + self._segment(restore(text[at:]), left, None)

    def _segment(self, text, left, right):
        if left is not None and left.rstrip:
            text = text.lstrip()
        if right is not None and right.lstrip:
            text = text.rstrip()
        if not text:
            return []
        return self._blind_ids(text, "" if left is None else self._anchor)


class _Copy:
    """Copies of messages and variables with their texts changed by `_string`. Names stay as they are: roles, types
    and the keys that a template asks for."""

    def message(self, message):
        """The message's copy."""
        return {k: v if k == "role" else self.value(v) for k, v in message.items()}

    def value(self, v):
        """A value's copy."""
        if isinstance(v, str):
            return self._string(v)
        if isinstance(v, dict):
            return {
                self._key(k): x
                if k == "type" and isinstance(x, str) and _NAME.fullmatch(x)
                else self.value(x)
                for k, x in v.items()
            }
        if isinstance(v, list):
            return [self.value(x) for x in v]
        return v

    def _key(self, k):
        simple = _NAME.fullmatch(k) and not any(n.lower() in k.lower() for n in self._names)
        return k if simple else self._string(k)

    def _string(self, s):
        raise NotImplementedError


class _Veil(_Copy):
    """Copies in which each character that could be in a control token is replaced by a private one, the same for
    the same character, so that lift can undo it. White space stays, since templates trim and split at it. Without
    `thorough` only characters and words out of the control tokens are replaced, so that templates that look for
    other words find them."""

    def __init__(self, given, names, template, thorough):
        self._names = names
        used = _characters(given)
        free = _private(used | set(template))
        marks = {c for n in names for c in n if not c.isalnum() and not c.isspace()} | set("&\\%")
        wanted = {c for c in used if not c.isspace()} if thorough else marks
        self._words = None
        if not thorough:
            words = {w for n in names for w in re.findall(r"\w{2,}", n)}
            self._words = re.compile("|".join(map(re.escape, sorted(words, key=len, reverse=True))) or "(?!)", re.I)
            wanted |= {c for w in self._words.findall("\n".join(_strings(given))) for c in w}
        self._to = {ord(c): next(free) for c in sorted(wanted)}
        self._marks = {ord(c): self._to[ord(c)] for c in marks if ord(c) in self._to}
        self._back = {ord(p): chr(c) for c, p in self._to.items()}

    def _string(self, s):
        if self._words is None:
            return s.translate(self._to)
        return self._words.sub(lambda m: m.group().translate(self._to), s).translate(self._marks)

    def lift(self, text):
        """The text with the characters that messages have."""
        return text.translate(self._back)


class _Shield(_Copy):
    """Copies of messages in which a mark breaks every control token that they spell, so that what a template
    makes of them has none but its own. The mark is a character that neither a message nor the template contains.
    Roles are the template's business and stay as they are."""

    def __init__(self, messages, names, template):
        self.used = False
        self._names = [n for n in names if len(n) > 1]
        self._re = re.compile("|".join(map(re.escape, self._names)))
        free = _private(_characters(messages) | set(template))
        self.mark = next(c for c in free if ascii(c)[1:-1] not in template)

    def _string(self, s):
        if not s or not self._names:
            return s
        out = s
        while self._re.search(out):  # again, since one token may overlap another's spelling
            out = self._re.sub(lambda m: m.group()[0] + self.mark + m.group()[1:], out)
        core = out.strip()  # templates like to trim
        if core:
            at = out.index(core)
            out = out[:at] + self._edges(core) + out[at + len(core) :]
        out = self._edges(out)
        self.used |= out != s
        return out

    def _edges(self, s):
        """A half-spelled token at an end of the text could be completed by the template."""
        for n in self._names:
            for k in range(len(n) - 1, 0, -1):
                if s.endswith(n[:k]):
                    s = s[: len(s) - k + 1] + self.mark + s[len(s) - k + 1 :]
                if s.startswith(n[-k:]):
                    s = s[: k - 1] + self.mark + s[k - 1 :]
        return s


class StreamDecoder:
    """Turns a stream of ids into text. Joined, what push and flush return is the decoding of all ids; nothing is
    returned that a later token could still change, such as the first half of an emoji."""

    def __init__(self, tokenizer, skip_special=True):
        self._tokenizer = tokenizer
        self._skip = tokenizer._special_ids if skip_special else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip = tokenizer._bytes_of.strip_left if tokenizer._bytes_of else 0
        self._window, self._shown = [], 0  # for tokenizers without a table of bytes

    def push(self, ids):
        """The text that is certain after these ids: one id or several."""
        if isinstance(ids, (str, bytes, bytearray)):
            raise InvalidArgument(f"token ids are integers, not a {type(ids).__name__}")
        try:
            ids = list(map(operator.index, ids if hasattr(ids, "__iter__") else [ids]))
        except (TypeError, ValueError):
            raise InvalidArgument("token ids are integers, or a list of them") from None
        ids = [i for i in ids if i not in self._skip]
        if self._tokenizer._bytes_of is None:
            return "".join(self._push_window(i) for i in ids if 0 <= i < 2**31)
        bytes_of = self._tokenizer._bytes_of
        return self._stripped(self._utf8.decode(b"".join([bytes_of(i) for i in ids])))

    def flush(self):
        """What was held back, at the end of the stream."""
        if self._tokenizer._bytes_of is None:
            text = self._tokenizer._tok.decode(self._window, skip_special_tokens=False)[self._shown :]
            self._window, self._shown = [], 0
            return text
        return self._stripped(self._utf8.decode(b"", final=True))

    def _stripped(self, text):
        """Some decoders drop the space that encoding put in front of the whole text."""
        while self._strip and text:
            if not text.startswith(" "):
                self._strip = 0
                break
            text, self._strip = text[1:], self._strip - 1
        return text

    def _push_window(self, token_id):
        """Decodes only the last tokens, from the last point at which the text was complete."""
        decode = self._tokenizer._tok.decode
        self._window.append(token_id)
        text = decode(self._window, skip_special_tokens=False)
        if text.endswith("\ufffd") and len(self._window) < 16:
            return ""
        delta = text[self._shown :]
        last = decode(self._window[-1:], skip_special_tokens=False)
        self._window, self._shown = self._window[-1:], len(last)
        return delta


class StopMatcher:
    """Looks for stop strings in a stream of text. push returns (text to show, whether a stop was hit); text that
    may be the beginning of a stop is held back. The result does not depend on how the text is cut into pieces:
    the stop that is complete first wins."""

    def __init__(self, stops):
        stops = [stops] if isinstance(stops, str) else stops or []
        if not isinstance(stops, (list, tuple, set)) or not all(isinstance(s, str) and s for s in stops):
            raise InvalidArgument("a stop string must be a non-empty string")
        self._stops = list(stops)
        self._held = ""
        self.hit = None  # the stop string that was found

    def push(self, text):
        """(text to show, hit). After a hit the rest of the stream is dropped."""
        if self.hit is not None:
            return "", True
        text = self._held + text
        found = [(at + len(s), at, s) for s in self._stops if (at := text.find(s)) >= 0]
        if found:
            _, at, self.hit = min(found)
            self._held = ""
            return text[:at], True
        keep = self._possible(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def _possible(self, text):
        """The length of the longest end of the text that begins a stop."""
        longest = max((len(s) for s in self._stops), default=1) - 1
        for k in range(min(longest, len(text)), 0, -1):
            if any(s.startswith(text[-k:]) for s in self._stops):
                return k
        return 0

    def flush(self):
        """What was held back, at the end of the stream."""
        text, self._held = self._held, ""
        return "" if self.hit is not None else text


# ---- reading the file's JSON ----


def _tokenizer_text(blob):
    text = blob.get("tokenizer")
    if not text:
        raise FormatError("the file has no tokenizer")
    if not isinstance(text, str):
        raise FormatError("the tokenizer in the file's JSON is not a text")
    return text


def _parse(text):
    try:
        tok = tokenizers.Tokenizer.from_str(text)
    except BaseException as e:  # the library raises plain Exception, and panics
        if isinstance(e, Exception) or type(e).__name__ == "PanicException":
            raise FormatError(f"the file's tokenizer cannot be read: {e}") from None
        raise
    tok.no_padding()
    tok.no_truncation()
    return tok


def _default_template(value):
    """Checkpoints may list several named templates; the one for chat is called default."""
    if isinstance(value, list):
        named = [(t.get("name"), t.get("template")) for t in value if isinstance(t, dict)]
        value = next((t for n, t in named if n == "default" and t), named[0][1] if named else None)
    if value is not None and not isinstance(value, str):
        raise FormatError("chat_template in the file's JSON is not a text")
    return value or None


def _valid_unicode(text):
    """Lone surrogates, from undecodable bytes on a command line, have no UTF-8."""
    try:
        text.encode("utf-8")
        return text
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


_TRUSTED = ("bos_token", "eos_token", "unk_token", "pad_token")  # variables that are control tokens
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_MOST_VALUES, _MOST_LEVELS = 1_000_000, 64


def _checked(messages, variables):
    """Plain copies of messages and template variables: what JSON can say, and nothing without end."""
    for name in ("messages", "add_generation_prompt"):
        if name in variables:
            raise InvalidArgument(f"{name!r} cannot be a template variable: the conversation has it already")
    count = [0]
    messages = [_plain(m, "a message", count) for m in _flat(messages)]
    return messages, {k: _plain(v, f"the template variable {k!r}", count) for k, v in variables.items()}


def _plain(v, what, count, level=0):
    count[0] += 1
    if level > _MOST_LEVELS or count[0] > _MOST_VALUES:
        raise InvalidArgument(f"{what} is nested too deeply, contains itself or is too large")
    if isinstance(v, str):
        return str.__str__(v)
    if v is None or isinstance(v, (bool, numbers.Number)):
        return v
    if isinstance(v, dict):
        if not all(isinstance(k, str) for k in v):
            raise InvalidArgument(f"{what} has a key that is not a string")
        return {str.__str__(k): _plain(x, what, count, level + 1) for k, x in v.items()}
    if isinstance(v, (list, tuple)):
        return [_plain(x, what, count, level + 1) for x in v]
    raise InvalidArgument(f"{what} has a value of type {type(v).__name__}, which is not one of JSON's")


def _strings(v):
    """All strings in a plain value, keys included."""
    if isinstance(v, str):
        yield v
    elif isinstance(v, dict):
        for k, x in v.items():
            yield k
            yield from _strings(x)
    elif isinstance(v, list):
        for x in v:
            yield from _strings(x)


def _characters(v):
    return set().union(*_strings(v))


def _private(used):
    """Private-use characters that are not in `used`."""
    for block in (range(0xE000, 0xF900), range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE)):
        yield from (c for c in map(chr, block) if c not in used)
    raise InvalidArgument("the conversation has too many different characters, private ones included")


def _flat(messages):
    """Checks OpenAI-shaped messages and turns lists of text parts into strings."""
    if isinstance(messages, (str, bytes, dict)) or not hasattr(messages, "__iter__"):
        raise InvalidArgument('messages is a list of {"role": ..., "content": ...}')
    out = []
    for m in messages:
        if not isinstance(m, dict) or not isinstance(m.get("role"), str):
            keys = ", ".join(map(repr, list(m)[:5])) if isinstance(m, dict) else type(m).__name__
            raise InvalidArgument(f'a message needs a "role" and a "content"; this one is: {keys:.80}')
        if not _NAME.fullmatch(m["role"]):
            raise InvalidArgument(f"a role is a simple name of letters, digits, _ and -, not {m['role']!r:.80}")
        content = m.get("content")
        if isinstance(content, list):
            m = {**m, "content": "".join(map(_part_text, content))}
        elif content is not None and not isinstance(content, str):
            raise InvalidArgument(f"a message's content is a {type(content).__name__}, not a string")
        elif content is None and "tool_calls" not in m:
            raise InvalidArgument(f'the message of role {m["role"]!r} has no "content"')
        out.append(m)
    if not out:
        raise InvalidArgument("the conversation has no messages")
    return out


def _part_text(part):
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return part["text"]
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    raise InvalidArgument(f"a message's content has a part of type {kind!r}; only text is supported")


# ---- bytes of tokens ----


def _byte_level_alphabet():
    """GPT-2's spelling of bytes as printable characters: character -> byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {chr(b): b for b in plain}
    rest = (b for b in range(256) if b not in set(plain))
    table.update({chr(256 + n): b for n, b in enumerate(rest)})
    return table


class _TokenBytes:
    """id -> the bytes that it adds to the text."""

    def __init__(self, tok, added, spell, strip_left=0):
        self._tok, self._added, self._spell = tok, added, spell
        self.strip_left = strip_left  # leading spaces that decoding drops from the whole text
        self._lookup = lru_cache(maxsize=None)(self._make)

    def __call__(self, token_id):
        return self._lookup(token_id)

    def _make(self, token_id):
        if token_id in self._added:
            return self._added[token_id].content.encode()
        token = self._tok.id_to_token(token_id) if 0 <= token_id < 2**31 else None
        return b"" if token is None else self._spell(token)


def _token_bytes(tok, added):
    """A _TokenBytes for the decoders of byte-level and of SentencePiece-like tokenizers; None for others."""
    steps = _decoder_steps(tok)
    kinds = [s.get("type") for s in steps]
    if kinds == ["ByteLevel"]:
        alphabet = _byte_level_alphabet()
        return _TokenBytes(tok, added, lambda t: _byte_level(t, alphabet))
    if kinds and set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
        return _sentencepiece(tok, added, steps)
    return None


def _decoder_steps(tok):
    if tok.decoder is None:
        return []
    decoder = json.loads(tok.decoder.__getstate__())
    return decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]


def _byte_level(token, alphabet):
    if all(c in alphabet for c in token):
        return bytes(alphabet[c] for c in token)
    return token.encode()


def _sentencepiece(tok, added, steps):
    replace, strip = [], 0
    fallback = any(s["type"] == "ByteFallback" for s in steps)
    for s in steps:
        if s["type"] == "Replace" and isinstance(s["pattern"].get("String"), str):
            replace.append((s["pattern"]["String"], s["content"]))
        elif s["type"] == "Metaspace":
            replace.append((s["replacement"], " "))
            strip = 0 if s.get("prepend_scheme") == "never" else 1
        elif s["type"] == "Strip" and s["content"] == " " and not s["stop"]:
            strip = s["start"]
        elif s["type"] in ("Replace", "Strip"):
            return None

    def spell(token):
        if fallback and len(token) == 6 and re.fullmatch("<0x[0-9A-Fa-f]{2}>", token):
            return bytes([int(token[3:5], 16)])
        for old, new in replace:
            token = token.replace(old, new)
        return token.encode()

    return _TokenBytes(tok, added, spell, strip)
