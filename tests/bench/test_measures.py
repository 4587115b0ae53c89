"""Each measurement on a tiny model: what it reports is the measured engine's, and the arithmetic around it is right."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

import plait
from plait.bench.coldstart import first_output
from plait.bench.costs import Costs, measure_costs
from plait.bench.processes import read_plan
from plait.bench.sides import BatchTiming, OurSide, Timing
from plait.bench.speed import (
    _batch_seconds,
    _check_batch,
    _check_text,
    _equal_firsts,
    measure_batch,
    measure_decode,
    measure_prefill,
    python_share,
)
from plait.errors import PlaitError
from plait.ops.spec import LatentSpec
from tests.threads import one_thread  # noqa: F401 (a fixture)
from tests.tiny import tiny_config, tiny_model_dir

pytestmark = pytest.mark.usefixtures("one_thread")
REFERENCE: dict[str, Any] = {"plan": "reference", "dtype": "fp32"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("models"))


@pytest.mark.slow
def test_our_side_gives_what_llm_gives(model: Path) -> None:
    side = OurSide(model, context=64, sequences=3, threads=1, **REFERENCE)
    prompts = [[5, 6, 7], [8, 9, 10], [70, 71, 72]]
    llm = plait.LLM(model, max_model_len=64, **REFERENCE)
    params = plait.SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    expected = [r.outputs[0].token_ids for r in llm.generate([{"prompt_token_ids": p} for p in prompts], params)]
    timing = side.complete(prompts[0], 5)
    assert timing.tokens == list(expected[0]) and timing.prompt_s > 0 and timing.decode_s > 0
    together = side.batch(prompts, [6] * len(prompts))
    assert together.tokens == [list(tokens) for tokens in expected]
    assert len(together.step_times) == 6
    assert all(0 < compute <= whole for whole, compute in together.step_times)
    assert sum(whole for whole, _ in together.step_times) <= together.seconds


@pytest.mark.slow
def test_our_logits_are_the_decoders(model: Path) -> None:
    import torch

    side = OurSide(model, context=200, threads=1, max_batched_tokens=64, **REFERENCE)
    tokens = [(i * 37) % 250 for i in range(150)]  # three steps
    found = side.logits(tokens)
    decoder = plait.load(model, dtype="fp32")
    with torch.inference_mode():
        expected = decoder.logits(decoder(torch.tensor(tokens[:-1]))).numpy()
    assert found.shape == expected.shape
    assert abs(found - expected).max() < 1e-4


def test_costs_are_those_of_the_parameters() -> None:
    decoder = plait.from_config(tiny_config())
    side = OurSide(decoder, context=64, threads=1, plan="reference")
    costs = measure_costs(side.bundle)
    embedding = 259 * 48
    parameters = sum(p.numel() for p in decoder.parameters())
    matrices = sum(p.numel() for p in decoder.parameters() if p.ndim == 2)
    assert costs.weight_bytes == 4 * (parameters - embedding)  # rows of the embedding are not all read
    assert costs.operations() == matrices - embedding
    assert costs.head == ("F32", embedding)
    # 3 layers, 2 heads of keys and values of width 12, fp32
    assert costs.bytes_read(10) - costs.weight_bytes == 10 * 3 * 2 * 2 * 12 * 4


def test_a_window_bounds_what_is_read() -> None:
    costs = Costs(weight_bytes=1000, caches=[(10, 0), (10, 24)])
    assert costs.bytes_read(20) == 1000 + 200 + 200
    assert costs.bytes_read(100) == 1000 + 1000 + 240


def test_limits_of_products_count_attention_and_every_row_of_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {"Q4_1": 100.0, "Q8_0": 50.0, "F32": 10.0}
    monkeypatch.setattr("plait.bench.costs.product_rate", lambda layout, threads: rates[layout])
    costs = Costs(multiply_adds={"Q4_1": 1000}, head=("Q8_0", 500), attention=[(8, 0), (8, 3)])
    assert costs.attended(0, 4) == 8 * (1 + 2 + 3 + 4) + 8 * (1 + 2 + 3 + 3)
    assert costs.attended(10, 1) == 8 * 11 + 8 * 3
    assert costs.rates(1) == rates
    assert costs.seconds(rates, 4, 2, 152) == pytest.approx(4 * 1000 / 100 + 2 * 500 / 50 + 152 / 10)
    monkeypatch.setattr("plait.bench.costs.product_rate", lambda layout, threads: None)
    assert costs.rates(1) is None


def test_the_limit_of_a_batch_counts_the_requests_that_are_not_done(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {"Q4_1": 100.0, "Q8_0": 50.0, "F32": 10.0}
    monkeypatch.setattr("plait.bench.costs.product_rate", lambda layout, threads: rates[layout])
    monkeypatch.setattr("plait.bench.speed.read_rate", lambda num_bytes, threads: 4.0)
    costs = Costs(90, {"Q4_1": 1000}, ("Q8_0", 500), caches=[(5, 0)], attention=[(8, 0)])
    # Prompts of 3 and 1 tokens, 7 keys seen in all. The second token of both sees 4 and 2 keys; then one request is
    # left, whose bytes (90 + 5 * 5 keys, at 4 a second) take longer than its products.
    prompts = (4 * 1000) / 100 + 2 * 500 / 50 + 7 * 8 / 10
    both = 2 * 1000 / 100 + 2 * 500 / 50 + (4 + 2) * 8 / 10
    assert both > (90 + (4 + 2) * 5) / 4
    assert 1000 / 100 + 500 / 50 + 5 * 8 / 10 < (90 + 25) / 4
    assert _batch_seconds(costs, [3, 1], [3, 2], 1) == pytest.approx(prompts + both + (90 + 25) / 4)


def test_latent_attention_costs_its_cheaper_form() -> None:
    """Two heads of 3 + 1 and 2 over a latent of 4: 4 + 2 a key expanded, 5 + 4 absorbed, 4 * 5 a row made again."""
    costs = Costs(latent=[LatentSpec(2, 4, 3, 1, 2, 1.0)])
    assert costs.attended(0, 3) == 2 * 6 * (1 + 2 + 3)
    assert costs.attended(10, 1) == 2 * 9 * 11
    pairs = sum(range(11, 51))
    assert costs.attended(10, 40) == 2 * min(9 * pairs, 10 * 20 + 6 * pairs) == 2 * (200 + 6 * pairs)


def test_costs_of_a_latent_model_are_its_parameters_and_one_row_a_token() -> None:
    decoder = plait.from_config(tiny_config("deepseek_v3"))
    costs = measure_costs(OurSide(decoder, context=64, threads=1, plan="reference").bundle)
    counts = decoder.param_counts()
    assert costs.operations() == sum(
        p.numel() * (2 / 6 if "experts." in n and p.ndim == 3 else 1)
        for n, p in decoder.named_parameters()
        if p.ndim > 1 and n != "model.embed_tokens.weight"
    )
    assert costs.weight_bytes == 4 * (counts["active"] - counts["embedding"])
    assert costs.bytes_read(10) - costs.weight_bytes == 10 * 3 * (24 + 6) * 4
    assert len(costs.latent) == 3 and not costs.attention


def test_python_share() -> None:
    found = python_share([(1.0, 0.98)] * 98 + [(1.0, 0.5)] * 2)
    assert found["Python's share of a step"] == "p50 2.0%, p99 50.0%"
    assert python_share([]) == {}


@pytest.mark.slow
def test_speeds_without_a_peer(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plait.bench.speed.read_rate", lambda num_bytes, threads: 1e9)
    monkeypatch.setattr("plait.bench.costs.product_rate", lambda layout, threads: 1e9)
    common: dict[str, Any] = {"rounds": 2, "threads": 1, "options": REFERENCE}
    ticks: list[int] = []
    decode = measure_decode(model, [], contexts=(8, 20), new_tokens=3, advance=lambda: ticks.append(1), **common)
    assert [row["task"] for row in decode["rows"]] == ["decode after 8 tokens", "decode after 20 tokens"]
    assert len(ticks) == 2 * 2 * 3  # contexts, ours and the limit, rounds with the warm one
    weights = decode["rows"][0]["details"]["MB read per token"] * 1e6
    assert decode["rows"][0]["limit"]["value"] == pytest.approx(1e9 / weights, rel=1e-3)
    prefill = measure_prefill(model, [], lengths=(40,), **common)
    assert prefill["rows"][0]["sides"]["plait"]["median"] > 0
    batch = measure_batch(model, [], requests=(2, 3), prompt_tokens=8, new_tokens=4, **common)
    assert [row["task"] for row in batch["rows"]] == ["2 requests", "3 requests"]
    mixed = measure_batch(model, [], requests=(3,), prompt_tokens=8, new_tokens=4, random_lengths=True, **common)
    (row,) = mixed["rows"]
    assert row["task"] == "3 requests of random lengths" and row["limit"]["value"] > 0
    assert row["sides"]["plait"]["median"] > 0 and mixed["settings"]["random lengths"]
    for report in (decode, prefill, batch):
        assert report["engines"] == {"plait": {"plan": "reference", "weights": "float32", "kv_dtype": "fp32"}}
        assert all(len(row["sides"]["plait"]["values"]) == 2 for row in report["rows"])


def a_batch(*tokens: list[int]) -> BatchTiming:
    return BatchTiming(1.0, list(tokens))


def test_a_batch_whose_text_is_another_is_noted() -> None:
    ours = a_batch(*([i, 2, 3, 4, 5] for i in range(4)))
    report: dict[str, Any] = {"notes": []}
    near = a_batch(*([i, 2, 3, 4, 9] for i in range(3)), [9, 9, 9, 9, 9])
    _check_batch(report, {"plait": [ours], "near": [near]}, [5] * 4)
    assert report["notes"] == []
    garbage = a_batch(*([i, 0, 0, 0, 0] for i in range(4)))
    _check_batch(report, {"plait": [ours], "garbage": [garbage]}, [5] * 4)
    assert "most have under 4 tokens in common with garbage" in report["notes"][0]
    other = a_batch(*([i + 7, 2, 3, 4, 5] for i in range(4)))
    _check_batch(report, {"plait": [ours], "other": [other]}, [5] * 4)
    assert "only 0 begin with the same token on other" in report["notes"][1]
    assert _equal_firsts({"plait": [ours], "near": [near]}) == {"near": "3 of 4"}
    with pytest.raises(PlaitError, match="short brought 2 tokens where 5 were asked for"):
        _check_batch(report, {"plait": [ours], "short": [ours, a_batch([0, 2], *ours.tokens[1:])]}, [5] * 4)


def test_a_request_whose_text_is_another_is_noted() -> None:
    def run(*tokens: int) -> list[Timing]:
        return [Timing(1.0, 1.0, list(tokens))]

    report: dict[str, Any] = {"notes": []}
    found = {"plait": run(1, 2, 3, 4, 5), "a": run(1, 2, 3, 4, 9), "b": run(1, 9, 9, 9, 9), "c": run(9, 2, 3, 4, 5)}
    _check_text(report, found, "here", 5)
    assert report["notes"] == [
        "here b has only 1 leading tokens in common with plait",
        "here c begins with another token than plait",
    ]


def test_the_plan_is_read_from_what_plait_prints() -> None:
    native = "x: plan: native (avx2, 2 threads), matrices 210 Q4_1, 1 Q8_0, keys and values in bf16, 5 MiB of buffers"
    assert read_plan(f"a\n{native}\nb") == {
        "plan": "native",
        "isa": "avx2",
        "weights": "210 Q4_1, 1 Q8_0",
        "kv_dtype": "bf16",
    }
    assert read_plan("plan: reference, keys and values in fp32") == {"plan": "reference", "kv_dtype": "fp32"}
    assert read_plan("nothing") == {"kv_dtype": "unknown"}


@pytest.mark.slow
def test_first_output_is_timed_to_the_first_byte_and_keeps_the_rest() -> None:
    code = "import sys, time; print('ab', end='', flush=True); time.sleep(0.5); print('c')"
    seconds, text, errors = first_output([sys.executable, "-S", "-c", code], {})
    assert (text, errors) == ("abc", "") and seconds < 0.45
    with pytest.raises(PlaitError, match="no luck"):
        first_output([sys.executable, "-S", "-c", "raise SystemExit('no luck')"], {})
