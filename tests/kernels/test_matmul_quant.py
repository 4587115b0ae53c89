"""Products with quantised matrices, on every instruction set that this machine runs, against numpy in float64."""

from __future__ import annotations

import numpy as np
import pytest

from plait.kernels import abi, native
from tests.kernels import quant_model as model

pytestmark = pytest.mark.skipif(native.native_library() is None, reason=f"no native library: {native.reason()}")
every_isa = pytest.mark.parametrize("isa", model.isa_names())
every_layout = pytest.mark.parametrize("layout", model.QUANTISED)


def random_records(rng: np.random.Generator, tokens: int, cols: int) -> model.Records:
    """Records with all values of a byte but -128, which the quantiser never makes."""
    quants = rng.integers(-127, 128, (tokens, cols)).astype(np.int8)
    scales = np.exp(rng.uniform(-6, 0, (tokens, cols // 32))).astype(np.float32)
    return model.records_of(quants, scales)


def random_case(rng: np.random.Generator, layout: str, rows: int, cols: int, tokens: int):
    """Blocks packed, their values, and records to multiply them with."""
    blocks = model.random_blocks(rng, layout, rows, cols)
    packed = model.pack(blocks, layout, layout, cols)
    return packed, model.dequantise(layout, blocks), random_records(rng, tokens, cols)


@every_isa
@every_layout
def test_product_equals_numpy(isa, layout):
    rng = np.random.default_rng(10)
    block = model.BLOCKS[layout][0]
    # Tokens on both sides of every tile, rows beyond a panel, columns that are no multiple of a chunk of blocks.
    for rows, blocks, tokens in ((1, 1, 1), (16, 3, 2), (17, 2, 3), (40, 1, 13), (100, 5, 9), (33, 6, 62)):
        cols = blocks * block
        packed, weights, records = random_case(rng, layout, rows, cols, tokens)
        model.assert_product(model.matmul(isa, packed, records.data), weights, records.values())


@pytest.mark.slow
@every_isa
@every_layout
def test_product_equals_numpy_in_many_shapes(isa, layout):
    rng = np.random.default_rng(11)
    block = model.BLOCKS[layout][0]
    for _ in range(60):
        rows, tokens = int(rng.integers(1, 101)), int(rng.integers(1, 71))
        cols = int(rng.integers(1, 1536 // block + 1)) * block
        packed, weights, records = random_case(rng, layout, rows, cols, tokens)
        model.assert_product(model.matmul(isa, packed, records.data), weights, records.values())


@every_isa
@every_layout
def test_results_do_not_depend_on_how_many_tokens_there_are(isa, layout):
    rng = np.random.default_rng(12)
    packed, _, records = random_case(rng, layout, 35, 768, 61)
    whole = model.matmul(isa, packed, records.data)
    for cut in (1, 2, 3, 5, 8, 12, 16, 20, 49):
        parts = [model.matmul(isa, packed, records.data[i : i + cut]) for i in range(0, 61, cut)]
        np.testing.assert_array_equal(np.concatenate(parts), whole, err_msg=f"{cut} tokens at a time")


@every_isa
@every_layout
def test_results_do_not_depend_on_the_other_rows(isa, layout):
    rng = np.random.default_rng(13)
    blocks = model.random_blocks(rng, layout, 40, 512)
    records = random_records(rng, 14, 512)
    whole = model.matmul(isa, model.pack(blocks, layout, layout, 512), records.data)
    order = rng.permutation(40).astype(np.int64)[:21]
    some = model.matmul(isa, model.pack(blocks, layout, layout, 512, row_index=order), records.data)
    np.testing.assert_array_equal(some, whole[:, order])


@every_isa
@pytest.mark.parametrize("layout", ["Q4_0", "Q6_K"])
def test_bias_and_addition_in_place(isa, layout):
    rng = np.random.default_rng(14)
    packed, weights, records = random_case(rng, layout, 37, 256, 13)
    bias = rng.standard_normal(37).astype(np.float32)
    base = rng.standard_normal((13, 50)).astype(np.float32)[:, 3:40]
    got = model.matmul(isa, packed, records.data, bias=bias)
    model.assert_product(got, weights, records.values(), bias)
    got = model.matmul(isa, packed, records.data, add=base)
    model.assert_product(got, weights, records.values(), base)
    both = model.matmul(isa, packed, records.data, bias=bias, add=base)
    model.assert_product(both, weights, records.values(), bias.astype(np.float64) + base)
    memory = np.full((13, 60), np.float32(3.5), np.float32)
    inside = memory[:, 5:42]
    inside[:] = base
    model.matmul(isa, packed, records.data, bias=bias, add=inside, out=inside)
    np.testing.assert_array_equal(inside, both)
    assert (memory[:, :5] == 3.5).all() and (memory[:, 42:] == 3.5).all()


@every_isa
@every_layout
@pytest.mark.parametrize("sign", [-127, 127])
@pytest.mark.parametrize("fill", [0xFF, 0x00, 0x80, 0x7F])
def test_extreme_numbers_do_not_overflow(isa, layout, fill, sign):
    # 0xff sets every bit of a quant (0x80 is -128 in Q8_0, where 0xff is -1); all products have one sign.
    rng = np.random.default_rng(15)
    blocks = model.random_blocks(rng, layout, 16, 512, fill=fill)
    packed = model.pack(blocks, layout, layout, 512)
    records = model.records_of(np.full((5, 512), sign, np.int8), np.full((5, 16), 0.01, np.float32))
    weights = model.dequantise(layout, blocks).astype(np.float64)
    expected = records.values() @ weights.T
    # Formats with an offset subtract two large sums: the error is relative to those, at most 64 steps of each weight.
    terms = np.abs(records.values()) @ np.abs(weights).T + 512 * 1.27 * 64 * np.abs(weights).max()
    assert np.all(np.abs(model.matmul(isa, packed, records.data) - expected) <= 1e-6 * terms + 1e-30)


@every_isa
def test_instruction_sets_agree_but_for_rounding(isa):
    rng = np.random.default_rng(16)
    for layout in model.QUANTISED:
        packed, weights, records = random_case(rng, layout, 16, 256, 3)
        got, portable = (model.matmul(name, packed, records.data) for name in (isa, "portable"))
        allowed = 2e-6 * (np.abs(records.values()) @ np.abs(weights.astype(np.float64)).T)
        assert np.all(np.abs(got.astype(np.float64) - portable) <= allowed), layout


@every_isa
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_is_not_lost(isa, value):
    rng = np.random.default_rng(17)
    x = rng.standard_normal((6, 256)).astype(np.float32)
    x[2, 77] = value
    records = model.native_quantise(isa, x)
    assert np.isnan(records.scales[2, 2]) and np.isnan(records.sums[2, 4:6]).all()
    for layout in model.QUANTISED:
        blocks = model.random_blocks(rng, layout, 18, 256)
        got = model.matmul(isa, model.pack(blocks, layout, layout, 256), records.data)
        assert np.isnan(got[2]).all() and np.isfinite(np.delete(got, 2, axis=0)).all()


@every_isa
def test_quantiser_equals_numpy(isa):
    rng = np.random.default_rng(18)
    x = rng.standard_normal((50, 1536)).astype(np.float32) * np.exp(rng.uniform(-30, 30, (50, 1))).astype(np.float32)
    x[3, 32:64] = 0
    got, expected = model.native_quantise(isa, x), model.quantise(x)
    np.testing.assert_array_equal(got.scales, expected.scales)
    apart = np.abs(got.quants.astype(int) - expected.quants)
    assert apart.max() <= 1 and np.count_nonzero(apart) <= 1e-3 * x.size
    halves = got.quants.reshape(50, -1, 16).astype(np.int32).sum(axis=2).astype(np.float32)
    np.testing.assert_array_equal(got.sums, halves * np.repeat(got.scales, 2, axis=1))
    assert not got.scales[3, 1] and not got.quants[3, 32:64].any() and not got.sums[3, 2:4].any()


@every_isa
def test_quantiser_at_the_edges_of_float(isa):
    x = np.zeros((4, 32), np.float32)
    x[0, 5], x[0, 6] = 3.4e38, -3.4e38
    x[1, 0] = 1e-30
    x[2, 31] = -1e-45  # the smallest number there is: 127 / x overflows, the block counts as zero
    x[3, :] = -0.0
    records = model.native_quantise(isa, x)
    assert records.quants[0, 5] == 127 and records.quants[0, 6] == -127 and np.isfinite(records.scales[0]).all()
    assert records.quants[1, 0] == 127
    assert not records.quants[2:].any() and not records.scales[2:].any() and not records.sums[2:].any()


def test_what_does_not_exist_is_refused():
    functions = native.native_library().functions
    blocks = model.random_blocks(np.random.default_rng(19), "Q4_0", 16, 32)
    packed = model.pack(blocks, "Q4_0", "Q4_0", 32)
    records = random_records(np.random.default_rng(20), 1, 32)
    out = np.empty(16, np.float32)

    def status(isa, matrix=packed):
        data = records.data.ctypes.data
        return functions.plait_matmul(isa, matrix.pointer, data, 64, 1, out.ctypes.data, 16, None, None, 0)

    assert status(None) == 0
    assert status(b"nonsense") == -1
    assert b"nonsense" in functions.plait_last_error()
    assert status(None, model.Packed(abi.Matrix(11, 0, 16, 32, 288, packed.data.ctypes.data), packed.data)) == -1
    assert status(None, model.Packed(abi.Matrix(3, 0, 16, 33, 288, packed.data.ctypes.data), packed.data)) == -1
    assert functions.plait_quantise(None, out.ctypes.data, 16, 1, 16, records.data.ctypes.data) == -1


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["Q4_1", "Q8_0"])
def test_measured_rate_is_a_rate(layout):
    measure = native.native_library().functions.plait_measure_matmul
    assert 1e6 < measure(abi.LAYOUTS[layout], 1, 0.05) < 1e13
    assert 1e6 < measure(abi.LAYOUTS[layout], 2, 0.05) < 1e13
