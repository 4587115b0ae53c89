"""Sizes of latent attention: how many parameters it has, and widths that no forward could carry out. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from plait.errors import ConfigError

if TYPE_CHECKING:
    from plait.model.config import LatentAttentionSpec


def latent_params(a: LatentAttentionSpec, hidden_size: int) -> tuple[int, int]:
    """Parameters of its projections with their biases, and of the norms inside."""
    queries, made = a.num_heads * a.key_width, a.num_heads * (a.nope_width + a.value_width)
    row, rank = a.attend.row_width, a.query_rank
    count = hidden_size * (row + a.num_heads * a.value_width) + a.latent_width * made
    count += hidden_size * queries if rank is None else rank * (hidden_size + queries)
    count += a.bias * (row + hidden_size + (rank or 0))
    return count, a.inner_norm.weight * (a.latent_width + (rank or 0))


def check_latent(layer: int, a: LatentAttentionSpec, ffn_width: int) -> None:
    """Raises ConfigError naming the layer and the keys."""
    rank = a.query_rank
    widths = (a.num_heads, a.latent_width, a.nope_width, a.value_width, ffn_width, 1 if rank is None else rank)
    if min(widths) < 1:
        raise ConfigError(
            f"layer {layer}: num_attention_heads={a.num_heads}, kv_lora_rank={a.latent_width},"
            f" q_lora_rank={'null' if rank is None else rank}, qk_nope_head_dim={a.nope_width},"
            f" v_head_dim={a.value_width} and intermediate_size={ffn_width} must all be at least 1"
            " (q_lora_rank may be null)"
        )
    if a.rope_width < 2 or a.rope_width % 2:
        raise ConfigError(f"layer {layer}: qk_rope_head_dim={a.rope_width} must be even and at least 2")
