"""Name maps of GGUF files, per architecture: blk.0.attn_q.weight and the like to our parameters.

Architectures whose rotary pairs are adjacent in GGUF and halves here (llama) had their q and k rows reordered by the
converter; the rules undo it. Gemma's norms are stored as 1 + w.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from plait.model.config import AttentionSpec, ModelConfig
from plait.model.expert_names import expert_rules
from plait.model.name_map import NameMap, RowsOf, Rule, gate_up_rows, paired, q_k_v_rows

_G, _O = "blk.{i}", "model.layers.{i}"
_BOTH = ("weight", "bias")


def _unpaired(heads: int, width: int) -> NDArray[np.int64]:
    """Rows in our order: pair j's two features stand at 2j, 2j + 1 of a head in the file, at j, j + d/2 here."""
    return np.arange(heads * width).reshape(heads, width // 2, 2).swapaxes(1, 2).ravel()


def _attention(config: ModelConfig, layer: int) -> AttentionSpec:
    a = config.layers[layer].attention
    assert isinstance(a, AttentionSpec)
    return a


def q_rows(config: ModelConfig, layer: int) -> Sequence[NDArray[np.int64]]:
    a = _attention(config, layer)
    return [_unpaired(a.num_heads, a.key_width)]


def k_rows(config: ModelConfig, layer: int) -> Sequence[NDArray[np.int64]]:
    a = _attention(config, layer)
    return [_unpaired(a.num_kv_heads, a.key_width)]


_ENDS = (*paired("token_embd", "model.embed_tokens"), *paired("output", "lm_head"))
_FEED_FORWARD = tuple(
    rule for part in ("gate", "up", "down") for rule in paired(f"{_G}.ffn_{part}", f"{_O}.mlp.{part}_proj", _BOTH)
)
_V_O = (
    *paired(f"{_G}.attn_v", f"{_O}.self_attn.v_proj", _BOTH),
    *paired(f"{_G}.attn_output", f"{_O}.self_attn.o_proj", _BOTH),
)
_QK_NORM = (
    *paired(f"{_G}.attn_q_norm", f"{_O}.self_attn.q_norm"),
    *paired(f"{_G}.attn_k_norm", f"{_O}.self_attn.k_norm"),
)
_PRE_NORMS = (
    *paired("output_norm", "model.norm", _BOTH),
    *paired(f"{_G}.attn_norm", f"{_O}.input_layernorm", _BOTH),
    *paired(f"{_G}.ffn_norm", f"{_O}.post_attention_layernorm", _BOTH),
)
_POST_NORMS = (
    *paired(f"{_G}.post_attention_norm", f"{_O}.post_self_attn_layernorm"),
    *paired(f"{_G}.post_ffw_norm", f"{_O}.post_mlp_layernorm"),
)


def _q_k(q: RowsOf | None = None, k: RowsOf | None = None) -> tuple[Rule, ...]:
    return (
        *paired(f"{_G}.attn_q", f"{_O}.self_attn.q_proj", _BOTH, rows=q),
        *paired(f"{_G}.attn_k", f"{_O}.self_attn.k_proj", _BOTH, rows=k),
    )


def _one_less(rules: Sequence[Rule]) -> tuple[Rule, ...]:
    return tuple(Rule(r.file, r.ours, r.rows, offset=-1.0) for r in rules)


_ROPE = (r"rope_freqs\.weight",)
_EXPERTS = (
    *paired(f"{_G}.ffn_gate_inp", f"{_O}.mlp.gate"),
    *expert_rules(f"{_G}.ffn_{{part}}_exps.weight"),
    # Files of 2023 and early 2024 have one tensor per expert.
    *expert_rules(f"{_G}.ffn_{{part}}.{{e}}.weight", read_only=True),
)
_GATED_SHARED = (
    *paired(f"{_G}.ffn_gate_inp_shexp", f"{_O}.mlp.shared_expert_gate"),
    *(r for p in ("gate", "up", "down") for r in paired(f"{_G}.ffn_{p}_shexp", f"{_O}.mlp.shared_expert.{p}_proj")),
)
_QWEN = NameMap((*_ENDS, *_PRE_NORMS, *_q_k(), *_V_O, *_QK_NORM, *_FEED_FORWARD), _ROPE)

GGUF_NAMES: dict[str, NameMap] = {
    "llama": NameMap((*_ENDS, *_PRE_NORMS, *_q_k(q_rows, k_rows), *_V_O, *_FEED_FORWARD, *_EXPERTS), _ROPE),
    "qwen2": _QWEN,
    "qwen3": _QWEN,
    "qwen2moe": NameMap((*_QWEN.rules, *_EXPERTS, *_GATED_SHARED), _ROPE),
    "qwen3moe": NameMap((*_QWEN.rules, *_EXPERTS), _ROPE),
    "olmoe": NameMap((*_QWEN.rules, *_EXPERTS), _ROPE),
    "gemma3": NameMap(
        (
            *_ENDS,
            *_q_k(),
            *_V_O,
            *_FEED_FORWARD,
            *_one_less(
                (
                    *_PRE_NORMS,
                    *_QK_NORM,
                    *_POST_NORMS,
                )
            ),
        ),
        _ROPE,
    ),
    "gemma2": NameMap(
        (*_ENDS, *_q_k(), *_V_O, *_FEED_FORWARD, *_one_less((*_PRE_NORMS, *_POST_NORMS))),
        _ROPE,
    ),
    "olmo2": NameMap((*_ENDS, *_PRE_NORMS, *_q_k(), *_V_O, *_QK_NORM, *_POST_NORMS, *_FEED_FORWARD), _ROPE),
    "starcoder2": _QWEN,
    "phi3": NameMap(
        (
            *_ENDS,
            *_PRE_NORMS,
            *paired(f"{_G}.attn_output", f"{_O}.self_attn.o_proj"),
            *paired(f"{_G}.ffn_down", f"{_O}.mlp.down_proj"),
            Rule(f"{_G}.ffn_up.weight", tuple(f"{_O}.mlp.{p}_proj.weight" for p in ("gate", "up")), gate_up_rows),
            Rule(f"{_G}.attn_qkv.weight", tuple(f"{_O}.self_attn.{p}_proj.weight" for p in "qkv"), q_k_v_rows),
        ),
        (*_ROPE, r"rope_factors_(long|short)\.weight"),
    ),
    "gptneox": NameMap(
        (
            *_ENDS,
            *_PRE_NORMS,
            *paired(f"{_G}.attn_output", f"{_O}.self_attn.o_proj", _BOTH),
            *_FEED_FORWARD,
            *(
                Rule(
                    f"{_G}.attn_qkv.{kind}",
                    tuple(f"{_O}.self_attn.{p}_proj.{kind}" for p in "qkv"),
                    rows=q_k_v_rows,
                )
                for kind in _BOTH
            ),
        ),
        _ROPE,
    ),
}
GGUF_NAMES |= dict.fromkeys(("granite", "smollm3"), GGUF_NAMES["llama"])

_LATENT = {
    "attn_q": "q_proj",
    "attn_q_a": "q_a_proj",
    "attn_q_a_norm": "q_a_layernorm",
    "attn_q_b": "q_b_proj",
    "attn_kv_a_mqa": "kv_a_proj_with_mqa",
    "attn_kv_a_norm": "kv_a_layernorm",
    "attn_kv_b": "kv_b_proj",
    "attn_output": "o_proj",
}
# Rows stay as they are: adjacent features pair up on both sides. Where kv_b is cut in two, plait.weights.joined makes
# it whole; beside a whole one the halves say nothing new.
GGUF_NAMES["deepseek2"] = NameMap(
    (
        *_ENDS,
        *_PRE_NORMS,
        *(rule for file, ours in _LATENT.items() for rule in paired(f"{_G}.{file}", f"{_O}.self_attn.{ours}")),
        *_FEED_FORWARD,
        *_EXPERTS,
        Rule(f"{_G}.exp_probs_b.bias", (f"{_O}.mlp.gate.e_score_correction_bias",)),
        *(
            r
            for p in ("gate", "up", "down")
            for r in paired(f"{_G}.ffn_{p}_shexp", f"{_O}.mlp.shared_experts.{p}_proj")
        ),
    ),
    (*_ROPE, r"blk\.\d+\.attn_[kv]_b\.weight"),
)
