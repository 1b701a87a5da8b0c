"""RoundProgressBar: lines in a file, one bar on a terminal."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from fedlit import Run
from fedlit.callbacks import OracleAccuracy, RoundProgressBar
from fedlit.run.component import Component
from refused import slow
from small_federation import Blobs, build, trainer

LINE = re.compile(
    r"round (\d+)(/\d+)?( \| target score -?\d\.\d\d)?( \| loss \d+\.\d\d)? \| ([\d.]+) MB( \| ETA \d+:\d\d)?"
)


def bar_trainer(rounds: int, folder: Path, callbacks: Any = (), **kwargs: Any) -> pl.Trainer:
    return trainer(rounds, [RoundProgressBar(), *callbacks], folder, enable_progress_bar=True, **kwargs)


def lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("round")]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_file_gets_a_line_every_tenth_of_the_rounds(tmp_path, capsys):
    module, rounds = build(), 25
    bar_trainer(5, tmp_path, strategy={"rounds_per_epoch": 5, "local_steps": 1}).fit(module, Blobs())
    shown = lines(capsys.readouterr().out)
    found = [LINE.fullmatch(line) for line in shown]
    assert all(found), shown
    # the first round of each tenth that is over
    due = sorted({-(-rounds * tenth // 10) for tenth in range(1, 11)})
    assert [int(match[1]) for match in found if match] == due
    assert shown[-1].startswith(f"round {rounds}/{rounds} | target score ")
    assert "ETA" in shown[0]
    assert "ETA" not in shown[-1]
    score = float(module.trainer.callback_metrics["target/score"])
    assert f"target score {score:.2f} | loss {float(module.trainer.callback_metrics['train/loss']):.2f}" in shown[-1]


def test_every_line_shows_the_score_of_its_round(tmp_path, capsys):
    scores: list[float] = []

    class Scores(pl.Callback):
        def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            scores.append(float(trainer.callback_metrics["target/score"]))

    bar_trainer(4, tmp_path, [Scores()]).fit(build(), Blobs())
    shown = [re.search(r"score ([-\d.]+)", line)[1] for line in lines(capsys.readouterr().out)]
    assert shown == [f"{score:.2f}" for score in scores]


def test_max_steps_and_an_endless_run_are_counted(tmp_path, capsys):
    bar_trainer(-1, tmp_path, max_steps=12).fit(build(), Blobs())  # 4 steps a round
    assert [line.split(" | ")[0] for line in lines(capsys.readouterr().out)] == [f"round {i}/3" for i in (1, 2, 3)]
    stop = EarlyStopping("round", stopping_threshold=11, mode="max", patience=100)
    bar_trainer(-1, tmp_path, [stop]).fit(build(), Blobs())
    shown = [line.split(" | ")[0] for line in lines(capsys.readouterr().out)]
    assert shown[0] == "round 10"
    assert len(shown) == 2, "and where it stopped"


def test_it_needs_neither_the_strategy_nor_validation(tmp_path, capsys):
    run = bar_trainer(2, tmp_path, federated=False, limit_val_batches=0)
    run.fit(build(weighting="uniform"), Blobs())
    shown = lines(capsys.readouterr().out)
    assert [line.split(" | ")[0] for line in shown] == ["round 1/2", "round 2/2"]
    assert "score" not in shown[0]


def test_other_processes_and_evaluation_show_nothing(tmp_path, capsys):
    run = bar_trainer(2, tmp_path, [OracleAccuracy()])
    run.test(build(), Blobs(), verbose=False)
    run.validate(build(), Blobs(), verbose=False)
    run.progress_bar_callback.disable()
    run.fit(build(), Blobs())
    assert capsys.readouterr().out == ""


def test_a_terminal_gets_one_bar_and_prints_stay_whole(tmp_path, monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")

    class Talks(pl.Callback):
        def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            pl_module.print("hello", trainer.current_epoch, sep="-")

    bar_trainer(3, tmp_path, [Talks()]).fit(build(), Blobs())
    assert sys.stdout is terminal, "the stream is given back"
    plain = re.sub(r"\x1b\[[^a-zA-Z]*[a-zA-Z]", "", terminal.getvalue()).replace("\r", "\n")
    assert "round 0/3" in plain
    assert "round 3/3 | target score" in plain
    assert plain.count("hello-2") == 1
    assert "━" in plain


def test_a_bar_is_refreshed_ten_times_a_second_at_most(tmp_path, monkeypatch):
    from rich.progress import Progress

    refreshes = []
    original = Progress.refresh
    monkeypatch.setattr(Progress, "refresh", lambda self: (refreshes.append(1), original(self))[1])
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setattr("fedlit.callbacks.round_progress_bar._SECONDS_BETWEEN_REFRESHES", 1000.0)
    bar_trainer(10, tmp_path).fit(build(), Blobs())
    few = len(refreshes)
    monkeypatch.setattr("fedlit.callbacks.round_progress_bar._SECONDS_BETWEEN_REFRESHES", 0.0)
    bar_trainer(10, tmp_path).fit(build(), Blobs())
    assert len(refreshes) - few >= 10
    assert few <= 6, "at the start and the end"


def test_an_error_gives_the_terminal_back(tmp_path, monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)

    class Fails(pl.Callback, Component):
        def on_round_end(self, run: Run) -> None:
            raise RuntimeError("lost")

    with pytest.raises(RuntimeError, match="lost"):
        bar_trainer(2, tmp_path, [Fails()]).fit(build(), Blobs())
    assert sys.stdout is terminal


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
@pytest.mark.parametrize(("steps", "first"), [(3, 1), slow(8, 3)])
def test_the_first_round_after_a_resume_is_shown_wherever_the_run_goes_on(tmp_path, capsys, steps, first):
    """Rounds of 4 steps: 3 are within a round, 8 at the end of one."""
    saving = ModelCheckpoint(tmp_path, filename="mid", every_n_train_steps=steps, save_top_k=-1)
    trainer(-(-steps // 4), [saving], tmp_path, enable_checkpointing=True).fit(build(), Blobs())
    capsys.readouterr()
    bar_trainer(4, tmp_path).fit(build(), Blobs(), ckpt_path=str(tmp_path / "mid.ckpt"))
    shown = [line.split(" | ")[0] for line in lines(capsys.readouterr().out)]
    assert shown == [f"round {done}/4" for done in range(first, 5)]
