"""Phi-3 (one tensor for q, k and v, one for gate and up) and Phi-1 and 2 (parallel branches after one LayerNorm)."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from plait.model.config import ModelConfig, NormSpec
from plait.model.families import register
from plait.model.families.llama import (
    each_attention,
    one_norm_for_both,
    pre_norm_decoder,
    same_window_everywhere,
)
from plait.model.name_map import NameMap, Rule, gate_up_rows, paired, q_k_v_rows
from plait.model.reader import ConfigReader

log = logging.getLogger("plait.config")

_ORIGINAL = "original_max_position_embeddings"
_LAYER = "model.layers.{i}"
FUSED_GATE_UP = Rule(
    f"{_LAYER}.mlp.gate_up_proj.weight",
    (f"{_LAYER}.mlp.gate_proj.weight", f"{_LAYER}.mlp.up_proj.weight"),
    rows=gate_up_rows,
)
PHI3_NAMES = NameMap(
    rules=(
        FUSED_GATE_UP,
        Rule(
            f"{_LAYER}.self_attn.qkv_proj.weight",
            tuple(f"{_LAYER}.self_attn.{part}_proj.weight" for part in "qkv"),
            rows=q_k_v_rows,
        ),
    )
)


def _phi3_rope(read: ConfigReader) -> Mapping[str, Any]:
    """The rope block; `su` and `yarn` are this family's older names of longrope."""
    block = read.rope_block()
    for key in ("type", "rope_type"):
        if block.get(key) in ("su", "yarn"):
            block[key] = "longrope"
    # Beside the block, and the class's default of it too, outranks what the block says.
    original = read(_ORIGINAL)
    if original is not None and "longrope" in (block.get("type"), block.get("rope_type")):
        own = block.get(_ORIGINAL, original)
        if own != original:
            log.warning("%s=%r of the rope block gives way to the model's own, %r", _ORIGINAL, own, original)
        block[_ORIGINAL] = original
    return block


@register("phi3", PHI3_NAMES, architecture="Phi3ForCausalLM")
def phi3(read: ConfigReader) -> ModelConfig:
    config = pre_norm_decoder(read, windows=same_window_everywhere(read), rope=_phi3_rope(read), partial=1.0)
    # The class has this dropout in its configuration and does not apply it.
    read("embd_pdrop")
    return replace(config, hidden_dropout=read.dropout("resid_pdrop"))


_BOTH = ("weight", "bias")
PHI_NAMES = NameMap(
    rules=(
        *paired("model.final_layernorm", "model.norm", _BOTH),
        *paired(f"{_LAYER}.self_attn.dense", f"{_LAYER}.self_attn.o_proj", _BOTH),
        *paired(f"{_LAYER}.self_attn.q_layernorm", f"{_LAYER}.self_attn.q_norm", _BOTH),
        *paired(f"{_LAYER}.self_attn.k_layernorm", f"{_LAYER}.self_attn.k_norm", _BOTH),
        *paired(f"{_LAYER}.mlp.fc1", f"{_LAYER}.mlp.up_proj", _BOTH),
        *paired(f"{_LAYER}.mlp.fc2", f"{_LAYER}.mlp.down_proj", _BOTH),
    )
)


@register("phi", PHI_NAMES, architecture="PhiForCausalLM")
def phi(read: ConfigReader) -> ModelConfig:
    norm = NormSpec("layer", read.number("layer_norm_eps"), bias=True)
    config = pre_norm_decoder(read, norm=norm, partial=0.5, qkv_bias=True, o_bias=True, mlp_bias=True, gated=False)
    if read.flag("qk_layernorm"):
        config = each_attention(config, head_norm=norm)
    return replace(
        one_norm_for_both(config),
        head_bias=True,
        embedding_dropout=read.dropout("embd_pdrop"),
        hidden_dropout=read.dropout("resid_pdrop"),
    )
