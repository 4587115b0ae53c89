"""A conversation with a model: its turns, kept through interrupts, saved and loaded as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plait.engine.params import SamplingParams
from plait.engine.streaming import Generation
from plait.errors import RequestError, TokenizerError, UsageError

if TYPE_CHECKING:
    from plait.engine.llm import LLM

FORMAT = "plait-conversation"
_ROLES = ("system", "user", "assistant")


@dataclass
class Turn:
    """One message. interrupted: the answer was cut off by the user; what came until then is its content."""

    role: str
    content: str
    interrupted: bool = False


@dataclass
class Conversation:
    """Turns so far, the system message apart. adapter: a loaded one, for what comes.

    Raises TokenizerError for a model that has no chat template.
    """

    llm: LLM
    params: SamplingParams
    system: str | None = None
    turns: list[Turn] = field(default_factory=list)
    last: Generation | None = None
    adapter: str | None = None

    def __post_init__(self) -> None:
        self._tokenizer: Any = self.llm.tokenizer
        if self._tokenizer is None or self._tokenizer.chat_template is None:
            raise TokenizerError(
                f"{self.llm.bundle.name} has no chat template, so it cannot chat; complete prompts with plait generate"
            )

    def messages(self) -> list[dict[str, str]]:
        """What the chat template is given."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return system + [{"role": turn.role, "content": turn.content} for turn in self.turns]

    def ask(self, text: str) -> Iterator[str]:
        """Answer a message; yields pieces of text.

        Both turns are kept when the answer is complete, and, marked as interrupted, when the iterator is closed early.
        An answer that cannot begin (the context is full) leaves the conversation as it was.
        """
        question = Turn("user", text)
        messages = [*self.messages(), {"role": question.role, "content": question.content}]
        generation = Generation(self.llm, self._tokenizer.encode_chat(messages), self.params, self.adapter)
        try:
            yield from generation
        finally:
            self.last = generation
            if generation.token_ids:
                interrupted = generation.finish_reason is None
                self.turns += [question, Turn("assistant", generation.text, interrupted)]

    def reset(self) -> None:
        """Forget the turns; the system message stays."""
        self.turns.clear()

    def save(self, path: str | Path) -> None:
        """Write the conversation as JSON. Raises UsageError where the file cannot be written."""
        turns = [asdict(turn) for turn in self.turns]
        document = {"format": FORMAT, "model": self.llm.bundle.name, "system": self.system, "turns": turns}
        try:
            Path(path).expanduser().write_text(
                json.dumps(document, ensure_ascii=False, indent=2) + "\n", encoding="utf-8"
            )
        except OSError as error:
            raise UsageError(f"{path}: {error.strerror or error}") from None

    def load(self, path: str | Path) -> None:
        """Replace this conversation by a saved one. Raises UsageError for a file that is none, changing nothing."""
        try:
            data = json.loads(Path(path).expanduser().read_text(encoding="utf-8"))
        except OSError as error:
            raise UsageError(f"{path}: {error.strerror or error}") from None
        except (ValueError, RecursionError):
            data = None
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise UsageError(f"{path} is no saved conversation (/save writes them)")
        try:
            turns = [Turn(t["role"], t["content"], bool(t.get("interrupted"))) for t in data["turns"]]
        except (KeyError, TypeError, AttributeError):
            raise UsageError(f"{path}: its turns are damaged") from None
        if any(t.role not in _ROLES or not isinstance(t.content, str) for t in turns):
            raise UsageError(f"{path}: its turns are damaged")
        system = data.get("system")
        if system is not None and not isinstance(system, str):
            raise RequestError(f"{path}: its system message is no text", field="system")
        self.turns, self.system = turns, system
