"""Checks a precompiled normalisation table (SentencePiece's `precompiled_charsmap`) before a library trusts it.

Layout: uint32 size of the trie, the trie, then the replacements, each ending with a zero byte. The trie is a double
array (darts-clone): a unit of 32 bits says which byte leads to it, whether a value hangs there, and where its children
begin. `tokenizers` follows it without looking at bounds, so that one wrong unit would end in a panic in the middle of a
request.
"""

from __future__ import annotations

import numpy as np

from plait.errors import TokenizerError

_HAS_LEAF = np.uint32(1 << 8)
_LABEL = np.uint32((1 << 31) | 0xFF)
_VALUE = np.uint32((1 << 31) - 1)
_BYTES = np.arange(1, 256, dtype=np.uint32)
# Children are looked at so many parents at a time: 255 candidates each.
_AT_ONCE = 1 << 12


def check_charsmap(table: bytes, path: str) -> None:
    """Raises TokenizerError where following the table could leave it. An empty one is no table, and fine."""
    if not isinstance(table, bytes):
        raise TokenizerError(f"{path} is damaged: its precompiled_charsmap is not bytes")
    if not table:
        return
    size = int.from_bytes(table[:4], "little") if len(table) >= 4 else 0
    if size == 0 or size % 4 or size + 4 > len(table):
        raise _damaged(path, f"its trie would have {size} bytes of {len(table)}")
    units = np.frombuffer(table, "<u4", size // 4, 4)
    replacements = table[4 + size :]
    try:
        replacements.decode()
    except UnicodeDecodeError as error:
        raise _damaged(path, f"its replacements are not UTF-8 (byte {error.start})") from None
    if replacements and replacements[-1]:
        raise _damaged(path, "its last replacement has no end")
    _check_values(_values(units, path), replacements, path)


def _values(units: np.ndarray, path: str) -> np.ndarray:
    """The values of all keys. Every place that any text can lead to is visited once."""
    root = _offsets(units[:1])
    seen = np.zeros(units.size, bool)  # of places where children begin
    values, pending = [], [root]
    _check_places(root, units.size, path)
    while pending:
        parents = pending.pop()
        for start in range(0, parents.size, _AT_ONCE):
            bases = parents[start : start + _AT_ONCE]
            _check_places(bases | np.uint32(0xFF), units.size, path)
            places = (bases[:, None] ^ _BYTES).reshape(-1)
            labels = np.tile(_BYTES, bases.size)
            places = places[units[places] & _LABEL == labels]
            found = units[places]
            children = places ^ _offsets(found)
            _check_places(children, units.size, path)
            values.append(units[children[found & _HAS_LEAF != 0]] & _VALUE)
            children = np.unique(children)
            children = children[~seen[children]]
            seen[children] = True
            if children.size:
                pending.append(children)
    return np.concatenate(values) if values else np.empty(0, np.uint32)


def _offsets(units: np.ndarray) -> np.ndarray:
    return (units >> np.uint32(10)) << ((units & np.uint32(1 << 9)) >> np.uint32(6))


def _check_places(places: np.ndarray, size: int, path: str) -> None:
    if places.size and int(places.max()) >= size:
        raise _damaged(path, f"its trie leads to unit {int(places.max())} of {size}")


def _check_values(values: np.ndarray, replacements: bytes, path: str) -> None:
    """Each value is the place of a replacement: inside, and at the beginning of a character."""
    if not values.size:
        return
    last = int(values.max())
    if last >= len(replacements):
        raise _damaged(path, f"a replacement begins at byte {last} of {len(replacements)}")
    first_bytes = np.frombuffer(replacements, np.uint8)[values]
    if bool(((first_bytes & 0xC0) == 0x80).any()):
        raise _damaged(path, "a replacement begins inside a character")


def _damaged(path: str, what: str) -> TokenizerError:
    return TokenizerError(f"{path} is damaged: precompiled_charsmap: {what}")
