"""The HTTP application: routes, and what surrounds them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib import resources
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from plait import __version__
from plait.errors import EngineError, PlaitError, RequestError
from plait.server.answering import CLIENT_GONE, EventStream, answer, json_response
from plait.server.body import ClientGone, read_json
from plait.server.call import Call
from plait.server.chat import ChatAnswer
from plait.server.completions import CompletionAnswer
from plait.server.deadline import Deadline
from plait.server.errors import ApiError, api_error, bad_request, unknown_model
from plait.server.logs import RequestLog
from plait.server.params import chat_fields, chat_params, completion_params
from plait.server.prompts import encode_messages, encode_prompt, split_prompts
from plait.server.protocol import AnyBody, ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from plait.server.security import HostGuard, KeyGuard, Keys
from plait.server.state import Served, ServerState, new_id

log = logging.getLogger("plait.server")

Answer = TypeVar("Answer")

_PAGE_HEADERS = {
    # The page can load nothing from elsewhere, and no other site can frame it.
    "content-security-policy": "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
_PAGE = {
    "/": ("chat.html", "text/html"),
    "/chat.css": ("chat.css", "text/css"),
    "/chat.js": ("chat.js", "text/javascript"),
}


def create_app(state: ServerState) -> Any:
    """The ASGI application over a state."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(PlaitError, _on_plait_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(ClientGone, _on_client_gone)
    app.add_exception_handler(Exception, _on_fault)
    for path, method, handler in (
        ("/v1/completions", "POST", completions),
        ("/v1/chat/completions", "POST", chat_completions),
        ("/v1/models", "GET", models),
        ("/v1/models/{name:path}", "GET", one_model),
        ("/tokenize", "POST", tokenize),
        ("/detokenize", "POST", detokenize),
        ("/health", "GET", health),
        ("/ready", "GET", ready),
        ("/version", "GET", version),
        ("/metrics", "GET", metrics),
    ):
        app.add_api_route(path, _bind(handler, state), methods=[method], response_model=None)
    _add_page(app)
    guarded: Any = app
    keys = Keys(state.settings.keys)
    if keys:
        guarded = KeyGuard(guarded, keys)
    if state.settings.cors_origins:
        from starlette.middleware.cors import CORSMiddleware

        guarded = CORSMiddleware(
            guarded,
            allow_origins=list(state.settings.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["Authorization", "Content-Type"],
        )
    if state.settings.hosts:
        guarded = HostGuard(guarded, state.settings.hosts)
    return RequestLog(guarded, state.settings.log_json)


def _bind(handler: Callable[..., Any], state: ServerState) -> Callable[[Request], Any]:
    async def route(request: Request) -> Response:
        return await handler(state, request)

    route.__name__, route.__doc__ = handler.__name__, handler.__doc__
    return route


def _add_page(app: FastAPI) -> None:
    folder = resources.files("plait.server") / "page"
    for path, (name, kind) in _PAGE.items():
        app.add_api_route(path, _file((folder / name).read_bytes(), kind), methods=["GET"], response_model=None)
    app.add_api_route("/favicon.ico", _no_icon, methods=["GET"], response_model=None)


def _file(content: bytes, kind: str) -> Callable[[], Any]:
    async def page() -> Response:
        return Response(content, headers=_PAGE_HEADERS, media_type=kind)

    return page


async def _no_icon() -> Response:
    return Response(status_code=204)


# Errors


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    request.scope["plait.log"].setdefault("error", error.code or error.param or "error")
    return Response(error.encoded(), error.status, error.headers, media_type="application/json")


async def _on_plait_error(request: Request, error: Exception) -> Response:
    return await _on_api_error(request, api_error(error))


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    what = {404: f"there is no {request.url.path:.100}", 405: f"{request.method:.10} is not allowed here"}
    text = what.get(error.status_code, str(error.detail))
    return await _on_api_error(request, ApiError(error.status_code, text, headers=dict(error.headers or {})))


async def _on_fault(request: Request, error: Exception) -> Response:
    # The error is raised once more after this answer: RequestLog writes its traceback.
    return await _on_api_error(request, api_error(error))


async def _on_client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_GONE)


# Generation


async def _read(state: ServerState, request: Request, kind: type[AnyBody]) -> AnyBody:
    state.check_accepting()
    data = await read_json(request.headers, request.receive, state.settings.max_body_bytes)
    return kind.parse(data)


def opened(call: Call, kind: Callable[[Call, AnyBody], Answer], body: AnyBody) -> Answer:
    """What makes the answer of a call that is already running; the call does not outlive a failure."""
    try:
        return kind(call, body)
    except BaseException:
        call.close()
        raise


async def completions(state: ServerState, request: Request) -> Response:
    """POST /v1/completions."""
    body = await _read(state, request, CompletionBody)
    deadline = Deadline(state.settings.request_timeout_s)
    served = state.find_model(body.model)
    params = completion_params(body, served.info.default_params)
    parts = split_prompts(body.prompt)
    state.check_queue(served, len(parts) * params.n)
    add = body.add_special_tokens is not False

    def encode() -> Any:
        limit = served.info.max_model_len
        return [encode_prompt(served.tokenizer, part, add, limit) for part in parts], served.words.resolve(params)

    prompts, params = await state.text_work(served, encode, request.receive, deadline)
    call = Call(state, served, new_id("cmpl"), prompts, params, request.scope["plait.log"], body.cache_salt, body.model)
    reply = opened(call, CompletionAnswer, body)
    if body.stream:
        return EventStream(call, reply.events(), deadline)
    return await answer(request, call, reply.document(), deadline)


async def chat_completions(state: ServerState, request: Request) -> Response:
    """POST /v1/chat/completions."""
    body = await _read(state, request, ChatBody)
    deadline = Deadline(state.settings.request_timeout_s)
    served = state.find_model(body.model)
    try:
        params = chat_params(body, served.info.default_params)
        state.check_queue(served, params.n)

        def encode() -> Any:
            prompt = encode_messages(
                served.tokenizer,
                body.messages,
                body.add_generation_prompt,
                body.chat_template_kwargs,
                served.info.max_model_len,
            )
            return prompt, served.words.resolve(params)

        prompt, params = await state.text_work(served, encode, request.receive, deadline)
        log_facts = request.scope["plait.log"]
        call = Call(state, served, new_id("chatcmpl"), [prompt], params, log_facts, body.cache_salt, body.model)
    except RequestError as error:
        raise api_error(error, chat_fields(body)) from None
    reply = opened(call, ChatAnswer, body)
    if body.stream:
        return EventStream(call, reply.events(), deadline)
    return await answer(request, call, reply.document(), deadline)


# Models and tokens


def _model(state: ServerState, served: Served, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": state.created,
        "owned_by": "plait",
        "root": served.id,
        "parent": served.id if name in served.info.adapters else None,
        "max_model_len": served.info.max_model_len,
    }


async def models(state: ServerState, request: Request) -> Response:
    """GET /v1/models."""
    data = [_model(state, served, name) for served in state.models for name in served.all_names]
    return json_response({"object": "list", "data": data})


async def one_model(state: ServerState, request: Request) -> Response:
    """GET /v1/models/NAME."""
    name = request.path_params["name"]
    for served in state.models:
        if name in served.all_names:
            return json_response(_model(state, served, name))
    raise unknown_model(name, state.served_names())


async def tokenize(state: ServerState, request: Request) -> Response:
    """POST /tokenize."""
    body = await _read(state, request, TokenizeBody)
    served = state.find_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("give either prompt or messages", "prompt")

    def encode() -> list[int]:
        limit = served.info.max_model_len
        if body.prompt is not None:
            return served.tokenizer.encode(body.prompt, body.add_special_tokens is not False, limit)
        kwargs = body.chat_template_kwargs
        return encode_messages(served.tokenizer, body.messages, body.add_generation_prompt, kwargs, limit).ids

    deadline = Deadline(state.settings.request_timeout_s)
    ids = await state.text_work(served, encode, request.receive, deadline)
    result = {"count": len(ids), "max_model_len": served.info.max_model_len, "tokens": ids}
    if body.return_token_strs:
        result["token_strs"] = [served.tokenizer.token_text(token) for token in ids]
    return json_response(result)


async def detokenize(state: ServerState, request: Request) -> Response:
    """POST /detokenize."""
    body = await _read(state, request, DetokenizeBody)
    served = state.find_model(body.model)
    tokens, size = body.tokens, served.tokenizer.vocab_size
    if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
        raise bad_request("tokens must be a list of token ids", "tokens")
    for token in tokens:
        if not 0 <= token < size:
            raise bad_request(f"token id {token} is outside the vocabulary: ids are 0 to {size - 1}", "tokens")

    def decode() -> str:
        return served.tokenizer.decode(tokens, skip_special_tokens=False)

    deadline = Deadline(state.settings.request_timeout_s)
    text = await state.text_work(served, decode, request.receive, deadline)
    return json_response({"prompt": text})


# The server itself


async def health(state: ServerState, request: Request) -> Response:
    """GET /health; with ?deep=1 the blocks of idle engines are checked."""
    status = 200 if state.phase in ("ready", "draining") else 503
    document: dict[str, Any] = {"status": "ok" if status == 200 else state.phase}
    if state.client.death is not None:
        document["reason"] = state.client.death
    if status == 200 and request.query_params.get("deep") == "1":
        document["models"] = {}
        try:
            for served, report in zip(state.models, await state.client.check(), strict=True):
                document["models"][served.id] = {
                    "integrity": report.integrity,
                    "blocks": report.num_blocks,
                    "free_blocks": report.num_free_blocks,
                    "running_or_waiting": state.client.num_choices(served.index),
                }
                if report.integrity not in ("ok", "busy"):
                    status, document["status"] = 503, "damaged"
        except EngineError as error:
            # Without an answer the process may still be alive: stopped, or in a very long step.
            word = "unresponsive" if state.client.death is None else "dead"
            status, document = 503, {"status": word, "reason": str(error)}
    return json_response(document, status)


async def ready(state: ServerState, request: Request) -> Response:
    """GET /ready: whether a request would be taken now."""
    status = 200 if state.phase == "ready" else 503
    return json_response({"status": state.phase}, status)


async def version(state: ServerState, request: Request) -> Response:
    """GET /version."""
    return json_response({"version": __version__})


async def metrics(state: ServerState, request: Request) -> Response:
    """GET /metrics in Prometheus' text format."""
    return Response(state.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")
