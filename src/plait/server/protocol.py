"""The bodies of requests: every field that is read, and what becomes of OpenAI's other ones."""

from __future__ import annotations

from typing import Any, ClassVar, Self, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from plait.server.errors import ApiError, bad_request

# Read and dropped: OpenAI defines them, and no text depends on them.
IGNORED = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "prediction",
    }
)


class Body(BaseModel):
    """A body whose fields have exactly the declared types; null is the same as absent.

    harmless: fields of OpenAI's API that are not supported, with the values that ask for nothing.
    """

    model_config = ConfigDict(strict=True, extra="forbid", protected_namespaces=())
    harmless: ClassVar[dict[str, tuple[Any, ...]]] = {}

    @classmethod
    def parse(cls, data: dict[str, Any]) -> Self:
        """Raises ApiError 400 naming the field that is unknown, unsupported or of the wrong type."""
        known = {}
        for key, value in data.items():
            if value is None or key in IGNORED:
                if key not in cls.model_fields and key not in cls.harmless and key not in IGNORED:
                    raise _unknown(key)
            elif key in cls.harmless:
                if not any(value == allowed and type(value) is type(allowed) for allowed in cls.harmless[key]):
                    raise bad_request(f"{key} is not supported yet; leave it out", key, "unsupported_parameter")
            elif key in cls.model_fields:
                known[key] = value
            else:
                raise _unknown(key)
        try:
            return cls.model_validate(known)
        except ValidationError as error:
            raise _invalid(error) from None


def _unknown(key: str) -> ApiError:
    return bad_request(f"unknown field {key!r:.100}", key[:100], "unknown_parameter")


def _invalid(error: ValidationError) -> ApiError:
    first = error.errors(include_url=False, include_context=False)[0]
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"] if part != "str")
    path = path.removeprefix(".")[:100] or "body"
    given = repr(first.get("input"))[:80]
    if first["type"] == "missing":
        return bad_request(f"{path} is missing", path, "missing_required_parameter")
    message = first["msg"].replace("Input should be", "must be")
    return bad_request(f"{path} {message}, got {given}", path, "invalid_type")


class StreamOptions(BaseModel):
    """include_obfuscation: accepted, adds nothing here."""

    model_config = ConfigDict(strict=True, extra="forbid")
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class SamplingBody(Body):
    """What completions and chat have in common: names and meanings of plait.SamplingParams, which judges the values."""

    model: str | None = None
    n: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: Any = None
    logit_bias: Any = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # Beyond OpenAI's API, under vLLM's names
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Any = None
    bad_words: Any = None
    allowed_token_ids: Any = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    cache_salt: str | None = None
    # llama.cpp's
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: int | None = None
    dry_penalty_last_n: int | None = None
    dry_sequence_breakers: Any = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None

    @classmethod
    def parse(cls, data: dict[str, Any]) -> Self:
        body = super().parse(data)
        if body.stream_options is not None and not body.stream:
            raise bad_request("stream_options is only allowed together with stream: true", "stream_options")
        return body

    @property
    def include_usage(self) -> bool:
        return bool(self.stream and self.stream_options and self.stream_options.include_usage)


class CompletionBody(SamplingBody):
    """POST /v1/completions."""

    harmless = {"best_of": (), "suffix": (), "response_format": ({"type": "text"},)}

    prompt: Any = None
    echo: bool | None = None
    logprobs: int | None = None
    add_special_tokens: bool | None = None


class ChatBody(SamplingBody):
    """POST /v1/chat/completions."""

    harmless = {
        "tools": (),
        "tool_choice": ("none",),
        "parallel_tool_calls": (),
        "functions": (),
        "function_call": ("none",),
        "response_format": ({"type": "text"},),
        "modalities": (["text"],),
        "audio": (),
        "reasoning_effort": (),
        "verbosity": (),
        "web_search_options": (),
        "best_of": (),
        "suffix": (),
        "echo": (False,),
        "continue_final_message": (False,),
    }

    messages: Any = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TokenizeBody(Body):
    """POST /tokenize: prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Any = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: Any = None


AnyBody = TypeVar("AnyBody", bound=Body)
