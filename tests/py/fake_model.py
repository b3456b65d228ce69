"""Tiny tokenizers made on the spot, and a Model without weights for tests of the command line and the chat."""

import json
from types import SimpleNamespace

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from pycass import errors
from pycass import tokenizer as pt
from pycass import template

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEXT = ["The quick brown fox jumps over the lazy dog. Hello world! This is a small text, and not a long one. 0123456789"]


def byte_level(**blob):
    """A byte-level BPE tokenizer's JSON blob, in the manner of SmolLM2 and Qwen."""
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False)
    tok.train_from_iterator(TEXT, trainer)
    tok.add_tokens([AddedToken("<think>", normalized=False), AddedToken("</think>", normalized=False)])
    out = {
        "tokenizer": tok.to_str(),
        "tokenizer_config": {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"},
        "chat_template": template.CHATML,
        "bos_token_id": None,
        "eos_token_ids": [tok.token_to_id("<|im_end|>")],
    }
    return out | blob


def sentencepiece_like(scheme="normalizer", **blob):
    """A BPE tokenizer with byte fallback in the manner of Llama 2 and Mistral; adds a BOS.

    scheme: where the space in front comes from, "normalizer" (every segment) or "first" (only the first)."""
    pieces = ["<unk>", "<s>", "</s>"] + [f"<0x{b:02X}>" for b in range(256)]
    words = ["▁", *"abcdefghijklmnopqrstuvwxyzHTIN.,!?<|>_/\n", "he", "▁t", "▁the", "in", "an"]
    vocab = {p: i for i, p in enumerate([*pieces, *words])}
    merges = [("h", "e"), ("▁", "t"), ("▁t", "he"), ("i", "n"), ("a", "n")]
    tok = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if scheme == "normalizer":
        tok.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tok.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tok.decoder = decoders.Sequence(steps)
    tok.add_special_tokens([AddedToken(t, normalized=False) for t in ("<unk>", "<s>", "</s>")])
    tok.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    out = {
        "tokenizer": tok.to_str(),
        "tokenizer_config": {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True},
        "chat_template": template.LLAMA2,
        "bos_token_id": 1,
        "eos_token_ids": [2],
    }
    return out | blob


class FakeModel:
    """Answers every prompt with the next of `replies`; an exception among them is raised instead, and the word
    ^C in a reply is where the user presses Ctrl-C."""

    def __init__(self, *replies, blob=None, n_ctx=2048):
        self.tokenizer = pt.Tokenizer(blob or byte_level())
        self.replies, self.n_ctx = list(replies), n_ctx
        self.kernel, self.device, self.threads = "fake", "cpu", 1
        self.prompts, self.options = [], []

    def stream(self, ids, **options):
        """The fake's Model.stream."""
        self.prompts.append(self.tokenizer.decode(ids, skip_special=False))
        self.options.append(options)
        if len(ids) >= self.n_ctx:
            raise errors.ContextFull(f"the prompt has {len(ids)} tokens, the context {self.n_ctx}")
        reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        if isinstance(reply, Exception):
            raise reply
        return _Stream(self, list(ids), reply)

    def generate(self, ids, logprobs=False, **options):
        """The fake's Model.generate."""
        stream = self.stream(ids, **options)
        for _ in stream:
            pass
        return stream.completion

    def completion(self, prompt, ids, text):
        """A Completion of made-up numbers."""
        return SimpleNamespace(
            text=text,
            token_ids=ids,
            finish_reason="stop",
            usage=SimpleNamespace(prompt_tokens=len(prompt), completion_tokens=len(ids), reused_tokens=0, kv_bytes=4096),
            timings=SimpleNamespace(prompt_ms=1.0, prompt_tps=100.0, decode_ms=2.0, decode_tps=50.0),
            spec=SimpleNamespace(steps=2, drafted=4, accepted=3, acceptance=0.75, mean_len=2.5, disabled=False,
                                 ngram_drafted=1, ngram_accepted=1),
            logits_hash=f"{json.dumps(ids)}",
            logprobs=None,
        )

    def stats(self):
        """The fake's Model.stats."""
        return {"plain_ms_per_token": 2.0, "spec_ms_per_token": 1.0, "bytes_read": 1000, "prompt_ms": 0.0}

    def draft_logits(self, ids):
        """The fake's Model.draft_logits."""

    def reset(self):
        """Nothing to forget."""

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        pass


class _Stream:
    def __init__(self, model, prompt, reply):
        self._model, self._prompt = model, prompt
        self._ids = model.tokenizer.encode(reply.replace("^C", ""), add_special=False, parse_special=True)
        self._reply, self._deltas = reply, self._pieces()
        self.completion = None

    def _pieces(self):
        decoder = pt.StreamDecoder(self._model.tokenizer)
        stopped = "^C" in self._reply
        for i in self._ids:
            yield SimpleNamespace(text=decoder.push(i), token_ids=[i])
        if stopped:
            raise KeyboardInterrupt
        yield SimpleNamespace(text=decoder.flush(), token_ids=[])
        text = self._model.tokenizer.decode(self._ids)
        self.completion = self._model.completion(self._prompt, self._ids, text)

    def __iter__(self):
        return self._deltas
