"""Packed matrices read back as the gguf package dequantises the same blocks, bit for bit."""

from __future__ import annotations

import ctypes

import gguf
import numpy as np
import pytest

from plait.kernels import abi, native
from tests.kernels import quant_model as model

pytestmark = pytest.mark.skipif(native.native_library() is None, reason=f"no native library: {native.reason()}")

FLOATS = {"F32": np.float32, "BF16": np.uint16, "F16": np.float16}
QUANTISABLE = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")  # gguf's numpy code can write these


def to_bf16(x: np.ndarray) -> np.ndarray:
    """Nearest even, uint16 bits; numpy has no such type."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), (bits >> 16).astype(np.uint16) | 0x40, rounded).astype(np.uint16)


def from_bf16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def rounded(x: np.ndarray, layout: str) -> np.ndarray:
    """float32 numbers as a float layout keeps them."""
    if layout == "BF16":
        return from_bf16(to_bf16(x))
    with np.errstate(over="ignore"):
        return x.astype(FLOATS[layout]).astype(np.float32)


def shapes(layout: str) -> list[tuple[int, int]]:
    block = model.BLOCKS[layout][0]
    return [(1, block), (16, 2 * block), (17, 3 * block), (31, block), (50, 5 * block)]


@pytest.mark.parametrize("layout", model.QUANTISED)
def test_any_bits_unpack_as_gguf_dequantises_them(layout):
    rng = np.random.default_rng(1)
    for rows, cols in shapes(layout):
        blocks = model.random_blocks(rng, layout, rows, cols)
        packed = model.pack(blocks, layout, layout, cols)
        np.testing.assert_array_equal(model.unpack(packed), model.dequantise(layout, blocks))


# 0, -0, the smallest and the largest subnormal, -1, the largest, the infinities, a NaN.
SPECIAL_SCALES = (0x0000, 0x8000, 0x0001, 0x83FF, 0xBC00, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0x7E00)


@pytest.mark.parametrize("target", ["its own", *FLOATS])
@pytest.mark.parametrize("layout", model.QUANTISED)
def test_scales_may_be_any_half_precision_number(layout, target):
    rng = np.random.default_rng(8)
    block_cols, block_bytes, scales = model.BLOCKS[layout]
    blocks = model.random_blocks(rng, layout, 40, 3 * block_cols).reshape(-1, block_bytes)
    for offset in scales:
        bits = rng.choice(np.array(SPECIAL_SCALES, "<u2"), len(blocks))
        blocks[:, offset : offset + 2] = bits[:, None].view(np.uint8)
    blocks = blocks.reshape(40, -1)
    with np.errstate(all="ignore"):
        expected = model.dequantise(layout, blocks)
        expected = expected if target == "its own" else rounded(expected, target)
    got = model.unpack(model.pack(blocks, layout, layout if target == "its own" else target, 3 * block_cols))
    np.testing.assert_array_equal(got, expected)
    assert np.isnan(expected).any() and np.isinf(expected).any() and (expected == 0).any()


@pytest.mark.parametrize("layout", QUANTISABLE)
def test_quantised_numbers_unpack_as_gguf_dequantises_them(layout):
    values = np.random.default_rng(2).standard_normal((20, 96)).astype(np.float32)
    blocks = gguf.quants.quantize(values, gguf.GGMLQuantizationType[layout])
    unpacked = model.unpack(model.pack(blocks, layout, layout, 96))
    np.testing.assert_array_equal(unpacked, model.dequantise(layout, blocks))
    assert np.abs(unpacked - values).max() < 0.3  # and they are still the numbers that were stored


@pytest.mark.parametrize("layout", ["Q5_1", "Q6_K", "BF16"])
def test_rows_are_taken_in_the_order_of_the_index(layout):
    rng = np.random.default_rng(3)
    if layout == "BF16":
        source = rng.integers(0, 0x7F00, (40, 256), dtype=np.uint16)
        expected = from_bf16(source)
    else:
        source = model.random_blocks(rng, layout, 40, 256)
        expected = model.dequantise(layout, source)
    index = rng.permutation(40)[:23].astype(np.int64)
    packed = model.pack(source, layout, layout, 256, row_index=index)
    np.testing.assert_array_equal(model.unpack(packed), expected[index])


@pytest.mark.parametrize("layout", FLOATS)
@pytest.mark.parametrize("format", [*FLOATS, *model.QUANTISED])
def test_every_format_expands_to_every_float_layout(format, layout):
    rng = np.random.default_rng(4)
    if format in FLOATS:
        cols = 37  # odd: the last pair of BF16 is half empty
        values = (rng.standard_normal((19, cols)) * np.exp(rng.uniform(-20, 8, (19, 1)))).astype(np.float32)
        source = to_bf16(values) if format == "BF16" else values.astype(FLOATS[format])
        values = rounded(values, format)
    else:
        cols = 512
        source = model.random_blocks(rng, format, 19, cols)
        values = model.dequantise(format, source)
    packed = model.pack(source, format, layout, cols)
    np.testing.assert_array_equal(model.unpack(packed), rounded(values, layout))


@pytest.mark.parametrize("layout", FLOATS)
def test_special_numbers_survive(layout):
    values = np.array([[0.0, -0.0, np.inf, -np.inf, np.nan, 65504.0, 65520.0, 1e-7, 6e-8, 2.9e-8, 1e-45, 3.4e38]])
    values = values.astype(np.float32)
    got = model.unpack(model.pack(values, "F32", layout, values.shape[1]))
    expected = rounded(values, layout)
    np.testing.assert_array_equal(got, expected)
    np.testing.assert_array_equal(np.signbit(got[~np.isnan(got)]), np.signbit(expected[~np.isnan(expected)]))


@pytest.mark.parametrize("layout", ["Q4_1", "Q6_K"])
def test_threads_pack_the_same_bytes(layout):
    blocks = model.random_blocks(np.random.default_rng(5), layout, 1000, 768)
    one = model.pack(blocks, layout, layout, 768)
    many = model.pack(blocks, layout, layout, 768, threads=5)
    np.testing.assert_array_equal(one.data, many.data)


def test_rows_beyond_the_last_are_zero():
    blocks = model.random_blocks(np.random.default_rng(6), "Q4_0", 3, 32)
    packed = model.pack(blocks, "Q4_0", "Q4_0", 32)
    packed.matrix.rows = 16
    assert not model.unpack(packed)[3:].any()


def test_selected_rows_and_ids_out_of_range():
    blocks = model.random_blocks(np.random.default_rng(7), "Q4_K", 33, 256)
    packed = model.pack(blocks, "Q4_K", "Q4_K", 256)
    ids = np.array([32, 0, 16, 16], np.int32)
    np.testing.assert_array_equal(model.unpack(packed, ids), model.dequantise("Q4_K", blocks)[ids])
    out = np.zeros(256, np.float32)
    for wrong in (-1, 33):
        one = np.array([wrong], np.int32)
        functions = native.native_library().functions
        assert functions.plait_unpack_rows(packed.pointer, one.ctypes.data, 1, out.ctypes.data, 256) == -1
        assert b"33 rows" in functions.plait_last_error()


def test_sizes_of_matrices_and_records():
    size = native.native_library().functions.plait_packed_bytes
    for name, (cols, block_bytes, _) in model.BLOCKS.items():
        # The packed form is as small as the file's, but for the scales of K-quants, which get a byte each.
        packed = size(abi.LAYOUTS[name], 32, cols)
        assert block_bytes * 32 <= packed <= block_bytes * 32 * 1.03, name
        assert size(abi.LAYOUTS[name], 17, 4 * cols) == packed * 4
        assert size(abi.LAYOUTS[name], 1, cols - 1) == -1
    assert size(abi.LAYOUTS["BF16"], 1, 3) == 16 * 4 * 2
    assert size(abi.LAYOUTS["F16"], 16, 3) == size(abi.LAYOUTS["F32"], 16, 3) // 2 == 96
    assert size(abi.LAYOUT_VECTOR, 1, 7) == 28
    assert size(11, 16, 32) == size(-1, 16, 32) == size(3, 0, 32) == size(3, 16, 0) == -1
    record = native.native_library().functions.plait_quantised_row_bytes
    assert record(32) == 64 and record(576) == 832 and record(33) == record(0) == -1


def test_what_cannot_be_packed_is_refused():
    functions = native.native_library().functions
    memory = np.zeros(4096, np.uint8)

    def status(format, layout, rows=1, cols=32, index=None):
        address = None if index is None else index.ctypes.data
        data = memory.ctypes.data
        return functions.plait_pack(format, layout, data, 64, address, rows, cols, data + 2048, 1)

    numbers = abi.LAYOUTS
    assert status(numbers["Q4_0"], numbers["Q4_0"]) == 0
    assert status(numbers["F32"], numbers["Q4_0"]) == -1
    assert status(numbers["Q4_0"], numbers["Q4_1"]) == -1
    assert status(numbers["Q4_0"], numbers["F32"], cols=31) == -1
    assert status(11, numbers["F32"]) == status(numbers["F32"], 11) == status(-1, 0) == -1
    assert status(numbers["F32"], numbers["F32"], rows=0) == -1
    assert status(numbers["Q4_0"], numbers["Q4_0"], index=np.array([-1], np.int64)) == -1
    assert b"negative" in functions.plait_last_error()


def test_vectors_are_rows_too():
    values = np.arange(5, dtype=np.float32)
    matrix = abi.Matrix(abi.LAYOUT_VECTOR, 0, 1, 5, 20, values.ctypes.data)
    ids, out = np.zeros(1, np.int32), np.empty(5, np.float32)
    functions = native.native_library().functions
    assert functions.plait_unpack_rows(ctypes.pointer(matrix), ids.ctypes.data, 1, out.ctypes.data, 5) == 0
    np.testing.assert_array_equal(out, values)
