"""How a model's key/value cache divides into groups of layers that share one pool of blocks.

No torch here: `plait models`, the scheduler and the block manager only need the arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from math import ceil
from typing import Any

from plait.errors import ConfigError
from plait.ops.spec import LayerCache

DEFAULT_BLOCK_TOKENS = 16


@dataclass(frozen=True)
class CacheGroup:
    """Layers of equal cache shape and kind that share one block table.

    layers: layer indices, at most `group_layers` of the layout (the last group of a kind may hold
    fewer; the rest of its block is padding). block_tokens: tokens per block in this group.
    """

    layers: tuple[int, ...]
    cache: LayerCache
    block_tokens: int


@dataclass(frozen=True)
class CacheLayout:
    """The groups of a model over one pool; every block of every group has `block_bytes` bytes.

    group_layers: layer slots per block. layer_bytes: bytes of one layer's slot (the widest group's).
    """

    groups: tuple[CacheGroup, ...]
    group_layers: int
    layer_bytes: int
    bytes_per_number: int

    @property
    def block_bytes(self) -> int:
        return self.group_layers * self.layer_bytes

    def slot(self, layer: int) -> tuple[int, int]:
        """(group, slot inside the group's block) of a model layer; KeyError for a layer without a cache."""
        return self._slots[layer]

    @cached_property
    def _slots(self) -> dict[int, tuple[int, int]]:
        return {layer: (g, slot) for g, group in enumerate(self.groups) for slot, layer in enumerate(group.layers)}

    def blocks_per_sequence(self, tokens: int, chunk_tokens: int | None = None) -> int:
        """Blocks that a sequence of `tokens` tokens needs at most, over all groups.

        chunk_tokens: the most tokens that one step may add (None: no recycling of out-of-window blocks).
        """
        return sum(group_blocks(group, tokens, chunk_tokens) for group in self.groups)

    def group_waste_bytes(self, group: CacheGroup) -> int:
        """Padding bytes in each block of `group`: layer slots without a layer, and rows that do not fill their slot."""
        used = len(group.layers) * group.block_tokens * group.cache.numbers_per_token * self.bytes_per_number
        return self.block_bytes - used

    @property
    def waste_bytes_per_block(self) -> float:
        """Padding bytes of a block, as the mean over the groups (waste_bytes() weighs them by their use)."""
        return sum(self.group_waste_bytes(group) for group in self.groups) / len(self.groups)

    def waste_bytes(self, tokens: int, chunk_tokens: int | None = None) -> int:
        """Padding bytes in the blocks that a sequence of `tokens` tokens needs at most."""
        return sum(group_blocks(group, tokens, chunk_tokens) * self.group_waste_bytes(group) for group in self.groups)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> CacheLayout:
        groups = tuple(
            CacheGroup(tuple(g["layers"]), LayerCache(**g["cache"]), g["block_tokens"]) for g in data["groups"]
        )
        return cls(groups, data["group_layers"], data["layer_bytes"], data["bytes_per_number"])


def group_blocks(group: CacheGroup, tokens: int, chunk_tokens: int | None) -> int:
    """Blocks that `group` needs at most for a sequence of `tokens` tokens; sizing and admission both ask here.

    A windowed group holds the last window - 1 tokens and the chunk being written:
    ceil((window - 1 + chunk) / block) + 1 blocks at most, however long the sequence is.
    """
    full = ceil(tokens / group.block_tokens)
    window = group.cache.window
    if not window or chunk_tokens is None:
        return full
    return min(full, ceil((window - 1 + chunk_tokens) / group.block_tokens) + 1)


def make_layout(
    layers: Sequence[LayerCache],
    bytes_per_number: int = 4,
    context_tokens: int = 4096,
    chunk_tokens: int = 512,
    block_tokens: int = DEFAULT_BLOCK_TOKENS,
) -> CacheLayout:
    """Choose the group size that needs the fewest pool bytes for one sequence of `context_tokens` (ties: fewer groups).

    Layers of one kind (equal LayerCache) are cut into groups of equal layer count; the last group of a
    kind is padded. The widest rows have `block_tokens` tokens per block; narrower ones have more, so that
    bytes agree, else their block is padded. Raises ConfigError for layers that keep nothing.
    """
    if not layers:
        raise ConfigError("a key/value layout needs at least one attention layer; the model has none")
    for index, cache in enumerate(layers):
        if cache.numbers_per_token <= 0 or cache.window < 0:
            raise ConfigError(f"layer {index} cannot have a cache of {cache}; widths are positive, window >= 0")
    if min(bytes_per_number, context_tokens, chunk_tokens, block_tokens) < 1:
        raise ConfigError("bytes_per_number, context_tokens, chunk_tokens and block_tokens must be at least 1")

    kinds: dict[LayerCache, list[int]] = {}
    for index, cache in enumerate(layers):
        kinds.setdefault(cache, []).append(index)
    widest = max(cache.numbers_per_token for cache in kinds)
    tokens = {cache: _tokens_per_block(cache, widest, block_tokens) for cache in kinds}
    blocks = {
        cache: group_blocks(CacheGroup((), cache, tokens[cache]), context_tokens, chunk_tokens) for cache in kinds
    }

    def cost(size: int) -> tuple[int, int]:
        groups = {cache: ceil(len(indices) / size) for cache, indices in kinds.items()}
        return size * sum(groups[cache] * blocks[cache] for cache in kinds), sum(groups.values())

    size = min(range(1, max(map(len, kinds.values())) + 1), key=cost)
    groups = tuple(
        CacheGroup(tuple(indices[i : i + size]), cache, tokens[cache])
        for cache, indices in kinds.items()
        for i in range(0, len(indices), size)
    )
    return CacheLayout(groups, size, widest * block_tokens * bytes_per_number, bytes_per_number)


def _tokens_per_block(cache: LayerCache, widest: int, block_tokens: int) -> int:
    """The most tokens that fit in the widest kind's bytes, in steps of half a block.

    Any number of tokens would fill the block better, but prefix hits come in the least common multiple
    of the groups' blocks, which odd numbers would make huge.
    """
    step = max(block_tokens // 2, 1)
    return widest * block_tokens // (cache.numbers_per_token * step) * step
