"""The losses and figures of mixtures of experts, from what a forward's trace tells of its routers.

Everything is made of sums over tokens (`RoutingSums`), which add up over micro-batches. So a step's losses are the sum
of its micro-batches' parts, each weighted by its tokens, however the step is cut.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import log
from typing import Any

import torch
from torch import Tensor

from plait.errors import ConfigError, UsageError
from plait.model.decoder import Decoder
from plait.model.layers import Mixture, Router, Routing


@dataclass(frozen=True)
class RoutingSums:
    """Sums over the non-padding tokens of a micro-batch, or of several, for the L layers that are mixtures.

    layers: their numbers in the decoder. probabilities: fp32 [L, E], of the routers' probabilities (`probabilities`);
    z: fp32 [L], of logsumexp(logits)^2; both with gradients. slots: int64 [L, E], how often each expert was chosen.
    tokens: how many there are. top_k: choices of a token.
    """

    layers: tuple[int, ...]
    probabilities: Tensor
    slots: Tensor
    z: Tensor
    tokens: int
    top_k: int

    def __add__(self, other: RoutingSums) -> RoutingSums:
        if (self.layers, self.top_k) != (other.layers, other.top_k):
            raise UsageError("sums of the routing of different models do not add up")
        return RoutingSums(
            self.layers,
            self.probabilities + other.probabilities,
            self.slots + other.slots,
            self.z + other.z,
            self.tokens + other.tokens,
            self.top_k,
        )

    def detach(self) -> RoutingSums:
        """The same numbers without gradients."""
        return RoutingSums(
            self.layers, self.probabilities.detach(), self.slots, self.z.detach(), self.tokens, self.top_k
        )

    @property
    def shares(self) -> Tensor:
        """f_e: which share of the routing slots each expert has, fp32 [L, E]; its sum over the experts is 1."""
        return _shares(self.slots, self.probabilities)


def routing_sums(routing: Mapping[int, Routing], token_mask: Tensor | None = None) -> RoutingSums:
    """What a forward with `Trace(router=True)` kept, summed over tokens.

    token_mask: bool, shaped like the ids, of the tokens that count; None: all that were routed, so not the padding of
    the forward's own token_mask. A mask of one language's tokens, or one side's, counts those alone. Raises UsageError
    where nothing was kept.
    """
    if not routing:
        raise UsageError(
            "there is no routing to sum: the model has no mixture, or its trace was not Trace(router=True)"
        )
    probability, slots, z = [], [], []
    for each in routing.values():
        real = each.ids[..., 0] >= 0 if token_mask is None else token_mask
        logits, ids = each.logits[real], each.ids[real]
        probability.append(probabilities(logits, each).sum(0))
        slots.append(torch.bincount(ids[ids >= 0], minlength=logits.shape[-1]))
        z.append(logits.logsumexp(-1).square().sum())
    if len({len(counts) for counts in slots}) > 1:
        raise ConfigError("the model's mixtures have different numbers of experts: their figures make no table")
    return RoutingSums(
        tuple(routing), torch.stack(probability), torch.stack(slots), torch.stack(z), len(ids), ids.shape[-1]
    )


def probabilities(logits: Tensor, routing: Routing) -> Tensor:
    """What the balance loss calls a token's probabilities, [..., E]: the softmax of all logits; where the router scores
    by a sigmoid, its scores divided by their sum (DeepSeek-AI 2024b, section 2.1.2)."""
    if routing.spec.scores == "sigmoid":
        scores = logits.sigmoid()
        return scores / scores.sum(-1, keepdim=True)
    return logits.softmax(-1)


def balance_loss(sums: RoutingSums, tokens: int, slots: Tensor | None = None) -> Tensor:
    """A micro-batch's part of the step's balance loss, the sum over layers of E sum_e f_e P_e (Fedus et al. 2021, eq. 4
    to 6).

    tokens: non-padding ones of the whole step. P_e is the mean probability over those; f_e the share of the slots of
    this micro-batch, or of the whole step where its `slots` [L, E] are given: then the result does not depend on how
    the step is cut. Summed over the micro-batches it is the loss of the step; without `slots`, the mean of the micro-
    batches' losses, weighted by their tokens. A layer's is 1 where all experts are alike, whatever k is.
    """
    shares = _shares(sums.slots if slots is None else slots, sums.probabilities)
    return len(shares[0]) * (shares * sums.probabilities).sum() / max(tokens, 1)


def z_loss(sums: RoutingSums, tokens: int) -> Tensor:
    """A micro-batch's part of the step's z-loss: the sum over layers of the mean of logsumexp(logits)^2 (Zoph et al.
    2022, eq. 5). tokens: non-padding ones of the whole step."""
    return sums.z.sum() / max(tokens, 1)


def _shares(slots: Tensor, like: Tensor) -> Tensor:
    return slots.to(like.dtype) / slots.sum(-1, keepdim=True).clamp(min=1)


class RoutingStats:
    """Figures of the routers over as many micro-batches and steps as are added."""

    def __init__(self) -> None:
        self._sums: RoutingSums | None = None

    def add(self, sums: RoutingSums) -> None:
        sums = sums.detach()
        self._sums = sums if self._sums is None else self._sums + sums

    def layers(self) -> dict[int, dict[str, Any]]:
        """Per layer: load, the experts' shares of the slots; entropy of that, divided by ln E (1: all alike); dropped,
        choices of tokens that no expert received; z, the mean of logsumexp(logits)^2."""
        if self._sums is None:
            return {}
        sums, tokens = self._sums, max(self._sums.tokens, 1)
        found = {}
        for layer, load, slots, z in zip(sums.layers, sums.shares.tolist(), sums.slots, sums.z, strict=True):
            entropy = -sum(share * log(share) for share in load if share)
            found[layer] = {
                "load": load,
                "entropy": entropy / log(len(load)) if len(load) > 1 else 1.0,
                "dropped": sums.tokens * sums.top_k - int(slots.sum()),
                "z": float(z) / tokens,
            }
        return found


# What an optimiser and the selection bias are told after a step


def active_experts(sums: RoutingSums) -> Tensor:
    """Which experts received a token, bool [L, E]."""
    return sums.slots > 0


def mark_active_experts(decoder: Decoder, sums: RoutingSums) -> None:
    """Set `active_experts` of every stack of experts: bool [E], or None where all of them received a token of these
    sums, the whole step's. An optimiser leaves the others as they are."""
    for layer, active in zip(sums.layers, active_experts(sums), strict=True):
        mask = None if bool(active.all()) else active
        for stack in _mixture(decoder, layer).experts.parameters():
            stack.active_experts = mask  # type: ignore[attr-defined]


def update_selection_bias(decoder: Decoder, sums: RoutingSums, gamma: float = 0.001) -> None:
    """Once after a step: each expert's selection bias grows by gamma where it had fewer slots of the step than the mean
    of its layer, and shrinks where it had more (DeepSeek-AI 2024b, section 2.1.2).

    Raises UsageError where the model's routers have no such bias.
    """
    with torch.no_grad():
        for layer, slots in zip(sums.layers, sums.slots.float(), strict=True):
            bias = _mixture(decoder, layer).gate.e_score_correction_bias
            if bias is None:
                raise UsageError(
                    f"layer {layer}: this {decoder.config.model_type} has no selection bias to update; a plait_gpt has"
                    " one with selection_bias: true, and so have deepseek_v3, dots1 and glm4_moe"
                )
            bias += gamma * (slots.mean() - slots).sign()


def selection_biases(decoder: Decoder) -> list[Tensor]:
    """Every router's selection bias."""
    routers = (module for module in decoder.modules() if isinstance(module, Router))
    return [router.e_score_correction_bias for router in routers if router.e_score_correction_bias is not None]


def _mixture(decoder: Decoder, layer: int) -> Mixture:
    mixture = decoder.model.layers[layer].mlp
    assert isinstance(mixture, Mixture)
    return mixture
