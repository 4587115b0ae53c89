"""One optimiser step over the micro-batches of a batch: gradients, their check, clipping, the update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from plait.errors import TrainingError
from plait.model.decoder import Decoder, Trace
from plait.training.batch import Batch
from plait.training.first_fault import gradient_fault, value_fault
from plait.training.loss import step_inputs, step_loss
from plait.training.micro import random_numbers, seed_of
from plait.training.precision import LossScaler, Precision

NO_TARGETS, NOT_FINITE, OVERFLOW = "no target", "not finite", "fp16 overflow"


class RoutingTerms(Protocol):
    """What a mixture of experts adds to a step; `plait.training.routing` has it."""

    def begin(self, tokens: int) -> None:
        """A step over `tokens` non-padding tokens begins."""

    def needs_counts(self) -> bool:
        """Whether a pass without gradients over all micro-batches must come first."""

    def count(self, trace: Trace, batch: Batch) -> None:
        """Take in the routing of a micro-batch of that pass."""

    def loss(self, trace: Trace, batch: Batch) -> Tensor:
        """The auxiliary losses of a micro-batch, as their share of the step's."""

    def finish(self, updated: bool) -> dict[str, Any]:
        """Figures of the step for the log. updated: whether the weights moved."""

    def mark_active(self) -> None:
        """Tell the optimiser which experts received a token in this step."""


@dataclass(frozen=True)
class StepReport:
    """What one step did. loss: cross-entropy per target, in nats. tokens: non-padding. skipped: why the weights did not
    move, None where they did. grad_norm: before clipping. scale: of the fp16 loss. curvature: whether Sophia's was
    refreshed. routing: figures per layer."""

    loss: float
    tokens: int
    targets: int
    grad_norm: float = 0.0
    skipped: str | None = None
    scale: float | None = None
    curvature: bool = False
    routing: dict[str, Any] = field(default_factory=dict)


class TrainingStep:
    """Makes steps, and counts those that were skipped.

    clip: the largest global norm of the gradients, 0 for none. seed: dropout's numbers, and the labels that Sophia
    draws, depend on it, on the step and on the micro-batch, and on nothing else. patience: so many steps in a row
    whose loss or gradients are not finite end the run.
    """

    def __init__(
        self,
        decoder: Decoder,
        optimizer: torch.optim.Optimizer,
        precision: Precision,
        *,
        clip: float = 1.0,
        seed: int = 0,
        patience: int = 10,
        routing: RoutingTerms | None = None,
    ) -> None:
        self.decoder = decoder
        self.optimizer = optimizer
        self.precision = precision
        self.scaler: LossScaler | None = precision.scaler()
        self.clip, self.seed, self.patience, self.routing = clip, seed, patience, routing
        self.skipped = dict.fromkeys((NO_TARGETS, NOT_FINITE, OVERFLOW), 0)
        self._bad_in_row = 0
        self._fault = ""
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])

    def __call__(self, batches: Sequence[Batch], step: int, lr_factor: float = 1.0) -> StepReport:
        """Make step number `step` over these micro-batches. Raises TrainingError when too many in a row fail."""
        valid, tokens = sum(b.target_count for b in batches), sum(b.tokens for b in batches)
        if not valid:
            self.skipped[NO_TARGETS] += 1
            return StepReport(float("nan"), tokens, 0, skipped=NO_TARGETS)
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * lr_factor
        loss = self.gradients(batches, step, valid)
        gradients = [p.grad for p in self.decoder.parameters() if p.grad is not None]
        if self.scaler is not None:
            self.scaler.unscale(gradients)
        norm = float(_norm(gradients))
        finite = _is_finite(norm) and _is_finite(loss)
        scale = None if self.scaler is None else self.scaler.scale
        report = {"loss": loss, "tokens": tokens, "targets": valid, "grad_norm": norm, "scale": scale}
        if not finite:
            return self._skip(batches, step, report)
        if self.clip and norm > self.clip:
            torch._foreach_mul_(gradients, self.clip / (norm + 1e-6))
        if self.routing is not None:
            self.routing.mark_active()
        self.optimizer.step()
        self._bad_in_row = 0
        self.optimizer.zero_grad(set_to_none=True)
        curvature = self._curvature(batches, step, valid)
        if self.scaler is not None:
            self.scaler.update(True)
        figures = {} if self.routing is None else self.routing.finish(True)
        return StepReport(**report, curvature=curvature, routing=figures)

    def gradients(self, batches: Sequence[Batch], step: int, valid: int) -> float:
        """Fill .grad with the step's gradients (times the scaler's scale); returns the loss per target."""
        self.optimizer.zero_grad(set_to_none=True)
        self._count_routing(batches, step)
        losses = []
        for micro, batch in enumerate(batches):
            if not batch.target_count and self.routing is None:
                continue  # it would add zeros
            with random_numbers(self.decoder.device, self.seed, step, micro), self._autocast():
                trace = self._trace()
                part = step_loss(self.decoder, batch, valid=valid, trace=trace)
                total = part.total
                if self.routing is not None and trace is not None:
                    total = total + self.routing.loss(trace, batch)
                losses.append(part.cross_entropy)
                (total if self.scaler is None else total * self.scaler.scale).backward()
        return float(torch.stack(losses).sum())

    def state_dict(self) -> dict[str, Any]:
        scaler = None if self.scaler is None else self.scaler.state_dict()
        return {"skipped": dict(self.skipped), "bad_in_row": self._bad_in_row, "scaler": scaler}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.skipped |= state["skipped"]
        self._bad_in_row = int(state["bad_in_row"])
        if self.scaler is not None and state["scaler"] is not None:
            self.scaler.load_state_dict(state["scaler"])

    # Private

    def _autocast(self) -> Any:
        return self.precision.autocast(str(self.decoder.device))

    def _trace(self) -> Trace | None:
        return None if self.routing is None else Trace(router=True)

    def _count_routing(self, batches: Sequence[Batch], step: int) -> None:
        if self.routing is None:
            return
        self.routing.begin(sum(b.tokens for b in batches))
        if not self.routing.needs_counts():
            return
        for micro, batch in enumerate(batches):
            # The same numbers as in the pass that follows: dropout then routes the tokens alike.
            with torch.no_grad(), random_numbers(self.decoder.device, self.seed, step, micro), self._autocast():
                trace = Trace(router=True)
                self.decoder(batch.ids, step_inputs(batch), None, trace)
                self.routing.count(trace, batch)

    def _curvature(self, batches: Sequence[Batch], step: int, valid: int) -> bool:
        """Sophia's refresh (Liu et al. 2023): a backward of its own, on labels drawn from the model."""
        optimizer: Any = self.optimizer
        wants = getattr(optimizer, "wants_hessian", None)
        if wants is None or not wants(step + 1):
            return False
        for micro, batch in enumerate(batches):
            if not batch.target_count:
                continue
            labels = torch.Generator(self.decoder.device)
            labels.manual_seed(seed_of(self.seed, step, micro, "labels"))
            with random_numbers(self.decoder.device, self.seed, step, micro, "curvature"), self._autocast():
                total = step_loss(self.decoder, batch, valid=valid, labels=labels).total
                (total if self.scaler is None else total * self.scaler.scale).backward()
        gradients = [p.grad for p in self.decoder.parameters() if p.grad is not None]
        if self.scaler is not None:
            self.scaler.unscale(gradients)
        refreshed = bool(optimizer.update_hessian(valid))  # it refuses what is not finite
        optimizer.zero_grad(set_to_none=True)
        return refreshed

    def _skip(self, batches: Sequence[Batch], step: int, report: dict[str, Any]) -> StepReport:
        """No update. An overflow in fp16 is the scaler's everyday business; anything else counts towards the end."""
        overflow = self.scaler is not None and _is_finite(report["loss"])
        why = OVERFLOW if overflow else NOT_FINITE
        self.skipped[why] += 1
        if not overflow:
            if not self._bad_in_row:
                self._fault = f"step {step}: {self._where(batches, step)}"
            self._bad_in_row += 1
        self.optimizer.zero_grad(set_to_none=True)
        figures = {} if self.routing is None else self.routing.finish(False)
        if overflow and self.scaler is not None:
            self.scaler.update(False)
        if self._bad_in_row >= self.patience:
            raise TrainingError(
                f"the loss or its gradients were not finite in {self._bad_in_row} steps in a row; it began at"
                f" {self._fault}. The last checkpoint is good: a new run with model=THIS_RUN starts from its weights,"
                " for example with a lower learning rate or train.precision=fp32"
            )
        return StepReport(**report, skipped=why, routing=figures)

    def _where(self, batches: Sequence[Batch], step: int) -> str:
        fault = gradient_fault(self.decoder)
        for micro, batch in enumerate(batches):
            with torch.no_grad(), random_numbers(self.decoder.device, self.seed, step, micro), self._autocast():
                found = value_fault(self.decoder, batch)
            if found is not None:
                return found
        return fault or "a sum of finite numbers became infinite"


def _norm(gradients: list[Tensor]) -> Tensor:
    """The global Euclidean norm."""
    if not gradients:
        return torch.zeros(())
    return torch.linalg.vector_norm(torch.stack(list(torch._foreach_norm(gradients))))


def _is_finite(number: float) -> bool:
    return number - number == 0.0
