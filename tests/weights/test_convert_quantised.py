"""`convert` of quantised Hugging Face checkpoints: the numbers are those of the expanded model, and nothing that is
written says that it is quantised any more."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

import plait
from plait.model.quantisation import BLOCKS
from plait.weights.convert import convert
from plait.weights.gguf_source import GGUFSource
from plait.weights.safetensors_source import SafetensorsSource
from tests.weights.converting import config_of
from tests.weights.test_convert_families import assert_same_bytes
from tests.weights.test_quantised_gpt_oss import published
from tests.weights.test_quantised_models import CASES, FORMATS, directory, logits_of, twin


def origin(form: str) -> str:
    return FORMATS[form][2].split(" as ")[0].split(" in ")[0]


def matrices(path: Path) -> list[str]:
    return [name for name in SafetensorsSource(twin(path)).names() if "_proj.weight" in name]


@pytest.mark.parametrize(("form", "family"), CASES)
def test_a_directory_has_the_expanded_numbers(form: str, family: str, tmp_path: Path) -> None:
    path = directory(tmp_path, form, family)
    report = convert(path, tmp_path / "full", dtype="fp32")
    assert_same_bytes(tmp_path / "full", twin(path))
    assert report.expanded == {origin(form): len(matrices(path))} and report.kept == {}
    assert any(line.startswith("the source is quantised: ") for line in report.lines())
    # Without a dtype the others stay as they are.
    convert(path, tmp_path / "plain")
    kinds = {name: SafetensorsSource(tmp_path / "plain").info(name).format for name in matrices(path)}
    assert set(kinds.values()) == {"F32"}
    assert SafetensorsSource(tmp_path / "plain").info("model.norm.weight").format == "BF16"
    for folder in ("full", "plain"):
        raw = config_of(tmp_path / folder)
        assert not set(BLOCKS) & raw.keys() and raw["dtype"] == "float32"
        assert torch.equal(logits_of(plait.load(tmp_path / folder, "fp32")), logits_of(plait.load(twin(path), "fp32")))


def test_a_dtype_that_rounds_is_told(tmp_path: Path) -> None:
    path = directory(tmp_path, "fp8 in blocks", "llama")
    report = convert(path, tmp_path / "half", dtype="bf16")
    assert any("rounded to bfloat16" in note for note in report.notes)
    convert(twin(path), tmp_path / "expected", dtype="bf16")
    assert_same_bytes(tmp_path / "half", tmp_path / "expected")


@pytest.mark.parametrize(("form", "family"), CASES)
def test_a_gguf_file_keeps_what_a_block_type_holds(form: str, family: str, tmp_path: Path) -> None:
    changes = {"mlp_only_layers": []} if family == "qwen3_moe" else {}
    path, file = directory(tmp_path, form, family, **changes), tmp_path / "model.gguf"
    report = convert(path, file)
    kind, kept, layout = FORMATS[form][2].partition(" as ")
    source = GGUFSource(file)
    types = Counter(source.info(name).format for name in source.names() if "_norm" not in name)
    stacks = len([name for name in source.names() if "_exps" in name])
    if kept:
        assert types[layout] > 10 and sum(report.kept.values()) == types[layout] and not report.expanded
        assert report.kept == {f"{kind} as {layout}": types[layout]}
        assert f"kept in blocks: {types[layout]} {kind} as {layout}" in report.lines()
    else:
        assert report.kept == {} and report.expanded == {origin(form): types["F32"] - stacks_free(source)}
    assert stacks == (6 if family == "qwen3_moe" else 0)
    assert not any(key in source.metadata["plait.config"] for key in BLOCKS)
    assert torch.equal(logits_of(plait.load(file, "fp32")), logits_of(plait.load(twin(path), "fp32")))
    convert(file, tmp_path / "back", dtype="fp32")
    assert_same_bytes(tmp_path / "back", twin(path))
    assert not set(BLOCKS) & config_of(tmp_path / "back").keys()


def stacks_free(source: GGUFSource) -> int:
    """Tensors that are F32 in every file, but for norms: routers and biases."""
    return len([name for name in source.names() if "ffn_gate_inp" in name or name.endswith(".bias")])


def test_another_type_is_made_of_the_expanded_numbers(tmp_path: Path) -> None:
    path = directory(tmp_path, "gptq", "llama")
    report = convert(path, tmp_path / "a.gguf", "q8_0")
    convert(twin(path), tmp_path / "b.gguf", "q8_0")
    a, b = GGUFSource(tmp_path / "a.gguf"), GGUFSource(tmp_path / "b.gguf")
    assert a.names() == b.names() and all(np.array_equal(a.raw(name), b.raw(name)) for name in a.names())
    assert report.expanded == {"GPTQ 4-bit": 14} and report.kept == {} and report.copied < report.tensors


def test_gpt_oss_becomes_plain_bfloat16(tmp_path: Path) -> None:
    """The experts' blocks run across the rows that a directory stores; bfloat16 holds every number."""
    (tmp_path / "source").mkdir()
    path = published(tmp_path / "source")
    report = convert(path, tmp_path / "plain")
    assert report.expanded == {"MXFP4": 4} and not any("rounded" in note for note in report.notes)
    plait.load(path, "bf16").save_pretrained(tmp_path / "saved")
    # Routers are float32 in every decoder, and as they were stored in what is converted.
    assert_same_bytes(tmp_path / "plain", tmp_path / "saved", but=("router.weight", "router.bias"))
    raw = config_of(tmp_path / "plain")
    assert not set(BLOCKS) & raw.keys() and raw["dtype"] == "bfloat16"
    expected = dict(plait.load(path, "fp32").named_parameters())
    for name, parameter in plait.load(tmp_path / "plain", "fp32").named_parameters():
        assert torch.equal(parameter, expected[name]), name
    from transformers import AutoModelForCausalLM

    theirs, info = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and theirs.dtype == torch.bfloat16


def test_scales_for_activations_are_left_out_and_told(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    path = directory(tmp_path, "fp8 in blocks", "llama")
    tensors = load_file(path / "model.safetensors")
    tensors["model.layers.0.self_attn.q_proj.input_scale"] = torch.tensor(0.5)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    raw = json.loads((path / "config.json").read_text())
    raw["quantization_config"]["activation_scheme"] = "static"
    (path / "config.json").write_text(json.dumps(raw))
    report = convert(path, tmp_path / "full", dtype="fp32")
    assert any("activations are not used" in note for note in report.notes)
    assert_same_bytes(tmp_path / "full", twin(path))
