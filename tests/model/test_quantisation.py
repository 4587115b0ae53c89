"""What the quantisation blocks of config.json mean, and which of their values are refused by name."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.errors import ConfigError
from plait.model.families import parse_config
from plait.model.quantisation import WeightScheme, read_quantisation, without_quantisation

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
INT4: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True},
            "input_activations": None,
            "output_activations": None,
        }
    },
    "ignore": ["lm_head", "re:.*gate$"],
    "kv_cache_scheme": None,
    "sparsity_config": {},
    "transform_config": {},
}
BLOCKS = {"gptq": GPTQ, "awq": AWQ, "fp8": FP8, "mxfp4": MXFP4, "int4": INT4}


def scheme(block: dict[str, Any]) -> WeightScheme:
    quantisation = read_quantisation({"quantization_config": block})
    assert quantisation is not None
    (found,) = quantisation.schemes
    return found


def weights(**changes: Any) -> dict[str, Any]:
    """INT4 with other values in its group's weights."""
    block = copy.deepcopy(INT4)
    block["config_groups"]["group_0"]["weights"] |= changes
    return block


def test_what_the_usual_blocks_say() -> None:
    assert scheme(GPTQ) == WeightScheme("gptq", 4, "group", 128, zero_offset=1)
    assert scheme({**GPTQ, "checkpoint_format": "gptq_v2", "desc_act": True, "group_size": -1, "sym": False}) == (
        WeightScheme("gptq", 4, "group", None, symmetric=False, act_order=True)
    )
    assert scheme({**GPTQ, "format": "gptq_v2"}).zero_offset == 0
    assert scheme(AWQ) == WeightScheme("awq", 4, "group", 128, symmetric=False)
    assert scheme({"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "version": "GEMM"}).group_size == 64
    assert scheme(FP8) == WeightScheme("fp8", 8, "block", block=(128, 128))
    assert scheme({"quant_method": "fp8", "activation_scheme": "static"}) == WeightScheme("fp8", 8, "tensor")
    assert scheme(MXFP4) == WeightScheme("mxfp4", 4, "group", 32)
    assert scheme(INT4) == WeightScheme("pack-quantized", 4, "group", 128, targets=("Linear",))
    assert scheme(weights(actorder="group", symmetric=False)).act_order
    assert not scheme(weights(actorder="weight")).act_order
    assert scheme(weights(strategy=None, group_size=-1)).strategy == "channel"


def test_a_block_may_stand_in_several_places() -> None:
    for raw in (
        {"compression_config": INT4},
        {"compression_config": {"quantization_config": INT4, "sparsity_config": None}},
        {"text_config": {"quantization_config": INT4}},
        {"quantization_config": INT4, "compression_config": INT4},
    ):
        quantisation = read_quantisation(raw)
        assert quantisation is not None and quantisation.title == "compressed-tensors, int4, groups of 128"
    assert read_quantisation({}) is None and read_quantisation({"quantization_config": None}) is None
    with pytest.raises(ConfigError, match="quantization_config and compression_config say different things"):
        read_quantisation({"quantization_config": GPTQ, "compression_config": INT4})


def test_two_groups_are_two_schemes() -> None:
    block = copy.deepcopy(INT4)
    block["format"] = "mixed-precision"
    block["config_groups"]["group_0"]["format"] = "pack-quantized"
    block["config_groups"]["group_1"] = {
        "targets": ["re:.*down_proj"],
        "format": "float-quantized",
        "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
        "input_activations": {"num_bits": 8, "type": "float", "dynamic": False},
    }
    quantisation = read_quantisation({"quantization_config": block})
    assert quantisation is not None
    assert [s.storage for s in quantisation.schemes] == ["pack-quantized", "float-quantized"]
    assert quantisation.notes == ("the checkpoint's scales for quantised activations are not used",)
    assert quantisation.title == "compressed-tensors, int4, groups of 128 and FP8, one scale per row"


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "bitsandbytes": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        r"quant_method 'bitsandbytes' is not supp",
    ),
    "no method": ({"bits": 4}, "quant_method None is not supported"),
    "modelopt": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "'modelopt' is not supported .supported: gptq"),
    "gptq of 5 bits": ({**GPTQ, "bits": 5}, "bits=5 must be 2, 3, 4 or 8"),
    "gptq without bits": ({"quant_method": "gptq"}, "bits=None must be"),
    "groups of 0": ({**GPTQ, "group_size": 0}, "group_size=0 must be positive, or -1"),
    "gptq for marlin": ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format='marlin' is not supported"),
    "sym as text": ({**GPTQ, "sym": "yes"}, "sym='yes' must be true or false"),
    "other words": ({**GPTQ, "pack_dtype": "int64"}, "pack_dtype='int64' is not supported"),
    "rules by module": ({**GPTQ, "dynamic": {"+:.*mlp": {"bits": 8}}}, r"dynamic='\+:.\*mlp' changes single modules"),
    "a low-rank adapter": ({**GPTQ, "adapter": {"rank": 4}}, "adapter=.* is not supported"),
    "awq of 8 bits": ({**AWQ, "bits": 8}, "bits=8 must be 4"),
    "awq gemv": ({**AWQ, "version": "gemv"}, "version='gemv' is not supported .supported: gemm"),
    "llm-awq": ({**AWQ, "backend": "llm-awq"}, "backend='llm-awq' is not supported"),
    "e5m2": ({**FP8, "fmt": "e5m2"}, "fmt='e5m2' is not supported"),
    "a block of one axis": ({**FP8, "weight_block_size": [128]}, r"weight_block_size=\[128\] must be two positive"),
    "an empty block": ({**FP8, "weight_block_size": [0, 128]}, "weight_block_size="),
    "experts in fp4": ({**FP8, "expert_dtype": "fp4"}, "expert_dtype='fp4' is not supported"),
    "skips that are no list": ({**FP8, "modules_to_not_convert": "lm_head"}, "must be a list of module names"),
    "nvfp4": ({**INT4, "format": "nvfp4-pack-quantized"}, "format='nvfp4-pack-quantized' is not supported"),
    "marlin": ({**INT4, "format": "marlin-24"}, "format='marlin-24' is not supported"),
    "sparse": ({**INT4, "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config.format='sparse-24"),
    "rotations": ({**INT4, "transform_config": {"config_groups": {"u": {}}}}, "transform_config .rotations"),
    "no groups": ({**INT4, "config_groups": {}}, "config_groups={} must be"),
    "a preset": (
        {**INT4, "config_groups": {"W4A16": ["Linear"]}},
        r"config_groups.W4A16=\['Linear'\] must be an object",
    ),
    "not calibrated": ({**INT4, "quantization_status": "calibration"}, "quantization_status='calibration'"),
    "a bad pattern": ({**INT4, "ignore": ["re:("]}, r"'re:\(' is no regular expression"),
    "a pattern without end": ({**INT4, "ignore": ["re:(.*)*(.*)*x$"]}, r"'re:\(.*repeats too often"),
    "a bad pattern of fp8": ({**FP8, "modules_to_not_convert": ["re:("]}, r"'re:\(' is no regular expression"),
    "float in words": (weights(type="float", num_bits=8), "type='float' does not fit the format 'pack-quantized'"),
    "groups without a size": (weights(group_size=None), "group_size=None must be positive"),
    "a size without groups": (weights(strategy="channel"), "group_size=128 does not fit strategy='channel'"),
    "blocks of integers": (weights(strategy="block", group_size=None), "block_structure=None must be two positive"),
    "9 bits": (weights(num_bits=9), "num_bits=9 must be 2 to 8"),
    "an order": (weights(actorder="random"), "actorder='random' is not supported"),
    "a strategy": (weights(strategy="tensor_group"), "strategy='tensor_group' is not supported"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_carried_out_is_refused_by_name(case: str) -> None:
    block, message = REFUSED[case]
    with pytest.raises(ConfigError, match=message) as error:
        read_quantisation({"quantization_config": block})
    assert "\n" not in str(error.value)


def test_what_no_longer_matters_is_harmless(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="plait.config"):
        more = {"damp_percent": 0.1, "static_groups": False, "model_name_or_path": None, "dynamic": {"-:.*lm_head": {}}}
        assert read_quantisation({"quantization_config": {**GPTQ, **more}}, strict=True) is not None
        assert not caplog.records
        read_quantisation({"quantization_config": {**GPTQ, "half_life": 3}}, warn=True)
        assert "ignoring keys that plait does not know: half_life" in caplog.text
    with pytest.raises(ConfigError, match="has keys that plait does not know: half_life"):
        read_quantisation({"quantization_config": {**GPTQ, "half_life": 3}}, strict=True)


def test_the_models_configuration_does_not_keep_the_block() -> None:
    raw = {"model_type": "llama", "vocab_size": 96, "hidden_size": 64, "quantization_config": GPTQ}
    assert "quantization_config" not in parse_config(raw).raw
    assert raw["quantization_config"] is GPTQ
    nested = {"text_config": {"a": 1, "quantization_config": GPTQ}, "compression_config": INT4}
    assert without_quantisation(nested) == {"text_config": {"a": 1}}


ANY = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.sampled_from(["", "gptq", "int", "re:(", "group", "\0"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@st.composite
def mutated(draw: st.DrawFn) -> Any:
    """A block one of whose values, at any depth, is something else."""
    block = copy.deepcopy(draw(st.sampled_from(sorted(BLOCKS.items())))[1])
    place: Any = block
    while True:
        key = draw(st.sampled_from(sorted(place)))
        if isinstance(place[key], dict) and place[key] and draw(st.booleans()):
            place = place[key]
            continue
        place[key] = draw(ANY)
        return block


@settings(max_examples=300, deadline=None)
@given(mutated())
def test_any_value_of_any_key_gives_a_meaning_or_one_line(block: Any) -> None:
    try:
        read_quantisation({"quantization_config": block})
    except ConfigError as error:
        assert "\n" not in str(error) and len(str(error)) < 500
