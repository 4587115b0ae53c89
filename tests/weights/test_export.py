"""What `save_pretrained` writes is what transformers loads, and what we load again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

import plait
from plait.errors import WeightError
from plait.weights.export import save_pretrained
from tests.configs import CONFIGS


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
def test_transformers_loads_it_and_agrees(decoder: plait.Decoder, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

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


def test_a_failed_save_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import safetensors.torch

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    with pytest.raises(OSError, match="No space"):
        plait.from_config(CONFIGS["llama"]).save_pretrained(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_rotary_divisors_of_a_gguf_file_have_no_place_in_config_json(tmp_path: Path) -> None:
    decoder = plait.from_config({**CONFIGS["llama"], "rope_divisors": [1.0, 2.0, 4.0]})
    with pytest.raises(WeightError, match="rope_freqs"):
        decoder.save_pretrained(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []
