"""The keys of the architecture deepseek2 (plait.weights.gguf_deepseek reads them), and its kv_b in two tensors.

llama.cpp works with the absorbed form: one key/value head as wide as the cached row, the heads' own widths under keys
of their own, and of every head what makes keys, transposed, apart from what makes values.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from plait.errors import ConfigError
from plait.model.config import LatentAttentionSpec, MixtureSpec, ModelConfig
from plait.weights.rows import Outgoing, OutTensor, Rows, turned

_GATING = {"softmax": 1, "sigmoid": 2}
_PLAIN = ("F32", "F16", "BF16")
# llama.cpp tells DeepSeek-V2-Lite by its layers.
_WITHOUT_QUERY_RANK = (26, 27)
_KV_B = re.compile(r"(blk\.(\d+)\.attn_)kv_b\.weight")


def _attention(config: ModelConfig) -> LatentAttentionSpec:
    found = config.layers[0].attention
    assert isinstance(found, LatentAttentionSpec)
    return found


def last_mixture(config: ModelConfig) -> MixtureSpec:
    """The experts of the last layer. ConfigError where it has none."""
    found = config.layers[-1].feed_forward
    if not isinstance(found, MixtureSpec):
        raise ConfigError(f"a {config.model_type} whose last layer has no experts cannot be written as GGUF")
    return found


def latent_sizes(config: ModelConfig) -> dict[str, Any]:
    """Of the model and of its attention."""
    a, dense = _attention(config), config.layers[0].feed_forward
    width = config.raw.get("intermediate_size") if isinstance(dense, MixtureSpec) else None
    keys = {
        "block_count": len(config.layers),
        "context_length": config.max_positions,
        "embedding_length": config.hidden_size,
        "feed_forward_length": dense.width if width is None else width,
        "vocab_size": config.vocab_size,
        "attention.head_count": a.num_heads,
        "attention.head_count_kv": 1,
        "attention.key_length": a.latent_width + a.rope_width,
        "attention.value_length": a.latent_width,
        "attention.key_length_mla": a.key_width,
        "attention.value_length_mla": a.value_width,
        "attention.kv_lora_rank": a.latent_width,
    }
    return keys if a.query_rank is None else {**keys, "attention.q_lora_rank": a.query_rank}


def yarn_multiplier(config: ModelConfig) -> dict[str, Any]:
    """A tenth of mscale_all_dim. ConfigError without one: llama.cpp then scales what it adds to the scores twice."""
    spec = config.rotary[0]
    if spec.rope_type != "yarn":
        return {}
    m_all = spec.scaling.get("mscale_all_dim")
    if not m_all:
        raise ConfigError(
            f"this {config.model_type} cannot be written as GGUF: llama.cpp computes rope_type='yarn' without"
            " mscale_all_dim in another way"
        )
    return {"rope.scaling.yarn_log_multiplier": 0.1 * float(m_all)}


def latent_notes(config: ModelConfig) -> list[str]:
    """What the file says, and llama.cpp takes otherwise."""
    first, last = config.layers[0].attention, config.layers[-1].feed_forward
    if not isinstance(first, LatentAttentionSpec):
        return []
    notes = []
    if first.query_rank is None and len(config.layers) not in _WITHOUT_QUERY_RANK:
        notes.append("there is no q_lora_rank: llama.cpp loads such a file only if it has 26 or 27 layers")
    if isinstance(last, MixtureSpec) and last.router.groups and last.router.group_score == "best":
        notes.append("llama.cpp scores a group of experts by its two best, this model by its best: texts may differ")
    return notes


def latent_experts(config: ModelConfig) -> dict[str, Any]:
    """The dense layers at the start, the experts and the router."""
    mixture = last_mixture(config)
    router = mixture.router
    keys = {
        "leading_dense_block_count": sum(not isinstance(x.feed_forward, MixtureSpec) for x in config.layers),
        "expert_count": router.num_experts,
        "expert_used_count": router.top_k,
        "expert_feed_forward_length": mixture.width,
        "expert_shared_count": mixture.shared.width // mixture.width if mixture.shared else 0,
        "expert_weights_scale": float(router.scale),
        "expert_weights_norm": router.renormalise != "never",
        "expert_gating_func": _GATING.get(router.scores, 0),
    }
    groups = {"expert_group_count": router.groups, "expert_group_used_count": router.top_groups}
    return keys | (groups if router.groups else {})


class SplitOutgoing:
    """An `Outgoing` whose tensors attn_kv_b [H (nope + v), r] are two: attn_k_b [H, r, nope], attn_v_b [H, v, r]."""

    def __init__(self, outgoing: Outgoing, config: ModelConfig) -> None:
        self._outgoing = outgoing
        self._halves: dict[str, tuple[OutTensor, LatentAttentionSpec, bool]] = {}
        self._read: dict[str, Rows] = {}  # the kv_b whose other half is still to come
        self.tensors = [half for tensor in outgoing for half in self._cut(tensor, config)]

    def __iter__(self) -> Iterator[OutTensor]:
        return iter(self.tensors)

    def _cut(self, tensor: OutTensor, config: ModelConfig) -> Iterator[OutTensor]:
        found = _KV_B.fullmatch(tensor.name)
        if found is None:
            yield tensor
            return
        a = config.layers[int(found[2])].attention
        assert isinstance(a, LatentAttentionSpec)
        # Blocks run along rows, which the keys' half has as columns.
        storage = tensor.storage if tensor.storage in _PLAIN else "F32"
        for name, shape, kind in (
            (f"{found[1]}k_b.weight", (a.num_heads, a.latent_width, a.nope_width), storage),
            (f"{found[1]}v_b.weight", (a.num_heads, a.value_width, a.latent_width), tensor.storage),
        ):
            self._halves[name] = (tensor, a, name.endswith("k_b.weight"))
            yield replace(tensor, name=name, shape=shape, storage=kind)

    def read(self, tensor: OutTensor) -> Rows:
        """As `Outgoing.read`."""
        if tensor.name not in self._halves:
            return self._outgoing.read(tensor)
        whole, a, keys = self._halves[tensor.name]
        rows = self._read.pop(whole.name, None)
        if rows is None:
            rows = self._read[whole.name] = self._outgoing.read(whole)
        data = rows.data.reshape(a.num_heads, a.nope_width + a.value_width, -1)
        data = data[:, : a.nope_width] if keys else data[:, a.nope_width :]
        half = Rows((*data.shape[:2], a.latent_width), rows.storage, data, rows.offset)
        return turned(half) if keys else half
