"""Rotary frequencies against arithmetic that is shown, and against transformers' own buffers."""

from __future__ import annotations

from dataclasses import replace
from math import ceil, floor, log, pi, sqrt

import pytest
import torch

import plait
from plait.errors import ConfigError
from plait.memory.none import NoMemory
from plait.model.config import RotarySpec
from plait.model.rope import rope_frequencies, rotary_table, short_rope_tokens, yarn_mscale, yarn_range
from plait.ops.reference import positions, positions_by_reach
from plait.ops.step import StepInputs

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def spec(
    kind: str = "default", theta: float = 10_000.0, width: int = 128, context: int = 4096, **scaling
) -> RotarySpec:
    return RotarySpec(kind, theta, width, width, context, scaling)


def frequencies(s: RotarySpec) -> torch.Tensor:
    return rope_frequencies(s)[0]


def test_the_last_wavelength_of_theta_500000_and_width_128_is_2559196_positions():
    last = frequencies(spec(theta=500_000.0))[-1].item()
    assert 2 * pi / last == pytest.approx(2_559_196, rel=1e-6)
    assert 2 * pi * 500_000 ** (126 / 128) == pytest.approx(2_559_196, rel=1e-6)


def test_linear_scaling_divides_every_frequency():
    assert torch.equal(frequencies(spec("linear", factor=4.0)), frequencies(spec()) / 4)


def test_llama3_keeps_short_wavelengths_divides_long_ones_and_blends_between():
    base, scaled = frequencies(spec(theta=500_000.0)), frequencies(spec("llama3", theta=500_000.0, **LLAMA3))
    for f, g in zip(base.double(), scaled.double(), strict=True):
        wavelength = 2 * pi / f
        t = (8192 / wavelength - 1) / (4 - 1)
        expected = f if wavelength < 8192 / 4 else f / 8 if wavelength > 8192 else (1 - t) * f / 8 + t * f
        assert g.item() == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize(
    ("width", "theta", "original", "expected"),
    [(128, 1e6, 32768, (23, 40)), (128, 1e6, 131072, (30, 47)), (64, 1e4, 4096, (10, 23))],
)
def test_the_yarn_ramp_lies_between_32_turns_and_1_turn_over_the_original_context(width, theta, original, expected):
    low, high = (width * log(original / (turns * 2 * pi)) / (2 * log(theta)) for turns in (32, 1))
    assert (floor(low), ceil(high)) == expected
    s = spec("yarn", theta, width, factor=4.0, original_max_position_embeddings=original)
    assert yarn_range(s) == expected
    untruncated = spec("yarn", theta, width, factor=4.0, original_max_position_embeddings=original, truncate=False)
    assert yarn_range(untruncated) == pytest.approx((low, high))


def test_yarn_keeps_pairs_below_the_ramp_and_divides_those_above():
    s = spec("yarn", 1e6, 128, factor=4.0, original_max_position_embeddings=32768)
    ratio = frequencies(s) / frequencies(spec(theta=1e6))
    assert torch.allclose(ratio[:24], torch.ones(24))
    assert torch.allclose(ratio[40:], torch.full((24,), 0.25))
    middle = (31 - 23) / (40 - 23)
    assert ratio[31].item() == pytest.approx((1 - middle) + middle / 4, rel=1e-6)


def test_the_yarn_magnitude_is_a_tenth_of_the_factors_logarithm_and_one():
    original = {"factor": 4.0, "original_max_position_embeddings": 32768}
    assert rope_frequencies(spec("yarn", **original))[1] == pytest.approx(1.138629, abs=1e-6)
    assert 0.1 * log(4) + 1 == pytest.approx(1.138629, abs=1e-6)
    assert rope_frequencies(spec("yarn", **original, attention_factor=1.0))[1] == 1.0
    both = rope_frequencies(spec("yarn", **original, mscale=0.7, mscale_all_dim=1.6))[1]
    assert both == pytest.approx((0.07 * log(4) + 1) / (0.16 * log(4) + 1))
    one = rope_frequencies(spec("yarn", **original, mscale=0.7))[1]
    assert one == pytest.approx(1.138629, abs=1e-6), "one of the two alone counts for nothing"
    assert yarn_mscale(0.5) == yarn_mscale(1.0) == 1.0


def test_a_yarn_factor_of_null_is_the_context_over_the_original_one():
    s = spec("yarn", context=32768, factor=None, original_max_position_embeddings=8192)
    given = spec("yarn", context=32768, factor=4.0, original_max_position_embeddings=8192)
    assert torch.equal(frequencies(s), frequencies(given))
    assert rope_frequencies(s)[1] == rope_frequencies(given)[1]


def test_proportional_rope_leaves_the_last_pairs_still():
    s = spec("proportional", width=16, factor=2.0, partial_rotary_factor=0.5)
    found = frequencies(s)
    # int(0.5 * 16 // 2) = 4 pairs turn, with exponents over the full width of 16.
    assert found[:4].tolist() == pytest.approx([10_000 ** (-2 * i / 16) / 2 for i in range(4)])
    assert found[4:].tolist() == [0.0] * 4


def test_divisors_of_a_gguf_file_divide_the_plain_frequencies():
    divisors = tuple(1.0 + i for i in range(64))
    s = RotarySpec("default", 10_000.0, 128, 128, 4096, {}, divisors)
    assert torch.equal(frequencies(s), frequencies(spec()) / torch.tensor(divisors))
    with pytest.raises(ConfigError, match="3 divisors for 64 rotating pairs"):
        frequencies(RotarySpec("default", 10_000.0, 128, 128, 4096, {}, (1.0, 2.0, 3.0)))


SHORT, LONG = [1.0, 1.1, 1.3, 1.2], [1.5, 2.5, 4.0, 64.0]


def longrope(**more) -> RotarySpec:
    scaling = {"short_factor": SHORT, "long_factor": LONG, "original_max_position_embeddings": 4096, **more}
    return spec("longrope", width=8, context=131072, **scaling)


def test_longrope_divides_by_its_short_or_its_long_set():
    table = rotary_table(longrope())
    base = frequencies(spec(width=8)).double()
    assert table.inv_freq == pytest.approx((base / torch.tensor(SHORT).double()).tolist(), rel=1e-6)
    assert table.long_inv_freq == pytest.approx((base / torch.tensor(LONG).double()).tolist(), rel=1e-6)
    assert table.original == 4096


def test_a_short_set_of_ones_is_plain_rope_but_for_the_magnitude():
    table = rotary_table(longrope(short_factor=[1.0] * 4, long_factor=[64.0] * 4))
    assert torch.equal(torch.tensor(table.inv_freq), frequencies(spec(width=8)))
    assert table.magnitude == pytest.approx(sqrt(1 + 5 / 12)) and table.long_inv_freq[0] == 1 / 64


def test_the_magnitude_of_longrope_is_the_root_of_one_and_the_ratio_of_logarithms():
    """Phi-3-mini-128k: 131072 / 4096 = 32; sqrt(1 + ln 32 / ln 4096) = sqrt(1 + 5 / 12)."""
    assert rotary_table(longrope()).magnitude == pytest.approx(sqrt(1 + 5 / 12))
    assert rotary_table(longrope(factor=4.0)).magnitude == pytest.approx(sqrt(1 + 2 / 12))
    assert rotary_table(longrope(factor=1.0)).magnitude == 1.0
    assert rotary_table(longrope(attention_factor=1.25)).magnitude == 1.25


def test_each_set_of_longrope_may_have_a_magnitude_of_its_own():
    """As Phi-3-small and Phi-3.5-MoE write it; it outranks what holds for both."""
    table = rotary_table(longrope(short_mscale=1.1, long_mscale=1.3, attention_factor=1.25))
    assert (table.magnitude, table.long_magnitude) == (1.1, 1.3)
    table = rotary_table(longrope(long_mscale=1.3))
    assert (table.magnitude, table.long_magnitude) == (pytest.approx(sqrt(1 + 5 / 12)), 1.3)
    block = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0, 3.0, 5.0, 9.0]}
    raw = {"model_type": "phi3", "vocab_size": 29, "hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 1}
    raw |= {"num_attention_heads": 2, "max_position_embeddings": 64, "original_max_position_embeddings": 6}
    plain = plait.from_config({**raw, "rope_scaling": block, "initializer_range": 0.5})
    own = {**block, "short_mscale": 2 * plain.rotary_tables[0].magnitude, "long_mscale": 0.5}
    other = plait.from_config({**raw, "rope_scaling": own, "initializer_range": 0.5})
    for length, factor in ((6, own["short_mscale"]), (7, 0.5)):
        both = plait.from_config(
            {**raw, "rope_scaling": {**block, "attention_factor": factor}, "initializer_range": 0.5}
        )
        ids = torch.arange(length)
        with torch.inference_mode():
            assert torch.equal(other(ids), both(ids))
            assert not torch.equal(other(ids), plain(ids))


def test_the_long_set_is_for_sequences_longer_than_the_original_context():
    """Exactly the original length is short; one token more is long, for all of its tokens."""
    table = rotary_table(longrope(original_max_position_embeddings=5))
    position = torch.arange(6)
    attributes = {"long_inv_freq": table.long_inv_freq, "original": 5, "magnitude": table.magnitude}
    for reach, inv_freq in ((5, table.inv_freq), (6, table.long_inv_freq)):
        found = positions_by_reach(position, torch.full((6,), reach), inv_freq=table.inv_freq, **attributes)
        assert torch.equal(found, positions(position, inv_freq=inv_freq, magnitude=table.magnitude))


def test_a_forward_without_a_cache_takes_the_set_of_every_segment():
    mask = torch.tensor([[True] * 7, [False] * 4 + [True] * 3])
    assert NoMemory().begin(torch.zeros(2, 7), StepInputs(token_mask=mask)).reach.tolist() == [[7] * 7, [3] * 7]
    segments = torch.tensor([[4, 4, 9, 9, 9, 4, 4]])
    # (Positions count anew where a segment begins, so the last two tokens of "4" are another run of the same.)
    assert NoMemory().begin(torch.zeros(1, 7), StepInputs(segment_ids=segments)).reach.tolist() == [
        [2, 2, 3, 3, 3, 2, 2]
    ]
    assert NoMemory().begin(torch.zeros(5), None).reach.tolist() == [5] * 5


def test_dynamic_scaling_is_fixed_by_the_length_that_is_served():
    """Peng et al.: theta ((s L / M) - (s - 1))^(d / (d - 2)); within M nothing changes."""
    s = spec("dynamic", context=2048, width=64, factor=4.0)
    assert torch.equal(frequencies(s), frequencies(spec(width=64)))
    grown = 10_000.0 * (4.0 * 8192 / 2048 - 3.0) ** (64 / 62)
    expected = frequencies(spec(theta=grown, width=64))
    assert torch.allclose(frequencies(replace(s, served_positions=8192)), expected, rtol=1e-6, atol=0)


SCALINGS = {
    "default": {},
    "linear": {"factor": 3.0},
    "llama3": LLAMA3,
    "llama3, narrow band": {**LLAMA3, "low_freq_factor": 2.0, "high_freq_factor": 2.5},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 4096},
    "yarn, betas": {"factor": 4.0, "original_max_position_embeddings": 4096, "beta_fast": 8.0, "beta_slow": 2.0},
    "yarn, tiny context": {"factor": 4.0, "original_max_position_embeddings": 4},
    "yarn, not truncated": {"factor": 4.0, "original_max_position_embeddings": 4096, "truncate": False},
    "yarn, mscale": {"factor": 40.0, "original_max_position_embeddings": 4096, "mscale": 0.7, "mscale_all_dim": 1.0},
    "yarn, attention factor": {"factor": 4.0, "original_max_position_embeddings": 4096, "attention_factor": 1.2},
    "proportional": {"factor": 2.0, "partial_rotary_factor": 0.3},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize(("theta", "width"), [(10_000.0, 64), (500_000.0, 128), (150.0, 6)])
def test_frequencies_equal_those_of_transformers(name: str, theta: float, width: int):
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    kind, scaling = name.split(",")[0], SCALINGS[name]
    block = {"rope_type": kind, "rope_theta": theta, **scaling}
    config = LlamaConfig(head_dim=width, max_position_embeddings=32768, rope_parameters=block)
    make = LlamaRotaryEmbedding.compute_default_rope_parameters if kind == "default" else ROPE_INIT_FUNCTIONS[kind]
    expected, magnitude = make(config)
    ours, mine = rope_frequencies(spec(kind, theta, width, 32768, **scaling))
    assert torch.allclose(ours, expected, rtol=1e-6, atol=0)
    assert mine == pytest.approx(magnitude, rel=1e-12)


def test_tables_stay_exact_at_long_positions_whatever_the_models_dtype():
    """bf16 cannot hold 257; positions, frequencies and tables are fp32, only the results are cast."""
    raw = {
        "vocab_size": 29,
        "hidden_size": 128,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
    }
    raw |= {"model_type": "llama", "max_position_embeddings": 8192}
    decoder = plait.from_config(raw, dtype=torch.bfloat16)
    table = decoder.rotary_tables[0]
    found = positions(torch.tensor([257, 600, 4095]), inv_freq=table.inv_freq, magnitude=table.magnitude)
    assert found.dtype == torch.float32
    f = 10_000.0 ** (-torch.arange(0, 128, 2, dtype=torch.float64) / 128)
    angle = torch.tensor([257.0, 600.0, 4095.0], dtype=torch.float64)[:, None] * f
    exact = torch.stack((angle.cos(), angle.sin()), 1)
    assert (found.double() - exact).abs().max() < 1e-3
    assert (found.bfloat16().double() - exact).abs().max() < 4e-3


@pytest.mark.slow
@pytest.mark.parametrize("length", [5, 2048, 2049, 9000])
def test_longrope_and_dynamic_frequencies_equal_those_of_transformers(length: int):
    """At the original context, a token more, and where dynamic has grown."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    blocks = {
        "longrope": {"short_factor": SHORT, "long_factor": LONG, "original_max_position_embeddings": 2048},
        "dynamic": {"factor": 3.0},
    }
    for kind, scaling in blocks.items():
        block = {"rope_type": kind, "rope_theta": 10_000.0, **scaling}
        config = LlamaConfig(head_dim=8, max_position_embeddings=8192, rope_parameters=block)
        expected, magnitude = ROPE_INIT_FUNCTIONS[kind](config, seq_len=length)
        ours = spec(kind, width=8, context=8192, **scaling)
        table = rotary_table(replace(ours, served_positions=length))
        chosen = table.long_inv_freq if 0 < short_rope_tokens([ours]) < length else table.inv_freq
        assert torch.allclose(torch.tensor(chosen), expected, rtol=1e-6, atol=0)
        assert table.magnitude == pytest.approx(magnitude, rel=1e-12)
