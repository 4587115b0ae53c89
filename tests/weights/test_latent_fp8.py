"""A DeepSeek-V3 stored in FP8 blocks serves as the bf16 copy of its numbers does, in both forms of latent attention."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import plait
from plait.engine.build import build_engine
from plait.engine.llm import LLM
from plait.engine.loading import LoadedModel
from plait.engine.params import SamplingParams
from plait.kernels.native import native_library, reason
from plait.memory.layout import make_layout
from plait.model.families.llama import each_attention
from plait.ops.spec import LatentForm
from plait.plan.executor import NativeExecutor
from plait.plan.load import NativeModel, load_native
from plait.text.tokenizer import load_tokenizer
from plait.weights.checkpoint import Checkpoint, open_checkpoint
from plait.weights.store import second_name
from tests.greedy import assert_same_texts, compare_greedy, tolerance
from tests.plan.steps import Script
from tests.quantised_files import Parts
from tests.threads import one_thread
from tests.tiny import VOCAB_SIZE, write_tokenizer

__all__ = ["one_thread"]

pytestmark = pytest.mark.usefixtures("one_thread")
needs_library = pytest.mark.skipif(native_library() is None, reason=f"no native library: {reason()}")

FORMS: tuple[LatentForm, ...] = ("auto", "expanded", "absorbed")
VOCABULARY = VOCAB_SIZE
_COMMON: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "vocab_size": VOCABULARY,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "eos_token_id": 1,
    "tie_word_embeddings": False,
}
# Widths whose matrices end inside a block, kv_b_proj in both directions, and that the kernels take as whole panels.
CASES: dict[str, tuple[tuple[int, int], dict[str, Any]]] = {
    "48 x 40": (
        (48, 40),
        {
            "hidden_size": 88,
            "intermediate_size": 104,
            "moe_intermediate_size": 56,
            "q_lora_rank": 56,
            "kv_lora_rank": 48,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 12,
            "v_head_dim": 48,
        },
    ),
    "128 x 128": (
        (128, 128),
        {
            "hidden_size": 136,
            "intermediate_size": 200,
            "moe_intermediate_size": 72,
            "q_lora_rank": None,
            "kv_lora_rank": 144,
            "qk_nope_head_dim": 64,
            "qk_rope_head_dim": 8,
            "v_head_dim": 80,
        },
    ),
}


def fp8_blocks(shape: tuple[int, ...], block: tuple[int, int], seed: int) -> tuple[Parts, torch.Tensor]:
    """A matrix in FP8 blocks, and its numbers. Scales have 4 bits, so that every product is a bf16 number."""
    generator = torch.Generator().manual_seed(seed)
    weight = (torch.randn(shape, generator=generator) * 40).to(torch.float8_e4m3fn)
    grid = torch.rand([-(-n // b) for n, b in zip(shape, block, strict=True)], generator=generator)
    scale = (8 + (8 * grid).floor()) * 2.0**-12
    spread = scale[torch.arange(shape[0]) // block[0]][:, torch.arange(shape[1]) // block[1]]
    numbers = weight.float() * spread
    assert torch.equal(numbers.bfloat16().float(), numbers)
    return {"weight": weight, "weight_scale_inv": scale}, numbers


@pytest.fixture(scope="module", params=CASES)
def directories(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The checkpoint in FP8 and its copy in bf16."""
    block, widths = CASES[request.param]
    folder = tmp_path_factory.mktemp("v3")
    raw = _COMMON | widths
    plait.from_config(raw, seed=3).save_pretrained(folder / "source")
    raw = json.loads((folder / "source" / "config.json").read_text())
    stored: Parts = {}
    plain: Parts = {}
    for seed, (name, tensor) in enumerate(load_file(folder / "source" / "model.safetensors").items()):
        if tensor.ndim == 2 and "_proj" in name:
            parts, numbers = fp8_blocks(tuple(tensor.shape), block, seed)
            stored |= {name.removesuffix("weight") + suffix: part for suffix, part in parts.items()}
            plain[name] = numbers.bfloat16()
        else:
            stored[name] = plain[name] = tensor if "correction" in name else tensor.bfloat16()
    assert {name.split("layers.1.")[-1] for name in stored if name.endswith("scale_inv")} >= {
        "self_attn.kv_b_proj.weight_scale_inv",
        "mlp.experts.3.down_proj.weight_scale_inv",
    }
    said = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": list(block)}
    for kind, tensors, data in (("fp8", stored, {**raw, "quantization_config": said}), ("bf16", plain, raw)):
        (folder / kind).mkdir()
        save_file({k: v.contiguous() for k, v in tensors.items()}, folder / kind / "model.safetensors")
        (folder / kind / "config.json").write_text(json.dumps(data))
        write_tokenizer(folder / kind, chat=False)
    return folder / "fp8", folder / "bf16"


def opened(path: Path, form: LatentForm) -> Checkpoint:
    """The checkpoint with one form in every layer."""
    checkpoint = open_checkpoint(path)
    checkpoint.config = each_attention(checkpoint.config, form=form)
    return checkpoint


IDS = torch.arange(40)[None] * 7 % VOCABULARY


def logits_of(path: Path, form: LatentForm, dtype: str) -> torch.Tensor:
    decoder = plait.load(opened(path, form), dtype)
    with torch.no_grad():
        return decoder.logits(decoder(IDS))


def test_the_reference_computes_with_the_numbers_of_the_copy(directories: tuple[Path, Path]) -> None:
    from transformers import AutoModelForCausalLM

    quantised, copy = directories
    theirs = AutoModelForCausalLM.from_pretrained(copy, dtype=torch.float32)
    with torch.no_grad():
        expected = theirs(IDS).logits
    found = []
    for form in FORMS:
        for dtype in ("fp32", "bf16"):
            assert torch.equal(logits_of(quantised, form, dtype), logits_of(copy, form, dtype))
        found.append(logits_of(quantised, form, "fp32"))
        assert float((found[-1] - expected).abs().max()) <= tolerance(expected)
    assert not torch.equal(found[1], found[2]), "one form for both"


# A prompt of one sequence, then steps that mix prompts and decoding.
STEPS = (((0, 70),), ((0, 1), (1, 33)), ((1, 1), (0, 1)), ((0, 1), (1, 20)))


def executor(native: NativeModel) -> tuple[NativeExecutor, Script]:
    layout = make_layout(native.config.caches(), 4, 128, 128)
    script = Script(layout, VOCABULARY, tokens=128)
    return NativeExecutor(native.recording, native.store, layout, script.num_blocks, 128, kv_dtype="fp32"), script


@needs_library
@pytest.mark.parametrize("form", FORMS)
def test_the_native_plan_gives_the_bits_of_the_copy_and_leaves_nothing_to_the_host(
    form: LatentForm, directories: tuple[Path, Path]
) -> None:
    for dtype, layout in (("auto", "BF16"), ("fp32", "F32")):
        both = [load_native(opened(path, form), dtype=dtype, use_cache=False) for path in directories]
        name = "model.layers.1.self_attn.kv_b_proj.weight"
        for native in both:
            assert {native.store[key].layout for key in (name, second_name(name))} == {layout}
        assert both[0].report.expanded == {"FP8": sum(name.endswith("_scale_inv") for name in stored(directories[0]))}
        made = [executor(native) for native in both]
        assert [engine.host_ops for engine, _ in made] == [(), ()]
        assert "attend_latent" in {op.kind for op in made[0][0].lowered.ops}
        for step in STEPS:
            ours, plain = (e.execute(*script.step(step), logits=True).logits.copy() for e, script in made)
            assert np.array_equal(ours, plain)


def stored(path: Path) -> list[str]:
    return list(load_file(path / "model.safetensors"))


def engine(path: Path, form: LatentForm, plan: str) -> LLM:
    options: dict[str, Any] = {"kv_memory": "1MiB", "kv_dtype": "fp32", "plan": plan, "max_model_len": 128}
    if plan == "reference":
        return LLM(plait.load(opened(path, form), "fp32"), tokenizer=load_tokenizer(path), **options)
    native = load_native(opened(path, form), dtype="fp32", use_cache=False)
    return LLM.from_bundle(build_engine(LoadedModel(native.config, "v3", {}, native, vocab_size=VOCABULARY), **options))


@pytest.mark.slow
@needs_library
@pytest.mark.parametrize("form", FORMS)
def test_every_plan_says_the_greedy_text_of_the_copy(form: LatentForm, directories: tuple[Path, Path]) -> None:
    prompts = ["It is", "a truth universally acknowledged, that a single man"]
    params = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
    decoder = plait.load(directories[1], "fp32")
    for plan in ("reference", "native"):
        results, expected = (engine(path, form, plan).generate(prompts, params) for path in directories)
        assert [r.outputs[0].text for r in results] == [r.outputs[0].text for r in expected]
        comparisons = []
        for result in results:
            prompt, tokens = list(result.prompt_token_ids), list(result.outputs[0].token_ids)
            assert len(tokens) == 16
            with torch.no_grad():
                logits = decoder.logits(decoder(torch.tensor([prompt + tokens])))[0]
            comparisons.append(compare_greedy(tokens, logits[len(prompt) - 1 : -1]))
        assert_same_texts(comparisons, f"{form}, {plan}")
