"""Settings files: what is read back, and what is refused in words."""

import json

import pytest

from pycass import settings
from pycass.errors import InvalidArgument, IOFailure
from pycass.settings import Settings

FULL = Settings(
    "cass1", hot=16, bias=True, prune=0.4, mantissa_bits=3, half=False, draft_max=5, draft_full=("lm_head*", "*.0.*"),
    measured={"tokens_per_second": 12.5}, machine={"cpu": "é"},
)  # fmt: skip


def test_a_file_comes_back(tmp_path):
    path = tmp_path / "s.json"
    for s in (FULL, Settings("nest")):
        settings.save(s, path)
        assert settings.load(path) == settings.of(path) == settings.of(s.as_object()) == settings.of(s) == s
    assert list(tmp_path.iterdir()) == [path] and settings.of(None) is None
    assert json.loads(path.read_text()) == {
        "pycass_settings": 1, "codec": "nest", "draft_full": [], "measured": {}, "machine": {}
    }  # fmt: skip


def test_what_convert_gets():
    assert FULL.convert_arguments() == {
        "codec": "cass1", "hot": 16, "bias": True, "prune": 0.4, "mantissa_bits": 3, "half": False
    }  # fmt: skip
    assert Settings("nest", hot=0).convert_arguments() == {"codec": "nest", "hot": 0}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"pycass_settings": 2}, "version 2; this program reads version 1"),
        ({"pycass_settings": True}, "version true"),
        ({"pycass_settings": "1"}, 'version "1"'),
        ({"prunes": 0.4}, "unknown key 'prunes'"),
        ({"codec": "zip"}, "codec: one of nest, cass1, cass2"),
        ({"codec": 1}, "codec: one of"),
        ({"codec": None}, "codec: null"),
        ({"hot": 16.0}, "hot: an integer"),
        ({"hot": True}, "hot: an integer"),
        ({"hot": -1}, "hot: an integer from 0"),
        ({"bias": 1}, "bias: true or false"),
        ({"half": "yes"}, 'half: true or false is needed, not "yes"'),
        ({"prune": 1}, "prune: a number from 0 to less than 1"),
        ({"prune": False}, "prune: a number"),
        ({"mantissa_bits": 8}, "mantissa_bits: an integer from 0 to 7 is needed, not 8"),
        ({"draft_max": 0}, "draft_max: an integer from 1 to 16"),
        ({"draft_max": None}, "draft_max: null is no value"),
        ({"draft_full": "lm_head"}, "draft_full: a list"),
        ({"draft_full": ["a", ""]}, "draft_full: a list"),
        ({"draft_full": ["a", 3]}, "draft_full: a list"),
        ({"measured": []}, "measured: an object"),
        ({"machine": "mine" * 50}, r"machine: an object is needed, not \"mine.*\.\.\."),
    ],
)
def test_what_is_refused(tmp_path, change, words):
    path = tmp_path / "s.json"
    path.write_text(json.dumps({"pycass_settings": 1, "codec": "nest"} | change))
    with pytest.raises(InvalidArgument, match=words) as error:
        settings.load(path)
    assert str(error.value).startswith(f"{path}: ")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not JSON"),
        ("[1]", "not a settings file"),
        ('{"codec": "nest"}', "not a settings file"),
        ('{"pycass_settings": 1}', "codec is missing"),
        ('{"pycass_settings": 1, "codec": "nest", "prune": NaN}', "NaN is no number"),
        ('{"pycass_settings": 1, "codec": "nest", "prune": 1e999}', "prune: a number"),
        ('{"pycass_settings": 1, "codec": "nest", "codec": "cass1"}', "twice"),
        ("[" * 100000, "not JSON"),
        ("\ud800", "UTF-8"),
        (" " * (1 << 20) + "{}", "too long"),
    ],
)
def test_what_is_no_settings_file(tmp_path, text, words):
    path = tmp_path / "s.json"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(InvalidArgument, match=words):
        settings.load(path)


def test_what_cannot_be_read(tmp_path):
    for path in (tmp_path, tmp_path / "none", "a\0b"):
        with pytest.raises(IOFailure, match="cannot read"):
            settings.load(path)
