"""transformers: its forward with its cache and an arg-max, without the overhead of `generate`."""

from __future__ import annotations

import time
import warnings
from typing import Any

import numpy as np
import torch
import transformers
from serve_lines import serve_lines  # type: ignore[import-not-found]

_model: Any = None
_SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def load(path: str, threads: int, context: int, sequences: int = 1, dtype: str = "bfloat16") -> dict[str, Any]:
    """A directory with config.json and safetensors. context, sequences: nothing to reserve here."""
    global _model
    torch.set_num_threads(threads)
    start = time.perf_counter()
    _model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)).eval()
    found = {"load_s": time.perf_counter() - start, "vocab_size": _model.config.get_text_config().vocab_size}
    return {**found, "kv_dtype": _SHORT[dtype]}


@torch.inference_mode()
def complete(prompt: list[int], new_tokens: int) -> dict[str, Any]:
    """One greedy request: its first token, then `new_tokens` more, one at a time."""
    start = time.perf_counter()
    out = _model(torch.tensor([prompt]), use_cache=True, logits_to_keep=1)
    token = out.logits[:, -1:].argmax(-1)
    tokens = [int(token)]
    first = time.perf_counter()
    for _ in range(new_tokens):
        out = _model(token, past_key_values=out.past_key_values, use_cache=True)
        token = out.logits[:, -1:].argmax(-1)
        tokens.append(int(token))
    return {"prompt_s": first - start, "decode_s": time.perf_counter() - first, "tokens": tokens}


@torch.inference_mode()
def batch(prompts: list[list[int]], new_tokens: list[int]) -> dict[str, Any]:
    """Prompts of equal length in one static batch."""
    if len({len(prompt) for prompt in prompts}) > 1 or len(set(new_tokens)) > 1:
        raise ValueError("one static batch has prompts and outputs of equal length")
    start = time.perf_counter()
    out = _model(torch.tensor(prompts), use_cache=True, logits_to_keep=1)
    steps = [out.logits[:, -1].argmax(-1)]
    for _ in range(new_tokens[0] - 1):
        out = _model(steps[-1][:, None], past_key_values=out.past_key_values, use_cache=True)
        steps.append(out.logits[:, -1].argmax(-1))
    return {"seconds": time.perf_counter() - start, "tokens": torch.stack(steps, 1).tolist()}


@torch.inference_mode()
def write_logits(tokens: list[int], file: str) -> dict[str, Any]:
    """float32 [T, V] of one window of tokens as a .npy file."""
    logits = _model(torch.tensor([tokens])).logits[0].float().numpy()
    np.save(file, logits)
    return {"vocab_size": logits.shape[-1]}


def versions() -> dict[str, str]:
    return {"transformers": transformers.__version__, "torch": torch.__version__}


if __name__ == "__main__":
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    warnings.filterwarnings("ignore")
    serve_lines({f.__name__: f for f in (load, complete, batch, write_logits, versions)})
