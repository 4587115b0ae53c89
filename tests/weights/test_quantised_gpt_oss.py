"""gpt-oss as it is published: experts in MXFP4, the rest in bfloat16. transformers' own loading is the oracle."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import plait
from plait.kernels.native import native_library
from plait.model.families import families
from plait.weights.checkpoint import open_checkpoint
from plait.weights.pack import pack_checkpoint

pytestmark = pytest.mark.skipif("gpt_oss" not in families(), reason="the family gpt_oss is not registered")


def published(folder: Path) -> Path:
    """A small random gpt-oss with quantised experts."""
    from transformers import AutoModelForCausalLM, GptOssConfig

    config = GptOssConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=16,
        max_position_embeddings=512,
        initializer_range=0.3,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, cols, rows = tensors.pop(name).shape
        shape = (experts, rows, cols // 32)
        tensors[name + "_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
        tensors[name + "_scales"] = torch.randint(121, 125, shape, dtype=torch.uint8, generator=generator)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    raw = json.loads((folder / "config.json").read_text())
    skipped = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    raw["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": skipped}
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


def test_logits_are_those_of_transformers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, Mxfp4Config

    path = published(tmp_path)
    dequantised = Mxfp4Config(dequantize=True)
    theirs = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.bfloat16, quantization_config=dequantised, attn_implementation="eager"
    ).float()
    ours = plait.load(path, "fp32")
    ids = torch.randint(0, 96, (1, 40), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        expected, given = theirs(ids).logits, ours.logits(ours(ids))
    assert float(expected.abs().max()) > 4
    assert float((given.log_softmax(-1) - expected.log_softmax(-1)).abs().max()) < 1e-4
    assert ours.load_report.expanded == {"MXFP4": 4}
    if native_library() is not None:
        store = pack_checkpoint(open_checkpoint(path))
        assert store.report.expanded == {"MXFP4": 4} and store.report.expanded_to == "bf16"
        for name, parameter in ours.named_parameters():
            np.testing.assert_array_equal(store.expand(name), parameter.detach().numpy(), err_msg=name)
