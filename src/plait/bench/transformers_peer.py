"""Decode and prefill of the reference path beside transformers: same weights, prompt, precision and threads."""

from __future__ import annotations

import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plait.errors import UsageError

if TYPE_CHECKING:
    from plait.model.decoder import Decoder

PRECISIONS = ("fp32", "bf16")


@dataclass(frozen=True)
class Timing:
    """Seconds of one prompt and of one generated token after it, and the tokens."""

    prompt_s: float
    token_s: float
    tokens: tuple[int, ...]


class OurSide:
    """One greedy request through the engine, sampler and scheduler included."""

    def __init__(self, decoder: Decoder, context: int) -> None:
        from plait.engine.build import build_engine

        self._engine = build_engine(
            decoder, max_model_len=context, max_num_seqs=1, max_batched_tokens=context, prefix_caching=False
        ).engine
        self._runs = 0

    def run(self, prompt: list[int], new_tokens: int) -> Timing:
        from plait.engine.params import SamplingParams
        from plait.engine.request import Request

        self._runs += 1
        params = SamplingParams(temperature=0, max_tokens=new_tokens + 1, ignore_eos=True)
        self._engine.add_request(Request(str(self._runs), prompt, params))
        tokens: list[int] = []
        start = time.perf_counter()
        for output in self._engine.step():
            tokens += output.token_ids
        first = time.perf_counter()
        while self._engine.has_unfinished():
            for output in self._engine.step():
                tokens += output.token_ids
        return Timing(first - start, (time.perf_counter() - first) / max(new_tokens, 1), tuple(tokens))


class TheirSide:
    """The same request in transformers: its forward with its cache and an arg-max, without the overhead of
    `generate`."""

    def __init__(self, decoder: Decoder) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        logging.set_verbosity_error()
        warnings.filterwarnings("ignore", category=FutureWarning, module="transformers|torch")
        with tempfile.TemporaryDirectory() as name:
            source, decoder.source = decoder.source, None
            decoder.save_pretrained(Path(name) / "model")
            decoder.source = source
            self._model = AutoModelForCausalLM.from_pretrained(Path(name) / "model", dtype=decoder.dtype).eval()

    def run(self, prompt: list[int], new_tokens: int) -> Timing:
        import torch

        with torch.inference_mode():
            start = time.perf_counter()
            out = self._model(torch.tensor([prompt]), use_cache=True, logits_to_keep=1)
            token = out.logits[:, -1:].argmax(-1)
            tokens = [int(token)]
            first = time.perf_counter()
            cache = out.past_key_values
            for _ in range(new_tokens):
                out = self._model(token, past_key_values=cache, use_cache=True)
                token = out.logits[:, -1:].argmax(-1)
                tokens.append(int(token))
            return Timing(first - start, (time.perf_counter() - first) / max(new_tokens, 1), tuple(tokens))


def compare(
    model: Any,
    prompt_tokens: int = 512,
    new_tokens: int = 64,
    rounds: int = 5,
    threads: int | None = None,
    advance: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Both sides in both precisions, alternating; medians in tokens/s and, per task, the ratio of each side's best
    precision.

    model: as for `plait.load`. advance: called after each alternation of each precision, 2 * (rounds + 1) times.
    Raises UsageError where transformers is not installed.
    """
    import torch

    from plait.bench.limits import machine
    from plait.kernels.native import usable_cpus
    from plait.weights.load import load

    try:
        import transformers
    except ImportError:
        raise UsageError("this benchmark needs its peer: pip install 'plait[bench]'") from None
    torch.set_num_threads(threads or usable_cpus())
    prompt = _prompt(model, prompt_tokens)
    sides: dict[str, tuple[OurSide, TheirSide]] = {}
    for precision in PRECISIONS:
        decoder = load(model, precision)
        sides[precision] = (OurSide(decoder, prompt_tokens + new_tokens + 1), TheirSide(decoder))
    timings: dict[tuple[str, str], list[Timing]] = {}
    for number in range(rounds + 1):
        for precision, pair in sides.items():
            ours, theirs = pair[0].run(prompt, new_tokens), pair[1].run(prompt, new_tokens)
            advance()
            if number:  # the first round warms up
                timings.setdefault((precision, "plait"), []).append(ours)
                timings.setdefault((precision, "transformers"), []).append(theirs)
    return {
        "machine": machine(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "prompt_tokens": len(prompt),
        "new_tokens": new_tokens,
        "rounds": rounds,
        "decode": _task(timings, lambda t: 1 / t.token_s),
        "prefill": _task(timings, lambda t: len(prompt) / t.prompt_s),
        "equal_leading_tokens": {p: _equal(timings[p, "plait"], timings[p, "transformers"]) for p in PRECISIONS},
    }


def _task(timings: dict[tuple[str, str], list[Timing]], rate: Any) -> dict[str, Any]:
    """Median tokens/s per precision and side, and the ratio of the best medians."""
    rates = {key: statistics.median(rate(t) for t in runs) for key, runs in timings.items()}
    best = {name: max(rates[p, name] for p in PRECISIONS) for name in ("plait", "transformers")}
    return {
        "tokens_per_s": {p: {n: round(rates[p, n], 1) for n in ("plait", "transformers")} for p in PRECISIONS},
        "ratio_at_fastest_precision": round(best["plait"] / best["transformers"], 3),
    }


def _equal(ours: list[Timing], theirs: list[Timing]) -> int:
    """How many leading tokens agree: both sides must have produced plausible equal text."""
    pairs = zip(ours[0].tokens, theirs[0].tokens, strict=True)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), len(ours[0].tokens))


_TEXT = (
    "A reader who opens a book of tides finds first a table of hours and heights, and only later an account of why the "
    "sea should rise at all. The moon draws the water towards it, the earth turns beneath, and twice a day the harbour "
    "fills. Fishermen knew the hours long before anyone could give the reason, and they set out by them in the dark. "
)


def _prompt(model: Any, count: int) -> list[int]:
    from plait.text.tokenizer import load_tokenizer
    from plait.weights.locate import locate

    tokenizer = load_tokenizer(locate(model))
    ids = tokenizer.encode(_TEXT * (1 + count // 64))
    if len(ids) < count:
        raise UsageError(f"the built-in text has {len(ids)} tokens here; ask for at most that many")
    return ids[:count]
