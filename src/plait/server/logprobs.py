"""Log-probabilities in the two shapes of OpenAI's API. The numbers are of the raw distribution."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from plait.engine.token_output import TokenLogprobs
from plait.text.detokenizer import IncrementalDetokenizer

if TYPE_CHECKING:
    from plait.text.tokenizer import Tokenizer


def chat_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprobs], top: int) -> list[dict[str, Any]]:
    """choices[].logprobs.content: an entry per token with the `top` best, best first."""
    return [
        {
            **_chat_token(tokenizer, entry.token_id, entry.logprob),
            "top_logprobs": [_chat_token(tokenizer, token, logprob) for token, logprob in entry.top[:top]],
        }
        for entry in entries
    ]


def _chat_token(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    data = tokenizer.token_bytes(token)
    return {"token": data.decode("utf-8", "replace"), "logprob": finite(logprob), "bytes": list(data)}


def prompt_logprobs(
    tokenizer: Tokenizer, entries: Sequence[TokenLogprobs | None], top: int
) -> list[dict[str, Any] | None]:
    """vLLM's extra: per prompt token id -> logprob, rank and text; None for the first."""
    result: list[dict[str, Any] | None] = []
    for entry in entries:
        if entry is None:
            result.append(None)
            continue
        ranked = [(entry.token_id, entry.logprob, entry.rank)]
        ranked += [(t, lp, rank) for rank, (t, lp) in enumerate(entry.top[:top], start=1) if t != entry.token_id]
        result.append(
            {
                str(token): {"logprob": finite(lp), "rank": rank, "decoded_token": tokenizer.token_text(token)}
                for token, lp, rank in ranked
            }
        )
    return result


def finite(logprob: float) -> float:
    """JSON has no infinity: a token that cannot occur gets the lowest number that OpenAI's API uses."""
    return logprob if logprob >= -9999.0 else -9999.0


class CompletionLogprobs:
    """choices[].logprobs of /v1/completions for one choice, token by token.

    tokens: each token's part of the text, so that they join to the text; "" for a token that the text leaves
    out, "bytes:\\xf0\\x9f" for one that is only a part of a character. text_offset: characters before it.
    top_logprobs: the `top` best and the token itself.
    """

    def __init__(
        self, tokenizer: Tokenizer, top: int, context_ids: Sequence[int], skip_special_tokens: bool, offset: int = 0
    ) -> None:
        self._tokenizer = tokenizer
        self._top = top
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._pieces = IncrementalDetokenizer(tokenizer, context_ids, skip_special_tokens)
        self._offset = offset

    def add(
        self,
        ids: Sequence[int],
        entries: Sequence[TokenLogprobs | None],
        num_hidden: int = 0,
        hides_last: bool = False,
    ) -> dict[str, Any]:
        """The four lists for these tokens. num_hidden: so many at the start, and with hides_last the last one (it ended
        the output), are no part of the text."""
        tokens, offsets, values, tops = [], [], [], []
        for i, (token, entry) in enumerate(zip(ids, entries, strict=True)):
            hidden = i < num_hidden or (hides_last and i == len(ids) - 1)
            piece = "" if hidden else self._pieces.push([token])
            text = "" if hidden else self._name(token, piece)
            tokens.append(text)
            offsets.append(self._offset)
            values.append(None if entry is None else finite(entry.logprob))
            tops.append(None if entry is None else self._alternatives(entry, text))
            self._offset += len(piece)
        return {"tokens": tokens, "text_offset": offsets, "token_logprobs": values, "top_logprobs": tops}

    def _name(self, token: int, piece: str) -> str:
        if token in self._skipped:
            return ""
        data = self._tokenizer.token_bytes(token)
        if piece and piece.encode() in (data, data.lstrip(b" ")):
            return piece
        return piece if not data else _text(data)

    def _alternatives(self, entry: TokenLogprobs, chosen: str) -> dict[str, float]:
        result: dict[str, float] = {}
        for token, logprob in entry.top[: self._top]:
            text = chosen if token == entry.token_id else _text(self._tokenizer.token_bytes(token))
            result.setdefault(text, finite(logprob))  # two tokens with one text: the likelier one counts
        result.setdefault(chosen, finite(entry.logprob))
        return result


def _text(data: bytes) -> str:
    """The text of a token, or "bytes:..." where its bytes are not whole characters."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def join(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Logprobs objects one after the other as one."""
    return {
        key: [item for part in parts for item in part[key]]
        for key in ("tokens", "text_offset", "token_logprobs", "top_logprobs")
    }
