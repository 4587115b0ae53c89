"""The study family: its exact sizes, its keys, how a new one begins, and where it can go. Its parity with a plain torch
model stands among the parity tests."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import plait
from plait.errors import ConfigError, UsageError
from plait.model.decoder import Decoder, build
from plait.model.families import parse_config
from plait.weights.convert import convert
from tests.configs import CONFIGS
from tests.parity.case import Case
from tests.parity.plait_gpt_cases import PLAIT_GPT
from tests.parity.reference import prove

pytestmark = pytest.mark.usefixtures("one_thread")

REFERENCE: dict[str, Any] = {
    "model_type": "plait_gpt",
    "vocab_size": 24_000,
    "d_model": 512,
    "n_ctx": 256,
    "n_layers": 8,
    "n_heads": 8,
    "d_ff": 2048,
}
# The five arms of the mixture study: what differs, total, active, ffn_total (the specification's figures).
ARMS: dict[str, tuple[dict[str, Any], int, int, int]] = {
    "dense": ({}, 37_462_528, 37_462_528, 16_777_216),
    "top-1": ({"use_moe": True}, 37_478_912, 24_896_000, 16_793_600),
    "top-2": ({"use_moe": True, "top_k": 2}, 37_478_912, 29_090_304, 16_793_600),
    "shared": ({"use_moe": True, "n_experts": 3, "n_shared": 1}, 37_474_816, 29_086_208, 16_789_504),
    "active-matched": ({"use_moe": True, "d_expert": 1024, "top_k": 2}, 54_256_128, 37_478_912, 33_570_816),
}
SMALL: dict[str, Any] = {
    "model_type": "plait_gpt",
    "vocab_size": 61,
    "d_model": 32,
    "n_ctx": 64,
    "n_layers": 2,
    "n_heads": 4,
    "d_ff": 48,
    "d_expert": 24,
}


def small(**changes: Any) -> Decoder:
    return plait.from_config({"initializer_range": 0.3, **SMALL, **changes}, seed=3)


def some_ids(rows: int = 2, length: int = 11) -> torch.Tensor:
    return torch.randint(0, 61, (rows, length), generator=torch.Generator().manual_seed(rows * 100 + length))


# Sizes


@pytest.mark.parametrize("arm", ARMS)
def test_the_arms_have_exactly_the_stated_sizes(arm: str) -> None:
    changes, total, active, ffn_total = ARMS[arm]
    config = parse_config({**REFERENCE, **changes})
    counts = config.param_counts()
    assert (counts["total"], counts["active"], counts["ffn_total"]) == (total, active, ffn_total)
    assert sum(p.numel() for p in build(config, device="meta").parameters()) == total


# Keys


def test_the_defaults_are_the_specifications() -> None:
    config = parse_config({**REFERENCE, "use_moe": True})
    (rotary,) = config.rotary
    mixture = config.layers[0].feed_forward
    assert (rotary.theta, rotary.width, config.max_positions) == (10_000.0, 64, 256)
    assert config.tie_embeddings and config.final_norm.eps == 1e-6
    assert (mixture.router.num_experts, mixture.router.top_k, mixture.width, mixture.shared) == (4, 1, 512, None)
    assert (config.attention_dropout, config.hidden_dropout, config.embedding_dropout) == (0.0, 0.0, 0.0)
    assert (config.balance_loss_coef, config.z_loss_coef) == (0.01, 0.001)


CHANGES: dict[str, tuple[Any, Any]] = {  # key -> a value, and where it arrives
    "vocab_size": (70, lambda c: c.vocab_size),
    "d_model": (64, lambda c: c.hidden_size),
    "n_ctx": (33, lambda c: c.max_positions),
    "n_layers": (5, lambda c: len(c.layers)),
    "n_heads": (2, lambda c: c.layers[0].attention.num_heads),
    "dropout": (0.25, lambda c: (c.attention_dropout + c.hidden_dropout) / 2),
    "rope_base": (500.0, lambda c: c.rotary[0].theta),
    "tie_embeddings": (False, lambda c: c.tie_embeddings),
    "n_experts": (6, lambda c: c.layers[0].feed_forward.router.num_experts),
    "top_k": (3, lambda c: c.layers[0].feed_forward.router.top_k),
    "n_shared": (2, lambda c: c.layers[0].feed_forward.shared.width / 24),
    "d_expert": (40, lambda c: c.layers[0].feed_forward.width),
    "selection_bias": (True, lambda c: c.layers[0].feed_forward.selection_bias),
    "aux_loss_coef": (0.5, lambda c: c.balance_loss_coef),
    "z_loss_coef": (0.25, lambda c: c.z_loss_coef),
    "bos_token_id": (3, lambda c: c.bos_token_id),
    "eos_token_id": (1, lambda c: c.eos_token_ids[0]),
    "pad_token_id": (2, lambda c: c.pad_token_id),
}


@pytest.mark.parametrize("key", CHANGES)
def test_every_key_is_obeyed(key: str) -> None:
    value, arrives = CHANGES[key]
    assert arrives(parse_config({**SMALL, "use_moe": True, key: value})) == value


def test_a_recipe_may_give_both_kinds_of_feed_forward_and_switch() -> None:
    dense, mixture = (parse_config({**SMALL, "use_moe": on}).layers[0].feed_forward for on in (False, True))
    assert (dense.width, mixture.width) == (48, 24)
    assert not dense.gated and not mixture.gated and dense.activation == mixture.activation == "gelu"


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"n_expert": 4}, r"n_expert=4 is no key of plait_gpt; did you mean 'n_experts'\?"),
    ({"sliding_windows": 4}, r"sliding_windows=4 is no key of plait_gpt; it has aux_loss_coef, .* z_loss_coef"),
    ({"d_model": 30}, "d_model=30 must be an even multiple of n_heads=4"),
    ({"d_model": 36}, "d_model=36 must be an even multiple of n_heads=4"),
    ({"n_ctx": 0}, "n_ctx=0 must be at least 1"),
    ({"n_ctx": None}, "n_ctx=None .* must be a whole number"),
    ({"d_ff": None}, "d_ff=None must be at least 1"),
    ({"use_moe": True, "top_k": 5}, "top_k=5 is more than n_experts=4"),
    ({"use_moe": True, "n_experts": 0}, "n_experts=0 must be at least 1"),
    ({"use_moe": True, "n_shared": -1}, "n_shared=-1 must not be negative"),
    ({"dropout": 1.0}, r"dropout=1.0 must be a number of at least 0 below 1"),
    ({"aux_loss_coef": -1}, "aux_loss_coef=-1 must be a number of at least 0"),
    ({"rope_base": 0}, "rope_base=0 must be a positive number"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_cannot_be_is_refused_by_the_keys_own_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config({**SMALL, **changes})


# A new model


@pytest.mark.parametrize("use_moe", [False, True])
def test_a_new_model_begins_with_residual_projections_divided_by_the_root_of_their_number(use_moe: bool) -> None:
    """N(0, 0.02), and 0.02 / sqrt(2 * 3 layers) where a matrix writes to the residual stream."""
    raw = {**SMALL, "d_model": 256, "d_ff": 300, "d_expert": 300, "n_layers": 3, "use_moe": use_moe, "n_shared": 1}
    decoder = plait.from_config({**raw, "vocab_size": 500, "tie_embeddings": False})
    residual = 0
    for name, parameter in decoder.named_parameters():
        if "norm" in name:
            assert (parameter == 1).all()
            continue
        writes = name.endswith(("o_proj.weight", "down_proj.weight", "experts.down_proj"))
        residual += writes
        # A deviation estimated from n numbers is off by 1 / sqrt(2 n) of itself; five times that is never met.
        expected = 0.02 / math.sqrt(6) if writes else 0.02
        assert parameter.std().item() == pytest.approx(expected, rel=5 / math.sqrt(2 * parameter.numel())), name
        assert abs(parameter.mean().item()) < 5 * expected / math.sqrt(parameter.numel())
    assert residual == 3 * (3 if use_moe else 2)


def test_any_family_can_begin_so_and_none_other_does_by_itself() -> None:
    raw = {**CONFIGS["llama"], "num_hidden_layers": 8}
    plain, scaled = (plait.from_config(raw, seed=5, scaled_residuals=on) for on in (None, True))
    expected = torch.Generator().manual_seed(5)
    for (name, a), b in zip(plain.named_parameters(), scaled.parameters(), strict=True):
        if a.ndim == 1:
            continue
        draw = torch.empty(a.shape).normal_(0.0, 0.3, generator=expected)
        assert torch.equal(a, draw)
        writes = name.endswith(("o_proj.weight", "down_proj.weight"))
        assert torch.allclose(b, draw / 4 if writes else draw)  # sqrt(2 * 8) = 4


def test_dropout_falls_on_attention_and_residual_branches_in_training_only() -> None:
    decoder, ids = small(dropout=0.4), some_ids()
    with torch.no_grad():
        still = decoder(ids)
        assert torch.equal(still, decoder(ids))
        decoder.train()
        torch.manual_seed(1)
        first = decoder(ids)
        torch.manual_seed(1)
        assert torch.equal(first, decoder(ids))
        assert not torch.allclose(first, decoder(ids)) and not torch.allclose(first, still)
    assert decoder.config.attention_dropout == decoder.config.hidden_dropout == 0.4


# What a mixture is


def test_a_mixture_of_one_expert_is_the_dense_model() -> None:
    """Its only expert has probability 1, and its router a gradient of 0."""
    dense, one = small(d_ff=24), small(use_moe=True, n_experts=1)
    weights = dict(dense.named_parameters())
    with torch.no_grad():
        for name, parameter in one.named_parameters():
            theirs = name.replace("experts.gate_up_proj", "up_proj.weight")
            theirs = theirs.replace("experts.down_proj", "down_proj.weight")
            if not name.endswith("mlp.gate.weight"):
                parameter.copy_(weights[theirs].view_as(parameter))
    ids = some_ids()
    found = [decoder.logits(decoder(ids)) for decoder in (dense, one)]
    for logits in found:
        torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    assert torch.allclose(*found, atol=1e-6)
    for mine, theirs in zip(one.model.layers, dense.model.layers, strict=True):
        assert (mine.mlp.gate.weight.grad == 0).all()
        assert torch.allclose(mine.mlp.experts.gate_up_proj.grad[0], theirs.mlp.up_proj.weight.grad, atol=1e-6)
        assert torch.allclose(mine.mlp.experts.down_proj.grad[0], theirs.mlp.down_proj.weight.grad, atol=1e-6)


@pytest.mark.parametrize("top_k", [1, 2])
def test_the_loss_alone_gives_the_router_a_gradient(top_k: int) -> None:
    decoder, ids = small(use_moe=True, top_k=top_k), some_ids()
    logits = decoder.logits(decoder(ids))
    torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    for layer in decoder.model.layers:
        assert layer.mlp.gate.weight.grad.norm() > 1e-3


@pytest.mark.parametrize("case", PLAIT_GPT, ids=str)
def test_gradients_equal_those_of_the_oracle_in_float64(case: Case, tmp_path: Path) -> None:
    proved = prove(case, tmp_path)
    targets = proved.ids[:, 1:].flatten()
    exact = proved.model.double()
    for logits in (proved.decoder.logits(proved.decoder(proved.ids)), exact(proved.ids).logits):
        torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), targets).backward()
    expected = {name: p.grad for name, p in exact.named_parameters()}
    for name, parameter in proved.decoder.named_parameters():
        if parameter.requires_grad:
            error = (parameter.grad.double() - expected[name]).norm() / expected[name].norm()
            assert error < 2e-5, name


# Where it can go


def test_a_directory_comes_back_as_it_was_and_names_no_class(tmp_path: Path) -> None:
    decoder = small(use_moe=True, top_k=2, n_shared=1, selection_bias=True, tie_embeddings=False)
    decoder.save_pretrained(tmp_path / "model")
    written = json.loads((tmp_path / "model" / "config.json").read_text())
    assert "architectures" not in written and "tie_word_embeddings" not in written
    assert written["tie_embeddings"] is False
    again = plait.load(tmp_path / "model", "fp32")
    assert again.config == decoder.config
    for (name, a), b in zip(decoder.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b), name
    ids = some_ids()
    with torch.no_grad():
        assert torch.equal(decoder(ids), again(ids))


def test_export_says_that_no_other_program_has_its_class(tmp_path: Path) -> None:
    small(use_moe=True).save_pretrained(tmp_path / "model")
    with pytest.raises(ConfigError, match="plait_gpt is plait's own family and has no class elsewhere") as caught:
        convert(tmp_path / "model", tmp_path / "model.gguf")
    assert "\n" not in str(caught.value) and not (tmp_path / "model.gguf").exists()
    report = convert(tmp_path / "model", tmp_path / "copy")
    assert "plait_gpt has no class elsewhere: only plait loads this directory" in report.notes
    assert plait.load(tmp_path / "copy", "fp32").config.model_type == "plait_gpt"


def test_verify_says_that_there_is_nothing_to_compare_with(tmp_path: Path) -> None:
    from plait.verify.reference import load_reference
    from plait.weights.checkpoint import open_checkpoint

    small().save_pretrained(tmp_path / "model")
    with pytest.raises(UsageError, match="plait_gpt is plait's own family: transformers has no class"):
        load_reference(open_checkpoint(tmp_path / "model"), None, torch.float32, "cpu")


def test_the_engine_serves_it(tmp_path: Path) -> None:
    """Greedy tokens of the live decoder, paged in steps of 7 tokens, against one forward after the other."""
    decoder = small(use_moe=True, top_k=2, n_shared=1)
    prompt = some_ids(1, 13)[0].tolist()
    llm = plait.LLM(decoder, plan="reference", kv_memory="2MiB", max_num_seqs=2, max_batched_tokens=7, threads=1)
    params = plait.SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
    (output,) = llm.generate([{"prompt_token_ids": prompt}], params)
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(9):
            ids.append(int(decoder.logits(decoder(torch.tensor([ids])))[0, -1].argmax()))
    assert output.outputs[0].token_ids == ids[13:]
