"""Below fp32 the order of casts matters: bf16 logits are transformers' bf16 logits, not merely as good as those."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from plait.model.decoder import build
from plait.weights.load import load
from tests.parity.cases import CASES, Case
from tests.parity.mutations import with_norms
from tests.parity.reference import Proved

# transformers rounds to bf16 between the steps of its soft cap and of its own tanh GELU; plait does these in fp32.
SAME_CASTS = [c for c in CASES if not c.raw.get("final_logit_softcapping") and c.raw.get("hidden_act") != "gelu_new"]


def rms(a: torch.Tensor, b: torch.Tensor) -> float:
    return (a - b).square().mean().sqrt().item()


@pytest.mark.slow
@pytest.mark.parametrize("case", SAME_CASTS, ids=str)
def test_bf16_logits_are_closer_to_those_of_transformers_than_either_is_to_fp32(
    case: Case, proved_cases: Callable[[Case], Proved]
):
    """The reference is loaded in bf16: a cast of the whole model would cast its rotary frequencies too."""
    from transformers import AutoModelForCausalLM

    proved = proved_cases(case)
    model = AutoModelForCausalLM.from_pretrained(proved.directory, dtype=torch.bfloat16).eval()
    decoder = load(proved.directory, torch.bfloat16)
    other_casts = build(with_norms(decoder.config, lambda n: replace(n, fp32_weight=not n.fp32_weight)), torch.bfloat16)
    other_casts.load_state_dict(decoder.state_dict())
    with torch.inference_mode():
        theirs = model(input_ids=proved.ids).logits.float()
        ours, wrong = (d.logits(d(proved.ids)) for d in (decoder, other_casts))
    rounding = rms(theirs, proved.reference)
    assert rms(ours, theirs) < 0.3 * rounding
    if decoder.config.final_norm.kind == "rms":
        assert rms(wrong, theirs) > 0.5 * rounding, "a cast in another place would be seen"
