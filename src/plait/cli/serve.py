"""`plait serve [MODEL...]`: an OpenAI-compatible server with a chat page at /."""

from __future__ import annotations

import argparse
import os
import re
from typing import Any

from plait.cli.common import MODEL_HELP, adapters, add_adapter_flag, add_model_flags, engine_options, positive
from plait.errors import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = __doc__
    parser.add_argument("models", nargs="*", metavar="MODEL", help=MODEL_HELP + "; several are served together")
    add_model_flags(parser)
    add_adapter_flag(parser, "served under its name beside the model; repeatable")
    group = parser.add_argument_group("server")
    group.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    group.add_argument("--port", type=_port, default=8000, help="0 takes a free one (default: 8000)")
    group.add_argument(
        "--api-key", action="append", metavar="KEY", help="needed to use the server; repeatable (or PLAIT_API_KEY)"
    )
    group.add_argument(
        "--served-model-name",
        action="append",
        metavar="NAME",
        help="name in the API; repeatable: aliases of one model, or one per model in their order",
    )
    group.add_argument("--cors-origin", action="append", default=[], metavar="ORIGIN", help="let pages of ORIGIN ask")
    group.add_argument("--log-json", action="store_true", help="log lines as JSON")
    limits = parser.add_argument_group("limits")
    limits.add_argument("--max-num-seqs", type=positive, default=32, metavar="N", help="sequences in a step (32)")
    limits.add_argument("--max-num-batched-tokens", type=positive, default=512, metavar="N", help="per step (512)")
    limits.add_argument("--max-queue", type=_count, default=1024, metavar="N", help="outputs that may wait (1024)")
    limits.add_argument("--max-body-size", default="8MiB", metavar="SIZE", help="of a request (8MiB)")
    limits.add_argument("--max-connections", type=positive, default=1024, metavar="N", help="at once (1024)")
    limits.add_argument("--request-timeout", type=_seconds, metavar="S", help="end longer requests (default: none)")
    limits.add_argument("--shutdown-timeout", type=_seconds, default=15.0, metavar="S", help="to finish requests (15)")


def run(args: argparse.Namespace) -> int:
    """Serve until told to stop."""
    try:
        import fastapi  # noqa: F401 (imported by functions of the server; named here while it can be said plainly)
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401

        from plait.server.logs import configure_logging
        from plait.server.run import ModelSpec, serve
        from plait.server.state import Settings
    except ModuleNotFoundError as error:
        raise UsageError(f"plait serve needs the package {error.name}: pip install 'plait[server]'") from None
    from plait.engine.adapters import check_adapters
    from plait.engine.build import parse_bytes
    from plait.weights.locate import locate

    options = engine_options(args)
    options |= {"max_num_seqs": args.max_num_seqs, "max_batched_tokens": args.max_num_batched_tokens}
    models = args.models or [None]
    paths = [locate(model) for model in models]
    names = served_names([_default_name(model, path) for model, path in zip(models, paths, strict=True)], args)
    check_adapter_names(list(adapters(args)), names)
    check_adapters(adapters(args))
    specs = [ModelSpec(path, own, options) for path, own in zip(paths, names, strict=True)]
    settings = Settings(
        keys=_keys(args.api_key, os.environ.get("PLAIT_API_KEY")),
        cors_origins=tuple(_origin(text) for text in args.cors_origin),
        max_queue=args.max_queue,
        max_body_bytes=parse_bytes(args.max_body_size),
        max_connections=args.max_connections,
        request_timeout_s=args.request_timeout,
        shutdown_timeout_s=args.shutdown_timeout,
        log_json=args.log_json,
    )
    configure_logging(args.log_json)
    return serve(specs, args.host, args.port, settings, lambda line: print(line, flush=True))


def served_names(defaults: list[str], args: argparse.Namespace) -> list[tuple[str, ...]]:
    """Per model its id and aliases. Raises UsageError where the names do not fit the models or repeat."""
    given = args.served_model_name
    if not given:
        names: list[tuple[str, ...]] = [(name,) for name in defaults]
    elif len(defaults) == 1:
        names = [tuple(given)]
    elif len(given) == len(defaults):
        names = [(name,) for name in given]
    else:
        raise UsageError(f"{len(given)} --served-model-name for {len(defaults)} models: give one for each")
    flat = [name for own in names for name in own]
    if len(set(flat)) < len(flat):
        raise UsageError(f"two models would have the same name ({', '.join(flat)}): set --served-model-name for each")
    if not all(flat):
        raise UsageError("--served-model-name must not be empty")
    return names


def check_adapter_names(given: list[str], models: list[tuple[str, ...]]) -> None:
    """UsageError where it is not clear which model or adapter a name would mean."""
    if given and len(models) > 1:
        raise UsageError(f"--adapter with {len(models)} models: adapters go with one model; serve it alone")
    taken = [name for name in given if name in models[0]]
    if taken:
        raise UsageError(f"the adapter {taken[0]} would have the model's name: write --adapter NAME=PATH")


def _default_name(model: str | None, path: Any) -> str:
    if model is not None and model.startswith("hf:"):
        return model.removeprefix("hf:")
    return path.stem if path.is_file() else path.resolve().name


def _keys(flags: list[str] | None, environment: str | None) -> tuple[str, ...]:
    """--api-key, else PLAIT_API_KEY. Raises UsageError for keys that no header can carry."""
    keys = flags if flags is not None else [environment] if environment else []
    for key in keys:
        if not key.strip() or key != key.strip() or not key.isprintable() or not key.isascii():
            raise UsageError("an API key must be printable ASCII without space around it, and not empty")
    return tuple(keys)


def _origin(text: str) -> str:
    if text != "*" and not re.fullmatch(r"https?://[^/\s]+", text):
        raise UsageError(f"--cors-origin {text!r}: write an origin such as https://example.org, or *")
    return text


def _port(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 5 or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} must be a port, 0 to 65535")
    return int(text)


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 18:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < 1e7:
        raise argparse.ArgumentTypeError(f"{text!r} must be a positive number of seconds")
    return value
