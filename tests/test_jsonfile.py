from __future__ import annotations

import os
from pathlib import Path

import pytest

from plait.errors import ConfigError, TokenizerError
from plait.jsonfile import check_readable, read_json, read_json_if_there, read_text


def test_an_object_is_read_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "real.json").write_text('{"a": 1}')
    (tmp_path / "link.json").symlink_to("real.json")
    assert read_json(tmp_path / "link.json") == {"a": 1}
    assert read_json_if_there(tmp_path / "none.json") == {}


def test_what_never_ends_is_refused(tmp_path: Path) -> None:
    pipe, device = tmp_path / "pipe.json", tmp_path / "zero.json"
    os.mkfifo(pipe)
    device.symlink_to("/dev/zero")
    for path in (pipe, device, tmp_path):
        with pytest.raises(ConfigError, match=f"{path} is not a regular file"):
            read_json_if_there(path)


def test_a_huge_file_is_refused(tmp_path: Path) -> None:
    huge = tmp_path / "config.json"
    with huge.open("wb") as file:
        file.truncate((64 << 20) + 1)  # sparse: takes no space
    with pytest.raises(ConfigError, match="67108865 bytes, more than the 67108864"):
        read_json(huge)
    check_readable(huge, max_bytes=1 << 30)


@pytest.mark.parametrize("content", [b"[]", b"{", b'"\xff"', b"[" * 100_000])
def test_what_is_no_object_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(TokenizerError, match=r"config\.json"):
        read_json(tmp_path / "config.json", TokenizerError)


def test_text_that_is_not_unicode_is_refused(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"{{ x }}\xff")
    with pytest.raises(ConfigError, match=r"chat_template\.jinja is not UTF-8 text \(byte 7\)"):
        read_text(tmp_path / "chat_template.jinja")
