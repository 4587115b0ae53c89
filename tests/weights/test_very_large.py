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


def deepseek_v3_tensors() -> Tensors:
    """DeepSeek-V3's tensors as published: FP8 weights with a scale for every 128 x 128, 256 experts in 58 layers."""
    hidden, tensors = 7168, []

    def fp8(name: str, rows: int, columns: int) -> None:
        tensors.append((f"{name}.weight", (rows, columns), "F8_E4M3"))
        tensors.append((f"{name}.weight_scale_inv", (-(-rows // 128), -(-columns // 128)), "F32"))

    def feed_forward(name: str, width: int) -> None:
        fp8(f"{name}.gate_proj", width, hidden)
        fp8(f"{name}.up_proj", width, hidden)
        fp8(f"{name}.down_proj", hidden, width)

    for n in range(61):
        layer = f"model.layers.{n}"
        for name, rows, columns in [
            ("q_a_proj", 1536, hidden),
            ("q_b_proj", 24_576, 1536),
            ("kv_a_proj_with_mqa", 576, hidden),
            ("kv_b_proj", 32_768, 512),
            ("o_proj", hidden, 16_384),
        ]:
            fp8(f"{layer}.self_attn.{name}", rows, columns)
        for name, width in [
            ("self_attn.q_a", 1536),
            ("self_attn.kv_a", 512),
            ("input", hidden),
            ("post_attention", hidden),
        ]:
            tensors.append((f"{layer}.{name}_layernorm.weight", (width,), "BF16"))
        if n < 3:
            feed_forward(f"{layer}.mlp", 18_432)
            continue
        tensors.append((f"{layer}.mlp.gate.weight", (256, hidden), "BF16"))
        tensors.append((f"{layer}.mlp.gate.e_score_correction_bias", (256,), "F32"))
        for expert in range(256):
            feed_forward(f"{layer}.mlp.experts.{expert}", 2048)
        feed_forward(f"{layer}.mlp.shared_experts", 2048)
    ends = [("model.embed_tokens", (129_280, hidden)), ("lm_head", (129_280, hidden)), ("model.norm", (hidden,))]
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


def test_inspect_of_ninety_thousand_tensors_in_two_seconds(tmp_path: Path) -> None:
    tensors = deepseek_v3_tensors()
    assert len(tensors) > 90_000
    config = {"model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 61}
    directory = sparse_checkpoint(tmp_path / "v3", config, tensors, num_shards=163)
    facts, seconds = command("inspect", str(directory), "--json")
    assert isinstance(facts, dict)
    assert (facts["tensors"]["count"], facts["tensors"]["files"]) == (len(tensors), 163)
    numbers = sum(prod(shape) for _, shape, dtype in tensors if dtype == "F8_E4M3")
    assert facts["tensors"]["formats"]["F8_E4M3"] == {
        "tensors": sum(dtype == "F8_E4M3" for *_, dtype in tensors),
        "numbers": numbers,
        "bytes": numbers,
    }
    assert numbers > 660e9 and seconds < LIMIT_S


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


@pytest.mark.parametrize("name", SHAPES)
def test_the_decoder_is_built_of_shapes_alone(name: str) -> None:
    config = parse_config(SHAPES[name][0])
    decoder = build(config, torch.bfloat16, "meta")
    parameters = list(decoder.parameters())
    assert {parameter.device.type for parameter in parameters} == {"meta"}
    assert sum(parameter.numel() for parameter in parameters) == config.param_counts()["total"]


@pytest.mark.parametrize(
    "text", ['{"a" :1,"a":2}', '{"a":{"b":1,"b":2}}', '{"\\u0061":1,"a":2}', '{":x":1,"y" :1,"y":2}']
)
def test_counting_keys_never_overlooks_one_that_is_there_twice(text: str) -> None:
    from plait.errors import WeightError
    from plait.weights.safetensors_header import parse_json_object

    with pytest.raises(WeightError, match="twice"):
        parse_json_object(text.encode(), "m")
    assert parse_json_object(b'{":":{"a":":"},"b" : 2}', "m") == {":": {"a": ":"}, "b": 2}
