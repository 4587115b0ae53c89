"""A request as the caller states it, and what the engine keeps about it and its choices while it runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from plait.engine.embed import Pooled
from plait.engine.params import SamplingParams
from plait.engine.sampling_state import SamplingState
from plait.engine.token_output import RequestTiming, TokenLogprobs
from plait.engine.tokens import TokenBuffer
from plait.errors import EngineError
from plait.memory.blocks import SequenceBlocks


@dataclass
class Request:
    """One generation request; plain data that crosses the process border.

    eos_token_ids: end tokens beside the engine's own. priority: lower goes first (policy "priority").
    arrival_s: on the engine's monotonic clock; None is the moment of add_request.
    cache_salt: requests share cached prefixes only with those of the same salt. pooling: "last" or "mean": nothing is
    generated, the answer is the prompt's hidden states, pooled. adapter: the name of one that the engine has.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    eos_token_ids: frozenset[int] = frozenset()
    priority: int = 0
    arrival_s: float | None = None
    cache_salt: str | None = None
    pooling: str | None = None
    adapter: str | None = None


@dataclass(eq=False)
class RequestState:
    """A request inside the engine.

    max_total_tokens: prompt and output together end here. order: by arrival. choices: unfinished ones that exist;
    the others are forked from choice 0 when the prompt has been computed (`forked` then).
    long_rope: max_total_tokens exceeds the context that the short of two rotary tables is for.
    prompt_logprobs: what has been collected, in order of position; None when not asked for or handed out.
    pooled: what has been collected of hidden states, where the request asks for them. adapter: its number in steps, 0
    for none, and the hash of its content.
    """

    request: Request
    seed: int
    end_ids: frozenset[int]
    max_total_tokens: int
    order: int
    timing: RequestTiming
    long_rope: bool = False
    adapter: int = 0
    adapter_hash: str = ""
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    pooled: Pooled | None = None
    num_cached_tokens: int | None = None
    forked: bool = False
    choices: dict[int, SequenceState] = field(default_factory=dict)
    ends: frozenset[int] = field(init=False)  # tokens that may end a choice

    def __post_init__(self) -> None:
        params = self.request.params
        self.ends = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.end_ids)

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def salt(self) -> tuple:
        """What its keys and values depend on beside the tokens (`BlockManager.new_sequence`)."""
        salt: tuple = () if self.request.cache_salt is None else (("salt", self.request.cache_salt),)
        if self.adapter:
            salt = (*salt, ("adapter", self.adapter_hash))
        return (*salt, ("rope", "long")) if self.long_rope else salt

    @property
    def missing_prompt_rows(self) -> range:
        """Positions whose logits are still needed for prompt_logprobs: position i predicts token i + 1."""
        if self.prompt_logprobs is None:
            return range(0)
        return range(len(self.prompt_logprobs) - 1, self.num_prompt - 1)


@dataclass(eq=False)
class SequenceState:
    """One choice: its tokens, its blocks while it is running (None while it waits), and its place in the order.

    key: (priority, order of arrival, choice index); the largest key is preempted first.
    """

    owner: RequestState
    index: int
    tokens: TokenBuffer
    sampling: SamplingState
    key: tuple[int, int, int]
    blocks: SequenceBlocks | None = None

    @property
    def held(self) -> SequenceBlocks:
        """The blocks of a running sequence."""
        if self.blocks is None:
            raise EngineError("a sequence that waits was used as if it were running")
        return self.blocks

    @property
    def num_computed(self) -> int:
        """Tokens whose keys and values are in the cache."""
        return 0 if self.blocks is None else self.blocks.num_computed

    @property
    def remaining(self) -> int:
        """Tokens that are known but not computed: 1 for a sequence that decodes."""
        return len(self.tokens) - self.num_computed

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.owner.num_prompt
