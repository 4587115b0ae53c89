"""Verifies a checkpoint: loads it with plait and with transformers, and compares the two."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from plait.engine.llm import LLM
from plait.engine.params import SamplingParams
from plait.errors import PlaitError, TokenizerError, WeightError
from plait.kernels.native import usable_cpus
from plait.model.decoder import Decoder
from plait.text.tokenizer import load_tokenizer
from plait.verify.compare import compare
from plait.verify.prompts import built_in_prompts, given_prompts, unreached_windows
from plait.verify.reference import load_reference
from plait.verify.report import Verification
from plait.weights.checkpoint import open_checkpoint
from plait.weights.load import load


def verify(
    model: str | Path | None = None,
    *,
    reference: str | Path | None = None,
    texts: Sequence[str] = (),
    length: int | None = None,
    new_tokens: int = 32,
    dtype: str = "auto",
    device: str = "cpu",
    threads: int | None = None,
    strict: bool = False,
    advance: Callable[[], None] = lambda: None,
    **engine: Any,
) -> Verification:
    """Compare plait's reading of `model` with transformers' reading of it, or of `reference` where that is given.

    texts: prompts; without any, the built-in ones, one of which has `length` tokens. new_tokens: greedy ones of each.
    dtype: of both sides, "auto" is fp32. engine: further options of the engine that writes plait's greedy text.
    Raises PlaitError for a checkpoint that either side cannot load, and for prompts that do not fit.
    """
    if device.startswith("cpu"):
        torch.set_num_threads(threads or usable_cpus())
    checkpoint = open_checkpoint(model, strict)
    decoder = load(checkpoint, "fp32" if dtype == "auto" else dtype, device, strict)
    other = checkpoint if reference is None else open_checkpoint(reference)
    tokenizer, notes = _tokenizer(checkpoint.path)
    config = decoder.config
    prompts = given_prompts(texts, tokenizer, config) if texts else built_in_prompts(tokenizer, config, length)
    llm = LLM(decoder, device=device, threads=threads, **engine) if new_tokens else None
    max_positions = llm.bundle.max_model_len if llm else config.max_positions
    unreached = unreached_windows(config, prompts)
    if unreached:
        remedy = "give a longer one" if texts else f"--length {unreached[-1] + 64} makes one"
        notes.append(f"no prompt reaches past the window of {unreached[-1]} tokens: {remedy}")
    oracle = load_reference(other, decoder if other is checkpoint else None, decoder.dtype, device)
    if oracle.vocab_size != config.vocab_size:
        raise WeightError(f"the reference has {oracle.vocab_size} tokens, the model has {config.vocab_size}")
    results = compare(
        prompts,
        lambda ids: _logits(decoder, ids),
        lambda requests: _greedy(llm, requests),
        oracle,
        new_tokens,
        max_positions,
        decoder.dtype,
        advance,
    )
    name = str(decoder.dtype).removeprefix("torch.")
    return Verification(str(checkpoint.path), oracle.description, name, results, [*oracle.notes, *notes])


def _tokenizer(path: Path) -> tuple[Any, list[str]]:
    """The checkpoint's tokenizer, or None and a note why prompts are random ids."""
    try:
        return load_tokenizer(path), []
    except (TokenizerError, FileNotFoundError) as error:
        return None, [f"prompts are random token ids, for lack of a tokenizer: {error}"]


def _logits(decoder: Decoder, ids: list[int]) -> Tensor:
    with torch.inference_mode():
        return decoder.logits(decoder(torch.tensor(ids, device=decoder.device)))


def _greedy(llm: LLM | None, requests: list[tuple[list[int], int]]) -> list[list[int]]:
    if llm is None:
        raise PlaitError("greedy text was asked for without an engine")
    params = [SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True) for _, count in requests]
    outputs = llm.generate([{"prompt_token_ids": ids} for ids, _ in requests], params)
    return [list(output.outputs[0].token_ids) for output in outputs]
