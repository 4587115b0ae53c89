"""Run directories of tiny untrained models, as a training leaves them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from plait.model.decoder import Decoder, from_config
from plait.training import checkpoints
from plait.training.config import RunConfig, config_of
from plait.training.data.build import Data, build_data
from plait.training.recipe import dump_yaml
from plait.training.tree import to_plain

STUDY_MODEL: dict[str, Any] = {
    "model_type": "plait_gpt",
    "d_model": 24,
    "n_ctx": 256,
    "n_layers": 2,
    "n_heads": 2,
    "use_moe": True,
    "n_experts": 3,
    "top_k": 2,
    "d_expert": 16,
}

_WORDS = "open close the file printer window could not be found select remove all items list new save server"
_VI = "mở đóng tệp máy in cửa sổ không thể tìm thấy chọn bỏ mọi mục danh sách mới lưu máy chủ"
_JA = "ファイル を 開く 閉じる 印刷 画面 見つかりません 選択 削除 すべて 項目 一覧 新規 保存 サーバー"


def sentence(text: str, seed: int, joint: str = " ") -> str:
    """A sentence of 3 to 8 words that no other seed below 10,000 has."""
    words, state, chosen = text.split(), seed * 7919 + 17, []
    for _ in range(3 + seed % 6):
        state = (state * 1_103_515_245 + 12_345) % (1 << 31)
        chosen.append(words[(state >> 8) % len(words)])
    return joint.join([*chosen, str(seed)])


def write_pairs(directory: Path) -> list[dict[str, Any]]:
    """vi.tsv and ja.tsv, and the sources of a recipe that reads them."""
    sources = []
    for language, words, joint in (("vi", _VI, " "), ("ja", _JA, "")):
        lines = [f"split\ten\t{language}"]
        for i in range(60):
            split = "train" if i < 40 else "valid" if i < 46 else "test"
            lines.append(f"{split}\t{sentence(_WORDS, i)}\t{sentence(words, i, joint)}")
        (directory / f"{language}.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
        sources.append({"path": str(directory / f"{language}.tsv"), "source": "en", "target": language})
    return sources


def write_documents(directory: Path) -> list[dict[str, Any]]:
    """docs.jsonl: documents of 100 to 400 words."""
    lines = []
    for i in range(20):
        text = " ".join(sentence(_WORDS, 100 * i + k) for k in range(20 + 60 * (i % 2)))
        lines.append(json.dumps({"split": "train" if i < 12 else "valid" if i < 14 else "test", "text": text}))
    (directory / "docs.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return [{"path": str(directory / "docs.jsonl")}]


def make_run(
    directory: Path,
    task: str,
    sources: list[dict[str, Any]],
    model: dict[str, Any] = STUDY_MODEL,
    context: int = 200,
    change: Callable[[Decoder], None] = lambda decoder: None,
) -> tuple[Path, RunConfig, Data, Decoder]:
    """A run with one checkpoint, of step 3."""
    run = directory / "run"
    recipe = {
        "model": model,
        "out": str(run),
        "data": {"task": task, "sources": sources, "context": context, "tokenizer": {"vocab_size": 300}},
        "train": {"batch_tokens": 1024},
    }
    config = config_of(recipe)
    data = build_data(config.data)
    decoder = from_config({**model, "vocab_size": data.tokenizer.vocab_size, "initializer_range": 0.2}, seed=3)
    change(decoder)
    (run / "checkpoints").mkdir(parents=True)
    (run / "config.yaml").write_text(dump_yaml(to_plain(config)))
    (run / "tokenizer").mkdir()
    data.tokenizer.save(run / "tokenizer")
    decoder.source = run / "tokenizer"
    checkpoints.save(run, 3, {"step": 3, "tokens": 999, "data": data.fingerprint}, decoder.save_pretrained)
    return run, config, data, decoder
