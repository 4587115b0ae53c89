"""The widest instruction set that the CPU can run, or the one that was asked for."""

from __future__ import annotations

import pytest

from plait.errors import UsageError
from plait.kernels import native
from plait.kernels.isa import ISA_FEATURES, select_isa, supported_isas
from plait.kernels.machine import CpuFeatures

AVX2 = frozenset({"avx2", "fma", "f16c"})
AVX512 = AVX2 | {"avx512f", "avx512dq", "avx512bw", "avx512vl"}


@pytest.mark.parametrize(
    ("flags", "widest"),
    [
        (frozenset(), "portable"),
        ({"avx2", "f16c"}, "portable"),  # without fma
        (AVX2, "avx2"),
        (AVX2 | {"avx512f"}, "avx2"),  # Xeon Phi: no byte and word instructions
        (AVX512, "avx512"),
        (AVX512 | {"avx512_vnni"}, "avx512_vnni"),
        (AVX512 | {"avx512_vnni", "avx512_bf16"}, "avx512_bf16"),
        ({"asimd", "bf16"}, "portable"),
    ],
)
def test_the_widest_that_the_cpu_runs(flags, widest):
    assert select_isa(CpuFeatures("any", frozenset(flags)), {}) == widest


def test_every_narrower_one_can_be_forced():
    everything = CpuFeatures("x86_64", AVX512 | {"avx512_vnni", "avx512_bf16"})
    assert supported_isas(everything) == list(ISA_FEATURES)
    for name in ISA_FEATURES:
        assert select_isa(everything, {"PLAIT_ISA": name}) == name


def test_one_that_the_cpu_lacks_is_refused_by_the_missing_feature():
    with pytest.raises(UsageError, match="PLAIT_ISA=avx512_vnni needs avx512_vnni, which this CPU lacks"):
        select_isa(CpuFeatures("x86_64", AVX512), {"PLAIT_ISA": "avx512_vnni"})


def test_an_unknown_name_is_refused_with_the_list():
    with pytest.raises(UsageError, match="PLAIT_ISA=sse9 is unknown: use one of portable, avx2"):
        select_isa(CpuFeatures("x86_64", AVX2), {"PLAIT_ISA": "sse9"})


def test_this_machine_runs_one_of_them(monkeypatch):
    monkeypatch.delenv("PLAIT_ISA", raising=False)
    assert select_isa(native.cpu_features()) in ISA_FEATURES
