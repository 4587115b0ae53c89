"""The instruction sets that kernels come in, and which of them this process uses.

Chosen at run time from the CPU's features; `PLAIT_ISA` forces one by name, for tests and for bisecting.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from plait.errors import UsageError
from plait.kernels.machine import CpuFeatures

# From the plainest to the widest; each needs what it lists. A CPU uses the last that it can run.
_AVX512 = ("avx2", "fma", "f16c", "avx512f", "avx512dq", "avx512bw", "avx512vl")
ISA_FEATURES: Mapping[str, tuple[str, ...]] = {
    "portable": (),
    "avx2": ("avx2", "fma", "f16c"),
    "avx512": _AVX512,
    "avx512_vnni": (*_AVX512, "avx512_vnni"),
    "avx512_bf16": (*_AVX512, "avx512_vnni", "avx512_bf16"),
}


def supported_isas(features: CpuFeatures) -> list[str]:
    """Every instruction set that a CPU with these features can run, from the plainest to the widest."""
    return [name for name, needed in ISA_FEATURES.items() if features.has(*needed)]


def select_isa(features: CpuFeatures, environ: Mapping[str, str] | None = None) -> str:
    """The instruction set to use: the one that PLAIT_ISA names, else the widest that the CPU can run.

    Raises UsageError where PLAIT_ISA names none of ISA_FEATURES, or one that this CPU cannot run.
    """
    forced = (os.environ if environ is None else environ).get("PLAIT_ISA", "")
    supported = supported_isas(features)
    if not forced:
        return supported[-1]
    if forced not in ISA_FEATURES:
        raise UsageError(f"PLAIT_ISA={forced} is unknown: use one of {', '.join(ISA_FEATURES)}")
    if forced not in supported:
        missing = [name for name in ISA_FEATURES[forced] if not features.has(name)]
        raise UsageError(f"PLAIT_ISA={forced} needs {', '.join(missing)}, which this CPU lacks: unset PLAIT_ISA")
    return forced
