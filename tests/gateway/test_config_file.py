"""The configuration file: read, and followed while it changes."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from engines import until

from proa.core.errors import ConfigError
from proa.gateway.config_file import follow_config, read_config


def test_a_file_that_is_not_there_or_no_text(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        read_config(tmp_path / "gateway.yaml")
    (tmp_path / "gateway.yaml").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="utf-8"):
        read_config(tmp_path / "gateway.yaml")


async def test_changes_are_applied_and_mistakes_leave_what_is_in_use(tmp_path):
    file = tmp_path / "gateway.yaml"
    file.write_text("models: {a: {path: /a}}")
    applied, refused = [], []

    async def apply(config):
        applied.append(list(config.models))

    following = asyncio.create_task(follow_config(file, apply, refused.append, poll=0.01))
    await asyncio.sleep(0.1)
    assert not applied
    (tmp_path / "new").write_text("models: {b: {path: /b}}")
    (tmp_path / "new").replace(file)
    await until(lambda: applied == [["b"]])
    file.write_text("models: {b: {pat: /b}}")
    await until(lambda: refused)
    assert "models.b.pat" in str(refused[0])
    file.unlink()
    await until(lambda: len(refused) == 2)
    file.write_text("a: " + "[" * 3000 + "]" * 3000)
    await until(lambda: len(refused) == 3)
    file.write_text("models: {cc: {path: /c}}")
    await until(lambda: applied == [["b"], ["cc"]])
    following.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await following


async def test_a_mistake_of_the_reader_ends_no_following(tmp_path, monkeypatch):
    file = tmp_path / "gateway.yaml"
    file.write_text("models: {a: {path: /a}}")
    applied, refused = [], []

    async def apply(config):
        applied.append(list(config.models))

    following = asyncio.create_task(follow_config(file, apply, refused.append, poll=0.01))
    await asyncio.sleep(0.1)
    with monkeypatch.context() as patch:
        patch.setattr("proa.gateway.config_file.parse_yaml", lambda *_: 1 // 0)
        file.write_text("models: {b: {path: /b}}")
        await until(lambda: refused)
    assert "ZeroDivisionError" in str(refused[0]) and not applied
    file.write_text("models: {cc: {path: /c}}")
    await until(lambda: applied == [["cc"]])
    following.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await following
