"""What this machine offers: CPU features, topology, memory; and how to find out without the native library.

Every reader takes `root`, which is put before the paths under /proc and /sys: "" for this machine, a
directory in tests. The native library (csrc/) follows the same rules; plait.kernels.native chooses.
"""

from __future__ import annotations

import math
import os
import platform
from dataclasses import dataclass
from pathlib import Path

from plait.kernels.cgroup import cgroup_cpu_quota, cgroup_free_memory_bytes, parse_int, read_line

# Features that a kernel may ask for, spelled as Linux spells them in /proc/cpuinfo.
FEATURE_NAMES = {
    "x86_64": ["fma", "f16c", "avx2", "avx_vnni", "avx512f", "avx512dq", "avx512bw", "avx512vl"]
    + ["avx512_vnni", "avx512_bf16", "amx_tile", "amx_int8", "amx_bf16"],
    "aarch64": ["asimd", "asimdhp", "asimddp", "sve", "i8mm", "bf16"],
}


@dataclass(frozen=True)
class CpuFeatures:
    """Instructions that may be used: the CPU has them and the operating system saves their registers."""

    architecture: str
    flags: frozenset[str]

    def has(self, *names: str) -> bool:
        return self.flags.issuperset(names)


@dataclass(frozen=True)
class Topology:
    """What the machine has and how much of it this process may use.

    logical_cpus: online in the machine. affinity_cpus: that this process may run on. cpu_quota: CPUs'
    worth of time that the control group grants, None = no limit. usable_cpus: threads worth starting.
    physical_cores, numa_nodes: among the affinity CPUs. Cache sizes are per instance; 0 = unknown.
    """

    logical_cpus: int
    affinity_cpus: int
    usable_cpus: int
    physical_cores: int
    numa_nodes: int
    cpu_quota: float | None
    l1d_bytes: int
    l2_bytes: int
    l3_bytes: int


def architecture() -> str:
    """`x86_64`, `aarch64`, or whatever else the system calls itself."""
    machine = platform.machine().lower()
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(machine, machine)


def read_cpu_features(root: str = "") -> CpuFeatures:
    """The features that /proc/cpuinfo lists; none where there is no such file."""
    known = FEATURE_NAMES.get(architecture(), [])
    listed = _cpuinfo(root, "flags") or _cpuinfo(root, "Features")
    return CpuFeatures(architecture(), frozenset(known).intersection(listed.split()))


def read_cpu_model(root: str = "") -> str:
    """The CPU's marketing name for reports, or the architecture where the system gives no name."""
    return _cpuinfo(root, "model name") or platform.processor() or architecture()


def read_topology(root: str = "") -> Topology:
    """Topology from the affinity mask, the control groups and /sys."""
    system = Path(f"{root}/sys/devices/system")
    cpus = affinity()
    quota = cgroup_cpu_quota(root)
    # Rounded down: a thread more than the quota pays for gets the whole process throttled.
    granted = len(cpus) if quota is None else math.floor(quota)
    caches = _cache_bytes(system / "cpu" / f"cpu{cpus[0]}" / "cache")
    return Topology(
        logical_cpus=len(parse_cpu_list(read_line(system / "cpu" / "online"))) or len(cpus),
        affinity_cpus=len(cpus),
        usable_cpus=max(1, min(len(cpus), granted)),
        physical_cores=_count_cores(system / "cpu", cpus),
        numa_nodes=_count_numa_nodes(system / "node", cpus),
        cpu_quota=quota,
        l1d_bytes=caches.get("1", 0),
        l2_bytes=caches.get("2", 0),
        l3_bytes=caches.get("3", 0),
    )


def read_available_memory_bytes(root: str = "") -> int:
    """Bytes that can be taken without swapping, within the machine and every control group.

    Where the system has no /proc/meminfo: all physical memory.
    """
    machine = _meminfo_bytes(root)
    if machine is None:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    group = cgroup_free_memory_bytes(root)
    return machine if group is None else min(machine, group)


def affinity() -> list[int]:
    """The CPUs that this process may run on, ascending."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def parse_cpu_list(text: str) -> list[int]:
    """`0-3,8` -> [0, 1, 2, 3, 8]. Anything malformed ends the list."""
    cpus: list[int] = []
    for part in text.split(","):
        first_text, dash, last_text = part.partition("-")
        first, last = parse_int(first_text), parse_int(last_text if dash else first_text)
        if first is None or last is None or first < 0 or last > 1 << 20:
            break
        cpus.extend(range(first, last + 1))
    return cpus


def parse_size(text: str) -> int:
    """`32K`, `1M`, `2G`, `512` -> bytes; 0 where malformed."""
    unit = "KMG".find(text[-1:]) + 1 if text else 0
    number = parse_int(text[:-1] if unit else text)
    if number is None or not 0 <= number <= 1 << 32:
        return 0
    return number << 10 * unit


def _cpuinfo(root: str, key: str) -> str:
    # The first CPU speaks for all: heterogeneous machines list the features common to all on each.
    for line in read_line(Path(f"{root}/proc/cpuinfo")).splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return ""


def _meminfo_bytes(root: str) -> int | None:
    # MemAvailable is the kernel's own estimate; kernels before 3.14 have MemFree only.
    found: dict[str, int] = {}
    for line in read_line(Path(f"{root}/proc/meminfo")).splitlines():
        words = line.split()
        kib = parse_int(words[1]) if len(words) > 1 else None
        if kib is not None:
            found[words[0]] = kib * 1024
    return found.get("MemAvailable:", found.get("MemFree:"))


def _count_cores(cpu_directory: Path, cpus: list[int]) -> int:
    # Hardware threads of one core name the same list of siblings; a CPU without one counts as a core.
    names = [f"cpu{cpu}" for cpu in cpus]
    return len({read_line(cpu_directory / name / "topology" / "thread_siblings_list") or name for name in names})


def _count_numa_nodes(node_directory: Path, cpus: list[int]) -> int:
    nodes = parse_cpu_list(read_line(node_directory / "online"))
    held = [parse_cpu_list(read_line(node_directory / f"node{node}" / "cpulist")) for node in nodes]
    return max(1, sum(not set(cpus).isdisjoint(on_node) for on_node in held))


def _cache_bytes(cache_directory: Path) -> dict[str, int]:
    """Size of the data or unified cache of each level, keyed "1", "2", "3"."""
    sizes: dict[str, int] = {}
    for index in range(16):
        directory = cache_directory / f"index{index}"
        level = read_line(directory / "level")
        if level and read_line(directory / "type") != "Instruction":
            sizes[level] = parse_size(read_line(directory / "size"))
    return sizes
