"""What the machine allows: read bandwidth, and the rate of matrix products by the layout of the weights.

Every tokens/s figure is to be read beside these, from the same minutes: a decoder that reads its weights once per token
cannot beat bandwidth / bytes, and prefill cannot beat rate / operations per token.
"""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

from plait.kernels import native
from plait.kernels.abi import LAYOUTS
from plait.kernels.machine import read_cpu_model

BUFFER_BYTES = (100 << 20, 1 << 30)
GEMM_SIZE = 1024
REPEATS = READ_ROUNDS = 9  # 100 MB take a few milliseconds each
PATIENCE_S = 2.0  # a dtype that the CPU only emulates need not be measured nine times
_PRODUCT_S = 0.2
_ROOT = Path(__file__).resolve().parents[3]
_SOURCES = ("src", "csrc", "CMakeLists.txt", "pyproject.toml")


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
    """The CPU, how many of its processors this process may use, its memory and system, and the kernels in use."""
    library = native.native_library()
    return {
        "cpu": read_cpu_model(),
        "usable_cpus": native.usable_cpus(),
        "flags": sorted(native.cpu_features().flags),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "kernels": library.isa() if library is not None else None,
        # The file's name without its folder: results are for others to read.
        "library": native.reason() if library is None else library.path.name,
    }


def origin() -> dict[str, Any]:
    """Where figures come from: the date, the commit of plait's sources, the machine."""
    return {"date": date.today().isoformat(), "commit": source_commit(), "machine": machine()}


def source_commit(root: Path = _ROOT) -> str | None:
    """The commit of the checkout that plait runs from, "-dirty" where its sources differ; None outside a checkout."""
    if not (root / ".git").exists():
        return None
    git = ["git", "--no-optional-locks", "-C", str(root)]
    try:
        head = subprocess.run([*git, "rev-parse", "--short=10", "HEAD"], capture_output=True, text=True)
        changes = subprocess.run([*git, "status", "--porcelain", "--", *_SOURCES], capture_output=True, text=True)
    except OSError:
        return None
    return head.stdout.strip() + ("-dirty" if changes.stdout.strip() else "") if head.returncode == 0 else None


def read_rate(num_bytes: int, threads: int) -> float:
    """Bytes per second of reading a buffer of num_bytes, the median of READ_ROUNDS rounds: what lasts."""
    library = native.native_library()
    if library is not None:
        return float(library.functions.plait_measure_read(num_bytes, threads, READ_ROUNDS))
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    buffer = torch.ones(num_bytes // 8, dtype=torch.int64)  # ones: pages of zeros may share one frame
    seconds = median_seconds(buffer.sum)
    torch.set_num_threads(before)
    return num_bytes / seconds


def product_rate(layout: str, threads: int) -> float | None:
    """Multiply-adds per second of our best kernel for weights of a layout; None where nothing measures it.

    Without the native library: torch's products, for F32 and BF16.
    """
    library = native.native_library()
    if library is not None:
        rate = float(library.functions.plait_measure_matmul(LAYOUTS[layout], threads, _PRODUCT_S))
        return rate if rate > 0 else None
    return torch_product_rate(layout, threads) if layout in ("F32", "BF16") else None


def torch_product_rate(layout: str, threads: int) -> float:
    """Multiply-adds per second of torch's product of two square matrices. layout: "F32" or "BF16"."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    dtype = {"F32": torch.float32, "BF16": torch.bfloat16}[layout]
    left, right = (torch.randn(GEMM_SIZE, GEMM_SIZE).to(dtype) for _ in range(2))
    seconds = median_seconds(partial(torch.matmul, left, right))
    torch.set_num_threads(before)
    return GEMM_SIZE**3 / seconds


def measure(threads: int | None = None) -> dict[str, Any]:
    """{"machine", "versions", "read GB/s": {"100 MiB, 1 threads": x}, "products G multiply-adds/s": {layout: x}}"""
    import torch

    usable = threads or native.usable_cpus()
    reads = {
        f"{num_bytes >> 20} MiB, {count} threads": round(read_rate(num_bytes, count) / 1e9, 1)
        for num_bytes in BUFFER_BYTES
        for count in sorted({1, usable})
    }
    rates = {}
    for layout in LAYOUTS:
        rate = product_rate(layout, usable) if native.available() else None
        if rate is not None:
            rates[layout] = round(rate / 1e9, 1)
    for layout in ("F32", "BF16"):
        rates[f"{layout}, torch"] = round(torch_product_rate(layout, usable) / 1e9, 1)
    return {
        "bench": "limits",
        **origin(),
        "versions": {"torch": torch.__version__},
        "settings": {"threads": usable, "rounds of a read": READ_ROUNDS},
        "read GB/s": reads,
        "products G multiply-adds/s": rates,
    }
