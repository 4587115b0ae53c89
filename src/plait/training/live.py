"""Texts from the weights of a run while it trains, through the paged engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from plait.engine.llm import LLM
from plait.engine.params import SamplingParams
from plait.errors import PlaitError
from plait.model.decoder import Decoder

_KV_BYTES = 256 << 20


class LiveSampler:
    """An engine around the module that trains. Its random numbers are its own, so that sampling changes no run."""

    def __init__(self, decoder: Decoder, tokenizer: Any, max_tokens: int, temperature: float) -> None:
        self._decoder, self._tokenizer = decoder, tokenizer
        self._max_tokens, self._temperature = max_tokens, temperature
        self._llm: LLM | None = None

    def sample(self, prompts: Sequence[str], seed: int) -> list[dict[str, str]]:
        """[{"prompt", "text"}]; an empty prompt begins with the end-of-text token. Raises PlaitError."""
        if self._llm is None:
            self._llm = LLM(
                self._decoder,
                tokenizer=self._tokenizer,
                device=str(self._decoder.device),
                kv_memory=_KV_BYTES,
                max_num_seqs=max(1, len(prompts)),
                threads=torch.get_num_threads(),  # else it takes all, and the steps after it other last bits
            )
        self._llm.refresh()
        params = SamplingParams(max_tokens=self._max_tokens, temperature=self._temperature, seed=seed % 2**31)
        starts = [self._tokenizer.encode(text) if text else self._beginning() for text in prompts]
        results = self._llm.generate([{"prompt_token_ids": ids} for ids in starts], params)
        return [{"prompt": p, "text": r.outputs[0].text} for p, r in zip(prompts, results, strict=True)]

    def _beginning(self) -> list[int]:
        config = self._decoder.config
        ids = [i for i in (config.bos_token_id, *config.eos_token_ids) if i is not None]
        if not ids:
            raise PlaitError("an empty prompt needs a bos or eos token, which the model lacks; give sample.prompts")
        return ids[:1]
