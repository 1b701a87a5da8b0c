"""The image of a server and of a site, as far as no container engine is needed, and the versions that it is made of."""

from __future__ import annotations

import itertools
import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import PurePosixPath
from typing import Any, NamedTuple

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from distributions import ROOT
from fedlit.cli.command import COMMANDS
from pages import PAGES, blocks

FILE = ROOT / "containers" / "Containerfile"
IGNORED = ROOT / ".dockerignore"
LOCK = ROOT / "requirements.lock"
PYPROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT: dict[str, Any] = PYPROJECT["project"]
SECRET = re.compile(r"secret|token|passw|credential|api.?key|private|_key\b", re.IGNORECASE)


class Step(NamedTuple):
    """An instruction of the Containerfile, and what follows it on its line."""

    word: str
    rest: str


def stages() -> dict[str, list[Step]]:
    """Instructions of each stage, with those of the stages that it starts from before its own."""
    text = re.sub(r"^#.*\n", "", FILE.read_text(encoding="utf-8"), flags=re.MULTILINE).replace("\\\n", " ")
    made: dict[str, list[Step]] = {}
    steps: list[Step] = []
    for line in text.splitlines():
        if not line.strip():
            continue
        step = Step(*line.split(maxsplit=1))
        if step.word == "FROM":
            base, name = re.fullmatch(r"(\S+) AS (\w+)", step.rest).groups()  # type: ignore[union-attr]
            steps = made[name] = [*made.get(base, [])]
        steps.append(step)
    return made


STAGES = stages()
TARGETS = ("server", "site")
STEPS = [*dict.fromkeys(itertools.chain(*STAGES.values()))]


def copied() -> Iterator[str]:
    """Paths of the repository that an image has."""
    for step in STEPS:
        if step.word == "COPY" and not step.rest.startswith("--from="):
            yield from step.rest.split()[:-1]


def test_every_path_that_is_copied_is_there_and_sent_to_the_builder() -> None:
    sent = [line[1:] for line in IGNORED.read_text(encoding="utf-8").splitlines() if line.startswith("!")]
    assert sorted(copied()) == sorted(sent)
    assert [path for path in copied() if not (ROOT / path).exists()] == []


def test_the_package_can_be_built_from_what_is_copied() -> None:
    folders = {folder for folder in PYPROJECT["tool"]["setuptools"]["package-dir"].values()}
    files = {PROJECT["readme"], *PROJECT["license-files"], "pyproject.toml"}
    assert [path for path in folders | files if PurePosixPath(path).parts[0] not in set(copied())] == []


@pytest.mark.parametrize(
    "path",
    [
        *(
            "certificates/ca.key",
            "examples/three_hospitals/sites/hungary/patients.csv",
            "runs/FedGP/version_0/last.ckpt",
        ),
        *(
            "fedlit/certificates/ca.crt",
            "privacy/north.key",
            "configs/server.pem",
            "callbacks/runs/x.csv",
            ".git/config",
        ),
        *("fedlit/data/sites/north/patients.csv", "benchmarks/.env", "shared/data/x.npz", ".venv/bin/python"),
    ],
)
def test_secrets_data_and_runs_are_not_sent_to_the_builder(path: str) -> None:
    assert not is_sent(path)


def is_sent(path: str) -> bool:
    """The last line that matches a path, or a folder that it is in, decides."""
    sent = True
    parts = PurePosixPath(path).parts
    for line in IGNORED.read_text(encoding="utf-8").splitlines():
        if not line or line.startswith("#"):
            continue
        pattern = line.removeprefix("!")
        anywhere = pattern.startswith("**/")
        for end in range(1, len(parts) + 1):
            if fnmatch(parts[end - 1] if anywhere else "/".join(parts[:end]), pattern.removeprefix("**/")):
                sent = line.startswith("!")
    return sent


def test_what_the_package_has_is_sent_to_the_builder() -> None:
    for path in (ROOT / "fedlit").rglob("*"):
        if path.is_file() and path.suffix in (".py", ".csv", ".json", ".yaml", ".typed", ".html"):
            assert is_sent(str(path.relative_to(ROOT))), path


@pytest.mark.parametrize("target", TARGETS)
def test_a_process_is_not_root_from_the_last_command_of_the_build_on(target: str) -> None:
    words = [step.word for step in STAGES[target]]
    users = [step.rest for step in STAGES[target] if step.word == "USER"]
    assert len(users) == 1
    user, _, group = users[0].partition(":")
    assert int(user) >= 1000
    assert int(group) >= 1000
    assert not {"RUN", "COPY", "ADD"} & {*words[words.index("USER") :]}


def test_nothing_secret_is_named_or_fetched_in_the_build() -> None:
    settings = [step for step in STEPS if step.word in ("ARG", "ENV", "LABEL")]
    assert [step for step in settings if SECRET.search(step.rest)] == []
    assert not {"ADD", "SHELL", "ONBUILD"} & {step.word for step in STEPS}
    assert not re.search(r"https?://(?!127\.0\.0\.1)", FILE.read_text(encoding="utf-8"))


@pytest.mark.parametrize(("target", "command"), [("server", "serve"), ("site", "join")])
def test_the_entry_point_is_a_command_of_fedlit(target: str, command: str) -> None:
    entry = json.loads(STAGES[target][-1].rest)
    assert STAGES[target][-1].word == "ENTRYPOINT"
    assert entry[:2] == ["fedlit", command]
    assert command in COMMANDS
    assert entry[2:] == (["--page"] if target == "server" else [])
    checks = [step for step in STAGES[target] if step.word == "HEALTHCHECK"]
    assert len(checks) == (target == "server")


def test_the_health_check_asks_for_the_page_at_its_port() -> None:
    from fedlit.cli.page import LOOPBACK, PORT

    check = next(step.rest for step in STAGES["server"] if step.word == "HEALTHCHECK")
    assert f"http://{LOOPBACK}:{PORT}/" in check
    assert json.loads(check.partition("CMD ")[2])[:2] == ["python", "-c"]


def test_caches_and_logs_are_set_for_a_root_that_is_read_only() -> None:
    settings = dict(
        word.split("=", 1) for step in STAGES["fedlit"] if step.word == "ENV" for word in shlex.split(step.rest)
    )
    assert settings["HOME"] == "/tmp"
    assert settings["FEDLIT_LOG"] == "json"
    volumes = [step.rest for step in STAGES["fedlit"] if step.word == "VOLUME"]
    folder = next(step.rest for step in STAGES["fedlit"] if step.word == "WORKDIR")
    assert volumes == [f"{folder}/runs"]  # where a command writes its runs, and its journal beside them


def test_extras_of_the_image_are_there() -> None:
    default = next(step.rest for step in STEPS if step.word == "ARG" and step.rest.startswith("EXTRAS="))
    assert {*default.partition("=")[2].split(",")} <= {*PROJECT["optional-dependencies"]}
    installed = [step.rest for step in STEPS if step.word == "RUN" and "pip install" in step.rest]
    commands = [part for rest in installed for part in rest.split("&&") if "pip install" in part]
    assert len(commands) == 2
    assert all("--constraint requirements.lock" in part for part in commands)


def test_commands_of_the_page_shut_containers_in() -> None:
    text = PAGES["docs/across.md"].read_text(encoding="utf-8").partition("\n## Containers\n")[2]
    commands = [
        line
        for block in blocks(text)
        for line in block.code.replace("\\\n", " ").splitlines()
        if re.match(r"(podman|docker) ", line)
    ]
    built = [line for line in commands if " build " in line]
    assert {shlex.split(line)[shlex.split(line).index("--target") + 1] for line in built} == {*TARGETS}
    assert all("containers/Containerfile" in line for line in built)
    started = [line for line in commands if " run " in line]
    assert len(started) >= 2
    for line in started:
        words = shlex.split(line)
        assert {"--read-only", "--cap-drop=all", "--security-opt=no-new-privileges"} <= {*words}, line
        mounts = [words[place + 1] for place, word in enumerate(words) if word in ("-v", "--volume")]
        assert [mount for mount in mounts if not mount.endswith(":ro")] == [
            mount for mount in mounts if mount.endswith(":/var/lib/fedlit/runs")
        ], line


def test_services_of_the_example_are_shut_in() -> None:
    services = yaml.safe_load((ROOT / "examples" / "three_hospitals" / "compose.yaml").read_text())["services"]
    for name, service in services.items():
        build = service["build"]
        folder = (ROOT / "examples" / "three_hospitals" / build["context"]).resolve()
        assert folder == ROOT
        assert folder / build["dockerfile"] == FILE
        assert build["target"] == ("server" if name == "server" else "site")
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges"]
        assert service["tmpfs"] == ["/tmp"]
        writable = [volume.split(":")[1] for volume in service["volumes"] if not volume.endswith(":ro")]
        assert writable == ["/var/lib/fedlit/runs"]


# ---------------------------------------------------------------- versions


def locked() -> list[tuple[str, Version, Requirement]]:
    """Name, version and marker of each line."""
    found = []
    for line in LOCK.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            requirement = Requirement(line)
            (pin,) = requirement.specifier
            assert pin.operator == "==", line
            found.append((canonicalize_name(requirement.name), Version(pin.version), requirement))
    return found


def test_every_library_is_locked_within_its_bounds() -> None:
    """If this fails after a change of `pyproject.toml`: the command is in the first lines of `requirements.lock`."""
    versions = locked()
    wanted = [Requirement(line) for line in PROJECT["dependencies"]]
    wanted += [Requirement(line) for lines in PROJECT["optional-dependencies"].values() for line in lines]
    wanted = [each for each in wanted if each.name != "fedlit"]
    assert len(wanted) > 45
    for each in wanted:
        found = [version for name, version, _ in versions if name == canonicalize_name(each.name)]
        assert found, f"{each.name} is not in requirements.lock"
        assert [version for version in found if not each.specifier.contains(version)] == [], each.name


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
def test_a_library_has_one_version_for_each_python(python: str) -> None:
    place = {"python_version": python, "python_full_version": f"{python}.9", "sys_platform": "linux"}
    place |= {"platform_machine": "x86_64", "implementation_name": "cpython", "os_name": "posix"}
    place |= {"platform_python_implementation": "CPython", "platform_system": "Linux"}
    names = [name for name, _, line in locked() if line.marker is None or line.marker.evaluate(place)]
    assert len(names) == len({*names})
    assert {"torch", "lightning", "grpcio", "pandas"} <= {*names}


def test_the_lock_names_no_host() -> None:
    text = LOCK.read_text(encoding="utf-8")
    assert not re.search(
        r"https?:|file:|--(extra-)?index-url|--find-links|--hash", text.replace("--no-emit-index-url", "")
    )
    assert "uv pip compile --universal" in text.splitlines()[1]
    assert "/uv.lock" in (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()
