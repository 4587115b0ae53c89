"""What `plait inspect --plan` and `--trace` show: the recorded forward, as a plan or with a text run through it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from plait.errors import RequestError, UsageError

# Attention weights of a trace are materialised: heads * tokens^2 numbers a layer.
MAX_TRACE_TOKENS = 1024
NUMBER_BYTES = {"auto": 2, "bf16": 2, "fp16": 2, "fp32": 4}


def plan(
    model: str | Path | None,
    dtype: str = "auto",
    batch: int | None = None,
    length: int | None = None,
    training: bool = False,
    strict: bool = False,
) -> dict[str, Any]:
    """The operations of one step, from the configuration alone.

    batch, length: as a table of every shape that a forward over `batch` sequences of `length` tokens goes through
    (together, or neither).
    """
    from plait.model.decoder import build
    from plait.model.record import record
    from plait.ops.report import Sizes, plan_rows, totals
    from plait.weights.checkpoint import read_config

    if (batch is None) != (length is None):
        raise UsageError("--batch and --length belong together: give both or neither")
    sizes = None if batch is None or length is None else Sizes.of(batch, length, training)
    if training and sizes is None:
        raise UsageError("--training needs --batch and --length")
    config = read_config(model, strict)
    if length is not None and length > config.max_positions:
        raise UsageError(f"--length {length} is beyond the model's {config.max_positions} positions")
    recording = record(build(config, device="meta"))
    width = NUMBER_BYTES[dtype]
    return {
        "model_type": config.model_type,
        "bytes_per_number": width,
        "batch": batch,
        "length": length,
        "totals": totals(recording, width, sizes),
        "operations": plan_rows(recording, width, sizes),
    }


def trace_text(decoder: Any, tokenizer: Any, text: str) -> dict[str, Any]:
    """A text through the interpreter: tokens, what every operation gave, and the five likeliest next tokens."""
    import torch

    from plait.memory.none import NoMemory
    from plait.model.record import record
    from plait.ops.trace import trace

    ids = tokenizer.encode(text)
    if not 1 <= len(ids) <= MAX_TRACE_TOKENS:
        raise RequestError(f"the text has {len(ids)} tokens; a trace takes 1 to {MAX_TRACE_TOKENS}", field="text")
    tensor = torch.tensor(ids, device=decoder.device)
    found = trace(record(decoder), dict(decoder.named_parameters()), tensor, NoMemory().begin(tensor, None))
    best = found["logits"].log_softmax(-1).topk(5)
    return {
        "tokens": [{"id": i, "text": tokenizer.token_text(i)} for i in ids],
        "operations": found["operations"],
        "next": [
            {"id": i, "text": tokenizer.token_text(i), "logprob": p}
            for p, i in zip(best.values.tolist(), best.indices.tolist(), strict=True)
        ],
    }
