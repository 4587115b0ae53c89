"""`plait verify` agrees with transformers on whole checkpoints, and finds and places what is wrong in a faulty one."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from plait.cli.main import main
from plait.errors import UsageError, WeightError
from plait.verify.run import verify
from tests.real_models import smollm2_path
from tests.tiny import tiny_model_dir

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma3_text", "gpt_neox")
QUICK = {"length": 60, "new_tokens": 6, "threads": 1, "kv_memory": "8MiB"}
FLAGS = ["--length", "60", "-n", "6", "--threads", "1", "--kv-memory", "8MiB"]


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in made:
            made[family] = tiny_model_dir(tmp_path_factory.mktemp("verify"), family, seed=3)
        return made[family]

    return get


def damaged(source: Path, target: Path, change: Callable[[dict, dict[str, torch.Tensor]], None]) -> Path:
    """A copy of the directory with its configuration and tensors changed."""
    shutil.copytree(source, target)
    config = json.loads((source / "config.json").read_text())
    tensors = load_file(source / "model.safetensors")
    change(config, tensors)
    (target / "config.json").write_text(json.dumps(config))
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    return target


def swap_q_rows(config: dict, tensors: dict[str, torch.Tensor]) -> None:
    name = "model.layers.1.self_attn.q_proj.weight"
    tensors[name] = tensors[name].roll(1, 0).contiguous()


def double_theta(config: dict, tensors: dict[str, torch.Tensor]) -> None:
    config["rope_theta"] = 2 * config.get("rope_theta", 10_000.0)


def drop_bias(config: dict, tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.0.self_attn.q_proj.bias"].zero_()


def zero_layer(config: dict, tensors: dict[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        if ".layers.2." in name and name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()


def zero_block(config: dict, tensors: dict[str, torch.Tensor]) -> None:
    """One run of 32 weights, as a quantised block has."""
    tensors["model.layers.0.mlp.up_proj.weight"].view(-1)[320:352] = 0


def give_bias(directory: Path) -> None:
    """Biases are 0 in a new model; here the q biases are not, so that dropping one matters."""
    tensors = load_file(directory / "model.safetensors")
    for name in tensors:
        if name.endswith("q_proj.bias"):
            tensors[name] = torch.linspace(-1, 1, tensors[name].numel())
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})


# Position 0 sees only itself, so neither its query nor its rotation matters there: such faults show from position 1 on.
FAULTS = {
    "q rows of a layer swapped": ("llama", swap_q_rows, 1),
    "theta doubled": ("llama", double_theta, 1),
    "a bias dropped": ("qwen2", drop_bias, 1),
    "a layer zeroed": ("llama", zero_layer, 0),
    "a block of 32 weights zeroed": ("llama", zero_block, 0),
}


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_agrees_with_transformers_on_its_own_directory(directories, family: str):
    result = verify(directories(family), **QUICK)
    assert result.passed
    assert len(result.comparisons) == 5
    assert all(len(c.deltas) == len(c.token_ids) for c in result.comparisons)
    assert all(c.greedy is not None and c.greedy.divergence is None for c in result.comparisons)
    assert all(c.top1 == 1.0 for c in result.comparisons)


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_exits_1_and_names_the_first_position(directories, tmp_path, capsys, fault: str):
    family, change, first = FAULTS[fault]
    good = tmp_path / "good"
    shutil.copytree(directories(family), good)
    if fault == "a bias dropped":
        give_bias(good)
    bad = damaged(good, tmp_path / "bad", change)
    assert main(["verify", str(bad), "--reference", str(good), *FLAGS]) == 1
    printed = capsys.readouterr().out
    assert "DIFFER: 5 of 5 prompts" in printed
    assert f"position {first} (after token" in printed
    assert main(["verify", str(good), "--reference", str(good), *FLAGS]) == 0
    assert "AGREE" in capsys.readouterr().out


@pytest.mark.slow
def test_json_reports_every_position(directories, tmp_path, capsys):
    good = directories("llama")
    bad = damaged(good, tmp_path / "bad", double_theta)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("one prompt\n\nand another\n")
    words = ["verify", str(bad), "--reference", str(good), "--prompts", str(prompts), "-p", "a third", "--json", *FLAGS]
    assert main(words) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["passed"] is False
    assert [p["num_prompt_tokens"] for p in document["prompts"]] == [7, 10, 11]  # one token per byte
    first = document["prompts"][0]
    assert len(first["per_position"]) == first["num_positions"] == 13
    assert first["per_position"][0] <= first["tolerance"] < first["per_position"][1]
    assert first["first_position_beyond_tolerance"] == 1
    assert first["max_abs_delta_logprob"] == max(first["per_position"])
    assert len(first["greedy"]["token_ids"]) == 6


@pytest.mark.slow
def test_a_checkpoint_without_tokenizer_is_verified_on_random_ids(directories, tmp_path):
    bare = tmp_path / "bare"
    shutil.copytree(directories("llama"), bare)
    for file in bare.glob("tokenizer*"):
        file.unlink()
    result = verify(bare, **QUICK)
    assert result.passed
    assert any("random token ids" in note for note in result.notes)
    with pytest.raises(UsageError, match="no tokenizer"):
        verify(bare, texts=["hello"], **QUICK)


@pytest.mark.slow
def test_windows_that_no_prompt_reaches_past_are_named(directories):
    result = verify(directories("mistral"), texts=["short"], **QUICK | {"new_tokens": 0})
    assert any("window of 24 tokens" in note for note in result.notes)
    assert result.comparisons[0].greedy is None


def test_another_vocabulary_is_refused(directories, tmp_path):
    other = tiny_model_dir(tmp_path, "llama", vocab_size=300)
    with pytest.raises(WeightError, match=r"300 tokens.*259"):
        verify(directories("llama"), reference=other, **QUICK)


def test_missing_transformers_is_said_with_the_command_that_installs_it(directories, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert main(["verify", str(directories("llama")), *FLAGS]) == 2
    assert "pip install 'plait[bench]'" in capsys.readouterr().err


def test_a_missing_checkpoint_is_a_wrong_request(tmp_path, capsys):
    assert main(["verify", str(tmp_path / "nowhere")]) == 2
    assert "nowhere" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.real_model
def test_the_default_model_agrees_with_the_gguf_loader_of_transformers():
    result = verify(smollm2_path(), length=96, new_tokens=8, kv_memory="64MiB")
    assert result.passed
    assert result.notes == []
    assert [c.name for c in result.comparisons] == ["prose", "code", "numbers", "languages", "long"]
