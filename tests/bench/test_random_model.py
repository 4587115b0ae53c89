"""Random models of any shape, and that `plait bench decode` counts what they cost: active parameters, bytes of
latents."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import plait
from plait.cli.main import main
from plait.errors import UsageError
from plait.kernels.native import native_library, reason
from plait.model.config import ModelConfig
from plait.model.families import parse_config
from tools.make_random_model import SHAPES, make

needs_library = pytest.mark.skipif(native_library() is None, reason=f"no native library: {reason()}")
_SMALL = {"vocab_size": 300, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


def small(name: str, folder: Path) -> str:
    """A config.json of a shape, with fewer of everything but experts."""
    raw = {**SHAPES[name], **_SMALL, "max_position_embeddings": 256}
    changes = {
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
    }
    file = folder / f"{name}.json"
    file.write_text(json.dumps(raw | {key: value for key, value in changes.items() if key in raw}))
    return str(file)


def config_of(name: str) -> ModelConfig:
    return parse_config(SHAPES[name])


def test_the_shapes_differ_in_what_they_are_to_show() -> None:
    total = {name: config_of(name).param_counts()["total"] for name in SHAPES}
    active = {name: config_of(name).param_counts()["active"] for name in SHAPES}
    assert 1e9 < total["mixture-1b"] < 1.1e9
    assert total["mixture-1b"] == pytest.approx(total["dense-1b"], rel=0.01)
    assert active["mixture-1b"] == pytest.approx(active["dense-small"], rel=0.01)
    assert active["dense-1b"] > 6 * active["mixture-1b"]
    assert total["latent"] == pytest.approx(total["heads"], rel=0.05)
    kept = {name: config_of(name).kv_bytes_per_token(2) for name in ("latent", "heads")}
    assert kept == {"latent": 16 * 576 * 2, "heads": 16 * 4096 * 2}


def bench(path: Path, capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, Any]]:
    flags = ["--peer", "none", "--rounds", "1", "--new-tokens", "2", "--threads", "1", "--kv-dtype", "bf16", "--json"]
    assert main(["bench", "decode", str(path), *flags, *words]) == 0
    rows: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["rows"]
    return rows


@needs_library
@pytest.mark.parametrize("name", SHAPES)
def test_decoding_costs_active_parameters_and_the_bytes_that_are_kept(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make(small(name, tmp_path), tmp_path / name)
    short, long = bench(tmp_path / name, capsys, "--context", "16,116")
    counts = config.param_counts()
    # Of the experts those of one token; the tied table is read once, as the head.
    matrices = counts["active"] - counts["norms"]
    assert short["details"]["multiply-adds per token, M"] == pytest.approx(matrices / 1e6, rel=0.01)
    assert (counts["total"] > 2 * counts["active"]) == (name == "mixture-1b")
    read = [row["details"]["MB read per token"] * 1e6 for row in (short, long)]
    assert read[1] - read[0] == pytest.approx(100 * config.kv_bytes_per_token(2), rel=0.01)
    routers = sum(getattr(getattr(x.feed_forward, "router", None), "num_experts", 0) for x in config.layers) * 64
    weights = 2 * matrices + 2 * routers + 4 * counts["norms"]  # routers and norms are fp32
    assert read[0] == pytest.approx(weights + 17 * config.kv_bytes_per_token(2), rel=0.03)


@needs_library
def test_a_gguf_file_holds_the_same_numbers_quantised(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shape = small("mixture-1b", tmp_path)
    make(shape, tmp_path / "m")
    make(shape, tmp_path / "m.gguf", "q8_0")
    plain, quantised = (dict(plait.load(tmp_path / n, "fp32").named_parameters()) for n in ("m", "m.gguf"))
    for name, parameter in plain.items():
        assert (quantised[name] - parameter).abs().max() <= parameter.abs().max() / 127, name
    spread = plain["model.layers.1.mlp.experts.gate_up_proj"].std() * 64**0.5
    assert 0.95 < spread < 1.05 and torch.equal(plain["model.norm.weight"], torch.ones(64))
    rows = [bench(tmp_path / n, capsys, "--context", "16")[0]["details"] for n in ("m", "m.gguf")]
    assert rows[1]["MB read per token"] < 0.7 * rows[0]["MB read per token"]


def test_the_numbers_depend_on_the_seed_alone_and_need_no_torch(tmp_path: Path) -> None:
    shape = small("latent", tmp_path)
    code = (
        "import sys; from pathlib import Path; from tools.make_random_model import make\n"
        f"make({shape!r}, Path({str(tmp_path / 'again')!r}))\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2]).returncode == 0
    make(shape, tmp_path / "first")
    make(shape, tmp_path / "other", seed=1)
    first, again, other = ((tmp_path / n / "model.safetensors").read_bytes() for n in ("first", "again", "other"))
    assert first == again != other


def test_what_cannot_be_made(tmp_path: Path) -> None:
    shape = small("heads", tmp_path)
    with pytest.raises(UsageError, match="neither a config.json nor one of mixture-1b, "):
        make(str(tmp_path / "nothing.json"), tmp_path / "out")
    with pytest.raises(UsageError, match=r"--type q8_0 makes a GGUF file: give .*out the ending \.gguf"):
        make(shape, tmp_path / "out", "q8_0")
    (tmp_path / "out").mkdir()
    with pytest.raises(UsageError, match="out exists already"):
        make(shape, tmp_path / "out")
    narrow = tmp_path / "narrow.json"
    narrow.write_text(json.dumps(json.loads(Path(shape).read_text()) | {"vocab_size": 100}))
    with pytest.raises(UsageError, match="vocab_size=100: the tokenizer has 257 tokens"):
        make(str(narrow), tmp_path / "new")
