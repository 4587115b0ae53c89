"""Hugging Face -> GGUF -> Hugging Face restores what it began with; types are copied, computed and reported as said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import plait
from plait.errors import ConfigError, UsageError, WeightError
from plait.weights.checkpoint import open_checkpoint
from plait.weights.convert import convert
from plait.weights.gguf_config import ARCHITECTURES
from plait.weights.gguf_names import GGUF_NAMES
from plait.weights.gguf_source import GGUFSource
from plait.weights.gguf_writer.architectures import WRITERS
from plait.weights.pack import pack_decoder
from plait.weights.packed import packed_decoder
from tests.gguf_files import tiny_llama
from tests.weights.converting import FAMILIES, config_of, logits, model_directory, random_decoder


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    return {k: v for file in sorted(directory.glob("*.safetensors")) for k, v in load_file(file).items()}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], norms: float = 0.0) -> None:
    """Bit-identical; norms: what those may be off by, relative to 1 + w."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape, name
        if norms and name.endswith("norm.weight"):
            allowed = norms * (1 + tensor.float()).abs().clamp(min=1)
            assert ((found[name].float() - tensor.float()).abs() <= allowed).all(), name
        else:
            assert torch.equal(found[name], tensor), name


def without(path: Path, *dropped: str) -> Path:
    """A copy of a GGUF file without some keys and without a tokenizer, as another program might have written it."""
    reader, target = gguf.GGUFReader(path), path.with_name(f"foreign-{path.name}")
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name.startswith(("GGUF.", "tokenizer.")) or name == "general.architecture" or name in dropped:
            continue
        sub = field.types[-1] if field.types[0] is gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), field.types[0], sub)
    writer.add_string("tokenizer.ggml.model", "none")
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_directory_comes_back_from_gguf_as_it_was(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    directory = model_directory(tmp_path, family, dtype)
    convert(directory, tmp_path / "model.gguf", "f32")
    convert(tmp_path / "model.gguf", tmp_path / "back")
    assert config_of(tmp_path / "back") == config_of(directory)
    # Stored as 1 + w in fp32: exact for bf16 of this size.
    assert_same(
        tensors_of(tmp_path / "back"),
        tensors_of(directory),
        norms=2**-23 if family == "gemma3" and dtype == torch.float32 else 0.0,
    )
    expected = logits(directory)
    if family == "gemma3" and dtype == torch.float32:
        assert (logits(tmp_path / "model.gguf") - expected).abs().max() < 1e-4
    else:
        assert torch.equal(logits(tmp_path / "model.gguf"), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_metadata_alone_says_what_the_model_computes(family: str, tmp_path: Path) -> None:
    """Without the config.json that travels along, as llama.cpp sees the file."""
    directory = model_directory(tmp_path, family)
    convert(directory, tmp_path / "model.gguf", "f32")
    foreign = without(tmp_path / "model.gguf", "plait.config", "plait.dtypes", "plait.generation_config")
    assert open_checkpoint(foreign).raw != open_checkpoint(directory).raw
    assert (logits(foreign) - logits(directory)).abs().max() < 1e-4


def test_gemmas_norms_are_one_more_in_gguf(tmp_path: Path) -> None:
    directory = model_directory(tmp_path, "gemma3")
    convert(directory, tmp_path / "model.gguf", "f32")
    source, stored = GGUFSource(tmp_path / "model.gguf"), tensors_of(directory)
    for theirs, ours in (
        ("output_norm", "model.norm"),
        ("blk.2.attn_q_norm", "model.layers.2.self_attn.q_norm"),
        ("blk.2.post_ffw_norm", "model.layers.2.post_feedforward_layernorm"),
    ):
        assert torch.equal(source.read(f"{theirs}.weight"), stored[f"{ours}.weight"] + 1)


def test_q_and_k_are_paired_each_with_its_own_heads(tmp_path: Path) -> None:
    """8 query heads, 2 of keys, 16 wide; a qwen2's stay as they are."""
    sizes = {"hidden_size": 128, "num_attention_heads": 8, "num_key_value_heads": 2, "attention_bias": True}
    for family, changes in (("llama", {**sizes, "head_dim": 16}), ("qwen2", sizes)):
        directory = model_directory(tmp_path, family, **changes)
        file = tmp_path / f"{family}.gguf"
        convert(directory, file, "f32")
        source, stored = GGUFSource(file), tensors_of(directory)
        for kind in ("weight", "bias"):
            for part, heads in (("q", 8), ("k", 2)):
                rows = stored[f"model.layers.1.self_attn.{part}_proj.{kind}"]
                paired = rows.reshape(heads, 2, 8, -1).swapaxes(1, 2).reshape(rows.shape)
                found = source.read(f"blk.1.attn_{part}.{kind}")
                assert torch.equal(found, paired if family == "llama" else rows), (family, part, kind)


def test_llama3_becomes_divisors_and_a_foreign_file_keeps_them(tmp_path: Path) -> None:
    """Past the original context; the way back has no llama3 to restore, but says the same frequencies."""
    directory = model_directory(tmp_path, "llama3")
    convert(directory, tmp_path / "model.gguf", "f32")
    source = GGUFSource(tmp_path / "model.gguf")
    divisors = source.read("rope_freqs.weight")
    assert divisors[0] == 1 and abs(divisors[-1] / 8 - 1) < 1e-6 and source.info("rope_freqs.weight").format == "F32"
    assert not [key for key in source.metadata if "rope.scaling" in key]  # else it would be applied twice
    foreign = without(tmp_path / "model.gguf", "plait.config", "plait.dtypes")
    report = convert(foreign, tmp_path / "back")
    assert any("rope_freqs" in note for note in report.notes)
    rope = config_of(tmp_path / "back")["rope_scaling"]
    assert rope["rope_type"] == "longrope" and rope["short_factor"] == rope["long_factor"] == divisors.tolist()
    assert (logits(tmp_path / "back") - logits(directory)).abs().max() < 1e-4
    plait.load(foreign, "fp32").save_pretrained(tmp_path / "saved")
    assert config_of(tmp_path / "saved")["rope_scaling"] == rope
    # And into GGUF once more: the same tensor.
    convert(tmp_path / "back", tmp_path / "again.gguf", "f32")
    assert torch.equal(GGUFSource(tmp_path / "again.gguf").read("rope_freqs.weight"), divisors)


@pytest.mark.slow
def test_transformers_computes_the_same_from_kept_divisors(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    directory = model_directory(tmp_path, "llama3")
    convert(directory, tmp_path / "model.gguf", "f32")
    convert(without(tmp_path / "model.gguf", "plait.config", "plait.dtypes"), tmp_path / "back")
    ids = torch.arange(40)[None] * 5 % 250
    with torch.inference_mode():
        found, expected = (
            AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)(ids).logits
            for path in (tmp_path / "back", directory)
        )
    assert (found - expected).abs().max() < 1e-4


def test_longrope_keeps_both_sets_of_divisors(tmp_path: Path) -> None:
    factors = {"short_factor": [1.0 + i / 8 for i in range(8)], "long_factor": [2.0 + i for i in range(8)]}
    scaling = {"type": "longrope", **factors, "original_max_position_embeddings": 32}
    directory = model_directory(
        tmp_path, "phi3", rope_scaling=scaling, original_max_position_embeddings=32, max_position_embeddings=128
    )
    convert(directory, tmp_path / "model.gguf", "f32")
    source = GGUFSource(tmp_path / "model.gguf")
    for kind in ("short", "long"):
        assert source.read(f"rope_factors_{kind}.weight").tolist() == factors[f"{kind}_factor"]
    foreign = without(tmp_path / "model.gguf", "plait.config", "plait.dtypes")
    assert (logits(foreign) - logits(directory)).abs().max() < 1e-4
    convert(tmp_path / "model.gguf", tmp_path / "back")
    assert config_of(tmp_path / "back") == config_of(directory)


@pytest.mark.parametrize("kind", ["f32", "f16", "bf16"])
def test_plain_types_hold_the_bits_of_the_source(kind: str, tmp_path: Path) -> None:
    """bf16 is the upper half of fp32, and shapes are those of the table, not of bytes."""
    directory = model_directory(tmp_path, "qwen2", torch.bfloat16)
    report = convert(directory, tmp_path / "model.gguf", kind)
    reader = {t.name: t for t in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    stored = tensors_of(directory)["model.layers.1.mlp.down_proj.weight"]
    found = reader["blk.1.ffn_down.weight"]
    assert found.tensor_type.name == kind.upper() and found.shape.tolist() == list(stored.shape[::-1])
    dtype = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[kind]
    assert np.array_equal(found.data.reshape(-1).view(np.uint8), stored.to(dtype).reshape(-1).view(torch.uint8).numpy())
    assert {t.tensor_type.name for t in reader.values() if len(t.shape) == 1} == {"F32"}
    assert report.copied == (22 if kind == "bf16" else 0) and not report.fallbacks


def test_a_tied_head_is_written_once(tmp_path: Path) -> None:
    convert(model_directory(tmp_path, "qwen2"), tmp_path / "model.gguf")
    assert "output.weight" not in GGUFSource(tmp_path / "model.gguf").names()


@pytest.mark.parametrize("kind", ["q8_0", "q4_k", "q4_k_m", "q6_k"])
def test_fallbacks_are_used_and_reported(kind: str, tmp_path: Path) -> None:
    """Rows of 64 and 96: none of 256. Both readers open the file."""
    directory = model_directory(tmp_path, "llama", intermediate_size=100)
    report = convert(directory, tmp_path / "model.gguf", kind)
    source = GGUFSource(tmp_path / "model.gguf")
    types = {t.name: t.tensor_type.name for t in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    assert types == {name: source.info(name).format for name in source.names()}
    expected = {"q8_0": "Q8_0", "q4_k": "Q5_0", "q4_k_m": "Q5_0", "q6_k": "Q8_0"}[kind]
    assert types["blk.1.attn_q.weight"] == expected and types["blk.1.ffn_down.weight"] == "F16"
    fell = {name: (wanted, got) for name, wanted, got in report.fallbacks}
    assert fell["blk.1.ffn_down.weight"][1] == "F16" and ("blk.1.attn_q.weight" in fell) == (kind != "q8_0")
    assert any("instead of" in line for line in report.lines())
    stored = tensors_of(directory)["model.layers.1.mlp.up_proj.weight"]
    assert (source.read("blk.1.ffn_up.weight") - stored).norm() < 0.05 * stored.norm()


def test_k_types_are_read_back_by_plait(tmp_path: Path) -> None:
    directory = model_directory(tmp_path, "llama", hidden_size=256, intermediate_size=512, head_dim=64)
    expected = logits(directory)
    errors = []
    for kind in ("q4_k_m", "q5_k_m", "q6_k", "q8_0"):
        report = convert(directory, tmp_path / f"{kind}.gguf", kind)
        assert not report.fallbacks
        errors.append(((logits(tmp_path / f"{kind}.gguf") - expected) ** 2).mean().item())
    assert errors == sorted(errors, reverse=True) and errors[-1] < 0.02 * (expected**2).mean().item()


def test_quantised_tensors_of_the_wanted_type_are_copied(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 255, (64, 34), dtype=np.uint8)
    blocks[:, :2] = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
    other = rng.standard_normal((64, 32))
    source = tiny_llama(
        tmp_path / "a.gguf",
        tensors={"blk.0.ffn_gate.weight": ("Q8_0", blocks), "blk.0.ffn_up.weight": ("Q4_0", other)},
        metadata={"tokenizer.ggml.model": "none", "general.parameter_count": ("u64", 7), "llama.vocab_size": 48},
    )
    report = convert(source, tmp_path / "b.gguf", "q8_0")
    found = GGUFSource(tmp_path / "b.gguf")
    assert np.array_equal(found.raw("blk.0.ffn_gate.weight"), blocks.reshape(-1))
    assert report.expanded == {"Q4_0": 1} and any("expanded first" in line for line in report.lines())
    assert found.metadata.kinds["general.parameter_count"] == (10,) and found.metadata["general.parameter_count"] == 7
    assert found.metadata["general.file_type"] == 7
    # auto keeps every type, and every byte.
    report = convert(source, tmp_path / "c.gguf")
    first, second = GGUFSource(source), GGUFSource(tmp_path / "c.gguf")
    assert first.names() == second.names() and report.copied == len(first.names()) and not report.expanded
    assert all(np.array_equal(first.raw(n), second.raw(n)) for n in first.names())


def test_a_quantised_file_becomes_a_directory_with_what_it_says(tmp_path: Path) -> None:
    directory = model_directory(tmp_path, "llama", torch.bfloat16)
    convert(directory, tmp_path / "model.gguf", "q8_0")
    report = convert(tmp_path / "model.gguf", tmp_path / "bf16")
    assert report.expanded == {"Q8_0": 23} and any("--dtype fp32" in note for note in report.notes)
    assert config_of(tmp_path / "bf16") == config_of(directory)
    convert(tmp_path / "model.gguf", tmp_path / "fp32", dtype="fp32")
    assert config_of(tmp_path / "fp32")["dtype"] == "float32"
    assert {t.dtype for t in tensors_of(tmp_path / "fp32").values()} == {torch.float32}
    assert torch.equal(logits(tmp_path / "fp32"), logits(tmp_path / "model.gguf"))


def test_dtypes_of_single_tensors_come_back(tmp_path: Path) -> None:
    """A norm in fp32 among bf16, as some checkpoints have routers."""
    from safetensors.torch import save_file

    directory = model_directory(tmp_path, "mixtral", torch.bfloat16)
    tensors = tensors_of(directory)
    router = "model.layers.1.block_sparse_moe.gate.weight"
    tensors[router] = torch.randn(tensors[router].shape)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    convert(directory, tmp_path / "model.gguf", "f32")
    convert(tmp_path / "model.gguf", tmp_path / "back")
    assert_same(tensors_of(tmp_path / "back"), tensors)


def test_shards_and_index(tmp_path: Path) -> None:
    directory = model_directory(tmp_path, "llama")
    report = convert(directory, tmp_path / "small", shard_bytes=100_000)
    files = sorted(p.name for p in (tmp_path / "small").glob("*.safetensors"))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert_same(tensors_of(tmp_path / "small"), tensors_of(directory))
    assert torch.equal(logits(tmp_path / "small"), logits(directory)) and report.copied == report.tensors


def test_a_gpt2_keeps_its_transposed_matrices(tmp_path: Path) -> None:
    from tests.configs import CONFIGS

    plait.from_config(CONFIGS["gpt2"]).save_pretrained(tmp_path / "gpt2")
    convert(tmp_path / "gpt2", tmp_path / "copy")
    assert_same(tensors_of(tmp_path / "copy"), tensors_of(tmp_path / "gpt2"))
    convert(tmp_path / "gpt2", tmp_path / "half", dtype="bf16")
    expected = {name: t.bfloat16() for name, t in tensors_of(tmp_path / "gpt2").items()}
    assert_same(tensors_of(tmp_path / "half"), expected)
    with pytest.raises(ConfigError, match="'gpt2' cannot be written as GGUF"):
        convert(tmp_path / "gpt2", tmp_path / "gpt2.gguf")


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_a_live_and_a_packed_decoder_are_written_too(family: str, tmp_path: Path) -> None:
    decoder = random_decoder(family, torch.bfloat16)
    report = convert(decoder, tmp_path / "live.gguf", "bf16")
    assert any("no tokenizer" in note for note in report.notes)
    packed = packed_decoder(decoder.config, pack_decoder(decoder))
    convert(packed, tmp_path / "packed.gguf", "bf16")
    assert (tmp_path / "live.gguf").read_bytes() == (tmp_path / "packed.gguf").read_bytes()
    ids = torch.arange(20)[None]
    loaded: Any = plait.load(tmp_path / "live.gguf", "bf16")
    with torch.inference_mode():
        assert torch.equal(loaded.logits(loaded(ids)), decoder.logits(decoder(ids)))


def test_every_writer_has_names_and_a_reader_of_its_model_type() -> None:
    for name, writer in WRITERS.items():
        assert name in GGUF_NAMES and ARCHITECTURES[name].model_type in writer.model_types


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("mixtral", {"sliding_window": 24}, r"layers\[0\]\.attention\.window is 24, not 0"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}, r"window is 16, not 0"),
        ("gemma3", {"query_pre_attn_scalar": 32}, r"attention\.scale is"),
        ("gemma3", {"sliding_window_pattern": 3}, r"window is"),
        ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, r"rope_type='dynamic' has no place"),
        ("llama", {"hidden_act": "gelu"}, r"activation is 'gelu'"),
        ("qwen2moe", {"norm_topk_prob": True}, r"renormalise is 'always'"),
        ("qwen2moe", {"mlp_only_layers": [0]}, r"layers\[0\]\.feed_forward is"),
        ("qwen2moe", {"mlp_only_layers": [2]}, r"a qwen2_moe whose last layer has no experts cannot be written"),
    ],
)
def test_what_the_architecture_has_no_key_for_is_refused(
    family: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        convert(random_decoder(family, **changes), tmp_path / "model.gguf")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["no json", "[1]", '{"model_type": "nonsense"}', '{"model_type": 3}', "[" * 10_000])
def test_a_config_that_says_something_else_is_not_believed(text: str, tmp_path: Path, caplog) -> None:
    path = tiny_llama(tmp_path / "model.gguf", metadata={"plait.config": text})
    assert open_checkpoint(path).raw["model_type"] == "llama"
    assert "plait.config of the GGUF file is left unused" in caplog.text


def test_a_config_whose_numbers_differ_is_not_believed(tmp_path: Path, caplog) -> None:
    raw = open_checkpoint(tiny_llama(tmp_path / "a.gguf")).raw
    believed = {**raw, "model_type": "mistral", "sliding_window": None}
    path = tiny_llama(tmp_path / "b.gguf", metadata={"plait.config": json.dumps(believed)})
    assert open_checkpoint(path).raw == believed and "left unused" not in caplog.text
    path = tiny_llama(tmp_path / "c.gguf", metadata={"plait.config": json.dumps({**raw, "rope_theta": 5000.0})})
    assert open_checkpoint(path).raw == raw
    assert "rotary[0] is default (theta 5000)" in caplog.text


def test_infinite_weights_are_refused_by_name(tmp_path: Path) -> None:
    decoder = random_decoder("llama")
    with torch.no_grad():
        decoder.get_parameter("model.layers.1.mlp.up_proj.weight")[3, 5] = float("inf")
    with pytest.raises(WeightError, match=r"'blk\.1\.ffn_up\.weight' holds inf, which Q8_0 cannot"):
        convert(decoder, tmp_path / "model.gguf", "q8_0")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("target", "options", "message"),
    [
        ("x.gguf", {"type": "hf"}, "makes a directory"),
        ("x.gguf", {"dtype": "bf16"}, "choose the type of .*x.gguf with --type"),
        ("x", {"type": "q8_0"}, "give .*x the ending .gguf"),
        ("x.gguf", {"type": "q9"}, "--type q9 is unknown"),
        ("x", {"dtype": "fp8"}, "--dtype fp8 is unknown"),
        ("no/such/x.gguf", {}, "is no directory: make it first"),
        ("taken.gguf", {}, "exists already: --force replaces it"),
        ("taken", {}, "exists already: --force replaces it"),
        ("taken.gguf/x", {}, "is no directory"),
        ("folder.gguf", {}, "is a directory"),
        ("file", {}, "is a file; give a directory"),
    ],
)
def test_wrong_requests_are_told_before_anything_is_read(
    target: str, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    (tmp_path / "taken.gguf").write_bytes(b"x")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "config.json").write_text("{}")
    (tmp_path / "folder.gguf").mkdir()
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(UsageError, match=message):
        convert("/no/such/model", tmp_path / target, **options)


def test_force_replaces_a_file_and_a_directory(tmp_path: Path) -> None:
    directory = model_directory(tmp_path, "llama")
    (tmp_path / "x.gguf").write_bytes(b"old")
    convert(directory, tmp_path / "x.gguf", force=True)
    assert GGUFSource(tmp_path / "x.gguf").names()
    (tmp_path / "y").mkdir()
    (tmp_path / "y" / "model.safetensors").write_bytes(b"old")
    (tmp_path / "y" / "README.md").write_text("mine")
    convert(tmp_path / "x.gguf", tmp_path / "y", force=True)
    assert torch.equal(logits(tmp_path / "y"), logits(directory))
    assert (tmp_path / "y" / "README.md").read_text() == "mine"
