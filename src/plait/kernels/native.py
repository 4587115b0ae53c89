"""The native library, where there is one, and what it or the standard library says of this machine.

The library is part of the installed package unless its build failed. `PLAIT_NATIVE_LIBRARY` overrides the
search: the path of another build, or `none` to do without. Nothing is loaded at import, and no torch.
"""

from __future__ import annotations

import ctypes
import importlib
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from plait.errors import PlaitError, UsageError
from plait.kernels import abi, machine
from plait.kernels.abi import ABI_VERSION
from plait.kernels.machine import CpuFeatures, Topology

LIBRARY_NAMES = ("libplait_native.so", "libplait_native.dylib", "plait_native.dll")


class NativeLibraryError(PlaitError):
    """A native library that cannot be used: not loadable, or built for another version of plait."""


class NativeLibrary:
    """The functions of csrc/plait_native.h with Python types. `root` as in plait.kernels.machine."""

    def __init__(self, path: Path) -> None:
        """Raises NativeLibraryError where the file is no library of this version."""
        self.path = path
        try:
            library = ctypes.CDLL(str(path))
            library.plait_abi_version.restype = ctypes.c_int32
            version = library.plait_abi_version()
        except (OSError, AttributeError) as error:
            raise NativeLibraryError(f"native library {path} cannot be loaded: {error}") from error
        if version != ABI_VERSION:
            raise NativeLibraryError(
                f"native library {path} speaks interface {version}, this plait speaks {ABI_VERSION}: "
                "build it anew with `make native` or reinstall plait"
            )
        try:
            abi.declare(library)
        except AttributeError as error:
            raise NativeLibraryError(f"native library {path} lacks a function: {error}") from error
        self.functions = library

    def feature_names(self) -> list[str]:
        """Every feature that the library knows of on this architecture, in bit order."""
        names: list[str] = []
        while (name := self.functions.plait_cpu_feature_name(len(names))) is not None:
            names.append(name.decode())
        return names

    def cpu_features(self) -> CpuFeatures:
        bits = self.functions.plait_cpu_features()
        flags = frozenset(name for bit, name in enumerate(self.feature_names()) if bits >> bit & 1)
        return CpuFeatures(machine.architecture(), flags)

    def topology(self, root: str = "") -> Topology | None:
        """None where the system has no files to read it from."""
        struct = abi.Topology()
        if self.functions.plait_topology(os.fsencode(root), ctypes.byref(struct)) != 0:
            return None
        values = {name: getattr(struct, name) for name, *_ in abi.Topology._fields_ if name != "reserved"}
        return Topology(**values | {"cpu_quota": struct.cpu_quota or None})

    def last_error(self) -> str:
        """What went wrong in this thread's last call that failed."""
        return str(self.functions.plait_last_error().decode())

    def isa(self) -> str:
        """The instruction set in use: the best that this CPU runs, or PLAIT_ISA.

        Raises UsageError where PLAIT_ISA names what is unknown or what this CPU cannot run.
        """
        name = self.functions.plait_isa()
        if name is None:
            wanted = os.environ.get("PLAIT_ISA", "")
            raise UsageError(f"PLAIT_ISA={wanted}: this CPU runs {', '.join(self.isa_names())}")
        return str(name.decode())

    def isa_names(self) -> list[str]:
        """The instruction sets that this build has and this CPU runs, worst first."""
        names: list[str] = []
        while (name := self.functions.plait_isa_name(len(names))) is not None:
            names.append(name.decode())
        return names

    def threads(self) -> int:
        """Threads that kernels run on, the caller's among them."""
        return int(self.functions.plait_threads())

    def set_threads(self, threads: int) -> None:
        """Threads that kernels run on from now on, 0 = all that are worth having. Raises UsageError beyond 256."""
        if self.functions.plait_set_threads(threads) != 0:
            raise UsageError(self.last_error())

    def available_memory_bytes(self, root: str = "") -> int | None:
        """None where the system has no files to read it from."""
        available_bytes = self.functions.plait_available_memory_bytes(os.fsencode(root))
        return None if available_bytes < 0 else available_bytes


@dataclass(frozen=True)
class _Outcome:
    loaded: NativeLibrary | None
    reason: str


def available() -> bool:
    """Whether the native library is in use; `reason()` says why not."""
    return native_library() is not None


def native_library() -> NativeLibrary | None:
    """The native library, loaded once per process; None where plait runs without.

    Raises UsageError where PLAIT_NATIVE_LIBRARY names a file that is no library of this version.
    """
    return _outcome(os.environ.get("PLAIT_NATIVE_LIBRARY", "")).loaded


def reason() -> str:
    """Where the native library comes from, or why there is none."""
    return _outcome(os.environ.get("PLAIT_NATIVE_LIBRARY", "")).reason


def find_library() -> Path | None:
    """The library's file in this package, or beside it where an editable install puts it."""
    package = importlib.import_module("plait.kernels")
    beside = (Path(directory, name) for directory in package.__path__ for name in LIBRARY_NAMES)
    found = next((path for path in beside if path.is_file()), None)
    return _installed_library() if found is None else found


def _installed_library() -> Path | None:
    from importlib import metadata  # it takes longer to import than all of the above

    try:
        installed = metadata.files("plait") or []
    except metadata.PackageNotFoundError:
        return None
    candidates = (Path(str(file.locate())) for file in installed if file.name in LIBRARY_NAMES)
    return next((path for path in candidates if path.is_file()), None)


def cpu_features() -> CpuFeatures:
    """Instructions that may be used on this CPU."""
    native = native_library()
    return machine.read_cpu_features() if native is None else native.cpu_features()


def topology() -> Topology:
    """CPUs, cores, caches and NUMA nodes that this process may use now."""
    native = native_library()
    return (native.topology() if native is not None else None) or machine.read_topology()


def usable_cpus() -> int:
    """Threads worth starting: the CPUs of the affinity mask, lowered to the control group's quota; at least 1."""
    return topology().usable_cpus


def available_memory_bytes() -> int:
    """Bytes that can be taken now without swapping, within the machine and every control group."""
    native = native_library()
    available_bytes = native.available_memory_bytes() if native is not None else None
    return machine.read_available_memory_bytes() if available_bytes is None else available_bytes


@cache
def _outcome(setting: str) -> _Outcome:
    if setting == "none":
        return _Outcome(None, "switched off by PLAIT_NATIVE_LIBRARY=none")
    if setting:
        try:
            return _Outcome(NativeLibrary(Path(setting)), f"loaded from {setting} (PLAIT_NATIVE_LIBRARY)")
        except NativeLibraryError as error:
            raise UsageError(f"PLAIT_NATIVE_LIBRARY: {error}") from error
    path = find_library()
    if path is None:
        return _Outcome(None, "not built: install plait on a machine with a C++ compiler to have it")
    try:
        return _Outcome(NativeLibrary(path), f"loaded from {path}")
    except NativeLibraryError as error:
        return _Outcome(None, str(error))
