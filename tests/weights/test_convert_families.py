"""`convert` into a directory is `save_pretrained` of the loaded model, tensor by tensor, for every family."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

import plait
from plait.model.config import keeps_float32
from plait.model.families import families
from plait.weights.convert import convert
from plait.weights.gguf_writer.architectures import WRITERS
from plait.weights.safetensors_source import SafetensorsSource
from tests.configs import CONFIGS
from tests.weights.converting import config_of


def saved(config: dict[str, Any], directory: Path) -> Path:
    """A model whose parameters are all random: biases and norms show where they end up, too."""
    decoder = plait.from_config(config, seed=3)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    decoder.save_pretrained(directory)
    return directory


def assert_same_bytes(found: Path, expected: Path, but: Sequence[str] = ()) -> None:
    """Names, shapes, types and bytes of the tensors of two directories; `but`: endings of names of other types."""
    a, b = SafetensorsSource(found), SafetensorsSource(expected)
    assert sorted(a.names()) == sorted(b.names())
    for name in b.names():
        one, other = a.info(name), b.info(name)
        assert one.shape == other.shape, name
        if not name.endswith(tuple(but)) or not but:
            assert one.format == other.format, name
            assert np.array_equal(a.raw(name), b.raw(name)), name


def files_of(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.iterdir()}


def test_every_family_has_a_configuration() -> None:
    assert set(families()) == set(CONFIGS)


@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_a_directory_is_what_save_pretrained_writes(family: str, tmp_path: Path) -> None:
    source = saved(CONFIGS[family], tmp_path / "source")
    plait.load(source, "fp32").save_pretrained(tmp_path / "saved")
    report = convert(source, tmp_path / "converted")
    assert_same_bytes(tmp_path / "converted", tmp_path / "saved")
    assert files_of(tmp_path / "converted") == files_of(tmp_path / "saved")
    assert not report.expanded and not report.skipped
    with safe_open(tmp_path / "converted" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    again: Any = plait.load(tmp_path / "converted", "fp32")
    for name, parameter in plait.load(source, "fp32").named_parameters():
        assert torch.equal(again.get_parameter(name), parameter), name


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3", "gpt_oss", "gpt2"])
def test_bf16_is_what_a_bf16_model_saves_with_routers_in_fp32(family: str, tmp_path: Path) -> None:
    source = saved(CONFIGS[family], tmp_path / "source")
    decoder: Any = plait.load(source, "bf16")
    decoder.save_pretrained(tmp_path / "saved")
    convert(source, tmp_path / "converted", dtype="bf16")
    assert files_of(tmp_path / "converted") == files_of(tmp_path / "saved")
    found = SafetensorsSource(tmp_path / "converted")
    formats = {name: found.info(name).format for name in found.names()}
    routers = sum(keeps_float32(name) for name, _ in decoder.named_parameters())
    assert sum(kind == "F32" for kind in formats.values()) == routers and set(formats.values()) <= {"F32", "BF16"}
    assert (routers > 0) == (family != "gpt2")


# What GGUF cannot say of the configurations above, by family.
_FULL = {"sliding_window": None}
WRITABLE: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"attention_bias": False},
    "deepseek_v3": {},
    "gemma2": {"query_pre_attn_scalar": 8},
    "gemma3_text": {"query_pre_attn_scalar": 8},
    "gpt_neox": {},
    "granite": {},
    "kimi_k2": {},
    "llama": {},
    "mistral": _FULL,
    "mixtral": _FULL,
    "olmo2": {},
    "olmoe": {"clip_qkv": None},
    "phi3": _FULL,
    "qwen2": {"use_sliding_window": False},
    "qwen2_moe": {"use_sliding_window": False, "decoder_sparse_step": 1},
    "qwen3": {},
    "qwen3_moe": {"mlp_only_layers": []},
    "smollm3": {"use_sliding_window": False, "no_rope_layer_interval": 4},
    "starcoder2": _FULL,
}


def test_every_family_that_gguf_has_is_tried() -> None:
    assert {kind for writer in WRITERS.values() for kind in writer.model_types} == set(WRITABLE)


@pytest.mark.parametrize("family", WRITABLE)
def test_a_gguf_file_of_float32_gives_the_directory_back(family: str, tmp_path: Path) -> None:
    source = saved({**CONFIGS[family], **WRITABLE[family]}, tmp_path / "source")
    convert(source, tmp_path / "model.gguf", "f32")
    convert(tmp_path / "model.gguf", tmp_path / "back")
    assert config_of(tmp_path / "back") == config_of(source)
    # Gemma's norms are stored as 1 + w.
    if not family.startswith("gemma"):
        assert_same_bytes(tmp_path / "back", source)
        return
    a, b = SafetensorsSource(tmp_path / "back"), SafetensorsSource(source)
    for name in b.names():
        one, other = a.read(name), b.read(name)
        assert one.dtype == other.dtype and one.shape == other.shape
        allowed = 2**-23 * (1 + other).abs().clamp(min=1) if "norm" in name else torch.zeros(())
        assert ((one - other).abs() <= allowed).all(), name
