"""The wheel carries the native library where a compiler works, and is complete without it where none does."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LIBRARY = "plait/kernels/libplait_native.so"


def find_compiler() -> str | None:
    """The C++ compiler that a build takes, if it is one: CXX may say that there is none (/bin/false)."""
    name = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    works = name and shutil.which(name) and subprocess.run([name, "--version"], capture_output=True).returncode == 0
    return name if works else None


COMPILER = find_compiler()

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="names the library as Linux does"),
]


def copy_of_the_sources(folder: Path) -> Path:
    """What a wheel is built from, apart from the tree under test and its cached builds."""
    folder.mkdir(exist_ok=True)
    for name in ("pyproject.toml", "CMakeLists.txt", "LICENSE", "README.md"):
        shutil.copy(ROOT / name, folder / name)
    shutil.copytree(ROOT / "csrc", folder / "csrc")
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    return folder


def build(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Builds the wheel into folder/dist with the build requirements of this environment: no network."""
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--disable-pip-version-check"]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # for cmake and ninja
    return subprocess.run(
        [*command, "--wheel-dir", str(folder / "dist"), str(folder)],
        env={**os.environ, "PATH": path, **environment},
        capture_output=True,
        text=True,
    )


def wheel_of(folder: Path, **environment: str) -> Path:
    done = build(folder, **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = (folder / "dist").glob("*.whl")
    return wheel


def files_of(folder: Path) -> set[str]:
    """Every module and data file of the copied sources, as a wheel names them."""
    found = {str(path.relative_to(folder / "src")) for path in (folder / "src").rglob("*") if path.is_file()}
    assert {"plait/kernels/native.py", "plait/py.typed"} <= found
    return found


def ask_the_wheel(wheel: Path, folder: Path, question: str) -> str:
    """Unpacks the wheel and runs a line of Python against that copy alone."""
    unpacked = folder / "unpacked"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(unpacked)
    # -S: no site-packages, so no editable install can stand in for what the wheel lacks.
    command = [sys.executable, "-S", "-c", f"from plait.kernels import native; {question}"]
    environment = {**os.environ, "PYTHONPATH": str(unpacked), "PLAIT_NATIVE_LIBRARY": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, cwd=folder)
    return done.stdout.strip()


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler here")
def test_with_a_compiler_the_wheel_carries_the_library_for_every_python(tmp_path):
    folder = copy_of_the_sources(tmp_path / "source")
    # The portable kernels alone and not optimised: those of each instruction set take half a minute to compile.
    options = {"CMAKE_ARGS": "-DPLAIT_INSTRUCTION_SETS= -DCMAKE_CXX_FLAGS_DEBUG=", "SKBUILD_CMAKE_BUILD_TYPE": "Debug"}
    wheel = wheel_of(folder, PLAIT_REQUIRE_NATIVE="1", **options)
    assert wheel.name.startswith("plait-") and "-py3-none-linux_" in wheel.name
    assert {LIBRARY} | files_of(folder) <= set(zipfile.ZipFile(wheel).namelist())
    assert ask_the_wheel(wheel, tmp_path, "print(native.available(), native.usable_cpus() > 0)") == "True True"


def test_without_a_compiler_the_wheel_is_pure_python_works_and_holds_every_file_of_the_source(tmp_path):
    folder = copy_of_the_sources(tmp_path / "source")
    wheel = wheel_of(folder, CC="/bin/false", CXX="/bin/false", PLAIT_REQUIRE_NATIVE="0")
    assert wheel.name.endswith("-py3-none-any.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert LIBRARY not in names and files_of(folder) <= names
    assert ask_the_wheel(wheel, tmp_path, "print(native.available(), native.usable_cpus() > 0)") == "False True"


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler here")
def test_whoever_requires_the_library_sees_why_it_did_not_compile(tmp_path):
    folder = copy_of_the_sources(tmp_path / "source")
    (folder / "csrc" / "abi.cpp").write_text("this is not C++\n")
    done = build(folder, PLAIT_REQUIRE_NATIVE="1")
    assert done.returncode != 0
    assert "abi.cpp" in done.stdout + done.stderr
