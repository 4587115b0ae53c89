"""What the iterations do to singular values."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from plait.errors import UsageError
from plait.training.optimizers.orthogonal import ITERATIONS, POLAR_EXPRESS, coefficients, orthogonalise

SHAPES = [(8, 8), (8, 32), (32, 8), (64, 24)]


def with_singular_values(shape: tuple[int, int], values: Tensor, seed: int = 0) -> Tensor:
    """A float64 matrix with these singular values and random directions."""
    generator = torch.Generator().manual_seed(seed)
    u, v = (torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64))[0] for n in shape)
    k = min(shape)
    return u[:, :k] @ torch.diag(values.double()) @ v[:, :k].T


def scalar(x: Tensor, iteration: str, steps: int) -> Tensor:
    """The iteration on numbers, in float64: a x + b x^3 + c x^5."""
    for a, b, c in coefficients(iteration, steps):
        x = a * x + b * x**3 + c * x**5
    return x


def test_newton_schulz_maps_singular_values_into_a_band() -> None:
    """From [0.05, 1] into [0.6, 1.25], for every number of a fine grid."""
    mapped = scalar(torch.linspace(0.05, 1, 100_001, dtype=torch.float64), "newton_schulz", 5)
    assert 0.6 < mapped.min() < mapped.max() < 1.25


@pytest.mark.parametrize("iteration", ITERATIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_matrix_is_mapped_as_its_singular_values_are(shape: tuple[int, int], iteration: str) -> None:
    values = torch.linspace(0.05, 1, min(shape), dtype=torch.float64)
    matrix = with_singular_values(shape, values)
    for dtype, allowed in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        made = orthogonalise(matrix[None].to(dtype), coefficients(iteration, 5), dtype)[0]
        got = torch.linalg.svdvals(made.double()).sort().values
        expected = scalar(values / values.norm(), iteration, 5).sort().values
        assert torch.allclose(got, expected, rtol=0, atol=allowed)


@pytest.mark.parametrize("shape", SHAPES[:3])
def test_singular_values_above_a_hundredth_of_the_norm_end_in_the_band(shape: tuple[int, int]) -> None:
    """TRN-09's bound, 0.65 to 1.25, with 5 steps in fp32; in bf16 a little wider. For a matrix of 8 rows, all values
    between 0.1 and 1 times a number lie above 1% of the Frobenius norm, sqrt(8) times that number at most."""
    matrix = with_singular_values(shape, torch.linspace(0.1, 1, 8))
    for dtype, slack in ((torch.float32, 0.0), (torch.bfloat16, 0.05)):
        made = orthogonalise(matrix[None].float(), coefficients("newton_schulz", 5), dtype)[0]
        got = torch.linalg.svdvals(made.double())
        assert 0.65 - slack < got.min() and got.max() < 1.25 + slack


def test_polar_express_comes_nearer_to_one_than_newton_schulz() -> None:
    x = torch.logspace(-3, 0, 20_001, dtype=torch.float64)
    for steps in (5, 8):
        errors = {name: float((scalar(x, name, steps) - 1).abs().max()) for name in ITERATIONS}
        assert errors["polar_express"] < errors["newton_schulz"]
    assert errors["polar_express"] < 1e-12  # with 8 steps it converges; the fixed coefficients never do


def test_polar_express_is_the_best_odd_quintic_of_every_step() -> None:
    """What defines the table: a step's polynomial has the smallest max |1 - p(x)| on the interval that the steps
    before leave. It does where the error has 4 extremes of equal height and alternating sign (Chebyshev). The first
    three steps are made for an interval that begins later (the paper's cushion), which lowers one inner extreme alone.
    """
    low, high = 1e-3, 1.0
    for step, (a, b, c) in enumerate(POLAR_EXPRESS[:6]):
        x = torch.linspace(low, high, 400_001, dtype=torch.float64)
        error = 1 - (a * x + b * x**3 + c * x**5)
        turns = (error[1:-1] - error[:-2]) * (error[2:] - error[1:-1]) < 0
        extremes = torch.cat([error[:1], error[1:-1][turns], error[-1:]])
        height = extremes[0]
        assert len(extremes) == 4
        assert torch.allclose(extremes[[1, 3]], -height.expand(2), rtol=1e-4, atol=1e-9)
        assert step < 3 or torch.allclose(extremes[2], height, rtol=1e-4, atol=1e-9)
        assert 0 < extremes[2] <= height * 1.0001
        low, high = float(1 - height), float(1 + height)
    assert high - low < 0.003


def test_a_zero_matrix_stays_zero_and_unknown_iterations_are_refused() -> None:
    assert not orthogonalise(torch.zeros(1, 3, 5), coefficients("newton_schulz", 5), torch.float32).any()
    with pytest.raises(UsageError, match="unknown iteration 'newton': newton_schulz or polar_express"):
        coefficients("newton", 5)
