"""Loading uses every tensor once and fills every parameter once, or says which name is at fault."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import plait
from plait.errors import UsageError, WeightError
from plait.model.decoder import Decoder
from plait.text.tokenizer import load_tokenizer
from plait.weights.checkpoint import open_checkpoint
from plait.weights.load import load
from tests.configs import CONFIGS
from tests.memory.tiny_decoders import tiny_decoder
from tests.tiny import tiny_config, tiny_model_dir

pytestmark = pytest.mark.usefixtures("one_thread")

Tensors = dict[str, torch.Tensor]
IDS = torch.arange(15) % 29


@pytest.fixture
def checkpoint(tmp_path: Path) -> Callable[..., Path]:
    """Writes a tiny model with its tensors and configuration changed."""

    def write(family: str = "llama", change: Callable[[Tensors], None] = lambda t: None, **config) -> Path:
        directory = tmp_path / f"model{len(list(tmp_path.iterdir()))}"
        tiny_decoder(family, tie_word_embeddings=config.pop("tie", False)).save_pretrained(directory)
        tensors = load_file(directory / "model.safetensors")
        change(tensors)
        save_file(tensors, directory / "model.safetensors", {"format": "pt"})
        raw = json.loads((directory / "config.json").read_text())
        raw |= config
        (directory / "config.json").write_text(json.dumps({k: v for k, v in raw.items() if v is not ...}))
        return directory

    return write


def logits(decoder: Decoder) -> torch.Tensor:
    with torch.inference_mode():
        return decoder.logits(decoder(IDS))


def add_head(tensors: Tensors, factor: float) -> None:
    tensors["lm_head.weight"] = factor * tensors["model.embed_tokens.weight"]


def add_short_head(tensors: Tensors) -> None:
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"][:3].clone()


def test_a_tied_model_may_hold_an_equal_head(checkpoint, caplog):
    plain = load(checkpoint(tie=True), "fp32")
    both = load(checkpoint(tie=True, change=lambda t: add_head(t, 1.0)), "fp32")
    assert torch.equal(logits(both), logits(plain))
    assert both.lm_head.weight is both.model.embed_tokens.weight
    assert not caplog.records


def test_a_tie_that_is_given_wins_over_a_head_that_differs_and_warns(checkpoint, caplog):
    plain = load(checkpoint(tie=True), "fp32")
    both = load(checkpoint(tie=True, change=lambda t: add_head(t, 2.0)), "fp32")
    assert torch.equal(logits(both), logits(plain))
    assert "lm_head.weight differs from the embedding" in caplog.text


def test_a_head_that_is_left_out_is_reported_as_skipped(checkpoint):
    for family, head in (("llama", "lm_head.weight"), ("gpt_neox", "embed_out.weight")):
        for factor in (1.0, 2.0):

            def add(tensors: Tensors, head: str = head, factor: float = factor) -> None:
                table = next(t for name, t in tensors.items() if "embed" in name)
                tensors[head] = factor * table

            assert load(checkpoint(family, tie=True, change=add), "fp32").load_report.skipped == [head]


@pytest.mark.parametrize("tie", [True, ...])
def test_a_head_of_another_shape_is_refused_also_where_it_is_not_used(checkpoint, tie):
    path = checkpoint("gemma3_text", tie=True, change=add_short_head, tie_word_embeddings=tie)
    with pytest.raises(WeightError, match=r"lm_head\.weight has shape \(3, \d+\)"):
        load(path, "fp32")


def test_a_file_that_is_named_is_the_one_that_is_loaded(checkpoint):
    """Also where its directory holds model.safetensors."""
    path = checkpoint()
    tensors = load_file(path / "model.safetensors")
    tensors["lm_head.weight"] = 3 * tensors["lm_head.weight"]
    save_file(tensors, path / "other.safetensors", {"format": "pt"})
    plain, other = load(path, "fp32"), load(path / "other.safetensors", "fp32")
    assert torch.allclose(logits(other), 3 * logits(plain), rtol=1e-4, atol=1e-4)
    assert torch.equal(logits(load(path / "model.safetensors", "fp32")), logits(plain))
    (path / "generation_config.json").write_text('{"top_k": 7}')
    assert open_checkpoint(path / "other.safetensors").generation_defaults == {"top_k": 7}


def test_a_model_in_the_layout_of_the_hubs_cache_is_an_ordinary_one(tmp_path):
    """Every file of a snapshot is a link to ../../blobs; whole directories and single files load through it."""
    directory = tiny_model_dir(tmp_path)
    blobs, snapshot = tmp_path / "hub" / "blobs", tmp_path / "hub" / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    expected, text = logits(load(directory, "fp32")), load_tokenizer(directory).encode("abc")
    for number, file in enumerate(sorted(directory.iterdir())):
        file.rename(blobs / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    for path in (snapshot, snapshot / "model.safetensors"):
        assert torch.equal(logits(load(path, "fp32")), expected)
        assert load_tokenizer(path).encode("abc") == text


def test_a_safetensors_file_without_a_configuration_is_refused(checkpoint, tmp_path):
    (checkpoint() / "model.safetensors").rename(tmp_path / "lone.safetensors")
    with pytest.raises(UsageError, match=r"has no config\.json"):
        load(tmp_path / "lone.safetensors")


def test_a_head_that_differs_wins_over_a_familys_default_tie_and_warns(checkpoint, caplog):
    """gemma ties by default; tie_word_embeddings is not in the file."""
    path = checkpoint("gemma3_text", tie=True, change=lambda t: add_head(t, 2.0), tie_word_embeddings=...)
    tied = load(checkpoint("gemma3_text", tie=True, tie_word_embeddings=...), "fp32")
    assert torch.allclose(logits(load(path, "fp32")), 2 * logits(tied), rtol=1e-4, atol=1e-4)
    assert "the head is used" in caplog.text


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "gpt_neox"])
def test_an_untied_model_without_a_head_is_refused_by_name(checkpoint, family):
    head = "embed_out.weight" if family == "gpt_neox" else "lm_head.weight"
    path = checkpoint(family, change=lambda t: t.pop(head), tie_word_embeddings=False)
    with pytest.raises(WeightError, match=r"lacks a tensor lm_head\.weight"):
        load(path)


def test_a_gemma_without_a_head_and_without_the_key_is_tied(checkpoint):
    decoder = load(checkpoint("gemma3_text", tie=True, tie_word_embeddings=...), "fp32")
    assert decoder.config.tie_embeddings
    assert torch.isfinite(logits(decoder)).all()


def test_missing_tensors_are_named_the_first_few_and_counted(checkpoint):
    def drop(tensors: Tensors) -> None:
        for name in [n for n in tensors if ".layers.1." in n]:
            del tensors[name]

    with pytest.raises(WeightError, match=r"lacks 9 tensors \(model\.layers\.1\..*, \.\.\.\)"):
        load(checkpoint(change=drop))


def test_a_tensor_that_nothing_uses_is_refused_by_name(checkpoint):
    path = checkpoint(change=lambda t: t.update({"model.layers.0.foo.weight": torch.zeros(3)}))
    with pytest.raises(WeightError, match=r"has a tensor model\.layers\.0\.foo\.weight .* no use for"):
        load(path)


@pytest.mark.parametrize(("dtype", "name"), [(torch.bool, "BOOL"), (torch.complex64, "C64")])
def test_what_holds_no_real_numbers_is_refused_before_anything_is_read(checkpoint, dtype, name):
    matrix = "model.layers.0.mlp.up_proj.weight"
    path = checkpoint(change=lambda t: t.update({matrix: t[matrix].to(dtype)}))
    with pytest.raises(WeightError, match=rf"up_proj\.weight is stored as {name}, which is no format of real numbers"):
        load(path)


def test_a_bias_that_the_configuration_does_not_have_is_refused(checkpoint):
    path = checkpoint(change=lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(24)}))
    with pytest.raises(WeightError, match=r"q_proj\.bias"):
        load(path)


def test_a_layer_too_many_is_refused(checkpoint):
    with pytest.raises(WeightError, match=r"model\.layers\.1\."):
        load(checkpoint(num_hidden_layers=1))


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("llama", "model.layers.0.mlp.up_proj.weight"),
        ("gpt_neox", "gpt_neox.layers.1.attention.query_key_value.weight"),
    ],
)
def test_another_shape_is_refused_with_both_shapes(checkpoint, family, name):
    shape: list[tuple[int, ...]] = []

    def cut(tensors: Tensors) -> None:
        shape.append(tuple(tensors[name].shape))
        tensors[name] = tensors[name][:-1].contiguous()

    with pytest.raises(WeightError) as error:
        load(checkpoint(family, change=cut))
    rows, columns = shape[0]
    assert name in str(error.value)
    assert str((rows - 1, columns)) in str(error.value) and str((rows, columns)) in str(error.value)


BUFFERS = {
    "llama": ("model.layers.0.self_attn.rotary_emb.inv_freq", "model.layers.1.self_attn.rotary_emb.cos_cached"),
    "gpt_neox": (
        "gpt_neox.layers.0.attention.bias",
        "gpt_neox.layers.0.attention.masked_bias",
        "gpt_neox.layers.0.attention.rotary_emb.inv_freq",
    ),
}


LATER_BUFFERS = {
    "gpt2": ("transformer.h.0.attn.bias", "h.2.attn.masked_bias"),
    "gptj": ("transformer.h.1.attn.bias", "transformer.h.1.attn.masked_bias", "transformer.h.0.attn.embed_positions"),
    "falcon": ("transformer.h.0.self_attention.rotary_emb.inv_freq",),
    "gemma2": ("model.layers.0.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq"),
    "mixtral": ("model.layers.2.self_attn.rotary_emb.sin_cached",),
}


@pytest.mark.parametrize("family", LATER_BUFFERS)
def test_leftover_buffers_of_other_families_too(tmp_path, family):
    plait.from_config(CONFIGS[family], seed=2).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for extra in LATER_BUFFERS[family]:
        save_file({**tensors, extra: torch.ones(4)}, tmp_path / "model.safetensors", {"format": "pt"})
        assert load(tmp_path, "fp32").load_report.skipped == [extra]
    save_file({**tensors, f"{extra}s": torch.ones(4)}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(WeightError, match=rf"{extra}s .* no use for"):
        load(tmp_path)


@pytest.mark.parametrize("family", BUFFERS)
def test_leftover_buffers_are_skipped_and_reported(checkpoint, family):
    buffers = {name: torch.ones(4) for name in BUFFERS[family]}
    decoder = load(checkpoint(family, change=lambda t: t.update(buffers)), "fp32")
    assert sorted(decoder.load_report.skipped) == sorted(BUFFERS[family])
    assert torch.equal(logits(decoder), logits(load(checkpoint(family), "fp32")))
    with_more = checkpoint(family, change=lambda t: t.update(buffers, **{"model.layers.0.foo.weight": torch.ones(2)}))
    with pytest.raises(WeightError, match=r"foo"):
        load(with_more)


def test_the_text_part_of_a_multimodal_directory_is_loaded_and_the_rest_skipped(checkpoint):
    """The prefixes and towers of a gemma3 directory."""

    def wrap(tensors: Tensors) -> None:
        for name in list(tensors):
            tensors[f"language_model.{name}"] = tensors.pop(name)
        tensors["vision_tower.vision_model.embeddings.weight"] = torch.zeros(2)
        tensors["multi_modal_projector.mm_input_projection_weight"] = torch.zeros(2)

    path = checkpoint("gemma3_text", tie=True, change=wrap)
    text = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
    decoder = load(path, "fp32")
    assert len(decoder.load_report.skipped) == 2
    assert torch.equal(logits(decoder), logits(load(checkpoint("gemma3_text", tie=True), "fp32")))


def test_every_parameter_is_filled(checkpoint, monkeypatch):
    """Memory that is not initialised is full of NaN here, and no logit is NaN."""
    from plait.weights import load as module

    real = module.build

    def poisoned(*args, **options):
        decoder = real(*args, **options)
        with torch.no_grad():
            for parameter in decoder.parameters():
                parameter.fill_(float("nan"))
        return decoder

    monkeypatch.setattr(module, "build", poisoned)
    for family in ("llama", "mistral", "qwen2", "qwen3", "gemma3_text", "gpt_neox"):
        assert torch.isfinite(logits(load(checkpoint(family), "fp32"))).all()


def test_a_sharded_checkpoint_equals_the_single_file(tmp_path):
    from plait.weights.export import save_pretrained

    decoder = plait.from_config(tiny_config("qwen3"), seed=5)
    save_pretrained(decoder, tmp_path / "one")
    save_pretrained(decoder, tmp_path / "many", shard_bytes=20_000)
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 3
    one, many = load(tmp_path / "one", "fp32"), load(tmp_path / "many", "fp32")
    assert torch.equal(logits(one), logits(many))
