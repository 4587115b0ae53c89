"""A tiny deterministic model over a real paged cache, and the same model without any cache.

Each layer keeps one 64-bit number per token, a hash of the token's state; a token's next state hashes the
numbers, with their positions, that it sees. All arithmetic is on integers, so that the logits are the
same bits under any chunking, and a wrong block table, a missed copy, a block recycled too early or a stale
prefix hit changes the tokens that come out.
"""

from __future__ import annotations

import numpy as np

from plait.engine.engine import Engine
from plait.engine.executor import StepResult, best_of
from plait.engine.params import SamplingParams
from plait.engine.sampler import Sampler
from plait.engine.sampling_state import SamplingState
from plait.engine.tokens import TokenBuffer
from plait.memory.layout import CacheGroup, CacheLayout
from plait.ops.spec import LayerCache
from plait.ops.step import StepInputs

VOCAB = 50
GREEDY = SamplingParams(temperature=0, max_tokens=8)
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def mix(x: np.ndarray) -> np.ndarray:
    """splitmix64's finaliser, on uint64."""
    x = np.asarray(x, np.uint64)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def placed(values: np.ndarray, positions: np.ndarray) -> np.ndarray:
    return mix(values ^ (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15))


def logits_of(state: np.ndarray, vocab_size: int, sharpness: float) -> np.ndarray:
    """float32 [R, V] from states uint64 [R]."""
    noise = mix(state[:, None] + mix(np.arange(vocab_size, dtype=np.uint64) + np.uint64(77)))
    return ((noise >> np.uint64(40)).astype(np.float32) / np.float32(1 << 24) * sharpness).astype(np.float32)


def hidden_of(state: np.ndarray) -> np.ndarray:
    """float32 [N, 4] in 0 .. 1 from states uint64 [N]."""
    return (state[:, None] >> np.array([0, 16, 32, 48], np.uint64) & np.uint64(0xFFFF)).astype(np.float32) / 65536


def make_layout(windows: tuple[int, ...], block_tokens: tuple[int, ...]) -> CacheLayout:
    groups = tuple(
        CacheGroup((i,), LayerCache(1, 1, 1, window), size)
        for i, (window, size) in enumerate(zip(windows, block_tokens, strict=True))
    )
    return CacheLayout(groups, group_layers=1, layer_bytes=max(block_tokens) * 8, bytes_per_number=4)


class ToyExecutor:
    """The Executor protocol on numpy. One layer per cache group."""

    def __init__(
        self,
        num_blocks: int = 64,
        windows: tuple[int, ...] = (0, 6),
        block_tokens: tuple[int, ...] = (4, 4),
        max_batched_tokens: int = 16,
        vocab_size: int = VOCAB,
        sharpness: float = 6.0,
        sampled_ids: int | None = None,
    ) -> None:
        self.vocab_size = vocab_size
        self.sampled_ids = sampled_ids or vocab_size
        self.layout = make_layout(windows, block_tokens)
        self.num_blocks = num_blocks
        self.max_batched_tokens = max_batched_tokens
        self.sharpness = sharpness
        self.weights = np.uint64(0)  # another value is another model
        self.pool = np.full((num_blocks, max(block_tokens)), 0xDEAD, np.uint64)
        self.steps: list[StepInputs] = []
        self.wanted: list[tuple[bool, bool]] = []  # per step: whether logits and hidden states were asked for

    def execute(
        self, token_ids: np.ndarray, inputs: StepInputs, *, logits: bool = True, hidden: bool = False
    ) -> StepResult:
        self.wanted.append((logits, hidden))
        numbers = self.compute(token_ids, inputs)
        best_ids, best_values = best_of(numbers, self.sampled_ids)
        return StepResult(
            best_ids, best_values, numbers if logits else None, hidden_of(self.states) if hidden else None
        )

    def compute(self, token_ids: np.ndarray, inputs: StepInputs) -> np.ndarray:
        """The step's logits; self.states are the states of its tokens."""
        assert token_ids.dtype == np.int32 and len(token_ids) <= self.max_batched_tokens
        sequences = inputs.sequences
        assert len(token_ids) == sequences.query_start[-1]
        self.steps.append(inputs)
        for source, destination in sequences.copies.tolist():
            assert destination != 0
            self.pool[destination] = self.pool[source]
        states = np.empty(len(token_ids), np.uint64)
        for s in range(sequences.count):
            first, last = sequences.query_start[s : s + 2].tolist()
            context = int(sequences.context_len[s])
            states[first:last] = self._run(token_ids[first:last], context, sequences.block_table[:, s])
        self.states = states
        return self.transform(logits_of(states[inputs.logit_rows], self.vocab_size, self.sharpness))

    def transform(self, logits: np.ndarray) -> np.ndarray:
        return logits

    def _run(self, tokens: np.ndarray, context: int, tables: np.ndarray) -> np.ndarray:
        positions = np.arange(context - len(tokens), context)
        state = mix(tokens.astype(np.uint64) + self.weights)
        for group, table in zip(self.layout.groups, tables, strict=True):
            size, window = group.block_tokens, group.cache.window
            blocks = table[positions // size]
            assert (blocks != 0).all(), "the null block must not be written"
            self.pool[blocks, positions % size] = state
            first = max(positions[0] - window + 1, 0) if window else 0
            seen = np.arange(first, context)
            total = np.cumsum(placed(self.pool[table[seen // size], seen % size], seen))
            state = attend(state, total, positions - first, window)
        return state


def attend(state: np.ndarray, total: np.ndarray, index: np.ndarray, window: int) -> np.ndarray:
    """total: running sums of what the visible positions hold; index: where in it each query stands."""
    before = np.zeros_like(total[index])
    if window:
        old = index - window
        before = np.where(old >= 0, total[np.maximum(old, 0)], np.uint64(0))
    return mix(state + (total[index] - before))


def states_without_cache(executor: ToyExecutor, tokens: np.ndarray) -> np.ndarray:
    positions = np.arange(len(tokens))
    state = mix(np.asarray(tokens).astype(np.uint64) + executor.weights)
    for group in executor.layout.groups:
        state = attend(state, np.cumsum(placed(state, positions)), positions, group.cache.window)
    return state


def logits_without_cache(executor: ToyExecutor, tokens: np.ndarray) -> np.ndarray:
    """float32 [T, V]: all logits of one sequence."""
    return executor.transform(
        logits_of(states_without_cache(executor, tokens), executor.vocab_size, executor.sharpness)
    )


def generate_alone(
    executor: ToyExecutor,
    prompt: list[int],
    params: SamplingParams,
    eos: frozenset[int] = frozenset(),
    choice: int = 0,
    max_total: int = 1 << 30,
) -> tuple[list[int], str]:
    """The oracle: recompute everything for every token; (output ids, finish reason)."""
    tokens = TokenBuffer(prompt)
    ends = eos | frozenset(params.stop_token_ids)
    seed = (params.seed or 0) % (1 << 64)
    state = SamplingState(params, tokens, len(prompt), seed, choice, ends, executor.vocab_size)
    sampler = Sampler(executor.vocab_size)
    stops = (frozenset() if params.ignore_eos else eos) | frozenset(params.stop_token_ids)
    output: list[int] = []
    while True:
        last = states_without_cache(executor, tokens.array)[-1:]
        row = executor.transform(logits_of(last, executor.vocab_size, executor.sharpness))
        (token,) = sampler.sample(StepResult(*best_of(row, sampler.vocab_size), row), [0], [state]).token_ids
        tokens.append(token)
        state.observe(token)
        output.append(token)
        if token in stops:
            return output, "stop"
        if len(tokens) >= max_total or (params.max_tokens is not None and len(output) >= params.max_tokens):
            return output, "length"


def run_to_end(engine, check: bool = True) -> dict[tuple[str, int], list]:
    """Step until nothing is left: all outputs by (request id, choice)."""
    outputs: dict[tuple[str, int], list] = {}
    while engine.has_unfinished():
        for output in engine.step():
            outputs.setdefault((output.request_id, output.index), []).append(output)
        if check:
            engine.check_integrity()
    return outputs


def tokens_of(outputs: list) -> list[int]:
    return [t for o in outputs for t in o.token_ids]


def make_engine(executor: ToyExecutor | None = None, **options: object) -> Engine:
    return Engine(executor or ToyExecutor(), **{"max_model_len": 60, "max_num_seqs": 4, **options})


def finish(engine: Engine, request_id: str = "a", choice: int = 0) -> tuple[list[int], str, object]:
    outputs = run_to_end(engine)[request_id, choice]
    return tokens_of(outputs), outputs[-1].finish_reason, outputs[-1].stop_reason
