"""Digits and HeartDisease, which ship with the package or its requirements."""

from __future__ import annotations

import csv
import math
from importlib import resources

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_digits, load_sample_images
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import cross_val_score

from fedlit.data import Digits, HeartDisease
from fedlit.data.digits import photo_patches, written_digits
from fedlit.data.heart import HOSPITALS
from refused import refused

# Digits.


@pytest.fixture(scope="module")
def digits():
    return Digits()


def everything(module, name):
    return module.all_samples(name).x, module.labels(name)


def test_handwritten_domains_share_no_digit_and_use_all():
    originals = torch.from_numpy(load_digits().images / 16).float().flatten(1)
    seen = []
    for part in range(3):
        x, y = written_digits(part)
        assert x.shape[1:] == (1, 8, 8)
        assert x.dtype == torch.float32
        assert y.dtype == torch.int64
        assert ((torch.bincount(y, minlength=10) - 59.9).abs() < 5).all()
        positions = torch.cdist(x.flatten(1), originals, compute_mode="donot_use_mm_for_euclid_dist").min(dim=1)
        assert (positions.values == 0).all()
        assert torch.equal(torch.from_numpy(load_digits().target)[positions.indices], y)
        seen += positions.indices.tolist()
    assert sorted(seen) == list(range(1797))  # no two digits of the data set are equal


def test_each_domain_is_in_the_unit_interval_and_the_same_in_every_run(digits):
    for name in ("clean", "blended", "fonts", "noisy"):
        x, y = everything(digits, name)
        assert 590 <= len(x) <= 610
        assert x.min() >= 0
        assert x.max() <= 1
        again = Digits(seed=3, clients=["clean", name] if name != "clean" else None, target="clean").load(name)
        assert torch.equal(again.x, x)
        assert torch.equal(again.y, y)


def test_blended_is_the_absolute_difference_of_patch_and_digit(digits):
    written, y = written_digits(1)
    x, labels = everything(digits, "blended")
    assert torch.equal(x, (0.5 * photo_patches(len(written)) - written).abs())
    assert torch.equal(labels, y)


def test_patches_are_cut_from_the_two_photographs():
    photos = [image.astype(float).sum(axis=2) / (3 * 255) for image in load_sample_images().images]
    found = [0, 0]
    for patch in photo_patches(20)[:, 0].numpy():
        best = []
        for photo in photos:  # each pixel of a patch averages 2x2 pixels, at any offset
            coarse = (photo[:-1, :-1] + photo[1:, :-1] + photo[:-1, 1:] + photo[1:, 1:]) / 4
            windows = np.lib.stride_tricks.sliding_window_view(coarse, (15, 15))[:, :, ::2, ::2]
            near = np.argwhere(np.abs(windows[..., 0, 0] - patch[0, 0]) < 1e-6)
            best.append(min((np.abs(windows[r, c] - patch).max() for r, c in near), default=1.0))
        assert min(best) < 1e-6
        found[int(np.argmin(best))] += 1
    assert min(found) > 0


def test_noise_has_its_level_clipped_in_its_domain_and_not_at_the_target():
    written, _ = written_digits(2)
    difference = Digits(noisy_std=0.1).load("noisy").x - written
    inside = (written > 0.4) & (written < 0.6)  # too far from both ends to be clipped
    assert difference[inside].std().item() == pytest.approx(0.1, rel=0.05)
    assert abs(difference[inside].mean().item()) < 0.01
    assert torch.equal(Digits(noisy_std=0.0).load("noisy").x, written)
    plain, noised = Digits(target="clean"), Digits(target="clean", noise_level=0.4)
    assert (noised.load("clean").x - plain.load("clean").x).std().item() == pytest.approx(0.4, rel=0.02)
    assert noised.load("clean").x.min() < -0.5
    assert torch.equal(plain.load("fonts").x, noised.load("fonts").x)


@pytest.mark.slow
def test_the_shifts_are_real_but_each_domain_can_be_learnt(digits):
    x, y = everything(digits, "clean")
    model = LogisticRegression(max_iter=2000).fit(x.flatten(1).numpy(), y.numpy())
    home = cross_val_score(LogisticRegression(max_iter=2000), x.flatten(1).numpy(), y.numpy(), cv=5).mean()
    assert home > 0.9
    for name in ("blended", "fonts", "noisy"):
        x, y = everything(digits, name)
        fall = home - model.score(x.flatten(1).numpy(), y.numpy())
        assert 0.10 < fall < 0.45, name
        own = cross_val_score(LogisticRegression(max_iter=2000), x.flatten(1).numpy(), y.numpy(), cv=5).mean()
        assert own > 0.65, name


@pytest.mark.parametrize("eta", [0.0, 0.1, 0.45, 0.5])
def test_label_shift_keeps_eta_of_the_first_three_classes_at_sources_and_the_rest_at_the_target(digits, eta):
    shifted = Digits(label_shift=eta)
    for name in ("clean", "fonts"):
        before = torch.bincount(everything(digits, name)[1], minlength=10)
        after = torch.bincount(shifted.load(name).y, minlength=10)
        first, others = (eta, 1 - eta) if name == "clean" else (1 - eta, eta)
        expected = torch.tensor([first] * 3 + [others] * 7) * before
        assert ((after - expected).abs() <= 0.5).all()
    assert len(shifted.train_dataloader()) > 0  # eta = 0 leaves no class in common, on purpose


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        *(("noisy_std", -1.0), ("noise_level", math.nan), ("photo_strength", 2.0), ("label_shift", 0.6)),
        *(("labels_per_source", number) for number in (0, 3)),
    ],
)
def test_levels_out_of_range_are_refused(argument, value):
    with refused(argument):
        Digits(**{"label_shift": 0.1, argument: value})  # of which labels_per_source must be left out


def test_digits_plot_shows_each_domain(digits):
    figure = digits.plot(num_samples=10)
    assert isinstance(figure, Figure)
    assert len(figure.axes) == 40
    assert [axis.get_title() for axis in figure.axes[:10]] == [str(digit) for digit in range(10)]
    assert [axis.get_ylabel().split("\n")[0] for axis in figure.axes[::10]] == digits.domain_names()
    with refused("num_samples"):
        digits.plot(num_samples=0)


# HeartDisease.


@pytest.fixture(scope="module")
def table():
    with (resources.files("fedlit.data") / "heart_disease_uci.csv").open(encoding="utf-8") as file:
        rows = list(csv.reader(file))
    return [dict(zip(rows[0], row, strict=True)) for row in rows[1:]]


def rows_of(table, hospital):
    return [row for row in table if row["dataset"] == HOSPITALS[hospital]]


def test_hospitals_have_their_patients_and_prevalence(table):
    module = HeartDisease(normalise="none")
    sizes = {"cleveland": 304, "hungary": 293, "switzerland": 123, "va_long_beach": 200}
    for name, size in sizes.items():
        ill = [float(int(row["num"]) > 0) for row in rows_of(table, name)]
        x, y = everything(module, name)
        assert len(ill) == len(x) == size
        assert y.tolist() == ill
    assert everything(module, "switzerland")[1].float().mean().item() == pytest.approx(115 / 123)


def test_features_without_normalisation_are_the_table_itself(table):
    module = HeartDisease(normalise="none")
    names = module.feature_names()
    assert module.in_features == len(names) == len(set(names)) == 38
    for hospital in HOSPITALS:
        x, _ = everything(module, hospital)
        for sample, row in zip(x.tolist(), rows_of(table, hospital), strict=True):
            patient = dict(zip(names, sample, strict=True))
            for column in ("age", "trestbps", "chol", "thalch", "oldpeak"):
                text = row[column]
                gone = text == "" or (column in ("chol", "trestbps") and float(text) == 0)
                assert patient[column] == (0.0 if gone else pytest.approx(float(text), rel=1e-6))
                assert patient.get(f"{column} missing", 0.0) == float(gone)
            for column in ("sex", "cp", "fbs", "restecg", "exang", "slope", "ca", "thal"):
                places = {key: value for key, value in patient.items() if key.startswith(f"{column}=")}
                assert places.pop(f"{column}={row[column] or 'missing'}") == 1.0
                assert not any(places.values())


def test_normalisation_uses_the_clients_own_training_split_and_nothing_else(table):
    module = HeartDisease()
    for hospital in HOSPITALS:
        x, _ = everything(module, hospital)
        assert x.isfinite().all()
        train = module.split(hospital).train.tolist()
        rows = rows_of(table, hospital)
        for place, column in enumerate(("age", "trestbps", "chol", "thalch", "oldpeak")):
            values = [float(row[column]) if row[column] else math.nan for row in rows]
            if column in ("chol", "trestbps"):
                values = [math.nan if value == 0 else value for value in values]
            known = [values[i] for i in train if not math.isnan(values[i])]
            if not known:
                assert (hospital, column) == ("switzerland", "chol")
                assert (x[:, place] == 0).all()
                continue
            mean, std = np.mean(known), np.std(known)
            expected = [0.0 if math.isnan(value) else (value - mean) / std for value in values]
            np.testing.assert_allclose(x[:, place].numpy(), expected, atol=1e-4)


def test_heart_rates_are_those_of_the_table_without_the_column_itself():
    module = HeartDisease(predict="heart_rate", normalise="none")
    table = resources.files("fedlit.data").joinpath("heart_disease_uci.csv").read_text(encoding="utf-8")
    rows = [row for row in csv.DictReader(table.splitlines()) if row["thalch"]]
    sizes = {name: len(everything(module, name)[1]) for name in module.domain_names()}
    assert sum(sizes.values()) == len(rows) == 865
    rates = torch.cat([140 + 25 * everything(module, name)[1] for name in module.domain_names()])
    assert sorted(rates.round().tolist()) == sorted(float(row["thalch"]) for row in rows)
    names = module.feature_names()
    assert len(names) == module.in_features == 36
    assert not [name for name in names if "thalch" in name]
    x, _ = everything(module, "cleveland")
    ages = [float(row["age"]) for row in rows if row["dataset"] == "Cleveland"]
    assert x[:, names.index("age")].tolist() == ages


@pytest.mark.parametrize("predict", ["disease", "heart_rate"])
def test_heart_plot_shows_what_is_missing(predict):
    *_, missing = HeartDisease(predict=predict).plot().axes
    texts = [text.get_text() for text in missing.texts]
    assert len(texts) == 13 * 4
    assert texts[2 * 4 + 2] == "100%"


def test_unknown_choices_are_refused():
    for argument in ("predict", "normalise"):
        with refused(argument):
            HeartDisease(**{argument: "global"})
