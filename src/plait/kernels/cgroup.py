"""What the control groups (Linux cgroups, version 1 and 2) allow this process.

The same rules as csrc/cgroup.cpp, for installations without the native library; the tests hold the two equal.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Group:
    """One control group as the file system shows it."""

    directory: Path
    version: int


def cgroup_cpu_quota(root: str = "") -> float | None:
    """CPUs' worth of time per period: the smallest of this process's group and all groups above it."""
    return min((quota for g in groups(root, "cpu") if (quota := _quota(g)) is not None), default=None)


def cgroup_free_memory_bytes(root: str = "") -> int | None:
    """Bytes still free under the tightest memory limit of this process's group and all groups above it.

    Page cache that the kernel can drop at once (`inactive_file`) counts as free: a model file that was
    read must not look like used memory.
    """
    return min((free for g in groups(root, "memory") if (free := _free_memory(g)) is not None), default=None)


def groups(root: str, controller: str) -> Iterator[Group]:
    """This process's group for `controller` and every group above it that is visible here."""
    for version, group_root, mount_point in _mounts(root, controller):
        path = _path(root, controller, version)
        if path is None:
            continue
        relative = _relative_path(path, group_root)
        while True:
            yield Group(Path(f"{root}{mount_point}{relative}"), version)
            if not relative:
                break
            relative = relative.rpartition("/")[0]


def read_line(path: Path) -> str:
    """The file's text without the white space around it, or "" where it cannot be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def parse_int(text: str) -> int | None:
    """A decimal number and nothing else."""
    digits = text.removeprefix("-")
    return int(text) if digits.isascii() and digits.isdigit() else None


def _mounts(root: str, controller: str) -> Iterator[tuple[int, str, str]]:
    # /proc/self/mountinfo, proc(5): "id parent major:minor root point options... - type source super_options".
    for line in read_line(Path(f"{root}/proc/self/mountinfo")).splitlines():
        head, dash, tail = line.partition(" - ")
        fields, described = head.split(), tail.split()
        if not dash or len(fields) < 5 or not described:
            continue
        if described[0] == "cgroup2":
            yield 2, fields[3], fields[4]
        if described[0] == "cgroup" and controller in described[-1].split(","):
            yield 1, fields[3], fields[4]


def _path(root: str, controller: str, version: int) -> str | None:
    # /proc/self/cgroup, cgroups(7): "id:controllers:path"; version 2 is the line "0::path".
    for line in read_line(Path(f"{root}/proc/self/cgroup")).splitlines():
        fields = line.split(":", 2)
        if len(fields) == 3 and (not fields[1] if version == 2 else controller in fields[1].split(",")):
            return fields[2]
    return None


def _relative_path(path: str, group_root: str) -> str:
    # In a container without a cgroup namespace the path is the host's and the mount shows only a part of
    # it: what lies outside reads as the mount point itself.
    relative = path
    if group_root != "/":
        relative = path[len(group_root) :] if path == group_root or path.startswith(group_root + "/") else ""
    if not relative.startswith("/") or ".." in relative.split("/"):
        return ""
    return relative.rstrip("/")


def _quota(group: Group) -> float | None:
    if group.version == 2:
        quota, _, period = read_line(group.directory / "cpu.max").partition(" ")
    else:
        quota = read_line(group.directory / "cpu.cfs_quota_us")
        period = read_line(group.directory / "cpu.cfs_period_us")
    quota_us, period_us = parse_int(quota), parse_int(period)
    if not quota_us or not period_us or quota_us < 0 or period_us < 0:
        return None
    return quota_us / period_us


def _free_memory(group: Group) -> int | None:
    limit_file, used_file, cache_key = (
        ("memory.max", "memory.current", "inactive_file")
        if group.version == 2
        else ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    )
    limit = parse_int(read_line(group.directory / limit_file))
    used = parse_int(read_line(group.directory / used_file))
    if limit is None or used is None:  # "max" is no number: no limit
        return None
    return max(0, limit - max(0, used - _stat(group.directory / "memory.stat", cache_key)))


def _stat(path: Path, key: str) -> int:
    for line in read_line(path).splitlines():
        name, _, value = line.partition(" ")
        if name == key:
            return parse_int(value.strip()) or 0
    return 0
