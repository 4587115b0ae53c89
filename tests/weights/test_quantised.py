"""Quantised weights of every format: the numbers that their description means, bit for bit; what stays in blocks."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from plait.errors import WeightError
from plait.model.quantisation import read_quantisation
from plait.weights.numbers import bf16_bits, float32_rows
from plait.weights.quantised.fp8 import E4M3
from plait.weights.quantised.source import QuantisedSource
from plait.weights.safetensors_source import SafetensorsSource
from tests import quantised_files as files
from tests.quantised_files import Parts, Random


def opened(folder: Path, tensors: Parts, config: dict[str, Any]) -> QuantisedSource:
    """One module m with these parts."""
    named = {name if name[:2] == "m." else f"m.{name}": tensor.contiguous() for name, tensor in tensors.items()}
    save_file(named, folder / "model.safetensors")
    quantisation = read_quantisation({"quantization_config": config})
    assert quantisation is not None
    return QuantisedSource(SafetensorsSource(folder / "model.safetensors"), quantisation)


def gptq_config(m: Random, group_size: int, **more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": m.bits, "group_size": group_size, "desc_act": False, **more}


def group(m: Random, group_size: int, symmetric: bool, kind: str = "pack-quantized", **more: Any) -> dict[str, Any]:
    weights = {"num_bits": m.bits, "type": "int", "symmetric": symmetric, "strategy": "group", "group_size": group_size}
    if group_size == -1:
        weights |= {"strategy": "channel", "group_size": None}
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": {**weights, **more}}},
        "ignore": ["lm_head"],
    }


def check(source: QuantisedSource, expected: np.ndarray, layout: str | None = None) -> None:
    """All numbers, any rows of them, the tensor that torch gets, and the blocks where there are any."""
    assert source.names() == ["m.weight"]
    info = source.info("m.weight")
    assert info.shape == expected.shape
    np.testing.assert_array_equal(float32_rows(source, "m.weight"), expected)
    first, last = len(expected) // 3, len(expected) - len(expected) // 4
    np.testing.assert_array_equal(float32_rows(source, "m.weight", first, last), expected[first:last])
    np.testing.assert_array_equal(source.read("m.weight").float().numpy(), expected)
    if layout is not None:
        assert info.format == layout
    raw = source.raw("m.weight")
    assert raw.nbytes == info.nbytes
    if info.format in ("Q4_0", "Q5_0", "Q8_0"):
        blocks = raw.reshape(expected.shape[0], -1)
        values = gguf.dequantize(blocks, gguf.GGMLQuantizationType[info.format])
        np.testing.assert_array_equal(values, expected)


@st.composite
def matrices(draw: st.DrawFn, bits: tuple[int, ...] = (2, 3, 4, 8)) -> tuple[Random, int, bool]:
    """A matrix, its group_size, and whether it is symmetric. Groups may be odd, ragged or whole rows."""
    width = draw(st.sampled_from(bits))
    unit = 32 if width == 3 else 32 // width
    size = draw(st.sampled_from([-1, 8, 16, 32, 64, 96, 128]))
    cols, rows = unit * draw(st.integers(1, 160 // unit)), unit * draw(st.integers(1, max(1, 40 // unit)))
    symmetric = draw(st.booleans())
    dtype = draw(st.sampled_from([torch.float16, torch.bfloat16, torch.float32]))
    m = Random(rows, cols, size, width, symmetric, draw(st.booleans()), dtype, draw(st.integers(0, 99)))
    return m, size, symmetric


@settings(max_examples=60, deadline=None)
@given(matrices(), st.booleans(), st.booleans())
def test_gptq(case: tuple[Random, int, bool], v2: bool, drop_order: bool) -> None:
    m, size, symmetric = case
    ordered = bool((m.g_idx == np.arange(m.cols) // m.group_size).all())
    parts = files.gptq(m, v2, with_order=not (ordered and drop_order))
    form = "gptq_v2" if v2 else "gptq"
    config = gptq_config(m, size, sym=symmetric, checkpoint_format=form, desc_act=not ordered)
    with tempfile.TemporaryDirectory() as folder:
        source = opened(Path(folder), parts, config)
        check(source, m.weight())
        exact = bool((m.scales.float() == m.scales.half().float()).all())
        blocks = ordered and exact and m.cols % 32 == 0 and (m.group_size % 32 == 0 or m.groups == 1)
        low = -(m.zeros.max())
        high = (1 << m.bits) - 1 - m.zeros.min()
        layout = {2: "Q4_0", 3: "Q4_0", 4: "Q4_0" if symmetric else "Q5_0", 8: "Q8_0"}[m.bits]
        half = {"Q4_0": 8, "Q5_0": 16, "Q8_0": 128}[layout]
        kept = blocks and low >= -half and high < half
        assert (source.info("m.weight").format == layout) == kept


def test_gptq_that_is_kept_is_the_rule_and_not_the_exception(tmp_path: Path) -> None:
    """The usual checkpoint: 4 bits, groups of 128, scales in half precision."""
    for bits, symmetric, layout in ((4, True, "Q4_0"), (4, False, "Q5_0"), (8, True, "Q8_0"), (3, False, "Q4_0")):
        m = Random(64, 256, 128, bits, symmetric)
        check(opened(tmp_path, files.gptq(m), gptq_config(m, 128, sym=symmetric)), m.weight(), layout)


def test_a_zero_point_of_0_borrows_from_its_neighbour_in_the_older_format(tmp_path: Path) -> None:
    m = Random(32, 64, 32, symmetric=False)
    m.zeros[:] = 0
    parts = files.gptq(m)
    assert (parts["qzeros"].numpy().view(np.uint32) == 0xEEEEEEEF).all()
    check(opened(tmp_path, parts, gptq_config(m, 32, sym=False)), m.weight(), "Q5_0")


@settings(max_examples=40, deadline=None)
@given(matrices((4,)))
def test_awq(case: tuple[Random, int, bool]) -> None:
    m, size, _ = case
    m.g_idx = np.arange(m.cols) // m.group_size
    with tempfile.TemporaryDirectory() as folder:
        config = {"quant_method": "awq", "bits": 4, "group_size": size, "zero_point": True, "version": "gemm"}
        check(opened(Path(folder), files.awq(m), config), m.weight())


def test_awq_stays_in_blocks_of_five_bits(tmp_path: Path) -> None:
    m = Random(64, 256, 128, symmetric=False)
    config = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "GEMM"}
    check(opened(tmp_path, files.awq(m), config), m.weight(), "Q5_0")


@settings(max_examples=40, deadline=None)
@given(matrices((4, 8)), st.integers(-1, 1), st.booleans())
def test_compressed_tensors_in_words(case: tuple[Random, int, bool], ragged: int, with_order: bool) -> None:
    """Rows and columns that do not fill their last word, too."""
    m, size, symmetric = case
    m = Random(m.rows + ragged, m.cols + ragged, size, m.bits, symmetric, with_order and size != -1, m.scales.dtype)
    more = {"actorder": "group"} if with_order and size != -1 else {}
    with tempfile.TemporaryDirectory() as folder:
        parts = files.packed(m, with_order and size != -1, store_zeros=not symmetric)
        check(opened(Path(folder), parts, group(m, size, symmetric, **more)), m.weight())


def test_compressed_tensors_in_words_stay_in_blocks(tmp_path: Path) -> None:
    for bits, symmetric, layout in ((4, True, "Q4_0"), (4, False, "Q5_0"), (8, True, "Q8_0")):
        m = Random(48, 256, 128, bits, symmetric, scale_dtype=torch.bfloat16)
        parts = files.packed(m, store_zeros=not symmetric)
        check(opened(tmp_path, parts, group(m, 128, symmetric)), m.weight(), layout)
        parts["weight_g_idx"] = torch.full((256,), -1, dtype=torch.int32)  # -1: columns in order
        check(opened(tmp_path, parts, group(m, 128, symmetric)), m.weight(), layout)
    m = Random(48, 256, 128, scale_dtype=torch.float32)  # scales that half precision does not hold
    check(opened(tmp_path, files.packed(m), group(m, 128, True)), m.weight(), "I4")


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("strategy", ["channel", "tensor", "group"])
def test_compressed_tensors_in_bytes(strategy: str, symmetric: bool, tmp_path: Path) -> None:
    m = Random(24, 64, 32 if strategy == "group" else -1, 8, symmetric, scale_dtype=torch.bfloat16)
    if strategy == "tensor":
        m.scales[:], m.zeros[:] = m.scales[0, 0], m.zeros[0, 0]
    parts = files.integers(m, store_zeros=not symmetric)
    if strategy == "tensor":
        parts = {name: part[0] if "weight_" in name else part for name, part in parts.items()}
    config = group(m, -1, symmetric, "int-quantized", strategy=strategy)
    if strategy == "group":
        config = group(m, 32, symmetric, "int-quantized")
    check(opened(tmp_path, parts, config), m.weight(), "Q8_0" if symmetric else "I8")


# FP8


def test_every_fp8_byte_is_the_number_that_torch_has() -> None:
    theirs = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    np.testing.assert_array_equal(E4M3, theirs)
    assert np.isnan(E4M3).nonzero()[0].tolist() == [0x7F, 0xFF]
    numbers = ~np.isnan(E4M3)
    np.testing.assert_array_equal(np.signbit(E4M3[numbers]), np.signbit(theirs[numbers]))


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 40),
    st.integers(1, 40),
    st.integers(1, 16),
    st.integers(1, 16),
    st.sampled_from(["float32", "bfloat16"]),
)
def test_fp8_blocks_with_ragged_edges(rows: int, cols: int, block_rows: int, block_cols: int, dtype: str) -> None:
    block = (block_rows, block_cols)
    parts, expected = files.fp8(rows, cols, block, getattr(torch, dtype))
    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": list(block)}
    with tempfile.TemporaryDirectory() as folder:
        named = {"weight": parts["weight"], "weight_scale_inv": parts["scale"]}
        check(opened(Path(folder), named, config), expected, "F8_E4M3")


def test_fp8_of_deepseeks_ragged_projection(tmp_path: Path) -> None:
    """576 rows are four and a half blocks of 128. The oracle is torch's own type, block by block."""
    rows, cols = 576, 7168 // 8
    generator = torch.Generator().manual_seed(1)
    weight = (torch.randn(rows, cols, generator=generator) * 30).to(torch.float8_e4m3fn)
    scale = torch.rand(5, 7, generator=generator) / 100
    config = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    source = opened(tmp_path, {"weight": weight, "weight_scale_inv": scale}, config)
    grown = scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :cols]
    expected = weight.float() * grown
    check(source, expected.numpy())
    np.testing.assert_array_equal(
        bf16_bits(float32_rows(source, "m.weight")), expected.bfloat16().view(torch.int16).numpy().view(np.uint16)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_as_transformers_expands_it(dtype: torch.dtype, tmp_path: Path) -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    parts, _ = files.fp8(64, 96, (16, 32))
    config = {"quant_method": "fp8", "weight_block_size": [16, 32]}
    source = opened(tmp_path, {"weight": parts["weight"], "weight_scale_inv": parts["scale"]}, config)
    expected = Fp8Dequantize(None)._dequantize_one(parts["weight"], parts["scale"], dtype)
    assert torch.equal(source.read("m.weight", dtype), expected)


@pytest.mark.parametrize("kind", ["bytes", "type"])
def test_fp8_with_powers_of_two_as_scales(kind: str, tmp_path: Path) -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    weight = files.fp8(32, 64, (1, 32))[0]["weight"]
    exponents = torch.randint(100, 140, (32, 2), dtype=torch.uint8, generator=torch.Generator().manual_seed(2))
    scale = exponents if kind == "bytes" else exponents.view(torch.float8_e8m0fnu)
    config = {"quant_method": "fp8", "weight_block_size": [1, 32], "scale_fmt": "ue8m0"}
    source = opened(tmp_path, {"weight": weight, "weight_scale_inv": scale}, config)
    expected = Fp8Dequantize(None)._dequantize_one(weight, exponents, torch.float32)
    assert torch.equal(source.read("m.weight"), expected)


@pytest.mark.parametrize("shape", [(), (1,), (24, 1)])
def test_fp8_with_a_scale_per_tensor_or_row(shape: tuple[int, ...], tmp_path: Path) -> None:
    weight = files.fp8(24, 40, (1, 40))[0]["weight"]
    scale = torch.rand(shape, generator=torch.Generator().manual_seed(3)) + 0.1
    tensors = {"weight": weight, "weight_scale": scale, "input_scale": torch.tensor(0.5)}
    source = opened(tmp_path, tensors, {"quant_method": "fp8", "activation_scheme": "static"})
    check(source, (weight.float() * scale).numpy(), "F8_E4M3")
    assert source.unused == ["m.input_scale"]


def test_stacked_experts_in_fp8(tmp_path: Path) -> None:
    made = [files.fp8(20, 24, (16, 16), seed=seed) for seed in range(3)]
    tensors = {
        "m.gate_up_proj": torch.stack([parts["weight"] for parts, _ in made]),
        "m.gate_up_proj_scale_inv": torch.stack([parts["scale"] for parts, _ in made]),
    }
    source = opened(tmp_path, tensors, {"quant_method": "fp8", "weight_block_size": [16, 16]})
    assert source.names() == ["m.gate_up_proj"] and source.info("m.gate_up_proj").shape == (3, 20, 24)
    expected = np.stack([numbers for _, numbers in made])
    np.testing.assert_array_equal(float32_rows(source, "m.gate_up_proj", 1, 3), expected[1:])


@pytest.mark.parametrize(("strategy", "shape"), [("tensor", (1,)), ("channel", (40, 1)), ("block", (3, 3))])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compressed_tensors_in_fp8(strategy: str, shape: tuple[int, ...], dtype: torch.dtype, tmp_path: Path) -> None:
    weight = files.fp8(40, 48, (1, 48))[0]["weight"]
    scale = (torch.rand(shape, generator=torch.Generator().manual_seed(4)) + 0.1).to(dtype)
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, "block_structure": None}
    grown = scale.float()
    if strategy == "block":
        weights["block_structure"] = [16, 20]
        grown = grown.repeat_interleave(16, 0)[:40].repeat_interleave(20, 1)[:, :48]
    config = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": weights, "input_activations": {"dynamic": True}}
        },
    }
    source = opened(tmp_path, {"weight": weight, "weight_scale": scale}, config)
    check(source, (weight.float() * grown).numpy(), "F8_E4M3")


@pytest.mark.parametrize("byte", [0x7F, 0xFF])
def test_fp8_that_is_no_number_is_named(byte: int, tmp_path: Path) -> None:
    parts, _ = files.fp8(24, 24, (8, 8))
    parts["weight"].view(torch.uint8)[17, 3] = byte
    tensors = {"weight": parts["weight"], "weight_scale_inv": parts["scale"]}
    source = opened(tmp_path, tensors, {"quant_method": "fp8", "weight_block_size": [8, 8]})
    with pytest.raises(WeightError, match=r"FP8 weight 'm.weight': 1 of the numbers in rows 0 to 23 are NaN"):
        float32_rows(source, "m.weight")


# MXFP4


def mxfp4_config() -> dict[str, Any]:
    return {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}


def test_mxfp4_as_transformers_expands_it(tmp_path: Path) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(5)
    blocks = torch.randint(0, 256, (3, 20, 2, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(0, 252, (3, 20, 2), dtype=torch.uint8, generator=generator)
    scales[0, :2], scales[1, 0] = 0, 252
    tensors = {"m.gate_up_proj_blocks": blocks, "m.gate_up_proj_scales": scales}
    source = opened(tmp_path, tensors, mxfp4_config())
    assert source.names() == ["m.gate_up_proj"]
    info = source.info("m.gate_up_proj")
    assert (info.format, info.origin, info.shape) == ("BF16", "MXFP4", (3, 64, 20))
    theirs = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
    assert torch.equal(source.read("m.gate_up_proj").view(torch.int16), theirs.view(torch.int16))
    assert source.raw("m.gate_up_proj").nbytes == info.nbytes
    np.testing.assert_array_equal(float32_rows(source, "m.gate_up_proj", 1, 3), theirs[1:].float().numpy())


@pytest.mark.parametrize("scale", [255, 254])
def test_mxfp4_that_is_not_finite_is_named(scale: int, tmp_path: Path) -> None:
    blocks = torch.full((2, 4, 1, 16), 0x77, dtype=torch.uint8)
    scales = torch.full((2, 4, 1), 127, dtype=torch.uint8)
    scales[1, 2] = scale
    source = opened(tmp_path, {"m.down_proj_blocks": blocks, "m.down_proj_scales": scales}, mxfp4_config())
    with pytest.raises(WeightError, match=f"MXFP4 weight 'm.down_proj': expert 1 .*not finite: a scale of {scale}"):
        source.read("m.down_proj")


def test_mxfp4_of_gguf_has_the_same_numbers(tmp_path: Path) -> None:
    """llama.cpp's blocks: the scale's byte, then byte j with number j in its low and number 16 + j in its high half."""
    rng = np.random.default_rng(6)
    numbers, exponents = rng.integers(0, 16, (4, 2, 32)), rng.integers(100, 140, (4, 2), np.uint8)
    theirs = np.concatenate([exponents[..., None], numbers[..., :16] | numbers[..., 16:] << 4], -1).astype(np.uint8)
    pairs = (numbers[..., 0::2] | numbers[..., 1::2] << 4).astype(np.uint8)
    tensors = {
        "m.down_proj_blocks": torch.from_numpy(pairs)[None],
        "m.down_proj_scales": torch.from_numpy(exponents)[None],
    }
    source = opened(tmp_path, tensors, mxfp4_config())
    expected = gguf.dequantize(theirs.reshape(4, 34), gguf.GGMLQuantizationType.MXFP4)
    np.testing.assert_array_equal(source.read("m.down_proj")[0].float().numpy().T, expected)


# compressed-tensors' own package as the oracle: it writes the configuration and the tensors, and expands them.


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_words_as_the_compressed_tensors_package_packs_them(bits: int, symmetric: bool, tmp_path: Path) -> None:
    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor

    check_package(PackedQuantizationCompressor, "pack-quantized", bits, "int", "group", symmetric, tmp_path)


@pytest.mark.parametrize(("strategy", "symmetric"), [("channel", True), ("channel", False), ("tensor", True)])
def test_bytes_as_the_compressed_tensors_package_writes_them(strategy: str, symmetric: bool, tmp_path: Path) -> None:
    from compressed_tensors.compressors.naive_quantized.base import IntQuantizationCompressor

    check_package(IntQuantizationCompressor, "int-quantized", 8, "int", strategy, symmetric, tmp_path)


@pytest.mark.parametrize("strategy", ["channel", "tensor", "block"])
def test_fp8_as_the_compressed_tensors_package_writes_it(strategy: str, tmp_path: Path) -> None:
    from compressed_tensors.compressors.naive_quantized.base import FloatQuantizationCompressor

    check_package(FloatQuantizationCompressor, "float-quantized", 8, "float", strategy, True, tmp_path)


def check_package(
    compressor: Any, form: str, bits: int, kind: str, strategy: str, symmetric: bool, folder: Path
) -> None:
    from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme

    rows, cols = 40, 96
    extra = {"group": {"group_size": 32}, "block": {"block_structure": [16, 40]}}.get(strategy, {})
    args = QuantizationArgs(num_bits=bits, type=kind, symmetric=symmetric, strategy=strategy, **extra)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    generator = torch.Generator().manual_seed(bits)
    shape = {"group": (rows, 3), "channel": (rows, 1), "tensor": (1,), "block": (3, 3)}[strategy]
    scale = (torch.rand(shape, generator=generator) / (40 if kind == "float" else 1 << bits - 1) + 0.02).bfloat16()
    state = {"weight": torch.randn(rows, cols, generator=generator).bfloat16(), "weight_scale": scale}
    if not symmetric:
        low = 1 << bits - 1
        state["weight_zero_point"] = torch.randint(-low, low, shape, dtype=torch.int8, generator=generator)
    stored = compressor.compress(dict(state), scheme)
    config = QuantizationConfig(
        config_groups={"group_0": scheme}, format=form, quantization_status="compressed", ignore=["lm_head"]
    ).to_dict()
    source = opened(folder, stored, config)
    exact = compressor.decompress({**stored, "weight_scale": scale.float()}, scheme)["weight"].float()
    assert torch.equal(source.read("m.weight"), exact)
    # In the model's own type the package rounds each product once.
    assert torch.equal(
        source.read("m.weight", torch.bfloat16), compressor.decompress(stored, scheme)["weight"].bfloat16()
    )
