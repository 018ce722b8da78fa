"""Image, compose files and systemd unit. No container engine is needed: RUN lines are scripts, and are tried here."""

from __future__ import annotations

import configparser
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from proa.cli.main import app

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "deploy/docker"
UNIT = ROOT / "deploy/systemd/proa-gateway.service"


def instructions():
    """(name, argument) of each instruction of the Dockerfile, continued lines joined."""
    text = re.sub(r"\\\n\s*", "", (DOCKER / "Dockerfile").read_text())
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [tuple(line.split(" ", 1)) for line in lines]


def run(*command, **environment):
    return subprocess.run(
        [str(word) for word in command], cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True
    )


def test_hadolint_finds_nothing():
    found = run(Path(sysconfig.get_path("scripts")) / "hadolint", DOCKER / "Dockerfile")
    assert found.returncode == 0, found.stdout + found.stderr


def test_every_run_line_is_one_that_is_tried_below():
    lines = [argument for name, argument in instructions() if name == "RUN"]
    assert lines == [
        "deploy/docker/packages.sh build",
        'make VENV=/opt/proa TORCH_INDEX="${TORCH_INDEX}" /opt/proa/.runtime',
        "deploy/docker/install.sh /opt/proa",
        "/opt/setup/packages.sh run && /opt/setup/user.sh",
    ]


@pytest.fixture
def apt(tmp_path):
    """An apt-get that writes down its arguments; PATH with it, and the file."""
    called = tmp_path / "called"
    fake = tmp_path / "bin/apt-get"
    fake.parent.mkdir()
    fake.write_text(f'#!/bin/sh\necho "$@" >> {called}\n')
    fake.chmod(0o755)
    return f"{fake.parent}:{os.environ['PATH']}", called


@pytest.mark.parametrize(
    "stage, cuda, packages",
    [
        ("build", "", "g++ make python3 python3-dev python3-venv"),
        ("run", "", "python3"),
        ("run", "12.8.1", "gcc libc6-dev python3 python3-dev"),
    ],
)
def test_packages_of_a_stage(apt, tmp_path, stage, cuda, packages):
    path, called = apt
    done = run(DOCKER / "packages.sh", stage, PATH=path, ROOT=str(tmp_path), CUDA_VERSION=cuda)
    assert done.returncode == 0, done.stderr
    assert called.read_text() == f"update\ninstall --yes --no-install-recommends {packages}\n"
    assert run(DOCKER / "packages.sh", "other", PATH=path).returncode == 2


def test_what_make_installs_into_the_image_is_what_it_installs_here():
    """Run for real by whoever sets up this environment; here the same target says what it would do."""
    plan = run(
        "make", "--dry-run", "--always-make", "VENV=/opt/proa", "TORCH_INDEX=https://index", "/opt/proa/.runtime"
    )
    assert plan.returncode == 0, plan.stderr
    assert "--constraint requirements/constraints.txt --extra-index-url https://index torch" in plan.stdout
    assert "scripts/requirements.py build runtime demo" in plan.stdout


def test_proa_is_built_installed_and_runs(tmp_path):
    venv = tmp_path / "venv"
    assert run(sys.executable, "-m", "venv", "--without-pip", venv).returncode == 0
    (tmp_path / "elsewhere").mkdir()
    done = run(DOCKER / "install.sh", venv, BUILD_PYTHON=sys.executable, TMPDIR=str(tmp_path / "elsewhere"))
    assert done.returncode == 0, done.stderr
    assert not list((tmp_path / "elsewhere").iterdir()), "the wheel stays behind"
    # Its packages are those of this environment; proa itself is the one that was installed.
    packages = {"PYTHONPATH": sysconfig.get_path("purelib"), "PYTHONSAFEPATH": "1"}
    where = run(venv / "bin/python", "-c", "import proa.native; print(proa.native.__file__)", **packages)
    assert where.stdout.startswith(str(venv)), where.stderr
    assert run(venv / "bin/proa", "gateway", "--help", **packages).returncode == 0


def test_the_user_of_the_image(tmp_path):
    (tmp_path / "etc").mkdir()
    path = tmp_path / "bin"
    path.mkdir()
    if os.geteuid() != 0:
        (path / "chown").write_text("#!/bin/sh\n")
        (path / "chown").chmod(0o755)
    done = run(DOCKER / "user.sh", ROOT=str(tmp_path), PATH=f"{path}:{os.environ['PATH']}")
    assert done.returncode == 0, done.stderr
    user = (tmp_path / "etc/passwd").read_text().strip().split(":")
    assert user[0] == "proa" and user[2:4] == ["10001", "10001"] and user[6].endswith("nologin")
    assert (tmp_path / "home/proa/.cache/proa").is_dir() and (tmp_path / "models").is_dir()
    assert ("USER", "10001:10001") in instructions()


def test_what_is_copied_is_there_and_reaches_the_builder():
    patterns = [
        line.removeprefix("!")
        for line in (DOCKER / "Dockerfile.dockerignore").read_text().splitlines()
        if line.startswith("!")
    ]
    for name, argument in instructions():
        if name == "COPY" and not argument.startswith("--from"):
            for source in argument.split()[:-1]:
                assert (ROOT / source).exists(), source
                assert source == "." or any(Path(source).match(p) or source.startswith(p) for p in patterns), source
    for needed in (
        "CMakeLists.txt",
        "csrc",
        "src",
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "requirements",
        "scripts",
    ):
        assert needed in patterns


def test_the_command_of_image_and_unit_is_one_that_proa_has(tmp_path):
    by_name = dict(instructions())
    image = [*yaml.safe_load(by_name["ENTRYPOINT"]), *yaml.safe_load(by_name["CMD"])]
    unit = read_unit()
    service = shlex.split(unit["Service"]["ExecStart"])
    for command in (image, service):
        words = command[1:]
        assert words[:2] == ["gateway", "run"]
        assert CliRunner().invoke(app, [*words, "--help"]).exit_code == 0


def test_health_is_asked_where_the_gateway_listens():
    by_name = dict(instructions())
    check = by_name["HEALTHCHECK"].split(" CMD ", 1)[1]
    program, _, code = yaml.safe_load(check)
    assert program == "python3"
    port = re.search(r"127\.0\.0\.1:(\d+)/livez", code)[1]
    assert by_name["EXPOSE"] == port == yaml.safe_load(by_name["CMD"])[-1]


def test_compose_gives_the_container_what_it_needs_and_no_more():
    service = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]["gateway"]
    assert (ROOT / "deploy/docker" / service["build"]["context"]).resolve() == ROOT
    assert (ROOT / service["build"]["dockerfile"]).is_file()
    assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    models, config, _ = service["volumes"]
    assert models.endswith(":/models:ro") and config.endswith(":/etc/proa/gateway.yaml:ro")
    assert service["cap_drop"] == ["ALL"] and service["cap_add"] == ["SYS_NICE"]
    assert service["read_only"] and service["ulimits"]["memlock"] == -1
    cuda = yaml.safe_load((DOCKER / "compose.cuda.yaml").read_text())["services"]["gateway"]
    arguments = {argument.split("=")[0] for name, argument in instructions() if name == "ARG"}
    assert set(cuda["build"]["args"]) == arguments


def read_unit():
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str
    parser.read(UNIT)
    return parser


def test_the_unit_is_watched_and_confined(tmp_path):
    service = read_unit()["Service"]
    assert (service["Type"], service["LimitMEMLOCK"]) == ("notify", "infinity")
    assert int(service["WatchdogSec"]) > 0 and int(service["TimeoutStopSec"]) > 60, "longer than a drain"
    assert service["NoNewPrivileges"] == "yes" and service["ProtectSystem"] == "strict"
    if shutil.which("systemd-analyze"):
        copy = tmp_path / UNIT.name
        copy.write_text(re.sub(r"ExecStart=\S+", "ExecStart=/bin/true", UNIT.read_text()))
        verified = run("systemd-analyze", "verify", copy)
        assert verified.returncode == 0 and not verified.stderr.strip(), verified.stderr
