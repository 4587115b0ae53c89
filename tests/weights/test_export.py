"""What `save_pretrained` writes is what transformers loads, and what we load again."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

import plait
from plait.errors import UsageError
from plait.model.decoder import build
from plait.model.families import families, parse_config
from plait.weights.export import save_pretrained
from tests.configs import CONFIGS
from tests.tiny import tiny_model_dir


@pytest.fixture(params=sorted(CONFIGS))
def decoder(request: pytest.FixtureRequest) -> plait.Decoder:
    return plait.from_config(CONFIGS[request.param], seed=5)


def test_loading_again_gives_the_same_bits(decoder: plait.Decoder, tmp_path: Path) -> None:
    decoder.save_pretrained(tmp_path / "model")
    again = plait.load(tmp_path / "model", dtype="fp32")
    ours, theirs = decoder.state_dict(), again.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(CONFIGS) - {"plait_gpt"}))  # which transformers has no class of
def test_transformers_loads_it_and_agrees(name: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    decoder = plait.from_config(CONFIGS[name], seed=5)
    decoder.save_pretrained(tmp_path / "model")
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    ids = torch.arange(20)[None] % 90
    with torch.inference_mode():
        theirs = model(ids).logits.log_softmax(-1)
        ours = decoder.logits(decoder(ids)).log_softmax(-1)
    assert (ours - theirs).abs().max() < 1e-3


def test_a_tied_head_is_written_once_and_stays_tied(tmp_path: Path) -> None:
    decoder = plait.from_config(CONFIGS["qwen2"])
    decoder.save_pretrained(tmp_path / "model")
    with safe_open(tmp_path / "model" / "model.safetensors", "pt") as file:
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118 (safe_open is no mapping)
    again = plait.load(tmp_path / "model", dtype="fp32")
    assert again.lm_head.weight is again.model.embed_tokens.weight


def test_shards_hold_every_tensor_once(decoder: plait.Decoder, tmp_path: Path) -> None:
    save_pretrained(decoder, tmp_path / "model", shard_bytes=20_000)
    index = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())
    files = set(index["weight_map"].values())
    assert len(files) > 1 and files == {p.name for p in (tmp_path / "model").glob("*.safetensors")}
    again = plait.load(tmp_path / "model", dtype="fp32")
    assert all(torch.equal(a, b) for a, b in zip(decoder.parameters(), again.parameters(), strict=True))


def test_saving_over_an_older_directory_leaves_no_stale_shards(tmp_path: Path) -> None:
    decoder = plait.from_config(CONFIGS["llama"])
    save_pretrained(decoder, tmp_path / "model", shard_bytes=20_000)
    decoder.save_pretrained(tmp_path / "model")
    assert [p.name for p in (tmp_path / "model").glob("*safetensors*")] == ["model.safetensors"]
    plait.load(tmp_path / "model")


def test_saving_over_a_directory_keeps_what_a_save_does_not_write(tmp_path: Path) -> None:
    model = tmp_path / "model"
    plait.from_config(CONFIGS["llama"], seed=1).save_pretrained(model)
    (model / "notes").mkdir()
    (model / "notes" / "a.txt").write_text("mine")
    (model / "README.md").write_text("a card")
    (model / "tokenizer.json").write_text("{}")  # the model below brings none
    model.chmod(0o700)
    (tmp_path / "link").symlink_to(model)
    decoder = plait.from_config(CONFIGS["qwen3"], seed=2)
    decoder.save_pretrained(tmp_path / "link")
    assert (model / "notes" / "a.txt").read_text() == "mine" and (model / "README.md").read_text() == "a card"
    assert (model / "tokenizer.json").exists() and model.stat().st_mode & 0o777 == 0o700
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link", "model"]
    again = plait.load(model, dtype="fp32")
    assert all(torch.equal(a, b) for a, b in zip(decoder.parameters(), again.parameters(), strict=True))


@pytest.mark.parametrize("fail_at", [1, 2])
def test_a_save_that_fails_at_the_last_moment_leaves_the_old_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fail_at: int
) -> None:
    """Wherever a rename fails, the files of one save are there, never some of each."""
    model = tmp_path / "model"
    plait.from_config(CONFIGS["llama"], seed=1).save_pretrained(model)
    before = {p.name: p.read_bytes() for p in model.iterdir()}
    rename, calls = os.rename, []

    def failing(source: Path, target: Path) -> None:
        calls.append(target)
        if len(calls) == fail_at:
            raise OSError(5, "Input/output error")
        rename(source, target)

    monkeypatch.setattr(os, "rename", failing)
    with pytest.raises(OSError, match="Input/output"):
        plait.from_config(CONFIGS["qwen3"], seed=2).save_pretrained(model)
    assert {p.name: p.read_bytes() for p in model.iterdir()} == before
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_a_file_is_no_place_to_save_into(tmp_path: Path) -> None:
    (tmp_path / "model").write_text("x")
    with pytest.raises(UsageError, match="is a file"):
        plait.from_config(CONFIGS["llama"]).save_pretrained(tmp_path / "model")


def test_a_failed_save_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import safetensors.torch

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    with pytest.raises(OSError, match="No space"):
        plait.from_config(CONFIGS["llama"]).save_pretrained(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_rotary_divisors_of_a_gguf_file_are_kept_as_longrope(tmp_path: Path) -> None:
    """Two equal sets divide the frequencies and do nothing else."""
    config = parse_config(CONFIGS["llama"])
    pairs = config.rotary[0].width // 2
    divisors = tuple(1.0 + i for i in range(pairs))
    decoder = build(replace(config, rotary=(replace(config.rotary[0], divisors=divisors),)))
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.normal_(0, 0.3)
    decoder.save_pretrained(tmp_path / "model")
    loaded = plait.load(tmp_path / "model", "fp32")
    ids = torch.arange(12) % config.vocab_size
    with torch.inference_mode():
        found, expected = loaded.logits(loaded(ids)), decoder.logits(decoder(ids))
    assert (found - expected).abs().max() < 1e-5


def test_every_family_names_the_class_that_transformers_loads_it_with() -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    own = {name for name, family in families().items() if family.is_own}
    assert own == {"plait_gpt"}
    assert {name: family.architecture for name, family in families().items() if name not in own} == {
        name: MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family.written_as]
        for name, family in families().items()
        if name not in own
    }


def test_a_directory_without_tokenizer_json_keeps_the_tokenizer_that_it_has(tmp_path: Path) -> None:
    from plait.text.tokenizer import load_tokenizer
    from tests.text import small_sentencepiece

    source = tiny_model_dir(tmp_path / "in")
    for file in source.glob("tokenizer*.json"):
        file.unlink()
    small_sentencepiece.write(source, small_sentencepiece.train(byte_fallback=True))
    plait.load(source).save_pretrained(tmp_path / "out")
    before, after = load_tokenizer(source), load_tokenizer(tmp_path / "out")
    assert before.encode("héllo 123") == after.encode("héllo 123")
