"""Packs weights for the native kernels: from the bytes of a checkpoint, without torch, or from a live decoder.

Quantised tensors keep their blocks' own numbers; rows are reordered on the way where a name map says so. One tensor at
a time: besides what is packed, memory holds at most one expanded tensor, and only for types that have no kernel.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from plait.errors import WeightError
from plait.kernels import abi
from plait.kernels.native import usable_cpus
from plait.model.config import keeps_float32
from plait.ops.spec import LatentSpec
from plait.weights.arrange import (
    DTYPES,
    PLAIN_FORMATS,
    LoadReport,
    arrange,
    dtype_name,
    exact_dtype,
    settle_dtype,
    settle_head,
)
from plait.weights.checkpoint import Checkpoint
from plait.weights.fill import Source, fill, fill_vector, row_order
from plait.weights.latent import fill_second, latent_weights, make_second, second_bytes
from plait.weights.mapping import Assignment, Plan
from plait.weights.numbers import float32_rows
from plait.weights.store import (
    VECTOR,
    PackedWeight,
    WeightStore,
    aligned_bytes,
    is_second,
    need_library,
    packed_bytes,
    second_name,
    stack_parts,
)

if TYPE_CHECKING:
    from plait.model.decoder import Decoder

Shapes = Mapping[str, tuple[int, ...]]
# Where a packed weight is to lie: the bytes wanted -> that many, beginning at a multiple of 64.
Allocate = Callable[[int], NDArray[np.uint8]]

FLOAT_LAYOUTS = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}
# What a tensor becomes whose format has no kernel.
_SUBSTITUTE = "BF16"
_NAMES = {"F32": "fp32", "BF16": "bf16", "F16": "fp16"}


@dataclass(frozen=True)
class Packing:
    """A checkpoint that is ready to be packed: every weight's place is known, no tensor has been read.

    latent: the weights that get a second layout.
    """

    checkpoint: Checkpoint
    plan: Plan
    shapes: Shapes
    layouts: Mapping[str, str]
    report: LoadReport
    latent: Mapping[str, LatentSpec] = field(default_factory=dict)

    @cached_property
    def parts(self) -> Mapping[str, int]:
        """See `stack_parts`."""
        return stack_parts(self.shapes)

    def sizes(self) -> dict[str, int]:
        """Packed bytes of every weight, second layouts too."""
        names = [part.name for assignment in self.plan.assignments for part in assignment.parts]
        own = {name: packed_bytes(self.layouts[name], self.shapes[name], self.parts.get(name, 1)) for name in names}
        return own | {second_name(name): second_bytes(self.layouts[name], spec) for name, spec in self.latent.items()}

    def weights(self, threads: int | None = None, allocate: Allocate = aligned_bytes) -> Iterator[PackedWeight]:
        """Every weight, packed, one after the other; the file's pages of each are given back as it is done.

        A stack of experts comes when the last of its tensors is packed: they are taken together, wherever they stand in
        the file. A weight's second layout follows it.
        """
        source = self.checkpoint.source
        count = usable_cpus() if threads is None else threads
        begun: dict[str, PackedWeight] = {}
        for last, assignment in self._in_order():
            for part in assignment.parts:
                if part.name not in begun:
                    begun[part.name] = self._begin(part.name, allocate)
            self._fill(assignment, begun, count)
            source.release(assignment.file)
            for name in last:
                weight = begun.pop(name)
                yield weight
                if name in self.latent:
                    yield make_second(weight, self.latent[name], count, allocate)

    def _in_order(self) -> Iterator[tuple[tuple[str, ...], Assignment]]:
        """Every assignment, those of one stack together, and the weights that are whole after it."""
        first: dict[str, int] = {}
        left: Counter[str] = Counter()
        for number, assignment in enumerate(self.plan.assignments):
            for part in assignment.parts:
                first.setdefault(part.name, number)
                left[part.name] += 1
        for assignment in sorted(self.plan.assignments, key=lambda a: first[a.parts[0].name]):
            names = [part.name for part in assignment.parts]
            left.subtract(names)
            yield tuple(name for name in names if not left[name]), assignment

    def _begin(self, name: str, allocate: Allocate) -> PackedWeight:
        shape, layout, parts = self.shapes[name], self.layouts[name], self.parts.get(name, 1)
        return PackedWeight(name, shape, layout, allocate(packed_bytes(layout, shape, parts)), parts)

    def _fill(self, assignment: Assignment, weights: Mapping[str, PackedWeight], threads: int) -> None:
        source = self.checkpoint.source
        info = source.info(assignment.file)
        storage = info.format
        vectors = [part for part in assignment.parts if weights[part.name].layout == VECTOR]
        if vectors or assignment.offset or storage not in abi.LAYOUTS:
            values = float32_rows(source, assignment.file)
            if assignment.offset:
                values += np.float32(assignment.offset)
            for part in vectors:
                fill_vector(weights[part.name], values if part.rows is None else values[part.rows], part.place)
            if len(vectors) == len(assignment.parts):
                return
            raw, storage = values.reshape(-1).view(np.uint8), "F32"
        else:
            raw = source.raw(assignment.file)
            if raw.ctypes.data % 4:  # a safetensors file may put its data anywhere
                raw = raw.copy()
        lines = prod(info.shape[:-1])
        for part in assignment.parts:
            if part not in vectors:
                order = row_order(part.rows, info.shape, part.place)
                rows = Source(storage, raw.ctypes.data, raw.nbytes // lines, order)
                fill(weights[part.name], rows, part.place, threads)


def plan_packing(checkpoint: Checkpoint, shapes: Shapes, dtype: object, dropped: list[str]) -> Packing:
    """Decide every weight's layout. shapes: the parameters'; dropped: heads that `settle_head` left out.

    dtype: "auto" keeps weights as stored, "fp32", "bf16" and "fp16" expand or round all matrices. Raises WeightError
    for tensors that do not fit, UsageError for a dtype that does not exist.
    """
    need_library()
    name, notes = settle_dtype(dtype, checkpoint.config)
    report = LoadReport(str(checkpoint.path), checkpoint.format, "", notes=notes)
    plan = arrange(checkpoint, shapes, dropped, report)
    stored: dict[str, set[str]] = {}
    for assignment in plan.assignments:
        for part in assignment.parts:
            stored.setdefault(part.name, set()).add(_storage(checkpoint.source, assignment.file))
    layouts = {key: choose_layout(key, _common(kinds), len(shapes[key]), name) for key, kinds in stored.items()}
    report.expanded, report.expanded_to = _expanded(checkpoint, plan, layouts)
    report.kept = _kept(checkpoint, plan, layouts)
    packing = Packing(checkpoint, plan, shapes, layouts, report, latent_weights(checkpoint.config, shapes))
    sizes = packing.sizes()
    report.weight_bytes = sum(sizes.values())
    report.second_bytes = sum(size for key, size in sizes.items() if is_second(key))
    report.parameters = checkpoint.config.param_counts()["total"]
    report.dtype = describe_layouts(layouts, sizes)
    report.exact = exact_dtype(_formats(checkpoint, plan, layouts), name)
    return packing


def _storage(source: Any, file: str) -> str:
    """How a tensor is stored; of one that a source joins of quantised ones, a type that has no kernel."""
    info = source.info(file)
    joined = getattr(source, "is_of_blocks", None)
    return info.origin if joined is not None and joined(file) else info.format


def _common(kinds: set[str]) -> str:
    """How the parts of one weight are kept that a file stores in these formats."""
    if len(kinds) == 1:
        return next(iter(kinds))
    # No plain number is rounded on the way: only BF16 and quantised blocks fit into BF16.
    return "F32" if kinds & (set(PLAIN_FORMATS) - {"BF16"}) or any(map(_is_integer, kinds)) else _SUBSTITUTE


def _is_integer(storage: str) -> bool:
    return storage[0] in "IU" and storage[1:].isdigit()


def _formats(checkpoint: Checkpoint, plan: Plan, layouts: Mapping[str, str]) -> Counter[str]:
    """Tensors by storage format, those that have no kernel by their layout; without those that are float32 in every
    model."""
    counts: Counter[str] = Counter()
    for assignment in plan.assignments:
        if not all(keeps_float32(part.name) for part in assignment.parts):
            storage, layout = _storage(checkpoint.source, assignment.file), layouts[assignment.parts[0].name]
            counts[storage if storage in (*PLAIN_FORMATS, *abi.LAYOUTS) or layout == VECTOR else layout] += 1
    return counts


def is_vector(name: str, num_axes: int) -> bool:
    """Whether a weight is kept as plain float32: experts have a bias each, [E, R], and heads may have a norm each."""
    return num_axes < 2 or name.endswith(("bias", "norm.weight"))


def choose_layout(name: str, storage: str, num_axes: int, dtype: str) -> str:
    """The layout of a weight that a file stores as `storage`; dtype: "auto", "fp32", "bf16" or "fp16"."""
    if is_vector(name, num_axes):
        return VECTOR
    if keeps_float32(name):
        return "F32"
    if dtype != "auto":
        return FLOAT_LAYOUTS[dtype]
    if storage in abi.LAYOUTS:
        return storage
    return "F32" if storage in PLAIN_FORMATS or _is_integer(storage) else _SUBSTITUTE


def describe_layouts(layouts: Mapping[str, str], sizes: Mapping[str, int]) -> str:
    """The layouts of the matrices, the one with the most bytes first: "Q4_K, Q6_K"."""
    by_layout: Counter[str] = Counter()
    for name, layout in layouts.items():
        if layout != VECTOR:
            by_layout[_NAMES.get(layout, layout)] += sizes[name]
    return ", ".join(name for name, _ in by_layout.most_common())


def _expanded(checkpoint: Checkpoint, plan: Plan, layouts: Mapping[str, str]) -> tuple[dict[str, int], str]:
    """Tensors by format that are no longer kept as they were stored, and the layout that they have."""
    counts: Counter[str] = Counter()
    targets = set()
    for assignment in plan.assignments:
        info, layout = checkpoint.source.info(assignment.file), layouts[assignment.parts[0].name]
        plain = info.format in PLAIN_FORMATS
        if layout != VECTOR and (info.origin if plain else layout != info.format):
            counts[info.origin or info.format] += 1
            targets.add(_NAMES[layout])
    return dict(counts), " and ".join(sorted(targets))


def _kept(checkpoint: Checkpoint, plan: Plan, layouts: Mapping[str, str]) -> dict[str, int]:
    """Weights made of several stored tensors that stay quantised, by the layout that holds their numbers."""
    counts: Counter[str] = Counter()
    for assignment in plan.assignments:
        info = checkpoint.source.info(assignment.file)
        if info.origin and layouts[assignment.parts[0].name] == info.format and info.format not in PLAIN_FORMATS:
            counts[f"{info.origin} as {info.format}"] += 1
    return dict(counts)


def pack_checkpoint(
    checkpoint: Checkpoint, dtype: object = "auto", threads: int | None = None, shapes: Shapes | None = None
) -> WeightStore:
    """All weights of a checkpoint, packed in memory; the store's `report` says what was done.

    dtype: see `plan_packing`. threads: default all that may be used. shapes: of the parameters; default those that the
    configuration makes (which needs torch). Settles the head first, which may untie the checkpoint's configuration.
    Raises WeightError, ConfigError, UsageError, or NativeLibraryError where there is no native library.
    """
    start = time.perf_counter()
    dropped = settle_head(checkpoint)
    packing = plan_packing(checkpoint, parameter_shapes(checkpoint) if shapes is None else shapes, dtype, dropped)
    store = WeightStore({weight.name: weight for weight in packing.weights(threads)}, report=packing.report)
    packing.report.seconds = time.perf_counter() - start
    return store


def parameter_shapes(checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
    """Shapes of the decoder's parameters, by building it without numbers: imports torch."""
    from plait.model.decoder import build

    decoder = build(checkpoint.config, device="meta")
    return {name: tuple(parameter.shape) for name, parameter in decoder.named_parameters()}


def pack_decoder(decoder: Decoder, dtype: object = None, store: WeightStore | None = None) -> WeightStore:
    """The parameters of a live decoder, packed as they are now.

    dtype: of the matrices, "fp32", "bf16" or "fp16"; None keeps the parameters' own. store: what an earlier call gave;
    it is filled anew in its standing buffers (its version grows) and returned. The store's `report` has bytes and time.
    Raises WeightError where the decoder's shapes are no longer those of the store.
    """
    start = time.perf_counter()
    name = dtype_name(dtype)
    parameters: dict[str, Any] = dict(decoder.named_parameters())
    latent, threads = latent_weights(decoder.config, parameters), need_library().threads()
    if store is None:
        parts = stack_parts({key: tuple(p.shape) for key, p in parameters.items()})
        weights = {key: _empty(key, p, name, parts.get(key, 1)) for key, p in parameters.items()}
        store = WeightStore(weights, report=LoadReport(str(decoder.source or decoder.config.model_type), "live", ""))
    elif {key: tuple(p.shape) for key, p in parameters.items()} != {
        key: w.shape for key, w in store.items() if not is_second(key)
    }:
        raise WeightError("the decoder's parameters are no longer those that were packed: build a new engine")
    for key, parameter in parameters.items():
        _pack_parameter(parameter, store[key])
    for key, spec in latent.items():
        if second_name(key) in store:
            fill_second(store[second_name(key)], store[key], spec, threads)
        else:
            store.add(make_second(store[key], spec, threads))
    store.renew()
    report = store.report
    report.second_bytes = store.second_bytes
    report.parameters = decoder.param_counts()["total"]
    report.weight_bytes = store.nbytes
    report.exact = (
        "float32"
        if name == "auto" and len({p.dtype for key, p in parameters.items() if not keeps_float32(key)}) > 1
        else DTYPES[_NAMES[store["model.embed_tokens.weight"].layout]]
    )
    own = {key: weight for key, weight in store.items() if not is_second(key)}
    report.dtype = describe_layouts({k: w.layout for k, w in own.items()}, {k: w.nbytes for k, w in own.items()})
    report.seconds = time.perf_counter() - start
    return store


def _empty(key: str, parameter: Any, dtype: str, parts: int) -> PackedWeight:
    own = str(parameter.dtype).removeprefix("torch.")
    kept = {"bfloat16": "BF16", "float16": "F16"}.get(own, "F32")
    shape, layout = tuple(parameter.shape), choose_layout(key, kept, parameter.ndim, dtype)
    return PackedWeight(key, shape, layout, aligned_bytes(packed_bytes(layout, shape, parts)), parts)


def _pack_parameter(parameter: Any, weight: PackedWeight) -> None:
    tensor = parameter.detach().cpu()
    kinds = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
    storage = kinds.get(str(tensor.dtype).removeprefix("torch."))
    if storage is None or weight.layout == VECTOR:
        tensor, storage = tensor.float(), "F32"
    tensor = tensor.contiguous()
    if weight.layout == VECTOR:
        fill_vector(weight, tensor.numpy(), None)
        return
    size = tensor.shape[-1] * tensor.element_size()
    fill(weight, Source(storage, tensor.data_ptr(), size), None, need_library().threads())
