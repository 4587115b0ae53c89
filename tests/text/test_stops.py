from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.errors import RequestError
from plait.text.stops import StopMatcher


def run(stops: list[str] | str | None, pieces: list[str], include_stop: bool = False) -> tuple[str, str | None]:
    matcher = StopMatcher(stops, include_stop)
    out = []
    for piece in pieces:
        emitted, hit = matcher.push(piece)
        out.append(emitted)
        if hit is not None:
            return "".join(out), hit
    return "".join(out) + matcher.flush(), None


def reference(stops: list[str], text: str, include_stop: bool) -> tuple[str, str | None]:
    """Reads the text character by character and cuts at the first place where a stop is complete."""
    for end in range(1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end if include_stop else end - len(stop)], stop
    return text, None


def test_a_stop_spread_over_tokens_is_found_and_none_of_it_is_given_out() -> None:
    assert run(["own fox"], ["The", " quick", " br", "own", " fox", " jumps"]) == ("The quick br", "own fox")


def test_only_what_may_become_a_stop_is_held_back() -> None:
    matcher = StopMatcher(["\nUser:"])
    assert matcher.push("Hello") == ("Hello", None)
    assert matcher.push("!\nUs") == ("!", None)
    assert matcher.push("ually") == ("\nUsually", None)
    assert matcher.push("\n") == ("", None)
    assert matcher.flush() == "\n"


def test_of_two_stops_the_one_that_is_complete_first_wins() -> None:
    assert run(["abcd", "bc"], ["xabcd"]) == ("xa", "bc")


def test_a_stop_that_is_the_beginning_of_another_wins() -> None:
    assert run(["stop", "stop here"], ["do st", "op here"]) == ("do ", "stop")


def test_of_stops_that_end_together_the_longest_wins() -> None:
    assert run(["lo", "hello"], ["oh hello"]) == ("oh ", "hello")


def test_characters_of_several_bytes_match_too() -> None:
    assert run(["của"], ["ngôn ngữ c", "ủ", "a tôi"]) == ("ngôn ngữ ", "của")


def test_the_stop_is_included_on_request() -> None:
    assert run(["fox"], ["a f", "ox jumps"], include_stop=True) == ("a fox", "fox")


def test_nothing_comes_out_after_a_hit() -> None:
    matcher = StopMatcher("x")
    assert matcher.push("axb") == ("a", "x")
    assert matcher.push("more") == ("", "x")
    assert matcher.flush() == ""


@pytest.mark.parametrize("stops", [None, []])
def test_without_stops_all_text_passes(stops: list[str] | None) -> None:
    assert run(stops, ["a", "b"]) == ("ab", None)


@pytest.mark.parametrize("stops", ["", ["a", ""]])
def test_an_empty_stop_is_refused(stops: list[str] | str) -> None:
    with pytest.raises(RequestError) as error:
        StopMatcher(stops)
    assert error.value.field == "stop"


@given(
    stops=st.lists(st.text("abü", min_size=1, max_size=5), min_size=1, max_size=4),
    pieces=st.lists(st.text("abü ", max_size=6), max_size=12),
    include_stop=st.booleans(),
)
def test_streaming_cuts_where_reading_the_whole_text_does(
    stops: list[str], pieces: list[str], include_stop: bool
) -> None:
    assert run(stops, pieces, include_stop) == reference(stops, "".join(pieces), include_stop)


@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4),
    pieces=st.lists(st.text("ab ", max_size=6), max_size=12),
)
def test_all_text_that_cannot_become_a_stop_is_out_at_once(stops: list[str], pieces: list[str]) -> None:
    matcher, seen, out = StopMatcher(stops), "", ""
    for piece in pieces:
        emitted, hit = matcher.push(piece)
        if hit is not None:
            return
        seen, out = seen + piece, out + emitted
        held = seen[len(out) :]
        assert seen.startswith(out)
        assert not held or any(stop.startswith(held) and stop != held for stop in stops)
