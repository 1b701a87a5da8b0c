"""PublishedDigitFive, from small files with the arrays of the published ones."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.io import loadmat, savemat

from fedlit.data import DatasetLayoutError, DatasetNotFoundError, PublishedDigitFive
from fedlit.data.published_digits import COUNTS
from fedlit.papers.stand_ins import write_digit_five
from refused import refused

SIZES = (200, 60)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("digit_five")
    write_digit_five(path, SIZES)
    return path


@pytest.fixture(scope="module")
def module(folder):
    return PublishedDigitFive(str(folder), published=False)


def published(folder, domain, part):
    """Images (n, side, side, channels) and digits, read as the benchmark's own code does."""
    at = ("train", "test").index(part)
    if domain == "svhn":
        mat = loadmat(folder / f"svhn_{part}_32x32.mat")
        return np.moveaxis(mat["X"], -1, 0), mat["y"].squeeze() % 10
    if domain == "usps":
        cells = loadmat(folder / "usps_28x28.mat")["dataset"]
        return (cells[at][0] * 255).round().astype(np.uint8).transpose(0, 2, 3, 1), cells[at][1].squeeze()
    if domain == "syn":
        mat = loadmat(folder / "syn_number.mat")
        return mat[f"{part}_data"], mat[f"{part}_label"].squeeze()
    mat = loadmat(folder / ("mnist_data.mat" if domain == "mnist" else "mnistm_with_label.mat"))
    x = mat[f"{part}_32"][..., None] if domain == "mnist" else mat[part]
    return x, np.nonzero(mat[f"label_{part}"])[1]


@pytest.mark.parametrize("domain", [*COUNTS])
def test_images_and_digits_are_those_that_scipy_reads(module, folder, domain):
    split, y = module.split(domain), module.labels(domain)
    loaded = module.all_samples(domain)
    assert (loaded.x.dtype, loaded.x.shape) == (torch.uint8, (sum(SIZES), 3, 32, 32))
    both = [published(folder, domain, part) for part in ("train", "test")]
    x, digits = (np.concatenate(each) for each in zip(*both, strict=True))
    np.testing.assert_array_equal(y.numpy(), digits)
    for ours, theirs in zip(loaded.x[::20], np.broadcast_to(x, (*x.shape[:3], 3))[::20], strict=True):
        expected = np.asarray(Image.fromarray(theirs.copy()).resize((32, 32), Image.Resampling.BILINEAR))
        tolerance = 0 if theirs.shape[0] == 32 else 1  # of Pillow's 8 bits
        np.testing.assert_allclose(ours.permute(1, 2, 0).numpy(), expected, atol=tolerance)
    assert split.test.tolist() == list(range(SIZES[0], sum(SIZES)))
    assert sorted([*split.train.tolist(), *split.val.tolist()]) == list(range(SIZES[0]))
    held = torch.bincount(y[split.val]).tolist()  # of each class, but of the target
    assert held == [2] * 10 if domain != module.target else sum(held) == 20
    assert torch.equal(module.dataset(domain, "test")[5][0], loaded.x[SIZES[0] + 5] / 255)
    assert torch.equal(module.raw_inputs().network(loaded.x[:3]), loaded.x[:3] / 255)


def test_the_benchmarks_numbers_are_kept_of_each_part_in_its_class_shares(folder):
    given = {"published": False, "max_train": 100, "max_test": 40, "val_fraction": 0.0, "clients": ["mnist", "usps"]}
    module, again = (PublishedDigitFive(str(folder), **given, seed=seed) for seed in (0, 9))
    split, y = module.split("mnist"), module.labels("mnist")
    assert torch.bincount(y[split.train]).tolist() == [10] * 10
    assert torch.bincount(y[split.test]).tolist() == [4] * 10
    assert torch.equal(again.load("mnist").y, y)


def test_published_numbers_are_checked_and_missing_files_named(folder, tmp_path):
    with pytest.raises(DatasetLayoutError, match=r"must be 55000 in 'train_32'.*got 200") as caught:
        PublishedDigitFive(str(folder)).split("mnist")
    assert caught.value.argument == "published"
    write_digit_five(tmp_path)
    (tmp_path / "svhn_test_32x32.mat").unlink()
    with pytest.raises(DatasetNotFoundError, match=r"without \['svhn_test_32x32.mat'\]"):
        PublishedDigitFive(str(tmp_path))
    assert len(PublishedDigitFive(str(tmp_path), clients=["mnist", "usps"]).clients) == 2
    for argument in ("max_train", "max_test"):
        with refused(argument):
            PublishedDigitFive(str(folder), **{argument: 9})


BYTES = np.zeros((200, 28, 28, 3), dtype=np.uint8)
HOT = np.eye(10, dtype=np.uint8)[np.arange(200) % 10]


@pytest.mark.parametrize(
    ("argument", "changes"),
    [
        ("file", {"label_train": None}),
        ("train", {"train": BYTES[:, :20]}),
        ("train", {"train": BYTES.astype(float) - 1}),
        ("train", {"train": BYTES[:199]}),
        ("train", {"label_train": np.arange(200)[:, None] % 9}),
        ("train", {"label_train": np.arange(200)[:, None] % 10 + 1}),
        ("train", {"train": np.where(np.arange(200)[:, None, None, None] == 3, 1.5, BYTES / 255)}),
    ],
)
def test_a_file_of_another_version_is_refused(tmp_path, argument, changes):
    file = tmp_path / "mnistm_with_label.mat"
    arrays = {"train": BYTES, "label_train": HOT, "test": BYTES, "label_test": HOT} | changes
    savemat(file, {key: value for key, value in arrays.items() if value is not None})
    write_digit_five(tmp_path / "others")
    (tmp_path / "others" / "syn_number.mat").rename(tmp_path / "syn_number.mat")
    module = PublishedDigitFive(str(tmp_path), clients=["mnistm", "syn"], target="syn", published=False)
    with refused(str(file) if argument == "file" else argument, DatasetLayoutError):
        module.split("mnistm")
