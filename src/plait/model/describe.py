"""A configuration's switches in words: what the model is, and how its layers differ. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from plait.model.config import (
    AttentionSpec,
    FeedForwardSpec,
    LatentAttentionSpec,
    LayerSpec,
    MixtureSpec,
    ModelConfig,
    NormSpec,
    RotarySpec,
)


def describe(config: ModelConfig) -> list[tuple[str, str]]:
    """(what, value) of the whole model, then one entry per kind of layer."""
    lines = [
        ("family", config.model_type),
        ("vocabulary", f"{config.vocab_size:,}, head {'tied to' if config.tie_embeddings else 'apart from'} embedding"),
        ("hidden size", f"{config.hidden_size:,}"),
        ("layers", str(len(config.layers))),
        ("positions", f"{config.max_positions:,}"),
        ("final norm", norm(config.final_norm)),
    ]
    lines += [(f"rotary table {i}", rotary(spec)) for i, spec in enumerate(config.rotary)]
    if config.embedding_scale != 1.0:
        lines.append(("embedding scale", f"{config.embedding_scale:g}"))
    if config.position_rows:
        lines.append(("learned positions", f"{config.position_rows:,} rows, the first for -{config.position_offset}"))
    if config.logit_scale != 1.0:
        lines.append(("logit scale", f"{config.logit_scale:g}"))
    if config.head_bias:
        lines.append(("head", "with a bias"))
    if config.logit_soft_cap:
        lines.append(("logit soft-cap", f"{config.logit_soft_cap:g}"))
    for indices, spec in kinds_of_layers(config.layers):
        where = ranges(indices)
        lines += [(f"layers {where}", text) for text in layer(spec)]
    return lines


def kinds_of_layers(layers: Sequence[LayerSpec]) -> list[tuple[list[int], LayerSpec]]:
    """Equal layers together, in order of first appearance."""
    kinds: dict[LayerSpec, list[int]] = {}
    for index, spec in enumerate(layers):
        kinds.setdefault(spec, []).append(index)
    return [(indices, spec) for spec, indices in kinds.items()]


def ranges(indices: Sequence[int]) -> str:
    """'0-4, 6-10' for sorted whole numbers."""
    parts: list[list[int]] = []
    for index in indices:
        if parts and parts[-1][1] == index - 1:
            parts[-1][1] = index
        else:
            parts.append([index, index])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def layer(spec: LayerSpec) -> list[str]:
    """Attention, feed-forward and norms of one layer, a line each."""
    norms = [
        f"{name} {norm(one)}"
        for name, one in (
            ("before attention", spec.pre_attention_norm),
            ("after attention", spec.post_attention_norm),
            ("before feed-forward", spec.pre_feed_forward_norm),
            ("after feed-forward", spec.post_feed_forward_norm),
        )
        if one is not None
    ]
    branches = "branches side by side; " if spec.parallel else ""
    branches += "one norm for both; " if spec.shared_norm else ""
    branches += f"branches x {spec.branch_scale:g}; " if spec.branch_scale != 1.0 else ""
    return [attention(spec.attention), feed_forward(spec.feed_forward), branches + "norms " + ", ".join(norms)]


def attention(spec: AttentionSpec | LatentAttentionSpec) -> str:
    """Heads, widths, window, rotary and what else is switched on."""
    if isinstance(spec, LatentAttentionSpec):
        return latent_attention(spec)
    width = str(spec.key_width) if spec.key_width == spec.value_width else f"{spec.key_width}/{spec.value_width}"
    parts = [
        f"attention: {spec.num_heads} heads over {spec.num_kv_heads} key/value heads of width {width}",
        f"window {spec.window:,}" if spec.window else "full",
        f"scale {spec.scale:.6g}",
    ]
    if spec.rotary is None:
        parts.append("no rotary")
    else:
        share = "" if spec.rotary.width == spec.key_width else f", {spec.rotary.width} of {spec.key_width} features"
        parts.append(f"rotary table {spec.rotary.table} ({spec.rotary.pairing}{share})")
    biased = [name for name in "qkvo" if getattr(spec, f"{name}_bias")]
    if biased:
        parts.append("biases on " + ", ".join(biased))
    if spec.head_norm is not None:
        over = {"head": "per head", "own_head": "per head, weights of its own", "projection": "over all heads"}
        after = ", after rotary" if spec.head_norm_after_rotary else ""
        parts.append(f"q/k norm {over[spec.head_norm_over]}{after} ({norm(spec.head_norm)})")
    if spec.clip:
        parts.append(f"q, k, v clipped to {spec.clip:g}")
    if spec.soft_cap:
        parts.append(f"soft-cap {spec.soft_cap:g}")
    if spec.sinks:
        parts.append("sinks")
    return "; ".join(parts)


def latent_attention(spec: LatentAttentionSpec) -> str:
    """The latent, the widths of what is made of it, and how queries come."""
    parts = [
        f"latent attention: {spec.num_heads} heads over a latent of {spec.latent_width} and a rotary key of"
        f" {spec.rope_width}, keys {spec.nope_width} + {spec.rope_width}, values {spec.value_width}",
        "queries straight" if spec.query_rank is None else f"queries through a rank of {spec.query_rank:,}",
        f"scale {spec.scale:.6g}",
        f"rotary table {spec.rotary.table} ({spec.rotary.pairing})",
        f"inner norms {norm(spec.inner_norm)}",
    ]
    if spec.bias:
        parts.append("biases on " + ("q_a, kv_a, o" if spec.query_rank is not None else "kv_a, o"))
    if spec.form != "auto":
        parts.append(f"always {spec.form}")
    return "; ".join(parts)


def feed_forward(spec: FeedForwardSpec | MixtureSpec) -> str:
    biases = "; biases" if spec.up_bias or spec.down_bias else ""
    numbers = ", ".join(f"{name} {number:g}" for name, number in spec.numbers.items())
    act = f"{spec.activation} ({numbers})" if numbers else spec.activation
    kind = f"{'gated' if spec.gated else 'plain'} {act}, width {spec.width:,}{biases}"
    return f"feed-forward: {kind}" if isinstance(spec, FeedForwardSpec) else f"experts: {kind}; {mixture(spec)}"


def mixture(spec: MixtureSpec) -> str:
    """How many experts, how they are chosen and weighted, and what is shared."""
    r = spec.router
    scores = {"topk_softmax": "softmax over the chosen", "sparse_mixer": f"sparse mixer, jitter {r.jitter:g}"}
    parts = [f"{r.top_k} of {r.num_experts}", scores.get(r.scores, r.scores)]
    if r.groups:
        by = "best" if r.group_score == "best" else "two best"
        parts.append(f"from the {r.top_groups} best of {r.groups} groups by their {by}")
    if spec.router_bias:
        parts.append("router bias")
    if spec.selection_bias:
        parts.append("selection bias")
    if r.renormalises:
        parts.append("renormalised" + (f" over at least {r.least_sum:g}" if r.least_sum else ""))
    if r.scale != 1.0:
        parts.append(f"times {r.scale:g}")
    if spec.shared is not None:
        gate = " behind a sigmoid gate" if spec.shared_gate else ""
        parts.append(f"a shared one of width {spec.shared.width:,}{gate}")
    return "; ".join(parts)


def norm(spec: NormSpec) -> str:
    """'RMS, eps 1e-06', with what is unusual about it."""
    name = "RMS" if spec.kind == "rms" else "layer norm"
    extra = ", weight 1 + w" if spec.unit_offset else ""
    extra += "" if spec.weight else ", no weight"
    extra += ", bias" if spec.bias else ""
    return f"{name}, eps {spec.eps:g}{extra}"


def rotary(spec: RotarySpec) -> str:
    scaling = ", ".join(f"{key} {value}" for key, value in sorted(spec.scaling.items()) if key != "rope_type")
    kind = "divisors from the file" if spec.divisors is not None else spec.rope_type
    return f"{kind}, theta {spec.theta:,.0f}, {spec.width} features" + (f" ({scaling})" if scaling else "")
