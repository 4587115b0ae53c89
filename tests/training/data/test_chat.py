"""Chats: which tokens are the assistant's. Oracle: transformers' mask, where a template marks the assistant's part."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.errors import DataError
from plait.text.tokenizer import Tokenizer, load_tokenizer
from plait.training.data.chat import CHAT, sequences
from plait.training.data.config import DataConfig, SourceConfig
from plait.training.data.files import Row
from plait.training.data.items import items_of
from tests.real_models import smollm2_path
from tests.text.small_tokenizers import byte_level

# ChatML whose assistant's part, end of turn included, stands between the tags that transformers' mask goes by.
MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content + '<|im_end|>' }}{% endgeneration %}{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# What was thought is left out of all turns but the last, as Qwen3's template does.
THINKING = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' and loop.last %}"
    "{{ '<think>' + m.thought + '</think>' }}{% endif %}{{ m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# The prompt goes on with something that no answer begins with.
UNFIT = (
    "{% for m in messages %}{{ m.role + ':' + m.content + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant>' }}{% endif %}"
)
TURNS = [
    {"role": "system", "content": "Answer in one word."},
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "Four"},
    {"role": "user", "content": "And in French? assistant\nFour"},
    {"role": "assistant", "content": "Quatre"},
]


def tokenizer(template: str) -> Tokenizer:
    backend = byte_level()
    eos: Any = backend.token_to_id("<|im_end|>")
    return Tokenizer(
        backend, special_tokens={"eos_token": "<|im_end|>"}, eos_token_ids=[eos], chat_templates={"default": template}
    )


def learnt_texts(tokenizer: Tokenizer, messages: list[dict[str, Any]]) -> list[list[str]]:
    """The runs of learnt tokens of each sequence, as text."""
    found = []
    for ids, learnt, _ in sequences(tokenizer, messages):
        assert learnt is not None and len(learnt) == len(ids)
        runs, run = [], list[int]()
        for token, mark in zip([*ids, 0], [*learnt, 0], strict=True):
            if mark:
                run.append(token)
            elif run:
                runs.append(tokenizer.decode(run, skip_special_tokens=False))
                run = []
        found.append(runs)
    return found


def test_only_the_answers_and_their_ends_are_learnt() -> None:
    marked = tokenizer(MARKED)
    assert learnt_texts(marked, TURNS) == [["Four<|im_end|>", "Quatre<|im_end|>"]]
    ((ids, _, _),) = sequences(marked, TURNS)
    assert ids == marked.encode_chat(TURNS, add_generation_prompt=False)


@pytest.mark.slow  # imports transformers
@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.text("ab \n<|im_endstar>", max_size=6), st.text("ab \n<|im_endstar>é", max_size=12)),
        min_size=1,
        max_size=3,
    ),
    st.booleans(),
)
def test_the_mask_is_that_of_transformers(chat: list[tuple[str, str]], ends_with_user: bool) -> None:
    messages = [
        m for ask, say in chat for m in ({"role": "user", "content": ask}, {"role": "assistant", "content": say})
    ]
    if ends_with_user:
        messages.append({"role": "user", "content": "a"})
    if any("<|" in m["content"] for m in messages):
        return  # transformers takes control text in contents for control tokens
    ours, theirs = pair()
    expected = theirs.apply_chat_template(messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
    ((ids, learnt, _),) = sequences(ours, messages)
    assert ids == expected["input_ids"]
    assert learnt == expected["assistant_masks"]


@cache
def pair() -> tuple[Tokenizer, Any]:
    from transformers import PreTrainedTokenizerFast

    ours = tokenizer(MARKED)
    theirs = PreTrainedTokenizerFast(tokenizer_object=byte_level(), eos_token="<|im_end|>")
    theirs.chat_template = MARKED
    return ours, theirs


def test_control_text_in_a_message_is_no_end() -> None:
    marked = tokenizer(MARKED)
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b<|im_end|>c"}]
    ((ids, learnt, _),) = sequences(marked, messages)
    end = marked.special_token_id("<|im_end|>")
    assert learnt is not None
    assert [ids[k] for k in range(len(ids)) if learnt[k]].count(end) == 1
    assert learnt_texts(marked, messages) == [["b<|im_end|>c<|im_end|>"]]


def test_a_token_across_the_border_is_the_answers() -> None:
    # The prompt ends with a newline, the answer begins with one; where the two are one token, it is learnt.
    marked = tokenizer(MARKED)
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "\nb"}]
    assert learnt_texts(marked, messages) in ([["\n\nb<|im_end|>"]], [["\nb<|im_end|>"]])


def test_a_template_that_changes_earlier_turns_gives_a_sequence_a_turn() -> None:
    thinking = tokenizer(THINKING)
    messages = [{**m, "thought": "hm"} if m["role"] == "assistant" else m for m in TURNS]
    assert learnt_texts(thinking, messages) == [
        ["<think>hm</think>Four<|im_end|>"],
        ["<think>hm</think>Quatre<|im_end|>"],
    ]
    first, second = sequences(thinking, messages)
    assert first.ids == thinking.encode_chat(messages[:3], add_generation_prompt=False)
    assert second.ids == thinking.encode_chat(messages, add_generation_prompt=False)


def test_a_template_whose_prompt_no_answer_goes_on_from_is_refused() -> None:
    with pytest.raises(DataError, match=r"message 2 .* the prompt has '>' where the answer's rendering has ':Four"):
        sequences(tokenizer(UNFIT), TURNS)


def encoded(rows: list[dict[str, Any]], tally: Counter[str], **config: Any) -> list[Any]:
    source = SourceConfig(path="a", **{k: config.pop(k) for k in ("answer",) if k in config})
    whole = DataConfig(task="chat", sources=(source,), **config)
    found = [Row("a.jsonl", n, row) for n, row in enumerate(rows, 1)]
    items = list(items_of(whole, source, found, CHAT.read(source), CHAT.columns(source), tally))
    return list(CHAT.encode(items, tokenizer(MARKED), whole, tally))


def test_rows_become_sequences_and_what_is_left_out_is_counted() -> None:
    tally: Counter[str] = Counter()
    rows = [
        {"messages": TURNS},
        {"messages": TURNS[:2]},  # nobody answers
        {"messages": []},
        {"messages": [TURNS[1], {"role": "assistant", "content": "long " * 200}]},
    ]
    assert len(encoded(rows, tally, context=200)) == 1
    assert (tally["without target"], tally["blank"], tally["too long"]) == (1, 1, 1)
    cut = encoded(rows[3:], tally, context=200, too_long="truncate")
    assert [len(sequence.ids) for sequence in cut] == [201] and tally["truncated"] == 1
    with pytest.raises(DataError, match=r"a\.jsonl:1 has \d+ tokens, more than data\.context=200"):
        encoded(rows[3:], tally, context=200, too_long="error")


def test_cutting_that_leaves_no_answer_is_counted() -> None:
    tally: Counter[str] = Counter()
    long = [{"role": "user", "content": "long " * 200}, TURNS[2]]
    assert encoded([{"messages": long}], tally, context=64, too_long="truncate") == []
    assert tally["without target"] == 1


def test_an_answer_may_stand_in_a_column_of_its_own() -> None:
    tally: Counter[str] = Counter()
    row = {"messages": TURNS[:2], "answer": "Four"}
    assert encoded([row], tally, answer="answer") == encoded([{"messages": TURNS[:3]}], tally)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": "hi"}, "a.jsonl:1: messages must be a list, not str"),
        ({"messages": ["hi"]}, "a.jsonl:1: each of messages must be an object with role and content"),
        ({"messages": [{"role": "user", "content": 3}, TURNS[2]]}, r"a.jsonl:1: messages\[0\].content must be"),
        ({"messages": [TURNS[2]]}, "a.jsonl:1: the chat begins with the assistant's message"),
        ({"chat": []}, "a.jsonl:1 has no column 'messages'"),
    ],
)
def test_a_bad_chat_is_named(row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        encoded([row], Counter())


@pytest.mark.real_model
def test_the_default_model() -> None:
    smollm2 = load_tokenizer(smollm2_path())
    assert learnt_texts(smollm2, TURNS) == [["Four<|im_end|>", "Quatre<|im_end|>"]]
    # Its template says what the assistant is where no system message does; that is not learnt.
    assert learnt_texts(smollm2, TURNS[1:3]) == [["Four<|im_end|>"]]
    ((ids, _, _),) = sequences(smollm2, TURNS)
    assert ids == smollm2.encode_chat(TURNS, add_generation_prompt=False)
