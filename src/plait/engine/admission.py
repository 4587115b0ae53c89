"""What a request must satisfy before the engine takes it: ids in the vocabulary, numbers within the limits, room."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from plait.engine.params import BAN, SamplingParams
from plait.engine.request import Request
from plait.errors import CapacityError, RequestError
from plait.memory.blocks import BlockManager


@dataclass(frozen=True)
class Limits:
    """The bounds of one engine.

    embedding_rows: prompt ids are below this. sampled_ids: ids that can be sampled are below this.
    max_model_len: tokens of prompt and output together. pool_tokens: tokens of the longest sequence that the
    key/value pool holds. max_logprobs: alternatives per token. end_ids: the model's own end tokens.
    """

    embedding_rows: int
    sampled_ids: int
    max_model_len: int
    pool_tokens: int
    max_logprobs: int
    end_ids: frozenset[int] = frozenset()


def longest_sequence(manager: BlockManager, limit: int) -> int:
    """Most tokens, up to `limit`, of a sequence that has the pool to itself."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if manager.fits(middle) else (low, middle - 1)
    return low


def check_request(request: Request, limits: Limits) -> None:
    """Raise RequestError naming the field, or CapacityError with the arithmetic."""
    if not isinstance(request.params, SamplingParams):
        raise RequestError(f"params must be SamplingParams, got {type(request.params).__name__}", field="params")
    _check_prompt(request, limits)
    _check_ids(request.params, limits)
    _check_something_is_left(request, limits)


def _check_prompt(request: Request, limits: Limits) -> None:
    ids = request.prompt_token_ids
    if len(ids) == 0:
        raise RequestError("the prompt is empty: give at least one token", field="prompt")
    if len(ids) <= limits.max_model_len:  # longer ones are refused by total_tokens without being read
        try:
            array = np.asarray(ids)
        except ValueError:  # a ragged list
            array = np.empty(0, object)
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise RequestError("the prompt's token ids must be a flat list of integers", field="prompt")
        wrong = array[(array < 0) | (array >= limits.embedding_rows)]
        if len(wrong):
            raise RequestError(
                f"prompt token id {wrong[0]} is outside the vocabulary: ids are 0 to {limits.embedding_rows - 1}",
                field="prompt",
            )


def _check_ids(params: SamplingParams, limits: Limits) -> None:
    id_lists = {
        "stop_token_ids": params.stop_token_ids,
        "allowed_token_ids": params.allowed_token_ids or (),
        "logit_bias": params.logit_bias,
        "bad_words": [i for word in params.bad_words_token_ids or () for i in word],
        "dry_sequence_breakers": [i for part in params.dry_breaker_token_ids or () for i in part],
    }
    for name, ids in id_lists.items():
        if ids and max(ids) >= limits.sampled_ids:
            raise RequestError(
                f"{name} holds id {max(ids)}, outside the vocabulary: ids are 0 to {limits.sampled_ids - 1}", field=name
            )
    for name in ("logprobs", "prompt_logprobs"):
        count = getattr(params, name)
        if count is not None and count > limits.max_logprobs:
            raise RequestError(f"{name} must be between 0 and {limits.max_logprobs}, got {count}", field=name)
    if params.bad_words and params.bad_words_token_ids is None:
        raise RequestError("bad_words needs a tokenizer, or bad_words_token_ids", field="bad_words")
    if params.uses_dry and params.dry_sequence_breakers and params.dry_breaker_token_ids is None:
        raise RequestError(
            "dry_sequence_breakers needs a tokenizer: give dry_breaker_token_ids, or an empty list",
            field="dry_sequence_breakers",
        )


def _check_something_is_left(request: Request, limits: Limits) -> None:
    """RequestError where bans and masks that hold from the first token on leave no token to sample."""
    params = request.params
    if params.max_tokens == 0:  # nothing is sampled
        return
    bans = {
        "logit_bias": {i for i, bias in params.logit_bias.items() if bias <= BAN},
        "bad_words": {word[0] for word in params.bad_words_token_ids or () if len(word) == 1},
        "min_tokens": set[int](),
    }
    if params.min_tokens > 0:
        bans["min_tokens"] = {*limits.end_ids, *request.eos_token_ids, *params.stop_token_ids}
    allowed = None if params.allowed_token_ids is None else set(params.allowed_token_ids)
    banned: set[int] = set()
    for name, ids in bans.items():
        banned |= {i for i in ids if i < limits.sampled_ids}
        left = limits.sampled_ids - len(banned) if allowed is None else len(allowed - banned)
        if left == 0:
            masks = " (it masks the end and stop tokens at first)" if name == "min_tokens" else ""
            raise RequestError(f"{name}{masks} leaves no token that may be sampled: relax it", field=name)


def total_tokens(num_prompt: int, max_tokens: int | None, limits: Limits) -> int:
    """Tokens of prompt and output at which the request ends; CapacityError with the numbers if there is no room.

    max_tokens None takes what is left of the context (and of the pool). A prompt that fills the context
    exactly can be scored (max_tokens 0) but leaves no room for an output token.
    """
    context = limits.max_model_len
    wanted = 1 if max_tokens is None else max_tokens
    if num_prompt + wanted > context:
        raise CapacityError(
            f"the context holds {context} tokens, but the prompt has {num_prompt} and "
            f"{'at least 1' if max_tokens is None else max_tokens} more "
            f"{'is' if max_tokens in (None, 1) else 'are'} requested ({num_prompt + wanted} together): "
            "shorten the prompt or lower max_tokens",
            field="prompt" if num_prompt >= context else "max_tokens",
        )
    # The last output token is never computed, so that it needs no room in the pool.
    stored = num_prompt + max(wanted - 1, 0)
    if stored > limits.pool_tokens:
        raise CapacityError(
            f"the key/value pool holds {limits.pool_tokens} tokens of one sequence, but the prompt has {num_prompt} "
            f"and {wanted} more are requested: enlarge kv_memory, shorten the prompt or lower max_tokens",
            field="prompt" if num_prompt > limits.pool_tokens else "max_tokens",
        )
    if max_tokens is None:
        return min(context, limits.pool_tokens + 1)
    return num_prompt + max_tokens
