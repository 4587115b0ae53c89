"""llama.cpp through the low-level API of llama-cpp-python: the loops of its own benches over llama_decode.

Flash attention is on; the greedy choice is numpy's arg-max over the logits where llama.cpp has them, outside Python.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Sequence
from typing import Any

import llama_cpp  # type: ignore[import-not-found]
import numpy as np
from llama_cpp import llama_cpp as api
from serve_lines import serve_lines  # type: ignore[import-not-found]

N_BATCH = 2048  # llama.cpp's own default of tokens per call
QUIET = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(lambda level, text, data: None)


class Batch:
    """A llama_batch that is filled again and again; tokens of at most one sequence each."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.struct = api.llama_batch_init(capacity, 0, 1)
        for i in range(capacity):
            self.struct.n_seq_id[i] = 1

    def fill(self, tokens: Sequence[int], positions: Sequence[int], sequences: Sequence[int], wanted: Any) -> None:
        struct = self.struct
        struct.n_tokens = len(tokens)
        for i, (token, position, sequence, logits) in enumerate(zip(tokens, positions, sequences, wanted, strict=True)):
            struct.token[i], struct.pos[i] = token, position
            struct.seq_id[i][0] = sequence
            struct.logits[i] = logits

    def free(self) -> None:
        api.llama_batch_free(self.struct)


class Model:
    """One file with one context. sequences: that may be in it at once, of `context` tokens each."""

    def __init__(self, path: str, threads: int, context: int, sequences: int) -> None:
        self.model = api.llama_model_load_from_file(os.fsencode(path), api.llama_model_default_params())
        if not self.model:
            raise ValueError(f"llama.cpp does not load {path}")
        self.size = (threads, context, sequences)
        self.context: Any = None
        self.open_context()
        self.vocab_size = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self.model))
        self.batch = Batch(N_BATCH)

    def open_context(self, unified: bool = False) -> None:
        """A new context. unified: one key/value cache for all sequences; llama.h advises one for each of them, which
        is the default."""
        threads, context, sequences = self.size
        if self.context:
            api.llama_free(self.context)
        params = api.llama_context_default_params()
        params.n_ctx = context * sequences
        params.n_batch, params.n_ubatch = N_BATCH, min(512, N_BATCH)
        params.n_threads = params.n_threads_batch = threads
        params.n_seq_max = sequences
        params.flash_attn_type = api.LLAMA_FLASH_ATTN_TYPE_ENABLED
        params.kv_unified = unified
        params.swa_full = False
        params.no_perf = True
        self.context = api.llama_init_from_model(self.model, params)
        if not self.context:
            raise ValueError(f"llama.cpp gives no context of {context} tokens for {sequences} sequences")

    def close(self) -> None:
        self.batch.free()
        if self.context:
            api.llama_free(self.context)
        api.llama_model_free(self.model)

    def clear(self) -> None:
        api.llama_memory_clear(api.llama_get_memory(self.context), True)

    def decode(self, rows: list[tuple[int, int, int, int]]) -> None:
        """Compute (token, position, sequence, whether its logits are wanted) rows, at most N_BATCH of them."""
        self.batch.fill(*zip(*rows, strict=True))
        status = api.llama_decode(self.context, self.batch.struct)
        if status != 0:
            raise RuntimeError(f"llama_decode returned {status}")

    def logits(self, count: int) -> np.ndarray:
        """The `count` rows of logits of the last `decode`, float32 [count, V], valid until the next one."""
        return np.ctypeslib.as_array(api.llama_get_logits(self.context), (count, self.vocab_size))

    def prefill(self, prompts: list[list[int]]) -> list[int]:
        """Compute whole prompts; the greedy first token of each."""
        rows = [
            (token, position, sequence, int(position == len(prompt) - 1))
            for sequence, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
        ]
        first: list[int] = []
        for start in range(0, len(rows), N_BATCH):
            part = rows[start : start + N_BATCH]
            self.decode(part)
            wanted = sum(row[3] for row in part)
            if wanted:
                first += self.logits(wanted).argmax(1).tolist()
            else:
                api.llama_synchronize(self.context)
        return first

    def step(self, rows: list[tuple[int, int, int]]) -> list[int]:
        """The greedy token after each (token, position, sequence)."""
        self.decode([(*row, 1) for row in rows])
        return self.logits(len(rows)).argmax(1).tolist()


_model: Model | None = None


def _loaded() -> Model:
    if _model is None:
        raise RuntimeError("nothing is loaded")
    return _model


def load(path: str, threads: int, context: int, sequences: int = 1) -> dict[str, Any]:
    """Load a GGUF file, in the place of what was loaded before."""
    global _model
    if _model is not None:
        _model.close()
    start = time.perf_counter()
    _model = Model(path, threads, context, sequences)
    found = {"load_s": time.perf_counter() - start, "vocab_size": _model.vocab_size, "kv_dtype": "fp16"}
    return {**found, "settles_batch": True}


def complete(prompt: list[int], new_tokens: int) -> dict[str, Any]:
    """One greedy request: its first token, then `new_tokens` more, one at a time."""
    model = _loaded()
    model.clear()
    start = time.perf_counter()
    tokens = model.prefill([prompt])
    first = time.perf_counter()
    for i in range(new_tokens):
        tokens += model.step([(tokens[-1], len(prompt) + i, 0)])
    return {"prompt_s": first - start, "decode_s": time.perf_counter() - first, "tokens": tokens}


def batch(prompts: list[list[int]], new_tokens: list[int]) -> dict[str, Any]:
    """Prompts together: all prefills, then steps with a token of each that has not got its number yet."""
    model = _loaded()
    model.clear()
    start = time.perf_counter()
    tokens = [[first] for first in model.prefill(prompts)]
    while active := [s for s, found in enumerate(tokens) if len(found) < new_tokens[s]]:
        rows = [(tokens[s][-1], len(prompts[s]) + len(tokens[s]) - 1, s) for s in active]
        for s, token in zip(active, model.step(rows), strict=True):
            tokens[s].append(token)
    return {"seconds": time.perf_counter() - start, "tokens": tokens}


def settle_batch(prompts: list[list[int]], new_tokens: int) -> dict[str, Any]:
    """Run a short batch twice with a key/value cache per sequence and with one for all, and stay with the faster.

    {"kept": its name, "seconds": {name: s}}. Near a tie the cache per sequence stays, which llama.h advises.
    """
    model = _loaded()
    names = {False: "a K/V cache per sequence", True: "one K/V cache for all"}
    seconds = {}
    for unified, name in names.items():
        model.open_context(unified)
        batch(prompts[:2], [2, 2])
        seconds[name] = min(batch(prompts, [new_tokens] * len(prompts))["seconds"] for _ in range(2))
    unified = seconds[names[True]] < 0.98 * seconds[names[False]]
    if not unified:
        model.open_context(False)
    return {"kept": names[unified], "seconds": seconds}


def write_logits(tokens: list[int], file: str) -> dict[str, Any]:
    """float32 [T, V] of one window of tokens, all at once, as a .npy file."""
    model = _loaded()
    model.clear()
    out = np.lib.format.open_memmap(file, "w+", np.float32, (len(tokens), model.vocab_size))
    for start in range(0, len(tokens), N_BATCH):
        part = tokens[start : start + N_BATCH]
        model.decode([(token, start + i, 0, 1) for i, token in enumerate(part)])
        out[start : start + len(part)] = model.logits(len(part))
    out.flush()
    return {"vocab_size": model.vocab_size}


def quantise(source: str, target: str, kind: str, threads: int) -> dict[str, Any]:
    """A copy of a GGUF file in another format, by llama.cpp's own quantiser. kind: "Q4_0", "Q8_0", "BF16", ..."""
    names = [f"LLAMA_FTYPE_MOSTLY_{kind}", f"LLAMA_FTYPE_MOSTLY_{kind}_M", f"LLAMA_FTYPE_ALL_{kind}"]
    ftype = next((getattr(api, name) for name in names if hasattr(api, name)), None)
    if ftype is None:
        raise ValueError(f"llama.cpp has no format {kind}")
    params = api.llama_model_quantize_default_params()
    params.ftype, params.nthread, params.allow_requantize = ftype, threads, True
    status = api.llama_model_quantize(os.fsencode(source), os.fsencode(target), ctypes.byref(params))
    if status != 0:
        raise RuntimeError(f"llama_model_quantize returned {status}")
    return {"bytes": os.path.getsize(target)}


def versions() -> dict[str, str]:
    parts = api.llama_print_system_info().decode().replace("CPU :", "").split("|")
    built = [part.split("=")[0].strip() for part in parts if part.strip().endswith("= 1")]
    return {"llama-cpp-python": f"{llama_cpp.__version__} ({' '.join(built)})"}


if __name__ == "__main__":
    api.llama_log_set(QUIET, ctypes.c_void_p(0))
    api.llama_backend_init()
    serve_lines(
        {f.__name__: f for f in (load, complete, batch, settle_batch, write_logits, quantise, versions)},
    )
