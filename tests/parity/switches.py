"""Which switches a configuration has on, read from the configuration itself and not from the case's name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from plait.model.config import AttentionSpec, LatentAttentionSpec, MixtureSpec, ModelConfig
from plait.model.families import parse_config
from tests.parity.cases import Case

Vector = dict[str, bool]


def switches(c: ModelConfig) -> Vector:
    """Every switch by name; the vectors of two models that compute differently differ somewhere."""
    first = c.layers[0]
    a, f = first.attention, first.feed_forward
    g = a if isinstance(a, AttentionSpec) else None
    latent = a if isinstance(a, LatentAttentionSpec) else None
    windows = [layer.attention.window for layer in c.layers]
    tables = {table.rope_type: table for table in c.rotary}
    yarn = tables["yarn"].scaling if "yarn" in tables else {}
    mixtures = [layer.feed_forward for layer in c.layers if isinstance(layer.feed_forward, MixtureSpec)]
    m = mixtures[0] if mixtures else None
    return {
        "head tied to the embedding": c.tie_embeddings,
        "embedding multiplied": c.embedding_scale != 1.0,
        "learned positions": c.position_rows > 0,
        "logits multiplied": c.logit_scale != 1.0,
        "head with a bias": c.head_bias,
        "logits soft-capped": c.logit_soft_cap > 0,
        "grouped queries": g is not None and 1 < g.num_kv_heads < g.num_heads,
        "a single kv head": g is not None and g.num_kv_heads == 1,
        "head_dim apart from hidden / heads": a.key_width * a.num_heads != c.hidden_size,
        "softmax scale apart from head_dim^-1/2": abs(a.scale - a.key_width**-0.5) > 1e-9,
        "q bias": g is not None and g.q_bias,
        "k bias": g is not None and g.k_bias,
        "v bias": g is not None and g.v_bias,
        "o bias": (g is not None and g.o_bias) or (latent is not None and latent.bias),
        "norm per q and k head": g is not None and g.head_norm is not None and g.head_norm_over != "projection",
        "norm over all q and k heads": g is not None and g.head_norm is not None and g.head_norm_over == "projection",
        "weights of its own for each head's norm": g is not None and g.head_norm_over == "own_head",
        "q and k normed after rotary": g is not None and g.head_norm_after_rotary,
        "q, k and v clipped": g is not None and g.clip > 0,
        "attention soft-capped": g is not None and g.soft_cap > 0,
        "attention sinks": g is not None and g.sinks,
        "latent attention": latent is not None,
        "latent: queries through a low rank": latent is not None and latent.query_rank is not None,
        "latent: biases": latent is not None and latent.bias,
        "latent: mscale in the softmax scale": latent is not None and bool(yarn.get("mscale_all_dim")),
        "latent: values of another width than keys": latent is not None and latent.value_width != latent.key_width,
        "window on every layer": all(windows),
        "window on some layers": any(windows) and not all(windows),
        "several rotary tables": len(c.rotary) > 1,
        "some layers do not rotate": len({layer.attention.rotary is None for layer in c.layers}) > 1,
        "adjacent features pair up": a.rotary is not None and a.rotary.pairing == "adjacent",
        "part of the head rotates": a.rotary is not None and a.rotary.width < a.key_width,
        "rope linear": "linear" in tables,
        "rope llama3": "llama3" in tables,
        "rope yarn": "yarn" in tables,
        "rope longrope": "longrope" in tables,
        "rope alpha": "ntk_alpha" in tables,
        "yarn: mscale": bool(yarn.get("mscale")),
        "yarn: attention_factor": "attention_factor" in yarn,
        "yarn: truncate false": yarn.get("truncate") is False,
        "layer norm": c.final_norm.kind == "layer",
        "norm weight stored as w of 1 + w": c.final_norm.unit_offset,
        "norms after the branches": first.post_attention_norm is not None,
        "eps large enough to matter": c.final_norm.eps >= 0.01,
        "parallel residual": first.parallel,
        "one norm for both branches": first.shared_norm,
        "branches multiplied": first.branch_scale != 1.0,
        "no norm before the branches": first.pre_attention_norm is None,
        "norm without parameters": not c.final_norm.weight,
        "layer norm without a bias": c.final_norm.kind == "layer" and not c.final_norm.bias,
        "gated feed-forward": f.gated,
        "feed-forward biases": f.up_bias and f.down_bias,
        "mixture of experts": m is not None,
        "dense layers among mixtures": 0 < len(mixtures) < len(c.layers),
        "a single expert per token": m is not None and m.router.top_k == 1,
        "router: sigmoid of the logits": m is not None and m.router.scores == "sigmoid",
        "router: softmax over the chosen": m is not None and m.router.scores == "topk_softmax",
        "router: sparse mixer": m is not None and m.router.scores == "sparse_mixer",
        "router: bias": m is not None and m.router_bias,
        "router: least sum": m is not None and m.router.least_sum > 0.1,
        "router: selection bias": m is not None and m.selection_bias,
        "router: groups": m is not None and m.router.groups > 0,
        "router: groups by their best": m is not None and m.router.groups > 0 and m.router.group_score == "best",
        "router: weights scaled": m is not None and m.router.scale != 1.0,
        "router: renormalised": m is not None and m.router.renormalises,
        "shared expert": m is not None and m.shared is not None,
        "shared expert behind a gate": m is not None and m.shared_gate,
        "activation silu": f.activation == "silu",
        "activation gelu (exact)": f.activation == "gelu",
        "activation gelu (tanh)": f.activation == "gelu_tanh",
        "activation relu": f.activation == "relu",
        "activation relu squared": f.activation == "relu_squared",
        "activation clamped SwiGLU": f.activation == "clamped_swiglu",
        "activation xIELU": f.activation == "xielu",
    }


def vectors(cases: Iterable[Case]) -> dict[str, list[Vector]]:
    """family -> the vectors of its cases."""
    found: dict[str, list[Vector]] = {}
    for case in cases:
        found.setdefault(case.family, []).append(switches(parse_config(case.raw)))
    return found


def distinct(found: dict[str, list[Vector]]) -> int:
    """Different vectors over all families; the family itself does not count."""
    return len({tuple(v.values()) for family in found.values() for v in family})


def table(found: dict[str, list[Vector]]) -> list[Sequence[str]]:
    """Rows of families x switches: in how many of a family's cases a switch is on ("-": in none)."""
    names = next(iter(found.values()))[0].keys()
    rows: list[Sequence[str]] = [("switch", *(f"{family} ({len(v)})" for family, v in found.items()))]
    for name in names:
        on = [sum(v[name] for v in family) for family in found.values()]
        rows.append((name, *(str(n) if n else "-" for n in on)))
    return rows
