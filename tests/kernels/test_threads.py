"""The worker threads: how many there are, that they sleep, that they get out of the way, that they survive a fork."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import Any

import numpy as np
import pytest

from plait.kernels import native

pytestmark = pytest.mark.skipif(native.native_library() is None, reason=f"no native library: {native.reason()}")
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def in_process(code: str, timeout: float = 60) -> str:
    """What a process of its own prints, which has the toy plan at hand."""
    start = (
        "import os, sys, time\n"
        "from plait.kernels import native\n"
        "from tests.kernels.test_plan_runtime import Toy, run_steps\n"
        "functions = native.native_library().functions\n"
        "def workers():\n"
        "    names = [open(f'/proc/self/task/{t}/comm').read().strip() for t in os.listdir('/proc/self/task')]\n"
        "    return sorted(name for name in names if name.startswith('plait-'))\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", start + code], capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_number_of_threads_can_be_set_within_limits():
    functions = native.native_library().functions
    before = functions.plait_threads()
    try:
        assert functions.plait_set_threads(3) == 0 and functions.plait_threads() == 3
        for wrong in (-1, 257):
            assert functions.plait_set_threads(wrong) == -1
            assert f"{wrong} threads" in functions.plait_last_error().decode()
        assert functions.plait_threads() == 3
        functions.plait_set_threads(0)
        topology = native.topology()
        assert functions.plait_threads() == max(1, min(topology.usable_cpus, topology.physical_cores))
    finally:
        functions.plait_set_threads(before)


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_every_item_of_a_stage_is_done_once(threads: int):
    functions = native.native_library().functions
    before = functions.plait_threads()
    try:
        functions.plait_set_threads(threads)
        # Around the number that one word can count (65,535), too; many small stages, so that threads come late to some.
        for items in (0, 1, 2, 3, 7, 64, 1000, 65_534, 65_535, 65_536, 131_071, 200_003, *range(2, 400)):
            visits = np.zeros(items, np.int32)
            assert functions.plait_visit(items, visits.ctypes.data) == 0
            assert (visits == 1).all(), (items, np.flatnonzero(visits != 1)[:5])
    finally:
        functions.plait_set_threads(before)


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    """What one process saw of its workers, one thing after another."""
    code = (
        "functions.plait_set_threads(3)\n"
        "toy = Toy(False)\n"
        "seen = {'before work': workers()}\n"
        "run_steps(toy, check=False)\n"
        "seen['three'] = workers()\n"
        "functions.plait_set_threads(1)\n"
        "run_steps(toy, check=False)\n"
        "seen['one'] = workers()\n"
        "functions.plait_set_threads(2)\n"
        "run_steps(toy, check=False)\n"
        "time.sleep(0.01)\n"
        "def of_workers(read):\n"
        "    tasks = [f'/proc/self/task/{t}' for t in os.listdir('/proc/self/task')]\n"
        "    return [read(t) for t in tasks if open(f'{t}/comm').read().startswith('plait-')]\n"
        "used = lambda: sum(of_workers(lambda t: int(open(f'{t}/schedstat').read().split()[0])))\n"
        "before = used()\n"
        "time.sleep(0.2)\n"
        "seen['idle ns'] = used() - before\n"
        "status = lambda t: dict(l.split(':', 1) for l in open(f'{t}/status') if ':' in l)\n"
        "seen['blocked'] = of_workers(lambda t: int(status(t)['SigBlk'], 16) >> 1 & 1)\n"
        "functions.plait_set_threads(0)\n"
        "first = sorted(os.sched_getaffinity(0))[:1]\n"
        "os.sched_setaffinity(0, first)\n"
        "time.sleep(1.1)\n"
        "run_steps(toy, check=False)\n"
        "seen['pinned'] = functions.plait_threads()\n"
        "import json; print(json.dumps(seen))\n"
    )
    return json.loads(in_process(code))


@linux
def test_there_are_no_threads_before_there_is_work_and_no_more_than_wanted(seen):
    assert seen["before work"] == []
    assert seen["three"] == seen["one"] == ["plait-1", "plait-2"]


@linux
def test_workers_use_no_time_when_there_is_no_work(seen):
    assert seen["idle ns"] < 1_000_000  # of 200 million


@linux
def test_workers_take_no_signals(seen):
    assert seen["blocked"] == [1, 1]  # SIGINT


@linux
def test_fewer_cpus_mean_fewer_threads(seen):
    assert seen["pinned"] == 1


@linux
@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
def test_a_busy_process_beside_costs_no_more_than_its_share():
    """With every CPU taken by somebody else, several threads must not be much slower than one."""
    code = (
        "toy = Toy(True)\n"
        "step = toy.step([1] * 8, [0, 8], [8], [0], [7])\n"
        "def rate(threads):\n"
        "    functions.plait_set_threads(threads)\n"
        "    end, count = time.monotonic() + 1.0, 0\n"
        "    while time.monotonic() < end:\n"
        "        toy.plan.run(step)\n"
        "        count += 1\n"
        "    return count\n"
        "rate(2)\n"
        "print(rate(1), rate(2), rate(1), rate(2))\n"
    )
    spin = "import time\nend = time.monotonic() + 20\nwhile time.monotonic() < end: pass"
    busy = [subprocess.Popen([sys.executable, "-c", spin]) for _ in os.sched_getaffinity(0)]
    try:
        time.sleep(0.2)
        one, two, again, two_again = (int(number) for number in in_process(code).split())
    finally:
        for process in busy:
            process.kill()
            process.wait()
    assert max(two, two_again) > 0.5 * min(one, again)
