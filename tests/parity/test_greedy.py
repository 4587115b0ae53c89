"""Greedy text through the engine is the one that transformers writes."""

from __future__ import annotations

import pytest
import torch

import plait
from plait.model.rope import short_rope_tokens
from plait.verify.compare import first_near_tie
from tests.parity.cases import CASES
from tests.parity.reference import Proved, seed_of

pytestmark = pytest.mark.slow

NEW_TOKENS = 24
PROMPT_LENGTHS = (3, 31, 50, 60)
COMPARED: list[bool] = []


@pytest.fixture(scope="module", autouse=True)
def few_comparisons_end_early():
    """At most one text, or 2% of them if that is more."""
    yield
    early = COMPARED.count(False)
    print(f"\n{len(COMPARED)} texts of {NEW_TOKENS} tokens, {early} compared only up to a near tie")
    assert early <= max(1, 0.02 * len(COMPARED))


def best_after(proved: Proved, text: list[int], prompt: int) -> tuple[list[int], int]:
    """transformers' best token after each beginning of `text` from its prompt on, by one forward, and the first of
    them at which its two best log-probabilities are within twice the tolerance."""
    with torch.inference_mode():
        logits = proved.model(input_ids=torch.tensor([text])).logits[0, prompt - 1 : -1]
    return logits.argmax(-1).tolist(), first_near_tie(logits, 2 * proved.tolerance)


def generated(proved: Proved, prompt: list[int]) -> list[int]:
    """What transformers' own generation, with its cache, puts behind the prompt."""
    ids = torch.tensor([prompt])
    options = {"do_sample": False, "max_new_tokens": NEW_TOKENS, "pad_token_id": 0}
    with torch.inference_mode():
        return proved.model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :].tolist()


def test_greedy_text_equals_transformers(proved: Proved):
    """A greedy text is the one whose every token is the best one after all before it: so one forward of transformers
    over our text judges it. For one prompt its `generate` writes the text itself."""
    generator = torch.Generator().manual_seed(seed_of("greedy" + str(proved.case)))
    vocabulary = proved.case.raw["vocab_size"]
    # transformers mixes the keys of both sets when a text crosses the context of longrope's short one; plait does not.
    context = short_rope_tokens(proved.config.rotary)
    lengths = [n for n in PROMPT_LENGTHS if not n <= context < n + NEW_TOKENS]
    prompts = [torch.randint(0, vocabulary, (n,), generator=generator).tolist() for n in lengths]
    llm = plait.LLM(proved.decoder, kv_memory="8MiB", max_num_seqs=4, max_batched_tokens=16, threads=1)
    params = plait.SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params)
    for number, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        ours = list(output.outputs[0].token_ids)
        assert len(ours) == NEW_TOKENS
        best, until = best_after(proved, prompt + ours, len(prompt))
        COMPARED.append(until == NEW_TOKENS)
        assert ours[:until] == best[:until]
        if number == 1:
            assert generated(proved, prompt)[:until] == best[:until]


def test_generation_stops_at_the_end_token_as_transformers_does(proved_cases):
    proved = proved_cases(CASES[0])
    ids = proved.ids[:1, :9]
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 12, "pad_token_id": 0}
    free = proved.model.generate(ids, **options)[0, 9:].tolist()
    stopped = proved.model.generate(ids, eos_token_id=free[4], **options)[0, 9:].tolist()
    llm = plait.LLM(proved.decoder, kv_memory="8MiB", max_batched_tokens=64, threads=1)
    params = plait.SamplingParams(temperature=0.0, max_tokens=12, stop_token_ids=[free[4]])
    (output,) = llm.generate({"prompt_token_ids": ids[0].tolist()}, params)
    assert output.outputs[0].token_ids == stopped
    assert output.outputs[0].finish_reason == "stop"
