"""Errors as OpenAI's API answers them."""

from __future__ import annotations

import json
from typing import Any

from plait.errors import CapacityError, EngineError, PlaitError, RequestError


class ApiError(Exception):
    """An answer with an error status. param: the field at fault. headers: to send with it."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = headers or {}

    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        kinds = {401: "authentication_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def encoded(self) -> bytes:
        # A message may quote what a client sent: what is not Unicode must not fail a second time here.
        return json.dumps(self.body(), ensure_ascii=True).encode()


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Status 400."""
    return ApiError(400, message, param, code)


def unknown_model(name: str, served: list[str]) -> ApiError:
    """Status 404 with the list of what is served."""
    text = f"the model {name!r:.200} is not served here; served: {', '.join(served)}"
    return ApiError(404, text, "model", "model_not_found")


def api_error(error: Exception, fields: dict[str, str] | None = None) -> ApiError:
    """What an exception means to a client. fields: names in SamplingParams -> names in the body, where they differ."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        field = None if error.field is None else (fields or {}).get(error.field, error.field)
        text = str(error)
        if error.field is not None and field != error.field and text.startswith(error.field):
            text = f"{field}{text[len(error.field) :]}"
        return bad_request(text, field, "context_length_exceeded" if isinstance(error, CapacityError) else None)
    if isinstance(error, EngineError):
        return ApiError(503, str(error), code="engine_error")
    if isinstance(error, PlaitError):  # a chat template that fails on these messages, a model without one
        return bad_request(str(error))
    return ApiError(500, "internal error; the server's log has the details", code="internal_error")
