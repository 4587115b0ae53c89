"""The chunked loss against torch's cross-entropy on whole logits, forward and backward."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

import plait
from plait.errors import UsageError
from plait.training import loss as loss_module
from plait.training.loss import step_loss, summed_cross_entropy, token_losses
from tests.configs import CONFIGS
from tests.training.batches import batch_of

# Their heads differ: plain, a factor and a soft cap, a bias, tied.
HEADS = ["llama", "granitemoe", "gemma3_text", "phimoe", "qwen2", "cohere"]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks of two rows, so that their borders are tested."""
    monkeypatch.setattr(loss_module, "CHUNK_BYTES", 4 * 96 * 2)
    monkeypatch.setattr(loss_module, "_MULTIPLE", 1)


def reference(decoder: plait.Decoder, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The definition: whole logits in float64, torch's cross-entropy."""
    c, head = decoder.config, decoder.lm_head
    logits = F.linear(hidden * c.logit_scale, head.weight, head.bias)
    if c.logit_soft_cap:
        logits = torch.tanh(logits / c.logit_soft_cap) * c.logit_soft_cap
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="sum", ignore_index=-100)


@pytest.mark.parametrize("family", HEADS)
def test_loss_and_gradients_are_those_of_whole_logits(family: str) -> None:
    decoder = plait.from_config(CONFIGS[family], seed=1, dtype=torch.float64)
    batch = batch_of([[5, 6, 7, 8, 9], [1, 2, 3], [4, 4]], vocabulary=96, holes=(2, 6))
    hidden = torch.randn(3, 5, decoder.config.hidden_size, dtype=torch.float64, requires_grad=True)
    found, wanted = {}, {}
    for result, compute in ((found, summed_cross_entropy), (wanted, reference)):
        decoder.zero_grad()
        hidden.grad = None
        loss = compute(decoder, hidden, batch.targets)
        (loss * 0.37).backward()
        assert hidden.grad is not None
        result["loss"], result["hidden"] = loss.detach(), hidden.grad.clone()
        result |= {name: p.grad.clone() for name, p in decoder.lm_head.named_parameters() if p.grad is not None}
    assert found.keys() == wanted.keys() and len(found) >= 3
    for name in wanted:
        torch.testing.assert_close(found[name], wanted[name], rtol=1e-12, atol=1e-12, msg=name)


def test_losses_of_tokens_sum_to_the_loss() -> None:
    decoder = plait.from_config(CONFIGS["gemma3_text"], seed=1)
    batch = batch_of([[5, 6, 7, 8, 9], [1, 2, 3]], vocabulary=96, holes=(1,))
    hidden = torch.randn(2, 5, decoder.config.hidden_size)
    losses = token_losses(decoder, hidden, batch.targets)
    logits = decoder.logits(hidden).log_softmax(-1)
    there = batch.targets != -100
    wanted = -logits.gather(-1, batch.targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(losses, torch.where(there, wanted, 0.0), rtol=1e-5, atol=1e-5)


def test_the_mean_is_over_the_targets_of_the_step() -> None:
    """One target of loss 2 and three of loss 1 make 1.25, not the mean of means, 1.5 (TRN-01).

    Both batches see the same untied head of zeros but for its bias; -log p is chosen by the bias."""
    decoder = plait.from_config(CONFIGS["phimoe"] | {"vocab_size": 3}, seed=0, dtype=torch.float64)
    with torch.no_grad():
        decoder.lm_head.weight.zero_()
        p = torch.tensor([-2.0, -1.0], dtype=torch.float64).exp()  # log p of the ids 0 and 1
        decoder.lm_head.bias.copy_(torch.cat((p, 1 - p.sum(0, keepdim=True))).log())  # type: ignore[union-attr]
    one, three = batch_of([[1, 0]], 3), batch_of([[1, 1, 1, 1]], 3)
    assert (one.target_count, three.target_count) == (1, 3)
    total = sum(float(step_loss(decoder, b, valid=4).cross_entropy) for b in (one, three))
    assert total == pytest.approx(1.25, abs=1e-12)


def test_a_batch_without_a_target_gives_a_zero_that_can_be_backpropagated() -> None:
    decoder = plait.from_config(CONFIGS["llama"], seed=0)
    batch = batch_of([[5, 6, 7]], 96, holes=(0, 1, 2))
    loss = step_loss(decoder, batch, valid=3).total
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert all(float(p.grad.abs().sum()) == 0.0 for p in decoder.parameters() if p.grad is not None)
    with pytest.raises(UsageError, match="without a target"):
        step_loss(decoder, batch)


def test_a_target_outside_the_vocabulary_is_named() -> None:
    decoder = plait.from_config(CONFIGS["llama"], seed=0)
    with pytest.raises(UsageError, match="target 96 is outside the vocabulary of 96"):
        step_loss(decoder, batch_of([[5, 6, 96]], 96))


def test_a_second_backward_is_refused() -> None:
    decoder = plait.from_config(CONFIGS["llama"], seed=0)
    loss = step_loss(decoder, batch_of([[5, 6, 7]], 96)).total
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="once already"):
        loss.backward()


def test_labels_are_drawn_from_the_models_own_distribution() -> None:
    """Over many draws the gradient of the bias is the frequency of each label minus p: zero in the mean, and its
    variance per draw is p (1 - p), which a loss on the data's labels does not have."""
    decoder = plait.from_config(CONFIGS["phimoe"] | {"vocab_size": 4}, seed=0)
    p = torch.tensor([0.5, 0.3, 0.15, 0.05])
    with torch.no_grad():
        decoder.lm_head.weight.zero_()
        decoder.lm_head.bias.copy_(p.log())  # type: ignore[union-attr]
    draws = 20_000
    hidden = torch.zeros(1, draws, decoder.config.hidden_size)
    summed_cross_entropy(
        decoder, hidden, torch.zeros(1, draws, dtype=torch.long), torch.Generator().manual_seed(7)
    ).backward()
    bias = decoder.lm_head.bias
    assert bias is not None and bias.grad is not None
    drawn = p - bias.grad / draws  # the frequency of each label
    deviation = (p * (1 - p) / draws).sqrt()
    assert bool(((drawn - p).abs() < 5 * deviation).all()) and float((drawn - p).abs().max()) > 0


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_autocast_products_are_near_fp32(name: str) -> None:
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[name]
    decoder = plait.from_config(CONFIGS["llama"], seed=1)
    hidden = torch.randn(2, 5, decoder.config.hidden_size, requires_grad=True)
    batch = batch_of([[5, 6, 7, 8, 9], [1, 2, 3]], 96)
    wanted = summed_cross_entropy(decoder, hidden, batch.targets)
    (exact,) = torch.autograd.grad(wanted, hidden)
    with torch.autocast("cpu", dtype):
        loss = summed_cross_entropy(decoder, hidden, batch.targets)
    (loss * 2.0**15).backward()
    assert hidden.grad is not None and hidden.grad.dtype == torch.float32
    # A bf16 product of 24 terms is off by some 2^-9 of its size.
    assert float((hidden.grad / 2.0**15 - exact).norm() / exact.norm()) < 2e-2
    assert float(loss.detach()) == pytest.approx(float(wanted), rel=1e-2)


MEMORY = """
import sys, torch, plait
from plait.training.batch import Batch
from plait.training.loss import summed_cross_entropy
torch.set_num_threads(1)
torch.manual_seed(0)
decoder = plait.from_config({"model_type": "llama", "vocab_size": 24000, "hidden_size": 512, "num_hidden_layers": 1,
    "num_attention_heads": 8, "intermediate_size": 64, "tie_word_embeddings": True})
tokens = int(sys.argv[1])
hidden = torch.randn(8, tokens // 8, 512, requires_grad=True)
targets = torch.randint(0, 24000, (8, tokens // 8))
def peak():  # getrusage would begin with the peak of the process that started this one
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
before = peak()
summed_cross_entropy(decoder, hidden, targets).backward()
print((peak() - before) * 1024)
"""


@pytest.mark.slow
def test_head_and_loss_add_less_than_400_mb_to_a_large_step() -> None:
    """32,768 tokens, 24,000 entries, width 512: whole fp32 logits alone would be 3.1 GB. The gradients of the hidden
    states (64 MB) and of the table (49 MB) are among what is counted."""
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, "32768"], capture_output=True, text=True, check=True, env=dict(os.environ)
    )
    assert 50e6 < int(done.stdout) < 400e6
