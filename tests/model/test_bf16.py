"""Below fp32 the order of casts matters: bf16 logits follow transformers' bf16 logits, not only the fp32 ones."""

from __future__ import annotations

import pytest
import torch
from tests.parity.cases import CASES, Case
from tests.parity.reference import reference_model, seed_of

from plait.weights.load import load

FIRST = {case.family: case for case in reversed(CASES)}


@pytest.mark.slow
@pytest.mark.parametrize("case", FIRST.values(), ids=str)
def test_bf16_hidden_states_are_as_close_to_transformers_as_rounding_allows(case: Case, tmp_path):
    """The same casts in the same places: the two differ by far less than either differs from fp32."""
    model = reference_model(case).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    exact, low = load(tmp_path, torch.float32), load(tmp_path, torch.bfloat16)
    ids = torch.randint(0, 97, (1, 40), generator=torch.Generator().manual_seed(seed_of(case.name)))
    with torch.inference_mode():
        theirs = model(input_ids=ids).logits.float()
        ours, right = low.logits(low(ids)), exact.logits(exact(ids))
    between, rounding = (ours - theirs).square().mean().sqrt(), (theirs - right).square().mean().sqrt()
    assert between < 1.2 * rounding
    assert (ours - right).square().mean().sqrt() < 1.2 * rounding
