"""``num_threads="auto"``: what is chosen, and that a run is the one with that number."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from fedlit import FederatedStrategy
from fedlit.cli import main
from fedlit.data import FederatedLoader
from fedlit.methods import FedAvg
from fedlit.models import MLP
from fedlit.run import threads
from fedlit.run.loop import Rounds
from fedlit.run.threads import fewest, try_threads
from helpers import STATEFUL, build, digits, same, trainer, weights


@pytest.fixture(autouse=True)
def _two_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(threads, "_set", None)
    monkeypatch.setattr(threads, "_found", {})
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_the_fewest_that_are_nearly_as_fast_as_any_are_taken() -> None:
    assert fewest({8: 1.0, 4: 1.1, 1: 3.0}) == 4
    assert fewest({8: 1.0, 4: 1.3, 1: 3.0}) == 8
    assert fewest({8: 5.0, 4: 3.0, 1: 1.0}) == 1
    assert fewest({2: 1.0}) == 2


def test_steps_are_timed_with_all_threads_half_of_them_and_one() -> None:
    torch.set_num_threads(8)
    slow = {8: 0.003, 4: 0.001, 1: 0.006}
    seconds = try_threads(lambda: time.sleep(slow[torch.get_num_threads()]), 8)
    assert list(seconds) == [8, 4, 1]
    assert all(seconds[number] >= slow[number] for number in slow)
    assert fewest(seconds) == 4
    assert torch.get_num_threads() == 8


def test_a_long_step_takes_all_without_more_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_LONG", 0.01)
    monkeypatch.setattr(threads, "_ENOUGH", 0.001)
    calls = []
    assert list(try_threads(lambda: (calls.append(1), time.sleep(0.02)), 2)) == [2]
    assert len(calls) == 2
    assert torch.get_num_threads() == 2


def test_one_thread_is_tried_though_all_are_slow() -> None:
    """As where threads wait for each other, because other processes have the cores."""
    seconds = try_threads(lambda: time.sleep(0.001 if torch.get_num_threads() == 1 else 0.25), 2)
    assert fewest(seconds) == 1


def run(num_threads: Any, rounds: int = 2, checkpoint: str | None = None, **options: Any) -> Any:
    """A Trainer that has trained a network which draws random numbers."""
    data = digits()
    done = trainer(rounds, strategy={"num_threads": num_threads}, **options)
    done.fit(build(FedAvg, data, **STATEFUL), data, ckpt_path=checkpoint)
    return done


def same_weights(ours: Any, theirs: Any) -> bool:
    pairs = (
        (weights(ours.lightning_module, name), weights(theirs.lightning_module, name)) for name in ("clean", "fonts")
    )
    return all(same(one, other) for one, other in pairs)


def pretend(monkeypatch: pytest.MonkeyPatch, chosen: int) -> list[int]:
    """Let a number of threads seem to be the fastest; the numbers that were tried up to, once each."""
    tried: list[int] = []
    real = try_threads

    def timed(step: Any, most: int) -> dict[int, float]:
        real(step, most)
        tried.append(most)
        return {number: 1.0 if number == chosen else 9.0 for number in (1, 2)}

    monkeypatch.setattr(threads, "try_threads", timed)
    return tried


@pytest.mark.parametrize("chosen", [1, 2])
def test_a_run_is_the_one_with_the_number_that_was_chosen(chosen: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the last bit: the network that is tried is a copy, and takes nothing from the run's random streams."""
    expected = run(chosen)
    torch.set_num_threads(2)
    tried = pretend(monkeypatch, chosen)
    logged: list[str] = []
    monkeypatch.setattr(threads._log, "info", lambda text, *values: logged.append(text % values))
    assert same_weights(run("auto"), expected)
    assert tried == [2]
    assert torch.get_num_threads() == chosen
    assert [line.partition(":")[2].split(",")[0] for line in logged] == [f" {chosen}"]


def test_the_client_with_the_most_samples_in_a_batch_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where clients have one batch size, and all but one fewer samples than that."""
    shapes: list[Any] = []
    real = threads._step_of

    def seen(*given: Any) -> Any:
        step, form = real(*given)
        shapes.append(form[-1])
        return step, form

    monkeypatch.setattr(threads, "_step_of", seen)
    data = {"a": digit_set(5), "b": digit_set(300), "target": digit_set(7)}
    module = FedAvg([*data], "target", 10, MLP(64, [16]))
    done = trainer(1, strategy={"num_threads": "auto"})
    done.fit(module, FederatedLoader(data, batch_size=64))
    assert shapes == [(64, 64)]


def digit_set(number: int) -> TensorDataset:
    return TensorDataset(torch.rand(number, 64), torch.arange(number) % 10)


def test_a_run_goes_on_with_the_number_in_its_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, 1)
    run("auto", 1).save_checkpoint(tmp_path / "first.ckpt")
    torch.set_num_threads(2)
    tried = pretend(monkeypatch, 2)
    resumed = run("auto", 2, str(tmp_path / "first.ckpt"))
    assert not tried
    assert torch.get_num_threads() == 1
    assert same_weights(resumed, run(1, 2))


def test_nothing_is_tried_where_there_is_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = pretend(monkeypatch, 1)
    torch.set_num_threads(1)
    run("auto", 1)
    assert not tried


def test_the_next_run_has_all_threads_to_choose_from(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pretend(monkeypatch, 1) == []
    run("auto", 1)
    assert torch.get_num_threads() == 1
    tried = pretend(monkeypatch, 2)
    run("auto", 1)
    assert not tried, "runs of an experiment take the same"
    assert torch.get_num_threads() == 1
    threads._found.clear()
    run("auto", 1)
    assert tried == [2]
    assert torch.get_num_threads() == 2


def test_networks_that_cannot_be_tried_by_themselves_take_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(step: Any, most: int) -> dict[int, float]:
        raise ValueError("Expected more than 1 value per channel when training")

    monkeypatch.setattr(threads, "try_threads", fails)
    run("auto", 1)
    assert torch.get_num_threads() == 2


def test_a_number_in_a_checkpoint_is_capped_by_what_there_is() -> None:
    threads.set_threads(64)
    assert torch.get_num_threads() == 2
    rounds = Rounds()
    rounds.load_state_dict({"num_threads": "many"})
    assert rounds.state_dict() == {}


@pytest.mark.parametrize("wrong", [0, "many", 1.5])
def test_other_numbers_are_refused(wrong: Any) -> None:
    with pytest.raises((ValueError, TypeError), match="num_threads"):
        FederatedStrategy(num_threads=wrong)


def test_the_command_chooses_unless_it_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    for given, shown in (((), "auto"), (("--trainer.strategy.num_threads=3",), "3")):
        with pytest.raises(SystemExit):
            main(
                [
                    "fit",
                    "--config=data/digits",
                    "--model=FedAvg",
                    "--config=configs/privacy/masking.yaml",
                    *given,
                    "--print_config",
                ]
            )
        assert f"num_threads: {shown}\n" in capsys.readouterr().out
