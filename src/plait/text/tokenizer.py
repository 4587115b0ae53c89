"""Text to token ids and back, for a model's own tokenizer."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from plait import cachefile
from plait.errors import CapacityError, RequestError, TokenizerError, UsageError
from plait.text.chat_template import ChatTemplate, validate_messages
from plait.text.control_text import ControlText, MarkedEncoder, strings_in, unused_marker
from plait.text.detokenizer import IncrementalDetokenizer, TokenBytes
from plait.text.sentencepiece_model import MAX_TOKEN_CHARS
from plait.text.token_bound import TokenBound

# So many merges are worked out before a file could be opened.
_FEW_MERGES = 10_000
# What a template has from elsewhere: the messages, the argument beside them, and Jinja's own name.
_RESERVED_NAMES = ("self", "messages", "add_generation_prompt")


class Tokenizer:
    """A `tokenizers.Tokenizer` together with what the files around it say.

    Special-token text in a raw prompt (`encode`) is parsed, as in transformers, vLLM and llama.cpp: whoever writes a
    raw prompt writes the model's format. `encode_plain` and the contents of `encode_chat` are never parsed.

    Args:
        backend: the `tokenizers.Tokenizer`; truncation and padding are switched off.
        special_tokens: names (`bos_token`, `eos_token`, `pad_token`, `unk_token`, ...) and texts, for chat templates.
        eos_token_ids: every id that ends a sequence.
        prefix_ids: what stands before a completion prompt: the BOS id, for a few models more, or nothing.
        chat_templates: templates by name; "default" is used, "tool_use" where tools are given.
        config: the `tokenizer_config.json` to write on `save`.
    """

    def __init__(
        self,
        backend: Any,
        *,
        special_tokens: Mapping[str, str],
        eos_token_ids: Iterable[int] = (),
        prefix_ids: Sequence[int] = (),
        chat_templates: Mapping[str, str] | None = None,
        config: Mapping[str, Any] | None = None,
        vocab_size: int | None = None,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._special_tokens = dict(special_tokens)
        self._prefix = list(prefix_ids)
        self._templates = dict(chat_templates or {})
        self._config = dict(config or {})
        self._compiled: dict[str, ChatTemplate] = {}
        self._guards: dict[str, ControlText] = {}
        self._marked: dict[str, MarkedEncoder] = {}
        self._added = backend.get_added_tokens_decoder()
        longest = max((len(token.content) for token in self._added.values()), default=0)
        if longest > MAX_TOKEN_CHARS:
            raise TokenizerError(f"an added token has {longest} characters (at most {MAX_TOKEN_CHARS})")
        self._warned_about_bos = False
        self._bound: TokenBound | None = None
        self.bytes_of = TokenBytes(backend)
        self.vocab_size = vocab_size or 1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
        self.bos_token_id = self._id_of("bos_token")
        self.pad_token_id = self._id_of("pad_token")
        self.eos_token_ids = frozenset(eos_token_ids)
        self.special_ids = frozenset(id for id, token in self._added.items() if token.special)
        self.add_bos_token = self.bos_token_id is not None and self.bos_token_id in self._prefix

    @property
    def chat_template(self) -> str | None:
        return self._templates.get("default")

    @property
    def chat_templates(self) -> Mapping[str, str]:
        """Templates by name."""
        return self._templates

    @property
    def prefix_ids(self) -> Sequence[int]:
        """What stands before a completion prompt."""
        return self._prefix

    def special_id(self, name: str) -> int | None:
        """The id of `bos_token`, `eos_token`, `pad_token`, `unk_token`, ...; None where the model has none."""
        return self._id_of(name)

    def specification(self) -> dict[str, Any]:
        """The tokenizer.json of the backend."""
        found: dict[str, Any] = json.loads(self._backend.to_str())
        return found

    def words(self, text: str) -> list[str]:
        """The pieces that the pre-tokeniser cuts a text into, each merged on its own."""
        return [word for word, _ in self._backend.pre_tokenizer.pre_tokenize_str(text)]

    def encode(self, text: str, add_bos: bool = True, max_tokens: int | None = None) -> list[int]:
        """Ids of a raw prompt, special-token text parsed, with exactly one BOS if the model wants one.

        A text that starts with the BOS text gets no second one; a text that brings two gets a warning.
        Raises RequestError for text that is not Unicode (a lone surrogate), and CapacityError for text that is so long
        that it must have more than `max_tokens` tokens: soon, where tokenising it would take very long.
        """
        _check_unicode(text, "prompt")
        self._check_length(text, max_tokens)
        ids = self._backend.encode(text, add_special_tokens=False).ids
        if add_bos and ids[: len(self._prefix)] != self._prefix:
            ids = self._prefix + ids
        self._warn_of_two_bos(ids)
        return ids

    def encode_plain(self, text: str) -> list[int]:
        """Ids of `text` without BOS in which the text of a special token is ordinary text."""
        _check_unicode(text, "prompt")
        marker, guard = unused_marker([text]), self._guard("")
        marked = guard.break_up(text, marker)
        return self._encode_marked(marked, marker, force=self._normalizes_into_control([text], guard, marker))

    def encode_plain_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode_plain` of each text, on all processors; texts without control text, nearly all, in one call."""
        guard = self._guard("")
        if self._backend.normalizer is not None and any(token.normalized for token in self._added.values()):
            return [self.encode_plain(text) for text in texts]
        plain = [number for number, text in enumerate(texts) if not guard.occurs_in(text)]
        for text in texts:
            _check_unicode(text, "prompt")
        encoded = self._backend.encode_batch_fast([texts[number] for number in plain], add_special_tokens=False)
        found = {number: encoding.ids for number, encoding in zip(plain, encoded, strict=True)}
        return [found[number] if number in found else self.encode_plain(text) for number, text in enumerate(texts)]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`. Spaces are never cleaned up; invalid bytes become U+FFFD."""
        detokenizer = IncrementalDetokenizer(self, (), skip_special_tokens)
        return detokenizer.push(ids) + detokenizer.flush()

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for; perhaps a part of a character."""
        return self.bytes_of[token_id]

    def token_text(self, token_id: int) -> str:
        """`token_bytes` as text, with U+FFFD for what is not a whole character."""
        return self.bytes_of[token_id].decode("utf-8", "replace")

    def special_token_id(self, text: str) -> int | None:
        """The id of the special token with this very text, or None: for stop strings that name a special token."""
        token_id = self._backend.token_to_id(text)
        return token_id if token_id in self.special_ids else None

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], /, add_generation_prompt: bool = True, **template_kwargs: Any
    ) -> str:
        """The prompt that the chat template makes of `messages`.

        Raises:
            RequestError: the messages are unusable (field "messages"), or a name is not for the caller to set (field
                "chat_template_kwargs").
            TokenizerError: the model has no chat template, or it failed.
        """
        _check_names(template_kwargs)
        messages = validate_messages(messages)
        for text in strings_in([messages, template_kwargs]):
            _check_unicode(text, "messages")
        template = self._template(template_kwargs)
        return template.render(messages, add_generation_prompt, **template_kwargs)

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], /, add_generation_prompt: bool = True, **template_kwargs: Any
    ) -> list[int]:
        """Ids of the rendered chat: see `encode_conversation`."""
        return self.encode_conversation(messages, template_kwargs, add_generation_prompt)

    def encode_conversation(
        self,
        messages: Sequence[Mapping[str, Any]],
        template_kwargs: Mapping[str, Any],
        add_generation_prompt: bool = True,
        max_tokens: int | None = None,
    ) -> list[int]:
        """Ids of the rendered chat: exactly what the template renders, no BOS added.

        Control tokens come from the template alone. Text in messages and `template_kwargs` that reads like a special
        token is encoded as text. So is, outside the assistant's messages, text that reads like any other added token
        that the template itself writes (some models mark turns with added tokens that are not special).

        Raises what `render_chat` raises, and CapacityError as `encode` does.
        """
        _check_names(template_kwargs)
        messages = validate_messages(messages)
        texts = list(strings_in([messages, template_kwargs]))
        for text in texts:
            _check_unicode(text, "messages")
        template, source = self._template(template_kwargs), self._template_source(template_kwargs)
        marker = unused_marker([*texts, source])
        scaffold, special = self._guard(source), self._guard("")
        marked = [
            (special if message["role"] == "assistant" else scaffold).break_up_all(message, marker)
            for message in messages
        ]
        variables = {name: scaffold.break_up_all(value, marker) for name, value in template_kwargs.items()}
        rendered = template.render(marked, add_generation_prompt, **variables)
        self._check_length(rendered.replace(marker, ""), max_tokens)
        ids = self._encode_marked(rendered, marker, force=self._normalizes_into_control(texts, scaffold, marker))
        self._warn_of_two_bos(ids)
        return ids

    def save(self, directory: str | Path) -> None:
        """Writes `tokenizer.json` and `tokenizer_config.json`, which transformers' AutoTokenizer loads."""
        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        config = dict(self._config)
        config.pop("chat_template", None)
        if set(self._templates) == {"default"}:
            config["chat_template"] = self._templates["default"]
        elif self._templates:
            config["chat_template"] = [{"name": name, "template": text} for name, text in self._templates.items()]
        self._backend.save(str(folder / "tokenizer.json"))
        text = json.dumps(config, ensure_ascii=False, indent=2)
        (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")

    def _check_length(self, text: str, max_tokens: int | None) -> None:
        if max_tokens is None or len(text) <= max_tokens:  # the first look at the vocabulary takes a while
            return
        self._bound = self._bound or TokenBound(self._backend, self.bytes_of)
        count = self._bound.at_least(text)
        if count > max_tokens:
            raise CapacityError(
                f"the context holds {max_tokens} tokens, but the prompt has at least {count} tokens: shorten it",
                field="prompt",
            )

    def _encode_marked(self, text: str, marker: str, force: bool) -> list[int]:
        if marker not in text and not force:
            return self._backend.encode(text, add_special_tokens=False).ids
        if marker not in self._marked:
            self._marked = {marker: MarkedEncoder(self._backend, marker)}  # one is kept: it is the first nearly always
        return self._marked[marker].encode(text)

    def _normalizes_into_control(self, texts: Iterable[str], guard: ControlText, marker: str) -> bool:
        """Whether the normaliser turns one of `texts` into control text that the backend then looks for.

        Only tokens with the flag `normalized` are looked for there; the marked encoder looks in raw text alone.
        """
        if self._backend.normalizer is None or not any(token.normalized for token in self._added.values()):
            return False
        normalized = map(self._backend.normalizer.normalize_str, texts)
        return any(guard.break_up(text, marker) != text for text in normalized)

    def _guard(self, template_source: str) -> ControlText:
        """What must not be found in contents: special tokens, and the added tokens that the template writes."""
        if template_source not in self._guards:
            tokens = [t.content for t in self._added.values() if t.special or t.content in template_source]
            self._guards[template_source] = ControlText(tokens)
        return self._guards[template_source]

    def _template_source(self, template_kwargs: Mapping[str, Any]) -> str:
        if template_kwargs.get("tools") and "tool_use" in self._templates:
            return self._templates["tool_use"]
        if "default" not in self._templates:
            raise TokenizerError("the model has no chat template; use a completion prompt, or give a template")
        return self._templates["default"]

    def _template(self, template_kwargs: Mapping[str, Any]) -> ChatTemplate:
        source = self._template_source(template_kwargs)
        if source not in self._compiled:
            self._compiled[source] = ChatTemplate(source, self._special_tokens)
        return self._compiled[source]

    def _id_of(self, name: str) -> int | None:
        text = self._special_tokens.get(name)
        return None if text is None else self._backend.token_to_id(text)

    def _warn_of_two_bos(self, ids: Sequence[int]) -> None:
        if not self._warned_about_bos and self.bos_token_id is not None and ids[:2] == [self.bos_token_id] * 2:
            self._warned_about_bos = True
            warnings.warn("a prompt starts with two BOS tokens; leave the BOS text out of it", stacklevel=3)


def _check_names(template_kwargs: Mapping[str, Any]) -> None:
    for name in template_kwargs:
        if name in _RESERVED_NAMES:
            raise RequestError(f"chat_template_kwargs must not set {name!r}", field="chat_template_kwargs")


def _check_unicode(text: Any, field: str) -> None:
    if not isinstance(text, str):
        raise RequestError(f"{field} must be text, not {type(text).__name__}", field=field)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{field} holds a lone surrogate (U+{ord(text[error.start]):04X} at character {error.start}), "
            "which is not Unicode text",
            field=field,
        ) from None


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer that a GGUF file's metadata describes (keys `tokenizer.*`). Raises TokenizerError."""
    from plait.text.gguf_tokenizer import build_tokenizer

    return build_tokenizer(metadata)


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer of a model directory with `tokenizer.json`, or of a `.gguf` file.

    A `.safetensors` file stands for the directory that it lies in.

    Raises:
        UsageError: `path` does not exist.
        TokenizerError: the tokenizer is damaged, unknown or missing; the message names what.
    """
    path = Path(path)
    if path.suffix == ".safetensors" and path.is_file():
        path = path.parent
    if path.is_dir():
        from plait.text.hf_tokenizer import load_directory

        return load_directory(path)
    if not path.exists():
        raise UsageError(f"{path} does not exist; give a model directory or a .gguf file")
    if path.suffix.lower() != ".gguf":
        raise TokenizerError(f"{path} is neither a model directory nor a .gguf file")
    from plait.text.gguf_tokenizer import build_tokenizer
    from plait.weights.gguf_reader import GGUFFile

    file = GGUFFile(path)
    return build_tokenizer(file.metadata, CachedMerges(path))


class CachedMerges:
    """A `MergeStore` in the cache of this user (plait.cachefile)."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def load(self) -> Any:
        key = self._key()
        entry = None if key is None else cachefile.read(self._name(), key)
        return None if entry is None else entry.arrays["merges"].view("<i4").reshape(-1, 2)

    def save(self, merges: Any) -> None:
        key = self._key()
        if key is None or len(merges) < _FEW_MERGES:
            return
        data = merges.astype("<i4").reshape(-1).view("u1")
        try:
            with cachefile.Writer(self._name(), data.nbytes) as writer:
                writer.add("merges", data)
                writer.commit(key, {})
        except OSError as error:
            cachefile.say_unwritten(error)

    def _name(self) -> str:
        return cachefile.entry_name("merges", self._path)

    def _key(self) -> dict[str, Any] | None:
        if cachefile.directory() is None:
            return None
        return {"kind": "merges", "version": 1, "files": cachefile.identity([self._path])}
