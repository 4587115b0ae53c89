"""No memory: padding, packed documents and flat sequences change nothing for the tokens that are really there."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from plait.memory.none import NoMemory
from plait.ops.step import Sequences, StepInputs
from tests.memory.tiny_decoders import CONFIGS, tiny_decoder

pytestmark = pytest.mark.usefixtures("one_thread")

FAMILIES = tuple(CONFIGS)


def logits(decoder, ids, inputs=None):
    with torch.inference_mode():
        return decoder.logits(decoder(ids, inputs))


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (a.log_softmax(-1) - b.log_softmax(-1)).abs().max().item() <= 1e-4


def prompts(*lengths: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(sum(lengths))
    return [torch.randint(0, 29, (n,), generator=generator) for n in lengths]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_padded_row_gives_what_it_gives_alone(family, side):
    """Whatever stands in the padding, also an id that the prompt uses as a real token."""
    decoder = tiny_decoder(family)
    short, long = prompts(3, 19)
    pad = torch.full((16,), short[0].item())
    row, real = (torch.cat((pad, short)), slice(16, 19)) if side == "left" else (torch.cat((short, pad)), slice(0, 3))
    mask = torch.zeros(2, 19, dtype=torch.bool)
    mask[0, real] = mask[1] = True
    both = logits(decoder, torch.stack((row, long)), StepInputs(token_mask=mask))
    assert close(both[0, real], logits(decoder, short))
    assert close(both[1], logits(decoder, long))
    assert torch.isfinite(both).all(), "a row of padding must not become NaN"


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_documents_do_not_see_one_another(family):
    decoder = tiny_decoder(family)
    parts = prompts(5, 1, 13)
    segments = torch.cat([torch.full((len(p),), i) for i, p in enumerate(parts)])
    packed = logits(decoder, torch.cat(parts).unsqueeze(0), StepInputs(segment_ids=segments.unsqueeze(0)))[0]
    for found, part in zip(packed.split([5, 1, 13]), parts, strict=True):
        assert close(found, logits(decoder, part))


def test_padding_behind_packed_documents_is_not_seen():
    decoder = tiny_decoder("gemma3_text")
    parts = prompts(6, 9)
    ids = torch.cat((*parts, torch.zeros(4, dtype=torch.long))).unsqueeze(0)
    segments = torch.tensor([[0] * 6 + [1] * 9 + [2] * 4])
    mask = torch.tensor([[True] * 15 + [False] * 4])
    packed = logits(decoder, ids, StepInputs(segment_ids=segments, token_mask=mask))[0]
    assert close(packed[:6], logits(decoder, parts[0]))
    assert close(packed[6:15], logits(decoder, parts[1]))
    assert torch.isfinite(packed).all()


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_flat_sequences_are_separate_documents_with_positions_of_their_own(family):
    decoder = tiny_decoder(family)
    parts = prompts(4, 11, 2)
    bounds = Sequences(np.array([0, 4, 15, 17], np.int32), np.array([4, 11, 2], np.int32))
    flat = logits(decoder, torch.cat(parts), StepInputs(sequences=bounds))
    for found, part in zip(flat.split([4, 11, 2]), parts, strict=True):
        assert close(found, logits(decoder, part))


def test_attention_dropout_acts_only_where_it_is_asked_for():
    decoder = tiny_decoder("llama")
    ids = torch.arange(12) % 29
    with torch.inference_mode():
        quiet = decoder(ids)
        assert torch.equal(decoder(ids, memory=NoMemory()), quiet)
        assert not torch.allclose(decoder(ids, memory=NoMemory(dropout=0.5)), quiet, atol=1e-3)


def test_gradients_reach_every_parameter():
    decoder = tiny_decoder("gemma3_text")
    decoder.logits(decoder(torch.arange(20) % 29)).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in decoder.parameters())
