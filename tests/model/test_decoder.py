"""The decoder itself: its parameters, its trace, its ties, and attention that sees what it should."""

from __future__ import annotations

import pytest
import torch

import plait
from plait.memory.dense import DenseMemory
from plait.memory.none import NoMemory
from plait.model.decoder import Trace, build
from plait.model.families import families
from plait.model.layers import Experts
from plait.model.record import record
from plait.ops.step import StepInputs
from plait.weights.mapping import BoundMap
from tests.memory.tiny_decoders import CONFIGS, tiny_decoder

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("family", CONFIGS)
def test_param_counts_are_those_of_the_parameters(family):
    decoder = tiny_decoder(family)
    counts = decoder.param_counts()
    assert counts["total"] == sum(p.numel() for p in decoder.parameters())
    stacks = [module for module in decoder.modules() if isinstance(module, Experts)]
    idle = sum(p.numel() * (1 - 2 / 4) for experts in stacks for p in experts.parameters())  # 2 of 4 experts at a time
    assert counts["active"] == counts["total"] - idle
    assert counts["embedding"] == decoder.model.embed_tokens.weight.numel()
    assert counts["ffn_total"] == sum(p.numel() for name, p in decoder.named_parameters() if ".mlp." in name)
    norms = sum(p.numel() for name, p in decoder.named_parameters() if "norm" in name)
    assert counts["norms"] == norms


@pytest.mark.parametrize("family", CONFIGS)
def test_a_familys_name_map_takes_random_tensors_there_and_back(family):
    decoder = tiny_decoder(family)
    parameters = dict(decoder.named_parameters())
    bound = BoundMap(decoder.config, families()[family].names)
    out = {}
    for assignment in bound.outgoing(list(parameters)):
        (first, *_) = assignment.parts
        if first.place is not None:
            out[assignment.file] = first.place.to_file(first.place.of(parameters[first.name].detach()))
            continue
        parts = [(parameters[p.name].detach(), p.rows) for p in assignment.parts]
        if len(parts) == 1 and parts[0][1] is None:
            out[assignment.file] = parts[0][0].unsqueeze(0) if assignment.one_row else parts[0][0]
            continue
        whole = torch.empty(sum(t.shape[0] for t, _ in parts), *parts[0][0].shape[1:])
        for tensor, rows in parts:
            whole[slice(None) if rows is None else torch.from_numpy(rows)] = tensor
        out[assignment.file] = whole
    back = {name: torch.full_like(p, float("nan")) for name, p in parameters.items()}
    plan = bound.incoming(out, {name: tuple(p.shape) for name, p in parameters.items()})
    for assignment in plan.assignments:
        for part in assignment.parts:
            whole = out[assignment.file]
            target = back[part.name].detach() if part.place is None else part.place.of(back[part.name].detach())
            whole = whole if part.rows is None else whole[torch.from_numpy(part.rows)]
            target.copy_(whole[0] if assignment.one_row else part.place.from_file(whole) if part.place else whole)
    assert all(torch.equal(back[name], p) for name, p in parameters.items())
    assert not plan.skipped


def test_a_tied_head_is_one_parameter_with_the_embedding_also_after_moving():
    decoder = tiny_decoder("llama", tie_word_embeddings=True)
    assert decoder.lm_head.weight is decoder.model.embed_tokens.weight
    moved = decoder.to(torch.float64)
    assert moved.lm_head.weight is moved.model.embed_tokens.weight
    assert "lm_head.weight" not in dict(decoder.named_parameters())
    built = build(decoder.config)
    assert built.lm_head.weight is built.model.embed_tokens.weight


def test_from_config_gives_the_same_weights_for_the_same_seed():
    raw = {"model_type": "llama", "vocab_size": 11, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    raw |= {"num_attention_heads": 2, "max_position_embeddings": 32}
    a, b, c = (plait.from_config(raw, seed=seed).state_dict() for seed in (4, 4, 5))
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not torch.equal(a["model.embed_tokens.weight"], c["model.embed_tokens.weight"])
    assert a["model.norm.weight"].eq(1).all()


def test_a_flat_row_is_a_batch_of_one_and_a_batch_is_its_rows():
    decoder = tiny_decoder("gemma3_text")
    ids = torch.randint(0, 29, (3, 17))
    with torch.inference_mode():
        whole = decoder(ids)
        for row, hidden in zip(ids, whole, strict=True):
            assert torch.allclose(decoder(row), hidden, atol=1e-5)
            assert torch.equal(decoder(row), decoder(row.unsqueeze(0))[0])


def test_a_trace_keeps_the_layers_that_were_asked_for_and_the_value_before_the_final_norm():
    decoder = tiny_decoder("qwen3")
    ids = torch.arange(12) % 29
    trace = Trace(layers=(1,))
    with torch.inference_mode():
        hidden = decoder(ids, trace=trace)
        assert list(trace.hidden_states) == [1]
        assert torch.equal(trace.hidden_states[1], trace.last_hidden)
        assert torch.equal(decoder.model.norm(trace.last_hidden), hidden)


def test_positions_that_are_given_are_used():
    decoder = tiny_decoder("llama")
    ids = torch.arange(12) % 29
    with torch.inference_mode():
        default = decoder(ids)
        assert torch.equal(decoder(ids, StepInputs(positions=torch.arange(12))), default)
        moved = decoder(ids, StepInputs(positions=torch.arange(100, 112)))
        assert torch.allclose(moved, default, atol=1e-4), "rotary positions are relative"
        stretched = decoder(ids, StepInputs(positions=3 * torch.arange(12)))
        assert not torch.allclose(stretched, default, atol=1e-2)


@pytest.mark.parametrize("memory", ["none", "dense"])
def test_a_window_of_4_shows_a_query_itself_and_the_three_before(memory):
    """One layer, uniform attention over one-hot values: the non-zero entries of a row are the keys that it saw."""
    tokens, window = 10, 4
    decoder = tiny_decoder("mistral", sliding_window=window, num_hidden_layers=1)
    spec = decoder.config.layers[0].attention.attend
    q = torch.zeros(1, tokens, spec.num_heads, spec.key_width)
    k = torch.zeros(1, tokens, spec.num_kv_heads, spec.key_width)
    ids = torch.zeros(1, tokens, dtype=torch.long)
    seen = torch.zeros(tokens, tokens, dtype=torch.bool)
    for position in range(tokens):
        held = NoMemory() if memory == "none" else DenseMemory(decoder.config.caches(), 1)
        v = torch.zeros(1, tokens, spec.num_kv_heads, spec.value_width)
        v[0, position] = 1.0
        out = held.begin(ids, None).attend(0, q, k, v, spec)
        seen[:, position] = out[0, :, 0, 0] > 0
    assert seen.sum(-1).tolist() == [min(i + 1, window) for i in range(tokens)]
    for i in range(tokens):
        assert seen[i, max(0, i - window + 1) : i + 1].all()


def test_recording_leaves_the_training_mode_as_it_was():
    decoder = tiny_decoder("llama")
    decoder.train()
    record(decoder)
    assert decoder.training


@pytest.mark.parametrize("family", CONFIGS)
def test_bf16_stays_close_to_fp32(family):
    decoder = tiny_decoder(family)
    ids = torch.arange(40) % 29
    with torch.inference_mode():
        exact = decoder.logits(decoder(ids)).log_softmax(-1)
        low = decoder.to(torch.bfloat16)
        found = low.logits(low(ids))
    assert found.dtype == torch.float32
    probability = exact.exp()
    divergence = (probability * (exact - found.log_softmax(-1))).sum(-1)
    assert divergence.mean() < 0.02
