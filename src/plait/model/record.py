"""Records a decoder's serving forward: flat ids in, hidden states and the logits of chosen rows out."""

from __future__ import annotations

from typing import Any

from plait.memory.base import SymbolicMemory
from plait.model.decoder import Decoder, evaluating
from plait.ops import functional as ops
from plait.ops.recording import Recording, Value
from plait.ops.symbolic import Recorder


def record(decoder: Decoder) -> Recording:
    """The list of operations of one step, the same for every step.

    Inputs: ids and positions [N], logit_rows [R], and reach [N] (plait.ops.step) where the rotary table depends on it.
    Outputs: hidden [N, D] (after the final norm), logits fp32 [R, V].
    Raises RecordingError naming the line of anything outside the set.
    """
    names = {id(p): name for name, p in decoder.named_parameters()}
    recorder = Recorder(names)
    ids = recorder.input("ids", Value(("N",), "i64"))
    positions = recorder.input("positions", Value(("N",), "i64"))
    long = any(table.long_inv_freq for table in decoder.rotary_tables)
    reach = recorder.input("reach", Value(("N",), "i64")) if long else None
    rows = recorder.input("logit_rows", Value(("R",), "i64"))
    with evaluating(decoder):
        hidden: Any = decoder(ids, memory=SymbolicMemory(positions, reach))
        logits: Any = decoder.logits(ops.select_rows(hidden, rows))
    config = decoder.config
    model = {"model_type": config.model_type, "vocab_size": config.vocab_size, "hidden_size": config.hidden_size}
    return recorder.recording({"hidden": hidden, "logits": logits}, config.caches(), model)
