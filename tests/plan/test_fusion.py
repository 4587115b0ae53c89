"""Every fusion rule gives an equal recording, bit for bit on the reference, and keeps off what it must not touch."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from plait.memory.none import NoMemory
from plait.model.config import FeedForwardSpec
from plait.model.decoder import Decoder
from plait.model.record import record
from plait.ops.interpreter import Interpreter
from plait.ops.recording import Recording, Value, WeightRef
from plait.ops.symbolic import Recorder, Symbol
from plait.plan import fusion
from plait.plan.fused import FUSED, references
from plait.plan.fusion import RULES, fuse, select_early
from tests.configs import CONFIGS
from tests.plan.models import make, slow_but
from tests.threads import one_thread

__all__ = ["one_thread"]

pytestmark = pytest.mark.usefixtures("one_thread")


def dense(ref: WeightRef) -> bool:
    return False


def run(recording: Recording, weights: dict[str, torch.Tensor], ids: torch.Tensor) -> dict[str, torch.Tensor]:
    step = NoMemory().begin(ids, None)
    inputs = {"ids": ids, "positions": step.positions, "logit_rows": torch.tensor([0, len(ids) - 1])}
    with torch.inference_mode():
        return Interpreter(recording, weights, references()).run(inputs, step)


def assert_equal(before: Recording, after: Recording, weights: dict[str, torch.Tensor]) -> None:
    ids = torch.arange(19) % 7
    expected, given = run(before, weights, ids), run(after, weights, ids)
    assert given.keys() == expected.keys()
    for name in expected:
        assert torch.equal(expected[name], given[name]), name


@pytest.mark.parametrize("family", slow_but(("llama", "gpt_neox"), sorted(CONFIGS)))
def test_each_rule_alone_and_all_together_give_the_same_bits(family: str) -> None:
    decoder = make(CONFIGS[family])
    weights = {name: p.detach() for name, p in decoder.named_parameters()}
    recording = record(decoder)
    for rule in RULES:
        assert_equal(recording, rule(recording, dense), weights)
    fused = fuse(recording)
    assert len(fused.ops) < len(recording.ops)
    assert_equal(recording, fused, weights)
    assert Recording.from_json(fused.to_json()).to_json() == fused.to_json()
    assert fuse(fused).ops == fused.ops


def names(recording: Recording) -> Counter[str]:
    return Counter(op.name for op in recording.ops)


@pytest.mark.parametrize(
    ("family", "per_layer"),
    [
        ("llama", {"linear_group": 1, "gated_linear": 1, "linear_add": 2}),
        ("gemma3_text", {"linear_group": 1, "gated_linear": 1, "linear": 2}),
        ("gpt_neox", {"linear_group": 1, "activated_linear": 1, "linear_add": 1, "linear": 1}),
    ],
)
def test_what_a_layer_becomes(family: str, per_layer: dict[str, int]) -> None:
    decoder = make(CONFIGS[family])
    counts = names(fuse(record(decoder)))
    layers = len(decoder.model.layers)
    products = {name: counts[name] for name in (*FUSED, "linear") if counts[name] and name != "capped_logits"}
    assert products == {name: n * layers for name, n in per_layer.items()}
    assert counts["capped_logits"] == (1 if family == "gemma3_text" else 0)


class Bench:
    """A hand-made recording: x [N, 8] and its consumers."""

    def __init__(self) -> None:
        self.recorder = Recorder({})
        self.x = self.recorder.input("x", Value(("N", 8)))
        self.count = 0

    def weight(self, rows: int = 8, form: str = "float32") -> WeightRef:
        self.count += 1
        return WeightRef(f"w{self.count}", (rows, 8), form)

    def linear(self, x: Symbol, rows: int = 8, form: str = "float32") -> Symbol:
        return self.recorder.emit("linear", (x,), (self.weight(rows, form), None))

    def op(self, name: str, *inputs: Symbol, **attrs) -> Symbol:
        return self.recorder.emit(name, inputs, **attrs)

    def recording(self, *outputs: Symbol) -> Recording:
        return self.recorder.recording({f"out{i}": s for i, s in enumerate(outputs)})

    def check(self, recording: Recording, rule: str, fires: bool) -> Recording:
        """Apply one rule; whether it fires or not, the results are the same."""
        after = getattr(fusion, rule)(recording, fusion._by_format)
        assert (after.ops != recording.ops) == fires
        generator = torch.Generator().manual_seed(1)
        weights = {ref.name: torch.randn(ref.shape, generator=generator) for ref in recording.weights()}
        x = torch.randn(5, 8, generator=generator)
        before, given = (Interpreter(r, weights, references()).run({"x": x}, None) for r in (recording, after))
        for name in before:
            assert torch.equal(before[name], given[name])
        return after


def test_linear_add_takes_either_order_and_the_later_of_two_products() -> None:
    for swap in (False, True):
        b = Bench()
        y = b.linear(b.x)
        after = b.check(b.recording(b.op("add", *((y, b.x) if swap else (b.x, y)))), "linear_add", True)
        assert names(after) == {"linear_add": 1}
    b = Bench()
    first, second = b.linear(b.x), b.linear(b.x)
    after = b.check(b.recording(b.op("add", second, first)), "linear_add", True)
    assert [op.name for op in after.ops] == ["linear", "linear_add"]
    assert after.ops[1].weights[0] == b.recording(second).ops[1].weights[0]


def test_linear_add_keeps_off_a_product_that_is_used_elsewhere() -> None:
    b = Bench()
    y = b.linear(b.x)
    b.check(b.recording(b.op("add", b.x, y), b.op("scale", y, factor=2.0)), "linear_add", False)
    b = Bench()
    y = b.linear(b.x)
    b.check(b.recording(b.op("add", b.x, y), y), "linear_add", False)
    b = Bench()
    y = b.linear(b.x)
    b.check(b.recording(b.op("add", y, y)), "linear_add", False)


def test_linear_add_keeps_off_operands_of_two_shapes() -> None:
    b = Bench()
    b.check(b.recording(b.op("add", b.x, b.linear(b.x, 1))), "linear_add", False)


def test_linear_group_takes_three_at_a_time() -> None:
    b = Bench()
    outputs = [b.linear(b.x, rows) for rows in (8, 4, 4, 12, 3)]
    after = b.check(b.recording(*outputs), "linear_group", True)
    assert [(op.name, len(op.outputs)) for op in after.ops] == [("linear_group", 3), ("linear_group", 2)]


def test_linear_group_keeps_off_products_of_different_inputs_or_storage() -> None:
    b = Bench()
    y = b.linear(b.x)
    b.check(b.recording(b.linear(y)), "linear_group", False)  # one depends on the other
    b = Bench()
    outputs = b.linear(b.x), b.linear(b.x, form="q4_0")
    b.check(b.recording(*outputs), "linear_group", False)
    b = Bench()
    outputs = b.linear(b.x), b.linear(b.x, form="q4_0"), b.linear(b.x), b.linear(b.x, form="q6_K")
    after = b.check(b.recording(*outputs), "linear_group", True)
    formats = [[ref.format for ref in op.weights if ref is not None] for op in after.ops]
    assert formats == [["float32", "float32"], ["q4_0", "q6_K"]]


def test_gated_linear_keeps_off_other_inputs_other_storage_and_shared_products() -> None:
    b = Bench()
    b.check(b.recording(b.op("gate", b.linear(b.x), b.linear(b.x), kind="silu")), "gated_linear", True)
    b = Bench()
    z = b.op("scale", b.x, factor=0.5)
    b.check(b.recording(b.op("gate", b.linear(b.x), b.linear(z), kind="silu")), "gated_linear", False)
    b = Bench()
    b.check(b.recording(b.op("gate", b.linear(b.x), b.linear(b.x, form="q8_0"), kind="silu")), "gated_linear", False)
    b = Bench()
    y = b.linear(b.x)
    b.check(b.recording(b.op("gate", y, y, kind="silu")), "gated_linear", False)
    b = Bench()
    gate, up = b.linear(b.x), b.linear(b.x)
    b.check(b.recording(b.op("gate", gate, up, kind="gelu"), up), "gated_linear", False)


def test_activated_linear_keeps_off_a_product_that_is_an_output() -> None:
    b = Bench()
    b.check(b.recording(b.op("activate", b.linear(b.x), kind="gelu_tanh")), "activated_linear", True)
    b = Bench()
    y = b.linear(b.x)
    b.check(b.recording(b.op("activate", y, kind="relu"), y), "activated_linear", False)


def test_capped_logits_keeps_off_logits_that_are_an_output() -> None:
    b = Bench()
    y = b.recorder.emit("logits", (b.x,), (b.weight(11),))
    b.check(b.recording(b.op("soft_cap", y, limit=0.5)), "capped_logits", True)
    b = Bench()
    y = b.recorder.emit("logits", (b.x,), (b.weight(11),))
    b.check(b.recording(b.op("soft_cap", y, limit=0.5), y), "capped_logits", False)


def test_one_product_is_not_taken_by_two_rules() -> None:
    """A residual that is itself a product stays, and is computed before."""
    b = Bench()
    a, c = b.linear(b.x), b.linear(b.x)
    total = b.op("add", b.op("add", c, a), b.x)
    after = b.check(b.recording(total), "linear_add", True)
    assert [op.name for op in after.ops] == ["linear", "linear_add", "add"]


def linears_of(decoder: Decoder) -> int:
    """Matrix products after the last attention's own that every token goes through."""
    spec = decoder.config.layers[-1].feed_forward
    plain = spec if isinstance(spec, FeedForwardSpec) else spec.shared
    count = 0 if plain is None else 3 if plain.gated else 2
    return count + (0 if isinstance(spec, FeedForwardSpec) else spec.shared_gate)


@pytest.mark.parametrize("family", slow_but(("llama", "gpt_neox"), sorted(CONFIGS)))
def test_rows_are_selected_after_the_last_attention(family: str) -> None:
    """The same logits; fewer rows in a matrix product may round otherwise."""
    decoder = make(CONFIGS[family])
    weights = {name: p.detach() for name, p in decoder.named_parameters()}
    recording = record(decoder)
    early = select_early(recording)
    assert early.outputs.keys() == {"logits"}
    ids = torch.arange(19) % 7
    expected = run(recording, weights, ids)["logits"]
    for form in (early, fuse(early), Recording.from_json(early.to_json())):
        assert torch.allclose(run(form, weights, ids)["logits"], expected, rtol=0, atol=2e-5)
    # Nothing but the selection reads the last attention, and all products after it are by rows of logits.
    last = max(i for i, op in enumerate(early.ops) if op.name in ("attend", "attend_latent"))
    assert early.ops[last + 1].name == "select_rows" or early.ops[last + 2].name == "select_rows"
    after = [op for op in early.ops[last + 1 :] if op.name not in ("select_rows", "view")]
    assert len([op for op in after if op.name == "linear"]) == 1 + linears_of(decoder)
    moved = [op for op in after if early.values[op.outputs[0]].shape[0] == "R"]
    # (The parallel branch of gpt_neox does not wait for the attention, and moves all the same.)
    assert moved == after


def test_what_is_an_output_or_read_by_attention_is_not_moved() -> None:
    r = Recorder({})
    ids, rows = r.input("x", Value(("N", 8))), r.input("logit_rows", Value(("R",), "i64"))
    shared = r.emit("scale", (ids,), factor=2.0)
    k, v = (r.emit("view", (shared,), tail=(1, 8), drop=1) for _ in range(2))
    spec = {"num_heads": 1, "num_kv_heads": 1, "key_width": 8, "value_width": 8, "scale": 1.0}
    attended = r.emit("attend", (k, k, v), layer=0, spec=spec)
    total = r.emit("add", (r.emit("view", (attended,), tail=(8,), drop=2), shared))
    kept = r.emit("scale", (total,), factor=3.0)
    logits = r.emit("logits", (r.emit("select_rows", (total, rows)),), (WeightRef("w", (5, 8)),))
    early = select_early(r.recording({"logits": logits, "hidden": kept}))
    assert [op.name for op in early.ops][:4] == ["scale", "view", "view", "attend"]
    # `kept` is computed still, for nobody, from all rows: so nothing could move over it.
    assert early.values[total.number].shape[0] == "N"
    plain = r.recording({"hidden": kept})
    assert select_early(plain) is plain
