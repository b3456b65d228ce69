"""Temporary folders: locked while they are used, removed when they are not."""

import os

import pytest

from pycass import scratch


def test_a_folder_goes_with_its_use(tmp_path):
    with scratch.folder(tmp_path, ".point-") as path:
        (tmp_path / "other").mkdir()
        open(os.path.join(path, "a.cass"), "w").close()
    assert os.listdir(tmp_path) == ["other"]
    with pytest.raises(ValueError), scratch.folder(tmp_path, ".point-"):
        raise ValueError
    assert os.listdir(tmp_path) == ["other"]


def test_leftovers_go_and_folders_in_use_stay(tmp_path):
    (tmp_path / ".point-killed").mkdir()
    (tmp_path / ".point-killed" / "a.cass").write_bytes(b"x" * 100)
    (tmp_path / ".calibrated-killed").mkdir()
    (tmp_path / ".point-file").write_text("not a folder")
    with scratch.folder(tmp_path, ".point-") as first, scratch.folder(tmp_path, ".point-") as second:
        names = set(os.listdir(tmp_path))
        assert names == {os.path.basename(first), os.path.basename(second), ".calibrated-killed", ".point-file"}


def test_no_room(tmp_path):
    with pytest.raises(OSError), scratch.folder(tmp_path / "missing", ".tune-"):
        pass
