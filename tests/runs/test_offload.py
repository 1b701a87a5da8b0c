"""Weights and optimiser states in files: the same numbers, in place, and in memory only where they are used."""

from __future__ import annotations

import copy
import ctypes
import errno
import os
import pickle
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins import AsyncCheckpointIO, TorchCheckpointIO
from torch import nn
from torch.optim import SGD, Adam

from fedlit import Client, FederatedModule, FederatedStrategy
from fedlit.federation import Fraction
from fedlit.federation.sums import driver
from fedlit.methods import Ditto, FedAvg, FedDA, FedDAN
from fedlit.run import turns
from fedlit.run.checkpoint_files import StreamedCheckpointIO
from fedlit.run.offload import DiskOffload
from helpers import Snapshots, layers, loader, same, trainer, unequal, weights

LABELLED = ["c0", "c1", Client("c2", role="target", labelled=True)]
ADAM: dict[str, Any] = {"optimizer": partial(Adam, lr=0.02)}

RUNS: dict[str, tuple[Any, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "momentum": (FedAvg, {}, {}, {}),
    "Adam": (FedAvg, ADAM, {}, {"gradient_clip_val": 0.5}),
    "reset": (FedAvg, {**ADAM, "reset_optimizer": True}, {}, {}),
    "some": (FedAvg, ADAM, {"participation": Fraction(0.5)}, {}),
    "two models": (Ditto, {}, {}, {}),
    "gradients": (partial(FedDA, beta="auto"), {"warmup_rounds": 1}, {}, {}),
    "not in turns": (FedDAN, {}, {}, {}),
    "64 bits": (FedAvg, {}, {}, {"precision": "64-true"}),
}


@pytest.fixture(autouse=True)
def _in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Networks of any size take turns, and are sent one by one."""
    monkeypatch.setattr(turns, "LARGE", 0)
    monkeypatch.setattr(driver, "_LONG", 1)


def module_of(method: Any = FedAvg, **arguments: Any) -> FederatedModule:
    torch.manual_seed(0)
    network: Any = layers(6, nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.2))
    clients = LABELLED if method is not FedDAN else ["c0", "c1", "c2"]
    made: FederatedModule = method(clients, "c2", 2, network, **arguments)
    return made


def tensors_of(module: FederatedModule) -> dict[str, torch.Tensor]:
    """Those that a client keeps between rounds."""
    (optimizer,) = module.trainer.optimizers
    states = {
        f"{place}.{name}": value
        for place, state in enumerate(optimizer.state.values())
        for name, value in state.items()
        if value is not None and value.dim()
    }
    return {**states, **{name: each for name, each in module.replicas.state_dict().items() if each.dim()}}


def mapped(folder: Path) -> list[tuple[range, int]]:
    """Address ranges of this process that are files of a folder, and the bytes of each that are in memory."""
    found: list[tuple[range, int]] = []
    own = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if "-" in first and not first.endswith(":"):
            start, end = (int(each, 16) for each in first.split("-"))
            own = f"{folder}/" in line
            if own:
                found.append((range(start, end), 0))
        elif own and first == "Rss:":
            found[-1] = (found[-1][0], int(rest[0]) * 1024)
    return found


@pytest.mark.parametrize("name", RUNS)
def test_numbers_are_those_of_a_run_in_memory(name: str, tmp_path: Path) -> None:
    method, arguments, strategy, options = RUNS[name]
    kept, data = [Snapshots(), Snapshots()], unequal(20, 18, 6)
    folders: list[dict[str, Any]] = [{}, {"state_dir": str(tmp_path)}]
    for snapshots, folder in zip(kept, folders, strict=True):
        module = module_of(method, **arguments)
        trainer(3, [snapshots], strategy={**strategy, **folder}, **options).fit(module, loader(data, 4))
    for before, after in zip(*(each.rounds for each in kept), strict=True):
        assert all(same(before[client], after[client]) for client in before)
    assert kept[0].metrics == kept[1].metrics
    places = [place for place, _ in mapped(tmp_path)]
    outside = [name for name, each in tensors_of(module).items() if not any(each.data_ptr() in at for at in places)]
    assert not outside
    assert not [*tmp_path.iterdir()]  # files have no names, and go with the process


def test_pages_of_clients_leave_memory_after_their_turn(tmp_path: Path) -> None:
    torch.manual_seed(0)
    wide: Any = layers(2000, nn.Linear(5, 2000), nn.Linear(2000, 2000))
    module = FedAvg(LABELLED, "c2", 2, wide)
    most: list[int] = []
    offload = DiskOffload.keep_states_

    def watched(self: DiskOffload, optimizer: Any) -> None:
        offload(self, optimizer)
        most.append(sum(size for _, size in mapped(tmp_path)))

    own = 2 * 4 * sum(param.numel() for param in wide.parameters())  # with momenta
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DiskOffload, "keep_states_", watched)
        trainer(2, strategy={"state_dir": str(tmp_path)}).fit(module, loader(unequal(8, 8, 8), 4))
    assert own > 30e6
    assert max(most) < 1.5 * own  # of three clients
    assert max(most) > 0.9 * own
    assert sum(size for _, size in mapped(tmp_path)) < own / 2


GROWTH = """
import copy, re, sys, torch
from fedlit.models import ResNet
from fedlit.run.offload import DiskOffload

def anonymous():
    return int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read())[1]) / 1024

torch.set_num_threads(1)
offload, original, kept, before = DiskOffload(sys.argv[1]), ResNet(18, weights=None), [], 0
for number in range(8):
    before = anonymous() if number == 2 else before
    kept.append(copy.deepcopy(original))
    offload.keep_weights_(f"client{number}", kept[-1])
print((anonymous() - before) / 6)
"""
"""Prints how many MiB in no file a further client has left in memory."""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="this C library has no malloc_trim")
def test_copies_that_went_to_files_leave_no_memory_behind(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", GROWTH, str(tmp_path)], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 5  # weights are 43; without giving free memory back 27 of them stayed


def test_a_resumed_run_is_the_straight_one(tmp_path: Path) -> None:
    folder = {"state_dir": str(tmp_path / "state")}
    straight, first, second = (module_of(**ADAM) for _ in range(3))
    trainer(4).fit(straight, loader(unequal(20, 18, 6), 4))
    half = trainer(2, strategy=folder)
    half.fit(first, loader(unequal(20, 18, 6), 4))
    half.save_checkpoint(tmp_path / "half.ckpt")
    path = str(tmp_path / "half.ckpt")
    trainer(4, strategy=folder).fit(second, loader(unequal(20, 18, 6), 4), ckpt_path=path, weights_only=False)
    assert all(same(weights(straight, name), weights(second, name)) for name in ("c0", "c1", "c2"))


def test_a_copied_module_has_weights_of_its_own(tmp_path: Path) -> None:
    module = module_of()
    trainer(1, strategy={"state_dir": str(tmp_path)}).fit(module, loader(unequal(8, 8, 8), 4))
    module.trainer = None
    before = weights(module, "c0")
    for other in (copy.deepcopy(module.run.offload), pickle.loads(pickle.dumps(module.run.offload))):
        assert not other._extents
    replicas = copy.deepcopy(module.replicas)
    with torch.no_grad():
        for param in replicas.parameters():
            param.add_(1)
    assert same(weights(module, "c0"), before)


def test_weights_that_share_memory_still_share_it(tmp_path: Path) -> None:
    class Tied(nn.Module):
        out_features = 5

        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)
            self.second.weight = self.first.weight
            self.first.bias.data = self.second.bias.data
            self.register_buffer("part", self.second.weight.detach()[0])
            self.register_buffer("bank", torch.zeros(4))
            self.views = [self.get_buffer("bank")[1:]]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x))  # type: ignore[no-any-return]

    network = Tied()
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    DiskOffload(tmp_path).keep_weights_("c0", network)
    with torch.no_grad():
        network.first.weight.add_(1)
        network.first.bias.add_(1)
        network.views[0].add_(1)
        network.get_buffer("bank")[0] += 1
    after = network.state_dict()
    assert all(torch.equal(after[name], before[name] + 1) for name in before)


def test_layouts_are_kept(tmp_path: Path) -> None:
    network = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    before, stride = network.weight.detach().clone(), network.weight.stride()
    DiskOffload(tmp_path).keep_weights_("c0", network)
    assert torch.equal(network.weight, before)
    assert network.weight.stride() == stride
    assert network.weight.data_ptr() in mapped(tmp_path)[0][0]


def _full(fd: int, offset: int, size: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_is_named_before_anything_is_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "posix_fallocate", _full)
    run = trainer(1, strategy={"state_dir": str(tmp_path)})
    with pytest.raises(OSError, match=r"state_dir '.*' has no space for 16 MiB of client 'c0': give a folder on a"):
        run.fit(module_of(), loader(unequal(8, 8, 8), 4))


def test_a_disk_that_fills_up_costs_no_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, module = (module_of(optimizer=partial(SGD, lr=0.1, momentum=0.9)) for _ in range(2))
    trainer(2).fit(plain, loader(unequal(8, 8, 8), 4))
    keep = DiskOffload.keep_states_

    def fills(self: DiskOffload, optimizer: Any) -> None:
        self._free = None
        monkeypatch.setattr(os, "posix_fallocate", _full)
        keep(self, optimizer)

    monkeypatch.setattr(DiskOffload, "keep_states_", fills)
    with pytest.warns(UserWarning, match="has no space for 16 MiB of client 'c0': states of optimisers stay in memory"):
        trainer(2, strategy={"state_dir": str(tmp_path)}).fit(module, loader(unequal(8, 8, 8), 4))
    assert all(same(weights(plain, name), weights(module, name)) for name in ("c0", "c1", "c2"))


def test_a_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    run = trainer(1, strategy={"state_dir": str(file)})
    with pytest.raises(ValueError, match=r"state_dir must be a folder that can be written in, got '.*file': give a "):
        run.fit(module_of(), loader(unequal(8, 8, 8), 4))


@pytest.mark.parametrize("folder", ["", 5, True, ["x"]])
def test_what_is_no_path_is_refused(folder: Any) -> None:
    with pytest.raises(ValueError, match="state_dir must be the path of a folder, got"):
        trainer(1, strategy={"state_dir": folder}).fit(module_of(), loader(unequal(8, 8, 8), 4))


def test_a_folder_in_memory_is_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = Path.read_text
    mounts = f"/dev/sda / ext4 rw 0 0\ntmpfs {tmp_path.resolve()} tmpfs rw 0 0\n"
    monkeypatch.setattr(Path, "read_text", lambda file: mounts if str(file) == "/proc/mounts" else read(file))
    with pytest.warns(UserWarning, match="is on a file system in memory, where files save none: give a folder on a"):
        DiskOffload(tmp_path / "inside")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        DiskOffload(tmp_path.parent)


def test_a_run_without_files_after_one_with_them_keeps_its_states_in_memory(tmp_path: Path) -> None:
    plain, module = module_of(), module_of()
    for folder, each in ((None, plain), (str(tmp_path), module)):
        trainer(1, strategy={"state_dir": folder}).fit(each, loader(unequal(8, 8, 8), 4))
        trainer(1).fit(each, loader(unequal(8, 8, 8), 4))
    assert module.run.offload is None
    assert all(same(weights(plain, name), weights(module, name)) for name in ("c0", "c1", "c2"))


def test_files_are_refused_on_a_gpu_and_beside_stacked_networks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="state_dir must be left out beside vectorize, which holds all networks in"):
        trainer(1, strategy={"state_dir": str(tmp_path)}).fit(module_of(vectorize=True), loader(unequal(8, 8, 8), 4))
    monkeypatch.setattr(FederatedStrategy, "root_device", torch.device("cuda", 0))
    with pytest.raises(ValueError, match=r"state_dir must be left out on cuda:0, got .*files are the CPU's memory"):
        FederatedStrategy(state_dir=str(tmp_path))._offload(module_of())


def test_a_checkpoint_that_cannot_be_written_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, files = tmp_path / "run.ckpt", StreamedCheckpointIO()
    files.save_checkpoint({"round": 1}, path)

    def fails(content: object, file: Path) -> None:
        os.close(os.open(file, os.O_CREAT))
        raise RuntimeError("unexpected pos 704 vs 598")  # torch's words for a full disk

    monkeypatch.setattr(torch, "save", fails)
    with pytest.raises(RuntimeError, match="unexpected pos"):
        files.save_checkpoint({"round": 2}, path)
    for number, words in ((errno.ENOSPC, "no space is left on the disk of"), (errno.EDQUOT, "the disk quota is used")):
        with monkeypatch.context() as full:
            full.setattr(Path, "open", partial(_refuses, number))
            with pytest.raises(OSError, match=rf"{words} .*run.ckpt: an earlier file of its name is as") as caught:
                files.save_checkpoint({"round": 2}, path)
        assert caught.value.errno == number
    assert [each.name for each in tmp_path.iterdir()] == ["run.ckpt"]
    assert torch.load(path) == {"round": 1}


def _refuses(number: int, *_: Any) -> Any:
    raise OSError(number, os.strerror(number))


def test_a_checkpoint_above_the_systems_limit_of_sizes_names_it(tmp_path: Path) -> None:
    script = f"""
import resource, torch
from fedlit.run.checkpoint_files import StreamedCheckpointIO
files = StreamedCheckpointIO()
files.save_checkpoint({{"round": 1}}, {str(tmp_path / "run.ckpt")!r})
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
try:
    files.save_checkpoint({{"weights": torch.zeros(1_000_000)}}, {str(tmp_path / "run.ckpt")!r})
except OSError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "the system's limit of file sizes (ulimit -f) is below" in done.stdout
    assert [each.name for each in tmp_path.iterdir()] == ["run.ckpt"]
    assert torch.load(tmp_path / "run.ckpt") == {"round": 1}


class Rotating(SGD):
    """Exchanges two of its states in each step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    first = state.get("first", torch.zeros_like(param))
                    second = state.get("second", torch.ones_like(param))
                    first.mul_(0.5).add_(param.grad)
                    second.mul_(0.9)
                    state["first"], state["second"] = second, first
                    param.sub_(0.05 * first * second)
        return loss


class Sparse(nn.Module):
    """With buffers that are not in rows."""

    out_features = 5

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)
        self.register_buffer("edges", torch.eye(5).to_sparse(), persistent=False)
        self.register_buffer("codes", torch.quantize_per_tensor(torch.ones(5), 0.1, 0, torch.qint8), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        edges, codes = self.get_buffer("edges"), self.get_buffer("codes")
        return torch.sparse.mm(edges, self.linear(x).t()).t() * codes.dequantize()  # type: ignore[no-any-return]


def test_states_that_change_places_and_buffers_of_other_layouts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "_is_torch_s", lambda optimizer: True)
    found = []
    for folder in ({}, {"state_dir": str(tmp_path)}):
        torch.manual_seed(0)
        module = FedAvg(LABELLED, "c2", 2, Sparse(), optimizer=partial(Rotating, lr=0.1))  # type: ignore[arg-type]
        trainer(3, strategy=folder).fit(module, loader(unequal(20, 18, 6), 4))
        found.append(module)
    assert all(same(weights(found[0], name), weights(found[1], name)) for name in ("c0", "c1", "c2"))


def test_space_of_a_state_is_another_s_when_nothing_has_it(tmp_path: Path) -> None:
    offload, param = DiskOffload(tmp_path), nn.Parameter(torch.zeros(1000))
    optimizer = SGD([{"params": [param], "client": "c0"}], lr=0.1)
    kept, places = [], set()
    for number in range(4):
        optimizer.state.clear()
        optimizer.state[param]["momentum_buffer"] = torch.full((1000,), float(number))
        offload.keep_states_(optimizer)
        now = optimizer.state[param]["momentum_buffer"]
        places.add(now.data_ptr())
        if number == 1:
            kept.append(now.detach())
        del now
    assert len(places) == 2
    assert torch.equal(kept[0], torch.ones(1000))


def test_what_is_left_of_a_checkpoint_that_cannot_be_pickled_goes(tmp_path: Path) -> None:
    with pytest.raises(AttributeError, match="local object"):
        StreamedCheckpointIO().save_checkpoint({"callback": lambda: None}, tmp_path / "run.ckpt")
    StreamedCheckpointIO().save_checkpoint({"round": 1}, tmp_path / f"{'é' * 120}.ckpt")
    assert [each.name for each in tmp_path.iterdir()] == [f"{'é' * 120}.ckpt"]


def test_a_plugin_of_the_trainer_writes_checkpoints_in_its_place(tmp_path: Path) -> None:
    wrapping = AsyncCheckpointIO()
    for plugins, kind in (([], StreamedCheckpointIO), ([TorchCheckpointIO()], TorchCheckpointIO), ([wrapping], None)):
        run = trainer(1, plugins=plugins)
        run.fit(module_of(), loader(unequal(8, 8, 8), 4))
        run.save_checkpoint(tmp_path / "run.ckpt")
        assert type(run.strategy.checkpoint_io) is (kind or AsyncCheckpointIO)
    assert type(wrapping.checkpoint_io) is StreamedCheckpointIO
