"""Likelihoods of given continuations against float64, transformers' loss, and rows alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from plait.decoding import scoring
from plait.decoding.generation import generate
from plait.decoding.scoring import batches_by_length, continuation_nll, target_nll
from plait.errors import RequestError, UsageError
from plait.model.decoder import Decoder, from_config
from tests.configs import CONFIGS as ALL_FAMILIES
from tests.decoding.models import RAGGED, model_pair
from tests.memory.tiny_decoders import CONFIGS, tiny_decoder

pytestmark = pytest.mark.usefixtures("one_thread")

CONTINUATIONS = [[5, 5, 28], [1], [], [9, 8, 7, 6, 5, 4, 3, 2, 1]]


def by_hand(decoder: Decoder, prompt: list[int], continuation: list[int]) -> tuple[float, int]:
    """The whole matrix of logits of one sequence, in float64."""
    if not continuation:
        return 0.0, 0
    with torch.inference_mode():
        log_p = decoder.logits(decoder(torch.tensor(prompt + continuation))).double().log_softmax(-1)
    rows = log_p[len(prompt) - 1 : -1]
    targets = torch.tensor(continuation)
    return -float(rows.gather(-1, targets[:, None]).sum()), int((rows.argmax(-1) == targets).sum())


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("batch_tokens", [8192, 12])
def test_rows_score_what_they_score_alone(family: str, batch_tokens: int) -> None:
    decoder = tiny_decoder(family)
    found = continuation_nll(decoder, RAGGED, CONTINUATIONS, batch_tokens)
    expected = [by_hand(decoder, p, c) for p, c in zip(RAGGED, CONTINUATIONS, strict=True)]
    assert found.tokens.tolist() == [3, 1, 0, 9]
    assert found.nll.tolist() == pytest.approx([nll for nll, _ in expected], abs=1e-4)
    assert found.correct.tolist() == [correct for _, correct in expected]
    assert found.accuracy == sum(correct for _, correct in expected) / 13


def test_a_greedy_continuation_is_the_first_choice_throughout() -> None:
    decoder = tiny_decoder("llama")
    assert continuation_nll(decoder, RAGGED, generate(decoder, RAGGED, 8).tokens).accuracy == 1.0


class Largest(TorchDispatchMode):
    """The most numbers that any tensor made inside has."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, torch.Tensor):
                self.numbers = max(self.numbers, tensor.numel())
        return out


def test_no_tensor_of_tokens_times_vocabulary_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = tiny_decoder("gemma3_text", vocab_size=1003, final_logit_softcapping=5.0)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(300, 24, generator=generator) * 3
    targets = torch.randint(0, 1003, (300,), generator=generator)
    log_p = decoder.logits(hidden).double().log_softmax(-1)
    monkeypatch.setattr(scoring, "LOGIT_NUMBERS", 1)
    with torch.inference_mode(), Largest() as largest:
        found = target_nll(decoder, hidden, targets)
    assert largest.numbers == 300 * 64  # a chunk of 64 columns; 1003 is no multiple of it
    assert torch.allclose(found.nll.double(), -log_p.gather(-1, targets[:, None])[:, 0], atol=1e-5)
    assert torch.equal(found.best, log_p.argmax(-1))


@pytest.mark.parametrize("chunk", [1, 1 << 24])
def test_of_equal_logits_the_lowest_id_is_the_first_choice(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = tiny_decoder("llama", vocab_size=300)
    monkeypatch.setattr(scoring, "LOGIT_NUMBERS", chunk)
    with torch.no_grad():
        decoder.lm_head.weight.zero_()
        decoder.lm_head.weight[[70, 71, 299], 0] = 1.0
        found = target_nll(decoder, torch.ones(2, 24), torch.tensor([0, 299]))
    # 297 logits are 0 and three 1: log(297 + 3 e) is the normaliser
    normaliser = torch.tensor(297 + 3 * torch.e).log().item()
    assert found.best.tolist() == [70, 70]
    assert found.nll.tolist() == pytest.approx([normaliser, normaliser - 1], rel=1e-6)


def test_a_head_with_bias_and_factor_is_chunked_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "LOGIT_NUMBERS", 1)
    for name in ("phimoe", "granitemoe"):
        decoder = from_config(ALL_FAMILIES[name], seed=1)
        with torch.no_grad():
            if decoder.lm_head.bias is not None:
                decoder.lm_head.bias.normal_(generator=torch.Generator().manual_seed(0))
        nll = continuation_nll(decoder, RAGGED, CONTINUATIONS).nll.tolist()
        expected = [by_hand(decoder, p, c)[0] for p, c in zip(RAGGED, CONTINUATIONS, strict=True)]
        assert nll == pytest.approx(expected, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mistral", "gpt_neox"])
def test_transformers_loss_and_a_model_of_transformers_agree(family: str, tmp_path: Path) -> None:
    decoder, theirs = model_pair(family, tmp_path)
    ours, through = (continuation_nll(m, RAGGED, CONTINUATIONS) for m in (decoder, theirs))
    assert torch.allclose(ours.nll, through.nll, atol=1e-4)
    assert torch.equal(ours.correct, through.correct) and torch.equal(ours.tokens, through.tokens)
    for row in (0, 1, 3):
        ids = torch.tensor([RAGGED[row] + CONTINUATIONS[row]])
        labels = ids.clone()
        labels[:, : len(RAGGED[row])] = -100
        with torch.no_grad():
            loss = theirs(ids, labels=labels).loss  # mean over the continuation
        assert ours.nll[row].item() == pytest.approx(float(loss) * len(CONTINUATIONS[row]), abs=1e-4)


def test_batches_hold_the_budget_and_every_row_once() -> None:
    lengths = [3, 9, 1, 6, 20, 6]
    groups = list(batches_by_length(lengths, 12))
    assert groups == [[4], [1], [3, 5], [0, 2]]  # 20 alone; 9; 6 and 6; 3 and 1


def test_bad_requests_are_named() -> None:
    decoder = tiny_decoder("llama")
    with pytest.raises(RequestError, match="2 prompts, 1 continuations"):
        continuation_nll(decoder, [[1], [2]], [[1]])
    with pytest.raises(RequestError, match="prompt 0 is empty"):
        continuation_nll(decoder, [[]], [[1]])
    with pytest.raises(UsageError, match="cannot score with a str"):
        continuation_nll("path", [[1]], [[1]])


def test_dropout_takes_no_part() -> None:
    decoder = tiny_decoder("llama", attention_dropout=0.5).train()
    expected = continuation_nll(tiny_decoder("llama"), RAGGED, CONTINUATIONS).nll
    assert torch.equal(continuation_nll(decoder, RAGGED, CONTINUATIONS).nll, expected)
    assert decoder.training
