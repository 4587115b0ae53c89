"""The oracle: the transformers model of a case with weights that let a wrong switch show, saved to a directory.

transformers is imported inside the functions, so that collecting tests stays quick.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from plait.model.config import ModelConfig
from plait.model.decoder import Decoder
from plait.model.families import family
from plait.weights.load import load
from tests.parity.cases import Case
from tests.parity.plait_gpt_oracle import PlaitGPT

PROMPT_TOKENS = 57


@dataclass
class Proved:
    """A case with its reference model and the decoder that plait loaded from the reference's own files.

    ids: [2, 57], longer than every window and past the original rotary contexts. reference: logits fp32 [2, 57, V].
    """

    case: Case
    model: Any
    directory: Path
    decoder: Decoder
    ids: Tensor
    reference: Tensor

    @property
    def config(self) -> ModelConfig:
        return self.decoder.config

    @cached_property
    def state(self) -> dict[str, Tensor]:
        return {name: p.detach() for name, p in self.decoder.named_parameters(remove_duplicate=False)}

    @property
    def tolerance(self) -> float:
        return tolerance(self.reference)

    def share(self, logits: Tensor) -> float:
        """max |Δ log p| against the reference as a share of the tolerance."""
        return distance(logits, self.reference) / self.tolerance


def tolerance(reference: Tensor) -> float:
    """1e-4 * max(1, max |logit| / 10), in fp32."""
    return 1e-4 * max(1.0, reference.abs().max().item() / 10)


def distance(logits: Tensor, reference: Tensor) -> float:
    """max |Δ log p| over positions and tokens."""
    assert torch.isfinite(logits).all()
    return (logits.log_softmax(-1) - reference.log_softmax(-1)).abs().max().item()


def seed_of(text: str) -> int:
    return zlib.crc32(text.encode())


def reference_model(case: Case, attention: str = "eager") -> Any:
    """The real architecture, randomly initialised in fp32 so that the largest |logit| lies between 5 and 25.

    attention: of transformers' models; plait_gpt is none of them, and its oracle has one.
    """
    if family(case.family).is_own:
        model = PlaitGPT(case.raw).eval()
        randomise(model, seed_of(str(case)))
        return model
    from transformers import AutoConfig, AutoModelForCausalLM

    raw = json.loads(json.dumps(case.raw))  # transformers changes nested dictionaries that it is given
    config = AutoConfig.for_model(family(raw.pop("model_type")).written_as, **raw)
    config.eos_token_id = config.pad_token_id = config.bos_token_id = None
    # Its grouped matrix products need sizes that are multiples of 16 bytes.
    config._experts_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32).eval()
    randomise(model, seed_of(str(case)))
    return model


def randomise(model: Any, seed: int) -> None:
    """Matrices sd 1/sqrt(fan_in), head 1.5/sqrt(fan_in), routers 3/sqrt(fan_in), embeddings sd 1.5 (tied 0.4), 1-D
    parameters sd 0.3."""
    generator = torch.Generator().manual_seed(seed)
    tied = model.config.tie_word_embeddings
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    offset_norms = model.config.model_type.startswith("gemma")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter is embedding:
                parameter.copy_(noise * (0.4 if tied else 1.5))
            elif parameter.ndim > 1:
                gain = 1.5 if parameter is head else 3.0 if is_router(name) else 1.0
                parameter.copy_(noise * gain / parameter.shape[-1] ** 0.5)
            else:
                default = 0.0 if name.endswith("bias") or offset_norms else 1.0
                parameter.copy_(default + 0.3 * noise)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))
            # xIELU's, so that each of them counts.
            if name.endswith(("act_fn.beta", "act_fn.eps")):
                buffer.fill_(0.4 if name.endswith("beta") else -0.3)


def is_router(name: str) -> bool:
    """Whether this parameter of a transformers model is the matrix of a router."""
    return name.endswith((".mlp.gate.weight", ".mlp.router.weight", ".block_sparse_moe.router.weight"))


def prove(case: Case, directory: Path) -> Proved:
    """Save the reference with transformers, load it with plait, run the reference once."""
    model = reference_model(case)
    model.save_pretrained(directory)
    saved = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(saved | {"model_type": case.family}))
    decoder = load(directory, torch.float32)
    generator = torch.Generator().manual_seed(seed_of(case.name))
    ids = torch.randint(0, case.raw["vocab_size"], (2, PROMPT_TOKENS), generator=generator)
    with torch.inference_mode():
        reference = model(input_ids=ids).logits
    return Proved(case, model, directory, decoder, ids, reference)
