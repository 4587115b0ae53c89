"""Adapters that peft made: logits as transformers with peft gives them, beside the weights and merged into them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from plait.engine.score_forward import AdaptedForward
from plait.kernels.native import native_library
from plait.model.decoder import Decoder
from plait.model.record import record
from plait.weights.adapters import Adapter, load_adapter
from plait.weights.load import load
from plait.weights.merge import merge_adapter
from tests.parity.case import SMALL, Case
from tests.parity.reference import distance, reference_model, tolerance

GROUPED = {**SMALL, "num_key_value_heads": 2}
# The model, and what peft is told.
CASES: dict[str, tuple[Case, dict[str, Any]]] = {
    "llama, a list, ranks and alphas by pattern": (
        Case("adapter", {"model_type": "llama", **GROUPED, "attention_bias": True}),
        {
            "r": 5,
            "lora_alpha": 3,
            "target_modules": ["q_proj", "v_proj", "o_proj", "down_proj"],
            "rank_pattern": {"layers.1.self_attn.q_proj": 17, r"layers\.\d\.mlp.down_proj": 2},
            "alpha_pattern": {"o_proj": 11},
        },
    ),
    "qwen2, all linear modules, rank-stabilised": (
        Case("adapter", {"model_type": "qwen2", **GROUPED, "tie_word_embeddings": True}),
        {"r": 4, "lora_alpha": 6, "target_modules": "all-linear", "use_rslora": True},
    ),
    "phi3, an expression, fused projections": (
        Case("adapter", {"model_type": "phi3", **GROUPED, "pad_token_id": 0}),
        {"r": 3, "lora_alpha": 8, "target_modules": r"model\.layers\.[02]\..*\.(qkv_proj|gate_up_proj|down_proj)"},
    ),
    "gpt2, Conv1D": (
        Case("adapter", {"model_type": "gpt2", "vocab_size": 97, "n_embd": 72, "n_layer": 3, "n_head": 6,
                         "n_positions": 128, "n_inner": 101}),
        {"r": 4, "lora_alpha": 8, "target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True},
    ),
    "gpt_neox, q, k and v by turns in one matrix": (
        Case("adapter", {"model_type": "gpt_neox", **SMALL, "rotary_pct": 0.5}),
        {"r": 4, "lora_alpha": 4, "target_modules": ["query_key_value", "attention.dense", "dense_4h_to_h"]},
    ),
    "mixtral, attention of two layers": (
        Case("adapter", {"model_type": "mixtral", **GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}),
        {"r": 4, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"], "layers_to_transform": [0, 2]},
    ),
    "qwen2_moe, attention and shared experts": (
        Case("adapter", {"model_type": "qwen2_moe", **GROUPED, "num_experts": 4, "num_experts_per_tok": 2,
                         "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40}),
        {"r": 4, "target_modules": ["k_proj", "shared_expert.up_proj", "shared_expert.down_proj"],
         "exclude_modules": ["layers.1.self_attn.k_proj"]},
    ),
}  # fmt: skip


@dataclass
class Adapted:
    """A model with an adapter of peft's. reference: logits fp32 [T, V] of ids [T]; plain: without the adapter."""

    base: Path
    path: Path
    ids: Tensor
    plain: Tensor
    reference: Tensor

    def decoder(self) -> Decoder:
        return load(self.base, torch.float32)

    def adapter(self, decoder: Decoder) -> Adapter:
        return load_adapter(self.path, decoder.config, record(decoder))

    def check(self, logits: Tensor) -> None:
        limit = tolerance(self.reference)
        assert distance(logits, self.reference) <= limit
        assert distance(logits, self.plain) > 100 * limit  # what there is to prove


@pytest.fixture(scope="module", params=CASES)
def adapted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    from peft import LoraConfig, get_peft_model

    case, options = CASES[request.param]
    directory = tmp_path_factory.mktemp("adapted")
    model = reference_model(case)
    model.save_pretrained(directory / "base")
    ids = torch.randint(0, 97, (1, 41), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        plain = model(input_ids=ids).logits[0]
    torch.manual_seed(4)
    lora = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **options)).eval()
    with torch.inference_mode():
        reference = lora(input_ids=ids).logits[0]
    lora.save_pretrained(directory / "adapter")
    return Adapted(directory / "base", directory / "adapter", ids[0], plain, reference)


def test_beside_the_weights(adapted: Adapted) -> None:
    decoder = adapted.decoder()
    with torch.inference_mode():
        hidden = AdaptedForward(decoder, adapted.adapter(decoder)).hidden(adapted.ids)
        adapted.check(decoder.logits(hidden))


def test_merged_and_saved(adapted: Adapted, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    decoder = adapted.decoder()
    merge_adapter(decoder, adapted.path)
    with torch.inference_mode():
        adapted.check(decoder.logits(decoder(adapted.ids)))
    decoder.save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    config._experts_implementation = "eager"  # as in reference_model
    options = {"config": config, "dtype": torch.float32, "attn_implementation": "eager"}
    saved = AutoModelForCausalLM.from_pretrained(tmp_path, **options).eval()
    with torch.inference_mode():
        adapted.check(saved(input_ids=adapted.ids[None]).logits[0])


@pytest.mark.skipif(native_library() is None, reason="no native library")
def test_in_the_native_plan(adapted: Adapted) -> None:
    import numpy as np

    from plait.memory.layout import make_layout
    from plait.ops.step import Sequences, StepInputs
    from plait.plan.executor import NativeExecutor
    from plait.weights.pack import pack_decoder

    decoder = adapted.decoder()
    layout = make_layout(decoder.config.caches(), 4, 64, 64)
    native = NativeExecutor(record(decoder), pack_decoder(decoder), layout, 64, 64, kv_dtype="fp32")
    native.set_adapters([adapted.adapter(decoder)])
    count = len(adapted.ids)
    table = np.arange(1, 1 + len(layout.groups) * 4, dtype=np.int32).reshape(len(layout.groups), 1, 4)
    sequences = Sequences(np.array([0, count], np.int32), np.array([count], np.int32), table)
    rows = np.arange(count, dtype=np.int32)
    inputs = StepInputs(sequences=sequences, logit_rows=rows, adapter_ids=np.ones(1, np.int32))
    result = native.execute(adapted.ids.numpy().astype(np.int32), inputs)
    adapted.check(torch.from_numpy(result.logits.copy()))
