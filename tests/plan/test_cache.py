"""The cache of packed weights: what counts as the same file, what damage does, and what several writers do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from plait import cachefile
from plait.errors import PlaitError, UsageError
from plait.kernels import native
from plait.model.families import parse_config
from plait.plan import cache
from plait.plan.load import load_native
from plait.plan.recorder import Recorder, describe, make_config, record_config
from plait.weights.checkpoint import open_checkpoint
from tests.configs import CONFIGS
from tests.gguf_files import tiny_llama, write_split
from tests.tiny import tiny_model_dir

needs_library = pytest.mark.skipif(native.native_library() is None, reason=f"no native library: {native.reason()}")
FACTS = {"a": [1, 2.5, None], "b": {"c": "text"}}
KEY = {"of": "a test", "files": [["x", 1, 2, 3, "ff"]]}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache, and a process that has said nothing yet."""
    monkeypatch.setenv("PLAIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cachefile, "_said", set())
    yield tmp_path / "cache"


def write(name: str = "e.plait", seed: int = 0, key: object = KEY, nbytes: int = 10_000) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    arrays = {f"array {i}": rng.integers(0, 256, n, dtype=np.uint8) for i, n in enumerate((nbytes, 0, 64, 4096))}
    with cachefile.Writer(name, nbytes) as writer:
        for label, array in arrays.items():
            writer.add(label, array)
        writer.commit(key, FACTS)  # type: ignore[arg-type]
    return arrays


def test_an_entry_gives_back_what_was_written_as_pages_of_its_file(folder: Path) -> None:
    arrays = write()
    entry = cachefile.read("e.plait", KEY)
    assert entry is not None and entry.facts == FACTS
    assert list(entry.arrays) == list(arrays)
    for name, array in arrays.items():
        np.testing.assert_array_equal(entry.arrays[name], array)
        assert entry.arrays[name].ctypes.data % 64 == 0 and not entry.arrays[name].flags.writeable
    assert [path.name for path in folder.iterdir()] == ["e.plait"]
    if sys.platform == "linux":
        assert str(folder / "e.plait") in Path("/proc/self/maps").read_text()


def test_another_key_or_name_is_no_hit_and_no_complaint(caplog: pytest.LogCaptureFixture) -> None:
    write()
    assert cachefile.read("e.plait", KEY | {"of": "another"}) is None
    assert cachefile.read("f.plait", KEY) is None
    assert caplog.text == ""


def test_any_changed_byte_and_any_lost_tail_is_noticed(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    write()
    path = folder / "e.plait"
    whole = path.read_bytes()
    rng = np.random.default_rng(1)
    used = cachefile._START.size
    places = {0, 20, used - 1, 4096, len(whole) - 1, *rng.integers(4096, len(whole), 150).tolist()}
    for place in sorted(places):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << int(rng.integers(8))
        path.write_bytes(damaged)
        assert cachefile.read("e.plait", KEY) is None, place
    for length in (0, 1, used, 4095, 4096, 9000, len(whole) - 1):
        path.write_bytes(whole[:length])
        assert cachefile.read("e.plait", KEY) is None, length
    path.write_bytes(whole + b"\0")
    assert cachefile.read("e.plait", KEY) is None
    assert len(caplog.messages) == len(set(caplog.messages)) <= 4  # each reason is said once
    assert all("is ignored and written anew" in line for line in caplog.messages)
    path.write_bytes(whole)
    assert cachefile.read("e.plait", KEY) is not None


def test_pages_that_changed_places_are_noticed(folder: Path) -> None:
    write(nbytes=3 * 4096)
    path = folder / "e.plait"
    data = path.read_bytes()
    path.write_bytes(data[:4096] + data[8192:12288] + data[4096:8192] + data[12288:])
    assert cachefile.read("e.plait", KEY) is None


def test_what_is_not_committed_leaves_nothing(folder: Path) -> None:
    write()
    with pytest.raises(RuntimeError), cachefile.Writer("e.plait", 100) as writer:
        writer.add("x", np.zeros(100, np.uint8))
        raise RuntimeError
    assert [path.name for path in folder.iterdir()] == ["e.plait"]
    assert cachefile.read("e.plait", KEY) is not None


_KILLED = """
import sys, time
import numpy as np
from plait import cachefile
writer = cachefile.Writer("e.plait", 100)
writer.add("x", np.zeros(100_000, np.uint8))
print("written", flush=True)
time.sleep(60)
"""


def test_a_kill_during_a_write_leaves_the_old_entry_and_the_next_writer_cleans_up(folder: Path) -> None:
    write()
    child = subprocess.Popen([sys.executable, "-c", _KILLED], stdout=subprocess.PIPE, text=True, env=_environment())
    assert child.stdout is not None and child.stdout.readline() == "written\n"
    (half,) = (path for path in folder.iterdir() if path.name != "e.plait")
    os.utime(half, (0, 0))
    write("other.plait")  # while it lives, its half is left alone
    assert len(list(folder.iterdir())) == 3
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert cachefile.read("e.plait", KEY) is not None
    write("other.plait")
    assert sorted(path.name for path in folder.iterdir()) == ["e.plait", "other.plait"]


_WRITER = """
import sys
sys.path.insert(0, sys.argv[1])
from tests.plan.test_cache import write
for seed in range(int(sys.argv[2]), int(sys.argv[2]) + 15):
    write(seed=seed, nbytes=300_000)
"""


@pytest.mark.slow
def test_two_writers_and_a_reader_at_once_see_whole_entries_only(folder: Path) -> None:
    root = str(Path(__file__).parents[2])
    command = [sys.executable, "-c", _WRITER, root]
    children = [subprocess.Popen([*command, str(100 * n)], env=_environment()) for n in (1, 2)]
    seen = set()
    while any(child.poll() is None for child in children):
        entry = cachefile.read("e.plait", KEY)
        if entry is not None:
            seen.add(int(entry.arrays["array 2"][0]))
        time.sleep(0.002)
    assert [child.wait() for child in children] == [0, 0]
    assert len(seen) > 1 and not cachefile._said
    assert [path.name for path in folder.iterdir()] == ["e.plait"]


def _environment() -> dict[str, str]:
    root = Path(__file__).parents[2]
    return os.environ | {"PYTHONPATH": f"{root / 'src'}{os.pathsep}{root}"}


def test_together_entries_stay_below_the_limit_and_the_least_recently_used_go_first(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        write(f"{number}.plait")
    for number, age in enumerate((300, 200, 100)):
        os.utime(folder / f"{number}.plait", (time.time() - age,) * 2)
    assert cachefile.read("0.plait", KEY) is not None  # used: now the youngest
    size = (folder / "0.plait").stat().st_size
    monkeypatch.setattr(cachefile, "LIMIT_BYTES", 3 * size)
    write("3.plait")
    assert sorted(path.name for path in folder.iterdir()) == ["0.plait", "2.plait", "3.plait"]
    monkeypatch.setattr(cachefile, "LIMIT_BYTES", 5_000)
    with pytest.raises(OSError, match="more than the cache may have"):
        write("4.plait")


def test_a_full_disk_is_an_error_before_anything_is_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cachefile, "FREE_BYTES", 1 << 60)
    with pytest.raises(OSError, match="the disk has no room"):
        write()
    assert not folder.exists()


def test_where_the_cache_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cachefile.directory() == tmp_path / "cache"
    monkeypatch.setenv("PLAIT_CACHE", "none")
    assert cachefile.directory() is None and cachefile.read("e.plait", KEY) is None
    monkeypatch.delenv("PLAIT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cachefile.directory() == tmp_path / "xdg" / "plait"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # the standard says: ignore it
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cachefile.directory() == tmp_path / ".cache" / "plait"


def test_every_change_of_a_models_files_is_another_key(tmp_path: Path) -> None:
    path = tiny_llama(tmp_path / "m.gguf")
    key = cache.key(path, "auto")
    assert key == cache.key(path, "auto") != cache.key(path, "bf16")
    status = path.stat()
    data = bytearray(path.read_bytes())
    data[30] ^= 1  # in the header, with size and times kept
    path.write_bytes(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert cache.key(path, "auto") != key
    os.utime(path, ns=(0, 0))
    changed = cache.key(path, "auto")
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(data)
    os.utime(copy, ns=(0, 0))
    copy.replace(path)
    assert cache.key(path, "auto") != changed  # another inode
    assert cache.key(tmp_path / "nothing.gguf", "auto") is None


def test_an_edit_in_the_middle_or_at_the_end_of_a_large_file_is_another_identity(tmp_path: Path) -> None:
    path = tmp_path / "large"
    data = bytearray(1 << 20)
    path.write_bytes(data)
    size = len(data)
    before = cachefile.identity([path])[0]
    assert all(0 <= start <= start + length <= size for start, length in cachefile._sampled(size))
    for place in (size - 1, cachefile._sampled(size)[3][0]):
        data[place] ^= 1
        path.write_bytes(data)
        after = cachefile.identity([path])[0]
        assert after[-1] != before[-1]
        before = after
    os.utime(path, ns=(0, 0))
    early = cachefile.identity([path])[0]
    time.sleep(0.02)
    os.utime(path, ns=(0, 0))  # whoever sets times back changes the inode
    assert cachefile.identity([path])[0] != early


def test_the_key_changes_with_the_code_that_makes_entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for part in cache._CODE:
        (tmp_path / "plait" / part).mkdir(parents=True, exist_ok=True)
    source = tmp_path / "plait" / "ops" / "reference.py"
    source.write_text("a = 1\n")
    monkeypatch.setattr(cache, "__file__", str(tmp_path / "plait" / "plan" / "cache.py"))
    digest = cache.code_digest.__wrapped__
    before = digest()
    assert before == digest() != ""
    source.write_text("a = 1.0\n")
    assert digest() != before
    assert cache.key(tiny_llama(tmp_path / "m.gguf"), "auto")["code"] == cache.code_digest()  # type: ignore[index]


def test_a_home_of_nobody_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLAIT_CACHE", "~nobody-of-this-name/c")
    with pytest.raises(UsageError, match="PLAIT_CACHE=~nobody-of-this-name/c: there is no such user"):
        cachefile.directory()


def test_a_name_that_is_not_utf8_has_an_entry(tmp_path: Path) -> None:
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xe9.gguf"))
    name = cachefile.entry_name("k", path)
    assert name.isascii() and name != cachefile.entry_name("k", path.with_name("e.gguf"))


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="no owners")
def test_what_others_may_write_is_not_trusted(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    write()
    entry = folder / "e.plait"
    assert folder.stat().st_mode & 0o777 == 0o700 and entry.stat().st_mode & 0o777 == 0o600
    for path in (entry, folder):
        mode = path.stat().st_mode
        for bit in (0o020, 0o002):
            path.chmod(mode | bit)
            assert cachefile.read("e.plait", KEY) is None
        if path == folder:
            with pytest.raises(OSError, match="other users may write it"):
                write("f.plait")
        path.chmod(mode)
        assert cachefile.read("e.plait", KEY) is not None
    assert len(caplog.messages) == 2 and all("is not used as a cache" in line for line in caplog.messages)


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="no owners")
def test_what_another_user_owns_is_not_trusted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write()
    owner = folder.stat().st_uid
    if owner == 0:
        os.chown(folder, 12345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    assert cachefile.read("e.plait", KEY) is None


def test_every_file_of_a_model_counts(tmp_path: Path) -> None:
    directory = tiny_model_dir(tmp_path)
    names = {path.name for path in cache.model_files(directory)}
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= names
    assert set(cache.model_files(directory / "model.safetensors")) == set(cache.model_files(directory))
    parts = write_split(tmp_path / "s", [({}, {}), ({}, {})])
    assert cache.model_files(parts[0]) == cache.model_files(parts[1]) == parts


# Models


@needs_library
def test_the_second_load_maps_what_the_first_one_packed(folder: Path, tmp_path: Path) -> None:
    path = tiny_llama(tmp_path / "m.gguf", metadata={"general.sampling.temp": 0.25})
    first, second = load_native(path), load_native(path)
    plain = load_native(path, use_cache=False)
    assert (first.cached, second.cached, plain.cached) == (False, True, False)
    assert len(list(folder.iterdir())) == 1
    for other in (first, second):
        assert other.recording == plain.recording and other.config == plain.config
        assert other.defaults == plain.defaults == {"temperature": 0.25}
        assert list(other.store) == list(plain.store) and other.store.report.formats == plain.store.report.formats
        for name in plain.store:
            assert other.store[name].layout == plain.store[name].layout
            np.testing.assert_array_equal(other.store[name].data, plain.store[name].data)


@needs_library
def test_a_model_that_changed_is_packed_anew_in_place_of_the_old(folder: Path, tmp_path: Path) -> None:
    path = tiny_llama(tmp_path / "m.gguf", seed=1)
    old = load_native(path).store.expand("model.norm.weight")
    tiny_llama(path, seed=2)
    new = load_native(path)
    assert not new.cached and not np.array_equal(new.store.expand("model.norm.weight"), old)
    assert load_native(path, dtype="bf16").cached is False and load_native(path, dtype="bf16").cached
    assert load_native(path).cached and len(list(folder.iterdir())) == 2  # one per dtype


@needs_library
def test_a_damaged_entry_is_told_once_and_replaced(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tiny_llama(tmp_path / "m.gguf")
    load_native(path)
    (entry,) = folder.iterdir()
    data = bytearray(entry.read_bytes())
    data[len(data) // 2] ^= 255
    entry.write_bytes(data)
    assert not load_native(path).cached
    assert [line for line in caplog.messages if "ignored and written anew" in line] == [
        f"{entry} is ignored and written anew: it is damaged"
    ]
    assert load_native(path).cached


@needs_library
@pytest.mark.parametrize("change", ["report", "recording", "layout"])
def test_an_entry_with_facts_of_another_version_is_written_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    path = tiny_llama(tmp_path / "m.gguf")
    commit = cachefile.Writer.commit

    def other(self: cachefile.Writer, key: dict[str, object], facts: dict[str, object]) -> None:
        changed: dict[str, object] = {
            "report": facts["report"] | {"renamed": 1},  # type: ignore[operator]
            "recording": "{}",
            "layout": [[name, shape, "Q3_X", 1] for name, shape, _, _ in facts["weights"]],  # type: ignore[attr-defined]
        }
        commit(self, key, facts | {"weights" if change == "layout" else change: changed[change]})

    monkeypatch.setattr(cachefile.Writer, "commit", other)
    assert not load_native(path).cached
    monkeypatch.undo()
    monkeypatch.setenv("PLAIT_CACHE", str(tmp_path / "cache"))
    assert not load_native(path).cached
    assert "is ignored and written anew: it holds something unexpected" in caplog.text
    assert load_native(path).cached


@needs_library
def test_a_given_checkpoint_with_another_configuration_has_its_own_entry(tmp_path: Path) -> None:
    path = tiny_llama(tmp_path / "m.gguf")
    plain = load_native(path)
    changed = open_checkpoint(path)
    assert load_native(changed).cached
    raw = dict(changed.config.raw) | {"rope_theta": 5e4}
    changed.config = make_config(describe(changed.config) | {"raw": raw})
    other = load_native(changed)
    assert not other.cached and other.recording != plain.recording
    assert load_native(changed).cached and load_native(path).recording == plain.recording
    changed.with_config(logit_soft_cap=5.0)  # its description does not tell that
    for _ in range(2):
        assert not load_native(changed).cached
    assert load_native(path).cached


@needs_library
@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_read_only_cache_is_done_without_and_said_once(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder.mkdir(mode=0o500)
    path = tiny_llama(tmp_path / "m.gguf")
    assert not load_native(path).cached and not load_native(path).cached
    assert len([line for line in caplog.messages if "nothing is cached" in line]) == 1


@needs_library
def test_a_cache_that_is_a_file_is_done_without_and_said_once(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder.write_text("no directory")
    path = tiny_llama(tmp_path / "m.gguf")
    first, second = load_native(path), load_native(path)
    assert not first.cached and not second.cached and len(second.store) == len(first.store) > 0
    assert len([line for line in caplog.messages if "nothing is cached" in line]) == 1


@needs_library
def test_a_disk_that_fills_up_while_packing_costs_the_cache_only(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    add = cachefile.Writer.add

    def full(self: cachefile.Writer, name: str, array: np.ndarray) -> None:
        if "down_proj" in name:
            raise OSError(28, "No space left on device")
        add(self, name, array)

    monkeypatch.setattr(cachefile.Writer, "add", full)
    model = load_native(tiny_llama(tmp_path / "m.gguf"))
    assert len(model.store) == 11 and list(folder.iterdir()) == []
    assert "No space left on device" in caplog.text


@needs_library
def test_what_a_checkpoint_says_against_itself_is_said_from_the_cache_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    head = {"lm_head.weight": 1.0}
    directory = tiny_model_dir(tmp_path, "qwen2", tie_word_embeddings=True)
    from safetensors.torch import load_file, save_file

    tensors = load_file(directory / "model.safetensors")
    tensors |= {name: tensors["model.embed_tokens.weight"] + by for name, by in head.items()}
    save_file(tensors, directory / "model.safetensors")
    for cached in (False, True):
        caplog.clear()
        model = load_native(directory)
        assert model.cached is cached and "the head is ignored" in caplog.text
        assert model.report.skipped == ["lm_head.weight"]


@needs_library
def test_strict_is_judged_on_a_hit_too(tmp_path: Path) -> None:
    directory = tiny_model_dir(tmp_path, "llama", some_unknown_key=3)
    load_native(directory)
    assert load_native(directory).cached
    with pytest.raises(PlaitError, match="some_unknown_key"):
        load_native(directory, strict=True)


@pytest.mark.parametrize(
    "family", ["llama", "mistral", "qwen2", "qwen3", "gemma3_text", "gpt_neox", "gpt_oss", "phimoe", "apertus"]
)
def test_a_configuration_survives_as_json(family: str) -> None:
    config = parse_config(CONFIGS[family])
    again = make_config(describe(config))
    assert again == config and again.raw == config.raw


def test_divisors_of_the_rotary_table_survive_too(tmp_path: Path) -> None:
    divisors = np.linspace(1, 8, 4, dtype=np.float32)
    checkpoint = open_checkpoint(tiny_llama(tmp_path / "m.gguf", tensors={"rope_freqs.weight": divisors}))
    assert checkpoint.config.rotary[0].divisors is not None
    assert make_config(describe(checkpoint.config)) == checkpoint.config


def test_the_stand_in_for_torch_refuses_what_it_does_not_know() -> None:
    from plait.plan.shapes_only import Mentioned, Parameter, Tensor

    for odd in (Tensor(2, 3), Mentioned("torch.sigmoid")):
        for use in (bool, list, len, lambda x: x[0], lambda x: 1 in x):
            with pytest.raises(TypeError):
                use(odd)
    with pytest.raises(TypeError):
        Mentioned("torch.sigmoid")(Tensor(2))
    code = (
        "import sys; from plait.plan import shapes_only; shapes_only.install(); import torch\n"
        "for name in ('full', 'is_grad_enabled', 'cuda', 'float8_e4m3fn', 'finfo'):\n"
        "    assert not hasattr(torch, name), name\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=_environment())
    assert Parameter(Tensor(2, 3)).shape == (2, 3)


@pytest.mark.parametrize("code", ["raise AttributeError('torch.full')", "import time; time.sleep(60)"])
def test_a_process_that_cannot_record_is_done_without_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: str
) -> None:
    config = open_checkpoint(tiny_llama(tmp_path / "m.gguf")).config
    popen = subprocess.Popen
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setattr(subprocess, "Popen", lambda _, **more: popen([sys.executable, "-c", code], **more))
    monkeypatch.setattr("plait.plan.recorder.record_config", lambda config: "recorded here")
    monkeypatch.setattr("plait.plan.recorder.TIMEOUT_S", 60 if code.startswith("raise") else 0.05)
    with caplog.at_level("DEBUG", "plait.load"), Recorder(config) as recorder:
        assert recorder.result() == "recorded here"
        assert recorder._process is not None and recorder._process.returncode
    (line,) = caplog.messages
    assert "recording without torch failed" in line
    assert ("torch.full" if code.startswith("raise") else "it took longer") in line


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", ["llama", "mistral", "qwen2", "qwen3", "gemma3_text", "gpt_neox", "gpt_oss", "phimoe", "apertus"]
)
def test_another_process_records_what_this_one_would(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = parse_config(CONFIGS[family])
    expected = record_config(config)
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setattr("plait.plan.recorder.record_config", lambda config: pytest.fail("recorded here"))
    with Recorder(config) as recorder:
        assert recorder.result() == expected
