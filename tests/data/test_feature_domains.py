"""FeatureDomains: .npz files and folders of .mat files."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scipy.io import loadmat, savemat
from scipy.stats import norm, rankdata

from fedlit.data import DatasetLayoutError, DatasetNotFoundError, FeatureDomains, feature_domains
from fedlit.data.raw_inputs import RankNetwork
from refused import refused


def arrays(**changes: Any):
    rng = np.random.default_rng(0)
    content = {}
    for name, n in (("amazon", 60), ("dslr", 40)):
        content[f"{name}_x"] = rng.integers(0, 256, (n, 6)).astype(np.uint8)
        content[f"{name}_y"] = (np.arange(n) % 3).astype(np.uint8)
    content["classes"] = np.array(["bike", "mug", "mouse"])
    content.update(changes)
    return {key: value for key, value in content.items() if value is not None}


@pytest.fixture
def npz(tmp_path):
    def save(**changes: Any):
        path = tmp_path / "features.npz"
        np.savez(path, **arrays(**changes))
        return str(path)

    return save


def read_here(path):
    """What `read_mat` gives, without the process of its own in which it reads."""
    return {name: value for name, value in loadmat(path).items() if not name.startswith("__")}


@pytest.fixture
def mat(tmp_path, monkeypatch):
    monkeypatch.setattr(feature_domains, "read_mat", read_here)

    def save(features="fts", labels="labels", first=1):
        content = arrays()
        folder = tmp_path / "surf"
        folder.mkdir()
        for name in ("dslr", "amazon"):
            y = (content[f"{name}_y"] + first).astype(np.uint8).reshape(-1, 1)
            savemat(folder / f"{name}.mat", {features: content[f"{name}_x"], labels: y})
        return folder

    return save


def everything(module, name):
    return module.all_samples(name).x, module.labels(name)


def test_features_are_read_as_they_stand_and_bytes_do_not_wrap(npz):
    module = FeatureDomains(npz(), normalise="none")
    assert module.domain_names() == ["amazon", "dslr"]
    assert module.target == "dslr"
    assert module.classes == ["bike", "mug", "mouse"]
    assert module.in_features == 6
    for name in ("amazon", "dslr"):
        x, y = everything(module, name)
        assert x.dtype == torch.float32
        assert y.dtype == torch.int64
        np.testing.assert_array_equal(x.numpy(), arrays()[f"{name}_x"].astype(float))
        np.testing.assert_array_equal(y.numpy(), arrays()[f"{name}_y"])


def test_unit_rows_have_length_one_and_keep_their_direction(npz):
    raw = arrays()["amazon_x"].copy()
    raw[5] = 0
    x, _ = everything(FeatureDomains(npz(amazon_x=raw)), "amazon")
    lengths = np.sqrt((raw.astype(float) ** 2).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(x.numpy(), raw / np.maximum(lengths, 1), atol=1e-6)
    assert (x[5] == 0).all()


def test_zscore_uses_the_clients_own_training_split(npz):
    raw = arrays()["amazon_x"].astype(np.float32)
    raw[:, 2] = 0.1  # a constant, in which a computed deviation may be a rounding error
    module = FeatureDomains(npz(amazon_x=raw), normalise="zscore")
    x, _ = everything(module, "amazon")
    train = module.split("amazon").train.numpy()
    mean, std = raw[train].mean(axis=0), raw[train].std(axis=0)
    std[2] = 1
    np.testing.assert_allclose(x.numpy(), (raw - mean) / std, atol=1e-4)
    assert x[:, 2].abs().max() < 1e-6


def test_zscores_of_length_one(npz):
    module, whole = (FeatureDomains(npz(), normalise=how) for how in ("zscore_unit", "zscore"))
    x, standardised = (everything(each, "amazon")[0].numpy() for each in (module, whole))
    lengths = np.sqrt((standardised**2).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(x, standardised / lengths, atol=1e-6)


def test_ranks_are_those_among_the_clients_own_training_split(npz):
    raw = arrays()["amazon_x"].astype(np.float32)
    raw[:, 2] = 0.1
    raw[::3, 1] = 128  # ties
    module = FeatureDomains(npz(amazon_x=raw), normalise="ranks")
    x, _ = everything(module, "amazon")
    train = module.split("amazon").train.numpy()
    scores = norm.ppf(rankdata(raw[train], axis=0) / (len(train) + 1))
    np.testing.assert_allclose(x.numpy()[train], scores / np.linalg.norm(scores, axis=1, keepdims=True), atol=1e-6)


def test_ranks_between_training_samples_and_beyond_them():
    network = RankNetwork(torch.tensor([[0.0, 5.0], [4.0, 5.0], [1.0, 5.0]]))
    score = float(norm.ppf(3 / 4))  # of ranks 1, 2 and 3 of 3: -score, 0 and score
    x = torch.tensor([[2.0, 5.0], [0.25, 5.0], [-9.0, 9.0], [99.0, -9.0], [1.0, 5.0]])
    expected = torch.tensor([score / 3, -0.75 * score, -score, score, 0.0])
    torch.testing.assert_close(network(x)[:, 0], expected.sign())  # the second feature is constant
    both = RankNetwork(torch.tensor([[0.0, 0.0], [4.0, 1.0], [1.0, 2.0]]))
    found = both(torch.stack([x[:, 0], torch.full((5,), 2.0)], dim=1))
    torch.testing.assert_close(found[:, 0] / found[:, 1], expected / score)


@pytest.mark.parametrize("normalise", ["unit", "zscore", "zscore_unit", "ranks"])
def test_an_exported_model_normalises_features_by_the_network_of_the_data(npz, normalise):
    data = FeatureDomains(npz(), normalise=normalise)
    raw = data.raw_inputs()
    assert torch.equal(raw.network(data.load("dslr").x), data.all_samples("dslr").x)
    assert raw.network(raw.sample).isfinite().all()


def test_classes_can_be_named_and_others_are_left_out(npz):
    module = FeatureDomains(npz(), classes=["mouse", "bike"], normalise="none")
    assert module.classes == ["mouse", "bike"]
    assert module.num_classes == 2
    x, y = everything(module, "dslr")
    old = arrays()["dslr_y"]
    np.testing.assert_array_equal(x.numpy(), arrays()["dslr_x"][old != 1])
    assert y.tolist() == [0 if label == 2 else 1 for label in old if label != 1]


def test_a_file_without_class_names_counts_them(npz):
    assert FeatureDomains(npz(classes=None)).classes == ["0", "1", "2"]
    assert FeatureDomains(npz(classes=np.array([b"bike", b"mug", b"mouse"]))).classes == ["bike", "mug", "mouse"]


@pytest.mark.parametrize(
    ("features", "labels", "reader"), [("feas", "label", feature_domains.read_mat), ("features", "labels", read_here)]
)
def test_mat_folders_give_the_same_as_npz(npz, mat, features, labels, reader, monkeypatch):
    monkeypatch.setattr(feature_domains, "read_mat", reader)
    ours = FeatureDomains(str(mat(features, labels)), normalise="zscore")
    theirs = FeatureDomains(npz(), normalise="zscore")
    assert ours.domain_names() == ["amazon", "dslr"]
    assert ours.classes == ["0", "1", "2"]
    for name in ours.domain_names():
        assert all(torch.equal(a, b) for a, b in zip(everything(ours, name), everything(theirs, name), strict=True))


NAMELESS = {"classes": None}
WRONG = [
    *(("dslr_x", {"dslr_x": np.full((40, 6), value)}) for value in (np.nan, 1e30)),
    *(("dslr_x", {"dslr_x": x}) for x in (np.zeros((40, 2, 3)), np.ones((40, 6), complex))),
    *(("dslr_y", {"dslr_y": np.array(y)}) for y in ([0.5] * 40, [0.0] * 39 + [np.nan], ["a"] * 40)),
    ("labels", {"dslr_x": np.zeros((39, 6))}),
    ("labels", {"amazon_y": np.arange(60) % 3 + 1, "dslr_y": np.arange(40) % 3 + 1} | NAMELESS),
    ("labels", {"dslr_y": np.full(40, 2**62)} | NAMELESS),
    ("shapes", {"dslr_x": np.zeros((40, 5))}),
    *(("classes", {"classes": np.array(["bike", "mug", name])}) for name in ("bike", "Mug")),
    ("classes", {"dslr_y": np.arange(40) % 2}),
    ("PATH", {"images": np.zeros((3, 2))}),
    ("PATH", {"dslr_y": np.array([None] * 40)}),
    ("PATH", {"classes": np.frombuffer(b"\xff" * 8, "<U1")}),  # characters that do not exist
]


@pytest.mark.parametrize(("argument", "changes"), WRONG, ids=range(len(WRONG)))
def test_a_file_laid_out_wrongly_is_refused(npz, argument, changes):
    path = npz(**changes)
    with refused(argument.replace("PATH", path), DatasetLayoutError):
        FeatureDomains(path, target_labels=1.0).train_dataloader()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"amazon_y": None}, "60 of 60 samples of source 'amazon' have no label"),
        *(({"dslr_y": np.arange(40) % 4 + shift}, r"must lie in 0\.\.2") for shift in (-2, 0)),
        ({"dslr_y": np.arange(40) % 3 + 1}, "y - 1"),
    ],
)
def test_labels_that_are_not_those_of_the_classes_are_refused(npz, changes, message):
    with pytest.raises(DatasetLayoutError, match=message):
        FeatureDomains(npz(**changes), target_labels=1.0).train_dataloader()


def test_classes_that_are_alike_may_be_named(npz):
    path = npz(classes=np.array(["bike", "mug", "Mug"]))
    assert FeatureDomains(path, classes=["mug", "Mug"]).classes == ["mug", "Mug"]
    with refused("classes", DatasetLayoutError):
        FeatureDomains(path, classes=["mug", "bike"])


@pytest.mark.parametrize("wanted", [["bike", "mug", "mouse"], ["mouse", "bike"]])
@pytest.mark.parametrize("label", [-2, -5])
def test_negative_labels_are_refused_also_where_classes_are_chosen(npz, wanted, label):
    path = npz(dslr_y=np.where(np.arange(40) % 3 == 2, label, np.arange(40) % 3))
    with pytest.raises(DatasetLayoutError, match=r"must lie in 0\.\.\d"):
        FeatureDomains(path, classes=wanted, target_labels=1.0).train_dataloader()


def test_a_source_that_counts_from_one_beside_others_is_told(npz):
    numbers = {f"{name}_y": np.arange(n) % 3 for name, n in (("amazon", 60), ("dslr", 40))}
    more = {"caltech_x": arrays()["dslr_x"], "caltech_y": np.arange(40) % 2 + 1, "classes": None}
    data = FeatureDomains(npz(**numbers, **more), target="dslr", target_labels=1.0)
    with pytest.warns(UserWarning, match=r"samples of caltech have no label 0.*subtract 1"):
        data.train_dataloader()


def test_labels_that_begin_at_one_can_be_named(npz):
    path = npz(amazon_y=np.arange(60) % 2 + 1, dslr_y=np.arange(40) % 2 + 1, classes=None)
    data = FeatureDomains(path, classes=["1", "2"], target_labels=1.0)
    assert len(data.train_dataloader()) > 0
    assert data.labels("amazon").tolist() == [0, 1] * 30


def test_a_missing_path_says_where_it_looked(tmp_path):
    with pytest.raises(DatasetNotFoundError, match="nowhere"):
        FeatureDomains(str(tmp_path / "nowhere.npz"))


def test_files_of_other_types_are_refused(tmp_path, mat):
    (tmp_path / "x.npz").write_bytes(b"not a zip file")
    np.savez(tmp_path / "y.npz", features=np.zeros(3))
    folder = mat()
    (tmp_path / "empty").mkdir()
    savemat(folder / "webcam.mat", {"fts": np.zeros((4, 6)), "labels": np.arange(4)})
    for argument, path in (
        *(("path", path) for path in (tmp_path / "empty", folder / "dslr.mat")),
        *((str(tmp_path / name), tmp_path / name) for name in ("x.npz", "y.npz")),
        (str(folder / "webcam.mat"), folder),  # labels that count from 0
    ):
        with refused(argument, DatasetLayoutError):
            FeatureDomains(str(path))


@pytest.mark.parametrize(
    "content", [{"x": np.zeros((4, 6)), "labels": np.ones(4)}, {"fts": np.zeros((6, 4)), "labels": np.ones(4)}]
)
def test_mat_files_laid_out_wrongly_are_refused(tmp_path, monkeypatch, content):
    monkeypatch.setattr(feature_domains, "read_mat", read_here)
    savemat(tmp_path / "webcam.mat", content)
    with refused(str(tmp_path / "webcam.mat"), DatasetLayoutError):
        FeatureDomains(str(tmp_path))


@pytest.mark.parametrize(
    ("argument", "value"), [("normalise", "l2"), ("classes", ["cup", "mug"]), ("classes", ["mug", "mug"])]
)
def test_arguments_that_cannot_be_are_refused(npz, argument, value):
    with refused(argument):
        FeatureDomains(npz(), **{argument: value})


def test_a_target_without_labels_has_none(npz):
    unlabelled = FeatureDomains(npz(dslr_y=None), transductive=True, target="dslr")
    x, y = everything(unlabelled, "dslr")
    assert len(x) == 40
    assert y.tolist() == [-1] * 40
    assert unlabelled.dataset("dslr", "test").labelled_indices.tolist() == []
    assert len(unlabelled.train_dataloader()) > 0
    with refused("target_labels"):
        FeatureDomains(npz(dslr_y=None), target_labels=3).train_dataloader()


def test_a_target_with_some_labels_keeps_those_and_chooses_among_them(npz):
    y = np.where(np.arange(40) < 12, np.arange(40) % 3, -1)
    module = FeatureDomains(npz(dslr_y=y), target_labels=1.0, val_fraction=0.0, test_fraction=0.0)
    shown = module.dataset("dslr", "train").y
    assert shown.tolist() == y.tolist()
    kept = FeatureDomains(npz(dslr_y=y), classes=["mouse", "bike"], target_labels=1.0, val_fraction=0, test_fraction=0)
    again = kept.dataset("dslr", "train").y  # mouse was 2 and bike 0; mugs, of label 1, are left out
    assert again.tolist() == [{2: 0, 0: 1, -1: -1}[label] for label in y.tolist() if label != 1]


def test_a_folder_of_files_is_read_as_one_file(tmp_path):
    content = arrays()
    folder = tmp_path / "features"
    folder.mkdir()
    for name in ("dslr", "amazon"):
        own = {key: value for key, value in content.items() if key.startswith(name) or key == "classes"}
        np.savez(folder / f"site-{name}.npz", **own)
    np.savez(tmp_path / "whole.npz", **content)
    apart, whole = FeatureDomains(str(folder)), FeatureDomains(str(tmp_path / "whole.npz"))
    assert apart.domain_names() == ["amazon", "dslr"]
    assert apart.classes == whole.classes
    for name in ("amazon", "dslr"):
        assert all(torch.equal(*pair) for pair in zip(everything(apart, name), everything(whole, name), strict=True))
    (folder / "site-dslr.npz").unlink()  # on another machine
    alone = FeatureDomains(str(folder), clients=["amazon", "dslr"], target="dslr")
    assert torch.equal(everything(alone, "amazon")[0], everything(whole, "amazon")[0])
    with pytest.raises(DatasetNotFoundError, match="no data of client 'dslr'"):
        everything(alone, "dslr")


@pytest.mark.parametrize(
    ("argument", "changes"),
    [
        ("amazon", {"amazon_x": np.zeros((2, 6)), "amazon_y": np.zeros(2)}),
        ("classes", {"classes": np.array(["mug", "bike", "mouse"])}),
    ],
)
def test_files_of_a_folder_that_do_not_fit_together_are_refused(tmp_path, argument, changes):
    content = arrays()
    np.savez(tmp_path / "a.npz", **{key: content[key] for key in ("amazon_x", "amazon_y", "classes")})
    np.savez(tmp_path / "b.npz", **{key: content[key] for key in ("dslr_x", "dslr_y", "classes")} | changes)
    with refused(argument, DatasetLayoutError):
        FeatureDomains(str(tmp_path))
