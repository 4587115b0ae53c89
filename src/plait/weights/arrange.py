"""What of a checkpoint goes where: the head's rules, every tensor's shape, and the report. No torch.

Loading into a `Decoder` and packing for the native kernels both go by this.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from plait.errors import UsageError, WeightError
from plait.kernels.native import cpu_features
from plait.model.config import ModelConfig
from plait.model.families import family
from plait.weights.checkpoint import Checkpoint
from plait.weights.mapping import Assignment, BoundMap, Plan
from plait.weights.numbers import float32_rows, rounded
from plait.weights.sources import TensorSource

log = logging.getLogger("plait.load")

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
PLAIN_FORMATS = ("F64", "F32", "F16", "BF16")
_NOT_REAL = ("BOOL", "C64")
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
# Numbers of two tensors that are compared at a time.
_COMPARED_NUMBERS = 1 << 22


@dataclass
class LoadReport:
    """What loading did.

    dtype: what the weights are kept in ("bfloat16", or the packed layouts, the largest first). formats: tensors by
    storage format of the file; expanded: those that were not floats there and are now kept as `expanded_to`.
    exact: the shortest dtype ("float32", ...) that holds every weight as it is kept. second_bytes: what of weight_bytes
    the second layout of latent attention's weights takes. quantised: what config.json says of quantised weights; kept:
    of those, how many stay quantised in which layout.
    """

    path: str
    format: str
    dtype: str
    parameters: int = 0
    weight_bytes: int = 0
    formats: dict[str, int] = field(default_factory=dict)
    expanded: dict[str, int] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0
    expanded_to: str = ""
    exact: str = "float32"
    second_bytes: int = 0
    quantised: str = ""
    kept: dict[str, int] = field(default_factory=dict)

    def lines(self) -> list[str]:
        """For people: what was loaded, what was expanded, what was left out."""
        size = self.weight_bytes / 2**20
        out = [
            f"{self.path}: {self.parameters / 1e6:.1f}M parameters, {self.dtype}, {size:,.0f} MiB, {self.seconds:.1f} s"
        ]
        if self.second_bytes:
            out.append(f"of these {self.second_bytes / 2**20:,.1f} MiB a second layout of latent attention's weights")
        if self.quantised:
            kept = ", ".join(f"{n} {kind}" for kind, n in sorted(self.kept.items()))
            out.append(f"quantised checkpoint: {self.quantised}" + (f"; kept in blocks: {kept}" if kept else ""))
        if self.expanded:
            kinds = ", ".join(f"{n} {kind}" for kind, n in sorted(self.expanded.items()))
            out.append(f"expanded to {self.expanded_to or self.dtype} at load: {kinds}")
        if self.skipped:
            shown = ", ".join(self.skipped[:3]) + (", ..." if len(self.skipped) > 3 else "")
            out.append(f"skipped: {len(self.skipped)} tensors ({shown})")
        return out + self.notes


def dtype_name(dtype: object) -> str:
    """ "auto", "bf16", "fp16" or "fp32" for one of these names, None, or a torch dtype. Raises UsageError."""
    if dtype in (None, "auto"):
        return "auto"
    text = str(dtype).removeprefix("torch.")
    for name, full in DTYPES.items():
        if text in (name, full):
            return name
    raise UsageError(f"dtype {dtype!r} is unknown; choose auto, {', '.join(DTYPES)}")


def settle_dtype(dtype: object, config: ModelConfig) -> tuple[str, list[str]]:
    """`dtype_name`, and what to tell the user: a model that overflows in fp16 gets bf16."""
    name = dtype_name(dtype)
    if name == "fp16" and config.fp16_overflows:
        return "bf16", [f"{config.model_type} overflows in fp16: bf16 is used instead"]
    return name, []


def cpu_dtype() -> str:
    """The dtype that "auto" means for expanded weights on this CPU: bf16 where it multiplies that faster than fp32."""
    features = cpu_features()
    return "bf16" if features.has("avx512_bf16") or features.has("amx_bf16") else "fp32"


def settle_head(checkpoint: Checkpoint, warn: Callable[[str], None] = log.warning) -> list[str]:
    """A tied model whose file also holds a head: the flag wins where it is given, a differing head where it is not.

    Returns the heads that are left out; where the head is used, the checkpoint's configuration is untied. warn: takes
    the line that a differing head is worth. Raises WeightError for a head of another shape than the configuration's.
    """
    config, source = checkpoint.config, checkpoint.source
    known = _head_names(checkpoint)
    heads = [name for name in source.names() if name in known]
    if not config.tie_embeddings or not heads:
        return []
    expected = (config.vocab_size, config.hidden_size)
    for head in heads:
        if source.info(head).shape != expected:
            raise WeightError(f"{head} has shape {source.info(head).shape}; the configuration makes it {expected}")
    table = BoundMap(config, checkpoint.names).file_of(_EMBEDDING, source.names())
    if table is None or same_numbers(source, table, heads[0]):
        return heads
    key = family(config.model_type).tie_key
    if checkpoint.raw.get(key) is None:
        warn(f"{heads[0]} differs from the embedding and {key} is not given: the head is used")
        checkpoint.with_config(tie_embeddings=False)
        return []
    warn(f"{heads[0]} differs from the embedding, but {key} is true: the head is ignored")
    return heads


def _head_names(checkpoint: Checkpoint) -> set[str]:
    """The file names under which an output head may stand."""
    ours = {_HEAD}
    files = {r.file for r in checkpoint.names.rules if r.ours == (_HEAD,)}
    prefixed = {
        theirs + _HEAD.removeprefix(mine) for theirs, mine in checkpoint.names.prefixes if _HEAD.startswith(mine)
    }
    return (files or ours) | prefixed | ours


def same_numbers(source: TensorSource, first: str, second: str) -> bool:
    """Whether two tensors hold the same numbers, the second rounded to the first's type where that is shorter."""
    a, b = source.info(first), source.info(second)
    if a.shape != b.shape:
        return False
    if a.format == b.format and np.array_equal(source.raw(first), source.raw(second)):
        return True
    rows = a.shape[0] if a.shape else 1
    step = max(_COMPARED_NUMBERS * rows // max(int(np.prod(a.shape)), 1), 1)
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        theirs = rounded(float32_rows(source, second, start, stop), a.format)
        if not np.array_equal(float32_rows(source, first, start, stop), theirs):
            return False
    return True


def arrange(
    checkpoint: Checkpoint, shapes: Mapping[str, tuple[int, ...]], dropped: Sequence[str], report: LoadReport
) -> Plan:
    """Which tensor fills which of the parameters of these shapes; notes formats and skipped tensors in the report.

    dropped: what `settle_head` left out. Raises WeightError for tensors that are unknown, missing, or of another shape.
    """
    source = checkpoint.source
    bound = BoundMap(checkpoint.config, checkpoint.names)
    if checkpoint.quantisation is not None:
        report.quantised = checkpoint.quantisation.title
        report.notes = [*report.notes, *checkpoint.quantisation.notes]
        # Some programs write a bias of zeros for every module, also where the model has none.
        zeros: list[str] = getattr(source, "zero_biases", list)()
        dropped = [*dropped, *(name for name in zeros if not bound.knows(name, shapes))]
    names = [name for name in source.names() if name not in dropped]
    plan = bound.incoming(names, shapes)
    for assignment in plan.assignments:
        info = source.info(assignment.file)
        _check_shape(assignment, info.shape, shapes)
        if info.format in _NOT_REAL:
            raise WeightError(f"{assignment.file} is stored as {info.format}, which is no format of real numbers")
    report.skipped = [*dropped, *plan.skipped]
    infos = (source.info(assignment.file) for assignment in plan.assignments)
    report.formats = dict(Counter(info.origin or info.format for info in infos))
    return plan


def exact_dtype(formats: Mapping[str, int], dtype: str) -> str:
    """The dtype that was asked for ("bf16", ...), or for "auto" the shortest that holds what a file stores so."""
    if dtype != "auto":
        return DTYPES[dtype]
    if len(formats) == 1:
        return {"BF16": "bfloat16", "F16": "float16"}.get(next(iter(formats)), "float32")
    return "float32"


def _check_shape(assignment: Assignment, found: tuple[int, ...], shapes: Mapping[str, tuple[int, ...]]) -> None:
    first, parts = assignment.parts[0], [shapes[p.name] for p in assignment.parts]
    expected = parts[0] if len(parts) == 1 else (sum(s[0] for s in parts), *parts[0][1:])
    if first.place is not None:
        (e0, e1), (r0, r1) = first.place.experts, first.place.rows
        expected = (e1 - e0, r1 - r0, *parts[0][2:])
        if e1 - e0 == 1 and len(found) < len(expected):
            expected = expected[1:]
    if assignment.one_row:
        expected = (1, *expected)
    if len(found) == 1 and expected == (1, *found):
        return  # a matrix of one row may be stored as a vector
    if tuple(found) != expected:
        raise WeightError(f"{assignment.file} has shape {tuple(found)}; the configuration makes it {expected}")
