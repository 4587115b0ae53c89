"""Adapters in the native plan: what the reference gives, and for every row what it gives alone, bit for bit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from plait.engine.reference_executor import ReferenceExecutor
from plait.errors import EngineError, UsageError
from plait.kernels.native import native_library, reason
from plait.model.record import record
from plait.plan.adapters import PackedAdapters, groups_of
from plait.plan.executor import NativeExecutor
from plait.weights.pack import pack_decoder
from tests.adapters import ids_for, make_adapter
from tests.plan.models import ALL, layout_of, make, quantised_store
from tests.plan.steps import Script
from tests.threads import one_thread

__all__ = ["one_thread"]

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(native_library() is None, reason=f"no native library: {reason()}"),
]
# Prompts of all, a mixed step, decoding; the adapter of each sequence.
STEPS = (((0, 5), (1, 9), (2, 40), (3, 1)), ((0, 1), (3, 33), (2, 1), (1, 1)), ((3, 1), (2, 1), (1, 1), (0, 1)))
ADAPTER_OF = (1, 0, 2, 1)


def numbers(parts) -> np.ndarray:
    return ids_for(*(ADAPTER_OF[s] for s, _ in parts))


def executor(decoder, store, **options) -> tuple[NativeExecutor, Script]:
    layout = layout_of(decoder, 4)
    script = Script(layout, decoder.config.vocab_size)
    return NativeExecutor(record(decoder), store, layout, script.num_blocks, 400, kv_dtype="fp32", **options), script


def run(native, script, steps=STEPS, adapted: bool = True, hidden: bool = False) -> dict[int, list[np.ndarray]]:
    """Per sequence the logits (or hidden states) of all its tokens, step by step."""
    out: dict[int, list[np.ndarray]] = {s: [] for s in range(4)}
    for parts in steps:
        ids, inputs = script.step(parts)
        result = native.execute(ids, replace(inputs, adapter_ids=numbers(parts) if adapted else None), hidden=hidden)
        rows = result.hidden if hidden else result.logits
        at = 0
        for s, count in parts:
            out[s].append(rows[at : at + count].copy())
            at += count
    return out


def two_adapters(tmp_path, decoder, dtype=torch.float32):
    """One of all linear modules with rank 4, one of some of them with rank 19."""
    return [
        make_adapter(tmp_path, decoder, "one", rank=4, seed=1, dtype=dtype),
        make_adapter(tmp_path, decoder, "two", rank=19, seed=2, lora_alpha=7, endings=("q_proj", "v_proj", "up_proj")),
    ]


FAMILIES = ("llama", "qwen2", "gemma3_text", "qwen2_moe", "phi3: fused")


def raw_of(name: str) -> dict:
    return ALL[name] if name in ALL else next(raw for key, raw in ALL.items() if key.startswith(name.split(":")[0]))


@pytest.mark.parametrize("name", FAMILIES)
def test_mixed_steps_give_what_the_reference_gives(name: str, tmp_path) -> None:
    decoder = make(raw_of(name))
    endings = {"phi3: fused": ("qkv_proj", "down_proj", "gate_up_proj")}.get(name)
    adapters = (
        two_adapters(tmp_path, decoder)
        if endings is None
        else [make_adapter(tmp_path, decoder, n, rank=3, seed=i, endings=endings) for i, n in enumerate("ab")]
    )
    native, script = executor(decoder, pack_decoder(decoder))
    reference = ReferenceExecutor(decoder, script.layout, script.num_blocks, 400, torch.float32)
    native.set_adapters(adapters)
    reference.set_adapters(adapters)
    found, expected = run(native, script), run(reference, Script(script.layout, script.vocab_size))
    plain = run(native, Script(script.layout, script.vocab_size), adapted=False)
    for s in range(4):
        a, b, c = (torch.from_numpy(np.concatenate(x[s])).log_softmax(-1) for x in (found, expected, plain))
        scale = max(1.0, float(np.abs(np.concatenate(expected[s])).max()) / 10)
        assert float((a - b).abs().max()) <= 1e-4 * scale
        assert (float((a - c).abs().max()) > 0.1) == (ADAPTER_OF[s] > 0)  # the adapters do something
    hidden = [run(e, Script(script.layout, script.vocab_size), hidden=True) for e in (native, reference)]
    assert max(np.abs(x - y).max() for s in range(4) for x, y in zip(hidden[0][s], hidden[1][s], strict=True)) < 2e-3


@pytest.mark.parametrize("form", ["F32", "Q4_1", "Q8_0"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_whoever_is_in_the_batch(form: str, dtype: torch.dtype, tmp_path) -> None:
    raw = {**raw_of("llama"), "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4}
    decoder = make(raw)
    store = quantised_store(decoder, form)
    native, script = executor(decoder, store)
    plain = run(native, script, adapted=False)
    native.set_adapters(two_adapters(tmp_path, decoder, dtype))
    together = run(native, Script(script.layout, script.vocab_size))
    for s in range(4):
        # Alone, and read in other chunks.
        own = Script(script.layout, script.vocab_size)
        steps = [((s, count),) for parts in STEPS for t, count in parts if t == s]
        alone = run(native, own, steps)
        assert all(np.array_equal(x, y) for x, y in zip(together[s], alone[s], strict=True))
        whole = Script(script.layout, script.vocab_size)
        total = sum(count for ((_, count),) in steps)
        (once,) = run(native, whole, [((s, total),)])[s]
        assert np.array_equal(np.concatenate(together[s]), once)
        without = all(np.array_equal(x, y) for x, y in zip(together[s], plain[s], strict=True))
        assert without == (ADAPTER_OF[s] == 0)


@pytest.mark.parametrize("form", ["F32", "Q4_1"])
def test_the_number_of_threads_changes_no_bit(form: str, tmp_path) -> None:
    raw = {**raw_of("llama"), "hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8}
    decoder, library = make(raw), native_library()
    store = quantised_store(decoder, form)
    adapters = two_adapters(tmp_path, decoder)
    found = []
    try:
        for threads in (1, 2, 3):
            library.set_threads(threads)
            native, script = executor(decoder, store)
            native.set_adapters(adapters)
            rows = run(native, script)
            found.append(np.concatenate([x.ravel() for s in range(4) for x in rows[s]]))
    finally:
        library.set_threads(0)
    assert np.array_equal(found[0], found[1]) and np.array_equal(found[0], found[2])


def test_quantised_weights_with_an_adapter_stay_near_the_reference(tmp_path) -> None:
    raw = {**raw_of("llama"), "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4}
    decoder = make(raw)
    store = quantised_store(decoder, "Q8_0")  # the decoder has these very weights now
    native, script = executor(decoder, store)
    reference = ReferenceExecutor(decoder, script.layout, script.num_blocks, 400, torch.float32)
    adapters = two_adapters(tmp_path, decoder)
    distances = []
    for adapted in (False, True):
        for e in (native, reference):
            e.set_adapters(adapters)
        pair = [run(e, Script(script.layout, script.vocab_size), adapted=adapted) for e in (native, reference)]
        logs = [torch.from_numpy(np.concatenate([x for s in range(4) for x in p[s]])).log_softmax(-1) for p in pair]
        distances.append(float((logs[0] - logs[1]).abs().mean()))
    # What activations in int8 cost without an adapter, they may cost with one.
    assert distances[1] < 2 * distances[0] + 1e-3


def test_steps_in_a_row_are_those_made_one_by_one(tmp_path) -> None:
    decoder = make(raw_of("llama"))
    native, script = executor(decoder, pack_decoder(decoder))
    native.set_adapters(two_adapters(tmp_path, decoder))
    prompts = [(0, 3), (1, 17), (2, 30), (3, 2)]
    ids, inputs = script.step(prompts)
    native.execute(ids, replace(inputs, adapter_ids=numbers(prompts)))
    decode = [(s, 1) for s in range(4)]
    first, inputs = script.step(decode)
    inputs = replace(inputs, reach=None, adapter_ids=numbers(decode))
    ids, values = native.execute_steps(first, inputs, 12, 60.0, np.array([], np.int32))
    sequences, token = inputs.sequences, first
    for step in range(12):
        bounds = replace(sequences, context_len=sequences.context_len + np.int32(step))
        result = native.execute(token, replace(inputs, sequences=bounds), logits=False)
        assert result.best_ids.tolist() == ids[step].tolist()
        assert result.best_values.tolist() == values[step].tolist()
        token = result.best_ids.copy()
    plain, _ = native.execute_steps(first, replace(inputs, adapter_ids=None), 12, 60.0, np.array([], np.int32))
    assert plain.tolist() != ids.tolist()


def test_adapters_are_exchanged_and_survive_new_weights(tmp_path) -> None:
    decoder = make(raw_of("llama"))
    store = pack_decoder(decoder)
    native, script = executor(decoder, store)
    one, two = two_adapters(tmp_path, decoder)

    def logits(*order) -> np.ndarray:
        fresh = Script(script.layout, script.vocab_size)
        native.set_adapters(order)
        ids, inputs = fresh.step([(0, 9)])
        return native.execute(ids, replace(inputs, adapter_ids=ids_for(1))).logits.copy()

    first, second = logits(one, two), logits(two)
    assert not np.array_equal(first, second)
    with pytest.raises(EngineError, match="no adapter 2"):  # taken away with the exchange
        ids, inputs = Script(script.layout, script.vocab_size).step([(0, 9)])
        native.execute(ids, replace(inputs, adapter_ids=ids_for(2)))
    assert np.array_equal(logits(one), first)
    native.refresh(store)
    ids, inputs = Script(script.layout, script.vocab_size).step([(0, 9)])
    assert np.array_equal(native.execute(ids, replace(inputs, adapter_ids=ids_for(1))).logits, first)
    assert native.adapter_bytes > 0


@pytest.mark.parametrize("wrong", [ids_for(3), ids_for(-1), ids_for(1, 1), np.zeros((1, 1), np.int32)])
def test_a_step_with_adapters_that_are_not_there_is_refused(wrong: np.ndarray, tmp_path) -> None:
    decoder = make(raw_of("llama"))
    native, script = executor(decoder, pack_decoder(decoder))
    native.set_adapters(two_adapters(tmp_path, decoder))
    ids, inputs = script.step([(0, 9)])
    with pytest.raises(EngineError, match="adapter"):
        native.execute(ids, replace(inputs, adapter_ids=wrong))


def test_a_plan_whose_products_an_adapter_was_not_packed_for_is_no_silent_loss(tmp_path) -> None:
    decoder = make(raw_of("llama"))
    native, _ = executor(decoder, pack_decoder(decoder))
    groups = list(groups_of(native.lowered).values())
    adapters = two_adapters(tmp_path, decoder)
    PackedAdapters(adapters, groups).give(native.plan)
    with pytest.raises(AssertionError, match="not packed for"):
        PackedAdapters(adapters, groups[1:]).give(native.plan)


def test_adapters_that_are_refused_leave_those_that_are_there(tmp_path) -> None:
    decoder = make(raw_of("llama"))
    native, script = executor(decoder, pack_decoder(decoder))
    one, two = two_adapters(tmp_path, decoder)
    native.set_adapters([one])

    def logits() -> np.ndarray:
        ids, inputs = Script(script.layout, script.vocab_size).step([(0, 9)])
        return native.execute(ids, replace(inputs, adapter_ids=ids_for(1))).logits.copy()

    first = logits()
    wrong = replace(one, targets={"lm_head.weight": next(iter(one.targets.values()))})
    with pytest.raises(UsageError, match="lm_head.weight, which has no native kernel"):
        native.set_adapters([two, wrong])
    assert np.array_equal(logits(), first)
