"""PrivacyReport in real runs: what it says of each channel, what it writes, and how it is printed."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from scipy import stats
from scipy.optimize import brentq

from fedlit import Run
from fedlit.callbacks import PrivacyReport
from fedlit.callbacks.privacy_report import NOT_PROTECTED, ChannelReport, Report, report
from fedlit.federation import Open, Summed
from fedlit.methods import FedAvg
from fedlit.privacy import GaussianMechanism, PairwiseMasking, Plain
from small_federation import CLIENTS, Blobs, EveryMetric, build, trainer


class Gossip(FedAvg):
    """FedAvg whose clients also send each other three numbers."""

    channels = (Summed("weights", "weights of the network", up="learners"), Open("prototypes", "three numbers"))

    def on_round_end(self, run: Run) -> None:
        super().on_round_end(run)
        local = {client.name: {"mean": torch.zeros(3)} for client in self.federation.local_clients}
        self.federation.exchange("prototypes", local)


def train(folder: Path, method: type[FedAvg] = FedAvg, rounds: int = 2, **strategy: Any) -> Any:
    module = build(method, weighting="uniform")
    trainer(rounds, [PrivacyReport()], folder, strategy=strategy).fit(module, Blobs())
    return module


def written(folder: Path) -> Any:
    return json.loads((folder / "privacy.json").read_text())


def printed(what: Report, width: int) -> list[str]:
    console = Console(width=width)
    with console.capture() as capture:
        console.print(what)
    return capture.get().splitlines()


def channel_report(name: str, **kwargs: Any) -> ChannelReport:
    defaults: dict[str, Any] = {"description": PairwiseMasking(colluders=0).describe(), "bytes_up": 1, "bytes_down": 2}
    defaults |= {"bytes_keys": 0, "clip_norm": None, "noise_multiplier": None}
    return ChannelReport(name, **(defaults | kwargs))


def test_messages_from_client_to_client_have_no_description(tmp_path, capsys):
    module = train(tmp_path, Gossip, privacy={"weights": Plain()})
    channels = {channel["channel"]: channel for channel in written(tmp_path)["channels"]}
    assert set(channels) == {"weights", "prototypes"}, "watched numbers are not the method's"
    assert channels["prototypes"] == {
        "channel": "prototypes",
        "description": None,
        "bytes_up": module.federation.ledger.bytes_by_channel()["prototypes"],
        "bytes_down": 0,
        "bytes_keys": 0,
        "clip_norm": None,
        "noise_multiplier": None,
        "sent": "in the clear: three numbers, from everyone to everyone, every round",
    }
    assert channels["weights"]["description"]["backend"] == "Plain"
    assert "none: from client to client in the clear" in capsys.readouterr().out


def test_key_material_is_counted_with_its_channel_and_apart_from_its_messages(tmp_path):
    module = train(tmp_path, privacy=PairwiseMasking(colluders=0))
    (channel,) = written(tmp_path)["channels"]
    sent = module.federation.ledger.bytes_by_channel()
    assert channel["channel"] == "weights"
    assert channel["bytes_up"] + channel["bytes_down"] == sent["weights"]
    assert channel["bytes_keys"] == sent["weights/keys"] > 0
    assert channel["description"] == asdict(PairwiseMasking(colluders=0).describe_round(3))


def test_the_file_holds_the_report_and_what_nothing_protects(tmp_path):
    path = tmp_path / "deep" / "book.json"
    module = build(weighting="uniform")
    trainer(1, [PrivacyReport(str(path), print_table=False)], tmp_path).fit(module, Blobs())
    assert path.read_text() == report(module.federation).to_json() + "\n"
    saved = json.loads(path.read_text())
    assert set(saved) == {"channels", "epsilon_message", "epsilon_sum", "not_protected"}
    assert saved["epsilon_message"] is saved["epsilon_sum"] is None
    assert saved["not_protected"] == list(NOT_PROTECTED)
    assert any("server is part of process 0" in line for line in NOT_PROTECTED)
    assert any("Checkpoints have weights and optimiser states" in line for line in NOT_PROTECTED)


def test_around_a_server_the_report_states_what_that_can_read(tmp_path):
    module = train(tmp_path, rounds=1)
    alone = report(module.federation).not_protected
    module.federation.transport.losable = True  # as of one with sites around it
    lines = " ".join(report(module.federation).not_protected)
    assert alone == NOT_PROTECTED
    assert "joined by TLS" in lines
    assert "process 0" not in lines


def test_privacy_losses_are_those_of_the_accountant_after_every_round(tmp_path):
    noise, delta, rounds = 3.0, 1e-4, 2
    module, seen = build(weighting="uniform"), EveryMetric()
    strategy = {"privacy": PairwiseMasking(colluders=0), "differential_privacy": GaussianMechanism(0.5, noise, delta)}
    trainer(rounds, [PrivacyReport(), seen], tmp_path, strategy=strategy).fit(module, Blobs())

    def epsilon(multiplier: float, releases: int) -> float:  # Balle and Wang 2018, theorem 8
        mu, cdf = math.sqrt(releases) / multiplier, stats.norm.cdf
        return brentq(lambda e: cdf(mu / 2 - e / mu) - math.exp(e) * cdf(-mu / 2 - e / mu) - delta, 0, 100, xtol=1e-12)

    together = noise * math.sqrt(len(CLIENTS) - 1)  # equal shares: the sum has the noise of all sources
    for done, row in enumerate(seen.rows, start=1):
        assert row["privacy/epsilon"] == pytest.approx(epsilon(noise, done), rel=1e-5)
        assert row["privacy/epsilon_sum"] == pytest.approx(epsilon(together, done), rel=1e-5)
    saved = written(tmp_path)
    assert saved["epsilon_message"] == pytest.approx(epsilon(noise, rounds), rel=1e-9)
    assert saved["epsilon_sum"] == pytest.approx(epsilon(together, rounds), rel=1e-9)
    (channel,) = saved["channels"]
    assert (channel["clip_norm"], channel["noise_multiplier"]) == (0.5, noise)


def test_an_infinite_loss_is_null_in_the_file_and_said_in_print():
    endless = Report([channel_report("weights")], epsilon_message=math.inf, epsilon_sum=2.5)
    saved = json.loads(endless.to_json())
    assert (saved["epsilon_message"], saved["epsilon_sum"]) == (None, 2.5)
    assert "epsilon inf by message, 2.5 by sum, at most" in printed(endless, 80)


@pytest.mark.parametrize(("width", "side_by_side"), [(80, 1), (120, 2)])
def test_no_line_runs_past_the_terminal_and_no_column_is_too_narrow_to_read(width, side_by_side):
    names = ["weights", "prototypes", "features", "aligner"]
    lines = printed(Report([channel_report(name) for name in names], None, None), width)
    assert max(len(line) for line in lines) <= width
    headers = [line.split() for line in lines if line.split() and set(line.split()) <= set(names)]
    assert headers == [names[first : first + side_by_side] for first in range(0, len(names), side_by_side)]
    words = " ".join(" ".join(lines).split())
    for text in ("collusion", "Not protected:", "Checkpoints have weights and optimiser states in the clear"):
        assert text in words


def test_a_method_that_sends_nothing_says_so():
    assert printed(Report([], None, None), 80)[0] == "privacy report: nothing is sent"


def test_a_file_with_half_a_mechanism_is_refused(tmp_path):
    train(tmp_path, rounds=1)
    record = json.loads((tmp_path / "privacy.json").read_text())
    record["channels"][0]["clip_norm"] = 1.0
    with pytest.raises(ValueError, match="clip_norm or noise_multiplier"):
        Report.from_json(json.dumps(record))
