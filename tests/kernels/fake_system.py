"""Writes /proc and /sys trees of machines that the tests do not run on."""

from __future__ import annotations

from pathlib import Path

from plait.kernels.machine import affinity

GIB = 1 << 30


def write_tree(root: Path, files: dict[str, str]) -> str:
    """Writes {absolute path: text} below `root`; returns `root` as the readers take it."""
    for path, text in files.items():
        target = root / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    return str(root)


def cgroup_v2(path: str, groups: dict[str, dict[str, str]], mount_root: str = "/") -> dict[str, str]:
    """A version 2 hierarchy: this process in `path`, and {group below the mount point: {file: text}}."""
    files = {
        "/proc/self/cgroup": f"0::{path}\n",
        "/proc/self/mountinfo": f"25 1 0:22 / /proc rw - proc proc rw\n"
        f"30 25 0:26 {mount_root} /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n",
    }
    for group, contents in groups.items():
        files |= {f"/sys/fs/cgroup{group}/{name}": text for name, text in contents.items()}
    return files


def cgroup_v1(cpu_path: str, memory_path: str, groups: dict[str, dict[str, str]]) -> dict[str, str]:
    """A version 1 hierarchy with the controllers `cpu,cpuacct` and `memory`, keyed by path below /sys/fs/cgroup."""
    files = {
        "/proc/self/cgroup": f"5:memory:{memory_path}\n4:cpu,cpuacct:{cpu_path}\n1:name=systemd:/init\n0::/\n",
        "/proc/self/mountinfo": "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755\n"
        "32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
        "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n",
    }
    for group, contents in groups.items():
        files |= {f"/sys/fs/cgroup/{group}/{name}": text for name, text in contents.items()}
    return files


def cpus_with_hyperthreads() -> dict[str, str]:
    """This process's CPUs as pairs of hardware threads, on one NUMA node each, with caches of 48K, 2M and 32M."""
    cpus = affinity()
    base = "/sys/devices/system"
    files = {f"{base}/cpu/online": f"0-{max(cpus) + 8}\n", f"{base}/node/online": f"0-{len(cpus)}\n"}
    for order, cpu in enumerate(cpus):
        pair = cpus[order - order % 2 :][:2]
        files[f"{base}/cpu/cpu{cpu}/topology/thread_siblings_list"] = ",".join(map(str, pair)) + "\n"
        files[f"{base}/node/node{order}/cpulist"] = f"{cpu}\n"
        caches = [("1", "Data", "48K"), ("1", "Instruction", "64K"), ("2", "Unified", "2048K"), ("3", "Unified", "32M")]
        for index, (level, kind, size) in enumerate(caches):
            directory = f"{base}/cpu/cpu{cpu}/cache/index{index}"
            files |= {f"{directory}/level": level, f"{directory}/type": kind, f"{directory}/size": size}
    files[f"{base}/node/node{len(cpus)}/cpulist"] = "\n"  # a node with memory and no CPU
    return files
