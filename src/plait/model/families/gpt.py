"""GPT-2 and OPT (learned positions) and GPT-J (parallel branches, rotary): LayerNorm, a plain feed-forward, biases."""

from __future__ import annotations

from dataclasses import replace

from plait.errors import ConfigError
from plait.model.config import AttentionSpec, FeedForwardSpec, LayerSpec, ModelConfig, NormSpec, RotaryUse
from plait.model.families import register
from plait.model.families.llama import activation, exact_head_width, sizes, special_tokens
from plait.model.name_map import NameMap, joined_q_k_v, paired, q_k_v_rows
from plait.model.reader import ConfigReader

_OURS = "model.layers.{i}"
_BOTH = ("weight", "bias")
_J = "transformer.h.{i}"
GPT2_NAMES = NameMap(
    rules=(
        *paired("transformer.wte", "model.embed_tokens"),
        *paired("transformer.wpe", "model.embed_positions"),
        *paired("transformer.ln_f", "model.norm", _BOTH),
        *paired(f"{_J}.ln_1", f"{_OURS}.input_layernorm", _BOTH),
        *paired(f"{_J}.ln_2", f"{_OURS}.post_attention_layernorm", _BOTH),
        *joined_q_k_v(f"{_J}.attn.c_attn", f"{_OURS}.self_attn", q_k_v_rows),
        *paired(f"{_J}.attn.c_proj", f"{_OURS}.self_attn.o_proj", _BOTH),
        *paired(f"{_J}.mlp.c_fc", f"{_OURS}.mlp.up_proj", _BOTH),
        *paired(f"{_J}.mlp.c_proj", f"{_OURS}.mlp.down_proj", _BOTH),
    ),
    skip=(r"(.*\.)?attn\.(bias|masked_bias)",),
    prefixes=tuple((f"{name}.", f"transformer.{name}.") for name in ("wte", "wpe", "ln_f", "h")),
    transposed=(r"(transformer\.)?h\.\d+\.(attn|mlp)\.c_(attn|proj|fc)\.weight",),
)


@register("gpt2", GPT2_NAMES, architecture="GPT2LMHeadModel")
def gpt2(read: ConfigReader) -> ModelConfig:
    d, heads, num_layers = sizes(read, "n_embd", "n_head", "n_layer")
    width = exact_head_width(d, heads)
    # Of its classifier, and of how it rounds below fp32.
    for key in ("summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels"):
        read(key)
    read("summary_first_dropout")
    read("reorder_and_upcast_attn")
    scale = width**-0.5 if read.flag("scale_attn_weights") else 1.0
    by_layer = read.flag("scale_attn_by_inverse_layer_idx")
    norm = NormSpec("layer", read.number("layer_norm_epsilon"), bias=True)
    mlp = _inner(read, d)

    def layer(index: int) -> LayerSpec:
        own = scale / (index + 1) if by_layer else scale
        attention = AttentionSpec(heads, heads, width, width, own, True, True, True, True)
        return LayerSpec(attention, mlp, norm, norm)

    max_positions = read.integer("n_positions")
    return ModelConfig(
        model_type=read.model_type,
        vocab_size=read.integer("vocab_size"),
        hidden_size=d,
        layers=tuple(layer(i) for i in range(num_layers)),
        rotary=(),
        final_norm=norm,
        tie_embeddings=read.flag("tie_word_embeddings"),
        max_positions=max_positions,
        position_rows=max_positions,
        attention_dropout=read.dropout("attn_pdrop"),
        embedding_dropout=read.dropout("embd_pdrop"),
        hidden_dropout=read.dropout("resid_pdrop"),
        **special_tokens(read),
    )


def _inner(read: ConfigReader, hidden_size: int) -> FeedForwardSpec:
    """The plain feed-forward of GPT-2 and GPT-J, four times as wide as the model where nothing is said."""
    width = read.optional_integer("n_inner", 4 * hidden_size)
    assert width is not None
    return FeedForwardSpec(width, activation(read, "activation_function"), gated=False, up_bias=True, down_bias=True)


GPTJ_NAMES = NameMap(
    rules=(
        *paired("transformer.wte", "model.embed_tokens"),
        *paired("transformer.ln_f", "model.norm", _BOTH),
        *paired(f"{_J}.ln_1", f"{_OURS}.input_layernorm", _BOTH),
        *(rule for part in "qkv" for rule in paired(f"{_J}.attn.{part}_proj", f"{_OURS}.self_attn.{part}_proj")),
        *paired(f"{_J}.attn.out_proj", f"{_OURS}.self_attn.o_proj"),
        *paired(f"{_J}.mlp.fc_in", f"{_OURS}.mlp.up_proj", _BOTH),
        *paired(f"{_J}.mlp.fc_out", f"{_OURS}.mlp.down_proj", _BOTH),
    ),
    skip=(r"(.*\.)?attn\.(bias|masked_bias|embed_positions)",),
)


@register("gptj", GPTJ_NAMES, architecture="GPTJForCausalLM")
def gptj(read: ConfigReader) -> ModelConfig:
    d, heads, num_layers = sizes(read, "n_embd", "n_head", "n_layer")
    width = exact_head_width(d, heads)
    max_positions = read.integer("n_positions")
    rotating = read.integer("rotary_dim")
    if not 0 < rotating <= width or rotating % 2:
        raise ConfigError(f"rotary_dim={rotating} must be even and at most the head's width, {width}")
    norm = NormSpec("layer", read.number("layer_norm_epsilon"), bias=True)
    layer = LayerSpec(
        AttentionSpec(heads, heads, width, width, width**-0.5, rotary=RotaryUse(0, rotating, "adjacent")),
        _inner(read, d),
        norm,
        None,
        parallel=True,
        shared_norm=True,
    )
    return ModelConfig(
        model_type=read.model_type,
        vocab_size=read.integer("vocab_size"),
        hidden_size=d,
        layers=(layer,) * num_layers,
        # The width itself: a fraction of the head's width would not give back every whole number.
        rotary=(replace(read.rotary(width, {}, 10_000.0, max_positions, 1.0), width=rotating),),
        final_norm=norm,
        tie_embeddings=read.flag("tie_word_embeddings"),
        max_positions=max_positions,
        head_bias=True,
        attention_dropout=read.dropout("attn_pdrop"),
        embedding_dropout=read.dropout("embd_pdrop"),
        hidden_dropout=read.dropout("resid_pdrop"),
        **special_tokens(read),
    )


_D = "model.decoder"
OPT_NAMES = NameMap(
    rules=(
        *paired(f"{_D}.embed_tokens", "model.embed_tokens"),
        *paired(f"{_D}.embed_positions", "model.embed_positions"),
        *paired(f"{_D}.final_layer_norm", "model.norm", _BOTH),
        *(
            rule
            for part, ours in (("q_proj",) * 2, ("k_proj",) * 2, ("v_proj",) * 2, ("out_proj", "o_proj"))
            for rule in paired(f"{_D}.layers.{{i}}.self_attn.{part}", f"{_OURS}.self_attn.{ours}", _BOTH)
        ),
        *paired(f"{_D}.layers.{{i}}.self_attn_layer_norm", f"{_OURS}.input_layernorm", _BOTH),
        *paired(f"{_D}.layers.{{i}}.final_layer_norm", f"{_OURS}.post_attention_layernorm", _BOTH),
        *paired(f"{_D}.layers.{{i}}.fc1", f"{_OURS}.mlp.up_proj", _BOTH),
        *paired(f"{_D}.layers.{{i}}.fc2", f"{_OURS}.mlp.down_proj", _BOTH),
    ),
    prefixes=(("decoder.", "model.decoder."),),
)
# The first two rows of its table of positions belong to no position.
_OPT_OFFSET = 2


@register("opt", OPT_NAMES, architecture="OPTForCausalLM")
def opt(read: ConfigReader) -> ModelConfig:
    d, heads, num_layers = sizes(read)
    width = exact_head_width(d, heads)
    if read.optional_integer("word_embed_proj_dim", d) != d:
        raise ConfigError(
            f"word_embed_proj_dim={read.raw['word_embed_proj_dim']}: projected embeddings are not supported"
        )
    read("init_std")
    bias, affine = read.flag("enable_bias"), read.flag("layer_norm_elementwise_affine")
    norm = NormSpec("layer", 1e-5, weight=affine, bias=affine)
    layer = LayerSpec(
        AttentionSpec(heads, heads, width, width, width**-0.5, bias, bias, bias, bias),
        FeedForwardSpec(read.integer("ffn_dim"), activation(read, "activation_function"), False, bias, bias),
        norm,
        norm,
    )
    max_positions = read.integer("max_position_embeddings")
    dropout = read.dropout("dropout")
    return ModelConfig(
        model_type=read.model_type,
        vocab_size=read.integer("vocab_size"),
        hidden_size=d,
        layers=(layer,) * num_layers,
        rotary=(),
        final_norm=norm,
        tie_embeddings=read.flag("tie_word_embeddings"),
        max_positions=max_positions,
        position_rows=max_positions + _OPT_OFFSET,
        position_offset=_OPT_OFFSET,
        attention_dropout=read.dropout("attention_dropout"),
        hidden_dropout=dropout,
        **special_tokens(read),
    )
