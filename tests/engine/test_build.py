"""From a checkpoint to an engine: which numbers are refused, and what the sizes add up to."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from plait.engine import build
from plait.engine.build import build_engine, check_options
from plait.engine.llm import LLM
from plait.engine.loading import check_defaults, choose_plan
from plait.engine.params import SamplingParams
from plait.engine.process import _build
from plait.engine.stats import TouchedBytes
from plait.errors import CapacityError, ConfigError, EngineError, UsageError
from plait.kernels import native
from plait.weights.checkpoint import Checkpoint
from tests.tiny import tiny_model_dir


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("model"))


def _with_defaults(directory: Path, values: dict[str, Any]) -> Path:
    (directory / "generation_config.json").write_text(json.dumps(values))
    return directory


@pytest.fixture
def defaults(directory: Path) -> Any:
    """Writes generation_config.json, and takes it away at the end."""
    yield lambda **values: _with_defaults(directory, values)
    (directory / "generation_config.json").unlink(missing_ok=True)


@pytest.mark.parametrize("name", ["max_model_len", "threads", "max_num_seqs", "max_batched_tokens"])
@pytest.mark.parametrize("value", [0, -1])
def test_zero_is_no_default(directory: Path, name: str, value: int) -> None:
    with pytest.raises(UsageError, match=f"{name}={value} must be at least 1"):
        build_engine(directory, **{name: value})


def test_options_are_judged_before_any_weights_are_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no amount of memory"):
        build_engine(tmp_path / "no such model", kv_memory="much")
    check_options(model="anything", kv_memory="1GiB", max_model_len=1, policy="fcfs")


def test_the_checkpoints_defaults_are_used_without_its_length(defaults: Any) -> None:
    path = defaults(temperature=0.25, top_k=7, max_new_tokens=10**9, do_sample=True, top_p=None)
    bundle = build_engine(path, kv_memory="1MiB", threads=1)
    assert bundle.default_params == {"temperature": 0.25, "top_k": 7}
    assert any("temperature=0.25, top_k=7" in line for line in bundle.lines)


@pytest.mark.parametrize(
    "key, value",
    [("temperature", -1), ("temperature", "warm"), ("top_k", 1.5), ("top_p", 2), ("repetition_penalty", [])],
)
def test_a_bad_default_names_file_and_key(defaults: Any, key: str, value: object) -> None:
    path = defaults(**{key: value})
    with pytest.raises(ConfigError, match=f"generation_config.json: {key} must be"):
        build_engine(path, kv_memory="1MiB", threads=1)
    assert build_engine(path, kv_memory="1MiB", threads=1, generation_config="none").default_params == {}


def test_the_sampling_keys_of_gguf_are_the_same_defaults(tmp_path: Path) -> None:
    metadata = {
        "general.sampling.temp": 0.5,
        "general.sampling.penalty_repeat": 1.5,
        "general.sampling.xtc_probability": 0.25,
        "general.sampling.xtc_threshold": 0.0625,
        "general.sampling.mirostat": 2,
    }
    parts: Any = {"raw": {}, "config": None, "source": SimpleNamespace(metadata=metadata), "names": None}
    checkpoint = Checkpoint(tmp_path / "m.gguf", format="gguf", **parts)
    expected = {"temperature": 0.5, "repetition_penalty": 1.5, "xtc_probability": 0.25, "xtc_threshold": 0.0625}
    assert checkpoint.generation_defaults == expected
    with pytest.raises(ConfigError, match="m.gguf, general.sampling.temp: temperature must be"):
        check_defaults(tmp_path / "m.gguf", {"temperature": -2.0})


def test_pools_of_several_models_are_sized_when_all_weights_are_loaded(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Free memory as it would be: 64 MiB less 16 MiB per loaded model, and no pool has touched a page yet."""
    loads: list[object] = []
    load_model = build.load_model

    def counting(*arguments: Any, **options: Any) -> Any:
        loads.append(arguments)
        return load_model(*arguments, **options)

    monkeypatch.setattr(build, "load_model", counting)
    monkeypatch.setattr(build, "available_memory_bytes", lambda: (64 - 16 * len(loads)) << 20)
    bundles = _build([{"model": directory, "threads": 1, "max_num_seqs": 512}] * 2)
    pools = [bundle.report["kv_pool_bytes"] for bundle in bundles]
    # Half of the 32 MiB that are left, in two equal parts of whole blocks.
    assert all(0 <= (8 << 20) - pool < bundles[0].report["kv_block_bytes"] for pool in pools)


def test_the_report_says_what_is_reserved_and_what_is_touched(directory: Path) -> None:
    bundle = build_engine(directory, kv_memory="64MiB", threads=1)
    executor: Any = bundle.engine.executor
    if executor.touched_bytes() is None:
        pytest.skip("this platform does not say what is touched")
    assert bundle.report["kv_pool_touched_bytes"] < 1 << 20 < bundle.report["kv_pool_bytes"]
    assert bundle.engine.stats().kv_touched_bytes < 1 << 20
    assert "up to 64 MiB (0 MiB in use)" in bundle.lines[-1]


def test_what_is_touched_is_asked_once_for_many_steps_and_never_where_nobody_knows() -> None:
    asked: list[int] = []

    def ask() -> int:
        asked.append(len(asked))
        return 4096

    touched = TouchedBytes(ask)
    assert {touched.read() for _ in range(100)} == {4096} and asked == [0]
    assert TouchedBytes(None).read() is None


def test_a_step_leaves_every_part_of_a_model_in_its_mode(directory: Path) -> None:
    import plait

    decoder = plait.load(directory)
    decoder.train()
    frozen = next(module for module in decoder.modules() if module is not decoder)
    frozen.eval()
    before = [module.training for module in decoder.modules()]
    assert True in before and False in before
    LLM(decoder, kv_memory="1MiB", threads=1).generate([1, 2, 3], SamplingParams(max_tokens=2))
    assert [module.training for module in decoder.modules()] == before


# Plans


needs_library = pytest.mark.skipif(native.native_library() is None, reason=f"no native library: {native.reason()}")
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, logprobs=3)
PROMPTS = [{"prompt_token_ids": list(ids)} for ids in (range(1, 40), (7, 8, 9), (200,) * 5)]


def _answers(llm: LLM) -> list[tuple[list[int], list[float]]]:
    """Token ids and their log-probabilities of every prompt's answer."""
    answers = []
    for output in llm.generate(PROMPTS, GREEDY):
        ids, logprobs = list(output.outputs[0].token_ids), output.outputs[0].logprobs or []
        answers.append((ids, [entry[token].logprob for token, entry in zip(ids, logprobs, strict=True)]))
    return answers


@needs_library
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "gemma3_text", "gpt_neox"])
def test_both_plans_give_the_same_text(family: str, tmp_path: Path) -> None:
    path = tiny_model_dir(tmp_path, family)
    # The reference chooses bf16 by itself where the processor multiplies it.
    native_llm = LLM(path, plan="auto", kv_memory="4MiB", threads=1)
    reference = LLM(path, plan="reference", dtype="fp32", kv_memory="4MiB", threads=1)
    assert (native_llm.bundle.plan, reference.bundle.plan) == ("native", "reference")
    for ours, theirs in zip(_answers(native_llm), _answers(reference), strict=True):
        assert ours[0] == theirs[0]
        assert ours[1] == pytest.approx(theirs[1], abs=2e-3)


@needs_library
def test_the_start_names_plan_instructions_threads_formats_and_bytes(directory: Path) -> None:
    bundle = build_engine(directory, kv_memory="4MiB", threads=1, dtype="bf16")
    report = bundle.report
    assert (report["plan"], report["threads"], report["host_ops"], report["kv_dtype"]) == ("native", 1, [], "bf16")
    assert report["weight_bytes"] == bundle.loaded.native.store.nbytes and report["plan_bytes"] > 0  # type: ignore[union-attr]
    (line,) = (line for line in bundle.lines if line.startswith("plan: "))
    assert f"native ({report['isa']}, 1 thread), matrices 23 BF16, keys and values in bf16" in line
    assert bundle.precision == "bf16"
    reference = build_engine(directory, plan="reference", dtype="fp32", kv_memory="4MiB")
    assert "plan: reference, keys and values in fp32" in reference.lines


@needs_library
def test_a_live_decoder_uses_the_reference_unless_told_and_a_refresh_packs_it_again(directory: Path) -> None:
    import torch

    import plait

    decoder = plait.load(directory, "fp32")
    assert build_engine(decoder, kv_memory="1MiB", threads=1).plan == "reference"
    llm = LLM(decoder, plan="native", kv_memory="1MiB", threads=1)
    assert llm.bundle.plan == "native" and llm.bundle.decoder is decoder
    before = _answers(llm)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.mul_(1.5)
    llm.refresh()
    after = _answers(llm)
    expected = _answers(LLM(decoder, plan="reference", kv_memory="1MiB", threads=1))
    assert after != before and [ids for ids, _ in after] == [ids for ids, _ in expected]


@needs_library
def test_a_packed_models_decoder_reads_the_store_and_computes_nothing(directory: Path) -> None:
    import torch

    import plait

    bundle = build_engine(directory, kv_memory="1MiB", threads=1)
    state, wanted = bundle.decoder.state_dict(), plait.load(directory, "fp32").state_dict()
    assert set(state) == set(wanted) and all(torch.equal(state[name], wanted[name]) for name in wanted)
    with pytest.raises(UsageError, match="plait.load"):
        bundle.decoder(torch.tensor([1]))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"plan": "fast"}, "plan 'fast': choose auto, native, reference"),
        ({"kv_dtype": "q8_0"}, "q8_0 is not supported yet"),
        ({"kv_dtype": "int4"}, "kv_dtype 'int4': choose auto, fp32, bf16, fp16"),
    ],
)
def test_plans_and_precisions_that_do_not_exist_are_refused(options: dict[str, str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        check_options(**options)


def test_more_threads_than_the_library_has_are_refused_at_once() -> None:
    check_options(threads=256)
    with pytest.raises(UsageError, match="threads=257 must be at most 256"):
        check_options(threads=257)


@needs_library
def test_threads_hold_for_the_sampler_of_the_reference_plan_too(directory: Path) -> None:
    library = native.native_library()
    assert library is not None
    library.set_threads(0)
    default = library.threads()
    build_engine(directory, plan="reference", kv_memory="1MiB", threads=3)
    assert library.threads() == 3
    build_engine(directory, plan="native", kv_memory="1MiB")
    assert library.threads() == default


def test_a_start_without_the_library_says_why_unless_the_reference_was_asked_for(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLAIT_NATIVE_LIBRARY", "none")
    why = "the native plan cannot be used: no native library, switched off by PLAIT_NATIVE_LIBRARY=none"
    assert why in build_engine(directory, kv_memory="1MiB", threads=1).lines
    bundle = build_engine(directory, kv_memory="1MiB", threads=1, plan="reference")
    assert why not in bundle.lines
    assert why not in build_engine(bundle.decoder, kv_memory="1MiB", threads=1).lines


@needs_library
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (ValueError("a mistake in lowering"), "a mistake in lowering"),
        (RuntimeError("a mistake in fusion"), "a mistake in fusion"),
        (MemoryError(), "lower max_batched_tokens or --kv-memory"),
    ],
)
def test_only_a_want_of_memory_is_told_as_one(
    directory: Path, monkeypatch: pytest.MonkeyPatch, fault: Exception, said: str
) -> None:
    def broken(*_: object) -> None:
        raise fault

    monkeypatch.setattr("plait.plan.executor.lower", broken)
    with pytest.raises(UsageError if isinstance(fault, MemoryError) else type(fault), match=said):
        build_engine(directory, kv_memory="1MiB", threads=1)


@needs_library
def test_buffers_for_embeddings_that_cannot_be_had_are_the_affair_of_one_request(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(directory, kv_memory="4MiB", threads=1)

    def broken(*_: object) -> None:
        raise EngineError("no memory")

    monkeypatch.setattr("plait.plan.executor.lower", broken)
    with pytest.raises(CapacityError, match="embeddings need buffers of their own, which cannot be made: no memory"):
        llm.embed({"prompt_token_ids": [1, 2, 3]})
    assert llm.bundle.engine.step() == [] and len(_answers(llm)) == len(PROMPTS)


def test_the_native_plan_needs_its_library_and_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    if native.native_library() is not None:
        assert choose_plan("auto", "cpu") == "native" and choose_plan("auto", "cpu", live=True) == "reference"
    assert choose_plan("auto", "cuda") == "reference"
    with pytest.raises(UsageError, match="the native plan runs on the CPU, not on cuda"):
        choose_plan("native", "cuda")
    monkeypatch.setenv("PLAIT_NATIVE_LIBRARY", "none")
    assert choose_plan("auto", "cpu") == "reference"
    with pytest.raises(UsageError, match="no native library .switched off by PLAIT_NATIVE_LIBRARY=none"):
        choose_plan("native", "cpu")
