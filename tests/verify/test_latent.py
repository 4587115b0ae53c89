"""`plait verify` of families that transformers knows by another name, or does not carry out as their authors do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import plait
from plait.verify.run import verify
from tests.configs import CONFIGS

pytestmark = pytest.mark.slow

OPTIONS = {"length": 24, "new_tokens": 4, "threads": 1, "kv_memory": "8MiB", "plan": "reference"}


def saved(directory: Path, family: str, **changes: object) -> Path:
    """A random model whose config.json has the family's own name."""
    plait.from_config({**CONFIGS[family], **changes}, seed=4).save_pretrained(directory)
    raw = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**raw, "model_type": family}))
    return directory


def test_kimi_k2_is_compared_with_the_class_of_deepseek_v3(tmp_path: Path):
    assert verify(saved(tmp_path, "kimi_k2"), **OPTIONS).passed


def test_weights_that_transformers_does_not_renormalise_are_made_up_for_and_said(tmp_path: Path):
    directory = saved(tmp_path / "renormalised", "deepseek_v2", norm_topk_prob=True, routed_scaling_factor=3.0)
    result = verify(directory, **OPTIONS)
    assert result.passed
    assert any("transformers ignores the key for a deepseek_v2" in note for note in result.notes)
    decoder = plait.load(directory, "fp32")
    _, weights, _ = decoder.model.layers[-1].mlp.gate(torch.randn(5, 24))
    assert torch.allclose(weights.sum(-1), torch.ones(5))
    raw = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**raw, "norm_topk_prob": False}))
    result = verify(directory, reference=saved(tmp_path / "other", "deepseek_v2", norm_topk_prob=True), **OPTIONS)
    assert not result.passed, "renormalised weights are other weights"
    assert not any("norm_topk_prob" in note for note in verify(directory, **OPTIONS).notes)
