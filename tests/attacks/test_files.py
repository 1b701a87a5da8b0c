"""Names and files of strangers in what fedlit prints, writes and reads."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fedlit.callbacks.report.run_folder import _picture
from fedlit.federation.errors import printable
from fedlit.remote.star.framing import one_line
from fedlit.run import returns
from fedlit.tables import Column, Row, Table


def test_texts_of_peers_steer_no_terminal() -> None:
    assert printable("clé\n\x1b[2J\x07ok") == "clé \\x1b[2J\\x07ok"
    assert one_line("a\n\x1b]0;x\x07 b") == "a \\x1b]0;x\\x07 b"


def test_cells_are_no_formulas() -> None:
    rows = [Row(["=cmd|' /C calc'!A0", -0.5]), Row([" @a", 1]), Row(["-", 2])]
    table = Table([Column("+client"), Column("share", numeric=True)], rows)
    assert table.csv().splitlines() == ["'+client,share", "'=cmd|' /C calc'!A0,-0.5", "' @a,1", "-,2"]


def test_a_pipe_is_no_picture(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "chart.png")
    with pytest.raises(ValueError, match="a pipe"):
        _picture(tmp_path / "chart.png")


@pytest.mark.parametrize("name", ["=HYPERLINK(0)", "\x1b[2Jcleared", "@SUM(1)", "", "two\nlines", 7])
def test_names_of_numbers_of_the_server_are_cells_and_no_formulas(name: object) -> None:
    """As who returns after the last round logs them."""
    assert returns._is_number("oracle/target/acc", 0.5)
    assert returns._is_number("source/größe 2/loss", 0.5)
    assert not returns._is_number(name, 0.5)
    assert not returns._is_number("loss", "=1")
