"""LoRA adapters (Hu et al. 2021) in `peft`'s format: adapter_config.json and adapter_model.safetensors. No torch.

An adapter changes linear products: y = W x becomes y = W x + scale * B (A x). Its tensors are named by modules of the
transformers class; the family's name map says which of our parameters these are. Where the file's module holds several
of ours (Phi-3's qkv_proj), they share A, and each gets its own rows of B.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from plait.errors import UsageError, WeightError
from plait.model.config import LatentAttentionSpec, ModelConfig, keeps_float32
from plait.model.families import family
from plait.ops.recording import Recording
from plait.weights.adapter_config import CONFIG_NAME, LoraConfig, read_lora_config
from plait.weights.mapping import Assignment, BoundMap, few
from plait.weights.numbers import float32_rows
from plait.weights.safetensors_source import SafetensorsSource

if TYPE_CHECKING:
    from plait.ops.adapted import Factors

WEIGHTS_NAME = "adapter_model.safetensors"
_PICKLED_NAME = "adapter_model.bin"
_PREFIX = "base_model.model."
_FLOATS = ("F32", "BF16", "F16", "F64")
_HEAD = "lm_head.weight"
_LATENT = "self_attn.kv_b_proj.weight"


@dataclass(frozen=True, eq=False)
class LowRank:
    """scale * B (A x) for one parameter [O, I]: a float32 [r, I], b float32 [O, r]. storage: the file's format."""

    a: NDArray[np.float32]
    b: NDArray[np.float32]
    scale: float
    storage: str

    @property
    def rank(self) -> int:
        return len(self.a)


@dataclass(frozen=True, eq=False)
class Adapter:
    """targets: by our parameters' names. content_hash: the same for adapters that compute the same, whatever they are
    called."""

    name: str
    path: Path
    targets: Mapping[str, LowRank]
    content_hash: str

    @property
    def rank(self) -> int:
        """The largest of its ranks."""
        return max(target.rank for target in self.targets.values())

    @property
    def nbytes(self) -> int:
        """Bytes of its numbers as the file stores them."""
        sizes = {"F16": 2, "BF16": 2}
        numbers = {id(x): x.size * sizes.get(t.storage, 4) for t in self.targets.values() for x in (t.a, t.b)}
        return sum(numbers.values())


def linear_shapes(recording: Recording) -> dict[str, tuple[int, int]]:
    """Shapes [O, I] of the parameters that an adapter can change: those of plain linear products, but for the head's.

    recording: of the model, not fused.
    """
    found = {}
    for op in recording.ops:
        ref = op.weights[0] if op.name == "linear" else None
        if ref is not None and ref.name != _HEAD:
            rows, columns = ref.shape
            found[ref.name] = (rows, columns)
    return found


def load_adapter(path: str | Path, config: ModelConfig, recording: Recording, name: str | None = None) -> Adapter:
    """Read an adapter for the model of this configuration.

    path: the directory. recording: of the model, not fused. name: default the directory's. Raises UsageError for a path
    that is no adapter, ConfigError for an adapter_config.json that cannot be carried out, WeightError for tensors that
    are damaged, missing, without use, or of other shapes than the model's.
    """
    directory = Path(path)
    lora = read_lora_config(check_directory(directory))
    source = SafetensorsSource(directory / WEIGHTS_NAME)
    try:
        targets = _read(source, lora, BoundMap(config, family(config.model_type).names), config, recording)
    finally:
        source.close()
    return Adapter(name or directory.resolve().name, directory, targets, _digest(targets))


def check_directory(directory: Path) -> Path:
    """The directory itself. UsageError where it holds no adapter that could be read."""
    if not directory.is_dir():
        wrong = "is a file" if directory.exists() else "does not exist"
        raise UsageError(f"adapter {directory} {wrong}: give the directory with its {CONFIG_NAME}")
    if not (directory / CONFIG_NAME).exists():
        raise UsageError(f"adapter {directory} has no {CONFIG_NAME}: it is no directory of a peft adapter")
    if not (directory / WEIGHTS_NAME).exists():
        if (directory / _PICKLED_NAME).exists():
            raise UsageError(
                f"adapter {directory} has its weights in {_PICKLED_NAME}, a pickle, which is never loaded: save it"
                " with peft's safe_serialization"
            )
        raise UsageError(f"adapter {directory} has no {WEIGHTS_NAME}")
    return directory


def _read(
    source: SafetensorsSource, lora: LoraConfig, bound: BoundMap, config: ModelConfig, recording: Recording
) -> dict[str, LowRank]:
    shapes = linear_shapes(recording)
    modules = _modules(source)
    places = {module: _place(module, bound, shapes, config, source.path) for module in modules}
    _check_against_targets(list(modules), lora, bound, shapes, config, source.path)
    targets: dict[str, LowRank] = {}
    for module, assignment in places.items():
        a, b = _matrices(source, module, lora, [shapes[part.name] for part in assignment.parts])
        scale = lora.scale_of(module)
        storage = source.info(_tensor(module, "A")).format
        if source.info(_tensor(module, "B")).format != storage:
            storage = "F32"
        if storage == "F64":
            storage = "F32"  # rounded
        for part in assignment.parts:
            if part.name in targets:
                raise WeightError(f"{source.path}: {part.name} is changed twice, the second time by {module}")
            rows = b if part.rows is None else np.ascontiguousarray(b[part.rows])
            targets[part.name] = LowRank(a, rows, scale, storage)
    return targets


def _modules(source: SafetensorsSource) -> dict[str, None]:
    """The modules that the file has both matrices of. WeightError for any other tensor."""
    halves: dict[str, set[str]] = {}
    for name in source.names():
        if not name.startswith(_PREFIX):
            raise WeightError(f"{source.path}: tensor {name!r:.200} does not begin with {_PREFIX}")
        module, _, kind = name.removeprefix(_PREFIX).rpartition(".lora_")
        if not module or kind not in ("A.weight", "B.weight"):
            raise WeightError(f"{source.path}: tensor {name!r:.200} {_what_else(name)}")
        halves.setdefault(module, set()).add(kind)
    if not halves:
        raise WeightError(f"{source.path} holds no tensor")
    for module, kinds in halves.items():
        if len(kinds) < 2:
            lacking = "A" if "B.weight" in kinds else "B"
            raise WeightError(f"{source.path}: {_tensor(module, lacking)!r:.200} is missing")
    return dict.fromkeys(halves)


def _what_else(name: str) -> str:
    kinds = {
        # What peft saves beside an adapter of lm_head or embed_tokens; it comes first in such a file.
        ".base_layer.": "belongs to an adapter of the output head or the embedding, which is not supported; "
        "merge the adapter with peft first",
        "lora_embedding_": "is of an adapted embedding, which is not supported",
        "lora_magnitude_vector": "is of DoRA, which is not supported",
        "modules_to_save": "is a whole module beside the low-rank matrices, which is not supported",
        ".bias": "is a bias, which is not supported",
    }
    found = next((text for part, text in kinds.items() if part in name), None)
    return found or "is neither a lora_A.weight nor a lora_B.weight"


def _tensor(module: str, half: str) -> str:
    return f"{_PREFIX}{module}.lora_{half}.weight"


def _place(
    module: str, bound: BoundMap, shapes: Mapping[str, tuple[int, int]], config: ModelConfig, path: Path
) -> Assignment:
    """Our parameters that a module's weight consists of. WeightError where they are none that can be changed."""
    assignment = bound.of_tensor(f"{module}.weight")
    names = [part.name for part in assignment.parts]
    if any(part.place is not None for part in assignment.parts) or ".experts." in module:
        raise WeightError(f"{path}: {module} belongs to the experts of a mixture: they cannot be adapted")
    if any(keeps_float32(name) for name in names):
        raise WeightError(f"{path}: {module} is a router: it cannot be adapted")
    if _HEAD in names:
        raise WeightError(f"{path}: {module} is the output head: it cannot be adapted; merge the adapter with peft")
    unknown = [name for name in names if name not in shapes]
    if isinstance(config.layers[0].attention, LatentAttentionSpec) and any(n.endswith(_LATENT) for n in unknown):
        raise WeightError(
            f"{path}: {module} makes keys and values of a latent: it cannot be adapted; merge the adapter"
        )
    if unknown:
        raise WeightError(f"{path}: {module} is no linear module of this {config.model_type}")
    return assignment


def _check_against_targets(
    modules: Sequence[str],
    lora: LoraConfig,
    bound: BoundMap,
    shapes: Mapping[str, tuple[int, int]],
    config: ModelConfig,
    path: Path,
) -> None:
    """WeightError where the file's modules are not those that the configuration names."""
    stray = [module for module in modules if not lora.changes(module)]
    if stray:
        raise WeightError(f"{path} has {few(stray)} that target_modules of {CONFIG_NAME} does not name")
    there = {bound.without_prefix(module) for module in modules}
    # The names that matter are the file's: with the prefix that it has.
    theirs, ours = next(
        ((a, b) for a, b in bound.prefixes if any(m.startswith(a) and not m.startswith(b) for m in modules)), ("", "")
    )
    missing = []
    for assignment in bound.outgoing(list(shapes)):
        name = assignment.file.removesuffix(".weight")
        full = theirs + name.removeprefix(ours) if ours and name.startswith(ours) else name
        if name not in there and lora.targets is not None and lora.changes(full):
            missing.append(full)
    if missing:
        raise WeightError(f"{path} lacks {few(missing)} that target_modules of {CONFIG_NAME} names")


def _matrices(
    source: SafetensorsSource, module: str, lora: LoraConfig, shapes: Sequence[tuple[int, int]]
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    rank = lora.rank_of(module)
    rows, columns = sum(shape[0] for shape in shapes), shapes[0][1]
    out = []
    for half, shape in (("A", (rank, columns)), ("B", (rows, rank))):
        name = _tensor(module, half)
        info = source.info(name)
        if info.format not in _FLOATS:
            raise WeightError(f"{source.path}: tensor {name!r:.200} is stored as {info.format}, not as floats")
        if info.shape != shape:
            raise WeightError(
                f"{source.path}: tensor {name!r:.200} has shape {info.shape}; the model and rank {rank} make it {shape}"
            )
        values = float32_rows(source, name)
        if not np.isfinite(values).all():
            raise WeightError(f"{source.path}: tensor {name!r:.200} holds NaN or infinity")
        out.append(values)
    return out[0], out[1]


def _digest(targets: Mapping[str, LowRank]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name, target in sorted(targets.items()):
        digest.update(repr((name, target.a.shape, target.b.shape, target.scale, target.storage)).encode())
        digest.update(np.ascontiguousarray(target.a).data)
        digest.update(np.ascontiguousarray(target.b).data)
    return digest.hexdigest()


def torch_factors(adapter: Adapter, device: Any) -> dict[str, Factors]:
    """The adapter's matrices as plait.ops.adapted.AdaptedRows takes them. Imports torch."""
    import torch

    from plait.ops.adapted import Factors

    moved: dict[int, Any] = {}  # one A may serve several parameters

    def tensor(values: NDArray[np.float32]) -> Any:
        return moved.setdefault(id(values), torch.from_numpy(values).to(device))

    return {name: Factors(tensor(t.a), tensor(t.b), t.scale) for name, t in adapter.targets.items()}
