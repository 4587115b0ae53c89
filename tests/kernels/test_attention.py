"""Native attention over paged keys and values against float64 numpy, and bit for bit against itself cut differently."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from plait.kernels import abi, native

LIBRARY = native.native_library()
pytestmark = pytest.mark.skipif(LIBRARY is None, reason=f"no native library: {native.reason()}")
CHUNK = 512  # kAttendChunk: where the kernel starts a new partial sum


def instruction_sets() -> list[str]:
    """What this build has and this CPU runs; one name where there is no library, so that tests show as skipped."""
    if LIBRARY is None:
        return ["none"]
    names: list[str] = []
    while (name := LIBRARY.functions.plait_isa_name(len(names))) is not None:
        names.append(name.decode())
    return names


ISAS = instruction_sets()


@dataclass(frozen=True)
class Shape:
    """Heads and widths of one layer; value 0: the value is the first `latent` numbers of the key."""

    heads: int
    kv_heads: int
    key: int
    value: int
    latent: int = 0

    @property
    def value_width(self) -> int:
        return self.value or self.latent


SHAPES = {
    "smollm2": Shape(9, 3, 64, 64),
    "gemma3": Shape(4, 1, 256, 256),
    "one head per key": Shape(2, 2, 128, 128),
    "many single heads": Shape(32, 32, 16, 16),
    "eight per key, unequal": Shape(16, 2, 96, 80),
    "71 per key": Shape(71, 1, 64, 64),
    "narrow": Shape(6, 2, 6, 10),
    "narrow the other way": Shape(3, 1, 10, 6),
    "uneven": Shape(10, 2, 34, 42),
    "latent": Shape(16, 1, 576, 0, 512),
    "narrow latent": Shape(5, 1, 22, 0, 14),
}


@dataclass
class Case:
    """One sequence in a pool of blocks, all of which but the written rows is NaN.

    q [context, heads, key], k [context, kv_heads, key], v [context, kv_heads, value]: float32, k and v as rounded by
    the cache. pool uint8 [blocks, block_bytes]; table int32 [blocks of the sequence], shuffled, never block 0.
    """

    shape: Shape
    kv_type: str
    block_tokens: int
    q: NDArray
    k: NDArray
    v: NDArray
    pool: NDArray
    table: NDArray
    scale: float
    window: int = 0
    soft_cap: float = 0.0
    sinks: NDArray | None = None


def rounded(x: NDArray, kv_type: str) -> NDArray:
    """float32 -> float32 that the cache's type can hold, by torch's conversion."""
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[kv_type]
    return torch.from_numpy(x).to(dtype).to(torch.float32).numpy()


def stored(x: NDArray, kv_type: str) -> NDArray:
    """The numbers' bits as the cache keeps them: uint16, or uint32 for fp32."""
    if kv_type == "fp32":
        return np.ascontiguousarray(x).view(np.uint32)
    dtype = torch.bfloat16 if kv_type == "bf16" else torch.float16
    return torch.from_numpy(np.ascontiguousarray(x)).to(dtype).view(torch.int16).numpy().view(np.uint16)


def lay_out(case: Case) -> None:
    """Put k and v into the pool by the layout that csrc/plait_native.h documents, with numpy alone."""
    shape, tokens = case.shape, case.block_tokens
    blocks = case.pool.view(np.uint32 if case.kv_type == "fp32" else np.uint16)
    of_keys, of_values = (shape.kv_heads * width * tokens for width in (shape.key, shape.value))
    keys, values = blocks[:, :of_keys], blocks[:, of_keys : of_keys + of_values]
    k, v, heads = stored(case.k, case.kv_type), stored(case.v, case.kv_type), shape.kv_heads
    position = np.arange(len(k))
    block, slot = case.table[position // tokens], position % tokens
    if case.kv_type == "fp32":
        keys.reshape(len(blocks), heads, shape.key, tokens)[block, :, :, slot] = k
        values.reshape(len(blocks), heads, tokens, shape.value)[block, :, slot] = v
    else:
        pairs = k.reshape(-1, heads, shape.key // 2, 2)
        keys.reshape(len(blocks), heads, shape.key // 2, tokens, 2)[block, :, :, slot] = pairs
        values.reshape(len(blocks), heads, tokens // 2, shape.value, 2)[block, :, slot // 2, :, slot % 2] = v


def make_case(
    shape: Shape,
    context: int,
    rng: np.random.Generator,
    kv_type: str = "bf16",
    block_tokens: int = 16,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: bool = False,
) -> Case:
    """Normal q, k and v. Scores have a deviation of about 1.5, so that neither one key nor all of them decide."""
    q, k, v = (
        rng.standard_normal((context, heads, width), np.float32)
        for heads, width in ((shape.heads, shape.key), (shape.kv_heads, shape.key), (shape.kv_heads, shape.value))
    )
    k, v = rounded(k, kv_type), rounded(v, kv_type)
    size = 4 if kv_type == "fp32" else 2
    block_bytes = size * block_tokens * shape.kv_heads * (shape.key + shape.value) + 64  # padded, as pools may be
    count = -(-context // block_tokens)
    table = (rng.permutation(count + 3)[:count] + 1).astype(np.int32)
    pool = np.full((count + 4, block_bytes // 4), np.float32("nan")).view(np.uint8)
    if kv_type != "fp32":
        pool.view(np.uint16)[:] = 0x7FFF  # NaN as bf16 and as half
    logits = rng.standard_normal(shape.heads).astype(np.float32) if sinks else None
    scale = 1.5 * shape.key**-0.5
    case = Case(shape, kv_type, block_tokens, q, k, v, pool, table, scale, window, soft_cap, logits)
    lay_out(case)
    return case


def cache_of(case: Case) -> abi.Cache:
    shape = case.shape
    return abi.Cache(
        base=case.pool.ctypes.data,
        block_stride=case.pool.shape[1],
        block_tokens=case.block_tokens,
        num_kv_heads=shape.kv_heads,
        key_width=shape.key,
        value_width=shape.value,
        kv_type=abi.KV_TYPES[case.kv_type],
        latent_width=shape.latent,
    )


def attend(isa: str, case: Case, first: int, tokens: int) -> NDArray:
    """The native attention of tokens [first, first + tokens): float32 [tokens, heads, value width]."""
    assert LIBRARY is not None
    q = np.ascontiguousarray(case.q[first : first + tokens])
    out = np.full((tokens, case.shape.heads, case.shape.value_width), np.float32("nan"))
    status = LIBRARY.functions.plait_attend(
        isa.encode(),
        ctypes.byref(cache_of(case)),
        case.table.ctypes.data,
        first,
        tokens,
        case.shape.heads,
        case.scale,
        case.soft_cap,
        case.window,
        None if case.sinks is None else case.sinks.ctypes.data,
        q.ctypes.data,
        out.ctypes.data,
    )
    assert status == 0, LIBRARY.functions.plait_last_error()
    return out


def expected(case: Case, first: int, tokens: int) -> NDArray:
    """softmax(cap(scale q k^T), sinks) v in float64 over the keys that each token sees."""
    shape, group = case.shape, case.shape.heads // case.shape.kv_heads
    context = first + tokens
    q = case.q[first:context].astype(np.float64).reshape(tokens, shape.kv_heads, group, shape.key)
    k = case.k[:context].astype(np.float64)
    v = case.v[:context].astype(np.float64) if shape.value else k[:, :, : shape.latent]
    scores = np.einsum("thgd,chd->thgc", q, k, optimize=True) * np.float64(np.float32(case.scale))
    if case.soft_cap:
        scores = case.soft_cap * np.tanh(scores / case.soft_cap)
    distance = np.arange(first, context)[:, None] - np.arange(context)
    seen = (distance >= 0) & ((distance < case.window) | (case.window == 0))
    scores = np.where(seen[:, None, None], scores, -np.inf)
    top = scores.max(-1, keepdims=True)
    weights = np.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    if case.sinks is not None:
        total += np.exp(case.sinks.astype(np.float64).reshape(1, shape.kv_heads, group, 1) - top)
    return np.einsum("thgc,chd->thgd", weights / total, v, optimize=True).reshape(tokens, shape.heads, -1)


def bound(case: Case) -> float:
    """Error allowed in a number of the output, whose values are normal numbers of deviation 1.

    A score is a chain of key_width fused additions, each off by half a unit (6e-8) of a partial sum of about 1.5 times
    up to 4 deviations: random signs make that 6e-8 * 6 * sqrt(key_width) in a weight. A weighted sum of at most 512
    keys and the exponential (1.5e-7) add less. Ten deviations of that, in the worst of up to millions of numbers.
    """
    return 10 * 6e-8 * (6 * case.shape.key**0.5 + 4)


def check(isa: str, case: Case, first: int, tokens: int) -> None:
    got, want = attend(isa, case, first, tokens), expected(case, first, tokens)
    worst = np.abs(got - want).max()
    assert worst < bound(case), f"{worst} of {bound(case)}"


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kv_type", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_is_float64_attention(isa, kv_type, name):
    shape = SHAPES[name]
    rng = np.random.default_rng(len(name))
    block_tokens = (8, 16, 24)[len(name) % 3]
    case = make_case(shape, 75, rng, kv_type, block_tokens)
    check(isa, case, 0, 75)
    check(isa, replace(case, window=19), 40, 33)
    check(isa, replace(case, soft_cap=3.0, sinks=rng.standard_normal(shape.heads).astype(np.float32)), 74, 1)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("length", [1, 2, 7, 8, 15, 16, 17, 511, 512, 513, 1024, 1025])
def test_lengths_around_vectors_blocks_and_chunks(isa, length):
    case = make_case(Shape(6, 2, 16, 24), length, np.random.default_rng(length), block_tokens=24)
    check(isa, case, length - 1, 1)
    check(isa, case, max(0, length - 30), min(length, 30))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("window", [1, 2, 9, 16, 100, 512, 513])
def test_windows_count_the_token_itself_and_read_nothing_older(isa, window):
    case = make_case(Shape(4, 2, 16, 16), 1100, np.random.default_rng(window), "bf16", 8, window)
    for first, tokens in ((1099, 1), (1030, 70), (505, 20), (0, 40)):
        # What no token of this call sees: blocks go back to the null block, single rows to NaN.
        oldest = max(0, first - window + 1)
        hidden = replace(case, pool=np.copy(case.pool), table=np.copy(case.table))
        hidden.table[: oldest // 8] = 0
        keep = hidden.pool.view(np.uint16)[hidden.table[oldest // 8]]
        keep[: 2 * 16 * 8].reshape(2, 8, 8, 2)[:, :, : oldest % 8] = 0x7FFF
        v = keep[2 * 16 * 8 : 4 * 16 * 8].reshape(2, 4, 16, 2).transpose(0, 1, 3, 2).reshape(2, 8, 16).copy()
        v[:, : oldest % 8] = 0x7FFF
        keep[2 * 16 * 8 : 4 * 16 * 8] = v.reshape(2, 4, 2, 16).transpose(0, 1, 3, 2).reshape(-1)
        got = attend(isa, hidden, first, tokens)
        assert np.array_equal(got, attend(isa, case, first, tokens))
        assert np.abs(got - expected(case, first, tokens)).max() < bound(case)


@pytest.mark.parametrize("isa", ISAS)
def test_a_sink_of_minus_infinity_is_none_and_a_large_one_takes_everything(isa):
    case = make_case(Shape(4, 2, 16, 16), 600, np.random.default_rng(1))
    plain = attend(isa, case, 590, 10)
    none = attend(isa, replace(case, sinks=np.full(4, -np.inf, np.float32)), 590, 10)
    assert np.array_equal(plain, none)
    everything = attend(isa, replace(case, sinks=np.full(4, 200, np.float32)), 590, 10)
    assert np.all(everything == 0)


@pytest.mark.parametrize("isa", ISAS)
def test_large_scores_neither_overflow_nor_vanish(isa):
    case = make_case(Shape(2, 1, 16, 16), 1300, np.random.default_rng(2), "fp32")
    case = replace(case, scale=200.0)
    got, want = attend(isa, case, 1290, 10), expected(case, 1290, 10)
    # Scores of thousands carry errors of their last bits: 1e4 * 6e-8 * 16 products.
    assert np.abs(got - want).max() < 1e-2
    check(isa, replace(case, scale=0.0), 1290, 10)


@pytest.mark.parametrize("isa", ISAS)
def test_a_nan_among_the_visible_keys_or_values_is_not_lost(isa):
    for which in ("k", "v"):
        case = make_case(Shape(2, 1, 16, 16), 700, np.random.default_rng(3), "fp32")
        getattr(case, which)[100, 0, 3] = np.nan
        lay_out(case)
        got = attend(isa, case, 699, 1)
        assert np.isnan(got[..., 3]).all()
        assert np.isnan(got).all() == (which == "k")


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kv_type", ["fp32", "fp16"])
@pytest.mark.parametrize("name", ["one head per key", "narrow", "latent"])
def test_what_a_token_does_not_see_may_be_infinite_or_nan(isa, kv_type, name):
    """Tokens before the bad one, and tokens whose window is past it, get the bits that they get alone."""
    for bad in (np.inf, np.nan):
        case = make_case(SHAPES[name], 60, np.random.default_rng(8), kv_type, window=11)
        case.k[23], case.v[23] = bad, bad
        lay_out(case)
        together = attend(isa, case, 0, 60)
        alone = np.concatenate([attend(isa, case, t, 1) for t in range(60)])
        blind = np.r_[0:23, 34:60]
        assert np.isfinite(together[blind]).all() and not np.isfinite(together[23:34]).any()
        assert np.array_equal(together[blind], alone[blind])


SAME_BITS: list[tuple[str, dict[str, Any]]] = [
    ("smollm2", {"block_tokens": 16}),
    ("gemma3", {"block_tokens": 8, "window": 300}),
    ("many single heads", {"block_tokens": 24}),
    ("71 per key", {"kv_type": "fp16"}),
    ("narrow", {"kv_type": "fp32", "sinks": True}),
    ("uneven", {"soft_cap": 4.0, "window": 40}),
    ("narrow latent", {"sinks": True}),
]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("name", "options"), SAME_BITS, ids=[name for name, _ in SAME_BITS])
def test_no_bit_depends_on_how_many_tokens_come_at_once(isa, name, options):
    """One call of many tiles runs whole tiles; a call of one token is split into chunks, and tiles lie elsewhere."""
    shape, context = SHAPES[name], 2 * CHUNK + 40
    tokens = 100 if shape.heads * shape.key < 2000 else 19
    case = make_case(shape, context, np.random.default_rng(4), **options)
    first, some = context - tokens, [0, 1, tokens // 2, tokens - 1]
    together = attend(isa, case, first, tokens)
    assert np.array_equal(together[some], np.concatenate([attend(isa, case, first + t, 1) for t in some]))
    for begin, end in ((0, 5), (5, 18), (18, tokens)):
        assert np.array_equal(together[begin:end], attend(isa, case, first + begin, end - begin))
    across = attend(isa, case, CHUNK - 10, 33)  # a tile with keys of two chunks for some tokens, of one for others
    assert np.array_equal(across[9:12], attend(isa, case, CHUNK - 1, 3))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kv_type", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", ["smollm2", "eight per key, unequal", "narrow latent"])
def test_writing_fills_the_documented_layout_and_nothing_else(isa, kv_type, name):
    assert LIBRARY is not None
    shape, rng = SHAPES[name], np.random.default_rng(5)
    context = 83
    case = make_case(shape, context, rng, kv_type, 24)
    # Numbers that round: ties both ways, beyond the largest half, subnormal halves, infinities.
    k, v = (rng.standard_normal(x.shape, np.float32) for x in (case.k, case.v))
    hard = [1.00390625, 1.01171875, -1.00390625, 1.00048828125, 1.00146484375, 65519, 65520, 3e5, 1e-7, 3e-8, 2.9e-8]
    hard += [-6.1e-5, np.inf, -np.inf, 0, -0.0]
    for x in (k, v):
        x.reshape(-1)[: len(hard)] = hard[: x.size]
    written = replace(case, pool=np.copy(case.pool))
    for first, tokens in ((0, 31), (31, 1), (32, 51)):
        status = LIBRARY.functions.plait_write_kv(
            isa.encode(),
            ctypes.byref(cache_of(written)),
            written.table.ctypes.data,
            first,
            tokens,
            k[first:].ctypes.data,
            v[first:].ctypes.data if shape.value else None,
        )
        assert status == 0
    case.k, case.v = k, v
    lay_out(case)
    assert np.array_equal(written.pool, case.pool)


@pytest.mark.parametrize("isa", ISAS)
def test_what_cannot_be_is_refused(isa):
    assert LIBRARY is not None
    case = make_case(Shape(4, 2, 16, 16), 20, np.random.default_rng(6))

    def status(heads: int = 4, name: str = isa, **changes: int) -> int:
        assert LIBRARY is not None
        cache, out = cache_of(case), np.empty_like(case.q)
        for field, value in changes.items():
            setattr(cache, field, value)
        return LIBRARY.functions.plait_attend(
            name.encode(), ctypes.byref(cache), case.table.ctypes.data, 19, 1, heads, 1.0, 0.0, 0, None,
            case.q.ctypes.data, out.ctypes.data,
        )  # fmt: skip

    assert status() == 0
    assert status(heads=3) == status(block_tokens=12) == status(key_width=15) == status(kv_type=7) == -1
    assert status(value_width=0, latent_width=8) == status(value_width=0) == status(name="sse9") == -1


@pytest.mark.slow
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("seed", range(12))
def test_random_steps(isa, seed):
    rng = np.random.default_rng(100 + seed)
    for _ in range(8):
        shape = SHAPES[rng.choice(list(SHAPES))]
        context = int(rng.integers(1, 5000 if rng.random() < 0.5 and shape.heads < 30 else 700))
        case = make_case(
            shape,
            context,
            rng,
            str(rng.choice(["fp32", "bf16", "fp16"])),
            int(rng.choice([8, 16, 24, 40])),
            int(rng.integers(1, context + 2)) if rng.random() < 0.5 else 0,
            float(rng.choice([0, 2, 50])),
            bool(rng.random() < 0.5),
        )
        for tokens in (1, int(rng.integers(1, min(context, 60) + 1))):
            check(isa, case, context - tokens, tokens)


@pytest.mark.slow
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", ["smollm2", "gemma3", "latent"])
def test_long_contexts(isa, name):
    case = make_case(SHAPES[name], 5000, np.random.default_rng(7))
    for first, tokens in ((4999, 1), (4872, 128), (2000, 50)):
        check(isa, case, first, tokens)
