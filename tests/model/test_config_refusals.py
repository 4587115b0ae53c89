"""No key of a config.json is silently ignored: what plait cannot carry out is refused by name and before any weight."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import plait
from plait.errors import ConfigError
from plait.model import reader
from plait.model.families import parse_config
from tests.model.test_config_cases import BASE, parsed

YARN = {"rope_type": "yarn", "factor": 4.0}

REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "kv heads that do not divide": (
        "llama",
        {"num_attention_heads": 7, "num_key_value_heads": 2, "head_dim": 32, "hidden_size": 224},
        r"num_attention_heads=7 is no multiple of num_key_value_heads=2",
    ),
    "heads that do not divide": ("llama", {"num_attention_heads": 5}, r"hidden_size=64.*num_attention_heads=5"),
    "odd head_dim": ("llama", {"head_dim": 15}, r"15 of head_dim=15 features rotate"),
    "odd rotary width": ("gpt_neox", {"rotary_pct": 0.33}, r"5 of head_dim=16 features rotate"),
    "rotary width 0": ("gpt_neox", {"rotary_pct": 0.01}, r"0 of head_dim=16 features rotate"),
    "rotary width beyond the head": ("gpt_neox", {"rotary_pct": 1.5}, r"24 of head_dim=16 features rotate"),
    "layer_types too short": (
        "qwen3",
        {"layer_types": ["full_attention"] * 3},
        r"layer_types has 3 entries for num_hidden_layers=4",
    ),
    "unknown layer type": ("qwen2", {"layer_types": ["chunked_attention"] * 4}, r"'chunked_attention'"),
    "windowed layers without a window": (
        "qwen2",
        {"layer_types": ["sliding_attention"] * 4, "use_sliding_window": False},
        r"sliding_window is absent, 0 or switched off",
    ),
    "no heads": ("llama", {"num_attention_heads": 0}, r"num_attention_heads=0"),
    "negative kv heads": ("llama", {"num_key_value_heads": -2}, r"num_key_value_heads=-2"),
    "no layers": ("llama", {"num_hidden_layers": 0}, r"num_hidden_layers=0"),
    "negative layers": ("gemma3_text", {"num_hidden_layers": -1}, r"num_hidden_layers=-1 must"),
    "no vocabulary": ("llama", {"vocab_size": 0}, r"vocab_size=0"),
    "negative width": ("llama", {"intermediate_size": -4}, r"intermediate_size=-4"),
    "negative window": ("mistral", {"sliding_window": -3}, r"sliding_window=-3"),
    "no positions": ("llama", {"max_position_embeddings": 0}, r"max_position_embeddings=0"),
    "size as text": ("llama", {"hidden_size": "64"}, r"hidden_size='64'.*whole number"),
    "head_dim as text": ("llama", {"head_dim": "16"}, r"head_dim='16'.*whole number"),
    "kv heads as text": ("llama", {"num_key_value_heads": "2"}, r"num_key_value_heads='2'.*whole number"),
    "kv heads as a list": ("gemma3_text", {"num_key_value_heads": [2, 2]}, r"num_key_value_heads=\[2, 2\]"),
    "window as text": ("gemma3_text", {"sliding_window": "8"}, r"sliding_window='8'"),
    "flag as a number": ("llama", {"attention_bias": 1}, r"attention_bias=1.*true or false"),
    "eps that is no number": ("llama", {"rms_norm_eps": float("nan")}, r"rms_norm_eps=nan"),
    "unknown activation": ("llama", {"hidden_act": "mish"}, r"hidden_act='mish'"),
    "end token as text": ("llama", {"eos_token_id": "</s>"}, r"eos_token_id='</s>'"),
    # rotary
    "longrope without its divisors": (
        "llama",
        {"rope_scaling": {"rope_type": "longrope"}},
        r"'longrope' needs the key",
    ),
    "longrope with too few divisors": (
        "llama",
        {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.0] * 7}},
        r"long_factor is 7 numbers; it must be a list of 8 numbers",
    ),
    "dynamic without a factor": ("llama", {"rope_scaling": {"type": "dynamic"}}, r"'dynamic' needs the key 'factor'"),
    "a scaling of olmo3 without layer types": (
        "olmo3",
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0}},
        r"rope_parameters of a olmo3 must be keyed by layer type",
    ),
    "a scaling of gemma3_text without layer types": (
        "gemma3_text",
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0}},
        r"rope_parameters of a gemma3_text must be keyed by layer type",
    ),
    "an old scaling by layer type": (
        "gemma3_text",
        {"rope_scaling": {"full_attention": {"rope_type": "linear", "factor": 2.0}}},
        r"rope_scaling of a gemma3_text concerns full layers",
    ),
    "rotary tables by layer type where there is one": (
        "smollm3",
        {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 5.0}}},
        r"rope_parameters.full_attention: a smollm3 has one rotary table",
    ),
    "a pattern in text without layer types": (
        "exaone4",
        {"sliding_window": 8, "sliding_window_pattern": "LLLG"},
        r"sliding_window_pattern='LLLG'",
    ),
    "output projection that is not square": ("helium", {"head_dim": 12}, r"num_attention_heads=4 times head_dim=12"),
    "norms after the branches": (
        "opt",
        {"do_layer_norm_before": False, "ffn_dim": 48},
        r"do_layer_norm_before=False: opt knows this key",
    ),
    "projected embeddings": ("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32}, r"word_embed_proj_dim=32"),
    "norms of each head on their own": (
        "stablelm",
        {"qk_layernorm": True},
        r"qk_layernorm=True: stablelm knows this key",
    ),
    "a window on some layers of a family with one mask": (
        "phi3",
        {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2},
        r"layer_types of a phi3 must all be 'sliding_attention'",
    ),
    "unknown rope type": ("llama", {"rope_scaling": {"rope_type": "spiral"}}, r"'spiral' is unknown"),
    "rope type that is no text": ("llama", {"rope_scaling": {"rope_type": ["yarn"]}}, r"\['yarn'\]"),
    "missing rope key": ("llama", {"rope_scaling": {"rope_type": "linear"}}, r"needs the key 'factor'"),
    "rope factor of zero": ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 0}}, r"factor=0 must"),
    "rope factor as text": ("llama", {"rope_scaling": {"rope_type": "linear", "factor": "2"}}, r"factor='2' must"),
    "yarn beta as text": ("llama", {"rope_scaling": {**YARN, "beta_fast": "32"}}, r"beta_fast='32'"),
    "yarn truncate as text": ("llama", {"rope_scaling": {**YARN, "truncate": "no"}}, r"truncate='no'"),
    "rope_theta of zero": ("llama", {"rope_theta": 0.0}, r"rope_theta=0.0 must"),
    "rope_theta as text": ("llama", {"rope_theta": "1e6"}, r"rope_theta='1e6' must"),
    "rope_scaling that is no object": ("llama", {"rope_scaling": "linear"}, r"rope_scaling='linear'"),
    "part of a head rotates where the class rotates it whole": (
        "llama",
        {"partial_rotary_factor": 0.5},
        r"partial_rotary_factor=0.5: a llama rotates whole heads",
    ),
    "layer types mixed with flat rope keys": (
        "gemma3_text",
        {"rope_parameters": {"full_attention": {}, "rope_theta": 5.0}},
        r"mixes layer types with the key 'rope_theta'",
    ),
    # families
    "bidirectional gemma": ("gemma3_text", {"use_bidirectional_attention": True}, r"use_bidirectional_attention=true"),
    "quantisation": ("llama", {"quantization_config": {"quant_method": "bitsandbytes"}}, r"'bitsandbytes' is not supp"),
    "family that needs more": ("qwen3_next", {}, r"'qwen3_next' is not supported: it needs gated delta-rule layers"),
    "state space": ("mamba2", {}, r"'mamba2' is not supported: it needs state-space layers"),
    "unknown family": ("lama", {}, r"unknown model_type 'lama'; did you mean 'llama'\? \(known: .*gemma3_text"),
    "far from any family": ("zzz", {}, r"unknown model_type 'zzz' \(known:"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_carried_out_is_refused_by_name(case: str):
    model_type, changes, message = REFUSED[case]
    with pytest.raises(ConfigError, match=message):
        parsed(model_type, **changes)


def test_a_quantised_multimodal_directory_is_refused_too():
    outer = {"model_type": "gemma3", "text_config": dict(BASE), "quantization_config": {"quant_method": "bitsandbytes"}}
    with pytest.raises(ConfigError, match="bitsandbytes"):
        parse_config(outer)


@pytest.mark.parametrize("raw", [[], "llama", {}, {"model_type": None}, {"model_type": 3}])
def test_what_is_no_configuration_is_refused(raw):
    with pytest.raises(ConfigError):
        parse_config(raw)


def test_a_key_that_the_class_does_not_know_warns_once_and_is_refused_when_strict(caplog):
    parsed(attention_multiplier=2.0)
    assert len(caplog.records) == 1
    assert "attention_multiplier=2.0 is no key of llama" in caplog.text
    with pytest.raises(ConfigError, match=r"attention_multiplier=2.0 is no key of llama \(--strict\)"):
        parse_config({"model_type": "llama", **BASE, "attention_multiplier": 2.0}, strict=True)


def test_a_key_that_the_class_knows_and_plait_does_not_must_have_its_default(monkeypatch):
    """No family leaves a key of its class unread today, so the table is given one more."""
    known = json.loads(json.dumps(reader.known_keys()))
    known["llama"]["attention_twist"] = 0.0
    monkeypatch.setattr(reader, "known_keys", lambda: known)
    parsed(attention_twist=0.0)
    with pytest.raises(ConfigError, match=r"attention_twist=0.5: llama knows this key and plait does not implement"):
        parsed(attention_twist=0.5)


def test_an_unknown_rope_key_warns_or_is_refused_when_strict(caplog):
    block = {"rope_type": "linear", "factor": 2.0, "swirl": 3}
    assert "swirl" not in parsed(rope_scaling=block).rotary[0].scaling
    assert "rope_parameters.swirl=3" in caplog.text
    with pytest.raises(ConfigError, match="swirl=3"):
        parse_config({"model_type": "llama", **BASE, "rope_scaling": block}, strict=True)


def test_dropout_is_implemented_and_not_ignored():
    config = parsed("gpt_neox", attention_dropout=0.1, hidden_dropout=0.2)
    assert (config.attention_dropout, config.hidden_dropout) == (0.1, 0.2)
    decoder = plait.from_config({"model_type": "gpt_neox", **BASE, "hidden_dropout": 0.5, "initializer_range": 0.5})
    ids = torch.arange(9)
    assert torch.equal(decoder(ids), decoder(ids))
    decoder.train()
    assert not torch.equal(decoder(ids), decoder(ids))


def test_a_refusal_comes_before_any_weight_is_read(tmp_path: Path):
    raw = {"model_type": "llama", **BASE, "num_key_value_heads": 3}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    (tmp_path / "model.safetensors").write_bytes(b"no tensors at all")
    with pytest.raises(ConfigError, match="num_key_value_heads=3"):
        plait.load(tmp_path)
