"""The native plan gives what the reference executor gives: every configuration, mixed steps, random schedules."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch

from plait.engine.reference_executor import ReferenceExecutor
from plait.errors import EngineError, UsageError
from plait.kernels.native import native_library, reason
from plait.memory.layout import make_layout
from plait.model.decoder import Decoder
from plait.model.record import record
from plait.ops.recording import Op, Recording
from plait.ops.step import StepInputs, StepResult
from plait.plan.executor import NativeExecutor
from plait.weights.pack import pack_decoder
from tests.configs import CONFIGS
from tests.plan.models import ALL, every_attribute, layout_of, make, packed, quantised_store, slow_but, without_kernel
from tests.plan.plan_model import PlanModel
from tests.plan.steps import MIXED, Script
from tests.plan.test_lower import SHORT, WIDE, mixed_layouts, replay
from tests.threads import one_thread

__all__ = ["one_thread"]

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(native_library() is None, reason=f"no native library: {reason()}"),
]
TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
KV_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


@cache
def decoder_of(name: str) -> Decoder:
    return make(ALL[name])


class Pair:
    """A native executor and the reference over one script of steps."""

    def __init__(self, decoder: Decoder, recording: Recording | None = None, kv: str = "fp32", **options) -> None:
        layout = layout_of(decoder, KV_BYTES[kv])
        self.script = Script(layout, decoder.config.vocab_size)
        blocks = self.script.num_blocks
        weights = options.pop("weights", None)
        self.store = pack_decoder(decoder, weights)
        self.native = NativeExecutor(
            recording or record(decoder), self.store, layout, blocks, 400, kv_dtype=kv, **options
        )
        self.reference = ReferenceExecutor(decoder, layout, blocks, 400, TORCH_DTYPES[kv])

    def step(self, parts, rows=None) -> tuple[StepResult, StepResult]:
        """Both results of one step. The plan that gives no hidden states gives the same bits as the one that does."""
        ids, inputs = self.script.step(parts, rows)
        short = self.native.execute(ids, inputs, logits=True).logits.copy()
        native = self.native.execute(ids, inputs, logits=True, hidden=True)
        assert np.array_equal(short, native.logits, equal_nan=True)
        return native, self.reference.execute(ids, inputs, logits=True, hidden=True)

    def agree(self, parts, rows=None, tolerance: float = 1e-4) -> None:
        native, reference = self.step(parts, rows)
        assert native.logits.shape == reference.logits.shape and native.hidden.shape == reference.hidden.shape
        if len(native.logits):
            given, expected = (torch.from_numpy(np.array(x.logits)).log_softmax(-1) for x in (native, reference))
            scale = max(1.0, float(np.abs(reference.logits).max()) / 10)
            assert float((given - expected).abs().max()) <= tolerance * scale
        # What it says is best is the first of the best of its own logits.
        sampled = native.logits[:, : self.native.sampled_ids]
        assert native.best_ids.tolist() == sampled.argmax(1).tolist()
        assert native.best_values.tolist() == sampled.max(1).tolist()
        assert np.abs(native.hidden - reference.hidden).max() <= 20 * tolerance


@pytest.mark.parametrize("name", slow_but(("gemma3_text", "gpt_neox", "qwen3"), sorted(CONFIGS)))
def test_mixed_steps_of_every_family(name: str) -> None:
    decoder = decoder_of(name)
    pair = Pair(decoder)
    assert set(pair.native.host_ops) == without_kernel(decoder.config)
    for i, parts in enumerate(SHORT):
        pair.agree(parts, None if i % 2 else [sum(n for _, n in parts) - 1])


@pytest.mark.parametrize("name", ["gpt2", "opt", "gptj", "phi", "cohere", "gpt_oss", "apertus", "phimoe"])
def test_learned_positions_biased_heads_and_sinks_leave_nothing_to_the_reference(name: str) -> None:
    """Each of these had, or would have, an operation on the host."""
    decoder = decoder_of(name)
    assert decoder.config.position_rows or decoder.config.head_bias or name in ("cohere", "gpt_oss", "apertus")
    native = Pair(decoder).native
    assert native.host_ops == () and native.max_steps > 1


@pytest.mark.parametrize("name", ["gpt2", "opt"])
def test_a_position_beyond_the_table_is_refused_and_the_last_one_is_not(name: str) -> None:
    sizes = {"gpt2": {"n_positions": 8}, "opt": {"max_position_embeddings": 8}}
    pair = Pair(make({**CONFIGS[name], **sizes[name]}))
    pair.agree([(0, 8)])
    with pytest.raises(EngineError, match="position 8 of a table of 8"):
        pair.native.execute(*pair.script.step([(0, 1)]))
    with pytest.raises(EngineError, match="position 10 of a table of 8"):
        pair.native.execute(*pair.script.step([(1, 11)]))
    pair.agree([(2, 3)])


def test_a_bias_of_the_head_decides_what_is_best() -> None:
    decoder = make(CONFIGS["phi"])
    with torch.no_grad():
        decoder.lm_head.bias.zero_()[71] = 100.0
    pair = Pair(decoder)
    ids, inputs = pair.script.step([(0, 5)])
    assert set(pair.native.execute(ids, inputs, logits=False).best_ids.tolist()) == {71}
    assert (pair.native.execute(ids, inputs, logits=True).logits.argmax(1) == 71).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(ALL))
def test_every_configuration_of_the_parity_tests(name: str) -> None:
    decoder = decoder_of(name)
    pair = Pair(decoder)
    assert set(pair.native.host_ops) == without_kernel(decoder.config)
    for parts in MIXED:
        pair.agree(parts)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", ["gemma3_text", "gpt_neox", "qwen2"])
def test_random_schedules(name: str, seed: int) -> None:
    """Chunks of random length of random sequences, logits of random rows, in any order."""
    pair = Pair(decoder_of(name))
    random = np.random.default_rng(seed)
    for _ in range(12):
        chosen = random.permutation(4)[: random.integers(1, 5)]
        left = [(int(s), pair.script.tokens - pair.script.computed[s]) for s in chosen]
        parts = [(s, int(min(n, random.choice([1, 1, 2, 17, 60])))) for s, n in left if n]
        total = sum(n for _, n in parts)
        if total:
            pair.agree(parts, random.permutation(total)[: random.integers(0, min(total, 9) + 1)].tolist())


@pytest.mark.parametrize("weights", ["bf16", "fp16"])
def test_weights_in_two_bytes(weights: str) -> None:
    """Against the reference on the weights as rounded: equal but for fp32 rounding."""
    decoder = make(CONFIGS["llama"])
    with torch.no_grad():
        for parameter in decoder.parameters():
            if parameter.ndim == 2:
                parameter.copy_(parameter.to(TORCH_DTYPES[weights]).float())
    pair = Pair(decoder, weights=weights)
    # AVX-512 BF16 multiplies bf16 by bf16: activations are rounded, to 9 binary digits.
    rounds = weights == "bf16" and native_library().isa() == "avx512_bf16"  # type: ignore[union-attr]
    for parts in SHORT:
        pair.agree(parts, **({"tolerance": 0.2} if rounds else {}))


@pytest.mark.parametrize("kv", ["bf16", "fp16"])
def test_keys_and_values_in_two_bytes(kv: str) -> None:
    pair = Pair(decoder_of("llama"), kv=kv)
    for parts in SHORT:
        pair.agree(parts, tolerance={"bf16": 0.1, "fp16": 0.02}[kv])


@pytest.mark.parametrize("form", slow_but(("Q4_1", "Q8_0"), ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", mixed_layouts]))
@pytest.mark.parametrize("name", slow_but(("llama",), ["llama", "gemma3_text", "gpt_neox"]))
def test_quantised_matrices_as_the_arithmetic_of_the_plan_says(name: str, form: str) -> None:
    """Against a float64 model of the plan that rounds activations to 8 bits as the runtime does.

    One layer and few tokens: where a number lies between two roundings, the two may take different ones, which would
    spread over the next layers. What the rounding itself costs is asserted to be much more than what is allowed.
    """
    decoder = make({**WIDE[name], "num_hidden_layers": 1})
    store = quantised_store(decoder, form)
    layout = layout_of(decoder)
    script = Script(layout, decoder.config.vocab_size)
    native = NativeExecutor(record(decoder), store, layout, script.num_blocks, 64, kv_dtype="fp32")
    assert native.host_ops == ()
    model = PlanModel(native.lowered, store, layout, script.num_blocks, rounds=True)
    reference = ReferenceExecutor(decoder, layout, script.num_blocks, 64)
    rounding = []
    for parts in SHORT:
        step = script.step(parts)
        given, expected = native.execute(*step).logits, model.step(*step)[0]
        close = np.abs(given - expected).max(-1)
        assert np.mean(close < 1e-4) >= 0.8 and close.max() < 0.05
        rounding.append(np.abs(reference.execute(*step).logits - given).max())
    assert max(rounding) > 0.002


def test_every_attribute_of_every_operation() -> None:
    recording, weights = every_attribute()
    layout = make_layout(recording.caches, context_tokens=384, chunk_tokens=384)
    script = Script(layout, 50)
    native = NativeExecutor(recording, packed(weights), layout, script.num_blocks, 64, kv_dtype="fp32")
    assert native.host_ops == ()
    steps = [script.step(parts) for parts in SHORT]
    for step, expected in zip(steps, replay(recording, weights, layout, steps, script.num_blocks), strict=True):
        assert np.abs(native.execute(*step).logits - expected["logits"].numpy()).max() <= 1e-4
        given = native.execute(*step, hidden=True)
        assert np.abs(given.logits - expected["logits"].numpy()).max() <= 1e-4
        assert np.abs(given.hidden - expected["hidden"].numpy()).max() <= 1e-4


# Operations without a kernel.


def planted(recording: Recording, at: int, name: str, **attrs) -> Recording:
    """An operation between the one that writes value `at` and everything that reads it."""
    new = len(recording.values)
    ops = []
    for op in recording.ops:
        ops.append(Op(op.name, tuple(new if v == at else v for v in op.inputs), op.outputs, op.weights, op.attrs))
        if at in op.outputs:
            ops.append(Op(name, (at,), (new,), (), attrs))
    outputs = {k: new if v == at else v for k, v in recording.outputs.items()}
    values = (*recording.values, recording.values[at])
    return Recording(values, tuple(ops), recording.inputs, outputs, recording.caches, recording.model)


def value_of(recording: Recording, name: str, index: int = 0) -> int:
    return [op for op in recording.ops if op.name == name][index].outputs[0]


@pytest.mark.parametrize("where", ["embed", "linear", "attend", "gate", "rms_norm", "select_rows"])
def test_an_operation_without_a_kernel_runs_through_the_reference_and_is_named(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from plait.ops.reference import REFERENCE

    monkeypatch.setitem(REFERENCE, "twist", lambda x, *, factor: torch.sin(x) * factor)
    decoder = make(CONFIGS["llama"])
    recording = planted(record(decoder), value_of(record(decoder), where, -1), "twist", factor=1.5)
    pair = Pair(decoder, recording)
    assert pair.native.host_ops == ("twist",)

    from plait.memory.paged import PagedMemory
    from plait.ops.interpreter import Interpreter

    interpreter = Interpreter(recording, {n: p.detach() for n, p in decoder.named_parameters()})
    memory = PagedMemory(pair.script.layout, pair.script.num_blocks)
    for parts in SHORT:
        ids, inputs = pair.script.step(parts)
        short = pair.native.execute(ids, inputs).logits.copy()
        given = pair.native.execute(ids, inputs, hidden=True)
        assert (short == given.logits).all()
        tensor = torch.from_numpy(ids).long()
        begun = memory.begin(tensor, inputs)
        values = {"ids": tensor, "positions": begun.positions, "logit_rows": torch.arange(len(ids))}
        with torch.inference_mode():
            expected = interpreter.run(values, begun)
        assert np.abs(given.logits - expected["logits"].numpy()).max() <= 1e-4
        assert np.abs(given.hidden - expected["hidden"].numpy()).max() <= 1e-4


def test_the_reference_takes_no_more_threads_than_the_plan_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from plait.ops.reference import REFERENCE

    monkeypatch.setitem(REFERENCE, "twist", lambda x: x)
    native = native_library()
    assert native is not None
    decoder = decoder_of("llama")
    pair = Pair(decoder, planted(record(decoder), value_of(record(decoder), "embed"), "twist"))
    native.set_threads(2)
    try:
        for before, after in ((4, 2), (1, 1)):
            torch.set_num_threads(before)
            pair.native.refresh()
            pair.native.execute(*pair.script.step([(0, 3)]))
            assert torch.get_num_threads() == after
    finally:
        native.set_threads(0)


def test_an_operation_that_nobody_knows_is_an_error_that_names_it() -> None:
    decoder = decoder_of("llama")
    recording = planted(record(decoder), value_of(record(decoder), "embed"), "twist")
    pair = Pair(decoder, recording)
    with pytest.raises(EngineError, match="twist"):
        pair.native.execute(*pair.script.step([(0, 3)]))


def test_something_after_the_logits_is_done_by_the_plan_too() -> None:
    """Scaled logits: a product, a row operation, and a host operation that finds the best."""
    decoder = decoder_of("gemma3_text")
    recording = record(decoder)
    pair = Pair(decoder, planted(recording, recording.outputs["logits"], "scale", factor=-0.5), sampled_ids=50)
    assert pair.native.host_ops == ("store_logits",)
    for parts in SHORT:
        native, reference = pair.step(parts)
        assert np.abs(native.logits + 0.5 * reference.logits).max() <= 1e-4
        assert native.best_ids.tolist() == native.logits[:, :50].argmax(1).tolist()
        assert native.best_values.tolist() == native.logits[:, :50].max(1).tolist()


@pytest.mark.parametrize("name", slow_but(("llama",), ["llama", "gemma3_text"]))
def test_attention_without_a_kernel_keeps_its_layer_in_the_references_order(name: str) -> None:
    """Blocks of 4 tokens, which the kernels do not have: every layer attends on the host."""
    decoder = decoder_of(name)
    layout = make_layout(decoder.config.caches(), 4, 384, 384, block_tokens=4)
    script = Script(layout, decoder.config.vocab_size)
    native = NativeExecutor(record(decoder), pack_decoder(decoder), layout, script.num_blocks, 400, kv_dtype="fp32")
    assert native.host_ops == ("attend",)
    reference = ReferenceExecutor(decoder, layout, script.num_blocks, 400)
    for parts in SHORT:
        ids, inputs = script.step(parts)
        given, expected = (e.execute(ids, inputs).logits for e in (native, reference))
        assert np.abs(given - expected).max() <= 1e-4


# The executor itself.


def test_logits_and_hidden_states_are_given_only_when_asked_for() -> None:
    pair = Pair(decoder_of("llama"), sampled_ids=40)
    ids, inputs = pair.script.step([(0, 5)], [1, 4])
    plain = pair.native.execute(ids, inputs, logits=False)
    assert plain.logits is None and plain.hidden is None
    best = plain.best_ids.tolist()
    full = pair.native.execute(ids, inputs, logits=True, hidden=True)
    assert full.logits.shape == (2, 96) and full.hidden.shape == (5, 24)
    assert full.logits[:, :40].argmax(1).tolist() == best and max(best) < 40
    nothing = StepInputs(sequences=inputs.sequences, logit_rows=np.empty(0, np.int32))
    assert len(pair.native.execute(ids, nothing).logits) == 0


def test_copies_come_first() -> None:
    """A sequence goes on in copies of its blocks as it would have in its own."""
    pair = Pair(decoder_of("gemma3_text"))
    script = pair.script
    pair.agree([(0, 37)])
    own = script.table[:, 0].copy()
    spare = script.table[:, 3]
    script.table[:, 0] = spare
    ids, inputs = script.step([(0, 1)])
    used = 37 // 8 + 1
    inputs.sequences.__dict__["copies"] = np.stack((own[:, :used].ravel(), spare[:, :used].ravel()), 1)
    given, expected = (e.execute(ids, inputs) for e in (pair.native, pair.reference))
    assert np.abs(given.logits - expected.logits).max() <= 1e-4
    for group in range(len(own)):
        assert pair.native.read_block(int(own[group, 0])) == pair.native.read_block(int(spare[group, 0]))


def test_the_same_request_gives_the_same_bits_whatever_runs_beside_it() -> None:
    for name in ("llama", "gemma3_text"):
        decoder = decoder_of(name)
        alone, together, chunked = (Pair(decoder) for _ in range(3))
        expected = alone.native.execute(*alone.script.step([(0, 90)])).logits.copy()
        beside = together.native.execute(*together.script.step([(2, 3), (0, 90), (1, 44)])).logits[3:93].copy()
        assert (beside == expected).all()
        pieces = [chunked.native.execute(*chunked.script.step([(0, n)])).logits.copy() for n in (1, 50, 7, 32)]
        assert (np.concatenate(pieces) == expected).all()


def test_refresh_takes_new_weights() -> None:
    decoder = make(CONFIGS["qwen3"])
    pair = Pair(decoder)
    pair.agree([(0, 9)])
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.mul_(1.1)
    pair.native.refresh(pack_decoder(decoder, store=pair.store))
    pair.agree([(1, 9)])
    pair.native.refresh(pack_decoder(decoder, "bf16"))
    pair.agree([(2, 9)], tolerance=0.2)


def test_blocks_come_back_as_they_were_read_and_untouched_pages_cost_nothing() -> None:
    decoder = decoder_of("llama")
    layout = layout_of(decoder)
    native = NativeExecutor(record(decoder), pack_decoder(decoder), layout, 100_000, 64, kv_dtype="fp32")
    assert native.touched_bytes() == 0
    script = Script(layout, decoder.config.vocab_size)
    ids, inputs = script.step([(0, 20)])
    first = native.execute(ids, inputs).logits.copy()
    assert 0 < native.touched_bytes() < 1 << 20
    blocks = script.table[:, 0, :2].ravel().tolist()
    saved = [native.read_block(b) for b in blocks]
    assert all(len(data) == layout.block_bytes for data in saved)
    for b in blocks:
        native.write_block(b, b"\xff" * layout.block_bytes)
    for b, data in zip(blocks, saved, strict=True):
        native.write_block(b, data)
    after = script.step([(0, 1)])
    other = NativeExecutor(record(decoder), pack_decoder(decoder), layout, script.num_blocks, 64, kv_dtype="fp32")
    assert (other.execute(ids, inputs).logits == first).all()
    assert (other.execute(*after).logits == native.execute(*after).logits).all()
    assert not any(native.read_block(0))


def test_a_nan_in_the_weights_comes_out_as_one() -> None:
    decoder = make(CONFIGS["llama"])
    with torch.no_grad():
        decoder.model.layers[1].mlp.down_proj.weight[3, 3] = float("nan")
    result = Pair(decoder).native.execute(*Script(layout_of(decoder), 96).step([(0, 4)]))
    assert np.isnan(result.best_values).all()


def test_wrong_steps_are_refused_and_the_next_one_runs() -> None:
    pair = Pair(decoder_of("llama"))
    ids, inputs = pair.script.step([(0, 5)])
    table = inputs.sequences.block_table
    for change, words in (
        ({"ids": np.full(5, 96, np.int32)}, "token id 96"),
        ({"ids": np.arange(6, dtype=np.int32)}, "6 tokens"),
        ({"logit_rows": np.array([5], np.int32)}, "row 5"),
        ({"block_table": table[:, :, :0]}, "block"),
        ({"block_table": table[:1, :0]}, "table"),
        ({"block_table": table + 10_000}, "block"),
        ({"block_table": table * 0}, "block"),
        ({"context_len": np.array([4], np.int32)}, "context"),
        ({"copies": np.array([[1, 10_000]], np.int32)}, "10000"),
    ):
        s = inputs.sequences
        parts = {
            "query_start": s.query_start,
            "context_len": s.context_len,
            "block_table": s.block_table,
            "copies": s.copies,
        }
        sequences = type(s)(**{k: change.get(k, v) for k, v in parts.items()})
        wrong = StepInputs(sequences=sequences, logit_rows=change.get("logit_rows", inputs.logit_rows))
        with pytest.raises(EngineError, match=words):
            pair.native.execute(change.get("ids", ids), wrong)
    pair.native.execute(ids, inputs)
    with pytest.raises(UsageError, match="token_mask"):
        pair.native.execute(ids, StepInputs(sequences=inputs.sequences, logit_rows=[0], token_mask=[True]))
    with pytest.raises(UsageError, match="logit_rows"):
        pair.native.execute(ids, StepInputs(sequences=inputs.sequences))


def test_a_step_larger_than_the_plan_is_refused() -> None:
    decoder = decoder_of("llama")
    script = Script(layout_of(decoder), 96)
    native = NativeExecutor(
        record(decoder), pack_decoder(decoder), script.layout, script.num_blocks, 8, kv_dtype="fp32", max_rows=2
    )
    with pytest.raises(EngineError, match="9 tokens"):
        native.execute(*script.step([(0, 9)], [0]))
    with pytest.raises(EngineError, match="3 rows"):
        native.execute(*script.step([(1, 5)], [0, 1, 2]))


def test_options_that_do_not_fit_are_refused() -> None:
    decoder = decoder_of("llama")
    for kv, words in (("bf16", "bytes per number"), ("int8", "int8")):
        with pytest.raises(UsageError, match=words):
            NativeExecutor(record(decoder), pack_decoder(decoder), layout_of(decoder), 8, 8, kv_dtype=kv)


def test_the_profile_names_operations_and_adds_up() -> None:
    pair = Pair(decoder_of("llama"))
    pair.native.profile(True)
    pair.native.execute(*pair.script.step([(0, 60)]))
    rows = pair.native.profile(False)
    assert [kind for kind, _, _ in rows][:2] == ["embed", "positions"]
    assert {"linear", "attend", "gated", "logits"} <= {kind for kind, _, s in rows if s > 0}
    assert 0 < sum(s for _, _, s in rows) <= pair.native.compute_s
    assert pair.native.plan_bytes >= pair.native.lowered.arena_bytes


@pytest.mark.slow
def test_wide_models_too() -> None:
    """Head width 32 and more than one panel everywhere."""
    for raw in WIDE.values():
        pair = Pair(make(raw))
        for parts in SHORT[1:]:
            pair.agree(parts)
