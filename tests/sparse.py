"""Checkpoint directories of any size that take no disk: real config, real headers, and holes where the numbers would
be."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

_BYTES = {"BF16": 2, "F8_E4M3": 1, "F32": 4}


def sparse_checkpoint(
    directory: Path, config: Mapping[str, Any], tensors: Sequence[tuple[str, tuple[int, ...], str]], num_shards: int
) -> Path:
    """A sharded safetensors directory with the given (name, shape, dtype), in order, spread over the shards."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(dict(config)))
    weight_map, total = {}, 0
    per_shard = -(-len(tensors) // num_shards)
    for shard in range(num_shards):
        file = f"model-{shard + 1:05d}-of-{num_shards:05d}.safetensors"
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        position = 0
        for name, shape, dtype in tensors[shard * per_shard : (shard + 1) * per_shard]:
            size = prod(shape) * _BYTES[dtype]
            header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, position + size]}
            position += size
            weight_map[name] = file
        text = json.dumps(header).encode()
        with (directory / file).open("wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            os.ftruncate(out.fileno(), 8 + len(text) + position)
        total += position
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


def llama_tensors(config: Mapping[str, Any]) -> list[tuple[str, tuple[int, ...], str]]:
    """Every tensor of a llama checkpoint in bf16."""
    d, ffn, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    kv = d // config["num_attention_heads"] * config["num_key_value_heads"]
    shapes = {
        "input_layernorm": (d,),
        "mlp.down_proj": (d, ffn),
        "mlp.gate_proj": (ffn, d),
        "mlp.up_proj": (ffn, d),
        "post_attention_layernorm": (d,),
        "self_attn.k_proj": (kv, d),
        "self_attn.o_proj": (d, d),
        "self_attn.q_proj": (d, d),
        "self_attn.v_proj": (kv, d),
    }
    layers = [
        (f"model.layers.{i}.{name}.weight", shape, "BF16")
        for i in range(config["num_hidden_layers"])
        for name, shape in shapes.items()
    ]
    head = [("lm_head.weight", (vocab, d), "BF16"), ("model.embed_tokens.weight", (vocab, d), "BF16")]
    return [*head, *layers, ("model.norm.weight", (d,), "BF16")]
