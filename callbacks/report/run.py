"""One run as blocks of a page."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fedlit.callbacks.communication_ledger import ledger_table, split
from fedlit.callbacks.privacy_report import ChannelReport, channel_table
from fedlit.callbacks.report.charts import Line, Panel
from fedlit.callbacks.report.pages import Block, Bullets, Folded, Heading, Picture, Pictures, Text, pictures_in
from fedlit.callbacks.report.run_folder import Curve, RunFolder, as_yaml
from fedlit.callbacks.run_record import METRICS, SUMMARY
from fedlit.callbacks.shared import LOGGING_CHANNELS
from fedlit.federation import KEYS
from fedlit.tables import Table

ORACLE = "ORACLE"
"""Marks scores that are measured with the target's hidden labels."""

_PRIVACY_KEYS = tuple(f"trainer.strategy.init_args.{name}" for name in ("privacy", "two_party", "differential_privacy"))


def blocks_of(run: RunFolder, anchor: str, pictured: bool = True) -> list[Block]:
    """Clients, curves, communication and privacy of a run; ``pictured`` ones of its folder are shown, or else named."""
    blocks: list[Block] = []
    if run.summary is None:
        blocks.append(
            Text(
                f"This run has no {SUMMARY}: it was interrupted, or was not one of fedlit fit. What follows is what it "
                f"left until then, {run.num_rounds} rounds."
            )
        )
    if not run.curves:
        blocks.append(Text(f"There are no curves: {METRICS} has no round, or there is none, as with other loggers."))
    blocks += [*_clients(run), *_intervals(run), *_clinic(run)]
    for title, panels in (
        ("R2" if run.is_regression else "Accuracy", _scores(run)),
        ("Losses", _losses(run)),
        ("Weights of the sources", _weights(run)),
        ("Barycentric coordinates", _coordinates(run)),
    ):
        if panels:
            slug = title.lower().replace(" ", "_")
            blocks += [Heading(3, title), *drawn(panels, f"{anchor}_{slug}", run.name)]
    if run.members:
        blocks += [Heading(3, "Members of the combination"), *_members(run)]
    blocks += [Heading(3, "Communication"), *_communication(run, anchor)]
    blocks += [Heading(3, "Privacy"), *_privacy(run, anchor)]
    if run.pictures and not pictured:
        named = ", ".join(path.name for path in run.pictures)
        blocks.append(Text(f"In its folder are pictures, too many for a page on so many runs: {named}."))
    elif run.pictures:
        pictures = [
            Picture(f"{anchor}_{path.name}", f"{run.name}: {path.stem}", path.read_bytes()) for path in run.pictures
        ]
        blocks += [Heading(3, "Pictures of the run"), Pictures(pictures, wide=True)]
    return blocks


def curves_of(run: RunFolder) -> list[Picture]:
    """Drawings of scores and losses over the rounds, captioned with the run's name."""
    return list(pictures_in(drawn([*_scores(run), *_losses(run)], "curves", run.name)))


def drawn(panels: Sequence[Panel], file: str, origin: str) -> list[Block]:
    """Pictures of panels, captioned with the runs that they are from, and their numbers."""
    pictures = [
        Picture(f"{file}_{place + 1}.svg", f"{origin}: {panel.title}", panel.draw())
        for place, panel in enumerate(panels)
    ]
    return [Pictures(pictures), *(Folded(f"numbers: {panel.title}", [_by_round(panel.lines)]) for panel in panels)]


def _members(run: RunFolder) -> list[Block]:
    """The models whose predictions the network has learnt."""
    text = (
        "The network has learnt the mean of these models' predictions for the target's training samples, refined by "
        "their neighbourhoods; no label of the target was used. Models weigh by information, that of a sample's "
        "predicted class about its neighbours', in [0, 1], and those that predict alike share their weight. The last "
        "column is the share of samples of which a model names the class that all together name: no accuracy."
    )
    shown = ("trust", "weight", "information", "agreement")
    rows = [
        [each.method, str(each.round_idx), *(f"{getattr(each, name):.3f}" for name in shown)]
        for each in sorted(run.members, key=lambda each: -each.weight)
    ]
    return [Text(text), Table.of(["method", "after round", *shown], rows)]


def _by_round(lines: Sequence[Line]) -> Table:
    rounds = sorted({round_idx for line in lines for round_idx in line.points})
    rows = [[str(round_idx), *(_at(line, round_idx) for line in lines)] for round_idx in rounds]
    return Table.of(["round", *(line.label for line in lines)], rows, words=0)


def _at(line: Line, round_idx: int) -> str:
    if round_idx not in line.points:
        return ""
    spread = f" ± {_number(line.spread[round_idx])}" if round_idx in line.spread else ""
    return _number(line.points[round_idx]) + spread


def _number(value: float) -> str:
    """Four digits; whole numbers in full."""
    return f"{value:,.0f}" if math.isfinite(value) and value == int(value) else f"{value:#.4g}"


# ---------------------------------------------------------------- scores and losses


_ERRORS = ("rmse", "mae")
"""Metrics in regression beside R2."""


def _metric(run: RunFolder) -> str:
    return "r2" if run.is_regression else "acc"


def _sources(run: RunFolder) -> list[str]:
    matches = (re.fullmatch(r"source/([^/]+)/\w+", name) for name in (*run.curves, *run.final))
    return sorted({match[1] for match in matches if match})


def _lines(run: RunFolder, *curves: tuple[Any, ...]) -> list[Line]:
    """Curves that were logged, each as its metric and, of `Line`, its label, place and emphasis.

    ``*`` in a metric stands for each source, which labels the line and gives it its colour.
    """
    lines = []
    for metric, *look in curves:
        looks = enumerate(_sources(run)) if "*" in metric else [(None, "")]
        for place, source in looks:
            name = metric.replace("*", source)
            if name in run.curves:
                lines.append(
                    Line(source, run.curves[name], place) if source else Line(look[0], run.curves[name], *look[1:])
                )
    return lines


def panel_of(
    title: str, lines: Sequence[Line], limits: tuple[float, float] | None = None, logarithmic: bool = False
) -> list[Panel]:
    """A panel, if there is something to draw."""
    return [Panel(title, lines, limits, logarithmic)] if lines else []


def _scores(run: RunFolder) -> list[Panel]:
    metric, target = _metric(run), f"{run.target} (target, {ORACLE})"
    others = sorted(name for name in run.curves if re.fullmatch(rf"oracle/target/[^/]+/{metric}", name))
    lines = _lines(
        run,
        (f"source/*/{metric}",),
        (f"source/{metric}", "mean of sources"),
        (f"oracle/target/{metric}", target, None, True),
        *(
            (name, f"{run.target} by {name.split('/')[2]} ({ORACLE})", place)
            for place, name in enumerate(others, len(_sources(run)))
        ),
    )
    if metric == "acc":
        lines = [in_percent(line) for line in lines]
        panels = panel_of("accuracy on validation samples, in %", lines, (-2, 102))
    else:
        panels = panel_of("R2 on validation samples, at most 1", lines)
        for name in _ERRORS:
            wrong = _lines(
                run,
                (f"source/*/{name}",),
                (f"source/{name}", "mean of sources"),
                (f"oracle/target/{name}", target, None, True),
            )
            panels += panel_of(f"{name.upper()} on validation samples, in the labels' unit", wrong)
    validators = sorted(name for name in run.curves if name.startswith("validator/"))
    scores = ((name, name, place) for place, name in enumerate(validators))
    free = _lines(run, ("target/score", "target/score"), *scores)
    return [*panels, *panel_of("label-free scores of the target, the higher the better", free)]


def in_percent(line: Line) -> Line:
    """The same, of a share."""
    points, spread = ({at: 100 * value for at, value in of.items()} for of in (line.points, line.spread))
    return replace(line, points=points, spread=spread)


def _losses(run: RunFolder) -> list[Panel]:
    training = _lines(
        run,
        ("source/*/loss",),
        ("target/loss", f"{run.target} (target)", len(_sources(run))),
        ("train/loss", "mean of clients"),
    )
    oracle = ("oracle/target/loss", f"{run.target} (target, {ORACLE})", None, True)
    return [
        *panel_of("training loss, mean over the local steps of a round", training, logarithmic=True),
        *panel_of("loss on validation samples", _lines(run, ("source/*/eval_loss",), oracle), logarithmic=True),
    ]


def _weights(run: RunFolder) -> list[Panel]:
    beta = _lines(run, ("beta/*",), ("beta", "mean of sources", None, True))
    distance = _lines(run, ("distance/*",), ("target_variance", "target variance", None, True))
    tau = _lines(run, ("tau/*",))
    return [
        *panel_of("weight of the source, beta", beta, (-0.03, 1.03)),
        *panel_of("squared distance of updates, and variance of the target's", distance, logarithmic=True),
        *panel_of("tau: distance of g_T to the directions of g_S, over d", tau, (-0.03, 1.03)),
    ]


def _coordinates(run: RunFolder) -> list[Panel]:
    panels: list[Panel] = []
    costs: list[Line] = []
    for place, (client, columns) in enumerate(run.dictionary.items()):
        role = f"{client} (target)" if client == run.target else client
        atoms = [name for name in columns if name.startswith("coordinate_")]
        lines = [Line(f"atom {name.removeprefix('coordinate_')}", columns[name], at) for at, name in enumerate(atoms)]
        panels += panel_of(f"barycentric coordinates of {role}", lines, (-0.03, 1.03))
        costs += [Line(role, columns["transport_cost"], place)] if "transport_cost" in columns else []
    return [*panels, *panel_of("cost of transport to the client's barycenter", costs)]


def _clients(run: RunFolder) -> list[Block]:
    """The last scores of each client."""
    unit = "accuracy in %" if _metric(run) == "acc" else "R2"
    rows = [_client_row(run, source, "source", f"source/{source}", f"source/{source}/loss") for source in _sources(run)]
    role = f"target (its {'scores' if run.is_regression else 'accuracy'}: {ORACLE})"
    rows.append(_client_row(run, "mean", "sources", "source", None))
    rows.append(_client_row(run, run.target, role, "oracle/target", "target/loss"))
    rows = [row for row in rows if any(row[2:])]
    if not rows:
        return []
    header = [f"{unit}, last validation", "in round", f"{unit}, test samples", "last training loss"]
    if run.is_regression:
        header += [f"{name.upper()}, {of}" for name in _ERRORS for of in ("last validation", "test samples")]
    return [Table.of(["client", "role", *header], rows, words=2)]


def _intervals(run: RunFolder) -> list[Block]:
    """Radii of intervals, and what is promised and measured of them."""
    latest = _latest(run)
    radii = {name: value for name, value in latest.items() if re.match("target/radius(/|$)", name)}
    radii = {name: value for name, value in radii.items() if "/" in name.removeprefix("target/")} or radii
    if not radii:
        return []
    each = ", ".join(f"{name.removeprefix('target/')} {value:.4g}" for name, value in radii.items())
    alpha = None if run.summary is None else run.summary.alpha
    share = "the share 1 - alpha" if alpha is None else f"{100 * (1 - alpha):.4g}%"
    text = f"Intervals around predictions: {each}, in the labels' unit. They hold at least {share} of new samples that "
    text += "are like the sources' validation samples; for a target that differs nothing is promised."
    if "oracle/target/coverage" in latest:
        text += f" Of the target's samples they hold {100 * latest['oracle/target/coverage']:.1f}% ({ORACLE})."
    return [Text(text)]


def _latest(run: RunFolder) -> dict[str, float]:
    """Metrics of test samples, or else of the last validation."""
    return {name: curve[max(curve)] for name, curve in run.curves.items()} | {**run.final}


def _clinic(run: RunFolder) -> list[Block]:
    """A row for each metric of a clinic, a column for each client."""
    by_client: dict[str, dict[str, float]] = {}
    latest = _latest(run)
    for name, value in latest.items():
        match = re.fullmatch(rf"(oracle/target|source/[^/]+)/({_CLINIC})", name)
        if match:
            client = f"{run.target} ({ORACLE})" if match[1] == "oracle/target" else match[1].removeprefix("source/")
            by_client.setdefault(client, {})[match[2]] = value
    by_client = dict(sorted(by_client.items(), key=lambda pair: ORACLE in pair[0]))  # the target last
    names = sorted({name for row in by_client.values() for name in row}, key=lambda name: ("/" in name, name))
    chosen = {name: value for name, value in latest.items() if name.startswith("threshold/")}
    if not names:
        return []
    rows = [[name, *(f"{row[name]:.3f}" if name in row else "" for row in by_client.values())] for name in names]
    thresholds = ", ".join(f"{name.removeprefix('threshold/')} {value:.4g}" for name, value in chosen.items())
    about = f" The thresholds of a probability that hold it: {thresholds}." if chosen else ""
    text = (
        "Metrics of a clinic, on test samples or else on the last validation's. Those of at_specificity/ and "
        f"at_sensitivity/ are at the threshold that the sources' validation samples chose.{about}"
    )
    return [Text(text), Table.of(["metric", *by_client], rows)]


_CLINIC = "auroc(?:_low|_high)?|sensitivity_at_specificity|specificity_at_sensitivity|at_(?:specificity|sensitivity)/.+"
"""Names of what `ClinicMetrics` logs."""


def _client_row(run: RunFolder, client: str, role: str, prefix: str, loss: str | None) -> list[str]:
    score = f"{prefix}/{_metric(run)}"
    last = max(run.curves.get(score, {}), default=None)
    losses: Curve = run.curves.get(loss or "", {})
    cells = [
        *(client, role, _last(run, score), "" if last is None else str(last)),
        _score(score, run.final[score]) if score in run.final else "",
        _number(losses[max(losses)]) if losses else "",
    ]
    for name in _ERRORS if run.is_regression else ():
        cells += [_last(run, f"{prefix}/{name}")]
        cells += [_score(name, run.final[f"{prefix}/{name}"]) if f"{prefix}/{name}" in run.final else ""]
    return cells


def _last(run: RunFolder, name: str) -> str:
    curve: Curve = run.curves.get(name, {})
    return _score(name, curve[max(curve)]) if curve else ""


def _score(name: str, value: float) -> str:
    if name.endswith(_ERRORS):
        return _number(value)
    return f"{100 * value:.1f}" if name.endswith("acc") else f"{value:.3f}"


# ---------------------------------------------------------------- communication and privacy


def _communication(run: RunFolder, anchor: str) -> list[Block]:
    """Bytes by channel: those of the ledger, or, where it was not written, those that the metrics have."""
    points: dict[str, dict[int, float]] = {}
    if run.ledger is not None:
        for entry in run.ledger:
            sent = points.setdefault(entry.channel, {})
            sent[entry.round_idx] = sent.get(entry.round_idx, 0) + entry.num_bytes
        about = (
            "Bytes by channel, as the ledger has them: up to the server, down from it, and from client to client; per "
            "round in which the channel was used. The channels 'metrics', 'oracle' and 'source_moments' carry what is "
            "watched, and are not the method's; numbers of an evaluation are booked to the round that it is of, other "
            "messages between two rounds to the later one."
        )
        table = ledger_table(run.ledger, exact=True)
    else:
        for name, curve in run.curves.items():
            match = re.fullmatch(r"comm/(.+)/MB", name)
            # a channel that is not used in a round is logged as 0, and has no entry in a ledger
            sent = {at: float(round(1e6 * amount)) for at, amount in curve.items() if amount}
            if match and sent:
                points[match[1]] = sent
        if not points:
            return [Text("Not known: there is no ledger.csv, and no round has logged bytes.")]
        about = (
            f"There is no ledger.csv: bytes are those that {METRICS} has of each round when it ended, without who sent "
            "to whom, and without what evaluations report after it."
        )
        rows = []
        for channel, sent in points.items():
            total = sum(sent.values())
            rows.append([channel, str(len(sent)), f"{total:,.0f}", f"{total / len(sent):,.0f}"])
        table = Table.of(["channel", "rounds", "total", "per round"], rows)
    of_method, watching = split(points)
    lines = [Line(name, points[name], place) for place, name in enumerate(of_method)]
    lines += [Line(name, points[name], None) for name in watching]
    panels = panel_of("bytes sent in a round, by channel", lines, logarithmic=True)
    return [Text(about), table, *drawn(panels, f"{anchor}_communication", run.name)]


def _privacy(run: RunFolder, anchor: str) -> list[Block]:
    report = run.privacy
    blocks = _configured(run) if report is None else []
    if report is not None and any(channel.clip_norm is not None for channel in report.channels):
        losses = (report.epsilon_message, report.epsilon_sum)  # JSON has no infinity
        by_message, by_sum = ("without bound" if each is None else f"{each:.3g}" for each in losses)
        blocks.append(
            Text(
                f"Greatest privacy loss of a client, at most: epsilon {by_message} against those who see single "
                f"messages, {by_sum} against those who see sums only."
            )
        )
    if report is not None and report.channels:
        blocks.append(channel_table(report.channels))
    spent = _lines(
        run, ("privacy/epsilon", "who sees single messages", 0), ("privacy/epsilon_sum", "who sees sums only", 1)
    )
    panels = panel_of("epsilon spent by a client, at most, against those", spent)
    return [*blocks, *(drawn(panels, f"{anchor}_privacy", run.name) if panels else [])]


def _configured(run: RunFolder) -> list[Block]:
    """What the run's other files show, where `PrivacyReport` wrote none."""
    configured = [
        f"{key.removeprefix('trainer.strategy.init_args.')}: {as_yaml(value)}"
        for key, value in run.config.items()
        if key.startswith(_PRIVACY_KEYS) and value is not None
    ]
    blocks: list[Block] = [
        Text(
            "There is no privacy.json (--trainer.callbacks+=fedlit.callbacks.PrivacyReport writes it): this is "
            "what the run's other files show."
        ),
        Bullets(configured) if configured else Text("No privacy backend is configured."),
    ]
    summary = run.summary
    sent = [] if summary is None else summary.bytes_by_channel
    channels = [
        ChannelReport(name, summary.backends.get(name), 0, 0, 0, None, None, summary.channels.get(name, ""))
        for name in sent
        if summary is not None and name not in LOGGING_CHANNELS and not name.endswith(KEYS)
    ]
    return [*blocks, channel_table(channels, with_traffic=False)] if channels else blocks
