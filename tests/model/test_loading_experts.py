"""Checkpoints of mixtures: one tensor per expert or stacks, every element filled once, routers in fp32 throughout."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import plait
from plait.errors import ConfigError, WeightError
from plait.model.config import MAX_EXPERTS, keeps_float32
from plait.model.decoder import Decoder, build
from plait.model.describe import describe
from plait.model.families import parse_config
from plait.model.known_models import _CONFIGS
from plait.weights.export import save_pretrained
from plait.weights.gguf_names import GGUF_NAMES
from plait.weights.load import load
from plait.weights.mapping import BoundMap
from tests.configs import CONFIGS

pytestmark = pytest.mark.usefixtures("one_thread")

Tensors = dict[str, torch.Tensor]
FAMILIES = ("qwen3_moe", "qwen2_moe", "mixtral", "olmoe", "dots1", "glm4_moe", "deepseek_v2", "deepseek_v3")
IDS = torch.arange(30).reshape(2, 15) % 96


@pytest.fixture
def saved(tmp_path: Path) -> Callable[..., Path]:
    """A model as `save_pretrained` writes it, with its tensors and its configuration changed."""

    def write(family: str, change: Callable[[Tensors], Any] = lambda tensors: None, **config: Any) -> Path:
        directory = tmp_path / f"model{len(list(tmp_path.iterdir()))}"
        plait.from_config(CONFIGS[family], seed=4).save_pretrained(directory)
        tensors = load_file(directory / "model.safetensors")
        change(tensors)
        save_file(tensors, directory / "model.safetensors", {"format": "pt"})
        raw = json.loads((directory / "config.json").read_text()) | config
        (directory / "config.json").write_text(json.dumps({k: v for k, v in raw.items() if v is not ...}))
        return directory

    return write


def logits(decoder: Decoder) -> torch.Tensor:
    with torch.inference_mode():
        return decoder.logits(decoder(IDS))


def reference_logits(directory: Path) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, experts_implementation="eager").eval()
    with torch.inference_mode():
        return model(input_ids=IDS).logits


def parts_of(family: str) -> tuple[str, str, str, str]:
    """Names in a file: the mixture of a layer, and gate, up and down of an expert."""
    if family == "mixtral":
        return "block_sparse_moe", "w1", "w3", "w2"
    return "mlp", "gate_proj", "up_proj", "down_proj"


def stack_up(family: str, tensors: Tensors) -> None:
    """Per-expert tensors -> gate_up_proj and down_proj, as transformers 5 names its own parameters."""
    mlp, gate, up, down = parts_of(family)
    for layer in range(3):
        prefix = f"model.layers.{layer}.{mlp}"
        found = [name for name in tensors if name.startswith(f"{prefix}.experts.")]
        count = len(found) // 3
        if not count:
            continue

        def take(part: str, prefix: str = prefix, count: int = count) -> list[torch.Tensor]:
            return [tensors.pop(f"{prefix}.experts.{e}.{part}.weight") for e in range(count)]

        ours = f"model.layers.{layer}.mlp"
        both = [torch.cat(pair) for pair in zip(take(gate), take(up), strict=True)]
        tensors[f"{ours}.experts.gate_up_proj"] = torch.stack(both)
        tensors[f"{ours}.experts.down_proj"] = torch.stack(take(down))
        if mlp != "mlp":
            tensors[f"{ours}.gate.weight"] = tensors.pop(f"{prefix}.gate.weight")


@pytest.mark.parametrize("family", FAMILIES)
def test_files_have_one_tensor_per_expert_and_stacks_are_read_as_well(saved, family):
    plain, stacked = saved(family), saved(family, lambda tensors: stack_up(family, tensors))
    mlp, gate, *_ = parts_of(family)
    assert any(f"{mlp}.experts.0.{gate}.weight" in name for name in load_file(plain / "model.safetensors"))
    one, other = load(plain, "fp32"), load(stacked, "fp32")
    assert torch.equal(logits(one), logits(plait.from_config(CONFIGS[family], seed=4)))
    for (name, first), (_, second) in zip(one.named_parameters(), other.named_parameters(), strict=True):
        assert torch.equal(first, second), name


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_loads_what_was_saved_with_equal_logits(saved, family):
    expected = reference_logits(saved(family))
    found = logits(plait.from_config(CONFIGS[family], seed=4))
    assert (found - expected).abs().max() < 1e-4 * max(1, expected.abs().max())


@pytest.mark.parametrize("original", [True, False], ids=["per expert", "stacked"])
@pytest.mark.parametrize("family", FAMILIES)
def test_what_transformers_saves_is_loaded_in_both_of_its_formats(tmp_path, family, original):
    from transformers import AutoConfig, AutoModelForCausalLM

    raw = {k: v for k, v in CONFIGS[family].items() if k != "model_type"}
    config = AutoConfig.for_model(family, **raw)
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config, experts_implementation="eager").eval()
    model.save_pretrained(tmp_path, save_original_format=original)
    names = load_file(tmp_path / "model.safetensors").keys()
    assert any(name.endswith("experts.gate_up_proj") for name in names) != original
    with torch.inference_mode():
        expected = model(input_ids=IDS).logits
    assert (logits(load(tmp_path, "fp32")) - expected).abs().max() < 1e-4 * max(1, expected.abs().max())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_missing_expert_is_named_by_the_tensor_that_is_not_there(saved, family):
    mlp, _, up, _ = parts_of(family)
    layer = 0 if family in ("qwen3_moe", "mixtral", "olmoe") else 1
    name = f"model.layers.{layer}.{mlp}.experts.2.{up}.weight"
    with pytest.raises(WeightError, match=rf"lacks a tensor {name.replace('.', '[.]')} that this {family} needs"):
        load(saved(family, lambda tensors: tensors.pop(name)))


def test_a_gap_in_the_numbers_of_experts_is_named_with_what_stands_behind_it(saved):
    """Experts 0 to 4 and 6 of six."""

    def renumber(tensors: Tensors) -> None:
        for name in [name for name in tensors if ".layers.0.mlp.experts.5." in name]:
            tensors[name.replace(".5.", ".6.")] = tensors.pop(name)

    with pytest.raises(WeightError, match=r"experts\.6\.\w+\.weight.* no use for, and lacks .*experts\.5\.up_proj"):
        load(saved("olmoe", renumber))


@pytest.mark.parametrize("part", ["gate", "up", "down"])
def test_a_missing_expert_of_an_old_gguf_file_is_named_too(part):
    """Such names are read and never written: stacks took their place."""
    config = parse_config(CONFIGS["mixtral"])
    shapes = {name: tuple(p.shape) for name, p in build(config, device="meta").named_parameters()}
    bound = BoundMap(config, GGUF_NAMES["llama"])
    names = [a.file for a in bound.outgoing(list(shapes)) if "_exps" not in a.file]
    experts = range(config.layers[0].feed_forward.router.num_experts)
    names += [f"blk.{i}.ffn_{p}.{e}.weight" for i in range(3) for p in ("gate", "up", "down") for e in experts]
    filled = {part.name for assignment in bound.incoming(names, shapes).assignments for part in assignment.parts}
    assert filled == set(shapes)
    names.remove(f"blk.1.ffn_{part}.2.weight")
    with pytest.raises(WeightError, match=rf"lacks a tensor blk\.1\.ffn_{part}\.2\.weight that"):
        bound.incoming(names, shapes)


def test_a_missing_stack_is_named(saved):
    def drop(tensors: Tensors) -> None:
        stack_up("olmoe", tensors)
        del tensors["model.layers.2.mlp.experts.down_proj"]

    with pytest.raises(WeightError, match=r"lacks a tensor model\.layers\.2\.mlp\.experts\.down_proj"):
        load(saved("olmoe", drop))


@pytest.mark.parametrize("first", [True, False])
def test_an_element_that_is_filled_twice_is_refused_with_both_tensors(saved, first):
    """A stack and one of its experts, in either order of the file."""
    single = "model.layers.0.mlp.experts.1.up_proj.weight"
    stack = "model.layers.0.mlp.experts.gate_up_proj"

    def double(tensors: Tensors) -> None:
        kept = tensors[single].clone()
        stack_up("olmoe", tensors)
        tensors[single if first else "model.layers.0.mlp.experts.1.up_proj.weight"] = kept

    with pytest.raises(WeightError, match=r"filled twice, by .* and by ") as error:
        load(saved("olmoe", double))
    assert single in str(error.value) and stack in str(error.value)


def test_a_single_expert_of_another_shape_is_refused_with_both_shapes(saved):
    name = "model.layers.0.mlp.experts.3.down_proj.weight"

    def cut(tensors: Tensors) -> None:
        tensors[name] = tensors[name][:, :-1].contiguous()

    with pytest.raises(WeightError, match=r"experts\.3\.down_proj\.weight has shape \(24, 39\).*\(24, 40\)"):
        load(saved("olmoe", cut))


def test_an_expert_too_many_is_refused(saved):
    def add(tensors: Tensors) -> None:
        tensors["model.layers.0.mlp.experts.6.up_proj.weight"] = torch.zeros(40, 24)

    with pytest.raises(WeightError, match=r"experts\.6\.up_proj\.weight .* no use for"):
        load(saved("olmoe", add))


def test_experts_of_a_dense_layer_are_refused(saved):
    def add(tensors: Tensors) -> None:
        tensors["model.layers.1.mlp.experts.0.up_proj.weight"] = torch.zeros(16, 24)

    with pytest.raises(WeightError, match=r"layers\.1\.mlp\.experts\.0\.up_proj\.weight .* no use for"):
        load(saved("qwen3_moe", add))


@pytest.mark.parametrize("original", [True, False], ids=["input_linear", "stacked"])
def test_granites_stacks_are_read_by_both_of_their_names(tmp_path, original):
    from transformers import AutoConfig, AutoModelForCausalLM

    raw = {k: v for k, v in CONFIGS["granitemoe"].items() if k != "model_type"}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("granitemoe", **raw)).eval()
    model.set_experts_implementation("eager")
    model.save_pretrained(tmp_path / "theirs", save_original_format=original)
    names = load_file(tmp_path / "theirs" / "model.safetensors").keys()
    assert ("model.layers.0.block_sparse_moe.input_linear.weight" in names) == original
    with torch.inference_mode():
        expected = model(input_ids=IDS).logits
    decoder = load(tmp_path / "theirs", "fp32")
    decoder.save_pretrained(tmp_path / "ours")
    assert (logits(decoder) - expected).abs().max() < 1e-4 * max(1, expected.abs().max())
    assert (reference_logits(tmp_path / "ours") - expected).abs().max() < 1e-4 * max(1, expected.abs().max())


def test_a_layer_after_the_last_one_is_skipped_where_the_family_predicts_tokens_with_it(saved):
    def add(tensors: Tensors) -> None:
        tensors["model.layers.3.eh_proj.weight"] = torch.zeros(24, 48)
        tensors["model.layers.3.mlp.experts.0.up_proj.weight"] = torch.zeros(16, 24)

    assert len(load(saved("glm4_moe", add), "fp32").load_report.skipped) == 2
    with pytest.raises(WeightError, match=r"2 tensors \(model\.layers\.3\.eh_proj"):
        load(saved("dots1", add))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_element_is_filled(saved, monkeypatch, family):
    """Memory that is not initialised is full of NaN here."""
    from plait.weights import load as module

    real = module.build

    def poisoned(*args: Any, **options: Any) -> Decoder:
        decoder = real(*args, **options)
        with torch.no_grad():
            for parameter in decoder.parameters():
                parameter.fill_(float("nan"))
        return decoder

    monkeypatch.setattr(module, "build", poisoned)
    for directory in (saved(family), saved(family, lambda tensors: stack_up(family, tensors))):
        assert all(torch.isfinite(p).all() for p in load(directory, "fp32").parameters())


def test_shards_hold_parts_of_one_stack(tmp_path):
    decoder = plait.from_config(CONFIGS["olmoe"], seed=5)
    save_pretrained(decoder, tmp_path / "many", shard_bytes=20_000)
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 3
    assert torch.equal(logits(load(tmp_path / "many", "fp32")), logits(decoder))


@pytest.mark.parametrize("family", FAMILIES)
def test_routers_stay_fp32_in_a_bf16_model_and_survive_a_save(saved, tmp_path, family):
    directory = saved(family)
    exact, low = load(directory, "fp32"), load(directory, "bf16")
    kinds = (".mlp.gate.weight", ".mlp.gate.e_score_correction_bias")
    routers = {name for name, _ in exact.named_parameters() if name.endswith(kinds)}
    assert routers and {name for name, _ in exact.named_parameters() if keeps_float32(name)} == routers
    state = dict(exact.named_parameters())
    for name, parameter in low.named_parameters():
        assert parameter.dtype == (torch.float32 if name in routers else torch.bfloat16), name
        if name in routers:
            assert torch.equal(parameter, state[name])
    exact.model.layers.to(torch.bfloat16)  # a part of it
    moved = exact.to(torch.bfloat16)
    assert {name for name, p in moved.named_parameters() if p.dtype == torch.float32} == routers
    assert all(torch.equal(p, state[name]) for name, p in low.named_parameters() if name in routers)
    assert all(torch.equal(p, dict(low.named_parameters())[n]) for n, p in moved.named_parameters() if n in routers)
    low.save_pretrained(tmp_path / "low")
    again = load(tmp_path / "low", "bf16")
    assert all(torch.equal(a, b) for a, b in zip(low.parameters(), again.parameters(), strict=True))
    assert {n for n, p in build(low.config, torch.bfloat16).named_parameters() if p.dtype == torch.float32} == routers


@pytest.mark.parametrize("dense", [0, 1, 3])
@pytest.mark.parametrize("family", ["dots1", "glm4_moe"])
def test_half_precision_is_fp32_rounded_however_many_layers_are_dense(saved, family, dense):
    raw = {**CONFIGS[family], "num_hidden_layers": 4, "first_k_dense_replace": dense, "initializer_range": 0.2}
    decoder = plait.from_config(raw, seed=3)
    half = build(decoder.config, torch.float16)
    half.load_state_dict(decoder.state_dict())
    with torch.inference_mode():
        exact, found = (d.logits(d(IDS)).log_softmax(-1) for d in (decoder, half))
    apart = (exact - found).abs().amax(-1)
    # A token near a tie may go to another expert.
    assert apart.median() < 0.01 and (apart < 0.05).float().mean() > 0.8


def test_a_selection_bias_learns_nothing_by_gradient():
    """Its name is kept in fp32 as well; nothing of a gated feed-forward is."""
    assert keeps_float32("model.layers.3.mlp.gate.e_score_correction_bias")
    assert not keeps_float32("model.layers.3.mlp.gate_proj.weight")
    assert not keeps_float32("model.layers.3.mlp.shared_expert_gate.weight")


REFUSED = {
    "two spellings": ("qwen3_moe", {"num_local_experts": 6}, r"num_experts=5 and num_local_experts=6 .* differ"),
    "more chosen than there are": ("olmoe", {"num_experts_per_tok": 7}, r"num_experts_per_tok=7 .* experts, 6"),
    "fewer experts than none": ("qwen3_moe", {"num_experts": -1}, r"num_experts=-1 must not be negative"),
    "fewer experts than none, by the other key": (
        "mixtral",
        {"num_local_experts": ..., "num_experts": -2},
        r"num_experts=-2 must not be negative",
    ),
    "a negative window that is off": (
        "qwen3_moe",
        {"sliding_window": -1, "use_sliding_window": False},
        r"sliding_window=-1 must not be negative",
    ),
    "none chosen": ("mixtral", {"num_experts_per_tok": 0}, r"num_experts_per_tok=0 must be at least 1"),
    "a step of 0": ("qwen2_moe", {"decoder_sparse_step": 0}, r"decoder_sparse_step=0 must be at least 1"),
    "dense layers that are no list": ("qwen3_moe", {"mlp_only_layers": 1}, r"mlp_only_layers=1 .* must be a list"),
    "windows of single layers": (
        "qwen3_moe",
        {"layer_types": ["sliding_attention", "full_attention", "full_attention"]},
        r"layer_types of a qwen3_moe must all be 'full_attention'",
    ),
    "jitter": ("mixtral", {"router_jitter_noise": 0.1}, r"router_jitter_noise=0\.1"),
    "experts beyond counting": ("olmoe", {"num_experts": 2**40}, rf"at most {MAX_EXPERTS} are allowed"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_router_cannot_do_is_refused_by_key(name):
    family, changes, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message):
        parse_config({key: value for key, value in {**CONFIGS[family], **changes}.items() if value is not ...})


def test_a_model_without_experts_is_dense():
    """num_experts: 0, as the classes of Qwen's mixtures read it."""
    config = parse_config({**CONFIGS["qwen3_moe"], "num_experts": 0})
    assert config.param_counts()["active"] == config.param_counts()["total"]


def test_the_parameters_that_are_active_are_those_of_the_model_cards():
    """3.3B of Qwen3-30B-A3B, 12.9B of Mixtral 8x7B: all but the experts that a token does not go through."""
    qwen = parse_config(_CONFIGS["Qwen3-30B-A3B"]).param_counts()
    assert qwen["total"] - qwen["active"] == 48 * (128 - 8) * 3 * 2048 * 768
    assert round(qwen["active"] / 1e9, 2) == 3.35
    mixtral = parse_config(_CONFIGS["Mixtral-8x7B-v0.1"]).param_counts()
    assert round(mixtral["active"] / 1e9, 1) == 12.9


def test_the_description_says_how_experts_are_chosen():
    lines = [text for _, text in describe(parse_config(CONFIGS["qwen2_moe"]))]
    assert "experts: gated silu, width 16; 3 of 4; softmax; a shared one of width 20 behind a sigmoid gate" in lines
    assert "feed-forward: gated silu, width 40" in lines
