"""Text, stops and results: what a caller sees of a scripted sequence of tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from plait.engine.engine import Engine
from plait.engine.outputs import OutputProcessor, RequestOutput
from plait.engine.params import SamplingParams
from plait.engine.request import Request
from plait.engine.words import WordResolver
from plait.errors import RequestError
from plait.text.tokenizer import Tokenizer, load_tokenizer
from tests.engine.toy_model import ToyExecutor
from tests.tiny import END_OF_TEXT, IM_END, IM_START, VOCAB_SIZE, write_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory: Path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(directory)
    return load_tokenizer(directory)  # token i is byte i, then the special tokens


class Script(ToyExecutor):
    """Says `ids` after any prompt of `prompt_length` tokens, whatever else happens."""

    def __init__(self, ids: list[int], prompt_length: int) -> None:
        super().__init__(num_blocks=200, windows=(0,), block_tokens=(4,), vocab_size=VOCAB_SIZE)
        self.ids = ids
        self.prompt_length = prompt_length

    def compute(self, token_ids: np.ndarray, inputs: object) -> np.ndarray:
        logits = super().compute(token_ids, inputs)
        owner = np.searchsorted(inputs.sequences.query_start, inputs.logit_rows, side="right") - 1
        for row, sequence in enumerate(owner):
            next_output = int(inputs.sequences.context_len[sequence]) - self.prompt_length
            if 0 <= next_output < len(self.ids):
                logits[row, self.ids[next_output]] += 100
        return logits


def say(tokenizer: Tokenizer, text: str | list[int], **params: object) -> tuple[RequestOutput, list[str]]:
    """Run a request whose model says `text`: its result and the pieces of the stream of choice 0."""
    ids = list(text.encode()) if isinstance(text, str) else text
    engine = Engine(Script(ids, 2), max_model_len=200, max_num_seqs=4, eos_token_ids=[IM_END])
    processor = OutputProcessor(tokenizer)
    request = Request("a", [65, 66], SamplingParams(**{"temperature": 0, "max_tokens": len(ids), **params}))
    processor.add_request(request, "AB")
    engine.add_request(request)
    pieces, results = [], []
    while engine.has_unfinished():
        step = processor.process(engine.step())
        for target in step.to_stop:
            engine.stop(*target)
        pieces += [d.text for d in step.deltas if d.index == 0]
        results += step.finished
    assert engine.blocks.usage == 0
    (result,) = results
    assert "".join(pieces) == result.outputs[0].text
    return result, pieces


FOX = "The quick brown fox jumps"


def test_without_stops_the_text_is_the_tokens_text(tokenizer: Tokenizer) -> None:
    result, _ = say(tokenizer, FOX)
    (choice,) = result.outputs
    assert (choice.text, choice.finish_reason, choice.stop_reason) == (FOX, "length", None)
    assert choice.token_ids == list(FOX.encode())
    assert (result.prompt, result.prompt_token_ids, result.finished) == ("AB", [65, 66], True)
    assert choice.logprobs is None and choice.cumulative_logprob is None


@pytest.mark.parametrize(
    ("stop", "text", "hit"),
    [
        ("own fox", "The quick br", "own fox"),
        (["fox", "own fox"], "The quick br", "own fox"),
        (["own f", "own fox"], "The quick br", "own f"),
        (["jumps!", "quick"], "The ", "quick"),
        (["zebra"], FOX, None),
        (["s"], FOX[:-1], "s"),
    ],
)
def test_a_stop_over_many_tokens_cuts_the_text(tokenizer: Tokenizer, stop: object, text: str, hit: str | None) -> None:
    result, _ = say(tokenizer, FOX, stop=stop)
    (choice,) = result.outputs
    assert (choice.text, choice.stop_reason) == (text, hit)
    assert choice.finish_reason == ("stop" if hit else "length")
    # tokens after the stop are not counted
    assert len(choice.token_ids) == (len(FOX) if hit is None else FOX.index(hit) + len(hit))


def test_the_stop_is_included_on_request(tokenizer: Tokenizer) -> None:
    result, _ = say(tokenizer, FOX, stop="own fox", include_stop_str_in_output=True)
    assert result.outputs[0].text == "The quick brown fox"


def test_stops_and_text_of_several_bytes(tokenizer: Tokenizer) -> None:
    text = "naïve 🙂 日本語 end"
    result, pieces = say(tokenizer, text, stop="本")
    assert result.outputs[0].text == "naïve 🙂 日"
    assert "\ufffd" not in "".join(pieces)


def test_an_incomplete_character_at_the_end_is_replaced(tokenizer: Tokenizer) -> None:
    result, _ = say(tokenizer, list("a🙂".encode())[:-1])
    assert result.outputs[0].text == "a\ufffd"


def test_a_possible_beginning_of_a_stop_is_given_out_when_nothing_follows(tokenizer: Tokenizer) -> None:
    result, pieces = say(tokenizer, "abcX", stop="XY")
    assert result.outputs[0].text == "abcX" and pieces == ["a", "b", "c", "X"]


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_that_is_a_special_token_matches_although_it_is_skipped(tokenizer: Tokenizer, include: bool) -> None:
    ids = [*b"hi", IM_START, *b"more"]
    result, _ = say(tokenizer, ids, stop="<|im_start|>", include_stop_str_in_output=include)
    (choice,) = result.outputs
    assert (choice.text, choice.finish_reason) == ("hi" + "<|im_start|>" * include, "stop")
    assert choice.stop_reason == "<|im_start|>" and len(choice.token_ids) == 3


def test_special_tokens_are_skipped_or_shown(tokenizer: Tokenizer) -> None:
    ids = [*b"hi", IM_START, *b"more"]
    assert say(tokenizer, ids)[0].outputs[0].text == "himore"
    assert say(tokenizer, ids, skip_special_tokens=False)[0].outputs[0].text == "hi<|im_start|>more"
    shown = say(tokenizer, ids, skip_special_tokens=False, stop="<|im_start|>")[0].outputs[0]
    assert (shown.text, shown.finish_reason) == ("hi", "stop")


def test_the_text_of_an_end_token_is_not_content(tokenizer: Tokenizer) -> None:
    for skip in (True, False):
        choice = say(tokenizer, [*b"hi", IM_END, *b"more"], skip_special_tokens=skip)[0].outputs[0]
        assert (choice.text, choice.finish_reason, choice.stop_reason) == ("hi", "stop", None)
        assert choice.token_ids == [*b"hi", IM_END]
    choice = say(tokenizer, "hi!", stop_token_ids=[ord("!")])[0].outputs[0]
    assert (choice.text, choice.stop_reason) == ("hi", ord("!"))


def test_stop_strings_wait_for_min_tokens(tokenizer: Tokenizer) -> None:
    assert say(tokenizer, "xaxbxc", stop="x", min_tokens=3)[0].outputs[0].text == "xaxb"


def test_detokenize_false_leaves_ids_only(tokenizer: Tokenizer) -> None:
    choice = say(tokenizer, FOX, detokenize=False)[0].outputs[0]
    assert choice.text == "" and choice.token_ids == list(FOX.encode())


def test_choices_end_one_by_one_and_the_result_comes_with_the_last(tokenizer: Tokenizer) -> None:
    result, _ = say(tokenizer, "same for all", n=3, stop="for")
    assert [(c.index, c.text, c.finish_reason) for c in result.outputs] == [(i, "same ", "stop") for i in range(3)]


def test_logprobs_have_the_token_first_and_are_cut_with_the_tokens(tokenizer: Tokenizer) -> None:
    result, _ = say(tokenizer, FOX, logprobs=2, prompt_logprobs=1, stop="quick")
    choice = result.outputs[0]
    assert len(choice.logprobs) == len(choice.token_ids) == 9
    for token, entry in zip(choice.token_ids, choice.logprobs, strict=True):
        assert next(iter(entry)) == token and len(entry) == 2  # the token itself is the best one here
        assert entry[token].rank == 1 and entry[token].decoded_token == chr(token)
    assert choice.cumulative_logprob == pytest.approx(
        sum(e[t].logprob for t, e in zip(choice.token_ids, choice.logprobs, strict=True))
    )
    assert result.prompt_logprobs[0] is None
    assert 1 <= len(result.prompt_logprobs[1]) <= 2 and 66 in result.prompt_logprobs[1]


def test_outputs_of_unknown_requests_are_ignored(tokenizer: Tokenizer) -> None:
    engine = Engine(Script([65] * 9, 1), max_model_len=50, max_num_seqs=4)
    engine.add_request(Request("dropped", [1], SamplingParams(temperature=0, max_tokens=3)))
    processor = OutputProcessor(tokenizer)
    while engine.has_unfinished():
        assert processor.process(engine.step()).deltas == []


def test_stop_strings_need_a_tokenizer() -> None:
    with pytest.raises(RequestError, match="stop strings need a tokenizer"):
        OutputProcessor(None).add_request(Request("a", [1], SamplingParams(stop="x")))


# Words


def test_bad_words_are_resolved_with_and_without_a_space(tokenizer: Tokenizer) -> None:
    params = WordResolver(tokenizer).resolve(SamplingParams(bad_words=["fox"]))
    assert params.bad_words_token_ids == (tuple(b"fox"),)  # the spaced form is the same tokens after a space
    result, _ = say(tokenizer, FOX, bad_words_token_ids=params.bad_words_token_ids)
    assert "fox" not in result.outputs[0].text


def test_dry_breakers_are_found_in_the_vocabulary(tokenizer: Tokenizer) -> None:
    resolver = WordResolver(tokenizer)
    params = resolver.resolve(SamplingParams(dry_multiplier=1, dry_sequence_breakers=["\n", "ab"]))
    assert set(params.dry_breaker_token_ids) == {(10,), (97, 98)}
    assert resolver.resolve(SamplingParams()) == SamplingParams()  # DRY is off: nothing to look for
    assert END_OF_TEXT not in {s[0] for s in params.dry_breaker_token_ids}
