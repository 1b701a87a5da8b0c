"""Label-free scores in a run: what they are of, through any backend, and as monitors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
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
from refused import refused, slow
from small_federation import CLIENTS, NUM_CLASSES, TARGET, Blobs, EveryMetric, build, trainer

NAMES = ["certainty", "diversity", "information", "density", "iwv", "dev"]
NAMES += ["calibrated", "neighbourhood", "trust", "class_means"]


def run(folder, rounds=2, callbacks=(), data=None, module=None, validators=None, **kwargs: Any):
    module = module or build()
    done = trainer(rounds, [validators or Validators(), *callbacks], folder, **kwargs)
    done.fit(module, data or Blobs())
    return module, {name: float(done.callback_metrics[f"validator/{name}"]) for name in NAMES}


def by_hand(module, sources=CLIENTS[:-1], data=None, bandwidth=0.5, ridge=0.1, temperature=0.05):
    """The scores of the trained clients on all their validation samples at once; sources count equally."""
    samples = {name: part.tensors for name, part in (data or Blobs()).parts["val"].items()}
    grid, target = fn.temperature_grid(), samples[TARGET][0]
    phi, errors, losses, by_class = {}, {}, {}, {}
    directions = {name: fn.standardised_directions(x) for name, (x, _) in samples.items()}
    with torch.no_grad():
        for name, (x, y) in samples.items():
            features = F.normalize(module.replicas[name].extractor(x).double(), dim=1)
            frequencies = fn.sample_frequencies(32, features.shape[1], bandwidth, seed=module.federation.seed)
            phi[name] = fn.random_fourier_features(features, frequencies)
            logits = module.replicas[name](x)
            errors[name] = (logits.argmax(dim=1) != y).double()
            losses[name] = fn.losses_at(logits, y, grid).mean(dim=0)
            known = F.one_hot(y, 4).double() / len(y)
            by_class[name] = known.T @ directions[name], known.sum(dim=0)
        logits = module.replicas[TARGET](target)

    def mean(of: Sequence[Tensor]) -> Tensor:
        return torch.stack([*of]).mean(dim=0)

    calibrated = fn.calibrated_information(logits, fn.best_temperature(grid, mean([losses[name] for name in sources])))
    classes = logits.argmax(dim=1)
    neighbourhood = fn.neighbourhood_information(classes, fn.nearest_neighbours(directions[TARGET]), 4)
    guess = F.one_hot(classes, 4).double()
    of_sources = map(mean, zip(*(by_class[name] for name in sources), strict=True))
    match = fn.class_mean_match(guess.T @ directions[TARGET], guess.sum(dim=0), *of_sources)
    p = logits.double().softmax(dim=1)
    entropy = torch.special.entr(p).sum(dim=1).mean()
    moments = [fn.SourceMoments.of(phi[name], errors[name]) for name in sources]
    mixed = fn.SourceMoments(*(mean([getattr(each, field) for each in moments]) for field in vars(moments[0])))
    iwv, dev = fn.importance_weighted_scores(mixed, phi[TARGET].mean(dim=0), ridge)
    right = 1 - mean([errors[name].mean() for name in sources])
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


def test_one_object_scores_modules_of_other_seeds_and_widths(tmp_path, monkeypatch):
    validators = Validators()
    run(tmp_path, 1, validators=validators)  # of seed 0 and width 8
    monkeypatch.setenv("PL_GLOBAL_SEED", "7")
    torch.manual_seed(0)
    module, scores = run(tmp_path, 1, validators=validators, module=FedAvg(CLIENTS, TARGET, NUM_CLASSES, MLP(5, [6])))
    assert module.federation.seed == 7
    assert scores == pytest.approx(by_hand(module), abs=1e-6)


def test_a_sanity_check_sends_nothing(tmp_path, plain):
    module, scores = plain
    checked, same = run(tmp_path, num_sanity_val_steps=2)
    assert same == scores
    assert list(checked.federation.ledger) == list(module.federation.ledger)


def test_moments_through_masking_are_the_same(tmp_path, plain):
    module, masked = run(tmp_path, strategy={"privacy": PairwiseMasking()})
    assert masked == pytest.approx(plain[1], abs=1e-3)
    assert module.federation.channels["source_moments"].description.backend == "PairwiseMasking"


@pytest.mark.parametrize(
    ("channel", "numbers"), [("source_moments", 4 * 32**2 + 6 * 32 + 53 + 1), ("class_means", 4 * 129 + 1)]
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


@pytest.mark.parametrize("name", [slow("dev"), "density"])
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


def test_sources_have_equal_shares_however_many_samples_they_have(tmp_path):
    module, scores = run(tmp_path, data=Uneven())
    assert scores == pytest.approx(by_hand(module, data=Uneven()), abs=1e-6)
    assert scores["iwv"] != pytest.approx(by_hand(module)["iwv"], abs=1e-3)


@pytest.mark.parametrize(
    ("names", "left", "problem"),
    [
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
        {"temperature": float("nan")},
    ],
    ids=str,
)
def test_arguments_are_checked_at_once(argument):
    with refused(*argument):
        Validators(**argument)


def test_watching_is_not_counted_as_the_methods_traffic(tmp_path):
    def watched(callbacks: list[Any]) -> tuple[dict[str, float], int, Any]:
        module, ledger = build(), CommunicationLedger(print_table=False)
        done = trainer(2, [*callbacks, ledger], tmp_path, strategy={"privacy": PairwiseMasking()})
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
    logging = ("metrics", "source_moments", "class_means", "validation_classes")
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
