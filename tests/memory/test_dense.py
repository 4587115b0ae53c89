"""Dense memory: however a batch is fed and padded, each row is what it would be alone."""

from __future__ import annotations

import pytest
import torch

from plait.errors import UsageError
from plait.memory.dense import DenseMemory
from plait.ops.step import StepInputs
from tests.memory.tiny_decoders import CONFIGS, tiny_decoder

pytestmark = pytest.mark.usefixtures("one_thread")


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (a.log_softmax(-1) - b.log_softmax(-1)).abs().max().item() <= 1e-4


def greedy(decoder, prompts: list[list[int]], new_tokens: int, pad: int) -> list[list[int]]:
    """Left-padded batch, one token after the other."""
    width = max(map(len, prompts))
    ids = torch.tensor([[pad] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[False] * (width - len(p)) + [True] * len(p) for p in prompts])
    memory = DenseMemory(decoder.config.caches(), len(prompts), capacity=4)
    out: list[list[int]] = [[] for _ in prompts]
    with torch.inference_mode():
        hidden = decoder(ids, StepInputs(token_mask=mask), memory)
        for _ in range(new_tokens):
            tokens = decoder.logits(hidden[:, -1]).argmax(-1)
            for row, token in zip(out, tokens.tolist(), strict=True):
                row.append(token)
            hidden = decoder(tokens[:, None], memory=memory)
    return out


@pytest.mark.parametrize("family", CONFIGS)
def test_a_left_padded_row_generates_what_it_generates_alone(family):
    """Prompts of 3 and 9 tokens; the short one holds the padding's id as a real token."""
    decoder = tiny_decoder(family)
    short, long = [7, 2, 11], [3, 1, 4, 1, 5, 9, 2, 6, 5]
    together = greedy(decoder, [short, long], 8, pad=2)
    assert together == [greedy(decoder, [p], 8, pad=0)[0] for p in (short, long)]


@pytest.mark.parametrize("family", CONFIGS)
def test_one_prefill_chunks_of_three_and_single_tokens_agree(family):
    decoder = tiny_decoder(family)
    ids = torch.randint(0, 29, (2, 21), generator=torch.Generator().manual_seed(0))
    found = []
    with torch.inference_mode():
        plain = decoder.logits(decoder(ids))
        for size in (21, 3, 1):
            memory = DenseMemory(decoder.config.caches(), 2, capacity=2)
            parts = [decoder.logits(decoder(ids[:, i : i + size], memory=memory)) for i in range(0, 21, size)]
            found.append(torch.cat(parts, 1))
            assert memory.length == 21
            assert memory.row_lengths.tolist() == [21, 21]
    assert all(close(f, plain) for f in found)


def test_reordered_rows_go_on_as_the_rows_they_copied():
    decoder = tiny_decoder("gemma3_text")
    ids = torch.randint(0, 29, (3, 10), generator=torch.Generator().manual_seed(1))
    tail = torch.randint(0, 29, (3, 4), generator=torch.Generator().manual_seed(2))
    rows = torch.tensor([2, 2, 0])
    memory = DenseMemory(decoder.config.caches(), 3)
    with torch.inference_mode():
        decoder(ids, memory=memory)
        memory.reorder(rows)
        found = decoder.logits(decoder(tail, memory=memory))
        expected = decoder.logits(decoder(torch.cat((ids[rows], tail), 1)))[:, 10:]
    assert close(found, expected)


def test_padding_in_the_middle_of_a_row_is_skipped():
    """A row that pauses for a step (its token masked) goes on as if the step had not been."""
    decoder = tiny_decoder("qwen3")
    first, last = torch.tensor([[4, 5, 6]]), torch.tensor([[8, 9]])
    memory = DenseMemory(decoder.config.caches(), 1)
    with torch.inference_mode():
        decoder(first, memory=memory)
        paused = decoder(torch.tensor([[0]]), StepInputs(token_mask=torch.tensor([[False]])), memory)
        found = decoder.logits(decoder(last, memory=memory))
        expected = decoder.logits(decoder(torch.cat((first, last), 1)))[:, 3:]
    assert torch.isfinite(paused).all()
    assert close(found, expected)
    assert memory.row_lengths.tolist() == [5]


@pytest.mark.parametrize(
    ("ids", "inputs"),
    [
        (torch.zeros(4, dtype=torch.long), None),
        (torch.zeros(3, 4, dtype=torch.long), None),
        (torch.zeros(2, 4, dtype=torch.long), StepInputs(segment_ids=torch.zeros(2, 4))),
    ],
    ids=["flat", "another batch", "segments"],
)
def test_what_a_dense_cache_cannot_hold_is_refused(ids, inputs):
    decoder = tiny_decoder("llama")
    with pytest.raises(UsageError):
        decoder(ids, inputs, DenseMemory(decoder.config.caches(), 2))
