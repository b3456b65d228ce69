"""Tokenizers rebuilt from GGUF and SentencePiece: the ids of the original."""

import io
import json
import random

import pytest
import sentencepiece
from checkpoints import SAMPLE, config, convert, gguf_vocabulary, nfc_split_tokenizer, weights, write_hf
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from pycass.convert import arch, open_source, spm, vocab
from pycass.errors import ConversionError

TEXTS = [
    "Hello world! Café déjà vu — 123 😊",
    "F\u00fchrer",
    "Fu\u0308hrer",
    "x =  12",
    "a\n\n  3.14159\n\t42",
    "DON'T we'LL it's",
    "日本語 漢字 ٣٤ ½ ²",
    "한국어 🎉👩\u200d💻",
    "   leading and trailing   ",
    "<|im_end|>",
    "a<|im_end|> b<tool> c",
    "",
    " ",
    "\r\n\r\n \t\u00a0\u3000x",
    "def f(x):\n    return x*100\n\n\n# end",
    "\u0000\u0001 control",
    "a" * 40,
    " 2024  2025   2026",
    "[PAD401]",
]
TEXTS += [c * n for c in (" ", "\t", "\n") for n in range(1, 257)] + [" " * n + "x" for n in range(1, 257)]


def cfg(n_vocab=500):
    return arch.ModelConfig("llama", n_vocab, 512, 64, 64, 1, 4, 4, 16, 1e-5)


def values(keys):
    return {k: v for k, (_, v) in keys.items()}


def same_ids(a, b, texts=TEXTS):
    for text in texts:
        assert a.encode(text).ids == b.encode(text).ids, repr(text)


def original(pre):
    """A tokenizer as the checkpoints behind `pre` have it."""
    if pre in ("gpt-2", "smollm"):
        t = nfc_split_tokenizer(".", False, False)
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
        t.pre_tokenizer = (
            byte_level
            if pre == "gpt-2"
            else pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
        )
        return t
    pattern = {"qwen2": vocab._QWEN2, "llama-bpe": vocab._LLAMA3, "tekken": vocab._TEKKEN}[pre]
    return nfc_split_tokenizer(pattern, pre == "qwen2", pre != "qwen2")


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "qwen2", "llama-bpe", "tekken"])
def test_ids_of_a_gguf_vocabulary(pre):
    t = original(pre)
    keys = values(gguf_vocabulary(t, 500, pre))
    keys |= {
        "tokenizer.ggml.bos_token_id": t.token_to_id("<|bos|>"),
        "tokenizer.ggml.eos_token_id": t.token_to_id("<|im_end|>"),
    }
    c = cfg()
    blob = vocab.from_gguf(keys, c, "x.gguf")
    rebuilt = Tokenizer.from_str(blob["tokenizer"])
    same_ids(rebuilt, t)
    for text in TEXTS:
        assert rebuilt.decode(rebuilt.encode(text).ids, skip_special_tokens=False) == t.decode(
            t.encode(text).ids, skip_special_tokens=False
        )
    assert c.n_token == t.get_vocab_size() and blob["tokenizer_config"]["add_bos_token"] is False
    flags = {i: (a.content, a.special, a.normalized) for i, a in rebuilt.get_added_tokens_decoder().items()}
    assert flags == {i: (a.content, a.special, a.normalized) for i, a in t.get_added_tokens_decoder().items()}


def test_the_regexes_are_the_published_ones():
    assert vocab._LLAMA3 == (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


def test_bos_and_eos_of_gguf():
    t = original("llama-bpe")
    keys = values(gguf_vocabulary(t, 500, "llama-bpe"))
    bos, eos = t.token_to_id("<|bos|>"), t.token_to_id("<|im_end|>")
    keys |= {
        "tokenizer.ggml.bos_token_id": bos,
        "tokenizer.ggml.eos_token_id": 7,
        "tokenizer.ggml.eot_token_id": 9,
        "tokenizer.chat_template": "{{x}}<|im_end|>",
    }
    del keys["tokenizer.ggml.add_bos_token"]
    blob = vocab.from_gguf(keys, cfg(), "x")  # llama-bpe adds a BOS unless the file says otherwise
    assert blob["tokenizer_config"]["add_bos_token"] and blob["bos_token_id"] == bos
    assert Tokenizer.from_str(blob["tokenizer"]).encode("x").ids[0] == bos
    assert blob["eos_token_ids"] == sorted({7, 9, eos}) and blob["chat_template"] == "{{x}}<|im_end|>"
    blob = vocab.from_gguf(
        keys | {"tokenizer.ggml.add_bos_token": False, "tokenizer.ggml.add_eos_token": True}, cfg(), "x"
    )
    assert Tokenizer.from_str(blob["tokenizer"]).encode("x").ids[-1] == 7
    del keys["tokenizer.ggml.bos_token_id"]
    blob = vocab.from_gguf(keys, cfg(), "x")
    assert blob["bos_token_id"] is None and not blob["tokenizer_config"]["add_bos_token"]
    assert vocab.from_gguf(keys | {"tokenizer.ggml.bos_token_id": 2**32 - 1}, cfg(), "x")["bos_token_id"] is None


# ---- SentencePiece ------------------------------------------------------------------------------------------


def trained(kind, **options):
    out = io.BytesIO()
    words = " ".join(SAMPLE).split()
    rng = random.Random(0)
    lines = [" ".join(rng.choices(words, k=12)) for _ in range(200)] + ["a  b   c", "tab\tx"]
    settings = {
        "vocab_size": 420,
        "byte_fallback": True,
        "character_coverage": 0.99,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "hard_vocab_limit": False,
        "user_defined_symbols": ["<tool>"],
        "minloglevel": 2,
    }
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=out, model_type=kind, **(settings | options)
    )
    return out.getvalue()


SPM_TEXTS = [t for t in TEXTS if "<|im_end|>" not in t and "<tool>" not in t and "\u0000" not in t]


@pytest.mark.parametrize(
    "options",
    [{}, {"add_dummy_prefix": False}, {"normalization_rule_name": "nmt_nfkc", "remove_extra_whitespaces": True}],
)
@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_ids_of_a_sentencepiece_model(kind, options):
    data = trained(kind, **options)
    reference = sentencepiece.SentencePieceProcessor(model_proto=data)
    t = spm.tokenizer(data, "tokenizer.model", {"bos_token": "<s>"})
    different = [x for x in SPM_TEXTS if t.encode(x, add_special_tokens=False).ids != reference.encode(x)]
    assert different == []
    assert t.encode("x").ids == [reference.bos_id(), *reference.encode("x")]
    plain = "Hello  world\n 😊 x"
    assert t.decode(t.encode(plain).ids) == reference.decode(reference.encode(plain))
    assert (
        t.token_to_id("<tool>") == reference.piece_to_id("<tool>") and t.encode("a<tool>b").tokens.count("<tool>") == 1
    )


def test_ids_of_a_sentencepiece_vocabulary_in_gguf():
    data = trained("bpe")
    reference = sentencepiece.SentencePieceProcessor(model_proto=data)
    n = reference.get_piece_size()
    kinds = [
        2
        if reference.is_unknown(i)
        else 3
        if reference.is_control(i)
        else 6
        if reference.is_byte(i)
        else 5
        if reference.is_unused(i)
        else 4
        if reference.id_to_piece(i) == "<tool>"
        else 1
        for i in range(n)
    ]
    keys = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [reference.id_to_piece(i) for i in range(n)],
        "tokenizer.ggml.scores": [reference.get_score(i) for i in range(n)],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    c = cfg()
    blob = vocab.from_gguf(keys, c, "x")
    t = Tokenizer.from_str(blob["tokenizer"])
    assert [x for x in SPM_TEXTS if t.encode(x, add_special_tokens=False).ids != reference.encode(x)] == []
    assert t.encode("x").ids[0] == 1 and blob["tokenizer_config"]["add_bos_token"] and c.n_token == n
    blob = vocab.from_gguf(keys | {"tokenizer.ggml.add_space_prefix": False}, cfg(), "x")
    assert Tokenizer.from_str(blob["tokenizer"]).encode("Hello", add_special_tokens=False).tokens[0][0] == "H"
    with pytest.raises(ConversionError, match="scores"):
        vocab.from_gguf({k: v for k, v in keys.items() if "scores" not in k}, cfg(), "x")


def test_non_legacy_puts_the_prefix_only_at_the_start():
    data = trained("bpe")
    legacy, new = spm.tokenizer(data, "m", {}), spm.tokenizer(data, "m", {"legacy": False})
    assert legacy.encode("Hello the").ids == new.encode("Hello the").ids
    assert (
        legacy.encode("a</s>b", add_special_tokens=False).tokens[-1] == "▁b"
        and new.encode("a</s>b", add_special_tokens=False).tokens[-1] == "b"
    )


def test_damaged_sentencepiece_models():
    for data in (trained("bpe"), trained("unigram", normalization_rule_name="nmt_nfkc")):
        damage_sentencepiece(data)


def damage_sentencepiece(data):
    for n in [0, 1, 2, 5, 100, len(data) // 2 + 1]:
        try:
            spm.tokenizer(data[:n], "m", {})
        except ConversionError:
            pass
    rng = random.Random(0)
    for _ in range(200):
        bad = bytearray(data)
        bad[rng.randrange(len(bad))] = rng.randrange(256)
        try:
            spm.tokenizer(bytes(bad), "m", {})
        except ConversionError:
            pass
    for bad in (b"", b"\xff" * 30, b"\x0a\xff\xff\xff\xff\x0f"):
        with pytest.raises(ConversionError, match="not a SentencePiece model"):
            spm.tokenizer(bad, "m", {})


def test_a_folder_with_tokenizer_model(tmp_path):
    c = config(vocab_size=420, bos_token_id=1, eos_token_id=2)
    write_hf(
        tmp_path / "m",
        c,
        tokenizer=False,
        tokenizer_config__json={
            "bos_token": "<s>",
            "eos_token": "</s>",
            "add_bos_token": True,
            "legacy": True,
            "tokenizer_class": "LlamaTokenizer",
        },
    )
    (tmp_path / "m" / "tokenizer.model").write_bytes(trained("bpe"))
    with open_source(tmp_path / "m") as s:
        t = Tokenizer.from_str(s.json["tokenizer"])
        assert t.encode("x").ids[0] == 1 == s.json["bos_token_id"] and s.json["eos_token_ids"] == [2]
        assert s.json["tokenizer_config"]["add_bos_token"] is True
    (tmp_path / "m" / "tokenizer_config.json").unlink()
    with open_source(tmp_path / "m") as s:
        assert s.json["bos_token_id"] == 1 and s.json["tokenizer_config"]["add_bos_token"] is True
        assert Tokenizer.from_str(s.json["tokenizer"]).encode("x").ids == t.encode("x").ids


# ---- settings of Hugging Face folders ------------------------------------------------------------------------


def blob_of(tmp_path, c=None, **files):
    write_hf(tmp_path / "m", c or config(), weights(config()), **files)
    with open_source(tmp_path / "m") as s:
        return s.json, s


def test_ends_are_united(tmp_path):
    blob, _ = blob_of(
        tmp_path,
        config(eos_token_id=[5, 6]),
        generation_config__json={"eos_token_id": [7, 5], "temperature": 0.6, "top_k": 20, "x": 1},
        tokenizer_config__json={"eos_token": {"content": "<|im_end|>"}, "bos_token": None},
    )
    assert blob["eos_token_ids"] == [5, 6, 7, 299] and blob["generation"] == {"temperature": 0.6, "top_k": 20}
    blob, _ = blob_of(
        tmp_path,
        config(eos_token_id=None),
        generation_config__json="{}",
        tokenizer_config__json={"chat_template": "{{m}}<|im_end|>"},
    )
    assert blob["eos_token_ids"] == [299]
    blob, _ = blob_of(tmp_path, config(eos_token_id=[5, 10**6, -1]), tokenizer_config__json="{}")
    assert blob["eos_token_ids"] == [5]
    with pytest.raises(ConversionError, match="not a token id"):
        blob_of(tmp_path, config(eos_token_id="5"))


def test_no_bos_is_invented(tmp_path):
    blob, s = blob_of(
        tmp_path, config(bos_token_id=None), tokenizer_config__json={"bos_token": None, "add_bos_token": True}
    )
    assert blob["bos_token_id"] is None and blob["tokenizer_config"]["add_bos_token"] is False
    assert s.config.n_token == 300


def test_bos_of_the_post_processor_and_of_llama_tokenizers(tmp_path):
    t = Tokenizer(models.BPE())
    t.pre_tokenizer, t.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    t.train_from_iterator(
        SAMPLE,
        trainers.BpeTrainer(vocab_size=298, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False),
    )
    t.add_tokens([AddedToken("<|bos|>", special=True)])
    t.post_processor = processors.TemplateProcessing(single=["<|bos|>", "$A"], special_tokens=[("<|bos|>", 298)])
    files = {"tokenizer": False, "tokenizer__json": t.to_str()}
    blob, _ = blob_of(tmp_path, tokenizer_config__json={"bos_token": "<|bos|>"}, **files)
    assert blob["tokenizer_config"]["add_bos_token"] is True and blob["bos_token_id"] == 298
    assert blob["tokenizer"] == t.to_str()
    blob, _ = blob_of(
        tmp_path,
        tokenizer_config__json={
            "bos_token": "<|bos|>",
            "tokenizer_class": "LlamaTokenizerFast",
            "add_bos_token": False,
        },
        **files,
    )
    assert blob["tokenizer_config"]["add_bos_token"] is False


def test_where_chat_templates_come_from(tmp_path):
    assert blob_of(tmp_path)[0]["chat_template"] is None
    blob, _ = blob_of(
        tmp_path,
        tokenizer_config__json={
            "chat_template": [{"name": "tools", "template": "T"}, {"name": "default", "template": "D"}]
        },
    )
    assert blob["chat_template"] == "D"
    blob, _ = blob_of(tmp_path, chat_template__json={"chat_template": "J"})
    assert blob["chat_template"] == "J"
    blob, _ = blob_of(tmp_path, chat_template__jinja="X")
    assert blob["chat_template"] == "X"


def test_damaged_tokenizers(tmp_path):
    with pytest.raises(ConversionError, match="not a tokenizer"):
        blob_of(tmp_path, tokenizer=False, tokenizer__json="{}")
    with pytest.raises(ConversionError, match="not JSON"):
        blob_of(tmp_path, tokenizer_config__json="[")
    write_hf(tmp_path / "n", config(), tokenizer=False)
    report = convert(tmp_path / "n", tmp_path / "n.cass", allow_missing_tokenizer=True)
    assert report.n_tensors == 21


def test_json_survives_odd_texts(tmp_path):
    blob, _ = blob_of(tmp_path, chat_template__jinja='😊 \u2028 \\ " {{x}}')
    convert(tmp_path / "m", tmp_path / "m.cass")
    from cass_reader import Reader

    assert Reader(tmp_path / "m.cass").json["chat_template"] == blob["chat_template"]
    assert json.dumps(blob)
