"""A convert that ends early, by a signal or for want of space, leaves nothing under the final name, and what was there
stays."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from plait.errors import UsageError, WeightError
from plait.weights.convert import convert
from tests.weights.converting import model_directory

# Sleeps before the third tensor, when half a file has been written.
_SLOW = (
    "import signal, sys, time\n"
    "import plait.weights.gguf_writer.model as m, plait.weights.hf_writer as h, plait.weights.convert as c\n"
    # A shell starts what runs in its background with this signal ignored, and the tests' children inherit that.
    "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    "count, plain = 0, m.encoded\n"
    "def slow(*args):\n"
    "    global count\n"
    "    count += 1\n"
    "    if count == 3: print('half', flush=True); time.sleep(600)\n"
    "    return plain(*args)\n"
    "m.encoded = h.encoded = slow\n"
    "c.convert(sys.argv[1], sys.argv[2], force=True)\n"
)


def half_written(source: Path, target: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", _SLOW, source, target], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "half\n"
    return process


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "number", "there"),
    [("x.gguf", signal.SIGKILL, False), ("x", signal.SIGKILL, True), ("x.gguf", signal.SIGINT, True)],
)
def test_a_killed_convert_leaves_the_target_as_it_was(
    name: str, number: signal.Signals, there: bool, tmp_path: Path
) -> None:
    directory = model_directory(tmp_path, "llama")
    target = tmp_path / "out" / name
    target.parent.mkdir()
    if there:
        convert(directory, target)
    before = [(p, p.stat().st_mtime_ns) for p in sorted(target.rglob("*"))]
    process = half_written(directory, target)
    process.send_signal(number)
    process.wait(60)
    assert process.returncode != 0
    assert target.exists() == there
    assert [(p, p.stat().st_mtime_ns) for p in sorted(target.rglob("*"))] == before
    left = [p for p in target.parent.iterdir() if p != target]
    # What a kill leaves is hidden and says what it is; an interrupt clears up.
    assert all(p.name.startswith(f".{name}-") and p.name.endswith(".partial") for p in left)
    assert bool(left) == (number == signal.SIGKILL)
    convert(directory, target, force=True)  # and nothing is in the way


@pytest.mark.parametrize("name", ["x.gguf", "x"])
def test_a_full_disk_is_one_line_and_leaves_nothing(name: str, tmp_path: Path) -> None:
    """A limit on the size of files stands for the disk: writing fails in the middle."""
    directory = model_directory(tmp_path, "llama")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = sorted(tmp_path.iterdir())
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(WeightError, match="cannot be written: .*nothing was left under that name"):
            convert(directory, tmp_path / name)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert sorted(tmp_path.iterdir()) == before
    convert(directory, tmp_path / name)


def test_what_could_not_be_replaced_is_said_to_be_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, target = model_directory(tmp_path, "llama"), tmp_path / "x.gguf"
    target.write_text("mine")

    def refuse(source: Path, name: Path) -> None:
        raise PermissionError(13, "Permission denied", str(source), None, str(name))

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(WeightError, match="x.gguf cannot be written: Permission denied; what was there is as it was"):
        convert(directory, target, force=True)
    assert target.read_text() == "mine"


def test_a_file_of_the_source_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = model_directory(tmp_path, "llama")
    (directory / "merges.txt").symlink_to(tmp_path)  # a directory is no file
    with pytest.raises(WeightError, match=r"cannot be written: Is a directory \(.*merges.txt\); nothing was left"):
        convert(directory, tmp_path / "x")


def test_what_the_disk_has_no_room_for_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = model_directory(tmp_path, "llama")
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000})())
    with pytest.raises(WeightError, match=r"needs [\d,]+ bytes, and the disk has 1,000 free"):
        convert(directory, tmp_path / "x.gguf")
    assert not (tmp_path / "x.gguf").exists()


def test_a_source_that_is_damaged_leaves_nothing(tmp_path: Path) -> None:
    directory = model_directory(tmp_path, "llama")
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(WeightError, match="truncated"):
        convert(directory, tmp_path / "x.gguf")
    assert [p.name for p in tmp_path.iterdir()] == [directory.name]


def test_the_file_has_the_rights_of_any_new_file(tmp_path: Path) -> None:
    directory = model_directory(tmp_path, "llama")
    mask = os.umask(0o027)
    try:
        convert(directory, tmp_path / "x.gguf")
        convert(directory, tmp_path / "x")
    finally:
        os.umask(mask)
    assert (tmp_path / "x.gguf").stat().st_mode & 0o777 == 0o640
    assert (tmp_path / "x").stat().st_mode & 0o777 == 0o750
    assert {file.stat().st_mode & 0o777 for file in (tmp_path / "x").iterdir()} == {0o640}


@pytest.mark.parametrize("name", ["x.gguf", "x"])
def test_the_source_is_no_target_even_by_force_and_through_a_link(name: str, tmp_path: Path) -> None:
    source = tmp_path / name
    convert(model_directory(tmp_path, "llama"), source)
    link = tmp_path / f"link-{name}"
    link.symlink_to(source)
    kept = {file.name: file.read_bytes() for file in ([source] if source.is_file() else source.iterdir())}
    for target in (source, link):
        with pytest.raises(UsageError, match="is the model that is read: write to another name"):
            convert(source, target, force=True)
    assert {file.name: file.read_bytes() for file in ([source] if source.is_file() else source.iterdir())} == kept


@pytest.mark.parametrize("name", ["x.gguf", "x"])
def test_what_appears_meanwhile_is_not_replaced(name: str, tmp_path: Path) -> None:
    """Another convert to the same target that was quicker, for one."""
    directory, target = model_directory(tmp_path, "llama"), tmp_path / name
    theirs = target if name.endswith(".gguf") else target / "config.json"

    @contextmanager
    def meanwhile(total: int) -> Iterator[Callable[[int], None]]:
        yield lambda done: None
        theirs.parent.mkdir(exist_ok=True)
        theirs.write_text("theirs")

    with pytest.raises(UsageError, match="exists already"):
        convert(directory, target, progress=meanwhile)
    assert theirs.read_text() == "theirs" and sorted(p.name for p in tmp_path.iterdir()) == sorted(
        [directory.name, name]
    )
    convert(directory, target, progress=meanwhile, force=True)
    assert theirs.stat().st_size > 100


def test_a_link_is_followed_where_it_leads_somewhere(tmp_path: Path) -> None:
    directory, link = model_directory(tmp_path, "llama"), tmp_path / "link.gguf"
    for leads in (link, tmp_path / "no/where.gguf"):
        link.symlink_to(leads)
        with pytest.raises(UsageError, match=r"link\.gguf is a link that leads nowhere"):
            convert(directory, link)
        link.unlink()
    link.symlink_to(tmp_path / "there.gguf")
    convert(directory, link)
    assert link.is_symlink() and (tmp_path / "there.gguf").is_file()


def test_of_two_that_replace_a_directory_at_once_neither_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, target = model_directory(tmp_path, "llama"), tmp_path / "x"
    convert(directory, target)
    (target / "notes.txt").write_text("mine")
    rename = os.rename

    def slow(source: Path, to: Path) -> None:
        if Path(to) == target:  # the other one's directory gets the name first
            target.mkdir()
            (target / "config.json").write_text("theirs")
        rename(source, to)

    monkeypatch.setattr("os.rename", slow)
    with pytest.raises(WeightError, match="cannot be written: Directory not empty"):
        convert(directory, target, force=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([directory.name, "x"])
    assert (target / "config.json").read_text() == "theirs" and (target / "notes.txt").read_text() == "mine"
