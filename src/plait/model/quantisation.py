"""How a Hugging Face checkpoint says that its weights are quantised: the blocks of config.json, read and judged.

Only what the blocks say is decided here; `plait.weights.quantised` reads the tensors by it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from plait.errors import ConfigError
from plait.patterns import compile_pattern

log = logging.getLogger("plait.config")

# Where in config.json the block may stand; older compressed-tensors and ModelOpt checkpoints use the other two.
BLOCKS = ("quantization_config", "compression_config", "hf_quant_config")
_REMEDY = "use a GGUF or bf16 version of the model"
_NUMBERS = frozenset((2, 3, 4, 8))


@dataclass(frozen=True)
class WeightScheme:
    """How the weights of some modules are stored.

    storage: "gptq", "awq", "pack-quantized", "int-quantized", "float-quantized", "fp8" or "mxfp4". strategy: what one
    scale covers: "tensor", "channel" (a row), "group" (group_size columns of a row; None: all of them) or "block"
    (block = rows, columns). zero_offset: added to stored zero points. act_order: columns may belong to groups in any
    order. targets: names, regular expressions ("re:...") or classes of the modules; empty: whatever is stored so.
    """

    storage: str
    bits: int
    strategy: str
    group_size: int | None = None
    block: tuple[int, int] | None = None
    symmetric: bool = True
    zero_offset: int = 0
    act_order: bool = False
    targets: tuple[str, ...] = ()


@dataclass(frozen=True)
class Quantisation:
    """What a quantisation block says. method: its quant_method. title: for people. ignore: modules that are not
    quantised, as for targets. notes: what of it is not carried out, for the load report."""

    method: str
    title: str
    schemes: tuple[WeightScheme, ...]
    ignore: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass
class Block:
    """A quantisation block whose keys are asked for one by one; `finish` judges those that nobody asked for."""

    data: Mapping[str, Any]
    what: str
    asked: set[str] = field(default_factory=set)

    def __call__(self, key: str, default: Any = None) -> Any:
        """The value; the default where it is absent or null."""
        self.asked.add(key)
        value = self.data.get(key)
        return default if value is None else value

    def number(self, key: str, default: int | None, allowed: Callable[[int], bool], rule: str) -> int:
        """An integer that `allowed` accepts; `rule` says in words which those are."""
        value = self(key, default)
        if type(value) is not int or not allowed(value):
            raise self.error(key, value, f"must be {rule}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self(key, default)
        if type(value) is not bool:
            raise self.error(key, value, "must be true or false")
        return value

    def text(self, key: str, default: str, allowed: tuple[str, ...]) -> str:
        """One of these words, in any case."""
        value = self(key, default)
        if not isinstance(value, str) or value.lower() not in allowed:
            raise self.error(key, value, f"is not supported (supported: {', '.join(allowed)}); {_REMEDY}")
        return value.lower()

    def names(self, *keys: str) -> tuple[str, ...]:
        """The texts of all these lists; those that begin with "re:" are expressions that can be matched."""
        found: list[str] = []
        for key in keys:
            value = self(key, [])
            if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
                raise self.error(key, value, "must be a list of module names")
            found += value
        for name in found:
            if name.startswith("re:"):
                try:
                    compile_pattern(name[3:])
                except ValueError as problem:
                    raise ConfigError(f"{self.what}: {name!r:.80} {problem}") from None
        return tuple(found)

    def refuse(self, *keys: str) -> None:
        """ConfigError where one of these keys says anything: it would change numbers."""
        for key in keys:
            value = self(key)
            if value not in (None, False, 0, "", [], {}):
                raise self.error(key, value, f"is not supported; {_REMEDY}")

    def error(self, key: str, value: Any, why: str) -> ConfigError:
        return ConfigError(f"{self.what}: {key}={value!r:.80} {why}")

    def finish(self, harmless: frozenset[str], strict: bool, warn: bool) -> None:
        """One warning line, or with `strict` an error, for keys that are neither asked for nor known as harmless."""
        unknown = sorted(str(key)[:60] for key in self.data.keys() - self.asked - harmless)
        if unknown and strict:
            raise ConfigError(f"{self.what} has keys that plait does not know: {', '.join(unknown[:8])}")
        if unknown and warn:
            log.warning("%s: ignoring keys that plait does not know: %s", self.what, ", ".join(unknown[:8]))


def quantisation_block(raw: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]] | None:
    """(its name, the block) of a config.json or of its text_config. Raises ConfigError for two, or for no object."""
    found: list[tuple[str, Any]] = []
    for where, data in (("", raw), ("text_config.", raw.get("text_config"))):
        if isinstance(data, Mapping):
            found += [(where + key, data[key]) for key in BLOCKS if data.get(key)]
    different = [entry for entry in found if entry[1] != found[0][1]]
    if different:
        raise ConfigError(f"{found[0][0]} and {different[0][0]} say different things of the quantisation: remove one")
    if not found:
        return None
    name, block = found[0]
    if not isinstance(block, Mapping):
        raise ConfigError(f"{name}={block!r:.80} must be an object")
    if not block.get("quant_method") and isinstance(block.get("quantization_config"), Mapping):
        return name, block["quantization_config"]  # older compressed-tensors files nest it once more
    return name, block


def without_quantisation(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration as it would be for the expanded weights."""
    plain = {key: value for key, value in raw.items() if key not in BLOCKS}
    if isinstance(plain.get("text_config"), Mapping):
        plain["text_config"] = {key: value for key, value in plain["text_config"].items() if key not in BLOCKS}
    return plain


def read_quantisation(raw: Mapping[str, Any], strict: bool = False, warn: bool = False) -> Quantisation | None:
    """What a config.json says of quantised weights; None where it says nothing.

    strict: unknown keys are errors; warn: they get a warning line. Raises ConfigError naming method or key for what
    cannot be carried out.
    """
    found = quantisation_block(raw)
    if found is None:
        return None
    name, data = found
    block = Block(data, name)
    method = block("quant_method")
    read = _METHODS.get(method) if isinstance(method, str) else None
    if read is None:
        known = ", ".join(_METHODS)
        raise ConfigError(f"{name}: quant_method {method!r:.60} is not supported (supported: {known}); {_REMEDY}")
    quantisation, harmless = read(block)
    block.finish(harmless, strict, warn)
    return quantisation


Read = tuple[Quantisation, frozenset[str]]

# What only the program that quantised needed.
_GPTQ_HARMLESS = frozenset(
    (
        "act_group_aware",
        "backend",
        "batch_size",
        "block_name_to_quantize",
        "cache_block_outputs",
        "damp_auto_increment",
        "damp_percent",
        "dataset",
        "disable_exllama",
        "exllama_config",
        "hyb_act",
        "lm_head",
        "lm_head_quantized",
        "max_input_length",
        "meta",
        "model_file_base_name",
        "model_name_or_path",
        "model_seqlen",
        "module_name_preceding_first_block",
        "modules_in_block_to_quantize",
        "modules_to_not_convert",
        "mse",
        "offload_to_disk",
        "offload_to_disk_path",
        "pad_token_id",
        "quantization_status",
        "quantizer",
        "static_groups",
        "tokenizer",
        "true_sequential",
        "use_cuda_fp16",
        "use_exllama",
    )
)
_AWQ_HARMLESS = _GPTQ_HARMLESS | {"do_fuse", "fuse_max_seq_len", "modules_to_fuse", "fuse_mapping", "sym"}
_FP8_HARMLESS = frozenset(("modules_to_convert", "dequantize", "quantization_status"))


def _gptq(block: Block) -> Read:
    bits = block.number("bits", None, _NUMBERS.__contains__, "2, 3, 4 or 8")
    size = _group_size(block)
    layout = block.text("checkpoint_format", block("format", "gptq"), ("gptq", "gptq_v2"))
    block.text("pack_dtype", "int32", ("int32",))
    act_order = block.flag("desc_act", False)
    symmetric = block.flag("sym", True)
    block.refuse("adapter", "rotation", "is_marlin_format")
    _check_dynamic(block)
    scheme = WeightScheme(
        "gptq", bits, "group", size, symmetric=symmetric, zero_offset=int(layout == "gptq"), act_order=act_order
    )
    order = ", columns by activation order" if act_order else ""
    return Quantisation("gptq", f"GPTQ, {bits} bits, {_groups(size)}{order}", (scheme,)), _GPTQ_HARMLESS


def _check_dynamic(block: Block) -> None:
    """Rules per module: those that leave modules out show in the tensors, any other changes bits or groups."""
    rules = block("dynamic", {})
    if not isinstance(rules, Mapping):
        raise block.error("dynamic", rules, "must be an object of rules by module")
    changed = [pattern for pattern, values in rules.items() if not str(pattern).startswith("-:") and values]
    if changed:
        raise block.error("dynamic", changed[0], f"changes single modules, which is not supported; {_REMEDY}")


def _awq(block: Block) -> Read:
    bits = block.number("bits", block("w_bit", 4), (4).__eq__, "4")
    size = _group_size(block, block("q_group_size", 128))
    form = block("checkpoint_format", block("format", "gemm"))
    block.text("version", form, ("gemm",))
    block.flag("zero_point", True)  # the zero points are stored either way
    block.text("pack_dtype", "int32", ("int32",))
    block.refuse("desc_act", "adapter", "rotation")
    _check_dynamic(block)
    if block("backend") == "llm-awq":
        raise block.error("backend", "llm-awq", f"is not supported; {_REMEDY}")
    scheme = WeightScheme("awq", bits, "group", size, symmetric=False)
    return Quantisation("awq", f"AWQ, {bits} bits, {_groups(size)}", (scheme,)), _AWQ_HARMLESS


def _group_size(block: Block, default: int = 128) -> int | None:
    size = block.number("group_size", default, lambda n: n == -1 or 0 < n < 1 << 31, "positive, or -1 for whole rows")
    return None if size == -1 else size


def _groups(size: int | None) -> str:
    return "whole rows" if size is None else f"groups of {size}"


def _fp8(block: Block) -> Read:
    block.text("fmt", "e4m3", ("e4m3", "float8_e4m3fn"))
    block.text("scale_fmt", "float", ("float", "ue8m0"))
    block.text("expert_dtype", "fp8", ("fp8",))
    fixed = block.text("activation_scheme", "dynamic", ("dynamic", "static")) == "static"
    block.refuse("kv_cache_scheme")
    size = block("weight_block_size")
    if size is not None and not _is_block(size):
        raise block.error("weight_block_size", size, "must be two positive numbers: rows and columns of a block")
    pair = None if size is None else (size[0], size[1])
    scheme = WeightScheme("fp8", 8, "tensor" if pair is None else "block", block=pair)
    ignore = block.names("modules_to_not_convert", "ignored_layers")
    title = "FP8, " + ("one scale per tensor or row" if pair is None else f"blocks of {pair[0]}x{pair[1]}")
    return Quantisation("fp8", title, (scheme,), ignore, activation_notes(fixed)), _FP8_HARMLESS


def _is_block(size: Any) -> bool:
    return isinstance(size, list) and len(size) == 2 and all(type(n) is int and 0 < n < 1 << 31 for n in size)


def activation_notes(stored: bool) -> tuple[str, ...]:
    """What the load report says of scales for activations."""
    return ("the checkpoint's scales for quantised activations are not used",) if stored else ()


def _mxfp4(block: Block) -> Read:
    ignore = block.names("modules_to_not_convert")
    scheme = WeightScheme("mxfp4", 4, "group", 32)
    return Quantisation("mxfp4", "MXFP4, groups of 32", (scheme,), ignore), frozenset(("dequantize",))


def _compressed(block: Block) -> Read:
    from plait.model.compressed_tensors import read_compressed

    return read_compressed(block)


_METHODS: dict[str, Callable[[Block], Read]] = {
    "gptq": _gptq,
    "awq": _awq,
    "fp8": _fp8,
    "compressed-tensors": _compressed,
    "mxfp4": _mxfp4,
}
