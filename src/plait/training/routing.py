"""What mixtures of experts add to one training step: losses, figures, and word to the optimiser."""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor

from plait.errors import UsageError
from plait.model.decoder import Decoder, Trace
from plait.training.mixture import (
    RoutingStats,
    RoutingSums,
    balance_loss,
    mark_active_experts,
    routing_sums,
    selection_biases,
    update_selection_bias,
    z_loss,
)


class StepRouting:
    """The routers of a decoder over one step after the other: `begin`, for every micro-batch `loss`, `mark_active`
    before the update, `finish` after it. Where `needs_counts`, a pass without gradients, with `count`, comes first.

    balance, z: coefficients of the losses. scope: what the balance loss's shares are counted over, each micro-batch
    ("micro": the loss depends on how the step is cut) or the whole step ("step"). bias_update: gamma of the selection
    bias; 0 leaves it alone. Raises UsageError for a bias_update of a model without selection biases.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        balance: float,
        z: float,
        scope: Literal["micro", "step"] = "micro",
        bias_update: float = 0.0,
    ) -> None:
        if bias_update and not selection_biases(decoder):
            raise UsageError(
                f"bias_update={bias_update:g}: this {decoder.config.model_type} has no selection bias; a plait_gpt has"
                " one with selection_bias: true, and so have deepseek_v3, dots1 and glm4_moe"
            )
        self.decoder = decoder
        self.balance, self.z, self.scope, self.bias_update = balance, z, scope, bias_update
        self._tokens = 0
        self._counted: RoutingSums | None = None
        self._sums: RoutingSums | None = None

    def begin(self, tokens: int) -> None:
        """A step over `tokens` non-padding tokens begins."""
        self._tokens, self._counted, self._sums = tokens, None, None

    def needs_counts(self) -> bool:
        """Whether a pass without gradients over all micro-batches must come before their losses."""
        return self.scope == "step" and self.balance > 0

    def count(self, trace: Trace, batch: Any) -> None:
        """Take in a micro-batch of that pass. batch: what has a `token_mask`, bool [B, T]."""
        self._counted = _sum(self._counted, routing_sums(trace.routing, batch.token_mask))

    def loss(self, trace: Trace, batch: Any) -> Tensor:
        """The micro-batch's part of the step's auxiliary losses, times their coefficients."""
        sums = routing_sums(trace.routing, batch.token_mask)
        self._sums = _sum(self._sums, sums)
        slots = None if self._counted is None else self._counted.slots
        return self.balance * balance_loss(sums, self._tokens, slots) + self.z * z_loss(sums, self._tokens)

    def mark_active(self) -> None:
        """Tell the optimiser which experts received a token in this step."""
        if self._sums is not None:
            mark_active_experts(self.decoder, self._sums)

    def finish(self, updated: bool) -> dict[str, Any]:
        """The step's figures by layer, as `RoutingStats.layers` has them, and its losses. updated: whether the weights
        moved; the selection biases then move too."""
        if self._sums is None:
            return {}
        if updated and self.bias_update:
            update_selection_bias(self.decoder, self._sums, self.bias_update)
        stats = RoutingStats()
        stats.add(self._sums)
        slots = self._sums.slots  # the whole step's, in either scope
        return {
            "balance_loss": float(balance_loss(self._sums, self._tokens, slots)),
            "z_loss": float(z_loss(self._sums, self._tokens)),
            **{str(layer): figures for layer, figures in stats.layers().items()},
        }


def _sum(before: RoutingSums | None, sums: RoutingSums) -> RoutingSums:
    """Added without gradients."""
    return sums.detach() if before is None else before + sums.detach()
