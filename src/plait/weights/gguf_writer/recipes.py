"""Which type every tensor of a GGUF file gets: one type for all matrices, or a mix of K types by kind and layer.

The mixes are llama.cpp's: more bits where an error costs most, which is the head, the values of attention and the last
product of the feed-forward.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from plait.errors import UsageError
from plait.weights.encode import ENCODERS
from plait.weights.gguf_types import TYPES_BY_NAME

AUTO = "AUTO"
# What takes the place of a type whose blocks do not divide a row.
FALLBACKS = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
_NO_BLOCKS = "F16"

# (layer, layers) -> whether the layer gets the larger type.
Layers = Callable[[int, int], bool]


def _more_bits(layer: int, layers: int) -> bool:
    """The first and the last eighth, and every third layer between them."""
    return layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2


def _first_eighth(layer: int, layers: int) -> bool:
    return layer < layers // 8


def _first_four(layer: int, layers: int) -> bool:
    return layer < 4


@dataclass(frozen=True)
class Recipe:
    """A mix. base: of all matrices that nothing else is said of; head: of the output head, and of an embedding that is
    tied to it. larger: by kind of tensor, the type and the layers that get it. eight_experts: what differs, by kind,
    where a model has eight experts. file_type: general.file_type, llama.cpp's number for it."""

    base: str
    head: str
    file_type: int
    larger: Mapping[str, tuple[str, Layers]] = field(default_factory=dict)
    eight_experts: Mapping[str, str] = field(default_factory=dict)


_EIGHT = {"attn_v": "Q8_0", "attn_k": "Q8_0"}

RECIPES: Mapping[str, Recipe] = {
    "Q4_K_S": Recipe(
        "Q4_K",
        "Q6_K",
        14,
        {"attn_v": ("Q5_K", _first_four), "ffn_down": ("Q5_K", _first_eighth)},
        _EIGHT | {"attn_output": "Q5_K"},
    ),
    "Q4_K_M": Recipe(
        "Q4_K",
        "Q6_K",
        15,
        {"attn_v": ("Q6_K", _more_bits), "ffn_down": ("Q6_K", _more_bits)},
        _EIGHT | {"attn_output": "Q5_K"},
    ),
    "Q5_K_S": Recipe("Q5_K", "Q6_K", 16, {}, _EIGHT),
    "Q5_K_M": Recipe("Q5_K", "Q6_K", 17, {"attn_v": ("Q6_K", _more_bits), "ffn_down": ("Q6_K", _more_bits)}, _EIGHT),
}
# general.file_type of files of one type.
_FILE_TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "BF16": 32}
_FILE_TYPES |= {"Q4_K": 14, "Q5_K": 16, "Q6_K": 18}
TYPE_NAMES = (*ENCODERS, *RECIPES)

# Where attention's values are: the matrix may hold q and k, or more of them, too.
_VALUES = ("attn_v", "attn_qkv", "attn_kv_b")


@dataclass(frozen=True)
class Model:
    """What a recipe asks about a model."""

    architecture: str
    layers: int
    experts: int = 0
    tied: bool = False


@dataclass(frozen=True)
class Choice:
    """A tensor's type; wanted: what it would have been if its rows had the length for it."""

    storage: str
    wanted: str

    @property
    def fell_back(self) -> bool:
        return self.storage != self.wanted


def check_type(name: str) -> str:
    """The name in capitals. Raises UsageError for one that does not exist."""
    upper = name.upper()
    if upper not in (AUTO, *TYPE_NAMES):
        raise UsageError(f"--type {name} is unknown; choose auto, hf, {', '.join(n.lower() for n in TYPE_NAMES)}")
    return upper


def stays_float32(name: str, axes: int) -> bool:
    """Whether a tensor is F32 in every file: vectors, norms, routers, and what is no weight."""
    return axes < 2 or not name.endswith("weight") or name.endswith("_norm.weight") or ".ffn_gate_inp" in name


def choose_type(type_name: str, name: str, shape: tuple[int, ...], stored: str, model: Model) -> Choice:
    """The type of a tensor of the file. type_name: of `TYPE_NAMES`, or AUTO: as it is stored, where GGUF has that."""
    if stays_float32(name, len(shape)):
        return Choice("F32", "F32")
    if type_name == AUTO:
        wanted = stored if stored in ("F32", "F16", "BF16") or _is_blocks(stored) else "F32"
        return Choice(wanted, wanted)
    wanted = _mixed(RECIPES[type_name], name, model) if type_name in RECIPES else type_name
    storage = wanted
    for instead in (FALLBACKS.get(wanted, _NO_BLOCKS), _NO_BLOCKS):
        if shape[-1] % TYPES_BY_NAME[storage].block_size:
            storage = instead
    return Choice(storage, wanted)


def _is_blocks(stored: str) -> bool:
    kind = TYPES_BY_NAME.get(stored)
    return kind is not None and kind.block_size > 1


def _mixed(recipe: Recipe, name: str, model: Model) -> str:
    if name == "output.weight" or (model.tied and name == "token_embd.weight"):
        return recipe.head
    found = re.match(r"blk\.(\d+)\.(\w+)", name)
    if found is None:
        return recipe.base
    # Experts' matrices count as ffn_down; the halves of latent attention's kv_b (attn_v_b) as nothing of their own.
    layer, kind = int(found[1]), "ffn_down" if found[2].startswith("ffn_down") else found[2]
    values = kind in _VALUES
    rule = "attn_v" if values else kind
    if model.experts == 8 and rule in recipe.eight_experts:
        return recipe.eight_experts[rule]
    chosen = recipe.base
    if rule in recipe.larger:
        larger, layers = recipe.larger[rule]
        chosen = larger if layers(layer, model.layers) else recipe.base
    if values and chosen == "Q4_K" and model.layers == 80 and model.architecture in ("llama", "qwen2"):
        return "Q5_K"  # llama.cpp's 70B: eight heads share these values
    return chosen


def file_type(type_name: str, storages: Mapping[str, int]) -> int:
    """general.file_type; storages: bytes by type, for AUTO."""
    if type_name in RECIPES:
        return RECIPES[type_name].file_type
    if type_name == AUTO:
        type_name = max(storages, key=lambda name: storages[name], default="F32")
    return _FILE_TYPES.get(type_name, 1024)
