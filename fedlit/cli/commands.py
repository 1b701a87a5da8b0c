"""Small commands, ``fedlit {list,report,export,certificates,features}``; slow imports wait till needed."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import astuple
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedlit.cli.known import KINDS, Row, known, load, offered
from fedlit.cli.page import PORT, open_page
from fedlit.tables import Column, Table, show
from fedlit.tables import Row as TableRow

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser

PROG = "fedlit features"

_WIDTH = 120
"""Columns of lists in a file or a pipe."""

_ENDINGS = {"pt2": ".pt2", "onnx": ".onnx", "safetensors": ""}
"""Of exported files by format; the last is a folder."""


def list_command(args: list[str]) -> None:
    """Print what there is."""
    parser = argparse.ArgumentParser(
        "fedlit list",
        description="What a configuration can name: fedlit's own classes and those of plug-ins, and scores by which a "
        "model can be chosen without labels of the target.",
    )
    kinds = f"{', '.join(KINDS)}; everything if it is left out"
    parser.add_argument("kind", nargs="?", choices=KINDS, metavar="KIND", help=kinds)
    words = "show what has all of these words, such as: fedlit list methods target ICLR"
    parser.add_argument("words", nargs="*", metavar="WORD", help=words)
    given = parser.parse_args(args)
    tables = [_table(each, given.words) for each in (KINDS if given.kind is None else (given.kind,))]
    if not any(table.rows for table in tables):
        missing = " and ".join(map(repr, given.words))
        sys.exit(f"fedlit: nothing among the {given.kind} has {missing}: fedlit list {given.kind} has all")
    for table in tables:
        show(table, _WIDTH)


@cache
def _plug_ins() -> list[tuple[str, Row]]:
    """Rows of plug-ins by their kinds, whose classes are imported only if there are any."""
    rows: list[tuple[str, Row]] = load("fedlit.cli.catalogue:plugin_rows")() if any(map(offered, KINDS)) else []
    return rows


def _table(kind: str, words: Sequence[str] = ()) -> Table:
    """What there is of a kind, with all of these words."""
    listed = [*known().listed[kind], *(row for of, row in _plug_ins() if of == kind)]
    listed = [row for row in listed if all(word.lower() in " ".join(astuple(row)).lower() for word in words)]
    names, last = [row.name for row in listed], [row.extra for row in listed]
    below = kind != "validators" and any(last)
    if below:
        names, last = ["\n  ".join([row.name, *row.extra.splitlines()]) for row in listed], []
    columns = {
        "name, and its configurations" if below else "name": names,
        "what it is": [row.what for row in listed],
        "where from": [row.origin for row in listed],
        "sends": [row.sends for row in listed],
        "source statistics" if kind == "validators" else "configuration": last,
    }
    shown = {header: cells for header, cells in columns.items() if any(cells)}
    headings = [Column(header, folds=not header.startswith("name"), min_width=12) for header in shown]
    return Table(headings, [TableRow(list(cells)) for cells in zip(*shown.values(), strict=True)], kind)


def report(args: list[str]) -> None:
    """Write a page on runs, and print its path."""
    parser = argparse.ArgumentParser(
        "fedlit report",
        description="Make one HTML page of what runs of fedlit fit left in their folders, and the same as Markdown. "
        "The page has the closing table of all runs, what differs in their configurations, and for each run its "
        "accuracy per client, label-free scores and losses over rounds, weights of the sources, the ledger by channel, "
        "what was hidden from whom, and its pictures. It needs no other file and no network. Numbers on the target's "
        "hidden labels are marked ORACLE. With --serve a browser shows runs as they go, until Ctrl-C.",
    )
    runs = (
        "folder of a run (runs/METHOD/version_N, if nothing else was set), or one above several runs, all of which are "
        "taken; a run that was interrupted is reported as far as it came"
    )
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN_DIR", help=runs)
    output = (
        "the HTML page (default: report.html); beside it, under the same name, go the Markdown page with .md and a "
        "folder of its pictures with _files (report.md, report_files)"
    )
    parser.add_argument("--output", type=Path, default=Path("report.html"), metavar="PATH", help=output)
    serve = f"write nothing, and show runs as they go at a port (default: {PORT}), for this machine alone without HOST"
    parser.add_argument("--serve", nargs="?", const=PORT, metavar="[HOST:]PORT", help=serve)
    options = parser.parse_args(args)
    if options.serve is not None and Path(options.serve).is_dir():  # what follows --serve is not its port
        options.runs, options.serve = [*options.runs, Path(options.serve)], PORT
    if not options.runs:
        parser.error("the following arguments are required: RUN_DIR")
    if options.serve is not None:
        check_folder = load("fedlit.callbacks.report.run_folder:check_folder")
        try:
            for place in options.runs:
                check_folder(place)
        except OSError as error:
            sys.exit(f"fedlit report: {error}")
        runs = load("fedlit.callbacks.report:LiveRuns")(options.runs)
        with suppress(KeyboardInterrupt):
            open_page(runs.page, options.serve, "--serve").serve_forever()
        return
    if options.output.suffix != ".html":
        parser.error(f"--output must end in .html, as the Markdown page goes beside it as .md, got '{options.output}'")
    read_runs, write_report = (load(f"fedlit.callbacks.report:{name}") for name in ("read_runs", "write_report"))
    try:
        paths = write_report(read_runs(options.runs), options.output)
    except (OSError, ValueError) as error:
        sys.exit(f"fedlit report: {error}")
    print(f"wrote {paths[0]} and {paths[1]} (pictures in {paths[2]})")


def export(args: list[str]) -> None:
    """Write the target's model of a run."""
    parser = argparse.ArgumentParser(
        "fedlit export",
        description="Write the target's model of a run to a file that needs no fedlit, or with safetensors to a folder "
        "that fedlit.load reads: from inputs (n, ...) to class probabilities (n, C), in regression to numbers. Inputs "
        "are those that the run's data module has before it normalises them. Run it where the run was trained: "
        "relative paths of data in its config.yaml are looked for from there.",
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="Folder that fedlit fit left, with config.yaml.")
    config = (
        "Configuration of the run, if RUN_DIR has none, as at a site whose process is not the first; several are laid "
        "over each other."
    )
    parser.add_argument("--config", action="append", help=config)
    ckpt_path = (
        "Checkpoint; default is the one in RUN_DIR/checkpoints, and of several the one that has trained for most "
        "rounds, of equals the one written last."
    )
    parser.add_argument("--ckpt_path", type=Path, help=ckpt_path)
    format_ = "pt2 for torch.export.load (default), onnx, or safetensors: a folder for fedlit.load and model hubs."
    parser.add_argument("--format", choices=[*_ENDINGS], help=format_)
    output = "File NAME.pt2 or NAME.onnx, or a folder NAME for safetensors; default is RUN_DIR/target with that ending."
    parser.add_argument("--output", type=Path, help=output)
    options = parser.parse_args(args)
    configs = options.config or [str(options.run_dir / "config.yaml")]
    if options.config is None and not Path(configs[0]).is_file():
        sys.exit(
            f"fedlit: RUN_DIR must be a folder that fedlit fit left, but '{configs[0]}' is not there: give one such as "
            "runs/FedAvg/version_0, or the configuration of the run (--config). A script exports its model itself: "
            "RunRecord(export='target.onnx'), or fedlit.export.export_target"
        )
    output = options.output or options.run_dir / f"target{_ENDINGS[options.format or 'pt2']}"
    if options.format and output.suffix != _ENDINGS[options.format]:
        ending = _ENDINGS[options.format] or "no suffix"
        parser.error(f"--output of --format {options.format} must end in {ending}, got '{output}'")
    load("fedlit.cli.stored:write")(options.run_dir, configs, options.ckpt_path, output)


def certificates(args: list[str]) -> None:
    """Make certificates for a trial across organisations."""
    parser = argparse.ArgumentParser(
        "fedlit certificates",
        description="Make a certificate authority, and certificates and keys of a server and sites, for a trial.",
    )
    parser.add_argument("--sites", required=True, help="names of the sites, as in north,south")
    parser.add_argument("--server", required=True, help="host by which sites call the server")
    parser.add_argument("--out", required=True, type=Path, help="folder for the files, made if need be")
    parser.add_argument("--days", type=int, default=365, help="for which they are valid (default: 365)")
    options = parser.parse_args(args)
    sites = [name.strip() for name in options.sites.split(",")]
    make_certificates = load("fedlit.remote.certificates:make_certificates")
    try:
        make_certificates(options.out, options.server, sites, options.days)
    except ValueError as error:
        sys.exit(f"fedlit: {error}")
    for party, name in (("The server", "server"), *((f"Site {name}", name) for name in sites)):
        files = [str(options.out / file) for file in (f"{name}.crt", f"{name}.key", "ca.crt")]
        print(f"{party} gets {files[0]!r}, {files[1]!r} and {files[2]!r}.")
    print(f"Nobody gets '{options.out / 'ca.key'}': who has it can make certificates in any name.")


def features(args: list[str]) -> None:
    """Write the features of a data module's samples."""
    if {"-h", "--help"} & {*args}:
        make_parser(None).parse_args(["--help"])
    load("fedlit.cli.extraction:extract")(args)


def make_parser(base: type | None) -> ArgumentParser:
    """What the command takes; ``base`` of data modules is ``None`` where help alone is wanted, which needs no torch."""
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(
        prog=PROG,
        description="Run a fixed network once over all samples of each client's data, as they are in evaluation, and "
        "write its features to an .npz file for fedlit.data.FeatureDomains: CLIENT_x (float32), CLIENT_y (int64, -1 "
        "where there is no label), classes. The same command again goes on where it was killed.",
    )
    parser.add_argument("--config", "-c", action="config", help="Configuration with data; its other keys are left out.")
    what = "The data module, such as fedlit.data.ImageDomains, and its arguments: --data.root FOLDER."
    if base is None:
        parser.add_argument("--data", required=True, metavar="CLASS", help=what)
    else:
        parser.add_subclass_arguments(base, "data", required=True, help=what)
    parser.add_argument(
        "--extractor",
        required=True,
        help="The network: a name of torchvision's, such as resnet50, timm/NAME (extra timm), efficientnet_lite0 "
        "(extra backbones; brings its weights), or a class such as fedlit.models.ResNet or my_package.MyNetwork. A "
        "pretrained network gets images as it was trained on, where --data leaves that open.",
    )
    parser.add_argument("--extractor_args", type=dict[str, Any], default={}, help="Arguments of a class, as YAML.")
    parser.add_argument("--weights", type=str | None, default=None, help="File of the network's state dict.")
    parser.add_argument("--out", type=str, required=True, help="The file, NAME.npz.")
    parser.add_argument("--clients", type=list[str] | None, default=None, help="Of these alone; default: all here.")
    parser.add_argument("--batch_size", type=int, default=32, help="Samples that go through the network at a time.")
    parser.add_argument("--device", type=str, default="cpu", help="On which: cpu, cuda, cuda:1, ...")
    return parser
