"""Choosing a method and a round by trust: from what runs leave, and in runs."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from fedlit.callbacks import TrustedRound, Validators
from fedlit.callbacks.report import RunFolder
from fedlit.callbacks.selection import TRUST, Candidate, as_json, members_of, select
from fedlit.methods import FedRFTCA
from small_federation import Blobs, EveryMetric, build, trainer
from summaries import summary


def left(method, curve, target="fonts", seed=0, name=None):
    config: dict[str, object] = {
        "model.class_path": f"fedlit.methods.{method}",
        "data.init_args.target": target,
        "seed_everything": seed,
    }
    finished = None if name is None else summary(name, target, None, seed)
    return RunFolder(method, finished, config, {TRUST: curve} if curve else {}, {}, None, None, {}, [])


def test_the_most_trusted_round_of_the_most_trusted_method_is_taken():
    (found,) = select(
        {
            "a": left("SourceOnly", {1: 0.2, 3: 0.1}),
            "b": left("FedMMD", {1: 0.3, 3: 0.4, 5: 0.4}),
            "c": left("FedDAN", {1: 0.392}),
            "d": left("FADA", {}),
        }
    )
    assert found.chosen == Candidate("FedMMD", 3, 0.4, "b")
    assert [each.method for each in found.candidates] == ["FedMMD", "FedDAN", "SourceOnly"]
    assert (found.without, found.in_doubt) == (["FADA"], False)
    assert str(found) == (
        "selected for fonts (seed 0): FedMMD after round 3, trust 0.400, in 'b'. Next: FedDAN after round 1, 2% less, "
        "too little to be sure of. Without a score: FADA"
    )


@pytest.mark.parametrize(
    "curves",
    [
        [{1: 0.0004}, {1: 0.0001, 2: 0.005}],
        [{1: math.nan}, {1: 0.001, 2: math.nan}],
    ],
)
def test_where_trust_is_near_0_no_winner_is_named(curves):
    (found,) = select({name: left(name, curve) for name, curve in zip(("SourceOnly", "FedMMD"), curves, strict=True)})
    assert found.chosen is None
    assert not found.in_doubt
    text = str(found)
    assert text.startswith("nothing is selected for fonts (seed 0): the highest trust is 0")
    assert "models that have learnt nothing reach 0.005 by chance" in text
    assert "Until then SourceOnly is the safe one." in text
    assert "FedMMD" not in text
    assert json.loads(as_json([found]))[0]["chosen"] is None


def test_members_of_a_combination_match_the_sources_classes_or_of_two_know_the_sources_samples():
    runs = {name: left(name, {1: trust}) for name, trust in (("FedMMD", 0.4), ("FedDAN", 0.05), ("FADA", 0.03))}
    for name, known in (("FedMMD", 0.9), ("FedDAN", 0.71), ("FADA", 0.69)):
        runs[name].curves["source/acc"] = {0: 1.0, 1: known}
    for name, match in (("FedMMD", 0.5), ("FedDAN", 0.8)):
        runs[name].curves["validator/class_means"] = {0: 0.9, 1: match}
    (found,) = select(runs)
    assert [each.match for each in found.candidates] == [0.5, 0.8, None]
    assert [each.method for each in members_of(found, 10)] == ["FedDAN", "FADA"]  # 0.5 is less than 0.7 times 0.8
    assert [each.method for each in members_of(found, 2)] == ["FedMMD", "FedDAN"]  # 0.19 is less than 0.5 times 0.4
    runs["FedMMD"].curves["validator/class_means"] = {1: 0.57}
    (found,) = select(runs)
    assert [each.method for each in members_of(found, 10)] == ["FedMMD", "FedDAN", "FADA"]


def refined(run, how):
    return dataclasses.replace(run, config={**run.config, "model.init_args.refine": how})


def test_a_refined_model_is_neither_the_safe_one_nor_that_which_adapts_nothing():
    recipe = refined(left("SourceOnly", {1: 0.001}, name="recipe"), "predictions")
    runs = {"SourceOnly": left("SourceOnly", {1: 0.001}), "recipe": recipe, "FedAvg": left("FedAvg", {1: 0.001})}
    (found,) = select(runs)
    assert found.safe == "SourceOnly"
    assert select({"recipe": recipe, "FedAvg": runs["FedAvg"]})[0].safe == "FedAvg"
    close = {"FedMMD": left("FedMMD", {1: 0.4}), "recipe": refined(left("SourceOnly", {1: 0.39}), "predictions")}
    assert select(close)[0].chosen == Candidate("FedMMD", 1, 0.4, "FedMMD")


def test_of_two_classes_the_one_that_adapts_nothing_is_taken():
    """In the hospitals those that trust took were 5.9 points below it on average (benchmarks/combining.py)."""

    def of_two(run):
        return dataclasses.replace(run, summary=summary(run.method, "fonts", None, classes=["ill", "well"]))

    runs = {name: of_two(left(name, {1: trust})) for name, trust in (("FedMMD", 0.4), ("SourceOnly", 0.1))}
    (found,) = select(runs)
    assert (found.chosen, found.in_doubt) == (Candidate("SourceOnly", 1, 0.1, "SourceOnly"), True)
    assert str(found).endswith(
        "FedMMD has 0.400, which says little of two classes: in doubt the one that adapts nothing"
    )
    (found,) = select({"FedMMD": runs["FedMMD"], "FedDAN": of_two(left("FedDAN", {1: 0.1}))})
    assert found.chosen == Candidate("FedMMD", 1, 0.4, "FedMMD")
    assert str(found).endswith("75% less. Of two classes trust says little: compare with SourceOnly")
    (found,) = select({name: of_two(left(name, {1: t})) for name, t in (("FedMMD", 0.1), ("SourceOnly", 0.4))})
    assert str(found).endswith("Next: FedMMD after round 1, 75% less")
    (found,) = select({name: of_two(left(name, {1: 0.001})) for name in ("FedMMD", "SourceOnly")})
    assert found.chosen is None


def test_where_all_methods_train_predictions_to_be_certain_none_is_chosen():
    (found,) = select({"SHOT": left("SHOT", {1: 0.9}), "FedMME": left("FedMME", {1: 0.8})})
    assert found.chosen is None
    assert str(found) == (
        "nothing is selected for fonts (seed 0): all methods train predictions to be certain, which trust takes for a "
        "good sign. Compare them with one that does not, such as SourceOnly, which is the safe one"
    )


def test_a_method_that_trains_on_what_trust_measures_is_not_ranked():
    runs = {name: left(name, {1: trust}) for name, trust in (("SHOT", 0.9), ("FedMMD", 0.4), ("FedDAN", 0.1))}
    (found,) = select(runs)
    assert found.chosen == Candidate("FedMMD", 1, 0.4, "FedMMD")
    assert [each.method for each in found.candidates] == ["FedMMD", "FedDAN", "SHOT"]
    assert str(found).endswith("75% less. Not ranked, as they train predictions to be certain: SHOT")
    assert select(runs | {"FedAvg": refined(left("FedAvg", {1: 0.8}), "network")})[0].chosen == found.chosen
    adabn = left("AdaBN", {1: 0.8})  # takes statistics alone, unless it mixes them and lowers entropy
    mixed = dataclasses.replace(adabn, config={**adabn.config, "model.init_args.mixing": "learned"})
    for run, name in ((adabn, "AdaBN"), (mixed, "FedMMD")):
        chosen = select(runs | {"AdaBN": run})[0].chosen
        assert chosen is not None
        assert chosen.method == name
    (alone,) = select({"SHOT": runs["SHOT"]})
    assert alone.chosen is not None  # there is nothing to compare


def test_a_number_that_is_not_finite_is_no_trust():
    (found,) = select({"a": left("FedMMD", {1: math.inf, 2: 0.2, 3: math.nan}), "b": left("FedDAN", {1: math.nan})})
    assert found.chosen == Candidate("FedMMD", 2, 0.2, "a")
    assert found.without == ["FedDAN"]


def test_what_adapts_nothing_is_known_by_its_class_whatever_its_name():
    """An entry of compare may have a name of its own; one that is called SourceOnly is not one for that."""
    (found,) = select({"a": left("SourceOnly", {1: 0.39}, name="no adaptation"), "b": left("FedMMD", {1: 0.4})})
    assert found.in_doubt
    assert found.chosen == Candidate("no adaptation", 1, 0.39, "a")
    (found,) = select({"a": left("FedDAN", {1: 0.39}, name="SourceOnly"), "b": left("FedMMD", {1: 0.4})})
    assert found.chosen == Candidate("FedMMD", 1, 0.4, "b")


@pytest.mark.parametrize(("trust", "chosen"), [(0.379, "FedMMD"), (0.381, "SourceOnly")])
def test_in_doubt_the_one_that_adapts_nothing_is_taken(trust, chosen):
    (found,) = select({"a": left("SourceOnly", {1: trust}), "b": left("FedMMD", {1: 0.4})})
    assert found.chosen.method == chosen
    assert found.in_doubt == ("in doubt" in str(found)) == (chosen == "SourceOnly")


def test_each_target_and_seed_has_a_selection_of_its_own():
    runs = {
        "a": left("FedMMD", {1: 0.4}),
        "b": left("FedMMD", {1: 0.1}, target="noisy"),
        "c": left("FedDAN", {1: 0.2}, target="noisy"),
        "d": left("FedDAN", {2: 0.3}, seed=1),
        "e": left("FedDAN", {}, target="clean"),
    }
    found = select(runs)
    assert [(each.target, each.seed, each.chosen.run) for each in found] == [
        ("fonts", "0", "a"), ("noisy", "0", "c"), ("fonts", "1", "d"),
    ]  # fmt: skip
    assert [row["chosen"]["round_idx"] for row in json.loads(as_json(found))] == [1, 1, 2]
    assert select({"e": runs["e"]}) == []


def run(folder: Path, module: Any, rounds: int) -> tuple[TrustedRound, list[dict[str, float]]]:
    seen, best = EveryMetric(), TrustedRound()
    trainer(rounds, [Validators(["trust"]), seen, best], folder, enable_checkpointing=True).fit(module, Blobs())
    return best, seen.rows


def test_the_checkpoint_is_that_of_the_most_trusted_round(tmp_path):
    best, rows = run(tmp_path, build(), 4)
    scores = [row[TRUST] for row in rows]
    at = max(range(4), key=scores.__getitem__)
    assert Path(best.best_model_path).name == f"trusted-epoch={at}.ckpt"
    assert torch.load(best.best_model_path, weights_only=True)["epoch"] == at


def test_validations_without_a_score_are_passed_over(tmp_path):
    module = build(FedRFTCA, num_frequencies=8, num_components=4, classifier_period=3)
    best, rows = run(tmp_path, module, 4)
    assert [TRUST in row for row in rows] == [False, False, False, True]
    assert Path(best.best_model_path).name == "trusted-epoch=3.ckpt"
