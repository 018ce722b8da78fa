from __future__ import annotations

import io
import logging

import pytest

from proa.core import env
from proa.core import logging as proa_logging
from proa.core.errors import ConfigError


def test_cache_directory(monkeypatch, tmp_path):
    monkeypatch.setenv("PROA_CACHE_DIR", str(tmp_path / "explicit"))
    assert env.cache_dir() == tmp_path / "explicit"
    monkeypatch.delenv("PROA_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert env.cache_dir() == tmp_path / "proa"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert env.cache_dir() == tmp_path / ".cache" / "proa"


def test_log_level_is_checked(monkeypatch):
    monkeypatch.delenv("PROA_LOG_LEVEL", raising=False)
    assert env.log_level() == "info"
    monkeypatch.setenv("PROA_LOG_LEVEL", "DEBUG")
    assert env.log_level() == "debug"
    monkeypatch.setenv("PROA_LOG_LEVEL", "loud")
    with pytest.raises(ConfigError, match="PROA_LOG_LEVEL"):
        env.log_level()


def test_an_empty_key_is_no_key(monkeypatch):
    monkeypatch.setenv("PROA_API_KEY", "")
    assert env.api_key() is None


def test_a_child_inherits_and_adds(monkeypatch):
    monkeypatch.setenv("PROA_TEST_INHERITED", "1")
    child = env.child_environment(PROA_TEST_ADDED="2")
    assert (child["PROA_TEST_INHERITED"], child["PROA_TEST_ADDED"]) == ("1", "2")


@pytest.fixture
def proa_logger():
    logger = logging.getLogger("proa")
    state = (logger.handlers[:], logger.level, logger.propagate)
    yield logger
    logger.handlers, logger.level, logger.propagate = state[0], state[1], state[2]


def test_configure_writes_lines_once_however_often_it_is_called(proa_logger):
    stream = io.StringIO()
    proa_logging.configure("debug")
    proa_logging.configure("info", process="api", stream=stream)
    logging.getLogger("proa.test").debug("hidden")
    logging.getLogger("proa.test").info("shown %d", 1)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 1
    assert lines[0].endswith("api INFO proa.test: shown 1")


def test_configure_refuses_an_unknown_level(proa_logger):
    with pytest.raises(ConfigError, match="log_level"):
        proa_logging.configure("loud")
