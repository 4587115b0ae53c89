"""Keys, CORS, limits, and several models on one port."""

from __future__ import annotations

import socket
import threading

import httpx
import pytest

from tests.server.running import Server, running, wait_for
from tests.tiny import tiny_model_dir

pytestmark = pytest.mark.slow

BODY = {"model": "one", "prompt": "x", "max_tokens": 1}
LONG = {"model": "one", "prompt": "x", "max_tokens": 8000, "ignore_eos": True}


@pytest.fixture(scope="module")
def guarded(tmp_path_factory, model_dir):
    """Two models, two keys (one holds the word Bearer), one allowed origin, one place and one in the queue."""
    second = tiny_model_dir(tmp_path_factory.mktemp("second"), "qwen3", chat=False, bos_token_id=None)
    flags = ["--served-model-name", "one", "--served-model-name", "two", "--max-num-seqs", "1", "--max-queue", "1"]
    flags += ["--api-key", "first", "--api-key", "Bearer second", "--cors-origin", "https://good.example"]
    with running(str(model_dir), str(second), *flags, "--request-timeout", "2", "--log-json") as server:
        yield server


def _with(value):
    return {"headers": {"Authorization": value}}


GOOD = _with("Bearer first")


@pytest.mark.parametrize("value", ["Bearer first", "bearer first", "BEARER first", "Bearer Bearer second"])
def test_right_keys(guarded, value):
    assert guarded.post("/v1/completions", BODY, **_with(value)).status_code == 200


@pytest.mark.parametrize(
    "value",
    [
        "Bearer wrong", "Bearer firs", "Bearer first2", "Bearer FIRST", "Bearer  first", "Bearer", "first",
        "Basic first", "Bearer second", "Bearerfirst", "", "Bearer \xe9",
    ],
)  # fmt: skip
def test_wrong_keys(guarded, value):
    response = guarded.post("/v1/completions", BODY, headers={"Authorization": value.encode("latin-1")})
    assert response.status_code == 401
    assert response.json()["error"]["code"] == "invalid_api_key"
    assert "first" not in response.text and "second" not in response.text


def test_two_authorization_headers_are_no_key(guarded):
    headers = [("Authorization", "Bearer first"), ("Authorization", "Bearer first")]
    assert guarded.post("/v1/completions", BODY, headers=headers).status_code == 401


def test_only_health_and_the_page_are_open(guarded):
    for path in ("/health", "/", "/chat.js", "/chat.css"):
        assert guarded.get(path).status_code == 200, path
    for path in (
        "/v1/models", "/metrics", "/version", "/ready", "/docs", "/openapi.json", "/nothing", "/health?deep=1",
        "/health/", "/v1/models/one", "/%2e%2e/health",
    ):  # fmt: skip
        assert guarded.get(path).status_code == 401, path
    for path in ("/tokenize", "/detokenize", "/v1/chat/completions", "/", "/chat.js"):
        assert guarded.post(path, BODY).status_code == 401, path


def test_the_request_chooses_the_model(guarded):
    listed = guarded.get("/v1/models", **GOOD).json()["data"]
    assert [model["id"] for model in listed] == ["one", "two"]
    for name in ("one", "two"):
        answer = guarded.post("/v1/completions", {**BODY, "model": name}, **GOOD).json()
        assert answer["model"] == name
    texts = {
        guarded.post("/v1/completions", {**BODY, "model": n, "max_tokens": 20, "temperature": 0}, **GOOD).text
        for n in ("one", "two")
    }
    assert len(texts) == 2
    missing = guarded.post("/v1/completions", {"prompt": "x"}, **GOOD)
    assert missing.status_code == 400 and missing.json()["error"]["param"] == "model"
    unknown = guarded.post("/v1/completions", {**BODY, "model": "three"}, **GOOD)
    assert unknown.status_code == 404 and "one, two" in unknown.json()["error"]["message"]


def test_a_model_without_template_refuses_chat(guarded):
    body = {"model": "two", "messages": [{"role": "user", "content": "hi"}]}
    response = guarded.post("/v1/chat/completions", body, **GOOD)
    assert response.status_code == 400 and "template" in response.json()["error"]["message"]


def test_a_full_queue_says_when_to_come_back(guarded):
    answers = []

    def send():
        answers.append(guarded.post("/v1/completions", LONG, **GOOD))

    threads = [threading.Thread(target=send) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    refused = [answer for answer in answers if answer.status_code == 429]
    assert len(refused) == 2
    assert all(int(answer.headers["retry-after"]) > 0 for answer in refused)
    # The other two ran, or waited, until the deadline.
    assert sorted(answer.status_code for answer in answers) == [429, 429, 504, 504]
    too_many = guarded.post("/v1/completions", {**BODY, "n": 3}, **GOOD)
    assert too_many.status_code == 400 and too_many.json()["error"]["param"] == "n"


def test_a_stream_beyond_its_deadline_ends_with_an_error(guarded):
    response = guarded.post("/v1/completions", {**LONG, "stream": True}, **GOOD)
    assert response.status_code == 200
    events = response.text.strip().split("\n\n")
    assert '"code":"timeout"' in events[-2] and events[-1] == "data: [DONE]"


def test_json_log_lines(guarded):
    import json

    guarded.post("/v1/completions", BODY, **GOOD)
    wait_for(lambda: any(line.startswith("{") and '"finish": "' in line for line in guarded.lines), 5)
    records = [json.loads(line) for line in guarded.lines if line.startswith("{")]
    assert all({"time", "method", "path", "status", "seconds"} <= set(record) for record in records)


def _cors_headers(response):
    return {name: value for name, value in response.headers.items() if name.startswith("access-control")}


def _preflight(server, origin):
    headers = {"Origin": origin, "Access-Control-Request-Method": "POST"}
    headers["Access-Control-Request-Headers"] = "content-type,authorization"
    return server.client.options("/v1/completions", headers=headers)


@pytest.mark.parametrize("origin", ["https://evil.example", "http://localhost:3000", "null"])
def test_no_origin_is_allowed_by_default(server, origin):
    assert _cors_headers(_preflight(server, origin)) == {}
    assert _preflight(server, origin).status_code == 405
    response = server.post("/v1/completions", {"prompt": "x", "max_tokens": 1}, headers={"Origin": origin})
    assert _cors_headers(response) == {}


def test_a_listed_origin_is_allowed_and_no_other(guarded):
    allowed = _preflight(guarded, "https://good.example")
    assert allowed.status_code == 200
    headers = _cors_headers(allowed)
    assert headers["access-control-allow-origin"] == "https://good.example"
    assert "access-control-allow-credentials" not in headers
    assert "access-control-allow-origin" not in _cors_headers(_preflight(guarded, "https://evil.example"))
    origin = {"Origin": "https://good.example"}
    answer = guarded.post("/v1/completions", BODY, headers={"Authorization": "Bearer first", **origin})
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == "https://good.example"
    refused = guarded.post("/v1/completions", BODY, headers=origin)
    assert refused.status_code == 401 and refused.headers["access-control-allow-origin"] == "https://good.example"


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:{port}", "127.0.0.1:{port}", "[::1]:{port}", "localhost.:80"])
def test_a_loopback_server_answers_to_its_own_names(server, host):
    answer = server.get("/v1/models", headers={"Host": host.format(port=server.port)})
    assert answer.status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "localhost.evil", "[::2]"]
)
def test_a_loopback_server_refuses_other_names(server, host):
    """A site whose name is made to resolve to this machine is of the same origin as itself."""
    for path in ("/v1/models", "/", "/health"):
        answer = server.get(path, headers={"Host": host})
        assert answer.status_code == 403
        assert answer.json()["error"]["code"] == "host_not_allowed" and host in answer.json()["error"]["message"]
    assert server.post("/v1/completions", BODY, headers={"Host": host}).status_code == 403


def test_a_request_without_host_is_served(server):
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        connection.sendall(b"GET /v1/models HTTP/1.0\r\n\r\n")
        assert b" 200 " in connection.recv(4096).splitlines()[0]


def test_with_a_key_any_name_will_do(guarded):
    assert guarded.get("/v1/models", headers={"Host": "my.example", "Authorization": "Bearer first"}).status_code == 200


def test_an_open_server_without_key_is_warned_about(model_dir):
    with running(str(model_dir), "--host", "0.0.0.0") as server:
        assert "warning: anybody" in server.output
        answer = httpx.get(f"http://127.0.0.1:{server.port}/v1/models", headers={"Host": "my.example"})
        assert answer.status_code == 200


def test_the_key_may_come_from_the_environment(model_dir):
    with running(str(model_dir), PLAIT_API_KEY="from-environment") as server:
        assert server.get("/v1/models").status_code == 401
        assert server.get("/v1/models", **_with("Bearer from-environment")).status_code == 200


@pytest.mark.parametrize(
    "flags",
    [
        ["--api-key", ""], ["--port", "70000"], ["--cors-origin", "good.example"], ["--max-body-size", "much"],
        ["--served-model-name", "a", "--served-model-name", "a"], ["--request-timeout", "0"], ["--adapter", "x"],
        ["--max-num-seqs", "600", "--max-num-batched-tokens", "500"], ["--kv-dtype", "q8_0"],
    ],
)  # fmt: skip
def test_wrong_flags_are_one_line(model_dir, flags):
    server = Server(str(model_dir), *flags)
    assert server.wait(60) == 2
    assert len(server.lines) == 1 and server.lines[0].startswith("plait: error: ")
