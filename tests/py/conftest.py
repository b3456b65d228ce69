"""Fixtures: the tiny models of tests/golden and SmolLM2-135M, each converted once."""

from pathlib import Path

import numpy as np
import pytest
import tiny_models as tiny
from checkpoints import convert

from pycass import Model

GOLDEN = Path(__file__).resolve().parent.parent / "golden"


@pytest.fixture(scope="session")
def tiny_hf(tmp_path_factory):
    """name -> the folder of a tiny model's checkpoint."""
    root, made = tmp_path_factory.mktemp("hf"), {}

    def get(name):
        if name not in made:
            made[name] = tiny.write(name, root / name)
        return made[name]

    return get


@pytest.fixture(scope="session")
def tiny_cass(tmp_path_factory, tiny_hf):
    """(name, codec) -> the path of a tiny model's .cass file. "hot": nest, calibrated."""
    root, made = tmp_path_factory.mktemp("cass"), {}

    def get(name, codec="nest"):
        if (name, codec) not in made:
            path = root / f"{name}.{codec}.cass"
            options = {"calibrate": "builtin", "samples": 12} if codec == "hot" else {}
            convert(tiny_hf(name), path, codec="nest" if codec == "hot" else codec, **options)
            made[name, codec] = path
        return made[name, codec]

    return get


@pytest.fixture
def tiny_model(tiny_cass):
    """(name, codec, **options of Model.load) -> a Model of one thread; closed after the test."""
    opened = []

    def get(name, codec="nest", threads=1, **options):
        opened.append(Model.load(tiny_cass(name, codec), threads=threads, **options))
        return opened[-1]

    yield get
    for model in opened:
        model.close()


@pytest.fixture(scope="session")
def golden():
    """What transformers computes for the tiny models (tests/golden/make.py)."""
    with np.load(GOLDEN / "tiny.npz") as arrays:
        return dict(arrays)


@pytest.fixture(scope="session")
def smollm2_cass():
    """SmolLM2-135M through `pull`: downloaded into the user's cache once."""
    from pycass.pull import pull

    return pull("smollm2-135m")


@pytest.fixture(scope="session")
def smollm2_gguf(tmp_path_factory):
    """The GGUF file that `pull` makes it from."""
    from pycass import pull

    return pull.fetch("smollm2-135m", tmp_path_factory.mktemp("gguf"))
