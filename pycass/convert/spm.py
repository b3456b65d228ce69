"""SentencePiece models (tokenizer.model) rebuilt as `tokenizers` objects; a small reader of their protobuf."""

import struct

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from .source import in_words

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
_UNIGRAM, _BPE = 1, 2
_SPACE = "\u2581"  # SentencePiece's spelling of a space


# ---- protobuf: (field number, value) pairs -----------------------------------------------------------------


def _varint(data, at):
    value = shift = 0
    while True:
        if at >= len(data) or shift > 63:
            raise ValueError("a number runs past the end")
        byte = data[at]
        value, shift, at = value | (byte & 127) << shift, shift + 7, at + 1
        if byte < 128:
            return value, at


def _fields(data):
    """Yields (number, value) of a message: ints, 4 or 8 raw bytes, or bytes. Raises ValueError on damage."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value, at = _varint(data, at)
        elif wire in (1, 2, 5):
            size = 8 if wire == 1 else 4
            if wire == 2:
                size, at = _varint(data, at)
            if size > len(data) - at:
                raise ValueError("a field runs past the end")
            value, at = data[at : at + size], at + size
        else:
            raise ValueError(f"wire type {wire}")
        yield number, value


def _read(data):
    """(pieces [(text, score, type)], trainer fields dict, normalizer fields dict)."""
    pieces, trainer, normalizer = [], {}, {}
    for number, value in _fields(data):
        if number == 1:
            piece = dict(_fields(value))
            score = struct.unpack("<f", piece[2])[0] if 2 in piece else 0.0
            pieces.append((piece.get(1, b"").decode("utf-8"), score, piece.get(3, _NORMAL)))
        elif number == 2:
            trainer = dict(_fields(value))
        elif number == 3:
            normalizer = dict(_fields(value))
    return pieces, trainer, normalizer


# ---- tokenizers --------------------------------------------------------------------------------------------


def merges(scored):
    """BPE merges of SentencePiece's algorithm: the pair whose union has the highest score comes first.

    scored: {text: (score, id)} of the normal pieces. Returns [(left, right)] by rank.
    """
    ranked = []
    for text, (score, i) in scored.items():
        for at in range(1, len(text)):
            left, right = text[:at], text[at:]
            if left in scored and right in scored:
                ranked.append((-score, i, at, left, right))
    return [(left, right) for *_, left, right in sorted(ranked)]


def _decoder(byte_fallback, prefix):
    steps = [decoders.Replace(_SPACE, " ")]
    steps += [decoders.ByteFallback()] if byte_fallback else []
    steps += [decoders.Fuse()]
    steps += [decoders.Strip(content=" ", left=1)] if prefix else []
    return decoders.Sequence(steps)


def _normalizer(prefix, charsmap=b"", squeeze=False):
    steps = [normalizers.Precompiled(charsmap)] if charsmap else []
    if squeeze:  # remove_extra_whitespaces: only spaces count
        steps += [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    steps += [normalizers.Prepend(_SPACE)] if prefix else []
    return normalizers.Sequence(steps + [normalizers.Replace(" ", _SPACE)])


def bpe(vocabulary, pairs, unknown, byte_fallback, prefix, **normal):
    """Tokenizer of a BPE vocabulary. prefix: a space is put in front of every text. normal: see _normalizer."""
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=pairs, unk_token=unknown, fuse_unk=True, byte_fallback=byte_fallback)
    )
    tokenizer.normalizer = _normalizer(prefix, **normal)
    tokenizer.decoder = _decoder(byte_fallback, prefix)
    return tokenizer


def _build(pieces, trainer, normalizer, settings):
    prefix = bool(normalizer.get(3, 1))
    if settings.get("add_prefix_space") is not None:
        prefix = bool(settings["add_prefix_space"])
    normal = {"charsmap": normalizer.get(2, b""), "squeeze": bool(normalizer.get(4, 1))}
    fallback = bool(trainer.get(35, 0))
    ids = {}
    for i, (text, *_) in enumerate(pieces):
        ids.setdefault(text, i)
    unknown = next((text for text, _, kind in pieces if kind == _UNKNOWN), None)
    kind = trainer.get(3, _UNIGRAM)
    if kind == _BPE:
        scored = {t: (score, i) for i, (t, score, k) in enumerate(pieces) if k == _NORMAL}
        tokenizer = bpe(ids, merges(scored), unknown, fallback, prefix, **normal)
    elif kind == _UNIGRAM:
        tokenizer = Tokenizer(
            models.Unigram([(t, s) for t, s, _ in pieces], unk_id=ids.get(unknown), byte_fallback=fallback)
        )
        tokenizer.normalizer = _normalizer(prefix, **normal)
        tokenizer.decoder = _decoder(fallback, prefix)
    else:
        raise ValueError(f"model type {kind}; supported: unigram, bpe")
    if prefix and settings.get("legacy") is False:  # the prefix only at the start, not behind control tokens
        tokenizer.normalizer = _normalizer(False, **normal)
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement=_SPACE, prepend_scheme="first", split=False)
    tokenizer.add_tokens(
        [
            AddedToken(t, normalized=False, special=k == _CONTROL or k == _UNKNOWN)
            for t, _, k in pieces
            if k in (_CONTROL, _USER_DEFINED, _UNKNOWN) and t
        ]
    )
    return tokenizer


def _add_ends(tokenizer, settings):
    """BOS in front unless the settings say otherwise, EOS behind if they do."""

    def text(key):
        value = settings.get(key)
        return value.get("content") if isinstance(value, dict) else value

    bos = text("bos_token") if settings.get("add_bos_token", True) else None
    eos = text("eos_token") if settings.get("add_eos_token", False) else None
    known = {t: tokenizer.token_to_id(t) for t in (bos, eos) if t and tokenizer.token_to_id(t) is not None}
    single = [t for t in (bos, "$A", eos) if t == "$A" or t in known]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=single, pair=[*single, "$B:1"], special_tokens=list(known.items())
    )


def tokenizer(data, where, settings):
    """Tokenizer of a tokenizer.model's bytes. settings: tokenizer_config.json's object.

    Raises ConversionError when the file is damaged or of a kind that cannot be rebuilt.
    """
    with in_words(f"{where}: not a SentencePiece model that can be used"):
        pieces, trainer, normalizer = _read(data)
        if not pieces:
            raise ValueError("no pieces")
        out = _build(pieces, trainer, normalizer, settings)
        added = settings.get("added_tokens_decoder") or {}
        for i, token in sorted((int(i), t) for i, t in added.items()):
            if i == out.get_vocab_size(with_added_tokens=True):  # tokens behind the model's own, in order
                flags = {k: bool(token.get(k)) for k in ("lstrip", "rstrip", "normalized", "single_word")}
                out.add_tokens([AddedToken(token["content"], special=bool(token.get("special")), **flags)])
        _add_ends(out, settings)
    return out
