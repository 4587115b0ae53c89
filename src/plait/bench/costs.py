"""What a token costs a model at least: bytes to read and operations, from the recording and the packed weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING

from plait.bench.limits import product_rate
from plait.ops.spec import LatentSpec
from plait.weights.store import VECTOR, second_name

if TYPE_CHECKING:
    from plait.engine.build import EngineBundle

_LAYOUT_OF_BYTES = {4: "F32", 2: "BF16"}


@dataclass
class Costs:
    """Per token of a step with one token: bytes of weights. Per token and key: bytes of keys and values.

    multiply_adds: per token, by layout of the weights, output embedding apart (a prompt needs it once, not per token);
    head: (layout, multiply-adds) of that. Of routed experts, those that a token uses.
    """

    weight_bytes: int = 0
    multiply_adds: dict[str, int] = field(default_factory=dict)
    head: tuple[str, int] = ("F32", 0)
    caches: list[tuple[int, int]] = field(default_factory=list)  # (bytes per token, window) of every layer
    attention: list[tuple[int, int]] = field(default_factory=list)  # (multiply-adds per token and key, window)
    latent: list[LatentSpec] = field(default_factory=list)  # of every layer with latent attention

    def bytes_read(self, context: int) -> int:
        """Bytes of weights, keys and values that a token at position `context` makes the machine read."""
        return self.weight_bytes + sum(b * (min(context, w) if w else context) for b, w in self.caches)

    def operations(self) -> int:
        """Multiply-adds with weights per generated token."""
        return sum(self.multiply_adds.values()) + self.head[1]

    def attended(self, first: int, tokens: int) -> int:
        """Multiply-adds of attention for `tokens` tokens of one sequence, the first of them at position `first`; of
        latent attention in its cheaper form."""
        keys = range(first + 1, first + tokens + 1)
        visible = {window: sum(min(n, window) if window else n for n in keys) for _, window in self.attention}
        pairs = sum(keys)
        total = sum(count * visible[window] for count, window in self.attention)
        for spec in self.latent:
            # The product with W is among the weights', once a token; the expanded form makes older keys again.
            again = first * spec.latent_width * (spec.nope_width + spec.value_width)
            expanded = again + pairs * (spec.key_width + spec.value_width)
            total += spec.num_heads * min(expanded, pairs * (spec.row_width + spec.latent_width))
        return total

    def rates(self, threads: int) -> dict[str, float] | None:
        """Multiply-adds per second of every kind of product of a step, measured now; None where one is unknown."""
        rates = {name: product_rate(name, threads) for name in {*self.multiply_adds, self.head[0], "F32"}}
        known = {name: rate for name, rate in rates.items() if rate is not None}
        return known if len(known) == len(rates) else None

    def seconds(self, rates: Mapping[str, float], tokens: int, rows: int, attended: int) -> float:
        """Seconds of the products of a step at these rates.

        tokens: of all sequences; rows: of logits; attended: multiply-adds of attention, which are products in fp32.
        """
        work = Counter({name: count * tokens for name, count in self.multiply_adds.items()})
        work[self.head[0]] += self.head[1] * rows
        work["F32"] += attended
        return sum(count / rates[name] for name, count in work.items())


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
        if op.name == "attend":
            spec = op.attrs["spec"]
            widths = spec["key_width"] + spec["value_width"]
            costs.attention.append((spec["num_heads"] * widths, spec["window"]))
        if op.name == "attend_latent":
            costs.latent.append(LatentSpec(**op.attrs["spec"]))
        if op.name == "embed":
            continue
        for ref in op.weights:
            if ref is None or (ref.name, ref.rows) in seen:
                continue
            seen.add((ref.name, ref.rows))
            numbers = prod(ref.shape)
            if op.name == "experts":  # [experts, ...], of which a token uses as many as it has ids
                numbers = numbers // ref.shape[0] * int(recording.values[op.inputs[1]].shape[-1])
            share = 1.0 if ref.rows is None else (ref.rows[1] - ref.rows[0]) / ref.shape[0]
            packed = store[ref.name] if store is not None else None
            layout = packed.layout if packed is not None else _LAYOUT_OF_BYTES[number_bytes]
            per_number = packed.data.nbytes / prod(ref.shape) if packed is not None else number_bytes
            costs.weight_bytes += round(share * numbers * per_number)
            if store is not None and second_name(ref.name) in store:
                # Of the rows that make keys a single token reads the second layout.
                spec = LatentSpec(**op.attrs["spec"])
                made = spec.nope_width + spec.value_width
                costs.weight_bytes += store[second_name(ref.name)].nbytes
                costs.weight_bytes -= round(numbers * per_number * spec.nope_width / made)
            if len(ref.shape) < 2 or layout == VECTOR:
                continue
            if op.name == "logits":
                costs.head = (layout, numbers)
            else:
                costs.multiply_adds[layout] = costs.multiply_adds.get(layout, 0) + round(share * numbers)
    kv_bytes = bundle.engine.executor.layout.bytes_per_number
    costs.caches = [(cache.numbers_per_token * kv_bytes, cache.window) for cache in recording.caches]
    return costs
