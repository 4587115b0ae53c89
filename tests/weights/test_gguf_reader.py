"""Our GGUF reader: what valid files say, and the one line that each kind of damaged file gets."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from plait.errors import PlaitError, UsageError, WeightError
from plait.weights.gguf_reader import GGUFFile
from tests.gguf_files import RawGGUF, packed, packed_array, packed_string, tiny_llama, write_gguf, write_split

U32, U64 = (1 << 32) - 1, (1 << 64) - 1
ONE = [(b"w", (32,), 0, 0)]


def refusal(path: Path) -> str:
    with pytest.raises(WeightError) as caught:
        GGUFFile(path)
    message = str(caught.value)
    assert str(path.name) in message and "\n" not in message and len(message) < 1000
    return message


def raw_refusal(tmp_path: Path, **fields: object) -> str:
    return refusal(RawGGUF(**fields).write(tmp_path / "m.gguf"))  # type: ignore[arg-type]


SCALARS = {
    "a.u8": ("u8", 200),
    "a.i8": ("i8", -5),
    "a.u16": ("u16", 65535),
    "a.i16": ("i16", -300),
    "a.u32": ("u32", U32),
    "a.i32": ("i32", -(1 << 31)),
    "a.u64": ("u64", U64),
    "a.i64": ("i64", -(1 << 63)),
    "a.f32": ("f32", 0.5),
    "a.f64": ("f64", 0.1),
    "a.true": True,
    "a.false": False,
    "a.text": "héllo\n\0world 🙂",
    "a.empty": "",
}
ARRAYS = {
    "b.ints": [1, 2, -3],
    "b.floats": [0.5, -2.0],
    "b.bools": [True, False, True],
    "b.strings": ["a", "", "Ġb", "🙂" * 100, "x\0y", "z" * 255, "z" * 256, "z" * 70000, "end"],
}


@pytest.mark.parametrize("version", [2, 3])
def test_every_value_type_reads_back_what_was_written(tmp_path: Path, version: int) -> None:
    path = write_gguf(tmp_path / "m.gguf", SCALARS | ARRAYS, {"w": np.ones((2, 3))}, version=version)
    file = GGUFFile(path)
    assert file.version == version
    expected = {key: value[1] if isinstance(value, tuple) else value for key, value in SCALARS.items()} | ARRAYS
    assert dict(file.metadata) == {"general.architecture": "llama"} | expected
    assert file.metadata["b.strings"] is file.metadata["b.strings"]
    assert file.metadata.array_length("b.strings") == 9


@pytest.mark.parametrize("lengths", [[0] * 5000, [3] * 5000, [255, 256, 0, 1] * 900, list(range(600)) * 3])
def test_string_arrays_of_any_lengths_decode_exactly(tmp_path: Path, lengths: list[int]) -> None:
    rng = np.random.default_rng(0)
    letters = [chr(c) for c in (0, 1, 8, 97, 0xE9, 0x20AC, 0x1F642)]
    strings = ["".join(letters[i] for i in rng.integers(0, len(letters), n)) for n in lengths]
    plain = ["".join(letters[i] for i in rng.integers(3, len(letters), n)) for n in lengths]
    path = write_gguf(tmp_path / "m.gguf", {"a.s": strings, "a.p": plain, "a.after": 7}, {})
    metadata = GGUFFile(path).metadata
    assert metadata["a.s"] == strings
    assert metadata["a.p"] == plain
    assert metadata["a.after"] == 7


def test_tensors_are_described_row_major_and_raw_gives_the_stored_bytes(tmp_path: Path) -> None:
    first, second = np.arange(6, dtype=np.float32).reshape(2, 3), np.arange(5, dtype=np.float32)
    path = write_gguf(tmp_path / "m.gguf", {}, {"first": first, "second": second})
    with GGUFFile(path) as file:
        assert list(file.tensors) == ["first", "second"]
        info = file.tensors["first"]
        assert (info.shape, info.format, info.nbytes, info.file) == ((2, 3), "F32", 24, str(path))
        raw = file.raw("first")
        assert raw.tobytes() == first.tobytes() == path.read_bytes()[info.offset : info.offset + 24]
        assert not raw.flags.writeable
    assert raw[7] == first.tobytes()[7]
    with pytest.raises(WeightError, match="closed"):
        file.raw("first")


def test_arrays_that_were_not_read_before_closing_are_an_error(tmp_path: Path) -> None:
    file = GGUFFile(write_gguf(tmp_path / "m.gguf", {"a.n": 1, "a.read": ["x"], "a.late": ["y"]}, {}))
    assert file.metadata["a.read"] == ["x"]
    file.close()
    assert (file.metadata["a.n"], file.metadata["a.read"]) == (1, ["x"])
    with pytest.raises(WeightError, match="closed, before key 'a.late'"):
        file.metadata["a.late"]


def test_a_name_that_is_not_there_gets_the_nearest_one(tmp_path: Path) -> None:
    file = GGUFFile(tiny_llama(tmp_path / "m.gguf"))
    with pytest.raises(WeightError, match=r"token_embed.weight.*nearest is 'token_embd.weight'"):
        file.raw("token_embed.weight")


def test_a_scalar_tensor_and_a_file_without_tensors_are_valid(tmp_path: Path) -> None:
    path = RawGGUF(tensors=[(b"s", (), 0, 0)], data=bytes(32)).write(tmp_path / "m.gguf")
    assert GGUFFile(path).tensors["s"].shape == ()
    assert GGUFFile(RawGGUF().write(path)).tensors == {}


HOSTILE_COUNTS = {
    "tensor count": {"num_tensors": 1 << 63},
    "key count": {"num_pairs": 1 << 63},
    "key count just above the file": {"num_pairs": 2, "pairs": [(b"k", "u8", b"\1")]},
    "key length": {"pairs": [(b"k", "u8", b"\1")], "num_pairs": 1, "_patch": (24, struct.pack("<Q", 1 << 60))},
    "string length": {"pairs": [(b"k", "str", packed_string(b"v", 1 << 60))]},
    "string length 2^64-1": {"pairs": [(b"k", "str", packed_string(b"v", U64))]},
    "array length": {"pairs": [(b"k", "array", packed_array("u8", [1], 1 << 40))]},
    "string array length": {"pairs": [(b"k", "array", packed_array("str", ["a"], 1 << 40))]},
    "f64 array length 2^61": {"pairs": [(b"k", "array", packed_array("f64", [1.0], 1 << 61))]},
    "string in an array": {"pairs": [(b"k", "array", struct.pack("<IQ", 8, 2) + packed_string(b"a") + b"\xff" * 8)]},
    "tensor name length": {"tensors": [(b"w" * 70000, (1,), 0, 0)], "data": bytes(32)},
}


@pytest.mark.parametrize("fields", HOSTILE_COUNTS.values(), ids=HOSTILE_COUNTS.keys())
def test_counts_and_lengths_beyond_the_file_are_refused_without_allocating(tmp_path: Path, fields: dict) -> None:
    patch = fields.pop("_patch", None) if "_patch" in fields else None
    data = bytearray(RawGGUF(**fields).encode())
    if patch:
        data[patch[0] : patch[0] + len(patch[1])] = patch[1]
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    tracemalloc.start()
    refusal(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 5_000_000


def test_nested_arrays_are_refused_at_any_depth(tmp_path: Path) -> None:
    nested = struct.pack("<IQ", 9, 1) * 100_000 + packed_array("u8", [1])
    assert "nested" in raw_refusal(tmp_path, pairs=[(b"k", "array", nested)])


def test_more_than_four_dimensions_are_refused(tmp_path: Path) -> None:
    assert "5 dimensions" in raw_refusal(tmp_path, tensors=[(b"w", (1,) * 5, 0, 0)], data=bytes(32))
    data = RawGGUF(tensors=ONE).encode()
    position = data.index(b"w") + 1
    path = tmp_path / "m.gguf"
    path.write_bytes(data[:position] + struct.pack("<I", 10**6) + data[position + 4 :])
    assert "1000000 dimensions" in refusal(path)


@pytest.mark.parametrize(
    "dims", [(U64, 2), (1152, (1 << 42) + 1), (1 << 32, 1 << 32), (1 << 62, 4), (2, U64, U64, U64)]
)
def test_shapes_whose_product_wraps_in_64_bits_are_refused(tmp_path: Path, dims: tuple[int, ...]) -> None:
    assert "truncated or damaged" in raw_refusal(tmp_path, tensors=[(b"w", dims, 0, 0)], data=bytes(4096))


def test_row_length_must_be_a_multiple_of_the_block(tmp_path: Path) -> None:
    message = raw_refusal(tmp_path, tensors=[(b"w", (48, 2), 2, 0)], data=bytes(4096))
    assert "'w'" in message and "48" in message and "Q4_0" in message


NAMES = {
    "zero dimension": ({"tensors": [(b"w", (1, 0), 0, 0)], "data": bytes(32)}, "'w' has a zero in its shape"),
    "empty key": ({"pairs": [(b"", "u8", b"\1")]}, "empty key at offset 24"),
    "empty tensor name": ({"tensors": [(b"", (1,), 0, 0)], "data": bytes(32)}, "empty tensor name at offset 24"),
    "duplicate key": ({"pairs": [(b"k", "u8", b"\1"), (b"k", "u8", b"\2")]}, "key 'k' occurs twice"),
    "duplicate tensor": ({"tensors": [(b"w", (1,), 0, 0), (b"w", (1,), 0, 32)], "data": bytes(64)}, "'w' occurs twice"),
    "key not UTF-8": ({"pairs": [(b"\xff", "u8", b"\1")]}, "offset 24 is not UTF-8"),
    "name not UTF-8": ({"tensors": [(b"\xc3", (1,), 0, 0)], "data": bytes(32)}, "offset 24 is not UTF-8"),
    "value not UTF-8": ({"pairs": [(b"k", "str", packed_string(b"\xc3("))]}, "'k' at offset 37 is not UTF-8"),
    "value type 13": ({"pairs": [(b"k", 13, b"\1" * 8)]}, "'k' has the unknown value type 13"),
    "element type 77": ({"pairs": [(b"k", "array", struct.pack("<IQ", 77, 0))]}, "unknown element type 77"),
    "bool of 2": ({"pairs": [(b"k", "bool", b"\2")]}, "'k' is a bool that is neither"),
}


@pytest.mark.parametrize(("fields", "expected"), NAMES.values(), ids=NAMES.keys())
def test_bad_names_and_values_are_refused_with_what_and_where(tmp_path: Path, fields: dict, expected: str) -> None:
    assert expected in raw_refusal(tmp_path, **fields)


def test_an_array_element_that_is_not_utf8_is_named_when_the_array_is_used(tmp_path: Path) -> None:
    array = struct.pack("<IQ", 8, 3) + packed_string("a") + packed_string(b"\xe2\x82") + packed_string("c")
    file = GGUFFile(RawGGUF(pairs=[(b"k", "array", array)]).write(tmp_path / "m.gguf"))
    with pytest.raises(WeightError, match="element 1 of key 'k'"):
        file.metadata["k"]
    bools = struct.pack("<IQ", 7, 2) + b"\1\3"
    file = GGUFFile(RawGGUF(pairs=[(b"k", "array", bools)]).write(tmp_path / "m.gguf"))
    with pytest.raises(WeightError, match="'k'"):
        file.metadata["k"]


def test_every_cut_of_a_file_is_refused(tmp_path: Path) -> None:
    """Only the padding behind the last tensor may be missing."""
    whole = write_gguf(tmp_path / "whole.gguf", {"a.s": ["x", "y"], "a.n": 3}, {"w": np.ones(5), "v": np.ones(3)})
    data = whole.read_bytes()
    last = GGUFFile(whole).tensors["v"]
    needed = last.offset + last.nbytes
    path = tmp_path / "m.gguf"
    for cut in range(1, len(data)):
        path.write_bytes(data[:cut])
        if cut >= needed:
            assert GGUFFile(path).raw("v").tobytes() == np.ones(3, np.float32).tobytes()
        else:
            refusal(path)
    path.write_bytes(b"")
    assert "empty" in refusal(path)


def test_tensor_offsets_must_lie_inside_the_file_and_apart(tmp_path: Path) -> None:
    assert "truncated or damaged" in raw_refusal(tmp_path, tensors=[(b"w", (4,), 0, U64 - 31)], data=bytes(64))
    assert "truncated or damaged" in raw_refusal(tmp_path, tensors=[(b"w", (4,), 0, 1 << 40)], data=bytes(64))
    assert "not a multiple of 32" in raw_refusal(tmp_path, tensors=[(b"w", (4,), 0, 4)], data=bytes(64))
    overlap = raw_refusal(tmp_path, tensors=[(b"w", (16,), 0, 0), (b"v", (4,), 0, 32)], data=bytes(64))
    assert "'w'" in overlap and "'v'" in overlap and "overlap" in overlap


ALIGNMENTS = [
    ("u32", 0, False),
    ("u32", 1, False),
    ("u32", 4, False),
    ("u32", 8, True),
    ("u32", 24, True),
    ("u32", 48, True),
    ("u32", 20, False),
    ("u32", 64, True),
    ("u32", 1 << 31, False),
    ("i32", -32, False),
    ("i32", 32, False),
    ("u64", 32, False),
    ("str", "32", False),
]


@pytest.mark.parametrize(("kind", "value", "accepted"), ALIGNMENTS)
def test_alignment_must_be_a_uint32_multiple_of_eight(
    tmp_path: Path, kind: str, value: int | str, accepted: bool
) -> None:
    step = value if accepted and isinstance(value, int) else 32
    fields = RawGGUF(
        pairs=[(b"general.alignment", kind, packed(kind, value))],
        tensors=[(b"w", (2,), 0, 0), (b"v", (1,), 0, step)],
        data=struct.pack("<ff", 1.5, 2.5) + bytes(step - 8) + struct.pack("<f", 3.5),
        alignment=step,
    )
    path = fields.write(tmp_path / "m.gguf")
    if accepted:
        file = GGUFFile(path)
        assert file.raw("w").view(np.float32).tolist() == [1.5, 2.5]
        assert file.raw("v").view(np.float32).tolist() == [3.5]
    else:
        assert "alignment" in refusal(path) or value == 1 << 31


FOREIGN = {
    "FUGG": (b"FUGG" + bytes(64), "big-endian"),
    "GGML": (b"GGML" + bytes(64), "GGML"),
    "ggjt": (b"tjgg\3\0\0\0" + bytes(64), "older than GGUF"),
    "HTML": (b"\n<!DOCTYPE html><html><body>404</body></html>", "HTML page"),
    "LFS": (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n", "git lfs pull"),
    "zip": (b"PK\x03\x04" + bytes(64), "ZIP"),
    "gzip": (b"\x1f\x8b" + bytes(64), "gzip"),
    "JSON": (b'{"error": "not found"}', "JSON"),
    "zeros": (bytes(4096), "zero"),
    "safetensors": (struct.pack("<Q", 20) + b'{"a":{}}', "safetensors"),
    "other": (b"\x13\x37 something", "it begins with"),
    "short": (b"GG", "not a GGUF file"),
    "version 1": (RawGGUF(version=1).encode(), "version 1"),
    "version 4": (RawGGUF(version=4).encode(), "version 4"),
    "version 0": (RawGGUF(version=0).encode(), "version 0"),
    "big-endian": (RawGGUF(version=0x03000000).encode(), "big-endian GGUF file (version 3)"),
    "big-endian 2": (RawGGUF(version=0x02000000).encode(), "big-endian GGUF file (version 2)"),
}


@pytest.mark.parametrize(("content", "expected"), FOREIGN.values(), ids=FOREIGN.keys())
def test_what_is_not_gguf_is_refused_with_the_probable_cause(tmp_path: Path, content: bytes, expected: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    assert expected in refusal(path)


@pytest.mark.parametrize(
    ("type_id", "expected"), [(4, "removed"), (31, "removed"), (9999, "unknown"), (255, "unknown")]
)
def test_an_unknown_type_names_tensor_and_id(tmp_path: Path, type_id: int, expected: str) -> None:
    message = raw_refusal(tmp_path, tensors=[(b"blk.0.w", (32,), type_id, 0)], data=bytes(128))
    assert "'blk.0.w'" in message and str(type_id) in message and expected in message


def test_paths_that_are_not_files_are_usage_errors(tmp_path: Path) -> None:
    import os

    os.mkfifo(tmp_path / "pipe.gguf")
    for path in (tmp_path / "absent.gguf", tmp_path, tmp_path / "pipe.gguf"):
        with pytest.raises(UsageError, match=str(path)):
            GGUFFile(path)


def split_parts() -> list[tuple[dict, dict]]:
    return [({"block_count": 1}, {"a": np.full(4, 1.0)}), ({}, {"b": np.full(4, 2.0)}), ({}, {"c": np.full(4, 3.0)})]


@pytest.mark.parametrize("member", [0, 1, 2])
def test_any_member_of_a_split_set_opens_the_set(tmp_path: Path, member: int) -> None:
    files = write_split(tmp_path / "m", split_parts())
    file = GGUFFile(files[member])
    assert list(file.tensors) == ["a", "b", "c"]
    assert file.metadata["llama.block_count"] == 1
    assert [float(file.raw(name).view(np.float32)[0]) for name in "abc"] == [1.0, 2.0, 3.0]
    assert file.tensors["c"].file == str(files[2])


def test_a_missing_member_is_named(tmp_path: Path) -> None:
    files = write_split(tmp_path / "m", split_parts())
    files[1].unlink()
    assert "m-00002-of-00003.gguf" in refusal(files[0])
    assert "m-00002-of-00003.gguf" in refusal(files[2])


def test_a_renamed_member_says_which_part_it_is(tmp_path: Path) -> None:
    files = write_split(tmp_path / "m", split_parts())
    assert "part 2 of a set of 3" in refusal(files[1].rename(tmp_path / "model.gguf"))


DISAGREEING = {
    "split.count": (1, {"split.count": ("u16", 4)}, None, "split.count is 4, but its name says 3"),
    "no split.count": (2, {"split.count": None}, None, "split.count is None, but its name says 3"),
    "split.no": (1, {"split.no": ("u16", 2)}, None, "split.no is 2 (counted from 0), but its name says part 2"),
    "tensor sum": (0, {}, 5, "split.tensors.count is 5, but the 3 files hold 3"),
    "model": (1, {"general.name": "other"}, None, "general.name is 'other', but 'one'"),
}


@pytest.mark.parametrize(("part", "keys", "total", "expected"), DISAGREEING.values(), ids=DISAGREEING.keys())
def test_split_files_that_disagree_are_refused_with_the_numbers(
    tmp_path: Path, part: int, keys: dict, total: int | None, expected: str
) -> None:
    parts = split_parts()
    parts[0][0]["general.name"] = "one"
    parts[part] = (parts[part][0] | keys, parts[part][1])
    with pytest.raises(WeightError) as caught:
        GGUFFile(write_split(tmp_path / "m", parts, total)[0])
    assert expected in str(caught.value)


def test_the_same_tensor_in_two_members_is_refused(tmp_path: Path) -> None:
    parts = split_parts()
    parts[2] = ({}, {"a": np.ones(4)})
    with pytest.raises(WeightError, match="tensor 'a' is also in m-00001-of-00003.gguf"):
        GGUFFile(write_split(tmp_path / "m", parts)[0])


@pytest.mark.parametrize("name", ["m.gguf.part1of2", "m.gguf.part00", "m.gguf-split-a", "m.gguf.gguf-split-b"])
def test_raw_byte_splits_get_the_advice_to_join_them(tmp_path: Path, name: str) -> None:
    path = tiny_llama(tmp_path / "m.gguf").rename(tmp_path / name)
    assert "join the pieces" in refusal(path)


def test_errors_are_of_our_own_types() -> None:
    assert issubclass(WeightError, PlaitError) and issubclass(UsageError, PlaitError)
