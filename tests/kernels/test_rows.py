"""Operations on rows, of every instruction set that this machine runs, against the references in float64."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from plait.kernels import abi, native
from plait.ops import reference
from tests.kernels.test_matmul_float import instruction_sets, pack

needs_library = pytest.mark.skipif(
    native.native_library() is None, reason=f"needs the native library: {native.reason()}"
)
every_isa = pytest.mark.parametrize("isa", instruction_sets())
widths = pytest.mark.parametrize("width", [1, 3, 8, 15, 16, 31, 64, 67, 576, 1000])
SPECIAL = [0.0, -0.0, 1e-40, 1e-30, 0.62, 0.63, 1, 5, 9, 13, 14, 20, 88, 89, 104, 1e5, 1e20, 3e38, np.inf, np.nan]


def run(
    isa: str,
    kind: str,
    inputs: list[np.ndarray],
    *,
    i: dict[int, int] | None = None,
    f: tuple[float, ...] = (),
    weights: tuple[abi.Matrix | np.ndarray | None, ...] = (),
    table: np.ndarray | None = None,
    out: np.ndarray | None = None,
) -> np.ndarray:
    """plait_row_op on the rows of `inputs` into `out` (default: a new array like inputs[0])."""
    library = native.native_library()
    assert library is not None
    op = abi.Op()
    op.kind = abi.OP_KINDS[kind]
    for index, value in (i or {}).items():
        op.i[index] = value
    op.f[: len(f)] = f
    matrices = [
        abi.Matrix(abi.LAYOUT_VECTOR, 0, 1, w.size, 0, w.ctypes.data) if isinstance(w, np.ndarray) else w
        for w in weights
    ]
    pointers = (ctypes.POINTER(abi.Matrix) * 6)(*[m and ctypes.pointer(m) for m in matrices])
    out = np.full_like(inputs[0], np.nan) if out is None else out
    status = library.functions.plait_row_op(
        isa.encode(),
        ctypes.byref(op),
        (ctypes.c_void_p * 3)(*[array.ctypes.data for array in inputs]),
        (ctypes.c_void_p * 3)(out.ctypes.data),
        pointers,
        None if table is None else table.ctypes.data,
        len(inputs[0]),
    )
    assert status == 0, library.functions.plait_last_error()
    return out


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def double(x: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(x).double()


def assert_close(out: np.ndarray, truth: torch.Tensor, relative: float, absolute: float = 1e-37) -> None:
    """Equal infinities and NaNs, and numbers within the bounds."""
    expected = truth.numpy()
    assert np.array_equal(np.isnan(out), np.isnan(expected))
    with np.errstate(invalid="ignore"):
        near = np.abs(out - expected) <= absolute + relative * np.abs(expected)
    overflow = (np.abs(expected) > 3.4028e38) & np.isinf(out) & (np.sign(out) == np.sign(expected))
    assert np.all(near | overflow | np.isnan(expected))


@needs_library
@every_isa
@widths
@pytest.mark.parametrize("unit_offset", [False, True])
@pytest.mark.parametrize("weighted", [True, False])
def test_rms_norm(isa, width, unit_offset, weighted):
    x, w = normal(3, width) * np.array([[1], [1e-3], [1e4]], np.float32), normal(width, seed=1)
    # The reference goes through fp32 on its way: here in float64 throughout.
    truth = double(x) * torch.rsqrt(double(x).pow(2).mean(-1, keepdim=True) + 1e-5)
    if weighted:
        truth = truth * (1 + double(w) if unit_offset else double(w))
    op = {"i": {0: 1, 1: width, 2: int(unit_offset)}, "f": (1e-5,), "weights": (w if weighted else None,)}
    out = run(isa, "rms_norm", [x], **op)
    assert_close(out, truth, 1e-5, 1e-7 if unit_offset else 1e-37)
    in_place = x.copy()
    assert np.array_equal(run(isa, "rms_norm", [in_place], out=in_place, **op), out)


@needs_library
@every_isa
def test_norm_of_every_head(isa):
    x, w, b = normal(2, 5 * 24), normal(24, seed=1), normal(24, seed=2)
    heads = double(x).reshape(2, 5, 24)
    out = run(isa, "rms_norm", [x], i={0: 5, 1: 24}, f=(1e-6,), weights=(w,))
    truth = heads * torch.rsqrt(heads.pow(2).mean(-1, keepdim=True) + 1e-6) * double(w)
    assert_close(out, truth.reshape(2, -1), 1e-5)
    out = run(isa, "layer_norm", [x], i={0: 5, 1: 24}, f=(1e-6,), weights=(w, b))
    assert_close(out, reference.layer_norm(heads, double(w), double(b), eps=1e-6).reshape(2, -1), 1e-5, 1e-6)


@needs_library
@every_isa
def test_norm_of_every_head_with_weights_of_its_own(isa):
    x, w, b = normal(3, 5 * 23), normal(5 * 23, seed=1), normal(5 * 23, seed=2)
    heads, weight, bias = double(x).reshape(3, 5, 23), double(w).reshape(5, 23), double(b).reshape(5, 23)
    truth = torch.nn.functional.layer_norm(heads, (23,), None, None, 1e-6) * weight
    i = {0: 5, 1: 23, 3: 1}
    assert_close(run(isa, "layer_norm", [x], i=i, f=(1e-6,), weights=(w,)), truth.reshape(3, -1), 1e-5, 1e-6)
    out = run(isa, "layer_norm", [x], i=i, f=(1e-6,), weights=(w, b))
    assert_close(out, (truth + bias).reshape(3, -1), 1e-5, 1e-6)


@needs_library
@every_isa
@widths
@pytest.mark.parametrize("weighted,shifted", [(True, True), (True, False), (False, False)])
def test_layer_norm(isa, width, weighted, shifted):
    # The mean is large beside the deviation: one pass over x and x^2 would lose the variance.
    x, w, b = normal(3, width) + np.float32(100), normal(width, seed=1), normal(width, seed=2)
    truth = reference.layer_norm(double(x), double(w) if weighted else None, double(b) if shifted else None, eps=1e-5)
    op = {"i": {0: 1, 1: width}, "f": (1e-5,), "weights": (w if weighted else None, b if shifted else None)}
    out = run(isa, "layer_norm", [x], **op)
    # The rounding of a mean near 100 (a few units of 8e-6) is all that is left.
    assert_close(out, truth, 1e-5, 2e-5 * max(1.0, float(truth.abs().max())) if width > 1 else 0.01)
    in_place = x.copy()
    assert np.array_equal(run(isa, "layer_norm", [in_place], out=in_place, **op), out)


@needs_library
@every_isa
@pytest.mark.parametrize("norm", ["rms_norm", "layer_norm"])
def test_norms_pass_nan_on_and_bear_zeros(isa, norm):
    x = normal(3, 40)
    x[0, 39], x[1] = np.nan, 0
    out = run(isa, norm, [x], i={0: 1, 1: 40}, f=(1e-6,), weights=(np.ones(40, np.float32),))
    assert np.isnan(out[0]).all() and np.all(out[1] == 0) and np.isfinite(out[2]).all()


@needs_library
@every_isa
@pytest.mark.parametrize("magnitude", [1.0, 1.25])
def test_positions(isa, magnitude):
    table = np.concatenate([np.zeros(3, np.float32), (10000.0 ** -(np.arange(37) / 37)).astype(np.float32)])
    position = np.array([0, 1, 2, 77, 4095, 131071, 999983], np.int32)
    out = np.empty((len(position), 2 * 37), np.float32)
    run(isa, "positions", [position], i={0: 3, 1: 37}, f=(magnitude,), table=table, out=out)
    angle = (position.astype(np.float32)[:, None] * table[3:]).astype(np.float64)
    truth = np.concatenate([np.cos(angle), np.sin(angle)], axis=1) * magnitude
    assert np.abs(out - truth).max() <= 1.5e-7 * magnitude
    expected = reference.positions(torch.from_numpy(position), inv_freq=table[3:].tolist(), magnitude=magnitude)
    assert np.abs(out - expected.reshape(len(position), -1).numpy()).max() <= 2e-7 * magnitude


@needs_library
@every_isa
@pytest.mark.parametrize("pairing", ["halves", "adjacent"])
@pytest.mark.parametrize(
    "heads,width,turning,start",
    [(3, 64, 64, 0), (2, 80, 32, 0), (1, 6, 2, 0), (4, 36, 36, 0), (2, 300, 290, 0), (3, 96, 32, 64), (2, 70, 20, 17)],
)
def test_rotate(isa, pairing, heads, width, turning, start):
    x, angles = normal(5, heads * width), normal(5, turning, seed=1)
    truth = reference.rotate(
        double(x).reshape(5, heads, width),
        double(angles).reshape(5, 2, -1),
        width=turning,
        pairing=pairing,
        start=start,
    )
    op = {"i": {0: heads, 1: width, 2: turning, 3: int(pairing == "adjacent"), 4: start}}
    out = run(isa, "rotate", [x, angles], **op)
    assert_close(out, truth.reshape(5, -1), 1e-6, 1e-6)
    in_place = x.copy()
    assert np.array_equal(run(isa, "rotate", [in_place, angles], out=in_place, **op), out)


@needs_library
@every_isa
@pytest.mark.parametrize("kind", abi.ACTIVATIONS)
def test_activations(isa, kind):
    special = np.array(SPECIAL + [-number for number in SPECIAL], np.float32)
    x = np.concatenate([special, np.linspace(-20, 20, 4001, dtype=np.float32), normal(500) * np.float32(1e-3)])[None]
    truth = reference.ACTIVATIONS[kind](double(x))
    # Infinities as torch has them in fp32, where some products are 0 * inf.
    truth = torch.where(torch.isfinite(torch.from_numpy(x)), truth, reference.ACTIVATIONS[kind](torch.from_numpy(x)))
    op = {"i": {0: abi.ACTIVATIONS[kind], 6: x.size}}
    out = run(isa, "activate", [x], **op)
    assert_close(out, truth, 3e-7, 2e-7)
    in_place = x.copy()
    assert np.array_equal(run(isa, "activate", [in_place], out=in_place, **op), out, equal_nan=True)
    y = normal(1, x.size, seed=2)
    gated = run(isa, "gate", [x, y], **op)
    with np.errstate(over="ignore"):
        assert np.array_equal(gated, out * y, equal_nan=True)
    for operand in (0, 1):
        operands = [x.copy(), y.copy()]
        assert np.array_equal(run(isa, "gate", operands, out=operands[operand], **op), gated, equal_nan=True)


@needs_library
@every_isa
@pytest.mark.parametrize(("alpha", "limit"), [(1.702, 7.0), (0.6, 0.5)])
def test_clamped_swiglu(isa, alpha, limit):
    special = np.array(SPECIAL + [-number for number in SPECIAL], np.float32)
    x = np.concatenate([np.repeat(special, len(special)), np.linspace(-20, 20, 4001, dtype=np.float32)])[None]
    y = np.concatenate([np.tile(special, len(special)), normal(4001, seed=2) * np.float32(5)])[None]
    op = {"i": {0: abi.GATES["clamped_swiglu"], 6: x.size}, "f": (alpha, limit)}
    out = run(isa, "gate", [x, y], **op)
    finite = np.isfinite(x) | np.isnan(x)
    truth = reference.gate(double(x), double(y), kind="clamped_swiglu", alpha=alpha, limit=limit)
    # Infinities as torch has them in fp32; where it has 0 * inf, either way is a NaN.
    single = reference.gate(
        torch.from_numpy(x), torch.from_numpy(y), kind="clamped_swiglu", alpha=alpha, limit=limit
    ).double()
    truth = torch.where(torch.from_numpy(finite), truth, single)
    # u + 1 may cancel: the bound is that of its terms.
    scale = np.abs(np.minimum(np.nan_to_num(x), limit)).max() * 3e-7
    assert_close(out, truth, 6e-7, max(2e-7, min(scale, 4e-6)))
    for operand in (0, 1):
        operands = [x.copy(), y.copy()]
        assert np.array_equal(run(isa, "gate", operands, out=operands[operand], **op), out, equal_nan=True)


@needs_library
@every_isa
@pytest.mark.parametrize("numbers", [(0.2, -1.05, 0.5, -1e-6), (1.4, 0.7, 0.3, -0.35), (25.0, -2.0, 0.5, -1.5)])
def test_xielu(isa, numbers):
    near = np.concatenate([np.geomspace(1e-6, 3, 300), [0, 1e-30, 50, 1e10]]).astype(np.float32)
    x = np.concatenate([near, -near, normal(501), [np.inf, np.nan]]).astype(np.float32)[None]
    weights = tuple(np.array([number], np.float32) for number in numbers)
    op = {"i": {0: abi.XIELU, 6: x.size}, "weights": weights}
    out = run(isa, "activate", [x], **op)
    truth = reference.xielu(double(x), *(double(w) for w in weights))
    assert_close(out, truth, 1e-6, 3e-7)
    in_place = x.copy()
    assert np.array_equal(run(isa, "activate", [in_place], out=in_place, **op), out, equal_nan=True)


@needs_library
@every_isa
@widths
def test_one_number_gates_a_row(isa, width):
    x, y = normal(5, 1), normal(5, width, seed=1)
    op = {"i": {0: abi.ACTIVATIONS["sigmoid"], 1: 1, 6: width}}
    out = run(isa, "gate", [x, y], out=np.full_like(y, np.nan), **op)
    assert_close(out, torch.sigmoid(double(x)) * double(y), 5e-7)
    in_place = y.copy()
    assert np.array_equal(run(isa, "gate", [x, in_place], out=in_place, **op), out)


@needs_library
@every_isa
@pytest.mark.parametrize("limit", [30.0, 50.0])
def test_soft_cap(isa, limit):
    special = np.array(SPECIAL + [-number for number in SPECIAL], np.float32)
    x = np.concatenate([special, normal(1000) * 20, normal(1000) * np.float32(1e-4)])[None]
    out = run(isa, "soft_cap", [x], i={6: x.size}, f=(limit,))
    assert_close(out, reference.soft_cap(double(x), limit=limit), 5e-7)


@needs_library
@every_isa
@widths
def test_add_scale_clip_copy(isa, width):
    x, y = normal(3, width), normal(3, width, seed=1)
    x[1, width // 2], x[2, 0] = np.nan, -np.inf
    i = {6: width}
    equal = {"equal_nan": True}
    assert np.array_equal(run(isa, "add", [x, y], i=i), x + y, **equal)
    assert np.array_equal(run(isa, "scale", [x], i=i, f=(0.3,)), x * np.float32(0.3), **equal)
    assert np.array_equal(run(isa, "clip", [x], i=i, f=(0.5,)), torch.from_numpy(x).clamp(-0.5, 0.5).numpy(), **equal)
    assert np.array_equal(run(isa, "copy", [x], i=i), x, **equal)
    for operand in (0, 1):
        operands = [x.copy(), y.copy()]
        assert np.array_equal(run(isa, "add", operands, i=i, out=operands[operand]), x + y, **equal)


@needs_library
@every_isa
@pytest.mark.parametrize("layout", abi.FLOAT_LAYOUTS)
def test_embed(isa, layout):
    weight = normal(40, 33)
    dtype = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}[layout]
    numbers = torch.from_numpy(weight).to(dtype).float()
    packed = pack(weight, layout)
    matrix = abi.Matrix(abi.LAYOUTS[layout], 0, 40, 33, packed.size // 3, packed.ctypes.data)
    ids = np.array([0, 39, 17, 17, 3], np.int32)
    for scale in (1.0, 5.5):
        out = run(isa, "embed", [ids], f=(scale,), weights=(matrix,), out=np.empty((5, 33), np.float32))
        assert np.array_equal(out, reference.embed(torch.from_numpy(ids).long(), numbers, scale=scale).numpy())
    # By position: five further than the number.
    out = np.empty((2, 33), np.float32)
    run(isa, "embed", [ids[3:] - 3], i={0: 1, 1: 5}, f=(1.0,), weights=(matrix,), out=out)
    assert np.array_equal(out, numbers[[19, 5]].numpy())
    with pytest.raises(AssertionError, match="no row"):
        run(isa, "embed", [ids], i={0: 1, 1: 1}, f=(1.0,), weights=(matrix,), out=np.empty((5, 33), np.float32))
    with pytest.raises(AssertionError, match="no row"):
        run(isa, "embed", [np.array([40], np.int32)], f=(1.0,), weights=(matrix,), out=np.empty((1, 33), np.float32))


@needs_library
def test_wrong_calls_are_refused():
    x = normal(1, 33)
    with pytest.raises(AssertionError, match="not one of single rows"):
        run("portable", "attend", [x], i={6: 33})
    with pytest.raises(AssertionError, match="blocks of 32"):
        run("portable", "quantise", [x], i={6: 33})
    with pytest.raises(AssertionError, match="on rows of 0"):
        run("portable", "add", [x, x])
    with pytest.raises(AssertionError):
        run("no such set", "add", [x, x], i={6: 33})


@needs_library
def test_read_bandwidth_is_plausible():
    functions = native.native_library().functions
    assert 1e8 < functions.plait_measure_read(8 << 20, 1, 3) < 1e12
    assert 1e8 < functions.plait_measure_read(8 << 20, 2, 3) < 2e12
    assert functions.plait_measure_read(10, 1, 1) == 0


CHECK = Path(__file__).with_name("vec_check.cpp")
FLAGS = ["-std=c++17", "-O2", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi"]
ISA_FLAGS = {
    "portable": [],
    "avx2": ["-mavx2", "-mfma", "-mf16c"],
    "avx512": ["-mavx2", "-mfma", "-mf16c", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"],
}


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@needs_library
@pytest.mark.parametrize("isa", [isa for isa in instruction_sets() if isa in ISA_FLAGS])
def test_vectors_by_definition(isa, tmp_path):
    """Half and bfloat16 conversions (every half), exp in units of the last place, arg_max."""
    program = tmp_path / "check"
    subprocess.run(["g++", *FLAGS, *ISA_FLAGS[isa], str(CHECK), "-o", str(program)], check=True)
    done = subprocess.run([str(program)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("aarch64-linux-gnu-g++") is None or shutil.which("qemu-aarch64") is None,
    reason="needs the cross compiler and the emulator for ARM",
)
def test_vectors_by_definition_on_arm(tmp_path):
    program = tmp_path / "check"
    subprocess.run(["aarch64-linux-gnu-g++", *FLAGS, "-static", str(CHECK), "-o", str(program)], check=True)
    done = subprocess.run(["qemu-aarch64", str(program), "40"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
