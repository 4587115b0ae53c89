"""Real checkpoints through the native plan: every operation has a kernel, and the numbers are the reference's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from plait.engine.score_forward import AdaptedForward
from plait.kernels.native import native_library, reason
from plait.memory.layout import make_layout
from plait.model.decoder import build
from plait.model.record import record
from plait.plan.executor import NativeExecutor
from plait.text.tokenizer import load_tokenizer
from plait.weights.checkpoint import open_checkpoint
from plait.weights.load import load
from plait.weights.pack import pack_checkpoint
from tests.adapters import make_adapter
from tests.greedy import assert_same_texts, compare_greedy
from tests.plan.steps import Script
from tests.real.test_greedy_text import FIXTURES, NEW_TOKENS, PROMPTS
from tests.real_models import gemma3_path, smollm2_path

pytestmark = [
    pytest.mark.real_model,
    pytest.mark.slow,
    pytest.mark.skipif(native_library() is None, reason=f"no native library: {reason()}"),
]
BYTES = {"fp32": 4, "bf16": 2}


class Real:
    """A checkpoint's native executor and a script of steps over given texts."""

    def __init__(self, path: Path, texts: list[list[int]], dtype: str, kv: str, tokens: int) -> None:
        checkpoint = open_checkpoint(path)
        self.store = pack_checkpoint(checkpoint, dtype)
        config = checkpoint.config
        self.layout = make_layout(config.caches(), BYTES[kv], tokens, tokens)
        self.script = Script(self.layout, config.vocab_size, count=len(texts), tokens=tokens)
        for sequence, ids in enumerate(texts):
            self.script.ids[sequence] = list(ids)
        most = max(512, sum(map(len, texts)))
        recording = record(build(config, device="meta"))
        self.executor = NativeExecutor(
            recording, self.store, self.layout, self.script.num_blocks, most, kv_dtype=kv, max_rows=512
        )

    def greedy(self, new_tokens: int) -> list[list[int]]:
        """All sequences together, one token a step; the tokens that each gained."""
        count = self.script.count
        parts = [(s, len(self.script.ids[s])) for s in range(count)]
        gained: list[list[int]] = [[] for _ in range(count)]
        for _ in range(new_tokens):
            ends = np.cumsum([n for _, n in parts]) - 1
            best = self.executor.execute(*self.script.step(parts, ends), logits=False).best_ids.tolist()
            for s, token in enumerate(best):
                gained[s].append(token)
                self.script.ids[s].append(token)
            parts = [(s, 1) for s in range(count)]
        return gained


def test_greedy_text_of_smollm2_with_weights_in_fp32_equals_the_references() -> None:
    path = smollm2_path()
    tokenizer = load_tokenizer(path)
    texts = [tokenizer.encode(text) for text in PROMPTS]
    real = Real(path, texts, "fp32", "fp32", 128)
    assert real.executor.host_ops == ()
    gained = real.greedy(NEW_TOKENS)
    decoder = load(path, torch.float32)
    comparisons = []
    for ids, tokens in zip(texts, gained, strict=True):
        with torch.inference_mode():
            whole = torch.tensor([*ids, *tokens[:-1]])
            logits = decoder.logits(decoder(whole)[len(ids) - 1 :])
        comparisons.append(compare_greedy(tokens, logits))
    assert_same_texts(comparisons, "SmolLM2-135M-Instruct, native plan in fp32")


# Mean Kullback-Leibler divergence from the reference with the same weights in fp32, and the share of tokens whose best
# id agrees: what activations in 8 bits and a bf16 cache cost these small models on English prose.
QUANTISED = [(smollm2_path, 0.01, 0.93), (gemma3_path, 0.03, 0.9)]


@pytest.mark.parametrize(("path", "most_kl", "least_agreement"), QUANTISED, ids=["smollm2", "gemma3"])
def test_a_quantised_file_as_stored_stays_close_to_the_reference(path, most_kl: float, least_agreement: float) -> None:
    path = path()
    ids = load_tokenizer(path).encode((FIXTURES / "austen-emma.txt").read_text()[4000:6000])[:300]
    real = Real(path, [ids], "auto", "bf16", 320)
    assert real.executor.host_ops == ()
    logits = [real.executor.execute(*real.script.step([(0, n)])).logits.copy() for n in (200, len(ids) - 210, 7, 1, 2)]
    given = torch.from_numpy(np.concatenate(logits)).log_softmax(-1)
    decoder = load(path, torch.float32)
    with torch.inference_mode():
        expected = decoder.logits(decoder(torch.tensor(ids))).log_softmax(-1)
    kl = float((expected.exp() * (expected - given)).sum(-1).mean())
    agreement = float((given.argmax(-1) == expected.argmax(-1)).float().mean())
    print(f"{path.name}: mean KL {kl:.5f}, best id agrees on {100 * agreement:.1f}%")
    assert kl <= most_kl and agreement >= least_agreement


def test_an_adapter_beside_quantised_weights_stays_close_to_the_reference(tmp_path: Path) -> None:
    """SmolLM2 as stored (Q4_1) with a random adapter of rank 8 on every linear module, another one in the same batch,
    and nobody: KL from the reference with the same adapter, as without one."""
    path = smollm2_path()
    ids = load_tokenizer(path).encode((FIXTURES / "austen-emma.txt").read_text()[4000:6000])[:150]
    decoder = load(path, torch.float32)
    adapters = [make_adapter(tmp_path, decoder, n, rank=8, seed=i, size=0.4) for i, n in enumerate(("one", "two"))]
    real = Real(path, [ids] * 3, "auto", "bf16", 160)
    real.executor.set_adapters(adapters)
    given, inputs = real.script.step([(s, len(ids)) for s in range(3)])
    numbers = np.array([1, 0, 2], np.int32)
    found = torch.from_numpy(real.executor.execute(given, replace(inputs, adapter_ids=numbers)).logits.copy())
    whole = torch.tensor(ids)
    expected = []
    for number in numbers:
        with torch.inference_mode():
            if number:
                expected.append(decoder.logits(AdaptedForward(decoder, adapters[number - 1]).hidden(whole)))
            else:
                expected.append(decoder.logits(decoder(whole)))
    kl = [float(divergence(a, b)) for a, b in zip(found.split(len(ids)), expected, strict=True)]
    apart = float(divergence(expected[0], expected[1]))
    assert apart > 20 * max(kl)  # the adapter changes far more than int8 activations do
    assert max(kl) < 0.01 and max(kl) < 4 * kl[1]


def divergence(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Mean over rows of KL(expected || found), logits [N, V]."""
    p, q = expected.double().log_softmax(-1), found.double().log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1).mean()
