"""The recorded forward: plain JSON that replays, without the model, to the same bits."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from plait.errors import RecordingError
from plait.memory.layout import make_layout
from plait.memory.paged import PagedMemory
from plait.model.decoder import Decoder, from_config
from plait.model.record import record
from plait.ops import functional as ops
from plait.ops.interpreter import Interpreter
from plait.ops.recording import Recording
from plait.ops.reference import REFERENCE
from plait.ops.signatures import OPERATIONS
from plait.ops.step import Sequences, StepInputs
from tests.configs import CONFIGS

# One process builds and runs the decoder, another replays the recording where plait.model must not exist.
REPLAY = """
import sys, json, torch, numpy as np
from safetensors.torch import load_file
from plait.memory.layout import make_layout
from plait.memory.paged import PagedMemory
from plait.ops.interpreter import Interpreter
from plait.ops.recording import Recording
from plait.ops.step import Sequences, StepInputs

torch.set_num_threads(1)
directory = sys.argv[1]
recording = Recording.from_json(open(f"{directory}/recording.json").read())
# Cloned, since matrix libraries may add up in another order when a mapped tensor is not aligned to a cache line.
weights = {name: tensor.clone() for name, tensor in load_file(f"{directory}/weights.safetensors").items()}
interpreter = Interpreter(recording, weights)
steps = json.load(open(f"{directory}/steps.json"))
layout = make_layout(recording.caches, context_tokens=512, chunk_tokens=512)
memory = PagedMemory(layout, steps["num_blocks"])
outputs = {}
with torch.inference_mode():
    for index, step in enumerate(steps["steps"]):
        arrays = {k: np.array(v, np.int32) for k, v in step.items()}
        sequences = Sequences(arrays["query_start"], arrays["context_len"], arrays["block_table"])
        ids = torch.from_numpy(arrays["ids"]).long()
        begun = memory.begin(ids, StepInputs(sequences=sequences))
        inputs = {"ids": ids, "positions": begun.positions, "logit_rows": torch.from_numpy(arrays["logit_rows"]).long()}
        result = interpreter.run(inputs, begun)
        outputs |= {f"{index}.{name}": value.contiguous() for name, value in result.items()}
loaded = [m for m in sys.modules if m.startswith("plait.model")]
assert not loaded, loaded
from safetensors.torch import save_file
save_file(outputs, f"{directory}/replayed.safetensors")
"""


def _steps(groups: int, block_tokens: int = 16) -> dict:
    """Prefills of 1, 7 and 300 tokens, a mixed step (two decodes, a continued prefill, a new prompt), and a decode
    step.

    Each sequence owns a fixed run of blocks per group, so the tables need no manager here.
    """
    per_sequence = 24
    random = np.random.default_rng(7)

    def table(sequence: int) -> list[list[int]]:
        first = 1 + sequence * groups * per_sequence
        return [list(range(first + g * per_sequence, first + (g + 1) * per_sequence)) for g in range(groups)]

    def step(parts: list[tuple[int, int, int]]) -> dict:
        """parts: (sequence, computed before, new tokens)."""
        counts = [new for _, _, new in parts]
        start = np.concatenate(([0], np.cumsum(counts)))
        return {
            "ids": random.integers(0, 90, int(start[-1])).tolist(),
            "query_start": start.tolist(),
            "context_len": [before + new for _, before, new in parts],
            "block_table": np.stack([table(s) for s, _, _ in parts], 1).tolist(),
            "logit_rows": (start[1:] - 1).tolist(),
        }

    return {
        "num_blocks": 1 + 4 * groups * per_sequence,
        "steps": [
            step([(0, 0, 1)]),
            step([(1, 0, 7)]),
            step([(2, 0, 300)]),
            step([(0, 1, 1), (1, 7, 1), (2, 300, 20), (3, 0, 33)]),
            step([(0, 2, 1), (1, 8, 1), (2, 320, 1), (3, 33, 1)]),
        ],
    }


def _eager(decoder: Decoder, plan: dict) -> dict[str, torch.Tensor]:
    layout = make_layout(decoder.config.caches(), context_tokens=512, chunk_tokens=512)
    memory = PagedMemory(layout, plan["num_blocks"])
    outputs = {}
    with torch.inference_mode():
        for index, step in enumerate(plan["steps"]):
            arrays = {k: np.array(v, np.int32) for k, v in step.items()}
            sequences = Sequences(arrays["query_start"], arrays["context_len"], arrays["block_table"])
            hidden = decoder(torch.from_numpy(arrays["ids"]).long(), StepInputs(sequences=sequences), memory)
            rows = torch.from_numpy(arrays["logit_rows"]).long()
            outputs[f"{index}.hidden"] = hidden
            outputs[f"{index}.logits"] = decoder.logits(hidden.index_select(0, rows))
    return outputs


@pytest.fixture(params=sorted(CONFIGS))
def decoder(request: pytest.FixtureRequest) -> Decoder:
    return from_config(CONFIGS[request.param], seed=3)


@pytest.mark.slow
def test_replay_without_the_model_gives_the_same_bits(decoder: Decoder, tmp_path: Path) -> None:
    recording = record(decoder)
    (tmp_path / "recording.json").write_text(recording.to_json())
    save_file({n: p.detach().contiguous() for n, p in decoder.named_parameters()}, tmp_path / "weights.safetensors")
    plan = _steps(len(make_layout(decoder.config.caches(), context_tokens=512, chunk_tokens=512).groups))
    (tmp_path / "steps.json").write_text(json.dumps(plan))
    subprocess.run([sys.executable, "-c", REPLAY, str(tmp_path)], check=True, timeout=120)

    from safetensors.torch import load_file

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        expected = _eager(decoder, plan)
    finally:
        torch.set_num_threads(threads)
    replayed = load_file(tmp_path / "replayed.safetensors")
    assert replayed.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(value, replayed[name]), name


def test_recording_survives_json(decoder: Decoder) -> None:
    recording = record(decoder)
    assert Recording.from_json(recording.to_json()) == Recording.from_json(
        Recording.from_json(recording.to_json()).to_json()
    )
    assert {ref.name for ref in recording.weights()} == {n for n, _ in decoder.named_parameters()}


def test_recording_has_no_tensors_or_callables(decoder: Decoder) -> None:
    document = json.loads(record(decoder).to_json())

    def walk(value: object) -> None:
        assert value is None or isinstance(value, (bool, int, float, str, list, dict))
        for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            walk(item)

    walk(document)


def test_recorded_shapes_are_the_shapes_of_a_run(decoder: Decoder) -> None:
    recording = record(decoder)
    sizes = {"N": 5, "R": 2}
    seen = []

    def observe(op, inputs, outputs) -> None:
        for number, value in zip(op.outputs, outputs, strict=True):
            expected = tuple(sizes.get(s, s) for s in recording.values[number].shape)
            assert tuple(value.shape) == expected, op.name
            seen.append(op.name)

    from plait.memory.none import NoMemory

    ids = torch.arange(5)
    step = NoMemory().begin(ids, None)
    inputs = {"ids": ids, "positions": step.positions, "logit_rows": torch.tensor([1, 4])}
    Interpreter(recording, dict(decoder.named_parameters())).run(inputs, step, observe)
    assert len(seen) == sum(len(op.outputs) for op in recording.ops)


def test_every_operation_has_a_reference_and_a_function() -> None:
    assert set(OPERATIONS) == set(REFERENCE)
    assert all(callable(getattr(ops, name)) for name in OPERATIONS)


@pytest.mark.parametrize(
    ("fault", "what"),
    [
        (lambda x: x * 2, "__mul__"),
        (lambda x: x.float(), ".float"),
        (lambda x: torch.relu(x), "torch.relu"),
        (lambda x: x[0], "__getitem__"),
        (lambda x: x if x.ndim else None, None),
        (lambda x: bool(x), "__bool__"),
    ],
)
def test_what_is_outside_the_set_fails_with_its_line(fault, what, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = from_config(CONFIGS["llama"])
    layer = decoder.model.layers[1]
    forward = layer.mlp.forward
    monkeypatch.setattr(layer.mlp, "forward", lambda x: forward(fault(x) if what else x))
    if what is None:
        record(decoder)
        return
    with pytest.raises(RecordingError, match="outside the set of operations") as error:
        record(decoder)
    assert what in str(error.value)
    assert "test_recording.py" in str(error.value)


def test_another_format_version_is_refused(decoder: Decoder) -> None:
    data = json.loads(record(decoder).to_json())
    data["format"] = 99
    with pytest.raises(RecordingError, match="99"):
        Recording.from_json(json.dumps(data))
