"""Stacks of experts, packed: exactly the checkpoint's numbers whatever its tensors and formats are, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import plait
from plait.errors import WeightError
from plait.kernels import abi, native
from plait.model.config import keeps_float32
from plait.model.name_map import Place
from plait.plan.load import load_native
from plait.weights.checkpoint import open_checkpoint
from plait.weights.fill import Source, fill
from plait.weights.mapping import Assignment, Part, Plan
from plait.weights.pack import Packing, pack_checkpoint, pack_decoder
from plait.weights.packed import packed_decoder
from plait.weights.store import PackedWeight, aligned_bytes, packed_bytes, stack_parts
from tests.configs import CONFIGS

pytestmark = pytest.mark.skipif(native.native_library() is None, reason=f"no native library: {native.reason()}")
FAMILIES = ["qwen3_moe", "qwen2_moe", "mixtral", "olmoe", "gpt_oss", "phimoe", "ernie4_5_moe"]


def saved(folder: Path, family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    plait.from_config({**CONFIGS[family], **changes}, seed=4).to(dtype).save_pretrained(folder)
    return folder


def numbers(decoder: Any) -> dict[str, np.ndarray]:
    return {name: p.detach().float().numpy() for name, p in decoder.named_parameters()}


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("family", FAMILIES)
def test_experts_of_a_checkpoint_become_stacks_of_the_references_numbers(
    family: str, threads: int, tmp_path: Path
) -> None:
    """Gate and up have 16, 20 or 40 rows: whole panels, and such that end in padding."""
    checkpoint = open_checkpoint(saved(tmp_path, family))
    store = pack_checkpoint(checkpoint, threads=threads)
    for name, expected in numbers(plait.load(tmp_path, "fp32")).items():
        np.testing.assert_array_equal(store.expand(name), expected, err_msg=name)
        if expected.ndim == 3:
            assert store[name].parts == (2 if name.endswith("gate_up_proj") else 1)
            lines = expected.reshape(-1, expected.shape[-1])
            ids = np.random.default_rng(1).integers(0, len(lines), 9)
            np.testing.assert_array_equal(store[name].rows(ids), lines[ids])
            for wrong in (-1, len(lines)):
                with pytest.raises(WeightError, match=f"out of range of {len(lines)}"):
                    store[name].rows([wrong])


def test_a_stack_is_one_matrix_with_the_padding_between_its_parts() -> None:
    shape = (3, 2 * 20, 7)
    assert stack_parts({"a.gate_up_proj": shape, "a.down_proj": (3, 7, 20)}) == {"a.gate_up_proj": 2, "a.down_proj": 1}
    assert stack_parts({"a.gate_up_proj": shape, "a.down_proj": (3, 7, 40)}) == {"a.gate_up_proj": 1, "a.down_proj": 1}
    weight = PackedWeight("a", shape, "F32", aligned_bytes(packed_bytes("F32", shape, 2)), 2)
    values = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    fill(weight, Source("F32", values.ctypes.data, 7 * 4), None, 2)
    matrix = weight.matrix()
    assert (matrix.rows, matrix.cols, matrix.panel_bytes) == (3 * 2 * 32, 7, 16 * 7 * 4)
    raw = weight.data.view(np.float32).reshape(3 * 2 * 2, 7, 16)  # panels by columns
    rows = raw.transpose(0, 2, 1).reshape(3, 2, 32, 7)
    np.testing.assert_array_equal(rows[:, :, :20], values.reshape(3, 2, 20, 7))
    assert not rows[:, :, 20:].any()


def test_what_begins_inside_a_panel_is_refused() -> None:
    shape = (2, 40, 3)
    weight = PackedWeight("w", shape, "F32", aligned_bytes(packed_bytes("F32", shape)))
    values = np.zeros((20, 3), np.float32)
    with pytest.raises(WeightError, match="w: rows 20 to 40 of an expert begin or end inside a panel"):
        fill(weight, Source("F32", values.ctypes.data, 12), Place((0, 1), (20, 40)), 1)


class Tensors:
    """A source of arrays by name: (format, raw bytes, shape)."""

    def __init__(self, tensors: dict[str, tuple[str, np.ndarray, tuple[int, ...]]]) -> None:
        self.tensors = tensors
        self.released: list[str] = []

    def names(self) -> list[str]:
        return list(self.tensors)

    def info(self, name: str) -> Any:
        from plait.weights.sources import TensorInfo

        kind, raw, shape = self.tensors[name]
        return TensorInfo(name, shape, kind, raw.nbytes, "f", 0)

    def raw(self, name: str) -> np.ndarray:
        return self.tensors[name][1].reshape(-1).view(np.uint8)

    def release(self, name: str) -> None:
        self.released.append(name)


def quantised(kind: str, rows: int, cols: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Blocks as bytes [rows, bytes], and their values by the gguf package."""
    import gguf

    values = np.random.default_rng(seed).standard_normal((rows, cols)).astype(np.float32)
    blocks = gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind])
    return blocks, gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind])


@pytest.mark.parametrize(
    ("gate_kind", "up_kind", "layout"),
    [
        ("Q8_0", "Q8_0", "Q8_0"),
        ("Q4_0", "Q4_0", "Q4_0"),
        ("Q4_0", "Q8_0", "BF16"),
        ("F16", "F32", "F32"),
        ("Q8_0", "F32", "F32"),
    ],
)
def test_gate_and_up_of_gguf_stacks(gate_kind: str, up_kind: str, layout: str, tmp_path: Path) -> None:
    """ffn_gate_exps and ffn_up_exps, in one format or two: a stack has one, and what gate and up cannot share becomes
    BF16."""
    experts, inner, width = 3, 20, 64
    tensors, expected = {}, np.empty((experts, 2 * inner, width), np.float32)
    assignments = []
    for part, (name, kind) in enumerate((("gate", gate_kind), ("up", up_kind))):
        blocks, values = quantised(kind, experts * inner, width, part)
        tensors[name] = (kind, blocks, (experts, inner, width))
        expected[:, part * inner : (part + 1) * inner] = values.reshape(experts, inner, width)
        place = Place((0, experts), (part * inner, (part + 1) * inner))
        assignments.append(Assignment(name, (Part("m.gate_up_proj", None, place),)))
    blocks, down = quantised("Q8_0", experts * width, 32, 7)
    tensors["down"] = ("Q8_0", blocks, (experts, width, 32))
    # Between those of the stack in the file: they are packed together all the same.
    assignments.insert(1, Assignment("down", (Part("m.down_proj", None),)))
    shapes = {"m.gate_up_proj": (experts, 2 * inner, width), "m.down_proj": (experts, width, inner)}
    shapes["m.down_proj"] = (experts, width, 32)
    from plait.weights.pack import _common, choose_layout

    layouts = {
        "m.gate_up_proj": choose_layout("m.gate_up_proj", _common({gate_kind, up_kind}), 3, "auto"),
        "m.down_proj": "Q8_0",
    }
    assert layouts["m.gate_up_proj"] == layout
    source = Tensors(tensors)
    checkpoint: Any = type("Checkpoint", (), {"source": source})()
    packing = Packing(checkpoint, Plan(tuple(assignments), ()), shapes, layouts, None)  # type: ignore[arg-type]
    packing.__dict__["parts"] = {"m.gate_up_proj": 2, "m.down_proj": 1}  # 20 rows are no blocks of down's columns
    made = {weight.name: weight for weight in packing.weights(threads=2)}
    assert list(made) == ["m.gate_up_proj", "m.down_proj"] and source.released == ["gate", "up", "down"]
    wanted = torch.from_numpy(expected).to(torch.bfloat16).float().numpy() if layout == "BF16" else expected
    np.testing.assert_array_equal(made["m.gate_up_proj"].expand(), wanted)
    np.testing.assert_array_equal(made["m.down_proj"].expand(), down.reshape(experts, width, 32))


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16", "auto"])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_routers_stay_float32_whatever_the_dtype(dtype: str, stored: torch.dtype, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(saved(tmp_path, "qwen3_moe", stored))
    store = pack_checkpoint(checkpoint, dtype)
    routers = [name for name in store if keeps_float32(name)]
    assert routers and {store[name].layout for name in routers} == {"F32"}
    experts = {store[name].layout for name in store if len(store[name].shape) == 3}
    kept = "BF16" if stored == torch.bfloat16 else "F32"
    assert experts == {{"fp32": "F32", "bf16": "BF16", "fp16": "F16", "auto": kept}[dtype]}
    if dtype == "auto":
        assert store.report.exact == str(stored).removeprefix("torch.")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_packed_decoder_has_the_exact_numbers_and_saves_them(family: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", family, torch.bfloat16)
    checkpoint = open_checkpoint(folder)
    decoder = packed_decoder(checkpoint.config, pack_checkpoint(checkpoint), folder)
    wanted = dict(plait.load(folder, "bf16").named_parameters())
    state = decoder.state_dict()
    for name, tensor in wanted.items():
        assert state[name].dtype == tensor.dtype == (torch.float32 if keeps_float32(name) else torch.bfloat16)
        assert torch.equal(state[name], tensor), name
    decoder.save_pretrained(tmp_path / "copy")
    first, second = (load_file(f / "model.safetensors") for f in (folder, tmp_path / "copy"))
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert tensor.dtype == second[name].dtype and torch.equal(tensor, second[name]), name


@pytest.mark.parametrize("family", FAMILIES)
def test_a_live_decoder_is_packed_again_in_its_place(family: str) -> None:
    decoder = plait.from_config(CONFIGS[family], seed=4)
    store = pack_decoder(decoder)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.mul_(1.5)
    assert pack_decoder(decoder, store=store) is store
    for name, expected in numbers(decoder).items():
        np.testing.assert_array_equal(store.expand(name), expected, err_msg=name)
    half = pack_decoder(decoder, "bf16")
    routers = {name for name in half if keeps_float32(name)}
    assert {half[name].layout for name in routers if name.endswith("weight")} == {"F32"}
    assert all(half[name].layout == "VECTOR" for name in routers if name.endswith("bias"))


def test_the_cache_keeps_how_stacks_are_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLAIT_CACHE", str(tmp_path / "cache"))
    folder = saved(tmp_path / "model", "qwen3_moe")
    first, second = load_native(folder), load_native(folder)
    assert not first.cached and second.cached
    for name, weight in first.store.items():
        again = second.store[name]
        assert (again.shape, again.layout, again.parts) == (weight.shape, weight.layout, weight.parts)
        np.testing.assert_array_equal(again.expand(), weight.expand(), err_msg=name)
    assert {w.parts for w in second.store.values()} == {1, 2}


def test_biases_of_experts_are_vectors_of_two_axes() -> None:
    from plait.weights.pack import choose_layout

    assert choose_layout("model.layers.0.mlp.experts.gate_up_proj_bias", "BF16", 2, "auto") == "VECTOR"
    shape = (3, 5)
    weight = PackedWeight("b", shape, "VECTOR", aligned_bytes(packed_bytes("VECTOR", shape)))
    weight.vector()[...] = np.arange(15).reshape(shape)
    matrix = weight.matrix()
    assert (matrix.layout, matrix.rows, matrix.cols) == (abi.LAYOUT_VECTOR, 1, 15)
    np.testing.assert_array_equal(weight.expand(), np.arange(15).reshape(shape))
