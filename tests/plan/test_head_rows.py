"""Norms, rotation and cache writes of a head in its attention item (csrc/head_rows.h): the bits of a stage of its own.

Where every sequence of a step has one token, attention does them; beside a sequence with more tokens they are a stage
of row operations. The same tokens must get the same bits either way, and leave the same keys and values behind.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from plait.kernels.native import native_library, reason
from plait.memory.layout import CacheLayout, make_layout
from plait.model.record import record
from plait.plan.executor import NativeExecutor
from plait.weights.pack import pack_decoder
from tests.plan.models import ALL, make
from tests.plan.steps import Script

pytestmark = pytest.mark.skipif(native_library() is None, reason=f"no native library: {reason()}")


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    library = native_library()
    assert library is not None
    before = library.threads()
    library.set_threads(request.param)
    yield request.param
    library.set_threads(before)


def run(name: str, kv_dtype: str, beside: int) -> tuple[list[np.ndarray], int]:
    """Two decoding steps of three sequences, alone or beside a prompt of `beside` tokens.

    -> the logits of the three in each, and how many stages of the second step took time.
    """
    decoder = make(ALL[name])
    layout: CacheLayout = make_layout(
        decoder.config.caches(), 4 if kv_dtype == "fp32" else 2, context_tokens=700, chunk_tokens=700
    )
    script = Script(layout, decoder.config.vocab_size, tokens=700)
    executor = NativeExecutor(record(decoder), pack_decoder(decoder), layout, script.num_blocks, 700, kv_dtype=kv_dtype)
    ids, inputs = script.step([(0, 3), (1, 40), (2, 600)], rows=[0])
    executor.execute(ids, inputs)
    logits = []
    for _ in range(2):
        others = [(3, beside)] if beside else []
        ids, inputs = script.step([(0, 1), (1, 1), (2, 1), *others], rows=[0, 1, 2])
        executor.profile(True)
        logits.append(executor.execute(ids, inputs).logits.copy())
    return logits, sum(seconds > 0 for _, _, seconds in executor.profile(False))


@pytest.mark.parametrize("kv_dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3_text", "cohere", "gpt_oss"])
def test_a_decoded_token_gets_the_same_bits_alone_and_beside_a_prompt(name: str, kv_dtype: str, threads: int) -> None:
    alone, stages = run(name, kv_dtype, 0)
    beside, more_stages = run(name, kv_dtype, 5)
    layers = len(make(ALL[name]).config.layers)
    assert more_stages == stages + layers, "where all decode, a stage of every layer falls away"
    for a, b in zip(alone, beside, strict=True):
        assert np.isfinite(a).all() and np.array_equal(a, b)
