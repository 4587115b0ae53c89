"""Tiny random models as directories on disk: for tests that need a real model, but not a good one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import plait

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
NUM_BYTES = 256
VOCAB_SIZE = NUM_BYTES + len(SPECIAL_TOKENS)
END_OF_TEXT, IM_START, IM_END = range(NUM_BYTES, VOCAB_SIZE)

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "bos_token_id": END_OF_TEXT,
    "eos_token_id": IM_END,
    "initializer_range": 0.3,
}
_PER_FAMILY: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 2, "rms_norm_eps": 1e-5, "rope_theta": 10_000.0, "tie_word_embeddings": False},
    "mistral": {"num_key_value_heads": 2, "sliding_window": 24, "tie_word_embeddings": False},
    "qwen2": {"num_key_value_heads": 2, "tie_word_embeddings": True},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": True},
    "gemma3_text": {
        "num_hidden_layers": 6,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "sliding_window": 24,
    },
    "gpt_neox": {"rotary_pct": 0.5, "tie_word_embeddings": False},
    "deepseek_v3": {
        "kv_lora_rank": 24,
        "q_lora_rank": 20,
        "qk_nope_head_dim": 10,
        "qk_rope_head_dim": 6,
        "v_head_dim": 14,
        "n_routed_experts": 6,
        "n_group": 3,
        "topk_group": 2,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 20,
        "first_k_dense_replace": 1,
    },
}


def tiny_config(family: str = "llama", **overrides: Any) -> dict[str, Any]:
    """The config.json dictionary of a model with a few thousand parameters."""
    return {"model_type": family, **_COMMON, **_PER_FAMILY[family], **overrides}


def tiny_model_dir(parent: Path, family: str = "llama", seed: int = 0, chat: bool = True, **overrides: Any) -> Path:
    """A new directory under `parent`: config.json, model.safetensors, a byte-level tokenizer, a ChatML template.

    overrides: config keys. chat False leaves the template out. The weights are random, so the model talks nonsense,
    but the same nonsense for the same seed.
    """
    directory = Path(parent) / f"tiny-{family}-{seed}"
    raw = tiny_config(family, **overrides)
    plait.from_config(raw, seed=seed).save_pretrained(directory)
    write_tokenizer(directory, chat)
    return directory


def write_tokenizer(directory: Path, chat: bool = True) -> None:
    """tokenizer.json and tokenizer_config.json: token i is byte i, then the special tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    # The byte-level alphabet in the order of the bytes: GPT-2's printable stand-ins.
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    stand_in = {byte: byte for byte in printable}
    stand_in |= {byte: 256 + i for i, byte in enumerate(b for b in range(256) if b not in stand_in)}
    vocabulary = {chr(stand_in[byte]): byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL_TOKENS])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL_TOKENS[0],
        "eos_token": SPECIAL_TOKENS[2],
        "pad_token": SPECIAL_TOKENS[0],
        "clean_up_tokenization_spaces": False,
    }
    if chat:
        settings["chat_template"] = CHAT_TEMPLATE
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
