"""Label-free scores in a run: what they are of, through any backend, and as monitors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import Tensor
from torch.utils.data import TensorDataset

from fedlit import functional as fn
from fedlit.callbacks import CommunicationLedger, Validators, closing_table, summarise
from fedlit.callbacks.communication_ledger import sums_of
from fedlit.data import FederatedLoader
from fedlit.federation import RosterError
from fedlit.methods import FedAvg, FedRFTCA
from fedlit.models import MLP
from fedlit.privacy import PairwiseMasking
from refused import refused
from small_federation import CLIENTS, NUM_CLASSES, TARGET, Blobs, EveryMetric, build, trainer

NAMES = ["certainty", "diversity", "information", "density", "iwv", "dev"]
NAMES += ["calibrated", "neighbourhood", "trust", "class_means"]


def run(
    folder: Path,
    rounds: int = 2,
    callbacks: Any = (),
    data: Any = None,
    module: Any = None,
    validators: Validators | None = None,
    **kwargs: Any,
) -> Any:
    module = module or build()
    done = trainer(rounds, [validators or Validators(), *callbacks], folder, **kwargs)
    done.fit(module, data or Blobs())
    return module, {name: float(done.callback_metrics[f"validator/{name}"]) for name in NAMES}


def by_hand(
    module: Any,
    sources: Sequence[str] = CLIENTS[:-1],
    bandwidth: float = 0.5,
    ridge: float = 0.1,
    temperature: float = 0.05,
) -> dict[str, float]:
    """The scores of the trained clients on all their validation samples at once."""
    data, phi, logits, errors, losses = Blobs().parts["val"], {}, {}, {}, {}
    grid = fn.temperature_grid()
    with torch.no_grad():
        for name in CLIENTS:
            x, y = data[name].tensors
            features = F.normalize(module.replicas[name].extractor(x).double(), dim=1)
            frequencies = fn.sample_frequencies(32, features.shape[1], bandwidth, seed=module.federation.seed)
            phi[name] = fn.random_fourier_features(features, frequencies)
            logits[name] = module.replicas[name](x)
            errors[name] = (logits[name].argmax(dim=1) != y).double()
            losses[name] = fn.losses_at(logits[name], y, grid)
    calibrated = fn.calibrated_information(
        logits[TARGET], fn.best_temperature(grid, torch.cat([losses[name] for name in sources]).mean(dim=0))
    )
    directions = {name: fn.standardised_directions(data[name].tensors[0]) for name in CLIENTS}
    classes = logits[TARGET].argmax(dim=1)
    neighbourhood = fn.neighbourhood_information(classes, fn.nearest_neighbours(directions[TARGET]), 4)
    known = {name: F.one_hot(data[name].tensors[1], 4).double() for name in sources}
    guess = F.one_hot(classes, 4).double()
    match = fn.class_mean_match(
        guess.T @ directions[TARGET], guess.sum(dim=0),
        sum(known[name].T @ directions[name] for name in sources), sum(known[name].sum(dim=0) for name in sources),
    )  # fmt: skip
    p = logits[TARGET].double().softmax(dim=1)
    entropy = torch.special.entr(p).sum(dim=1).mean()
    pooled = fn.SourceMoments.of(
        torch.cat([phi[name] for name in sources]), torch.cat([errors[name] for name in sources])
    )
    iwv, dev = fn.importance_weighted_scores(pooled, phi[TARGET].mean(dim=0), ridge)
    right = 1 - torch.cat([errors[name] for name in sources]).mean()
    found: list[Tensor] = [
        fn.certainty_score(entropy, 4), fn.diversity_score(p.mean(dim=0)), fn.information_score(p.mean(dim=0), entropy),
        fn.soft_neighbourhood_density(p, temperature), iwv, dev,
        calibrated, neighbourhood, calibrated * neighbourhood * max(match, 0) * right, match,
    ]  # fmt: skip
    return {name: float(score) for name, score in zip(NAMES, found, strict=True)}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run(tmp_path_factory.mktemp("plain"))


def test_scores_are_of_all_validation_samples(plain):
    module, scores = plain
    assert scores == pytest.approx(by_hand(module), abs=1e-6)
    assert len(set(scores.values())) == len(NAMES)


@pytest.mark.parametrize(
    ("setting", "changed"),
    [({"bandwidth": 1.0}, {"iwv", "dev"}), ({"ridge": 10.0}, {"iwv", "dev"}), ({"temperature": 1.0}, {"density"})],
)
def test_a_setting_changes_the_scores_that_it_is_of(setting, changed, tmp_path):
    module, scores = run(tmp_path, validators=Validators(**setting))
    assert scores == pytest.approx(by_hand(module, **setting), abs=1e-6)
    default = by_hand(module)
    assert {name for name in NAMES if abs(scores[name] - default[name]) > 1e-3} == changed


@pytest.mark.parametrize(("seed", "width"), [(7, 8), (0, 6)])
def test_one_object_scores_modules_of_other_seeds_and_widths(seed, width, tmp_path, monkeypatch):
    validators = Validators()
    run(tmp_path, 1, validators=validators)  # of seed 0 and width 8
    monkeypatch.setenv("PL_GLOBAL_SEED", str(seed))
    torch.manual_seed(0)
    module, scores = run(
        tmp_path, 1, validators=validators, module=FedAvg(CLIENTS, TARGET, NUM_CLASSES, MLP(5, [width]))
    )
    assert module.federation.seed == seed
    assert scores == pytest.approx(by_hand(module), abs=1e-6)


class Extractions(Callback):
    def __init__(self) -> None:
        self.number = 0

    def on_sanity_check_start(self, trainer: Trainer, pl_module: Any) -> None:
        extractor = pl_module.replicas["amazon"].get_submodule("extractor")
        self._hook = extractor.register_forward_hook(self._count)

    def on_sanity_check_end(self, trainer: Trainer, pl_module: Any) -> None:
        self._hook.remove()

    def _count(self, *_: object) -> None:
        self.number += 1


def test_a_sanity_check_sends_and_extracts_nothing(tmp_path, plain):
    module, scores = plain
    checked, same = run(tmp_path, callbacks=[seen := Extractions()], num_sanity_val_steps=2)
    assert same == scores
    assert list(checked.federation.ledger) == list(module.federation.ledger)
    assert seen.number == 2, "those of the module's predictions"


def test_moments_through_masking_are_the_same(tmp_path, plain):
    module, masked = run(tmp_path, strategy={"privacy": PairwiseMasking()})
    assert masked == pytest.approx(plain[1], abs=1e-3)
    assert module.federation.channels["source_moments"].description.backend == "PairwiseMasking"


@pytest.mark.parametrize(
    ("channel", "numbers"), [("source_moments", 4 * 32**2 + 6 * 32 + 41 + 1), ("class_means", 4 * 129 + 1)]
)
def test_the_target_is_sent_the_means_alone(plain, channel, numbers):
    sent = [entry for entry in plain[0].federation.ledger if entry.channel == channel]
    once = [*((name, "server") for name in CLIENTS[:-1]), ("server", TARGET)]
    assert [(entry.sender, entry.receiver) for entry in sent] == 2 * once
    assert all(numbers * 8 <= entry.num_bytes < numbers * 8 + 300 for entry in sent)


def test_scores_of_the_target_alone_cost_the_sources_nothing(tmp_path):
    module = build()
    done = trainer(1, [Validators(names=["information", "density", "neighbourhood"])], tmp_path)
    done.fit(module, Blobs())
    assert not {"source_moments", "class_means"} & {entry.channel for entry in module.federation.ledger}
    logged = {name for name in done.callback_metrics if name.startswith("validator/")}
    assert logged == {"validator/information", "validator/density", "validator/neighbourhood"}
    assert float(done.callback_metrics["validator/information"]) == pytest.approx(
        float(done.callback_metrics["target/score"])
    )


@pytest.mark.parametrize("name", ["dev", "density"])
def test_a_checkpoint_is_kept_by_a_score(name, tmp_path):
    metrics, monitor = EveryMetric(), f"validator/{name}"
    best = ModelCheckpoint(tmp_path, monitor=monitor, mode="max", filename="{epoch}")
    stop = EarlyStopping(monitor, mode="max", patience=50, check_on_train_epoch_end=False)
    run(tmp_path, 4, [metrics, best, stop], enable_checkpointing=True)
    scores = [row[monitor] for row in metrics.rows]
    assert len(set(scores)) == 4
    assert best.best_model_path.endswith(f"epoch={max(range(4), key=scores.__getitem__)}.ckpt")
    assert float(best.best_model_score) == pytest.approx(max(scores))
    assert float(stop.best_score) == pytest.approx(max(scores))


class Only(Blobs):
    """Only these clients have validation samples; if a number is given, so many."""

    def __init__(self, names: set[str] | dict[str, int]) -> None:
        super().__init__()
        self.numbers = names if isinstance(names, dict) else dict.fromkeys(names)

    def val_dataloader(self) -> FederatedLoader:
        val = self.parts["val"]
        own = {name: TensorDataset(*val[name][:number]) for name, number in self.numbers.items()}
        return FederatedLoader(own, batch_size=8, training=False, guarded=TARGET, seed=0)


def test_a_source_without_validation_samples_does_not_count(tmp_path):
    module, scores = run(tmp_path, data=Only({"amazon", "caltech", TARGET}))
    assert scores == pytest.approx(by_hand(module, ["amazon", "caltech"]), abs=1e-6)
    assert scores["iwv"] != pytest.approx(by_hand(module)["iwv"], abs=1e-4)


class Uneven(Blobs):
    """Sources have 30, 13 and 5 validation samples."""

    def __init__(self) -> None:
        super().__init__()
        for name, number in (("dslr", 13), ("caltech", 5)):
            cut = (tensor[:number] for tensor in self.parts["val"][name].tensors)
            self.parts["val"][name] = TensorDataset(*cut)


Mean = Callable[[Mapping[str, np.ndarray]], np.ndarray]


def weighted_in_numpy(module: Any, mean: Mean) -> dict[str, float]:
    """The formulas of `importance_weighted_scores`, sample by sample; E_S is ``mean`` of numbers by source."""
    frequencies = fn.sample_frequencies(32, 8, 0.5, seed=module.federation.seed).numpy()
    phi, wrong = {}, {}
    for name, samples in Uneven().parts["val"].items():
        x, y = samples.tensors
        with torch.no_grad():
            features = module.replicas[name].extractor(x).double().numpy()
            wrong[name] = (module.replicas[name](x).argmax(dim=1) != y).numpy().astype(float)
        phase = features / np.linalg.norm(features, axis=1, keepdims=True) @ frequencies.T
        phi[name] = np.hstack([np.cos(phase), np.sin(phase)]) / np.sqrt(32)
    sources = CLIENTS[:-1]
    square = mean({name: phi[name][:, :, None] * phi[name][:, None, :] for name in sources})
    theta = np.linalg.solve(square + 0.1 / 64 * np.eye(64), phi[TARGET].mean(axis=0))
    w = {name: phi[name] @ theta for name in sources}
    wl = {name: w[name] * wrong[name] for name in sources}
    mean_w, mean_wl = mean(w), mean(wl)
    variance = mean({name: (w[name] - mean_w) ** 2 for name in sources})
    covariance = mean({name: (wl[name] - mean_wl) * (w[name] - mean_w) for name in sources})
    eta = -covariance / variance
    return {"iwv": float(1 - mean_wl), "dev": float(1 - (mean_wl + eta * (mean_w - 1)))}


def test_sources_have_equal_shares_however_many_samples_they_have(tmp_path):
    module, scores = run(tmp_path, data=Uneven())
    shared = weighted_in_numpy(module, lambda values: np.mean([own.mean(axis=0) for own in values.values()], axis=0))
    pooled = weighted_in_numpy(module, lambda values: np.concatenate(list(values.values())).mean(axis=0))
    for name in ("iwv", "dev"):
        assert scores[name] == pytest.approx(shared[name], abs=1e-6)
        assert scores[name] != pytest.approx(pooled[name], abs=1e-3)


@pytest.mark.parametrize(
    ("names", "left", "problem"),
    [
        (["iwv"], {TARGET}, r"\['iwv'\] .* samples of the sources"),
        (["trust"], {TARGET}, r"\['trust'\] .* samples of the sources"),
        (["density", "class_means"], {TARGET}, r"\['class_means'\] .* samples of the sources"),
        (["trust"], {"amazon": 8, TARGET: 3}, r"\['trust'\] .* at least 4 .* got 3"),
        (["density"], set(CLIENTS[:-1]), "'webcam', which has no validation samples"),
        (["density"], {TARGET: 2}, r"\['density'\] .* at least 3 .* got 2"),
    ],
)
def test_nothing_to_score_is_an_error(names, left, problem, tmp_path):
    with pytest.raises(RosterError, match=problem):
        trainer(1, [Validators(names=names)], tmp_path).fit(build(), Only(left))


@pytest.mark.parametrize(
    "argument",
    [
        {"names": ["certainty", "luck"]},
        {"num_frequencies": 0},
        {"bandwidth": -1.0},
        {"ridge": 0.0},
        {"temperature": float("nan")},
    ],
    ids=str,
)
def test_arguments_are_checked_at_once(argument):
    with refused(*argument):
        Validators(**argument)


@pytest.mark.parametrize("privacy", [None, PairwiseMasking()])
def test_watching_is_not_counted_as_the_methods_traffic(privacy, tmp_path):
    def watched(callbacks: list[Any]) -> tuple[dict[str, float], int, Any]:
        module, ledger = build(), CommunicationLedger(print_table=False)
        done = trainer(2, [*callbacks, ledger], tmp_path, strategy={"privacy": privacy})
        done.fit(module, Blobs())
        _, method, _ = sums_of(module.federation.ledger)
        return dict(done.callback_metrics), method.total, summarise(done, module, 1.0)

    bare, total, _ = watched([])
    logged, with_scores, summary = watched([Validators()])
    assert with_scores == total
    assert float(logged["comm/MB"]) == float(bare["comm/MB"])
    assert float(logged["comm/source_moments/MB"]) > 0
    (cells,) = closing_table([summary]).texts()
    assert "source_moments" not in cells[5]
    logging = ("metrics", "source_moments", "class_means")
    sent = sum(size for name, size in summary.bytes_by_channel.items() if name.startswith(logging))
    assert float(cells[6]) == pytest.approx(sent / 1e6, rel=5e-3)
    assert any(note.startswith("privacy: source_moments -> ") for note in closing_table([summary]).footnotes)


def test_a_target_without_a_classifier_has_no_scores_until_it_has_one(tmp_path):
    seen = EveryMetric()
    module = build(FedRFTCA, num_frequencies=8, num_components=4, classifier_period=3)
    trainer(4, [Validators(), seen], tmp_path).fit(module, Blobs())
    scored = ["validator/dev" in row for row in seen.rows]
    assert scored == ["target/score" in row for row in seen.rows] == [False, False, False, True]
    assert {f"validator/{name}" for name in NAMES} <= {*seen.rows[-1]}


def test_regression_is_refused(tmp_path):
    with pytest.raises(ValueError, match="task='regression'"):
        trainer(1, [Validators()], tmp_path).fit(build(task="regression"), Blobs())
