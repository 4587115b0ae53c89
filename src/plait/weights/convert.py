"""Converts a checkpoint, or a live decoder, into a GGUF file or a Hugging Face directory.

Everything is written under another name beside the target and renamed when it is complete.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from plait.errors import UsageError, WeightError
from plait.kernels.native import usable_cpus
from plait.model.config import ModelConfig
from plait.model.families import family
from plait.weights.adapters import Adapter
from plait.weights.arrange import DTYPES, settle_head
from plait.weights.checkpoint import Checkpoint, open_checkpoint
from plait.weights.gguf_source import GGUFSource
from plait.weights.gguf_writer.file import FileTensor, write_gguf
from plait.weights.gguf_writer.model import GGUFContents, copied_contents, model_contents
from plait.weights.gguf_writer.recipes import AUTO, check_type
from plait.weights.hf_files import move_into_place, sync, umask
from plait.weights.hf_writer import directory_contents, write_directory
from plait.weights.joined import JoinedSource
from plait.weights.locate import locate
from plait.weights.mapping import BoundMap
from plait.weights.merged import MergedParameters, file_changes, load_adapters, targets_of
from plait.weights.pack import parameter_shapes
from plait.weights.rows import CheckpointParameters, DecoderParameters, Parameters

SHARD_BYTES = 5 * 10**9
HUGGING_FACE = "HF"
# total bytes -> a context whose value is called with the bytes of every tensor that is done.
Progress = Callable[[int], AbstractContextManager[Callable[[int], None]]]
ShapesOf = Callable[[ModelConfig], Mapping[str, tuple[int, ...]]]


@contextlib.contextmanager
def no_progress(total: int) -> Iterator[Callable[[int], None]]:
    yield lambda done: None


@dataclass
class ConvertReport:
    """What was written. storages: tensors by type, [count, bytes]; fallbacks: [tensor, the type it would have had, the
    type it has]; copied: tensors whose bytes are the source's; expanded: quantised tensors of the source that were
    computed anew, by type; kept: weights of a quantised Hugging Face checkpoint whose numbers a block type holds, by
    both; skipped: tensors of the source that no target has; adapters: what was merged."""

    source: str
    target: str
    format: str
    type: str
    tensors: int = 0
    nbytes: int = 0
    storages: dict[str, list[int]] = field(default_factory=dict)
    copied: int = 0
    expanded: dict[str, int] = field(default_factory=dict)
    kept: dict[str, int] = field(default_factory=dict)
    fallbacks: list[list[str]] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    adapters: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def count(self, tensors: list[FileTensor]) -> None:
        self.tensors = len(tensors)
        for tensor in tensors:
            entry = self.storages.setdefault(tensor.storage, [0, 0])
            entry[0] += 1
            entry[1] += tensor.nbytes

    def lines(self) -> list[str]:
        """For people."""
        kinds = ", ".join(f"{n} {kind}" for kind, (n, _) in sorted(self.storages.items(), key=lambda e: -e[1][1]))
        out = [f"{self.target}: {self.nbytes / 2**20:,.1f} MiB, {self.tensors} tensors ({kinds}), {self.seconds:.1f} s"]
        if self.adapters:
            out.append("merged: " + ", ".join(self.adapters))
        if self.kept:
            out.append("kept in blocks: " + ", ".join(f"{n} {kind}" for kind, n in sorted(self.kept.items())))
        if self.expanded:
            was = ", ".join(f"{n} {kind}" for kind, n in sorted(self.expanded.items()))
            out.append(f"expanded first, since the source is quantised otherwise: {was}")
        for (wanted, storage), names in _grouped(self.fallbacks).items():
            shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            out.append(f"{storage} instead of {wanted}, whose blocks do not divide the rows: {shown}")
        if self.skipped:
            shown = ", ".join(self.skipped[:3]) + (", ..." if len(self.skipped) > 3 else "")
            out.append(f"left out: {len(self.skipped)} tensors ({shown})")
        return out + self.notes

    def to_json(self) -> dict[str, Any]:
        return {
            "source": self.source,
            "target": self.target,
            "format": self.format,
            "type": self.type,
            "tensors": self.tensors,
            "bytes": self.nbytes,
            "types": {kind: {"tensors": n, "bytes": size} for kind, (n, size) in self.storages.items()},
            "copied": self.copied,
            "expanded": self.expanded,
            "kept": self.kept,
            "fallbacks": [dict(zip(("tensor", "wanted", "type"), entry, strict=True)) for entry in self.fallbacks],
            "skipped": self.skipped,
            "adapters": self.adapters,
            "notes": self.notes,
            "seconds": self.seconds,
        }


def convert(
    source: Any,
    target: str | Path,
    type: str | None = None,
    *,
    dtype: str | None = None,
    adapters: Mapping[str, str | Path] | None = None,
    shard_bytes: int = SHARD_BYTES,
    tokenizer: bool = True,
    strict: bool = False,
    force: bool = False,
    threads: int | None = None,
    progress: Progress = no_progress,
    shapes: ShapesOf | None = None,
) -> ConvertReport:
    """Write `target`: a GGUF file where its name ends in .gguf, else a Hugging Face directory.

    source: a path, `hf:OWNER/NAME`, None (the default model), an opened Checkpoint, or a Decoder. type: of the matrices
    in a GGUF file, or a recipe ("q8_0", "q4_k_m", ...); None or "auto" keeps what the source has; "hf" says that the
    target is a directory. dtype: of a directory's tensors, "bf16", "fp16" or "fp32"; None: as in the original, where
    that is known, else as stored. adapters: directories of LoRA adapters by name, merged into the weights in this order
    (in fp32, rounded once). shard_bytes: the most that one safetensors file holds. force: an existing target is
    replaced. shapes: of a configuration's parameters; None builds a decoder of them, which imports torch. Raises
    UsageError, ConfigError, WeightError or TokenizerError, and leaves nothing under the target's name then.
    """
    start = time.perf_counter()
    path = Path(target)
    gguf = path.suffix.lower() == ".gguf"
    type_name = _settle_type(type, dtype, gguf, path)
    _check_target(path, gguf, force)
    model = _open(source, strict, shapes)
    if model.path is not None and path.exists() and os.path.samefile(path, model.path):
        model.close()
        raise UsageError(f"{path} is the model that is read: write to another name, and replace it afterwards")
    report = ConvertReport(str(model.path or model.config.model_type), str(path), "gguf" if gguf else "hf", "")
    report.type = type_name.lower() if gguf else dtype or "auto"
    threads = threads or usable_cpus()
    try:
        if adapters:
            model.adapters = load_adapters(adapters, model.config)
            report.adapters = [f"{a.name} (rank {a.rank}, {len(a.targets)} matrices)" for a in model.adapters]
        if gguf:
            contents = model.gguf_contents(type_name, tokenizer, threads)
            report.fallbacks = [[name, c.wanted, c.storage] for name, c in contents.choices.items() if c.fell_back]
            _finish_report(report, contents, model)
            _write_file(path, contents, progress, force)
            report.nbytes = path.stat().st_size
        else:
            written = directory_contents(model.config, model.parameters(), dtype, model.recorded, threads)
            _finish_report(report, written, model)
            if family(model.config.model_type).is_own:
                report.notes.append(
                    f"{model.config.model_type} has no class elsewhere: only plait loads this directory"
                )

            def fill(directory: Path, done: Callable[[FileTensor], None]) -> None:
                write_directory(
                    written,
                    directory,
                    model.path,
                    model.recorded,
                    shard_bytes=shard_bytes,
                    tokenizer=tokenizer,
                    done=done,
                )

            _write_whole_directory(path, fill, written.tensors, progress, force)
            report.nbytes = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    finally:
        model.close()
    report.seconds = time.perf_counter() - start
    return report


class _Model:
    """What is converted: an opened checkpoint, or a decoder."""

    def __init__(self, config: ModelConfig, path: Path | None) -> None:
        self.config = config
        self.path = path
        self.skipped: list[str] = []
        self.notes: list[str] = []
        self.adapters: list[Adapter] = []

    @property
    def recorded(self) -> Mapping[str, Any]:
        """The metadata of a GGUF file, which may tell of the original."""
        return {}

    def parameters(self) -> Parameters:
        """With the adapters merged."""
        own = self._parameters()
        return MergedParameters(own, targets_of(self.adapters)) if self.adapters else own

    def _parameters(self) -> Parameters:
        """Those of its kind: each of the two classes below has its own."""
        raise NotImplementedError

    def gguf_contents(self, type_name: str, tokenizer: bool, threads: int) -> GGUFContents:
        return model_contents(
            self.config,
            self.parameters(),
            type_name,
            source=self.path,
            dtypes=self.dtypes(),
            tokenizer=tokenizer,
            threads=threads,
        )

    def dtypes(self) -> Mapping[str, str]:
        return {}

    def close(self) -> None: ...


class _CheckpointModel(_Model):
    def __init__(self, checkpoint: Checkpoint, shapes: ShapesOf | None) -> None:
        self._dropped = settle_head(checkpoint)
        self._shapes_of = shapes
        self._checkpoint = checkpoint
        super().__init__(checkpoint.config, checkpoint.path)

    @property
    def recorded(self) -> Mapping[str, Any]:
        return getattr(self._checkpoint.source, "metadata", {})

    def _parameters(self) -> Parameters:
        of, checkpoint = self._shapes_of, self._checkpoint
        shapes = parameter_shapes(checkpoint) if of is None else of(checkpoint.config)
        found = CheckpointParameters(checkpoint, shapes, self._dropped)
        self.skipped = [name for name in found.report.skipped if not name.startswith("rope_f")]
        if found.report.quantised:
            self.notes = [f"the source is quantised: {found.report.quantised}", *found.report.notes]
        return found

    def gguf_contents(self, type_name: str, tokenizer: bool, threads: int) -> GGUFContents:
        source = self._checkpoint.source
        source = source.stored if isinstance(source, JoinedSource) else source
        if isinstance(source, GGUFSource):
            bound = BoundMap(self.config, self._checkpoint.names)
            changes = file_changes(targets_of(self.adapters), bound, source.names())
            return copied_contents(source, type_name, tokenizer, threads, changes)
        return super().gguf_contents(type_name, tokenizer, threads)

    def dtypes(self) -> Mapping[str, str]:
        source = self._checkpoint.source
        if self._checkpoint.quantisation is not None:
            return {}  # there is no dtype to go back to
        return {name: source.info(name).format for name in source.names()}

    def close(self) -> None:
        self._checkpoint.source.close()


class _DecoderModel(_Model):
    def __init__(self, decoder: Any) -> None:
        super().__init__(decoder.config, decoder.source)
        self._decoder = decoder

    def _parameters(self) -> Parameters:
        return DecoderParameters(self._decoder)


def _open(source: Any, strict: bool, shapes: ShapesOf | None) -> _Model:
    if isinstance(source, Checkpoint):
        return _CheckpointModel(source, shapes)
    if source is None or isinstance(source, str | Path):
        return _CheckpointModel(open_checkpoint(locate(source), strict), shapes)
    return _DecoderModel(source)


def _settle_type(type: str | None, dtype: str | None, gguf: bool, path: Path) -> str:
    name = (type or "").upper()
    if gguf and name == HUGGING_FACE:
        raise UsageError(f"--type hf makes a directory, and {path} names a GGUF file: give a name without .gguf")
    if gguf and dtype is not None:
        raise UsageError(f"--dtype is of a Hugging Face directory; choose the type of {path} with --type")
    if dtype is not None and dtype not in DTYPES:
        raise UsageError(f"--dtype {dtype} is unknown; choose {', '.join(DTYPES)}")
    if name in ("", HUGGING_FACE):
        return AUTO
    name = check_type(type or "")
    if not gguf and name != AUTO:
        raise UsageError(f"--type {name.lower()} makes a GGUF file: give {path} the ending .gguf")
    return name


def _check_target(path: Path, gguf: bool, force: bool) -> None:
    """UsageError for a target that would be overwritten, or that is no place for what is to be written."""
    if gguf and path.is_dir():
        raise UsageError(f"{path} is a directory; give a file that does not exist")
    if not gguf and path.exists() and not path.is_dir():
        raise UsageError(f"{path} is a file; give a directory, or a name that ends in .gguf")
    taken = path.exists() if gguf else path.is_dir() and any(path.iterdir())
    if taken and not force:
        raise UsageError(f"{path} exists already: --force replaces it")
    real = Path(os.path.realpath(path))
    if path.is_symlink() and (real.is_symlink() or not real.parent.is_dir()):
        raise UsageError(f"{path} is a link that leads nowhere: remove it, or choose another target")
    parent = path.absolute().parent
    if not parent.is_dir():
        raise UsageError(f"{parent} is no directory: make it first, or choose another target")


def _finish_report(report: ConvertReport, contents: Any, model: _Model) -> None:
    report.count(contents.tensors)
    report.copied, report.expanded, report.kept = contents.copied, dict(contents.expanded), dict(contents.kept)
    report.notes, report.skipped = [*model.notes, *contents.notes], model.skipped


def _write_file(path: Path, contents: GGUFContents, progress: Progress, force: bool) -> None:
    total = sum(tensor.nbytes for tensor in contents.tensors)
    path = path.resolve()  # a link stays one
    with _failing_whole(path, total):
        descriptor, name = tempfile.mkstemp(prefix=f".{path.name}-", suffix=".partial", dir=path.parent)
        os.close(descriptor)
        temporary = Path(name)
        try:
            with progress(total) as advance:
                write_gguf(temporary, contents.metadata, contents.tensors, lambda tensor: advance(tensor.nbytes))
            sync(temporary)
            os.chmod(temporary, 0o666 & ~umask())
            _check_target(path, True, force)  # another one may have been written meanwhile
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


def _write_whole_directory(
    path: Path,
    fill: Callable[[Path, Callable[[FileTensor], None]], None],
    tensors: list[FileTensor],
    progress: Progress,
    force: bool,
) -> None:
    total = sum(tensor.nbytes for tensor in tensors)
    path = path.resolve()
    with _failing_whole(path, total):
        temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}-", suffix=".partial", dir=path.parent))
        try:
            with progress(total) as advance:
                fill(temporary, lambda tensor: advance(tensor.nbytes))
            for file in temporary.rglob("*.safetensors"):
                sync(file)
            _check_target(path, False, force)
            move_into_place(temporary, path)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


@contextlib.contextmanager
def _failing_whole(path: Path, total: int) -> Iterator[None]:
    """Refuse at once what the disk has no room for; an error of writing names the target."""
    free = shutil.disk_usage(path.parent).free
    if free < total:
        raise WeightError(f"{path} needs {total:,} bytes, and the disk has {free:,} free")
    try:
        yield
    except OSError as error:
        why = error.strerror or f"the disk may be full ({error})"  # NumPy names no cause
        if isinstance(error.filename, str | Path) and not _is_ours(Path(error.filename), path):
            why += f" ({error.filename})"
        left = "what was there is as it was" if path.exists() else "nothing was left under that name"
        raise WeightError(f"{path} cannot be written: {why}; {left}") from error


def _is_ours(file: Path, target: Path) -> bool:
    """Whether this is the target, or what is written under another name beside it."""
    return file == target or any(part.startswith(f".{target.name}-") for part in file.parts)


def _grouped(fallbacks: list[list[str]]) -> dict[tuple[str, str], list[str]]:
    found: dict[tuple[str, str], list[str]] = {}
    for name, wanted, storage in fallbacks:
        found.setdefault((wanted, storage), []).append(name)
    return found
