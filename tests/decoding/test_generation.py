"""Batched generation: worked examples, rows alone, recomputation, and transformers' own generate."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from plait.decoding.filters import Filters, row_generators
from plait.decoding.generation import generate, left_padded, true_positions
from plait.decoding.models import step_model
from plait.errors import CapacityError, RequestError, UsageError
from plait.memory.dense import seeing_itself, visible_columns
from plait.model.decoder import from_config
from tests.configs import CONFIGS as ALL_FAMILIES
from tests.decoding.models import RAGGED, Recomputing, model_pair
from tests.memory.tiny_decoders import CONFIGS, tiny_decoder

pytestmark = pytest.mark.usefixtures("one_thread")


def bits(mask: torch.Tensor) -> list[str]:
    return ["".join("01"[int(seen)] for seen in row) for row in mask]


# Worked examples


def test_two_prompts_as_a_left_padded_batch() -> None:
    ids, mask = left_padded([[7, 8], [1, 2, 3, 4]], pad_id=9)
    assert ids.tolist() == [[9, 9, 7, 8], [1, 2, 3, 4]]
    assert bits(mask) == ["0011", "1111"]
    # cumsum of 0011 is 0012, less one and not below 0: 0001
    assert true_positions(mask).tolist() == [[0, 0, 0, 1], [0, 1, 2, 3]]


def test_its_mask_before_and_after_the_rule_that_nobody_sees_nothing() -> None:
    mask = left_padded([[7, 8], [1, 2, 3, 4]])[1]
    before = visible_columns(mask, true_positions(mask))
    assert bits(before[0]) == ["0000", "0000", "0010", "0011"]
    assert bits(before[1]) == ["1000", "1100", "1110", "1111"]
    after = seeing_itself(before)
    assert bits(after[0]) == ["1000", "0100", "0010", "0011"]
    assert torch.equal(after[1], before[1])


def test_the_mask_of_later_steps_holds_the_step_s_rows_only() -> None:
    mask = left_padded([[7, 8], [1, 2, 3, 4]])[1]
    mask = torch.nn.functional.pad(mask, (0, 1), value=True)
    step = seeing_itself(visible_columns(mask, true_positions(mask), start=4))
    assert [bits(row) for row in step] == [["00111"], ["11111"]]


def test_the_window_mask_in_row_major_order() -> None:
    """Window 2 over 4 tokens: each sees itself and the one before."""
    full = torch.ones(1, 4, dtype=torch.bool)
    flat = visible_columns(full, true_positions(full), window=2).flatten().int().tolist()
    assert flat == [1, 0, 0, 0, 1, 1, 0, 0, 0, 1, 1, 0, 0, 0, 1, 1]
    padded = left_padded([[7, 8], [1, 2, 3, 4]])[1]
    assert bits(visible_columns(padded, true_positions(padded), window=2)[0]) == ["0000", "0000", "0010", "0011"]


def test_a_greedy_batch_of_two_step_by_step() -> None:
    """Each step's tokens are those of a forward over each row alone, without memory and without padding."""
    decoder = tiny_decoder("llama")
    found = generate(decoder, [[7, 8], [1, 2, 3, 4]], 5)
    rows = [[7, 8], [1, 2, 3, 4]]
    for step in range(5):
        for row, emitted in zip(rows, found.ids.tolist(), strict=True):
            with torch.inference_mode():
                expected = int(decoder.logits(decoder(torch.tensor(row)))[-1].argmax())
            assert emitted[step] == expected
            row.append(expected)
    assert found.lengths == [5, 5] and found.ended == [False, False]


# Rows alone, and recomputation


@pytest.mark.parametrize("family", CONFIGS)
def test_each_row_is_what_it_is_alone_and_caching_changes_nothing(family: str) -> None:
    """Prompts of 1 to 9 tokens; the padding's id stands in them as a real token."""
    decoder = tiny_decoder(family)
    together = generate(decoder, RAGGED, 10, pad_id=2).tokens
    assert together == [generate(decoder, [prompt], 10).tokens[0] for prompt in RAGGED]
    assert together == generate(Recomputing(decoder), RAGGED, 10, pad_id=5).tokens


def test_longrope_keeps_the_table_of_the_length_that_a_row_reaches() -> None:
    rope = {"type": "longrope", "short_factor": [1.0, 1.2], "long_factor": [3.0, 9.0]}
    raw = {**ALL_FAMILIES["phi3"], "original_max_position_embeddings": 12, "rope_scaling": rope}
    decoder = from_config(raw, seed=4)
    prompts = [[5, 6], list(range(3, 12))]  # 2 + 6 tokens stay below 12, 9 + 6 do not
    together = generate(decoder, prompts, 6).tokens
    assert together == [generate(decoder, [prompt], 6).tokens[0] for prompt in prompts]
    assert together == generate(Recomputing(decoder), prompts, 6).tokens


def test_a_drawn_row_is_what_it_is_alone() -> None:
    decoder = tiny_decoder("qwen3")
    filters, ends = Filters(1.3, top_p=0.95), [4, 17]
    together = generate(decoder, RAGGED, 20, filters, eos_ids=ends, generators=row_generators(3, range(4)))
    for i, prompt in enumerate(RAGGED):
        alone = generate(decoder, [prompt], 20, filters, eos_ids=ends, generators=row_generators(3, [i]))
        assert (alone.tokens[0], alone.ended[0]) == (together.tokens[i], together.ended[i])


# Ends


class Scripted:
    """A `StepModel` whose row r says the r-th script, and whose past is where it stands."""

    max_positions = None
    device = torch.device("cpu")

    def __init__(self, scripts: Sequence[Sequence[int]]) -> None:
        self.scripts = torch.tensor(scripts)
        self.rows_fed: list[int] = []

    def start(self, reach: torch.Tensor) -> tuple[torch.Tensor, int]:
        return torch.arange(len(reach)), 0

    def forward(self, ids, mask, positions, past):
        rows, step = past
        self.rows_fed.append(len(ids))
        return torch.nn.functional.one_hot(self.scripts[rows, step], 10).float(), (rows, step + 1)

    def select(self, past, rows):
        return past[0][rows], past[1]


def test_finished_rows_emit_padding_until_all_are_done() -> None:
    model = Scripted([[5, 1, 6, 6, 6, 6], [5, 5, 5, 2, 6, 6], [1, 3, 3, 3, 3, 3]])
    found = generate(model, [[3]] * 3, 6, eos_ids=[1, 2], pad_id=0)
    assert found.ids.tolist() == [[5, 1, 0, 0], [5, 5, 5, 2], [1, 0, 0, 0]]
    assert found.tokens == [[5], [5, 5, 5], []]
    assert found.ended == [True, True, True]
    assert model.rows_fed == [3, 2, 1, 1]  # who has finished is left out


def test_without_a_pad_token_the_first_end_token_pads() -> None:
    model = Scripted([[1, 6, 6], [6, 6, 6]])
    found = generate(model, [[3], [3, 3]], 3, eos_ids=[2, 1])
    assert found.ids.tolist() == [[1, 2, 2], [6, 6, 6]]
    assert (found.tokens, found.ended) == ([[], [6, 6, 6]], [True, False])


def test_few_finished_rows_are_carried_along() -> None:
    model = Scripted([[1, 6, 6]] + [[6, 6, 6]] * 4)
    found = generate(model, [[3]] * 5, 3, eos_ids=[1], pad_id=0)
    assert model.rows_fed == [5, 5, 5]
    assert found.ids.tolist() == [[1, 0, 0]] + [[6, 6, 6]] * 4


# Against transformers


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "mistral", "gpt_neox", "qwen3_moe"])
def test_transformers_generates_the_same_and_decodes_through_the_adapter(family: str, tmp_path: Path) -> None:
    decoder, theirs = model_pair(family, tmp_path)
    ids, mask = left_padded(RAGGED, 0)
    plain = generate(decoder, RAGGED, 12).ids.flatten().tolist()
    ends = [plain[5], plain[30]]  # tokens that do come
    expected = theirs.generate(
        input_ids=ids, attention_mask=mask.long(), max_new_tokens=12, do_sample=False, eos_token_id=ends, pad_token_id=0
    )[:, ids.shape[1] :]
    ours = generate(decoder, RAGGED, 12, eos_ids=ends, pad_id=0)
    assert any(ours.ended)
    assert torch.equal(ours.ids, expected)
    assert torch.equal(generate(theirs, RAGGED, 12, eos_ids=ends, pad_id=0).ids, expected)
    filters = Filters(0.9, top_k=8)
    drawn = [generate(m, RAGGED, 8, filters, generators=row_generators(0, range(4))).tokens for m in (decoder, theirs)]
    assert drawn[0] == drawn[1]


# Bad input, and what is left as it was


def test_a_training_decoder_generates_without_dropout_and_goes_on_training() -> None:
    decoder = tiny_decoder("llama", attention_dropout=0.5).train()
    assert generate(decoder, RAGGED, 6).tokens == generate(tiny_decoder("llama"), RAGGED, 6).tokens
    assert decoder.training and decoder.model.layers[0].training


def test_bad_requests_are_named() -> None:
    decoder = tiny_decoder("llama")
    with pytest.raises(RequestError, match="prompt 1 is empty"):
        generate(decoder, [[1], []], 3)
    with pytest.raises(RequestError, match="no prompts"):
        generate(decoder, [], 3)
    with pytest.raises(RequestError, match="max_new_tokens"):
        generate(decoder, [[1]], 0)
    with pytest.raises(CapacityError, match="100 tokens and 29 new ones exceed the model's 128 positions"):
        generate(decoder, [[1] * 100], 29)
    with pytest.raises(RequestError, match="generator for each"):
        generate(decoder, [[1]], 3, Filters())
    with pytest.raises(UsageError, match="cannot decode with a str"):
        step_model("a path")
