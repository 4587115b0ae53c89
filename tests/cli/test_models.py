"""`plait models`: the arithmetic of public configurations."""

from __future__ import annotations

import json

import pytest

from plait.cli.main import main
from plait.model.known_models import known_models
from tests.tiny import tiny_config


def rows(capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, dict]:
    assert main(["models", "--json", *flags]) == 0
    return {row["model"]: row for row in json.loads(capsys.readouterr().out)}


@pytest.mark.parametrize(
    ("model", "kib", "gib", "saving", "window"),
    [
        ("Llama-3.1-8B", 128.0, 4.00, "4.0x", None),
        ("Mistral-7B-v0.1", 128.0, 4.00, "4.0x", 4096),
        ("Qwen2.5-7B", 56.0, 1.75, "7.0x", None),
        ("DeepSeek-V3", 68.6, 2.14, "71.1x", None),
        # 27 layers * 576 numbers * 2 bytes = 30.4 KiB; 16 heads * 320 / 576 = 8.9
        ("DeepSeek-V2-Lite", 30.4, 0.95, "8.9x", None),
        # 48 layers * 4 heads * 256 numbers * 2 bytes
        ("Qwen3-30B-A3B", 96.0, 3.00, "8.0x", None),
        ("Gemma-3-1B", 26.0, 0.81, "4.0x", 512),
    ],
)
def test_known_values(
    model: str, kib: float, gib: float, saving: str, window: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert rows(capsys)[model] == {
        "model": model,
        "kv_KiB_per_token": kib,
        "GiB_for_32k_tokens": gib,
        "saving_vs_full_mha": saving,
        "sliding_window": window,
    }


# Totals that the model cards state (weights counted once where the head is tied).
PUBLISHED_PARAMETERS = {
    "SmolLM2-135M": 134_515_008,
    "SmolLM2-360M": 361_821_120,
    "SmolLM2-1.7B": 1_711_376_384,
    "Llama-3.2-1B": 1_235_814_400,
    "Llama-3.2-3B": 3_212_749_824,
    "Llama-3.1-8B": 8_030_261_248,
    "Llama-3.1-405B": 405_853_388_800,
    "Mistral-7B-v0.1": 7_241_732_096,
    "Qwen2.5-7B": 7_615_616_512,
    "Qwen3-0.6B": 596_049_920,
    "Qwen3-4B": 4_022_468_096,
    "Qwen3-8B": 8_190_735_360,
    "Qwen3-32B": 32_762_123_264,
    "Qwen3-30B-A3B": 30_532_122_624,
    "Mixtral-8x7B-v0.1": 46_702_792_704,
    "Gemma-3-270M": 268_098_176,
    "Gemma-3-1B": 999_885_952,
    "Pythia-160M": 162_322_944,
    "Pythia-1.4B": 1_414_647_808,
}


def test_configurations_have_the_published_number_of_parameters() -> None:
    ours = {facts.model: facts.parameters for facts in known_models()}
    assert {name: ours[name] for name in PUBLISHED_PARAMETERS} == PUBLISHED_PARAMETERS


def test_requests_that_fit_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    found = rows(capsys, "--memory", "16GiB", "--context", "32768")
    # 16 GiB hold 4 contexts of 4 GiB and nothing else; the engine keeps one block free, so the fourth lacks a block.
    assert found["Llama-3.1-8B"]["requests_with_recycling"] == 3
    assert rows(capsys, "--memory", "16.01GiB")["Llama-3.1-8B"]["requests_with_recycling"] == 4
    mistral = found["Mistral-7B-v0.1"]
    # With recycling a layer keeps ceil((4096 - 1 + 512) / 16) + 1 = 289 blocks of 16 tokens instead of 2,048.
    blocks = 16 * 2**30 // (16 * 128 * 1024) - 1
    assert mistral["requests_with_recycling"] == blocks // 289 == 28
    assert mistral["requests_without_recycling"] == blocks // 2048 == 3


def test_recycling_never_costs_requests(capsys: pytest.CaptureFixture[str]) -> None:
    for row in rows(capsys, "--memory", "24GiB", "--context", "16384").values():
        assert row["requests_with_recycling"] >= row["requests_without_recycling"]
        assert (row["requests_with_recycling"] > row["requests_without_recycling"]) <= bool(row["sliding_window"])


def test_weights_are_subtracted_when_asked(capsys: pytest.CaptureFixture[str]) -> None:
    llama = rows(capsys, "--memory", "24GiB", "--subtract-weights")["Llama-3.1-8B"]
    # 8.03e9 parameters in bf16 are 14.96 GiB; the 9.04 GiB that are left hold two contexts of 4 GiB.
    assert llama["weights_GiB"] == 14.96
    assert llama["requests_with_recycling"] == 2


def test_another_context_adds_its_own_column(capsys: pytest.CaptureFixture[str]) -> None:
    llama = rows(capsys, "--context", "8192")["Llama-3.1-8B"]
    assert (llama["GiB_for_32k_tokens"], llama["GiB_for_context"], llama["context_tokens"]) == (4.0, 1.0, 8192)


def test_paths_are_read_instead_of_the_table(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(tiny_config("llama")))
    expected = 3 * 2 * (12 + 12) * 2 / 1024
    assert rows(capsys, str(path))[str(path)]["kv_KiB_per_token"] == round(expected, 1)
    assert rows(capsys, str(tmp_path))[str(tmp_path)]["saving_vs_full_mha"] == "2.0x"


def test_the_print_lists_families_with_what_they_were_proved_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "--memory", "16GiB"]) == 0
    text = capsys.readouterr().out
    assert "random weights; SmolLM2-135M-Instruct (GGUF)" in text
    assert "requests" in text and "without recycling" in text
