"""Every family gives transformers' logits, whichever memory it runs with and however the prompt is cut."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import pytest
import torch

from plait.memory.none import NoMemory
from plait.model.families import parse_config
from plait.weights.checkpoint import open_checkpoint
from plait.weights.mapping import BoundMap
from plait.weights.transposed import matches
from tests.parity.cases import CASES
from tests.parity.forwards import dense, paged, plain, replayed, run_interpreter
from tests.parity.reference import Proved, distance, reference_model, tolerance

SHARES: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))


@pytest.fixture(scope="module", autouse=True)
def print_shares():
    """With -s: the largest share of the tolerance per family and way."""
    yield
    for family, ways in SHARES.items():
        print(f"\n{family:12s} " + "  ".join(f"{way} {share:.3f}" for way, share in ways.items()), end="")


def agree(proved: Proved, way: str, logits: torch.Tensor) -> None:
    share = proved.share(logits)
    family = proved.case.family
    SHARES[family][way] = max(SHARES[family][way], share)
    assert share <= 1, f"{way}: {share:.2f} times the tolerance"


def test_the_reference_weights_are_neither_too_small_nor_too_large(proved: Proved):
    assert 5 <= proved.reference.abs().max() <= 25


def test_plain_forward_rounds_to_a_quarter_of_the_tolerance(proved: Proved):
    logits = plain(proved.decoder, proved.ids)
    agree(proved, "plain", logits)
    assert proved.share(logits) < 0.25


@pytest.mark.slow
@pytest.mark.parametrize("chunks", [(1,), (19, 1, 4, 1, 1)], ids=["token by token", "chunks"])
def test_dense_cache(proved: Proved, chunks: tuple[int, ...]):
    agree(proved, "dense", dense(proved.decoder, proved.ids, chunks))


@pytest.mark.slow
@pytest.mark.parametrize("chunks", [(57,), (11, 1, 1, 3, 9), (1,)], ids=["whole", "chunks", "token by token"])
def test_paged_cache(proved: Proved, chunks: tuple[int, ...]):
    agree(proved, "paged", paged(proved.decoder, proved.ids, chunks))


@pytest.mark.slow
def test_a_recording_read_back_from_json_gives_the_eager_forward_bit_for_bit(proved: Proved):
    replay, row = replayed(proved.decoder), proved.ids[0]
    with torch.inference_mode():
        logits = run_interpreter(replay, row, NoMemory().begin(row, None))
    assert torch.equal(logits, plain(proved.decoder, row))
    chunks = (13, 1, 2)
    logits = paged(proved.decoder, proved.ids, chunks, interpret=True)
    assert torch.equal(logits, paged(proved.decoder, proved.ids, chunks))
    agree(proved, "recorded", logits)


@pytest.mark.slow
def test_gradients_equal_those_of_transformers(proved: Proved):
    """Cross-entropy of the next token; per parameter, relative to its own norm."""
    targets = proved.ids[:, 1:].flatten()

    def loss_of(logits: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), targets)

    decoder, model = proved.decoder, proved.model
    loss_of(decoder.logits(decoder(proved.ids))).backward()
    loss_of(model(input_ids=proved.ids).logits).backward()
    theirs = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    ours = {name: p.grad for name, p in decoder.named_parameters() if p.requires_grad}
    decoder.zero_grad()
    model.zero_grad()
    names = open_checkpoint(proved.directory).names
    shapes = {name: tuple(g.shape) for name, g in ours.items()}
    whole = ours.get("model.norm.weight", ours["model.embed_tokens.weight"]).norm()
    plan = BoundMap(proved.config, names).incoming(theirs, shapes)
    assert not plan.skipped
    for assignment in plan.assignments:
        for part in assignment.parts:
            expected = theirs[assignment.file]
            expected = expected.mT if matches(names.transposed, assignment.file) else expected
            expected = expected if part.rows is None else expected[torch.from_numpy(part.rows)]
            expected = expected if part.place is None else part.place.from_file(expected)
            error = (ours[part.name] - expected).norm() / expected.norm()
            # A key bias adds the same to every score of a query, so its gradient is rounding and nothing else.
            vanishes = part.name.endswith("k_proj.bias") and expected.norm() < 1e-4 * whole
            assert error <= 1e-4 or vanishes, part.name


def test_both_spellings_of_the_configuration_mean_the_same(proved: Proved):
    """What the case says, mostly in transformers 4 spelling, against what transformers 5 wrote."""
    tokens = {"eos_token_ids": (), "bos_token_id": None, "pad_token_id": None}
    assert replace(parse_config(proved.case.raw), **tokens) == replace(proved.config, **tokens)


@pytest.mark.slow
def test_sdpa_and_eager_references_agree(proved_cases):
    proved = proved_cases(CASES[0])
    with torch.inference_mode():
        logits = reference_model(proved.case, "sdpa")(input_ids=proved.ids).logits
    assert proved.share(logits) < 0.25


@pytest.mark.slow
def test_two_thousand_tokens_of_a_gemma_whose_full_layers_are_scaled(proved_cases):
    """Short prompts hide a scaling that is dropped, or applied to the windowed layers too."""
    (case,) = [c for c in CASES if c.name == "linear scaling on full layers only"]
    proved = proved_cases(case)
    for length in (32, 2000):
        ids = torch.randint(0, 97, (1, length), generator=torch.Generator().manual_seed(length))
        with torch.inference_mode():
            reference = proved.model(input_ids=ids).logits
        assert distance(plain(proved.decoder, ids), reference) <= tolerance(reference)
