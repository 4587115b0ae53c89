"""Which type each tensor of a GGUF file gets."""

from __future__ import annotations

from collections import Counter

import gguf
import pytest

from plait.errors import UsageError
from plait.weights.encode import ENCODERS
from plait.weights.gguf_writer.recipes import RECIPES, Choice, Model, check_type, choose_type, file_type

MODEL = Model("llama", 32)


def chosen(recipe: str, name: str, columns: int = 4096, model: Model = MODEL) -> str:
    return choose_type(recipe, name, (64, columns), "BF16", model).storage


@pytest.mark.parametrize(
    ("wanted", "columns", "storage"),
    [
        ("Q4_K", 576, "Q5_0"),
        ("Q5_K", 896, "Q5_1"),
        ("Q6_K", 576, "Q8_0"),
        ("Q4_K", 100, "F16"),
        ("Q6_K", 100, "F16"),
        ("Q8_0", 100, "F16"),
        ("Q4_0", 48, "F16"),
        ("Q4_K", 512, "Q4_K"),
        ("Q8_0", 96, "Q8_0"),
        ("F16", 100, "F16"),
    ],
)
def test_rows_that_the_blocks_do_not_divide_fall_back(wanted: str, columns: int, storage: str) -> None:
    choice = choose_type(wanted, "blk.0.ffn_up.weight", (8, columns), "BF16", MODEL)
    assert choice == Choice(storage, wanted) and choice.fell_back == (storage != wanted)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("blk.0.attn_norm.weight", (64,)),
        ("blk.0.attn_q.bias", (64,)),
        ("blk.0.ffn_gate_inp.weight", (8, 256)),
        ("blk.0.ffn_gate_inp_shexp.weight", (256,)),
        ("rope_freqs.weight", (32,)),
        ("blk.0.attn_q_norm.weight", (4, 256)),
    ],
)
def test_vectors_norms_and_routers_stay_float32(name: str, shape: tuple[int, ...]) -> None:
    for kind in ("Q4_K_M", "Q8_0", "F16", "BF16", "AUTO"):
        assert choose_type(kind, name, shape, "BF16", MODEL) == Choice("F32", "F32")


def test_one_type_is_that_of_all_matrices() -> None:
    names = ("output.weight", "token_embd.weight", "blk.0.attn_v.weight", "blk.31.ffn_down.weight")
    assert {chosen("Q4_K", name) for name in names} == {"Q4_K"}


def test_q4_k_m_gives_more_bits_where_they_tell() -> None:
    """llama.cpp's own table for 32 layers: half of attn_v and ffn_down in Q6_K."""
    down = [chosen("Q4_K_M", f"blk.{i}.ffn_down.weight") for i in range(32)]
    more = [i for i, kind in enumerate(down) if kind == "Q6_K"]
    assert more == [0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31]
    assert down == [chosen("Q4_K_M", f"blk.{i}.attn_v.weight") for i in range(32)]
    assert Counter(down) == {"Q6_K": 16, "Q4_K": 16}
    assert chosen("Q4_K_M", "output.weight") == "Q6_K" and chosen("Q4_K_M", "token_embd.weight") == "Q4_K"
    assert chosen("Q4_K_M", "token_embd.weight", model=Model("llama", 32, tied=True)) == "Q6_K"
    assert chosen("Q4_K_M", "blk.0.attn_q.weight") == chosen("Q4_K_M", "blk.0.ffn_up.weight") == "Q4_K"


def test_q4_k_s_gives_them_to_the_first_layers() -> None:
    assert [chosen("Q4_K_S", f"blk.{i}.attn_v.weight") for i in (0, 3, 4)] == ["Q5_K", "Q5_K", "Q4_K"]
    assert [chosen("Q4_K_S", f"blk.{i}.ffn_down.weight") for i in (0, 3, 4)] == ["Q5_K", "Q5_K", "Q4_K"]


def test_eight_experts_and_eighty_layers_are_special() -> None:
    eight = Model("llama", 32, experts=8)
    assert [chosen("Q4_K_M", f"blk.9.attn_{p}.weight", model=eight) for p in ("k", "v", "output", "q")] == [
        "Q8_0",
        "Q8_0",
        "Q5_K",
        "Q4_K",
    ]
    assert chosen("Q4_K_M", "blk.0.ffn_down_exps.weight", model=eight) == "Q6_K"
    assert chosen("Q4_K_M", "blk.11.attn_v.weight", model=Model("llama", 80)) == "Q5_K"


def test_auto_keeps_what_gguf_has() -> None:
    stored = {"BF16": "BF16", "F16": "F16", "Q2_K": "Q2_K", "F64": "F32", "I32": "F32"}
    assert {s: choose_type("AUTO", "blk.0.ffn_up.weight", (8, 256), s, MODEL).storage for s in stored} == stored


def test_file_types_are_llama_cpps() -> None:
    for name in RECIPES:
        assert file_type(name, {}) == gguf.LlamaFileType[f"MOSTLY_{name}"]
    for name in ENCODERS:
        their = {"F32": "ALL_F32", "Q4_K": "MOSTLY_Q4_K_S", "Q5_K": "MOSTLY_Q5_K_S"}.get(name, f"MOSTLY_{name}")
        assert file_type(name, {}) == gguf.LlamaFileType[their]
    assert file_type("AUTO", {"Q8_0": 5, "F32": 1}) == gguf.LlamaFileType.MOSTLY_Q8_0


def test_an_unknown_type_is_told_with_the_known_ones() -> None:
    assert check_type("q4_k_m") == "Q4_K_M"
    with pytest.raises(UsageError, match="q9_9 is unknown; choose auto, hf, f32"):
        check_type("q9_9")
