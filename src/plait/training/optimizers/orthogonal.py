"""Iterations that make a matrix's singular values equal: X -> a X + (b A + c A^2) X with A = X X^T, some steps of it.

An odd polynomial of X acts on the singular values alone. With the same coefficients in every step they end between
0.68 and 1.14 (where they were 0.05 to 1 before); Polar Express chooses every step's best for what the steps before
left.
"""

from __future__ import annotations

import torch
from torch import Tensor

from plait.errors import UsageError

Coefficients = list[tuple[float, float, float]]

# Jordan 2024, "Muon: An optimizer for hidden layers in neural networks": steep at 0, in every step.
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
# Amsel, Persson, Musco and Gower 2025, "The Polar Express", the table of section 4 for singular values from 1e-3 on.
POLAR_EXPRESS = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.875, -1.25, 0.375),  # from here on
)
# Rounding may leave singular values a little above where a step wants them; the last step forgives it.
_SAFETY = 1.01
ITERATIONS = ("newton_schulz", "polar_express")
# Below this Frobenius norm a matrix is not stretched to 1.
SMALLEST_NORM = 1e-7


def coefficients(iteration: str, steps: int) -> Coefficients:
    """(a, b, c) of every step. Raises UsageError for an unknown iteration."""
    if iteration == "newton_schulz":
        return [NEWTON_SCHULZ] * steps
    if iteration != "polar_express":
        raise UsageError(f"unknown iteration {iteration!r}: {' or '.join(ITERATIONS)}")
    table = [POLAR_EXPRESS[min(step, len(POLAR_EXPRESS) - 1)] for step in range(steps)]
    safe = [(a / _SAFETY, b / _SAFETY**3, c / _SAFETY**5) for a, b, c in table[:-1]]
    return [*safe, table[-1]]


def orthogonalise(x: Tensor, steps: Coefficients, dtype: torch.dtype) -> Tensor:
    """[B, R, C] of any floating dtype -> the same shape in `dtype`, in which the products are made.

    Each matrix is scaled to Frobenius norm 1 first, and transposed where it is tall, so that A is small.
    """
    tall = x.shape[-2] > x.shape[-1]
    y = x.to(dtype)
    if tall:
        y = y.mT
    y = y / torch.linalg.vector_norm(y, dim=(-2, -1), keepdim=True).clamp(min=SMALLEST_NORM)
    for a, b, c in steps:
        gram = y @ y.mT
        factor = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        y = torch.baddbmm(y, factor, y, beta=a)
    return y.mT if tall else y
