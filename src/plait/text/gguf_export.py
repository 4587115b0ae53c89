"""A tokenizer as GGUF metadata: the reverse of plait.text.gguf_tokenizer.

Byte-level BPE becomes the model `gpt2`, with the name of the pre-tokeniser whose rules cut text as this one does;
BPE on characters with a fallback to bytes becomes `llama`, with scores that rank the tokens as its merges do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from plait.errors import TokenizerError
from plait.text.gguf_tokenizer import merges_from_scores
from plait.text.pretokenizers import PRE_TOKENIZERS, PreTokenizer
from plait.text.tokenizer import Tokenizer

_PREFIX = "tokenizer.ggml."
_REMEDY = "; convert without it (--no-tokenizer)"
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
_WORD_START = "\u2581"
# The score of a token that no merge gives: below that of every token that one does.
_UNREACHED = -1e6
# Names of the ids beside the first that end a sequence; what is no end of a message ends a turn.
_END_OF_MESSAGE = ("<|eom_id|>",)

# Texts that tell the rules of pre-tokenisers apart: scripts, digits, contractions, white space, marks, symbols.
_PROBES = (
    "Hello, world! It's 1234567 o'clock, I'LL don't WE'VE 'S 're",
    " leading  double   triple spaces\tand\ttabs \n\n new\r\nlines\r \n  \n x  ",
    "camelCase PascalCase XMLHttpRequest snake_case kebab-case foo.bar() a/b\\c ///",
    "1 22 333 4444 55555 3.14159 1,000,000 0x1F 10e-5 \u00bd \u0661\u0662\u0663 \u2167",
    '#include <a.h>\nint main(void) { return x == y && z != 0 ? `a` : "b"; } // $ ^ ~ | + = <>',
    "caf\u00e9 na\u00efve \u00c5ngstr\u00f6m stra\u00dfe \u0130stanbul e\u0301a\u0308 \u1e9e",
    "\u041f\u0440\u0438\u0432\u0435\u0442 \u043c\u0438\u0440 \u0393\u03b5\u03b9\u03ac "
    "\u05e9\u05dc\u05d5\u05dd \u0645\u0631\u062d\u0628\u0627 \u0939\u093f\u0928\u094d\u0926\u0940 "
    "\u0e44\u0e17\u0e22\u0e20\u0e32\u0e29\u0e32",
    "\u4f60\u597d\uff0c\u4e16\u754c\u3002\u3053\u3093\u306b\u3061\u306f \u30ab\u30bf\u30ab\u30ca "
    "\ud55c\uad6d\uc5b4 \u7e41\u9ad4\u5b57123abc",
    "\U0001f600 \U0001f44d\U0001f3fd\U0001f468\u200d\U0001f469\u200d\U0001f467 "
    "\u2764\ufe0f\u2026\u2014\u201cquoted\u201d \u00a0nbsp\u2003em \u0964\u06d4\u060c",
    "!!!??? ...,,, (x) [y] {z} <tag attr='v'>text</tag> a+b=c 100% @user #tag \u20ac5 \u00a3\u00a5 \u00b0\u00b1\u00d7",
    "'The 'quoted' \u2019s \u2019t word's'\n\t'tis 'Twas o'er",
    "  1  22   333\t4 \n 5\r\n\r\n6  (7)  a  \u00e9  !  $  \u4f60  \U0001f600  .5 -  -",
    "x\n\n\ny\n \nz \n\n  w\t\n",
    "a1b2c3 v2.0.1-rc3 2024-01-31T23:59:59Z +1 (555) 010-9999 A\u0300B \u0915\u0941 \uff11\uff12 \U0001d7d8",
)


def tokenizer_metadata(tokenizer: Tokenizer, vocab_size: int, name: str = "the tokenizer") -> dict[str, Any]:
    """The `tokenizer.*` keys of a GGUF file.

    vocab_size: rows of the model's embedding; tokens that the tokenizer has no text for are written as unused. name:
    of the tokenizer's file, for errors. Raises TokenizerError for a tokenizer that GGUF cannot hold.
    """
    spec = tokenizer.specification()
    kind = spec["model"].get("type")
    if kind != "BPE":
        raise TokenizerError(f"{name} is of the type {kind!r}, and plait writes only BPE into GGUF{_REMEDY}")
    tokens, types = _tokens(tokenizer, spec, vocab_size, name)
    if _is_byte_level(spec):
        keys = _byte_level_keys(tokenizer, spec, name)
    elif spec["model"].get("byte_fallback"):
        keys = _sentencepiece_keys(spec, tokens, types, name)
    else:
        raise TokenizerError(f"{name} is BPE of neither bytes nor characters with byte fallback{_REMEDY}")
    metadata: dict[str, Any] = {f"{_PREFIX}{key}": value for key, value in keys.items()}
    metadata[_PREFIX + "tokens"] = ("ARRAY:STRING", tokens)
    metadata[_PREFIX + "token_type"] = ("ARRAY:INT32", types)
    metadata |= {f"{_PREFIX}{key}": value for key, value in _ids(tokenizer, tokens).items()}
    metadata[_PREFIX + "add_bos_token"] = tokenizer.add_bos_token
    for template, text in tokenizer.chat_templates.items():
        metadata["tokenizer.chat_template" + ("" if template == "default" else f".{template}")] = text
    return metadata


def notes(tokenizer: Tokenizer) -> list[str]:
    """What of a tokenizer a GGUF file does not say, for people."""
    found = []
    prefix = [id for id in tokenizer.prefix_ids if id != tokenizer.bos_token_id]
    if prefix:
        texts = ", ".join(repr(tokenizer.token_text(id)) for id in prefix)
        found.append(f"the tokenizer puts {texts} before a prompt, which GGUF cannot say: give it in the prompt")
    steps = _steps(tokenizer.specification().get("pre_tokenizer"), "pretokenizers")
    if any(step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never" for step in steps):
        found.append(
            "a text that begins with a space gets another one before it in GGUF; the tokenizer leaves it as it is"
        )
    return found


def _tokens(tokenizer: Tokenizer, spec: Mapping[str, Any], vocab_size: int, name: str) -> tuple[list[str], list[int]]:
    """Texts and GGUF token types by id."""
    vocabulary: dict[str, int] = dict(spec["model"]["vocab"])
    added = {token["id"]: token for token in spec.get("added_tokens", ())}
    vocabulary |= {token["content"]: id for id, token in added.items()}
    beyond = [text for text, id in vocabulary.items() if id >= vocab_size]
    if beyond:
        raise TokenizerError(
            f"{name} has {max(vocabulary.values()) + 1} tokens ({beyond[0]!r:.40} is beyond the end), and the model has"
            f" an embedding for {vocab_size}{_REMEDY}"
        )
    texts: list[str | None] = [None] * vocab_size
    for known, id in vocabulary.items():
        texts[id] = known
    unknown = spec["model"].get("unk_token")
    byte_level = _is_byte_level(spec)
    types = []
    for id, text in enumerate(texts):
        if text is None:
            types.append(_UNUSED)
        elif text == unknown and not byte_level:
            types.append(_UNKNOWN)
        elif id in added:
            types.append(_CONTROL if added[id]["special"] else _USER_DEFINED)
        elif not byte_level and _is_byte(text):
            types.append(_BYTE)
        else:
            types.append(_NORMAL)
    return [f"[PAD{id}]" if text is None else text for id, text in enumerate(texts)], types


def _is_byte(text: str) -> bool:
    return len(text) == 6 and text.startswith("<0x") and text.endswith(">")


def _steps(block: Mapping[str, Any] | None, inner: str) -> list[Mapping[str, Any]]:
    """The parts of a normaliser, pre-tokeniser or decoder, which may be a sequence of them."""
    if not block:
        return []
    if block.get("type") != "Sequence":
        return [block]
    return [step for part in block[inner] for step in _steps(part, inner)]


def _is_byte_level(spec: Mapping[str, Any]) -> bool:
    return any(step["type"] == "ByteLevel" for step in _steps(spec.get("pre_tokenizer"), "pretokenizers"))


def _byte_level_keys(tokenizer: Tokenizer, spec: Mapping[str, Any], name: str) -> dict[str, Any]:
    normalizers = [step["type"] for step in _steps(spec.get("normalizer"), "normalizers")]
    if set(normalizers) - {"NFC"}:
        raise TokenizerError(
            f"{name} normalises text with {', '.join(normalizers)}, which GGUF has no key for{_REMEDY}"
        )
    merges = [" ".join(pair) if not isinstance(pair, str) else pair for pair in spec["model"]["merges"]]
    pre = pre_tokenizer_name(tokenizer, spec, bool(normalizers), name)
    return {"model": "gpt2", "pre": pre, "merges": ("ARRAY:STRING", merges)}


def pre_tokenizer_name(tokenizer: Tokenizer, spec: Mapping[str, Any], nfc: bool, name: str) -> str:
    """The `tokenizer.ggml.pre` whose rules cut text as the tokenizer's own do. Raises TokenizerError where there is
    none."""
    own = [tokenizer.words(probe) for probe in _PROBES]
    ignore_merges = bool(spec["model"].get("ignore_merges"))
    alike = [entry for entry in PRE_TOKENIZERS if _words(entry) == own]
    # Normal form C is not applied by llama.cpp at all, so that it only decides between entries that cut alike.
    chosen = sorted((e for e in alike if e.ignore_merges == ignore_merges), key=lambda e: e.nfc != nfc)
    if chosen:
        return chosen[0].names[0]
    if alike:
        said = "ignore_merges" if ignore_merges else "no ignore_merges"
        raise TokenizerError(f"{name} cuts words as {alike[0].names[0]!r} does but has {said}, unlike it{_REMEDY}")
    raise TokenizerError(f"{name} cuts text into words in a way that GGUF has no name for{_REMEDY}")


def _words(entry: PreTokenizer) -> list[list[str]]:
    rules = entry.build()
    return [[word for word, _ in rules.pre_tokenize_str(probe)] for probe in _PROBES]


def _sentencepiece_keys(spec: Mapping[str, Any], tokens: list[str], types: list[int], name: str) -> dict[str, Any]:
    merges = [tuple(pair.split(" ", 1)) if isinstance(pair, str) else tuple(pair) for pair in spec["model"]["merges"]]
    scores = _scores(merges, tokens)
    implied = [(tokens[left], tokens[right]) for left, right in merges_from_scores(tokens, types, scores).tolist()]
    added = {token["content"] for token in spec.get("added_tokens", ())}
    if not _ranked_alike(merges, implied, added):
        raise TokenizerError(f"{name} joins characters in an order that no scores of tokens give{_REMEDY}")
    prefixed = _space_prefix(spec, name)
    return {"model": "llama", "scores": ("ARRAY:FLOAT32", scores), "add_space_prefix": prefixed, "pre": "default"}


def _scores(merges: list[tuple[str, ...]], tokens: list[str]) -> list[float]:
    """Minus the rank of each token among the tokens that merges give, as SentencePiece's own BPE numbers them."""
    rank: dict[str, int] = {}
    for pair in merges:
        rank.setdefault("".join(pair), len(rank))
    return [-float(rank[token]) if token in rank else _UNREACHED for token in tokens]


def _ranked_alike(merges: list[tuple[str, ...]], implied: list[tuple[str, str]], added: set[str]) -> bool:
    """Whether both lists hold the same merges and give the tokens in the same order. Added tokens do not count: they
    are found in a text before anything is merged."""

    def counted(pairs: Any) -> dict[tuple[str, ...], None]:
        return {pair: None for pair in pairs if not added & {*pair, "".join(pair)}}

    ours, theirs = counted(merges), counted(implied)
    orders = [list(dict.fromkeys("".join(pair) for pair in pairs)) for pairs in (ours, theirs)]
    return ours.keys() == theirs.keys() and orders[0] == orders[1]


def _space_prefix(spec: Mapping[str, Any], name: str) -> bool:
    """Whether a text gets a space before it. Raises TokenizerError for white space that is treated in another way."""
    normalizers = _steps(spec.get("normalizer"), "normalizers")
    pre = _steps(spec.get("pre_tokenizer"), "pretokenizers")
    prefixed, replaced = False, False
    for step in (*normalizers, *pre):
        kind = step["type"]
        if kind == "Prepend" and step["prepend"] == _WORD_START:
            prefixed = True
        elif kind == "Replace" and step["pattern"] == {"String": " "} and step["content"] == _WORD_START:
            replaced = True
        elif kind == "Metaspace" and step.get("replacement") == _WORD_START:
            replaced = True
            prefixed = step.get("prepend_scheme", "always") != "never"
        elif kind == "Split" and step["pattern"] == {"String": " "}:
            pass  # after the replacement there are no spaces left
        else:
            raise TokenizerError(f"{name} treats text with {kind!r}, which GGUF has no key for{_REMEDY}")
    if not replaced:
        raise TokenizerError(f"{name} does not mark spaces as SentencePiece does{_REMEDY}")
    return prefixed


def _ids(tokenizer: Tokenizer, tokens: list[str]) -> dict[str, int]:
    """Ids of special tokens; of those that end a sequence GGUF names three."""
    named = {name: tokenizer.special_id(f"{name}_token") for name in ("bos", "eos", "unk", "pad")}
    ends = sorted(tokenizer.eos_token_ids)
    eos = named["eos"] if named["eos"] in ends else (ends[0] if ends else named["eos"])
    keys = {
        "bos_token_id": named["bos"],
        "eos_token_id": eos,
        "unknown_token_id": named["unk"],
        "padding_token_id": named["pad"],
    }
    others = [id for id in ends if id != eos and id < len(tokens)]
    for id in others:
        key = "eom_token_id" if tokens[id] in _END_OF_MESSAGE else "eot_token_id"
        keys.setdefault(key, id)
    return {key: id for key, id in keys.items() if id is not None}
