"""The numbers of our parameters row by row, as a checkpoint or a live decoder holds them, and the tensors that a file
of another format is made of. Rows keep their bytes where only their order changes. No torch.

A file's tensor fills parameters (`BoundMap.incoming`), parameters make up another file's tensors (`outgoing`): between
two formats the rows of one tensor are those of the other in another order, and an offset is added where only one of the
two stores a norm as 1 + w.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from plait.errors import WeightError
from plait.model.config import ModelConfig
from plait.model.name_map import NameMap
from plait.weights.arrange import LoadReport, arrange
from plait.weights.checkpoint import Checkpoint
from plait.weights.gguf_types import TYPES_BY_NAME, BlockType, row_bytes
from plait.weights.mapping import Assignment, BoundMap, Part
from plait.weights.numbers import BYTES, expand_rows, float32_rows
from plait.weights.sources import TensorInfo, TensorSource
from plait.weights.transposed import turned_shape

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Rows:
    """Numbers as they are stored. shape: of the tensor; storage: "F32", "BF16", "Q4_K", ...

    data: uint8, axes of the tensor but the last, then the bytes of a row; of a vector [n, bytes of a number].
    offset is to be added to the numbers.
    """

    shape: Shape
    storage: str
    data: Bytes
    offset: float = 0.0

    @property
    def columns(self) -> int:
        """Numbers of a row."""
        return self.shape[-1] if len(self.shape) > 1 else 1

    def lines(self) -> Bytes:
        """data as [rows, bytes of a row]."""
        return self.data.reshape(-1, self.data.shape[-1])

    def floats(self, start: int, stop: int) -> Floats:
        """Rows start .. stop - 1 as numbers, float32 [stop - start, columns], the offset added."""
        values = expand_rows(self.lines()[start:stop], self.storage, self.columns)
        return values + np.float32(self.offset) if self.offset else values

    def as_float32(self) -> Rows:
        """The same numbers stored as F32."""
        if self.storage == "F32" and not self.offset:
            return self
        lines = self.lines()
        values = np.concatenate([self.floats(i, i + 4096) for i in range(0, len(lines), 4096)])
        return Rows(self.shape, "F32", values.view(np.uint8).reshape(*self.data.shape[:-1], -1))


def stored_rows(shape: Shape, storage: str, raw: Bytes, name: str) -> Rows:
    """The stored bytes of a tensor as rows. A quantised vector is expanded: its blocks span rows of one number."""
    if not shape:
        shape = (1,)
    if storage not in BYTES:
        kind = TYPES_BY_NAME.get(storage)
        if kind is None or not kind.readable:
            raise WeightError(f"tensor {name!r} is stored as {storage}, which cannot be converted")
        if len(shape) == 1:
            values = expand_rows(raw.reshape(1, -1), storage, shape[0]).reshape(-1, 1)
            return Rows(shape, "F32", np.ascontiguousarray(values).view(np.uint8))
    lead = shape[:-1] if len(shape) > 1 else shape
    return Rows(shape, storage, raw.reshape(*lead, -1))


def source_rows(source: TensorSource, name: str, shape: Shape) -> Rows:
    """A tensor of a checkpoint as rows of this shape; what no layout holds, such as FP8 with its scales, expanded."""
    info = source.info(name)
    if not _is_expanded(info):
        return stored_rows(shape, info.format, source.raw(name), name)
    values = np.ascontiguousarray(float32_rows(source, name))
    return Rows(shape, "F32", values.view(np.uint8).reshape(*(shape[:-1] if len(shape) > 1 else shape), -1))


def _is_expanded(info: TensorInfo) -> bool:
    """Whether a weight that is made of several stored tensors fits into no layout."""
    kind = TYPES_BY_NAME.get(info.format)
    holds = info.format in _FLOATS or (kind is not None and kind.block_size > 1)
    return bool(info.origin) and not holds


class Parameters(Protocol):
    """Where the numbers of our parameters come from, by parameter name."""

    shapes: Mapping[str, Shape]

    def storages(self, name: str) -> set[str]:
        """How they are stored; more than one where several tensors of a file fill the parameter."""
        ...

    def origins(self, name: str) -> set[str]:
        """The quantised formats, for people, of weights that a checkpoint keeps as several tensors."""
        ...

    def made(self, name: str) -> bool:
        """Whether the rows are no tensor's own: put together out of several, or changed."""
        ...

    def offset(self, name: str) -> float:
        """What is added to the stored numbers."""
        ...

    def rows(self, name: str) -> Rows: ...

    def release(self, name: str) -> None:
        """The parameter will not be wanted again."""
        ...


class CheckpointParameters:
    """`Parameters` of an opened checkpoint. report: formats and skipped tensors.

    Raises WeightError for tensors that are missing, left over or of another shape than the configuration makes.
    """

    def __init__(self, checkpoint: Checkpoint, shapes: Mapping[str, Shape], dropped: list[str]) -> None:
        self.shapes = shapes
        self.report = LoadReport(str(checkpoint.path), checkpoint.format, "")
        self._source = checkpoint.source
        self._pieces: dict[str, list[tuple[Assignment, Part]]] = {}
        for assignment in arrange(checkpoint, shapes, dropped, self.report).assignments:
            for part in assignment.parts:
                self._pieces.setdefault(part.name, []).append((assignment, part))

    def storages(self, name: str) -> set[str]:
        infos = [self._source.info(assignment.file) for assignment, _ in self._pieces[name]]
        found = {"F32" if _is_expanded(info) else info.format for info in infos}
        vectors = len(self.shapes[name]) < (3 if self._pieces[name][0][1].place else 2)
        return {"F32"} if vectors and any(storage not in BYTES for storage in found) else found

    def origins(self, name: str) -> set[str]:
        found = {self._source.info(assignment.file).origin for assignment, _ in self._pieces[name]}
        return found - {""}

    def made(self, name: str) -> bool:
        return bool(self.origins(name))

    def offset(self, name: str) -> float:
        return self._pieces[name][0][0].offset

    def rows(self, name: str) -> Rows:
        shape = self.shapes[name]
        pieces = [(self._piece(assignment, part, shape), part) for assignment, part in self._pieces[name]]
        (first, part), *more = pieces
        if not more and part.place is None:
            return first
        found = {piece.storage for piece, _ in pieces}
        if len(found) > 1 or (len(shape) < 3 and not found <= BYTES.keys()):
            pieces = [(piece.as_float32(), part) for piece, part in pieces]
        first = pieces[0][0]
        out: Bytes | None = None
        for piece, part in pieces:
            assert part.place is not None, name
            (e0, e1), (r0, r1) = part.place.experts, part.place.rows
            data = part.place.from_file(piece.data.reshape(e1 - e0, r1 - r0, -1))
            if out is None:
                out = np.empty((*shape[:2], data.shape[-1]), np.uint8)
            part.place.of(out)[...] = data
        assert out is not None
        return Rows(shape, first.storage, out.reshape(*shape[:-1], -1), first.offset)

    def release(self, name: str) -> None:
        for assignment, _ in self._pieces[name]:
            self._source.release(assignment.file)

    def _piece(self, assignment: Assignment, part: Part, shape: Shape) -> Rows:
        stored = tuple(self._source.info(assignment.file).shape)
        stored = stored[1:] if assignment.one_row and len(stored) > 1 else stored
        rows = source_rows(self._source, assignment.file, stored)
        data = rows.data if part.rows is None else rows.data[part.rows]
        if part.place is None:
            if len(stored) == 1 and len(shape) == 2:  # a matrix of one row, stored as a vector
                data = np.ascontiguousarray(data).reshape(1, -1)
            return Rows(shape, rows.storage, data, assignment.offset)
        return replace(rows, data=data, offset=assignment.offset)


class DecoderParameters:
    """`Parameters` of a live decoder, or of one whose weights are packed: these are expanded one at a time."""

    def __init__(self, decoder: Any) -> None:
        tensors = getattr(decoder, "tensors", None)
        own = dict(decoder.named_parameters())
        self._tensors: Mapping[str, Any] = own if tensors is None else tensors()
        self._storages = {name: _STORAGES[str(p.dtype).removeprefix("torch.")] for name, p in own.items()}
        self.shapes: Mapping[str, Shape] = {name: tuple(p.shape) for name, p in own.items()}

    def storages(self, name: str) -> set[str]:
        return {self._storages[name]}

    def origins(self, name: str) -> set[str]:
        return set()

    def made(self, name: str) -> bool:
        return False

    def offset(self, name: str) -> float:
        return 0.0

    def rows(self, name: str) -> Rows:
        tensor = self._tensors[name].detach().cpu().contiguous()
        import torch

        raw = tensor.reshape(-1).view(torch.uint8).numpy()
        return stored_rows(self.shapes[name], self._storages[name], raw, name)

    def release(self, name: str) -> None: ...


_FLOATS = ("F64", "F32", "F16", "BF16")
_NUMBERS = {"F64": np.uint64, "F32": np.uint32, "F16": np.uint16, "BF16": np.uint16}
_STORAGES = {"float64": "F64", "float32": "F32", "bfloat16": "BF16", "float16": "F16"}


@dataclass(frozen=True)
class OutTensor:
    """A tensor of the file that is to be written. storage: how its numbers are stored where they come from, "F32" where
    they are computed (an offset) or come from tensors of several types; stored: the types as they are there, for
    people. made: the bytes are no tensor's of the source (a quantised weight of several, a changed one)."""

    name: str
    shape: Shape
    assignment: Assignment
    storage: str
    stored: frozenset[str]
    offset: float
    made: bool = False

    def is_copied(self, storage: str) -> bool:
        """Whether a tensor that is written as this type has the source's own bytes."""
        return self.storage == storage and not self.offset and not self.made


class Outgoing:
    """What the parameters make up in files of a name map, in the parameters' order. squeeze: vectors in the file that
    are matrices of one row here, by the end of their names."""

    def __init__(
        self, parameters: Parameters, config: ModelConfig, names: NameMap, squeeze: tuple[str, ...] = ()
    ) -> None:
        self._parameters = parameters
        self._squeeze = squeeze
        self._whole = {r.file for r in names.rules if r.place is not None and "{e}" not in r.file}
        bound = BoundMap(config, names)
        self.tensors = [self._describe(assignment) for assignment in bound.outgoing(list(parameters.shapes))]
        self._last: dict[str, Rows] = {}  # the stack of experts that is being cut up
        self._left: dict[str, int] = {}
        for tensor in self.tensors:
            for part in tensor.assignment.parts:
                self._left[part.name] = self._left.get(part.name, 0) + 1

    def __iter__(self) -> Iterator[OutTensor]:
        return iter(self.tensors)

    def read(self, tensor: OutTensor) -> Rows:
        """The numbers, in the file's order of rows."""
        assignment = tensor.assignment
        (part, *more) = assignment.parts
        if part.place is not None:
            whole = self._rows(part.name)
            if len(whole.shape) < 3 and whole.storage not in BYTES:
                whole = whole.as_float32()
            stack = whole.data.reshape(*whole.shape[:2], -1)
            rows = replace(whole, data=part.place.to_file(part.place.of(stack)))
        elif not more and part.rows is None:
            rows = self._rows(part.name)
        else:
            pieces = [self._rows(p.name) for p in assignment.parts]
            if len({piece.storage for piece in pieces}) > 1:
                pieces = [piece.as_float32() for piece in pieces]
            data = np.empty((sum(len(piece.data) for piece in pieces), *pieces[0].data.shape[1:]), np.uint8)
            for piece, p in zip(pieces, assignment.parts, strict=True):
                data[p.rows] = piece.data
            rows = replace(pieces[0], data=data)
        for p in assignment.parts:
            self._done(p.name)
        return _in_shape(rows, tensor.shape, tensor.offset)

    def _describe(self, assignment: Assignment) -> OutTensor:
        shapes = [self._parameters.shapes[part.name] for part in assignment.parts]
        shape = shapes[0] if len(shapes) == 1 else (sum(s[0] for s in shapes), *shapes[0][1:])
        place = assignment.parts[0].place
        if place is not None:
            (e0, e1), (r0, r1) = place.experts, place.rows
            shape = (e1 - e0, r1 - r0, *shapes[0][2:])
            if e1 - e0 == 1 and not self._is_whole(assignment.file):
                shape = shape[1:]
        if assignment.file.endswith(self._squeeze) and self._squeeze and shape[0] == 1:
            shape = shape[1:]
        if assignment.one_row:
            shape = (1, *shape)
        names = [part.name for part in assignment.parts]
        storages = set().union(*map(self._parameters.storages, names))
        origins = set().union(*map(self._parameters.origins, names))
        offset = self._parameters.offset(names[0]) - assignment.offset
        storage = next(iter(storages)) if len(storages) == 1 and not offset else "F32"
        vectors = len(shape) == 1 or (place is not None and len(shapes[0]) < 3)
        if vectors and storage not in BYTES:
            storage = "F32"
        stored = frozenset(origins or storages)
        made = any(map(self._parameters.made, names))
        return OutTensor(assignment.file, shape, assignment, storage, stored, offset, made)

    def _is_whole(self, file: str) -> bool:
        """Whether a rule without an expert's number gave this name: its tensor has an axis of experts, even of one."""
        return re.sub(r"\d+", "{i}", file, count=1) in self._whole

    def _rows(self, name: str) -> Rows:
        if name in self._last:
            return self._last[name]
        rows = self._parameters.rows(name)
        if self._left[name] > 1:
            self._last = {name: rows}
        return rows

    def _done(self, name: str) -> None:
        self._left[name] -= 1
        if not self._left[name]:
            self._last.pop(name, None)
            self._parameters.release(name)


def _in_shape(rows: Rows, shape: Shape, offset: float) -> Rows:
    """The rows in the file's shape, with the offset that is left; a matrix of one row may become a vector, and a vector
    such a matrix."""
    if len(shape) == 1 and len(rows.shape) > 1:
        return stored_rows(shape, rows.storage, np.ascontiguousarray(rows.data).reshape(-1), "")
    return Rows(shape, rows.storage, rows.data.reshape(*(shape[:-1] if len(shape) > 1 else shape), -1), offset)


def turned(rows: Rows) -> Rows:
    """A matrix [out, in], or a stack of them, as [in, out]; quantised ones are expanded."""
    if rows.storage not in _NUMBERS:
        rows = rows.as_float32()
    numbers = np.ascontiguousarray(rows.data).view(_NUMBERS[rows.storage])
    data = np.ascontiguousarray(numbers.swapaxes(-1, -2)).view(np.uint8)
    return Rows(turned_shape(rows.shape), rows.storage, data, rows.offset)


def tensor_bytes(shape: Shape, storage: str) -> int:
    """Bytes of a tensor of this shape and type."""
    if storage in BYTES:
        return prod(shape) * BYTES[storage]
    kind: BlockType = TYPES_BY_NAME[storage]
    return prod(shape[:-1]) * row_bytes(kind, shape[-1])
