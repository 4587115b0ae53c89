"""What is quantised here is what the `gguf` package expands, with an error that the type allows."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from plait.errors import WeightError
from plait.weights.encode import ENCODERS, encode
from plait.weights.gguf_types import TYPES_BY_NAME, row_bytes

QUANTISED = [name for name in ENCODERS if name not in ("F32", "F16", "BF16")]
K_TYPES = ["Q4_K", "Q5_K", "Q6_K"]
# Root mean square error of normally distributed numbers, as a share of theirs: a little above what the bits allow.
ALLOWED = {"Q4_0": 0.09, "Q4_1": 0.082, "Q5_0": 0.045, "Q5_1": 0.04, "Q8_0": 0.0057}
ALLOWED |= {"Q4_K": 0.074, "Q5_K": 0.0375, "Q6_K": 0.0185}


def there_and_back(values: NDArray[np.float32], kind: str) -> NDArray[np.float32]:
    blocks = encode(lambda a, b: values[a:b], *values.shape, kind, "x")
    assert blocks.shape == (len(values), row_bytes(TYPES_BY_NAME[kind], values.shape[1]))
    return gguf.dequantize(blocks, gguf.GGMLQuantizationType[kind])


def normal(rows: int, columns: int, scale: float = 1.0) -> NDArray[np.float32]:
    return (np.random.default_rng(3).standard_normal((rows, columns)) * scale).astype(np.float32)


def share(found: NDArray[Any], expected: NDArray[Any]) -> float:
    return float(
        np.sqrt(((found.astype(np.float64) - expected) ** 2).mean() / (expected.astype(np.float64) ** 2).mean())
    )


@pytest.mark.parametrize("scale", [1.0, 1e-2, 1e3])
@pytest.mark.parametrize("kind", QUANTISED)
def test_the_error_of_a_type_is_what_its_bits_allow(kind: str, scale: float) -> None:
    values = normal(16, 1024, scale)
    assert share(there_and_back(values, kind), values) < ALLOWED[kind]


@pytest.mark.parametrize("kind", K_TYPES)
def test_a_k_type_is_better_than_the_simple_type_of_its_bits(kind: str) -> None:
    """Where scales differ from part to part, and where parts are far from zero."""
    values = normal(8, 1024) * np.repeat(np.exp(normal(8, 64)), 16, axis=1)
    simple = {"Q4_K": "Q4_0", "Q5_K": "Q5_0", "Q6_K": "Q5_0"}[kind]
    assert share(there_and_back(values, kind), values) < share(there_and_back(values, simple), values)
    above = values + np.float32(20)
    if kind != "Q6_K":  # which has no minimum
        assert share(there_and_back(above, kind) - 20, values) < share(there_and_back(above, simple) - 20, values)


@pytest.mark.parametrize("kind", QUANTISED)
def test_zeros_stay_zero_and_constants_stay_near(kind: str) -> None:
    values = np.zeros((4, 512), np.float32)
    values[1], values[2] = 0.37, -5.5
    values[3, 300] = 1.0  # one number among zeros
    found = there_and_back(values, kind)
    assert not found[0].any() and not found[3, :256].any()
    assert np.abs(found - values).max() <= 0.05 * 5.5
    assert abs(found[1] / 0.37 - 1).max() < 0.05 and abs(found[3, 300] - 1) < 0.05


@pytest.mark.parametrize("kind", K_TYPES)
def test_numbers_that_are_on_the_grid_are_kept(kind: str) -> None:
    """d * scale * q with one scale for all parts is what the search must find again."""
    bits = {"Q4_K": 16, "Q5_K": 32, "Q6_K": 64}[kind]
    q = np.random.default_rng(1).integers(0, bits, (4, 512)).astype(np.float32)
    q.reshape(4, -1, 16)[:, :, 0], q.reshape(4, -1, 16)[:, :, 1] = 0, bits - 1  # every part has the whole range
    values = (q - bits // 2) / np.float32(64)
    assert np.abs(there_and_back(values, kind) - values).max() < 0.51 / 64


@pytest.mark.parametrize("scale", [1e-12, 1e-30, 1e-42])
@pytest.mark.parametrize("kind", K_TYPES)
def test_numbers_below_the_range_of_the_scales_become_zero(kind: str, scale: float) -> None:
    found = there_and_back(normal(2, 256, scale), kind)
    assert np.isfinite(found).all() and np.abs(found).max() <= 1e-7


@pytest.mark.parametrize("kind", QUANTISED)
def test_what_a_type_cannot_hold_is_refused_by_name(kind: str) -> None:
    for bad in (np.inf, -np.inf, np.nan):
        values = normal(2, 256)
        values[1, 7] = bad
        with pytest.raises(WeightError, match=r"'blk\.3\.x' holds"):
            encode(lambda a, b, v=values: v[a:b], 2, 256, kind, "blk.3.x")
    with pytest.raises(WeightError, match="too large for"):
        encode(lambda a, b: normal(2, 256, 1e9)[a:b], 2, 256, kind, "x")


def test_fp16_refuses_what_would_become_infinite() -> None:
    with pytest.raises(WeightError, match="too large for F16"):
        encode(lambda a, b: np.full((1, 4), 70000, np.float32), 1, 4, "F16", "x")


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K"])
def test_threads_and_pieces_do_not_change_the_bytes(kind: str) -> None:
    values = normal(300, 4096)  # more than one piece
    one = encode(lambda a, b: values[a:b], 300, 4096, kind, "x", threads=1)
    assert np.array_equal(one, encode(lambda a, b: values[a:b], 300, 4096, kind, "x", threads=3))
    assert np.array_equal(one[200:201], encode(lambda a, b: values[200:201], 1, 4096, kind, "x"))
