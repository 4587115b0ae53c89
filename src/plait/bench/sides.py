"""The two sides of a comparison: the engine in this process, and a peer in its own. Both take the same ids."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plait.bench.peers import PeerProcess


@dataclass(frozen=True)
class Timing:
    """One greedy request: seconds to its first token, seconds of all further ones, and the tokens."""

    prompt_s: float
    decode_s: float
    tokens: list[int]


@dataclass(frozen=True)
class BatchTiming:
    """Many requests together, prompts included. step_times: (whole, arithmetic) seconds of each step, ours only."""

    seconds: float
    tokens: list[list[int]]
    step_times: list[tuple[float, float]] = field(default_factory=list)


class Tap:
    """Stands before an executor: times it, and may keep the logits that come out."""

    def __init__(self, executor: Any) -> None:
        self._executor = executor
        self.compute_s = 0.0
        self.keep = False
        self.kept: list[NDArray[np.float32]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def execute(self, *args: Any, **options: Any) -> Any:
        if self.keep:
            options = {**options, "logits": True} if "logits" in options else options
        start = time.perf_counter()
        result = self._executor.execute(*args, **options)
        self.compute_s = time.perf_counter() - start
        # Inside a native executor a little of the time is Python's: it counts what its library takes itself.
        self.compute_s = min(self.compute_s, getattr(self._executor, "compute_s", self.compute_s))
        if self.keep:
            logits = getattr(result, "logits", result)
            self.kept.append(np.array(logits, np.float32))
        return result

    def execute_steps(self, *args: Any) -> Any:
        result = self._executor.execute_steps(*args)
        self.compute_s = self._executor.compute_s
        return result


class OurSide:
    """Greedy requests through the engine: scheduler, sampler and all. options: of build_engine."""

    def __init__(self, model: Any, *, context: int, sequences: int = 1, threads: int | None = None, **options: Any):
        from plait.engine.build import build_engine

        self.bundle = build_engine(
            model,
            max_model_len=context,
            max_num_seqs=sequences,
            threads=threads,
            prefix_caching=False,
            generation_config="none",
            **options,
        )
        self.engine = self.bundle.engine
        self.executor = self.engine.executor
        self.tap = Tap(self.executor)
        self.engine.executor = self.tap
        self._runs = 0

    def describe(self) -> dict[str, str]:
        """What computes, and in which precision."""
        report = self.bundle.report
        found = {"plan": self.bundle.plan, "weights": str(self.bundle.precision), "kv_dtype": str(report["kv_dtype"])}
        return found | ({"isa": str(report["isa"])} if "isa" in report else {})

    def complete(self, prompt: list[int], new_tokens: int) -> Timing:
        """A first token and new_tokens more."""
        request_id = self._add(prompt, new_tokens + 1)
        tokens: list[int] = []
        start = time.perf_counter()
        while not tokens:
            tokens += self._step().get(request_id, [])
        first = time.perf_counter()
        while self.engine.has_unfinished():
            tokens += self._step().get(request_id, [])
        return Timing(first - start, time.perf_counter() - first, tokens)

    def batch(self, prompts: list[list[int]], new_tokens: list[int]) -> BatchTiming:
        """All requests at once. new_tokens: of each."""
        wanted = zip(prompts, new_tokens, strict=True)
        tokens: dict[str, list[int]] = {self._add(prompt, count): [] for prompt, count in wanted}
        self.engine.step_times.clear()
        start = time.perf_counter()
        while self.engine.has_unfinished():
            for request_id, new in self._step().items():
                tokens[request_id] += new
        return BatchTiming(time.perf_counter() - start, list(tokens.values()), list(self.engine.step_times))

    def logits(self, tokens: list[int]) -> NDArray[np.float32]:
        """float32 [T - 1, V]: after each token but the last."""
        from plait.engine.params import SamplingParams
        from plait.engine.request import Request

        self.tap.keep, self.tap.kept = True, []
        self._runs += 1
        params = SamplingParams(max_tokens=0, prompt_logprobs=0, temperature=0.0)
        self.engine.add_request(Request(str(self._runs), tokens, params))
        while self.engine.has_unfinished():
            self.engine.step()
        self.tap.keep = False
        kept, self.tap.kept = self.tap.kept, []
        return np.concatenate(kept)[: len(tokens) - 1]

    def close(self) -> None:
        """The engine ends with its last reference."""

    def _add(self, prompt: list[int], max_tokens: int) -> str:
        from plait.engine.params import SamplingParams
        from plait.engine.request import Request

        self._runs += 1
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        self.engine.add_request(Request(str(self._runs), prompt, params))
        return str(self._runs)

    def _step(self) -> dict[str, list[int]]:
        outputs = self.engine.step()
        for output in outputs:
            if output.error is not None:
                raise RuntimeError(f"the request failed: {output.error}")
        return {output.request_id: output.token_ids for output in outputs}


class TheirSide:
    """A peer with one model. dtype: where it takes one. started: called with the process's id before it loads."""

    def __init__(
        self,
        peer: str,
        path: Path,
        *,
        context: int,
        sequences: int = 1,
        threads: int,
        dtype: str | None = None,
        started: Callable[[int], object] = lambda pid: None,
    ) -> None:
        self._process = PeerProcess(peer)
        self.pid = self._process.pid
        arguments: dict[str, Any] = {"path": str(path), "threads": threads, "context": context, "sequences": sequences}
        try:
            started(self.pid)
            self.loaded = self._process.call("load", **arguments, **({"dtype": dtype} if dtype else {}))
            self.versions: dict[str, str] = self._process.call("versions")
        except BaseException:
            self._process.close()
            raise

    def describe(self) -> dict[str, str]:
        """As OurSide.describe, as far as the peer says."""
        return {"kv_dtype": str(self.loaded.get("kv_dtype", "its own choice"))}

    def settle_batch(self, prompts: list[list[int]], new_tokens: int) -> dict[str, Any] | None:
        """Let a peer that has a choice try both ways on a short batch and keep the faster; None for the others."""
        if not self.loaded.get("settles_batch"):
            return None
        found: dict[str, Any] = self._process.call("settle_batch", prompts=prompts, new_tokens=new_tokens)
        return found

    def complete(self, prompt: list[int], new_tokens: int) -> Timing:
        return Timing(**self._process.call("complete", prompt=prompt, new_tokens=new_tokens))

    def batch(self, prompts: list[list[int]], new_tokens: list[int]) -> BatchTiming:
        return BatchTiming(**self._process.call("batch", prompts=prompts, new_tokens=new_tokens))

    def logits(self, tokens: list[int]) -> NDArray[np.float32]:
        """float32 [T - 1, V]: after each token but the last."""
        with tempfile.TemporaryDirectory() as name:
            file = Path(name) / "logits.npy"
            self._process.call("write_logits", tokens=tokens, file=str(file))
            return np.load(file)[: len(tokens) - 1]

    def close(self) -> None:
        self._process.close()


Side = OurSide | TheirSide


@dataclass(frozen=True)
class PeerModel:
    """One side that we are compared with: which peer, which file, in which dtype ("" where the file says)."""

    label: str
    peer: str
    path: Path
    dtype: str = ""


@contextmanager
def open_sides(
    model: Any,
    peers: list[PeerModel],
    *,
    context: int,
    sequences: int = 1,
    threads: int,
    options: dict[str, Any] | None = None,
) -> Iterator[tuple[OurSide, dict[str, TheirSide]]]:
    """Ours and theirs, loaded and ready; the peers' processes end with the block."""
    with ExitStack() as stack:
        theirs: dict[str, TheirSide] = {}
        for peer in peers:
            side = TheirSide(
                peer.peer, peer.path, context=context, sequences=sequences, threads=threads, dtype=peer.dtype or None
            )
            stack.callback(side.close)
            theirs[peer.label] = side
        yield OurSide(model, context=context, sequences=sequences, threads=threads, **(options or {})), theirs
