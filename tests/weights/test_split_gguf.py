"""A model split by the `gguf` package's own writer is the model of the single file, whichever shard is named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

import plait
from plait.cli.main import main
from plait.errors import UsageError, WeightError
from plait.kernels import native
from plait.plan import cache
from plait.text.tokenizer import load_tokenizer
from plait.weights.gguf_reader import GGUFFile
from plait.weights.gguf_source import GGUFSource
from plait.weights.inspect import inspect_checkpoint
from tests.gguf_files import tiny_llama

KEYS = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", *(f"t{n}" for n in range(45))],
    "tokenizer.ggml.scores": [float(-n) for n in range(48)],
    "tokenizer.ggml.token_type": [2, 3, 3, *[1] * 45],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "general.name": "tiny",
}


def split(single: Path, folder: Path, tensors_per_file: int = 5) -> list[Path]:
    """The single file cut by `gguf.GGUFWriter`, which puts the metadata into the first shard."""
    reader = gguf.GGUFReader(single)
    folder.mkdir()
    writer = gguf.GGUFWriter(folder / "m.gguf", "llama", split_max_tensors=tensors_per_file)
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            sub_type = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(key, field.contents(), field.types[0], sub_type=sub_type)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(folder.glob("*.gguf"))


@pytest.fixture
def single(tmp_path: Path) -> Path:
    rng = np.random.default_rng(1)
    quantised = {"blk.0.ffn_up.weight": ("Q8_0", rng.standard_normal((64, 32)))}
    return tiny_llama(tmp_path / "single.gguf", metadata=KEYS, tensors=quantised)


@pytest.fixture
def shards(single: Path, tmp_path: Path) -> list[Path]:
    files = split(single, tmp_path / "split")
    assert [file.name for file in files] == [f"m-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    return files


def names(single: Path, shards: list[Path]) -> dict[str, Any]:
    return {"first": shards[0], "second": shards[1], "last": shards[2], "directory": shards[0].parent}


@pytest.mark.parametrize("named", ["first", "second", "last", "directory"])
def test_whatever_is_named_is_the_model_of_the_single_file(single: Path, shards: list[Path], named: str) -> None:
    path = names(single, shards)[named]
    want, have = plait.load(single), plait.load(path)
    for (name, tensor), (other_name, other) in zip(want.state_dict().items(), have.state_dict().items(), strict=True):
        assert name == other_name and torch.equal(tensor, other)
    if path.is_file():
        assert load_tokenizer(path).encode("t1 t2") == load_tokenizer(single).encode("t1 t2")
    alone, facts = inspect_checkpoint(single), inspect_checkpoint(path)
    assert facts["tensors"].pop("files") == 3 and alone["tensors"].pop("files") == 1
    assert {k: v for k, v in facts.items() if k != "path"} | {"memory": None} == {
        k: v for k, v in alone.items() if k != "path"
    } | {"memory": None}


def test_the_tensors_are_those_of_the_single_file_byte_for_byte(single: Path, shards: list[Path]) -> None:
    want, have = GGUFSource(single), GGUFSource(shards[1])
    assert sorted(want.names()) == sorted(have.names())
    assert all(want.raw(name).tobytes() == have.raw(name).tobytes() for name in want.names())


@pytest.mark.skipif(native.native_library() is None, reason=f"no native library: {native.reason()}")
def test_it_packs_as_the_single_file_does(
    single: Path, shards: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from plait.plan.load import load_native

    monkeypatch.setenv("PLAIT_CACHE", str(tmp_path / "cache"))
    want, have = load_native(single), load_native(shards[2])
    assert not have.cached and load_native(shards[2]).cached
    for name in want.store:
        assert np.array_equal(want.store[name].data, have.store[name].data), name
    assert (have.vocab_size, have.eos_token_ids) == (want.vocab_size, want.eos_token_ids)
    # A change in any file makes the entry old.
    touched = bytearray(shards[0].read_bytes())
    touched[-1] ^= 1
    shards[0].write_bytes(touched)
    assert not load_native(shards[2]).cached


def test_the_cache_key_has_every_file(shards: list[Path]) -> None:
    assert cache.model_files(shards[1]) == shards
    before = cache.key(shards[1], "auto")
    shutil.copy(shards[2], shards[2].with_suffix(".copy"))
    shards[2].with_suffix(".copy").replace(shards[2])
    assert before != cache.key(shards[1], "auto")


@pytest.mark.parametrize("gone", [0, 1, 2])
def test_a_missing_shard_is_named_before_anything_is_read(
    shards: list[Path], gone: int, capsys: pytest.CaptureFixture[str]
) -> None:
    shards[gone].unlink()
    for path in {*shards, shards[0].parent} - {shards[gone]}:
        assert main(["inspect", str(path), "--json"]) == 1
        error = capsys.readouterr().err
        assert f"1 of 3 split files missing beside it: 'm-0000{gone + 1}-of-00003.gguf'" in error
        assert error.count("\n") == 1


def test_two_sets_or_a_set_beside_its_single_file_are_two_models(single: Path, shards: list[Path]) -> None:
    shutil.copy(single, shards[0].parent / "single.gguf")
    with pytest.raises(UsageError, match="2 GGUF models"):
        inspect_checkpoint(shards[0].parent)


def test_a_shard_of_another_model_is_refused(single: Path, shards: list[Path], tmp_path: Path) -> None:
    other = tiny_llama(tmp_path / "other.gguf", seed=1, metadata=KEYS | {"general.name": "other"})
    foreign = split(other, tmp_path / "foreign", tensors_per_file=4)
    shutil.copy(foreign[1], shards[1])
    with pytest.raises(WeightError, match=r"tensor '.*' is also in|split.tensors.count is 11, but"):
        GGUFFile(shards[0])


def test_members_that_repeat_metadata_must_repeat_it_rightly(tmp_path: Path) -> None:
    from tests.gguf_files import write_split

    shared = {"block_count": 1, "tokenizer.ggml.tokens": ["a", "b"]}
    parts = [(shared, {"a": np.ones(4)}), (shared, {"b": np.ones(4)})]
    assert list(GGUFFile(write_split(tmp_path / "m", parts)[1]).tensors) == ["a", "b"]
    parts[1] = (shared | {"tokenizer.ggml.tokens": ["a", "c"]}, parts[1][1])
    with pytest.raises(WeightError, match=r"m-00002.*ggml.tokens is \['a', 'c'\], but \['a', 'b'\] in m-00001"):
        GGUFFile(write_split(tmp_path / "m", parts)[0])


def test_inspect_prints_the_set_as_one_model(shards: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(shards[2]), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tensors"]["count"] == 11
