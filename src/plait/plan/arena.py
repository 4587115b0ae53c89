"""Where the buffers of a plan lie: one arena, whose memory is used again after barriers."""

from __future__ import annotations

from plait.kernels.abi import ROWS_TOKENS
from plait.plan.lowered import ALIGNMENT, ROW_LOCAL, Lowered, round_up

# Buffers do not begin at equal addresses modulo a page, or the first rows of all of them would fight for the same
# lines of the first cache when a step has one token.
_PAGE = 4096
_STAGGER = 9 * ALIGNMENT


def assign_memory(plan: Lowered, max_tokens: int, max_rows: int) -> None:
    """Give every buffer its offset in one arena, as small as reuse across barriers makes it."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    before: list[int] = []  # what the row operations just before read
    for op, stage in zip(plan.ops, plan.stages(), strict=True):
        # Attention can do the row operations before it itself, head by head (csrc/head_rows.h).
        late = before if op.kind == "attend" else []
        before = [*before, *op.inputs] if op.kind in ROW_LOCAL else []
        for number in (*op.inputs, *op.outputs, *late):
            memory = plan.buffers[number].memory
            first.setdefault(memory, stage)
            last[memory] = stage
    free: list[tuple[int, int]] = []  # (bytes, offset)
    busy: list[tuple[int, int, int]] = []  # (last stage, bytes, offset)
    end = 0
    for memory in sorted(first, key=lambda m: (first[m], m)):
        buffer = plan.buffers[memory]
        size = buffer.row_bytes * (max_tokens if buffer.rows == ROWS_TOKENS else max_rows)
        free += [(n, at) for stage, n, at in busy if stage < first[memory]]
        busy = [entry for entry in busy if entry[0] >= first[memory]]
        fitting = [region for region in free if region[0] >= size]
        if fitting:
            region = min(fitting)
            free.remove(region)
        else:
            region = (size, end)
            end += round_up(size, _PAGE) + _STAGGER
        buffer.offset = region[1]
        busy.append((last[memory], *region))
    for buffer in plan.buffers:
        buffer.offset = max(plan.buffers[buffer.memory].offset, 0) + buffer.column
    # A slice begins inside a row: its last row, counted whole, ends behind the buffer.
    plan.arena_bytes = end + max((buffer.column for buffer in plan.buffers), default=0)
