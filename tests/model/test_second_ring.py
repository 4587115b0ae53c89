"""gemma, gpt_oss, phimoe, ernie4_5_moe and apertus: what published configurations mean, and what is refused."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

import plait
from plait.errors import ConfigError, WeightError
from plait.model.config import MixtureSpec
from plait.model.families import families, parse_config
from plait.model.rope import rotary_table, short_rope_tokens
from plait.weights.checkpoint import open_checkpoint
from tests.configs import CONFIGS

# Published configurations, without what cannot matter.
GPT_OSS: dict[str, Any] = {
    "model_type": "gpt_oss",
    "attention_bias": True,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "pad_token_id": 199999,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}
PHIMOE: dict[str, Any] = {
    "model_type": "phimoe",
    "attention_bias": True,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "input_jitter_noise": 0.0,
    "intermediate_size": 6400,
    "lm_head_bias": True,
    "max_position_embeddings": 131072,
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 16,
    "original_max_position_embeddings": 4096,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "long_factor": [1.0 + i for i in range(64)],
        "long_mscale": 1.243163121016122,
        "original_max_position_embeddings": 4096,
        "short_factor": [1.0 + i / 64 for i in range(64)],
        "short_mscale": 1.243163121016122,
        "type": "longrope",
    },
    "rope_theta": 10000.0,
    "router_jitter_noise": 0.01,
    "sliding_window": 131072,
    "vocab_size": 32064,
}
ERNIE: dict[str, Any] = {
    "model_type": "ernie4_5_moe",
    "hidden_act": "silu",
    "hidden_size": 2560,
    "intermediate_size": 12288,
    "max_position_embeddings": 131072,
    "moe_intermediate_size": 1536,
    "moe_k": 6,
    "moe_layer_end_index": -1,
    "moe_layer_interval": 1,
    "moe_layer_start_index": 1,
    "moe_num_experts": 64,
    "moe_num_shared_experts": 2,
    "num_attention_heads": 20,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "use_bias": False,
    "vocab_size": 103424,
}
APERTUS: dict[str, Any] = {
    "model_type": "apertus",
    "hidden_act": "xielu",
    "hidden_size": 4096,
    "intermediate_size": 21504,
    "max_position_embeddings": 65536,
    "mlp_bias": False,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "post_norm": False,
    "qk_norm": True,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
        "type": "llama3",
    },
    "rope_theta": 12000000,
    "vocab_size": 131072,
}
GEMMA: dict[str, Any] = {
    "model_type": "gemma",
    "head_dim": 256,
    "hidden_act": "gelu",
    "hidden_size": 2048,
    "intermediate_size": 16384,
    "max_position_embeddings": 8192,
    "num_attention_heads": 8,
    "num_hidden_layers": 18,
    "num_key_value_heads": 1,
    "vocab_size": 256000,
}


@pytest.mark.parametrize(
    ("raw", "billions", "active"),
    [(GPT_OSS, 20.91, 4.19), (PHIMOE, 41.87, 6.64), (ERNIE, 21.83, 3.4), (APERTUS, 8.05, 8.05), (GEMMA, 2.51, 2.51)],
    ids=lambda x: x["model_type"] if isinstance(x, dict) else "",
)
def test_published_configurations_have_the_parameters_that_their_makers_count(raw, billions, active, caplog):
    with caplog.at_level(logging.WARNING):
        counts = parse_config(raw, strict=True).param_counts()
    assert not caplog.records
    # Of gpt-oss OpenAI count 3.61 active, without the 0.58 of the embedding table.
    assert counts["total"] / 1e9 == pytest.approx(billions, abs=0.006)
    assert counts["active"] / 1e9 == pytest.approx(active, abs=0.06)


def test_gpt_oss_alternates_windows_and_its_rope_is_not_truncated():
    config = parse_config(GPT_OSS)
    assert [layer.attention.window for layer in config.layers] == [128, 0] * 12
    first = config.layers[0]
    assert isinstance(first.feed_forward, MixtureSpec) and first.attention.sinks
    assert first.feed_forward.numbers == {"alpha": 1.702, "limit": 7.0}
    bare = {key: value for key, value in GPT_OSS.items() if key not in ("rope_scaling", "layer_types")}
    assert parse_config(bare).rotary == config.rotary and parse_config(bare).layers == config.layers


def test_one_magnitude_for_all_lengths_is_one_table():
    """The published Phi-3.5-MoE: nothing then depends on how long a request becomes."""
    same = parse_config(PHIMOE)
    table = rotary_table(same.rotary[0])
    assert not table.long_inv_freq and table.magnitude == 1.243163121016122
    assert short_rope_tokens(same.rotary) == 0
    other = parse_config({**PHIMOE, "rope_scaling": {**PHIMOE["rope_scaling"], "long_mscale": 1.5}})
    table = rotary_table(other.rotary[0])
    assert table.long_inv_freq == table.inv_freq and (table.magnitude, table.long_magnitude) == (1.243163121016122, 1.5)
    assert short_rope_tokens(other.rotary) == 4096


@pytest.mark.parametrize(
    ("raw", "change", "words"),
    [
        (GPT_OSS, {"swiglu_limit": 0}, "swiglu_limit"),
        (GPT_OSS, {"experts_per_token": 5}, "two spellings"),
        (GPT_OSS, {"hidden_act": "gelu"}, "hidden_act"),
        (GPT_OSS, {"sliding_window": None}, "sliding_window"),
        (GPT_OSS, {"num_experts_per_tok": 33, "experts_per_token": 33}, "number of experts"),
        (PHIMOE, {"num_experts_per_tok": 3}, "sparse mixer takes two"),
        (PHIMOE, {"input_jitter_noise": 0.1}, "input_jitter_noise"),
        (PHIMOE, {"router_jitter_noise": -0.1}, "router_jitter_noise"),
        (PHIMOE, {"rope_scaling": {**PHIMOE["rope_scaling"], "short_mscale": None}}, "short_mscale"),
        (PHIMOE, {"rope_scaling": {"type": "linear", "factor": 2.0}}, "default and longrope"),
        (PHIMOE, {"rope_scaling": {k: v for k, v in PHIMOE["rope_scaling"].items() if k != "short_factor"}}, "factor"),
        (ERNIE, {"moe_layer_interval": 0}, "moe_layer_interval"),
        (ERNIE, {"moe_num_shared_experts": -1}, "moe_num_shared_experts"),
        (ERNIE, {"moe_norm_min": -1.0}, "moe_norm_min"),
        (ERNIE, {"moe_k": 65}, "number of experts"),
        (APERTUS, {"qk_norm": False}, "qk_norm"),
        (APERTUS, {"post_norm": True}, "post_norm"),
        (APERTUS, {"hidden_act": "mish"}, "hidden_act"),
        (GEMMA, {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        (GEMMA, {"hidden_act": "xielu"}, "plain feed-forwards"),
    ],
)
def test_what_cannot_be_carried_out_is_refused_by_name(raw, change, words):
    with pytest.raises(ConfigError, match=words):
        parse_config({**raw, **change})


def test_every_family_of_the_second_ring_but_latent_ones_is_registered():
    ring = "gemma gpt2 gpt_oss granite granitemoe smollm3 qwen2_moe olmo olmoe olmo3 stablelm starcoder2 cohere cohere2"
    ring += " glm4 glm4_moe phi phimoe exaone4 ernie4_5 ernie4_5_moe dots1 hunyuan_v1_dense seed_oss apertus helium"
    ring += " nemotron falcon opt gptj arcee"
    assert set(ring.split()) <= set(families())


def test_files_of_gpt_oss_have_experts_turned_and_columns_of_gate_and_up_in_turns(tmp_path):
    decoder = plait.from_config(CONFIGS["gpt_oss"], seed=2)
    ours = decoder.model.layers[1].mlp.experts
    with torch.no_grad():
        ours.gate_up_proj_bias.normal_(generator=torch.Generator().manual_seed(1))
    decoder.save_pretrained(tmp_path)
    source = open_checkpoint(tmp_path).source
    prefix = "model.layers.1.mlp.experts."
    gate, up = ours.gate_up_proj.detach().chunk(2, 1)
    # What rules see is turned; the file itself is not.
    from safetensors.torch import load_file

    stored = load_file(tmp_path / "model.safetensors")
    assert torch.equal(stored[f"{prefix}gate_up_proj"][..., ::2], gate.mT)
    assert torch.equal(stored[f"{prefix}gate_up_proj"][..., 1::2], up.mT)
    assert torch.equal(stored[f"{prefix}gate_up_proj_bias"][..., 1::2], ours.gate_up_proj_bias.detach().chunk(2, 1)[1])
    assert torch.equal(stored[f"{prefix}down_proj"], ours.down_proj.detach().mT)
    assert source.info(f"{prefix}down_proj").shape == tuple(ours.down_proj.shape)
    back = dict(plait.load(tmp_path, "fp32").named_parameters())
    assert all(torch.equal(back[name], p) for name, p in decoder.named_parameters())


def test_ernie_keeps_the_selection_bias_as_a_row_and_another_shape_is_refused(tmp_path):
    from safetensors.torch import load_file, save_file

    decoder = plait.from_config(CONFIGS["ernie4_5_moe"], seed=2)
    decoder.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.moe_statics.e_score_correction_bias"
    assert stored[name].shape == (1, 6)
    save_file(stored | {name: stored[name].reshape(2, 3)}, tmp_path / "model.safetensors")
    with pytest.raises(WeightError, match=r"e_score_correction_bias has shape \(2, 3\)"):
        plait.load(tmp_path, "fp32")


def test_apertus_stores_four_numbers_of_every_feed_forward(tmp_path):
    from safetensors.torch import load_file

    decoder = plait.from_config(CONFIGS["apertus"], seed=2)
    decoder.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    shapes = {k.rpartition(".")[2]: tuple(v.shape) for k, v in stored.items() if ".layers.0.mlp.act_fn." in k}
    assert shapes == {"alpha_p": (1,), "alpha_n": (1,), "beta": (), "eps": ()}
    numbers = {name: p for name, p in decoder.named_parameters() if "act_fn" in name}
    trained = {name.rpartition(".")[2] for name, p in numbers.items() if p.requires_grad}
    assert trained == {"alpha_p", "alpha_n"}


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma", "gpt_oss", "phimoe", "ernie4_5_moe", "apertus"])
def test_transformers_loads_what_was_saved_with_equal_logits(family, tmp_path):
    from transformers import AutoModelForCausalLM

    decoder = plait.from_config(CONFIGS[family], seed=3)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if parameter.ndim < 2 or name.endswith("bias"):
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    decoder.save_pretrained(tmp_path)
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager", output_loading_info=True)
    assert not any(info.values())
    ids = torch.arange(3, 40)[None]
    with torch.inference_mode():
        expected, given = model.eval()(input_ids=ids).logits, decoder.logits(decoder(ids))
    assert (given - expected).abs().max() < 1e-4 * max(1, expected.abs().max() / 10)
