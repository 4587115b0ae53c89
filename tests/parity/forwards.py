"""The ways to run one decoder over the same prompts: plain, dense, paged, and replayed from a recording."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from plait.memory.blocks import BlockManager, SequenceBlocks
from plait.memory.dense import DenseMemory
from plait.memory.layout import CacheLayout, make_layout
from plait.memory.paged import PagedMemory
from plait.model.decoder import Decoder
from plait.model.record import record
from plait.ops.interpreter import Interpreter
from plait.ops.recording import Recording
from plait.ops.step import Sequences, StepInputs


def plain(decoder: Decoder, ids: Tensor) -> Tensor:
    """One causal forward without a memory: ids [B, T] -> logits [B, T, V]."""
    with torch.inference_mode():
        return decoder.logits(decoder(ids))


def dense(decoder: Decoder, ids: Tensor, chunks: Sequence[int]) -> Tensor:
    """The same through a dense cache that grows, in steps of the given lengths (repeated until the end)."""
    memory = DenseMemory(decoder.config.caches(), ids.shape[0], capacity=5)
    with torch.inference_mode():
        parts = [
            decoder.logits(decoder(ids[:, a:b], StepInputs(reach=torch.full((len(ids), b - a), ids.shape[1])), memory))
            for a, b in bounds(ids.shape[1], chunks)
        ]
    return torch.cat(parts, 1)


def small_layout(decoder: Decoder, chunk_tokens: int) -> CacheLayout:
    """Blocks of four tokens, so that short sequences cross many of their borders."""
    return make_layout(decoder.config.caches(), 4, 64, chunk_tokens, block_tokens=4)


class PagedRun:
    """A block manager and a pool around a decoder, or around an interpreter of its recording.

    chunk_tokens: the most tokens of a sequence in one step. num_blocks: of the pool.
    """

    def __init__(
        self,
        decoder: Decoder,
        num_blocks: int = 256,
        chunk_tokens: int = 64,
        interpret: bool = False,
        layout: CacheLayout | None = None,
    ) -> None:
        layout = layout or small_layout(decoder, chunk_tokens)
        self.decoder = decoder
        self.blocks = BlockManager(layout, num_blocks, chunk_tokens=chunk_tokens)
        self.memory = PagedMemory(layout, num_blocks)
        self.interpreter = replayed(decoder) if interpret else None

    def step(self, plan: Sequence[tuple[SequenceBlocks, Sequence[int], int]]) -> list[Tensor]:
        """One step: copies, forward, commit. Returns the logits of each sequence's new tokens.

        plan: (blocks, all ids, total) of sequences that are allocated up to `total` tokens.
        """
        query = [total - blocks.num_computed for blocks, _, total in plan]
        sequences = Sequences(
            np.concatenate(([0], np.cumsum(query))).astype(np.int32),
            np.array([total for _, _, total in plan], np.int32),
            self.blocks.block_tables([blocks for blocks, _, _ in plan]),
            self.blocks.take_copies(),
        )
        ids = torch.tensor([i for blocks, tokens, total in plan for i in tokens[blocks.num_computed : total]])
        reach = np.repeat([len(tokens) for _, tokens, _ in plan], query)
        inputs = StepInputs(sequences=sequences, reach=reach)
        with torch.inference_mode():
            if self.interpreter is None:
                logits = self.decoder.logits(self.decoder(ids, inputs, self.memory))
            else:
                logits = run_interpreter(self.interpreter, ids, self.memory.begin(ids, inputs))
        for blocks, tokens, total in plan:
            self.blocks.commit(blocks, tokens, total)
        return list(logits.split(query))


def paged(decoder: Decoder, ids: Tensor, chunks: Sequence[int], interpret: bool = False) -> Tensor:
    """Both rows as sequences of a paged batch, the second one a step behind: prefill and decode mixed."""
    run = PagedRun(decoder, interpret=interpret)
    rows = ids.tolist()
    seqs = [run.blocks.new_sequence(row) for row in rows]
    steps = list(bounds(ids.shape[1], chunks))
    parts: list[list[Tensor]] = [[] for _ in rows]
    for number in range(len(steps) + len(rows) - 1):
        plan = []
        for i, seq in enumerate(seqs):
            if 0 <= number - i < len(steps):
                total = steps[number - i][1]
                assert run.blocks.allocate(seq, total)
                plan.append((i, (seq, rows[i], total)))
        for (i, _), logits in zip(plan, run.step([p for _, p in plan]), strict=True):
            parts[i].append(logits)
        run.blocks.check_integrity(seqs)
    return torch.stack([torch.cat(p) for p in parts])


def replayed(decoder: Decoder) -> Interpreter:
    """The decoder's recording after a round trip through JSON, over its weights."""
    recording = Recording.from_json(record(decoder).to_json())
    return Interpreter(recording, {name: p.detach() for name, p in decoder.named_parameters()})


def run_interpreter(interpreter: Interpreter, ids: Tensor, step) -> Tensor:
    inputs = {"ids": ids, "positions": step.positions, "logit_rows": torch.arange(len(ids))}
    if "reach" in interpreter.recording.inputs:
        inputs["reach"] = step.reach
    return interpreter.run(inputs, step)["logits"]


def bounds(length: int, chunks: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(start, end) of consecutive chunks; the given lengths are repeated, the last chunk is cut at `length`."""
    start, turn = 0, 0
    while start < length:
        end = min(length, start + chunks[turn % len(chunks)])
        yield start, end
        start, turn = end, turn + 1
