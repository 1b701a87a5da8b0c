"""What every method does: it resumes, is absent, declares what it sends, and trains the same wherever it runs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import yaml
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils._pytree import tree_leaves

import fedgp_by_hand
from fedgp_by_hand import unequal
from fedlit import FederatedModule, FederatedStrategy, methods
from fedlit.federation import KEYS, SERVER, ChannelError, Everyone, Federation, RosterError, Schedule
from fedlit.methods import AdaBN, FedAvg, FedCORAL, FedDA, FedGP, FedMMD, FedProx, FedRFTCA, FedWDGRL, SourceOnly
from fedlit.models import MLP
from fedlit.privacy import FixedPoint, PairwiseMasking, Plain, PlainAffine
from helpers import QUIET, STATEFUL, build, digits, loader, normalised_head, same, trainer, weights
from method_table import METHODS, ONE_PASS, Row, one_of_each

CLIENTS = ["clean", "blended", "fonts"]
AWAY = Schedule([CLIENTS, CLIENTS, ["clean", "fonts"], CLIENTS])
ROUNDS = 4
SEVERAL_ROUNDS = [name for name in METHODS if name not in ONE_PASS]
SINGLE_MESSAGES = "FedGP auto, exact"  # which no backend hides

AUTO = {"target_labels": 30, "target_batch_size": 8}
OTHERS: dict[str, Row] = {
    "FedAvg, second moments": (FedAvg, {"classifier": normalised_head(), "batchnorm_average": "moments"}, {}),
    "FedProx, resetting": (FedProx, {"mu": 0.5, "reset_optimizer": True}, {}),
    "SourceOnly, vectorised": (SourceOnly, {"vectorize": True}, {}),
    "FedGP auto, normalised": (FedGP, {"beta": "auto", "classifier": normalised_head()}, AUTO),
    "FedGP auto, vectorised": (FedGP, {"beta": "auto", "vectorize": True}, AUTO),
    "FedCORAL, scaled": (FedCORAL, {"feature_variance": "mean", "every": "round", "average": "all"}, {}),
    "FedMMD, moments to sources": (FedMMD, {"degree": 1, "exchange": "pairwise", "warmup_rounds": 0}, {}),
    "FedMMD, moments to all": (FedMMD, {"exchange": "open", "warmup_rounds": 0}, {}),
    "FedRFTCA, voting": (FedRFTCA, {"num_frequencies": 16, "num_components": 8, "classifier_period": None}, {}),
    "FedRFTCA, seldom": (FedRFTCA, {"num_frequencies": 16, "num_components": 8, "classifier_period": 3}, {}),
}
"""Exchanges and ways to train that no row of the table has."""
SHOWN = ("FedAvg, second moments", "FedProx, resetting", "FedRFTCA, voting")
SOME_OTHERS = [pytest.param(name, marks=() if name in SHOWN else pytest.mark.slow) for name in OTHERS]


def make(name: str, **more: Any) -> tuple[FederatedModule, Any]:
    method, arguments, of_data = (METHODS | OTHERS)[name]
    data = digits(**of_data)
    return build(method, data, **STATEFUL, **arguments, **more), data


def short(name: str) -> dict[str, Any]:
    return {} if name in ONE_PASS else {"local_steps": 2}


PROTECTION: dict[str, Callable[[], dict[str, Any]]] = {
    "": lambda: {"participation": AWAY},
    "grid": lambda: {"privacy": Plain(FixedPoint()), "participation": Everyone()},
    "masked": lambda: {"privacy": PairwiseMasking(colluders=0), "participation": Everyone()},
}


@dataclass
class Run:
    module: FederatedModule
    trainer: pl.Trainer
    data: Any
    carrying: set[str]
    checkpoints: Path

    def weights(self) -> dict[str, dict[str, torch.Tensor]]:
        return {name: weights(self.module, name) for name in CLIENTS}


def fit(folder: Path, name: str, protection: str = "", resume_from: str | None = None) -> Run:
    """A run of a row; in the open, a source is away in the third of four rounds."""
    module, data = make(name)
    own = folder / f"{name}, {protection}"
    savers = [ModelCheckpoint(own, "{epoch}", save_top_k=-1)]
    savers.append(ModelCheckpoint(own, "{step}", every_n_train_steps=5, save_top_k=-1))
    saving = protection == "" and resume_from is None
    rounds = 3 if protection else ROUNDS
    run = trainer(
        rounds,
        savers if saving else [],
        strategy=PROTECTION[protection]() | short(name),
        gradient_clip_val=1.0,
        enable_checkpointing=saving,
    )
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        carrying = watched_for_samples(patch, data)
        run.fit(module, data, ckpt_path=resume_from and own / f"{resume_from}.ckpt")
    return Run(module, run, data, carrying, own)


def watched_for_samples(patch: pytest.MonkeyPatch, data: Any) -> set[str]:
    """Channels over which the bytes of a training sample were given to be sent, whatever is declared."""
    carrying: set[str] = set()
    samples = [data.dataset(client.name, "train").x[:5] for client in data.clients]
    rows = [row.numpy().tobytes() for row in torch.cat(samples)]

    def watch(send: Any) -> Any:
        def sending(self: Federation, channel: str, payloads: Any, *args: Any, **kwargs: Any) -> Any:
            whole = b"".join(tensor.detach().contiguous().numpy().tobytes() for tensor in tree_leaves(payloads))
            carrying.update([channel] if any(row in whole for row in rows) else [])
            return send(self, channel, payloads, *args, **kwargs)

        return sending

    for verb in ("exchange", "mean", "sum"):
        patch.setattr(Federation, verb, watch(getattr(Federation, verb)))
    return carrying


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    """`fit`, whose runs are kept for the other tests of this module."""
    return cache(partial(fit, tmp_path_factory.mktemp("runs")))


def assert_same(one: FederatedModule, other: FederatedModule) -> None:
    for name in CLIENTS:
        assert same(weights(one, name), weights(other, name)), name


@pytest.mark.parametrize("name", [*one_of_each(METHODS), *SOME_OTHERS])
def test_a_run_resumes_bit_for_bit(name: str, runs: Callable[..., Run]) -> None:
    """From within the round in which a source is away; methods of one pass after it."""
    straight = runs(name).module
    resumed = runs(name, resume_from="epoch=0" if name in ONE_PASS else "step=5").module
    assert_same(straight, resumed)
    if name != "FedMMD, moments to sources":  # whose pairs exchange their keys again
        assert straight.federation.ledger == resumed.federation.ledger
    assert straight.federation.round_idx == resumed.federation.round_idx == (1 if name in ONE_PASS else ROUNDS)


@pytest.mark.parametrize("name", one_of_each(SEVERAL_ROUNDS))
def test_an_absent_client_neither_sends_nor_receives(name: str, runs: Callable[..., Run]) -> None:
    ledger = runs(name).module.federation.ledger
    met = {round_idx: set() for round_idx in range(ROUNDS)}
    for entry in ledger:
        if entry.channel != "metrics":  # numbers of evaluations are everyone's
            met[entry.round_idx] |= {entry.sender, entry.receiver}
    assert "blended" not in met[2]
    if met[3]:  # fine-tuning sends nothing
        assert ("blended" in met[3]) == ("blended" in met[1])


@pytest.mark.parametrize("name", one_of_each(name for name in METHODS if "warmup_rounds" in METHODS[name][1]))
def test_warm_up_rounds_send_weights_alone(name: str, runs: Callable[..., Run]) -> None:
    module = runs(name).module
    assert module.warmup_rounds == 1
    assert {entry.channel for entry in module.federation.ledger if entry.round_idx == 0} == {"weights", "metrics"}


@pytest.mark.parametrize("name", one_of_each(METHODS))
def test_no_message_holds_a_sample_unless_the_channel_says_so(name: str, runs: Callable[..., Run]) -> None:
    run = runs(name)
    declared = {channel.name for channel in run.module.federation.channels.values() if channel.declared.samples}
    assert run.carrying == declared == ({"samples"} if "votes" in name else set())


@pytest.mark.parametrize("name", one_of_each(METHODS))
def test_a_checkpoint_predicts_and_tests_as_the_run_does_under_any_global_seed(
    name: str, runs: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = runs(name)
    path = run.checkpoints / ("epoch=0.ckpt" if name in ONE_PASS else f"epoch={ROUNDS - 1}.ckpt")

    def seen(module: FederatedModule, trainer: pl.Trainer, **given: Any) -> tuple[dict[str, float], torch.Tensor]:
        (numbers,) = trainer.test(module, digits(**METHODS[name][2]), verbose=False, **given)
        batches = trainer.predict(module, digits(**METHODS[name][2]), **given)
        return dict(numbers), torch.cat([batch["fonts"] for batch in batches])  # type: ignore[union-attr]

    numbers, predictions = seen(run.module, run.trainer)
    monkeypatch.setenv("PL_GLOBAL_SEED", "77")
    found, predicted = seen(make(name)[0], trainer(1), ckpt_path=path)
    assert found == numbers
    assert torch.equal(predicted, predictions)


BOOKED: list[Any] = [
    *[pytest.param(each.values[0], how, marks=each.marks) for how in ("", "masked") for each in one_of_each(METHODS)],
    *[pytest.param(*each.values, "", marks=each.marks) for each in SOME_OTHERS],
]


@pytest.mark.parametrize(("name", "protection"), BOOKED)
def test_what_is_booked_is_what_was_declared_and_conversely(
    name: str, protection: str, runs: Callable[..., Run]
) -> None:
    if name == SINGLE_MESSAGES and protection:
        with pytest.raises(ChannelError, match="single updates"):
            runs(name, protection)
        return
    module = runs(name, protection).module
    check_ledger(module, silent={"inner_product", *(() if protection else ("target_update", "class_sources"))})


def check_ledger(module: FederatedModule, silent: set[str]) -> None:
    """Channels in ``silent`` are declared for other choices of the strategy."""
    channels, ledger = module.federation.channels, module.federation.ledger
    assert {entry.channel.removesuffix(KEYS) for entry in ledger} | silent >= set(channels)
    for entry in ledger:
        channel = channels[entry.channel.removesuffix(KEYS)]
        if entry.channel.endswith(KEYS):
            assert channel.hides or channel.sent.startswith("pairwise") or "encrypted on its way" in channel.sent
            continue
        way, *_ = channel.sent.split(":")
        senders, receivers = set(channel.senders), set(channel.receivers)
        if way.startswith("pairwise"):  # a protocol has steps in both directions
            senders = receivers = senders | receivers
        summed = way.startswith("summed") or channel.name == "metrics"  # numbers go through the server
        assert (SERVER in (entry.sender, entry.receiver)) == summed, entry
        assert entry.sender in {SERVER, *senders}, entry
        assert entry.receiver in {SERVER, *receivers}, entry
    for channel in channels.values():
        assert channel.declared.contents
        protected = channel.sent.startswith("summed") or channel.protocol is not None
        assert (channel.description is not None) == protected


def test_a_two_party_protocol_is_booked_as_declared() -> None:
    data = digits(target_labels=30, target_batch_size=8)
    module = build(FedGP, data, beta="auto")
    strategy = {"privacy": PairwiseMasking(colluders=0), "two_party": PlainAffine(), "local_steps": 2}
    trainer(2, strategy=strategy).fit(module, data)
    check_ledger(module, silent=set())


def test_no_configuration_that_is_shipped_sends_samples() -> None:
    found = 0
    for path in [*Path("configs").rglob("*.yaml"), *Path("examples").rglob("*.yaml")]:
        texts = [text for text in tree_leaves(yaml.safe_load(path.read_text())) if isinstance(text, str)]
        assert "votes" not in texts, path
        found += sum(text.startswith("fedlit.methods.") for text in texts)
    assert found > 100
    for name in methods.__all__:
        method = getattr(methods, name)
        made = build(method, digits(target_labels=30), **({"classifier": normalised_head()} if name == "AdaBN" else {}))
        assert not [channel.name for channel in made.channels if channel.samples], name


@pytest.mark.parametrize("name", one_of_each(name for name, row in METHODS.items() if not issubclass(row[0], FedDA)))
def test_masked_sums_train_what_plain_sums_on_their_grid_do(name: str, runs: Callable[..., Run]) -> None:
    assert_same(runs(name, "masked").module, runs(name, "grid").module)


@pytest.mark.parametrize("name", one_of_each(SEVERAL_ROUNDS))
def test_how_rounds_are_packed_into_epochs_changes_nothing(name: str) -> None:
    steps = 2 if METHODS[name][1].get("beta") == "auto" else 1  # one step has no variance to weigh sources with
    modules = []
    for epochs, rounds_per_epoch in ((4, 1), (2, 2)):
        module, data = make(name)
        strategy = {"local_steps": steps, "rounds_per_epoch": rounds_per_epoch}
        trainer(epochs, strategy=strategy, limit_val_batches=0).fit(module, data)
        assert module.federation.round_idx == 4
        modules.append(module)
    assert_same(*modules)


@pytest.mark.parametrize("name", one_of_each(METHODS))
def test_in_a_plain_trainer_a_method_trains_the_same(name: str) -> None:
    modules = []
    for federated in (True, False):
        module, _ = make(name)
        data = digits(**METHODS[name][2] | {"batch_size": 128})
        trainer(2, federated=federated, limit_val_batches=0).fit(module, data)
        modules.append(module)
    assert_same(*modules)
    assert modules[0].federation.ledger == modules[1].federation.ledger


@pytest.mark.parametrize(
    ("method", "arguments"),
    [(SourceOnly, {}), (FedRFTCA, METHODS["FedRFTCA"][1]), (AdaBN, METHODS["AdaBN, mixing"][1])],
)
def test_labels_of_the_target_that_a_method_does_not_need_change_nothing(
    method: type[FederatedModule], arguments: dict[str, Any]
) -> None:
    modules = []
    for labels in (0, 30):
        # validation samples of a target with labels are drawn by class
        modules.append(build(method, data := digits(target_labels=labels, val_fraction=0.0), **arguments))
        trainer(1, strategy={"local_steps": 2}).fit(modules[-1], data)
    assert_same(*modules)


on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def fitted(name: str, device: str, precision: str, privacy: Any = None) -> FederatedModule:
    """A row of the table after three rounds."""
    method, arguments, options = METHODS[name]
    module = build(method, data := digits(**options), **{"optimizer": partial(SGD, lr=0.05, momentum=0.9)} | arguments)
    run = trainer(3, accelerator=device, precision=precision, strategy={"privacy": privacy}, gradient_clip_val=1.0)
    run.fit(module, data)
    return module


@on_a_gpu
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", METHODS)
def test_a_gpu_trains_what_the_cpu_trains(name: str, masked: bool) -> None:
    privacy = PairwiseMasking(colluders=0) if masked else None
    try:
        expected, found = (fitted(name, device, "64-true", privacy) for device in ("cpu", "gpu"))
    except RosterError as error:
        pytest.skip(f"has nothing to say over a hidden channel: {error}")
    for client in expected.clients:
        one, other = weights(expected, client.name), weights(found, client.name)
        for key, tensor in one.items():
            torch.testing.assert_close(other[key].cpu(), tensor, rtol=0, atol=1e-5 if masked else 1e-9)
    assert sorted(expected.federation.ledger) == sorted(found.federation.ledger)


@on_a_gpu
@pytest.mark.parametrize("residual", ["isotropic", "exact"])
def test_a_checkpoint_within_a_round_resumes_on_a_gpu(residual: str, tmp_path: Path) -> None:
    def go(path: str | None = None, **given: Any) -> dict[str, Tensor]:
        module = fedgp_by_hand.build(beta="auto", residual=residual)
        trainer(2, accelerator="gpu", **given).fit(module, loader(unequal()), ckpt_path=path)
        return weights(module, "c2")

    saver = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    straight = go(callbacks=[saver], enable_checkpointing=True)
    assert same(go(str(tmp_path / "step=7.ckpt")), straight)  # rounds have 5 steps


class Elsewhere(FederatedStrategy):
    """Builds modules where a GPU's strategy does: in Lightning's context of a device other than the CPU."""

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        with torch.device("meta"):
            yield


class Lazy(nn.Sequential):
    """A network that takes the width of the samples."""

    out_features = 16

    def __init__(self) -> None:
        super().__init__(nn.LazyLinear(16), nn.ReLU())


@pytest.mark.parametrize(
    ("method", "extractor"), [(FedAvg, partial(MLP, 64, [16])), (FedWDGRL, Lazy), (FedRFTCA, partial(MLP, None, [16]))]
)
def test_first_weights_do_not_depend_on_the_device(method: type[FederatedModule], extractor: Any) -> None:
    found = []
    for strategy in (FederatedStrategy, Elsewhere):
        torch.manual_seed(0)
        data = digits()
        sizes = {"num_frequencies": 16, "num_components": 8} if method is FedRFTCA else {}
        module = method(data.clients, data.target, data.num_classes, extractor(), **sizes)
        once = strategy(num_threads=1, local_steps=1)
        pl.Trainer(**QUIET, max_epochs=1, limit_val_batches=0, strategy=once).fit(module, data)
        found.append(weights(module, data.target))
    assert same(*found)


NO_LABELS_NEEDED = [name for name, row in METHODS.items() if not row[0].requires.target_labels and name != "SourceOnly"]


@pytest.mark.parametrize("name", one_of_each(NO_LABELS_NEEDED))
def test_a_method_says_that_it_makes_nothing_of_labels_of_the_target(name: str) -> None:
    method, arguments, of_data = METHODS[name]

    def trained(shift: int) -> FederatedModule:
        data = digits(**{**of_data, "target_labels": 30})
        data.setup("fit")
        given = data.train_dataloader()
        samples = given.datasets["fonts"]
        shifted = [(x, (y + shift) % 10 if y >= 0 else y) for x, y in (samples[i] for i in range(len(samples)))]
        given.datasets = {**given.datasets, "fonts": shifted}
        module = build(method, data, **STATEFUL, **arguments)
        trainer(3).fit(module, given, data.val_dataloader())
        return module

    ignores, said = method.requires.ignores_target_labels, "makes nothing of the labels that target 'fonts' has"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module = trained(0)
    assert any(said in str(each.message) for each in caught) == ignores
    other = trained(1)
    assert all(same(weights(module, each), weights(other, each)) for each in CLIENTS) == ignores
