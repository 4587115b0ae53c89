"""deepseek2 files that plait writes: what their keys and tensors are, and that they say what the model computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import plait
from plait.errors import ConfigError
from plait.weights.checkpoint import open_checkpoint
from plait.weights.convert import convert
from plait.weights.gguf_source import GGUFSource
from plait.weights.safetensors_source import SafetensorsSource
from tests.tiny import write_tokenizer
from tests.weights.converting import config_of, logits
from tests.weights.test_convert import without
from tests.weights.test_convert_families import assert_same_bytes
from tests.weights.test_quantised_models import FORMATS, logits_of, quantised_model, twin

_SIZES: dict[str, Any] = {
    "vocab_size": 259,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "rms_norm_eps": 1e-5,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 6,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "bos_token_id": None,
    "eos_token_id": 258,
    "pad_token_id": None,
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 24.0}
MODELS: dict[str, dict[str, Any]] = {
    "lite": {
        **_SIZES,
        "model_type": "deepseek_v2",
        "q_lora_rank": None,
        "topk_method": "greedy",
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.7,
        "rope_scaling": {**_YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
    },
    "v2": {
        **_SIZES,
        "model_type": "deepseek_v2",
        "topk_method": "group_limited_greedy",
        "n_group": 3,
        "topk_group": 2,
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.5,
        "tie_word_embeddings": True,
        "first_k_dense_replace": 0,
    },
    "v3": {
        **_SIZES,
        "model_type": "deepseek_v3",
        "n_group": 3,
        "topk_group": 2,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "num_nextn_predict_layers": 1,
        "rope_scaling": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    },
}


def random_model(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> plait.Decoder:
    decoder = plait.from_config({**MODELS[name], **changes}, dtype=dtype, seed=3)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for key, parameter in decoder.named_parameters():
            if "norm" in key or key.endswith("bias"):
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return decoder


def saved(name: str, directory: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    random_model(name, dtype, **changes).save_pretrained(directory)
    write_tokenizer(directory)
    return directory


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", MODELS)
def test_a_directory_comes_back_from_gguf_as_it_was(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    source = saved(name, tmp_path / "source", dtype)
    convert(source, tmp_path / "model.gguf", "f32")
    convert(tmp_path / "model.gguf", tmp_path / "back")
    assert config_of(tmp_path / "back") == config_of(source)
    assert_same_bytes(tmp_path / "back", source)
    assert torch.equal(logits(tmp_path / "model.gguf"), logits(source))
    assert torch.equal(logits(tmp_path / "back"), logits(source))


@pytest.mark.parametrize("name", MODELS)
def test_the_metadata_alone_says_what_the_model_computes(name: str, tmp_path: Path) -> None:
    """Without the config.json that travels along, as llama.cpp sees the file."""
    source = saved(name, tmp_path / "source")
    convert(source, tmp_path / "model.gguf", "f32")
    foreign = without(tmp_path / "model.gguf", "plait.config", "plait.dtypes", "plait.generation_config")
    assert open_checkpoint(foreign).raw != open_checkpoint(source).raw
    assert (logits(foreign) - logits(source)).abs().max() < 1e-4


def test_the_keys_describe_the_absorbed_form(tmp_path: Path) -> None:
    convert(random_model("v3"), tmp_path / "model.gguf", "f32")
    metadata = GGUFSource(tmp_path / "model.gguf").metadata
    expected = {
        "attention.head_count": 4,
        "attention.head_count_kv": 1,
        "attention.key_length": 32 + 8,
        "attention.value_length": 32,
        "attention.key_length_mla": 12 + 8,
        "attention.value_length_mla": 10,
        "attention.kv_lora_rank": 32,
        "attention.q_lora_rank": 24,
        "feed_forward_length": 96,
        "rope.dimension_count": 8,
        "rope.scaling.type": "yarn",
        "rope.scaling.original_context_length": 32,
        "leading_dense_block_count": 1,
        "expert_count": 6,
        "expert_used_count": 2,
        "expert_shared_count": 2,
        "expert_feed_forward_length": 32,
        "expert_group_count": 3,
        "expert_group_used_count": 2,
        "expert_gating_func": 2,
        "expert_weights_norm": True,
        "expert_weights_scale": 2.5,
    }
    found = {key: metadata.get(f"deepseek2.{key}") for key in expected}
    assert found == expected
    assert metadata["deepseek2.rope.scaling.yarn_log_multiplier"] == pytest.approx(0.1)
    convert(random_model("v2"), tmp_path / "v2.gguf", "f32")
    metadata = GGUFSource(tmp_path / "v2.gguf").metadata
    assert metadata["deepseek2.expert_gating_func"] == 1 and metadata["deepseek2.expert_weights_norm"] is False
    assert metadata["deepseek2.leading_dense_block_count"] == 0


@pytest.mark.parametrize("kind", ["f32", "bf16"])
def test_kv_b_is_cut_in_two(kind: str, tmp_path: Path) -> None:
    source = saved("v3", tmp_path / "source", torch.bfloat16)
    convert(source, tmp_path / "model.gguf", kind)
    file, stored = GGUFSource(tmp_path / "model.gguf"), SafetensorsSource(source)
    for layer in range(3):
        heads = stored.read(f"model.layers.{layer}.self_attn.kv_b_proj.weight").reshape(4, 12 + 10, 32)
        keys, values = (file.read(f"blk.{layer}.attn_{half}_b.weight") for half in "kv")
        assert keys.shape == (4, 32, 12) and values.shape == (4, 10, 32)
        for head in range(4):
            assert torch.equal(keys[head].bfloat16(), heads[head, :12].T)
            assert torch.equal(values[head].bfloat16(), heads[head, 12:])
    assert {file.info(f"blk.1.attn_{half}_b.weight").format for half in "kv"} == {kind.upper()}
    assert not any("kv_b" in name for name in file.names())


def test_a_quantised_kv_b_keeps_the_half_whose_rows_are_its_own(tmp_path: Path) -> None:
    """GPTQ's blocks of 32 lie along the latent; the keys' half has it as columns."""
    config, pack, _ = FORMATS["gptq"]
    widths = {"q_lora_rank": 32, "v_head_dim": 16, "qk_nope_head_dim": 24}
    random_model("v3", **widths).save_pretrained(tmp_path / "source")
    path = quantised_model(tmp_path / "source", tmp_path / "quantised", config, pack, torch.bfloat16)
    report = convert(path, tmp_path / "model.gguf")
    file = GGUFSource(tmp_path / "model.gguf")
    assert {file.info(f"blk.1.attn_{half}_b.weight").format for half in "kv"} == {"F32", "Q4_0"}
    assert report.expanded == {"GPTQ 4-bit": 3} and report.kept["GPTQ 4-bit as Q4_0"] > 20
    assert torch.equal(
        logits_of(plait.load(tmp_path / "model.gguf", "fp32")), logits_of(plait.load(twin(path), "fp32"))
    )
    convert(path, tmp_path / "q8.gguf", "q8_0")  # rows of 24 cannot
    file = GGUFSource(tmp_path / "q8.gguf")
    assert [file.info(f"blk.1.attn_{half}_b.weight").format for half in "kv"] == ["F16", "Q8_0"]


def test_a_gguf_file_is_copied_under_its_own_names(tmp_path: Path) -> None:
    convert(random_model("v3"), tmp_path / "a.gguf", "bf16")
    report = convert(tmp_path / "a.gguf", tmp_path / "b.gguf")
    a, b = GGUFSource(tmp_path / "a.gguf"), GGUFSource(tmp_path / "b.gguf")
    assert a.names() == b.names() and all(np.array_equal(a.raw(name), b.raw(name)) for name in a.names())
    assert report.copied == report.tensors and dict(a.metadata) == dict(b.metadata)
    convert(tmp_path / "a.gguf", tmp_path / "c.gguf", "f16")
    assert GGUFSource(tmp_path / "c.gguf").info("blk.1.attn_k_b.weight").format == "F16"


def test_layers_that_predict_further_tokens_are_left_out_and_told(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    source = saved("v3", tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.3.eh_proj.weight"] = torch.ones(64, 128)
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    report = convert(source, tmp_path / "model.gguf", "f32")
    assert report.skipped == ["model.layers.3.eh_proj.weight"]
    assert torch.equal(logits(tmp_path / "model.gguf"), logits(source))


def test_what_llama_cpp_takes_otherwise_is_told(tmp_path: Path) -> None:
    notes = {name: convert(random_model(name), tmp_path / f"{name}.gguf").notes for name in MODELS}
    assert any("26 or 27 layers" in note for note in notes["lite"])
    assert any("two best" in note for note in notes["v2"])
    assert not any("llama.cpp" in note for note in notes["v3"])


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("v2", {"attention_bias": True}, r"layers\[0\]\.attention\.bias is True"),
        ("v3", {"rope_interleave": False}, r"rotary\.pairing is 'halves'"),
        ("v3", {"rope_scaling": _YARN}, r"llama\.cpp computes rope_type='yarn' without mscale_all_dim"),
        ("v3", {"rope_scaling": {**_YARN, "mscale": 1.0, "mscale_all_dim": 0.5}}, r"rotary\[0\] is yarn"),
        ("v3", {"first_k_dense_replace": 3}, r"whose last layer has no experts"),
    ],
)
def test_what_the_architecture_has_no_key_for_is_refused(
    name: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        convert(random_model(name, **changes), tmp_path / "model.gguf")
    assert list(tmp_path.iterdir()) == []
