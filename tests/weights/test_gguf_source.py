"""GGUF tensors as torch tensors: every storage type, the order of dimensions, and the real files."""

from __future__ import annotations

import struct
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch

from plait.errors import WeightError
from plait.weights import gguf_types
from plait.weights.gguf_reader import GGUFFile
from plait.weights.gguf_source import GGUFSource
from plait.weights.gguf_types import PLAIN_TYPES, TYPES_BY_ID, TYPES_BY_NAME
from plait.weights.sources import open_source
from tests.gguf_files import RawGGUF, tiny_llama, write_gguf
from tests.real_models import gemma3_path, smollm2_path

QUANTISED = [kind.name for kind in TYPES_BY_ID.values() if kind.readable and kind.name not in PLAIN_TYPES]
ROWS, BLOCKS = 5, 3


def test_the_block_table_is_the_gguf_packages() -> None:
    import gguf

    ours = {kind.id: (kind.name, kind.block_size, kind.block_bytes) for kind in TYPES_BY_ID.values()}
    theirs = {kind.value: (kind.name, *sizes) for kind, sizes in gguf.constants.GGML_QUANT_SIZES.items()}
    assert ours == theirs


def test_every_type_that_the_gguf_package_expands_is_readable() -> None:
    import gguf

    for kind in gguf.GGMLQuantizationType:
        data = np.zeros((1, TYPES_BY_ID[kind.value].block_bytes), np.uint8)
        try:
            gguf.dequantize(data, kind)
        except NotImplementedError:
            assert not TYPES_BY_ID[kind.value].readable or kind.name in PLAIN_TYPES, kind.name
        else:
            assert TYPES_BY_ID[kind.value].readable, kind.name


def special_scales(raw: np.ndarray, kind: str) -> None:
    """Put float16 zero, the smallest subnormal, -1, infinity and NaN where a block's first scale may be."""
    size = TYPES_BY_NAME[kind].block_bytes
    blocks = raw.reshape(-1, size)
    for block, bits in enumerate((0x0000, 0x0001, 0xBC00, 0x7C00, 0xFC00, 0x7E00)):
        for position in (0, 2, size - 2, size - 4):
            blocks[(4 * block + position) % len(blocks), position : position + 2] = (bits & 0xFF, bits >> 8)


@pytest.mark.parametrize("kind", QUANTISED)
def test_random_blocks_expand_as_the_gguf_package_expands_them(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import gguf

    shape = (ROWS, BLOCKS * TYPES_BY_NAME[kind].block_bytes)
    raw = np.random.default_rng(1).integers(0, 256, shape, dtype=np.uint8)
    special_scales(raw, kind)
    source = GGUFSource(write_gguf(tmp_path / "m.gguf", {}, {"w": (kind, raw)}))
    with np.errstate(all="ignore"):
        expected = gguf.dequantize(raw, gguf.GGMLQuantizationType[kind])
    # Rows of two blocks, chunks of four: the 15 blocks end in a short chunk and a short row.
    monkeypatch.setattr(gguf_types, "_ROW_NUMBERS", 2 * TYPES_BY_NAME[kind].block_size)
    monkeypatch.setattr(gguf_types, "_CHUNK_NUMBERS", 4 * TYPES_BY_NAME[kind].block_size)
    values = source.read("w")
    assert values.dtype == torch.float32 and values.shape == expected.shape == source.info("w").shape
    np.testing.assert_array_equal(values.numpy(), expected)
    assert torch.equal(source.read("w", torch.bfloat16).nan_to_num(), values.to(torch.bfloat16).nan_to_num())


def q4_1_by_hand(block: bytes) -> list[float]:
    """ggml's block_q4_1: float16 scale d, float16 minimum m, then 16 bytes with elements i and i + 16 as nibbles."""
    d, m = np.frombuffer(block[:4], np.float16).astype(np.float32)
    nibbles = [byte & 15 for byte in block[4:]] + [byte >> 4 for byte in block[4:]]
    return [float(d * np.float32(q) + m) for q in nibbles]


def test_q4_1_is_what_its_definition_says(tmp_path: Path) -> None:
    block = np.array([0.5, -3.0], np.float16).tobytes() + bytes(range(7, 7 + 16 * 15, 15))
    raw = np.frombuffer(block, np.uint8).reshape(1, 20)
    values = GGUFSource(write_gguf(tmp_path / "m.gguf", {}, {"w": ("Q4_1", raw)})).read("w")
    assert values[0].tolist() == q4_1_by_hand(block)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "F64", "I8", "I16", "I32", "I64"])
def test_plain_numbers_keep_their_bits_and_type(tmp_path: Path, kind: str) -> None:
    width = TYPES_BY_NAME[kind].block_bytes
    raw = np.random.default_rng(2).integers(0, 256, (3, 4 * width), dtype=np.uint8)
    path = RawGGUF(tensors=[(b"w", (4, 3), TYPES_BY_NAME[kind].id, 0)], data=raw.tobytes()).write(tmp_path / "m.gguf")
    values = GGUFSource(path).read("w")
    assert values.shape == (3, 4) and values.dtype == getattr(torch, PLAIN_TYPES[kind])
    assert values.reshape(-1).view(torch.uint8).numpy().tobytes() == raw.tobytes()


def test_bfloat16_is_the_upper_half_of_a_float32(tmp_path: Path) -> None:
    exact = (np.random.default_rng(3).standard_normal((6, 8)).astype(np.float32).view(np.uint32) & 0xFFFF0000).view(
        np.float32
    )
    path = write_gguf(tmp_path / "m.gguf", {}, {"b": ("BF16", exact), "h": ("F16", exact), "f": exact})
    source = GGUFSource(path)
    assert source.read("b").dtype == torch.bfloat16
    np.testing.assert_array_equal(source.read("b", torch.float32).numpy(), exact)
    np.testing.assert_array_equal(source.read("f").numpy(), exact)
    np.testing.assert_array_equal(source.read("h").numpy(), exact.astype(np.float16))


def test_three_dimensional_tensors_keep_their_order(tmp_path: Path) -> None:
    import gguf

    values = np.random.default_rng(4).standard_normal((2, 3, 64)).astype(np.float32)
    source = GGUFSource(write_gguf(tmp_path / "m.gguf", {}, {"f": values, "q": ("Q8_0", values)}))
    assert source.info("q").shape == (2, 3, 64)
    np.testing.assert_array_equal(source.read("f").numpy(), values)
    kind = gguf.GGMLQuantizationType.Q8_0
    np.testing.assert_array_equal(source.read("q").numpy(), gguf.dequantize(gguf.quantize(values, kind), kind))


@pytest.mark.parametrize("kind", [kind.name for kind in TYPES_BY_ID.values() if not kind.readable])
def test_a_type_that_cannot_be_expanded_is_named_when_it_is_read(tmp_path: Path, kind: str) -> None:
    row = TYPES_BY_NAME[kind]
    path = RawGGUF(tensors=[(b"blk.0.w", (row.block_size,), row.id, 0)], data=bytes(row.block_bytes))
    source = GGUFSource(path.write(tmp_path / "m.gguf"))
    with pytest.raises(WeightError, match=rf"'blk.0.w' has type {kind} \(id {row.id}\)"):
        source.read("blk.0.w")


def test_open_source_tells_formats_apart(tmp_path: Path) -> None:
    source = open_source(tiny_llama(tmp_path / "m.gguf"))
    assert isinstance(source, GGUFSource) and source.read("output_norm.weight").shape == (32,)
    source.close()


@pytest.mark.slow
def test_reading_needs_torch_and_gguf_only_where_they_do_the_work(tmp_path: Path) -> None:
    """Opening imports neither; plain tensors need no gguf."""
    path = tiny_llama(tmp_path / "m.gguf")
    script = (
        "import sys; from plait.weights.gguf_source import GGUFSource; import plait.weights.locate\n"
        "import plait.weights.safetensors_header, plait.weights.gguf_config\n"
        f"s = GGUFSource({str(path)!r}); s.metadata['tokenizer.ggml.tokens']\n"
        "assert not {'torch', 'gguf', 'safetensors', 'huggingface_hub'} & sys.modules.keys()\n"
        "s.read('output_norm.weight'); assert 'gguf' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=Path(gguf_types.__file__).parents[2])


@pytest.mark.real_model
@pytest.mark.slow
def test_smollm2_reads_as_the_gguf_package_reads_it() -> None:
    import gguf

    path = smollm2_path()
    reference = gguf.GGUFReader(path)
    with GGUFFile(path) as file:
        ours = file.metadata
        theirs = {key: field for key, field in reference.fields.items() if not key.startswith("GGUF.")}
        assert list(ours) == list(theirs)
        for key, field in theirs.items():
            # `contents` costs seconds on the token arrays: those are compared through the parts that it would decode.
            if len(field.data) < 1000:
                assert ours[key] == field.contents(), key
            elif field.types[1] == gguf.GGUFValueType.STRING:
                assert ours[key] == [field.parts[i].tobytes().decode() for i in field.data], key
            else:
                assert ours[key] == [field.parts[i][0].item() for i in field.data], key
        assert list(file.tensors) == [tensor.name for tensor in reference.tensors]
        for tensor in reference.tensors:
            info = file.tensors[tensor.name]
            assert (info.shape, info.format) == (tuple(tensor.shape[::-1].tolist()), tensor.tensor_type.name)
            assert (info.nbytes, info.offset) == (int(tensor.n_bytes), int(tensor.data_offset))
            assert np.array_equal(file.raw(tensor.name), tensor.data.reshape(-1).view(np.uint8))


def plain_walk(data: bytes) -> tuple[dict[str, object], list[tuple[str, list[int], int, int]]]:
    """Keys and tensor descriptions by the plainest reading of the format (the gguf package takes a minute)."""
    codes = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
    position = 8

    def take(code: str) -> object:
        nonlocal position
        (value,) = struct.unpack_from("<" + code, data, position)
        position += struct.calcsize(code)
        return value

    def value(kind: int) -> object:
        nonlocal position
        if kind == 9:
            element, count = take("I"), take("Q")
            return [value(element) for _ in range(count)]  # type: ignore[arg-type, call-overload]
        if kind != 8:
            return take(codes[kind])
        length = int(str(take("Q")))
        position += length
        return data[position - length : position].decode()

    tensors, keys = int(str(take("Q"))), int(str(take("Q")))
    metadata = {str(value(8)): value(int(str(take("I")))) for _ in range(keys)}
    described = []
    for _ in range(tensors):
        name = str(value(8))
        dims = [int(str(take("Q"))) for _ in range(int(str(take("I"))))]
        described.append((name, dims, int(str(take("I"))), int(str(take("Q")))))
    return metadata, described


@pytest.mark.real_model
def test_gemma3_reads_as_a_plain_walk_reads_it() -> None:
    path = gemma3_path()
    with path.open("rb") as file:
        metadata, described = plain_walk(file.read(20_000_000))
    with GGUFFile(path) as ours:
        assert dict(ours.metadata) == metadata
        assert len(metadata["tokenizer.ggml.tokens"]) == 262144  # type: ignore[arg-type]
        first = min(info.offset for info in ours.tensors.values())
        read = [
            (info.name, list(info.shape[::-1]), TYPES_BY_NAME[info.format].id, info.offset - first)
            for info in ours.tensors.values()
        ]
        assert read == described


@pytest.mark.real_model
def test_one_layer_of_smollm2_expands_as_the_gguf_package_expands_it() -> None:
    import gguf

    source = GGUFSource(smollm2_path())
    for name in source.names():
        if name.startswith("blk.3."):
            info = source.info(name)
            raw = source.file.raw(name)
            rows = raw if info.format == "F32" else raw.reshape(info.shape[0], -1)
            expected = gguf.dequantize(rows, gguf.GGMLQuantizationType[info.format]).reshape(info.shape)
            np.testing.assert_array_equal(source.read(name).numpy(), expected)


def test_expanding_needs_little_memory_besides_the_result(tmp_path: Path) -> None:
    """16 Mi numbers: 64 MiB as float32, but only a chunk of 1 Mi is expanded at a time (NumPy's share is traced)."""
    raw = np.zeros((1024, 16384 // 32 * 34), np.uint8)
    source = GGUFSource(write_gguf(tmp_path / "m.gguf", {}, {"w": ("Q8_0", raw)}))
    source.read("w", torch.bfloat16)
    tracemalloc.start()
    assert source.read("w", torch.bfloat16).shape == (1024, 16384)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 24 << 20
