"""Which computed blocks can be found again by the tokens that they hold: a tree of token blocks.

A node stands for one whole prefix: its root carries what else the keys and values depend on (weights
version, salt, adapter, rotary set), its path the tokens. So a node is found by comparing every token
of the prefix, and no hash value is ever trusted: dictionaries fall back on equality, hence a hash
function that collides makes the search slow, never wrong.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from math import lcm

import numpy as np
from numpy.typing import NDArray

from plait.memory.layout import CacheGroup


def block_key(tokens: Sequence[int] | NDArray[np.integer]) -> bytes:
    """The dictionary key of one block's tokens: the ids themselves as int32 bytes."""
    return np.asarray(tokens, dtype=np.int32).tobytes()


class PrefixNode:
    """One full block of tokens after the prefix that `parent` stands for.

    blocks: pool block per group of the tree (0: none cached). cursors: live sequences whose last full
    block is this one; they keep the node, so that their next block finds its parent.
    """

    __slots__ = ("blocks", "children", "cursors", "key", "parent")

    def __init__(self, parent: PrefixNode | None, key: Hashable, num_groups: int) -> None:
        self.parent = parent
        self.key = key
        self.children: dict[Hashable, PrefixNode] = {}
        self.blocks = [0] * num_groups
        self.cursors = 0


class PrefixTree:
    """The prefixes of all groups that have the same number of tokens per block.

    groups: indices of those groups in the layout; a node's blocks are in this order.
    """

    def __init__(self, block_tokens: int, groups: tuple[int, ...]) -> None:
        self.block_tokens = block_tokens
        self.groups = groups
        self.roots: dict[Hashable, PrefixNode] = {}

    def root(self, salt: Hashable) -> PrefixNode:
        """The node of the empty prefix under `salt`, created when absent."""
        node = self.roots.get(salt)
        if node is None:
            node = self.roots[salt] = PrefixNode(None, salt, len(self.groups))
        return node

    def child(self, node: PrefixNode, tokens: Sequence[int] | NDArray[np.integer]) -> PrefixNode:
        """The node of the prefix that is longer by one block of `tokens`, created when absent."""
        key = block_key(tokens)
        found = node.children.get(key)
        if found is None:
            found = node.children[key] = PrefixNode(node, key, len(self.groups))
        return found

    def path(self, salt: Hashable, tokens: NDArray[np.int32], required: Sequence[int]) -> list[PrefixNode]:
        """Nodes of the blocks that `tokens` begins with, as far as they are known and hold the `required` groups."""
        nodes: list[PrefixNode] = []
        node = self.roots.get(salt)
        size = self.block_tokens
        for start in range(0, len(tokens) - size + 1, size):
            node = node.children.get(block_key(tokens[start : start + size])) if node else None
            if node is None or not all(node.blocks[slot] for slot in required):
                break
            nodes.append(node)
        return nodes

    def blocks_along(self, node: PrefixNode) -> list[int]:
        """The listed blocks of all prefixes of `node`, of itself, and of everything that continues it."""
        nodes = [node]
        for current in nodes:  # grows while it is read
            nodes.extend(current.children.values())
        parent = node.parent
        while parent is not None:
            nodes.append(parent)
            parent = parent.parent
        return [block for current in nodes for block in current.blocks if block]

    def prune(self, node: PrefixNode) -> None:
        """Drop `node`, and then its parents, if nothing needs it any more."""
        current: PrefixNode | None = node
        while current is not None and not (current.cursors or current.children or any(current.blocks)):
            parent = current.parent
            siblings = self.roots if parent is None else parent.children
            if siblings.get(current.key) is current:  # a reset may have put another root in this place
                del siblings[current.key]
            current = parent


class PrefixCache:
    """One tree per distinct number of tokens per block, and the search for the longest common hit."""

    def __init__(self, groups: Sequence[CacheGroup]) -> None:
        sizes = sorted({group.block_tokens for group in groups})
        members = [tuple(g for g, group in enumerate(groups) if group.block_tokens == size) for size in sizes]
        self.trees = [PrefixTree(size, member) for size, member in zip(sizes, members, strict=True)]
        self.hit_tokens = lcm(*sizes)
        self._windows = [[groups[g].cache.window for g in tree.groups] for tree in self.trees]

    def clear(self) -> None:
        for tree in self.trees:
            tree.roots.clear()

    def longest_hit(self, salt: Hashable, tokens: NDArray[np.int32]) -> tuple[int, list[list[PrefixNode]]]:
        """(L, nodes per tree up to L): the longest prefix whose keys and values are all there.

        L is a multiple of every group's block and at most len(tokens) - 1, as the last token has to be
        computed for its logits. A full group needs all blocks below L, one with window w those that
        hold a key at or after L - w + 1, the oldest that the query at L sees.
        """
        known = tokens[: max(len(tokens) - 1, 0)]
        paths, runs = [], []
        hit = len(known)
        for tree, windows in zip(self.trees, self._windows, strict=True):
            full = [slot for slot, window in enumerate(windows) if not window]
            path = tree.path(salt, known, full)
            hit = min(hit, len(path) * tree.block_tokens)
            paths.append(path)
            runs += [
                (tree.block_tokens, window, _run_lengths([node.blocks[slot] for node in path]))
                for slot, window in enumerate(windows)
                if window
            ]
        hit -= hit % self.hit_tokens
        while hit and not all(
            run[hit // size - 1] >= hit // size - first_visible_block(hit, window, size) for size, window, run in runs
        ):
            hit -= self.hit_tokens
        return hit, [path[: hit // tree.block_tokens] for tree, path in zip(self.trees, paths, strict=True)]


def first_visible_block(computed_tokens: int, window: int, block_tokens: int) -> int:
    """The first block with a key that a query at or after `computed_tokens` can see (window 0: block 0)."""
    return max(computed_tokens - window + 1, 0) // block_tokens if window else 0


def _run_lengths(blocks: list[int]) -> list[int]:
    """For every place the number of consecutive cached blocks that end there."""
    runs, run = [], 0
    for block in blocks:
        run = run + 1 if block else 0
        runs.append(run)
    return runs
