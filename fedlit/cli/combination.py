"""``--select combine``: one network of what the methods of an experiment predict at the target."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedlit.callbacks import RunSummary
from fedlit.callbacks.report.run_folder import read_runs
from fedlit.callbacks.selection import (
    COMBINATION,
    Candidate,
    Member,
    Selection,
    changes_at_end,
    members_of,
    rule_of_members,
)
from fedlit.callbacks.shared import write_rows, write_whole
from fedlit.cli.folders import ExperimentFolder, fingerprint
from fedlit.cli.parsed import Parsed
from fedlit.cli.plan import Plan
from fedlit.cli.stored import load, newest
from fedlit.export.target import target_model
from fedlit.federation import UNLABELLED, FederatedLoader
from fedlit.federation.nested import vectors
from fedlit.functional import Combination, combine_predictions, neighbour_graph, standardised_directions
from fedlit.models import Replica
from fedlit.module import FederatedModule
from fedlit.run.refinement import LEAST_SAMPLES, last_layers, noting

if TYPE_CHECKING:
    from fedlit.cli.experiment import Experiment

NAME = "combined"
"""Of the trained network in tables."""

_LEAST = 0.005
"""Weight below which members are named without it."""

_LEARNT = 0.8
"""Share of samples on which a network has to name the combination's class to be called one that has learnt it."""

_TEACHER, _PREDICTIONS = "teacher.pt", "predictions.csv"


@dataclass(frozen=True)
class _Stored:
    """What a member says at the target of its n training samples."""

    candidate: Candidate
    probabilities: Tensor  # shape (n, C), float64
    inputs: Tensor | None  # side by side, shape (n, d), if they are vectors
    features: Tensor  # what its last layer is given, or else its probabilities, shape (n, d)
    state: Mapping[str, Tensor]  # of the target's network
    is_plain: bool  # whether that is an extractor and a classifier alone
    positions: Tensor  # in the data, shape (n,)
    ids: Sequence[str]
    classes: Sequence[str]


def combine(experiment: Experiment, selections: Sequence[Selection]) -> tuple[list[RunSummary], list[str]]:
    """Combine the members of each target and seed, and train a network on that.

    Returns:
        What the networks came to, and sentences on members, networks and refusals.
    """
    chosen = [each for each in selections if each.chosen is not None]
    sentences = [
        f"nothing is combined for {each.target} (seed {each.seed}): {each.refusal}"
        for each in selections
        if each.chosen is None
    ]
    plan = _Distilled(experiment, [(each.target, each.seed) for each in chosen])
    for number, selection in enumerate(chosen):
        place = plan.place(number)
        if experiment.parsed.arguments.fresh or not plan.is_of(number, selection):
            plan.folder.forget(number)
            refusal = _write(selection, place, experiment.base)
            if refusal:
                sentences.append(f"nothing is combined for {selection.target} (seed {selection.seed}): {refusal}")
                continue
            plan.train(number)
        sentences += plan.about(number)
    found = (plan.folder.finished(number) for number in range(len(chosen)))
    return [each for each in found if each is not None], sentences


class _Distilled(Plan):
    """A network of the target for each combination, trained after the experiment's runs."""

    def __init__(self, experiment: Experiment, cells: Sequence[tuple[str, str]]) -> None:
        self.parsed, self.runs, self.targets_tried = experiment.parsed, cells, ()
        self._experiment, self._cells = experiment, cells

    def place(self, number: int) -> Path:
        """Where the combination of a target and seed is."""
        target, seed = self._cells[number]
        return self._experiment.folder.path / NAME / f"{target}_{seed}"

    def configuration(self, number: int) -> Parsed:
        """The experiment's data and network, taught by the combination."""
        target, seed = self._cells[number]
        return self._experiment.taught(str(self.place(number) / _TEACHER)).on(target, int(seed))

    def name(self, number: int) -> str:
        """Its name in tables."""
        return NAME

    @property
    def is_many(self) -> bool:
        """They belong to the experiment's runs."""
        return True

    @cached_property
    def folder(self) -> ExperimentFolder:
        """In the experiment's own."""
        each = [fingerprint(self.configuration(number).text) for number in range(len(self.runs))]
        return ExperimentFolder(self.root, f"{self._experiment.folder.path.name}/{NAME}", len(each), each.__getitem__)

    def close(self, done: Mapping[int, RunSummary], failed: Collection[int]) -> None:
        """Nothing: the experiment closes."""

    def is_of(self, number: int, selection: Selection) -> bool:
        """Whether there is a network already, of the models that are selected now."""
        place = self.place(number) / COMBINATION
        if self.folder.finished(number) is None or not place.is_file():
            return False
        return bool(json.loads(place.read_text(encoding="utf-8")).get("of") == _key(selection))

    def about(self, number: int) -> list[str]:
        """The members, where the network is, and what was lost on the way to it."""
        folder, place = self.folder.folder_of(number), self.place(number)
        if folder is None:
            return []
        text = (place / COMBINATION).read_text(encoding="utf-8")
        write_whole(folder / COMBINATION, text)
        run, left_out = read_runs([folder])[0], json.loads(text)["left_out"]
        agreement = [*run.curves.get("target/agreement", {}).values()]
        lost = _agreement(agreement[-1]) if agreement else ""  # which reports may leave out
        return [
            f"combined for {run.target} (seed {run.seed}): {_sentence(run.members)}",
            *(f"left out: {method}: {reason}" for method, reason in left_out.items()),
            f"network of the combination: '{folder}'{lost}; what each model says: '{place / _PREDICTIONS}'",
        ]


def _agreement(share: float) -> str:
    text = f", which names the combination's class on {share:.1%} of the target's training samples"
    if share >= _LEARNT:
        return text
    return (
        f"{text}, less than {_LEARNT:.0%}: it has not learnt the combination, so train it for more rounds "
        "(trainer.max_epochs), or at another learning rate, or take what the file says"
    )


def _write(selection: Selection, place: Path, base: str) -> str:
    """Write what the network is taught, what each member says, and the members with their weights.

    Returns:
        The reason why there is no combination, if there is none, in which case nothing is written.
    """
    stored, left_out = _read_all(selection, base)
    if not stored:
        return f"all are left out: {'; '.join(f'{name}: {reason}' for name, reason in left_out.items())}"
    first, number = stored[0], len(stored[0].probabilities)
    if number < LEAST_SAMPLES:
        return f"neighbourhoods take {LEAST_SAMPLES} training samples of the target, and it has {number}"
    features = _features(stored)
    combination = combine_predictions(
        [each.probabilities for each in stored], neighbour_graph(features), features=features
    )
    members = _members(stored, combination)
    teacher: dict[str, Any] = {"probabilities": combination.p.float()}
    # weights of the network that is trained on, where a member has it
    for each in (each for each in stored if each.candidate.method == base and each.is_plain):
        teacher["start"] = dict(each.state)
    place.mkdir(parents=True, exist_ok=True)
    torch.save(teacher, place / _TEACHER)
    predicted = torch.stack([each.probabilities.argmax(dim=1) for each in stored], dim=1).tolist()
    header = ["id", "predicted", *first.classes, *(f"by {each.method}" for each in members)]
    rows = [
        [name, first.classes[row.index(max(row))], *row, *(first.classes[label] for label in labels)]
        for name, row, labels in zip(first.ids, combination.p.tolist(), predicted, strict=True)
    ]
    write_rows(place / _PREDICTIONS, [header, *rows])
    content = {"members": [asdict(each) for each in members], "left_out": left_out, "of": _key(selection)}
    write_whole(place / COMBINATION, json.dumps(content, indent=2))
    return ""


def _key(selection: Selection) -> list[list[Any]]:
    """Run, round and trust of each candidate, by which a selection is recognised when the command is repeated."""
    return [[each.run, each.round_idx, each.trust] for each in selection.candidates]


def _read_all(selection: Selection, base: str) -> tuple[list[_Stored], dict[str, str]]:
    """What members say of the samples that the base method has, and by method why another is left out."""
    stored, left_out = list[_Stored](), dict[str, str]()
    for candidate in selection.candidates:
        try:
            stored.append(_read(candidate))
        except (SystemExit, TypeError, RuntimeError, ValueError) as error:
            left_out[candidate.method] = str(error).removeprefix("fedlit: ")
    if not stored:
        return [], left_out
    num_classes = len(stored[0].classes)
    members = {each.method for each in members_of(selection, num_classes)}
    reference = next((each for each in stored if each.candidate.method == base), None)
    taken = list[_Stored]()
    for each in stored:
        if reference is not None and not torch.equal(each.positions, reference.positions):
            left_out[each.candidate.method] = f"it has other training samples of the target than {base}"
        elif each.candidate.method not in members:
            left_out[each.candidate.method] = rule_of_members(num_classes)
        else:
            taken.append(each)
    return taken, left_out


def _features(stored: Sequence[_Stored]) -> Tensor:
    """What the target's samples are compared by: their vectors, or else the features of all members together."""
    inputs = stored[0].inputs
    if inputs is not None:
        return standardised_directions(inputs)
    return torch.cat([standardised_directions(each.features) for each in stored], dim=1)


def _members(stored: Sequence[_Stored], combination: Combination) -> list[Member]:
    classes = combination.p.argmax(dim=1)
    agreements = [float((each.probabilities.argmax(dim=1) == classes).double().mean()) for each in stored]
    columns = zip(stored, combination.weights.tolist(), combination.information.tolist(), agreements, strict=True)
    return [
        Member(each.candidate.method, each.candidate.round_idx, each.candidate.trust, weight, information, agreement)
        for each, weight, information, agreement in columns
    ]


def _sentence(members: Sequence[Member]) -> str:
    taken = sorted((each for each in members if each.weight >= _LEAST), key=lambda each: -each.weight)
    out = [each.method for each in members if each.weight < _LEAST]
    text = ", ".join(f"{each.method} {each.weight:.0%}" for each in taken)
    return text + (f"; less than {_LEAST:.1%}: {', '.join(out)}" if out else "")


def _read(candidate: Candidate) -> _Stored:
    """Predict the target's training samples with a run's most trusted round, or its last one, see `changes_at_end`."""
    run_dir = Path(candidate.run)
    kept = [] if changes_at_end(read_runs([run_dir])[0]) else sorted((run_dir / "checkpoints").glob("trusted-*.ckpt"))
    module, data = load([str(run_dir / "config.yaml")], kept[0] if kept else newest(run_dir / "checkpoints"))
    name = module.target.name
    model, positions = target_model(module), data.split(name).train
    samples = data.make_dataset(name, positions, torch.full((len(positions),), UNLABELLED), training=False)
    probabilities, inputs, features = list[Tensor](), list[Tensor | None](), list[Tensor]()
    with torch.no_grad(), noting(last_layers(model, module.num_classes)) as calls:
        for batch in FederatedLoader({name: samples}, 512, training=False, guarded=name):
            x = batch[name][0]
            calls.clear()
            probabilities.append(model(x).double())
            inputs.append(vectors(x))
            features.append(calls[-1][1] if calls and calls[-1][1].dim() == 2 else probabilities[-1])
    flat = [each for each in inputs if each is not None]
    ids = data.ids(name, "train")
    return _Stored(
        candidate,
        torch.cat(probabilities),
        torch.cat(flat) if flat else None,
        torch.cat(features),
        module.replicas[name].state_dict(),
        type(module.replicas[name]) is Replica and type(module).build_replica is FederatedModule.build_replica,
        positions,
        [str(place) for place in positions.tolist()] if ids is None else ids,
        data.classes,
    )
