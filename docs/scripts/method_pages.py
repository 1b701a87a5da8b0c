"""A page for each method, made from its class, the papers' entries and the results: `docs/conf.py` writes them."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import fedlit.functional
import fedlit.methods
from fedlit import FederatedModule
from fedlit.cli.catalogue import citation, instance_of, summary, way_of
from fedlit.cli.known import known
from fedlit.federation import Channel, Summed
from fedlit.papers.entries import names, read
from fedlit.papers.page import averages_of
from fedlit.papers.running import ours
from fedlit.tables import Table

ROOT = Path(__file__).resolve().parents[2]
RESULTS, BENCHMARKS = ROOT / "fedlit" / "papers" / "results", ROOT / "benchmarks"

HOOKS = ("loss", "losses", "on_run_start", "on_round_start", "on_round_end", "on_run_end", "predict")
"""Of a class, in the order in which a run calls them; those that a method has itself are its algorithm."""

EXCEPTIONS = {
    "Oracle": "needed, all of them",
    "FedMME": "a few are advised; the target trains on unlabelled samples too",
    "FedAnalytic": "none are used, nor other samples of the target",
    "SourceOnly": "none are used",
}
"""What methods check by themselves."""

MARK = re.compile(r"(``.*?``|`[^`]*`)|([|*])")
"""Code, and characters with a meaning in reStructuredText that docstrings do not use."""

LABELS = {
    (False, False): "none; those that it has are trained on",
    (False, True): "none; the target trains on unlabelled samples",
    (True, False): "needed, a few",
    (True, True): "needed, a few; the target trains on unlabelled samples too",
}
"""By whether a method needs labels of the target, and trains on its unlabelled samples."""


def methods() -> dict[str, type[FederatedModule]]:
    """All methods by name."""
    return {name: getattr(fedlit.methods, name) for name in sorted(fedlit.methods.__all__, key=str.lower)}


def page(method: type[FederatedModule]) -> str:
    """Markdown with directives."""
    name, requires = method.__name__, method.requires
    adapts = (requires.target_labels, requires.unlabelled_target)
    labels = EXCEPTIONS.get(name, LABELS[adapts])
    if requires.ignores_target_labels:
        labels = labels.replace("none;", "none are used;")
    facts = [
        ("source", citation(method)),
        ("target labels", labels),
        ("tasks", " and ".join(requires.tasks)),
        ("trains in the first round", _trains(method)),
        (
            "unequal classes",
            "warns: features are aligned whatever their classes" if requires.matches_distributions else "-",
        ),
    ]
    row = next(each for each in known().listed["methods"] if each.name == name)
    configurations = row.extra.split()
    if configurations:
        facts.append(("configuration", ", ".join(f"`{each}`" for each in configurations)))
        facts.append(("try it", f"`fedlit fit --config data/digits --config {configurations[0]}`"))
    parts = [f"# {name}", summary(method), _table(("", ""), facts), *_channels(method)]
    parts += [
        "## Definition and arguments",
        f"```{{eval-rst}}\n.. autoclass:: fedlit.methods.{name}\n   :no-members:\n   :no-index:\n```",
    ]
    parts += [
        "## The paper, and where this departs from it",
        _directive(inspect.getdoc(inspect.getmodule(method)) or ""),
    ]
    equations = [*_equations(method)]
    if equations:
        parts += [
            "## Equations",
            "Functions of [fedlit.functional](../api/functional.md) that it computes with.",
            *equations,
        ]
    code = [*_code(method)]
    if code:
        parts += ["## The algorithm, in code", *code]
    rows = [*_against(name)]
    if rows:
        text = "Averages over the columns that both have; the links go to all of them, with seeds, spread and settings."
        parts += [
            "## Results next to the papers'",
            text,
            _table(("paper", "table", "row", "ours", "the paper's"), rows),
        ]
    return "\n\n".join(parts) + "\n"


def _table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    return Table.of(header, [list(row) for row in rows], words=len(header)).markdown(escaped=False)


def _directive(text: str) -> str:
    return "\n".join(["```{eval-rst}", *escaped(text.splitlines()), "```"])


def escaped(lines: list[str]) -> list[str]:
    """Lines of a docstring in which bars and stars stand for themselves, outside of code and formulas."""
    result, formula = [], None  # the indentation of the formula that the line is in
    for line in lines:
        indent = len(line) - len(line.lstrip())
        if formula is not None and line.strip() and indent <= formula:
            formula = None
        if ".. math::" in line:
            formula = indent
        result.append(line if formula is not None else MARK.sub(lambda match: match[1] or f"\\{match[2]}", line))
    return result


def _channels(method: type[FederatedModule]) -> Iterator[str]:
    made = instance_of(method)
    if made is None:
        return
    channels = made.channels
    yield "## What is sent, and who learns it"
    if not channels:
        yield "Nothing is sent."
        return
    rows = [(each.name, each.contents, f"{each.up} to {each.to}", way_of(each), _learns(each)) for each in channels]
    yield _table(("channel", "contents", "from and to", "how", "who learns what"), rows)
    yield (
        "With default arguments, beside what is logged. Backends and adversaries are on "
        "[Privacy backends and threats](../privacy.md)."
    )


def _trains(method: type[FederatedModule]) -> str:
    """Who trains in the first round, where the target has labels."""
    made = instance_of(method)
    if made is None or not method.requires.sources:
        return "the target alone"
    if all(client.name != "target" for client in made.learners(0)):
        return "the sources"
    return "all clients" if method.requires.adapts else "clients that have labels"


def _learns(channel: Channel) -> str:
    what = "single samples" if channel.samples else "each message"
    if channel.kind == "summed":
        singly = isinstance(channel, Summed) and channel.singly
        return f"{channel.to}: the sum alone (with Plain{'' if singly else ' the server'}: {what})"
    return f"{channel.to}: {'a linear map of each' if channel.kind == 'pairwise' else what}"


def _equations(method: type[FederatedModule]) -> Iterator[str]:
    """Documentation of the public functions that the method's modules import from `fedlit.functional`."""
    modules = [inspect.getmodule(owner) for owner in method.__mro__ if owner.__module__.startswith("fedlit.methods")]
    for name in sorted({name for module in modules for name, each in vars(module).items() if _is_equation(name, each)}):
        yield _directive(f".. autofunction:: fedlit.functional.{name}\n   :no-index:")


def _is_equation(name: str, thing: object) -> bool:
    return inspect.isfunction(thing) and getattr(fedlit.functional, name, None) is thing


def _code(method: type[FederatedModule]) -> Iterator[str]:
    for name in HOOKS:
        for owner in method.__mro__:
            if name in vars(owner):
                if owner.__module__.startswith("fedlit.methods"):
                    source = textwrap.dedent(inspect.getsource(vars(owner)[name]))
                    where = "" if owner is method else f"Of `{owner.__name__}`:\n\n"
                    yield f"{where}```python\n{source}```"
                break


def _against(name: str) -> Iterator[tuple[str, ...]]:
    for paper in names():
        for table, asked in read(paper).tables.items():
            cells = ours(paper, table, RESULTS, BENCHMARKS)
            for row in asked.paper:
                if asked.rows.get(row, row).partition(",")[0].partition("(")[0].strip() != name:
                    continue
                both = averages_of(asked, cells, row)
                if both is not None:
                    where, mine, printed = both
                    link = f"[{table.replace('-', ' ')}](../papers.md#{paper}-{table})"
                    yield read(paper).paper.partition(",")[0], link, f"{row}{where}", f"{mine:.1f}", f"{printed:.1f}"


def write(folder: Path) -> list[str]:
    """Write all pages; returns their names."""
    folder.mkdir(exist_ok=True)
    for name, method in methods().items():
        text, path = page(method), folder / f"{name}.md"
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
    return [*methods()]
