"""Scores of long texts: every token once, with as much context as the window gives."""

from __future__ import annotations

from math import exp, log
from pathlib import Path
from typing import Any

import pytest
import torch

import plait
from plait.decoding import scoring
from plait.engine import score_forward
from plait.engine.loading import load_model
from plait.engine.score import Scorer, windows
from plait.engine.score_forward import DecoderForward, PlanForward
from plait.errors import RequestError
from plait.kernels.native import native_library
from plait.text.tokenizer import Tokenizer, load_tokenizer
from tests.tiny import END_OF_TEXT, tiny_model_dir

TEXT = "It was a bright cold day in April, and the clocks were striking thirteen."


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def decoder(directory: Path) -> plait.Decoder:
    return plait.load(directory, "fp32")


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Tokenizer:
    return load_tokenizer(directory)


@pytest.fixture(scope="module")
def bos_tokenizer(directory: Path) -> Tokenizer:
    """The same tokenizer for a model whose texts begin with BOS."""
    plain = load_tokenizer(directory)
    return Tokenizer(plain._backend, special_tokens={"bos_token": "<|endoftext|>"}, prefix_ids=[END_OF_TEXT])


def one_by_one(decoder: plait.Decoder, context: list[int], token: int) -> float:
    """log p(token | context), a forward of its own."""
    with torch.inference_mode():
        return float(decoder.logits(decoder(torch.tensor(context))[-1]).double().log_softmax(-1)[token])


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("size", [2, 3, 8, 50])
@pytest.mark.parametrize("num_tokens", [2, 3, 7, 8, 9, 49, 50, 51, 120])
def test_windows_score_every_token_once_with_enough_context(num_tokens: int, size: int, bos: bool) -> None:
    for stride in {1, max(size // 2, 1), size - bos}:
        scored: list[int] = []
        for window in windows(num_tokens, size, stride, bos):
            fed = window.end - 1 - window.begin + bos
            assert fed <= size
            for token in range(window.first, window.end):
                before = token - window.begin
                assert before + bos >= 1
                assert before == token or before + bos >= size - stride
                scored.append(token)
        assert scored == list(range(0 if bos else 1, num_tokens))


def test_a_text_that_fits_is_scored_with_its_whole_past(decoder: plait.Decoder, tokenizer: Tokenizer) -> None:
    found = Scorer(DecoderForward(decoder), tokenizer).score(TEXT)
    ids = list(TEXT.encode())
    assert found.token_ids == ids and found.token_logprobs[0] is None
    expected = [one_by_one(decoder, ids[:i], ids[i]) for i in range(1, len(ids))]
    assert found.token_logprobs[1:] == pytest.approx(expected, abs=1e-4)
    assert found.nll == pytest.approx(-sum(expected), rel=1e-5)
    figures = found.to_json()
    assert figures["perplexity"] == pytest.approx(exp(-sum(expected) / len(expected)), rel=1e-5)
    assert figures["bits_per_byte"] == pytest.approx(-sum(expected) / log(2) / (len(ids) - 1), rel=1e-5)


def test_a_sliding_window_limits_what_a_token_sees(decoder: plait.Decoder, tokenizer: Tokenizer) -> None:
    found = Scorer(DecoderForward(decoder), tokenizer, window=16, stride=4).score(TEXT)
    ids = list(TEXT.encode())
    # The first window feeds 16 tokens and scores up to token 16; the next ends 4 tokens later.
    for token in (1, 16, 17, 20, 21):
        end = 17 if token < 17 else 17 + 4 * -(-(token - 16) // 4)
        begin = max(0, end - 1 - 16)
        assert found.token_logprobs[token] == pytest.approx(one_by_one(decoder, ids[begin:token], ids[token]), abs=1e-4)


def test_bos_stands_before_every_window(decoder: plait.Decoder, bos_tokenizer: Tokenizer) -> None:
    found = Scorer(DecoderForward(decoder), bos_tokenizer, window=16, stride=15).score(TEXT)
    ids = list(TEXT.encode())
    assert found.token_logprobs[0] == pytest.approx(one_by_one(decoder, [END_OF_TEXT], ids[0]), abs=1e-4)
    assert found.num_scored == found.num_bytes == len(ids)
    # 16 scored by the first window (BOS and 15 fed); the second feeds BOS and tokens 15 to 29.
    assert found.token_logprobs[16] == pytest.approx(one_by_one(decoder, [END_OF_TEXT, ids[15]], ids[16]), abs=1e-4)


def test_logits_never_exist_for_all_tokens_at_once(
    decoder: plait.Decoder, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Scorer(DecoderForward(decoder), tokenizer).score(TEXT).token_logprobs
    sizes: list[int] = []
    head = scoring.head_logits

    def spy(*args: Any) -> Any:
        sizes.append(head(*args).shape[-1])
        return head(*args)

    monkeypatch.setattr(scoring, "LOGIT_NUMBERS", 100 * (len(TEXT) - 1))
    monkeypatch.setattr(scoring, "head_logits", spy)
    parts = Scorer(DecoderForward(decoder), tokenizer).score(TEXT).token_logprobs
    assert max(sizes) == 100 and sum(sizes) == decoder.config.vocab_size
    assert parts[1:] == pytest.approx(whole[1:], abs=1e-5)


def test_text_that_names_a_special_token_is_ordinary_text(decoder: plait.Decoder, tokenizer: Tokenizer) -> None:
    assert len(Scorer(DecoderForward(decoder), tokenizer).encode("<|im_end|>")) == len("<|im_end|>")


@pytest.mark.parametrize(("window", "stride"), [(1, None), (513, None), (16, 17)])
def test_sizes_that_cannot_work_are_refused(
    decoder: plait.Decoder, tokenizer: Tokenizer, window: int, stride: int | None
) -> None:
    with pytest.raises(RequestError):
        Scorer(DecoderForward(decoder), tokenizer, window, stride)


@pytest.mark.parametrize("text", ["", "a"])
def test_a_text_with_nothing_to_score_is_refused(decoder: plait.Decoder, tokenizer: Tokenizer, text: str) -> None:
    with pytest.raises(RequestError, match="nothing to score"):
        Scorer(DecoderForward(decoder), tokenizer).score(text, "empty.txt")


@pytest.mark.skipif(native_library() is None, reason="needs the native library")
@pytest.mark.parametrize("window", [16, None])
def test_the_plan_scores_like_the_decoder(
    tmp_path: Path, tokenizer: Tokenizer, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tiny_model_dir(tmp_path)
    loaded = load_model(directory, plan="native", dtype="fp32")
    positions = loaded.config.max_positions
    # Chunks of 5 tokens: windows and rows that are scored begin inside a chunk.
    monkeypatch.setattr(score_forward, "LOGIT_NUMBERS", 5 * loaded.config.vocab_size)
    forward = PlanForward(loaded, window or positions, "fp32")
    found = Scorer(forward, tokenizer, window=window).score(TEXT * 3)
    expected = Scorer(DecoderForward(plait.load(directory, dtype="fp32")), tokenizer, window=window).score(TEXT * 3)
    assert found.token_logprobs[0] is None
    assert found.token_logprobs[1:] == pytest.approx(expected.token_logprobs[1:], abs=1e-4)
