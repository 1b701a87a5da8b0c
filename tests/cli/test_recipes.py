"""Recommended configurations: they fit the data that they are for, and are what they say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml
from sklearn.linear_model import LogisticRegression
from torch import Tensor

from commands import refusal, summaries
from fedlit.cli import main
from fedlit.data import HeartDisease
from fedlit.functional import normal_scores

CONFIGS = Path(__file__).parents[2] / "configs"
PHONES = "experiments/hapt_features"
DECAY = 5e-4
"""Weight decay of the recipes."""


def summary() -> dict[str, Any]:
    (only,) = summaries()
    return only


@pytest.mark.slow
def test_the_classifier_of_all_sources_is_that_of_their_pooled_samples():
    """scikit-learn as oracle: two classes of weights w and -w, whose penalty is half that of their difference."""
    main(["fit", "--config=data/heart_disease", "--config=recipes/tables", "--model.refine=false"])
    (path,) = Path("runs").rglob("*.ckpt")
    state = torch.load(path, weights_only=False)["clients"]["va_long_beach"]["weights"]
    weight, bias = state["classifier.weight"], state["classifier.bias"]
    data = HeartDisease(target="va_long_beach", transductive=True, val_fraction=0.0, test_fraction=0.0)
    data.setup("fit")
    sources = [name for name in data.domain_names() if name != "va_long_beach"]
    x = torch.cat([torch.stack([x for x, _ in data.all_samples(name)]) for name in sources]).double()
    y = torch.cat([data.labels(name) for name in sources])
    ones = torch.cat([x, torch.ones(len(x), 1)], dim=1)  # the bias is penalised, too
    oracle = LogisticRegression(C=2 / (DECAY * len(x)), fit_intercept=False, tol=1e-10, max_iter=10_000)
    oracle.fit(ones.numpy(), y.numpy())
    difference = torch.cat([weight[1] - weight[0], (bias[1] - bias[0])[None]]).double()

    def objective(w: Tensor) -> float:
        return float(F.binary_cross_entropy_with_logits(ones @ w, y.double()) + DECAY / 4 * w.square().sum())

    least = objective(torch.from_numpy(oracle.coef_[0]))
    assert least < objective(difference) < least + 2e-3
    assert objective(torch.zeros(39, dtype=torch.float64)) > least + 0.2


@pytest.mark.slow
def test_sources_of_features_count_by_the_square_root_of_their_samples():
    """scikit-learn as oracle, with samples weighted by hand: sources of 100 and 25 count 10 to 5."""
    generator = torch.Generator().manual_seed(0)
    labels = {"a": [0] * 90 + [1] * 10, "b": [0] * 10 + [1] * 15, "c": [0, 1] * 30}
    arrays = {}
    for name, own in labels.items():
        y = torch.tensor(own)
        x = torch.randn(len(y), 8, generator=generator) + F.one_hot(y, 8)
        arrays |= {f"{name}_x": x.numpy(), f"{name}_y": y.numpy()}
    np.savez("domains.npz", **arrays)
    words = ["--data=fedlit.data.FeatureDomains", "--data.path=domains.npz", "--data.target=c"]
    main(["fit", *words, "--config=recipes/features", "--model.refine=false"])
    (path,) = Path("runs").rglob("*.ckpt")
    state = torch.load(path, weights_only=False)["clients"]["c"]["weights"]
    weight, bias = state["classifier.weight"], state["classifier.bias"]
    x = torch.cat([F.normalize(normal_scores(torch.from_numpy(arrays[f"{name}_x"])), dim=1) for name in "ab"]).double()
    y = torch.tensor(labels["a"] + labels["b"])
    shares = torch.tensor([2 / 300] * 100 + [1 / 75] * 25)
    ones = torch.cat([x, torch.ones(len(x), 1)], dim=1)  # the bias is penalised, too
    oracle = LogisticRegression(C=2 / DECAY, fit_intercept=False, tol=1e-10, max_iter=10_000)
    oracle.fit(ones.numpy(), y.numpy(), sample_weight=shares.numpy())
    difference = torch.cat([weight[1] - weight[0], (bias[1] - bias[0])[None]]).double()
    torch.testing.assert_close(difference, torch.from_numpy(oracle.coef_[0]), atol=0.01, rtol=0.01)


def test_refined_predictions_of_features_are_as_sure_as_they_are_right(shared_data: Path):
    """Of Office-Caltech: regression alone is far too cautious."""
    file = shared_data / "office_caltech10_efficientnet_lite0.npz"
    words = ["--config=data/office_caltech_features", f"--data.path={file}", "--data.target=webcam"]
    for refine in ("true", "false"):
        main(["fit", *words, "--config=recipes/features", f"--model.refine={refine}"])
    refined, before = summaries()
    errors = []
    for run in (refined, before):
        counts, confidences, accuracies = np.array(run["oracle_reliability"]).T
        errors.append(float((counts * abs(confidences - accuracies)).sum() / counts.sum()))
        assert errors[-1] == pytest.approx(run["oracle_ece"], abs=0.02)  # of other bins
    assert errors[0] < 0.05
    assert errors[1] > 0.1
    assert refined["oracle_accuracy"] > before["oracle_accuracy"]


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--config=recipes/features", "--data=fedlit.data.Digits"], "data (normalise, transductive, "),
        (["--config=recipes/networks", "--config=data/digits"], "data (transductive, test_fraction)"),
    ],
)
def test_a_recipe_before_its_data_is_told_apart(words, part):
    line = refusal("fit", *words)
    assert f"sets arguments of {part}" in line
    assert "put --data, or the configuration that has it, before it" in line


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedrf_tca", "fedrf_tca_closed_form", "fed_jda", "fed_analytic"])
def test_methods_that_build_on_given_features_find_their_width(method):
    words = ["--model.extractor=fedlit.models.Features", "--trainer.max_epochs=1"]
    main(["fit", "--config=data/digits", f"--config=methods/{method}", *words])
    assert summary()["rounds"] == 1
    (checkpoint,) = Path("runs").glob("*/version_0/checkpoints/*.ckpt")
    main(["test", f"--config={checkpoint.parents[1] / 'config.yaml'}", f"--ckpt_path={checkpoint}"])


def test_the_recipe_for_signals_is_that_of_the_experiment_on_phones():
    read = {name: yaml.safe_load((CONFIGS / f"{name}.yaml").read_text()) for name in ("recipes/signals", PHONES)}
    recipe, experiment = (read[name] for name in ("recipes/signals", PHONES))
    for key in ("path", "target", "magnitudes"):  # of the data
        del experiment["data"]["init_args"][key]
    assert recipe["data"] == experiment["data"]["init_args"]
    del experiment["model"]["init_args"]["extractor"]["init_args"]  # the number of features, which the data have
    assert recipe["model"] == experiment["model"]


def test_missing_values_of_a_table_have_a_mark_that_the_classifier_reads():
    """Where a number is missing tells the class, and its mean does not: without marks half would be wrong."""
    Path("tables").mkdir()
    generator = torch.Generator().manual_seed(0)
    for name in ("north", "east", "south"):
        ill, noise = torch.arange(80) % 2, torch.randn(80, 2, generator=generator)
        rows = zip(ill.tolist(), noise.tolist(), strict=True)
        lines = [f"{'' if y else round(a, 3)},{b:.3},{y}" for y, (a, b) in rows]
        Path(f"tables/{name}.csv").write_text("\n".join(["marker,age,ill", *lines]) + "\n")
    words = ["--data=CSVDomains", "--data.files=tables", "--data.label=ill", "--data.target=south"]
    main(["fit", *words, "--config=recipes/tables"])
    assert summary()["oracle_accuracy"] == 1.0
