"""The loss of a step: cross-entropy over the rows that have a target, without ever holding logits for all of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from plait.errors import UsageError
from plait.model.decoder import Decoder, Trace
from plait.ops.step import StepInputs
from plait.training.batch import Batch
from plait.training.data.constants import IGNORE

# Logits exist for so many rows at a time that they take about this much. Larger chunks are not faster: the products
# are compute-bound from some 128 rows on.
CHUNK_BYTES = 32 << 20
_MULTIPLE = 64


@dataclass(frozen=True)
class StepLoss:
    """total: the scalar with its graph. cross_entropy: the part of it that is the sum of -log p over this batch's
    targets divided by `valid`, detached. targets, tokens: of this batch."""

    total: Tensor
    cross_entropy: Tensor
    targets: int
    tokens: int
    trace: Trace | None = None


def step_loss(
    decoder: Decoder,
    batch: Batch,
    *,
    valid: int | None = None,
    trace: Trace | None = None,
    labels: torch.Generator | None = None,
) -> StepLoss:
    """Cross-entropy of a micro-batch as its share of a step: sum of -log p(target) / valid.

    valid: targets of the whole step, over all its micro-batches; None: this batch is the step. The sum of the results
    over the micro-batches is then the mean over the step's targets, however it was cut. trace: passed to the forward
    (auxiliary losses read it). labels: draw the targets from the model's own distribution with this generator, at the
    positions that have one (Sophia's curvature; Liu et al. 2023, Algorithm 1).
    A batch without a target gives a zero that hangs on the graph. Raises UsageError for a step without one.
    """
    count = batch.target_count if valid is None else valid
    if count < 1:
        raise UsageError("a step without a target has no loss: skip it, or look at how the data sets its targets")
    hidden = decoder(batch.ids, step_inputs(batch), None, trace)
    total = summed_cross_entropy(decoder, hidden, batch.targets, labels) / count
    return StepLoss(total, total.detach(), batch.target_count, batch.tokens, trace)


def step_inputs(batch: Batch) -> StepInputs:
    """What the forward is told of a batch. A mask that masks nothing is left out: attention then takes its fast way."""
    mask = None if bool(batch.token_mask.all()) else batch.token_mask
    return StepInputs(positions=batch.positions, token_mask=mask, segment_ids=batch.segment_ids)


def summed_cross_entropy(
    decoder: Decoder, hidden: Tensor, targets: Tensor, labels: torch.Generator | None = None
) -> Tensor:
    """Sum of -log softmax(logits)[target] over the targets that are not -100, a scalar in fp32 (float64 for float64).

    hidden: [..., D] after the final norm, targets: int64 [...]. labels: see `step_loss`.
    """
    flat, rows, chosen = _rows(decoder, hidden, targets)
    head = decoder.lm_head
    sizes = (decoder.config.logit_scale, decoder.config.logit_soft_cap)
    result: Tensor = _ChunkedCrossEntropy.apply(flat, head.weight, head.bias, rows, chosen, sizes, labels)
    return result


@torch.no_grad()
def token_losses(decoder: Decoder, hidden: Tensor, targets: Tensor) -> Tensor:
    """-log p of every target, like targets [...] in fp32, 0 where there is none. For evaluation: without a graph."""
    flat, rows, chosen = _rows(decoder, hidden, targets)
    config, head = decoder.config, decoder.lm_head
    losses = torch.zeros(flat.shape[0], dtype=torch.float32, device=flat.device)
    for part, goal in _chunks(rows, chosen, len(head.weight)):
        logits, _ = _logits(flat[part], head.weight, head.bias, config.logit_scale, config.logit_soft_cap)
        picked = logits.gather(1, goal.unsqueeze(1)).squeeze(1)
        losses[part] = (logits.logsumexp(1) - picked).float()
    return losses.view(targets.shape)


def _rows(decoder: Decoder, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """hidden as [N, D], the rows that have a target int64 [R], their targets [R]."""
    flat, goals = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    rows = (goals != IGNORE).nonzero().squeeze(1)
    chosen = goals[rows]
    vocabulary = len(decoder.lm_head.weight)
    if len(chosen) and not 0 <= int(chosen.min()) <= int(chosen.max()) < vocabulary:
        wrong = int(chosen.max()) if int(chosen.max()) >= vocabulary else int(chosen.min())
        raise UsageError(f"target {wrong} is outside the vocabulary of {vocabulary}: is this the model's tokenizer?")
    return flat, rows, chosen


def _chunks(rows: Tensor, targets: Tensor, vocabulary: int) -> Any:
    count = max(_MULTIPLE, CHUNK_BYTES // (4 * vocabulary) // _MULTIPLE * _MULTIPLE)
    return zip(rows.split(count), targets.split(count), strict=True) if len(rows) else ()


def _logits(x: Tensor, weight: Tensor, bias: Tensor | None, scale: float, cap: float) -> tuple[Tensor, Tensor | None]:
    """Logits [R, V] in at least fp32 as `Decoder.logits` has them, and where they are capped, tanh of them."""
    logits = torch.nn.functional.linear(x * scale if scale != 1.0 else x, weight, bias)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if not cap:
        return logits, None
    squashed = torch.tanh(logits / cap)
    return squashed * cap, squashed


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Sum of cross-entropies over rows of hidden states [N, D], whose gradients are made in the forward.

    The loss is a sum, so its gradients are known but for one factor as soon as a chunk's logits are: each chunk costs
    the three products that it must, and nothing of [rows, vocabulary] outlives it. The gradients of the logits are at
    most 1 there, which half precision holds well; the factor (1 / valid, loss scale) comes in the backward.
    torch's own chunked linear_cross_entropy (2.13) knows neither soft cap nor autocast, and on a CPU takes 1.5 times as
    long (4,096 rows, 24,000 entries, width 512, fp32: 5.4 s for 3.5 s; in bf16 4.3 s for 2.2 s).
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        rows: Tensor,
        targets: Tensor,
        sizes: tuple[float, float],
        labels: torch.Generator | None,
    ) -> Tensor:
        scale, cap = sizes
        wants = ctx.needs_input_grad[:3]
        kind = hidden.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
        wide = torch.promote_types(hidden.dtype, torch.float32)
        total = torch.zeros((), dtype=wide, device=hidden.device)
        grad_hidden = torch.zeros_like(hidden) if wants[0] else None
        grad_weight = torch.zeros(weight.shape, dtype=wide, device=weight.device) if wants[1] else None
        grad_bias = torch.zeros(bias.shape, dtype=wide, device=bias.device) if bias is not None and wants[2] else None
        w = weight.to(dtype)
        with torch.autocast(kind, enabled=False):
            for part, goal in _chunks(rows, targets, len(weight)):
                x = hidden.index_select(0, part).to(dtype)
                logits, squashed = _logits(x, w, None if bias is None else bias.to(dtype), scale, cap)
                peak = logits.amax(1, keepdim=True)
                logits -= peak
                picked = None if labels is not None else logits.gather(1, goal.unsqueeze(1))
                sums = logits.exp_().sum(1, keepdim=True)
                probabilities = logits.div_(sums)
                if labels is not None:
                    # Nothing can be drawn from what is not finite; the loss and its gradient say so.
                    finite = probabilities.isfinite().all(1, keepdim=True)
                    drawable = torch.where(finite, probabilities, torch.ones_like(probabilities))
                    goal = torch.multinomial(drawable, 1, generator=labels).squeeze(1)
                    picked = probabilities.gather(1, goal.unsqueeze(1)).log() + sums.log()
                assert picked is not None
                total += (sums.log() - picked).sum()
                grad = probabilities
                grad.scatter_add_(1, goal.unsqueeze(1), torch.full_like(picked, -1.0))
                if squashed is not None:
                    grad *= squashed.square_().neg_().add_(1.0)
                grad = grad.to(dtype)
                if grad_bias is not None:
                    grad_bias += grad.sum(0, dtype=wide)
                if grad_hidden is not None:
                    product = grad @ w
                    grad_hidden[part] = (product * scale if scale != 1.0 else product).to(hidden.dtype)
                if grad_weight is not None:
                    x = x * scale if scale != 1.0 else x
                    if dtype == wide:
                        grad_weight.addmm_(grad.mT, x)
                    else:
                        grad_weight += grad.mT @ x
        ctx.gradients = [grad_hidden, grad_weight, grad_bias]
        ctx.dtypes = [weight.dtype, None if bias is None else bias.dtype]
        return total

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> Any:
        (factor,) = outputs
        if ctx.gradients is None:
            raise RuntimeError("this loss was backpropagated once already; compute it again")
        hidden, weight, bias = ctx.gradients
        ctx.gradients = None
        for gradient in (hidden, weight, bias):
            if gradient is not None:
                gradient.mul_(factor)
        weight = None if weight is None else weight.to(ctx.dtypes[0])
        bias = None if bias is None else bias.to(ctx.dtypes[1])
        return hidden, weight, bias, None, None, None, None
