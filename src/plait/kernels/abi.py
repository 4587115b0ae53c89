"""The structs and constants of csrc/plait_native.h, field by field, and the signatures of its functions."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char_p, c_double, c_float, c_int32, c_int64, c_uint32, c_uint64, c_void_p

ABI_VERSION = 7  # PLAIT_ABI_VERSION

# PLAIT_LAYOUT_...: how a packed matrix is kept; the same numbers name the storage of a source to pack.
LAYOUTS = {
    "F32": 0,
    "BF16": 1,
    "F16": 2,
    "Q4_0": 3,
    "Q4_1": 4,
    "Q5_0": 5,
    "Q5_1": 6,
    "Q8_0": 7,
    "Q4_K": 8,
    "Q5_K": 9,
    "Q6_K": 10,
}
LAYOUT_VECTOR = 64
FLOAT_LAYOUTS = ("F32", "BF16", "F16")
PANEL_ROWS = 16

# PLAIT_OP_..., in the header's order.
OP_KINDS = {
    name: number
    for number, name in enumerate(
        (
            "embed",
            "positions",
            "linear",
            "gated",
            "activated",
            "rms_norm",
            "layer_norm",
            "rotate",
            "write_kv",
            "attend",
            "gate",
            "activate",
            "add",
            "scale",
            "soft_cap",
            "clip",
            "quantise",
            "copy",
            "select_rows",
            "logits",
            "hidden",
            "host",
            "route",
            "experts",
            "attend_latent",
        )
    )
}
ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3, "relu_squared": 4, "sigmoid": 5}
# What a gate may be beside those, and the activation whose numbers are weights.
GATES = {**ACTIVATIONS, "clamped_swiglu": 6}
XIELU = 7
ROUTER_SCORES = {"softmax": 0, "sigmoid": 1, "topk_softmax": 2, "sparse_mixer": 3}
ROUTE_TWO_BEST, ROUTE_MASKED_ZERO = 1, 2
MAX_EXPERTS = 1024  # kMaxExperts
LATENT_FORMS = {"auto": 0, "expanded": 1, "absorbed": 2}
KV_TYPES = {"fp32": 0, "bf16": 1, "fp16": 2}
ROWS_TOKENS, ROWS_LOGITS = 0, 1
KIND_F32, KIND_I32, KIND_Q8 = 0, 1, 2
RULES = {"adamw": 0, "lion": 1, "mars": 2, "sophia": 3}  # PLAIT_RULE_...


class Topology(ctypes.Structure):
    _fields_ = [
        ("logical_cpus", c_int32),
        ("affinity_cpus", c_int32),
        ("usable_cpus", c_int32),
        ("physical_cores", c_int32),
        ("numa_nodes", c_int32),
        ("reserved", c_int32),
        ("cpu_quota", c_double),
        ("l1d_bytes", c_int64),
        ("l2_bytes", c_int64),
        ("l3_bytes", c_int64),
    ]


class Matrix(ctypes.Structure):
    _fields_ = [
        ("layout", c_int32),
        ("reserved", c_int32),
        ("rows", c_int64),
        ("cols", c_int64),
        ("panel_bytes", c_int64),
        ("data", c_void_p),
    ]


class Step(ctypes.Structure):
    _fields_ = [
        ("num_tokens", c_int32),
        ("num_sequences", c_int32),
        ("num_rows", c_int32),
        ("num_groups", c_int32),
        ("table_width", c_int32),
        ("num_copies", c_int32),
        ("token_ids", c_void_p),
        ("positions", c_void_p),
        ("query_start", c_void_p),
        ("context_len", c_void_p),
        ("block_table", c_void_p),
        ("copies", c_void_p),
        ("logit_rows", c_void_p),
        ("logits", c_void_p),
        ("best_ids", c_void_p),
        ("best_values", c_void_p),
        ("hidden", c_void_p),
        ("adapter_ids", c_void_p),
    ]


class Buffer(ctypes.Structure):
    _fields_ = [
        ("offset", c_int64),
        ("row_bytes", c_int64),
        ("rows", c_int32),
        ("kind", c_int32),
        ("width", c_int32),
        ("reserved", c_int32),
    ]


class Op(ctypes.Structure):
    # "in" is a keyword of Python: the field is called `inputs` here, and `out` `outputs`.
    _fields_ = [
        ("kind", c_int32),
        ("inputs", c_int32 * 3),
        ("outputs", c_int32 * 3),
        ("w", c_int32 * 6),
        ("i", c_int32 * 7),
        ("f", c_float * 4),
    ]


class AdapterSite(ctypes.Structure):
    _fields_ = [
        ("op", c_int32),
        ("first", c_int32 * 3),
        ("a", Matrix),
        ("b", Matrix * 3),
    ]


class Cache(ctypes.Structure):
    _fields_ = [
        ("base", c_void_p),
        ("block_stride", c_int64),
        ("group", c_int32),
        ("block_tokens", c_int32),
        ("num_kv_heads", c_int32),
        ("key_width", c_int32),
        ("value_width", c_int32),
        ("kv_type", c_int32),
        ("latent_width", c_int32),
        ("reserved", c_int32),
    ]


class PlanSpec(ctypes.Structure):
    _fields_ = [
        ("ops", POINTER(Op)),
        ("buffers", POINTER(Buffer)),
        ("matrices", POINTER(Matrix)),
        ("caches", POINTER(Cache)),
        ("tables", POINTER(c_float)),
        ("num_ops", c_int32),
        ("num_buffers", c_int32),
        ("num_matrices", c_int32),
        ("num_caches", c_int32),
        ("num_table_floats", c_int32),
        ("max_tokens", c_int32),
        ("max_rows", c_int32),
        ("vocab_size", c_int32),
        ("sampled_ids", c_int32),
        ("copy_slots", c_int32),
        ("arena_bytes", c_int64),
        ("pool", c_void_p),
        ("slot_stride", c_int64),
        ("block_bytes", c_int64),
    ]


class Sampling(ctypes.Structure):
    _fields_ = [
        ("temperature", c_double),
        ("min_p", c_double),
        ("typical_p", c_double),
        ("top_p", c_double),
        ("xtc_probability", c_double),
        ("xtc_threshold", c_double),
        ("u", c_double),
        ("coin", c_double),
        ("seed", c_uint64),
        ("position", c_uint32),
        ("choice", c_uint32),
        ("top_k", c_int32),
        ("seeded", c_int32),
    ]


class Update(ctypes.Structure):
    _fields_ = [
        ("parameter", c_void_p),
        ("gradient", c_void_p),
        ("state", c_void_p * 3),
        ("count", c_int64),
        ("decay", c_float),
        ("rate", c_float),
        ("root", c_float),
        ("eps", c_float),
        ("beta1", c_float),
        ("rest1", c_float),
        ("beta2", c_float),
        ("rest2", c_float),
        ("extra", c_float),
        ("rule", c_int32),
        ("measured", c_double),
    ]


_P = c_void_p  # any array: pass an address (array.ctypes.data) or None
_SIGNATURES: dict[str, tuple[type | None, list[type]]] = {
    "plait_abi_version": (c_int32, []),
    "plait_cpu_features": (c_uint64, []),
    "plait_cpu_feature_name": (c_char_p, [c_int32]),
    "plait_topology": (c_int32, [c_char_p, POINTER(Topology)]),
    "plait_available_memory_bytes": (c_int64, [c_char_p]),
    "plait_packed_bytes": (c_int64, [c_int32, c_int64, c_int64]),
    "plait_pack": (c_int32, [c_int32, c_int32, _P, c_int64, _P, c_int64, c_int64, _P, c_int32]),
    "plait_unpack_rows": (c_int32, [POINTER(Matrix), _P, c_int64, _P, c_int64]),
    "plait_quantised_row_bytes": (c_int64, [c_int64]),
    "plait_isa": (c_char_p, []),
    "plait_isa_name": (c_char_p, [c_int32]),
    "plait_matmul": (c_int32, [c_char_p, POINTER(Matrix), _P, c_int64, c_int64, _P, c_int64, _P, _P, c_int64]),
    "plait_quantise": (c_int32, [c_char_p, _P, c_int64, c_int64, c_int64, _P]),
    "plait_row_op": (c_int32, [c_char_p, POINTER(Op), POINTER(_P), POINTER(_P), POINTER(POINTER(Matrix)), _P, c_int64]),
    "plait_write_kv": (c_int32, [c_char_p, POINTER(Cache), _P, c_int64, c_int64, _P, _P]),
    "plait_attend": (
        c_int32,
        [c_char_p, POINTER(Cache), _P, c_int64, c_int64, c_int32, c_float, c_float, c_int32, _P, _P, _P],
    ),
    "plait_plan_create": (_P, [POINTER(PlanSpec)]),
    "plait_plan_destroy": (None, [_P]),
    "plait_plan_run": (c_int32, [_P, POINTER(Step), c_int32]),
    "plait_plan_run_steps": (c_int32, [_P, POINTER(Step), c_int32, c_double, _P, c_int32, _P, _P, _P]),
    "plait_plan_set_adapter": (c_int32, [_P, c_int32, POINTER(AdapterSite), c_int32]),
    "plait_plan_buffer": (_P, [_P, c_int32]),
    "plait_plan_bytes": (c_int64, [_P]),
    "plait_plan_profile": (None, [_P, c_int32, _P]),
    "plait_set_threads": (c_int32, [c_int32]),
    "plait_threads": (c_int32, []),
    "plait_visit": (c_int32, [c_int64, _P]),
    "plait_last_error": (c_char_p, []),
    "plait_sample": (c_int32, [_P, c_int64, c_int64, c_int64, _P, _P]),
    "plait_optimise": (c_int32, [c_char_p, _P, c_int64]),
    "plait_measure_read": (c_double, [c_int64, c_int32, c_int32]),
    "plait_measure_matmul": (c_double, [c_int32, c_int32, c_double]),
}


def declare(library: ctypes.CDLL) -> None:
    """Give every function of the library its types. Raises AttributeError for one that is missing."""
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
