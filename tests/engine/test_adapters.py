"""Adapters in the engine: chosen per request, two and none in one batch, and prefixes that are never shared wrongly."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import plait
from plait.engine.adapters import adapter_of_each, check_adapters, parse_adapter
from plait.engine.llm import LLM
from plait.engine.params import SamplingParams
from plait.errors import ConfigError, RequestError, UsageError, WeightError
from plait.kernels.native import native_library
from plait.text.tokenizer import load_tokenizer
from plait.weights.merge import merge_adapter
from tests.adapters import write_adapter
from tests.tiny import tiny_model_dir

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPTS = ["alpha", "beta gamma " * 4, "delta", "epsilon zeta"]
CHOSEN = ["one", None, "two", "one"]
PLANS = [
    pytest.param("native", marks=pytest.mark.skipif(native_library() is None, reason="no native library")),
    "reference",
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("model"), "qwen2")


@pytest.fixture(scope="module")
def paths(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two adapters, and a copy of the first under another name."""
    decoder, folder = plait.load(model, dtype="fp32"), tmp_path_factory.mktemp("adapters")
    one = write_adapter(folder / "one", decoder, rank=4, seed=1)
    two = write_adapter(folder / "two", decoder, rank=6, seed=2, endings=("q_proj", "v_proj", "gate_proj"))
    return {"one": one, "two": two, "same": Path(shutil.copytree(one, folder / "same"))}


def make(model: Any, paths: dict[str, Path], plan: str = "auto", **options: Any) -> LLM:
    return LLM(model, adapters=paths, plan=plan, dtype="fp32", kv_memory="8MiB", threads=1, **options)


@pytest.fixture(scope="module", params=PLANS)
def llm(request: pytest.FixtureRequest, model: Path, paths: dict[str, Path]) -> LLM:
    return make(model, paths, request.param)


def texts(outputs: Any) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="module")
def merged(model: Path, paths: dict[str, Path]) -> dict[str | None, list[list[int]]]:
    """What each model writes when the adapter is merged into it."""
    found: dict[str | None, list[list[int]]] = {}
    for name in (None, "one", "two"):
        decoder = plait.load(model, dtype="fp32")
        if name is not None:
            merge_adapter(decoder, paths[name])
        alone = LLM(decoder, plan="reference", kv_memory="8MiB", tokenizer=load_tokenizer(model))
        found[name] = texts(alone.generate(PROMPTS, GREEDY))
    return found


def test_two_adapters_and_none_in_one_batch_write_what_the_merged_models_write(llm: LLM, merged: Any) -> None:
    together = texts(llm.generate(PROMPTS, GREEDY, adapter=CHOSEN))
    assert together == [merged[name][i] for i, name in enumerate(CHOSEN)]
    assert len({tuple(map(tuple, written)) for written in merged.values()}) == 3
    assert texts(llm.generate(PROMPTS, GREEDY, adapter="two")) == merged["two"]
    assert texts(llm.generate(PROMPTS, GREEDY)) == merged[None]


def test_a_stream_and_a_conversation_take_an_adapter(llm: LLM, merged: Any) -> None:
    ids = [token for delta in llm.stream(PROMPTS[0], GREEDY, adapter="one") for token in delta.token_ids]
    assert ids == merged["one"][0]
    messages = [{"role": "user", "content": "hello"}]
    answers = [texts(llm.chat(messages, GREEDY, adapter=name))[0] for name in (None, "one", "same", "two")]
    assert answers[1] == answers[2] and len({tuple(a) for a in answers}) == 3


def test_prefixes_are_shared_by_equal_adapters_only(model: Path, paths: dict[str, Path]) -> None:
    llm = make(model, paths)
    prompt = "a prompt that is long enough to fill several blocks of the cache " * 2

    def cached(adapter: str | None) -> int:
        return llm.generate(prompt, GREEDY, adapter=adapter)[0].num_cached_tokens

    assert cached("one") == 0
    assert cached("two") == 0
    assert cached(None) == 0
    first = cached("one")
    assert first > 64
    assert cached("same") == first  # another name, the same numbers
    assert cached("two") == first and cached(None) == first
    llm.engine.check_integrity()


def test_forks_and_preempted_requests_keep_their_adapter(model: Path, paths: dict[str, Path]) -> None:
    params = SamplingParams(temperature=1.0, n=3, seed=5, max_tokens=40, ignore_eos=True)

    block = make(model, paths).bundle.report["kv_block_bytes"]
    (roomy, none), (tight, some) = (run_in(model, paths, params, block * count) for count in (400, 22))
    assert none == 0 and some > 0
    assert tight == roomy


def run_in(model: Path, paths: dict[str, Path], params: SamplingParams, kv_memory: int) -> tuple[Any, int]:
    llm = LLM(model, adapters=paths, dtype="fp32", kv_memory=kv_memory, threads=1, max_model_len=96, max_num_seqs=12)
    outputs = llm.generate(PROMPTS, params, adapter=CHOSEN)
    llm.engine.check_integrity()
    return [[list(c.token_ids) for c in o.outputs] for o in outputs], llm.engine.stats().preemptions


def test_scores_logprobs_and_embeddings_are_of_the_adapted_model(llm: LLM, model: Path, paths: dict[str, Path]) -> None:
    decoder = plait.load(model, dtype="fp32")
    merge_adapter(decoder, paths["one"])
    alone = LLM(decoder, plan="reference", kv_memory="8MiB", tokenizer=load_tokenizer(model))
    scores = llm.score(PROMPTS, adapter=["one"] * 4)
    for found, expected in zip(scores, alone.score(PROMPTS), strict=True):
        assert found[1:] == pytest.approx(expected[1:], abs=2e-4)
    assert scores[0][1:] != pytest.approx(llm.score(PROMPTS)[0][1:], abs=1e-2)
    for pooling in ("last", "mean"):
        found, expected, plain = (
            torch.tensor([r.outputs.embedding for r in results])
            for results in (
                llm.embed(PROMPTS, pooling=pooling, adapter="one"),
                alone.embed(PROMPTS, pooling=pooling),
                llm.embed(PROMPTS, pooling=pooling),
            )
        )
        assert (found - expected).abs().max() < 2e-4 < (found - plain).abs().max() / 10


@pytest.mark.skipif(native_library() is None, reason="no native library")
def test_steps_in_a_row_and_single_steps_write_the_same(model: Path, paths: dict[str, Path]) -> None:
    written = [
        texts(make(model, paths, run_ahead_s=seconds).generate(PROMPTS, GREEDY, adapter=CHOSEN)) for seconds in (0, 1)
    ]
    assert written[0] == written[1]


def test_a_live_decoder_with_adapters_follows_its_weights(model: Path, paths: dict[str, Path]) -> None:
    for plan in ("native", "reference") if native_library() else ("reference",):
        decoder = plait.load(model, dtype="fp32")
        llm = make(decoder, paths, plan, tokenizer=load_tokenizer(model))
        before = texts(llm.generate(PROMPTS, GREEDY, adapter=CHOSEN))
        with torch.no_grad():
            decoder.model.layers[0].mlp.down_proj.weight.mul_(-1.0)
        llm.refresh()
        after = texts(llm.generate(PROMPTS, GREEDY, adapter=CHOSEN))
        with torch.no_grad():
            decoder.model.layers[0].mlp.down_proj.weight.mul_(-1.0)
        llm.refresh()
        assert texts(llm.generate(PROMPTS, GREEDY, adapter=CHOSEN)) == before != after


def test_what_is_loaded_is_reported(llm: LLM) -> None:
    adapters = llm.bundle.adapters
    assert list(adapters) == ["one", "two", "same"]
    assert (adapters["two"].rank, adapters["two"].modules) == (6, 9)
    assert adapters["one"].content_hash == adapters["same"].content_hash != adapters["two"].content_hash
    assert llm.bundle.report["adapter_bytes"] >= sum(a.nbytes for a in adapters.values())
    assert any(line.startswith("adapter two: ") and "rank 6, 9 modules" in line for line in llm.bundle.lines)


def test_an_adapter_that_cannot_be_meant_is_refused(llm: LLM) -> None:
    wrong: list[Any] = ["three", "", ["one"], ["one"] * 3, [1, None, None, None], 7]
    for adapter in wrong:
        with pytest.raises(RequestError) as error:
            llm.generate(PROMPTS, GREEDY, adapter=adapter)
        assert error.value.field == "adapter"
    assert texts(llm.generate(PROMPTS[:1], GREEDY, adapter="one"))  # nothing else has suffered
    with pytest.raises(RequestError, match="adapter"):
        next(iter(llm.stream("x", GREEDY, adapter=["one"])))  # type: ignore[arg-type]


def test_without_adapters_none_can_be_asked_for(model: Path) -> None:
    llm = LLM(model, dtype="fp32", kv_memory="8MiB", threads=1)
    with pytest.raises(RequestError, match="none is loaded"):
        llm.generate("x", adapter="one")


def test_one_bad_adapter_is_one_line_before_or_after_the_model(
    model: Path, paths: dict[str, Path], tmp_path: Path
) -> None:
    broken = shutil.copytree(paths["one"], tmp_path / "broken")
    (broken / "adapter_config.json").write_text('{"peft_type": "LORA", "target_modules": ["q_proj"], "use_dora": true}')
    with pytest.raises(ConfigError, match="DoRA"):
        make("/no/model", {"one": paths["one"], "broken": broken})  # read before the model
    other = plait.from_config({"model_type": "llama", "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 3,
                               "num_attention_heads": 2, "intermediate_size": 48})  # fmt: skip
    wrong = write_adapter(tmp_path / "wrong", other)
    with pytest.raises(WeightError, match="adapter wrong: .*shape"):
        make(model, {"one": paths["one"], "wrong": wrong})
    for adapters in ({"": paths["one"]}, {" x": paths["one"]}, {"a\nb": paths["one"]}, {"x": 7}, ["one"]):
        with pytest.raises(UsageError):
            check_adapters(adapters)
    with pytest.raises(UsageError, match="at most 256"):
        check_adapters({f"a{i}": paths["one"] for i in range(300)})


def test_names_on_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "a=b").mkdir()
    assert parse_adapter("x=/some/where") == ("x", "/some/where")
    assert parse_adapter("/some/where/") == ("where", "/some/where/")
    assert parse_adapter("x=/a=b") == ("x", "/a=b")
    assert parse_adapter(str(tmp_path / "a=b")) == ("a=b", str(tmp_path / "a=b"))
    assert parse_adapter(f"lr=1={tmp_path / 'a=b'}") == ("lr=1", str(tmp_path / "a=b"))
    assert parse_adapter("/missing/lr=1") == ("lr=1", "/missing/lr=1")
    for wrong in ("=path", "name=", "="):
        with pytest.raises(UsageError):
            parse_adapter(wrong)
    assert adapter_of_each(None, 2) == [None, None] and adapter_of_each("a", 2) == ["a", "a"]
