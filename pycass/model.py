"""Loading and running models: `Model`, and what its calls return."""

import math
import operator
import os
import random
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from fnmatch import fnmatchcase
from dataclasses import dataclass, field

import numpy as np

from pycass._pycass import ffi, lib
from pycass.errors import ContextFull, InvalidArgument, IOFailure, KernelUnavailable, PycassError, check
from pycass.file import CassFile, config_of
from pycass.settings import Settings, of
from pycass.tokenizer import StopMatcher, Tokenizer

_SPEC_MODES = {"off": lib.PYCASS_SPEC_OFF, "on": lib.PYCASS_SPEC_ON, "auto": lib.PYCASS_SPEC_AUTO}
KV_CODECS = {n: getattr(lib, f"PYCASS_KV_{n.upper()}") for n in ("auto", "raw", "nest", "cass1", "cass2")}
DRAFT_MAX = 8  # tokens of a draft unless something else is said
_MAX_STEP = 32  # tokens of one step: 31 guessed and one more
_PROMPT_PIECE = 512  # tokens of a prompt between two looks for an interrupt


@dataclass(frozen=True)
class Usage:
    """Token counts; `reused_tokens` of the prompt were in the cache, which has `kv_bytes` bytes."""

    prompt_tokens: int
    completion_tokens: int
    reused_tokens: int
    kv_bytes: int


@dataclass(frozen=True)
class Timings:
    """Milliseconds, and tokens per second (of the prompt: those that were evaluated)."""

    prompt_ms: float
    prompt_tps: float
    decode_ms: float
    decode_tps: float


@dataclass(frozen=True)
class Spec:
    """Speculation of a completion: `steps` target passes; `mean_len` tokens per step; `disabled`: auto turned drafting
    off. `ngram_drafted` and `ngram_accepted` of the tokens were looked up in the text, not made by the draft."""

    steps: int
    drafted: int
    accepted: int
    acceptance: float
    mean_len: float
    disabled: bool
    ngram_drafted: int
    ngram_accepted: int


@dataclass(frozen=True)
class Completion:
    """The result of a generation. `token_ids` ends with the end token or the tokens of a stop string if one ended it.

    `logprobs` (of each token, log softmax of the target's logits) and `logits_hash` (a checksum over the logits
    behind all tokens) are None unless asked for with logprobs=True.
    """

    text: str
    token_ids: list[int]
    finish_reason: str  # "stop": an end token or stop string; "length": max_tokens or the context
    usage: Usage
    timings: Timings
    spec: Spec
    logprobs: list[float] | None = None
    logits_hash: str | None = None


@dataclass(frozen=True)
class Delta:
    """A piece of a streamed completion: text that is certain now, and the tokens of this step."""

    text: str
    token_ids: list[int] = field(default_factory=list)


def kernels() -> list[tuple[str, bool]]:
    """(name, whether this machine can run it) of the kernel sets built in, best first."""
    found, runs = [], ffi.new("int *")
    while (name := lib.pycass_kernel_name(len(found), runs)) != ffi.NULL:
        found.append((ffi.string(name).decode(), bool(runs[0])))
    return found


@dataclass(frozen=True)
class Device:
    """A GPU: its name, compute capability (8, 9), and bytes of memory."""

    name: str
    capability: tuple[int, int]
    free_bytes: int
    total_bytes: int


def devices() -> list[Device]:
    """The GPUs; device="cuda" takes the first. `DeviceUnavailable` says why there is none."""
    found, out = [], ffi.new("pycass_device *")
    while (status := lib.pycass_device_info(len(found), out)) == lib.PYCASS_OK:
        name = ffi.string(out.name).decode("utf-8", "replace")
        found.append(Device(name, (out.major, out.minor), out.free_bytes, out.total_bytes))
    if not found:
        check(status)
    return found


def _read_text(path):
    """The tokenizer of a file, and its JSON section."""
    with CassFile(path) as file:
        return Tokenizer(file.json), file.json


class Model:
    """A loaded model with one KV cache. Made by `Model.load`; a context manager.

    One generation at a time: calls from several threads wait for each other. A stream ends when another call begins:
    going on with it afterwards is an error.
    """

    def __init__(self, model, session, path: str, tokenizer: Tokenizer, json: dict):
        self._model, self._session, self.path = model, session, path
        self.config = config_of(lib.pycass_model_file(model))
        self.json, self.tokenizer = json, tokenizer
        self.n_ctx: int = lib.pycass_session_n_ctx(session)
        self.threads: int = lib.pycass_session_n_threads(session)
        self.kernel: str = ffi.string(lib.pycass_model_kernel(model)).decode()
        note = ffi.new("char const **")
        self.device: str = ffi.string(lib.pycass_model_device(model, note)).decode()
        self.device_note: str = ffi.string(note[0]).decode("utf-8", "replace")
        self.draft_max: int = DRAFT_MAX  # what generate() takes if it is not told
        self._lock = threading.RLock()
        self._generation = 0  # number of the latest call that uses the session

    @classmethod
    def load(
        cls,
        path,
        n_ctx: int = 0,
        threads: int = 0,
        threads_batch: int = 0,
        batch_size: int = 0,
        kernel: str | None = None,
        mmap: bool | None = None,
        mlock: bool = False,
        rope_scaling: dict | None = None,
        draft_full: Sequence[str] = (),
        kv: str = "auto",
        device: str = "cpu",
        settings: "Settings | dict | str | os.PathLike | None" = None,
    ) -> "Model":
        """Loads a `.cass` file; `pycass.pull.resolve` gives one for a name, a GGUF file or a Hugging Face folder.

        n_ctx: tokens of context; 0: the model's, at most 4096. threads: 0: physical cores; threads_batch: for
        prompts. kernel: "scalar", "avx2", "avx512", "avx512bf16" or "amx"; None: $PYCASS_KERNEL, else the best.
        mmap: map the file, which shares its memory with other processes, or read it into huge pages, which are
        faster; None: map it and, if there is room, move it to huge pages in the background.
        rope_scaling: replaces the file's, in transformers' terms: {"rope_type": "yarn", "factor": 4.0, ...}.
        kv: how older keys and values are kept: "raw" (BF16), "nest" (lossless), "cass1" (lossless, slow), "cass2"
        (near-lossless, slow); "auto": raw, or nest if n_ctx tokens would take more than half of the memory available.
        device: "cpu"; "cuda": the first GPU; "auto": that, if it can run the model, else the CPU, and `device_note` says why.
        On a GPU keys and values are raw.
        draft_full: names of tensors that the draft reads as the target does, * and ? standing for others (fnmatch).
        settings: what `pycass tune` chose (a file, or pycass.settings.Settings): its draft_full is added, and its draft_max
        is what generate() takes if it is not told. The file must be of its codec.
        """
        path, keep = _path(path), []
        settings = of(settings)
        if settings:
            _require_codec(path, settings.codec)
            draft_full = [*draft_full, *settings.draft_full]
        options = ffi.new("pycass_model_options *")
        if kernel is not None:
            names = [name for name, _ in kernels()]
            if kernel not in names:
                raise KernelUnavailable(f"no kernel set {kernel!r}; there are: {', '.join(names)}")
            keep.append(ffi.new("char[]", kernel.encode()))
            options.kernel = keep[-1]
        options.loading = lib.PYCASS_LOAD_AUTO if mmap is None else lib.PYCASS_LOAD_MAP if mmap else lib.PYCASS_LOAD_READ
        options.mlock = mlock
        keep.append(ffi.new("char[]", device.encode()))
        options.device = keep[-1]
        if rope_scaling:
            keep.append(_set_rope(options, path, rope_scaling))
        if draft_full:
            keep.append(_set_draft_full(options, path, draft_full))
        out = ffi.new("pycass_model **")
        with ThreadPoolExecutor(1) as pool:  # a tokenizer takes as long to build as the weights to read
            text = pool.submit(_read_text, path)
            check(lib.pycass_model_load(os.fsencode(path), options, out), path)
            model = ffi.gc(out[0], lib.pycass_model_free)
            session = _new_session(model, n_ctx, threads, threads_batch, batch_size, kv)
            loaded = cls(model, session, path, *text.result())
            loaded.draft_max = settings and settings.draft_max or DRAFT_MAX
            return loaded

    # ---- text and tokens ----

    def tokenize(self, text: str, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Token ids. parse_special: control tokens written in the text become control tokens."""
        return self.tokenizer.encode(text, add_special=add_special, parse_special=parse_special)

    def detokenize(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of token ids."""
        return self.tokenizer.decode(ids, skip_special=skip_special)

    # ---- generation ----

    def generate(self, prompt, max_tokens: int | None = 256, **options) -> Completion:
        """Continues a prompt: text, or a list of token ids.

        max_tokens: None or -1: until the end token or the end of the context. Options, all with defaults:
        temperature=0.0 (the most likely token), top_k=0, top_p=1.0, min_p=0.0, repeat_penalty=1.0,
        repeat_last_n=64, presence_penalty=0.0, frequency_penalty=0.0, logit_bias={id: bias}, seed=None (random),
        stop=None (a string or several), ignore_eos=False, spec="auto" ("on", "off"), draft_max=8 (or the settings'),
        draft_fixed=False (always draft_max tokens), spec_ngram=None (whether what followed the last tokens where they
        stood before is guessed too, beyond draft_max; None: unless draft_fixed), logprobs=False.
        """
        with self._lock:  # other threads wait until it is done
            stream = self.stream(prompt, max_tokens, **options)
            for _ in stream:
                pass
            return stream.completion

    def stream(self, prompt, max_tokens: int | None = 256, **options) -> "Stream":
        """As generate, but an iterator of `Delta`s; after the last one its `.completion` is the Completion."""
        ids = self.tokenize(prompt) if isinstance(prompt, str) else _ids(prompt)
        return Stream(self, ids, max_tokens, **options)

    def chat(self, messages: Sequence[dict], max_tokens: int | None = 1024, **options) -> Completion:
        """Answers a conversation: [{"role": "user", "content": "..."}, ...], through the model's chat template."""
        return self.generate(self.tokenizer.encode_chat(list(messages)), max_tokens, **options)

    def stream_chat(self, messages: Sequence[dict], max_tokens: int | None = 1024, **options) -> "Stream":
        """As chat, streamed."""
        return self.stream(self.tokenizer.encode_chat(list(messages)), max_tokens, **options)

    # ---- logits ----

    def logits(self, ids: Sequence[int], start: int = 0) -> np.ndarray:
        """The target's logits after each of ids[start:], from an empty context: float32 [n - start, n_vocab]."""
        return self._eval(lib.pycass_session_eval, ids, start)

    def draft_logits(self, ids: Sequence[int], start: int = 0) -> np.ndarray:
        """The draft's: what it computes for ids[i] on the target's cache of ids[:i], for i from start on. float32
        [n - start, n_vocab]."""
        return self._eval(lib.pycass_session_eval_draft, ids, start)

    def _eval(self, function, ids, start) -> np.ndarray:
        ids = _ids(ids)
        if len(ids) > self.n_ctx:
            raise ContextFull(f"{len(ids)} tokens do not fit: the context holds {self.n_ctx}")
        if not 0 <= _index(start) <= len(ids):
            raise InvalidArgument(f"start = {start}; there are {len(ids)} tokens")
        before, ids = ids[:start], ids[start:]
        out = np.empty((len(ids), self.config.n_vocab), dtype=np.float32)
        with self._use() as session:
            check(lib.pycass_session_trim(session, 0))
            if before:
                check(lib.pycass_session_eval(session, _int32s(before), len(before), ffi.NULL))
            check(function(session, _int32s(ids), len(ids), ffi.cast("float *", ffi.from_buffer(out))))
        return out

    def observe(self, texts: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray, int]:
        """Sums of the activations that go into the model's products, and of their squares, over the tokens of some texts:
        (float64 [n_channel], float64 [n_channel], number of tokens). Channels are those of pycass_model_n_channel. The first
        token of a text is left out: models park large numbers there."""
        with self._use() as session:
            n, count = lib.pycass_model_n_channel(self._model), 0
            sums = np.zeros((2, n))
            pointers = [ffi.cast("double *", ffi.from_buffer(row)) for row in sums]
            for text in map(_ids, texts):
                if len(text) > self.n_ctx:
                    raise ContextFull(f"{len(text)} tokens do not fit: the context holds {self.n_ctx}")
                if len(text) < 2:
                    continue
                check(lib.pycass_session_trim(session, 0))
                check(lib.pycass_session_eval(session, _int32s(text[:1]), 1, ffi.NULL))
                check(lib.pycass_session_observe(session, _int32s(text[1:]), len(text) - 1, *pointers))
                count += len(text) - 1
        return sums[0], sums[1], count

    # ---- state ----

    def save_state(self, path) -> None:
        """Saves the evaluated tokens and their cache; the file appears whole or not at all."""
        path = _path(path)
        with self._use() as session:
            size = lib.pycass_session_state_size(session)
            data = np.empty(size, dtype=np.uint8)
            check(lib.pycass_session_save_state(session, ffi.cast("uint8_t *", ffi.from_buffer(data)), size))
        write_whole(path, data)

    def load_state(self, path) -> None:
        """Restores what save_state wrote; a prompt that begins with its tokens then reuses them."""
        path = _path(path)
        try:
            with open(path, "rb") as f:
                data = np.frombuffer(f.read(), dtype=np.uint8)
        except OSError as error:
            raise IOFailure(f"cannot read {path}: {error.strerror or error}") from error
        with self._use() as session:
            pointer = ffi.cast("uint8_t *", ffi.from_buffer(data))
            check(lib.pycass_session_load_state(session, pointer, data.size), path)

    def reset(self) -> None:
        """Forgets the cache."""
        with self._use() as session:
            check(lib.pycass_session_trim(session, 0))

    @property
    def tokens(self) -> list[int]:
        """The tokens that the session knows."""
        with self._lock:
            session = self._handle()
            n = lib.pycass_session_tokens(session, ffi.NULL, 0)
            out = ffi.new("int32_t[]", n + 1)
            lib.pycass_session_tokens(session, out, n)
            return ffi.unpack(out, n)

    def stats(self) -> dict:
        """The counters of the latest generation (pycass_stats)."""
        with self._lock:
            s = ffi.new("pycass_stats *")
            lib.pycass_session_stats(self._handle(), s)
            return {name: getattr(s, name) for name, _ in ffi.typeof("pycass_stats").fields}

    @property
    def kv_bytes(self) -> int:
        """Bytes that hold the KV cache of the session's tokens."""
        with self._lock:
            return lib.pycass_session_kv_bytes(self._handle())

    def kv_stats(self) -> dict:
        """The KV cache: `plain` positions in BF16, `encoded` ones, the latter's `encoded_bytes` and `draft_bytes`, which the
        draft reads of them, and all `bytes`."""
        with self._lock:
            session, s = self._handle(), ffi.new("pycass_kv_stats *")
            lib.pycass_session_kv_stats(session, s)
            found = {name: getattr(s, name) for name, _ in ffi.typeof("pycass_kv_stats").fields}
            return {**found, "bytes": lib.pycass_session_kv_bytes(session)}

    def close(self) -> None:
        """Frees the session and the map; further use is an error."""
        with self._lock:
            if self._session is not None:
                self._generation += 1
                ffi.release(self._session)
                ffi.release(self._model)
                self._session = self._model = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def _handle(self):
        if self._session is None:
            raise InvalidArgument("the model is closed")
        return self._session

    @contextmanager
    def _use(self):
        """The session, for a call that changes it: an unfinished stream ends here."""
        with self._lock:
            self._generation += 1
            yield self._handle()


class Stream:
    """Iterator of `Delta`s of one generation. `completion` is None until it is exhausted."""

    def __init__(
        self, model: Model, ids: list[int], max_tokens, *, stop=None, ignore_eos=False, logprobs=False, **options
    ):
        self._model, self._ids = model, ids
        self._limit = math.inf if max_tokens is None or max_tokens == -1 else _index(max_tokens)
        if self._limit < 0:
            raise InvalidArgument(f"max_tokens = {max_tokens}; it must be 0 or more, or -1 (no limit)")
        if not ids:
            raise InvalidArgument("the prompt is empty: it has no tokens")
        self._reply = _Reply(model.tokenizer, stop, ignore_eos)
        self._record = bool(logprobs)
        self._sampling, self._speculation, self._keep = _options(**{"draft_max": model.draft_max} | options)
        self.completion: Completion | None = None
        self._steps = self._run()

    def __iter__(self) -> Iterator[Delta]:
        return self

    def __next__(self) -> Delta:
        return next(self._steps)

    def close(self) -> None:
        """Ends the generation; the model is free for the next one anyway."""
        self._steps.close()

    def _run(self) -> Iterator[Delta]:
        reply = self._reply
        number, reused = self._begin()
        while len(reply.tokens) < self._limit and not reply.ended:
            step = self._next(number)
            if step is None:  # the context is full
                break
            seen = len(reply.tokens)
            text = "".join(reply.add(token) for token in step)
            yield Delta(text, [t.id for t in reply.tokens[seen:]])
        with self._turn(number) as session:
            check(lib.pycass_session_trim(session, len(self._ids) + len(reply.tokens)))
            tail = reply.finish()
            self.completion = self._complete(reused)
        if tail:
            yield Delta(tail)

    @contextmanager
    def _turn(self, number: int):
        """The session, if no other call has used it since this stream began."""
        with self._model._lock:
            if self._model._generation != number:
                raise PycassError("another call has used the model since: this stream has ended")
            yield self._model._handle()

    def _begin(self) -> tuple[int, int]:
        """Evaluates the prompt: (number of this use of the session, tokens that were in the cache)."""
        with self._model._use() as session:
            check(lib.pycass_session_configure(session, self._sampling, self._speculation))
            lib.pycass_session_record(session, self._record)
            ids, reused, done = _int32s(self._ids), ffi.new("size_t *"), ffi.new("int *")
            first = None
            while not done[0]:  # in pieces, so that Ctrl-C is heard
                check(lib.pycass_session_prompt(session, ids, len(self._ids), _PROMPT_PIECE, reused, done))
                first = reused[0] if first is None else first
            return self._model._generation, first

    def _next(self, number: int):
        with self._turn(number) as session:
            room = int(min(_MAX_STEP, self._limit - len(self._reply.tokens)))
            out, n_out = ffi.new("pycass_token[]", room), ffi.new("size_t *")
            status = lib.pycass_session_next(session, out, room, n_out)
            if status == lib.PYCASS_ERR_CONTEXT_FULL:
                return None
            check(status)
            return [_Token(t.id, t.logprob, t.logits_crc32c) for t in out[0 : n_out[0]]]

    def _complete(self, reused: int) -> Completion:
        r, s, tokens = self._reply, self._model.stats(), self._reply.tokens
        steps = s["steps"]
        return Completion(
            text="".join(r.text),
            token_ids=[t.id for t in tokens],
            finish_reason="stop" if r.ended else "length",
            usage=Usage(len(self._ids), len(tokens), reused, self._model.kv_bytes),
            timings=Timings(
                s["prompt_ms"],
                _per_second(s["prompt_tokens"], s["prompt_ms"]),
                s["decode_ms"],
                _per_second(s["tokens"], s["decode_ms"]),
            ),
            spec=Spec(
                steps=steps,
                drafted=s["drafted"],
                accepted=s["accepted"],
                acceptance=s["accepted"] / s["drafted"] if s["drafted"] else 0.0,
                mean_len=(steps + s["accepted"]) / steps if steps else 0.0,
                disabled=bool(s["spec_disabled"]),
                ngram_drafted=s["ngram_drafted"],
                ngram_accepted=s["ngram_accepted"],
            ),
            logprobs=[t.logprob for t in tokens] if self._record else None,
            logits_hash=f"{r.logits_crc():08x}" if self._record else None,
        )


@dataclass(frozen=True)
class _Token:
    id: int
    logprob: float
    logits_crc: int


class _Reply:
    """Tokens on their way to text: decoding, end tokens and stop strings."""

    def __init__(self, tokenizer: Tokenizer, stop, ignore_eos: bool):
        self._decoder, self._stops = tokenizer.stream_decoder(), StopMatcher(stop)
        self._eos = set() if ignore_eos else tokenizer.eos_token_ids
        self.tokens: list[_Token] = []
        self.text: list[str] = []
        self.ended = False

    def add(self, token: _Token) -> str:
        """The text that is certain after this token; none, and no effect, after the end."""
        if self.ended:
            return ""
        self.tokens.append(token)
        text, hit = self._stops.push(self._decoder.push(token.id))
        self.ended = hit or token.id in self._eos
        self.text.append(text)
        return text

    def finish(self) -> str:
        """The text that was held back."""
        text, hit = self._stops.push(self._decoder.flush())
        self.ended = self.ended or hit
        text += self._stops.flush()
        self.text.append(text)
        return text

    def logits_crc(self) -> int:
        crc = 0
        for token in self.tokens:
            crc = lib.pycass_crc32c(crc, token.logits_crc.to_bytes(4, "little"), 4)
        return crc


def _options(
    temperature=0.0,
    top_k=0,
    top_p=1.0,
    min_p=0.0,
    repeat_penalty=1.0,
    repeat_last_n=64,
    presence_penalty=0.0,
    frequency_penalty=0.0,
    logit_bias=None,
    seed=None,
    spec="auto",
    draft_max=DRAFT_MAX,
    draft_fixed=False,
    spec_ngram=None,
):
    """The C structures of a generation's options, and what must live as long as they do."""
    if not isinstance(spec, str) or spec not in _SPEC_MODES:
        raise InvalidArgument(f"spec = {spec!r}; it must be one of {', '.join(_SPEC_MODES)}")
    seed = random.getrandbits(64) if seed is None else _index(seed)
    if not 0 <= seed < 2**64:
        raise InvalidArgument(f"seed = {seed}; it must be in 0..2^64 - 1")
    if not isinstance(logit_bias or {}, dict):
        raise InvalidArgument("logit_bias must be a dictionary: {token id: bias}")
    bias = {_index(i): _float(b, "a logit bias") for i, b in (logit_bias or {}).items()}
    ids, values = _int32s(bias), ffi.new("float[]", list(bias.values()))
    sampling = ffi.new(
        "pycass_sampling *",
        {
            "temperature": _float(temperature, "temperature"),
            "top_k": _int32(top_k, "top_k"),
            "top_p": _float(top_p, "top_p"),
            "min_p": _float(min_p, "min_p"),
            "repeat_penalty": _float(repeat_penalty, "repeat_penalty"),
            "repeat_last_n": _int32(repeat_last_n, "repeat_last_n"),
            "presence_penalty": _float(presence_penalty, "presence_penalty"),
            "frequency_penalty": _float(frequency_penalty, "frequency_penalty"),
            "seed": seed,
            "bias_ids": ids,
            "bias": values,
            "n_bias": len(bias),
        },
    )
    speculation = ffi.new(
        "pycass_speculation *", {"mode": _SPEC_MODES[spec], "draft_max": _int32(draft_max, "draft_max"),
                                 "draft_fixed": bool(draft_fixed),
                                 "ngram": not draft_fixed if spec_ngram is None else bool(spec_ngram)}
    )  # fmt: skip
    return sampling, speculation, (ids, values)


def _index(value) -> int:
    """An integer, also numpy's; anything else is an error in words."""
    try:
        return operator.index(value)
    except TypeError:
        raise InvalidArgument(f"{value!r} is not an integer") from None


def _ids(values) -> list[int]:
    """Token ids: any sequence of integers."""
    if isinstance(values, (bytes, bytearray, str)) or not hasattr(values, "__iter__"):
        raise InvalidArgument(f"a text or a list of token ids is needed, not {type(values).__name__}")
    return [_index(i) for i in values]


def _path(path) -> str:
    """A path as text; the C library would cut it at a NUL."""
    path = os.fsdecode(path)
    if "\0" in path:
        raise InvalidArgument(f"{path!r} is not a path")
    return path


def _float(value, name: str) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise InvalidArgument(f"{name} = {value!r} is not a number") from None


def _int32(value, name: str) -> int:
    value = _index(value)
    if not -(2**31) <= value < 2**31:
        raise InvalidArgument(f"{name} = {value} is out of range")
    return value


def _int32s(values):
    return ffi.new("int32_t[]", [_int32(v, "token id") for v in values])


def _per_second(n: int, ms: float) -> float:
    return 1000.0 * n / ms if ms > 0 else 0.0


def _uint32(value, name: str) -> int:
    value = _index(value)
    if not 0 <= value < 2**32:
        raise InvalidArgument(f"{name} = {value} is out of range")
    return value


def _new_session(model, n_ctx, threads, threads_batch, batch_size, kv):
    if kv not in KV_CODECS:
        raise InvalidArgument(f"kv = {kv!r} is not one of {', '.join(KV_CODECS)}")
    options = ffi.new(
        "pycass_session_options *",
        {
            "n_ctx": _uint32(n_ctx, "n_ctx"),
            "n_threads": _uint32(threads, "threads"),
            "n_threads_batch": _uint32(threads_batch, "threads_batch"),
            "n_batch": _uint32(batch_size, "batch_size"),
            "kv": KV_CODECS[kv],
        },
    )
    out = ffi.new("pycass_session **")
    check(lib.pycass_session_new(model, options, out))
    return ffi.gc(out[0], lib.pycass_session_free)


def _require_codec(path: str, codec: str):
    """Settings for another codec than a file's would promise what it does not hold."""
    with CassFile(path) as f:
        found = sorted({t.codec for t in f.tensors.values() if len(t.shape) == 2})
    if codec not in found:
        raise InvalidArgument(
            f"{path}: its matrices are {', '.join(found)}, the settings are for {codec}: convert the model with them first"
        )


def _set_draft_full(options, path: str, patterns):
    """Fills in the tensors that the patterns name; returns what must live as long as the options."""
    with CassFile(path) as f:
        names = [name for name in f.tensors if any(fnmatchcase(name, p) for p in patterns)]
        for p in patterns:
            if not any(fnmatchcase(name, p) for name in names):
                raise InvalidArgument(f"draft_full: {path} has no tensor {p}")
    texts = [ffi.new("char[]", name.encode()) for name in names]
    array = ffi.new("char *[]", texts)
    options.draft_full, options.n_draft_full = array, len(texts)
    return texts, array


def _set_rope(options, path: str, scaling: dict):
    """Fills in the rope part of the model's options; returns the array it points to."""
    from pycass.convert.rope import resolve
    from pycass.file import CassFile

    if not isinstance(scaling, dict):
        raise InvalidArgument('rope_scaling must be a dictionary such as {"rope_type": "yarn", "factor": 4.0}')
    with CassFile(path) as f:
        c, stored = f.config, f.json.get("rope") or {}
    if "rope_theta" not in scaling and "rope_theta" not in stored:
        raise InvalidArgument(f"{path} does not say its rope_theta: give it in rope_scaling")
    params = {"rope_theta": stored.get("rope_theta")} | dict(scaling)
    inv_freq, factor = resolve(params, c.head_dim, c.n_ctx_train)
    array = ffi.new("float[]", [float(x) for x in inv_freq])
    options.rope_inv_freq, options.rope_attention_factor = array, factor
    return array


def write_whole(path: str, data) -> None:
    """Writes a file that appears whole or not at all. A link is followed; what is not a regular file stays."""
    path = os.path.realpath(path)
    if os.path.exists(path) and not os.path.isfile(path):
        raise IOFailure(f"cannot write {path}: it is not a regular file")
    try:
        partial = f"{path}.{os.getpid()}-{random.getrandbits(32):08x}.partial"
        try:
            with open(partial, "xb") as f:
                f.write(data)
                f.flush()
                os.fsync(f.fileno())
            os.replace(partial, path)
        except BaseException:
            if os.path.exists(partial):
                os.unlink(partial)
            raise
    except OSError as error:
        raise IOFailure(f"cannot write {path}: {error.strerror or error}") from error
