"""`plait score`: perplexity and log-probabilities of text."""

from __future__ import annotations

import argparse
import time
from typing import Any

from plait.cli.common import (
    Counter,
    add_adapter_flag,
    add_load_flags,
    add_plan_flags,
    load_forward,
    one_adapter,
    positive,
    print_json,
    print_table,
    read_text,
    say,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Every token is scored once, given those before it in a sliding window. Nothing is sampled, and the native"
        " plan's key/value cache holds one window."
    )
    parser.add_argument("model", metavar="MODEL", help="as for generate; `default` is the embedded model")
    parser.add_argument("files", nargs="+", metavar="FILE", help="UTF-8 text; - for standard input")
    parser.add_argument(
        "--window", type=positive, metavar="N", help="tokens a forward sees (default: the model's, at most 2048)"
    )
    parser.add_argument(
        "--stride", type=positive, metavar="N", help="how far it moves on (default: half of the window)"
    )
    parser.add_argument("--tokens", action="store_true", help="also every token with its log-probability")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    add_load_flags(parser)
    add_adapter_flag(parser, "the text is scored by the model with it")
    add_plan_flags(parser)


def run(args: argparse.Namespace) -> int:
    from plait.engine.score import Scorer, figures

    texts = [(name, read_text(name)) for name in args.files]
    args.model = None if args.model == "default" else args.model
    loaded, tokenizer, forward = load_forward(args)
    scorer = Scorer(forward, tokenizer, args.window, args.stride)
    start = time.perf_counter()
    with Counter("scored tokens", sum(len(scorer.encode(text)) for _, text in texts)) as counter:
        scorer.advance = counter.advance
        scores = [scorer.score(text, name) for name, text in texts]
    seconds = time.perf_counter() - start
    total = figures(sum(s.nll for s in scores), sum(s.num_scored for s in scores), sum(s.num_bytes for s in scores))
    document = {
        "model": loaded.report.path,
        "dtype": loaded.precision,
        **({} if args.adapter is None else {"adapter": one_adapter(args)}),
        "plan": "reference" if loaded.native is None else "native",
        "kv_dtype": forward.kv_dtype,
        "window": scorer.size,
        "stride": scorer.step,
        "bos": None if scorer.bos is None else "at the start of every window",
        **total,
        "seconds": seconds,
        "files": [_file(score, tokenizer, args.tokens) for score in scores],
    }
    if args.json:
        print_json(document)
    else:
        _show(document, args.tokens)
    say(f"{total['scored_tokens']:,} tokens in {seconds:.1f} s, {total['scored_tokens'] / seconds:,.0f} tokens/s")
    return 0


def _file(score: Any, tokenizer: Any, with_tokens: bool) -> dict[str, Any]:
    if not with_tokens:
        return score.to_json()
    tokens = [
        {"id": token, "text": tokenizer.token_text(token), "logprob": logprob}
        for token, logprob in zip(score.token_ids, score.token_logprobs, strict=True)
    ]
    return score.to_json() | {"token_logprobs": tokens}


def _show(document: dict[str, Any], with_tokens: bool) -> None:
    files = document["files"]
    for file in files if with_tokens else []:
        for token in file["token_logprobs"]:
            logprob = "-" if token["logprob"] is None else f"{token['logprob']:.4f}"
            print(f"{token['id']}\t{logprob}\t{token['text']!r}")
    rows = [_row(file["file"], file) for file in files]
    if len(files) > 1:
        rows.append(_row("total", document))
    print_table(("file", "scored tokens", "perplexity", "bits/byte", "nats/token"), rows)


def _row(name: str, figures: dict[str, Any]) -> tuple[str, ...]:
    return (
        name,
        f"{figures['scored_tokens']:,}",
        f"{figures['perplexity']:,.4f}",
        "-" if figures["bits_per_byte"] is None else f"{figures['bits_per_byte']:.4f}",
        f"{figures['nll_per_token']:.4f}",
    )
