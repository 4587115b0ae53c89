"""A decoder whose weights are packed for the native kernels: it has shapes, names and values, but computes nothing."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from plait.errors import UsageError
from plait.model.config import ModelConfig
from plait.model.decoder import Decoder
from plait.weights.store import WeightStore

_HEAD = "lm_head.weight"


class PackedDecoder(Decoder):
    """Parameters lie on the meta device; `state_dict` and `save_pretrained` read the store, exactly.

    Training, a forward, or loading a state dict raises UsageError that names the way out.
    """

    _settled = False  # whether its dtype is final

    def __init__(self, config: ModelConfig, store: WeightStore) -> None:
        with torch.device("meta"):
            super().__init__(config)
        self.store = store
        super().train(False)

    def tensors(self) -> Mapping[str, Tensor]:
        """The parameters' values by name, each expanded when it is asked for, in its own dtype."""
        return _Tensors(self)

    def state_dict(self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """Every value, expanded into memory."""
        if args:  # torch still takes them by position
            destination, prefix = (*args, prefix)[:2] if len(args) == 1 else args[:2]
        # A module that holds this one gives an empty dictionary, and reads that one afterwards.
        out = OrderedDict() if destination is None else destination
        tensors = self.tensors()
        for name in tensors:
            out[prefix + name] = tensors[name]
        if self.config.tie_embeddings:
            out[prefix + _HEAD] = out[prefix + "model.embed_tokens.weight"]
        return out

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        if self._settled:
            raise self._error("cannot be moved or converted")
        return super()._apply(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise self._error("takes no other weights")

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise self._error("computes nothing in torch")

    def logits(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise self._error("computes nothing in torch")

    def train(self, mode: bool = True) -> PackedDecoder:
        if mode:
            raise self._error("cannot be trained")
        return self

    def _error(self, what: str) -> UsageError:
        path = "..." if self.source is None else repr(str(self.source))
        return UsageError(
            f"the weights of this decoder are packed for the native kernels, so it {what}: load it with"
            f' plait.load({path}, dtype="fp32") or "bf16"'
        )


class _Tensors(Mapping[str, Tensor]):
    def __init__(self, decoder: PackedDecoder) -> None:
        self._store = decoder.store
        self._dtypes = {name: parameter.dtype for name, parameter in decoder.named_parameters()}

    def __getitem__(self, name: str) -> Tensor:
        return torch.from_numpy(self._store.expand(name)).to(self._dtypes[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._dtypes)

    def __len__(self) -> int:
        return len(self._dtypes)


def packed_decoder(config: ModelConfig, store: WeightStore, source: Path | None = None) -> PackedDecoder:
    """The decoder of a configuration whose weights are in `store`. Its dtype holds every one of them exactly."""
    decoder = PackedDecoder(config, store).to(getattr(torch, store.report.exact))
    decoder.tie()
    decoder.source = source
    decoder.load_report = store.report
    decoder._settled = True
    return decoder
