"""The calibration texts: what ships, and how a user's file is split."""

import difflib
import json
from pathlib import Path

import pytest

from pycass import prompts
from pycass.calibration_text import PIECE, samples
from pycass.errors import InvalidArgument, IOFailure

ROOT = Path(__file__).resolve().parents[2]


def test_the_shipped_text():
    found = samples()
    assert len(found) == len(set(found)) == 128 and found == samples("builtin")
    assert all(120 < 3 * len(s) and len(s) < 500 and s == s.strip("\n") and "\n---" not in s for s in found)
    assert 7 <= sum(any("\u3000" < c < "\uff00" for c in s) for s in found) <= 16  # Chinese and Japanese
    assert "CC0" in (ROOT / "pycass/data/README.md").read_text()


def test_the_shipped_text_is_not_what_is_measured():
    golden = json.loads((ROOT / "tests/golden/smollm2.json").read_text())["prompts"]
    measured = [*prompts.PROMPTS.values(), *(p["prompt"] for p in golden)]
    for sample in samples():
        for prompt in measured:
            matcher = difflib.SequenceMatcher(None, sample, prompt, autojunk=False)
            assert matcher.find_longest_match().size < 24, (sample, prompt)


def test_a_file_with_separators(tmp_path):
    path = tmp_path / "t"
    path.write_bytes("one\n\nmore\n---\n\n---  \r\n  zwei é\n---not one\n---\n".encode())
    assert samples(path) == ["one\n\nmore", "  zwei é\n---not one"]


def test_a_file_without_separators(tmp_path):
    path = tmp_path / "t"
    line = "x" * 60
    path.write_text("\n".join([line] * 3 + ["", "y" * 90, "y" * 90]) + "\n")
    assert samples(path) == ["\n".join([line] * 3), "y" * 90 + "\n" + "y" * 90]
    text = "".join(chr(97 + i % 26) for i in range(5 * PIECE + 7))
    path.write_text(text)
    assert "".join(samples(path)) == text and max(map(len, samples(path))) <= 1.5 * PIECE
    path.write_text("short")
    assert samples(path) == ["short"]


@pytest.mark.parametrize(
    ("data", "words"), [(b"", "empty"), (b" \n---\n\n", "empty"), (b"a\0b", "zero bytes"), (b"ab\xff", "byte 2")]
)
def test_what_is_no_text(tmp_path, data, words):
    path = tmp_path / "t"
    path.write_bytes(data)
    with pytest.raises(InvalidArgument, match=words):
        samples(path)


def test_what_cannot_be_read(tmp_path):
    for path in (tmp_path, tmp_path / "none", "a\0b"):
        with pytest.raises(IOFailure, match="cannot read"):
            samples(path)
