"""Block managers of tests, and sequences that compute in them."""

from __future__ import annotations

from plait.memory.blocks import BlockManager
from plait.memory.layout import make_layout
from plait.ops.spec import LayerCache

FULL = LayerCache(1, 4, 4)


def window(tokens):
    return LayerCache(1, 4, 4, tokens)


def manager_of(*layers, num_blocks=100, block_tokens=4, **options) -> BlockManager:
    """One group per kind of layer given (one layer each, so groups have one layer)."""
    return BlockManager(make_layout(layers, block_tokens=block_tokens), num_blocks, **options)


def compute(manager, seq, tokens, chunk=1 << 30):
    """Run `tokens` through in chunks, as an engine would with this sequence alone."""
    while seq.num_computed < len(tokens):
        total = min(seq.num_computed + chunk, len(tokens))
        assert manager.allocate(seq, total)
        manager.take_copies()
        manager.commit(seq, tokens, total)
    return seq


def cached_tokens(manager, tokens, salt=()) -> int:
    """What a new request with these tokens would find."""
    seq = manager.new_sequence(tokens, salt)
    manager.free(seq)
    return seq.num_cached_tokens
