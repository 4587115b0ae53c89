"""What a token costs a model at least: bytes to read and operations, from the recording and the packed weights."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING

from plait.bench.limits import product_rate

if TYPE_CHECKING:
    from plait.engine.build import EngineBundle

_LAYOUT_OF_BYTES = {4: "F32", 2: "BF16"}


@dataclass
class Costs:
    """Per token of a step with one token: bytes of weights. Per token and key: bytes of keys and values.

    multiply_adds: per token, by layout of the weights, output embedding apart (a prompt needs it once, not per token);
    head: (layout, multiply-adds) of that.
    """

    weight_bytes: int = 0
    multiply_adds: dict[str, int] = field(default_factory=dict)
    head: tuple[str, int] = ("F32", 0)
    caches: list[tuple[int, int]] = field(default_factory=list)  # (bytes per token, window) of every layer

    def bytes_read(self, context: int) -> int:
        """Bytes of weights, keys and values that a token at position `context` makes the machine read."""
        return self.weight_bytes + sum(b * (min(context, w) if w else context) for b, w in self.caches)

    def operations(self) -> int:
        """Multiply-adds with weights per generated token."""
        return sum(self.multiply_adds.values()) + self.head[1]

    def prefill_seconds(self, tokens: int, threads: int) -> float | None:
        """Seconds that the products of a prompt take at the measured rates; None where a rate is unknown."""
        work = {layout: count * tokens for layout, count in self.multiply_adds.items()}
        work[self.head[0]] = work.get(self.head[0], 0) + self.head[1]
        rates = {layout: product_rate(layout, threads) for layout in work}
        known = {layout: rate for layout, rate in rates.items() if rate is not None}
        return sum(n / known[layout] for layout, n in work.items()) if len(known) == len(work) else None


def measure_costs(bundle: EngineBundle) -> Costs:
    """The costs of what an engine runs: of packed weights as they are packed, of a decoder's in its dtype."""
    native = bundle.loaded.native
    store = None if native is None else native.store
    number_bytes = 4
    if native is not None:
        recording = native.recording
    else:
        from plait.model.record import record

        recording = record(bundle.decoder)
        number_bytes = bundle.decoder.dtype.itemsize
    costs = Costs()
    seen = set()
    for op in recording.ops:
        if op.name == "embed":
            continue
        for ref in op.weights:
            if ref is None or (ref.name, ref.rows) in seen:
                continue
            seen.add((ref.name, ref.rows))
            numbers = prod(ref.shape)
            share = 1.0 if ref.rows is None else (ref.rows[1] - ref.rows[0]) / ref.shape[0]
            packed = store[ref.name] if store is not None else None
            layout = packed.layout if packed is not None else _LAYOUT_OF_BYTES[number_bytes]
            costs.weight_bytes += round(share * (packed.data.nbytes if packed is not None else numbers * number_bytes))
            if len(ref.shape) < 2:
                continue
            if op.name == "logits":
                costs.head = (layout, numbers)
            else:
                costs.multiply_adds[layout] = costs.multiply_adds.get(layout, 0) + round(share * numbers)
    kv_bytes = bundle.engine.executor.layout.bytes_per_number
    costs.caches = [(cache.numbers_per_token * kv_bytes, cache.window) for cache in recording.caches]
    return costs
