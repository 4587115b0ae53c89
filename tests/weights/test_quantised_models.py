"""Whole quantised checkpoints: the same numbers and logits as a plain one of the expanded weights, on both plans."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import plait
from plait.cli.main import main
from plait.engine.params import SamplingParams
from plait.errors import WeightError
from plait.kernels.native import native_library, reason
from plait.memory.layout import make_layout
from plait.plan.executor import NativeExecutor
from plait.plan.load import load_native
from plait.weights.checkpoint import open_checkpoint
from plait.weights.inspect import inspect_checkpoint
from plait.weights.pack import pack_checkpoint
from plait.weights.packed import packed_decoder
from plait.weights.store import stack_parts
from tests import quantised_files as files
from tests.plan.models import PlainWeight
from tests.plan.plan_model import PlanModel
from tests.plan.steps import Script
from tests.quantised_files import Packer, Parts, Random, quantised_model
from tests.tiny import VOCAB_SIZE, write_tokenizer

needs_library = pytest.mark.skipif(native_library() is None, reason=f"no native library: {reason()}")

_COMMON: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "eos_token_id": 1,
    "tie_word_embeddings": False,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {**_COMMON, "model_type": "llama"},
    "qwen2": {**_COMMON, "model_type": "qwen2"},  # with biases
    "qwen3_moe": {
        **_COMMON,
        "model_type": "qwen3_moe",
        "head_dim": 16,
        "num_experts": 3,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
}


def made(group_size: int, pack: Callable[[Random], Parts], **options: Any) -> Packer:
    def packer(module: str, shape: tuple[int, int], seed: int) -> tuple[Parts, np.ndarray]:
        m = Random(*shape, group_size, seed=seed, spread=0.4, **options)
        return pack(m), m.weight()

    return packer


def in_fp8(block: tuple[int, int], suffix: str) -> Packer:
    def packer(module: str, shape: tuple[int, int], seed: int) -> tuple[Parts, np.ndarray]:
        size = (block[0] or shape[0], block[1] or shape[1])
        parts, numbers = files.fp8(*shape, size, torch.bfloat16 if "inv" not in suffix else torch.float32, seed, 0.15)
        return {"weight": parts["weight"], suffix: parts["scale"]}, numbers

    return packer


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"symmetric": True, **weights}}},
        "ignore": ["lm_head", "re:.*mlp.gate$"],
    }


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
WHOLE = "gptq of 8 bits in whole rows"
# name -> the block of config.json, its packer, and what the native plan makes of its matrices.
FORMATS: dict[str, tuple[dict[str, Any], Packer, str]] = {
    "gptq": (GPTQ, made(32, files.gptq), "GPTQ 4-bit as Q4_0"),
    "gptq by activation order": (
        {**GPTQ, "desc_act": True, "sym": False},
        made(32, files.gptq, symmetric=False, order=True),
        "GPTQ 4-bit in fp32",
    ),
    WHOLE: (
        {**GPTQ, "bits": 8, "group_size": -1, "checkpoint_format": "gptq_v2"},
        made(-1, lambda m: files.gptq(m, v2=True), bits=8),
        "GPTQ 8-bit as Q8_0",
    ),
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
        made(32, files.awq, symmetric=False),
        "AWQ 4-bit as Q5_0",
    ),
    "int4": (
        compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=32),
        made(32, files.packed, scale_dtype=torch.bfloat16),
        "int4 as Q4_0",
    ),
    "int8": (
        compressed("int-quantized", num_bits=8, type="int", strategy="channel"),
        made(-1, files.integers, bits=8, scale_dtype=torch.bfloat16),
        "int8 as Q8_0",
    ),
    "fp8 by row": (
        compressed("float-quantized", num_bits=8, type="float", strategy="channel"),
        in_fp8((1, 0), "weight_scale"),
        "FP8 in bf16",
    ),
    "fp8 in blocks": (
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [24, 40]},
        in_fp8((24, 40), "weight_scale_inv"),
        "FP8 in bf16",
    ),
}
CASES = [(name, "llama") for name in FORMATS]
CASES += [("gptq", "qwen2"), ("gptq", "qwen3_moe"), ("fp8 in blocks", "qwen3_moe"), ("awq", "qwen3_moe")]


def directory(folder: Path, form: str, family: str, **changes: Any) -> Path:
    """A quantised checkpoint; its plain twin lies beside it."""
    config, pack, _ = FORMATS[form]
    plait.from_config({**MODELS[family], **changes}, seed=3).save_pretrained(folder / "source")
    return quantised_model(folder / "source", folder / "quantised", config, pack, torch.bfloat16)


def twin(path: Path) -> Path:
    return path.with_name(path.name + "-plain")


def logits_of(decoder: Any) -> torch.Tensor:
    ids = torch.arange(40)[None] * 7 % 96
    with torch.no_grad():
        return decoder.logits(decoder(ids))


@pytest.mark.parametrize(("form", "family"), CASES)
def test_the_reference_computes_with_the_expanded_numbers(form: str, family: str, tmp_path: Path) -> None:
    path = directory(tmp_path, form, family)
    for dtype in ("fp32", "bf16"):
        decoder, expected = plait.load(path, dtype), plait.load(twin(path), dtype)
        theirs = dict(expected.named_parameters())
        for name, parameter in decoder.named_parameters():
            assert torch.equal(parameter, theirs[name]), name
        assert torch.equal(logits_of(decoder), logits_of(expected))
        report = decoder.load_report
        assert list(report.expanded) == [FORMATS[form][2].split(" as ")[0].split(" in ")[0]]
        assert report.quantised and report.quantised in "\n".join(report.lines())


@needs_library
@pytest.mark.parametrize(("form", "family"), CASES)
def test_the_native_plan_keeps_what_fits_and_expands_the_rest(form: str, family: str, tmp_path: Path) -> None:
    path = directory(tmp_path, form, family)
    store = pack_checkpoint(open_checkpoint(path))
    theirs = dict(plait.load(twin(path), "fp32").named_parameters())
    kind, kept, layout = FORMATS[form][2].partition(" as ")
    if not kept:
        kind, _, layout = kind.partition(" in ")
    count = sum(1 for name in theirs if "_proj.weight" in name or ".experts." in name)
    total = sum(1 for name in open_checkpoint(path).source.names() if "_proj.weight" in name)
    matrices = [weight for name, weight in store.items() if "_proj" in name and not name.endswith("bias")]
    assert len(matrices) == count
    expected_layout = {"fp32": "F32", "bf16": "BF16"}.get(layout, layout)
    assert {weight.layout for weight in matrices} == {expected_layout}
    for name, parameter in theirs.items():
        numbers = parameter.detach()
        if expected_layout == "BF16" and "_proj" in name:
            numbers = numbers.bfloat16().float()
        np.testing.assert_array_equal(store.expand(name), numbers.numpy(), err_msg=name)
    report = store.report
    assert report.kept == ({f"{kind} as {layout}": total} if kept else {})
    assert report.expanded == ({} if kept else {kind: total})
    lines = "\n".join(report.lines())
    assert (
        f"kept in blocks: {total} {kind} as {layout}" if kept else f"expanded to {layout} at load: {total}"
    ) in lines
    full = pack_checkpoint(open_checkpoint(path), "fp32")
    assert full.report.kept == {} and full.report.expanded == {kind: total} and full.report.expanded_to == "fp32"
    for name, parameter in theirs.items():
        np.testing.assert_array_equal(full.expand(name), parameter.detach().numpy(), err_msg=name)


THEIRS = {
    "int4": ("int4", FORMATS["int4"][1]),
    "int8": ("int8", FORMATS["int8"][1]),
    "fp8 by row": ("fp8 by row", FORMATS["fp8 by row"][1]),
    "fp8 in even blocks": ("fp8 in blocks", in_fp8((16, 32), "weight_scale_inv")),
}


@pytest.mark.parametrize(
    ("form", "family"), [*((form, "llama") for form in THEIRS), ("fp8 in even blocks", "qwen3_moe")]
)
def test_transformers_loads_the_same_weights(form: str, family: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    name, pack = THEIRS[form]
    config = {**FORMATS[name][0], "dequantize": True}
    if "weight_block_size" in config:
        config["weight_block_size"] = [16, 32]
    plait.from_config(MODELS[family], seed=3).save_pretrained(tmp_path / "source")
    path = quantised_model(tmp_path / "source", tmp_path / "quantised", config, pack, torch.bfloat16)
    theirs = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    ours = plait.load(path, "fp32")
    expected = theirs.state_dict()
    for key, parameter in ours.named_parameters():
        # compressed-tensors rounds to the scales' type, whatever the model's is.
        rounded = parameter.bfloat16().float() if config["quant_method"] == "compressed-tensors" else parameter
        assert torch.equal(rounded, expected[key].float()), key


STEPS = (((0, 20), (1, 9)), ((0, 1), (1, 1)))


def native_executor(path: Path, dtype: str) -> tuple[NativeExecutor, Script]:
    native = load_native(path, dtype=dtype, use_cache=False)
    layout = make_layout(native.config.caches(), 4, 64, 64)
    script = Script(layout, native.config.vocab_size, tokens=64)
    return NativeExecutor(native.recording, native.store, layout, script.num_blocks, 64, kv_dtype="fp32"), script


@needs_library
@pytest.mark.parametrize(
    ("form", "family"),
    [(form, "llama") for form in ("gptq", WHOLE)] + [(form, "qwen3_moe") for form in ("awq", "fp8 in blocks")],
)
def test_native_logits(form: str, family: str, tmp_path: Path) -> None:
    """In fp32 the same bits as of the plain twin. As kept: those of a float64 model of the plan that has the twin's
    numbers, and rounds activations to 8 bits where a matrix is quantised, as the kernels do."""
    path = directory(tmp_path, form, family, num_hidden_layers=1)
    ours, plain = native_executor(path, "fp32"), native_executor(twin(path), "fp32")
    kept, script = native_executor(path, "auto")
    numbers = {name: p.detach() for name, p in plait.load(twin(path), "fp32").named_parameters()}
    store = load_native(path, use_cache=False).store
    parts = stack_parts({name: tuple(p.shape) for name, p in numbers.items()})
    weights = {}
    for name, p in numbers.items():
        layout = store[name].layout
        kept_as = p.bfloat16().float() if layout == "BF16" else p
        weights[name] = PlainWeight(name, kept_as.numpy(), layout, parts.get(name, 1))
    model = PlanModel(kept.lowered, weights, script.layout, script.num_blocks, rounds=True)
    distances = []
    for step in STEPS:
        first, second = (e.execute(*s.step(step), logits=True).logits.copy() for e, s in (ours, plain))
        np.testing.assert_array_equal(first, second)
        ids, inputs = script.step(step)
        distances += np.abs(kept.execute(ids, inputs, logits=True).logits - model.step(ids, inputs)[0]).max(-1).tolist()
    # A few numbers lie between two roundings, and either is right. AVX-512 BF16 rounds what meets bf16 matrices to 9
    # binary digits, which the model of the plan does not.
    rounds = native_library().isa() == "avx512_bf16"  # type: ignore[union-attr]
    assert np.median(distances) < (0.05 if rounds else 1e-5) and max(distances) < 0.3, distances


@needs_library
@pytest.mark.parametrize("form", ["gptq", "fp8 in blocks", "gptq by activation order"])
def test_what_is_saved_is_expanded_and_says_nothing_of_quantisation(
    form: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = directory(tmp_path, form, "llama")
    title = open_checkpoint(path).quantisation.title  # type: ignore[union-attr]
    checkpoint = open_checkpoint(path)
    packed = packed_decoder(checkpoint.config, pack_checkpoint(checkpoint), path)
    for number, decoder in enumerate((plait.load(path, "bf16"), packed)):
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="plait.save"):
            decoder.save_pretrained(tmp_path / f"saved{number}")
        assert f"the weights are written expanded (they were {title})" in caplog.text
        raw = json.loads((tmp_path / f"saved{number}" / "config.json").read_text())
        assert not [key for key in raw if "quant" in key or "compress" in key]
        again = plait.load(tmp_path / f"saved{number}", str(decoder.dtype).removeprefix("torch."))
        theirs = decoder.state_dict()
        for name, parameter in again.named_parameters():
            assert torch.equal(parameter, theirs[name]), name
        assert raw["dtype"] == {"fp8 in blocks": "bfloat16"}.get(form, "float32" if number else "bfloat16")


def test_parts_in_different_shards_are_one_weight(tmp_path: Path) -> None:
    path = directory(tmp_path, "gptq", "llama")
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    halves = [sorted(tensors)[0::2], sorted(tensors)[1::2]]
    weight_map = {}
    for number, names in enumerate(halves, 1):
        file = f"model-0000{number}-of-00002.safetensors"
        save_file({name: tensors[name] for name in names}, path / file)
        weight_map |= dict.fromkeys(names, file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert len({weight_map[f"model.layers.0.mlp.up_proj.{part}"] for part in ("qweight", "qzeros", "scales")}) == 2
    theirs = dict(plait.load(twin(path), "fp32").named_parameters())
    for name, parameter in plait.load(path, "fp32").named_parameters():
        assert torch.equal(parameter, theirs[name]), name


def test_biases_of_zeros_that_the_model_does_not_have_are_left_out(tmp_path: Path) -> None:
    path = directory(tmp_path, "gptq", "llama")
    file = path / "model.safetensors"
    tensors = load_file(file)
    biases = {f"model.layers.{i}.mlp.up_proj.bias": torch.zeros(96, dtype=torch.float16) for i in range(2)}
    save_file(tensors | biases, file)
    assert plait.load(path, "fp32").load_report.skipped == sorted(biases)
    biases["model.layers.1.mlp.up_proj.bias"][5] = 1
    save_file(tensors | biases, file)
    with pytest.raises(WeightError, match=r"model\.layers\.1\.mlp\.up_proj\.bias that this llama has no use"):
        plait.load(path)


def test_a_quantised_head_and_biases_in_half_precision(tmp_path: Path) -> None:
    path = directory(tmp_path, "gptq", "qwen2")
    tensors = load_file(path / "model.safetensors")
    m = Random(96, 64, 32, seed=77, spread=0.4)
    tensors.pop("lm_head.weight")
    tensors |= {f"lm_head.{role}": part for role, part in files.gptq(m).items()}
    tensors |= {name: t.half() for name, t in tensors.items() if name.endswith(".bias")}
    save_file({k: v.contiguous() for k, v in tensors.items()}, path / "model.safetensors")
    decoder = plait.load(path, "fp32")
    assert np.array_equal(decoder.lm_head.weight.detach().numpy(), m.weight())
    for name, parameter in decoder.named_parameters():
        if name.endswith(".bias"):
            assert torch.equal(parameter, tensors[name].float())


def test_inspect_names_the_quantisation(tmp_path: Path) -> None:
    path = directory(tmp_path, "gptq", "llama")
    facts = inspect_checkpoint(path)
    assert facts["supported"]
    assert facts["quantisation"] == {
        "method": "gptq",
        "title": "GPTQ, 4 bits, groups of 32",
        "weights": 14,
        "unused": 0,
    }
    assert inspect_checkpoint(twin(path))["quantisation"] is None
    raw = json.loads((path / "config.json").read_text())
    raw["quantization_config"]["bits"] = 5
    (path / "config.json").write_text(json.dumps(raw))
    facts = inspect_checkpoint(path)
    assert not facts["supported"] and "bits=5 must be 2, 3, 4 or 8" in facts["problem"]


@needs_library
def test_the_cache_keeps_what_the_report_says_and_a_command_runs_from_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = directory(tmp_path, "gptq", "llama", vocab_size=VOCAB_SIZE)
    write_tokenizer(path, chat=False)
    first, second = load_native(path), load_native(path)
    assert not first.cached and second.cached
    assert second.report.kept == first.report.kept == {"GPTQ 4-bit as Q4_0": 14}
    assert second.report.lines()[1:] == first.report.lines()[1:]
    assert main(["inspect", str(path)]) == 0
    assert "quantised          GPTQ, 4 bits, groups of 32: 14 weights" in capsys.readouterr().out
    prompt = [5, 6, 7]
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    texts = []
    for plan in ("native", "reference"):
        llm = plait.LLM(path, plan=plan, dtype="fp32", kv_memory="1MiB", threads=1)
        texts.append(llm.generate(prompt, params)[0].outputs[0].token_ids)
    assert texts[0] == texts[1] and len(texts[0]) == 8


@needs_library
def test_a_stack_of_which_one_expert_does_not_fit_is_expanded_whole(tmp_path: Path) -> None:
    path = directory(tmp_path, "int4", "qwen3_moe")
    tensors = load_file(path / "model.safetensors")
    name = "model.layers.0.mlp.experts.1.down_proj.weight_scale"
    tensors[name][3, 0] = 2.0**-30  # less than half precision holds
    save_file(tensors, path / "model.safetensors")
    store = pack_checkpoint(open_checkpoint(path))
    stack = "model.layers.0.mlp.experts.down_proj"
    assert {key for key, weight in store.items() if weight.layout == "F32" and "_proj" in key} == {stack}
    assert store.report.expanded == {"int4": 3} and store.report.expanded_to == "fp32"
    assert list(store.report.kept) == ["int4 as Q4_0"]
    for key, parameter in plait.load(path, "fp32").named_parameters():
        np.testing.assert_array_equal(store.expand(key), parameter.detach().numpy(), err_msg=key)
    assert 0 < np.abs(store.expand(stack)[1, 3, :32]).max() < 1e-7
