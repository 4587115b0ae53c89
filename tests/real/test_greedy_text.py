"""Real checkpoints: greedy text through the paged engine equals transformers on the same weights.

transformers expands and maps the GGUF file with its own loader, so neither our reader nor our name map is trusted.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from plait import LLM, SamplingParams
from tests.greedy import assert_same_texts, compare_greedy
from tests.real_models import gemma3_path, smollm2_path

pytestmark = [pytest.mark.real_model, pytest.mark.slow]

FIXTURES = Path(__file__).parents[1] / "fixtures"
NEW_TOKENS = 64

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    ",
    "Photosynthesis is the process by which",
    "Q: What is 17 + 25?\nA:",
    "Dear Sir or Madam,\n\nI am writing to",
    "The three laws of thermodynamics state that",
    "Il était une fois",
    "1, 1, 2, 3, 5, 8,",
    "To make a good cup of tea, first",
    "import numpy as np\n\nx =",
    "In 1969, two astronauts",
    "The opposite of hot is",
    "Here is a list of animals:\n- dog\n- cat\n-",
    "SELECT name FROM users WHERE",
    "She opened the door and saw",
    "Der schnellste Weg nach Berlin",
    "Water boils at 100 degrees Celsius because",
    "🙂 means",
    "The quick brown fox",
]


def _reference(path: Path):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()


def _compare(path: Path, prompts: list[list[int]], llm: LLM):
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    results = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params)
    llm.engine.check_integrity()
    reference = _reference(path)
    comparisons = []
    for ids, result in zip(prompts, results, strict=True):
        tokens = list(result.outputs[0].token_ids)
        assert len(tokens) == NEW_TOKENS
        with torch.inference_mode():
            whole = torch.tensor([ids + tokens[:-1]])
            logits = reference(whole, logits_to_keep=NEW_TOKENS).logits[0]
        comparisons.append(compare_greedy(tokens, logits))
    return comparisons


def test_smollm2_greedy_text_equals_transformers() -> None:
    path = smollm2_path()
    llm = LLM(path, dtype="fp32", max_model_len=1024)
    chats = [llm.tokenizer.encode_chat([{"role": "user", "content": text}]) for text in PROMPTS[:10]]
    completions = [llm.tokenizer.encode(text) for text in PROMPTS[10:]]
    assert_same_texts(_compare(path, chats + completions, llm), "SmolLM2-135M-Instruct")


def test_gemma3_greedy_text_equals_transformers_within_and_past_its_window() -> None:
    path = gemma3_path()
    llm = LLM(path, dtype="fp32", max_model_len=2048)
    austen = llm.tokenizer.encode((FIXTURES / "austen-emma.txt").read_text())
    melville = llm.tokenizer.encode((FIXTURES / "melville-moby-dick.txt").read_text())
    bos = austen[:1]
    assert bos == [llm.tokenizer.bos_token_id]
    # Past the window of 512: 1,500 tokens, and once with the window's edge inside a chunk.
    long = [austen[:1500], melville[:1500], bos + melville[700:1300], bos + austen[300:840]]
    short = [llm.tokenizer.encode(text) for text in PROMPTS[:16]]
    assert_same_texts(_compare(path, long + short, llm), "Gemma 3 270M")
