"""Latent attention: which of its two equal forms a sequence of a step takes, and what they cost. No torch.

Expanded: keys [W_uk c ; k_rope] and values W_uv c of every head are made of the cached rows [c ; k_rope], then ordinary
attention. Absorbed: W_uk goes to the query, q~ = W_uk^T q_nope, and all heads attend to the cached rows themselves,
whose first r features are the values; W_uv maps each head's result back. The first is cheaper for prompts, the second
for decoding.
"""

from __future__ import annotations

from typing import Any

from plait.ops.spec import LatentSpec

# What a multiply-add of attention costs relative to one in a product with the weight, in the reference.
ATTEND_COST = 1.0


def expands(queries: int, context: int, spec: LatentSpec, attend_cost: float = ATTEND_COST) -> bool:
    """Whether a sequence with so many queries in this step and so many keys (these included) takes the expanded form.

    Multiply-adds per head, for T queries and C keys (P = r (nope + v) per product):
    expanded C P + a T C (nope + rope + v), absorbed T P + a T C (2 r + rope). In doubles: every product without a is
    exact, so that another implementation of the rule decides the same. Equal costs: absorbed.
    """
    if spec.form != "auto":
        return spec.form == "expanded"
    product = spec.latent_width * (spec.nope_width + spec.value_width)
    pairs = queries * context
    expanded = float(context * product) + attend_cost * float(pairs * (spec.key_width + spec.value_width))
    absorbed = float(queries * product) + attend_cost * float(pairs * (spec.row_width + spec.latent_width))
    return expanded < absorbed


def flops_per_key(name: str, spec: dict[str, Any], expanded: bool = False) -> int:
    """Floating-point operations per token and visible key of `attend` or `attend_latent`, from its recorded spec.

    expanded: of latent attention in that form.
    """
    heads, key, value = spec["num_heads"], spec.get("key_width"), spec["value_width"]
    if name == "attend_latent":
        latent = LatentSpec(**spec)
        form = latent.expanded if expanded else latent.absorbed
        key, value = form.key_width, form.value_width
    return 2 * heads * (key + value)
