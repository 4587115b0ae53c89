"""Tokenizers: one trained here, or one that a model brings."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from plait.errors import ConfigError, TokenizerError
from plait.text.tokenizer import Tokenizer, load_tokenizer
from plait.training.data.config import TokenizerConfig

PAD_TEXT, EOS_TEXT, SEP_TEXT = "<pad>", "<eos>", "<sep>"
_BYTES = 256


def tag_text(language: str) -> str:
    """The token that says which language follows."""
    return f"<{language}>"


def train_tokenizer(texts: Iterable[str], vocab_size: int, languages: Sequence[str] = ()) -> Tokenizer:
    """A byte-level BPE in NFC, without a prefix space: decode(encode_plain(x)) = NFC(x) for every text.

    Special tokens come first: `<pad>` 0, `<eos>` 1, `<sep>` 2, then a tag for each language; then the 256 bytes, then
    merges until there are `vocab_size` entries, fewer if the texts give no more. The same texts in the same order give
    the same tokenizer. Raises ConfigError for a `vocab_size` without room for merges.
    """
    from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
    from tokenizers import Tokenizer as Backend

    special = [PAD_TEXT, EOS_TEXT, SEP_TEXT, *map(tag_text, languages)]
    if vocab_size <= len(special) + _BYTES:
        raise ConfigError(
            f"data.tokenizer.vocab_size {vocab_size} has no room for merges: {len(special)} special tokens and "
            f"{_BYTES} bytes come first"
        )
    backend = Backend(models.BPE())
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(text, normalized=False, special=True) for text in special],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return from_json(backend.to_str())


def from_json(text: str) -> Tokenizer:
    """The tokenizer that `train_tokenizer` made, from its tokenizer.json."""
    from tokenizers import Tokenizer as Backend

    backend = Backend.from_str(text)
    named = {"pad_token": PAD_TEXT, "eos_token": EOS_TEXT, "sep_token": SEP_TEXT}
    added: dict[int, Any] = backend.get_added_tokens_decoder()
    tags = [token.content for _, token in sorted(added.items()) if token.content not in named.values()]
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **named,
        "additional_special_tokens": tags,
        "clean_up_tokenization_spaces": False,
    }
    eos: Any = backend.token_to_id(EOS_TEXT)
    return Tokenizer(backend, special_tokens=named, eos_token_ids=[eos], config=config)


def given_tokenizer(config: TokenizerConfig) -> Tokenizer:
    """The tokenizer of the model, or of the directory without one, that the configuration names."""
    from plait.weights.locate import locate

    place = Path(config.path).expanduser()
    return load_tokenizer(place if (place / "tokenizer.json").exists() else locate(config.path))


def identity(tokenizer: Tokenizer) -> str:
    """All that decides about ids, as text: the tokenizer.json, and what stands beside it."""
    beside = [sorted(tokenizer.eos_token_ids), list(tokenizer.prefix_ids), dict(tokenizer.chat_templates)]
    names = {name: tokenizer.special_id(name) for name in ("pad_token", "eos_token", "bos_token")}
    return json.dumps([tokenizer.specification(), beside, names], sort_keys=True)


def eos_id(tokenizer: Tokenizer) -> int:
    """The id that ends a document. Raises TokenizerError where there is none."""
    found = tokenizer.special_id("eos_token")
    if found is None:
        found = min(tokenizer.eos_token_ids, default=None)
    if found is None:
        raise TokenizerError("the tokenizer has no eos token, which documents end with: train one, or choose another")
    return found


def pad_id(tokenizer: Tokenizer) -> int:
    """What stands at padding; masks go by length, so that any id will do."""
    found = tokenizer.pad_token_id
    return found if found is not None else min(tokenizer.eos_token_ids, default=0)


def control_id(tokenizer: Tokenizer, text: str) -> int:
    """The id of a separator or a language tag. Raises TokenizerError where the tokenizer lacks it."""
    found = tokenizer.special_token_id(text)
    if found is None:
        raise TokenizerError(
            f"the tokenizer has no special token {text}, which translation needs: leave out data.tokenizer.path to "
            f"train one, or add the token"
        )
    return found
