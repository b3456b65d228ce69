"""doctor and bench's view of the machine: other machines as folders, programs in PATH and a library."""

import json
import os
import shutil
import stat
import subprocess
import time

import pytest

import pycass.cli as cli
from pycass import bench, doctor, machine, memory
from pycass.file import CassFile

ORIN = {
    "etc/nv_tegra_release": "# R36 (release), REVISION: 4.3, GCID: 38968081, BOARD: generic, EABI: aarch64, DATE: x\n",
    "etc/nvpmodel.conf": "< POWER_MODEL ID=0 NAME=MAXN >\nCPU_ONLINE CORE_0 1\n< POWER_MODEL ID=2 NAME=MODE_30W >\n",
    "var/lib/nvpmodel/status": "pmode:0002\n",
    "proc/device-tree/model": "NVIDIA Jetson AGX Orin Developer Kit\0",
    "proc/cpuinfo": "processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd42\n",
    "proc/meminfo": "MemTotal:       31000000 kB\nMemAvailable:   20000000 kB\nCached:   9000000 kB\n"
    "SwapTotal:  15000000 kB\nSwapFree: 14000000 kB\n",
    "proc/swaps": "Filename Type Size Used Priority\n/dev/zram0 partition 1 0 5\n",
    "proc/self/cgroup": "0::/user/pycass\n",
    "sys/fs/cgroup/user/memory.max": "max\n",
    "sys/fs/cgroup/user/memory.current": "5\n",
    "sys/fs/cgroup/user/pycass/memory.max": f"{9 << 30}\n",
    "sys/fs/cgroup/user/pycass/memory.current": f"{1 << 30}\n",
    "sys/devices/system/cpu/online": "0-7\n",
    "sys/devices/system/cpu/cpufreq/policy0/scaling_max_freq": "1728000\n",
    "sys/devices/system/cpu/cpufreq/policy0/cpuinfo_max_freq": "2201600\n",
    "sys/devices/system/cpu/cpufreq/policy0/scaling_governor": "schedutil\n",
}
STATS = (
    "11-30-2025 10:00:00 RAM {ram}/30697MB (lfb 4x4MB) SWAP 0/15348MB (cached 0MB) CPU [3%@729,off] EMC_FREQ 0%@2133 "
    "GR3D_FREQ 0%@[305,305] CPU@{t}C soc2@41.5C VDD_GPU_SOC 3000mW/3100mW VDD_CPU_CV 1000mW/1000mW VIN_SYS_5V0 4000mW/4000mW"
)
LIBCUDA = """
#include <stddef.h>
#include <string.h>
int cuInit(unsigned flags) { return STATUS; }
int cuDriverGetVersion(int *v) { *v = 12060; return 0; }
int cuDeviceGetCount(int *n) { *n = 1; return 0; }
int cuDeviceGet(int *d, int i) { *d = 40 + i; return 0; }
int cuDeviceGetName(char *name, int n, int d) { strncpy(name, d == 40 ? "Orin" : "?", n); return 0; }
int cuDeviceTotalMem_v2(size_t *n, int d) { *n = 32000000000; return 0; }
int cuDeviceGetAttribute(int *v, int a, int d) { *v = a == 75 ? 8 : a == 76 ? 7 : a == 18; return 0; }
"""


@pytest.fixture
def orin(tmp_path):
    """An Orin's files, as a root."""
    return tree(tmp_path / "orin", ORIN)


def tree(root, files):
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


@pytest.fixture
def program(tmp_path, monkeypatch):
    """(name, shell script): a program in front of PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")

    def make(name, script):
        path = folder / name
        path.write_text("#!/bin/sh\n" + script)
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    return make


@pytest.fixture
def libcuda(tmp_path):
    """A driver's library of one device, whose cuInit returns `status`."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if not compiler:
        pytest.skip("no C compiler: install gcc")

    def make(status=0):
        source, library = tmp_path / "cuda.c", tmp_path / f"libcuda{status}.so"
        source.write_text(LIBCUDA)
        subprocess.run([compiler, "-shared", "-fPIC", f"-DSTATUS={status}", "-o", library, source], check=True)
        return str(library)

    return make


# ---- machines ----


def test_an_orin(orin):
    d = doctor.examine(root=orin, libcuda="no-such-library.so")
    assert (d["l4t"], d["board"], d["power_mode"]) == ("36.4.3", "NVIDIA Jetson AGX Orin Developer Kit", "MODE_30W")
    cpu = d["cpu"]
    assert (cpu["name"], cpu["cores"], cpu["mhz"], cpu["most_mhz"]) == ("Cortex-A78AE", 8, 1728, 2201)
    assert cpu["governors"] == ["schedutil"]
    m = d["memory"]
    assert m["total"] == 31000000 << 10 and m["zram"] and m["limit"] == 8 << 30
    assert doctor.room(m) == (8 << 30) - doctor.SPARE
    notes = "\n".join(d["advice"])
    for said in ("MODE_30W, not MAXN", "1728 of 2201 MHz", "zram", "control group leaves 8.00 GiB"):
        assert said in notes
    shown = doctor.as_text(d)
    assert "L4T 36.4.3, power mode MODE_30W" in shown and "no-such-library.so" in shown


def test_other_machines(tmp_path):
    nothing = doctor.examine(root=tmp_path, libcuda="no-such-library.so")
    assert nothing["l4t"] is nothing["power_mode"] is nothing["board"] is nothing["memory"]["total"] is None
    assert nothing["cpu"]["cores"] == os.cpu_count() and doctor.room(nothing["memory"]) == 0
    assert "Jetson" not in doctor.as_text(nothing) and "unknown" in doctor.as_text(nothing)
    pc = tree(tmp_path / "pc", {"proc/cpuinfo": "model name\t: Some CPU @ 3 GHz\n", "proc/meminfo": "MemAvailable: 2097152 kB\n"})
    assert machine.cpu_name(pc) == "Some CPU @ 3 GHz" and machine.cpus(pc)["mhz"] is None
    assert doctor.room(machine.memory(pc)) == (2 << 30) - doctor.SPARE
    assert doctor.examine()["memory"]["available"] > 0


@pytest.mark.parametrize(("status", "mode"), [("pmode:0000", "MAXN"), ("pmode:0007 fmode:cool", "mode 7"), ("", None)])
def test_power_modes_from_files(orin, status, mode):
    (orin / "var/lib/nvpmodel/status").write_text(status)
    assert machine.power_mode(orin) == mode
    assert (mode == "MAXN") == (not any("MAXN" in s for s in doctor.examine(root=orin)["advice"]))


def test_power_mode_from_nvpmodel(program):
    program("nvpmodel", '[ "$1" = -q ] && printf "NV Power Mode: 15W\\n2\\n"')
    assert machine.power_mode() == "15W"
    program("nvpmodel", "exit 1")
    assert machine.power_mode() is None


def test_kernels(monkeypatch):
    monkeypatch.delenv("PYCASS_KERNEL", raising=False)
    best = doctor.chosen()
    assert doctor.examine()["kernel"] == best == next(name for name, runs in doctor.kernels() if runs)
    monkeypatch.setenv("PYCASS_KERNEL", "scalar")
    d = doctor.examine()
    assert d["kernel"] == "scalar" and "scalar (used)" in doctor.as_text(d) and any("scalar" in s for s in d["advice"])
    monkeypatch.setenv("PYCASS_KERNEL", "bogus")
    assert "bogus" in doctor.examine()["advice"][0]


# ---- GPUs ----


def test_a_driver(libcuda, monkeypatch):
    monkeypatch.setattr(doctor, "built", lambda: [])
    d = doctor.examine(libcuda=libcuda())
    assert d["cuda"]["driver"] == "12.6" and d["cuda"]["error"] is None
    assert d["cuda"]["devices"] == [{"name": "Orin", "arch": "sm_87", "bytes": 32000000000, "integrated": True}]
    assert "no CUDA backend" in "\n".join(d["advice"])
    assert "CUDA 12.6, 1 device\n" in doctor.as_text(d) and "Orin, sm_87, 29.80 GiB, shared" in doctor.as_text(d)


def test_a_driver_without_a_device(libcuda, monkeypatch):
    monkeypatch.setattr(doctor, "built", lambda: ["libpycass_cuda.so"])
    d = doctor.examine(libcuda=libcuda(100))
    assert d["cuda"]["devices"] == [] and "cuInit gives 100" in d["cuda"]["error"]
    assert any("the CUDA backend is here, but the driver does not start" in s for s in d["advice"])


# ---- files ----


def test_the_longest_context(tiny_cass):
    path = tiny_cass("llama3_rope")
    with CassFile(path) as f:
        c = f.config
    values, scores = 4 * c.n_layer * c.n_head_kv * c.head_dim, 32 * c.n_head + 4
    weights, n = os.path.getsize(path), 1000
    raw = doctor.fit(path, weights + n * (values + scores))
    assert raw["fits"] and raw["context"]["raw"] == {"bytes_per_token": values + scores, "longest": n}
    assert raw["context"]["nest"]["longest"] > n > 0
    assert doctor.fit(path, weights + n * (values + scores) - 1)["context"]["raw"]["longest"] == n - 1
    small = doctor.fit(path, weights - 1)
    assert not small["fits"] and {w["longest"] for w in small["context"].values()} == {0}
    assert doctor.fit(path, 1 << 50)["context"]["raw"]["longest"] == 1 << 24
    assert raw["resident"] is None or 0 <= raw["resident"] <= raw["bytes"] == weights


@pytest.mark.parametrize("kv", memory.CACHE_RATIOS)
def test_a_cache_takes_no_more_than_foretold(kv, smollm2_cass):
    from pycass import Model

    with Model.load(smollm2_cass, kv=kv, n_ctx=700) as m:
        m.generate("Once upon a time there was a clockmaker who never slept. " * 40, 1)
        tokens, c = len(m.tokens), m.config
        foretold = memory.cached(c, 0, kv).memory(tokens) - tokens * (32 * c.n_head + 4)
        assert 0.85 * foretold < m.kv_bytes <= foretold


def test_advice_about_a_file(orin, tiny_cass):
    path = tiny_cass("qwen2")
    assert not any("fit" in s for s in doctor.examine(path, orin)["advice"])
    (orin / "proc/meminfo").write_text(f"MemAvailable: {(doctor.SPARE + os.path.getsize(path) + 200_000) >> 10} kB\n")
    assert any("--kv nest holds more" in s for s in doctor.examine(path, orin)["advice"])
    (orin / "proc/meminfo").write_text("MemAvailable: 1000 kB\n")
    assert any("the weights do not fit" in s for s in doctor.examine(path, orin)["advice"])


def test_the_command(tiny_cass, capsys):
    path = tiny_cass("mistral")
    assert cli.main(["doctor", "--json", str(path)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["file"]["file"] == str(path) and set(found["file"]["context"]) == {"raw", "nest", "cass1", "cass2"}
    assert cli.main(["doctor", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "--kv nest" in shown and "all of the model's context" in shown
    assert cli.main(["doctor"]) == 0 and "--kv" not in capsys.readouterr().out
    assert cli.main(["doctor", "/no/such/file.cass"]) == 1


# ---- bench ----


def test_tegrastats_lines():
    s = machine.summary([STATS.format(ram=3000, t=45.0), STATS.format(ram=3100, t=47.25)])
    assert s == {"samples": 2, "watts": 8.0, "celsius": 47.25, "ram_mb": 3100}
    assert machine.summary(["RAM 1/2MB VDD_IN 4840mW/4840mW VDD_SOC 1400mW/1400mW"])["watts"] == 4.84
    assert machine.summary(["?"]) == {"samples": 1, "watts": None, "celsius": None, "ram_mb": None}
    assert machine.summary([]) is None


def test_bench_logs_tegrastats(program, tiny_cass, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "READ_BYTES", 1 << 20)
    program("nvpmodel", 'printf "NV Power Mode: MAXN\\n0\\n"')
    program("tegrastats", f'[ "$1" = --interval ] || exit 1\nwhile :; do echo "{STATS.format(ram=3000, t=45)}"; sleep 0.01; done')
    prompt = bench.prompt

    def slow(model, ids):
        """As long as it takes until some samples are there."""
        end = time.monotonic() + 30
        while log.read_text().count("tegrastats: 11-30-2025") < 3 and time.monotonic() < end:
            time.sleep(0.01)
        return prompt(model, ids)

    monkeypatch.setattr(bench, "prompt", slow)
    for output in ("md", "json"):
        log = tmp_path / output
        args = ["-t", "1", "-r", "2", "-p", "64", "-n", "8", "--log-file", str(log), "-o", output]
        assert cli.main(["bench", str(tiny_cass("qwen3")), *args]) == 0
        out, err = capsys.readouterr()
        assert log.read_text().count("tegrastats: 11-30-2025") > 2 and "tegrastats" not in err
        if output == "md":
            assert "- power mode MAXN\n" in out and "pp64, 1 thread: 8.0 W on average, 45.0 °C at most, 3000 MB" in out
        else:
            rows = json.loads(out)
            assert {r["power_mode"] for r in rows} == {"MAXN"} and rows[0]["tegrastats"]["watts"] == 8.0


def test_bench_elsewhere(tiny_cass, capsys, monkeypatch):
    monkeypatch.setattr(bench, "READ_BYTES", 1 << 20)
    monkeypatch.setenv("PATH", "/nowhere")
    assert cli.main(["bench", str(tiny_cass("qwen3")), "-t", "1", "-r", "1", "-p", "16", "-n", "0", "-o", "json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["power_mode"] is None and row["tegrastats"] is None
