"""`plait inspect`: headers without torch, the plan from the configuration, a trace through the interpreter."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from plait.cli.main import main
from plait.model.known_models import _CONFIGS
from tests.real_models import smollm2_path
from tests.sparse import llama_tensors, sparse_checkpoint
from tests.tiny import VOCAB_SIZE, tiny_model_dir

LLAMA_405B = {
    "model_type": "llama",
    "hidden_size": 16_384,
    "intermediate_size": 53_248,
    "num_hidden_layers": 126,
    "num_attention_heads": 128,
    "num_key_value_heads": 8,
    "vocab_size": 128_256,
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": False,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_model_dir(tmp_path_factory.mktemp("models")))


def inspect(capsys: pytest.CaptureFixture[str], *argv: str) -> Any:
    assert main(["inspect", *argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_directory_of_405_billion_parameters_needs_headers_only_and_no_torch(tmp_path: Path) -> None:
    config = LLAMA_405B
    directory = sparse_checkpoint(tmp_path / "llama-405b", config, llama_tensors(config), num_shards=191)
    code = (
        "import sys; from plait.cli.main import main\n"
        f"status = main(['inspect', {str(directory)!r}, '--json'])\n"
        "print(sorted({'torch', 'rich', 'tokenizers', 'safetensors'} & set(sys.modules)), file=sys.stderr)\n"
        "sys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr.strip()) == (0, "[]")
    facts = json.loads(done.stdout)
    assert facts["supported"] and facts["format"] == "safetensors"
    assert facts["tensors"]["count"] == 126 * 9 + 3
    # Every number of the files is a parameter, and the other way round.
    assert facts["tensors"]["numbers"] == facts["config"]["parameters"]["total"] == 405_853_388_800
    assert facts["memory"]["kv_bytes_per_token"]["bf16"] == 126 * 8 * 256 * 2


def test_a_directory_of_671_billion_parameters_is_described_in_two_seconds(tmp_path: Path) -> None:
    """DeepSeek-V3's shape, a tensor per expert, with the layer that predicts a second token."""
    config = _CONFIGS["DeepSeek-V3"]
    directory = sparse_checkpoint(tmp_path / "v3", config, list(_v3_tensors(config)), num_shards=163)
    before = _child_seconds()
    done = subprocess.run(
        [sys.executable, "-m", "plait", "inspect", str(directory), "--json"], capture_output=True, text=True, timeout=60
    )
    seconds = _child_seconds() - before
    facts = json.loads(done.stdout)
    assert facts["supported"] and facts["tensors"]["count"] > 45_000
    assert facts["config"]["parameters"]["total"] == 671_026_419_200
    assert facts["memory"]["kv_bytes_per_token"]["bf16"] == 61 * 576 * 2
    assert seconds < 2


def _child_seconds() -> float:
    """Processor time of ended children: unlike the clock it does not count waiting for other processes."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _v3_tensors(c: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...], str]]:
    d, heads, rank = c["hidden_size"], c["num_attention_heads"], c["kv_lora_rank"]
    yield from (
        ("model.embed_tokens.weight", (c["vocab_size"], d), "BF16"),
        ("lm_head.weight", (c["vocab_size"], d), "BF16"),
    )
    yield "model.norm.weight", (d,), "BF16"
    for layer in range(c["num_hidden_layers"] + 1):
        name = f"model.layers.{layer}"
        matrices = {
            "self_attn.q_a_proj": (1536, d),
            "self_attn.q_b_proj": (heads * 192, 1536),
            "self_attn.kv_a_proj_with_mqa": (rank + 64, d),
            "self_attn.kv_b_proj": (heads * 256, rank),
            "self_attn.o_proj": (d, heads * 128),
        }
        widths = {"mlp": c["intermediate_size"]}
        if layer >= c["first_k_dense_replace"]:
            widths = {f"mlp.experts.{e}": 2048 for e in range(256)} | {"mlp.shared_experts": 2048}
            matrices["mlp.gate"] = (256, d)
            yield f"{name}.mlp.gate.e_score_correction_bias", (256,), "F32"
        for part, width in widths.items():
            matrices |= {
                f"{part}.gate_proj": (width, d),
                f"{part}.up_proj": (width, d),
                f"{part}.down_proj": (d, width),
            }
        norms = {"input_layernorm": d, "post_attention_layernorm": d}
        norms |= {"self_attn.q_a_layernorm": 1536, "self_attn.kv_a_layernorm": rank}
        yield from ((f"{name}.{part}.weight", shape, "BF16") for part, shape in matrices.items())
        yield from ((f"{name}.{part}.weight", (width,), "BF16") for part, width in norms.items())


def test_facts_of_a_small_directory(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    facts = inspect(capsys, model)
    assert facts["tokenizer"]["tokens"] == VOCAB_SIZE
    assert facts["tokenizer"]["special_tokens"] == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    assert facts["tokenizer"]["eos_token"] == "<|im_end|>"
    assert facts["chat_template"].startswith("{% for message")
    assert facts["tensors"]["formats"]["F32"]["numbers"] == facts["config"]["parameters"]["total"]
    switches = " ".join(value for _, value in facts["config"]["switches"])
    assert "4 heads over 2 key/value heads of width 12; full" in switches


@pytest.mark.parametrize(
    "template", ["a", {"tool_use": "b", "default": "a"}, [{"name": "default", "template": "a"}]], ids=str
)
def test_the_template_is_shown_however_it_is_stored(
    template: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tiny_model_dir(tmp_path)
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    assert inspect(capsys, str(directory))["chat_template"] == "a"


def test_layers_that_differ_are_told_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = tiny_model_dir(tmp_path, "gemma3_text")
    assert main(["inspect", str(directory)]) == 0
    text = capsys.readouterr().out
    assert "layers 0-4 " in text and "window 24" in text and "layers 5 " in text


def test_a_model_that_cannot_run_is_still_described(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {"model_type": "llama4", "hidden_size": 64}
    directory = sparse_checkpoint(tmp_path / "m", config, [("a", (4, 8), "BF16"), ("b", (3,), "F32")], num_shards=2)
    facts = inspect(capsys, str(directory))
    assert not facts["supported"] and "llama4" in facts["problem"]
    assert facts["tensors"]["formats"]["BF16"] == {"tensors": 1, "numbers": 32, "bytes": 64}
    assert facts["config"]["raw"]["hidden_size"] == 64
    assert main(["inspect", str(directory)]) == 0
    assert "cannot run this model" in capsys.readouterr().out


def test_tensors_lists_every_tensor(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    rows = inspect(capsys, model, "--tensors")
    shapes = {row["name"]: row["shape"] for row in rows}
    assert shapes["model.layers.2.self_attn.k_proj.weight"] == [24, 48]
    assert sum(row["bytes"] for row in rows) == 4 * inspect(capsys, model)["config"]["parameters"]["total"]


def test_plan_counts_the_multiplications_of_a_token(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    plan = inspect(capsys, model, "--plan")
    # Every matrix but the embedding multiplies once: 2 FLOPs a number.
    d, ffn, kv, layers = 48, 80, 24, 3
    matrices = layers * (2 * d * d + 2 * d * kv + 3 * d * ffn) + VOCAB_SIZE * d
    linear = sum(
        row["flops"] * max(len(row["layers"]), 1) for row in plan["operations"] if row["op"] in ("linear", "logits")
    )
    assert linear == 2 * matrices
    # q k and weights v: 4 heads of width 12 twice, 2 FLOPs each, in 3 layers.
    assert plan["totals"]["flops_per_key"] == layers * 2 * 4 * (12 + 12)
    attend = next(row for row in plan["operations"] if row["op"] == "attend")
    assert attend["layers"] == [0, 1, 2]
    assert attend["inputs"] == [["N", 4, 12], ["N", 2, 12], ["N", 2, 12]]
    norms = (2 * layers + 1) * d
    assert plan["totals"]["weight_bytes"] == 2 * (matrices + norms + VOCAB_SIZE * d)


def test_plan_with_sizes_shows_concrete_shapes(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    serving = inspect(capsys, model, "--plan", "--batch", "2", "--length", "10")
    training = inspect(capsys, model, "--plan", "--batch", "2", "--length", "10", "--training")

    def of(plan: dict[str, Any], op: str) -> dict[str, Any]:
        return next(row for row in plan["operations"] if row["op"] == op)

    assert of(serving, "embed")["outputs"] == [[20, 48]]
    assert of(serving, "logits")["outputs"] == [[2, VOCAB_SIZE]]
    assert of(training, "embed")["outputs"] == [[2, 10, 48]]
    assert of(training, "logits")["outputs"] == [[2, 10, VOCAB_SIZE]]
    assert of(training, "logits")["flops"] == 20 * 2 * 48 * VOCAB_SIZE
    # Causal: 1 + 2 + ... + 10 = 55 visible keys in each of the two sequences.
    assert of(training, "attend")["flops"] == 2 * 55 * 2 * 4 * (12 + 12)


def test_plan_of_latent_attention_counts_the_form_that_is_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """4 heads, latent 24, keys 10 + 6, values 14. Absorbed: 2 * (24 + 6 + 24) per key; expanded: 2 * (16 + 14)."""
    directory = str(tiny_model_dir(tmp_path, "deepseek_v3"))
    product = 2 * 4 * 24 * (10 + 14)

    def attend(*flags: str) -> dict[str, Any]:
        rows = inspect(capsys, directory, "--plan", *flags)["operations"]
        return next(row for row in rows if row["op"] == "attend_latent")

    token = attend()
    assert token["inputs"] == [["N", 4, 16], ["N", 24], ["N", 1, 6]] and token["outputs"] == [["N", 4, 14]]
    assert (token["flops"], token["flops_per_key"]) == (product, 2 * 4 * (30 + 24))
    assert token["attributes"]["form"] == "auto" and token["attributes"]["nope_width"] == 10
    sized = attend("--batch", "2", "--length", "10")
    assert sized["flops"] == 20 * product + 2 * 55 * 2 * 4 * (16 + 14)
    assert main(["inspect", directory, "--plan"]) == 0
    assert f"{product:,} + {2 * 4 * 54:,}/key" in capsys.readouterr().out


def test_plan_groups_layers_by_kind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = tiny_model_dir(tmp_path, "gemma3_text", num_hidden_layers=7)
    plan = inspect(capsys, str(directory), "--plan")
    windows = {
        tuple(row["layers"]): row["attributes"].get("window") for row in plan["operations"] if row["op"] == "attend"
    }
    assert windows == {(0, 1, 2, 3, 4, 6): 24, (5,): None}
    assert main(["inspect", str(directory), "--plan"]) == 0
    assert "layers 0-4, 6 (6 times)" in capsys.readouterr().out


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "deepseek_v3"])
def test_trace_shows_what_the_decoder_computes(family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    import plait
    from plait.model.decoder import Trace

    directory = tiny_model_dir(tmp_path, family)
    text = "The quick brown fox jumps over the lazy dog."
    found = inspect(capsys, str(directory), "--trace", text, "--dtype", "fp32", "--threads", "1")
    assert "".join(token["text"] for token in found["tokens"]) == text
    decoder = plait.load(directory, "fp32")
    trace = Trace(layers=(1,))
    ids = torch.tensor([token["id"] for token in found["tokens"]])
    with torch.inference_mode():
        logprobs = decoder.logits(decoder(ids, trace=trace)[-1]).log_softmax(-1)
    assert found["next"][0]["id"] == int(logprobs.argmax())
    assert found["next"][0]["logprob"] == pytest.approx(float(logprobs.max()), abs=1e-4)
    # The value that enters layer 2 is what layer 1 gave.
    attends = [i for i, row in enumerate(found["operations"]) if row["op"].startswith("attend")]
    adds = [row for row in found["operations"][attends[1] : attends[2]] if row["op"] == "add"]
    assert adds[-1]["rms"] == pytest.approx(float(trace.hidden_states[1].square().mean().sqrt()), rel=1e-4)
    weights = [weight for _, _, weight in found["operations"][attends[0]]["attention"]]
    assert weights == sorted(weights, reverse=True) and 0 < weights[0] <= 1


def test_trace_prints_tokens_and_attention(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", model, "--trace", "abc", "--threads", "1"]) == 0
    text = capsys.readouterr().out
    assert "0:'a' 1:'b' 2:'c'" in text
    assert "layer 2 head " in text and text.splitlines()[-1].startswith("next: ")


@pytest.mark.real_model
def test_inspect_of_a_real_gguf_file(capsys: pytest.CaptureFixture[str]) -> None:
    facts = inspect(capsys, str(smollm2_path()))
    assert facts["format"] == "gguf" and facts["config"]["parameters"]["total"] == 134_515_008
    assert facts["tensors"]["formats"]["Q4_1"]["tensors"] == 210
    assert facts["tokenizer"] == {
        "kind": "gpt2",
        "pre_tokenizer": "smollm",
        "tokens": 49_152,
        "merges": 48_900,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "add_bos_token": False,
    }


@pytest.mark.real_model
def test_inspect_of_a_gguf_file_imports_no_torch() -> None:
    code = (
        "import sys; from plait.cli.main import main\n"
        f"main(['inspect', {str(smollm2_path())!r}])\n"
        "sys.exit('torch' in sys.modules or 'gguf' in sys.modules)"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, env=environment).returncode == 0
