"""llama.cpp loads what `plait convert` writes, chooses the same types, quantises no better, and gives the same text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import plait
from plait.bench.accuracy import distances
from plait.bench.peers import PeerProcess, peer_version
from plait.bench.sides import OurSide, TheirSide
from plait.bench.summary import common_prefix
from plait.bench.text import load_text_ids, make_prompts
from plait.weights.convert import convert
from plait.weights.gguf_source import GGUFSource
from plait.weights.numbers import float32_rows
from tests.parity.test_gguf import MODELS
from tests.real_models import smollm2_path
from tests.weights.converting import FAMILIES, random_decoder

pytestmark = [pytest.mark.peer, pytest.mark.slow]
PROMPTS, LENGTH, NEW = 10, 24, 32
NEAR_TIE = 0.2  # in logits
MIXES = ("q4_k_m", "q4_k_s", "q5_k_m", "q5_k_s")


@pytest.fixture(autouse=True)
def llama_cpp() -> None:
    if peer_version("llama-cpp") is None:
        pytest.skip("llama-cpp is not installed: python tools/peers.py install llama-cpp")


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model as a directory, in bf16."""
    directory = tmp_path_factory.mktemp("smollm2") / "model"
    convert(smollm2_path(), directory, dtype="bf16")
    return directory


@pytest.mark.real_model
@pytest.mark.parametrize("kind", ["q8_0", "q4_k_m"])
def test_both_engines_agree_on_an_exported_file(smollm2: Path, kind: str, tmp_path: Path) -> None:
    """Along llama.cpp's own greedy text, so that a near tie that falls otherwise counts once."""
    file = tmp_path / f"{kind}.gguf"
    convert(smollm2, file, kind)
    ids, prefix = load_text_ids(file)
    prompts = make_prompts(ids, prefix, PROMPTS, LENGTH)
    ours = OurSide(file, context=LENGTH + NEW + 2, threads=1)
    theirs = TheirSide("llama-cpp", file, context=LENGTH + NEW + 2, threads=1)
    kl: list[float] = []
    equal: list[bool] = []
    margins: list[float] = []
    try:
        for prompt in prompts:
            text = prompt + theirs.complete(prompt, NEW).tokens
            expected = theirs.logits(text)
            found = distances(expected, ours.logits(text), np.array(text[1:]))
            kl += found.kl[LENGTH - 1 :]
            equal += found.equal_top[LENGTH - 1 :]
            best = np.sort(expected[LENGTH - 1 :], 1)
            margins += (best[:, -1] - best[:, -2]).tolist()
    finally:
        theirs.close()
    assert len(kl) == PROMPTS * (NEW + 1)
    clear = np.array(margins) > NEAR_TIE
    without_ties = np.mean(np.array(equal)[clear])
    print(f"{kind}: KL {np.mean(kl):.5f}, top-1 {np.mean(equal):.4f}, without near ties {without_ties:.4f}")
    assert np.mean(kl) <= 0.01
    # Both engines round activations to 8 bits: each of them agrees with fp32 arithmetic on the same file in some 94% of
    # these positions only, so that the other choice is allowed where the two likeliest tokens are close.
    assert clear.mean() > 0.7 and without_ties >= 0.97 and np.mean(equal) > 0.9


# llama.cpp wants heads of at least 32 for flash attention, and no gemma3 whose windows are off.
_WIDE = {"head_dim": 32, "hidden_size": 128}
_ROUND_TRIPS: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 48},
    "llama3": {"hidden_size": 128},
    "qwen2": {"hidden_size": 128},
    "qwen3": _WIDE,
    "gemma3": {**_WIDE, "query_pre_attn_scalar": 32},
    "mixtral": {"hidden_size": 128},
    "qwen2moe": {"hidden_size": 128},
    "phi3": {"hidden_size": 128},
}


def assert_same_text(decoder: Any, file: Path, near_tie: float = 0.02) -> None:
    """Greedy texts of both engines from fp32 files; where they part, both took it for a near tie."""
    theirs = TheirSide("llama-cpp", file, context=64, threads=1)
    try:
        for start in (3, 50, 120):
            prompt = [(start + 7 * i) % 90 for i in range(9)]
            text = theirs.complete(prompt, 15).tokens
            with torch.inference_mode():
                logits = decoder.logits(decoder(torch.tensor(prompt + text[:-1]))).float().numpy()[len(prompt) - 1 :]
            greedy = logits.argmax(1).tolist()
            equal = common_prefix(greedy, text)
            if equal < len(text):
                assert abs(logits[equal][greedy[equal]] - logits[equal][text[equal]]) < near_tie, (equal, greedy, text)
            assert equal >= 4
    finally:
        theirs.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_fp32_files_give_the_same_greedy_text(family: str, tmp_path: Path) -> None:
    decoder = random_decoder(family, **_ROUND_TRIPS[family])
    for parameter in decoder.parameters():
        parameter.data.mul_(0.5 if parameter.ndim > 1 else 1.0)  # else a tiny error decides
    convert(decoder, tmp_path / "model.gguf", "f32")
    assert_same_text(decoder, tmp_path / "model.gguf")


OTHERS = ["qwen3moe", "olmoe", "gemma2", "olmo2", "starcoder2", "granite", "smollm3", "gptneox"]


@pytest.mark.parametrize("name", OTHERS)
def test_every_other_architecture_has_the_same_logits(name: str, tmp_path: Path) -> None:
    raw = {**MODELS[name][0], "hidden_size": 128, "intermediate_size": 96, "initializer_range": 0.15}
    raw |= {"head_dim": 32} if "head_dim" in raw else {}
    raw |= {"query_pre_attn_scalar": 32} if "query_pre_attn_scalar" in raw else {}
    raw |= {"moe_intermediate_size": 32} if "moe_intermediate_size" in raw else {}
    raw |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    decoder: Any = plait.from_config(raw, seed=3)
    convert(decoder, tmp_path / "model.gguf", "f32")
    ids = [(3 + 7 * i) % 90 for i in range(24)]
    theirs = TheirSide("llama-cpp", tmp_path / "model.gguf", context=64, threads=1)
    try:
        found = torch.from_numpy(theirs.logits(ids)).log_softmax(-1)
    finally:
        theirs.close()
    with torch.inference_mode():
        expected = decoder.logits(decoder(torch.tensor(ids[:-1]))).float().log_softmax(-1)
    off = (found - expected).abs().amax(-1)
    # Its keys and values are fp16. A router's near tie may fall otherwise, and later positions attend to it.
    assert off[:4].max() < 0.05 and expected.std() > 1
    assert off.quantile(0.8) < (0.3 if "moe" in name else 0.05)


SIZES = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 97, "head_dim": 64}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "dense, untied": ("llama", {**SIZES, "num_hidden_layers": 16}),
    "tied": ("qwen2", {**SIZES, "num_hidden_layers": 9}),
    "eight experts": ("mixtral", {**SIZES, "num_hidden_layers": 9, "num_local_experts": 8}),
    "q, k and v in one": ("phi3", {**SIZES, "num_hidden_layers": 9}),
    "rows of 64 and 96": ("llama", {"num_hidden_layers": 9}),
}


def compare_with_quantiser(source: Path, kind: str, tmp_path: Path) -> dict[str, float]:
    """Types are equal tensor by tensor; returns the ratio of the two errors of each tensor that was quantised."""
    ours, theirs = tmp_path / f"{kind}-ours.gguf", tmp_path / f"{kind}-theirs.gguf"
    convert(source, ours, kind, force=True)
    with PeerProcess("llama-cpp") as process:
        process.call("quantise", source=str(source), target=str(theirs), kind=kind.upper(), threads=1)
    a, b, exact = GGUFSource(ours), GGUFSource(theirs), GGUFSource(source)
    assert {n: a.info(n).format for n in a.names()} == {n: b.info(n).format for n in b.names()}
    ratios = {}
    for name in a.names():
        values = float32_rows(exact, name)
        ours_error, their_error = (float(((float32_rows(s, name) - values) ** 2).mean()) ** 0.5 for s in (a, b))
        if their_error:
            ratios[name] = ours_error / their_error
    return ratios


@pytest.mark.parametrize("shape", SHAPES)
def test_mixes_have_the_types_of_llama_cpps_quantiser(shape: str, tmp_path: Path) -> None:
    family, changes = SHAPES[shape]
    decoder = random_decoder(family, **changes)
    convert(decoder, tmp_path / "f32.gguf", "f32")
    for kind in MIXES:
        ratios = compare_with_quantiser(tmp_path / "f32.gguf", kind, tmp_path)
        assert ratios and max(ratios.values()) < 1.02, (kind, max(ratios.items(), key=lambda r: r[1]))


@pytest.mark.real_model
def test_the_errors_on_real_weights_are_those_of_llama_cpps_quantiser(smollm2: Path, tmp_path: Path) -> None:
    convert(smollm2, tmp_path / "bf16.gguf", "bf16")
    for kind in ("q4_k_m", "q8_0"):
        ratios = compare_with_quantiser(tmp_path / "bf16.gguf", kind, tmp_path)
        assert len(ratios) == 211 and max(ratios.values()) < 1.01


_DEEPSEEK: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "q_lora_rank": 48,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_V3 = {**_DEEPSEEK, "model_type": "deepseek_v3", "norm_topk_prob": True, "routed_scaling_factor": 1.5}
_V2 = {**_DEEPSEEK, "model_type": "deepseek_v2", "topk_method": "greedy", "norm_topk_prob": False}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "mscale": 1, "mscale_all_dim": 1}
DEEPSEEKS: dict[str, dict[str, Any]] = {
    "v3 with groups": {**_V3, "n_group": 3, "topk_group": 2},
    "v3 with yarn": {**_V3, "n_group": 1, "topk_group": 1, "rope_scaling": _YARN},
    "v2": {**_V2, "routed_scaling_factor": 1.7},
    "v2-lite": {**_V2, "routed_scaling_factor": 1.0, "num_hidden_layers": 27, "q_lora_rank": None},
}


@pytest.mark.parametrize("name", DEEPSEEKS)
def test_deepseeks_have_the_same_logits_and_greedy_text(name: str, tmp_path: Path) -> None:
    decoder: Any = plait.from_config(DEEPSEEKS[name], seed=3)
    convert(decoder, tmp_path / "model.gguf", "f32")
    # llama.cpp's latents are fp16; in 27 layers some router's near tie falls otherwise.
    assert_same_text(decoder, tmp_path / "model.gguf", near_tie=0.15 if name == "v2-lite" else 0.02)
    ids = [(3 + 7 * i) % 90 for i in range(24)]
    theirs = TheirSide("llama-cpp", tmp_path / "model.gguf", context=64, threads=1)
    try:
        found = torch.from_numpy(theirs.logits(ids)).log_softmax(-1)
    finally:
        theirs.close()
    with torch.inference_mode():
        expected = decoder.logits(decoder(torch.tensor(ids[:-1]))).float().log_softmax(-1)
    assert expected.std() > 1 and (found - expected).abs().amax(-1).quantile(0.8) < 0.05


def test_a_deepseeks_mixes_have_the_types_of_llama_cpps_quantiser(tmp_path: Path) -> None:
    widths = {"hidden_size": 256, "intermediate_size": 512, "kv_lora_rank": 256, "q_lora_rank": 256}
    raw = {
        **DEEPSEEKS["v3 with groups"],
        **widths,
        "v_head_dim": 64,
        "moe_intermediate_size": 256,
        "num_hidden_layers": 9,
    }
    convert(plait.from_config(raw, seed=3), tmp_path / "f32.gguf", "f32")
    for kind in MIXES:
        ratios = compare_with_quantiser(tmp_path / "f32.gguf", kind, tmp_path)
        assert ratios and max(ratios.values()) < 1.02, (kind, max(ratios.items(), key=lambda r: r[1]))
