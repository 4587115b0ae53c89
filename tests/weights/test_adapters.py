"""Reading peft's adapters: which modules a configuration means, and one clear line for what cannot be used."""

from __future__ import annotations

import json
import random
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from plait.errors import ConfigError, PlaitError, UsageError, WeightError
from plait.model.decoder import Decoder, build, from_config
from plait.model.record import record
from plait.weights.adapter_config import parse_lora_config
from plait.weights.adapters import Adapter, load_adapter
from plait.weights.merge import merge_adapter
from tests.adapters import PREFIX, make_adapter, write_adapter
from tests.configs import CONFIGS

BASE: dict[str, Any] = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8, "target_modules": ["q"]}
FILE = "adapter_model.safetensors"


def config(**changes: Any):
    return parse_lora_config({**BASE, **changes}, Path("adapter_config.json"))


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return from_config(CONFIGS["llama"], seed=1)


@pytest.fixture
def directory(decoder: Decoder, tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "adapter", decoder)


def read(directory: Path, decoder: Decoder) -> Adapter:
    return load_adapter(directory, decoder.config, record(decoder))


# The configuration. The oracle is peft's own matching.

TARGETS: list[dict[str, Any]] = [
    {"target_modules": ["q_proj", "self_attn.v_proj", "model.layers.2.mlp.up_proj"]},
    {"target_modules": ["proj"]},
    {"target_modules": r".*\.(q|k)_proj"},
    {"target_modules": r"model\.layers\.\d+\.mlp\..*"},
    {"target_modules": "q_proj"},
    {"target_modules": ["q_proj", "up_proj"], "exclude_modules": ["layers.1.self_attn.q_proj"]},
    {"target_modules": ["q_proj", "up_proj"], "exclude_modules": r".*\.1\..*"},
    {"target_modules": ["q_proj"], "layers_to_transform": 1},
    {"target_modules": ["q_proj", "up_proj"], "layers_to_transform": [0, 2], "layers_pattern": "layers"},
    {"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": ["blocks", "layers"]},
    {"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": "blocks"},
    {"target_modules": ["q_proj"], "layers_to_transform": []},
    {"target_modules": ["gate_proj"], "layers_to_transform": [5], "layers_pattern": None},
]
NAMES = [
    f"model.layers.{i}.{part}"
    for i in range(3)
    for part in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.up_proj", "mlp.experts.5.gate_proj")
]


@pytest.mark.parametrize("options", TARGETS, ids=str)
def test_modules_are_chosen_as_peft_chooses_them(options: dict[str, Any]) -> None:
    from peft import LoraConfig
    from peft.tuners.tuners_utils import check_target_module_exists

    theirs = LoraConfig(**options)
    ours = config(**options)
    expected = []
    for name in NAMES:
        found = check_target_module_exists(theirs, name)
        expected.append(bool(found) and type(found).__name__ != "_ExcludedModule")
    assert [ours.changes(name) for name in NAMES] == expected


def test_ranks_and_scales_by_pattern_as_peft_finds_them() -> None:
    from peft.utils.other import get_pattern_key

    ranks = {"q_proj": 2, r"layers\.1\.mlp.up_proj": 32, "up_proj": 16, "k_proj|v_proj": 7}
    ours = config(rank_pattern=ranks, alpha_pattern={"model.layers.0.self_attn.q_proj": 3})
    for name in NAMES:
        assert ours.rank_of(name) == ranks.get(get_pattern_key(ranks.keys(), name), 4)
    assert ours.scale_of("model.layers.0.self_attn.q_proj") == 3 / 2
    assert ours.scale_of("model.layers.1.self_attn.q_proj") == 8 / 2
    assert config(use_rslora=True).scale_of("x") == 8 / 4**0.5


def test_a_config_that_peft_writes_is_read(tmp_path: Path) -> None:
    from peft import LoraConfig

    LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], lora_dropout=0.1).save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "adapter_config.json").read_text())
    assert len(raw) > 20
    assert parse_lora_config(raw, tmp_path).changes("a.q_proj")


REFUSED_CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"peft_type": "IA3"}, "only adapters of peft_type LORA"),
    ({"peft_type": None}, "does not say that this is a LoRA adapter"),
    ({"peft_type": ["LORA"]}, "peft_type"),
    ({"task_type": "SEQ_CLS"}, "another task"),
    ({"use_dora": True}, "DoRA"),
    ({"modules_to_save": ["lm_head"]}, "whole modules"),
    ({"trainable_token_indices": [1, 2]}, "trained embeddings"),
    ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "stacks of experts"),
    ({"lora_bias": True}, "a bias beside"),
    ({"layer_replication": [[0, 2], [1, 3]]}, "several times"),
    ({"alora_invocation_tokens": [5]}, "aLoRA"),
    ({"bias": "all"}, "biases trained"),
    ({"init_lora_weights": "pissa"}, "changed base weights"),
    ({"init_lora_weights": "olora"}, "changed base weights"),
    ({"init_lora_weights": 7}, "changed base weights"),
    ({"rotation": "yes"}, "'rotation'='yes' is not known"),
    ({"r": 0}, "must be a rank"),
    ({"r": True}, "must be a rank"),
    ({"r": 4.0}, "must be a rank"),
    ({"r": 10**9}, "must be a rank"),
    ({"lora_alpha": "8"}, "must be a finite number"),
    ({"lora_alpha": float("nan")}, "must be a finite number"),
    ({"lora_alpha": 10**400}, "must be a finite number"),
    ({"use_rslora": "yes"}, "must be true or false"),
    ({"target_modules": None}, "list of module names"),
    ({"target_modules": []}, "names no module"),
    ({"target_modules": [1]}, "list of module names"),
    ({"target_modules": {"q": 1}}, "list of module names"),
    ({"target_modules": "(q"}, "is no regular expression"),
    ({"target_modules": "(a+)+b"}, "in several ways"),
    ({"target_modules": "(?:[a-z.]|a[a-z.])+!"}, "in several ways"),
    ({"target_modules": "(?:a?a?)*!"}, "in several ways"),
    ({"target_modules": "(?:(?:a|b*)c)*d"}, "in several ways"),
    ({"target_modules": ".*a" * 5}, "too often"),
    ({"rank_pattern": {"(.*)*x": 2}}, "in several ways"),
    ({"target_modules": "q" * 3000}, "3000 characters"),
    ({"target_modules": r".*\.q", "layers_to_transform": [1]}, "list of target_modules only"),
    ({"layers_to_transform": [-1]}, "index"),
    ({"layers_to_transform": "1"}, "index"),
    ({"layers_to_transform": [0], "layers_pattern": 3}, "layers_pattern"),
    ({"rank_pattern": [4]}, "rank_pattern"),
    ({"rank_pattern": {"q": "4"}}, "must be a rank"),
    ({"rank_pattern": {"q)": 4}}, "is no regular expression"),
    ({"alpha_pattern": {"q": None}}, "must be a finite number"),
    ({"exclude_modules": 3}, "exclude_modules"),
]


@pytest.mark.parametrize(("changes", "said"), REFUSED_CONFIGS, ids=str)
def test_a_config_that_cannot_be_carried_out_is_one_line(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        config(**changes)
    assert said in str(error.value) and "\n" not in str(error.value)


def test_an_expression_as_training_tools_write_it_is_read() -> None:
    text = (
        r"(?:.*?(?:language|text).*?(?:self_attn|attention|mlp|ffn).*?(?:q_proj|k_proj|v_proj).*?)"
        r"|(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|mlp)\.(?:(?:q_proj|k_proj)))"
    )
    assert config(target_modules=text).changes("model.layers.11.self_attn.q_proj")


def test_the_slowest_expression_that_is_read_ends_soon() -> None:
    began = time.perf_counter()
    assert not config(target_modules=".*.*.*.*!").changes("model.layers.11.block_sparse_moe.shared_experts.down_proj")
    assert time.perf_counter() - began < 5


# The tensors


def test_the_hash_is_of_the_content(decoder: Decoder, tmp_path: Path) -> None:
    one = make_adapter(tmp_path, decoder, "one", seed=1)
    same = load_adapter(shutil.copytree(one.path, tmp_path / "other"), decoder.config, record(decoder), "other")
    assert one.content_hash == same.content_hash and (one.name, same.name) == ("one", "other")
    others = [
        make_adapter(tmp_path, decoder, "seed", seed=2),
        make_adapter(tmp_path, decoder, "scale", seed=1, lora_alpha=5),
        make_adapter(tmp_path, decoder, "format", seed=1, dtype=torch.bfloat16),
    ]
    assert len({one.content_hash, *(a.content_hash for a in others)}) == 4
    assert one.rank == 4 and one.nbytes == sum(t.nbytes for t in load_file(one.path / FILE).values())


def change_tensors(directory: Path, change: Any) -> None:
    tensors = load_file(directory / FILE)
    change(tensors)
    save_file({k: v.contiguous() for k, v in tensors.items()}, directory / FILE)


Q = f"{PREFIX}model.layers.0.self_attn.q_proj"
REFUSED_TENSORS: dict[str, tuple[Any, str]] = {
    "half is missing": (lambda t: t.pop(f"{Q}.lora_A.weight"), "q_proj.lora_A.weight' is missing"),
    "a module is missing": (
        lambda t: [t.pop(f"{Q}.lora_{h}.weight") for h in "AB"],
        "lacks a tensor model.layers.0.self_attn.q_proj that target_modules",
    ),
    "all are missing": (lambda t: t.clear(), "holds no tensor"),
    "another rank": (lambda t: t.update({f"{Q}.lora_A.weight": torch.zeros(3, 24)}), "rank 4 make it (4, 24)"),
    "another base model": (lambda t: t.update({f"{Q}.lora_B.weight": torch.zeros(32, 4)}), "(32, 4)"),
    "a vector": (lambda t: t.update({f"{Q}.lora_B.weight": torch.zeros(96)}), "shape (96,)"),
    "not finite": (lambda t: t[f"{Q}.lora_B.weight"].fill_(float("nan")), "NaN or infinity"),
    "integers": (lambda t: t.update({f"{Q}.lora_A.weight": torch.zeros(4, 24, dtype=torch.int8)}), "not as floats"),
    "magnitudes": (lambda t: t.update({f"{Q}.lora_magnitude_vector": torch.ones(24)}), "of DoRA"),
    "an embedding": (
        lambda t: t.update({f"{PREFIX}model.embed_tokens.lora_embedding_A": torch.ones(4, 96)}),
        "adapted embedding",
    ),
    "a saved module": (lambda t: t.update({f"{PREFIX}lm_head.weight": torch.ones(96, 24)}), "neither a lora_A"),
    "the head beside its adapter": (
        lambda t: t.update({f"{PREFIX}lm_head.base_layer.weight": torch.ones(96, 24)}),
        "lm_head.base_layer.weight' belongs to an adapter of the output head or the embedding",
    ),
    "a bias": (lambda t: t.update({f"{Q}.lora_B.bias": torch.ones(24)}), "is a bias"),
    "another prefix": (lambda t: t.update({"model.x.lora_A.weight": torch.ones(4, 24)}), "does not begin with"),
    "a module that is not there": (
        lambda t: t.update(
            {f"{PREFIX}model.layers.7.self_attn.q_proj.lora_{h}.weight": torch.ones(4, 4) for h in "AB"}
        ),
        "model.layers.7.self_attn.q_proj is no linear module of this llama",
    ),
    "a norm": (
        lambda t: t.update({f"{PREFIX}model.norm.lora_{h}.weight": torch.ones(4, 4) for h in "AB"}),
        "model.norm is no linear module",
    ),
    "the head": (
        lambda t: t.update({f"{PREFIX}lm_head.lora_{h}.weight": torch.ones(4, 4) for h in "AB"}),
        "lm_head is the output head",
    ),
}


@pytest.mark.parametrize("wrong", REFUSED_TENSORS)
def test_tensors_that_do_not_fit_are_one_line(wrong: str, directory: Path, decoder: Decoder) -> None:
    change, said = REFUSED_TENSORS[wrong]
    change_tensors(directory, change)
    with pytest.raises(WeightError) as error:
        read(directory, decoder)
    assert said in str(error.value) and "\n" not in str(error.value)


def test_tensors_that_the_config_does_not_name_are_refused(decoder: Decoder, tmp_path: Path) -> None:
    directory = write_adapter(tmp_path / "a", decoder, target_modules=["q_proj"])
    with pytest.raises(WeightError, match="18 tensors .* that target_modules of adapter_config.json does not name"):
        read(directory, decoder)


@pytest.mark.parametrize(
    ("module", "said"),
    [("mlp.gate", "is a router"), ("mlp.experts.1.up_proj", "experts of a mixture"), ("mlp.experts", "experts")],
)
def test_routers_and_experts_are_refused_by_name(module: str, said: str, tmp_path: Path) -> None:
    mixture = from_config(CONFIGS["qwen2_moe"])
    directory = write_adapter(tmp_path / "a", mixture, endings=("q_proj",))
    more = {f"{PREFIX}model.layers.1.{module}.lora_{h}.weight": torch.ones(4, 4) for h in "AB"}
    change_tensors(directory, lambda t: t.update(more))
    with pytest.raises(WeightError, match=said):
        read(directory, mixture)


def test_what_is_no_adapter_directory_is_said(decoder: Decoder, directory: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    for path, said in (("nowhere", "does not exist"), ("file", "is a file"), ("empty", "has no adapter_config.json")):
        with pytest.raises(UsageError, match=said):
            read(tmp_path / path, decoder)
    (directory / FILE).rename(directory / "adapter_model.bin")
    with pytest.raises(UsageError, match="a pickle, which is never loaded"):
        read(directory, decoder)
    (directory / "adapter_model.bin").unlink()
    with pytest.raises(UsageError, match="has no adapter_model.safetensors"):
        read(directory, decoder)


def test_damaged_files_raise_nothing_but_our_errors(decoder: Decoder, directory: Path, tmp_path: Path) -> None:
    """Random changes of bytes and of configuration values: loaded, or one line."""
    recording, rng = record(decoder), random.Random(5)
    good = (directory / FILE).read_bytes()
    raw = json.loads((directory / "adapter_config.json").read_text())
    values: list[Any] = [None, True, 0, -1, 3, 1e308, "", "q_proj", [], ["q_proj"], [[1]], {}, {"q_proj": 2}, {"": 1}]
    keys = [*raw, "rank_pattern", "alpha_pattern", "layers_to_transform", "layers_pattern", "exclude_modules", "x"]
    broken = 0
    for turn in range(300):
        data, changed = bytearray(good), dict(raw)
        if turn % 2:
            for _ in range(rng.randint(1, 4)):
                data[rng.randrange(min(len(data), 4000))] = rng.randrange(256)
            data = data[: rng.choice([len(data), rng.randrange(len(data))])]
        else:
            for _ in range(rng.randint(1, 3)):
                changed[rng.choice(keys)] = rng.choice(values)
        (directory / FILE).write_bytes(data)
        (directory / "adapter_config.json").write_text(json.dumps(changed))
        try:
            load_adapter(directory, decoder.config, recording)
        except PlaitError as error:
            broken += 1
            assert "\n" not in str(error)
    assert broken > 200


# Merging


def test_merging_adds_the_product_in_fp32_and_rounds_once(tmp_path: Path) -> None:
    decoder = from_config(CONFIGS["llama"], seed=1, dtype=torch.bfloat16)
    before = {name: p.detach().clone() for name, p in decoder.named_parameters()}
    adapter = make_adapter(tmp_path, decoder, lora_alpha=3, endings=("q_proj", "up_proj"))
    assert merge_adapter(decoder, adapter) is adapter
    for name, parameter in decoder.named_parameters():
        target = adapter.targets.get(name)
        if target is None:
            assert torch.equal(parameter, before[name])
        else:
            product = torch.from_numpy(target.b.astype("f8") @ target.a.astype("f8")) * 0.75
            exact = before[name].double() + product
            assert not torch.equal(parameter, before[name])
            assert (parameter.double() - exact).abs().max() <= exact.abs().max() * 2**-8


def test_packed_weights_cannot_be_merged_into(decoder: Decoder, directory: Path) -> None:
    with pytest.raises(UsageError, match="cannot be merged into packed weights"):
        merge_adapter(build(decoder.config, device="meta"), directory)


def test_an_adapter_of_another_model_is_not_merged(decoder: Decoder, tmp_path: Path) -> None:
    adapter = make_adapter(tmp_path, decoder)
    other = from_config({**CONFIGS["llama"], "hidden_size": 32}, seed=1)
    with pytest.raises(WeightError, match="does not have in that shape"):
        merge_adapter(other, adapter)
    with pytest.raises(WeightError, match="shape"):
        merge_adapter(other, adapter.path)


def test_what_makes_keys_of_a_latent_is_refused_by_name(tmp_path: Path) -> None:
    """An adapter of "all-linear" modules has matrices for it."""
    latent = from_config(CONFIGS["deepseek_v3"])
    directory = write_adapter(tmp_path / "a", latent, endings=("o_proj",), target_modules="all-linear")
    read(directory, latent)
    more = {f"{PREFIX}model.layers.1.self_attn.kv_b_proj.lora_{h}.weight": torch.ones(4, 4) for h in "AB"}
    change_tensors(directory, lambda t: t.update(more))
    with pytest.raises(WeightError, match=r"layers\.1\.self_attn\.kv_b_proj makes keys and values of a latent"):
        read(directory, latent)
