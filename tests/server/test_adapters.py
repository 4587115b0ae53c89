"""Adapters over HTTP: an adapter is a model of its own name."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import plait
from tests.adapters import write_adapter
from tests.server.running import Server, running


@pytest.fixture(scope="module")
def adapted(model_dir, tmp_path_factory) -> Iterator[Server]:
    decoder, folder = plait.load(model_dir, "fp32"), tmp_path_factory.mktemp("adapters")
    flags: list[str] = []
    for i, name in enumerate(("first", "second")):
        flags += ["--adapter", f"{name}={write_adapter(folder / name, decoder, seed=i)}"]
    names = ["--served-model-name", "tiny", "--served-model-name", "alias"]
    with running(str(model_dir), *names, "--dtype", "fp32", *flags) as server:
        yield server


def complete(server: Server, model: str | None, prompt: str = "Once upon a time " * 8) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    response = server.client.post("/v1/completions", json=body if model is None else {**body, "model": model})
    assert response.status_code == 200, response.text
    return response.json()


def test_models_lists_adapters_with_their_parent(adapted: Server) -> None:
    listed = {m["id"]: m for m in adapted.client.get("/v1/models").json()["data"]}
    assert list(listed) == ["tiny", "alias", "first", "second"]
    assert [m["parent"] for m in listed.values()] == [None, None, "tiny", "tiny"]
    assert adapted.client.get("/v1/models/second").json() == listed["second"]
    assert str(listed["first"]).count("/") == 0  # no path of this machine
    assert "adapter first: " in adapted.output


def test_the_name_chooses_the_adapter_and_prefixes_stay_apart(adapted: Server) -> None:
    names = ["tiny", "first", "second", None, "alias"]
    answers = [complete(adapted, name) for name in names]
    texts = [a["choices"][0]["text"] for a in answers]
    assert [a["model"] for a in answers] == ["tiny", "first", "second", "tiny", "tiny"]
    assert texts[0] == texts[3] == texts[4] and len(set(texts)) == 3
    cached = [a["usage"]["prompt_tokens_details"]["cached_tokens"] for a in answers]
    assert cached[:3] == [0, 0, 0] and cached[3] == cached[4] > 0
    again = complete(adapted, "second")
    assert again["choices"][0]["text"] == texts[2]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == cached[3]
    # All at once: the same texts.
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(lambda name: complete(adapted, name)["choices"][0]["text"], names[:3] * 4))
    assert found == texts[:3] * 4


def test_chat_streams_with_an_adapter(adapted: Server) -> None:
    import openai

    client = openai.OpenAI(base_url=f"{adapted.url}/v1", api_key="none")
    texts = {}
    for name in ("tiny", "first"):
        chunks = list(
            client.chat.completions.create(
                model=name, messages=[{"role": "user", "content": "hi"}], stream=True, max_tokens=12, temperature=0
            )
        )
        assert {chunk.model for chunk in chunks} == {name}
        texts[name] = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert texts["tiny"] != texts["first"]


def test_an_unknown_name_is_404_with_all_names(adapted: Server) -> None:
    response = adapted.client.post("/v1/completions", json={"prompt": "x", "model": "third"})
    assert response.status_code == 404
    assert response.json()["error"]["message"].endswith("served: tiny, first, second")
    assert adapted.client.get("/v1/models/third").status_code == 404


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--adapter", "tiny=/nowhere", "--served-model-name", "tiny"], "the adapter tiny would have the model's name"),
        (["{model}", "--adapter", "x=/nowhere", "--served-model-name", "a", "--served-model-name", "b"], "2 models"),
        (["--adapter", "x=/nowhere"], "adapter /nowhere does not exist"),
    ],
)
def test_wrong_flags_are_one_line(model_dir, flags: list[str], said: str) -> None:
    server = Server(str(model_dir), *(flag.format(model=model_dir) for flag in flags))
    assert server.wait(60) == 2
    assert len(server.lines) == 1 and said in server.lines[0]
