"""`LLM`: the engine in the calling process, with the call names of vLLM's class."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plait.engine.adapters import adapter_of_each
from plait.engine.embed import EmbeddingOutput, EmbeddingRequestOutput, check_ids, check_pooling, normalized
from plait.engine.inputs import Prompt, as_list, check_conversations, check_priority, parse_prompt
from plait.engine.outputs import ChoiceDelta, OutputProcessor, RequestOutput
from plait.engine.params import SamplingParams
from plait.engine.request import Request
from plait.engine.shared_steps import SharedSteps
from plait.engine.words import WordResolver
from plait.errors import EngineError, RequestError

if TYPE_CHECKING:
    from plait.engine.build import EngineBundle
    from plait.model.decoder import Decoder


class LLM:
    """A model with an engine around it: many prompts at once, results in the order of the prompts.

    model: None (the embedded default), a path, "hf:OWNER/NAME", or a live Decoder (then without text unless a
    tokenizer is given: prompts are token ids). dtype: "auto", "fp32", "bf16", "fp16". kv_memory: bytes of the
    key/value pool, None for the default share of free memory. generation_config: "auto" takes the checkpoint's default
    temperature, top_p, top_k, repetition penalty for calls without params, "none" does not. adapters: names and
    directories of LoRA adapters (`peft`), of which each prompt may have one: adapter=NAME.
    Further keywords go to the engine (max_batched_tokens, policy, seed, run_ahead_s, ...).
    Calls may overlap, as interleaved streams of one thread or from several threads: they share the steps.
    Raises PlaitError for a model or an argument that cannot be used.
    """

    def __init__(
        self,
        model: str | Path | Decoder | None = None,
        *,
        dtype: Any = "auto",
        device: str = "cpu",
        kv_memory: int | str | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int = 32,
        generation_config: str = "auto",
        adapters: Mapping[str, str | Path] | None = None,
        **options: Any,
    ) -> None:
        from plait.engine.build import build_engine

        self._attach(
            build_engine(
                model,
                dtype=dtype,
                device=device,
                kv_memory=kv_memory,
                max_model_len=max_model_len,
                max_num_seqs=max_num_seqs,
                generation_config=generation_config,
                adapters=adapters,
                **options,
            )
        )

    @classmethod
    def from_bundle(cls, bundle: EngineBundle) -> LLM:
        """Around an engine that build_engine() made."""
        llm = cls.__new__(cls)
        llm._attach(bundle)
        return llm

    def _attach(self, bundle: EngineBundle) -> None:
        self.bundle = bundle
        self.engine = bundle.engine
        self.tokenizer = bundle.tokenizer
        self._steps = SharedSteps(self.engine, OutputProcessor(self.tokenizer))
        self._words = None if self.tokenizer is None else WordResolver(self.tokenizer)
        self._ids = count()

    def get_tokenizer(self) -> Any:
        """The tokenizer, None where the model came without one."""
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What a call without params uses: the checkpoint's generation defaults over SamplingParams' own."""
        return SamplingParams(**dict(self.bundle.default_params or {}))

    def refresh(self) -> None:
        """The decoder's weights have changed: forget every key and value computed with older ones."""
        self._steps.refresh()

    # Generation

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
        priority: Sequence[int] | None = None,
        adapter: str | Sequence[str | None] | None = None,
    ) -> list[RequestOutput]:
        """Complete every prompt: a string, {"prompt": text}, {"prompt_token_ids": ids} (either may have "cache_salt"),
        or a list of these. params: one for all, or one per prompt. progress: a bar on the terminal. adapter: a name
        for all prompts, or a list with a name or None for each."""
        items = as_list(prompts)
        chosen = self._params_for(items, params)
        check_priority(priority, len(items))
        adapters = adapter_of_each(adapter, len(items))
        parsed = [self._parse_prompt(item) for item in items]
        requests = [
            Request(
                self._next_id(),
                ids,
                p,
                priority=priority[i] if priority else 0,
                cache_salt=salt,
                adapter=adapters[i],
            )
            for i, ((_, ids, salt), p) in enumerate(zip(parsed, chosen, strict=True))
        ]
        return self._run(requests, [text for text, _, _ in parsed], progress)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        progress: bool = False,
        adapter: str | Sequence[str | None] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or a list of conversations, of {"role", "content"} messages."""
        tokenizer = self._need_tokenizer("chat")
        conversations = check_conversations(messages)
        options = dict(chat_template_kwargs or {})
        ids = [tokenizer.encode_conversation(c, options, add_generation_prompt) for c in conversations]
        return self.generate([{"prompt_token_ids": i} for i in ids], params, progress=progress, adapter=adapter)

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, adapter: str | None = None
    ) -> Iterator[ChoiceDelta]:
        """Complete one prompt and yield what each step adds. Closing the iterator aborts the request."""
        ((_, ids, salt),) = [self._parse_prompt(prompt)]
        (chosen,) = self._params_for([prompt], params)
        request = Request(self._next_id(), ids, chosen, cache_salt=salt, adapter=adapter)
        with self._steps.running([request], [None]) as mail:
            finished = False
            while not finished:
                deltas, results = self._steps.advance(mail)
                yield from deltas
                finished = bool(results)

    def score(
        self, texts: Prompt | Sequence[Prompt], adapter: str | Sequence[str | None] | None = None
    ) -> list[list[float | None]]:
        """Log-probability of every token of each text (or id list) given those before it; None for the first one.
        Raises EngineError where the model gives no finite number."""
        params = SamplingParams(max_tokens=0, prompt_logprobs=0, temperature=0.0)
        results = self.generate(texts, params, adapter=adapter)
        for position, result in enumerate(results):
            if result.outputs[0].error is not None:
                raise EngineError(f"text {position} cannot be scored: {result.outputs[0].error}")
        return [
            [
                None if entry is None else entry[token].logprob
                for token, entry in zip(r.prompt_token_ids, r.prompt_logprobs or (), strict=True)
            ]
            for r in results
        ]

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling: str = "last",
        normalize: bool = True,
        adapter: str | Sequence[str | None] | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """A vector per prompt: its last token's hidden state after the final norm, or the mean over its tokens.

        pooling: "last" or "mean". normalize: to Euclidean length 1. The engine computes them beside whatever else runs.
        Raises EngineError where its executor gives no hidden states or they are not finite.
        """
        check_pooling(pooling)
        parsed = [self._parse_prompt(item) for item in as_list(prompts)]
        for _, ids, _ in parsed:
            check_ids(ids, self.engine.limits.embedding_rows, self.bundle.max_model_len)
        params = SamplingParams(detokenize=False)
        requests = [
            Request(self._next_id(), ids, params, cache_salt=salt, pooling=pooling, adapter=name)
            for (_, ids, salt), name in zip(parsed, adapter_of_each(adapter, len(parsed)), strict=True)
        ]
        results: list[EmbeddingRequestOutput] = []
        for result in self._run(requests, [text for text, _, _ in parsed], progress=False):
            if result.embedding is None:
                raise EngineError(f"prompt {len(results)} has no embedding: {result.outputs[0].error}")
            vector = normalized(result.embedding) if normalize else result.embedding
            output = EmbeddingOutput(vector)
            results.append(EmbeddingRequestOutput(result.request_id, result.prompt, result.prompt_token_ids, output))
        return results

    # Private

    def _run(self, requests: list[Request], texts: list[str | None], progress: bool) -> list[RequestOutput]:
        results: dict[str, RequestOutput] = {}
        with self._steps.running(requests, texts) as mail, _bar(len(requests), progress) as advance:
            while len(results) < len(requests):
                for result in self._steps.advance(mail)[1]:
                    results[result.request_id] = result
                    advance()
        return [results[r.request_id] for r in requests]

    def _params_for(
        self, items: Sequence[Any], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[SamplingParams]:
        if params is None:
            params = self.get_default_sampling_params()
        if not isinstance(params, (SamplingParams, Sequence)):
            raise RequestError("params must be SamplingParams", field="params")
        each = [params] * len(items) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(items):
            raise RequestError(f"{len(each)} params for {len(items)} prompts: give one or as many", field="params")
        if not all(isinstance(p, SamplingParams) for p in each):
            raise RequestError("params must be SamplingParams", field="params")
        return each if self._words is None else [self._words.resolve(p) for p in each]

    def _parse_prompt(self, item: Any) -> tuple[str | None, Sequence[int], str | None]:
        """(text, ids, cache salt) of one prompt."""
        text, ids, salt = parse_prompt(item)
        if ids is None:
            ids = self._need_tokenizer("a text prompt").encode(text)
        return text, ids, salt

    def _need_tokenizer(self, what: str) -> Any:
        if self.tokenizer is None:
            raise RequestError(
                f"{what} needs a tokenizer, which this model came without: give prompt_token_ids", field="prompt"
            )
        return self.tokenizer

    def _next_id(self) -> str:
        return str(next(self._ids))


@contextmanager
def _bar(total: int, shown: bool) -> Iterator[Any]:
    if not shown:
        yield lambda: None
        return
    from rich.progress import Progress

    with Progress(transient=True) as progress:
        task = progress.add_task("requests", total=total)
        yield lambda: progress.advance(task)
