"""``fedlit report RUN_DIR ...``: what runs came to, as a page."""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from pathlib import Path

from fedlit.cli.loading import load

_DESCRIPTION = """
Make one HTML page of what runs of fedlit fit left in their folders, and the same as Markdown. The page has the closing
table of all runs, what differs in their configurations, and for each run its accuracy per client, label-free scores and
losses over rounds, weights of the sources, the ledger by channel, what was hidden from whom, and its pictures. It needs
no other file and no network. Numbers on the target's hidden labels are marked ORACLE.
"""


def report(args: list[str]) -> None:
    """Write the page, and print its path."""
    parser = ArgumentParser("fedlit report", description=_DESCRIPTION)
    parser.add_argument(
        "runs",
        nargs="+",
        type=Path,
        metavar="RUN_DIR",
        help="folder of a run (runs/METHOD/version_N, if nothing else was set), or one above several runs, all of "
        "which are taken; a run that was interrupted is reported as far as it came",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("report.html"),
        metavar="PATH",
        help="the HTML page (default: report.html); beside it, under the same name, go the Markdown page with .md and "
        "a folder of its pictures with _files (report.md, report_files)",
    )
    options = parser.parse_args(args)
    if options.output.suffix != ".html":
        parser.error(f"--output must end in .html, as the Markdown page goes beside it as .md, got '{options.output}'")
    read_runs, write_report = (load(f"fedlit.callbacks.report:{name}") for name in ("read_runs", "write_report"))
    try:
        paths = write_report(read_runs(options.runs), options.output)
    except (OSError, ValueError) as error:
        sys.exit(f"fedlit report: {error}")
    print(f"wrote {paths[0]} and {paths[1]} (pictures in {paths[2]})")
