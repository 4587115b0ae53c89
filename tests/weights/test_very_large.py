"""Checkpoints of hundreds of billions of parameters: described from config and headers, in a moment, without torch."""

from __future__ import annotations

import json
import os
import sys
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

from plait.model.decoder import build
from plait.model.families import parse_config
from tests.sparse import sparse_checkpoint

Tensors = list[tuple[str, tuple[int, ...], str]]
# The commands must answer within two seconds. What is measured is the time that they compute: other processes of a
# busy machine do not count.
LIMIT_S = 2.0

QWEN3_235B = {
    "model_type": "qwen3_moe",
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 94,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "vocab_size": 151_936,
    "max_position_embeddings": 40_960,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
}
MIXTRAL_8X22B = {
    "model_type": "mixtral",
    "hidden_size": 6144,
    "intermediate_size": 16_384,
    "num_hidden_layers": 56,
    "num_attention_heads": 48,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 32_000,
    "max_position_embeddings": 65_536,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
}


def attention(config: dict[str, Any], layer: str) -> Tensors:
    hidden, heads, kv = config["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"]
    width = config.get("head_dim") or hidden // heads
    shapes = {"q": (heads * width, hidden), "k": (kv * width, hidden), "v": (kv * width, hidden)}
    shapes["o"] = (hidden, heads * width)
    norms = [(f"{layer}.{name}_layernorm.weight", (hidden,), "BF16") for name in ("input", "post_attention")]
    return norms + [(f"{layer}.self_attn.{name}_proj.weight", shape, "BF16") for name, shape in shapes.items()]


def mixture_tensors(config: dict[str, Any], experts: int, width: int, mixture: str, names: dict[str, str]) -> Tensors:
    """A mixture with a tensor per expert and projection. names: gate, up and down as the family calls them."""
    hidden = config["hidden_size"]
    tensors: Tensors = [("model.embed_tokens.weight", (config["vocab_size"], hidden), "BF16")]
    for n in range(config["num_hidden_layers"]):
        layer = f"model.layers.{n}"
        tensors += attention(config, layer)
        if "head_dim" in config:
            tensors += [(f"{layer}.self_attn.{x}_norm.weight", (config["head_dim"],), "BF16") for x in "qk"]
        tensors.append((f"{layer}.{mixture}.gate.weight", (experts, hidden), "BF16"))
        shapes = {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
        tensors += [
            (f"{layer}.{mixture}.experts.{expert}.{names[role]}.weight", shape, "BF16")
            for expert in range(experts)
            for role, shape in shapes.items()
        ]
    head = ("lm_head.weight", (config["vocab_size"], hidden), "BF16")
    return [*tensors, ("model.norm.weight", (hidden,), "BF16"), head]


QWEN_NAMES = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
SHAPES: dict[str, tuple[dict[str, Any], Tensors, int]] = {
    "qwen3-235b": (QWEN3_235B, mixture_tensors(QWEN3_235B, 128, 1536, "mlp", QWEN_NAMES), 118),
    "mixtral-8x22b": (
        MIXTRAL_8X22B,
        mixture_tensors(MIXTRAL_8X22B, 8, 16_384, "block_sparse_moe", {"gate": "w1", "up": "w3", "down": "w2"}),
        59,
    ),
}


_FP8_BLOCKS = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
# As published, but for what concerns only training. Both are 61 layers of 7168.
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18_432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "vocab_size": 129_280,
    "max_position_embeddings": 163_840,
    "rope_theta": 10_000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "quantization_config": _FP8_BLOCKS,
}
KIMI_K2 = DEEPSEEK_V3 | {
    "model_type": "kimi_k2",
    "num_nextn_predict_layers": 0,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "n_routed_experts": 384,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.827,
    "vocab_size": 163_840,
    "max_position_embeddings": 131_072,
    "rope_theta": 50_000,
    "rope_scaling": DEEPSEEK_V3["rope_scaling"] | {"factor": 32},
}
# (configuration, files, parameters of the model as its authors count them)
LATENT = {"deepseek-v3": (DEEPSEEK_V3, 163, 671.0e9), "kimi-k2": (KIMI_K2, 62, 1026.4e9)}


def latent_tensors(c: dict[str, Any]) -> Tensors:
    """The tensors as published: FP8 weights with a scale for every 128 x 128; behind the last layer, in DeepSeek-V3's
    files, the one that predicts a further token."""
    hidden, heads, rank, rope = c["hidden_size"], c["num_attention_heads"], c["kv_lora_rank"], c["qk_rope_head_dim"]
    tensors: Tensors = []

    def fp8(name: str, rows: int, columns: int) -> None:
        tensors.append((f"{name}.weight", (rows, columns), "F8_E4M3"))
        tensors.append((f"{name}.weight_scale_inv", (-(-rows // 128), -(-columns // 128)), "F32"))

    def feed_forward(name: str, width: int) -> None:
        fp8(f"{name}.gate_proj", width, hidden)
        fp8(f"{name}.up_proj", width, hidden)
        fp8(f"{name}.down_proj", hidden, width)

    for n in range(c["num_hidden_layers"] + c["num_nextn_predict_layers"]):
        layer = f"model.layers.{n}"
        for name, rows, columns in [
            ("q_a_proj", c["q_lora_rank"], hidden),
            ("q_b_proj", heads * (c["qk_nope_head_dim"] + rope), c["q_lora_rank"]),
            ("kv_a_proj_with_mqa", rank + rope, hidden),
            ("kv_b_proj", heads * (c["qk_nope_head_dim"] + c["v_head_dim"]), rank),
            ("o_proj", hidden, heads * c["v_head_dim"]),
        ]:
            fp8(f"{layer}.self_attn.{name}", rows, columns)
        for name, width in [
            ("self_attn.q_a_layernorm", c["q_lora_rank"]),
            ("self_attn.kv_a_layernorm", rank),
            ("input_layernorm", hidden),
            ("post_attention_layernorm", hidden),
        ]:
            tensors.append((f"{layer}.{name}.weight", (width,), "BF16"))
        if n < c["first_k_dense_replace"]:
            feed_forward(f"{layer}.mlp", c["intermediate_size"])
            continue
        experts = c["n_routed_experts"]
        tensors.append((f"{layer}.mlp.gate.weight", (experts, hidden), "BF16"))
        tensors.append((f"{layer}.mlp.gate.e_score_correction_bias", (experts,), "F32"))
        for expert in range(experts):
            feed_forward(f"{layer}.mlp.experts.{expert}", c["moe_intermediate_size"])
        feed_forward(f"{layer}.mlp.shared_experts", c["moe_intermediate_size"])
        if n >= c["num_hidden_layers"]:
            extra = {"enorm": (hidden,), "hnorm": (hidden,), "eh_proj": (hidden, 2 * hidden)}
            extra |= {"shared_head.norm": (hidden,), "shared_head.head": (c["vocab_size"], hidden)}
            extra |= {"embed_tokens": (c["vocab_size"], hidden)}
            tensors.extend((f"{layer}.{name}.weight", shape, "BF16") for name, shape in extra.items())
    table = (c["vocab_size"], hidden)
    ends = [("model.embed_tokens", table), ("lm_head", table), ("model.norm", (hidden,))]
    return tensors + [(f"{name}.weight", shape, "BF16") for name, shape in ends]


def command(*words: str) -> tuple[dict[str, Any] | list[Any], float]:
    """The JSON of a plait command in a process of its own, and the seconds that the process computed.

    Fails where it imports torch, or anything else that only models need.
    """
    code = (
        "import sys; from plait.cli.main import main\n"
        f"status = main({list(words)!r})\n"
        "heavy = sorted({'torch', 'transformers', 'safetensors', 'gguf', 'tokenizers'} & set(sys.modules))\n"
        "sys.exit(f'imported {heavy}' if heavy else status)"
    )
    read_end, write_end = os.pipe()
    process = os.posix_spawn(
        sys.executable, [sys.executable, "-c", code], os.environ, file_actions=[(os.POSIX_SPAWN_DUP2, write_end, 1)]
    )
    os.close(write_end)
    with os.fdopen(read_end, encoding="utf-8") as output:
        text = output.read()
    _, status, usage = os.wait4(process, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    return json.loads(text), usage.ru_utime + usage.ru_stime


@pytest.mark.slow
@pytest.mark.parametrize("name", LATENT)
def test_inspect_of_a_hundred_thousand_tensors_in_two_seconds(tmp_path: Path, name: str) -> None:
    config, files, published = LATENT[name]
    tensors = latent_tensors(config)
    assert len(tensors) > 90_000
    directory = sparse_checkpoint(tmp_path / name, config, tensors, files)
    facts, seconds = command("inspect", str(directory), "--json")
    assert isinstance(facts, dict)
    assert facts["supported"], facts["problem"]
    assert (facts["tensors"]["count"], facts["tensors"]["files"]) == (len(tensors), files)
    stored = [prod(shape) for _, shape, dtype in tensors if dtype == "F8_E4M3"]
    expected = {"tensors": len(stored), "numbers": sum(stored), "bytes": sum(stored)}
    assert facts["tensors"]["formats"]["F8_E4M3"] == expected
    assert facts["quantisation"]["weights"] == len(stored)
    assert round(facts["config"]["parameters"]["total"], -8) == published and seconds < LIMIT_S


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
def test_inspect_of_a_family_that_runs_counts_every_parameter(tmp_path: Path, name: str) -> None:
    config, tensors, shards = SHAPES[name]
    directory = sparse_checkpoint(tmp_path / name, config, tensors, shards)
    facts, seconds = command("inspect", str(directory), "--json")
    assert isinstance(facts, dict)
    assert facts["supported"] and facts["tensors"]["count"] == len(tensors)
    numbers = sum(prod(shape) for _, shape, _ in tensors)
    assert facts["config"]["parameters"]["total"] == facts["tensors"]["numbers"] == numbers
    assert numbers > 140e9 and seconds < LIMIT_S


def test_models_answers_in_two_seconds(tmp_path: Path) -> None:
    rows, seconds = command("models", "--json", "--memory", "80GiB")
    assert isinstance(rows, list)
    assert {"DeepSeek-V3", "Kimi-K2"} <= {row["model"] for row in rows} and seconds < LIMIT_S
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_235B))
    rows, seconds = command("models", str(tmp_path), "--json")
    assert isinstance(rows, list)
    assert rows[0]["kv_KiB_per_token"] == 94 * 4 * 256 * 2 / 1024 and seconds < LIMIT_S


@pytest.mark.parametrize("name", [*SHAPES, *LATENT])
def test_the_decoder_is_built_of_shapes_alone(name: str) -> None:
    """As many parameters as the files hold numbers, scales and the layer behind the last apart."""
    raw = SHAPES[name][0] if name in SHAPES else LATENT[name][0]
    tensors = SHAPES[name][1] if name in SHAPES else latent_tensors(raw)
    config = parse_config(raw)
    decoder = build(config, torch.bfloat16, "meta")
    parameters = list(decoder.parameters())
    assert {parameter.device.type for parameter in parameters} == {"meta"}
    behind = f"model.layers.{raw['num_hidden_layers']}."
    counted = [prod(s) for key, s, _ in tensors if not key.startswith(behind) and not key.endswith("_scale_inv")]
    assert sum(parameter.numel() for parameter in parameters) == config.param_counts()["total"] == sum(counted)
    if name in LATENT:
        assert round(sum(counted), -8) == LATENT[name][2]


@pytest.mark.parametrize(
    "text", ['{"a" :1,"a":2}', '{"a":{"b":1,"b":2}}', '{"\\u0061":1,"a":2}', '{":x":1,"y" :1,"y":2}']
)
def test_counting_keys_never_overlooks_one_that_is_there_twice(text: str) -> None:
    from plait.errors import WeightError
    from plait.weights.safetensors_header import parse_json_object

    with pytest.raises(WeightError, match="twice"):
        parse_json_object(text.encode(), "m")
    assert parse_json_object(b'{":":{"a":":"},"b" : 2}', "m") == {":": {"a": ":"}, "b": 2}
