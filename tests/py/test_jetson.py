"""jetson/run.sh with programs of our own instead of a Jetson's."""

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "jetson" / "run.sh"
CONF = "< POWER_MODEL ID=0 NAME=15W >\n< POWER_MODEL ID=1 NAME=25W >\n< POWER_MODEL ID=2 NAME=MAXN_SUPER >\n"


@pytest.fixture
def jetson(tmp_path):
    """Runs the script: (the finished process, what nvpmodel and jetson_clocks were called with, in turn)."""
    calls, conf, programs = tmp_path / "calls", tmp_path / "nvpmodel.conf", tmp_path / "bin"
    conf.write_text(CONF)
    programs.mkdir()
    for name in ("nvpmodel", "jetson_clocks"):
        (programs / name).write_text(f'#!/bin/sh\necho "{name} $*" >> {calls}\n[ "$*" != "$FAILS" ]\n')
        (programs / name).chmod(0o755)
    (programs / "sudo").write_text('#!/bin/sh\nexec "$@"\n')
    (programs / "sudo").chmod(0o755)

    def run(*args, path=f"{programs}{os.pathsep}{os.environ['PATH']}", fails="none"):
        env = os.environ | {"PATH": path, "NVPMODEL_CONF": str(conf), "FAILS": fails}
        calls.write_text("")
        done = subprocess.run([SCRIPT, *args], capture_output=True, text=True, env=env)
        return done, [line.split() for line in calls.read_text().splitlines()]

    return run


def test_full_clocks_for_a_command(jetson):
    done, calls = jetson("sh", "-c", "echo out; exit 3")
    assert (done.returncode, done.stdout) == (3, "out\n")
    assert calls[:2] == [["nvpmodel", "-m", "2"], ["nvpmodel", "-q"]]
    store, on, show, restore = calls[2:]
    assert store[1] == "--store" and on == ["jetson_clocks"] and show[1] == "--show" and restore[1:] == ["--restore", store[2]]


@pytest.mark.parametrize(("mode", "number"), [("25W", "1"), ("0", "0"), ("MAXN_SUPER", "2")])
def test_power_modes(jetson, mode, number):
    done, calls = jetson("-m", mode)
    assert done.returncode == 0 and calls == [["nvpmodel", "-m", number], ["nvpmodel", "-q"], ["jetson_clocks", "--show"]]


def test_an_unknown_power_mode_is_refused(jetson):
    done, calls = jetson("-m", "99W", "true")
    assert done.returncode == 2 and "no power mode 99W" in done.stderr and calls == []


def test_what_fails_is_said_and_the_command_runs(jetson):
    done, _ = jetson("echo", "out", fails="-m 2")
    assert (done.returncode, done.stdout) == (0, "out\n") and "power mode could not be set" in done.stderr
    done, calls = jetson("echo", "out", fails="")  # jetson_clocks alone
    assert (done.returncode, done.stdout) == (0, "out\n") and "clocks go up and down" in done.stderr
    assert calls[-1][1] == "--restore"


def test_other_machines(jetson):
    done, calls = jetson("echo", "out", path="/usr/bin:/bin")
    assert (done.returncode, done.stdout, calls) == (0, "out\n", [])
    assert "no nvpmodel" in done.stderr and "no jetson_clocks" in done.stderr
