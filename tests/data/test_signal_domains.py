"""SignalDomains: time series by client, from arrays, .npz files and tables."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from fedlit.data import DatasetLayoutError, DatasetNotFoundError, SignalDomains
from fedlit.data.signals.recordings import Windows
from fedlit.data.signals.splits import overlaps
from fedlit.methods import SourceOnly
from fedlit.models import Features, Recurrent, ResNet1D, SmallCNN1D
from helpers import samples_of, trainer
from refused import refused, slow
from signal_files import arrays, write


def made(content=None, **arguments: Any):
    arguments = {"domain": "person", "window": 0.5, "stride": 0.25, "seed": 0} | arguments
    return SignalDomains(arrays() if content is None else content, **arguments)


def test_windows_are_those_of_a_loop():
    content = arrays()
    data = made(content, normalise="none")
    assert data.domain_names() == ["a", "b", "c"]
    assert data.classes == ["0", "1"]
    rows = np.flatnonzero(content["person"] == "b")
    expected, labels = [], []
    for start in range(0, len(rows) - 24, 12):
        part = rows[start : start + 25]
        if len(set(content["label"][part])) == 1:
            expected.append(content["x"][part].T)
            labels.append(content["label"][part][0])
    domain = data.load("b")
    np.testing.assert_array_equal(domain.x.numpy(), np.stack(expected))
    assert domain.y.tolist() == labels
    assert data.input_shape == (3, 25)


def test_an_npz_of_integers_is_scaled_and_samples_without_a_label_are_left_out(tmp_path):
    content = arrays(recordings=2)
    label = content["label"] + 1
    label[:300] = -1
    content |= {"x": (content["x"] * 100).astype(np.int16), "label": label, "scale": np.full(3, 0.01)}
    np.savez(
        tmp_path / "s.npz",
        **content,
    )
    data = SignalDomains(str(tmp_path / "s.npz"), domain="person", window=25, unit="samples", normalise="none", seed=0)
    assert data.classes == ["1", "2"]
    windows = data.windows("a")
    assert windows.names == ("s.npz#0", "s.npz#1")
    assert int(windows.start[windows.recording == 0].min()) >= 300
    assert abs(float(windows.x[:, 2].mean()) - 1) < 0.05
    assert data.ids("a", "test")[0].startswith("s.npz#")


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
@pytest.mark.parametrize("by_class", [False, True])
def test_folders_of_tables_give_the_same_windows_as_arrays(tmp_path, suffix, by_class):
    for number, name in enumerate("abc"):
        write(tmp_path, name, by_class=by_class, seed=10 * number, suffix=suffix)
    given = {"channels": ["x", "y", "z"], "window": 0.5, "stride": 0.25, "normalise": "none", "seed": 0, "time": "t"}
    data = SignalDomains(str(tmp_path), **given)
    assert data.classes == ["still", "walk"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # classes in files of their own have gaps where the other one is
        found = data.load("b")
    expected = made(normalise="none").load("b")
    if not by_class:
        torch.testing.assert_close(found.x, expected.x)
        assert torch.equal(found.y, expected.y)
    # by class, a stretch of one class is cut from its own first sample on
    assert found.y.bincount().tolist() == expected.y.bincount().tolist() or by_class
    assert set(found.y.tolist()) == {0, 1}


@pytest.mark.parametrize("deep", [False, True])
def test_a_column_names_the_domain(tmp_path, deep):
    content = arrays(recordings=2)
    table = pd.DataFrame(content["x"], columns=["x", "y", "z"]).assign(
        person=content["person"], recording=content["recording"], label=content["label"], room="r"
    )
    if deep:
        for name, part in table.groupby("recording"):
            (tmp_path / "any" / str(name)).mkdir(parents=True)
            part.to_csv(tmp_path / "any" / str(name) / "all.csv", index=False)
    else:
        table.to_csv(tmp_path / "all.csv", index=False)
    path = tmp_path if deep else tmp_path / "all.csv"
    given = {"recorded_rate": 50.0, "channels": ["x", "y", "z"], "normalise": "none"}
    data = made(str(path), **given)
    assert data.domain_names() == ["a", "b", "c"]
    torch.testing.assert_close(data.load("b").x, made(content, normalise="none").load("b").x)
    with pytest.raises(DatasetLayoutError, match="room"):
        made(str(path), **(given | {"channels": None})).load("b")


def test_rows_of_several_devices_may_take_turns_if_they_have_time_stamps(tmp_path):
    content = arrays(persons=("a", "b"))
    time = np.tile(np.arange(1000) / 50, 2)
    table = pd.DataFrame(content["x"], columns=["x", "y", "z"]).assign(
        t=time, person=content["person"], label=content["label"]
    )
    table.sort_values(["t", "person"]).to_csv(tmp_path / "mixed.csv", index=False)
    given = {"channels": ["x", "y", "z"], "normalise": "none"}
    expected = made(content, **given | {"channels": None})
    data = made(str(tmp_path / "mixed.csv"), time="t", **given)
    for name in "ab":
        torch.testing.assert_close(data.load(name).x, expected.load(name).x)
    # two recordings, each from 0 on, are told apart by another person's between them
    pd.concat([table[:500], table[1000:1500], table[:500]]).to_csv(tmp_path / "again.csv", index=False)
    windows = made(str(tmp_path / "again.csv"), time="t", **given).windows("a")
    assert windows.names == ("again.csv", "again.csv#2")
    index = table.assign(t=pd.Timestamp("2026-01-01") + pd.to_timedelta(table["t"], unit="s")).set_index("t")
    index.to_parquet(tmp_path / "index.parquet")
    stamped = made(str(tmp_path / "index.parquet"), time="t", **given)
    torch.testing.assert_close(stamped.load("b").x, expected.load("b").x)


def test_a_target_without_labels_keeps_all_windows(tmp_path):
    for name in "ab":
        write(tmp_path, name, seed=ord(name))
    write(tmp_path, "c", label=None)
    data = SignalDomains(str(tmp_path), window=0.5, time="t", seed=0)
    assert data.labels("c").eq(-1).all()
    assert len(data.labels("c")) == (1000 - 25) // 12 + 1
    with pytest.raises(DatasetLayoutError, match="labels"):
        SignalDomains(str(tmp_path), window=0.5, time="t", seed=0, target="a").load("c")


def spans(windows: Windows, positions):
    return {
        (int(windows.recording[i]), int(windows.start[i]) + t) for i in positions for t in range(windows.x.shape[-1])
    }


@pytest.mark.parametrize("label_rule", ["all", "majority"])
@pytest.mark.parametrize("stride", [0.08, 0.25])
@pytest.mark.parametrize(("recordings", "by"), [(1, None), (8, None), (8, "blocks")])
def test_no_two_parts_of_a_split_share_a_sample(recordings, by, stride, label_rule):
    data = made(arrays(recordings=recordings), stride=stride, split_by=by, label_rule=label_rule, val_fraction=0.15)
    split = data.split("a")
    windows = data._windows["a"]
    train, val, test = (spans(windows, part.tolist()) for part in (split.train, split.val, split.test))
    assert not train & val
    assert not train & test
    assert not val & test
    owners = [set(windows.recording[part].tolist()) for part in (split.train, split.val, split.test)]
    assert (recordings == 8 and by is None) == (not owners[0] & owners[1] and not owners[0] & owners[2])
    assert set(data.labels("a")[split.train].tolist()) == {0, 1}
    assert 0.05 < len(split.test) / len(windows.y) < 0.35
    assert overlaps(windows, split.train, split.train).all()


@pytest.mark.parametrize("recordings", [1, 8])
def test_windows_that_validate_a_target_without_labels_do_not_depend_on_its_labels(recordings):
    given = dict(target="a", val_fraction=0.1, test_fraction=0.0, transductive=True, stride=0.1)
    content = arrays(recordings=recordings)
    val = made(content, **given).split("a").val
    other = made(content | {"label": 1 - content["label"]}, **given)
    assert torch.equal(val, other.split("a").val)
    if recordings == 1:  # some of each stretch, in place of the end alone
        assert len(torch.unique(val * 4 // len(other.labels("a")))) == 4
    given |= {"transductive": False, "test_fraction": 0.2}
    held = made(content, **given)
    parts = held.split("a")
    train, val, test = (spans(held._windows["a"], part.tolist()) for part in (parts.train, parts.val, parts.test))
    assert not train & val
    assert not (train | val) & test
    assert torch.equal(parts.test, made(content, **given | {"target_labels": 4}).split("a").test)


def test_windows_that_overlap_much_are_held_out_of_fewer_stretches():
    given = dict(target="a", test_fraction=0.0, stride=0.04)
    parts = made(arrays(recordings=1), **given).split("a")
    assert len(parts.train) > 0.6 * len(torch.cat([parts.train, parts.val]))
    labelled = made(arrays(recordings=1), **given, target_labels=1.0).split("a")
    assert len(parts.train) >= 0.9 * len(labelled.train)


def test_a_hidden_class_is_not_told():
    content = arrays()
    one = content | {"label": np.where(content["person"] == "a", 1, content["label"])}
    with pytest.warns(UserWarning, match=r"client 'a' has windows of one class alone \('1'"):
        made(one, target="a", target_labels=4).facts("a")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made(one, target="a").facts("a")


def test_labelled_windows_of_a_transductive_target_share_nothing_with_those_that_score():
    data = made(stride=0.1, transductive=True, target_labels=5, test_fraction=0.0, val_fraction=0.0)
    split = data.split("c")
    windows = data._windows["c"]
    assert len(split.labelled) == 5
    assert not spans(windows, split.labelled.tolist()) & spans(windows, split.test.tolist())


def test_labels_that_leave_no_window_to_score_are_refused():
    with refused("target_labels"):
        made(stride=0.02, transductive=True, target_labels=0.9, test_fraction=0.0, val_fraction=0.0).split("c")


def test_too_few_recordings_are_refused_where_they_are_asked_for():
    with refused("split_by"):
        made(arrays(recordings=2), split_by="recordings").split("a")


def test_windows_are_standardised_by_client_or_each_by_itself():
    data = made(normalise="client")
    x = data._domain("a").x[data.split("a").train]
    torch.testing.assert_close(x.mean(dim=(0, 2)), torch.zeros(3), atol=1e-5, rtol=0)
    torch.testing.assert_close(x.std(dim=(0, 2), correction=0), torch.ones(3), atol=1e-5, rtol=0)
    x = made(normalise="window")._domain("a").x
    torch.testing.assert_close(x.mean(dim=2), torch.zeros(len(x), 3), atol=1e-5, rtol=0)
    torch.testing.assert_close(x.std(dim=2, correction=0), torch.ones(len(x), 3), atol=1e-4, rtol=0)
    small = arrays()
    small["x"] = small["x"] * 1e-12
    small["x"][:, 2] = 9.81
    x = made(small, normalise="window")._domain("a").x
    torch.testing.assert_close(x[:, 0].std(dim=1, correction=0), torch.ones(len(x)), atol=1e-4, rtol=0)
    assert x[:, 2].abs().max() < 1
    with refused("normalise"):
        made(normalise="ranks")


def test_features_and_magnitudes():
    data = made(magnitudes={"length": ["0", "1", "2"]}, features=True, normalise="zscore")
    assert data.input_shape == (4 * 13,)
    x = made(magnitudes={"length": ["0", "1", "2"]}, normalise="none")
    assert torch.allclose(x._domain("a").x[:, 3], x.load("a").x.norm(dim=1))


# ---------------------------------------------------------------- rates, gaps, missing values


def test_recordings_of_other_rates_are_brought_to_one(tmp_path):
    for name, rate in (("a", 50), ("b", 100), ("c", 49.6)):
        write(tmp_path, name, rate=rate)
    given = {"window": 0.5, "time": "t", "seed": 0, "normalise": "none"}
    data = SignalDomains(str(tmp_path), rate=25, **given)
    assert {tuple(data.load(name).x.shape[1:]) for name in "abc"} == {(3, 12)}
    data = SignalDomains(str(tmp_path), **given)
    with pytest.raises(DatasetLayoutError, match="give rate"):
        data.train_dataloader()
    write(tmp_path, "a", name="r1", rate=40)
    with pytest.raises(DatasetLayoutError, match=r"r1.csv.*rate=40"):
        SignalDomains(str(tmp_path), **given).load("a")


def test_a_gap_between_time_stamps_is_told_or_filled(tmp_path):
    folder = write(tmp_path, "a")
    write(tmp_path, "b")
    table = pd.read_csv(folder / "a" / "r0.csv")
    pd.concat([table[:400], table[410:]]).to_csv(folder / "a" / "r0.csv", index=False)
    given = {"window": 0.5, "stride": 0.02, "time": "t", "seed": 0}
    with pytest.warns(UserWarning, match=r"1 gaps between the time stamps of a/r0.csv"):
        windows = SignalDomains(str(tmp_path), **given).windows("a")
    covered = spans(windows, range(len(windows.y)))
    assert not {(0, sample) for sample in range(400, 410)} & covered
    assert (0, 410) in covered  # places in time stay
    whole = SignalDomains(str(tmp_path), fill=0.2, **given).windows("a")
    assert {(0, sample) for sample in range(400, 410)} <= spans(whole, range(len(whole.y)))


def test_missing_values_are_told_or_filled():
    content = arrays()
    content["x"][110:118, 1] = np.nan
    content["x"][510, 2] = np.inf
    with pytest.warns(UserWarning, match=r"(?s)client 'a'.*missing by channel: \['1 8', '2 1'\].*fill"):
        few = made(content).windows("a")
    assert few.x.isfinite().all()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        whole = made(content, fill=0.16).windows("a")
    assert len(whole.y) > len(few.y)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(made(content).windows("b").y) == len(whole.y)


def test_time_stamps_that_run_back_are_refused_and_repeated_ones_left_out(tmp_path):
    for name in "ab":
        write(tmp_path, name)
    path = tmp_path / "a" / "r0.csv"
    table = pd.read_csv(path)
    data = SignalDomains(str(tmp_path), window=0.5, time="t", seed=0)
    pd.concat([table[:50], table[49:]]).to_csv(path, index=False)
    with pytest.warns(UserWarning, match="1 repeat"):
        assert len(data.windows("a").y) == len(data.windows("b").y)
    pd.concat([table[:50], table[20:]]).to_csv(path, index=False)
    with pytest.raises(DatasetLayoutError, match=r"a/r0.csv.*back at samples \[50\]"):
        data.windows("a")


def test_stamps_may_be_dates_or_whole_nanoseconds(tmp_path):
    for name in "ab":
        write(tmp_path, name)
    expected = SignalDomains(str(tmp_path), window=0.5, time="t", seed=0).windows("a")
    path = tmp_path / "a" / "r0.csv"
    table = pd.read_csv(path)
    stamps = pd.Timestamp("2026-03-01T12:00:00Z") + pd.to_timedelta((table["t"] * 1e9).round().astype("int64"))
    table.assign(t=stamps.map(lambda stamp: stamp.isoformat())).to_csv(path, index=False)
    torch.testing.assert_close(SignalDomains(str(tmp_path), window=0.5, time="t", seed=0).windows("a").x, expected.x)
    table.assign(t=stamps.astype("int64")).to_csv(path, index=False)
    data = SignalDomains(str(tmp_path), window=0.5, time="t", time_unit="ns", seed=0)
    torch.testing.assert_close(data.windows("a").x, expected.x)
    table.assign(t="noon").to_csv(path, index=False)
    with pytest.raises(DatasetLayoutError, match="ISO 8601"):
        SignalDomains(str(tmp_path), window=0.5, time="t", seed=0).windows("a")


# ---------------------------------------------------------------- what is refused or told


def test_channels_are_taken_by_name(tmp_path):
    write(tmp_path, "a", columns="xyz")
    write(tmp_path, "b", columns="zxy")
    given = {"window": 0.5, "time": "t", "seed": 0, "normalise": "none"}
    data = SignalDomains(str(tmp_path), **given)
    torch.testing.assert_close(data.load("b").x, data.load("a").x)
    assert data.channel_names() == ["x", "y", "z"]
    assert SignalDomains(str(tmp_path), channels=["z", "x"], **given).input_shape == (2, 25)
    write(tmp_path, "b", columns="xy")
    with pytest.raises(DatasetLayoutError, match=r"b/r0.csv.*\['z'\]"):
        data.load("b")
    with pytest.raises(DatasetLayoutError, match=r"b/r0.csv.*\['z'\]"):
        SignalDomains(str(tmp_path), channels=["z", "x"], **given).load("b")


def test_sites_with_other_channels_or_another_order_are_refused_when_they_meet(tmp_path):
    for site, columns in (("one", "xyz"), ("two", "zxy")):
        write(tmp_path / site, "a", columns=columns)
        write(tmp_path / site, "b", columns=columns)
    given = {"window": 0.5, "time": "t", "seed": 0, "clients": ["a", "b"]}
    one, two = (SignalDomains(str(tmp_path / site), **given) for site in ("one", "two"))
    one.check_facts({"a": one.facts("a"), "b": one.facts("b")})
    with pytest.raises(DatasetLayoutError, match=r"channels must be the same.*in one order"):
        one.check_facts({"a": one.facts("a"), "b": two.facts("b")})
    two = SignalDomains(str(tmp_path / "two"), channels=["x", "y", "z"], **given)
    one.check_facts({"a": one.facts("a"), "b": two.facts("b")})


def test_a_short_recording_is_told_and_a_client_of_none_is_refused():
    content = arrays(recordings=2)
    keep = np.ones(len(content["x"]), dtype=bool)
    keep[np.flatnonzero((content["person"] == "a") & (content["recording"] == 1))[20:]] = False
    content = {key: value if value.ndim == 0 else value[keep] for key, value in content.items()}
    with pytest.warns(UserWarning, match=r"(?s)client 'a'.*#1 \(20 samples\)"):
        made(content).windows("a")
    with pytest.raises(DatasetLayoutError, match=r"(?s)client 'a'.*Give a shorter window"):
        made(content, window=30.0).windows("a")
    with pytest.raises(DatasetLayoutError, match=r"classes \['run', 'swim'\].*labels \['0', '1'\]"):
        made(classes=["run", "swim"]).windows("a")


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"x": np.zeros(10)}, r"x \(of path"),
        ({"scale": np.ones(2)}, "scale"),
        ({"channels": np.array(["x", "x", "y"])}, "once"),
        ({"label": np.zeros(5)}, "label"),
        ({"person": None}, "person"),
        ({"rate": np.array(0.0)}, "rate"),
        ({"rate": None}, "recorded_rate"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(changes, match):
    with pytest.raises(DatasetLayoutError, match=match):
        made(arrays(**changes)).load("a")


def test_what_is_not_there_or_no_table_is_refused(tmp_path):
    with pytest.raises(DatasetNotFoundError):
        made(str(tmp_path / "gone"))
    (tmp_path / "a").mkdir()
    with pytest.raises(DatasetLayoutError, match="must be"):
        SignalDomains(str(tmp_path), window=1.0)
    write(tmp_path, "a")
    write(tmp_path, "b")
    (tmp_path / "b" / "r0.csv").write_text("x,label\nhigh,walk\nlow,still\n")
    with pytest.raises(DatasetLayoutError, match=r"b/r0.csv.*\['x'\]"):
        SignalDomains(str(tmp_path), window=1.0, channels=["x"]).load("b")
    (tmp_path / "b" / "r0.csv").write_text("x;label\n1,5;walk\n2,5;still\n")
    with pytest.raises(DatasetLayoutError, match=r"b/r0.csv.*give separator=';'"):
        SignalDomains(str(tmp_path), window=1.0, channels=["x"], recorded_rate=1.0).load("b")
    for row, number in (("1,walk", 2), ("1,2,3,walk", 4)):
        (tmp_path / "b" / "r0.csv").write_text(f"x,y,label\n1,2,walk\n{row}\n3,4,still\n")
        with pytest.raises(
            DatasetLayoutError, match=rf"b/r0.csv must be of 3 fields in each line, got {number} in line 3"
        ):
            SignalDomains(str(tmp_path), window=1.0, channels=["x"], recorded_rate=1.0).load("b")
    (tmp_path / "b" / "walk").mkdir()
    with pytest.raises(DatasetLayoutError, match="both"):
        SignalDomains(str(tmp_path), window=1.0)


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.01)


def fit(content, rounds=1, network=None, **arguments: Any):
    """Accuracy of a model at the target, by hand."""
    data = made(content, classes=["0", "1"], **arguments)
    module = SourceOnly(data.clients, data.target, data.num_classes, network or Features(), optimizer=adam)
    trainer(rounds).fit(module, data)
    x, y = samples_of(data, data.target, "test")
    return float((module.replicas[data.target].eval()(x).argmax(dim=1) == y).float().mean())


def test_a_classifier_of_features_learns():
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*tenfold.*")
        assert fit(arrays(), 15, features=True, normalise="zscore") > 0.9


NETWORKS = {
    "cnn": lambda: SmallCNN1D(width=8),
    "resnet": lambda: ResNet1D(width=8),
    "gru": lambda: Recurrent(width=16),
    "lstm": lambda: Recurrent(width=16, cell="lstm"),
}


@pytest.mark.parametrize("network", ["cnn", "gru", *map(slow, ("resnet", "lstm"))])
def test_a_network_that_finds_its_channels_learns(network):
    assert fit(arrays(), 20 if network in ("gru", "lstm") else 8, NETWORKS[network]()) > 0.9


@pytest.mark.parametrize(("factor", "warns"), [(9.80665, ["b"]), (1 / 9.80665, ["b"]), (5.0, [])])
def test_a_client_with_another_unit_is_told(factor, warns):
    content = arrays(persons="abcd")
    content["x"][content["person"] == "b", 1] *= factor
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(content, features=True)
    told = [str(each.message) for each in caught if "tenfold" in str(each.message)]
    assert [message.split("client ")[1][1] for message in told] == warns
    assert all("channel '1'" in message for message in told)


def test_a_source_with_one_class_is_told():
    content = arrays()
    content["label"][content["person"] == "b"] = 1
    with pytest.warns(UserWarning, match="client 'b' has windows of one class"):
        made(content).facts("b")


def test_a_process_without_data_knows_clients_and_classes():
    data = SignalDomains(None, clients=["a", "b"], classes=["0", "1"], window=1.0)
    assert data.target == "b"
    with refused("classes"):
        SignalDomains(None, clients=["a", "b"], window=1.0)
    with refused("clients"):
        SignalDomains(None, classes=["0", "1"], window=1.0)


@pytest.mark.parametrize("suffix", [".csv", ".parquet", ".npz"])
@pytest.mark.parametrize("features", [False, True])
def test_all_windows_of_a_new_recording_are_predicted(tmp_path, suffix, features):
    rules = {"window": 0.5, "stride": 0.25, "rate": 50.0, "features": features, "seed": 0, "target": "c"}
    folder = tmp_path / "all"
    for number, person in enumerate("abc"):
        write(folder, person, seed=number)
    new = write(tmp_path / "new", "c", columns=("z", "x", "y"), label=None, seed=2, suffix=".csv") / "c" / "r0.csv"
    if suffix != ".csv":
        table, other = pd.read_csv(new), new.with_suffix(suffix)
        if suffix == ".npz":
            channels = ["z", "x", "y"]
            np.savez(other, x=table[channels].to_numpy(), channels=channels, t=table["t"].to_numpy())
        else:
            table.to_parquet(other)
        new = other
    data = SignalDomains(str(folder), time="t", label_rule="majority", predict_file=str(new), **rules)
    found = data.predict_dataloader().datasets["c"]
    assert len(found) == (1000 - 25) // 12 + 1  # of 20 seconds at 50 a second, with and without a change of class
    assert data.ids("c", "predict")[:2] == [f"r0{suffix}@0.0", f"r0{suffix}@0.24"]
    trained = {name: row for name, row in zip(data.ids("c", "train"), data.dataset("c", "train").x, strict=True)}
    again = {name.replace(suffix, ".csv"): row for name, row in zip(data.ids("c", "predict"), found.x, strict=True)}
    assert len(trained) > 20
    for name, row in trained.items():  # the same recording, so the same numbers with the same statistics
        torch.testing.assert_close(again[name.removeprefix("c/")], row)


def test_a_new_recording_of_another_rate_channel_or_client_is_refused(tmp_path):
    folder = tmp_path / "all"
    for number, person in enumerate("abc"):
        write(folder, person, seed=number)
    table = pd.read_csv(folder / "c" / "r0.csv")
    made_of = {
        "rate": (table.iloc[::2], "rate of predict_file"),
        "channel": (table.drop(columns="y"), r"none called \['y'\]"),
        "client": (table.assign(who="a"), "samples of the target"),
    }
    for name, (changed, match) in made_of.items():
        changed.to_csv(tmp_path / f"{name}.csv", index=False)
        domain = {"domain": "who"} if name == "client" else {}
        if domain:
            for person in "abc":
                path = folder / person / "r0.csv"
                pd.read_csv(path).assign(who=person).to_csv(path, index=False)
        given = {"time": "t", "window": 0.5, "target": "c", "predict_file": str(tmp_path / f"{name}.csv"), **domain}
        with pytest.raises(DatasetLayoutError, match=match):
            SignalDomains(str(folder), **given, seed=0).predict_dataloader()
    with refused("predict_file", DatasetNotFoundError):
        SignalDomains(str(folder), domain="who", time="t", window=0.5, predict_file="away.csv").predict_dataloader()
