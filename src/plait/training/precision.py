"""In which numbers a step computes: fp32, bf16 or fp16 by autocast, and the loss scaler that fp16 needs."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from plait.errors import TrainingError, UsageError
from plait.weights.arrange import cpu_dtype

PRECISIONS = ("auto", "fp32", "bf16", "fp16")
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Precision:
    """name: fp32, bf16 or fp16. why: the sentence that a person is told."""

    name: str
    why: str

    def autocast(self, device: str) -> AbstractContextManager[Any]:
        """Products in the precision inside; parameters, gradients and optimiser stay fp32."""
        if self.name == "fp32":
            return nullcontext()
        return torch.autocast(torch.device(device).type, _DTYPES[self.name])

    def scaler(self) -> LossScaler | None:
        return LossScaler() if self.name == "fp16" else None


def choose_precision(name: str, device: str) -> Precision:
    """`auto`: bf16 where the hardware multiplies it fast, on older GPUs fp16 with a scaler, else fp32. UsageError."""
    if name not in PRECISIONS:
        raise UsageError(f"precision={name!r:.40}: choose {', '.join(PRECISIONS)}")
    if name != "auto":
        return Precision(name, "as asked for")
    if torch.device(device).type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        if major >= 8:
            return Precision("bf16", f"compute capability {major}.{minor} multiplies bf16 fast")
        return Precision("fp16", f"compute capability {major}.{minor} has no fast bf16: fp16 with a loss scaler")
    if cpu_dtype() == "bf16":
        return Precision("bf16", "this CPU multiplies bf16 faster than fp32")
    return Precision("fp32", "this CPU has no fast bf16")


class LossScaler:
    """Keeps fp16 gradients in range (Micikevicius et al. 2018): the loss is multiplied by a power of two.

    It is doubled after `growth_steps` good steps in a row, and halved by one whose gradients overflowed, which is then
    no step. The order in a step is: unscale, clip, check, step, update.
    """

    start = 2.0**15
    growth_steps = 1_000
    least = 2.0**-14

    def __init__(self) -> None:
        self.scale = self.start
        self.good_steps = 0

    def unscale(self, gradients: Iterable[Tensor]) -> None:
        """Divide by the scale, in place. It is a power of two, so nothing is rounded."""
        held = list(gradients)
        if held:
            torch._foreach_mul_(held, 1.0 / self.scale)

    def update(self, finite: bool) -> None:
        """After a step, or after none because its gradients were not finite. Raises TrainingError at the floor."""
        if finite:
            self.good_steps += 1
            if self.good_steps == self.growth_steps:
                self.scale, self.good_steps = self.scale * 2, 0
            return
        self.scale, self.good_steps = self.scale / 2, 0
        if self.scale < self.least:
            raise TrainingError(
                f"the loss scale fell to {self.scale:g} and fp16 gradients still overflow: use precision=bf16 or fp32,"
                " or a lower learning rate"
            )

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale, "good_steps": self.good_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scale, self.good_steps = float(state["scale"]), int(state["good_steps"])
