"""What there is to know about this machine, for `doctor` and `bench`. `root` stands for / wherever files are read, so that
tests can have other machines; programs are looked for in PATH."""

import ctypes
import os
import platform
import re
import shutil
import statistics
import subprocess
import threading
from pathlib import Path

TIMEOUT = 5  # seconds for a program that only reports


def text(root, path: str) -> str | None:
    """A file's text without the zeros and line ends around it; None if it cannot be read."""
    try:
        return Path(root, path).read_bytes().decode("utf-8", "replace").strip("\0\n ")
    except OSError:
        return None


# ---- Jetson ----


def l4t(root="/") -> str | None:
    """The version of Jetson Linux (L4T), such as 36.4.3; None elsewhere."""
    found = re.match(r"# R(\d+) \(release\), REVISION: ([\d.]+)", text(root, "etc/nv_tegra_release") or "")
    return f"{found[1]}.{found[2]}" if found else None


def board(root="/") -> str | None:
    """The board's name, where there is a device tree."""
    return text(root, "proc/device-tree/model")


def power_mode(root="/") -> str | None:
    """The power mode of a Jetson as nvpmodel names it; None elsewhere."""
    if root == "/" and shutil.which("nvpmodel"):
        found = re.search(r"NV Power Mode: *(\S+)", output("nvpmodel", "-q") or "")
        if found:
            return found[1]
    number = re.search(r"pmode:(\d+)", text(root, "var/lib/nvpmodel/status") or "")
    if not number:
        return None
    names = re.findall(r"< *POWER_MODEL +ID=(\d+) +NAME=(\S+?) *>", text(root, "etc/nvpmodel.conf") or "")
    return {int(i): name for i, name in names}.get(int(number[1]), f"mode {int(number[1])}")


def output(*command: str) -> str | None:
    """What a program prints; None if it is missing, fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


class Tegrastats:
    """Runs tegrastats, where there is one, while it is entered. Each line goes to `log`; `take` sums up those since the last
    call."""

    def __init__(self, log, interval_ms: int = 500):
        self._log, self._interval = log, interval_ms
        self._process, self._lines = None, []

    def __enter__(self):
        if shutil.which("tegrastats"):
            command = ["tegrastats", "--interval", str(self._interval)]
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                             stderr=subprocess.DEVNULL, text=True)  # fmt: skip
            self._reader = threading.Thread(target=self._read, daemon=True)
            self._reader.start()
        return self

    def _read(self):
        for line in self._process.stdout:
            self._log(f"tegrastats: {line.rstrip()}")
            self._lines.append(line)

    def take(self) -> dict | None:
        """{samples, watts, celsius, ram_mb}: the mean of all rails (or of VDD_IN, which is the board's), the hottest sensor and
        the most memory; None without a sample."""
        lines, self._lines = self._lines, []
        return summary(lines)

    def __exit__(self, *_):
        if self._process:
            self._process.terminate()
            self._process.wait()
            self._reader.join()
            self._process.stdout.close()


def summary(lines) -> dict | None:
    """Of tegrastats' lines, as `Tegrastats.take`."""
    if not lines:
        return None
    watts, celsius, ram = [], [], []
    for line in lines:
        rails = {name: int(mw) / 1000 for name, mw in re.findall(r"\b(V\w+) (\d+)mW", line)}
        if rails:
            watts.append(rails.get("VDD_IN", sum(rails.values())))
        celsius += [float(t) for t in re.findall(r"@(-?\d+(?:\.\d+)?)C\b", line)]
        ram += [int(n) for n in re.findall(r"\bRAM (\d+)/", line)]
    return {
        "samples": len(lines),
        "watts": round(statistics.fmean(watts), 2) if watts else None,
        "celsius": max(celsius, default=None),
        "ram_mb": max(ram, default=None),
    }


# ---- processors ----


def cpus(root="/") -> dict:
    """{name, cores, usable, mhz, most_mhz, governors}: cores that are on and that this process may use; the highest clock that
    a core may take now, and that it could take."""
    base = Path(root, "sys/devices/system/cpu")
    policies = sorted(base.glob("cpufreq/policy*")) or sorted(base.glob("cpu[0-9]*/cpufreq"))
    allowed = [_number(p, "scaling_max_freq") for p in policies]
    able = [_number(p, "cpuinfo_max_freq") for p in policies]
    return {
        "name": cpu_name(root),
        "cores": _count(text(root, "sys/devices/system/cpu/online")) or os.cpu_count(),
        "usable": len(os.sched_getaffinity(0)),
        "mhz": max((n // 1000 for n in allowed if n), default=None),
        "most_mhz": max((n // 1000 for n in able if n), default=None),
        "governors": sorted({g for p in policies if (g := text(p, "scaling_governor"))}),
    }


def cpu_name(root="/") -> str:
    """The processor as Linux calls it: by name on x86, by the number of its kind on Arm; else the architecture."""
    info = text(root, "proc/cpuinfo") or ""
    found = re.search(r"^model name\s*:\s*(.+)$", info, re.M)
    if found:
        return found[1]
    maker, part = (re.search(rf"^CPU {what}\s*:\s*(0x\w+)$", info, re.M) for what in ("implementer", "part"))
    if maker and part and int(maker[1], 16) == 0x41:
        return ARM_PARTS.get(int(part[1], 16), f"Arm part {part[1]}")
    return platform.processor() or platform.machine()


# MIDR part numbers of Arm's own cores: the "main ID register" of each core's reference manual
ARM_PARTS = {0xD05: "Cortex-A55", 0xD08: "Cortex-A72", 0xD0B: "Cortex-A76", 0xD40: "Neoverse V1", 0xD0C: "Neoverse N1",
             0xD41: "Cortex-A78", 0xD42: "Cortex-A78AE", 0xD4F: "Neoverse V2", 0xD83: "Neoverse V3AE"}  # fmt: skip


def _number(folder, name):
    found = text(folder, name)
    return int(found) if found and found.isdigit() else None


def _count(ranges):
    """Of "0-3,6" 5."""
    ends = [part.split("-") for part in (ranges or "").split(",") if part]
    return sum(int(e[-1]) - int(e[0]) + 1 for e in ends)


# ---- memory ----


def memory(root="/") -> dict:
    """{total, available, cached, swap_total, swap_free, zram, limit}, in bytes: `limit` is what this process's control group
    leaves, None without; `zram`: swap that is compressed memory."""
    info = {k: int(n) << 10 for k, n in re.findall(r"^(\w+):\s+(\d+) kB$", text(root, "proc/meminfo") or "", re.M)}
    return {
        "total": info.get("MemTotal"),
        "available": info.get("MemAvailable"),
        "cached": info.get("Cached"),
        "swap_total": info.get("SwapTotal"),
        "swap_free": info.get("SwapFree"),
        "zram": "zram" in (text(root, "proc/swaps") or ""),
        "limit": group_room(root),
    }


def group_room(root="/") -> int | None:
    """Bytes that the control groups of this process leave it (version 2); None without a limit."""
    found = re.search(r"^0::/(.*)$", text(root, "proc/self/cgroup") or "", re.M)
    if not found:
        return None
    rooms, group = [], Path("sys/fs/cgroup", found[1])
    while group.parts[:3] == ("sys", "fs", "cgroup"):
        folder = Path(root, group)
        most, used = _number(folder, "memory.max"), _number(folder, "memory.current")
        if most is not None and used is not None:
            rooms.append(max(most - used, 0))
        group = group.parent
    return min(rooms, default=None)


def resident(path) -> int | None:
    """Bytes of a file that are in the page cache. Linux tells only those who may write it."""
    import mmap

    import numpy as np

    size, page = os.path.getsize(path), mmap.PAGESIZE
    if not size or not os.access(path, os.W_OK):
        return None
    with open(path, "rb") as f, mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ) as view:
        here = np.empty((size + page - 1) // page, np.uint8)
        bytes_ = np.frombuffer(view, np.uint8)
        address, found = bytes_.ctypes.data, ctypes.CDLL(None).mincore
        del bytes_
        if found(ctypes.c_void_p(address), ctypes.c_size_t(size), here.ctypes.data_as(ctypes.c_void_p)):
            return None
        return min(int((here & 1).sum()) * page, size)


# ---- GPUs ----

_MAJOR, _MINOR, _INTEGRATED = 75, 76, 18  # CUdevice_attribute, of cuda.h


def cuda(library="libcuda.so.1") -> dict:
    """{driver, devices: [{name, arch, bytes, integrated}], error}: what NVIDIA's driver says; `error` in words if it does not
    answer."""
    found = {"driver": None, "devices": [], "error": None}
    try:
        lib = ctypes.CDLL(library)
    except OSError:
        return {**found, "error": f"there is no {library}: no NVIDIA driver, or a container that was started without its GPU"}
    status = lib.cuInit(0)
    if status:
        return {**found, "error": f"the driver does not start: cuInit gives {status}"}
    version, count = ctypes.c_int(), ctypes.c_int()
    lib.cuDriverGetVersion(ctypes.byref(version))
    lib.cuDeviceGetCount(ctypes.byref(count))
    found["driver"] = f"{version.value // 1000}.{version.value % 1000 // 10}"
    found["devices"] = [_device(lib, i) for i in range(count.value)]
    return found


def _device(lib, i):
    device, name, size = ctypes.c_int(), ctypes.create_string_buffer(256), ctypes.c_size_t()
    lib.cuDeviceGet(ctypes.byref(device), i)
    lib.cuDeviceGetName(name, len(name), device)
    lib.cuDeviceTotalMem_v2(ctypes.byref(size), device)

    def attribute(number):
        value = ctypes.c_int()
        lib.cuDeviceGetAttribute(ctypes.byref(value), number, device)
        return value.value

    return {
        "name": name.value.decode("utf-8", "replace"),
        "arch": f"sm_{attribute(_MAJOR)}{attribute(_MINOR)}",
        "bytes": size.value,
        "integrated": bool(attribute(_INTEGRATED)),
    }
