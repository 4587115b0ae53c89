"""A checkpoint with quantised weights, seen as if every weight were one tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from plait.errors import WeightError
from plait.model.quantisation import Quantisation, WeightScheme
from plait.weights.numbers import float32_rows
from plait.weights.quantised import awq, compressed, gptq
from plait.weights.quantised.awq import AwqWeight
from plait.weights.quantised.base import Fetch, Logical
from plait.weights.quantised.compressed import CompressedInteger
from plait.weights.quantised.fp8 import Float8Weight
from plait.weights.quantised.gptq import GptqWeight
from plait.weights.quantised.modules import Modules
from plait.weights.quantised.mxfp4 import Mxfp4Weight
from plait.weights.safetensors_header import QUANTISED_DTYPES
from plait.weights.sources import TensorInfo, TensorSource, no_such_tensor, some_names

if TYPE_CHECKING:
    import torch

# Stored parts of a weight by its name: role -> the tensor.
Found = dict[str, dict[str, TensorInfo]]

_LAYOUTS = ("Q4_0", "Q5_0", "Q8_0")
# Scales for activations and for keys and values that FP8 checkpoints may hold.
_FP8_UNUSED = (*compressed.UNUSED, ".activation_scale")


class QuantisedSource:
    """A TensorSource over another one. Raises WeightError, naming tensors, for parts that are missing, left over, or of
    a wrong shape or type.

    weights: the quantised ones by name. unused: tensors that are left out (scales for activations). `info` may read
    scales and zero points: they decide whether a layout holds the numbers exactly.
    """

    def __init__(self, source: TensorSource, quantisation: Quantisation) -> None:
        self.path: Path = source.path
        self.quantisation = quantisation
        self._source = source
        self._ignored = Modules(quantisation.ignore)
        self._targets = [(scheme, Modules(scheme.targets)) for scheme in quantisation.schemes]
        infos = [source.info(name) for name in source.names()]
        found, self.unused = collect(infos, quantisation)
        self.weights = {name: self._weight(name, parts, source.raw) for name, parts in found.items()}
        self._names = self._in_order(infos, found)
        self._infos: dict[str, TensorInfo] = {}

    def _weight(self, name: str, parts: Mapping[str, TensorInfo], fetch: Fetch) -> Logical:
        module = name.removesuffix(".weight")
        ignored = self._ignored.entry_for(module)
        if ignored is not None:
            shown = some_names([info.name for info in parts.values()])
            raise WeightError(f"{self.path}: {shown} are quantised, but config.json leaves {ignored!r} out of it")
        return _BUILD[self.quantisation.method](name, parts, fetch, self._scheme(module))

    def _scheme(self, module: str) -> WeightScheme:
        """The first scheme that means the module by its name, else by a name's part or a pattern, else by "Linear", the
        class of all of them."""
        for means in (lambda t: t.has(module), lambda t: t.entry_for(module) is not None, lambda t: t.has("Linear")):
            for scheme, targets in self._targets:
                if not scheme.targets or means(targets):
                    return scheme
        raise WeightError(f"{self.path}: {module!r} is quantised, but no group of config.json targets it")

    def _in_order(self, infos: list[TensorInfo], found: Found) -> dict[str, None]:
        """The names of weights and of all other tensors, in the file's order."""
        weight_of = {info.name: name for name, parts in found.items() for info in parts.values()}
        names: dict[str, None] = {}
        stored, unused = {info.name for info in infos}, set(self.unused)
        for info in infos:
            name = weight_of.get(info.name)
            if name is None and info.name not in unused:
                self._check_plain(info)
                names[info.name] = None
            elif name is not None:
                if name in stored and name not in weight_of:
                    raise WeightError(f"{info.file}: {name!r} is there twice: as it is, and quantised as {info.name!r}")
                names[name] = None
        return names

    def _check_plain(self, info: TensorInfo) -> None:
        number = info.format not in ("F64", "F32", "F16", "BF16")
        if info.format in QUANTISED_DTYPES or (number and info.name.endswith((".weight", "_proj"))):
            raise WeightError(
                f"{info.file}: tensor {info.name!r} is stored as {info.format}, which is not what"
                f" {self.quantisation.method} checkpoints hold: are its scales missing?"
            )

    def names(self) -> list[str]:
        return list(self._names)

    def info(self, name: str) -> TensorInfo:
        weight = self.weights.get(name)
        if weight is None:
            if name not in self._names:
                raise no_such_tensor(name, self.path, self.names())
            return self._source.info(name)
        if name not in self._infos:
            main = next(iter(weight.parts.values()))
            self._infos[name] = TensorInfo(
                name, weight.shape, weight.format, weight.nbytes, main.file, main.offset, weight.origin
            )
            weight.forget()
        return self._infos[name]

    def numbers(self, name: str, start: int, stop: int) -> NDArray[np.float32]:
        """Rows start .. stop - 1 (axis 0) of a weight or of another tensor, float32."""
        weight = self.weights.get(name)
        return float32_rows(self._source, name, start, stop) if weight is None else weight.numbers(start, stop)

    def read(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The tensor, expanded; dtype None: float32, bfloat16 for MXFP4, the stored type for plain numbers."""
        weight = self.weights.get(name)
        if weight is None:
            return self._source.read(name, dtype)
        import torch

        if weight.format == "BF16":
            tensor = torch.from_numpy(weight.raw()).view(torch.bfloat16).reshape(weight.shape)
        else:
            tensor = torch.from_numpy(weight.numbers(0, weight.shape[0]))
        weight.forget()
        return tensor if dtype is None else tensor.to(dtype)

    def raw(self, name: str) -> NDArray[np.uint8]:
        """Of a weight: the bytes of its format where that is a layout, made anew; else those of all its parts."""
        weight = self.weights.get(name)
        return self._source.raw(name) if weight is None else weight.raw()

    def release(self, name: str) -> None:
        weight = self.weights.get(name)
        for stored in [name] if weight is None else [info.name for info in weight.parts.values()]:
            self._source.release(stored)
        if weight is not None:
            weight.forget()

    def close(self) -> None:
        self._source.close()

    def zero_biases(self) -> list[str]:
        """Biases of quantised modules that are all zero: some programs write one for every module."""
        modules = {name.removesuffix(".weight") for name in self.weights}
        biases = (name for name in self._names if name.endswith(".bias") and name[:-5] in modules)
        return [name for name in biases if not self._source.raw(name).any()]


# Collecting the parts of each weight. A part whose main tensor is missing is found too: the weight then says so.


def collect(infos: list[TensorInfo], quantisation: Quantisation) -> tuple[Found, list[str]]:
    """The parts of every quantised weight, and the tensors that are left out. From the names and types alone."""
    return _COLLECT[quantisation.method](infos)


def _by_suffix(roles: Mapping[str, str], infos: Iterable[TensorInfo]) -> Found:
    found: Found = {}
    for info in infos:
        module, dot, last = info.name.rpartition(".")
        role = roles.get(dot + last)
        if role is not None:
            found.setdefault(f"{module}.weight", {})[role] = info
    main = next(iter(roles.values()))
    return {name: dict(sorted(parts.items(), key=lambda item: item[0] != main)) for name, parts in found.items()}


def _collect_gptq(infos: list[TensorInfo]) -> tuple[Found, list[str]]:
    return _by_suffix(gptq.ROLES, infos), []


def _collect_awq(infos: list[TensorInfo]) -> tuple[Found, list[str]]:
    return _by_suffix(awq.ROLES, infos), []


def _collect_compressed(infos: list[TensorInfo]) -> tuple[Found, list[str]]:
    unused = [info.name for info in infos if info.name.endswith(compressed.UNUSED)]
    found = _by_suffix(compressed.ROLES, infos)
    plain = {
        name
        for name, parts in found.items()
        if parts.keys() == {"weight"} and parts["weight"].format in ("F64", "F32", "F16", "BF16")
    }
    return {name: parts for name, parts in found.items() if name not in plain}, unused


def _collect_fp8(infos: list[TensorInfo]) -> tuple[Found, list[str]]:
    """A large checkpoint has 140,000 tensors: each is looked at once, and half of them are scales."""
    found: Found = {}
    scales: dict[str, TensorInfo] = {}
    plain: list[TensorInfo] = []
    for info in infos:
        name = info.name
        if name.endswith("_scale_inv"):
            other = scales.setdefault(name[:-10], info)
        elif info.format == "F8_E4M3" and not name.endswith("_scale"):
            found[name] = {"weight": info}
            continue
        elif name.endswith("weight_scale"):
            other = scales.setdefault(name[:-6], info)
        else:
            plain.append(info)
            continue
        if other is not info:
            raise WeightError(f"{info.file}: {other.name!r} and {name!r} are scales of the same weight")
    unused = [info.name for info in plain if info.name.endswith(_FP8_UNUSED)]
    for info in plain:
        if info.name in scales:
            found[info.name] = {"weight": info}  # of whatever type: the weight says which it should be
    for name, info in scales.items():
        found.setdefault(name, {})["scale"] = info
    return found, unused


def _collect_mxfp4(infos: list[TensorInfo]) -> tuple[Found, list[str]]:
    found: Found = {}
    for info in infos:
        for suffix in ("_blocks", "_scales"):
            if info.name.endswith(suffix):
                found.setdefault(info.name.removesuffix(suffix), {})[suffix[1:]] = info
    return {name: dict(sorted(parts.items())) for name, parts in found.items()}, []


_COLLECT: dict[str, Callable[[list[TensorInfo]], tuple[Found, list[str]]]] = {
    "gptq": _collect_gptq,
    "awq": _collect_awq,
    "fp8": _collect_fp8,
    "compressed-tensors": _collect_compressed,
    "mxfp4": _collect_mxfp4,
}


def _build_compressed(name: str, parts: Mapping[str, TensorInfo], fetch: Fetch, scheme: WeightScheme) -> Logical:
    if "weight" in parts and "weight_packed" in parts:
        both = some_names([parts["weight"].name, parts["weight_packed"].name])
        raise WeightError(f"{parts['weight'].file}: {both} are the same weight twice")
    weight: Logical
    if scheme.storage != "float-quantized":
        weight = CompressedInteger(name, parts, fetch, scheme)
        spare = {"weight_shape"} & parts.keys() if scheme.storage == "int-quantized" else set()
    else:
        renamed = {{"weight_scale": "scale"}.get(role, role): info for role, info in parts.items()}
        weight = Float8Weight(name, renamed, fetch, scheme)
        spare = renamed.keys() - {"weight", "scale"}
    if spare:
        raise weight.error(f"{parts[min(spare)].name!r} is of no use to the format {scheme.storage!r}")
    return weight


_BUILD: dict[str, Callable[[str, Mapping[str, TensorInfo], Fetch, WeightScheme], Logical]] = {
    "gptq": GptqWeight,
    "awq": AwqWeight,
    "fp8": Float8Weight,
    "compressed-tensors": _build_compressed,
    "mxfp4": lambda name, parts, fetch, _: Mxfp4Weight(name, parts, fetch),
}


def quantised_source(source: TensorSource, quantisation: Quantisation | None) -> TensorSource:
    """The source as it is where nothing says that it is quantised, else a `QuantisedSource`.

    Raises WeightError for FP8 tensors that no configuration explains.
    """
    if quantisation is not None:
        return QuantisedSource(source, quantisation)
    check_plain(source)
    return source


def check_plain(source: TensorSource) -> None:
    """WeightError for FP8 and packed tensors, which mean nothing without a quantisation block."""
    for name in source.names():
        info = source.info(name)
        if info.format in QUANTISED_DTYPES or name.endswith((".qweight", ".weight_packed")):
            raise WeightError(
                f"{info.file}: tensor {name!r} is stored as {info.format}, but config.json has no quantization_config"
                " that says how: restore it, or use a bf16 version of the model"
            )
