"""A client that goes away: its request is aborted and its blocks are free, whatever it was doing."""

from __future__ import annotations

import time
from contextlib import ExitStack

import pytest

from tests.server.running import running, wait_for

pytestmark = pytest.mark.slow

PATH = "/v1/completions"
LONG = {"prompt": "x", "max_tokens": 8000, "ignore_eos": True}


@pytest.fixture(scope="module")
def small(model_dir):
    """Two places, and steps of few tokens, so that requests wait and prompts take many steps."""
    with running(str(model_dir), "--max-num-seqs", "2", "--max-num-batched-tokens", "16") as server:
        yield server


def _wait_until_running(server, count=1):
    wait_for(lambda: server.metric("num_requests_running") == count, 20)


def _wait_for_bytes(connection):
    assert connection.recv(1)


def _assert_all_ended(server):
    """Nothing is held, and no token is computed any more."""
    server.wait_until_idle()
    steps = server.metric("engine_steps_total")
    time.sleep(0.2)
    assert server.metric("engine_steps_total") == steps
    assert server.metric("num_requests_waiting") == 0
    answer = server.complete(prompt="next", max_tokens=2, ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize("stream", [True, False])
def test_before_the_first_token(small, stream):
    for _ in range(5):
        with small.rude_request(PATH, **LONG, stream=stream):
            pass
    _assert_all_ended(small)


def test_in_the_middle_of_a_stream(small):
    with small.rude_request(PATH, **LONG, stream=True) as connection:
        _wait_for_bytes(connection)
        _wait_until_running(small)
    _assert_all_ended(small)


def test_while_waiting_for_a_whole_answer(small):
    with small.rude_request(PATH, **LONG):
        _wait_until_running(small)
    _assert_all_ended(small)


@pytest.mark.parametrize("stream", [True, False])
def test_with_several_choices(small, stream):
    with small.rude_request(PATH, **LONG, n=4, stream=stream):
        _wait_until_running(small, 2)
    _assert_all_ended(small)


@pytest.mark.parametrize("stream", [True, False])
def test_while_queued(small, stream):
    with ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(small.rude_request(PATH, **LONG))
        _wait_until_running(small, 2)
        with small.rude_request(PATH, **LONG, stream=stream):
            wait_for(lambda: small.metric("num_requests_waiting") == 1, 20)
        wait_for(lambda: small.metric("num_requests_waiting") == 0, 5)
        assert small.metric("num_requests_running") == 2
    _assert_all_ended(small)


def test_during_a_long_prompt(small):
    before = small.metric("generation_tokens_total")
    with small.rude_request(PATH, prompt="y" * 8000, max_tokens=100, stream=True):
        _wait_until_running(small)
    _assert_all_ended(small)
    assert small.metric("generation_tokens_total") <= before + 2  # those of the next request


def test_a_normal_end_counts_as_no_abort(small):
    small.complete(prompt="x", max_tokens=3, ignore_eos=True)
    small.stream(PATH, prompt="x", max_tokens=3, ignore_eos=True)
    wait_for(lambda: "finish=length" in small.output, 5)
    assert 'finished_reason="abort"' not in small.get("/metrics").text
