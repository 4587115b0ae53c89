"""A GGUF file of a model gives the logits of the transformers model that it was written from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import plait
from plait.verify.run import verify
from plait.weights.sources import open_source
from tests.parity.cases import Case
from tests.parity.forwards import plain
from tests.parity.gguf_export import write_model
from tests.parity.reference import distance, reference_model, tolerance

pytestmark = pytest.mark.slow

_SIZES = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 101, "max_position_embeddings": 128}
_GROUPED = {**_SIZES, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
_EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2}
_LATENT = {
    **_SIZES,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 36,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
}
_COUNTS = {"expert_count": 5, "expert_used_count": 2}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def _divisors(model: Any) -> torch.Tensor:
    """Per-pair divisors of the plain frequencies, as converters store llama3 scaling."""
    found = model.model.rotary_emb.inv_freq
    width = 2 * len(found)
    base = 1.0 / model.config.rope_parameters["rope_theta"] ** (torch.arange(0, width, 2).float() / width)
    return base / found


MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": (
        {"model_type": "llama", **_GROUPED, "rope_theta": 500.0, "rms_norm_eps": 0.02},
        {"rope.freq_base": 500.0},
    ),
    "llama with biases, head width and divisors": (
        {
            "model_type": "llama",
            **_GROUPED,
            "rope_theta": 500.0,
            "rope_scaling": _LLAMA3,
            "attention_bias": True,
            "mlp_bias": True,
            "head_dim": 24,
            "tie_word_embeddings": True,
        },
        {"rope.freq_base": 500.0},
    ),
    "qwen2, yarn": (
        {
            "model_type": "qwen2",
            **_GROUPED,
            "rope_theta": 1000.0,
            "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        },
        {
            "rope.freq_base": 1000.0,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 32,
        },
    ),
    "qwen3": ({"model_type": "qwen3", **_GROUPED, "head_dim": 24, "rope_theta": 300.0}, {"rope.freq_base": 300.0}),
    "qwen3moe": (
        {
            "model_type": "qwen3_moe",
            **_GROUPED,
            **_EXPERTS,
            "moe_intermediate_size": 36,
            "norm_topk_prob": True,
            "head_dim": 24,
            "rope_theta": 300.0,
        },
        {**_COUNTS, "rope.freq_base": 300.0, "expert_feed_forward_length": 36},
    ),
    "qwen2moe": (
        {
            "model_type": "qwen2_moe",
            **_GROUPED,
            **_EXPERTS,
            "moe_intermediate_size": 36,
            "shared_expert_intermediate_size": 44,
            "rope_theta": 300.0,
        },
        {
            **_COUNTS,
            "rope.freq_base": 300.0,
            "expert_feed_forward_length": 36,
            "expert_shared_feed_forward_length": 44,
        },
    ),
    "llama with experts": (
        {
            "model_type": "mixtral",
            **_GROUPED,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "rope_theta": 500.0,
            "tie_word_embeddings": True,
        },
        {**_COUNTS, "rope.freq_base": 500.0},
    ),
    "olmoe": (
        {"model_type": "olmoe", **_GROUPED, **_EXPERTS, "rope_theta": 500.0, "num_key_value_heads": 4},
        {**_COUNTS, "rope.freq_base": 500.0},
    ),
    "deepseek2": (
        {
            "model_type": "deepseek_v2",
            **_LATENT,
            "q_lora_rank": None,
            "topk_method": "greedy",
            "routed_scaling_factor": 1.7,
            "rope_theta": 300.0,
        },
        {"rope.freq_base": 300.0},
    ),
    "deepseek2, groups": (
        {
            "model_type": "deepseek_v2",
            **_LATENT,
            "topk_method": "group_limited_greedy",
            "n_group": 3,
            "topk_group": 2,
            "first_k_dense_replace": 0,
            "rope_theta": 300.0,
            "tie_word_embeddings": True,
        },
        {"rope.freq_base": 300.0, "expert_group_count": 3, "expert_group_used_count": 2, "expert_gating_func": 1},
    ),
    "deepseek2, sigmoid, kv_b in two, yarn": (
        {
            "model_type": "deepseek_v3",
            **_LATENT,
            "num_key_value_heads": 4,
            "n_group": 3,
            "topk_group": 2,
            "rope_theta": 300.0,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 16,
                "mscale": 0.707,
                "mscale_all_dim": 0.707,
            },
        },
        {
            "rope.freq_base": 300.0,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 16,
            "rope.scaling.yarn_log_multiplier": 0.0707,
            "expert_group_count": 3,
            "expert_group_used_count": 2,
            "attention.head_count_kv": 1,
            "attention.key_length": 32 + 8,
            "attention.value_length": 32,
            "attention.key_length_mla": 12 + 8,
            "attention.value_length_mla": 10,
        },
    ),
    "gemma3": (
        {
            "model_type": "gemma3_text",
            **_GROUPED,
            "num_hidden_layers": 7,
            "head_dim": 24,
            "query_pre_attn_scalar": 24,
            "sliding_window": 9,
            "rope_theta": 1000.0,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
        {
            "rope.freq_base": 1000.0,
            "rope.scaling.type": "linear",
            "rope.scaling.factor": 8.0,
            "attention.sliding_window": 9,
        },
    ),
    "gemma2": (
        {
            "model_type": "gemma2",
            **_GROUPED,
            "head_dim": 24,
            "query_pre_attn_scalar": 24,
            "sliding_window": 9,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 20.0,
            "rope_theta": 300.0,
        },
        {
            "rope.freq_base": 300.0,
            "attention.sliding_window": 9,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 20.0,
        },
    ),
    "phi3": (
        {
            "model_type": "phi3",
            **_GROUPED,
            "pad_token_id": None,
            "sliding_window": 9,
            "partial_rotary_factor": 0.5,
            "rope_theta": 300.0,
        },
        {"rope.freq_base": 300.0, "rope.dimension_count": 8, "attention.sliding_window": 9},
    ),
    "phi3, longrope": (
        {
            "model_type": "phi3",
            **_GROUPED,
            "pad_token_id": None,
            "original_max_position_embeddings": 32,
            "rope_scaling": {
                "type": "longrope",
                "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.6, 1.8, 2.0],
                "long_factor": [1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 9.0, 13.0],
            },
        },
        {
            "rope.scaling.original_context_length": 32,
            # sqrt(1 + ln(128 / 32) / ln(32))
            "rope.scaling.attn_factor": 1.1832159566199232,
        },
    ),
    "olmo2": (
        {"model_type": "olmo2", **_GROUPED, "rms_norm_eps": 0.02, "rope_theta": 300.0},
        {"rope.freq_base": 300.0},
    ),
    "starcoder2": (
        {"model_type": "starcoder2", **_GROUPED, "norm_epsilon": 0.02, "rope_theta": 300.0},
        {"rope.freq_base": 300.0},
    ),
    "granite": (
        {
            "model_type": "granite",
            **_GROUPED,
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.4,
            "residual_multiplier": 0.6,
            "logits_scaling": 0.5,
            "rope_theta": 300.0,
        },
        {
            "rope.freq_base": 300.0,
            "embedding_scale": 3.0,
            "attention.scale": 0.4,
            "residual_scale": 0.6,
            "logit_scale": 0.5,
        },
    ),
    "smollm3": (
        {
            "model_type": "smollm3",
            **_GROUPED,
            "num_hidden_layers": 5,
            "pad_token_id": None,
            "tie_word_embeddings": False,
            "rope_theta": 300.0,
        },
        {"rope.freq_base": 300.0},
    ),
    "gptneox": (
        {
            "model_type": "gpt_neox",
            **_SIZES,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "rotary_pct": 0.5,
            "rotary_emb_base": 300,
            "use_parallel_residual": False,
        },
        {"rope.freq_base": 300.0, "rope.dimension_count": 8, "use_parallel_residual": False},
    ),
}


# What transformers' GGUF loader does not read.
UNREAD = (
    *("gptneox", "llama with experts", "olmoe", "olmo2", "granite", "smollm3"),
    *("deepseek2", "deepseek2, groups", "deepseek2, sigmoid, kv_b in two, yarn"),
)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Any, Path]]:
    made: dict[str, tuple[Any, Path]] = {}

    def get(name: str) -> tuple[Any, Path]:
        if name not in made:
            raw, metadata = MODELS[name]
            model = reference_model(Case(name, raw))
            divisors = _divisors(model).numpy() if "divisors" in name else None
            path = tmp_path_factory.mktemp("gguf") / "model.gguf"
            made[name] = (model, write_model(model, path, divisors, **metadata))
        return made[name]

    return get


@pytest.mark.parametrize("name", MODELS)
def test_a_gguf_file_gives_the_logits_of_the_model_it_was_written_from(files, name: str):
    model, path = files(name)
    ids = torch.randint(0, 97, (2, 57), generator=torch.Generator().manual_seed(5))
    with torch.inference_mode():
        reference = model(input_ids=ids).logits
    assert distance(plain(plait.load(path, "fp32"), ids), reference) <= tolerance(reference)


def test_the_files_of_old_converters_have_one_tensor_per_expert(files, tmp_path):
    """blk.0.ffn_gate.3.weight instead of the fourth slice of blk.0.ffn_gate_exps.weight."""
    model, path = files("llama with experts")
    old = write_model(model, tmp_path / "old.gguf", old_experts=True, **MODELS["llama with experts"][1])
    names = open_source(old).names()
    assert "blk.0.ffn_gate.4.weight" in names and not any("_exps" in name for name in names)
    expected, found = (dict(plait.load(p, "fp32").named_parameters()) for p in (path, old))
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize("name", [name for name in MODELS if name not in UNREAD])
def test_verify_compares_with_the_gguf_loader_of_transformers(files, name: str):
    _, path = files(name)
    result = verify(path, length=40, new_tokens=4, threads=1, kv_memory="8MiB")
    assert "its GGUF loader" in result.reference
    assert result.passed
    # What that loader does not read is made up for, and said.
    misread = any("misreads" in note for note in result.notes)
    assert misread == (name != "llama"), result.notes
    assert any("rope_freqs" in note for note in result.notes) == ("divisors" in name)


@pytest.mark.parametrize("name", ["gptneox", "llama with biases, head width and divisors"])
def test_verify_finds_a_zeroed_layer_of_a_gguf_file(files, tmp_path, name: str):
    """Also where the reference is made of what plait reads: of the other file, then."""
    model, path = files(name)
    raw, metadata = MODELS[name]
    damaged = reference_model(Case(name, raw))
    with torch.no_grad():
        for parameter, weight in damaged.named_parameters():
            if ".1." in parameter and ("dense" in parameter or "down_proj" in parameter or "o_proj" in parameter):
                weight.zero_()
    divisors = _divisors(model).numpy() if "divisors" in name else None
    bad = write_model(damaged, tmp_path / "bad.gguf", divisors, **metadata)
    options = {"length": 40, "new_tokens": 0, "threads": 1}
    assert verify(path, reference=path, **options).passed
    result = verify(bad, reference=path, **options)
    assert [c.first_wrong for c in result.comparisons] == [0] * 4


@pytest.mark.parametrize("name", UNREAD)
def test_verify_says_when_the_reference_shares_our_reading(files, name: str):
    _, path = files(name)
    result = verify(path, length=40, new_tokens=4, threads=1, kv_memory="8MiB")
    assert result.passed
    assert any("shares plait's reader, name map and configuration" in note for note in result.notes)
