"""What the machine allows: read bandwidth, and the rate of matrix products by dtype.

Every tokens/s figure is to be read beside these, from the same minute: a decoder that reads its weights
once per token cannot beat bandwidth / bytes, and prefill cannot beat rate / operations per token.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from plait.kernels import native
from plait.kernels.machine import read_cpu_model

BUFFER_BYTES = (100 << 20, 1 << 30)
GEMM_SIZE = 1024
REPEATS = 9
PATIENCE_S = 2.0  # a dtype that the CPU only emulates need not be measured nine times


def median_seconds(work: Callable[[], Any]) -> float:
    """Median time of `work` after one run that warms up."""
    work()
    times: list[float] = []
    while len(times) < REPEATS and sum(times) < PATIENCE_S:
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def machine() -> dict[str, Any]:
    """The CPU, and how many of its processors this process may use."""
    return {"cpu": read_cpu_model(), "usable_cpus": native.usable_cpus(), "flags": sorted(native.cpu_features().flags)}


def measure() -> dict[str, Any]:
    """{"machine": ..., "read GB/s": {"100 MiB, 1 threads": x}, "GEMM GFLOP/s": {dtype: x}}"""
    import torch

    usable = native.usable_cpus()
    report: dict[str, Any] = {"machine": machine(), "versions": {"torch": torch.__version__}}
    reads, rates = {}, {}
    for num_bytes in BUFFER_BYTES:
        buffer = torch.ones(num_bytes // 8, dtype=torch.int64)  # ones: pages of zeros may share one frame
        for threads in sorted({1, usable}):
            torch.set_num_threads(threads)
            seconds = median_seconds(buffer.sum)
            reads[f"{num_bytes >> 20} MiB, {threads} threads"] = round(num_bytes / seconds / 1e9, 1)
    torch.set_num_threads(usable)
    for dtype in (torch.float32, torch.bfloat16):
        left, right = (torch.randn(GEMM_SIZE, GEMM_SIZE).to(dtype) for _ in range(2))
        seconds = median_seconds(partial(torch.matmul, left, right))
        rates[str(dtype).removeprefix("torch.")] = round(2 * GEMM_SIZE**3 / seconds / 1e9, 1)
    return report | {"read GB/s": reads, "GEMM GFLOP/s": rates}
