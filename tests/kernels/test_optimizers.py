"""The optimisers' kernels, of every instruction set that this machine runs, against the formulas in float64."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

from plait.kernels import abi, native
from tests.kernels.test_matmul_float import instruction_sets

needs_library = pytest.mark.skipif(
    native.native_library() is None, reason=f"needs the native library: {native.reason()}"
)
every_isa = pytest.mark.parametrize("isa", instruction_sets())
# Tails of every width, and more than one item of work (16,384 numbers).
SIZES = [1, 3, 7, 16, 33, 1000, 16384, 40000]
NUMBERS = {
    "decay": 0.97,
    "rate": 0.03,
    "root": 1.7,
    "eps": 1e-4,
    "beta1": 0.9,
    "rest1": 0.1,
    "beta2": 0.8,
    "rest2": 0.2,
    "extra": 0.475,
}


class Arrays:
    """Pieces of these sizes in one memory for each of parameter, gradient and three states; float32 from 0.1 to 1."""

    def __init__(self, sizes: list[int], seed: int = 0) -> None:
        random = np.random.default_rng(seed)
        self.sizes = sizes
        total = sum(sizes)
        self.values = [random.uniform(0.1, 1, total).astype(np.float32) for _ in range(5)]
        for array in self.values[:3]:  # parameter, gradient, first state: of both signs
            array *= random.choice([-1, 1], total).astype(np.float32)
        self.values[1] *= 0.01  # so that MARS clips long pieces alone

    def updates(self, rule: str) -> Any:
        made = (abi.Update * len(self.sizes))()
        start = 0
        for update, size in zip(made, self.sizes, strict=True):
            parameter, gradient, *states = (array.ctypes.data + 4 * start for array in self.values)
            update.parameter, update.gradient, update.state[:] = parameter, gradient, states
            update.count, update.rule = size, abi.RULES[rule]
            for name, value in NUMBERS.items():
                setattr(update, name, value)
            start += size
        return made

    def pieces(self) -> list[list[np.ndarray]]:
        """Of every piece the five arrays, in float64."""
        ends = np.cumsum(self.sizes)[:-1]
        return [list(piece) for piece in zip(*(np.split(a.astype(np.float64), ends) for a in self.values), strict=True)]


def run(rule: str, arrays: Arrays, isa: str | None = None) -> list[float]:
    library = native.native_library()
    assert library is not None
    updates = arrays.updates(rule)
    name = None if isa is None else isa.encode()
    assert library.functions.plait_optimise(name, ctypes.addressof(updates), len(updates)) == 0
    return [update.measured for update in updates]


def expected(rule: str, piece: list[np.ndarray]) -> tuple[list[np.ndarray], float]:
    """(parameter, gradient and states after the step, what is measured)"""
    n = {name: float(np.float32(value)) for name, value in NUMBERS.items()}
    p, g, m, s, last = piece
    if rule == "lion":
        direction = n["beta1"] * m + n["rest1"] * g
        p = n["decay"] * p - n["rate"] * np.sign(direction)
        return [p, g, n["beta2"] * m + n["rest2"] * g, s, last], 0.0
    if rule == "sophia":
        m = n["beta1"] * m + n["rest1"] * g
        ratio = m / (n["extra"] * s + n["eps"])
        p = n["decay"] * p - n["rate"] * np.clip(ratio, -1, 1)
        return [p, g, m, s, last], float((np.abs(ratio) < 1).sum())
    c, length = g, 0.0
    if rule == "mars":
        c = g + n["extra"] * (g - last)
        length = float(np.sqrt((c * c).sum()))
        c, last = c / max(1.0, length), g
    m = n["beta1"] * m + n["rest1"] * c
    s = n["beta2"] * s + n["rest2"] * c * c
    p = n["decay"] * p - n["rate"] * m / (np.sqrt(s) * n["root"] + n["eps"])
    return [p, g, m, s, last], length


@needs_library
@every_isa
@pytest.mark.parametrize("rule", abi.RULES)
def test_a_step_is_the_formula(isa: str, rule: str) -> None:
    arrays = Arrays(SIZES)
    wanted = [expected(rule, piece) for piece in arrays.pieces()]
    measured = run(rule, arrays, isa)
    for (tensors, value), made, got in zip(wanted, arrays.pieces(), measured, strict=True):
        for tensor, ours in zip(tensors, made, strict=True):
            assert np.abs(tensor - ours).max() < 4e-7  # numbers around 1: a few units in the last place
        assert got == pytest.approx(value, rel=1e-6, abs=1 if rule == "sophia" else 1e-6)
    if rule == "mars":
        assert min(measured) < 1 < max(measured)


@needs_library
@pytest.mark.parametrize("rule", abi.RULES)
def test_any_number_of_threads_makes_the_same_numbers(rule: str) -> None:
    library = native.native_library()
    assert library is not None
    before, results = library.threads(), []
    try:
        for threads in (1, 2, 5):
            library.set_threads(threads)
            arrays = Arrays([70000, 5, 1 << 20, 40000], seed=1)  # MARS makes these in two waves
            measured = run(rule, arrays)
            results.append((measured, [array.copy() for array in arrays.values]))
    finally:
        library.set_threads(before)
    for measured, values in results[1:]:
        assert measured == results[0][0]
        assert all(np.array_equal(a, b) for a, b in zip(values, results[0][1], strict=True))


@needs_library
def test_updates_that_cannot_be_are_refused() -> None:
    library = native.native_library()
    assert library is not None
    arrays = Arrays([4, 4])
    changes: list[tuple[str, Any, str]] = [
        ("rule", 9, "update 1: there is no rule 9"),
        ("count", -1, "update 1: -1 numbers"),
        ("gradient", None, "update 1: no parameter or gradient"),
    ]
    for name, value, message in changes:
        updates = arrays.updates("mars")
        setattr(updates[1], name, value)
        assert library.functions.plait_optimise(None, ctypes.addressof(updates), 2) == -1
        assert library.last_error() == message
    updates = arrays.updates("mars")
    updates[1].state[2] = None
    assert library.functions.plait_optimise(None, ctypes.addressof(updates), 2) == -1
    assert library.last_error() == "update 1: rule 2 needs state 2"
    assert library.functions.plait_optimise(b"z80", ctypes.addressof(updates), 0) == -1
    assert "z80" in library.last_error()
