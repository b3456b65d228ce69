"""Tokenizers: everything becomes the text of a Hugging Face tokenizer.json and a few settings beside it."""

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from ..errors import ConversionError
from . import rope, spm
from .source import in_words

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # token types, GGUF's and SentencePiece's

# what chat templates close a turn with, and what ends a document
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<|end_of_turn|>", "<end_of_turn>", "<|endoftext|>")
_DOCUMENT_ENDS = ("<|endoftext|>", "<|end_of_text|>", "<|eom_id|>")

_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = _QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _byte_level(use_regex):
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


def _split(pattern):
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), _byte_level(False)])


def _smollm():
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _byte_level(True)])


# tokenizer.ggml.pre -> (pre-tokenizer, NFC, whole words before merges, BOS unless the file says otherwise)
_PRE = {
    "gpt-2": (lambda: _byte_level(True), False, False, False),
    "gpt2": (lambda: _byte_level(True), False, False, False),
    "smollm": (_smollm, False, False, False),
    "qwen2": (lambda: _split(_QWEN2), True, False, False),
    "deepseek-r1-qwen": (lambda: _split(_QWEN2), True, False, True),
    "llama-bpe": (lambda: _split(_LLAMA3), False, True, True),
    "llama3": (lambda: _split(_LLAMA3), False, True, True),
    "llama-v3": (lambda: _split(_LLAMA3), False, True, True),
    "tekken": (lambda: _split(_TEKKEN), False, True, True),
}


# ---- settings common to both sources ------------------------------------------------------------------------


def _parse(text, where):
    with in_words(f"{where}: not a tokenizer that the tokenizers library reads"):
        return Tokenizer.from_str(text)


def count_ids(tokenizer, cfg, notes):
    """Sets cfg.n_token: ids from it on are unknown to the tokenizer."""
    top = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    if top > cfg.n_vocab:
        notes.append(f"the tokenizer knows ids up to {top - 1}, but the embedding has {cfg.n_vocab} rows only")
    cfg.n_token = max(1, min(top, cfg.n_vocab))


def _turn_ends(tokenizer, template):
    """Ids of the tokens that the chat template closes turns with."""
    added = {t.content: i for i, t in tokenizer.get_added_tokens_decoder().items()}
    text = template if isinstance(template, str) else ""
    return {added[name] for name in _TURN_ENDS if name in added and name in text}


def _ids(value, where, n_vocab):
    """A token id, a list of them or None, as a list."""
    values = value if isinstance(value, list) else [] if value is None else [value]
    for v in values:
        if isinstance(v, bool) or not isinstance(v, int):
            raise ConversionError(f"{where}: not a token id: {rope.shown(v)}")
    return [v for v in values if 0 <= v < n_vocab]


def _generation(values):
    """The sampling settings of a generation_config.json that are numbers or flags."""
    wanted = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "do_sample", "max_new_tokens")
    out = {}
    for k in wanted:
        v = values.get(k)
        if isinstance(v, bool) or rope.is_number(v):
            out[k] = v
        elif isinstance(v, int):
            raise ConversionError(f"generation settings: '{k}' is not a number that a float holds: {rope.shown(v)}")
    return out


def _template_processor(bos, eos, tokenizer):
    """Post-processor that puts bos in front and eos behind a text; each a token's text or None."""
    single = ([bos] if bos else []) + ["$A"] + ([eos] if eos else [])
    pair = single + ([bos + ":1"] if bos else []) + ["$B:1"] + ([eos + ":1"] if eos else [])
    special = [(t, tokenizer.token_to_id(t)) for t in dict.fromkeys(filter(None, (bos, eos)))]
    return processors.TemplateProcessing(single=single, pair=pair, special_tokens=special)


# ---- Hugging Face -------------------------------------------------------------------------------------------


def _token_text(value):
    """A token in tokenizer_config.json: its text, or an object with `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _default_template(value):
    """Several named templates: the one for chat is called default."""
    if isinstance(value, list):
        named = {t.get("name"): t.get("template") for t in value if isinstance(t, dict)}
        value = named.get("default") or next(iter(named.values()), None)
    return value if isinstance(value, str) else None


def _hf_template(folder, settings, read_json):
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as e:
            raise ConversionError(f"{path}: {e}") from e
    value = read_json(folder / "chat_template.json").get("chat_template")
    return _default_template(settings.get("chat_template") if value is None else value)


def _hf_tokenizer(folder, settings):
    """(text of tokenizer.json, Tokenizer), or None when the folder has neither tokenizer.json nor tokenizer.model."""
    path = folder / "tokenizer.json"
    if path.is_file():
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as e:
            raise ConversionError(f"{path}: {e}") from e
        return text, _parse(text, path)
    path = folder / "tokenizer.model"
    if path.is_file():
        tokenizer = spm.tokenizer(path.read_bytes(), str(path), settings)
        return tokenizer.to_str(), tokenizer
    return None


def _adds(tokenizer, token, end):
    """Whether encoding puts `token` at that end of every text."""
    if token is None:
        return False
    ids = tokenizer.encode("a", add_special_tokens=True).ids
    plain = tokenizer.encode("a", add_special_tokens=False).ids
    at = 0 if end == "bos" else -1
    return len(ids) > len(plain) and ids[at] == tokenizer.token_to_id(token)


def _effective_add(tokenizer, settings, name, token):
    """transformers' Llama tokenizers follow the setting (BOS unless told otherwise), others the post-processor."""
    if str(settings.get("tokenizer_class", "")).startswith(("LlamaTokenizer", "CodeLlamaTokenizer")):
        value = settings.get(f"add_{name}_token")
        return bool(name == "bos" if value is None else value) and token is not None
    return _adds(tokenizer, token, name)


def from_hf(folder, config, read_json, cfg, allow_missing=False):
    """The JSON section (without provenance) of a Hugging Face directory; sets cfg.n_token.

    config: config.json's object. read_json(path) -> object. Raises ConversionError when there is no tokenizer,
    unless allow_missing.
    """
    settings, generation = read_json(folder / "tokenizer_config.json"), read_json(folder / "generation_config.json")
    if not (folder / "tokenizer.json").is_file() and (folder / "tokenizer.model").is_file():
        settings = {
            "bos_token": "<s>",
            "eos_token": "</s>",
            "unk_token": "<unk>",
            "tokenizer_class": "LlamaTokenizer",
        } | settings
    found = _hf_tokenizer(folder, settings)
    template = _hf_template(folder, settings, read_json)
    eos = _ids(config.get("eos_token_id"), "config.json: eos_token_id", cfg.n_vocab)
    eos += _ids(generation.get("eos_token_id"), "generation_config.json: eos_token_id", cfg.n_vocab)
    bos = _ids(config.get("bos_token_id"), "config.json: bos_token_id", cfg.n_vocab)
    out = {"name": folder.resolve().name, "chat_template": template, "generation": _generation(generation)}
    tokens = {k: _token_text(settings.get(k)) for k in ("bos_token", "eos_token", "unk_token", "pad_token")}
    if found is None:
        if not allow_missing:
            raise ConversionError(f"{folder}: no tokenizer.json and no tokenizer.model")
        cfg.n_token = cfg.n_vocab
        return out | {
            "tokenizer": None,
            "tokenizer_config": tokens,
            "bos_token_id": bos[0] if bos else None,
            "eos_token_ids": sorted(set(eos)),
        }
    out["tokenizer"], tokenizer = found
    count_ids(tokenizer, cfg, cfg.notes)
    if tokens["eos_token"] is not None:
        eos += _ids(tokenizer.token_to_id(tokens["eos_token"]), "eos_token", cfg.n_vocab)
    named_bos = tokenizer.token_to_id(tokens["bos_token"]) if tokens["bos_token"] else None
    add_bos = _effective_add(tokenizer, settings, "bos", tokens["bos_token"])
    if add_bos and named_bos is not None:
        bos = [named_bos]
    kept = {
        k: settings[k] for k in ("tokenizer_class", "model_max_length", "legacy", "add_prefix_space") if k in settings
    }
    out["tokenizer_config"] = (
        kept
        | tokens
        | {"add_bos_token": add_bos, "add_eos_token": _effective_add(tokenizer, settings, "eos", tokens["eos_token"])}
    )
    known = set(tokenizer.get_vocab(with_added_tokens=True).values())  # some configs name ids of padding rows
    bos = [i for i in bos if i in known]
    out["bos_token_id"] = bos[0] if bos else None
    out["eos_token_ids"] = sorted((set(eos) | _turn_ends(tokenizer, template)) & known)
    return out


# ---- GGUF ---------------------------------------------------------------------------------------------------


class GgufVocabulary:
    """A GGUF file's tokens, checked: texts, types, scores, merges, and its settings by short key."""

    def __init__(self, metadata, where):
        self.where, self._metadata = where, metadata
        self.tokens = self._list("tokens", str)
        self.types = self._list("token_type", int) or [NORMAL] * len(self.tokens)
        self.scores = self._list("scores", float)
        self.merges = self._list("merges", str)
        if not self.tokens:
            raise ConversionError(f"{where}: no tokenizer.ggml.tokens: the file has no vocabulary")
        if len(self.types) != len(self.tokens):
            raise ConversionError(f"{where}: {len(self.tokens)} tokens but {len(self.types)} token types")
        if self.scores and len(self.scores) != len(self.tokens):
            raise ConversionError(f"{where}: {len(self.tokens)} tokens but {len(self.scores)} scores")
        self.padding = {i for i, t in enumerate(self.tokens) if self._is_padding(i, t)}

    def _list(self, key, kind):
        values = self._metadata.get(f"tokenizer.ggml.{key}")
        if values is None:
            return []
        if not isinstance(values, list) or values and not isinstance(values[0], kind):
            raise ConversionError(f"{self.where}: tokenizer.ggml.{key} is not a list of {kind.__name__}")
        return values

    def _is_padding(self, i, text):
        """Converters fill ids that the tokenizer does not have with tokens of this text."""
        return self.types[i] in (UNUSED, USER_DEFINED) and text == f"[PAD{i}]"

    def get(self, key, kind, default=None):
        value = self._metadata.get(f"tokenizer.ggml.{key}", default)
        if value is not default and not isinstance(value, kind):
            raise ConversionError(f"{self.where}: tokenizer.ggml.{key} is not of type {kind.__name__}: {value!r}")
        return value

    def token_id(self, key):
        """The id under `key`, or None when it is absent or no token (some writers put -1 there)."""
        value = self.get(f"{key}_token_id", int)
        return value if value is not None and 0 <= value < len(self.tokens) else None

    def text(self, key):
        i = self.token_id(key)
        return None if i is None else self.tokens[i]

    def ids(self):
        """{text: id} without padding; of a text that occurs twice the first id."""
        out = {}
        for i, text in enumerate(self.tokens):
            if i not in self.padding:
                out.setdefault(text, i)
        return out

    def added(self):
        """The control and user-defined tokens, which are cut out of a text before it is split into words."""
        return [
            AddedToken(t, normalized=False, special=self.types[i] == CONTROL)
            for i, t in enumerate(self.tokens)
            if i not in self.padding and self.types[i] in (CONTROL, USER_DEFINED) and t
        ]


def _gguf_bpe(v):
    """(Tokenizer, add BOS by default) of a vocabulary of the model "gpt2"."""
    pre = v.get("pre", str)
    if pre not in _PRE:
        raise ConversionError(f"{v.where}: tokenizer.ggml.pre '{pre}' is not supported; supported: {', '.join(_PRE)}")
    if not v.merges:
        raise ConversionError(f"{v.where}: no tokenizer.ggml.merges")
    make, nfc, ignore_merges, add_bos = _PRE[pre]
    merges = []
    for text in v.merges:
        at = text.find(" ", 1)
        if at < 0:
            raise ConversionError(f"{v.where}: tokenizer.ggml.merges has '{text}', which is not a pair")
        merges.append((text[:at], text[at + 1 :]))
    tokenizer = Tokenizer(
        models.BPE(vocab=v.ids(), merges=merges, fuse_unk=False, byte_fallback=False, ignore_merges=ignore_merges)
    )
    if nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = make()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, add_bos


def _gguf_spm(v):
    """(Tokenizer, add BOS by default) of a vocabulary of the model "llama" (SentencePiece, merges by score)."""
    if not v.scores:
        raise ConversionError(f"{v.where}: no tokenizer.ggml.scores")
    vocabulary = v.ids()
    normal = {t: (v.scores[i], i) for t, i in vocabulary.items() if v.types[i] == NORMAL}
    unknown = v.text("unknown") or next((t for t, k in zip(v.tokens, v.types) if k == UNKNOWN), None)
    return spm.bpe(
        vocabulary, spm.merges(normal), unknown, byte_fallback=True, prefix=v.get("add_space_prefix", bool, True)
    ), True


def from_gguf(metadata, cfg, where):
    """The JSON section (without provenance) of a GGUF file's metadata (dict); sets cfg.n_token.

    Raises ConversionError when the vocabulary is of a kind that cannot be rebuilt exactly.
    """
    v = GgufVocabulary(metadata, where)
    kind = v.get("model", str)
    builders = {"gpt2": _gguf_bpe, "llama": _gguf_spm}
    if kind not in builders:
        raise ConversionError(
            f"{where}: tokenizer.ggml.model '{kind}' is not supported; supported: {', '.join(builders)}"
        )
    with in_words(f"{where}: the vocabulary is damaged"):
        tokenizer, add_bos = builders[kind](v)
        tokenizer.add_tokens(v.added())
    add_bos = v.get("add_bos_token", bool, add_bos) and v.token_id("bos") is not None
    add_eos = v.get("add_eos_token", bool, False) and v.token_id("eos") is not None
    tokenizer.post_processor = _template_processor(
        v.text("bos") if add_bos else None, v.text("eos") if add_eos else None, tokenizer
    )
    count_ids(tokenizer, cfg, cfg.notes)
    template = metadata.get("tokenizer.chat_template")
    template = template if isinstance(template, str) else None
    return {
        "name": metadata["general.name"] if isinstance(metadata.get("general.name"), str) else "",
        "tokenizer": tokenizer.to_str(),
        "chat_template": template,
        "tokenizer_config": {
            f"{k}_token": v.text(g) for k, g in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        }
        | {"add_bos_token": bool(add_bos), "add_eos_token": bool(add_eos)},
        "bos_token_id": v.token_id("bos"),
        "eos_token_ids": _gguf_ends(v, tokenizer, template),
        "generation": _gguf_generation(metadata),
    }


def _gguf_ends(v, tokenizer, template):
    """Ids that end a text: the file's own, and the usual control tokens, since GGUF has no generation_config."""
    ends = {i for i in map(v.token_id, ("eos", "eot", "eom")) if i is not None}
    names = v.ids()
    ends |= {names[t] for t in _DOCUMENT_ENDS if t in names and v.types[names[t]] == CONTROL}
    return sorted(ends | _turn_ends(tokenizer, template))


def _gguf_generation(metadata):
    names = {
        "temp": "temperature",
        "top_k": "top_k",
        "top_p": "top_p",
        "min_p": "min_p",
        "penalty_repeat": "repetition_penalty",
    }
    return _generation({n: metadata.get(f"general.sampling.{k}") for k, n in names.items()})
