"""Spellings of config.json that have broken other loaders, each with the meaning that transformers gives it."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from typing import Any

import pytest
import torch

import plait
from plait.model.config import LatentAttentionSpec, ModelConfig
from plait.model.families import families, parse_config
from plait.model.reader import known_keys
from plait.model.rope import rope_frequencies
from tests.configs import CONFIGS
from tests.model.test_rope import SCALINGS

BASE: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


def parsed(model_type: str = "llama", drop: tuple[str, ...] = (), **changes: Any) -> ModelConfig:
    raw = {"model_type": model_type, **BASE, **changes}
    return parse_config({key: value for key, value in raw.items() if key not in drop})


def hugging_face(model_type: str, drop: tuple[str, ...] = (), **changes: Any) -> Any:
    from transformers import AutoConfig

    raw = json.loads(json.dumps({**BASE, **changes}))
    return AutoConfig.for_model(model_type, **{key: value for key, value in raw.items() if key not in drop})


def windows(config: ModelConfig) -> list[int]:
    return [layer.attention.window for layer in config.layers]


def table(config: ModelConfig, index: int = 0) -> torch.Tensor:
    return rope_frequencies(config.rotary[index])[0]


# Rotary spellings


def test_type_is_an_alias_of_rope_type():
    old = parsed(rope_scaling={"type": "linear", "factor": 4.0})
    assert old == parsed(rope_scaling={"rope_type": "linear", "factor": 4.0})
    assert torch.equal(table(old), table(parsed()) / 4)


@pytest.mark.parametrize("name", SCALINGS)
def test_every_scaling_is_the_same_by_either_name_of_its_type(name: str):
    kind = name.split(",")[0]
    old, new = (parsed("llama", rope_scaling={key: kind, **SCALINGS[name]}) for key in ("type", "rope_type"))
    assert old == new and torch.equal(table(old), table(new))


def test_rope_type_alone_is_enough():
    block = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    config = parsed(rope_scaling=block, rope_theta=500_000.0)
    ratio = table(parsed(rope_theta=500_000.0)) / table(config)
    assert ratio[0] == 1 and ratio[-1] == pytest.approx(8)


def test_both_spellings_of_the_type_agreeing_load_without_a_word(caplog):
    block = {"type": "yarn", "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    assert parsed(rope_scaling=block) == parsed(rope_scaling={k: v for k, v in block.items() if k != "type"})
    assert not caplog.records


def test_both_spellings_disagreeing_follow_rope_type_and_warn(caplog):
    config = parsed(rope_scaling={"type": "linear", "rope_type": "yarn", "factor": 4.0})
    assert config.rotary[0].rope_type == "yarn"
    assert "type='linear'" in caplog.text and "rope_type='yarn'" in caplog.text


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3"])
def test_theta_inside_rope_parameters_is_the_same_model_as_theta_beside_them(model_type):
    """Bit for bit the same logits, and not the class's default theta."""
    new = {"rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0}}
    raw = {"model_type": model_type, **BASE, "initializer_range": 0.3}
    a, b = (plait.from_config({**raw, **more}, seed=1) for more in (new, {"rope_theta": 1_000_000.0}))
    assert a.config.rotary[0].theta == 1_000_000.0
    ids = torch.arange(20) % 32
    with torch.inference_mode():
        assert torch.equal(a.logits(a(ids)), b.logits(b(ids)))
        default = plait.from_config(raw, seed=1)
        assert not torch.equal(a.logits(a(ids)), default.logits(default(ids)))


def test_rope_parameters_of_transformers_5_outrank_nothing_when_rope_scaling_is_given_too(caplog):
    """transformers takes rope_scaling where both are given; so does plait, and says so."""
    both = {
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
        "rope_parameters": {"rope_type": "linear", "factor": 8.0, "rope_theta": 10_000.0},
    }
    assert parsed(**both).rotary[0].scaling["factor"] == 2.0
    assert hugging_face("llama", **both).rope_parameters["factor"] == 2.0
    assert "rope_scaling" in caplog.text


def test_yarn_without_an_original_context_takes_the_models():
    bare = parsed(rope_scaling={"rope_type": "yarn", "factor": 4.0}, max_position_embeddings=32768)
    assert bare.rotary[0].scaling["original_max_position_embeddings"] == 32768
    given = parsed(
        rope_scaling={"rope_type": "yarn", "factor": 40, "original_max_position_embeddings": 4096},
        max_position_embeddings=163840,
    )
    assert given.rotary[0].scaling["original_max_position_embeddings"] == 4096


# Sizes


def test_a_head_dim_of_null_is_hidden_over_heads():
    assert parsed(head_dim=None).layers[0].attention.key_width == 16
    assert parsed(head_dim=20).layers[0].attention.key_width == 20
    big = parsed(hidden_size=4096, num_attention_heads=32, num_key_value_heads=8, head_dim=None)
    assert big.layers[0].attention.key_width == 128


@pytest.mark.parametrize("how", ["absent", "null"])
def test_kv_heads_that_are_not_given_are_the_heads(how):
    config = parsed(drop=("num_key_value_heads",)) if how == "absent" else parsed(num_key_value_heads=None)
    assert config.layers[0].attention.num_kv_heads == 4
    assert hugging_face("llama", ("num_key_value_heads",)).num_key_value_heads == 4


@pytest.mark.parametrize("model_type", ["mistral", "qwen2", "qwen3"])
def test_kv_heads_of_null_are_the_heads(model_type):
    assert parsed(model_type, num_key_value_heads=None).layers[0].attention.num_kv_heads == 4
    if model_type != "mistral":  # whose class in transformers 5 refuses null
        assert hugging_face(model_type, num_key_value_heads=None).num_key_value_heads == 4


def test_qwen3_without_head_dim_has_its_class_default():
    assert parsed("qwen3").layers[0].attention.key_width == hugging_face("qwen3").head_dim == 128


@pytest.mark.parametrize("family", [family for family in CONFIGS if family not in ("gpt2", "gptj", "opt", "plait_gpt")])
def test_null_is_the_arithmetic_in_every_family(family: str):
    """Also where the class has a default of its own, which is for absent keys."""
    raw = {**CONFIGS[family], "hidden_size": 64, "num_attention_heads": 4}
    keys = known_keys()[family].keys() | raw.keys()
    nulls = {key: None for key in ("head_dim", "num_key_value_heads") if key in keys}
    for attention in (layer.attention for layer in parse_config({**raw, **nulls}).layers):
        if isinstance(attention, LatentAttentionSpec):
            assert attention.num_heads == 4  # whose widths have keys of their own
            continue
        assert attention.key_width == 16
        assert attention.num_kv_heads == (4 if "num_key_value_heads" in nulls or family != "falcon" else 1)


# Windows


def test_a_mistral_window_of_null_is_full_attention_everywhere():
    assert windows(parsed("mistral", sliding_window=None)) == [0] * 4
    raw = {**BASE, "initializer_range": 0.3}
    mistral = plait.from_config({"model_type": "mistral", **raw, "sliding_window": None}, seed=2)
    llama = plait.from_config({"model_type": "llama", **raw}, seed=2)
    ids = torch.arange(20) % 32
    with torch.inference_mode():
        assert torch.equal(mistral.logits(mistral(ids)), llama.logits(llama(ids)))


def test_a_mistral_window_covers_every_layer_and_defaults_to_its_class_value():
    assert windows(parsed("mistral", sliding_window=8)) == [8] * 4
    assert windows(parsed("mistral")) == [hugging_face("mistral").sliding_window] * 4


def test_a_mistral_honours_layer_types_only_where_they_say_the_same():
    """transformers' class builds one mask and ignores the list."""
    assert windows(parsed("mistral", sliding_window=8, layer_types=["sliding_attention"] * 4)) == [8] * 4
    assert windows(parsed("mistral", sliding_window=None, layer_types=["full_attention"] * 4)) == [0] * 4
    mixed = ["sliding_attention", "full_attention"] * 2
    with pytest.raises(plait.PlaitError, match="layer_types"):
        parsed("mistral", sliding_window=8, layer_types=mixed)


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3"])
def test_qwen_windows_need_the_switch_and_begin_at_max_window_layers(model_type):
    unused = parsed(model_type, sliding_window=8, use_sliding_window=False, max_window_layers=2)
    assert windows(unused) == [0] * 4
    assert windows(parsed(model_type, sliding_window=8, use_sliding_window=True, max_window_layers=2)) == [0, 0, 8, 8]
    assert windows(parsed(model_type, sliding_window=8, use_sliding_window=True)) == [0] * 4  # default: from layer 28
    assert windows(parsed(model_type, sliding_window=None, use_sliding_window=True, max_window_layers=0)) == [0] * 4


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3", "gemma3_text"])
def test_layer_types_decide_where_they_are_given(model_type):
    types = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]
    more = {} if model_type == "gemma3_text" else {"use_sliding_window": True, "max_window_layers": 0}
    assert windows(parsed(model_type, sliding_window=8, layer_types=types, **more)) == [8, 0, 0, 8]


def test_gemma_windows_are_five_layers_of_six_or_follow_the_pattern():
    assert windows(parsed("gemma3_text", num_hidden_layers=7, sliding_window=8)) == [8, 8, 8, 8, 8, 0, 8]
    assert windows(parsed("gemma3_text", sliding_window=8, sliding_window_pattern=2)) == [8, 0, 8, 0]
    # transformers 5 writes the pattern with an underscore beside the layer types that it made of it.
    assert windows(parsed("gemma3_text", sliding_window=8, _sliding_window_pattern=3)) == [8, 8, 0, 8]


# Gemma


def test_gemma_scales_full_layers_only_and_leaves_the_local_base_alone():
    config = parsed(
        "gemma3_text",
        rope_scaling={"rope_type": "linear", "factor": 8.0},
        rope_theta=1e6,
        rope_local_base_freq=1e4,
        sliding_window=8,
        sliding_window_pattern=2,
        head_dim=16,
    )
    i = torch.arange(8)
    assert torch.allclose(table(config, 0), 1e6 ** (-2 * i / 16) / 8)
    assert torch.allclose(table(config, 1), 1e4 ** (-2 * i / 16))
    assert [layer.attention.rotary.table for layer in config.layers] == [1, 0, 1, 0]


@pytest.mark.parametrize(("scalar", "scale"), [(144, 0.083333), (168, 0.077152)])
def test_gemmas_softmax_scale_comes_from_query_pre_attn_scalar(scalar, scale):
    config = parsed("gemma3_text", head_dim=128, query_pre_attn_scalar=scalar)
    assert config.layers[0].attention.scale == pytest.approx(scalar**-0.5) == pytest.approx(scale, abs=1e-6)


def test_the_text_part_of_a_multimodal_gemma_is_read_as_a_gemma_text_model():
    text = {"model_type": "gemma3_text", **BASE, "sliding_window": 8}
    outer = {"model_type": "gemma3", "text_config": text, "vision_config": {}, "eos_token_id": [1, 106]}
    config = parse_config(outer)
    assert config.eos_token_ids == (1, 106)
    assert replace(config, eos_token_ids=(1,)) == parse_config(text)


@pytest.mark.parametrize(("scalar", "scale"), [(144, 0.083333), (256, 0.0625)])
def test_gemma_2_takes_its_softmax_scale_from_there_too(scalar, scale):
    config = parsed("gemma2", head_dim=128, query_pre_attn_scalar=scalar)
    assert config.layers[0].attention.scale == pytest.approx(scale, abs=1e-6)


def test_the_windows_of_gemma_2_are_on_the_layers_that_transformers_lists():
    types = hugging_face("gemma2").layer_types
    expected = [8 if kind == "sliding_attention" else 0 for kind in types]
    assert windows(parsed("gemma2", sliding_window=8)) == expected == [8, 0, 8, 0]


# Phi-3: what rotates, and the context that decides between two sets of divisors


def test_the_rotary_fraction_of_phi3_counts_at_either_place_and_defaults_to_all():
    """Phi-4-mini: 96 of 128 features."""
    sizes = {"hidden_size": 3072, "num_attention_heads": 24}
    for raw in ({"partial_rotary_factor": 0.75}, {"rope_parameters": {"partial_rotary_factor": 0.75}}):
        assert parsed("phi3", **sizes, **raw).rotary[0].width == 96
    assert parsed("phi3", **sizes).rotary[0].width == 128
    assert parsed("phi", hidden_size=256).rotary[0].width == 32  # half of 64
    assert parsed("stablelm", hidden_size=256).rotary[0].width == 16  # a quarter


@pytest.mark.parametrize("name", ["longrope", "su", "yarn"])
def test_phi3_keeps_its_original_context_at_the_top_level_and_has_old_names_for_longrope(name):
    rope = {"type": name, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    (table,) = parsed("phi3", original_max_position_embeddings=32, rope_scaling=rope).rotary
    assert (table.rope_type, table.scaling["original_max_position_embeddings"]) == ("longrope", 32)
    (table,) = parsed("phi3", rope_scaling=rope).rotary
    assert table.scaling["original_max_position_embeddings"] == 4096  # the class's default


def test_the_original_context_beside_phi3s_rope_block_outranks_the_one_in_it_even_by_default(caplog):
    rope = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    block = {**rope, "original_max_position_embeddings": 32}
    for beside, expected in (({"original_max_position_embeddings": 64}, 64), ({}, 4096)):
        theirs = hugging_face("phi3", rope_scaling=block, pad_token_id=None, **beside).rope_parameters
        (table,) = parsed("phi3", rope_scaling=block, **beside).rotary
        assert table.scaling["original_max_position_embeddings"] == expected
        assert theirs["original_max_position_embeddings"] == expected
        assert "original_max_position_embeddings=32 of the rope block gives way" in caplog.text
        caplog.clear()


# EXAONE 4


def test_layer_types_of_an_exaone4_decide_whatever_its_pattern_says():
    """Published ones have "LLLG" (32B) or null (1.2B) there, which no other reading of the key allows."""
    types = ["sliding_attention", "sliding_attention", "full_attention", "full_attention"]
    config = parsed("exaone4", sliding_window=8, sliding_window_pattern="LLLG", layer_types=types)
    assert windows(config) == [8, 8, 0, 0]
    assert (
        hugging_face("exaone4", sliding_window=8, sliding_window_pattern="LLLG", layer_types=types).layer_types == types
    )
    full = ["full_attention"] * 4
    for window, rotates in ((None, True), (0, False), (8, False)):  # as transformers asks: is there a key, not a window
        config = parsed("exaone4", sliding_window=window, layer_types=full)
        assert [layer.attention.rotary is not None for layer in config.layers] == [rotates] * 4
    assert windows(parsed("exaone4", sliding_window=None, sliding_window_pattern=None, layer_types=full)) == [0] * 4
    assert windows(parsed("exaone4", sliding_window=8, sliding_window_pattern=2)) == [8, 0, 8, 0]


# OLMo 3


@pytest.mark.parametrize("model_type", ["olmo3", "gemma3_text"])
def test_a_rope_scaling_beside_blocks_by_layer_type_adds_to_that_of_full_layers(model_type):
    both = {
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 400.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
        },
    }
    full, sliding = parsed(model_type, sliding_window=8, **both).rotary
    assert (full.rope_type, full.theta, full.scaling) == ("linear", 400.0, {"factor": 4.0})
    assert (sliding.rope_type, sliding.theta) == ("default", 50.0)
    theirs = hugging_face(model_type, **both).rope_parameters
    assert theirs["full_attention"] == {"rope_type": "linear", "rope_theta": 400.0, "factor": 4.0}
    assert theirs["sliding_attention"] == both["rope_parameters"]["sliding_attention"]


def test_theta_beside_the_blocks_of_an_olmo3_is_that_of_its_full_layers():
    """As transformers reads it: windowed layers keep the class's 500,000."""
    config = parsed("olmo3", rope_theta=1e6, sliding_window=8)
    assert [t.theta for t in config.rotary] == [1e6, 500_000.0]
    theirs = hugging_face("olmo3", rope_theta=1e6).rope_parameters
    assert [theirs[kind]["rope_theta"] for kind in ("full_attention", "sliding_attention")] == [1e6, 500_000.0]


# GPT-J, GPT-NeoX and ties


def test_the_rotary_width_of_a_gptj_is_exact():
    """30 of 44: int(44 * (30 / 44)) is 29."""
    config = parsed("gptj", n_embd=176, n_head=4, n_layer=2, rotary_dim=30)
    assert config.rotary[0].width == config.layers[0].attention.rotary.width == 30
    assert torch.allclose(table(config), 10_000.0 ** (-torch.arange(0, 30, 2) / 30))


def test_the_rotary_fraction_of_gpt_neox_defaults_to_a_quarter():
    assert parsed("gpt_neox", hidden_size=256).rotary[0].width == 16  # of 64
    assert parsed("gpt_neox", hidden_size=256, rotary_pct=0.5).rotary[0].width == 32
    new = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.75}
    config = parsed("gpt_neox", hidden_size=256, rope_parameters=new)
    assert config.layers[0].attention.rotary.width == 48
    # Exponents divide by the rotary width, not by the head's.
    assert torch.allclose(table(config), 10_000.0 ** (-torch.arange(0, 48, 2) / 48))


TIED = {"gemma2", "gemma3_text", "cohere", "cohere2", "starcoder2", "smollm3", "falcon", "gpt2", "opt", "ernie4_5"}
TIED |= {"ernie4_5_moe", "minicpm3", "gemma"}


@pytest.mark.parametrize("family", [family for family in CONFIGS if not families()[family].is_own])
def test_a_tie_that_is_not_given_is_the_familys_own(family: str):
    from transformers import AutoConfig

    raw = {key: value for key, value in CONFIGS[family].items() if key != "tie_word_embeddings"}
    known = {**raw, "model_type": families()[family].written_as}  # as transformers calls it
    expected = AutoConfig.for_model(**known).tie_word_embeddings
    assert parse_config(raw).tie_embeddings == expected == (family in TIED)


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3", "gemma3_text", "gpt_neox"])
def test_the_table_of_known_keys_is_that_of_the_installed_transformers(model_type):
    config = hugging_face(model_type)
    for key, default in known_keys()[model_type].items():
        assert hasattr(config, key), key
        if key not in BASE and key not in ("rope_parameters", "head_dim", "layer_types", "sliding_window"):
            assert getattr(config, key) == default, key


@pytest.mark.parametrize(("given", "expected"), [(5, (5,)), ([5, 6], (5, 6)), (None, ())])
def test_end_tokens_are_one_id_a_list_or_none(given, expected):
    assert parsed(eos_token_id=given).eos_token_ids == expected


def test_harmless_keys_pass_without_a_word(caplog):
    caplog.set_level(logging.INFO, "plait")
    keys = {"torch_dtype": "bfloat16", "dtype": "bfloat16", "transformers_version": "4.40.0", "initializer_range": 0.1}
    parsed(**keys, use_cache=False, pretraining_tp=2, architectures=["LlamaForCausalLM"], _name_or_path="x")
    assert not caplog.records
