"""HAPT, PAMAP2 and Widar3: small files of the published layouts, and the real data of HAPT."""

from __future__ import annotations

import re
import warnings
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.io import loadmat, savemat
from sklearn.linear_model import LogisticRegression
from torch.optim import Adam

from fedlit.data import HAPT, PAMAP2, DatasetLayoutError, DatasetNotFoundError, Widar3
from fedlit.data.pamap2 import CHANNELS, INTENSITIES
from fedlit.data.widar3 import SIX_GESTURES
from fedlit.methods import SourceOnly
from fedlit.models import WidarNet
from helpers import samples_of, trainer
from refused import refused
from sensor_files import write_hapt, write_pamap2, write_widar3

# ---------------------------------------------------------------- HAPT


def test_hapt_of_the_archive_is_hapt_of_an_npz(tmp_path: Path) -> None:
    arrays = write_hapt(tmp_path)
    data = HAPT(str(tmp_path), normalise="none", seed=0)
    assert data.domain_names() == ["person1", "person2", "person10"]
    assert data.classes == ["walking", "upstairs", "downstairs", "sitting", "standing", "lying"]
    np.savez(tmp_path / "hapt.npz", **arrays)
    other = HAPT(str(tmp_path / "hapt.npz"), normalise="none", seed=0)
    for name in data.domain_names():
        raw, stored = data.load(name), other.load(name)
        torch.testing.assert_close(raw.x, stored.x, atol=1e-3, rtol=0)
        assert torch.equal(raw.y, stored.y)
    rows = np.flatnonzero((arrays["person"] == 2) & (arrays["recording"] == 0))
    labels = arrays["label"][rows]
    first = next(
        start for start in range(0, 900, 64) if 0 < labels[start] < 7 and np.ptp(labels[start : start + 128]) == 0
    )
    expected = (arrays["x"][rows[first : first + 128]] * arrays["scale"]).T
    np.testing.assert_allclose(other.load("person2").x[0].numpy(), expected, atol=1e-6)
    assert data.windows("person2").rate == 50.0
    assert "stand_to_sit" in HAPT(str(tmp_path), transitions=True).classes
    assert HAPT(str(tmp_path), classes=["sitting", "lying"]).num_classes == 2


@pytest.mark.parametrize(
    ("file", "text", "match"),
    [
        ("labels.txt", "1 1 5 1 99999\n", r"labels.txt.*99999"),
        ("labels.txt", "1 1 0 1 100\n", r"labels.txt.*from 1 to 12, got 0"),
        ("labels.txt", "1 1 13 1 100\n", r"labels.txt.*from 1 to 12, got 13"),
        ("labels.txt", "1 1 1.6 1 100\n", r"labels.txt.*whole numbers"),
        ("labels.txt", "1 1 1 1 100 1 1 1 1 100\n", r"labels.txt.*5 numbers in each line, got 10"),
        ("acc_exp01_user01.txt", "1 2 3 4 5 6\n" * 450, r"acc_exp01_user01.txt.*3 numbers in each line, got 6"),
        ("acc_exp01_user01.txt", "0.1 0.2\n", "acc_exp01_user01.txt"),
        ("gyro_exp01_user01.txt", "0.1 0.2 0.3\n", "gyro_exp01_user01.txt"),
    ],
)
def test_hapt_names_the_file_that_is_wrong(tmp_path: Path, file: str, text: str, match: str) -> None:
    write_hapt(tmp_path)
    (tmp_path / "RawData" / file).write_text(text)
    with pytest.raises(DatasetLayoutError, match=match):
        HAPT(str(tmp_path)).load("person1")


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    for module in (HAPT, PAMAP2, Widar3):
        with pytest.raises(DatasetNotFoundError, match="get it from"):
            module(str(tmp_path / "gone"))
        with pytest.raises(DatasetLayoutError):
            module(str(tmp_path))


@pytest.mark.slow
def test_regression_of_features_of_hapt_is_as_good_as_known(shared_data: Path) -> None:
    """README of the shared data: 96.4 on average over ten people, features standardised by each person."""
    given = {"features": True, "normalise": "zscore", "magnitudes": {"acc": ["acc_x", "acc_y", "acc_z"]}}
    data = HAPT(str(shared_data / "hapt.npz"), transductive=True, val_fraction=0.0, test_fraction=0.0, seed=0, **given)  # type: ignore[arg-type]
    names = data.domain_names()
    assert names == [f"person{number}" for number in range(1, 31)]
    x = {name: data._domain(name).x.numpy() for name in names}
    y = {name: data.labels(name).numpy() for name in names}
    assert sum(map(len, y.values())) == 10017
    accuracies = []
    for target in ("person1", "person2", "person3"):
        others = [name for name in names if name != target]
        model = LogisticRegression(max_iter=60)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # which stops before the last digits
            model.fit(np.concatenate([x[name] for name in others]), np.concatenate([y[name] for name in others]))
        accuracies.append(model.score(x[target], y[target]))
    assert np.mean(accuracies) > 0.95


# ---------------------------------------------------------------- PAMAP2


def test_pamap2_reads_the_protocol(tmp_path: Path) -> None:
    numbers = write_pamap2(tmp_path)
    data = PAMAP2(str(tmp_path), seed=0, normalise="none", window=1.0, stride=0.5, fill=0.2)
    assert data.domain_names() == ["subject101", "subject102", "subject105"]
    assert len(data.channel_names()) == 40
    assert not any("orientation" in name for name in data.channel_names())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        windows = data.windows("subject101")
    assert "chest_gyro_y" in str(caught[0].message)  # missing for longer than is filled
    assert windows.x.isfinite().all()
    assert windows.rate == 100.0
    table = numbers["subject101"]
    ankle = CHANNELS.index("ankle_acc16_x") + 2
    number, start = 3, int(windows.start[3])
    expected = table[start : start + 100, ankle]
    found = windows.x[number, data.channel_names().index("ankle_acc16_x")].numpy()
    np.testing.assert_allclose(found, expected, atol=1e-5)
    activity = {4: "walking", 1: "lying", 24: "rope_jumping"}[int(table[start, 1])]
    assert data.classes[int(windows.y[number])] == activity
    pulse = windows.x[number, 0].numpy()  # filled between the beats that are known
    known = ~np.isnan(table[start : start + 100, 2])
    np.testing.assert_allclose(pulse[known], table[start : start + 100, 2][known], atol=1e-4)
    assert not np.isnan(pulse).any()


def test_pamap2_by_intensity_and_with_all_channels(tmp_path: Path) -> None:
    write_pamap2(tmp_path)
    data = PAMAP2(str(tmp_path / "Protocol"), labels="intensity", window=1.0, fill=2.0, channels=[*CHANNELS], seed=0)
    assert data.classes == ["light", "moderate", "vigorous"]
    assert data.input_shape == (52, 100)
    assert set(data.labels("subject102").tolist()) == {0, 1, 2}
    assert sorted(name for group in INTENSITIES.values() for name in group) == sorted(PAMAP2(str(tmp_path)).classes)


@pytest.mark.parametrize("kept", [53, 20])
def test_a_line_of_pamap2_that_lacks_numbers_is_named(tmp_path: Path, kept: int) -> None:
    write_pamap2(tmp_path)
    file = tmp_path / "Protocol" / "subject101.dat"
    lines = file.read_text().splitlines()
    lines[7] = " ".join(lines[7].split()[:kept])
    file.write_text("\n".join(lines) + "\n")
    with pytest.raises(DatasetLayoutError, match=rf"subject101.dat.*54 numbers, got {kept} in line 8"):
        PAMAP2(str(tmp_path)).load("subject101")


def test_pamap2_names_a_file_of_other_columns(tmp_path: Path) -> None:
    write_pamap2(tmp_path)
    (tmp_path / "Protocol" / "subject101.dat").write_text("0.0 1 2 3\n")
    with pytest.raises(DatasetLayoutError, match=r"subject101.dat.*54"):
        PAMAP2(str(tmp_path)).load("subject101")


# ---------------------------------------------------------------- Widar3


def test_widar3_reads_profiles_by_room_and_user(tmp_path: Path) -> None:
    write_widar3(tmp_path)
    (tmp_path / "20181130-VS" / "user5" / "user5-1-1-1-9-1-1e-07-100-20-100000-L0.mat").write_bytes(b"")
    data = Widar3(str(tmp_path), seed=0)
    assert data.domain_names() == ["room1_user5", "room1_user10", "room2_user1", "room3_user3"]
    assert data.classes == list(SIX_GESTURES)
    assert data.input_shape == (30, 20, 20)
    with pytest.warns(UserWarning, match="1 empty files"):
        domain = data.load("room1_user5")
    assert domain.x.shape == (24, 30, 20, 20)
    file = tmp_path / "20181130-VS" / "user5" / "user5-5-1-1-2-1-1e-07-100-20-100000-L0.mat"
    stored = loadmat(file)["velocity_spectrum_ro"]
    expected = [(x - x.min()) / (x.max() - x.min()) for x in np.moveaxis(stored, 2, 0)]
    names = sorted(path.name for path in file.parent.iterdir() if path.stat().st_size)
    sample = names.index(file.name)
    assert data.classes[int(domain.y[sample])] == "draw_o"
    np.testing.assert_allclose(domain.x[sample, -len(expected) :].numpy(), np.stack(expected), atol=1e-6)
    assert not domain.x[sample, : -len(expected)].any()


GESTURE_4 = {
    "20181109-VS": "slide", "20181115-VS": "draw_o_vertical", "20181112-VS": "draw_4", "20181121-VS": "draw_n",
    "20181128-VS": "draw_o", "20181205-VS": "draw_n",
}  # fmt: skip
"""As in the tables of the data set's README, of user 3."""


def test_the_number_of_a_gesture_means_another_one_on_another_date(tmp_path: Path) -> None:
    write_widar3(tmp_path, {**dict.fromkeys(GESTURE_4, (3,)), "20181130-VS": (3,)}, 4)
    every = Widar3(str(tmp_path), classes=[*dict.fromkeys([*GESTURE_4.values(), "clap"])], domain=["room"])
    counted = {name: int(n) for name, n in zip(every.classes, torch.bincount(every.labels("room1")), strict=False)}
    # number 4 on 20181109 and 20181130; 3 on 20181109, 20181115 and 20181130; slide is number 1 on 20181121
    assert counted["slide"] == 3 * 4
    assert counted["clap"] == 3 * 4
    assert counted["draw_4"] == counted["draw_o_vertical"] == counted["draw_n"] == 4
    assert torch.bincount(every.labels("room2"))[every.classes.index("draw_o")] == 2 * 4  # 20181128, and 20181205 as 2


def test_widar3_by_location_and_with_users_as_one_target(tmp_path: Path) -> None:
    write_widar3(tmp_path)
    data = Widar3(str(tmp_path), domain=["location"], rooms=[1], seed=0)
    assert data.domain_names() == ["location1", "location2"]
    assert len(data.labels("location2")) == 2 * 12
    groups = {"others": ["room2_user1", "room3_user3"]}
    data = Widar3(str(tmp_path), groups=groups, target="others", seed=0)
    assert [client.name for client in data.clients] == ["room1_user5", "room1_user10", "others"]
    assert len(data.labels("others")) == 2 * 24
    assert Widar3(str(tmp_path), users=[5, 10]).domain_names() == ["room1_user5", "room1_user10"]
    with refused("groups['x']"):
        Widar3(str(tmp_path), groups={"x": ["room9_user1"]})


@pytest.mark.slow
def test_gestures_are_learnt(tmp_path: Path) -> None:
    write_widar3(tmp_path)
    data = Widar3(str(tmp_path), val_fraction=0.0, frames=15, seed=0)
    network = WidarNet(width=16, dropout=0.2)
    module = SourceOnly(data.clients, data.target, data.num_classes, network, optimizer=partial(Adam, lr=0.005))
    trainer(15).fit(module, data)
    x, y = samples_of(data, data.target, "test")
    assert float((module.replicas[data.target].eval()(x).argmax(dim=1) == y).float().mean()) > 0.9


@pytest.mark.parametrize("folder", ["20181211_VS", "20190101-VS"])
def test_files_of_widar3_that_fit_no_date_are_told(tmp_path: Path, folder: str) -> None:
    write_widar3(tmp_path, {"20181211-VS/6-link": (7, 8), "20181130-VS": (5, 10)})
    number = len([*(tmp_path / "20181211-VS").rglob("*.mat")])
    (tmp_path / "20181211-VS").rename(tmp_path / folder)
    with pytest.warns(UserWarning, match=rf"left out {number} files.*{folder}"):
        Widar3(str(tmp_path)).domain_names()


def test_a_file_of_widar3_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    write_widar3(tmp_path, {"20181211-VS/6-link": (7, 8)})
    file = next(iter(sorted((tmp_path / "20181211-VS" / "6-link" / "user8").iterdir())))
    file.write_bytes(b"no matlab file at all")
    with pytest.raises(DatasetLayoutError, match=re.escape(file.name)):
        Widar3(str(tmp_path)).load("room3_user8")
    savemat(file, {"velocity_spectrum_ro": np.zeros((30, 20, 2))})
    with pytest.raises(DatasetLayoutError, match=r"\(30, 20, 2\)"):
        Widar3(str(tmp_path)).load("room3_user8")
