"""Parity cases of plait_gpt, whose oracle is plain torch (plait_gpt_oracle.py): no other program has a class for it."""

from __future__ import annotations

from tests.parity.case import Case, family

_plait_gpt = family(
    "plait_gpt", vocab_size=97, d_model=72, n_layers=3, n_heads=6, n_ctx=128, d_ff=101, n_experts=5, d_expert=37
)

PLAIT_GPT: tuple[Case, ...] = (
    _plait_gpt("dense, head apart", rope_base=1000.0, tie_embeddings=False),
    _plait_gpt("dense, four heads", n_heads=4),
    _plait_gpt("one expert of five", use_moe=True),
    _plait_gpt("two of five and a shared one, head apart", use_moe=True, top_k=2, n_shared=1, tie_embeddings=False),
    _plait_gpt("one of four by a selection bias, two shared", use_moe=True, n_experts=4, n_shared=2,
               selection_bias=True, rope_base=300.0),
)  # fmt: skip
