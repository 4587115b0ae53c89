"""Recipes: bases, words, types, and what is said of a key that is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from plait.errors import ConfigError, PlaitError, UsageError
from plait.training.config import RunConfig, check_same, config_of, load_config
from plait.training.recipe import apply_overrides, dump_yaml, parse_yaml, read_recipe
from plait.training.tree import to_plain

RECIPE = """
model: {model_type: llama, vocab_size: auto, hidden_size: 24, rms_norm_eps: 1e-6}
data:
  sources: [{path: a.txt}]
train: {tokens: 1e6}
"""


def write(folder: Path, **texts: str) -> Path:
    for name, text in texts.items():
        (folder / f"{name}.yaml").write_text(text)
    return folder / f"{list(texts)[-1]}.yaml"


def test_a_recipe_becomes_a_frozen_tree_with_defaults(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, small=RECIPE))
    assert (config.train.tokens, type(config.train.tokens)) == (1_000_000, int)
    assert isinstance(config.model, dict) and config.model["rms_norm_eps"] == 1e-6  # a number, not text
    assert config.data.sources[0].path == str(Path.cwd() / "a.txt") and config.data.context == 256
    assert (config.schedule.warmup, config.schedule.floor, config.train.clip) == (0.02, 0.1, 1.0)
    assert config.out == "runs/small"
    with pytest.raises(AttributeError):
        config.seed = 2  # type: ignore[misc]


def test_what_was_resolved_reads_back_the_same(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, small=RECIPE), ["sample.prompts=['a: b', \"no\"]", "optimizer.lr=3e-4"])
    again = config_of(parse_yaml(dump_yaml(to_plain(config)), "config.yaml"))
    assert again == config and again.sample.prompts == ("a: b", "no") and again.optimizer.lr == 3e-4


def test_recipes_extend_one_another_over_several_levels(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "ground.yaml").write_text(RECIPE)
    leaf = write(
        tmp_path,
        middle="base: deep/ground.yaml\ntrain: {clip: 0.5, tokens: 7}\nseed: 1",
        leaf="base: middle.yaml\nseed: 2\ndata: {sources: [{path: b.txt}, {path: c.txt}]}",
    )
    config = load_config(leaf)
    assert (config.train.clip, config.train.tokens, config.seed) == (0.5, 7, 2)
    assert [Path(s.path).name for s in config.data.sources] == ["b.txt", "c.txt"]  # a list is replaced whole


def test_a_model_of_another_type_replaces_the_base_s(tmp_path: Path) -> None:
    write(tmp_path, ground=RECIPE)
    leaf = write(tmp_path, leaf="base: ground.yaml\nmodel: {model_type: qwen3, hidden_size: 8}")
    assert load_config(leaf).model == {"model_type": "qwen3", "hidden_size": 8}
    leaf = write(tmp_path, leaf="base: ground.yaml\nmodel: {hidden_size: 8}")
    assert load_config(leaf).model["model_type"] == "llama"  # type: ignore[index]


def test_a_circle_of_bases_is_named(tmp_path: Path) -> None:
    first = write(tmp_path, one="base: two.yaml", two="base: three.yaml", three="base: one.yaml")
    with pytest.raises(ConfigError, match=r"circle: three.yaml -> one.yaml -> two.yaml -> three.yaml"):
        read_recipe(first)
    with pytest.raises(UsageError, match=r"gone.yaml: no such recipe \(the `base` of .*alone.yaml\)"):
        read_recipe(write(tmp_path, alone="base: gone.yaml"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train.tokns=5"], r"train.tokns: there is no such key; did you mean train.tokens\?"),
        (["optimzer.lr=5"], r"optimzer: there is no such key; did you mean optimizer\?"),
        (["lr=5"], r"lr: there is no such key here; did you mean optimizer.lr\?"),
        (["data.splits.on_leek=drop"], r"data.splits.on_leek: .*did you mean data.splits.on_leak\?"),
        (["data.sources=[{pth: x}]"], r"data.sources\[0\].pth: .*did you mean data.sources\[0\].path\?"),
        (["train.tokens=many"], r"train.tokens='many' must be a whole number"),
        (["train.tokens=1.5"], r"train.tokens=1.5 must be a whole number"),
        (["train.tokens=true"], r"train.tokens=True must be a whole number"),
        (["train.clip=-1"], r"train.clip=-1.0 must be at least 0"),
        (["train.clip=.nan"], r"train.clip=nan must be at least 0"),
        (["experts.balance_scope=step2"], r"experts.balance_scope='step2' must be one of micro, step"),
        (["data=5"], r"data=5 must be a mapping"),
        (["sample.prompts=hello"], r"sample.prompts='hello' must be a list, each text"),
        (["schedule.kind=linear"], r"schedule.kind='linear': choose cosine"),
        (["train.tokens"], r"'train.tokens': write key=value"),
        (["seed=[1"], r"the value of seed, line 1"),
        (["seed={a: 1, a: 2}"], r"'a' stands twice"),
    ],
)
def test_what_is_wrong_is_named_by_its_path(tmp_path: Path, words: list[str], said: str) -> None:
    with pytest.raises(PlaitError, match=said):
        load_config(write(tmp_path, small=RECIPE), words)


def test_a_key_that_must_be_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^model is missing"):
        load_config(write(tmp_path, small="data: {sources: []}"))
    with pytest.raises(ConfigError, match=r"bad.yaml, line 2"):
        load_config(write(tmp_path, bad="a: 1\n b: 2"))


def test_words_are_yaml_of_version_1_2() -> None:
    words = ["a=3e-4", "b=no", "c=[1, 2.5]", "d=1_000", "e.f=null", "g=''", "h=2024-01-01", "i=true"]
    wanted: dict[str, Any] = {"a": 3e-4, "b": "no", "c": [1, 2.5], "d": 1000, "e": {"f": None}, "g": ""}
    assert apply_overrides({}, words) == wanted | {"h": "2024-01-01", "i": True}
    assert apply_overrides({"e": {"k": 1}}, ["e.f=2", "e.f=3"]) == {"e": {"k": 1, "f": 3}}


def test_a_run_goes_on_only_as_it_was_begun(tmp_path: Path) -> None:
    path = write(tmp_path, small=RECIPE)
    stored = to_plain(load_config(path))
    check_same(stored, load_config(path, ["log.every_steps=5", "checkpoints.keep_last=1"]), tmp_path)
    for word, said in (
        ("train.tokens=5", "train.tokens=1000000, not 5"),
        ("model.hidden_size=8", "model.hidden_size=24"),
    ):
        with pytest.raises(UsageError, match=said):
            check_same(stored, load_config(path, [word]), tmp_path)


def test_every_field_of_the_tree_has_a_type_that_is_checked() -> None:
    """Also the data's: a field of a kind that the tree does not know would take anything."""
    config = config_of({"model": "somewhere", "data": {"sources": [{"path": "x"}]}})
    assert config == config_of(to_plain(config)) and isinstance(config, RunConfig)
