"""SignalDomains: time stamps as devices write them, cells that are no numbers, and names that are misspelt."""

from __future__ import annotations

import warnings

import numpy as np
import pandas as pd
import pytest
import torch

from fedlit.data import DatasetLayoutError, SignalDomains
from fedlit.data.signals.recordings import _rate_of
from signal_files import arrays, write


def changed(folder, change):
    """A folder of two clients, with the table of one changed."""
    for name in "ab":
        write(folder, name)
    path = folder / "a" / "r0.csv"
    change(pd.read_csv(path)).to_csv(path, index=False)
    return SignalDomains(str(folder), window=0.5, time="t", seed=0)


def test_stamps_in_milliseconds_that_jitter_by_one_have_no_gaps_and_the_rate_of_the_clock(tmp_path):
    rng = np.random.default_rng(0)
    for name in "ab":
        write(tmp_path, name, rate=250)
        path = tmp_path / name / "r0.csv"
        table = pd.read_csv(path)
        # steps of 2 to 6 ms, of which 6 are one and a half periods to the last digit
        stamps = 1_700_000_000_000 + 4 * np.arange(len(table)) + rng.integers(-1, 2, len(table))
        table.assign(t=stamps).to_csv(path, index=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        windows = SignalDomains(str(tmp_path), window=0.5, time="t", time_unit="ms", seed=0).windows("a")
    assert windows.rate == 250
    assert len(windows.y) > 55  # of 65 without jitter: those at a change of label may go


@pytest.mark.parametrize("jitter", [0.1, 0.2, 0.3])
def test_the_rate_is_that_of_the_clock_where_stamps_jitter_and_samples_are_missing(jitter):
    rng = np.random.default_rng(1)
    time = (np.arange(20_000) + rng.uniform(-jitter, jitter, 20_000)) / 50
    assert _rate_of(time[rng.random(len(time)) > 0.02]) == 50


def test_stamps_that_are_coarser_than_samples_are_refused(tmp_path):
    data = changed(tmp_path, lambda table: table.assign(t=np.floor(table["t"])))
    with pytest.raises(DatasetLayoutError, match=r"a/r0.csv.*recorded_rate"):
        data.windows("a")


def test_a_cell_that_is_no_number_is_named_by_its_row(tmp_path):
    with pytest.raises(DatasetLayoutError, match=r"a/r0.csv.*'y' at row 12 "):
        changed(tmp_path, lambda table: table.astype({"y": object}).replace({"y": {table["y"][11]: "off"}}))


def test_a_channel_that_only_grows_is_told(tmp_path):
    for name in "ab":
        write(tmp_path, name)
    given = {"window": 0.5, "seed": 0}
    with pytest.warns(UserWarning, match=r"\['t'\] of client 'a'.*time"):
        SignalDomains(str(tmp_path), recorded_rate=50, **given).windows("a")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        SignalDomains(str(tmp_path), recorded_rate=50, channels=["x", "y", "z"], **given).windows("a")
        SignalDomains(str(tmp_path), time="t", **given).windows("a")


def test_an_npz_file_may_have_an_upper_case_ending(tmp_path):
    np.savez(tmp_path / "s.npz", **arrays())
    (tmp_path / "s.npz").rename(tmp_path / "S.NPZ")
    given = {"domain": "person", "window": 0.5, "seed": 0}
    data = SignalDomains(str(tmp_path / "S.NPZ"), **given)
    torch.testing.assert_close(data.windows("a").x, SignalDomains(arrays(), **given).windows("a").x)


def test_dates_in_another_form_are_refused_in_one_sentence(tmp_path):
    with pytest.raises(DatasetLayoutError, match=r"04\.03\.2025.*: mend") as caught:
        changed(tmp_path, lambda table: table.assign(t="04.03.2025 00:30:00"))
    assert "You might" not in str(caught.value)


def test_a_class_that_no_source_has_is_told():
    given = {"domain": "person", "window": 0.5, "seed": 0}
    with pytest.warns(UserWarning, match=r"\['walking'\]"):
        SignalDomains(arrays(), classes=["0", "walking", "1"], **given).setup("fit")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        SignalDomains(arrays(), classes=["1", "0"], **given).setup("fit")


def test_tables_in_another_encoding_are_read_if_it_is_named(tmp_path):
    for number, person in enumerate("abc"):
        path = write(tmp_path, person, seed=number) / person / "r0.csv"
        path.write_text(path.read_text().replace(",x,", ",x [µg],"), encoding="latin-1")
    given = {"time": "t", "window": 0.5, "target": "c", "seed": 0}
    assert SignalDomains(str(tmp_path), encoding="latin-1", **given).channel_names()[0] == "x [µg]"
    with pytest.raises(DatasetLayoutError, match="give its encoding"):
        SignalDomains(str(tmp_path), **given).load("a")
