"""`--device cuda` runs the reference path on a GPU; here only where there is one."""

from __future__ import annotations

import pytest
import torch

import plait
from tests.configs import CONFIGS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and torch sees none here"),
]


@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_greedy_text_on_a_gpu_equals_the_cpus(family: str, tmp_path) -> None:
    decoder = plait.from_config(CONFIGS[family], seed=4)
    decoder.save_pretrained(tmp_path / "model")
    params = plait.SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=1)
    prompts = [{"prompt_token_ids": list(range(2, 2 + n))} for n in (1, 7, 40)]
    on_gpu = plait.load(tmp_path / "model", dtype="fp32", device="cuda")
    assert on_gpu.device.type == "cuda"
    expected = plait.LLM(decoder, max_num_seqs=4).generate(prompts, params)
    found = plait.LLM(on_gpu, device="cuda", max_num_seqs=4, kv_memory="64MiB").generate(prompts, params)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.outputs[0].token_ids == theirs.outputs[0].token_ids
