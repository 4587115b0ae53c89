"""Accuracy: each side's logits on real text against fp32 arithmetic on the expanded weights.

Windows of equal size, each from an empty cache, the model's BOS token first where it wants one; every token but the
window's first is scored. All sides see the same ids and are compared on the same positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from math import exp
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plait.bench.peers import PEERS, PeerError
from plait.bench.report import OURS, make_row, start_report, times
from plait.bench.sides import OurSide, PeerModel, TheirSide
from plait.bench.text import load_text_ids, make_prompts

REFERENCE = "fp32"
_ROWS = 64  # rows of logits that are compared at once, in float64

GetLogits = Callable[[list[int]], NDArray[np.float32]]


@dataclass
class Distances:
    """What one side's distributions are like, position by position.

    kl: KL(reference || side) in nats. equal_top: whether both have the same likeliest token. nll: -log p of the text.
    """

    kl: list[float] = field(default_factory=list)
    equal_top: list[bool] = field(default_factory=list)
    nll: list[float] = field(default_factory=list)


def measure_accuracy(
    path: Path,
    peers: list[PeerModel],
    *,
    num_windows: int = 4,
    window: int = 512,
    threads: int,
    text: str | None = None,
    kv_dtypes: Sequence[str] = (),
    options: dict[str, Any] | None = None,
    bench: str = "accuracy",
    advance: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """KL, top-1 agreement and perplexity of ours and the peers.

    kv_dtypes: precisions of keys and values to measure beside the default one, a side of ours each. options: of
    build_engine. advance: called once per window and side, the reference included. A peer that gives no logits, or
    does not load the model, is left out and noted.
    """
    ids, prefix = load_text_ids(path, text)
    texts = make_prompts(ids, prefix, num_windows, window)
    versions: dict[str, str] = {}
    with ExitStack() as stack:
        sides: dict[str, OurSide | TheirSide] = {}
        for label, more in [(OURS, {}), *((f"{OURS} with {kv} K/V", {"kv_dtype": kv}) for kv in kv_dtypes)]:
            sides[label] = OurSide(path, context=window + 1, threads=threads, **{**(options or {}), **more})
        notes = []
        for peer in peers:
            try:
                side = _their_side(peer, window, threads)
                stack.callback(side.close)
                side.logits(texts[0][:2])
            except PeerError as error:
                notes.append(f"{peer.label} is left out: {error}")
                continue
            sides[peer.label] = side
            versions |= side.versions
        settings = {"threads": threads, "windows": num_windows, "tokens of a window": window}
        engines = {name: side.describe() for name, side in sides.items()}
        found = compare_sides(
            reference_logits(path, threads), {name: s.logits for name, s in sides.items()}, texts, advance
        )
    report = start_report(bench, path, versions, settings, engines)
    report["rows"] = _rows(found, window)
    report["notes"].append(f"reference: {REFERENCE} arithmetic and keys and values on the expanded weights, by torch")
    report["notes"] += notes
    return report


def _their_side(peer: PeerModel, window: int, threads: int) -> TheirSide:
    if not PEERS[peer.peer].gives_logits:
        raise PeerError(f"{peer.peer} gives no logits of a whole text")
    return TheirSide(peer.peer, peer.path, context=window, threads=threads, dtype=peer.dtype or None)


def reference_logits(path: Path, threads: int) -> GetLogits:
    """The decoder's own forward on expanded weights in fp32: ids of a window -> float32 [T - 1, V]."""
    import torch

    from plait.weights.load import load

    torch.set_num_threads(threads)
    decoder: Any = load(path, "fp32").eval()

    def run(tokens: list[int]) -> NDArray[np.float32]:
        with torch.inference_mode():
            hidden = decoder(torch.tensor(tokens[:-1]))
            return decoder.logits(hidden).float().numpy()

    return run


def compare_sides(
    reference: GetLogits,
    sides: dict[str, GetLogits],
    texts: Sequence[list[int]],
    advance: Callable[[], None] = lambda: None,
) -> dict[str, list[Distances]]:
    """Distances by side, one per window; the reference's own under REFERENCE."""
    found: dict[str, list[Distances]] = {REFERENCE: [], **{name: [] for name in sides}}
    for tokens in texts:
        expected = reference(tokens)
        targets = np.asarray(tokens[1:])
        found[REFERENCE].append(distances(expected, expected, targets))
        advance()
        for name, logits in sides.items():
            found[name].append(distances(expected, logits(tokens), targets))
            advance()
    return found


def distances(expected: NDArray[np.float32], found: NDArray[np.float32], targets: NDArray[Any]) -> Distances:
    """Both [T, V] logits, targets [T] the tokens that came. Columns beyond the narrower vocabulary do not count."""
    width = min(expected.shape[1], found.shape[1])
    out = Distances()
    for start in range(0, len(targets), _ROWS):
        stop = min(start + _ROWS, len(targets))
        p, q = (_log_softmax(x[start:stop, :width]) for x in (expected, found))
        out.kl += np.einsum("rv,rv->r", np.exp(p), p - q).tolist()
        out.equal_top += (p.argmax(1) == q.argmax(1)).tolist()
        out.nll += (-q[np.arange(stop - start), targets[start:stop]]).tolist()
    return out


def _log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    wide = logits.astype(np.float64)
    wide -= wide.max(1, keepdims=True)
    wide -= np.log(np.exp(wide).sum(1, keepdims=True))
    return wide


def _rows(found: dict[str, list[Distances]], window: int) -> list[dict[str, Any]]:
    kl = {name: [float(np.mean(d.kl)) for d in runs] for name, runs in found.items() if name != REFERENCE}
    whole = {name: np.concatenate([d.kl for d in runs]) for name, runs in found.items() if name != REFERENCE}
    top = {name: [100 * float(np.mean(d.equal_top)) for d in runs] for name, runs in found.items() if name != REFERENCE}
    perplexity = {name: [exp(float(np.mean(d.nll))) for d in runs] for name, runs in found.items()}
    overall = {name: exp(float(np.mean(np.concatenate([d.nll for d in runs])))) for name, runs in found.items()}
    positions = len(next(iter(whole.values())))
    means = {name: float(values.mean()) for name, values in whole.items()}
    differences = {
        name: f"{100 * (overall[OURS] / value - 1):+.2f}%" for name, value in overall.items() if name != OURS
    }
    return [
        make_row(
            f"KL against {REFERENCE}, mean of a window",
            "nats",
            kl,
            better="lower",
            details={
                "positions": positions,
                "mean over all": means,
                "our mean is": {
                    name: times(means[OURS] / mean) for name, mean in means.items() if name != OURS and mean
                },
                "99th percentile": {name: float(np.percentile(values, 99)) for name, values in whole.items()},
                "largest": {name: float(values.max()) for name, values in whole.items()},
            },
        ),
        make_row(f"same likeliest token as {REFERENCE}", "%", top),
        make_row(
            f"perplexity in windows of {window}",
            "",
            perplexity,
            better="lower",
            details={"over all": overall, "ours differs by": differences},
        ),
    ]
