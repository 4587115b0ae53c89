"""The Python readers against the system's own tools, and against machines written down by hand."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from plait.kernels import machine
from plait.kernels.cgroup import cgroup_cpu_quota, cgroup_free_memory_bytes
from tests.kernels.fake_system import GIB, cgroup_v1, cgroup_v2, cpus_with_hyperthreads, write_tree

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc and /sys")
lscpu = pytest.mark.skipif(shutil.which("lscpu") is None, reason="lscpu is not installed")


def lscpu_value(key: str) -> str:
    lines = subprocess.run(["lscpu"], capture_output=True, text=True, check=True, env={**os.environ, "LC_ALL": "C"})
    return next(line.split(":", 1)[1].strip() for line in lines.stdout.splitlines() if line.startswith(key + ":"))


@linux
@lscpu
def test_features_are_those_that_lscpu_lists():
    listed = set(lscpu_value("Flags").split())
    features = machine.read_cpu_features()
    known = set(machine.FEATURE_NAMES[machine.architecture()])
    assert features.flags == listed & known


@linux
@lscpu
def test_logical_cpus_are_those_that_lscpu_counts():
    assert machine.read_topology().logical_cpus >= machine.read_topology().affinity_cpus
    online = lscpu_value("On-line CPU(s) list")
    assert machine.read_topology().logical_cpus == len(machine.parse_cpu_list(online))


@linux
def test_affinity_bounds_the_usable_cpus():
    one = min(os.sched_getaffinity(0))
    code = (
        f"import os; os.sched_setaffinity(0, {{{one}}})\n"
        "from plait.kernels import machine\n"
        "t = machine.read_topology(); print(t.affinity_cpus, t.usable_cpus, t.physical_cores, t.numa_nodes)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=source_env())
    assert done.stdout.split() == ["1", "1", "1", "1"]


def test_hardware_threads_of_one_core_count_once(tmp_path):
    topology = machine.read_topology(write_tree(tmp_path, cpus_with_hyperthreads()))
    cpus = len(machine.affinity())
    assert topology.physical_cores == (cpus + 1) // 2
    assert topology.numa_nodes == cpus  # the node without CPUs does not count
    assert topology.logical_cpus == max(machine.affinity()) + 9
    assert (topology.l1d_bytes, topology.l2_bytes, topology.l3_bytes) == (48 << 10, 2 << 20, 32 << 20)


def test_a_system_without_files_still_has_the_affinity_cpus(tmp_path):
    topology = machine.read_topology(str(tmp_path))
    cpus = len(machine.affinity())
    assert (topology.usable_cpus, topology.physical_cores, topology.logical_cpus) == (cpus, cpus, cpus)
    assert (topology.numa_nodes, topology.cpu_quota, topology.l3_bytes) == (1, None, 0)
    assert machine.read_cpu_features(str(tmp_path)).flags == frozenset()


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        (cgroup_v2("/job", {"/job": {"cpu.max": "150000 100000\n"}}), 1.5),
        (cgroup_v2("/job", {"/job": {"cpu.max": "max 100000\n"}}), None),
        # The tightest of the groups above counts, not the nearest.
        (cgroup_v2("/a/b", {"/a": {"cpu.max": "50000 100000"}, "/a/b": {"cpu.max": "400000 100000"}}), 0.5),
        # A container without a cgroup namespace: the path is the host's, the mount shows the container's part.
        (cgroup_v2("/docker/ab/x", {"/x": {"cpu.max": "20000 10000"}}, mount_root="/docker/ab"), 2.0),
        (cgroup_v2("/docker/cd", {"": {"cpu.max": "30000 10000"}}, mount_root="/docker/ab"), 3.0),
        (cgroup_v2("/../../job", {"": {"cpu.max": "70000 10000"}}), 7.0),
        (
            cgroup_v1("/j", "/", {"cpu,cpuacct/j": {"cpu.cfs_quota_us": "250000", "cpu.cfs_period_us": "100000"}}),
            2.5,
        ),
        (cgroup_v1("/j", "/", {"cpu,cpuacct/j": {"cpu.cfs_quota_us": "-1", "cpu.cfs_period_us": "100000"}}), None),
        ({}, None),
    ],
)
def test_cpu_quota_of_the_control_groups(tmp_path, files, quota):
    assert cgroup_cpu_quota(write_tree(tmp_path, files)) == quota


@pytest.mark.parametrize(("cpu_max", "usable"), [("10000 100000", 1), ("199999 100000", 1), ("max 100000", None)])
def test_a_quota_is_rounded_down_to_whole_threads_but_never_to_none(tmp_path, cpu_max, usable):
    root = write_tree(tmp_path, cgroup_v2("/", {"": {"cpu.max": cpu_max}}))
    assert machine.read_topology(root).usable_cpus == (usable or len(machine.affinity()))


@pytest.mark.parametrize(
    ("files", "free_bytes"),
    [
        (cgroup_v2("/j", {"/j": {"memory.max": f"{8 * GIB}", "memory.current": f"{3 * GIB}"}}), 5 * GIB),
        # 2 of the 3 GiB in use are page cache that the kernel drops when asked.
        (
            cgroup_v2(
                "/j",
                {
                    "/j": {
                        "memory.max": f"{8 * GIB}",
                        "memory.current": f"{3 * GIB}",
                        "memory.stat": f"anon 5\ninactive_file {2 * GIB}\n",
                    }
                },
            ),
            7 * GIB,
        ),
        (cgroup_v2("/j", {"/j": {"memory.max": "max", "memory.current": "77"}}), None),
        (cgroup_v2("/j", {"/j": {"memory.max": "100", "memory.current": "300"}}), 0),
        (
            cgroup_v1(
                "/",
                "/a/b",
                {
                    "memory/a": {"memory.limit_in_bytes": f"{GIB}", "memory.usage_in_bytes": f"{GIB // 2}"},
                    "memory/a/b": {"memory.limit_in_bytes": "9223372036854771712", "memory.usage_in_bytes": "4096"},
                },
            ),
            GIB // 2,
        ),
    ],
)
def test_free_memory_of_the_control_groups(tmp_path, files, free_bytes):
    assert cgroup_free_memory_bytes(write_tree(tmp_path, files)) == free_bytes


def test_available_memory_is_the_smaller_of_machine_and_group(tmp_path):
    meminfo = {"/proc/meminfo": f"MemTotal: {64 << 20} kB\nMemFree: 1 kB\nMemAvailable: {32 << 20} kB\n"}
    group = cgroup_v2("/j", {"/j": {"memory.max": f"{4 * GIB}", "memory.current": f"{GIB}"}})
    assert machine.read_available_memory_bytes(write_tree(tmp_path / "machine", meminfo)) == 32 * GIB
    assert machine.read_available_memory_bytes(write_tree(tmp_path / "group", meminfo | group)) == 3 * GIB


@pytest.mark.parametrize(
    ("text", "cpus"), [("0-3,8", [0, 1, 2, 3, 8]), ("5", [5]), ("", []), ("1,x,3", [1]), ("0-1-2", [])]
)
def test_cpu_lists(text, cpus):
    assert machine.parse_cpu_list(text) == cpus


@pytest.mark.parametrize(("text", "size"), [("32K", 32768), ("1M", 1 << 20), ("2G", 2 << 30), ("512", 512), ("?K", 0)])
def test_sizes(text, size):
    assert machine.parse_size(text) == size


def source_env() -> dict[str, str]:
    """The environment for a child process that imports plait from where this process did."""
    return {**os.environ, "PYTHONPATH": str(Path(machine.__file__).parents[2])}
