"""The pre-tokenisers that `tokenizer.ggml.pre` names: how text is cut into words before byte-pair merging.

Each name stands for the splitting rules in the `tokenizer.json` of the model family it comes from. A rule is applied
to every piece that the rules before it left; matches and the text between them both become pieces. Where a published
tokenizer.json and llama.cpp's reading of it differ in how an expression is written, the published one stands here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

from plait.errors import TokenizerError

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DIGIT = r"\p{N}"
_DIGITS_BY_THREE = r"\p{N}{1,3}"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_PUNCTUATION = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_LLAMA3 = f"{_CONTRACTION}|{_WORD}|{_DIGITS_BY_THREE}|{_PUNCTUATION}|{_SPACES}"
_QWEN2 = f"{_CONTRACTION}|{_WORD}|{_DIGIT}|{_PUNCTUATION}|{_SPACES}"
_QWEN35 = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|{_DIGIT}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
# Words in which capitals come before small letters, so that camelCase falls apart at the capitals.
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*")
_PUNCTUATION_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_GPT4O = f"{_CASED[0]}{_CONTRACTION}?|{_CASED[1]}{_CONTRACTION}?|{_DIGITS_BY_THREE}|{_PUNCTUATION_SLASH}|{_SPACES}"
# Kimi's: runs of Han characters are words of their own, and no part of other words.
_UPPER_NO_HAN, _LOWER_NO_HAN = (f"{letters[:-1]}&&[^\\p{{Han}}]]" for letters in (_UPPER, _LOWER))
_KIMI_K2 = (
    rf"[\p{{Han}}]+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER_NO_HAN}*{_LOWER_NO_HAN}+{_CONTRACTION}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER_NO_HAN}+{_LOWER_NO_HAN}*{_CONTRACTION}?"
    rf"|{_DIGITS_BY_THREE}|{_PUNCTUATION}|{_SPACES}"
)
_TEKKEN = f"{_CASED[0]}|{_CASED[1]}|{_DIGIT}|{_PUNCTUATION_SLASH}|{_SPACES}"
_BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_DEEPSEEK3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
)
_CJK_AND_KANA = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_DEEPSEEK_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
# The cased letters as deepseek-llm's tokenizer.json lists them (an older Unicode than today's \\p{L}).
_DEEPSEEK_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376"
    "\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-"
    "\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a"
    "\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4"
    "\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc"
    "\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f"
    "\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b"
    "\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a"
    "\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2"
    "\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_DEEPSEEK_PUNCTUATION = "!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002"


@dataclass(frozen=True)
class PreTokenizer:
    """Splitting rules of one name. `ignore_merges`: a whole word that is a token is taken before any merging;
    `add_bos`: what holds when the file does not say; `nfc`: text is brought into Unicode normal form C first."""

    rules: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False
    nfc: bool = False
    names: tuple[str, ...] = field(default=())

    def build(self) -> Any:
        """The `tokenizers` pre-tokeniser: the rules in order, then bytes as GPT-2's printable characters."""
        from tokenizers import Regex, pre_tokenizers

        steps = [pre_tokenizers.Split(Regex(rule), "isolated") for rule in self.rules]
        return pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


PRE_TOKENIZERS = (
    PreTokenizer(
        (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
        names=("default",),
    ),
    PreTokenizer(
        (_GPT2,),
        names=(
            "gpt-2",
            "phi-2",
            "mpt",
            "jais",
            "trillion",
            "granite-docling",
            "exaone4",
            "gigachat",
            "a.x-4.0",
            "mellum",
            "modern-bert",
            "jina-es",
            "jina-de",
            "jina-v2-es",
            "jina-v2-de",
            "jina-v1-en",
            "jina-v2-code",
            "roberta-bpe",
        ),
    ),
    PreTokenizer((_GPT2,), nfc=True, names=("olmo",)),
    PreTokenizer(
        (_DIGIT, _GPT2),
        names=("smollm", "starcoder", "refact", "codeshell", "exaone", "minerva-7b", "mellum2"),
    ),
    PreTokenizer((_DIGIT, _GPT2), nfc=True, names=("command-r",)),
    PreTokenizer(
        (_LLAMA3,),
        ignore_merges=True,
        add_bos=True,
        names=(
            "llama-bpe",
            "llama3",
            "llama-v3",
            "falcon3",
            "falcon-h1",
            "pixtral",
            "midm-2.0",
            "lfm2",
            "jina-v5-nano",
        ),
    ),
    PreTokenizer((_LLAMA3,), names=("dbrx", "smaug-bpe", "chatglm-bpe")),
    PreTokenizer((_LLAMA3,), ignore_merges=True, names=("glm4", "glm5")),
    PreTokenizer((_QWEN2,), nfc=True, names=("qwen2",)),
    PreTokenizer(
        (_QWEN2,),
        names=(
            "deepseek-r1-qwen",
            "stablelm2",
            "hunyuan",
            "megrez",
            "kormo",
            "f2llmv2",
            "solar-open",
            "grok-2",
        ),
    ),
    PreTokenizer((_QWEN35,), nfc=True, names=("qwen35",)),
    PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True, names=("tekken",)),
    PreTokenizer((_KIMI_K2,), ignore_merges=True, names=("kimi-k2",)),
    PreTokenizer((_GPT4O,), names=("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2")),
    PreTokenizer(
        (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]"),
        names=("falcon",),
    ),
    PreTokenizer(
        (
            r"[\r\n]",
            rf"\s?[{_DEEPSEEK_LETTERS}]+",
            rf"\s?[{_DEEPSEEK_PUNCTUATION}]+",
            r"\s+$",
            _DEEPSEEK_CJK,
            r"\p{N}+",
        ),
        names=("deepseek-llm",),
    ),
    PreTokenizer(
        (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_CJK, _DIGIT),
        names=("deepseek-coder",),
    ),
    PreTokenizer(
        (_DIGITS_BY_THREE, _CJK_AND_KANA, _DEEPSEEK3),
        names=("deepseek-v3", "hunyuan-dense", "hy_v4", "joyai-llm"),
    ),
    PreTokenizer((_BLOOM,), names=("bloom", "poro-chat", "gpt3-finnish")),
    PreTokenizer((_BLOOM, _DIGIT), names=("viking",)),
    PreTokenizer(
        (rf"{_CONTRACTION}|{_WORD}|{_DIGIT}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",),
        names=("seed-coder",),
    ),
    PreTokenizer(
        (
            r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
            r"|\s*[\r\n]|\s+(?!\S)|\s+",
        ),
        names=("bailingmoe", "bailingmoe2", "llada-moe"),
    ),
    PreTokenizer(
        (_DIGITS_BY_THREE, f"{_CONTRACTION}|{_WORD}|\\p{{N}}+|{_PUNCTUATION}|{_SPACES}"),
        ignore_merges=True,
        names=("minicpm5",),
    ),
)


@cache
def _by_name() -> dict[str, PreTokenizer]:
    return {name: entry for entry in PRE_TOKENIZERS for name in entry.names}


def pre_tokenizer(name: str) -> PreTokenizer:
    """The rules that `tokenizer.ggml.pre` = `name` stands for; raises TokenizerError for an unknown name."""
    entry = _by_name().get(name) if isinstance(name, str) else None
    if entry is None:
        raise TokenizerError(
            f"tokenizer.ggml.pre {name!r} is a pre-tokeniser that plait does not know; "
            "use the model's tokenizer.json instead"
        )
    return entry
