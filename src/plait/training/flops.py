"""How much arithmetic a training token needs, and how much this machine can do: the share of peak in the progress."""

from __future__ import annotations

import time

import torch

from plait.model.config import LatentAttentionSpec, ModelConfig


def flops_per_token(config: ModelConfig, length: float, target_share: float = 1.0) -> float:
    """Floating-point operations of forward and backward per token, a multiply-add as two.

    6 per parameter that takes part in a product (Kaplan et al. 2020, section 2.1), of experts those that a token goes
    through, of the head for the rows with a target; and attention's products with `length` tokens a row, half of which
    a causal query sees.
    """
    counts = config.param_counts()
    head = config.vocab_size * config.hidden_size
    inner = counts["active"] - counts["embedding"] - counts["head"] - counts["norms"]
    attention = 0.0
    for layer in config.layers:
        a = layer.attention
        if isinstance(a, LatentAttentionSpec):
            widths, window = a.key_width + a.value_width, 0
        else:
            widths, window = a.key_width + a.value_width, a.window
        seen = min(length / 2, window) if window else length / 2
        attention += 6.0 * a.num_heads * widths * seen
    return 6.0 * (inner + head * target_share) + attention


def measured_peak(device: str, dtype: torch.dtype, size: int = 1024, seconds: float = 0.25) -> float:
    """Operations per second of square products on this device, now, with torch's present threads."""
    n = size if torch.device(device).type == "cpu" else 4 * size
    a, b = (torch.ones(n, n, dtype=dtype, device=device) for _ in range(2))
    _product(a, b)
    best, end = 0.0, time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        _product(a, b)
        best = max(best, 2.0 * n**3 / (time.perf_counter() - start))
    return best


def _product(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.mm(a, b)
    if a.is_cuda:
        torch.cuda.synchronize(a.device)
