"""Families with latent attention: what their configurations mean, what is refused, what files may hold beside."""

from __future__ import annotations

import json
from math import log
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import plait
from plait.errors import ConfigError, WeightError
from plait.model.config import LatentAttentionSpec, MixtureSpec, ModelConfig
from plait.model.describe import describe
from plait.model.families import parse_config
from plait.model.known_models import _CONFIGS
from plait.model.rope import rotary_numbers, yarn_range
from plait.ops.spec import RouterSpec
from plait.weights.load import load
from tests.configs import CONFIGS
from tests.parity.switches import switches

IDS = torch.arange(30).reshape(2, 15) % 96
LATENT = ("deepseek_v2", "deepseek_v3", "kimi_k2", "minicpm3")


def parsed(family: str, **changes: Any) -> ModelConfig:
    return parse_config({**CONFIGS[family], **changes})


def attention(config: ModelConfig) -> LatentAttentionSpec:
    a = config.layers[0].attention
    assert isinstance(a, LatentAttentionSpec)
    return a


def routed(config: ModelConfig) -> RouterSpec:
    mixture = config.layers[-1].feed_forward
    assert isinstance(mixture, MixtureSpec)
    return mixture.router


# The softmax scale and yarn


@pytest.mark.parametrize(
    ("name", "scale"), [("DeepSeek-V2-Lite", 0.114721), ("DeepSeek-V2", 0.114721), ("DeepSeek-V3", 0.135234)]
)
def test_mscale_all_dim_multiplies_the_softmax_scale_squared(name: str, scale: float):
    config = parse_config(_CONFIGS[name])
    assert attention(config).scale == pytest.approx(scale, abs=1e-6)
    assert attention(parse_config({**_CONFIGS[name], "rope_scaling": None})).scale == pytest.approx(0.072169, abs=1e-6)
    # Both mscales are equal there, so cos and sin are not multiplied.
    assert rotary_numbers(config.rotary[0])[1] == 1.0


def test_the_scale_of_other_attention_is_not_corrected():
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "mscale_all_dim": 1.0}
    assert parsed("llama", rope_scaling=scaling).layers[0].attention.scale == 6**-0.5


def test_a_yarn_without_a_factor_stretches_from_the_original_context_to_the_maximum():
    scaling = {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 128, "mscale_all_dim": 0.7}
    corrected = attention(parsed("deepseek_v3", rope_scaling=scaling)).scale
    assert corrected == pytest.approx(12**-0.5 * (0.07 * log(512 / 128) + 1) ** 2)


def test_the_ramp_lies_over_the_original_context_and_not_the_maximum():
    assert yarn_range(parse_config(_CONFIGS["DeepSeek-V3"]).rotary[0]) == (10, 23)


# What the keys mean


def test_a_null_rank_is_a_single_projection_of_the_queries():
    with_rank, without = (plait.from_config({**CONFIGS["deepseek_v3"], "q_lora_rank": r}) for r in (12, None))
    names = [{n for n, _ in d.model.layers[0].self_attn.named_parameters()} for d in (with_rank, without)]
    assert names[0] - names[1] == {"q_a_proj.weight", "q_a_layernorm.weight", "q_b_proj.weight"}
    assert names[1] - names[0] == {"q_proj.weight"}


def test_biases_are_on_what_projects_into_the_latents_and_on_o():
    decoder = plait.from_config({**CONFIGS["deepseek_v3"], "attention_bias": True})
    biases = {n.split(".")[0] for n, _ in decoder.model.layers[0].self_attn.named_parameters() if n.endswith("bias")}
    assert biases == {"q_a_proj", "kv_a_proj_with_mqa", "o_proj"}


def test_inner_norms_keep_their_eps_whatever_the_configuration_says():
    config = parsed("deepseek_v2", rms_norm_eps=0.5)
    assert attention(config).inner_norm.eps == 1e-6
    assert config.final_norm.eps == config.layers[0].pre_attention_norm.eps == 0.5


@pytest.mark.parametrize(
    ("changes", "pairing"),
    [({}, "adjacent"), ({"rope_interleave": True}, "adjacent"), ({"rope_interleave": False}, "halves")],
)
def test_rope_interleave_says_which_features_pair_up(changes: dict[str, Any], pairing: str):
    assert attention(parsed("deepseek_v3", **changes)).rotary.pairing == pairing
    assert attention(parsed("deepseek_v2")).rotary.pairing == "adjacent"
    assert attention(parsed("minicpm3")).rotary.pairing == "halves"


def test_routers_of_v2_lite_v2_and_v3():
    lite, v2, v3 = (routed(parse_config(_CONFIGS[f"DeepSeek-{name}"])) for name in ("V2-Lite", "V2", "V3"))
    assert lite == RouterSpec(64, 6, "softmax", "never", 1.0)
    assert v2 == RouterSpec(160, 6, "softmax", "never", 16.0, 8, 3, "best", "zero")
    assert v3 == RouterSpec(256, 8, "sigmoid", "always", 2.5, 8, 4, "two_best", "minus_infinity")
    assert routed(parse_config(_CONFIGS["Kimi-K2"])) == RouterSpec(
        384, 8, "sigmoid", "always", 2.827, group_score="two_best"
    )
    kinds = [[isinstance(layer.feed_forward, MixtureSpec) for layer in parse_config(_CONFIGS[n]).layers] for n in KNOWN]
    assert [sum(k) for k in kinds] == [26, 59, 58, 60]


def test_greedy_ignores_groups():
    """The published configuration of V2-Lite has n_group and topk_group of 1, others of more."""
    assert routed(parsed("deepseek_v2", topk_method="greedy", n_group=3, topk_group=1)).groups == 0


def test_one_group_of_which_one_is_taken_is_greedy():
    changes = {"n_group": 1, "topk_group": 1}
    grouped = parsed("deepseek_v2", topk_method="group_limited_greedy", **changes)
    assert routed(grouped) == routed(parsed("deepseek_v2", topk_method="greedy", **changes))


@pytest.mark.parametrize("normalised", [True, False])
@pytest.mark.parametrize("scale", [1.0, 16.0])
def test_scaling_and_renormalising_are_switches_of_their_own_in_v3(normalised: bool, scale: float):
    router = routed(parsed("deepseek_v3", norm_topk_prob=normalised, routed_scaling_factor=scale))
    assert (router.renormalises, router.scale) == (normalised, scale)


def test_v2_renormalises_or_scales_as_its_own_code_does():
    both = {"norm_topk_prob": True, "routed_scaling_factor": 16.0}
    several, one = (routed(parsed("deepseek_v2", **both, num_experts_per_tok=k)) for k in (3, 1))
    assert (several.renormalises, several.scale) == (True, 1.0)
    assert (one.renormalises, one.scale) == (False, 16.0)


def test_v2_mlp_bias_reaches_the_shared_experts_and_not_the_routed():
    config = parsed("deepseek_v2", mlp_bias=True)
    mixture = config.layers[-1].feed_forward
    assert isinstance(mixture, MixtureSpec) and mixture.shared is not None
    assert mixture.shared.up_bias and mixture.shared.down_bias and not mixture.up_bias
    assert config.layers[0].feed_forward.up_bias


def test_multipliers_of_minicpm3_and_what_null_means():
    config = parsed("minicpm3")
    assert config.embedding_scale == 1.5 and config.round_embedding_scale
    assert config.layers[0].branch_scale == pytest.approx(1.4 / 3**0.5)
    assert config.logit_scale == pytest.approx(20 / 24)
    plain = parsed("minicpm3", scale_depth=None, dim_model_base=None, v_head_dim=None)
    assert plain.layers[0].branch_scale == plain.logit_scale == 1.0
    assert attention(plain).value_width == 24 // 4


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "kv heads": ("deepseek_v3", {"num_key_value_heads": 2}, "num_key_value_heads=2 must be num_attention_heads=4"),
    "odd rotary width": ("deepseek_v2", {"qk_rope_head_dim": 5}, "qk_rope_head_dim=5 must be even"),
    "no rotary width": ("deepseek_v3", {"qk_rope_head_dim": 0}, "qk_rope_head_dim=0 must be even and at least 2"),
    "no rank": ("deepseek_v3", {"kv_lora_rank": 0}, "kv_lora_rank=0"),
    "rank 0 of queries": ("deepseek_v3", {"q_lora_rank": 0}, r"q_lora_rank=0.*may be null"),
    "no nope": ("minicpm3", {"qk_nope_head_dim": 0}, "qk_nope_head_dim=0"),
    "no values": ("deepseek_v2", {"v_head_dim": 0}, "v_head_dim=0"),
    "head_dim": ("deepseek_v2", {"head_dim": 7}, "head_dim=7"),
    "misspelt method": ("deepseek_v2", {"topk_method": "gready"}, r"topk_method='gready'.*'greedy'"),
    "no method": ("deepseek_v2", {"topk_method": None}, "topk_method=None"),
    "method of another": ("deepseek_v3", {"topk_method": "greedy"}, "topk_method='greedy': a deepseek_v3"),
    "groups without a number": ("deepseek_v2", {"n_group": None}, "n_group=None"),
    "no groups": ("deepseek_v2", {"n_group": 0}, "n_group=0 must be at least 1"),
    "scores": ("deepseek_v2", {"scoring_func": "sigmoid"}, "scoring_func='sigmoid': a deepseek_v2 has 'softmax'"),
    "other scores": ("kimi_k2", {"scoring_func": "softmax"}, "scoring_func='softmax': a kimi_k2 has 'sigmoid'"),
    "sparse layers": ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq=2"),
    "two spellings": (
        "deepseek_v3",
        {"num_nextn_predict_layers": 1, "num_mtp_layers": 2},
        "num_nextn_predict_layers=1 and num_mtp_layers=2",
    ),
    "layers without end": ("deepseek_v3", {"num_nextn_predict_layers": 10**9}, "at most 1000"),
    "endless scale": (
        "deepseek_v3",
        {"rope_scaling": {"type": "yarn", "factor": 4.0, "mscale_all_dim": 1e300}},
        r"mscale_all_dim=1e\+300 makes a softmax scale that is not finite",
    ),
    "base": ("minicpm3", {"dim_model_base": 0}, "dim_model_base=0"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_carried_out_is_refused_by_key(name: str):
    family, changes, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message):
        parsed(family, **changes)


def test_published_keys_about_training_are_read_without_a_warning(caplog: pytest.LogCaptureFixture):
    keys = {"aux_loss_alpha": 0.001, "seq_aux": True, "ep_size": 1, "moe_layer_freq": 1, "scoring_func": "sigmoid"}
    parsed("deepseek_v3", **keys, topk_method="noaux_tc", num_nextn_predict_layers=1, qk_head_dim=12, head_dim=4)
    assert not caplog.records


# Parameters and the cache

KNOWN = ("DeepSeek-V2-Lite", "DeepSeek-V2", "DeepSeek-V3", "Kimi-K2")


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("DeepSeek-V2-Lite", 15.7, 2.7),
        ("DeepSeek-V2", 235.7, 21.4),
        ("DeepSeek-V3", 671.0, 37.6),
        ("Kimi-K2", 1026.4, 32.9),
    ],
)
def test_parameters_are_those_of_the_model_cards(name: str, total: float, active: float):
    counts = parse_config(_CONFIGS[name]).param_counts()
    assert round(counts["total"] / 1e9, 1) == total
    assert round(counts["active"] / 1e9, 1) == active


@pytest.mark.parametrize("family", LATENT)
def test_parameters_are_counted_as_they_are_built(family: str):
    for bias in (False, True):
        decoder = plait.from_config({**CONFIGS[family], "attention_bias": bias})
        assert decoder.param_counts()["total"] == sum(p.numel() for p in decoder.parameters())


@pytest.mark.parametrize("family", LATENT)
def test_a_layer_keeps_one_row_per_token(family: str):
    (cache,) = set(parsed(family).caches())
    assert (cache.num_kv_heads, cache.key_width, cache.value_width, cache.window) == (1, 16 + 4, 0, 0)


def test_the_description_tells_the_latent_and_its_widths():
    lines = [text for _, text in describe(parsed("deepseek_v2"))]
    assert (
        "latent attention: 4 heads over a latent of 16 and a rotary key of 4, keys 8 + 4, values 10; queries straight;"
        " scale 0.288675; rotary table 0 (adjacent); inner norms RMS, eps 1e-06; biases on kv_a, o" in lines
    )
    assert any("queries through a rank of 12" in text for _, text in describe(parsed("minicpm3")))
    assert switches(parsed("minicpm3"))["latent attention"] and not switches(parsed("llama"))["latent attention"]


# Checkpoints


def write(directory: Path, family: str, extra: dict[str, torch.Tensor], **config: Any) -> Path:
    """A saved model with tensors and keys added, under its own model_type."""
    plait.from_config(CONFIGS[family], seed=4).save_pretrained(directory)
    tensors = load_file(directory / "model.safetensors")
    save_file({**tensors, **extra}, directory / "model.safetensors", {"format": "pt"})
    raw = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**raw, "model_type": family, **config}))
    return directory


@pytest.mark.parametrize("family", ["deepseek_v3", "kimi_k2"])
def test_layers_that_predict_further_tokens_are_skipped_and_listed(family: str, tmp_path: Path):
    extra = {
        "model.layers.3.eh_proj.weight": torch.zeros(24, 48),
        "model.layers.3.self_attn.kv_a_layernorm.weight": torch.zeros(16),
        "model.layers.4.shared_head.head.weight": torch.zeros(96, 24),
    }
    decoder = load(write(tmp_path / "two", family, extra, num_nextn_predict_layers=2), "fp32")
    assert sorted(decoder.load_report.skipped) == sorted(extra)
    with torch.inference_mode():
        expected = plait.from_config(CONFIGS[family], seed=4)
        assert torch.equal(decoder.logits(decoder(IDS)), expected.logits(expected(IDS)))
    with pytest.raises(WeightError, match=r"model\.layers\.4\.shared_head\.head\.weight"):
        load(write(tmp_path / "one", family, extra, num_nextn_predict_layers=1))
    with pytest.raises(WeightError, match=r"3 tensors .*model\.layers\.3\.eh_proj"):
        load(write(tmp_path / "none", family, extra, num_nextn_predict_layers=0))


def test_kimi_k2_is_saved_under_the_name_that_transformers_knows(tmp_path: Path):
    decoder = plait.from_config({**CONFIGS["kimi_k2"], "auto_map": {"AutoConfig": "configuration_deepseek.X"}}, seed=4)
    decoder.save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    assert (raw["model_type"], raw["architectures"]) == ("deepseek_v3", ["DeepseekV3ForCausalLM"])
    assert "auto_map" not in raw
    again = load(tmp_path, "fp32")
    with torch.inference_mode():
        assert torch.equal(again.logits(again(IDS)), decoder.logits(decoder(IDS)))
