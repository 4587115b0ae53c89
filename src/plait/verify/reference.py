"""The other side of a verification: the checkpoint as transformers reads and computes it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import redirect_stderr
from dataclasses import asdict, dataclass, field
from io import StringIO
from math import isclose
from typing import Any

import torch
from torch import Tensor

from plait.errors import ConfigError, UsageError, WeightError
from plait.model.config import MixtureSpec, ModelConfig
from plait.model.decoder import Decoder
from plait.model.families import family, parse_config
from plait.model.rope import rotary_table
from plait.weights.checkpoint import Checkpoint
from plait.weights.load import load

MISSING = "plait verify compares with transformers, which is not here: pip install 'plait[bench]'"


@dataclass
class Reference:
    """A model of the transformers library. description: what it is, notes: what a reader must know of it."""

    model: Any
    description: str
    notes: list[str] = field(default_factory=list)

    @property
    def vocab_size(self) -> int:
        return int(self.model.get_output_embeddings().weight.shape[0])

    def logits(self, ids: list[int]) -> Tensor:
        """fp32 logits [T, V] of one sequence."""
        with torch.inference_mode():
            return self.model(input_ids=self._tensor(ids)).logits[0].float()

    def greedy(self, ids: list[int], new_tokens: int) -> list[int]:
        """The most likely token, `new_tokens` times over, whether or not the text ends."""
        prompt = self._tensor(ids)
        with torch.inference_mode():
            out = self.model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                do_sample=False,
                max_new_tokens=new_tokens,
                pad_token_id=0,
            )
        return out[0, len(ids) :].tolist()

    def _tensor(self, ids: list[int]) -> Tensor:
        return torch.tensor([ids], device=self.model.device)


def load_reference(checkpoint: Checkpoint, decoder: Decoder | None, dtype: torch.dtype, device: str) -> Reference:
    """The checkpoint through transformers: a directory by its own loader, GGUF by its GGUF loader.

    decoder: what plait made of this checkpoint, None if it has not read it yet; its weights are used, and that is said,
    where transformers cannot read the GGUF architecture. Raises UsageError where transformers is missing, WeightError
    where it cannot load the model.
    """
    model_type = checkpoint.config.model_type
    if family(model_type).is_own:
        raise UsageError(f"{model_type} is plait's own family: transformers has no class of it to compare with")
    try:
        import transformers
    except ImportError as error:
        raise UsageError(MISSING) from error
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    path = checkpoint.path
    try:
        with redirect_stderr(StringIO()):  # the GGUF loader's progress bar does not ask whether there is a terminal
            found = _load(checkpoint, decoder, dtype)
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise WeightError(f"transformers cannot load {path}: {first}") from error
    found.model.to(device).eval()
    same_frequencies(found.model, checkpoint.config)
    found.notes += _renormalise(checkpoint, found.model)
    if any(isinstance(layer.feed_forward, MixtureSpec) for layer in checkpoint.config.layers):
        # Its grouped products take only sizes that are multiples of 16 bytes; this way takes any.
        found.model.set_experts_implementation("eager")
    # Sampling settings and end tokens of the checkpoint have no place in a comparison.
    found.model.generation_config = transformers.GenerationConfig()
    return found


def same_frequencies(model: Any, config: ModelConfig) -> None:
    """Give a model of transformers plait's rotary frequencies where its own are equal but for their last digits (1e-6).

    Its own are powers in float32, whose last digit depends on the processor: at position 100 that alone moved
    probabilities of tiny models by more than plait's whole tolerance, and with equal frequencies by nothing.
    """
    ours = [torch.tensor(rotary_table(spec).inv_freq) for spec in config.rotary]
    for name, theirs in model.named_buffers():
        for table in ours if name.endswith("inv_freq") else ():
            table = table.to(theirs.device, theirs.dtype)
            if table.shape == theirs.shape and torch.allclose(table, theirs, rtol=1e-6, atol=0):
                theirs.copy_(table)


def _renormalise(checkpoint: Checkpoint, model: Any) -> list[str]:
    """Have the routers of a deepseek_v2 do what the configuration asks for and transformers' class does not; the note
    that says so, where it does."""
    config = checkpoint.config
    mixtures = [layer.feed_forward for layer in config.layers if isinstance(layer.feed_forward, MixtureSpec)]
    if config.model_type != "deepseek_v2" or not any(mixture.router.renormalises for mixture in mixtures):
        return []

    def renormalised(module: Any, inputs: Any, output: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        logits, weights, ids = output
        return logits, weights / (weights.sum(-1, keepdim=True) + 1e-20), ids

    for name, module in model.named_modules():
        if name.endswith(".mlp.gate"):
            module.register_forward_hook(renormalised)
    return [
        "norm_topk_prob is true: plait renormalises the experts' weights, as the model's own code does; transformers"
        " ignores the key for a deepseek_v2, so its routers were made to"
    ]


def _load(checkpoint: Checkpoint, decoder: Decoder | None, dtype: torch.dtype) -> Reference:
    import transformers

    if checkpoint.format != "gguf":
        model = _from_directory(checkpoint, dtype)
        return Reference(model, f"transformers {transformers.__version__}, {checkpoint.path}")
    decoder = decoder or load(checkpoint, dtype)
    architecture = checkpoint.source.metadata["general.architecture"]  # type: ignore[attr-defined]
    make = _from_gguf if _knows_gguf(architecture, checkpoint.config.model_type) else _from_our_weights
    return make(checkpoint, decoder, dtype)


def _from_directory(checkpoint: Checkpoint, dtype: torch.dtype) -> Any:
    """AutoModelForCausalLM; a multimodal directory's class is told by its own name, and only its text part runs."""
    import transformers

    if not checkpoint.path.is_dir():
        raise UsageError(f"{checkpoint.path}: transformers reads whole directories; give the directory")
    options: dict[str, Any] = {"dtype": dtype, "local_files_only": True}
    model_type = checkpoint.config.model_type
    if family(model_type).written_as != model_type:  # it knows the class, by another name
        raw: dict[str, Any] = json.loads(json.dumps(checkpoint.raw))
        del raw["model_type"]
        options["config"] = transformers.AutoConfig.for_model(family(model_type).written_as, **raw)
        kind: Any = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(options["config"])]
        return kind.from_pretrained(checkpoint.path, **options)
    return transformers.AutoModelForCausalLM.from_pretrained(checkpoint.path, **options)


def _knows_gguf(architecture: str, model_type: str) -> bool:
    """Whether its loader reads such files: it lists some by GGUF's name and some by its own."""
    from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES

    if architecture == "llama" and model_type != "llama":
        return False  # it takes a llama with experts for a mixtral, and has no names for that one's tensors
    return architecture in GGUF_SUPPORTED_ARCHITECTURES or model_type in GGUF_SUPPORTED_ARCHITECTURES


def _from_gguf(checkpoint: Checkpoint, decoder: Decoder, dtype: torch.dtype) -> Reference:
    """Read by transformers' GGUF loader: all weights, but not every key; a key that it misses is supplied, and said."""
    import transformers

    path, notes = checkpoint.path, []
    config = transformers.AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    missed = _differences(config, checkpoint)
    if missed:
        config = _own_config(checkpoint)
        notes.append(
            f"transformers' GGUF loader misreads {', '.join(missed)}: it read the weights, the configuration is plait's"
        )
    kind: Any = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    model = kind.from_pretrained(path.parent, gguf_file=path.name, config=config, dtype=dtype)
    if checkpoint.config.rotary[0].divisors is not None:
        notes.append("transformers' GGUF loader ignores rope_freqs: the rotary frequencies are plait's")
        model.model.rotary_emb.inv_freq.copy_(torch.tensor(decoder.rotary_tables[0].inv_freq))
    return Reference(model, f"transformers {transformers.__version__} and its GGUF loader, {path}", notes)


def _differences(theirs: Any, checkpoint: Checkpoint) -> list[str]:
    """Fields of the model's switches that transformers' reading of the metadata gets otherwise than plait's."""
    ignored = {"eos_token_ids", "bos_token_id", "pad_token_id", "max_positions", "raw", "model_type"}
    try:
        read, ours = asdict(parse_config(theirs.to_dict())), asdict(parse_config(checkpoint.raw))
    except ConfigError:
        return ["the configuration"]
    return [name for name in read if name not in ignored and not _close(read[name], ours[name])]


def _close(a: Any, b: Any) -> bool:
    """Equal plain data; numbers that were fp32 on one side may differ by its rounding."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(_close(a[key], b[key]) for key in a)
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_close, a, b))
    if isinstance(a, float) and isinstance(b, float):
        return isclose(a, b, rel_tol=1e-6)
    return bool(a == b)


def _own_config(checkpoint: Checkpoint) -> Any:
    """The transformers configuration that plait's reading of the metadata makes."""
    import transformers

    raw: dict[str, Any] = json.loads(json.dumps(checkpoint.raw))
    return transformers.AutoConfig.for_model(raw.pop("model_type"), **raw)


def _from_our_weights(checkpoint: Checkpoint, decoder: Decoder, dtype: torch.dtype) -> Reference:
    """transformers' class with the weights that plait read: shares our reader and our name map."""
    import transformers

    from plait.weights.export import hugging_face_tensors

    config = _own_config(checkpoint)
    config.tie_word_embeddings = decoder.config.tie_embeddings
    state = {name: tensor.to(dtype) for name, tensor in hugging_face_tensors(decoder)}
    kind: Any = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    model = kind.from_pretrained(None, config=config, state_dict=state, dtype=dtype)
    architecture = checkpoint.source.metadata["general.architecture"]  # type: ignore[attr-defined]
    note = (
        f"transformers cannot read GGUF files of the architecture {architecture!r}: its own class runs on the weights"
        " that plait read, so the reference shares plait's reader, name map and configuration"
    )
    return Reference(model, f"transformers {transformers.__version__}, {checkpoint.path}", [note])
