"""The second layout of latent attention's weights: of every head the rows that make keys, transposed. No torch.

`kv_b_proj` [H (nope + v), r] makes each head's keys and values of a latent. The absorbed form (plait.ops.latent)
multiplies queries with the transpose of the rows that make keys, which a packed matrix cannot be read as: it lies
beside the weight as a stack [H, r, nope], under a name that is no parameter's. Its numbers are the weight's own, in
bf16 where that is quantised.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import numpy as np
from numpy.typing import NDArray

from plait.kernels import abi
from plait.model.config import LatentAttentionSpec, ModelConfig
from plait.ops.spec import LatentSpec
from plait.weights.fill import Source, fill
from plait.weights.store import PackedWeight, aligned_bytes, packed_bytes, second_name


def fits(spec: LatentSpec) -> bool:
    """Whether the kernels take these widths: whole panels of keys, of values and of latents."""
    widths = (spec.latent_width, spec.nope_width, spec.value_width)
    return not any(width % abi.PANEL_ROWS for width in widths) and not spec.rope_width % 2


def latent_weights(config: ModelConfig, names: Collection[str]) -> dict[str, LatentSpec]:
    """Those of these parameters that need a second layout."""
    found = {}
    for index, layer in enumerate(config.layers):
        name = f"model.layers.{index}.self_attn.kv_b_proj.weight"
        if isinstance(layer.attention, LatentAttentionSpec) and name in names and fits(layer.attention.attend):
            found[name] = layer.attention.attend
    return found


def second_layout(layout: str) -> str:
    """The layout of the transposed rows of a weight that is kept in `layout`."""
    return layout if layout in abi.FLOAT_LAYOUTS else "BF16"


def second_bytes(layout: str, spec: LatentSpec) -> int:
    """Bytes of the second layout of a weight that is kept in `layout`."""
    return packed_bytes(second_layout(layout), _shape(spec))


def make_second(
    weight: PackedWeight, spec: LatentSpec, threads: int, allocate: Callable[[int], NDArray[np.uint8]] = aligned_bytes
) -> PackedWeight:
    """The second layout of a packed weight [H (nope + v), r]. allocate: see plait.weights.pack."""
    layout = second_layout(weight.layout)
    data = allocate(second_bytes(weight.layout, spec))
    second = PackedWeight(second_name(weight.name), _shape(spec), layout, data)
    fill_second(second, weight, spec, threads)
    return second


def fill_second(second: PackedWeight, weight: PackedWeight, spec: LatentSpec, threads: int) -> None:
    """Make it anew, of the weight's present numbers."""
    heads, latent, nope = _shape(spec)
    starts = np.arange(heads) * (nope + spec.value_width)
    keys = weight.rows((starts[:, None] + np.arange(nope)).reshape(-1)).reshape(heads, nope, latent)
    turned = np.ascontiguousarray(keys.transpose(0, 2, 1))
    fill(second, Source("F32", turned.ctypes.data, 4 * nope), None, threads)


def _shape(spec: LatentSpec) -> tuple[int, int, int]:
    return spec.num_heads, spec.latent_width, spec.nope_width
