"""vLLM's CPU build: greedy requests through its `LLM` class, as its users call it."""

from __future__ import annotations

import os
import time
from typing import Any

from serve_lines import serve_lines  # type: ignore[import-not-found]

_llm: Any = None


def load(path: str, threads: int, context: int, sequences: int = 1, dtype: str = "bfloat16") -> dict[str, Any]:
    """A directory with config.json and safetensors."""
    global _llm
    cpus = sorted(os.sched_getaffinity(0))[:threads]
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cpus))
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    from vllm import LLM  # type: ignore[import-not-found]

    start = time.perf_counter()
    _llm = LLM(
        path,
        dtype=dtype,
        max_model_len=context,
        max_num_seqs=sequences,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
    )
    short = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
    return {"load_s": time.perf_counter() - start, "kv_dtype": short[dtype]}


def _generate(prompts: list[list[int]], new_tokens: int) -> tuple[float, list[list[int]]]:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
    start = time.perf_counter()
    outputs = _llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    return time.perf_counter() - start, [list(output.outputs[0].token_ids) for output in outputs]


def complete(prompt: list[int], new_tokens: int) -> dict[str, Any]:
    """Its first token alone, then the request with `new_tokens` more: the difference is theirs."""
    prompt_s, _ = _generate([prompt], 1)
    whole_s, tokens = _generate([prompt], new_tokens + 1)
    if whole_s <= prompt_s:
        raise RuntimeError(f"{new_tokens} tokens took no measurable time beside the prompt's: ask for more of them")
    return {"prompt_s": prompt_s, "decode_s": whole_s - prompt_s, "tokens": tokens[0]}


def batch(prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
    seconds, tokens = _generate(prompts, new_tokens)
    return {"seconds": seconds, "tokens": tokens}


def versions() -> dict[str, str]:
    import torch
    import vllm

    return {"vllm": vllm.__version__, "torch": torch.__version__}


if __name__ == "__main__":
    serve_lines({f.__name__: f for f in (load, complete, batch, versions)})
