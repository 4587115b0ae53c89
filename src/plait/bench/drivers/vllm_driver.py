"""vLLM's CPU build: greedy requests through its `LLM` class, as its users call it."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from serve_lines import serve_lines  # type: ignore[import-not-found]

_BLOCK_TOKENS = 128  # of its key/value cache on a CPU
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
# Its worker polls for a second after a step before it sleeps: whoever is measured next must not share the CPU with it.
_QUIET_S = 1.2

_llm: Any = None


def load(path: str, threads: int, context: int, sequences: int = 1, dtype: str = "bfloat16") -> dict[str, Any]:
    """A directory with config.json and safetensors. Raises ValueError where it has no attention for the heads' size."""
    global _llm
    cpus = sorted(os.sched_getaffinity(0))[:threads]
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cpus))
    # What it saves of a model compiled for a CPU it cannot load again (0.32.0); without, Inductor's own cache serves.
    os.environ.setdefault("VLLM_USE_AOT_COMPILE", "0")
    openmp = Path(sys.prefix) / "lib" / "libiomp5.so"
    if openmp.is_file():  # as its installation guide advises; its processes are started anew and take it up
        os.environ["LD_PRELOAD"] = ":".join(filter(None, [str(openmp), os.environ.get("LD_PRELOAD")]))
    from vllm import LLM  # type: ignore[import-not-found]

    config = _text_config(path)
    _check_head_size(_head_size(config))
    start = time.perf_counter()
    _llm = LLM(
        path,
        dtype=dtype,
        max_model_len=context,
        max_num_seqs=sequences,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        kv_cache_memory_bytes=_cache_bytes(config, context, sequences, _BYTES[dtype]),
    )
    seconds = time.perf_counter() - start
    time.sleep(_QUIET_S)
    return {"load_s": seconds, "kv_dtype": _SHORT[dtype]}


def _text_config(path: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((Path(path) / "config.json").read_text())
    return config.get("text_config") or config


def _head_size(config: dict[str, Any]) -> int:
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def _check_head_size(size: int) -> None:
    """Otherwise its engine dies in the first step."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend  # type: ignore[import-not-found]

    known = CPUAttentionBackend.get_supported_head_sizes()
    if size not in known:
        raise ValueError(f"no attention on a CPU for heads of {size}, only of {', '.join(map(str, known))}")


def _cache_bytes(config: dict[str, Any], context: int, sequences: int, width: int) -> int:
    """Of keys and values for all sequences at once, in whole blocks and one to spare: none may have to wait.

    It touches all of it at the start, so more would cost seconds.
    """
    heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    token_bytes = 2 * config["num_hidden_layers"] * heads * _head_size(config) * width
    blocks = sequences * (-(-context // _BLOCK_TOKENS) + 1) + 1
    return int(blocks * _BLOCK_TOKENS * token_bytes)


def _generate(prompts: list[list[int]], new_tokens: list[int]) -> tuple[float, list[list[int]]]:
    from vllm import SamplingParams

    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False) for n in new_tokens]
    start = time.perf_counter()
    outputs = _llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    seconds = time.perf_counter() - start
    return seconds, [list(output.outputs[0].token_ids) for output in outputs]


def complete(prompt: list[int], new_tokens: int) -> dict[str, Any]:
    """Its first token alone, then the request with `new_tokens` more: the difference is theirs."""
    prompt_s, _ = _generate([prompt], [1])
    whole_s, tokens = _generate([prompt], [new_tokens + 1])
    if whole_s <= prompt_s:
        raise RuntimeError(f"{new_tokens} tokens took no measurable time beside the prompt's: ask for more of them")
    time.sleep(_QUIET_S)
    return {"prompt_s": prompt_s, "decode_s": whole_s - prompt_s, "tokens": tokens[0]}


def batch(prompts: list[list[int]], new_tokens: list[int]) -> dict[str, Any]:
    seconds, tokens = _generate(prompts, new_tokens)
    time.sleep(_QUIET_S)
    return {"seconds": seconds, "tokens": tokens}


def versions() -> dict[str, str]:
    import torch
    import vllm

    return {"vllm": vllm.__version__, "torch": torch.__version__}


if __name__ == "__main__":
    serve_lines({f.__name__: f for f in (load, complete, batch, versions)})
