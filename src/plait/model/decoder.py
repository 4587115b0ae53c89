"""The one decoder: every family, in training and in serving, with any memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from plait.memory.base import Memory, MemoryStep
from plait.memory.none import NoMemory
from plait.model.config import ModelConfig
from plait.model.families import parse_config
from plait.model.layers import XIELU_NUMBERS, Layer, Norm, Routing
from plait.model.rope import rotary_table
from plait.ops import functional as ops
from plait.ops.spec import RotaryTable
from plait.ops.step import StepInputs


@dataclass
class Trace:
    """What a caller asks a forward to keep; nothing is kept without it.

    layers: indices whose output hidden states are wanted. hidden_states: layer -> [..., D], filled by the forward.
    router: whether routing is wanted. routing: layer -> `Routing`, filled by the forward, of the layers that are
    mixtures; gradients reach the routers through it. last_hidden: the hidden states before the final norm.
    """

    layers: tuple[int, ...] = ()
    router: bool = False
    hidden_states: dict[int, Any] = field(default_factory=dict)
    routing: dict[int, Routing] = field(default_factory=dict)
    last_hidden: Any = None


class Embedding(nn.Module):
    """The table [V, D] of token vectors."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size))


class Head(Embedding):
    """The table [V, D] that hidden states are compared with, and where the switch says so a bias [V]."""

    def __init__(self, vocab_size: int, hidden_size: int, bias: bool) -> None:
        super().__init__(vocab_size, hidden_size)
        self.bias = nn.Parameter(torch.empty(vocab_size)) if bias else None

    def columns(self, start: int, stop: int) -> HeadColumns:
        """The head of tokens start .. stop - 1, as views."""
        return HeadColumns(self.weight[start:stop], None if self.bias is None else self.bias[start:stop])


class HeadColumns(NamedTuple):
    """Some rows of the head's table and of its bias: the logits of a part of the vocabulary."""

    weight: Tensor
    bias: Tensor | None


class Backbone(nn.Module):
    """Embedding, layers and final norm, named as in Llama checkpoints; learned positions are `embed_positions`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        d = config.hidden_size
        self.embed_tokens = Embedding(config.vocab_size, d)
        if config.position_rows:
            self.embed_positions = Embedding(config.position_rows, d)
        self.layers = nn.ModuleList(Layer(spec, d, config.hidden_dropout) for spec in config.layers)
        self.norm = Norm(config.final_norm, d)


class Decoder(nn.Module):
    """A decoder-only language model, built from its switches.

    Make one with `plait.load` or `plait.from_config`. source: the checkpoint that it was loaded from, for its
    tokenizer when it is saved again; load_report: what loading did.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.source: Path | None = None
        self.load_report: Any = None
        self.model = Backbone(config)
        self.lm_head = Head(config.vocab_size, config.hidden_size, config.head_bias)
        self.rotary_tables = [rotary_table(spec) for spec in config.rotary]
        self.tie()

    def tie(self) -> None:
        """Make head and embedding one parameter again where the model ties them."""
        if self.config.tie_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    @property
    def dtype(self) -> torch.dtype:
        return self.model.embed_tokens.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.model.embed_tokens.weight.device

    def forward(
        self,
        ids: Tensor,
        inputs: StepInputs | None = None,
        memory: Memory | None = None,
        trace: Trace | None = None,
    ) -> Tensor:
        """Hidden states after the final norm, [..., D], for token ids of any leading shape.

        ids: int64 [B, T], or flat [N] in serving. inputs: positions, masks and bounds, derived where absent. memory:
        None (causal attention over the given tokens), `DenseMemory` or `PagedMemory`. trace: filled when given.
        Tokens that the inputs' token_mask calls padding go through no routed expert.
        """
        c = self.config
        if memory is None:
            memory = NoMemory(c.attention_dropout if self.training else 0.0)
        step = memory.begin(ids, inputs)
        table = self.model.embed_tokens.weight
        x = ops.embed(ids, table, scale=c.embedding_scale, round_scale=c.round_embedding_scale)
        if c.position_rows:
            x = ops.add(x, ops.embed(step.positions, self.model.embed_positions.weight, offset=c.position_offset))
        if self.training and c.embedding_dropout:
            x = ops.dropout(x, p=c.embedding_dropout)
        angles = [step_angles(step, table) for table in self.rotary_tables]
        given = None if inputs is None or inputs.token_mask is None else inputs.token_mask
        token_mask = None if given is None else torch.as_tensor(given, device=ids.device).view(ids.shape)
        routing = trace.routing if trace is not None and trace.router else None
        for index, layer in enumerate(self.model.layers):
            x = layer(x, index, angles, step, token_mask, routing)
            if trace is not None and index in trace.layers:
                trace.hidden_states[index] = x
        if trace is not None:
            trace.last_hidden = x
        return self.model.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 logits [..., V] of hidden states [..., D]."""
        return head_logits(self.config, self.lm_head, hidden)

    def param_counts(self) -> dict[str, int]:
        """Parameters by part: total, active, embedding, head, attention, ffn_total, norms."""
        return self.config.param_counts()

    def save_pretrained(self, directory: str | Path) -> None:
        """Write a Hugging Face directory (config, safetensors, tokenizer where known) that transformers loads."""
        # Upward on purpose: a method that users of this ecosystem expect here, carried out by the weights package.
        from plait.weights.export import save_pretrained

        save_pretrained(self, Path(directory))


def head_logits(config: ModelConfig, head: Head | HeadColumns, hidden: Any) -> Any:
    """fp32 logits [..., V] of hidden states [..., D], with the model's factor and soft cap."""
    # The factor meets the hidden states and not the logits: fewer numbers, and the product stays last.
    x: Any = hidden if config.logit_scale == 1.0 else ops.scale(hidden, factor=config.logit_scale)
    x = ops.logits(x, head.weight, head.bias)
    return ops.soft_cap(x, limit=config.logit_soft_cap) if config.logit_soft_cap else x


def step_angles(step: MemoryStep, table: RotaryTable) -> Any:
    """cos and sin for the step's tokens, [..., 2, d/2]."""
    common = {"inv_freq": table.inv_freq, "magnitude": table.magnitude}
    if not table.long_inv_freq:
        return ops.positions(step.positions, **common)
    long: dict[str, Any] = {"long_inv_freq": table.long_inv_freq, "original": table.original}
    if table.long_magnitude not in (None, table.magnitude):
        long["long_magnitude"] = table.long_magnitude
    return ops.positions_by_reach(step.positions, step.reach, **common, **long)


# What writes to the residual stream, by the end of its name.
RESIDUAL_PROJECTIONS = (".o_proj", ".down_proj")


@contextmanager
def evaluating(decoder: nn.Module) -> Iterator[None]:
    """Without dropout inside; afterwards exactly the parts that were training before train again."""
    training = [module for module in decoder.modules() if module.training] if decoder.training else []
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


def from_config(
    raw: Mapping[str, Any],
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    scaled_residuals: bool | None = None,
) -> Decoder:
    """A new, randomly initialised decoder from a config.json dictionary.

    Matrices and embeddings are normal with the config's initializer_range (default 0.02), norms the identity, biases 0.
    scaled_residuals: the deviation of the matrices that write to the residual stream (o_proj; down_proj, of routed and
    shared experts too) is divided by sqrt(2 * layers), as GPT-2 does (Radford et al. 2019, section 2.3); None: as the
    family has it.
    """
    config = parse_config(raw)
    decoder = build(config, dtype)
    generator = torch.Generator().manual_seed(seed)
    deviation = float(raw.get("initializer_range") or 0.02)
    scaled = config.scaled_residuals if scaled_residuals is None else scaled_residuals
    residual = deviation / (2 * len(config.layers)) ** 0.5 if scaled else deviation
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if parameter.ndim > 1:
                writes = name.removesuffix(".weight").endswith(RESIDUAL_PROJECTIONS)
                parameter.normal_(0.0, residual if writes else deviation, generator=generator)
        for module in decoder.modules():
            if isinstance(module, Norm) and module.weight is not None:
                module.weight.fill_(0.0 if module.spec.unit_offset else 1.0)
        for name, parameter in decoder.named_parameters():
            if name.endswith(("bias", "sinks")):
                parameter.zero_()
            if ".act_fn." in name:
                parameter.fill_(XIELU_NUMBERS[name.rpartition(".")[2]])
    return decoder


def build(config: ModelConfig, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu") -> Decoder:
    """A decoder with uninitialised parameters (on "meta": with shapes only)."""
    with torch.device("meta"):
        decoder = Decoder(config)
    decoder = decoder.to(dtype)
    if torch.device(device).type != "meta":
        decoder = decoder.to_empty(device=device)
    decoder.tie()
    return decoder.eval()
