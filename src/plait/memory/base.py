"""What a forward sees of a memory: one step of it, with positions and attention. The memory itself is the caller's."""

from __future__ import annotations

from typing import Any, Protocol

from plait.errors import UsageError
from plait.ops import functional as ops
from plait.ops.spec import AttendSpec, LatentSpec
from plait.ops.step import StepInputs


class MemoryStep:
    """One step of a memory; made by `Memory.begin`, used by every layer of one forward, then dropped.

    positions: of the step's tokens, shaped like the ids (a tensor, or a symbol while recording).
    """

    positions: Any
    _reach: Any = None

    @property
    def reach(self) -> Any:
        """The most tokens that each token's sequence will ever have, shaped like the ids."""
        if self._reach is None:
            raise UsageError(
                "this model's rotary embedding (longrope) depends on how long a sequence will become:"
                " give StepInputs.reach"
            )
        return self._reach

    def attend(self, layer: int, q: Any, k: Any, v: Any, spec: AttendSpec, sinks: Any = None) -> Any:
        """q [..., H, dk], k [..., Hk, dk], v [..., Hk, dv] of a layer, sinks [H] or none -> [..., H, dv].

        The step's keys are written first, so its later queries see them under the causal rule.
        """
        return ops.attend(q, k, v, sinks, layer=layer, spec=spec, memory=self)

    def attend_tensors(self, layer: int, q: Any, k: Any, v: Any, spec: AttendSpec, sinks: Any = None) -> Any:
        """The reference of `attend` on tensors; each memory has its own."""
        raise TypeError(f"{type(self).__name__} holds no tensors")

    def attend_latent(self, layer: int, q: Any, latent: Any, k_rope: Any, weight: Any, spec: LatentSpec) -> Any:
        """q [..., H, nope + rope], latent [..., r], k_rope [..., 1, rope] of a layer, weight [H (nope + v), r] -> [...,
        H, v]. The step's rows [latent ; k_rope] are written first."""
        return ops.attend_latent(q, latent, k_rope, weight, layer=layer, spec=spec, memory=self)

    def attend_latent_tensors(self, layer: int, q: Any, latent: Any, k_rope: Any, weight: Any, spec: LatentSpec) -> Any:
        """The reference of `attend_latent` on tensors; each memory has its own."""
        raise TypeError(f"{type(self).__name__} holds no tensors")


class Memory(Protocol):
    """What attention remembers between steps: nothing, a dense cache, or pages."""

    def begin(self, ids: Any, inputs: StepInputs | None) -> MemoryStep:
        """Prepare one step over ids [B, T] or flat [N]."""


def refuse_inputs(inputs: StepInputs, memory: str, *names: str) -> None:
    """UsageError for the first of these inputs that is given: this memory would ignore it."""
    for name in names:
        if getattr(inputs, name) is not None:
            ways = {"adapter_ids": ": an engine adds adapters, plait.LLM(model, adapters={...})"}
            raise UsageError(f"{memory} takes no {name}{ways.get(name, '')}")


class SymbolicMemory:
    """The memory that a forward is recorded with: positions are an input of the recording, attention an operation."""

    def __init__(self, positions: Any, reach: Any = None) -> None:
        self._positions = positions
        self._reach = reach

    def begin(self, ids: Any, inputs: StepInputs | None) -> MemoryStep:
        step = MemoryStep()
        step.positions = self._positions
        step._reach = self._reach
        return step
