"""An experiment that asks a site for more than its own file allows is refused before any data are read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from commands import refusal
from fedlit import FederatedStrategy
from fedlit.cli.arguments import normalise
from fedlit.cli.experiment import Experiment
from fedlit.cli.lightning_cli import FedlitCLI
from fedlit.cli.policy import asked
from fedlit.cli.seats import take_seat
from fedlit.federation.errors import public_text
from fedlit.methods import FedAvg, FedMMD
from fedlit.privacy import BFV, Paillier, PairwiseMasking, Plain
from fedlit.remote import Policy, PolicyError, Seat
from fedlit.remote.certificates import make_certificates
from fedlit.remote.policy import Asked, Chosen
from fedlit.remote.relay import POLICY, TIMES
from helpers import build, digits, trainer
from refused import refused

FREE = {"class_path": "PairwiseMasking", "init_args": {"colluders": 0}}
BY_CHANNEL = {"weights": ["PairwiseMasking"], "moments": ["Paillier"]}


def experiment(*backends: Any, **by_channel: Any) -> Asked:
    chosen = {"": [Chosen(cls, {}) for cls in backends]} if backends else {}
    return Asked(FedAvg, chosen | {name: [each] for name, each in by_channel.items()}, 3, {"model": "export"})


@pytest.mark.parametrize(
    ("policy", "asks", "key"),
    [
        ({}, experiment(Plain), ""),
        ({"methods": ["FedAvg"]}, experiment(), ""),
        ({"methods": ["fedlit.methods.FedAvg"]}, experiment(), ""),
        ({"methods": ["FedMMD"]}, experiment(), "methods"),
        ({"methods": ["other.FedAvg"]}, experiment(), "methods"),
        ({"methods": []}, experiment(), "methods"),
        ({"backends": ["PairwiseMasking"]}, experiment(PairwiseMasking), ""),
        ({"backends": ["PairwiseMasking"]}, experiment(Plain), "backends"),
        ({"backends": ["PairwiseMasking"]}, experiment(PairwiseMasking, Plain), "backends"),
        ({"backends": ["PairwiseMasking"]}, experiment(weights=Chosen(PairwiseMasking, {"colluders": 0})), "backends"),
        ({"backends": [FREE]}, experiment(weights=Chosen(PairwiseMasking, {"colluders": 0})), ""),
        ({"backends": [FREE]}, experiment(PairwiseMasking), "backends"),
        ({"backends": BY_CHANNEL}, experiment(weights=Chosen(PairwiseMasking), moments=Chosen(Paillier)), ""),
        ({"backends": BY_CHANNEL}, experiment(weights=Chosen(Paillier)), "backends"),
        ({"backends": BY_CHANNEL}, experiment(update=Chosen(PairwiseMasking)), "backends"),
        ({"backends": BY_CHANNEL}, experiment(Paillier), ""),
        ({"backends": BY_CHANNEL}, experiment(BFV), "backends"),
        ({"min_participants": 3}, experiment(), ""),
        ({"min_participants": 4}, experiment(), "min_participants"),
        ({"min_participants": 4}, Asked(FedAvg, {}), ""),
        ({"exports": ["model"]}, experiment(), ""),
        ({"exports": ["loggers"]}, experiment(), "exports"),
    ],
)
def test_an_experiment_is_checked_key_by_key(policy: Mapping[str, Any], asks: Asked, key: str) -> None:
    if not key:
        Policy(**policy).check(asks)
        return
    with refused(key, PolicyError) as caught:
        Policy(**policy, path="site.yaml").check(asks)
    assert "site.yaml" in str(caught.value)  # the way out
    assert "site.yaml" not in public_text(caught.value)


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("method: [FedAvg]", "policy"),
        ("- FedAvg", "policy"),
        ("", "policy"),
        ("methods:", "methods"),
        ("methods: [", "policy"),
        ("methods: FedAvg", "methods"),
        ("methods: [1]", "methods"),
        ("backends: Plain", "backends"),
        ("backends: {weights: Plain}", "backends"),
        ("backends: [{class_path: Plain, arguments: {}}]", "backends"),
        ("min_participants: 2.5", "min_participants"),
        ("min_participants: true", "min_participants"),
        ("min_participants: 0", "min_participants"),
        ("exports: [all]", "exports"),
        ("exports: false", "exports"),
    ],
)
def test_what_is_no_policy_allows_nothing(text: str, key: str, tmp_path: Path) -> None:
    (tmp_path / "policy.yaml").write_text(text)
    with refused(key, PolicyError):
        Policy.read(tmp_path / "policy.yaml")


def test_a_policy_that_is_missing_allows_nothing(tmp_path: Path) -> None:
    with refused("policy", PolicyError):
        Policy.read(tmp_path / "policy.yaml")


# ---------------------------------------------------------------- the experiment as the command reads it

TABLES = """
data: {class_path: CSVDomains, init_args: {clients: [a, b, c], classes: [n, y], label: y, target: c}}
model:
  class_path: FedAvg
  init_args: {extractor: {class_path: fedlit.models.MLP, init_args: {in_features: 2, hidden: [4]}}}
trainer: {max_epochs: 1, strategy: {class_path: fedlit.FederatedStrategy, init_args: {privacy: PairwiseMasking}}}
"""
STRICT = """
methods: [FedAvg]
backends: [PairwiseMasking]
min_participants: 3
exports: []
"""
ASKS = {
    "methods": ["--model=FedProx"],
    "backends": ["--trainer.strategy.init_args.privacy=null"],
    "min_participants": ["--data.clients=[a, c]"],
    "exports": ["--trainer.logger=WandbLogger"],
    "strategy": ["--trainer.strategy=ddp"],
}
MORE = {
    "backends": [
        ["--trainer.strategy.init_args.privacy=Plain"],
        ["--trainer.strategy.init_args.privacy.colluders=0"],
        ["--trainer.strategy.init_args.privacy={weights: {class_path: Plain}}"],
        ["--trainer.strategy.init_args.two_party=PlainAffine"],
        ["--trainer.strategy=federated"],
    ],
    "exports": [
        ["--trainer.callbacks+=RunRecord", "--trainer.callbacks.export=model.onnx"],
        ["--trainer.callbacks+=TargetPredictions"],
        ["--trainer.callbacks+=Artifacts", "--trainer.callbacks.predictions=false"],
        ["--trainer.callbacks+=Artifacts", "--trainer.callbacks.model=false"],
    ],
}
CASES = [*ASKS.items(), *((key, words) for key, several in MORE.items() for words in several)]


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Arguments of a site, whose table is not there, and of whose configuration nothing may be built."""
    (tmp_path / "tables.yaml").write_text(TABLES)
    (tmp_path / "policy.yaml").write_text(STRICT)

    def build(cli: FedlitCLI) -> None:
        assert not cli._run_classes, "data were read"

    monkeypatch.setattr(FedlitCLI, "instantiate_classes", build)
    return [f"--config={tmp_path / 'tables.yaml'}", f"--data.files={{a: {tmp_path / 'a.csv'}}}"]


class NoSeat(Seat):
    is_server = False

    def __init__(self, file: Path) -> None:
        self.policy = Policy.read(file)

    def open(self, facts: Mapping[str, Any]) -> Any:
        raise AssertionError("the server was called")


@pytest.mark.parametrize(("key", "words"), CASES, ids=[" ".join(words)[-60:] for _, words in CASES])
def test_a_configuration_is_refused_before_its_data_are_built(
    key: str, words: list[str], site: list[str], tmp_path: Path
) -> None:
    run = Experiment(normalise(["fit", *site, *words]), one_target=True)
    with refused(key, PolicyError):
        take_seat(run, NoSeat(tmp_path / "policy.yaml"))


def test_a_configuration_that_the_policy_allows_goes_on_to_its_data(site: list[str], tmp_path: Path) -> None:
    run = Experiment(normalise(["fit", *site]), one_target=True)
    Policy.read(tmp_path / "policy.yaml").check(asked(run.parsed.arguments))
    with pytest.raises(AssertionError, match="data were read"):
        take_seat(run, NoSeat(tmp_path / "policy.yaml"))


def test_join_names_the_key_and_calls_nobody(site: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The seat's file is found beside the configuration that names it, as certificates are."""
    pytest.importorskip("grpc")
    monkeypatch.chdir(tmp_path)
    make_certificates(tmp_path, "localhost", ["a"])
    files = "certificate: a.crt, key: a.key, ca: ca.crt, policy: policy.yaml"
    (tmp_path / "site.yaml").write_text(f"seat: {{server: 'localhost:1', {files}}}")
    line = refusal("join", *site, f"--config={tmp_path / 'site.yaml'}", "--model=FedProx")
    assert line.startswith("fedlit: PolicyError: methods must be one of ['FedAvg'], got 'FedProx'")
    line = refusal("join", *site, f"--config={tmp_path / 'site.yaml'}", "--targets=[all]")
    assert "is for one" in line


def test_a_job_of_flare_cannot_leave_the_sites_policy_out(
    site: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from fedlit.cli.command import main

    monkeypatch.setenv(TIMES, "1 1")
    monkeypatch.setenv(POLICY, str(tmp_path / "policy.yaml"))
    monkeypatch.setattr("fedlit.cli.seats.RelayedSender", lambda: None)
    with pytest.raises(SystemExit) as ended:
        main(["flare", "site", *site, "--trainer.strategy.init_args.privacy=Plain", "--seat.policy=null"])
    assert ended.value.code == 77
    assert "backends must be one of ['PairwiseMasking'], got 'Plain'" in capsys.readouterr().err


# ---------------------------------------------------------------- a run that is built


def test_a_run_of_a_script_is_refused_by_its_channels_before_the_server_is_called(tmp_path: Path) -> None:
    (tmp_path / "policy.yaml").write_text("backends: {weights: [PairwiseMasking]}")
    seat = NoSeat(tmp_path / "policy.yaml")
    strategy = {"seat": seat, "privacy": PairwiseMasking(colluders=0)}
    with pytest.raises(AssertionError, match="the server was called"):
        trainer(1, strategy=strategy).fit(build(FedAvg, digits()), digits())
    with refused("backends", PolicyError) as caught:  # what it sends on another channel is not allowed
        trainer(1, strategy=strategy).fit(build(FedMMD, digits(), degree=1), digits())
    assert "weights" in str(caught.value)
    (tmp_path / "policy.yaml").write_text("min_participants: 4")
    with refused("min_participants", PolicyError):
        trainer(1, strategy={"seat": NoSeat(tmp_path / "policy.yaml")}).fit(build(FedAvg, digits()), digits())
    assert FederatedStrategy(seat=seat).seat is seat
