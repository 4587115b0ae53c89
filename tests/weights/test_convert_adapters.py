"""`convert` with adapters writes what `merge_adapter` and `save_pretrained` would, and leaves the source alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import plait
from plait.cli.main import main
from plait.errors import WeightError
from plait.weights.convert import convert
from plait.weights.gguf_names import GGUF_NAMES
from plait.weights.gguf_source import GGUFSource
from plait.weights.mapping import BoundMap
from plait.weights.merge import merge_adapter
from plait.weights.merged import file_changes, targets_of
from tests.adapters import ALL, make_adapter, write_adapter
from tests.weights.converting import model_directory, random_decoder
from tests.weights.test_convert_deepseek import random_model
from tests.weights.test_convert_families import assert_same_bytes
from tests.weights.test_quantised_models import directory, twin

QKV = ("q_proj", "k_proj", "v_proj", "o_proj")


def merged_decoder(source: Path, *adapters: Path, dtype: str = "fp32") -> Any:
    decoder: Any = plait.load(source, dtype)
    for adapter in adapters:
        merge_adapter(decoder, adapter)
    return decoder


def assert_same_parameters(found: Any, expected: Any) -> None:
    ours, theirs = dict(found.named_parameters()), dict(expected.named_parameters())
    assert ours.keys() == theirs.keys()
    for name, parameter in theirs.items():
        assert torch.equal(ours[name].float(), parameter.float()), name


@pytest.mark.parametrize(
    ("family", "endings"),
    [
        ("llama", ALL),
        ("phi3", ("qkv_proj", "o_proj", "gate_up_proj")),
        ("mixtral", QKV),
        ("gemma3", ("q_proj", "up_proj")),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_directory_is_that_of_the_merged_decoder(
    family: str, endings: Sequence[str], dtype: torch.dtype, tmp_path: Path
) -> None:
    source = model_directory(tmp_path, family, dtype)
    adapter = write_adapter(tmp_path / "adapter", random_decoder(family), endings=endings)
    report = convert(source, tmp_path / "converted", adapters={"mine": adapter})
    name = "fp32" if dtype == torch.float32 else "bf16"
    merged_decoder(source, adapter, dtype=name).save_pretrained(tmp_path / "saved")
    # A decoder's routers are float32 always.
    assert_same_bytes(tmp_path / "converted", tmp_path / "saved", but=(".gate.weight",))
    assert any(line.startswith("merged: mine (rank 4, ") for line in report.lines())
    assert report.copied < report.tensors and report.to_json()["adapters"] == report.adapters
    convert(source, tmp_path / "plain")
    with pytest.raises(AssertionError):
        assert_same_bytes(tmp_path / "converted", tmp_path / "plain")


@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_every_way_through_gguf_gives_the_merged_weights(family: str, tmp_path: Path) -> None:
    """Into GGUF, from GGUF into GGUF, and from GGUF into a directory; llama's rows are in another order there."""
    source = model_directory(tmp_path, family)
    endings = ALL if family == "llama" else ("qkv_proj", "gate_up_proj", "down_proj")
    adapter = write_adapter(tmp_path / "adapter", random_decoder(family), endings=endings)
    expected = merged_decoder(source, adapter)
    convert(source, tmp_path / "plain.gguf", "f32")
    convert(source, tmp_path / "one.gguf", "f32", adapters={"a": adapter})
    convert(tmp_path / "plain.gguf", tmp_path / "two.gguf", adapters={"a": adapter})
    convert(tmp_path / "plain.gguf", tmp_path / "three", adapters={"a": adapter})
    for target in ("one.gguf", "two.gguf", "three"):
        assert_same_parameters(plait.load(tmp_path / target, "fp32"), expected)
    convert(plait.load(source, "fp32"), tmp_path / "four", adapters={"a": adapter})
    assert_same_bytes(tmp_path / "four", tmp_path / "three")


def test_what_is_quantised_and_changed_is_not_quantised_again(tmp_path: Path) -> None:
    source = model_directory(tmp_path, "llama", num_hidden_layers=2)
    convert(source, tmp_path / "q8.gguf", "q8_0")
    adapter = write_adapter(tmp_path / "adapter", random_decoder("llama", num_hidden_layers=2), endings=("q_proj",))
    report = convert(tmp_path / "q8.gguf", tmp_path / "merged.gguf", adapters={"a": adapter})
    before, after = GGUFSource(tmp_path / "q8.gguf"), GGUFSource(tmp_path / "merged.gguf")
    changed = [name for name in before.names() if not np.array_equal(before.raw(name), after.raw(name))]
    assert changed == ["blk.0.attn_q.weight", "blk.1.attn_q.weight"] and report.expanded == {"Q8_0": 2}
    assert {after.info(name).format for name in changed} == {"F32"}
    assert_same_parameters(plait.load(tmp_path / "merged.gguf", "fp32"), merged_decoder(tmp_path / "q8.gguf", adapter))
    convert(tmp_path / "q8.gguf", tmp_path / "again.gguf", "q8_0", adapters={"a": adapter})
    assert GGUFSource(tmp_path / "again.gguf").info("blk.0.attn_q.weight").format == "Q8_0"


@pytest.mark.parametrize("form", ["gptq", "fp8 in blocks"])
def test_into_a_quantised_directory(form: str, tmp_path: Path) -> None:
    path = directory(tmp_path, form, "llama")
    adapter = write_adapter(tmp_path / "adapter", plait.load(path, "fp32"), endings=("k_proj", "down_proj"))
    expected = merged_decoder(twin(path), adapter)
    convert(path, tmp_path / "full", dtype="fp32", adapters={"a": adapter})
    expected.save_pretrained(tmp_path / "saved")
    assert_same_bytes(tmp_path / "full", tmp_path / "saved")
    report = convert(path, tmp_path / "model.gguf", adapters={"a": adapter})
    assert_same_parameters(plait.load(tmp_path / "model.gguf", "fp32"), expected)
    assert sum(report.kept.values()) == (10 if form == "gptq" else 0)
    assert sum(report.expanded.values()) == (4 if form == "gptq" else 14)


def test_several_adapters_are_merged_in_turn(tmp_path: Path) -> None:
    source = model_directory(tmp_path, "llama")
    first, second = (write_adapter(tmp_path / f"a{i}", random_decoder("llama"), seed=i, rank=i + 2) for i in (0, 1))
    convert(source, tmp_path / "both", adapters={"first": first, "second": second})
    merged_decoder(source, first, second).save_pretrained(tmp_path / "saved")
    assert_same_bytes(tmp_path / "both", tmp_path / "saved")


def test_latent_attention(tmp_path: Path) -> None:
    decoder = random_model("v3")
    decoder.save_pretrained(tmp_path / "source")
    adapter = write_adapter(tmp_path / "adapter", decoder, endings=("q_a_proj", "kv_a_proj_with_mqa", "o_proj"))
    expected = merged_decoder(tmp_path / "source", adapter)
    convert(tmp_path / "source", tmp_path / "one.gguf", "f32", adapters={"a": adapter})
    convert(tmp_path / "source", tmp_path / "plain.gguf", "f32")
    convert(tmp_path / "plain.gguf", tmp_path / "two", adapters={"a": adapter})
    convert(tmp_path / "plain.gguf", tmp_path / "three.gguf", adapters={"a": adapter})
    for target in ("one.gguf", "two", "three.gguf"):
        assert_same_parameters(plait.load(tmp_path / target, "fp32"), expected)


def test_a_change_that_no_tensor_of_a_file_takes_is_an_error(tmp_path: Path) -> None:
    decoder = random_decoder("llama")
    targets = targets_of([make_adapter(tmp_path, decoder, endings=("q_proj",))])
    bound = BoundMap(decoder.config, GGUF_NAMES["llama"])
    files = [f"blk.{layer}.attn_q.weight" for layer in range(3)]
    assert list(file_changes(targets, bound, ["output.weight", *files])) == files
    with pytest.raises(
        WeightError, match=r"a tensor model\.layers\.2\.self_attn\.q_proj\.weight, which .* another form"
    ):
        file_changes(targets, bound, files[:2])


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = model_directory(tmp_path, "llama")
    adapter = write_adapter(tmp_path / "adapter", random_decoder("llama"))
    assert main(["convert", str(source), str(tmp_path / "out"), "--adapter", f"mine={adapter}"]) == 0
    assert "merged: mine (rank 4, 21 matrices)" in capsys.readouterr().out
    merged_decoder(source, adapter).save_pretrained(tmp_path / "saved")
    assert_same_bytes(tmp_path / "out", tmp_path / "saved")
    other = write_adapter(tmp_path / "other", random_decoder("llama", hidden_size=32))
    for words, message, status in (
        (["--adapter", str(tmp_path / "none")], "does not exist", 2),
        (["--adapter", f"a={adapter}", "--adapter", f"a={other}"], "two adapters would be called a", 2),
        (["--adapter", f"small={other}"], "adapter small: ", 1),
    ):
        assert main(["convert", str(source), str(tmp_path / "x.gguf"), *words]) == status
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1
        assert not (tmp_path / "x.gguf").exists()
