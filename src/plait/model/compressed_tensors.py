"""The quantisation block of compressed-tensors checkpoints: groups of modules, each with its own scheme."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from plait.errors import ConfigError
from plait.model.quantisation import Block, Quantisation, WeightScheme, activation_notes

FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
_HARMLESS = frozenset(("quant_method", "global_compression_ratio", "version", "run_compressed", "dequantize"))
_OBSERVERS = frozenset(("observer", "observer_kwargs", "scale_dtype", "zp_dtype", "dynamic"))
_STRATEGIES = ("tensor", "channel", "group", "block")
_BLOCK = re.compile(r"(\d{1,9})x(\d{1,9})")


def read_compressed(block: Block) -> tuple[Quantisation, frozenset[str]]:
    """What the block says, and the keys that never matter. Raises ConfigError for what cannot be carried out."""
    block.text("quantization_status", "compressed", ("compressed", "frozen"))
    _check_sparsity(block)
    transforms = block("transform_config", {})
    if transforms and not (isinstance(transforms, Mapping) and not transforms.get("config_groups")):
        raise ConfigError(f"{block.what}: transform_config (rotations of activations) is not supported")
    block.refuse("moe_sparsity_config")
    groups = block("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise block.error("config_groups", groups, "must be an object of groups")
    storage = block("format")
    schemes, stored = [], bool(block("kv_cache_scheme"))
    for name, group in groups.items():
        scheme, fixed = _group(name, group, storage, block.what)
        schemes.append(scheme)
        stored |= fixed
    ignore = block.names("ignore")
    title = "compressed-tensors, " + " and ".join(dict.fromkeys(_title(scheme) for scheme in schemes))
    return Quantisation("compressed-tensors", title, tuple(schemes), ignore, activation_notes(stored)), _HARMLESS


def _check_sparsity(block: Block) -> None:
    sparsity = block("sparsity_config", {})
    if not isinstance(sparsity, Mapping) or sparsity.get("format", "dense") != "dense":
        kind = sparsity.get("format") if isinstance(sparsity, Mapping) else sparsity
        raise block.error("sparsity_config.format", kind, "is not supported (supported: dense)")


def _group(name: Any, group: Any, storage: Any, what: str) -> tuple[WeightScheme, bool]:
    """The scheme of one group, and whether scales for activations are stored with it."""
    what = f"{what}.config_groups.{str(name)[:40]}"
    if not isinstance(group, Mapping):
        raise ConfigError(f"{what}={group!r:.80} must be an object")
    keys = Block(group, what)
    weights, inputs, targets = keys("weights"), keys("input_activations"), keys.names("targets")
    form = keys("format", storage)
    form = Block({"format": form}, what).text("format", "", FORMATS)
    keys("output_activations")
    keys.finish(frozenset(), strict=False, warn=True)
    if not isinstance(weights, Mapping):
        raise keys.error("weights", weights, "must say how weights are stored")
    fixed = isinstance(inputs, Mapping) and inputs.get("dynamic") is False
    return _weights(Block(weights, f"{what}.weights"), form, targets), fixed


def _weights(keys: Block, storage: str, targets: tuple[str, ...]) -> WeightScheme:
    kind = keys.text("type", "int", ("int", "float"))
    if (kind == "float") == (storage in ("pack-quantized", "int-quantized")):
        raise keys.error("type", kind, f"does not fit the format {storage!r}")
    packed = storage == "pack-quantized"
    bits = keys.number("num_bits", 8, range(2, 9).__contains__ if packed else (8).__eq__, "2 to 8" if packed else "8")
    symmetric = keys.flag("symmetric", True)
    if kind == "float" and not symmetric:
        raise keys.error("symmetric", False, "does not fit float weights")
    size = keys("group_size")
    strategy = keys.text("strategy", "tensor" if size is None else "channel" if size == -1 else "group", _STRATEGIES)
    group_size = block = None
    if strategy == "group":
        group_size = keys.number("group_size", None, lambda n: 0 < n < 1 << 31, "positive")
    elif size not in (None, -1):
        raise keys.error("group_size", size, f"does not fit strategy={strategy!r}")
    if strategy == "block":
        block = _block(keys)
    if packed and strategy in ("tensor", "block"):
        raise keys.error("strategy", strategy, f"does not fit the format {storage!r}")
    order = keys("actorder")
    if order not in (None, False, True, "group", "weight", "dynamic", "static"):
        raise keys.error("actorder", order, "is not supported (supported: group, weight)")
    keys.finish(_OBSERVERS | {"block_structure"}, strict=False, warn=True)
    act_order = order in (True, "group", "dynamic")
    if kind == "float":
        storage = "float-quantized"
    elif storage == "naive-quantized":
        storage = "int-quantized"
    return WeightScheme(storage, bits, strategy, group_size, block, symmetric, 0, act_order, targets)


def _block(keys: Block) -> tuple[int, int]:
    value = keys("block_structure")
    if isinstance(value, str) and (match := _BLOCK.fullmatch(value)):
        value = [int(match[1]), int(match[2])]
    if not isinstance(value, list) or len(value) != 2 or not all(type(n) is int and 0 < n < 1 << 31 for n in value):
        raise keys.error("block_structure", value, "must be two positive numbers: rows and columns of a block")
    return value[0], value[1]


def _title(scheme: WeightScheme) -> str:
    kind = "FP8" if scheme.storage == "float-quantized" else f"int{scheme.bits}"
    scale = {"tensor": "one scale per tensor", "channel": "one scale per row"}.get(scheme.strategy)
    if scheme.strategy == "group":
        scale = f"groups of {scheme.group_size}"
    elif scheme.block is not None:
        scale = f"blocks of {scheme.block[0]}x{scheme.block[1]}"
    return f"{kind}, {scale}"
