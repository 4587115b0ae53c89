"""The module with which DeepSeek-V3 and its kin predict one token further: a decoder layer over what the decoder knows.

DeepSeek-AI 2024 (DeepSeek-V3 Technical Report), section 2.2:

    h'_i = layer(W [RMSNorm(Emb(t_i+1)) ; RMSNorm(h_i)]),  logits of t_i+2 = head(RMSNorm(h'_i))

h_i is what the decoder's head reads, after the final norm; embedding and head are the decoder's. The report names h
first; in the published weights the first half of W's columns (`eh_proj`) is the embedding's, and so it is here.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from plait.errors import UsageError
from plait.memory.base import Memory
from plait.memory.none import NoMemory
from plait.model.config import LayerSpec, ModelConfig
from plait.model.decoder import Embedding, Head, head_logits, step_angles
from plait.model.layers import Layer, Linear, Norm
from plait.model.rope import rotary_table
from plait.ops import functional as ops
from plait.ops.spec import LayerCache
from plait.ops.step import StepInputs


class SharedHead(nn.Module):
    """The norm before the head, and the head [V, D]."""

    def __init__(self, norm: Norm, head: Head) -> None:
        super().__init__()
        self.norm = norm
        self.head = head


class Drafter(nn.Module):
    """Predicts the token after the next one. Modules are named as in DeepSeek's files, the layer's under `layer`.

    config: of the decoder; layer: the switches of the drafter's own layer. embed_tokens, head: modules that may be the
    decoder's. Make one with `plait.weights.drafter.load_drafter`. load_report: what loading did.
    """

    def __init__(self, config: ModelConfig, layer: LayerSpec, embed_tokens: Embedding, head: Head) -> None:
        super().__init__()
        d = config.hidden_size
        self.config = replace(config, layers=(layer,))
        self.load_report: Any = None
        self.embed_tokens = embed_tokens
        self.enorm, self.hnorm = Norm(config.final_norm, d), Norm(config.final_norm, d)
        self.eh_proj = Linear(2 * d, d, bias=False)
        self.layer = Layer(layer, d, config.hidden_dropout)
        self.shared_head = SharedHead(Norm(config.final_norm, d), head)
        self.rotary_tables = [rotary_table(spec) for spec in config.rotary]

    def caches(self) -> list[LayerCache]:
        """What its one layer keeps per token: what a memory of its own is made of."""
        return self.config.caches()

    def forward(
        self, hidden: Tensor, next_ids: Tensor, inputs: StepInputs | None = None, memory: Memory | None = None
    ) -> Tensor:
        """fp32 logits [..., V]: after tokens t_0 .. t_i+1, of the token t_i+2.

        hidden [..., D]: what the decoder's forward gave for t_i; next_ids [...]: t_i+1, int64. Positions are those of
        t_i. inputs, memory: as the decoder's forward takes them; a memory is the drafter's own, made of `caches()`.
        Raises UsageError where the two shapes do not belong together.
        """
        return self.logits(self.states(hidden, next_ids, inputs, memory))

    def states(
        self, hidden: Tensor, next_ids: Tensor, inputs: StepInputs | None = None, memory: Memory | None = None
    ) -> Tensor:
        """Hidden states [..., D] after the drafter's own norm, for arguments as `forward` has them: what the head reads
        and another step of drafting may start from."""
        c = self.config
        if tuple(hidden.shape) != (*next_ids.shape, c.hidden_size):
            raise UsageError(
                f"hidden states of shape {tuple(hidden.shape)} and ids of shape {tuple(next_ids.shape)}:"
                f" a drafter needs [..., {c.hidden_size}] and [...]"
            )
        if memory is None:
            memory = NoMemory(c.attention_dropout if self.training else 0.0)
        step = memory.begin(next_ids, inputs)
        table = self.embed_tokens.weight
        embedded = ops.embed(next_ids, table, scale=c.embedding_scale, round_scale=c.round_embedding_scale)
        x = self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(hidden)), -1))
        x = self.layer(x, 0, [step_angles(step, rotary) for rotary in self.rotary_tables], step)
        states: Tensor = self.shared_head.norm(x)
        return states

    def logits(self, states: Tensor) -> Tensor:
        """fp32 logits [..., V] of what `states` gave."""
        logits: Tensor = head_logits(self.config, self.shared_head.head, states)
        return logits
