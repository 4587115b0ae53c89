"""The layer that predicts a further token: the formula written out, over transformers' own decoder layer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import plait
from plait.errors import UsageError, WeightError
from plait.kernels.native import native_library, reason
from plait.memory.dense import DenseMemory
from plait.memory.layout import make_layout
from plait.memory.paged import PagedMemory
from plait.model.drafter import Drafter
from plait.ops.step import Sequences, StepInputs
from plait.weights.checkpoint import open_checkpoint
from plait.weights.drafter import load_drafter
from tests.greedy import tolerance
from tests.parity.case import SMALL, YARN, family
from tests.parity.reference import reference_model
from tests.quantised_files import fp8
from tests.tiny import tiny_config

_MIXTURE = {
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 37,
    "n_shared_experts": 1,
    "num_key_value_heads": 6,
    "num_hidden_layers": 2,
}
_LATENT = {"kv_lora_rank": 22, "q_lora_rank": 26, "qk_nope_head_dim": 10, "qk_rope_head_dim": 6, "v_head_dim": 9}
# All layers of the first are dense, its drafter is a mixture all the same.
CASES = {
    "deepseek_v3": {**_MIXTURE, **_LATENT, "first_k_dense_replace": 2, "num_nextn_predict_layers": 1},
    "kimi_k2": {
        **_MIXTURE,
        **_LATENT,
        "q_lora_rank": None,
        "first_k_dense_replace": 1,
        "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 1.0},
    },
    "glm4_moe": {**_MIXTURE, "first_k_dense_replace": 1, "head_dim": 12, "use_qk_norm": True},
}
IDS = torch.randint(0, 97, (2, 20), generator=torch.Generator().manual_seed(2))


class Made:
    """A checkpoint with a drafter, and what its drafter must give.

    The oracle is a transformers model that is a layer longer: its last layer is the drafter's.
    """

    def __init__(self, name: str, folder: Path) -> None:
        raw = {**SMALL, **CASES[name]}
        self.layers = raw["num_hidden_layers"]
        case = family(name)("with a drafter", **raw | {"num_hidden_layers": self.layers + 1})
        self.oracle = reference_model(case)
        self.path = folder / name
        self.oracle.save_pretrained(self.path)
        said = json.loads((self.path / "config.json").read_text())
        said |= {"num_hidden_layers": self.layers, "model_type": name}
        said.pop("mlp_layer_types", None)
        self.prefix, d = f"model.layers.{self.layers}.", raw["hidden_size"]
        generator = torch.Generator().manual_seed(5)
        self.own = {
            "enorm.weight": 1 + 0.3 * torch.randn(d, generator=generator),
            "hnorm.weight": 1 + 0.3 * torch.randn(d, generator=generator),
            "eh_proj.weight": torch.randn(d, 2 * d, generator=generator) / d**0.5,
            "shared_head.norm.weight": 1 + 0.3 * torch.randn(d, generator=generator),
        }
        self.tensors = load_file(self.path / "model.safetensors")
        copies = {"embed_tokens.weight": "model.embed_tokens.weight", "shared_head.head.weight": "lm_head.weight"}
        self.copies = {self.prefix + theirs: self.tensors[ours].clone() for theirs, ours in copies.items()}
        self.tensors |= {self.prefix + key: value for key, value in self.own.items()} | self.copies
        self.config = said
        self.write(self.path)

    def write(self, path: Path, tensors: dict[str, Tensor] | None = None, **config: Any) -> Path:
        path.mkdir(exist_ok=True)
        kept = {k: v.contiguous() for k, v in (tensors or self.tensors).items()}
        save_file(kept, path / "model.safetensors", {"format": "pt"})
        (path / "config.json").write_text(json.dumps(self.config | config))
        return path

    def without(self, path: Path, names: Callable[[str], bool]) -> Path:
        return self.write(path, {k: v for k, v in self.tensors.items() if not names(k)})

    @torch.no_grad()
    def expected(self, ids: Tensor) -> Tensor:
        """float64 logits [B, T - 1, V] of the tokens after ids[:, 1:]."""
        model = self.oracle.model
        model.config.num_hidden_layers = self.layers  # the forward takes so many
        hidden = model(ids).last_hidden_state[:, :-1].double()
        embedded = model.embed_tokens(ids[:, 1:]).double()
        pair = torch.cat((self._rms(embedded, "enorm"), self._rms(hidden, "hnorm")), -1)
        x = (pair @ self.own["eh_proj.weight"].double().T).float()
        length = x.shape[1]
        mask = torch.full((length, length), float("-inf")).triu(1)[None, None]
        positions = torch.arange(length)[None]
        turn = model.rotary_emb(x, positions)
        y = model.layers[self.layers](x, attention_mask=mask, position_ids=positions, position_embeddings=turn)
        return self._rms(y.double(), "shared_head.norm") @ self.oracle.lm_head.weight.double().T

    def _rms(self, x: Tensor, name: str) -> Tensor:
        scale = (x.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"]).rsqrt()
        return x * scale * self.own[f"{name}.weight"].double()


@pytest.fixture(scope="module", params=CASES)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(request.param, tmp_path_factory.mktemp("drafters"))


@pytest.fixture(scope="module")
def v3(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made("deepseek_v3", tmp_path_factory.mktemp("v3"))


def both(path: Path, dtype: str = "fp32") -> tuple[Any, Drafter]:
    decoder = plait.load(path, dtype)
    return decoder, load_drafter(path, decoder)


@torch.no_grad()
def drafted(path: Path, dtype: str = "fp32") -> Tensor:
    decoder, drafter = both(path, dtype)
    return drafter(decoder(IDS)[:, :-1], IDS[:, 1:])


def test_its_logits_are_those_of_the_formula(made: Made) -> None:
    expected = made.expected(IDS)
    assert 5 <= expected.abs().max() <= 40
    found = drafted(made.path)
    assert found.dtype == torch.float32 and found.shape == (2, 19, 97)
    assert (found.double() - expected).abs().max() <= tolerance(expected)


@torch.no_grad()
def test_with_a_memory_of_its_own_it_goes_on_token_by_token(made: Made) -> None:
    decoder, drafter = both(made.path)
    hidden, expected = decoder(IDS), made.expected(IDS)
    dense = DenseMemory(drafter.caches(), batch=2)
    parts = [(0, 7), (7, 8), (8, 19)]
    found = [drafter(hidden[:, a:b], IDS[:, a + 1 : b + 1], memory=dense) for a, b in parts]
    assert (torch.cat(found, 1).double() - expected).abs().max() <= tolerance(expected)
    layout = make_layout(tuple(drafter.caches()), 4, 32, 32)
    blocks = -(-19 // layout.groups[0].block_tokens)
    paged, table = PagedMemory(layout, blocks + 1), torch.arange(1, blocks + 1).numpy().astype("int32")
    for a, b in parts:
        bounds = torch.tensor([0, b - a]).numpy().astype("int32"), torch.tensor([b]).numpy().astype("int32")
        step = StepInputs(sequences=Sequences(*bounds, table.reshape(1, 1, -1)))
        got = drafter(hidden[0, a:b], IDS[0, a + 1 : b + 1], step, paged)
        assert (got.double() - expected[0, a:b]).abs().max() <= tolerance(expected)


def test_it_lends_the_decoders_embedding_and_head(v3: Made, tmp_path: Path) -> None:
    decoder, drafter = both(v3.path)
    assert drafter.embed_tokens is decoder.model.embed_tokens and drafter.shared_head.head is decoder.lm_head
    assert sorted(drafter.load_report.skipped) == sorted(v3.copies)
    bare = v3.without(tmp_path / "bare", v3.copies.__contains__)
    assert torch.equal(drafted(bare), drafted(v3.path))
    assert both(bare)[1].load_report.skipped == []
    own = sum(p.numel() for p in drafter.parameters()) - 2 * 97 * 72
    assert drafter.load_report.parameters == own == v3_layer_numbers(v3)


def v3_layer_numbers(v3: Made) -> int:
    return sum(t.numel() for k, t in v3.tensors.items() if k.startswith(v3.prefix) and k not in v3.copies)


def test_a_head_that_is_no_copy_is_used(v3: Made, tmp_path: Path) -> None:
    name = f"{v3.prefix}shared_head.head.weight"
    path = v3.write(tmp_path / "other", {**v3.tensors, name: v3.tensors[name].flip(0)})
    decoder, drafter = both(path)
    assert drafter.shared_head.head is not decoder.lm_head and drafter.embed_tokens is decoder.model.embed_tokens
    assert torch.allclose(drafted(path), drafted(v3.path).flip(-1), atol=1e-5)
    assert any("shared_head.head.weight is no copy" in line for line in drafter.load_report.lines())


def test_a_decoder_is_loaded_without_it_as_before(v3: Made, tmp_path: Path) -> None:
    decoder = plait.load(v3.path, "fp32")
    assert sorted(decoder.load_report.skipped) == sorted(k for k in v3.tensors if k.startswith(v3.prefix))
    bare = v3.without(tmp_path / "bare", lambda name: name.startswith(v3.prefix))
    assert torch.equal(decoder(IDS), plait.load(bare, "fp32")(IDS))


def test_it_has_the_decoders_dtype_and_trains(v3: Made) -> None:
    decoder, drafter = both(v3.path, "bf16")
    kinds = {name: p.dtype for name, p in drafter.named_parameters()}
    routers = {"layer.mlp.gate.weight", "layer.mlp.gate.e_score_correction_bias"}
    assert {name for name, dtype in kinds.items() if dtype == torch.float32} == routers
    assert (drafted(v3.path, "bf16") - v3.expected(IDS)).abs().mean() < 0.3
    decoder, drafter = both(v3.path)
    loss = torch.nn.functional.cross_entropy(
        drafter(decoder(IDS)[:, :-2], IDS[:, 1:-1]).flatten(0, 1), IDS[:, 2:].flatten()
    )
    loss.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in drafter.parameters() if p.requires_grad)


def test_a_drafter_in_fp8(v3: Made, tmp_path: Path) -> None:
    stored, plain = dict(v3.tensors), dict(v3.tensors)
    for seed, (name, tensor) in enumerate(v3.tensors.items()):
        if tensor.ndim == 2 and "_proj" in name:
            parts, numbers = fp8(tensor.shape[0], tensor.shape[1], (32, 48), seed=seed, spread=0.15)
            stored |= {name: parts["weight"], f"{name}_scale_inv": parts["scale"]}
            plain[name] = torch.from_numpy(numbers)
    said = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 48]}
    quantised = v3.write(tmp_path / "fp8", stored, quantization_config=said)
    assert f"{v3.prefix}eh_proj.weight_scale_inv" in stored
    assert torch.equal(drafted(quantised), drafted(v3.write(tmp_path / "plain", plain)))
    assert set(both(quantised)[1].load_report.expanded) == {"FP8"}


def refused(path: Path, decoder: Any, error: type[Exception], message: str, index: int = 0) -> None:
    with pytest.raises(error, match=message) as caught:
        load_drafter(path, decoder, index)
    assert "\n" not in str(caught.value)


def test_what_cannot_be_loaded(v3: Made, tmp_path: Path) -> None:
    decoder = plait.load(v3.path, "fp32")
    bare = v3.without(tmp_path / "bare", lambda name: name.startswith(v3.prefix))
    refused(bare, decoder, WeightError, r"bare has no tensors model\.layers\.2\.\*: this deepseek_v3 was saved without")
    llama = plait.from_config(tiny_config("llama", layer_types=["full_attention"] * 3))
    llama.save_pretrained(tmp_path / "llama")
    refused(tmp_path / "llama", llama, WeightError, r"no tensors model\.layers\.3\.\*: this llama was saved without")
    refused(v3.path, decoder, UsageError, r"index=1: .* has 1 layer that", index=1)
    none = v3.write(tmp_path / "none", num_nextn_predict_layers=0)
    with pytest.raises(WeightError, match="has no use for"):  # nor can the model be loaded
        plait.load(none, "fp32")
    refused(none, decoder, UsageError, r"index=0: .* has 0 layers that")

    def gap(path: Path, *names: str) -> Path:
        return v3.without(path, {v3.prefix + name for name in names}.__contains__)

    norm = gap(tmp_path / "a", "enorm.weight")
    refused(norm, decoder, WeightError, r"lacks a tensor model\.layers\.2\.enorm\.weight")
    expert = "mlp.experts.4.up_proj.weight"
    refused(gap(tmp_path / "b", expert), decoder, WeightError, rf"lacks a tensor model\.layers\.2\.{expert}")
    several = gap(tmp_path / "c", "hnorm.weight", "self_attn.kv_b_proj.weight", "shared_head.norm.weight")
    refused(several, decoder, WeightError, r"lacks 3 tensors \(model\.layers\.2\.hnorm\.weight, .*kv_b_proj")
    name = f"{v3.prefix}eh_proj.weight"
    turned = v3.write(tmp_path / "d", {**v3.tensors, name: v3.tensors[name].T})
    refused(turned, decoder, WeightError, r"eh_proj\.weight has shape \(144, 72\); .* it \(72, 144\)")
    name = f"{v3.prefix}embed_tokens.weight"
    short = v3.write(tmp_path / "e", {**v3.tensors, name: v3.tensors[name][1:]})
    refused(short, decoder, WeightError, r"embed_tokens\.weight has shape \(96, 72\); the configuration makes it \(97,")
    more = v3.write(tmp_path / "f", {**v3.tensors, f"{v3.prefix}what.weight": torch.ones(3)})
    refused(more, decoder, WeightError, r"has a tensor model\.layers\.2\.what\.weight that this deepseek_v3 has no use")


def test_a_decoder_that_does_not_belong_to_it(v3: Made) -> None:
    other = plait.from_config(v3.config | {"num_hidden_layers": 1})
    refused(v3.path, other, UsageError, r"\(hidden size 72, vocabulary 97, 1 layers\) is not of .*97, 2 layers\)")


@pytest.mark.skipif(native_library() is None, reason=f"no native library: {reason()}")
def test_a_packed_decoder_lends_nothing(v3: Made) -> None:
    from plait.weights.pack import pack_checkpoint
    from plait.weights.packed import packed_decoder

    checkpoint = open_checkpoint(v3.path)
    packed = packed_decoder(checkpoint.config, pack_checkpoint(checkpoint), v3.path)
    refused(v3.path, packed, UsageError, "a packed decoder computes nothing in torch: load the decoder with plait.load")


def test_hidden_states_of_other_tokens_are_refused(v3: Made) -> None:
    _, drafter = both(v3.path)
    with pytest.raises(UsageError, match=r"\(2, 20, 72\) and ids of shape \(2, 19\): a drafter needs \[\.\.\., 72\]"):
        drafter(torch.zeros(2, 20, 72), IDS[:, 1:])
