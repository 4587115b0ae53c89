"""The GGUF architecture deepseek2: DeepSeek V2 and V3 and what shares their attention (Kimi K2).

A file whose router is a softmax is read as deepseek_v2, one whose router is a sigmoid as deepseek_v3. Files of
converters since 2025 describe the absorbed form (one key/value head, the widths of the cached row) and keep the heads'
own widths under keys of their own; older ones have the heads' widths where every architecture has them.
"""

from __future__ import annotations

from typing import Any

from plait.weights.gguf_keys import GROUPED, REQUIRED, ROPE, Architecture, Reader, Row, rope_scaling

_SOFTMAX, _SIGMOID = 1, 2
# Classes by the router's scores.
_CLASSES = {_SOFTMAX: ("deepseek_v2", "DeepseekV2ForCausalLM"), _SIGMOID: ("deepseek_v3", "DeepseekV3ForCausalLM")}


def _deepseek2(read: Reader, config: dict[str, Any]) -> None:
    _widths(read, config)
    config["q_lora_rank"] = read.get("attention.q_lora_rank", int)
    config["first_k_dense_replace"] = read.get("leading_dense_block_count", int, 0)
    _router(read, config)
    rope_scaling(read, config)
    # Written as a tenth of mscale_all_dim. A file has no mscale: cos and sin are not multiplied, as if both were equal.
    tenth = read.get("rope.scaling.yarn_log_multiplier", float, 0.0)
    if tenth and config.get("rope_scaling", {}).get("rope_type") == "yarn":
        mscale = float(f"{10 * tenth:.7g}")
        config["rope_scaling"] |= {"mscale": mscale, "mscale_all_dim": mscale}
    elif tenth:
        raise read.error(f"rope.scaling.yarn_log_multiplier is {tenth} without rope.scaling.type 'yarn'")


def _widths(read: Reader, config: dict[str, Any]) -> None:
    """Of the latent, and of a head's rotating and other features and values."""
    heads, kv_heads = config["num_attention_heads"], config.pop("num_key_value_heads")
    rank, rope = config["kv_lora_rank"], read.get("rope.dimension_count", int, REQUIRED)
    key, value = (read.get(f"attention.{kind}_length", int) for kind in ("key", "value"))
    own_key, own_value = (read.get(f"attention.{kind}_length_mla", int) for kind in ("key", "value"))
    absorbed = own_key is not None
    if absorbed:
        expected = (1, rank + rope, rank)
        if (kv_heads, key or rank + rope, value or rank) != expected:
            raise read.error(
                f"attention.head_count_kv {kv_heads}, key_length {key} and value_length {value} must be"
                f" {', '.join(map(str, expected))} where attention.key_length_mla stands"
            )
        key, value = own_key, own_value
    elif kv_heads != heads:
        raise read.error(f"attention.head_count_kv is {kv_heads}; without attention.key_length_mla it must be {heads}")
    if key is None or value is None:
        raise read.error("attention.key_length and value_length, or key_length_mla and value_length_mla, are missing")
    if key <= rope:
        raise read.error(f"a head's key of {key} has no features beside the {rope} that rotate (rope.dimension_count)")
    config |= {"qk_nope_head_dim": key - rope, "qk_rope_head_dim": rope, "v_head_dim": value}


def _router(read: Reader, config: dict[str, Any]) -> None:
    # Early files do not say; a bias of the selection is the sigmoid's.
    unsaid = _SIGMOID if read.layers_with("exp_probs_b.bias", config["num_hidden_layers"]) else _SOFTMAX
    kind = read.get("expert_gating_func", int, 0) or unsaid
    if kind not in _CLASSES:
        raise read.error(f"expert_gating_func is {kind}: a router that is neither softmax nor sigmoid")
    config["model_type"], name = _CLASSES[kind]
    config["architectures"] = [name]
    config["moe_intermediate_size"] = read.get("expert_feed_forward_length", int, REQUIRED)
    config["n_shared_experts"] = read.get("expert_shared_count", int, REQUIRED)
    config["norm_topk_prob"] = read.get("expert_weights_norm", bool, False)
    config["routed_scaling_factor"] = read.get("expert_weights_scale", float, 0.0) or 1.0
    groups, top_groups = (read.get(f"expert_group_{name}", int, 0) or 1 for name in ("count", "used_count"))
    config |= {"n_group": groups, "topk_group": top_groups}
    if kind == _SOFTMAX:
        config["topk_method"] = "greedy" if groups == 1 else "group_limited_greedy"
    else:
        config["rope_interleave"] = True
        config["num_nextn_predict_layers"] = 0


DEEPSEEK: dict[str, Architecture] = {
    "deepseek2": Architecture(
        *_CLASSES[_SOFTMAX],
        (
            *GROUPED,
            *ROPE,
            Row("attention.kv_lora_rank", "kv_lora_rank", int),
            Row("expert_count", "n_routed_experts", int),
            Row("expert_used_count", "num_experts_per_tok", int),
        ),
        {"hidden_act": "silu", "attention_bias": False},
        _deepseek2,
    )
}
