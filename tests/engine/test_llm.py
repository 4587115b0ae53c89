"""`LLM` on a tiny random model: prompts in, results out, scores equal to the model's own."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from plait.engine.llm import LLM
from plait.engine.params import SamplingParams
from plait.errors import EngineError, RequestError
from tests.tiny import tiny_model_dir

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def llm(directory: Path) -> LLM:
    return LLM(directory, dtype="fp32", kv_memory="16MiB", max_num_seqs=4, max_batched_tokens=32)


def test_prompts_of_every_form_give_results_in_order(llm: LLM) -> None:
    ids = llm.tokenizer.encode("Hello")
    results = llm.generate(["Hello", {"prompt": "Hello"}, {"prompt_token_ids": ids}, ids, "Other"], GREEDY)
    assert [r.outputs[0].token_ids for r in results[:4]] == [results[0].outputs[0].token_ids] * 4
    assert results[4].prompt == "Other" and results[0].prompt_token_ids == ids
    assert llm.generate("Hello", GREEDY)[0].outputs[0].text == results[0].outputs[0].text
    assert llm.generate(ids, GREEDY)[0].outputs[0].token_ids == results[0].outputs[0].token_ids
    assert llm.generate([], GREEDY) == []


def test_greedy_equals_stepping_the_decoder_by_hand(llm: LLM, directory: Path) -> None:
    import torch

    import plait

    decoder = plait.load(directory, dtype=torch.float32)
    prompts = ["Hello", "A much longer prompt that takes more than one step of thirty-two tokens", "x"]
    for result in llm.generate(prompts, GREEDY):
        ids = list(result.prompt_token_ids)
        for token in result.outputs[0].token_ids:
            with torch.no_grad():
                assert decoder.logits(decoder(torch.tensor([ids])))[0, -1].argmax() == token
            ids.append(token)


def test_texts_do_not_depend_on_running_ahead(llm: LLM, directory: Path) -> None:
    """Stop strings in the middle of what comes together, streams that stop early, and what is counted."""
    if not hasattr(llm.engine.executor, "execute_steps"):
        pytest.skip("the reference plan makes one step at a time")
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    options = {"dtype": "fp32", "kv_memory": "16MiB", "max_num_seqs": 4, "max_batched_tokens": 64}
    single, ahead = (LLM(directory, **options, run_ahead_s=seconds) for seconds in (0, 60))
    prompts = ["Hello", "Other", "x"]
    whole = [r.outputs[0] for r in single.generate(prompts, params)]
    assert [r.outputs[0] for r in ahead.generate(prompts, params)] == whole
    stops = [output.text[len(output.text) // 2 :][:3] for output in whole]
    chosen = [SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, stop=stop) for stop in stops]
    expected, found = ([r.outputs[0] for r in side.generate(prompts, chosen)] for side in (single, ahead))
    assert found == expected
    assert [(o.finish_reason, o.stop_reason) for o in found] == [("stop", stop) for stop in stops]
    assert all(len(o.token_ids) < 40 for o in found)
    deltas = list(ahead.stream(prompts[0], chosen[0]))
    assert "".join(d.text for d in deltas) == expected[0].text
    assert [i for d in deltas for i in d.token_ids] == expected[0].token_ids
    assert max(len(d.token_ids) for d in deltas) > 1
    stream = ahead.stream(prompts[0], params)
    text = next(stream).text + next(stream).text
    stream.close()
    assert text and whole[0].text.startswith(text) and not ahead.engine.has_unfinished()
    for side in (single, ahead):
        side.engine.check_integrity()


def test_one_params_per_prompt(llm: LLM) -> None:
    results = llm.generate(["a", "b"], [GREEDY, SamplingParams(max_tokens=3, seed=1, ignore_eos=True)])
    assert [len(r.outputs[0].token_ids) for r in results] == [8, 3]
    with pytest.raises(RequestError, match="2 params for 3 prompts"):
        llm.generate(["a", "b", "c"], [GREEDY, GREEDY])


def test_chat_applies_the_template(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "hi"}]
    (result,) = llm.chat(conversation, GREEDY)
    assert result.prompt_token_ids == llm.tokenizer.encode_chat(conversation)
    assert len(llm.chat([conversation, conversation], GREEDY)) == 2
    with pytest.raises(RequestError, match="messages is empty"):
        llm.chat([])


def test_scores_are_the_models_log_probabilities(llm: LLM, directory: Path) -> None:
    import torch

    import plait

    decoder = plait.load(directory, dtype=torch.float32)
    text = "Score me, please: all of me, over several steps."
    (scores,) = llm.score(text)
    ids = torch.tensor([llm.tokenizer.encode(text)])
    with torch.no_grad():
        logprobs = decoder.logits(decoder(ids))[0].log_softmax(-1)
    expected = logprobs[:-1].gather(1, ids[0, 1:, None])[:, 0]
    assert scores[0] is None
    assert scores[1:] == pytest.approx(expected.tolist(), abs=1e-4)


def test_stream_yields_what_generate_returns_and_closing_it_frees_everything(llm: LLM) -> None:
    text = "".join(delta.text for delta in llm.stream("Hello", GREEDY))
    assert text == llm.generate("Hello", GREEDY)[0].outputs[0].text
    stream = llm.stream("Hello", GREEDY)
    next(stream)
    stream.close()
    assert not llm.engine.has_unfinished() and llm.engine.blocks.usage == 0


def test_one_wrong_prompt_refuses_the_call_and_leaves_nothing_behind(llm: LLM) -> None:
    for prompts, match in (
        (["fine", ""], None if llm.tokenizer.add_bos_token else "empty"),
        (["fine", {"text": "x"}], "unknown key 'text'"),
        (["fine", "x" * 3000], "context holds"),
        ([["a"]], "flat list of integers"),
    ):
        if match is not None:
            with pytest.raises(RequestError, match=match):
                llm.generate(prompts, GREEDY)
        assert not llm.engine.has_unfinished()


def test_a_live_decoder_generates_from_ids_with_its_current_weights() -> None:
    import torch

    import plait
    from tests.tiny import tiny_config

    decoder = plait.from_config(tiny_config(), seed=3)
    llm = LLM(decoder, kv_memory="4MiB", max_num_seqs=2)
    prompt = {"prompt_token_ids": list(range(40))}
    before = llm.generate(prompt, GREEDY)[0].outputs[0]
    assert before.text == "" and len(before.token_ids) == 8
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.mul_(-1.5)
    llm.refresh()
    after = llm.generate(prompt, GREEDY)[0].outputs[0].token_ids
    fresh = LLM(decoder, kv_memory="4MiB", max_num_seqs=2).generate(prompt, GREEDY)[0].outputs[0].token_ids
    assert after == fresh != before.token_ids
    with pytest.raises(RequestError, match="needs a tokenizer"):
        llm.generate("text")


def test_streams_interleave_in_one_thread_and_with_other_calls(llm: LLM) -> None:
    alone = [llm.generate(prompt, GREEDY)[0].outputs[0].token_ids for prompt in ("Hello", "Other")]
    first, second = llm.stream("Hello", GREEDY), llm.stream("Other", GREEDY)
    got: list[list[int]] = [[], []]
    got[0] += next(first).token_ids
    got[1] += next(second).token_ids
    assert llm.generate("Hello", GREEDY)[0].outputs[0].token_ids == alone[0]
    for deltas in zip(first, second, strict=True):
        for tokens, delta in zip(got, deltas, strict=True):
            assert delta.error is None
            tokens += delta.token_ids
    assert got == alone
    assert not llm.engine.has_unfinished()


def test_calls_from_several_threads_each_get_their_own_results(llm: LLM) -> None:
    prompts = ["Hello", "Other", "A third prompt", "x"]
    alone = [r.outputs[0].token_ids for r in llm.generate(prompts, GREEDY)]

    def streamed(prompt: str) -> list[int]:
        return [token for delta in llm.stream(prompt, GREEDY) for token in delta.token_ids]

    def generated(prompt: str) -> list[int]:
        return llm.generate([prompt, "Other"], GREEDY)[0].outputs[0].token_ids

    with ThreadPoolExecutor(4) as pool:
        for call in (streamed, generated):
            assert list(pool.map(call, prompts * 2, timeout=60)) == alone * 2
    assert not llm.engine.has_unfinished() and llm.engine.blocks.usage == 0


def test_a_stream_whose_request_was_aborted_raises_instead_of_waiting(llm: LLM) -> None:
    stream = llm.stream("Hello", GREEDY)
    llm.engine.abort(next(stream).request_id)
    with pytest.raises(EngineError, match="aborted elsewhere"):
        next(stream)


@pytest.mark.parametrize(
    ("prompts", "field"),
    [
        ([1.0], "prompt"),
        (None, "prompt"),
        (5, "prompt"),
        ([[1.0]], "prompt"),
        ({"prompt_token_ids": 5}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": "x", "cache_salt": [1]}, "cache_salt"),
        ({"a": 1, 2: 3}, "prompt"),
        ("\ud800", "prompt"),
    ],
)
def test_a_prompt_of_no_known_form_is_refused_by_name(llm: LLM, prompts: Any, field: str) -> None:
    with pytest.raises(RequestError) as caught:
        llm.generate(prompts, GREEDY)
    assert caught.value.field == field


@pytest.mark.parametrize(
    "messages", [{"role": "user", "content": "hi"}, "hi", 5, ["hi"], [[]], [[{"role": "user"}, 5]]]
)
def test_what_is_no_list_of_messages_is_refused_by_name(llm: LLM, messages: Any) -> None:
    with pytest.raises(RequestError) as caught:
        llm.chat(messages, GREEDY)
    assert caught.value.field == "messages"


def test_other_arguments_are_refused_by_name(llm: LLM) -> None:
    for options, field in (({"params": 5}, "params"), ({"priority": 5}, "priority"), ({"priority": ["a"]}, "priority")):
        with pytest.raises(RequestError) as caught:
            llm.generate(["x"], **options)
        assert caught.value.field == field


def test_a_score_that_is_not_finite_is_an_error_with_the_reason() -> None:
    import torch

    import plait
    from tests.tiny import tiny_config

    decoder = plait.from_config(tiny_config(), seed=3)
    with torch.no_grad():
        next(iter(decoder.parameters())).fill_(float("nan"))
    with pytest.raises(EngineError, match="text 0 cannot be scored: .*not finite"):
        LLM(decoder, kv_memory="4MiB", max_num_seqs=2).score([[1, 2, 3]])
