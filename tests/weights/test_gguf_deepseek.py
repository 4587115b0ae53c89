"""deepseek2 files: what their keys mean, and a kv_b that lies in two tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import plait
from plait.errors import ConfigError, WeightError
from plait.kernels.native import native_library, reason
from plait.model.config import LatentAttentionSpec
from plait.model.families import parse_config
from plait.model.rope import rotary_numbers
from plait.weights.checkpoint import open_checkpoint
from plait.weights.gguf_config import gguf_config
from plait.weights.pack import pack_checkpoint
from plait.weights.sources import TensorInfo
from plait.weights.store import second_name
from tests.gguf_files import write_gguf

# DeepSeek-V2-Lite as converters of 2024 describe it.
LITE: dict[str, Any] = {
    "block_count": 27,
    "context_length": 163_840,
    "embedding_length": 2048,
    "feed_forward_length": 10_944,
    "attention.head_count": 16,
    "attention.head_count_kv": 16,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "attention.key_length": 192,
    "attention.value_length": 128,
    "attention.kv_lora_rank": 512,
    "rope.freq_base": 10_000.0,
    "rope.dimension_count": 64,
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 40.0,
    "rope.scaling.original_context_length": 4096,
    "rope.scaling.yarn_log_multiplier": float(np.float32(0.0707)),
    "leading_dense_block_count": 1,
    "expert_feed_forward_length": 1408,
    "expert_count": 64,
    "expert_used_count": 6,
    "expert_shared_count": 2,
    "expert_weights_scale": 1.0,
    "vocab_size": 102_400,
}
ABSORBED = {
    "attention.head_count_kv": 1,
    "attention.key_length": 576,
    "attention.value_length": 512,
    "attention.key_length_mla": 192,
    "attention.value_length_mla": 128,
}


def read(*tensors: str, **changes: Any) -> dict[str, Any]:
    """The config.json of V2-Lite's metadata with keys changed (dots as __); None removes. tensors: of the file."""
    keys = LITE | {key.replace("__", "."): value for key, value in changes.items()}
    metadata = {f"deepseek2.{key}": value for key, value in keys.items() if value is not None}
    shapes = dict.fromkeys(tensors, (1,)) | {"token_embd.weight": (102_400, 2048)}
    infos = {name: TensorInfo(name, shape, "F32", 4, "m.gguf", 0) for name, shape in shapes.items()}
    return gguf_config({"general.architecture": "deepseek2", **metadata}, infos)


def attention(raw: dict[str, Any]) -> LatentAttentionSpec:
    a = parse_config(raw).layers[0].attention
    assert isinstance(a, LatentAttentionSpec)
    return a


def test_the_multiplier_of_a_file_is_a_tenth_of_mscale_all_dim():
    raw = read()
    assert raw["rope_scaling"]["mscale_all_dim"] == raw["rope_scaling"]["mscale"] == 0.707
    assert attention(raw).scale == pytest.approx(0.114721, abs=1e-6)
    assert rotary_numbers(parse_config(raw).rotary[0])[1] == 1.0
    plain = read(rope__scaling__yarn_log_multiplier=None)
    assert attention(plain).scale == 192**-0.5 and "mscale" not in plain["rope_scaling"]


def test_older_and_newer_files_say_the_same_widths():
    older = read()
    assert older == read(**{key.replace(".", "__"): value for key, value in ABSORBED.items()})
    a = attention(older)
    assert (a.latent_width, a.nope_width, a.rope_width, a.value_width, a.query_rank) == (512, 128, 64, 128, None)
    assert attention(read(attention__q_lora_rank=1536)).query_rank == 1536


def test_the_router_decides_between_the_families():
    lite, v2 = read(), read(expert_group_count=8, expert_group_used_count=3, expert_weights_scale=16.0)
    assert (lite["model_type"], lite["topk_method"]) == ("deepseek_v2", "greedy")
    assert (v2["topk_method"], v2["n_group"], v2["topk_group"]) == ("group_limited_greedy", 8, 3)
    assert v2["routed_scaling_factor"] == 16.0 and v2["architectures"] == ["DeepseekV2ForCausalLM"]
    v3 = read(expert_gating_func=2, expert_group_count=8, expert_group_used_count=4, expert_weights_norm=True)
    assert (v3["model_type"], v3["norm_topk_prob"]) == ("deepseek_v3", True)
    assert read("blk.3.exp_probs_b.bias", expert_gating_func=0)["model_type"] == "deepseek_v3"
    assert read("blk.3.exp_probs_b.bias", expert_gating_func=1)["model_type"] == "deepseek_v2"
    assert parse_config(v3).layers[3].feed_forward.router.scores == "sigmoid"
    assert attention(v3).rotary.pairing == attention(lite).rotary.pairing == "adjacent"


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no rotary width": ({"rope__dimension_count": None}, "deepseek2.rope.dimension_count is missing"),
    "no rank": ({"attention__kv_lora_rank": None}, "deepseek2.attention.kv_lora_rank is missing"),
    "no widths": ({"attention__key_length": None}, "key_length and value_length"),
    "nothing beside rotary": ({"attention__key_length": 64}, "a head's key of 64 has no features beside the 64"),
    "kv heads": ({"attention__head_count_kv": 4}, "head_count_kv is 4; without attention.key_length_mla it must be 16"),
    "cached row": (
        {"attention__key_length_mla": 192, "attention__value_length_mla": 128, "attention__head_count_kv": 1},
        "must be 1, 576, 512 where attention.key_length_mla stands",
    ),
    "values of newer files": (
        {key.replace(".", "__"): value for key, value in ABSORBED.items() if "value_length_mla" not in key},
        "key_length_mla and value_length_mla, are missing",
    ),
    "router": ({"expert_gating_func": 3}, "expert_gating_func is 3: a router that is neither"),
    "no width of experts": ({"expert_feed_forward_length": None}, "expert_feed_forward_length is missing"),
    "correction without yarn": ({"rope__scaling__type": "linear"}, "yarn_log_multiplier is 0.0707 without"),
    "layers for speculation": ({"nextn_predict_layers": 1}, "nextn_predict_layers is 1"),
    "unknown": ({"attention__indexer_heads": 4}, "deepseek2.attention.indexer_heads"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_file_may_not_say(name: str):
    changes, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message.replace(".", r"\.")) as caught:
        read(**changes)
    assert "\n" not in str(caught.value)


# A model of one layer, two heads of 32 + 2 for keys and 32 for values, over a latent of 32

TINY: dict[str, Any] = {
    "block_count": 1,
    "context_length": 64,
    "embedding_length": 32,
    "feed_forward_length": 32,
    "attention.head_count": 2,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "attention.key_length": 34,
    "attention.value_length": 32,
    "attention.kv_lora_rank": 32,
    "rope.dimension_count": 2,
    "leading_dense_block_count": 1,
    "expert_feed_forward_length": 32,
    "expert_count": 2,
    "expert_used_count": 1,
    "expert_shared_count": 1,
}
KV_B = np.random.default_rng(1).normal(size=(2, 64, 32)).astype(np.float32)
HALVES = {"attn_k_b": KV_B[:, :32].transpose(0, 2, 1), "attn_v_b": KV_B[:, 32:]}


def write(path: Path, **layer: Any) -> Path:
    """The file with these tensors of its layer beside those that every test needs."""
    random = np.random.default_rng(2)
    shapes = {
        "token_embd": (48, 32),
        "output_norm": (32,),
        "blk.0.attn_norm": (32,),
        "blk.0.attn_q": (68, 32),
        "blk.0.attn_kv_a_mqa": (34, 32),
        "blk.0.attn_kv_a_norm": (32,),
        "blk.0.attn_output": (32, 64),
        "blk.0.ffn_norm": (32,),
        "blk.0.ffn_gate": (32, 32),
        "blk.0.ffn_up": (32, 32),
        "blk.0.ffn_down": (32, 32),
    }
    tensors: dict[str, Any] = {f"{name}.weight": random.normal(size=shape) for name, shape in shapes.items()}
    tensors |= {f"blk.0.{name}.weight": value for name, value in layer.items()}
    keys = {f"deepseek2.{key}": value for key, value in TINY.items()}
    keys["tokenizer.ggml.tokens"] = [f"t{i}" for i in range(48)]
    return write_gguf(path, keys, tensors, "deepseek2")


def kv_b(path: Path) -> torch.Tensor:
    return plait.load(path, "fp32").model.layers[0].self_attn.kv_b_proj.weight.detach()


def test_two_halves_are_the_whole(tmp_path: Path):
    expected = kv_b(write(tmp_path / "whole.gguf", attn_kv_b=KV_B.reshape(128, 32)))
    assert torch.equal(expected, torch.from_numpy(KV_B).reshape(128, 32))
    assert torch.equal(kv_b(write(tmp_path / "halves.gguf", **HALVES)), expected)
    flat = {name: value.reshape(-1, 32) for name, value in HALVES.items()}
    assert torch.equal(kv_b(write(tmp_path / "flat.gguf", **flat)), expected)


@pytest.mark.parametrize(
    ("k", "v", "joined"),
    [("F16", "F16", "F16"), ("BF16", "BF16", "BF16"), ("F16", "F32", "F32"), ("Q8_0", "F16", "F32")],
)
def test_halves_are_joined_in_the_shortest_type_that_holds_both(k: str, v: str, joined: str, tmp_path: Path):
    import gguf

    kinds = {"attn_k_b": k, "attn_v_b": v}
    path = write(tmp_path / "m.gguf", **{name: (kind, HALVES[name]) for name, kind in kinds.items()})
    source = open_checkpoint(path).source
    info = source.info("blk.0.attn_kv_b.weight")
    assert (info.format, info.shape, info.nbytes) == (joined, (128, 32), source.raw(info.name).nbytes)
    assert not {"blk.0.attn_k_b.weight", "blk.0.attn_v_b.weight"} & set(source.names())
    stored = {}
    for name, kind in kinds.items():
        kind = gguf.GGMLQuantizationType[kind]
        rows = gguf.dequantize(gguf.quantize(np.ascontiguousarray(HALVES[name]), kind), kind)
        stored[name] = rows.reshape(HALVES[name].shape)
    expected = np.concatenate((stored["attn_k_b"].transpose(0, 2, 1), stored["attn_v_b"]), 1).reshape(128, 32)
    assert np.array_equal(kv_b(path).numpy(), expected)


@pytest.mark.skipif(native_library() is None, reason=f"no native library: {reason()}")
@pytest.mark.parametrize(
    ("k", "v", "layout", "expanded"),
    [
        ("Q8_0", "Q8_0", "BF16", "Q8_0 in two tensors"),
        ("Q4_0", "Q8_0", "BF16", "Q4_0 and Q8_0 in two tensors"),
        ("BF16", "Q8_0", "BF16", "Q8_0 in two tensors"),
        ("Q8_0", "F16", "F32", "Q8_0 in two tensors"),
        ("BF16", "BF16", "BF16", ""),
        ("F32", "F32", "F32", ""),
    ],
)
def test_the_native_plan_keeps_halves_of_blocks_in_16_bits(k: str, v: str, layout: str, expanded: str, tmp_path: Path):
    """No plain number of the file is rounded; what decoding reads of the others, both layouts, has two bytes each."""
    path = write(tmp_path / "m.gguf", attn_k_b=(k, HALVES["attn_k_b"]), attn_v_b=(v, HALVES["attn_v_b"]))
    name = "model.layers.0.self_attn.kv_b_proj.weight"
    exact = kv_b(path)
    store = pack_checkpoint(open_checkpoint(path))
    kept = exact.bfloat16().float() if layout == "BF16" else exact
    assert (store[name].layout, store[second_name(name)].layout) == (layout, layout)
    assert np.array_equal(store.expand(name), kept.numpy())
    turned = kept.reshape(2, 64, 32)[:, :32].transpose(1, 2)
    assert np.array_equal(store.expand(second_name(name)), turned.numpy())
    report = store.report
    assert report.second_bytes == 2 * 32 * 32 * (2 if layout == "BF16" else 4)
    assert report.expanded == ({expanded: 1} if expanded else {})
    if expanded:
        to = {"BF16": "bf16", "F32": "fp32"}[layout]
        assert f"expanded to {to} at load: 1 {expanded}" in report.lines()
        assert plait.load(path, "fp32").load_report.expanded == {expanded: 1}
    wide = pack_checkpoint(open_checkpoint(path), "fp32")
    assert wide[name].layout == "F32" and np.array_equal(wide.expand(name), exact.numpy())


def test_halves_beside_the_whole_are_left_out_and_listed(tmp_path: Path):
    path = write(tmp_path / "m.gguf", attn_kv_b=KV_B.reshape(128, 32), **{k: 0 * v for k, v in HALVES.items()})
    decoder = plait.load(path, "fp32")
    assert decoder.load_report.skipped == ["blk.0.attn_k_b.weight", "blk.0.attn_v_b.weight"]
    assert torch.equal(decoder.model.layers[0].self_attn.kv_b_proj.weight, torch.from_numpy(KV_B).reshape(128, 32))


def test_one_half_alone_or_of_another_shape_is_an_error(tmp_path: Path):
    with pytest.raises(WeightError, match=r"lacks a tensor model\.layers\.0\.self_attn\.kv_b_proj\.weight"):
        plait.load(write(tmp_path / "one.gguf", attn_k_b=HALVES["attn_k_b"]), "fp32")
    turned = write(tmp_path / "turned.gguf", attn_k_b=HALVES["attn_k_b"], attn_v_b=HALVES["attn_v_b"][:, :31])
    with pytest.raises(WeightError, match=r"attn_v_b\.weight has shape \(2, 31, 32\); .* \(2, 32, 32\)"):
        plait.load(turned, "fp32")
