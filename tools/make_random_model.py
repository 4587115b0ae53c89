"""Write a model of any shape with random numbers: `python tools/make_random_model.py SHAPE OUT [--type q8_0]`.

SHAPE: a config.json, or one of the shapes below, which show what decoding costs: the experts that a token goes through
and not all of them, latents and not the keys and values of every head. OUT: a Hugging Face directory in bf16 or, with
the ending .gguf, a file of any type that `plait convert` writes. The tokenizer has a token for each byte. No torch.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from plait.errors import PlaitError, UsageError
from plait.kernels.native import usable_cpus
from plait.model.config import ModelConfig
from plait.model.families import parse_config
from plait.plan.recorder import Recorder
from plait.weights.gguf_writer.file import write_gguf
from plait.weights.gguf_writer.model import model_contents
from plait.weights.gguf_writer.recipes import check_type
from plait.weights.hf_writer import directory_contents, write_directory
from plait.weights.numbers import bf16_bits
from plait.weights.rows import Rows, Shape

SHARD_BYTES = 5 << 30
END = "<|endoftext|>"

_COMMON: dict[str, Any] = {
    "vocab_size": 32_000,
    "hidden_size": 1024,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "max_position_embeddings": 32_768,
    "tie_word_embeddings": True,
    "eos_token_id": 256,
}
_GROUPED = {**_COMMON, "num_key_value_heads": 4, "head_dim": 64}
_HEADS = {**_COMMON, "intermediate_size": 2048, "num_key_value_heads": 16}
SHAPES: dict[str, dict[str, Any]] = {
    # 4 of 40 experts: as many parameters as dense-1b, as many active ones as dense-small.
    "mixture-1b": {
        **_GROUPED,
        "model_type": "qwen3_moe",
        "intermediate_size": 2048,
        "num_experts": 40,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 512,
        "norm_topk_prob": True,
    },
    "dense-1b": {**_GROUPED, "model_type": "qwen3", "intermediate_size": 40 * 512},
    "dense-small": {**_GROUPED, "model_type": "qwen3", "intermediate_size": 4 * 512},
    # 576 numbers a token and layer, and 4096.
    "latent": {
        **_HEADS,
        "model_type": "deepseek_v3",
        "first_k_dense_replace": 16,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    },
    "heads": {**_HEADS, "model_type": "qwen3", "head_dim": 128},
}


class RandomParameters:
    """plait.weights.rows.Parameters: matrices of sd 1 / sqrt(fan in), norms 1, biases 0, in bf16; the same numbers for
    the same name and seed."""

    def __init__(self, config: ModelConfig, seed: int = 0) -> None:
        with Recorder(config) as recorder:
            self.shapes: dict[str, Shape] = {ref.name: ref.shape for ref in recorder.result().weights()}
        self._seed = seed

    def storages(self, name: str) -> set[str]:
        return {"BF16"}

    def origins(self, name: str) -> set[str]:
        return set()

    def made(self, name: str) -> bool:
        return False

    def offset(self, name: str) -> float:
        return 0.0

    def rows(self, name: str) -> Rows:
        shape = self.shapes[name]
        if len(shape) < 2 or name.endswith(("norm.weight", "bias")):
            values = np.full(shape, float(name.endswith("norm.weight")), np.float32)
        else:
            random = np.random.default_rng([self._seed, zlib.crc32(name.encode())])
            values = random.standard_normal(shape, np.float32)
            values *= np.float32(shape[-1] ** -0.5)
        data = bf16_bits(values).view(np.uint8)
        return Rows(shape, "BF16", data.reshape(*(shape[:-1] if len(shape) > 1 else shape), -1))

    def release(self, name: str) -> None: ...


def make(shape: str, target: Path, type_name: str | None = None, seed: int = 0) -> ModelConfig:
    """Write the model. Raises PlaitError for a shape, a target or a type that cannot be."""
    raw = SHAPES[shape] if shape in SHAPES else _read(Path(shape))
    config = parse_config(raw)
    if config.vocab_size < 257:
        raise UsageError(f"vocab_size={config.vocab_size}: the tokenizer has 257 tokens")
    if target.exists():
        raise UsageError(f"{target} exists already")
    gguf = target.suffix == ".gguf"
    if not gguf and type_name not in (None, "bf16"):
        raise UsageError(f"--type {type_name} makes a GGUF file: give {target} the ending .gguf")
    kind = check_type(type_name or "bf16") if gguf else "BF16"
    parameters, threads = RandomParameters(config, seed), usable_cpus()
    with tempfile.TemporaryDirectory() as name:
        tokenizer = Path(name)
        write_tokenizer(tokenizer)
        if gguf:
            options: dict[str, Any] = {"source": tokenizer, "dtypes": {}, "tokenizer": True, "threads": threads}
            contents = model_contents(config, parameters, kind, **options)
            write_gguf(target, contents.metadata, contents.tensors)
        else:
            written = directory_contents(config, parameters, None, {}, threads)
            target.mkdir(parents=True)
            done: dict[str, Any] = {"shard_bytes": SHARD_BYTES, "tokenizer": True, "done": lambda tensor: None}
            write_directory(written, target, tokenizer, {}, **done)
    return config


def write_tokenizer(directory: Path) -> None:
    """tokenizer.json and tokenizer_config.json: token i is byte i, token 256 ends a text."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    # GPT-2's printable stand-ins for the bytes.
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    stand_ins = {byte: chr(byte) for byte in plain} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    tokenizer = Tokenizer(models.BPE(vocab={stand_ins[byte]: byte for byte in range(256)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END, special=True, normalized=False)])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


def _read(path: Path) -> dict[str, Any]:
    from plait.jsonfile import read_json

    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise UsageError(f"{path}: neither a config.json nor one of {', '.join(SHAPES)}")
    return read_json(file)


def describe(config: ModelConfig) -> str:
    """What decoding has to do with: parameters, those of a token, and what a token leaves behind."""
    counts, kept = config.param_counts(), config.kv_bytes_per_token(2)
    return (
        f"{counts['total'] / 1e6:,.1f}M parameters, {counts['active'] / 1e6:,.1f}M active for a token,"
        f" {kept:,} bytes of keys and values a token in bf16"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", metavar="SHAPE", help=f"a config.json, or {', '.join(SHAPES)}")
    parser.add_argument("target", metavar="OUT", type=Path)
    parser.add_argument("--type", help="of a .gguf file's matrices (default: bf16)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    try:
        print(f"{args.target}: {describe(make(args.shape, args.target, args.type, args.seed))}")
    except PlaitError as error:
        raise SystemExit(f"make_random_model: error: {error}") from None
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
