"""Latent attention in each of its two forms gives transformers' logits and gradients, whoever chooses the form."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from plait.model.decoder import Decoder, build
from plait.model.families.llama import each_attention
from plait.ops.spec import LatentForm
from tests.parity.case import Case
from tests.parity.forwards import dense, paged, plain
from tests.parity.latent_cases import LATENT
from tests.parity.reference import Proved

pytestmark = pytest.mark.slow

FORMS: tuple[LatentForm, ...] = ("expanded", "absorbed")
FIRST = [next(case for case in LATENT if case.family == family) for family in dict.fromkeys(c.family for c in LATENT)]


def always(proved: Proved, form: LatentForm) -> Decoder:
    """The decoder with one form in every layer, over the same weights."""
    decoder = build(each_attention(proved.config, form=form))
    decoder.load_state_dict(proved.state)
    return decoder


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", [*FIRST, LATENT[1]], ids=str)
def test_either_form_agrees_with_transformers_in_every_memory(
    case: Case, form: LatentForm, proved_cases: Callable[[Case], Proved]
):
    proved = proved_cases(case)
    decoder = always(proved, form)
    logits = plain(decoder, proved.ids)
    assert proved.share(logits) < 0.25
    assert not torch.equal(logits, plain(always(proved, FORMS[form == "expanded"]), proved.ids)), "one form for both"
    assert proved.share(dense(decoder, proved.ids, (19, 1, 4, 1, 1))) <= 1
    assert proved.share(paged(decoder, proved.ids, (11, 1, 1, 3, 9))) <= 1


@pytest.mark.parametrize("case", FIRST, ids=str)
def test_gradients_of_the_forms_agree(case: Case, proved_cases: Callable[[Case], Proved]):
    """Those of the expanded form are compared with transformers' in test_forwards.py."""
    proved = proved_cases(case)
    found = []
    for form in FORMS:
        decoder = always(proved, form)
        decoder.logits(decoder(proved.ids)).logsumexp(-1).sum().backward()
        found.append({name: p.grad for name, p in decoder.named_parameters() if p.requires_grad})
    for name, expected in found[0].items():
        assert (found[1][name] - expected).norm() <= 1e-4 * expected.norm(), name
