"""What ``fedlit list`` prints: everything that there is, as the code itself says it."""

from __future__ import annotations

import inspect
import re
from functools import cache
from pathlib import Path

import pytest
import yaml
from lightning.pytorch import Callback
from rich.console import Console
from torch import nn

import fedlit.data
import fedlit.methods
import fedlit.models
from fedlit import methods
from fedlit.callbacks import Validators
from fedlit.cli import catalogue, commands, known, main
from fedlit.cli.catalogue import KINDS, PlugIn
from fedlit.data import DomainDataModule
from fedlit.methods import FedAvg
from helpers import build, digits, trainer

ROOT = Path(__file__).parents[2]
rows = cache(catalogue.rows)
"""Made once: for those of methods, each is built."""


@pytest.fixture(autouse=True)
def _no_plug_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is installed beside fedlit where the tests run."""
    monkeypatch.setattr(commands, "offered", lambda kind: ())
    monkeypatch.setattr(catalogue, "rows", rows)
    commands._plug_ins.cache_clear()


def test_what_is_printed_without_the_classes_is_what_they_say():
    again = "it is made again with python -m fedlit.cli.catalogue"
    assert Path(str(known.FILE)).read_text(encoding="utf-8") == catalogue.made(), again
    assert set(known.KINDS) == set(KINDS)
    for kind in KINDS:
        assert known.known().listed[kind] == rows(kind)


def test_every_class_that_a_shipped_configuration_names_is_known_with_its_arguments():
    named = 0
    for path in (ROOT / "configs").rglob("*.yaml"):
        for found in re.findall(r"class_path: (fedlit\.[\w.]+)", path.read_text()):
            assert found in known.known().arguments, (path, found)
            named += 1
    assert named > 100


def names(kind: str) -> set[str]:
    return {row.name for row in rows(kind)}


def test_every_class_of_a_kind_is_listed():
    assert names("methods") == set(fedlit.methods.__all__)
    public = {name: getattr(fedlit.data, name) for name in fedlit.data.__all__}
    modules = {name for name, thing in public.items() if DomainDataModule in inspect.getmro(thing)[1:]}
    assert names("data") == modules  # less DomainDataModule itself
    networks = [getattr(fedlit.models, name) for name in fedlit.models.__all__]
    networks = [thing for thing in networks if isinstance(thing, type) and issubclass(thing, nn.Module)]
    extractors = {cls.__name__ for cls in networks if "self.out_features = " in inspect.getsource(cls)}
    assert names("models") == extractors
    text = (ROOT / "docs" / "privacy.md").read_text(encoding="utf-8")
    tables = re.findall(r"^\| (?:backend|exchange) \| .*\n(?:\|.*\n)+", text, re.MULTILINE)
    assert len(tables) == 2
    assert names("privacy") == {name for table in tables for name in re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)}


def test_every_label_free_score_of_a_run_is_listed_and_whether_it_needs_source_statistics():
    data = digits()
    done = trainer(1, [Validators()])
    done.fit(build(FedAvg, data), data)
    logged = {name for name in done.callback_metrics if name.startswith("validator/")}
    assert names("validators") == logged | {"source/acc", "target/score"}
    assert names("validators") <= set(done.callback_metrics)
    for row in rows("validators"):
        if row.name.startswith("validator/"):
            module = build(FedAvg, data)
            trainer(1, [Validators([row.name.removeprefix("validator/")])]).fit(module, data)
            sent = {"source_moments", "class_means"} & set(module.federation.ledger.bytes_by_channel())
            assert row.extra == ("yes" if sent else "no"), row.name


@pytest.mark.parametrize("kind", ["methods", "data", "privacy"])
def test_every_configuration_is_listed_with_its_class(kind):
    listed = {name: row.name for row in rows(kind) for name in row.extra.splitlines()}
    expected = {}
    for path in (ROOT / "configs" / kind).glob("*.yaml"):
        config = yaml.safe_load(path.read_text())
        if kind == "privacy":
            chosen = config["trainer"]["strategy"]["init_args"].get("privacy")
        else:
            chosen = config["model" if kind == "methods" else "data"]
        if chosen is not None:  # differential privacy goes with any backend
            expected[f"{kind}/{path.stem}"] = chosen["class_path"].split(".")[-1]
    assert listed == expected


@pytest.mark.parametrize("kind", KINDS)
def test_names_and_configurations_are_whole_on_a_narrow_screen(kind):
    screen = Console(width=80)
    with screen.capture() as shown:
        screen.print(commands._table(kind))
    words = set(shown.get().split())
    for row in rows(kind):
        assert len(row.what) > 20, row.name
        assert "\n" not in row.what
        assert row.name in words
        assert kind == "validators" or set(row.extra.splitlines()) <= words


def test_methods_are_listed_with_their_channels_in_the_clear_and_summed():
    listed = {row.name: row.sends for row in rows("methods")}
    assert listed["FedRFTCA"] == "summed: features, aligner, classifier; in the clear: target_features"
    assert listed["FedMMD"] == "summed: moments; in the clear: target_moments, classifier"
    gp = "summed by a backend that hides: update; in the clear: target_update, model; pairwise: inner_product"
    assert listed["FedGP"] == gp
    assert listed["Oracle"] == "nothing"
    assert all(listed.values())
    screen = Console(width=200)
    with screen.capture() as shown:
        screen.print(commands._table("methods"))
    assert "target_features" in shown.get()


def test_the_table_of_methods_is_made_of_their_declarations():
    page = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")
    assert catalogue.with_table(page) == page, "run python -m fedlit.cli.catalogue"


def test_each_method_names_its_source_where_help_and_api_pages_show_it():
    text = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")
    for row in rows("methods"):
        first = (getattr(methods, row.name).__doc__ or "").partition("\n")[0]
        assert re.search(r"\([^()]*\b\d{4}\b[^()]*\)\.$", first), first
        assert row.origin in first
        assert f"| `{row.name}` | {row.origin} |" in text


class Watch(Callback):
    """Watch [red]closely[/red]."""


def test_plug_ins_are_listed_with_the_package_that_they_are_from(monkeypatch, capsys):
    found = (PlugIn("validators", Watch, "their-package"), PlugIn("models", nn.Linear, "another"))
    monkeypatch.setattr(commands, "offered", lambda kind: ("Watch",))
    monkeypatch.setattr(catalogue, "load_plugins", lambda: found)
    main(["list"])
    everything = capsys.readouterr().out
    main(["list", "validators", "their-package"])
    watch = capsys.readouterr().out
    commands._plug_ins.cache_clear()
    assert "Watch [red]closely[/red]." in watch  # docstrings are text, whatever brackets they have
    assert "from their-package" in watch
    assert "mcc" not in watch
    assert "from another" in everything


def test_in_a_pipe_lists_are_120_columns_wide_and_have_all(capsys):
    main(["list"])
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) == 120
    words = set(printed.split())
    for kind in KINDS:
        assert {row.name for row in rows(kind)} <= words
        assert kind == "validators" or {name for row in rows(kind) for name in row.extra.splitlines()} <= words


def test_words_leave_what_has_all_of_them_in_any_column_and_case(capsys):
    main(["list", "methods", "iclr", "Target_Update"])
    printed = capsys.readouterr().out
    assert [row.name for row in rows("methods") if f" {row.name} " in printed] == ["FedGP"]
    with pytest.raises(SystemExit) as ended:
        main(["list", "data", "nowhere"])
    assert ended.value.code == "fedlit: nothing among the data has 'nowhere': fedlit list data has all"
