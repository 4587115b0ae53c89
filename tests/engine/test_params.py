"""Values outside their range are refused by name before anything is allocated."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError

import numpy as np
import pytest

from plait.engine.params import SamplingParams
from plait.errors import RequestError

NAN, INF = math.nan, math.inf


def test_defaults_are_those_of_the_ecosystem() -> None:
    p = SamplingParams()
    assert (p.n, p.temperature, p.top_p, p.top_k, p.min_p, p.max_tokens, p.min_tokens) == (1, 1.0, 1.0, 0, 0.0, 16, 0)
    assert (p.presence_penalty, p.frequency_penalty, p.repetition_penalty) == (0.0, 0.0, 1.0)
    assert p.seed is None and p.stop == () and p.stop_token_ids == () and p.logprobs is None
    assert p.skip_special_tokens and p.detokenize and not p.ignore_eos and not p.include_stop_str_in_output
    with pytest.raises(FrozenInstanceError):
        p.n = 2  # type: ignore[misc]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("temperature", v) for v in (-1, 999999, NAN, INF, -INF, "1", True, None, 10**400)],
        *[("top_p", v) for v in (-1, 1.5, NAN, "0.5")],
        *[("min_p", v) for v in (2, -0.1, NAN)],
        *[("typical_p", v) for v in (0, 1.1, NAN)],
        *[("top_k", v) for v in (-2, 1.5, "3", True)],
        *[("repetition_penalty", v) for v in (0, -1, 1e-40, 0.009, NAN, INF)],
        *[("presence_penalty", v) for v in (5, -2.1, NAN)],
        *[("frequency_penalty", v) for v in (2.1, NAN)],
        *[("n", v) for v in (0, -1, 5_000_000, 1.0, True)],
        *[("max_tokens", v) for v in (-1, 1.5, "5", True)],
        *[("min_tokens", v) for v in (-1, 17)],
        *[("logprobs", v) for v in (-1, 1.5, True)],
        *[("prompt_logprobs", v) for v in (-1, True)],
        *[("seed", v) for v in (1.5, "7", 1 << 64)],
        *[("stop", v) for v in ("", ["a", ""], [1], 5, {"a": 1}, ["x"] * 65, "x" * 2000, ["\ud800"])],
        *[("stop_token_ids", v) for v in ([-1], ["1"], [1.0], [True], 5, "12")],
        *[("allowed_token_ids", v) for v in ([], [-1])],
        *[("bad_words", v) for v in ([""], [3])],
        *[(name, v) for name in ("bad_words_token_ids", "dry_breaker_token_ids") for v in (5, [5], [[]], "12")],
        *[
            ("logit_bias", v)
            for v in ({"abc": 1}, {"5": 101}, {"5": NAN}, {"-1": 1}, {1.5: 1}, {True: 1}, [5], {5: "1"})
        ],
        *[("ignore_eos", v) for v in (1, "true")],
        *[("dry_multiplier", v) for v in (-1, NAN)],
        *[("dry_penalty_last_n", v) for v in (-2,)],
        *[("xtc_probability", v) for v in (1.5, -1)],
        ("structured_outputs", {"json": {}}),
        ("beam_width", 4),
        ("length_penalty", 1.0),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(RequestError, match=field) as caught:
        SamplingParams(**{field: value})
    assert caught.value.field == field
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 250


def test_the_message_states_the_allowed_range() -> None:
    with pytest.raises(RequestError, match=r"temperature must be a number between 0\.0 and 100\.0, got -1"):
        SamplingParams(temperature=-1)


def test_values_are_normalised() -> None:
    p = SamplingParams(stop="a", logit_bias={"5": -100, 6: 1}, stop_token_ids=np.array([3, 4]), top_k=np.int64(5))
    assert p.stop == ("a",)
    assert p.logit_bias == {5: -100.0, 6: 1.0}
    assert p.stop_token_ids == (3, 4)
    assert type(p.top_k) is int


@pytest.mark.parametrize("temperature", [0, 1e-5, 1e-12, 1e-38, 5e-324])
def test_tiny_temperatures_are_greedy(temperature: float) -> None:
    assert SamplingParams(temperature=temperature).greedy


def test_no_output_tokens_are_only_for_scoring() -> None:
    assert SamplingParams(max_tokens=0, prompt_logprobs=0).max_tokens == 0
    with pytest.raises(RequestError, match="max_tokens 0"):
        SamplingParams(max_tokens=0)


def test_edges_of_the_filters_are_allowed() -> None:
    SamplingParams(top_k=-1, top_p=0, min_p=1)
    SamplingParams(top_k=10**6, top_p=1e-9, max_tokens=10**12, seed=-1, stop=None)
