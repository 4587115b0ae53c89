"""`plait bench mla`: what it measures, and where it finds that both forms cost the same."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from plait.bench.latent import FORMS, WIDTHS, cost_of, crossing, measure, random_layer
from plait.cli.main import main
from plait.kernels.native import native_library, reason
from plait.ops.latent import expands
from tests.plan.models import make
from tests.plan.test_lower import WIDE
from tests.threads import one_thread

__all__ = ["one_thread"]

needs_library = pytest.mark.skipif(native_library() is None, reason=f"no native library: {reason()}")


def test_the_crossing_lies_where_the_ratio_is_one() -> None:
    assert crossing([1, 2, 4, 8], [16.0, 8.0, 2.0, 0.5]) == pytest.approx(4 * 2**0.5)
    assert crossing([1, 2, 4], [4.0, 1.0, 0.25]) == pytest.approx(2.0)
    assert crossing([1, 2, 4], [4.0, 3.0, 2.0]) is None and crossing([4, 8], [0.5, 0.2]) is None


@pytest.mark.parametrize("context", [64, 513, 8192])
@pytest.mark.parametrize("tokens", [3, 17, 60])
def test_the_cost_found_is_the_one_at_which_the_choice_turns(tokens: int, context: int) -> None:
    cost = cost_of(WIDTHS, tokens, context)
    assert not expands(tokens, context, WIDTHS, 0.999 * cost)
    assert expands(tokens, context, WIDTHS, 1.001 * cost)


@needs_library
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("kv_dtype", ["fp32", "bf16", "fp16"])
def test_every_count_of_tokens_is_measured_in_both_forms(kv_dtype: str) -> None:
    spec = replace(WIDTHS, num_heads=2, latent_width=32, nope_width=16, rope_width=8, value_width=16)
    report = measure(None, [5, 40], 1, kv_dtype, random_layer(spec))
    assert [(row["context"], row["tokens"]) for row in report["rows"]] == [
        *((5, n) for n in (1, 2, 4)),
        *((40, n) for n in (1, 2, 4, 8, 16, 32)),
    ]
    assert all(row[f"{form} ms"] > 0 for row in report["rows"] for form in FORMS)
    assert [row["context"] for row in report["crossings"]] == [5, 40]
    assert report["settings"]["threads"] == 1 and report["settings"]["weights"] == "BF16"
    assert report["rows"][0]["chosen"] == "absorbed" and report["rows"][-1]["chosen"] == "expanded"


@needs_library
@pytest.mark.usefixtures("one_thread")
def test_a_models_own_layer_on_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PLAIT_CACHE", str(tmp_path / "cache"))
    make(WIDE["deepseek_v3"]).save_pretrained(tmp_path / "model")
    assert main(["bench", "mla", str(tmp_path / "model"), "--context", "9", "--threads", "1", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["bench"] == "mla" and len(report["rows"]) == 4
    assert (report["settings"]["heads"], report["settings"]["latent"], report["settings"]["weights"]) == (4, 32, "F32")
    assert main(["bench", "mla", str(tmp_path / "model"), "--context", "9", "--threads", "1"]) == 0
    assert "the plan counts a multiply-add of attention" in capsys.readouterr().out
