"""Packed weights hold exactly the numbers of the checkpoint, whatever its formats, and come out as they went in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import plait
from plait.errors import UsageError, WeightError
from plait.kernels import native
from plait.weights.checkpoint import Checkpoint, open_checkpoint
from plait.weights.numbers import bf16_bits, bf16_values, float32_rows
from plait.weights.pack import pack_checkpoint, pack_decoder
from plait.weights.packed import packed_decoder
from plait.weights.store import PackedWeight, WeightStore, aligned_bytes, packed_bytes
from tests.gguf_files import tiny_llama, write_gguf
from tests.tiny import tiny_model_dir

pytestmark = pytest.mark.skipif(native.native_library() is None, reason=f"no native library: {native.reason()}")

# Columns that every block divides, so that each type can be stored as it is.
WIDE: dict[str, Any] = {
    "llama.embedding_length": 256,
    "llama.feed_forward_length": 512,
    "llama.attention.key_length": 8,
    "llama.attention.value_length": 8,
}
SHAPES = {
    "token_embd.weight": (48, 256),
    "blk.0.attn_q.weight": (32, 256),
    "blk.0.attn_k.weight": (16, 256),
    "blk.0.attn_v.weight": (16, 256),
    "blk.0.ffn_gate.weight": (512, 256),
    "blk.0.ffn_up.weight": (512, 256),
    "blk.0.ffn_down.weight": (256, 512),
}
NORMS = ("output_norm.weight", "blk.0.attn_norm.weight", "blk.0.ffn_norm.weight")
WITH_KERNELS = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
WITHOUT = ("Q2_K", "Q3_K", "IQ4_NL", "IQ4_XS")


def raw_blocks(kind: str, shape: tuple[int, int], rng: np.random.Generator) -> np.ndarray:
    """Random blocks of a type as bytes, [rows, bytes of a row]: every bit pattern of the numbers, finite scales."""
    import gguf

    size, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = rng.integers(0, 256, (shape[0], shape[1] // size, nbytes), dtype=np.uint8)
    scales = rng.uniform(-0.1, 0.1, (*blocks.shape[:2], 2)).astype("<f2").view(np.uint8)
    begin = {"Q2_K": 80, "Q3_K": 108, "Q6_K": 208}.get(kind, 0)
    count = min(nbytes - begin, 2 if kind in ("Q4_0", "Q5_0", "Q8_0", "Q3_K", "Q6_K", "IQ4_NL", "IQ4_XS") else 4)
    blocks[..., begin : begin + count] = scales[..., :count]
    return blocks.reshape(shape[0], -1)


def wide_llama(path: Path, kind: str, seed: int = 0, **metadata: Any) -> Checkpoint:
    """One layer, all matrices of one type, norms in F32."""
    rng = np.random.default_rng(seed)
    plain = kind in ("F32", "F16", "BF16")
    tensors: dict[str, Any] = {}
    for name, shape in SHAPES.items():
        tensors[name] = (kind, rng.standard_normal(shape) if plain else raw_blocks(kind, shape, rng))
    tensors["blk.0.attn_output.weight"] = rng.standard_normal((256, 32))
    tensors |= {name: rng.standard_normal(256) for name in NORMS}
    return open_checkpoint(tiny_llama(path, metadata=WIDE | metadata, tensors=tensors))


def expected(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """The same checkpoint as the reference loads it, fp32."""
    return dict(plait.load(checkpoint, "fp32").named_parameters())


@pytest.mark.parametrize("kind", WITH_KERNELS)
def test_a_format_that_has_kernels_is_kept_and_unpacks_to_the_references_numbers(kind: str, tmp_path: Path) -> None:
    checkpoint = wide_llama(tmp_path / "m.gguf", kind)
    store = pack_checkpoint(checkpoint, threads=2)
    assert {w.layout for w in store.values()} == {kind, "F32", "VECTOR"}
    assert store.report.expanded == {}
    wanted = expected(checkpoint)
    assert set(store) == set(wanted)
    for name, tensor in wanted.items():
        assert store[name].shape == tuple(tensor.shape)
        np.testing.assert_array_equal(store.expand(name), tensor.detach().numpy(), err_msg=name)


@pytest.mark.parametrize("kind", WITHOUT)
def test_a_format_without_kernels_becomes_bf16_and_the_report_names_it(kind: str, tmp_path: Path) -> None:
    checkpoint = wide_llama(tmp_path / "m.gguf", kind)
    store = pack_checkpoint(checkpoint, threads=1)
    assert store.report.expanded == {kind: len(SHAPES)}
    assert any(f"expanded to bf16 at load: {len(SHAPES)} {kind}" in line for line in store.report.lines())
    for name, tensor in expected(checkpoint).items():
        rounded = tensor.to(torch.bfloat16).float() if store[name].layout == "BF16" else tensor
        np.testing.assert_array_equal(store.expand(name), rounded.detach().numpy(), err_msg=name)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("kind", ["Q4_1", "Q6_K", "F32", "BF16", "IQ4_NL"])
def test_a_dtype_expands_every_matrix_to_it(kind: str, dtype: str, tmp_path: Path) -> None:
    checkpoint = wide_llama(tmp_path / "m.gguf", kind)
    store = pack_checkpoint(checkpoint, dtype, threads=1)
    layout, rounding = {
        "fp32": ("F32", torch.float32),
        "bf16": ("BF16", torch.bfloat16),
        "fp16": ("F16", torch.float16),
    }[dtype]
    assert {w.layout for w in store.values()} == {layout, "VECTOR"}
    for name, tensor in expected(checkpoint).items():
        wanted = tensor if tensor.ndim == 1 else tensor.to(rounding).float()
        np.testing.assert_array_equal(store.expand(name), wanted.detach().numpy(), err_msg=name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("start", [1, 2, 5])
def test_safetensors_data_may_begin_at_any_byte(start: int, dtype: torch.dtype, tmp_path: Path) -> None:
    """Matrices and vectors, one of which is joined with others: nothing is rounded up to an address."""
    directory = tiny_model_dir(tmp_path, "qwen2")
    file = directory / "model.safetensors"
    save_file({name: tensor.to(dtype) for name, tensor in load_file(file).items()}, file)
    wanted = {name: p.detach().numpy() for name, p in plait.load(directory, "fp32").named_parameters()}
    data = file.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = data[8:end].rstrip(b" ")
    header += b" " * ((start - 8 - len(header)) % 8)
    file.write_bytes(len(header).to_bytes(8, "little") + header + data[end:])
    assert (8 + len(header)) % 8 == start
    store, found = pack_checkpoint(open_checkpoint(directory), threads=1), plait.load(directory, "fp32").state_dict()
    for name, numbers in wanted.items():
        np.testing.assert_array_equal(store.expand(name), numbers, err_msg=name)
        np.testing.assert_array_equal(found[name].numpy(), numbers, err_msg=name)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_a_gguf_file_has_the_bits_of_the_safetensors_file_it_came_from(kind: str, tmp_path: Path) -> None:
    """Numbers that every one of the three types holds, so that they can be compared bit for bit."""
    rng = np.random.default_rng(5)
    tensors: dict[str, Any] = {}
    for name, info in open_checkpoint(tiny_llama(tmp_path / "a.gguf")).source.file.tensors.items():
        values = (rng.integers(-127, 128, info.shape) / 64).astype(np.float32)
        tensors[name] = (kind, values) if values.ndim == 2 else values
    path = tiny_llama(tmp_path / "m.gguf", tensors=tensors)
    plain = {name: value[1] if isinstance(value, tuple) else value for name, value in tensors.items()}
    same = plait.load(tiny_llama(tmp_path / "plain.gguf", tensors=plain), "fp32")
    folder = tmp_path / "folder"
    folder.mkdir()
    save_file(dict(same.named_parameters()), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(open_checkpoint(path).raw))
    store, found = pack_checkpoint(open_checkpoint(path)), plait.load(path, "fp32").state_dict()
    for name, parameter in plait.load(folder, "fp32").named_parameters():
        assert torch.equal(found[name], parameter), name
        np.testing.assert_array_equal(store.expand(name), found[name].numpy(), err_msg=name)
    np.testing.assert_array_equal(found["model.embed_tokens.weight"].numpy(), plain["token_embd.weight"])
    assert {weight.layout for weight in store.values()} == {kind, "VECTOR"}


def test_rows_that_a_converter_reordered_are_put_back_and_a_permutation_would_be_seen(tmp_path: Path) -> None:
    checkpoint = wide_llama(tmp_path / "m.gguf", "Q4_K")
    store = pack_checkpoint(checkpoint)
    stored = checkpoint.source.read("blk.0.attn_q.weight").numpy()
    ours = store.expand("model.layers.0.self_attn.q_proj.weight")
    assert not np.array_equal(ours, stored)
    # Heads of width 8: feature j of the first half stands at row 2 j of its head in the file.
    np.testing.assert_array_equal(ours[8:12], stored[8:16:2])
    np.testing.assert_array_equal(store["model.layers.0.self_attn.q_proj.weight"].rows([9, 8]), ours[[9, 8]])


def test_gemmas_norms_lose_the_one_that_gguf_adds(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    metadata = {
        "block_count": 1,
        "context_length": 64,
        "embedding_length": 32,
        "feed_forward_length": 64,
        "attention.head_count": 4,
        "attention.head_count_kv": 1,
        "attention.key_length": 8,
        "attention.value_length": 8,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "attention.sliding_window": 16,
        "tokenizer.ggml.tokens": [f"t{i}" for i in range(48)],
    }
    tensors = {
        "token_embd.weight": rng.standard_normal((48, 32)),
        "output_norm.weight": rng.standard_normal(32),
        "blk.0.attn_q.weight": rng.standard_normal((32, 32)),
        "blk.0.attn_k.weight": rng.standard_normal((8, 32)),
        "blk.0.attn_v.weight": rng.standard_normal((8, 32)),
        "blk.0.attn_output.weight": rng.standard_normal((32, 32)),
        "blk.0.ffn_gate.weight": rng.standard_normal((64, 32)),
        "blk.0.ffn_up.weight": rng.standard_normal((64, 32)),
        "blk.0.ffn_down.weight": rng.standard_normal((32, 64)),
    }
    norms = ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")
    tensors |= {f"blk.0.{name}.weight": rng.standard_normal(32) for name in norms}
    tensors |= {f"blk.0.attn_{name}_norm.weight": rng.standard_normal(8) for name in "qk"}
    keys = {key if key.startswith("tokenizer") else f"gemma3.{key}": value for key, value in metadata.items()}
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", keys, tensors, architecture="gemma3"))
    store = pack_checkpoint(checkpoint)
    stored = tensors["output_norm.weight"].astype(np.float32)
    np.testing.assert_array_equal(store.expand("model.norm.weight"), stored - np.float32(1))
    for name, tensor in expected(checkpoint).items():
        np.testing.assert_array_equal(store.expand(name), tensor.detach().numpy(), err_msg=name)


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3_text", "gpt_neox"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_safetensors_are_packed_as_they_are(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    directory = tiny_model_dir(tmp_path, family)
    file = directory / "model.safetensors"
    save_file({name: tensor.to(dtype) for name, tensor in load_file(file).items()}, file)
    checkpoint = open_checkpoint(directory)
    store = pack_checkpoint(checkpoint)
    wanted = expected(checkpoint)
    assert set(store) == set(wanted)
    assert store.report.exact == str(dtype).removeprefix("torch.")
    for name, tensor in wanted.items():
        np.testing.assert_array_equal(store.expand(name), tensor.detach().numpy(), err_msg=name)


def test_data_that_begins_at_an_odd_byte_is_read_all_the_same(tmp_path: Path) -> None:
    directory = tiny_model_dir(tmp_path)
    file = directory / "model.safetensors"
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    text = data[8 : 8 + length].rstrip() + b" "
    text += b" " * (len(text) % 2 == 0)
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    assert len(text) % 2
    checkpoint = open_checkpoint(directory)
    store = pack_checkpoint(checkpoint)
    for name, tensor in plait.load(checkpoint, "fp32").named_parameters():
        np.testing.assert_array_equal(store.expand(name), tensor.detach().numpy(), err_msg=name)


def test_a_tied_head_is_one_weight_and_a_differing_head_is_another(tmp_path: Path) -> None:
    table = np.random.default_rng(0).standard_normal((48, 32))
    same = open_checkpoint(tiny_llama(tmp_path / "same.gguf", tensors={"token_embd.weight": table}))
    store = pack_checkpoint(same)
    assert "lm_head.weight" not in store and store["model.embed_tokens.weight"].shape == (48, 32)
    other = open_checkpoint(
        tiny_llama(tmp_path / "other.gguf", tensors={"token_embd.weight": table, "output.weight": table + 1})
    )
    store = pack_checkpoint(other)
    np.testing.assert_array_equal(store.expand("lm_head.weight"), (table + 1).astype(np.float32))


def test_a_missing_and_a_misshapen_tensor_are_named(tmp_path: Path) -> None:
    missing = open_checkpoint(tiny_llama(tmp_path / "a.gguf", tensors={"blk.0.ffn_up.weight": None}))
    with pytest.raises(WeightError, match=r"lacks a tensor model.layers.0.mlp.up_proj.weight"):
        pack_checkpoint(missing)
    wrong = open_checkpoint(tiny_llama(tmp_path / "b.gguf", tensors={"blk.0.ffn_up.weight": np.zeros((64, 64))}))
    with pytest.raises(WeightError, match=r"blk.0.ffn_up.weight has shape \(64, 64\)"):
        pack_checkpoint(wrong)
    with pytest.raises(UsageError, match="dtype 'int4' is unknown"):
        pack_checkpoint(open_checkpoint(tiny_llama(tmp_path / "c.gguf")), "int4")


def test_packing_quantised_weights_takes_no_memory_besides_them(tmp_path: Path) -> None:
    """Every buffer that packing asks for is one that it keeps."""
    import tracemalloc

    checkpoint = wide_llama(tmp_path / "m.gguf", "Q4_K")
    pack_checkpoint(checkpoint, threads=1)  # imports are done
    tracemalloc.start()
    store = pack_checkpoint(checkpoint, threads=1)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < store.nbytes + (1 << 20)


def test_the_state_dict_of_a_packed_decoder_is_that_of_the_reference(tmp_path: Path) -> None:
    checkpoint = wide_llama(tmp_path / "m.gguf", "Q5_K")
    packed = packed_decoder(checkpoint.config, pack_checkpoint(checkpoint), checkpoint.path)
    wanted = plait.load(checkpoint, "fp32").state_dict()
    state = packed.state_dict()
    assert list(state) == list(wanted) and all(torch.equal(state[name], wanted[name]) for name in wanted)
    assert all(p.device.type == "meta" for p in packed.parameters())
    outer = torch.nn.Module()
    outer.inner = packed  # torch passes an empty dictionary to what comes first
    assert {name.removeprefix("inner.") for name in outer.state_dict()} == set(wanted)


def test_a_packed_decoder_is_saved_as_the_file_that_it_came_from(tmp_path: Path) -> None:
    directory = tiny_model_dir(tmp_path, "qwen2")
    file = directory / "model.safetensors"
    save_file({name: tensor.to(torch.bfloat16) for name, tensor in load_file(file).items()}, file)
    checkpoint = open_checkpoint(directory)
    packed_decoder(checkpoint.config, pack_checkpoint(checkpoint), directory).save_pretrained(tmp_path / "saved")
    before, after = load_file(file), load_file(tmp_path / "saved" / "model.safetensors")
    assert set(before) == set(after) and all(torch.equal(before[n], after[n]) for n in before)
    assert (tmp_path / "saved" / "tokenizer.json").read_bytes() == (directory / "tokenizer.json").read_bytes()


def test_what_a_packed_decoder_cannot_do_names_the_way_out(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(tiny_llama(tmp_path / "m.gguf"))
    packed = packed_decoder(checkpoint.config, pack_checkpoint(checkpoint), checkpoint.path)
    for attempt in (
        lambda: packed(torch.tensor([1, 2])),
        lambda: packed.logits(torch.zeros(1, 32)),
        packed.train,
        lambda: packed.load_state_dict({}),
        packed.float,
        lambda: packed.to(torch.bfloat16),
    ):
        with pytest.raises(UsageError, match=r'plait.load\(.*m.gguf.*, dtype="fp32"\)'):
            attempt()
    assert packed.eval() is packed


def test_a_live_decoder_is_packed_again_into_the_standing_buffers() -> None:
    from tests.tiny import tiny_config

    decoder = plait.from_config(tiny_config("qwen2"))
    store = pack_decoder(decoder)
    addresses = {name: weight.data.ctypes.data for name, weight in store.items()}
    assert (store.version, store.report.weight_bytes) == (1, store.nbytes)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.add_(1.0)
    assert not np.array_equal(store.expand("model.norm.weight"), decoder.model.norm.weight.detach().numpy())
    assert pack_decoder(decoder, store=store) is store and store.version == 2 and store.report.seconds > 0
    assert {name: weight.data.ctypes.data for name, weight in store.items()} == addresses
    for name, parameter in decoder.named_parameters():
        np.testing.assert_array_equal(store.expand(name), parameter.detach().numpy(), err_msg=name)
    other = plait.from_config(tiny_config("qwen2", num_hidden_layers=2))
    with pytest.raises(WeightError, match="build a new engine"):
        pack_decoder(other, store=store)


@pytest.mark.parametrize(
    ("own", "asked", "layout"),
    [(torch.bfloat16, None, "BF16"), (torch.float64, None, "F32"), (torch.float32, "bf16", "BF16")],
)
def test_a_live_decoders_dtype_is_kept_or_rounded(own: torch.dtype, asked: str | None, layout: str) -> None:
    from tests.tiny import tiny_config

    decoder = plait.from_config(tiny_config("llama")).to(own)
    store = pack_decoder(decoder, asked)
    assert {w.layout for w in store.values()} == {layout, "VECTOR"}
    rounding = {"BF16": torch.bfloat16, "F32": torch.float32}[layout]
    for name, parameter in decoder.named_parameters():
        wanted = parameter.detach().float() if parameter.ndim == 1 else parameter.detach().to(rounding).float()
        np.testing.assert_array_equal(store.expand(name), wanted.numpy(), err_msg=name)


def test_the_store_counts_a_shared_weight_once_and_knows_its_edges() -> None:
    data = aligned_bytes(packed_bytes("F32", (20, 3)))
    assert data.ctypes.data % 64 == 0
    weight = PackedWeight("a", (20, 3), "F32", data)
    store = WeightStore({"a": weight, "b": weight})
    assert store.nbytes == data.nbytes == 2 * 16 * 3 * 4 and store.layouts() == {"F32": 1}
    assert weight.matrix().panel_bytes == 16 * 3 * 4
    for ids in ([20], [-1]):
        with pytest.raises(WeightError, match="row out of range of 20"):
            weight.rows(ids)
    with pytest.raises(WeightError, match="matrix of layout F32, not a vector"):
        weight.vector()
    with pytest.raises(WeightError, match="cannot be packed as Q4_K"):
        packed_bytes("Q4_K", (16, 128))


def test_bfloat16_is_rounded_as_torch_rounds() -> None:
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 1 << 32, 100_000, dtype=np.uint64).astype(np.uint32)
    values = np.concatenate([bits.view(np.float32), np.float32([0.0, -0.0, np.inf, -np.inf, np.nan, 3.4e38])])
    wanted = torch.from_numpy(values).to(torch.bfloat16)
    finite = ~np.isnan(values)
    np.testing.assert_array_equal(bf16_values(bf16_bits(values))[finite], wanted.float().numpy()[finite])
    assert np.isnan(bf16_values(bf16_bits(values))[~finite]).all()


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q5_1", "Q3_K"])
def test_rows_are_read_as_torch_reads_the_tensor(kind: str, tmp_path: Path) -> None:
    source = wide_llama(tmp_path / "m.gguf", kind).source
    whole = source.read("blk.0.ffn_gate.weight", torch.float32).numpy()
    np.testing.assert_array_equal(float32_rows(source, "blk.0.ffn_gate.weight", 3, 17), whole[3:17])
