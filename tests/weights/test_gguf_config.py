"""GGUF metadata as a config.json: against transformers' reading and arithmetic, and what must be refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from plait.errors import ConfigError
from plait.weights.gguf_config import fraction_of, gguf_config, shortest_float32
from plait.weights.gguf_reader import GGUFFile
from plait.weights.sources import TensorInfo
from tests.gguf_files import tiny_llama, write_gguf
from tests.real_models import gemma3_path, smollm2_path

COMMON = {
    "block_count": 2,
    "context_length": 4096,
    "embedding_length": 64,
    "feed_forward_length": 128,
    "attention.head_count": 8,
}
EXPERTS = {"expert_count": 8, "expert_used_count": 2}
RMS = {"attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 1e-5}


def metadata(architecture: str, **keys: Any) -> dict[str, Any]:
    """The smallest sufficient metadata; `keys` (dots written as __) are added, None removes."""
    own = COMMON | (
        {"attention.layer_norm_epsilon": 1e-5, "rope.dimension_count": 2} if architecture == "gptneox" else RMS
    )
    own |= {key.replace("__", "."): value for key, value in keys.items()}
    found = {f"{architecture}.{key}": value for key, value in own.items() if value is not None}
    return {"general.architecture": architecture, **found}


def infos(*names: str, vocab: int = 100) -> dict[str, TensorInfo]:
    shapes = dict.fromkeys(names, (1,)) | {"token_embd.weight": (vocab, 64)}
    return {name: TensorInfo(name, shape, "F32", 4, "m.gguf", 0) for name, shape in shapes.items()}


def config(architecture: str, *tensors: str, **keys: Any) -> dict[str, Any]:
    return gguf_config(metadata(architecture, **keys), infos(*tensors))


def refusal(architecture: str, *tensors: str, **keys: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        config(architecture, *tensors, **keys)
    message = str(caught.value)
    assert "\n" not in message and architecture in message
    return message


def test_smollm2_has_the_config_that_its_authors_publish() -> None:
    with GGUFFile(smollm2_path()) as file:
        found = gguf_config(file.metadata, file.tensors)
    published = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "max_position_embeddings": 8192,
        "num_attention_heads": 9,
        "num_hidden_layers": 30,
        "num_key_value_heads": 3,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000,
        "tie_word_embeddings": True,
        "vocab_size": 49152,
    }
    assert found == published | {"head_dim": 64, "mlp_bias": False}


def test_gemma3_has_the_config_that_its_authors_publish() -> None:
    with GGUFFile(gemma3_path()) as file:
        found = gguf_config(file.metadata, file.tensors)
    full = {5, 11, 17}
    assert found == {
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "attention_bias": False,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "final_logit_softcapping": None,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 640,
        "intermediate_size": 2048,
        "layer_types": ["full_attention" if i in full else "sliding_attention" for i in range(18)],
        "max_position_embeddings": 32768,
        "num_attention_heads": 4,
        "num_hidden_layers": 18,
        "num_key_value_heads": 1,
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-6,
        "rope_local_base_freq": 10000,
        "rope_theta": 1000000,
        "sliding_window": 512,
        "tie_word_embeddings": True,
        "vocab_size": 262144,
    }


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma3"])
def test_transformers_reads_the_same_values_from_the_same_file(tmp_path: Path, architecture: str) -> None:
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    keys = metadata(architecture, attention__key_length=8, attention__value_length=8, rope__freq_base=5e5)
    keys |= {f"{architecture}.vocab_size": 40, f"{architecture}.rope.dimension_count": 8}
    keys |= {"gemma3.attention.sliding_window": 16} if architecture == "gemma3" else {}
    keys |= {"tokenizer.ggml.bos_token_id": 3, "tokenizer.ggml.eos_token_id": 5, "tokenizer.ggml.padding_token_id": 7}
    del keys["general.architecture"]
    path = write_gguf(tmp_path / "m.gguf", keys, {"token_embd.weight": np.ones((40, 64))}, architecture)
    theirs = load_gguf_checkpoint(str(path), return_tensors=False)["config"]
    with GGUFFile(path) as file:
        ours = gguf_config(file.metadata, file.tensors)
    compared = {key: value for key, value in theirs.items() if key in ours}
    assert len(compared) >= 12
    for key, value in compared.items():
        assert ours[key] == (pytest.approx(value, rel=1e-7) if isinstance(value, float) else value), key


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma3", "gptneox"])
def test_the_config_class_accepts_every_key(architecture: str) -> None:
    from transformers import AutoConfig

    found = config(architecture)
    model_type = found.pop("model_type")
    built = AutoConfig.for_model(model_type, **found)
    assert built.num_hidden_layers == 2 and built.vocab_size == 100
    for key, value in found.items():
        if not key.startswith(("rope_", "rotary_")):
            assert getattr(built, key) == value, key


def test_gptneox_says_the_rotary_width_as_a_fraction() -> None:
    from transformers import AutoConfig

    found = config("gptneox", embedding_length=512, rope__dimension_count=16)
    assert (found["rotary_pct"], found["rotary_emb_base"], found["use_parallel_residual"]) == (0.25, 10000.0, True)
    assert found["model_type"] == "gpt_neox" and found["layer_norm_eps"] == 1e-5 and found["hidden_act"] == "gelu"
    assert AutoConfig.for_model(**found).rope_parameters["partial_rotary_factor"] == 0.25
    assert config("gptneox", use_parallel_residual=False)["use_parallel_residual"] is False
    for width in range(2, 300):
        for part in range(2, width + 1, 2):
            assert int(width * fraction_of(part, width)) == part


def test_float32_values_get_back_their_shortest_spelling() -> None:
    for value in (1e-5, 1e-6, 0.1, 10000.0, 500000.0, 1e6, 1.1):
        assert shortest_float32(float(np.float32(value))) == value
    assert shortest_float32(0.1) == 0.1
    assert shortest_float32(1e300) == 1e300
    assert shortest_float32(float("inf")) == float("inf")


def test_defaults_for_keys_that_files_leave_out() -> None:
    found = config("llama", attention__head_count_kv=None)
    assert found["num_key_value_heads"] == 8 and found["head_dim"] == 8 and found["rope_theta"] == 10000.0
    assert found["bos_token_id"] is None and found["eos_token_id"] is None
    assert config("llama", rope__freq_base=1e6)["rope_theta"] == 1e6
    gemma = config("gemma3", attention__sliding_window=512, block_count=13)
    assert gemma["rope_theta"] == 1e6 and gemma["rope_local_base_freq"] == 10000.0
    assert [i for i, kind in enumerate(gemma["layer_types"]) if kind == "full_attention"] == [5, 11]


def test_a_head_tensor_decides_whether_embeddings_are_tied() -> None:
    assert config("llama")["tie_word_embeddings"] is True
    assert config("llama", "output.weight")["tie_word_embeddings"] is False


def test_the_vocabulary_is_the_embeddings_rows() -> None:
    assert config("llama")["vocab_size"] == config("llama", vocab_size=100)["vocab_size"] == 100
    assert "vocab_size is 99, but token_embd.weight has 100 rows" in refusal("llama", vocab_size=99)
    keys = metadata("llama") | {"tokenizer.ggml.tokens": ["a", "b"]}
    assert gguf_config(keys, {})["vocab_size"] == 2
    assert gguf_config(metadata("llama", vocab_size=7), {})["vocab_size"] == 7
    with pytest.raises(ConfigError, match="vocabulary"):
        gguf_config(metadata("llama"), {})


def test_the_ends_of_sequence_are_a_set() -> None:
    ids = {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.padding_token_id": 0}
    one = gguf_config(metadata("llama") | ids, infos())
    assert (one["bos_token_id"], one["eos_token_id"], one["pad_token_id"]) == (1, 2, 0)
    two = gguf_config(metadata("llama") | ids | {"tokenizer.ggml.eot_token_id": 9}, infos())
    assert two["eos_token_id"] == [2, 9]
    same = gguf_config(metadata("llama") | ids | {"tokenizer.ggml.eot_token_id": 2}, infos())
    assert same["eos_token_id"] == 2


ATTENTION = ("attn_q", "attn_k", "attn_v", "attn_output")
FEED_FORWARD = ("ffn_gate", "ffn_up", "ffn_down")


def biases(*names: str, layers: tuple[int, ...] = (0, 1)) -> list[str]:
    return [f"blk.{layer}.{name}.bias" for layer in layers for name in names]


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_attention_biases_are_all_four_or_refused(architecture: str) -> None:
    assert config(architecture)["attention_bias"] is False
    assert config(architecture, *biases(*ATTENTION))["attention_bias"] is True
    assert "attn_output in 0" in refusal(architecture, *biases(*ATTENTION[:3]))
    assert "attn_q in 1" in refusal(architecture, *biases(*ATTENTION, layers=(0,)))


def test_feed_forward_biases_are_a_switch_of_llama() -> None:
    assert config("llama", *biases(*FEED_FORWARD))["mlp_bias"] is True
    assert "ffn_gate in 0" in refusal("llama", *biases("ffn_up"))


SCALINGS: list[tuple[dict[str, Any], Any]] = [
    ({}, None),
    ({"rope__scaling__type": "none", "rope__scaling__factor": 4.0}, None),
    ({"rope__scaling__type": "linear", "rope__scaling__factor": 1.0}, None),
    ({"rope__scaling__type": "linear", "rope__scaling__factor": 8.0}, {"rope_type": "linear", "factor": 8.0}),
    ({"rope__scaling__factor": 2.0}, {"rope_type": "linear", "factor": 2.0}),
    ({"rope__scale_linear": 4.0}, {"rope_type": "linear", "factor": 4.0}),
    (
        {
            "rope__scaling__type": "yarn",
            "rope__scaling__factor": 4.0,
            "rope__scaling__original_context_length": 1024,
            "rope__scaling__finetuned": True,
        },
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
    ),
    (
        {
            "rope__scaling__type": "yarn",
            "rope__scaling__factor": 2.0,
            "rope__scaling__yarn_beta_fast": 16.0,
            "rope__scaling__yarn_beta_slow": 2.0,
            "rope__scaling__yarn_ext_factor": 1.0,
            "rope__scaling__attn_factor": 1.0,
        },
        {
            "rope_type": "yarn",
            "factor": 2.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 16.0,
            "beta_slow": 2.0,
        },
    ),
]


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma3", "gptneox"])
@pytest.mark.parametrize(("keys", "expected"), SCALINGS)
def test_rope_scaling(architecture: str, keys: dict[str, Any], expected: Any) -> None:
    assert config(architecture, **keys).get("rope_scaling") == expected


def test_stored_divisors_replace_the_scaling_keys() -> None:
    keys = {"rope__scaling__type": "linear", "rope__scaling__factor": 8.0}
    assert "rope_scaling" not in config("llama", "rope_freqs.weight", **keys)


GEMMA_LAYERS: list[tuple[dict[str, Any], list[int]]] = [
    ({}, [0, 1, 2, 3, 4, 5, 6]),
    ({"attention__sliding_window": 0}, [0, 1, 2, 3, 4, 5, 6]),
    ({"attention__sliding_window": 8}, [5]),
    ({"attention__sliding_window": 8, "attention__sliding_window_pattern": 3}, [2, 5]),
    ({"attention__sliding_window": 8, "attention__sliding_window_pattern": [True] * 4 + [False] * 3}, [4, 5, 6]),
    ({"attention__sliding_window": 8, "attention__sliding_window_pattern": 1}, [0, 1, 2, 3, 4, 5, 6]),
]


@pytest.mark.parametrize(("keys", "full"), GEMMA_LAYERS)
def test_gemma3_layer_types(keys: dict[str, Any], full: list[int]) -> None:
    found = config("gemma3", block_count=7, **keys)
    assert [i for i, kind in enumerate(found["layer_types"]) if kind == "full_attention"] == full
    assert found["sliding_window"] == (keys.get("attention__sliding_window") or None)


def test_gemma3_softmax_scale_is_the_head_width_except_in_the_27b() -> None:
    """4B: 2560 hidden, 8 heads of 256. 27B: 5376 hidden, 32 heads of 128, scale from 5376 / 32 = 168."""
    four = {"embedding_length": 2560, "attention__key_length": 256, "attention__value_length": 256}
    assert config("gemma3", block_count=34, **four)["query_pre_attn_scalar"] == 256
    big = {"embedding_length": 5376, "attention__head_count": 32, "attention__head_count_kv": 16}
    big |= {"attention__key_length": 128, "attention__value_length": 128}
    assert config("gemma3", block_count=62, **big)["query_pre_attn_scalar"] == 168
    assert config("gemma3", final_logit_softcapping=30.0)["final_logit_softcapping"] == 30.0


def test_gemma2_softmax_scale_is_the_head_width_except_in_the_27b() -> None:
    """9B: 3584 hidden, 16 heads of 256. 27B: 4608 hidden, 32 heads of 128, scale from 4608 / 32 = 144."""
    for layers, hidden, heads, width, scalar in ((42, 3584, 16, 256, 256), (46, 4608, 32, 128, 144)):
        sizes = {"block_count": layers, "embedding_length": hidden, "attention__head_count": heads}
        sizes |= {"attention__key_length": width, "attention__value_length": width, "attention__head_count_kv": 8}
        found = config("gemma2", **sizes)
        assert found["query_pre_attn_scalar"] == scalar
        assert (found["attn_logit_softcapping"], found["final_logit_softcapping"]) == (50.0, 30.0)


@pytest.mark.parametrize(
    "architecture", ["gemma2", "phi3", "olmo2", "granite", "smollm3", "qwen2moe", "qwen3moe", "olmoe"]
)
def test_the_rotary_base_is_10000_only_where_the_file_has_none(architecture: str) -> None:
    experts = EXPERTS if architecture.endswith(("moe", "olmoe")) else {}
    assert config(architecture, **experts)["rope_theta"] == 10_000.0
    assert config(architecture, **experts, rope__freq_base=1e6)["rope_theta"] == 1e6


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "experts": ("qwen3", {"expert_count": 8, "expert_used_count": 2}, "count is "),
    "sigmoid router": ("qwen3moe", {**EXPERTS, "expert_gating_func": 2}, "expert_gating_func is 2: a router"),
    "other weights": ("qwen3moe", {**EXPERTS, "expert_weights_norm": False}, "expert_weights_norm is False"),
    "renormalised": ("olmoe", {**EXPERTS, "expert_weights_norm": True}, "expert_weights_norm is True"),
    "scaled experts": ("qwen2moe", {**EXPERTS, "expert_weights_scale": 2.5}, "expert_weights_scale is 2.5"),
    "groups": ("llama", {**EXPERTS, "expert_group_count": 2}, "expert_group_count is 2"),
    "shared experts": ("llama", {**EXPERTS, "expert_shared_count": 1}, "expert_shared_count is 1"),
    "experts without a number": ("qwen3moe", {"expert_count": 8}, "qwen3moe.expert_used_count is missing"),
    "no experts": ("qwen3moe", {"expert_count": 0, "expert_used_count": 2}, "num_experts is 0"),
    "unknown key": ("llama", {"attention__sigmoid": 1}, "llama.attention.sigmoid"),
    "window": ("qwen2", {"attention__sliding_window": 64}, "sliding_window is 64"),
    "not causal": ("llama", {"attention__causal": False}, "attention.causal is False"),
    "clipping": ("llama", {"attention__clamp_kqv": 8.0}, "clamp_kqv is 8.0"),
    "soft cap": ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0"),
    "partial rotary": ("llama", {"rope__dimension_count": 4}, "rope.dimension_count 4"),
    "value width": ("qwen3", {"attention__key_length": 16, "attention__value_length": 8}, "value_length 8"),
    "longrope": ("llama", {"rope__scaling__type": "longrope"}, "'longrope'"),
    "magnitude": ("qwen3", {"rope__scaling__type": "yarn", "rope__scaling__attn_factor": 1.2}, "attn_factor is 1.2"),
    "no rotary positions": ("granite", {"rope__scaling__finetuned": False}, "finetuned is false: layers that do not"),
    "YaRN correction": ("llama", {"rope__scaling__yarn_log_multiplier": 0.1}, "yarn_log_multiplier is 0.1"),
    "missing key": ("llama", {"embedding_length": None}, "llama.embedding_length is missing"),
    "missing norm": ("qwen3", {"attention__layer_norm_rms_epsilon": None}, "layer_norm_rms_epsilon is missing"),
    "wrong type": ("llama", {"block_count": "two"}, "llama.block_count is 'two'"),
    "bool for int": ("llama", {"block_count": True}, "llama.block_count is True"),
    "zero layers": ("llama", {"block_count": 0}, "num_hidden_layers is 0"),
    "zero heads": ("llama", {"attention__head_count": 0}, "num_attention_heads is 0"),
    "zero head width": ("llama", {"attention__key_length": 0}, "key_length is 0"),
    "too many layers": ("gemma3", {"block_count": 1 << 31}, "block_count is 2147483648"),
    "heads do not divide": ("llama", {"attention__head_count": 7}, "not a multiple"),
    "heads per layer": ("llama", {"attention__head_count_kv": [2, 4]}, "differs from layer to layer"),
    "pattern length": (
        "gemma3",
        {"attention__sliding_window": 8, "attention__sliding_window_pattern": [True]},
        "1 entries for 2 layers",
    ),
    "odd rotary": ("gptneox", {"rope__dimension_count": 3}, "rope.dimension_count is 3"),
    "wide rotary": ("gptneox", {"rope__dimension_count": 16}, "rope.dimension_count is 16"),
}


@pytest.mark.parametrize(("architecture", "keys", "expected"), REFUSED.values(), ids=REFUSED.keys())
def test_what_would_change_the_mathematics_is_refused_by_name(
    architecture: str, keys: dict[str, Any], expected: str
) -> None:
    assert expected in refusal(architecture, **keys)


def test_harmless_values_of_such_keys_are_fine() -> None:
    keys = {"expert_count": 0, "expert_used_count": 0, "attention__causal": True, "tensor_data_layout": "Meta AI"}
    assert config("llama", **keys, attention__head_count_kv=[2, 2])["num_key_value_heads"] == 2


@pytest.mark.parametrize(
    ("architecture", "expected"),
    [
        (
            "qwen3moe",
            {"model_type": "qwen3_moe", "num_experts": 8, "norm_topk_prob": True, "moe_intermediate_size": 64},
        ),
        ("qwen2moe", {"model_type": "qwen2_moe", "norm_topk_prob": False, "shared_expert_intermediate_size": 128}),
        ("llama", {"model_type": "mixtral", "num_local_experts": 8, "intermediate_size": 128}),
        ("olmoe", {"model_type": "olmoe", "num_experts": 8, "norm_topk_prob": False, "intermediate_size": 128}),
    ],
)
def test_files_that_count_experts_are_mixtures(architecture: str, expected: dict[str, Any]) -> None:
    """Two experts of eight; their width, where no key has it, is half of the feed-forward's 128 (llama.cpp)."""
    found = config(architecture, **EXPERTS)
    assert found["num_experts_per_tok"] == 2
    assert expected.items() <= found.items()
    if architecture == "qwen2moe":
        widths = {"expert_feed_forward_length": 24, "expert_shared_feed_forward_length": 40}
        found = config(architecture, **EXPERTS, **widths)
        assert (found["moe_intermediate_size"], found["shared_expert_intermediate_size"]) == (24, 40)


@pytest.mark.parametrize("architecture", ["qwen4moe", "mamba", "", None, 5])
def test_an_architecture_that_is_not_in_the_table_is_named(architecture: Any) -> None:
    known = r".*gemma3, .*llama, .*qwen3, qwen3moe"
    with pytest.raises(ConfigError, match=rf"not supported yet \(supported: {known}"):
        gguf_config({"general.architecture": architecture}, {})


def test_a_whole_tiny_file(tmp_path: Path) -> None:
    with GGUFFile(tiny_llama(tmp_path / "m.gguf")) as file:
        found = gguf_config(file.metadata, file.tensors)
    assert (found["vocab_size"], found["head_dim"], found["num_key_value_heads"]) == (48, 8, 2)
