"""The adapters of an engine: names and directories as they are given, what was loaded, and who asks for which."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plait.errors import PlaitError, RequestError, UsageError

if TYPE_CHECKING:
    from plait.engine.loading import LoadedModel
    from plait.weights.adapters import Adapter

MAX_ADAPTERS = 256
_MAX_NAME = 200


@dataclass(frozen=True)
class AdapterInfo:
    """What is known of a loaded adapter. content_hash: what prefixes are shared by; modules: parameters it changes;
    nbytes: of its numbers as it is stored."""

    name: str
    path: str
    content_hash: str
    rank: int
    modules: int
    nbytes: int


def check_adapters(adapters: Any) -> dict[str, Path]:
    """Names and directories of adapters, {} for None; each one's configuration has been read. Raises PlaitError."""
    from plait.weights.adapter_config import read_lora_config
    from plait.weights.adapters import check_directory

    if adapters is None:
        return {}
    if not isinstance(adapters, Mapping):
        raise UsageError('adapters must be a map from names to directories, such as {"name": "path"}')
    if len(adapters) > MAX_ADAPTERS:
        raise UsageError(f"{len(adapters)} adapters: at most {MAX_ADAPTERS} can be loaded")
    found = {}
    for name, path in adapters.items():
        check_name(name)
        if not isinstance(path, str | Path):
            raise UsageError(f"adapter {name}: its path must be text, got {type(path).__name__}")
        found[name] = Path(path)
        read_lora_config(check_directory(found[name]))
    return found


def check_name(name: Any) -> None:
    """UsageError for what cannot be an adapter's name."""
    fits = isinstance(name, str) and 0 < len(name) <= _MAX_NAME and name.isprintable() and name == name.strip()
    if not fits:
        raise UsageError(f"an adapter's name must be printable text without space around it, not {name!r:.60}")


def parse_adapter(text: str) -> tuple[str, str]:
    """(name, directory) from NAME=DIRECTORY or from a directory, whose own name it is then.

    A directory of this very name counts first, then the first = before a directory that there is, then the first =.
    What begins as a path does (/, ./, ../, ~) has no name before it.
    """
    cuts = [text[:at] for at, character in enumerate(text) if character == "="]
    if not cuts or Path(text).exists() or text.startswith(("/", "./", "../", "~")):
        name, path = Path(text).resolve().name, text
    else:
        rest = {name: text[len(name) + 1 :] for name in cuts}
        name = next((name for name in cuts if rest[name] and Path(rest[name]).is_dir()), cuts[0])
        path = rest[name]
    if not name or not path:
        raise UsageError(f"--adapter {text!r:.100}: write NAME=DIRECTORY, or a directory")
    return name, path


def load_adapters(adapters: Mapping[str, Path], loaded: LoadedModel) -> list[Adapter]:
    """Every adapter for a loaded model, in order. Raises PlaitError that names the adapter which does not fit."""
    if not adapters:
        return []
    from plait.weights.adapters import load_adapter

    if loaded.native is not None:
        recording = loaded.native.recording
    else:
        from plait.model.record import record

        recording = record(loaded.decoder)
    found = []
    for name, path in adapters.items():
        try:
            found.append(load_adapter(path, loaded.config, recording, name))
        except PlaitError as error:
            raise type(error)(f"adapter {name}: {error}") from None
    return found


def describe(adapters: Sequence[Adapter]) -> dict[str, AdapterInfo]:
    """By name, in order."""
    return {
        a.name: AdapterInfo(a.name, str(a.path), a.content_hash, a.rank, len(a.targets), a.nbytes) for a in adapters
    }


def adapter_line(info: AdapterInfo) -> str:
    """For people."""
    return f"adapter {info.name}: {info.path}, rank {info.rank}, {info.modules} modules, {info.nbytes / 2**20:,.1f} MiB"


def adapter_of_each(adapter: Any, count: int) -> list[str | None]:
    """The adapter's name for each of `count` prompts: one for all, or a list. RequestError."""
    if adapter is None or isinstance(adapter, str):
        return [adapter] * count
    if not isinstance(adapter, Sequence) or not all(a is None or isinstance(a, str) for a in adapter):
        raise RequestError("adapter must be a loaded adapter's name, or a list of names and None", field="adapter")
    if len(adapter) != count:
        raise RequestError(f"{len(adapter)} adapters for {count} prompts: give one or as many", field="adapter")
    return list(adapter)


def unknown_adapter(name: object, known: Mapping[str, Any]) -> RequestError:
    """The error for a name that is not loaded."""
    loaded = f"loaded: {', '.join(known)}" if known else "none is loaded (adapters=..., --adapter)"
    return RequestError(f"there is no adapter {name!r:.100}; {loaded}", field="adapter")
