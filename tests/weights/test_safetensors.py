"""safetensors files and directories: what is read, and the one line that each kind of damage gets."""

from __future__ import annotations

import builtins
import io
import json
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from plait.errors import PlaitError, UsageError, WeightError
from plait.weights.safetensors_header import DTYPE_BITS, read_directory, read_header
from plait.weights.safetensors_source import SafetensorsSource
from plait.weights.sources import open_source

A, B, C = torch.arange(6.0).reshape(2, 3), torch.arange(4.0) + 10, torch.arange(3.0) - 7


def write_raw(path: Path, header: Any, data: bytes = b"", length: int | None = None, pad: int = 0) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    text += b" " * pad
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def write_shards(directory: Path, shards: dict[str, dict[str, torch.Tensor]], weight_map: Any = None) -> Path:
    for name, tensors in shards.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, directory / name)
    if weight_map is None:
        weight_map = {tensor: name for name, tensors in shards.items() for tensor in tensors}
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


def refusal(path: Path) -> str:
    with pytest.raises(PlaitError) as caught:
        SafetensorsSource(path)
    assert isinstance(caught.value, WeightError)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 1000
    return message


THREE = {
    "model-00001-of-00003.safetensors": {"a": A},
    "model-00002-of-00003.safetensors": {"b": B},
    "model-00003-of-00003.safetensors": {"c": C},
}


def test_a_file_reads_as_the_safetensors_package_reads_it(tmp_path: Path) -> None:
    dtypes = [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.uint8]
    tensors = {str(dtype): (torch.randn(3, 5) * 9).to(dtype) for dtype in dtypes}
    tensors |= {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 4), "flag": torch.tensor([True, False])}
    path = tmp_path / "model.safetensors"
    save_file(tensors, path, {"format": "pt"})
    source = open_source(path)
    expected = load_file(path)
    assert set(source.names()) == expected.keys()
    for name, value in expected.items():
        read = source.read(name)
        assert read.dtype == value.dtype and torch.equal(read, value)
        assert source.info(name).shape == tuple(value.shape)
        assert source.info(name).nbytes == value.nbytes
    assert source.read("torch.bfloat16", torch.float32).dtype == torch.float32
    assert read_header(path)[1] == {"format": "pt"}
    source.close()
    with pytest.raises(WeightError, match="closed"):
        source.read("scalar")


@pytest.mark.parametrize("pad", range(9))
def test_data_is_read_exactly_where_the_header_ends(tmp_path: Path, pad: int) -> None:
    header = {
        "odd": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
        "half": {"dtype": "BF16", "shape": [2, 2], "data_offsets": [3, 11]},
        "single": {"dtype": "F32", "shape": [2], "data_offsets": [11, 19]},
    }
    half, single = torch.tensor([[1.5, -2.0], [3.0, 0.25]]).bfloat16(), torch.tensor([1e-3, -7.5])
    data = b"\1\2\3" + half.view(torch.uint8).numpy().tobytes() + single.numpy().tobytes()
    path = write_raw(tmp_path / "model.safetensors", header, data, pad=pad)
    source = SafetensorsSource(path)
    assert source.read("odd").tolist() == [1, 2, 3]
    assert torch.equal(source.read("half"), half)
    assert torch.equal(source.read("single"), single)
    info = source.info("half")
    assert path.read_bytes()[info.offset : info.offset + info.nbytes] == data[3:11]
    assert torch.equal(source.read("half"), load_file(path)["half"])


ONE = {"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}
DATA = bytes(8)


def described(**changes: Any) -> dict[str, Any]:
    return {"w": ONE["w"] | changes}


FILES = {
    "all ones": (b"\xff" * 8 + b"{}" + bytes(50), "18446744073709551615 bytes"),
    "2^40": (struct.pack("<Q", 1 << 40) + b"{}" + bytes(50), "1099511627776 bytes"),
    "beyond the file": (struct.pack("<Q", 5000) + b'{"a":1}' + bytes(50), "truncated"),
    "zero length": (bytes(8) + b"{}" + bytes(50), "header of 0 bytes"),
    "three bytes": (b"abc", "only 3 bytes"),
    "empty": (b"", "only 0 bytes"),
    "not JSON": (struct.pack("<Q", 9) + b"{nonsense" + bytes(9), "not valid JSON"),
    "array": (struct.pack("<Q", 9) + b"[1, 2, 3]" + bytes(9), "not a JSON object"),
    "not UTF-8": (struct.pack("<Q", 8) + b'{"\xff":1}' + bytes(9), "not valid JSON"),
    "deep": (struct.pack("<Q", 200_005) + b'{"a":' + b"[" * 200_000 + bytes(9), "nested too deeply"),
    "HTML": (b"<!DOCTYPE html>\n<html><body>Access denied</body></html>", "HTML page"),
    "LFS": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "git lfs pull"),
    "GGUF": (b"GGUF\3\0\0\0" + bytes(64), ".gguf"),
    "pickle": (b"\x80\x02\x8a\n" + bytes(64), "pickle"),
    "ZIP": (b"PK\x03\x04" + bytes(64), "ZIP"),
}


@pytest.mark.parametrize(("content", "expected"), FILES.values(), ids=FILES.keys())
def test_what_is_not_safetensors_is_refused_with_the_probable_cause(
    tmp_path: Path, content: bytes, expected: str
) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    tracemalloc.start()
    message = refusal(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert expected in message and str(path) in message
    assert peak < 20_000_000


HEADERS: dict[str, tuple[Any, str]] = {
    "hole": ({"w": ONE["w"], "v": {"dtype": "U8", "shape": [1], "data_offsets": [9, 10]}}, "hole"),
    "overlap": ({"w": ONE["w"], "v": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, "overlaps"),
    "too short": (described(shape=[1]), "needs 4 bytes, but its data_offsets span 8"),
    "too long": (described(shape=[4], data_offsets=[0, 16]), "describes"),
    "begin after end": (described(data_offsets=[8, 0]), "span -8"),
    "negative": (described(data_offsets=[-8, 0]), "bad data_offsets"),
    "float shape": (described(shape=[2.0]), "bad shape"),
    "bool shape": (described(shape=[True, 2]), "bad shape"),
    "three offsets": (described(data_offsets=[0, 8, 8]), "bad data_offsets"),
    "huge shape": (described(shape=[1 << 63, 1 << 63]), "impossible shape"),
    "many huge dims": (described(shape=[1 << 60] * 10_000), "impossible shape"),
    "wraps": (described(shape=[1 << 62, 2]), "'w'"),
    "unknown dtype": (described(dtype="Q9"), "unknown dtype 'Q9'"),
    "dtype not a string": (described(dtype=[]), "unknown dtype"),
    "half a byte": (described(dtype="F4", shape=[3], data_offsets=[0, 2]), "'w'"),
    "no dtype": ({"w": {"shape": [2], "data_offsets": [0, 8]}}, "not described"),
    "extra key": (described(extra=1), "not described"),
    "entry not a map": ({"w": 5}, "not described"),
    "metadata": (ONE | {"__metadata__": {"a": 1}}, "__metadata__"),
    "twice": (b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"w":{}}', "names 'w' twice"),
}


@pytest.mark.parametrize(("header", "expected"), HEADERS.values(), ids=HEADERS.keys())
def test_headers_that_the_format_forbids_are_refused(tmp_path: Path, header: Any, expected: str) -> None:
    path = write_raw(tmp_path / "model.safetensors", header, DATA)
    message = refusal(path)
    assert expected in message and str(path) in message


def test_every_cut_of_a_file_is_refused(tmp_path: Path) -> None:
    whole = tmp_path / "whole.safetensors"
    save_file({"a": A, "b": B}, whole)
    data = whole.read_bytes()
    path = tmp_path / "model.safetensors"
    for cut in range(len(data)):
        path.write_bytes(data[:cut])
        refusal(path)
    path.write_bytes(data + b"\0")
    refusal(path)


@pytest.mark.parametrize("dtype", [name for name in DTYPE_BITS if name.startswith("F8")])
def test_eight_bit_floats_are_described_but_no_numbers_without_their_scales(tmp_path: Path, dtype: str) -> None:
    header = {"blk.w": {"dtype": dtype, "shape": [8], "data_offsets": [0, 8]}}
    source = SafetensorsSource(write_raw(tmp_path / "model.safetensors", header, DATA))
    assert source.info("blk.w").format == dtype
    with pytest.raises(WeightError, match=rf"'blk.w' is stored as {dtype}: it has no numbers of its own"):
        source.read("blk.w")


def test_a_sharded_directory_reads_as_one(tmp_path: Path) -> None:
    source = open_source(write_shards(tmp_path, THREE))
    assert source.names() == ["a", "b", "c"]
    assert torch.equal(source.read("b"), B)
    assert source.info("c").file == str(tmp_path / "model-00003-of-00003.safetensors")
    with pytest.raises(WeightError, match="no tensor named 'd'"):
        source.read("d")


def test_missing_shards_are_listed(tmp_path: Path) -> None:
    write_shards(tmp_path, THREE)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    message = refusal(tmp_path)
    assert "1 of 3 shards missing" in message and "model-00002-of-00003.safetensors" in message


def test_files_beside_the_indexed_ones_do_not_count(tmp_path: Path) -> None:
    write_shards(tmp_path, THREE)
    for name in ("consolidated.safetensors", "model.safetensors", "old.safetensors"):
        save_file({"a": A + 100, "stray": A}, tmp_path / name)
    (tmp_path / "notes.safetensors.bak.json").write_text("not JSON")
    source = SafetensorsSource(tmp_path)
    assert source.names() == ["a", "b", "c"] and torch.equal(source.read("a"), A)


def test_without_an_index_model_safetensors_counts_then_a_single_other(tmp_path: Path) -> None:
    save_file({"stray": C}, tmp_path / "consolidated.safetensors")
    save_file({"stray": C}, tmp_path / "adapter_model.safetensors")
    assert "neither model.safetensors nor" in refusal(tmp_path)
    save_file({"a": A}, tmp_path / "weights.safetensors")
    assert SafetensorsSource(tmp_path).names() == ["a"]
    save_file({"b": B}, tmp_path / "other.safetensors")
    assert "'other.safetensors', 'weights.safetensors'" in refusal(tmp_path)
    save_file({"c": C}, tmp_path / "model.safetensors")
    assert SafetensorsSource(tmp_path).names() == ["c"]


def test_one_shard_alone_is_not_a_model(tmp_path: Path) -> None:
    shard = tmp_path / "model-00001-of-00002.safetensors"
    save_file({"a": A}, shard)
    assert "shard 1 of 2" in refusal(tmp_path)
    assert "shard 1 of 2" in refusal(shard)


INDEXES: dict[str, tuple[Any, str]] = {
    "tensor not in its shard": ({"a": "x.safetensors", "b": "x.safetensors"}, "holds 'b', but it does not"),
    "tensor not listed": ({"b": "y.safetensors", "d": "y.safetensors"}, "does not list 'c'"),
    "in two shards": ({"a": "x.safetensors", "b": "y.safetensors", "c": "z.safetensors"}, "'c'"),
}


@pytest.mark.parametrize(("weight_map", "expected"), INDEXES.values(), ids=INDEXES.keys())
def test_an_index_that_disagrees_with_its_shards_is_refused(tmp_path: Path, weight_map: Any, expected: str) -> None:
    shards = {
        "x.safetensors": {"a": A},
        "y.safetensors": {"b": B, "c": C, "d": C + 1},
        "z.safetensors": {"c": C},
    }
    assert expected in refusal(write_shards(tmp_path, shards, weight_map))


def test_a_tensor_that_two_shards_hold_is_named_with_both(tmp_path: Path) -> None:
    shards = {"x.safetensors": {"a": A}, "y.safetensors": {"a": A, "b": B}}
    weight_map = {"a": "x.safetensors", "b": "y.safetensors"}
    message = refusal(write_shards(tmp_path, shards, weight_map))
    assert "in y.safetensors and in x.safetensors too: 'a'" in message
    (tmp_path / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}'
    )
    assert "'a' twice" in refusal(tmp_path)


ESCAPES = [
    "../other/secret.safetensors",
    "../../other/secret.safetensors",
    "{root}/other/secret.safetensors",
    "a/../../other/secret.safetensors",
    "a/../secret.safetensors",
    "..\\other\\secret.safetensors",
    "C:\\secret.safetensors",
    "secret.safetensors\0",
    "",
    ".",
    "secret.txt",
    5,
    None,
]


@pytest.mark.parametrize("shard", ESCAPES)
def test_a_shard_name_that_leaves_the_directory_opens_nothing(
    tmp_path: Path, shard: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, other = tmp_path / "model", tmp_path / "other"
    other.mkdir()
    save_file({"a": A}, other / "secret.safetensors")
    (directory / "a").mkdir(parents=True)
    save_file({"a": A}, directory / "secret.safetensors")
    if isinstance(shard, str):
        shard = shard.format(root=tmp_path)
    write_shards(directory, {}, {"a": shard})
    opened: list[str] = []
    real_open = io.open

    def watched(file: Any, *args: Any, **kwargs: Any) -> Any:
        opened.append(str(file))
        return real_open(file, *args, **kwargs)

    monkeypatch.setattr(io, "open", watched)
    monkeypatch.setattr(builtins, "open", watched)
    message = refusal(directory)
    assert "'a'" in message and "model.safetensors.index.json" in message
    assert opened == [str(directory / "model.safetensors.index.json")]


def test_shards_in_a_subdirectory_and_the_hub_caches_links_load(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    save_file({"a": A}, blobs / "0123")
    save_file({"b": B}, blobs / "4567")
    (snapshot / "model.safetensors").symlink_to("../../blobs/0123")
    assert torch.equal(SafetensorsSource(snapshot).read("a"), A)
    (snapshot / "part").mkdir()
    (snapshot / "part" / "y.safetensors").symlink_to("../../../blobs/4567")
    write_shards(snapshot, {}, {"a": "model.safetensors", "b": "part/y.safetensors"})
    assert torch.equal(SafetensorsSource(snapshot).read("b"), B)


def test_a_link_that_leads_nowhere_is_a_missing_shard(tmp_path: Path) -> None:
    write_shards(tmp_path, {}, {"a": "x.safetensors"})
    (tmp_path / "x.safetensors").symlink_to("gone")
    assert "1 of 1 shards missing: 'x.safetensors'" in refusal(tmp_path)


BAD_INDEX = {
    "not JSON": (b"{", "not valid JSON"),
    "array": (b"[]", "not an object"),
    "no map": (b"{}", "no weight_map"),
    "empty map": (b'{"weight_map": {}}', "no weight_map"),
    "map of another kind": (b'{"weight_map": ["a"]}', "no weight_map"),
    "LFS": (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
    "HTML": (b"<html></html>", "HTML"),
}


@pytest.mark.parametrize(("content", "expected"), BAD_INDEX.values(), ids=BAD_INDEX.keys())
def test_a_bad_index_is_named(tmp_path: Path, content: bytes, expected: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_bytes(content)
    message = refusal(tmp_path)
    assert expected in message and "model.safetensors.index.json" in message


def test_pickled_weights_are_refused_with_the_advice_to_convert(tmp_path: Path) -> None:
    assert "no weights" in refusal(tmp_path)
    torch.save({"a": A}, tmp_path / "pytorch_model.bin")
    message = refusal(tmp_path)
    assert "'pytorch_model.bin'" in message and "convert" in message


def test_a_gguf_file_beside_a_configuration_is_to_be_named(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    assert "name 'm.gguf'" in refusal(tmp_path)


def test_paths_that_do_not_exist_are_usage_errors(tmp_path: Path) -> None:
    for path in (tmp_path / "absent", tmp_path / "absent.safetensors"):
        with pytest.raises(UsageError, match=str(path)):
            SafetensorsSource(path)


@pytest.mark.slow
def test_the_headers_of_a_very_large_checkpoint_are_read_without_its_data(tmp_path: Path) -> None:
    """163 shards with 560 tensors each, shaped like a 671B mixture of experts; the files are sparse."""
    weight_map = {}
    for shard in range(163):
        name = f"model-{shard + 1:05d}-of-00163.safetensors"
        header, position = {}, 0
        for expert in range(560):
            tensor = f"model.layers.{shard}.mlp.experts.{expert}.down_proj.weight"
            header[tensor] = {"dtype": "BF16", "shape": [7168, 2048], "data_offsets": [position, position + 29360128]}
            position += 29360128
            weight_map[tensor] = name
        path = write_raw(tmp_path / name, header)
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size + position)
    write_shards(tmp_path, {}, weight_map)
    tensors = read_directory(tmp_path)
    assert len(tensors) == 163 * 560
    assert sum(info.nbytes for info in tensors.values()) == 163 * 560 * 7168 * 2048 * 2
