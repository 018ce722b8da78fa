from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# Test modules are imported by path (importmode=importlib); the helpers beside them need this.
sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "chat"))  # case_writers
import tiny_tokenizer
from server_process import ServerProcess


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_tokenizer.write_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[ServerProcess]:
    """A healthy server that tests share; they leave it as they found it."""
    directory = tmp_path_factory.mktemp("server")
    process = ServerProcess(
        directory,
        model_dir,
        server={"aliases": ["other-name"], "header_timeout": 2.0, "body_idle_timeout": 1.0, "keepalive_interval": 0.3},
    )
    yield process.wait_ready()
    process.stop()
    assert process.exit_code() == 0, process.log()
    assert "Traceback" not in process.log(), process.log()


@pytest.fixture
def start_server(tmp_path: Path, model_dir: Path) -> Iterator[Callable[..., ServerProcess]]:
    """Starts servers with settings of the test's own."""
    started: list[ServerProcess] = []

    def start(*, ready: bool = True, model: Path = model_dir, **settings: Any) -> ServerProcess:
        process = ServerProcess(tmp_path, model, **settings)
        started.append(process)
        return process.wait_ready() if ready else process

    yield start
    for process in started:
        process.stop()
