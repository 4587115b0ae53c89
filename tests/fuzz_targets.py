"""What `tests.fuzzing` mutates: small valid files of every kind that a model directory has, and how each is read."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.gguf_files import write_gguf, write_split


@dataclass(frozen=True)
class Target:
    """build: the valid directory. file: what is mutated in it. read: everything that reading it means."""

    build: Callable[[Path], None]
    file: str
    read: Callable[[Path], None]
    is_json: bool = False
    # So many cases, of those asked for, in proportion: what is read in a moment gets more.
    weight: int = 1


# Weight files


def tiny_gguf(path: Path) -> bytes:
    """Under 2 KB, with every kind of value, so that most mutations hit the header."""
    keys = {
        "block_count": 1,
        "context_length": 32,
        "embedding_length": 32,
        "feed_forward_length": 32,
        "llama.attention.head_count": 2,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "general.alignment": 32,
        "a.flag": True,
        "a.text": "text",
        "a.ints": [1, 2, 3],
        "a.flags": [True, False],
        "tokenizer.ggml.tokens": ["a", "bc", "", "d" * 20],
    }
    tensors = {"token_embd.weight": ("Q8_0", torch.ones(4, 32).numpy()), "output_norm.weight": torch.ones(32).numpy()}
    tensors["half"] = ("BF16", torch.ones(3, 4).numpy())
    return write_gguf(path, keys, tensors).read_bytes()


def tiny_safetensors(path: Path) -> bytes:
    from safetensors.torch import save_file

    save_file({"a": torch.ones(2, 3), "b": torch.ones(4).bfloat16(), "c": torch.zeros(0)}, path, {"format": "pt"})
    return path.read_bytes()


def read_gguf(path: Path) -> None:
    from plait.weights.gguf_config import gguf_config
    from plait.weights.gguf_source import GGUFSource

    source = GGUFSource(path)
    for key in source.metadata:
        source.metadata[key]
    for name in source.names():
        source.read(name)
    gguf_config(source.metadata, source.file.tensors)


def read_safetensors(path: Path) -> None:
    from plait.weights.safetensors_source import SafetensorsSource

    source = SafetensorsSource(path)
    for name in source.names():
        source.read(name)


def _read_gguf_alone(path: Path) -> None:
    from plait.weights.gguf_source import GGUFSource

    source = GGUFSource(path)
    for name in source.names():
        source.read(name)


def _build_split(folder: Path) -> None:
    one, two = {"a": torch.ones(4).numpy()}, {"b": torch.ones(4).numpy()}
    write_split(folder / "m", [({"block_count": 1}, one), ({}, two)])


def _build_sharded(folder: Path) -> None:
    from safetensors.torch import save_file

    weight_map = {}
    for number, name in enumerate("ab", 1):
        file = f"model-{number:05d}-of-00002.safetensors"
        save_file({name: torch.ones(2), name * 2: torch.ones(3)}, folder / file)
        weight_map |= {name: file, name * 2: file}
    index = {"metadata": {"total_size": 40}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _read_directory(path: Path) -> None:
    read_safetensors(path.parent)


def _build_config(folder: Path) -> None:
    from tests.tiny import tiny_config

    (folder / "config.json").write_text(json.dumps(tiny_config("gemma3_text")))


def _read_config(path: Path) -> None:
    from plait.weights.checkpoint import read_config

    config = read_config(path)
    config.param_counts()
    config.kv_bytes_per_token(2)


# Tokenizers

TEXTS = ("Hello  wörld 123\n\t<|im_start|>你好 👍🏽<s>", "", " \u0301x\r\n")


def _read_tokenizer(path: Path) -> None:
    from plait.text.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(path.parent)
    for text in TEXTS:
        ids = tokenizer.encode(text)
        tokenizer.encode_plain(text)
        tokenizer.decode(ids)
    if tokenizer.chat_template is not None:
        tokenizer.encode_chat([{"role": "user", "content": "hi"}])


CONFIG = {
    "bos_token": "<s>",
    "eos_token": {"content": "</s>", "lstrip": False, "special": True},
    "add_bos_token": True,
    "add_prefix_space": False,
    "legacy": True,
    "added_tokens_decoder": {"276": {"content": "<|im_start|>", "special": True}, "277": {"content": "<call>"}},
    "additional_special_tokens": ["<|im_start|>"],
    "chat_template": "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}",
}


def _build_tokenizer_json(folder: Path) -> None:
    from tests.text import small_tokenizers as small

    small.write(folder, small.with_bos(small.metaspace(), "<s>"), {"bos_token": "<s>", "chat_template": small.WITH_BOS})
    spec = json.loads((folder / "tokenizer.json").read_text())
    # A short vocabulary: most mutations should hit the settings around it.
    keep = {text for text, id in spec["model"]["vocab"].items() if id < 320}
    spec["model"]["vocab"] = {text: id for text, id in spec["model"]["vocab"].items() if text in keep}
    spec["model"]["merges"] = [m for m in spec["model"]["merges"] if {*m, "".join(m)} <= keep]
    (folder / "tokenizer.json").write_text(json.dumps(spec))


def _build_sentencepiece(kind: str) -> Callable[[Path], None]:
    def build(folder: Path) -> None:
        from sentencepiece import sentencepiece_model_pb2

        message = sentencepiece_model_pb2.ModelProto()
        pieces = [("<unk>", 2), ("<s>", 3), ("</s>", 3), ("\n", 4), ("<tool>", 4), ("<mark>", 5)]
        pieces += [
            (text, 1) for text in ("▁", "a", "b", "ab", "▁a", "h", "e", "l", "o", "he", "ll", "lo", "▁hello", "w")
        ]
        pieces += [(f"<0x{byte:02X}>", 6) for byte in range(256)] if kind == "bpe" else []
        for number, (text, type) in enumerate(pieces):
            message.pieces.add(piece=text, score=-float(number) if type == 1 else 0.0, type=type)
        message.trainer_spec.model_type = {"unigram": 1, "bpe": 2}[kind]
        message.trainer_spec.byte_fallback = kind == "bpe"
        message.normalizer_spec.remove_extra_whitespaces = kind == "unigram"
        (folder / "tokenizer.model").write_bytes(message.SerializeToString())

    return build


def _build_charsmap(folder: Path) -> None:
    """A table of some kilobytes: a trie with one letter, so that most mutations hit what is followed."""
    from sentencepiece import sentencepiece_model_pb2

    _build_sentencepiece("unigram")(folder)
    message = sentencepiece_model_pb2.ModelProto.FromString((folder / "tokenizer.model").read_bytes())
    units = [0] * 512
    # From the root, whose children begin at 256, "h" leads on to the leaf of its value, the first replacement.
    units[0] = 256 << 10
    units[256 ^ ord("h")] = ((256 ^ ord("h") ^ 300) << 10) | (1 << 8) | ord("h")
    units[300] = (1 << 31) | 0
    message.normalizer_spec.precompiled_charsmap = struct.pack("<I512I", 2048, *units) + b"H\0"
    (folder / "tokenizer.model").write_bytes(message.SerializeToString())


def _build_beside(folder: Path) -> None:
    _build_sentencepiece("bpe")(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps(CONFIG))


def _build_gguf_tokenizer(kind: str) -> Callable[[Path], None]:
    def build(folder: Path) -> None:
        tokens = ["<unk>", "<s>", "</s>", "a", "b", "ab", "he", "l", "o", "h", "e"]
        keys: dict[str, object] = {
            "model": kind,
            "tokens": tokens,
            "token_type": [2, 3, 3, *[1] * 8],
            "bos_token_id": 1,
            "eos_token_id": 2,
            "add_bos_token": True,
        }
        if kind == "llama":
            keys |= {"scores": [0.0, 0.0, 0.0, *(-1.5 * n for n in range(8))], "unknown_token_id": 0}
        else:
            keys |= {"pre": "llama-bpe", "merges": ["a b", "h e"]}
        metadata = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
        write_gguf(folder / "m.gguf", metadata | {"tokenizer.chat_template": "{{ messages[0].content }}"}, {})

    return build


def _read_gguf_tokenizer(path: Path) -> None:
    from plait.text.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(path)
    for text in ("hello ab", "<s>ab"):
        tokenizer.decode(tokenizer.encode(text))
        tokenizer.encode_plain(text)
    if tokenizer.chat_template is not None:
        tokenizer.encode_chat([{"role": "user", "content": "hi"}])


def _build_vocab(folder: Path) -> None:
    from tests.text import small_tokenizers as small

    spec = json.loads(small.byte_level().to_str())["model"]
    vocabulary = {text: id for text, id in spec["vocab"].items() if id < 300}
    pairs = [merge for merge in spec["merges"] if {*merge, "".join(merge)} <= vocabulary.keys()]
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in pairs))


def _build_ranks(folder: Path) -> None:
    import base64

    tokens = [bytes([byte]) for byte in range(256)] + [b"he", b"ll", b"hell", "你".encode()]
    lines = [base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens)]
    (folder / "tiktoken.model").write_bytes(b"".join(lines))
    decoder = {str(len(tokens)): {"content": "[BOS]", "special": True}}
    config = {"tokenizer_class": "TikTokenTokenizer", "added_tokens_decoder": decoder}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


TEMPLATE = (
    "{%- set ns = namespace(first=true) -%}{%- if tools %}{{ tools | tojson(indent=2) }}{% endif -%}"
    "{%- for message in messages[-3:] -%}{%- if loop.index0 % 2 == 0 and message['role'] != 'user' -%}"
    "{{ raise_exception('no') }}{%- endif -%}{{ '<|' ~ message.role | upper ~ '|>' }}"
    "{{ message.content.split('x')[0] | trim | replace('a', 'b') }}{% set ns.first = false %}{%- endfor -%}"
    "{%- if add_generation_prompt %}{{ '=' * 3 }}{{ range(4) | join(',') }}{% endif %}"
)


def _build_template(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text(TEMPLATE)


def _read_template(path: Path) -> None:
    from plait.jsonfile import read_text
    from plait.text.chat_template import ChatTemplate

    from plait.errors import TokenizerError  # isort: skip

    template = ChatTemplate(read_text(path, TokenizerError), {"bos_token": "<s>", "eos_token": "</s>"})
    template.render([{"role": "user", "content": "a x b"}], tools=[{"name": "f"}])


TARGETS: dict[str, Target] = {
    "gguf": Target(lambda folder: _written(tiny_gguf(folder / "m.gguf")), "m.gguf", read_gguf, weight=16),
    "split gguf": Target(_build_split, "m-00002-of-00002.gguf", _read_gguf_alone, weight=8),
    "safetensors": Target(
        lambda folder: _written(tiny_safetensors(folder / "m.safetensors")),
        "m.safetensors",
        read_safetensors,
        weight=16,
    ),
    "index": Target(_build_sharded, "model.safetensors.index.json", _read_directory, is_json=True, weight=8),
    "config.json": Target(_build_config, "config.json", _read_config, is_json=True, weight=8),
    "tokenizer.json": Target(_build_tokenizer_json, "tokenizer.json", _read_tokenizer, is_json=True),
    "sentencepiece bpe": Target(_build_sentencepiece("bpe"), "tokenizer.model", _read_tokenizer),
    "sentencepiece unigram": Target(_build_sentencepiece("unigram"), "tokenizer.model", _read_tokenizer, weight=2),
    "charsmap": Target(_build_charsmap, "tokenizer.model", _read_tokenizer),
    "tokenizer_config.json": Target(_build_beside, "tokenizer_config.json", _read_tokenizer, is_json=True),
    "gguf llama tokenizer": Target(_build_gguf_tokenizer("llama"), "m.gguf", _read_gguf_tokenizer),
    "gguf gpt2 tokenizer": Target(_build_gguf_tokenizer("gpt2"), "m.gguf", _read_gguf_tokenizer),
    "vocab.json": Target(_build_vocab, "vocab.json", _read_tokenizer, is_json=True),
    "merges.txt": Target(_build_vocab, "merges.txt", _read_tokenizer),
    "tiktoken.model": Target(_build_ranks, "tiktoken.model", _read_tokenizer),
    "chat template": Target(_build_template, "chat_template.jinja", _read_template),
}


def _written(_: bytes) -> None:
    """The build functions of these two return what they wrote."""
