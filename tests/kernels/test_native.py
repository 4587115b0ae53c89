"""The native library agrees with the Python readers; without it, or with a wrong one, plait says so and goes on."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from plait.errors import UsageError
from plait.kernels import machine, native
from tests.kernels.fake_system import GIB, cgroup_v1, cgroup_v2, cpus_with_hyperthreads, write_tree

MEMINFO = {"/proc/meminfo": "MemTotal: 99999 kB\nMemFree: 5 kB\nMemAvailable: 70000 kB\n"}
OLD_MEMINFO = {"/proc/meminfo": "MemTotal: 99999 kB\nMemFree: 50000 kB\n"}
V2_GROUP = {"cpu.max": "100000 100000\n", "memory.max": "40000000\n", "memory.current": "30000000\n"}
V1_GROUPS = {
    "cpu,cpuacct/a": {"cpu.cfs_quota_us": "150000", "cpu.cfs_period_us": "100000"},
    "memory/m": {
        "memory.limit_in_bytes": f"{GIB}",
        "memory.usage_in_bytes": f"{GIB - 5000}",
        "memory.stat": "cache 9\ntotal_inactive_file 3000\n",
    },
}
SYSTEMS = {
    "empty": {},
    "hyperthreads": cpus_with_hyperthreads() | MEMINFO,
    "v2": cgroup_v2("/a/b", {"/a": V2_GROUP}) | MEMINFO,
    "v2 in a container": cgroup_v2("/docker/x/y", {"/y": V2_GROUP}, mount_root="/docker/x") | MEMINFO,
    "v2 above the namespace": cgroup_v2("/../b", {"": V2_GROUP}) | MEMINFO,
    "v1": cgroup_v1("/a", "/m", V1_GROUPS) | OLD_MEMINFO,
    "damaged": cgroup_v2("no slash", {"": {"cpu.max": "x y z", "memory.max": "", "memory.stat": "inactive_file"}})
    | {"/proc/meminfo": "nonsense\nMemAvailable: many kB\nMemFree: 7 kB\n", "/sys/devices/system/cpu/online": "0-"},
}


@pytest.fixture(scope="module")
def library() -> native.NativeLibrary:
    found = native.native_library()
    if found is None:
        pytest.skip(f"no native library: {native.reason()}")
    return found


def test_the_library_knows_the_features_that_python_knows(library):
    assert library.feature_names() == machine.FEATURE_NAMES[machine.architecture()]


def test_the_cpu_says_what_the_kernel_says(library):
    assert library.cpu_features() == machine.read_cpu_features()


def test_topology_of_this_machine_is_the_same_both_ways(library):
    assert library.topology() == machine.read_topology()


def test_available_memory_of_this_machine_is_the_same_both_ways(library):
    # The two readings are microseconds apart on a machine at work: a few per cent.
    assert library.available_memory_bytes() == pytest.approx(machine.read_available_memory_bytes(), rel=0.1)


def test_instruction_sets_go_from_worst_to_best_and_one_can_be_asked_for(library, monkeypatch):
    names = library.isa_names()
    monkeypatch.delenv("PLAIT_ISA", raising=False)
    assert names[0] == "portable" and library.isa() == names[-1]
    for name in names:
        monkeypatch.setenv("PLAIT_ISA", name)
        assert library.isa() == name
    monkeypatch.setenv("PLAIT_ISA", "sse17")
    with pytest.raises(UsageError, match="PLAIT_ISA=sse17: this CPU runs portable"):
        library.isa()


def test_instruction_sets_are_those_that_the_cpu_has(library):
    has = machine.read_cpu_features().has
    assert ("avx2" in library.isa_names()) == has("avx2", "fma", "f16c")
    for name, features in {"avx512_vnni": ["avx512bw", "avx512_vnni"], "avx512_bf16": ["avx512_bf16"]}.items():
        assert name not in library.isa_names() or has(*features)


def test_the_number_of_threads_is_refused_in_words(library):
    before = library.threads()
    with pytest.raises(UsageError, match="-1 threads"):
        library.set_threads(-1)
    assert library.threads() == before


@pytest.mark.parametrize("name", SYSTEMS)
def test_both_ways_read_the_same_from_any_system(library, tmp_path, name):
    root = write_tree(tmp_path, SYSTEMS[name])
    assert library.topology(root) == machine.read_topology(root)
    if "/proc/meminfo" in SYSTEMS[name]:
        assert library.available_memory_bytes(root) == machine.read_available_memory_bytes(root)
    else:
        assert library.available_memory_bytes(root) is None


def test_without_the_library_the_same_answers_come_from_python(monkeypatch):
    monkeypatch.setenv("PLAIT_NATIVE_LIBRARY", "none")
    assert not native.available()
    assert "PLAIT_NATIVE_LIBRARY=none" in native.reason()
    assert native.topology() == machine.read_topology()
    assert native.usable_cpus() == machine.read_topology().usable_cpus
    assert native.cpu_features() == machine.read_cpu_features()
    assert native.available_memory_bytes() == pytest.approx(machine.read_available_memory_bytes(), rel=0.1)


def test_a_library_that_was_asked_for_must_load(monkeypatch, tmp_path):
    wrong = tmp_path / "libplait_native.so"
    wrong.write_bytes(b"not a library")
    monkeypatch.setenv("PLAIT_NATIVE_LIBRARY", str(wrong))
    with pytest.raises(UsageError, match="PLAIT_NATIVE_LIBRARY.*cannot be loaded"):
        native.native_library()


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_a_library_of_another_interface_version_is_refused_with_the_remedy(tmp_path):
    other = tmp_path / "libplait_native.so"
    source = "int plait_abi_version(void) { return 9999; }"
    command = ["cc", "-shared", "-fPIC", "-x", "c", "-o", str(other), "-"]
    subprocess.run(command, input=source, text=True, check=True)
    with pytest.raises(native.NativeLibraryError, match="interface 9999.*make native"):
        native.NativeLibrary(other)


def test_importing_the_loader_loads_neither_library_nor_torch():
    code = (
        "import sys, plait.kernels.native\n"
        "assert not {'torch', 'numpy'} & set(sys.modules), 'heavy import'\n"
        "print('plait_native' in open('/proc/self/maps').read() if sys.platform == 'linux' else False)"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(machine.__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert (done.returncode, done.stdout.strip()) == (0, "False"), done.stderr
