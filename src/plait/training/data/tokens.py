"""Token stores in the cache on disk, and how they are built."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plait import cachefile
from plait.errors import DataError
from plait.training.data.examples import TokenStore
from plait.training.data.task import Encoded

log = logging.getLogger("plait.data")

_PARTS = {"offsets": "<i8", "learnt": "|u1", "languages": "<i8"}


def token_dtype(vocab_size: int) -> str:
    """uint16 where every id fits, else uint32. vocab_size: one more than the largest id, added tokens included."""
    return "<u2" if vocab_size <= 1 << 16 else "<u4"


class StoreBuilder:
    """Collects sequences into a `TokenStore`. Raises DataError for an id that the vocabulary does not have."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._tokens, self._learnt = array("I"), bytearray()
        self._ends, self._languages = array("q", [0]), array("q")

    def add(self, sequence: Encoded) -> None:
        self._tokens.extend(sequence.ids)
        self._ends.append(len(self._tokens))
        if sequence.learnt is not None:
            self._learnt.extend(sequence.learnt)
        if sequence.language is not None:
            self._languages.append(sequence.language)

    def build(self) -> TokenStore:
        tokens = np.array(self._tokens, np.uint32)
        largest = int(tokens.max(initial=0))
        if largest >= self._vocab_size:
            raise DataError(f"the tokenizer gives the id {largest}, its vocabulary has {self._vocab_size} entries")
        return TokenStore(
            tokens.astype(token_dtype(self._vocab_size)),
            np.array(self._ends, np.int64),
            np.frombuffer(bytes(self._learnt), np.uint8) if self._learnt else None,
            np.array(self._languages, np.int64) if self._languages else None,
        )


def write(name: str, key: Mapping[str, Any], stores: Mapping[str, TokenStore], facts: Mapping[str, Any]) -> None:
    """Write stores by name as one entry of the cache, whole or not at all; where it cannot be written, say so."""
    arrays = {f"{store}.{part}": values for store in stores for part, values in _arrays(stores[store]).items()}
    header = {part: [values.dtype.str, len(values)] for part, values in arrays.items()}
    try:
        with cachefile.Writer(name, sum(values.nbytes for values in arrays.values())) as writer:
            for part, values in arrays.items():
                writer.add(part, np.ascontiguousarray(values).view(np.uint8))
            writer.commit(key, {"arrays": header, "stores": list(stores), **facts})
    except OSError as error:
        if cachefile.directory() is not None:
            cachefile.say_unwritten(error)


def read(name: str, key: Mapping[str, Any], vocab_size: int) -> tuple[dict[str, TokenStore], dict[str, Any]] | None:
    """Stores and facts of an entry, mapped; None where it is not there, or damaged, which is said."""
    if cachefile.directory() is None:
        return None
    entry = cachefile.read(name, key)
    if entry is None:
        return None
    try:
        arrays = {part: _typed(entry.arrays[part], *kind) for part, kind in entry.facts["arrays"].items()}
        stores = {store: _store(arrays, store, vocab_size) for store in entry.facts["stores"]}
    except (KeyError, TypeError, ValueError) as error:
        log.warning("%s in the cache is not used and written anew: %s", name, error)
        return None
    return stores, entry.facts


def _arrays(store: TokenStore) -> dict[str, NDArray[Any]]:
    parts = {"tokens": store.tokens} | {part: getattr(store, part) for part in _PARTS}
    return {part: values for part, values in parts.items() if values is not None}


def _typed(data: NDArray[np.uint8], dtype: str, count: int) -> NDArray[Any]:
    values = data.view(dtype)
    if len(values) != count:
        raise ValueError(f"its header says {count} numbers of {dtype}, there are {len(values)}")
    return values


def _store(arrays: Mapping[str, NDArray[Any]], name: str, vocab_size: int) -> TokenStore:
    parts = {part: arrays.get(f"{name}.{part}") for part in ("tokens", *_PARTS)}
    for part, dtype in {"tokens": token_dtype(vocab_size), **_PARTS}.items():
        values = parts[part]
        if values is not None and values.dtype != np.dtype(dtype):
            raise ValueError(f"{name}.{part} is {values.dtype.str}, a vocabulary of {vocab_size} takes {dtype}")
    tokens, offsets = parts["tokens"], parts["offsets"]
    if tokens is None or offsets is None or not len(offsets) or int(offsets[-1]) != len(tokens):
        raise ValueError(f"{name} ends elsewhere than its offsets say")
    return TokenStore(tokens, offsets, parts["learnt"], parts["languages"])
