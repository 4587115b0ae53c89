"""Bad requests: the right status in OpenAI's error shape, soon, and the next request works."""

from __future__ import annotations

import json
import resource
import socket
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

pytestmark = pytest.mark.slow

COMPLETION = "/v1/completions"
CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]


def _error(response, status=400):
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"] and error["type"]
    return error


def _raw(server, body, path=COMPLETION, kind="application/json"):
    return server.post(path, content=body, headers={"content-type": kind})


@pytest.fixture(autouse=True)
def _still_serving(server):
    yield
    assert server.get("/health").status_code == 200
    assert server.complete(prompt="fine", max_tokens=1, ignore_eos=True)["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize(
    "body",
    [
        b"", b"   ", b"{not json", b"[]", b'"text"', b"null", b"[" * 100_000, b'{"prompt":' + b"[" * 100_000,
        b'{"prompt": "a", "prompt": "b"}', b'{"prompt": "\xc3\x28"}', b'{"prompt": "\\ud83d"}',
        b'{"model": "\\ud83d", "prompt": "x"}', b'{"\\ud83d": 1}', b'{"prompt": "x", "temperature": NaN}',
        b'{"prompt": "x", "temperature": -Infinity}', b'{"prompt": "x", "temperature": 1e400}',
        b'{"prompt": "x", "seed": ' + b"9" * 10_000 + b"}",
        b'{"prompt": "x", "logit_bias": ' + b'{"1":' * 80 + b"1" + b"}" * 80 + b"}",
    ],
)  # fmt: skip
def test_what_is_no_usable_json(server, body):
    start = time.monotonic()
    _error(_raw(server, body))
    _error(_raw(server, body, path=CHAT))
    assert time.monotonic() - start < 10


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": [' + b'"hello",' * 900_000 + b'"x"]}',
        b'{"prompt": [' + b"[]," * 2_000_000 + b"[1]]}",
        b'{"prompt": [' + b"1," * 4_000_000 + b"1]}",
        b'{"prompt": ' + b"[" * 8_000_000,
        b'{"prompt": "x", "logit_bias": {' + b",".join(b'"%d":1' % i for i in range(240_000)) + b"}}",
        b"{" + b",".join(b'"f%d":1' % i for i in range(240_000)) + b"}",
        b'{"prompt": "' + b"\\ud800" * 1_000_000 + b'"}',
        b'{"prompt": "x", "stop": [' + b",".join([b'"ab"'] * 240_000) + b"]}",
    ],
    ids=lambda body: body[:30].decode(),
)
def test_monstrous_bodies_hold_up_nobody(server, body):
    """Refused soon; meanwhile others are served, and the memory that it took stays bounded."""
    before = _rss_bytes(server.process.pid)
    statuses = []
    thread = threading.Thread(target=lambda: statuses.append(_raw(server, body).status_code))
    thread.start()
    slowest = 0.0
    while thread.is_alive():
        start = time.monotonic()
        httpx.get(server.url + "/health", timeout=30)
        slowest = max(slowest, time.monotonic() - start)
    assert statuses[0] in (400, 413)
    assert slowest < 5  # far above what it takes: this machine may be busy
    assert _rss_bytes(server.process.pid) - before < 80 << 20


def _rss_bytes(pid):
    if sys.platform != "linux":
        return 0
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_other_content_types(server, kind):
    assert "application/json" in _error(_raw(server, b'{"prompt": "x"}', kind=kind))["message"]


COMPLETION_FAULTS = [
    ({"prompt": "x", "max_tokens": "12"}, "max_tokens"),
    ({"prompt": "x", "max_tokens": 1.5}, "max_tokens"),
    ({"prompt": "x", "max_tokens": 0}, "max_tokens"),
    ({"prompt": "x", "max_tokens": -1}, "max_tokens"),
    ({"prompt": "x", "max_tokens": 10**12}, "max_tokens"),
    ({"prompt": "x", "n": 5_000_000}, "n"),
    ({"prompt": "x", "n": 0}, "n"),
    ({"prompt": "x", "n": True}, "n"),
    ({"prompt": "x", "best_of": 10**9}, "best_of"),
    ({"prompt": "x", "suffix": "y"}, "suffix"),
    ({"prompt": "x", "logprobs": 10**9}, "logprobs"),
    ({"prompt": "x", "logprobs": -1}, "logprobs"),
    ({"prompt": "x", "logprobs": True}, "logprobs"),
    ({"prompt": "x", "temperature": -1}, "temperature"),
    ({"prompt": "x", "temperature": 999_999}, "temperature"),
    ({"prompt": "x", "temperature": "hot"}, "temperature"),
    ({"prompt": "x", "top_p": -1}, "top_p"),
    ({"prompt": "x", "top_p": 1.5}, "top_p"),
    ({"prompt": "x", "min_p": 2}, "min_p"),
    ({"prompt": "x", "repetition_penalty": 0}, "repetition_penalty"),
    ({"prompt": "x", "repetition_penalty": -1}, "repetition_penalty"),
    ({"prompt": "x", "presence_penalty": 5}, "presence_penalty"),
    ({"prompt": "x", "stop": ""}, "stop"),
    ({"prompt": "x", "stop": ["a", ""]}, "stop"),
    ({"prompt": "x", "stop": 5}, "stop"),
    ({"prompt": "x", "stop": ["ab"] * 100_000}, "stop"),
    ({"prompt": "x", "logit_bias": {"191222": -100, "5": 5}}, "logit_bias"),
    ({"prompt": "x", "logit_bias": {"abc": 1}}, "logit_bias"),
    ({"prompt": "x", "logit_bias": {"5": 101}}, "logit_bias"),
    ({"prompt": "x", "stop_token_ids": [-1], "min_tokens": 1}, "stop_token_ids"),
    ({"prompt": "x", "stop_token_ids": [300], "min_tokens": 1}, "stop_token_ids"),
    ({"prompt": [262]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": [""]}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({}, "prompt"),
    ({"prompt": ["a", [1]]}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": {"text": "x"}}, "prompt"),
    ({"prompt": ["a"] * 100_000}, "prompt"),
    ({"prompt": "x", "stream_options": {"nonsense": 1}}, "stream_options.nonsense"),
    ({"prompt": "x", "stream_options": {"include_usage": True}}, "stream_options"),
    ({"prompt": "x", "stream": False, "stream_options": {}}, "stream_options"),
    ({"prompt": "x", "temprature": 1}, "temprature"),
    ({"prompt": "x", "messages": USER}, "messages"),
    ({"prompt": "x", "response_format": {"type": "json_object"}}, "response_format"),
    ({"prompt": "x", "prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
]
CHAT_FAULTS = [
    ({"messages": []}, "messages"),
    ({}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [None]}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages"),
    ({"messages": [{"role": "user", "content": None}]}, "messages"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": "x", "mood": 1}]}, "messages[0].mood"),
    ({"messages": USER * 10_000}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
     "messages[0].content"),
    ({"messages": USER, "top_logprobs": 1}, "top_logprobs"),
    ({"messages": USER, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"messages": USER, "logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    ({"messages": USER, "logprobs": 5}, "logprobs"),
    ({"messages": USER, "tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ({"messages": USER, "tool_choice": "auto"}, "tool_choice"),
    ({"messages": USER, "parallel_tool_calls": True}, "parallel_tool_calls"),
    ({"messages": USER, "response_format": {"type": "json_schema"}}, "response_format"),
    ({"messages": USER, "reasoning_effort": "low"}, "reasoning_effort"),
    ({"messages": USER, "continue_final_message": True}, "continue_final_message"),
    ({"messages": USER, "echo": True}, "echo"),
    ({"messages": USER, "prompt": "x"}, "prompt"),
    ({"messages": USER, "max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
    ({"messages": USER, "max_completion_tokens": -6}, "max_completion_tokens"),
    *(
        ({"messages": USER, "chat_template_kwargs": {name: 1}}, "chat_template_kwargs")
        for name in ("messages", "self", "add_generation_prompt")
    ),
]  # fmt: skip


@pytest.mark.parametrize("body, field", COMPLETION_FAULTS, ids=lambda v: json.dumps(v)[:50])
def test_faults_of_a_completion_name_the_field(server, body, field):
    error = _error(server.post(COMPLETION, body))
    assert error["param"] == field and error["type"] == "invalid_request_error"


@pytest.mark.parametrize("body, field", CHAT_FAULTS, ids=lambda v: json.dumps(v)[:50])
def test_faults_of_a_chat_name_the_field(server, body, field):
    assert _error(server.post(CHAT, body))["param"] == field


@pytest.mark.parametrize(
    "extra",
    [
        {"user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "stream_options": None},
        {"response_format": {"type": "text"}, "tool_choice": "none", "tools": None, "modalities": ["text"]},
        {"stop": None, "temperature": None, "max_tokens": None, "logit_bias": None, "n": None},
        {"temperature": 1e-38, "logit_bias": {"5": -100}},
        {"temperature": 5e-324, "top_k": 10**6, "top_p": 0, "min_p": 1},
    ],
)
def test_harmless_fields_are_accepted(server, extra):
    response = server.post(CHAT, {"messages": USER, "max_completion_tokens": 3, **extra})
    assert response.status_code == 200, response.text


def test_a_prompt_beyond_the_context_gets_both_numbers(server):
    message = _error(server.post(COMPLETION, {"prompt": "x" * 9000}))["message"]
    assert "8192" in message and "9000" in message
    message = _error(server.post(COMPLETION, {"prompt": "x" * 8000, "max_tokens": 193}))["message"]
    assert "8192" in message and "8000" in message and "193" in message
    assert _error(server.post(COMPLETION, {"prompt": "x" * 8192, "max_tokens": None}))["param"] == "prompt"


def test_a_prompt_far_beyond_the_context_is_refused_soon(server):
    text = "a b " * 2_000_000
    for path, body in ((COMPLETION, {"prompt": text}), (CHAT, {"messages": [{"role": "user", "content": text}]})):
        error = _error(server.post(path, body))
        assert "8192" in error["message"] and "at least" in error["message"]
        assert error["code"] == "context_length_exceeded"
        assert error["param"] == ("prompt" if path == COMPLETION else "messages")


@pytest.mark.parametrize("name", ["self", "messages", "add_generation_prompt"])
def test_tokenize_refuses_reserved_names_too(server, name):
    error = _error(server.post("/tokenize", {"messages": USER, "chat_template_kwargs": {name: 1}}))
    assert error["param"] == "chat_template_kwargs" and name in error["message"]


def test_a_large_body_is_refused_before_it_is_read(server):
    _error(_raw(server, b'{"prompt": "' + b"x" * (9 << 20) + b'"}'), 413)
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        head = f"POST {COMPLETION} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        connection.sendall(head.encode() + b"Content-Length: 200000000\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 413")


def test_a_body_that_does_not_come_holds_up_nobody(server):
    head = f"POST {COMPLETION} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += "Content-Length: 50\r\n\r\n{"
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(head.encode())
        assert server.complete(prompt="x", max_tokens=1, ignore_eos=True)


def test_unknown_models_get_the_list(server):
    error = _error(server.post(COMPLETION, {"model": "gpt", "prompt": "x"}), 404)
    assert error["param"] == "model" and error["code"] == "model_not_found" and "tiny" in error["message"]


def test_unknown_paths_and_methods(server):
    _error(server.get("/v1/nothing"), 404)
    _error(server.get("/../../etc/passwd"), 404)
    _error(server.get(COMPLETION), 405)


def test_no_fault_disturbs_a_running_stream(server):
    fields = {"prompt": "steady", "temperature": 0, "max_tokens": 40, "ignore_eos": True}
    alone = server.complete(**fields)["choices"][0]["text"]
    with server.client.stream("POST", COMPLETION, json={**fields, "stream": True}) as response:
        lines = response.iter_lines()
        first = next(lines)
        for body, _ in COMPLETION_FAULTS[:20]:
            _error(server.post(COMPLETION, body))
        data = [line.removeprefix("data: ") for line in [first, *lines] if line]
    text = "".join(json.loads(item)["choices"][0]["text"] for item in data if item != "[DONE]")
    assert text == alone
