"""Bad quantised checkpoints: parts that are missing, left over, misshapen or no numbers are named in one line."""

from __future__ import annotations

import json
import random
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import plait
from plait.errors import ConfigError, PlaitError, WeightError
from plait.kernels.native import native_library
from plait.model.quantisation import read_quantisation
from plait.weights.checkpoint import open_checkpoint
from plait.weights.numbers import float32_rows
from plait.weights.pack import pack_checkpoint
from plait.weights.quantised.source import QuantisedSource
from plait.weights.safetensors_source import SafetensorsSource
from tests import quantised_files as files
from tests.model.test_quantisation import AWQ, FP8, GPTQ, INT4, MXFP4
from tests.quantised_files import Parts, Random
from tests.weights.test_quantised_models import directory


def case(name: str) -> tuple[dict[str, Any], Parts]:
    """A small valid checkpoint of two modules: its block, and its tensors."""
    made: Parts = {}
    block: dict[str, Any] = {}
    for module, seed in (("model.a", 0), ("model.b", 1)):
        m = Random(32, 64, 32, symmetric=name != "awq", seed=seed)
        if name == "gptq":
            block, parts = {**GPTQ, "group_size": 32}, files.gptq(m)
        elif name == "gptq by activation order":
            m = Random(32, 64, 32, symmetric=False, order=True, seed=seed)
            block, parts = {**GPTQ, "group_size": 32, "desc_act": True, "sym": False}, files.gptq(m)
        elif name == "awq":
            block, parts = {**AWQ, "group_size": 32}, files.awq(m)
        elif name == "int4":
            block = json.loads(json.dumps(INT4))
            block["config_groups"]["group_0"]["weights"] |= {"group_size": 32, "symmetric": False, "actorder": "group"}
            parts = files.packed(m, with_order=True, store_zeros=True)
        elif name == "fp8":
            block = {**FP8, "weight_block_size": [24, 40]}
            made_parts, _ = files.fp8(32, 64, (24, 40), seed=seed)
            parts = {"weight": made_parts["weight"], "weight_scale_inv": made_parts["scale"]}
        else:
            block = MXFP4
            generator = torch.Generator().manual_seed(seed)
            parts = {
                "gate_up_proj_blocks": torch.randint(0, 256, (2, 8, 2, 16), dtype=torch.uint8, generator=generator),
                "gate_up_proj_scales": torch.randint(100, 140, (2, 8, 2), dtype=torch.uint8, generator=generator),
            }
        made |= {f"{module}.{suffix}": part for suffix, part in parts.items()}
    made["model.norm.weight"] = torch.ones(64)
    return block, made


NAMES = ("gptq", "gptq by activation order", "awq", "int4", "fp8", "mxfp4")


def opened(folder: Path, block: dict[str, Any], tensors: Parts) -> QuantisedSource:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    quantisation = read_quantisation({"quantization_config": block})
    assert quantisation is not None
    return QuantisedSource(SafetensorsSource(folder / "model.safetensors"), quantisation)


def read_all(source: QuantisedSource) -> None:
    for name in source.names():
        info = source.info(name)
        assert source.raw(name).nbytes == info.nbytes
        assert float32_rows(source, name).shape == info.shape
        assert tuple(source.read(name).shape) == info.shape


def refusal(folder: Path, block: dict[str, Any], tensors: Parts) -> str:
    with pytest.raises(WeightError) as error:
        read_all(opened(folder, block, tensors))
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("name", NAMES)
def test_every_part_is_needed_and_named(name: str, tmp_path: Path) -> None:
    block, tensors = case(name)
    source = opened(tmp_path, block, tensors)
    read_all(source)
    assert len(source.names()) == 3 and "model.norm.weight" in source.names()
    for part in tensors:
        if part != "model.norm.weight" and not (name == "gptq" and part.endswith("g_idx")):
            left = {key: tensor for key, tensor in tensors.items() if key != part}
            message = refusal(tmp_path, block, left)
            assert part.rsplit(".", 1)[0] in message or "model." in message, message
            role = part.rsplit(".", 1)[1]
            assert role in message or "scale" in message or "missing" in message, message


@pytest.mark.parametrize("name", NAMES)
def test_a_part_of_another_shape_or_type_is_named(name: str, tmp_path: Path) -> None:
    block, tensors = case(name)
    for part, tensor in tensors.items():
        if part == "model.norm.weight" or part.endswith("weight_shape"):
            continue
        grown = torch.cat([tensor.view(torch.uint8)] * 2).view(tensor.dtype)
        for changed in (grown, tensor[None], tensor.view(torch.uint8).long()):
            message = refusal(tmp_path, block, {**tensors, part: changed})
            assert "model.a" in message or "model.b" in message


def test_contents_that_mean_nothing_are_named(tmp_path: Path) -> None:
    block, tensors = case("gptq by activation order")
    order = tensors["model.a.g_idx"].clone()
    order[3] = 2
    message = refusal(tmp_path, block, {**tensors, "model.a.g_idx": order})
    assert "GPTQ 4-bit weight 'model.a.weight': g_idx names groups from 0 to 2, but there are 2" in message
    order[3] = -1
    assert "from -1 to 1" in refusal(tmp_path, block, {**tensors, "model.a.g_idx": order})
    scales = tensors["model.b.scales"].clone()
    scales[0, 5] = float("inf")
    message = refusal(tmp_path, block, {**tensors, "model.b.scales": scales})
    assert "'model.b.scales' holds 1 numbers that are not finite" in message
    block, tensors = case("int4")
    message = refusal(tmp_path, block, {**tensors, "model.a.weight_shape": torch.tensor([32, 1 << 40])})
    assert "weight_shape says [32, 1099511627776], which [32, 8] words of 32 bits do not hold" in message
    block, tensors = case("fp8")
    scales = torch.full_like(tensors["model.a.weight_scale_inv"], float("nan"))
    assert "holds 4 numbers that are not finite" in refusal(
        tmp_path, block, {**tensors, "model.a.weight_scale_inv": scales}
    )


def test_parts_that_are_there_twice_or_too_many_are_named(tmp_path: Path) -> None:
    block, tensors = case("gptq")
    message = refusal(tmp_path, block, {**tensors, "model.a.weight": torch.ones(32, 64)})
    assert "'model.a.weight' is there twice: as it is, and quantised as" in message
    block, tensors = case("int4")
    message = refusal(tmp_path, block, {**tensors, "model.a.weight": torch.ones(32, 64)})
    assert "'model.a.weight', 'model.a.weight_packed' are the same weight twice" in message
    block, tensors = case("fp8")
    message = refusal(tmp_path, block, {**tensors, "model.a.weight_scale": torch.ones(2, 2)})
    assert "'model.a.weight_scale_inv'" in message and "are scales of the same weight" in message
    message = refusal(tmp_path, block, {**tensors, "model.c.weight": torch.zeros(4, 4, dtype=torch.int8)})
    assert "tensor 'model.c.weight' is stored as I8, which is not what fp8 checkpoints hold" in message
    message = refusal(tmp_path, block, {**tensors, "model.c.weight_scale_inv": torch.ones(1, 1)})
    assert "'model.c.weight_scale_inv' is there, but its weight is missing" in message
    message = refusal(tmp_path, {**block, "modules_to_not_convert": ["model.b"]}, tensors)
    assert "'model.b.weight', 'model.b.weight_scale_inv' are quantised, but config.json leaves 'model.b' out" in message


def test_a_module_that_no_group_targets_is_named(tmp_path: Path) -> None:
    block, tensors = case("int4")
    block["config_groups"]["group_0"]["targets"] = ["re:.*a$"]
    assert "'model.b' is quantised, but no group of config.json targets it" in refusal(tmp_path, block, tensors)
    block["config_groups"]["group_1"] = {**block["config_groups"]["group_0"], "targets": ["model.b"]}
    read_all(opened(tmp_path, block, tensors))


def test_eight_bit_floats_without_a_block_are_no_weights(tmp_path: Path) -> None:
    plait.from_config(
        {"model_type": "llama", "vocab_size": 8, "hidden_size": 64, "num_hidden_layers": 1}
    ).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    save_file({**tensors, name: tensors[name].to(torch.float8_e4m3fn)}, tmp_path / "model.safetensors")
    with pytest.raises(
        WeightError, match=rf"'{name}' is stored as F8_E4M3, but config.json has no quantization_config"
    ):
        open_checkpoint(tmp_path)
    packed = name.replace("weight", "qweight")
    save_file({**tensors, packed: torch.zeros(8, 64, dtype=torch.int32)}, tmp_path / "model.safetensors")
    with pytest.raises(WeightError, match=rf"'{packed}' is stored as I32, but config.json has no quantization_config"):
        open_checkpoint(tmp_path)


def test_families_whose_matrices_stand_the_other_way_are_refused(tmp_path: Path) -> None:
    raw = {"model_type": "gpt2", "vocab_size": 8, "n_embd": 64, "n_layer": 1, "n_head": 4, "n_positions": 32}
    plait.from_config(raw).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**saved, "quantization_config": GPTQ}))
    with pytest.raises(ConfigError, match="gptq checkpoints of gpt2 are not supported"):
        open_checkpoint(tmp_path)


def mutate(block: dict[str, Any], tensors: Parts, rng: random.Random) -> tuple[dict[str, Any], Parts]:
    """One or two edits of parts, their names, shapes, types and bytes, or of the block."""
    block, tensors = json.loads(json.dumps(block)), dict(tensors)
    for _ in range(rng.randint(1, 2)):
        name = rng.choice(sorted(tensors))
        tensor, kind = tensors[name], rng.randrange(8)
        if kind == 0:
            del tensors[name]
        elif kind == 1:
            tensors[rng.choice([name + "_scale_inv", name.replace("a.", "c."), name[:-1], "x." + name])] = tensors.pop(
                name
            )
        elif kind == 2:
            shape = list(tensor.shape)
            tensors[name] = rng.choice([tensor.reshape(-1), tensor.reshape(shape[::-1]), tensor[:0], tensor[None]])
        elif kind == 3:
            dtype = rng.choice(
                [torch.uint8, torch.int8, torch.float8_e4m3fn, torch.int32, torch.float16, torch.float64]
            )
            tensors[name] = tensor.float().nan_to_num().to(dtype)
        elif kind == 4:
            raw = tensor.clone().contiguous()
            flat = raw.view(-1).view(torch.uint8).numpy()
            for _ in range(rng.randint(1, 8)):
                flat[rng.randrange(flat.size)] = rng.choice([0, 1, 127, 128, 255])
            tensors[name] = raw
        elif kind == 5:
            tensors[name] = torch.cat([tensor.view(torch.uint8)] * 2).view(tensor.dtype)
        else:
            place: Any = block
            while True:
                key = rng.choice(sorted(place))
                if isinstance(place[key], dict) and place[key]:
                    place = place[key]
                    continue
                if rng.random() < 0.3:
                    del place[key]
                else:
                    place[key] = rng.choice(
                        [None, 0, 1, 3, 16, 2**31 - 1, -1, "gptq", "re:.*", [], [1, 1], True, False]
                    )
                break
    return block, tensors


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_mutated_checkpoints_are_read_or_refused(name: str, tmp_path: Path) -> None:
    block, tensors = case(name)
    rng = random.Random(name)
    counts = {"read": 0, "refused": 0}
    tracemalloc.start()
    for _ in range(120):
        try:
            read_all(opened(tmp_path, *mutate(block, tensors, rng)))
            counts["read"] += 1
        except PlaitError as error:
            assert "\n" not in str(error) and len(str(error)) < 2000
            counts["refused"] += 1
        except AssertionError:
            pass  # a block that says nothing of quantisation
    assert tracemalloc.get_traced_memory()[1] < 20_000_000
    tracemalloc.stop()
    assert counts["read"] >= 10 and counts["refused"] >= 50, counts


@pytest.mark.parametrize("name", ["gptq", "int4", "fp8 in blocks"])
def test_mutated_models_are_loaded_and_packed_or_refused(name: str, tmp_path: Path) -> None:
    """All the way: names, shapes and stacks of the model come on top."""
    path = directory(tmp_path, name, "qwen3_moe", num_hidden_layers=1)
    block = json.loads((path / "config.json").read_text())
    tensors = load_file(path / "model.safetensors")
    rng = random.Random(name)
    counts = {"read": 0, "refused": 0}
    for _ in range(25):
        changed, kept = mutate(block["quantization_config"], tensors, rng)
        save_file({key: tensor.contiguous() for key, tensor in kept.items()}, path / "model.safetensors")
        (path / "config.json").write_text(json.dumps({**block, "quantization_config": changed}))
        try:
            plait.load(path, "fp32")
            if native_library() is not None:
                pack_checkpoint(open_checkpoint(path))
            counts["read"] += 1
        except PlaitError as error:
            assert "\n" not in str(error) and len(str(error)) < 2000
            counts["refused"] += 1
    assert counts["read"] and counts["refused"] >= 10, counts


def test_expanding_takes_little_memory_besides_the_result(tmp_path: Path) -> None:
    rows, cols = 2048, 8192
    rng = np.random.default_rng(0)
    tensors = {
        "m.qweight": torch.from_numpy(rng.integers(-(1 << 31), 1 << 31, (cols // 8, rows)).astype(np.int32)),
        "m.qzeros": torch.from_numpy(rng.integers(-(1 << 31), 1 << 31, (cols // 128, rows // 8)).astype(np.int32)),
        "m.scales": torch.rand(cols // 128, rows).half(),
    }
    source = opened(tmp_path, {**GPTQ, "sym": False}, tensors)
    for read, size in ((source.raw, rows * cols // 32 * 22), (lambda n: float32_rows(source, n), 4 * rows * cols)):
        tracemalloc.start()
        assert read("m.weight").nbytes == size
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < size + 80_000_000, (peak, size)
