"""Real checkpoints: greedy text through the paged engine equals transformers on the same weights.

The reference gets its weights by another way than ours, so that neither our reader nor our name map is trusted.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from plait import LLM, SamplingParams
from tests.greedy import assert_same_texts, compare_greedy
from tests.real_models import gemma3_path, smollm2_path

pytestmark = [pytest.mark.real_model, pytest.mark.slow]

FIXTURES = Path(__file__).parents[1] / "fixtures"
NEW_TOKENS = 64

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    ",
    "Photosynthesis is the process by which",
    "Q: What is 17 + 25?\nA:",
    "Dear Sir or Madam,\n\nI am writing to",
    "The three laws of thermodynamics state that",
    "Il était une fois",
    "1, 1, 2, 3, 5, 8,",
    "To make a good cup of tea, first",
    "import numpy as np\n\nx =",
    "In 1969, two astronauts",
    "The opposite of hot is",
    "Here is a list of animals:\n- dog\n- cat\n-",
    "SELECT name FROM users WHERE",
    "She opened the door and saw",
    "Der schnellste Weg nach Berlin",
    "Water boils at 100 degrees Celsius because",
    "🙂 means",
    "The quick brown fox",
]


def _smollm2_reference(path: Path):
    """transformers' own GGUF loader: neither our reader nor our name map is trusted."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()


# Gemma's tensors in transformers' names, written apart from the package's map. (transformers' GGUF loader reads this
# file's 262,144 tokens several times over, which takes minutes.)
GEMMA_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def _gemma3_reference(path: Path):
    """Gemma3ForCausalLM with the 270M model's published configuration, filled through the gguf package's reader."""
    from gguf import GGUFReader, dequantize
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    config = Gemma3TextConfig(
        vocab_size=262144,
        hidden_size=640,
        intermediate_size=2048,
        num_hidden_layers=18,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        max_position_embeddings=32768,
        rms_norm_eps=1e-6,
        query_pre_attn_scalar=256,
        sliding_window=512,
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": 1_000_000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
    )
    state = {}
    for tensor in GGUFReader(path).tensors:
        values = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        if "norm" in tensor.name:
            values = values - 1  # the file stores 1 + w
        head = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
        name = head.get(tensor.name)
        if name is None:
            _, layer, kind, _ = tensor.name.split(".")
            name = f"model.layers.{layer}.{GEMMA_NAMES[kind]}.weight"
        state[name] = values
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    with torch.device("meta"):
        model = Gemma3ForCausalLM(config)
    model.load_state_dict(state, assign=True, strict=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    model.model.embed_tokens.embed_scale = torch.tensor(640**0.5)
    return model.float().eval()


def _compare(prompts: list[list[int]], llm: LLM, reference):
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    results = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params)
    llm.engine.check_integrity()
    comparisons = []
    for ids, result in zip(prompts, results, strict=True):
        tokens = list(result.outputs[0].token_ids)
        assert len(tokens) == NEW_TOKENS
        with torch.inference_mode():
            whole = torch.tensor([ids + tokens[:-1]])
            logits = reference(whole, logits_to_keep=NEW_TOKENS).logits[0]
        comparisons.append(compare_greedy(tokens, logits))
    return comparisons


def test_smollm2_greedy_text_equals_transformers() -> None:
    path = smollm2_path()
    llm = LLM(path, dtype="fp32", max_model_len=1024)
    chats = [llm.tokenizer.encode_chat([{"role": "user", "content": text}]) for text in PROMPTS[:10]]
    completions = [llm.tokenizer.encode(text) for text in PROMPTS[10:]]
    assert_same_texts(_compare(chats + completions, llm, _smollm2_reference(path)), "SmolLM2-135M-Instruct")


def test_gemma3_greedy_text_equals_transformers_within_and_past_its_window() -> None:
    path = gemma3_path()
    llm = LLM(path, dtype="fp32", max_model_len=2048)
    austen = llm.tokenizer.encode((FIXTURES / "austen-emma.txt").read_text())
    melville = llm.tokenizer.encode((FIXTURES / "melville-moby-dick.txt").read_text())
    bos = austen[:1]
    assert bos == [llm.tokenizer.bos_token_id]
    # Past the window of 512: 1,500 tokens, and once with the window's edge inside a chunk.
    long = [austen[:1500], melville[:1500], bos + melville[700:1300], bos + austen[300:840]]
    short = [llm.tokenizer.encode(text) for text in PROMPTS[:16]]
    assert_same_texts(_compare(long + short, llm, _gemma3_reference(path)), "Gemma 3 270M")
