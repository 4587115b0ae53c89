"""Products with fp32, bf16 and fp16 matrices, of every instruction set that this machine runs, against float64."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch

from plait.kernels import abi, native

LAYOUTS = abi.FLOAT_LAYOUTS


def instruction_sets() -> list[str]:
    library = native.native_library()
    if library is None:
        return []
    names: list[str] = []
    while (name := library.functions.plait_isa_name(len(names))) is not None:
        names.append(name.decode())
    return names


pytestmark = pytest.mark.skipif(native.native_library() is None, reason=f"needs the native library: {native.reason()}")
every_isa = pytest.mark.parametrize("isa", instruction_sets())
every_layout = pytest.mark.parametrize("layout", LAYOUTS)


def rounded(x: np.ndarray, layout: str) -> np.ndarray:
    """x in the numbers of a layout, as float64."""
    dtype = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}[layout]
    return torch.from_numpy(x).to(dtype).double().numpy()


def pack(weight: np.ndarray, layout: str) -> np.ndarray:
    """Panels of weight [rows, cols] as csrc/plait_native.h describes them, written down independently."""
    rows, cols = weight.shape
    if layout == "F32":
        numbers = weight.view(np.uint32)
    elif layout == "F16":
        numbers = weight.astype(np.float16).view(np.uint16)
    else:
        numbers = torch.from_numpy(weight).bfloat16().view(torch.int16).numpy().view(np.uint16)
    pair = 2 if layout == "BF16" else 1
    padded = np.zeros(((rows + 15) // 16 * 16, (cols + pair - 1) // pair * pair), numbers.dtype)
    padded[:rows, :cols] = numbers
    panels = padded.reshape(-1, 16, padded.shape[1] // pair, pair).transpose(0, 2, 1, 3)
    aligned = np.zeros(panels.nbytes + 64, np.uint8)
    start = -aligned.ctypes.data % 64
    aligned = aligned[start : start + panels.nbytes]
    aligned[:] = np.ascontiguousarray(panels).view(np.uint8).ravel()
    return aligned


def matmul(
    isa: str,
    layout: str,
    packed: np.ndarray,
    rows: int,
    x: np.ndarray,
    bias: np.ndarray | None = None,
    add: np.ndarray | None = None,
    out: np.ndarray | None = None,
) -> np.ndarray:
    """x [tokens, cols] times the packed matrix transposed (+ bias [rows]) (+ add [tokens, rows]) by plait_matmul."""
    library = native.native_library()
    assert library is not None
    panels = (rows + 15) // 16
    matrix = abi.Matrix(abi.LAYOUTS[layout], 0, rows, x.shape[1], packed.size // panels, packed.ctypes.data)
    out = np.full((len(x), rows), np.nan, np.float32) if out is None else out
    status = library.functions.plait_matmul(
        isa.encode(),
        ctypes.byref(matrix),
        x.ctypes.data,
        x.strides[0],
        len(x),
        out.ctypes.data,
        out.strides[0] // 4,
        None if bias is None else bias.ctypes.data,
        None if add is None else add.ctypes.data,
        0 if add is None else add.strides[0] // 4,
    )
    assert status == 0, library.functions.plait_last_error()
    return out


def assert_near(out: np.ndarray, isa: str, layout: str, weight: np.ndarray, x: np.ndarray, *terms: np.ndarray) -> None:
    """|error| <= 1e-5 of the sum of the magnitudes that were added."""
    # With instructions for pairs of bf16, activations are rounded to bf16 too.
    numbers = rounded(x, "BF16") if isa == "avx512_bf16" and layout == "BF16" else x.astype(np.float64)
    w = rounded(weight, layout)
    truth, size = numbers @ w.T, np.abs(numbers) @ np.abs(w.T)
    for term in terms:
        truth, size = truth + term, size + np.abs(term)
    assert np.all(np.abs(out - truth) <= 1e-5 * size)


@every_isa
@every_layout
@pytest.mark.parametrize("rows,cols", [(1, 1), (16, 2), (17, 33), (70, 576), (5, 255), (150, 601)])
def test_equals_float64_and_does_not_depend_on_the_number_of_tokens(isa, layout, rows, cols):
    rng = np.random.default_rng(rows * cols)
    weight = rng.standard_normal((rows, cols)).astype(np.float32)
    x = rng.standard_normal((110, cols)).astype(np.float32)
    bias = rng.standard_normal(rows).astype(np.float32)
    add = rng.standard_normal((110, rows)).astype(np.float32)
    packed = pack(weight, layout)
    every_token = matmul(isa, layout, packed, rows, x, bias, add)
    assert_near(every_token, isa, layout, weight, x, bias.astype(np.float64), add.astype(np.float64))
    for tokens in [*range(1, 27), 35, 36, 37, 47, 48, 49, 70, 95, 96, 97]:
        first = int(rng.integers(0, 110 - tokens))
        part = slice(first, first + tokens)
        out = matmul(isa, layout, packed, rows, x[part], bias, add[part])
        assert np.array_equal(out, every_token[part]), tokens


@every_isa
@every_layout
def test_random_shapes_strides_and_operands(isa, layout):
    rng = np.random.default_rng(7)
    for _ in range(25):
        rows, cols, tokens = (int(n) for n in rng.integers(1, (90, 700, 71)))
        weight = rng.standard_normal((rows, cols)).astype(np.float32) * np.float32(10.0 ** rng.integers(-3, 3))
        x = rng.standard_normal((tokens, cols + 5)).astype(np.float32)[:, :cols]  # rows with a gap between them
        bias = rng.standard_normal(rows).astype(np.float32) if rng.random() < 0.5 else None
        out = rng.standard_normal((tokens, rows + 3)).astype(np.float32)
        gap, residual = out[:, rows:].copy(), out[:, :rows].copy()
        if rng.random() < 0.5:  # the residual is added in place
            matmul(isa, layout, pack(weight, layout), rows, x, bias, add=out, out=out)
            terms = [residual.astype(np.float64)]
        else:
            matmul(isa, layout, pack(weight, layout), rows, x, bias, out=out)
            terms = []
        terms += [] if bias is None else [bias.astype(np.float64)]
        assert_near(out[:, :rows], isa, layout, weight, x, *terms)
        assert np.array_equal(out[:, rows:], gap)


@every_isa
@every_layout
@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_what_lies_beyond_a_row_of_activations_has_no_part(isa, layout, tokens):
    rng = np.random.default_rng(3)
    weight = rng.standard_normal((20, 37)).astype(np.float32)
    x = np.full((tokens, 40), np.nan, np.float32)
    x[:, :37] = rng.standard_normal((tokens, 37))
    out = matmul(isa, layout, pack(weight, layout), 20, x[:, :37])
    assert_near(out, isa, layout, weight, x[:, :37])


@every_isa
@every_layout
def test_a_nan_stays_in_its_token(isa, layout):
    rng = np.random.default_rng(4)
    weight = rng.standard_normal((33, 64)).astype(np.float32)
    x = rng.standard_normal((9, 64)).astype(np.float32)
    x[4, 63] = np.nan
    out = matmul(isa, layout, pack(weight, layout), 33, x)
    assert np.isnan(out[4]).all()
    assert np.isfinite(np.delete(out, 4, axis=0)).all()
