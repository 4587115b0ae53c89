"""Parts of the server that need no running engine."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from importlib import resources

import pytest
from fastapi import Request

from plait.engine.token_output import TokenLogprobs
from plait.errors import EngineError, RequestError
from plait.server.app import health
from plait.server.body import MAX_DEPTH, parse_object
from plait.server.errors import ApiError, api_error
from plait.server.logprobs import CompletionLogprobs, chat_logprobs
from plait.server.params import chat_params, completion_params
from plait.server.prompts import check_messages, encode_prompt, split_prompts
from plait.server.protocol import ChatBody, CompletionBody
from plait.server.security import Keys
from plait.server.state import ServerState, Settings
from plait.text.tokenizer import load_tokenizer
from tests.tiny import END_OF_TEXT, write_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(directory)
    return load_tokenizer(directory)


def test_importing_the_server_needs_no_torch_and_the_command_no_fastapi():
    blocked = "import sys; sys.modules['torch'] = None; "
    everything = "app, run, call, metrics, protocol"
    for code in (
        f"from plait.server import {everything}; import plait.engine.client, plait.engine.process",
        "import plait.cli.serve; assert not {'fastapi', 'pydantic', 'uvicorn'} & set(sys.modules)",
    ):
        subprocess.run([sys.executable, "-c", blocked + code], check=True, env={"PYTHONPATH": ":".join(sys.path)})


def test_nested_json_up_to_the_limit_is_parsed():
    def nested(depth):
        return b'{"a":' * (depth - 1) + b"{}" + b"}" * (depth - 1)

    assert parse_object(nested(MAX_DEPTH))
    with pytest.raises(ApiError, match="nested"):
        parse_object(nested(MAX_DEPTH + 1))


def test_brackets_in_strings_are_no_nesting():
    assert parse_object(json.dumps({"prompt": "[" * 10_000}).encode())["prompt"][:2] == "[["


def test_a_pair_of_surrogates_is_a_character():
    assert parse_object(b'{"prompt": "\\ud83e\\udd8a"}') == {"prompt": "🦊"}


@pytest.mark.parametrize(
    "value, accepted",
    [
        ([b"Bearer key"], True), ([b"bearer key"], True), ([b"Bearer "], False), ([b"Bearer"], False), ([], False),
        ([b"Bearer key "], False), ([b"Bearer keykey"], False), ([b"Bearer ke"], False), ([b"\xff\xfe"], False),
        ([b"Bearer key", b"Bearer key"], False), ([b"Bearer other"], True), ([b"Basic key"], False),
    ],
)  # fmt: skip
def test_keys(value, accepted):
    assert Keys(["key", "other"]).accept(value) is accepted


def test_prompts_are_split_by_their_kind():
    assert split_prompts("a") == ["a"]
    assert split_prompts(["a", "b"]) == ["a", "b"]
    assert split_prompts([1, 2]) == [[1, 2]]
    assert split_prompts([[1], [2]]) == [[1], [2]]


@pytest.mark.parametrize("death, status", [(None, "unresponsive"), ("it was killed", "dead")])
def test_an_engine_that_does_not_answer_need_not_be_dead(death, status):
    class Client:
        def __init__(self):
            self.death = death

        async def check(self):
            raise EngineError("no answer")

    request = Request({"type": "http", "query_string": b"deep=1"})
    state = ServerState(Settings(), Client(), metrics=None)  # type: ignore[arg-type]
    state.phase = "ready"
    answer = asyncio.run(health(state, request))
    assert answer.status_code == 503 and json.loads(answer.body)["status"] == status


def test_an_empty_prompt_needs_a_start_token(tokenizer, tmp_path):
    with pytest.raises(RequestError, match="empty"):
        encode_prompt(tokenizer, "")
    write_tokenizer(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**settings, "add_bos_token": True}))
    assert encode_prompt(load_tokenizer(tmp_path), "").ids == [END_OF_TEXT]


def test_the_checkpoints_defaults_lie_between_the_bodys_and_our_own():
    defaults = {"temperature": 0.25, "top_k": 7}
    params = completion_params(CompletionBody.parse({"prompt": "x", "top_k": 3}), defaults)
    assert (params.temperature, params.top_k, params.top_p, params.max_tokens) == (0.25, 3, 1.0, 16)
    params = chat_params(ChatBody.parse({"messages": []}), {})
    assert params.max_tokens is None
    assert chat_params(ChatBody.parse({"max_completion_tokens": 4}), {"max_tokens": 9}).max_tokens == 4


def test_every_field_of_the_two_bodies_is_used():
    """A field that is declared but goes nowhere would be ignored silently."""
    from plait.engine.params import SamplingParams

    elsewhere = {"model", "stream", "stream_options", "cache_salt"}
    completion = {"prompt", "echo", "add_special_tokens"}
    chat = {"messages", "max_completion_tokens", "top_logprobs", "add_generation_prompt", "chat_template_kwargs"}
    assert set(CompletionBody.model_fields) - SamplingParams.names() == elsewhere | completion
    assert set(ChatBody.model_fields) - SamplingParams.names() == elsewhere | chat


def test_errors_name_the_field_of_the_body():
    error = api_error(RequestError("logprobs must be small", field="logprobs"), {"logprobs": "top_logprobs"})
    assert (error.status, error.param, error.message) == (400, "top_logprobs", "top_logprobs must be small")
    assert api_error(KeyError("secret")).status == 500 and "secret" not in api_error(KeyError("secret")).message


def test_messages_keep_what_templates_read():
    assert check_messages([{"role": "developer", "content": "x", "name": "n", "refusal": None}]) == [
        {"role": "system", "content": "x", "name": "n"}
    ]


def test_chat_logprobs_carry_raw_bytes(tokenizer):
    first = "é".encode()[0]
    entry = TokenLogprobs(first, -0.5, 1, [(first, -0.5), (65, -1.5), (66, float("-inf"))])
    (shown,) = chat_logprobs(tokenizer, [entry], top=3)
    assert shown["bytes"] == [0xC3] and shown["token"] == "\ufffd"
    assert [top["logprob"] for top in shown["top_logprobs"]] == [-0.5, -1.5, -9999.0]
    assert chat_logprobs(tokenizer, [entry], top=0)[0]["top_logprobs"] == []


def test_completion_logprobs_hide_what_the_text_leaves_out(tokenizer):
    ids = [65, END_OF_TEXT, 0xC3, 0xA9, 66]
    shape = CompletionLogprobs(tokenizer, 0, [], skip_special_tokens=True, offset=10)
    lists = shape.add(ids, [TokenLogprobs(i, -1.0, 1) for i in ids], hides_last=True)
    assert lists["tokens"] == ["A", "", "bytes:\\xc3", "bytes:\\xa9", ""]
    assert lists["text_offset"] == [10, 11, 11, 11, 12]


def test_the_chosen_token_is_listed_beside_the_best(tokenizer):
    shape = CompletionLogprobs(tokenizer, 2, [], skip_special_tokens=True)
    entry = TokenLogprobs(67, -3.0, 3, [(65, -0.5), (66, -1.0)])
    assert shape.add([67], [entry])["top_logprobs"] == [{"A": -0.5, "B": -1.0, "C": -3.0}]


def test_the_page_loads_nothing_from_elsewhere():
    folder = resources.files("plait.server") / "page"
    texts = {name: (folder / name).read_text(encoding="utf-8") for name in ("chat.html", "chat.css", "chat.js")}
    for name, text in texts.items():
        assert not re.search(r"(https?:)?//[\w.-]+\.\w", text), name
        assert "@import" not in text and "eval(" not in text and "innerHTML" not in text
    links = re.findall(r'(?:src|href)="([^"]*)"', texts["chat.html"])
    assert sorted(links) == ["chat.css", "chat.js", "data:,"]
    assert "<style" not in texts["chat.html"] and " style=" not in texts["chat.html"]
    # Every element that the script asks for exists.
    wanted = set(re.findall(r'\$\("([\w-]+)"\)', texts["chat.js"]))
    assert wanted <= set(re.findall(r'id="([\w-]+)"', texts["chat.html"]))
