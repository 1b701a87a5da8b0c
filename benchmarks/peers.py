"""FedAvg next to other frameworks: one job as a plain loop, in fedlit, pfl-research and Flower; and secure aggregation.

Run: python benchmarks/peers.py [--repeats 3] [--environments FOLDER] [--out benchmarks/peers.json]

The job is FedAvg on scikit-learn's digits, dealt out to 10 clients: a 64-64-64-10 MLP of 8,970 numbers with the same
initial weights, batch 32, fused SGD whose momentum starts at 0 in each round, one local epoch a round, all clients in
each round, the mean weighted by samples, 20 rounds, one thread in each process. All but fedlit, which shuffles by
itself, take the same batches. "accuracy" is that of the last global model on all digits, in per cent, and shows that
the jobs are alike.

Each run has a process of its own, and the ways take turns; figures are medians over repeats. "first round" is wall time
from the start of the job to the end of its first round, without what that process imports, but with what processes
import that it starts. "wall/round" is the median of rounds 2 to 20, "CPU/round" the mean of them over all processes of
the run: Ray's are no children, so they are found by a variable of their environment, and their clocks are read at the
end of each round. "memory" is the sum of what they hold then (Pss), at most; as it counts shared pages in parts, other
programs with the same libraries lower it. What all this reading takes is left out. Clients take turns in one process,
but for Flower, whose simulation has a process for each core. It looks for messages and for answers every 0.1 s, which
is most of its wall time.

"Flower" is its current interface (`flwr.serverapp.strategy.FedAvg`). SecAgg+ works with the older one alone, so it is
compared with that ("Flower, workflow"). All clients share with all, and 7 of 10 shares restore a secret, which is
fedlit's default for 10 clients too. In one process neither protects anything: these are costs. What they are for
differs. SecAgg+ of Flower 1.42 takes the server to keep to the protocol: clients have each other's keys from it without
a signature, send the shares that it asks for without comparing its lists with others', and take any total; masks come
from numpy's RandomState with seeds of 32 bits. With `PairwiseMasking` round keys are bound to long-term keys that
clients pin, clients confirm to each other whose vectors are in a sum before they send shares, and tags let them refuse
another total (checked once here, as all are in one process): docs/privacy.md has what a server that lies gets, with
tests.

pfl-research and Flower are installed by pip, each in an environment of its own, behind whose packages are those of the
calling one, such as torch. What --environments has is taken as it is, and what it lacks is made and kept.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # which the first optimiser imports
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.optim import SGD

from measures import environment

CLIENTS, BATCH = 10, 32

MARK = "FEDLIT_PEERS_RUN"
"""Variable in the environment of all processes of a run."""

PACKAGES: Mapping[str, str] = {"pfl": "pfl", "flower": "flwr[simulation]"}
"""What pip installs, by environment."""

FIGURES = ("first_round_s", "wall_ms", "cpu_ms", "peak_mib", "accuracy")


@functools.cache
def shards() -> list[tuple[Tensor, Tensor]]:
    """Digits dealt out to the clients."""
    x, y = load_digits(return_X_y=True)
    inputs, labels = torch.tensor(x / 16, dtype=torch.float32), torch.tensor(y)
    return [(inputs[i::CLIENTS], labels[i::CLIENTS]) for i in range(CLIENTS)]


def network() -> nn.Sequential:
    """The same weights each time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def sgd(params: Any, lr: float = 0.05) -> SGD:
    """Whose momentum starts at 0."""
    return SGD(params, lr=lr, momentum=0.9, fused=True)


def shuffled(client: int, number: int) -> tuple[Tensor, Tensor]:
    """A client's samples in the order of a round."""
    x, y = shards()[client]
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(1000 * number + client))
    return x[order], y[order]


def train(model: nn.Module, client: int, number: int) -> int:
    """One local epoch; how many samples it had."""
    x, y = shuffled(client, number)
    optimizer = sgd(model.parameters())
    for inputs, labels in zip(x.split(BATCH), y.split(BATCH), strict=True):
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    return len(y)


def accuracy(model: nn.Module) -> float:
    """On all digits, in per cent."""
    with torch.no_grad():
        right = sum(int((model(x).argmax(1) == y).sum()) for x, y in shards())
    return 100 * right / sum(len(y) for _, y in shards())


def processes(mark: str) -> list[int]:
    """Those that live and have the mark."""
    found, wanted = [], f"{MARK}={mark}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found


def mebibytes(pid: int) -> float:
    """What a process holds, with its part of what it shares."""
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024
    return 0.0


class Probe:
    """Wall time, CPU time and memory of all processes of this run, at the end of each round."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._clocks: dict[int, float] = {}  # also of processes that have ended
        self._rounds: list[tuple[float, float, float, float, float]] = []
        self._start = time.perf_counter()

    def round(self) -> None:
        """One more round has ended."""
        wall, pids = time.perf_counter(), processes(os.environ[MARK])
        cpu, mib = self._cpu(pids), sum(mebibytes(pid) for pid in pids)
        self._rounds.append((wall, cpu, mib, time.perf_counter(), self._cpu(pids)))

    def figures(self) -> dict[str, float]:
        """Of all rounds."""
        pairs = list(itertools.pairwise(self._rounds))
        return {
            "first_round_s": self._rounds[0][0] - self._start,
            "wall_ms": 1000 * statistics.median(after[0] - before[3] for before, after in pairs),
            "cpu_ms": 1000 * statistics.mean(after[1] - before[4] for before, after in pairs),
            "peak_mib": max(each[2] for each in self._rounds),
        }

    def _cpu(self, pids: list[int]) -> float:
        for pid in pids:
            with contextlib.suppress(OSError):  # it has ended
                self._clocks[pid] = time.clock_gettime((~pid << 3) | 2)  # of clock_getcpuclockid(3): all its threads
        return sum(self._clocks.values())


def by_hand(rounds: int) -> tuple[Probe, nn.Module]:
    """As one would write it."""
    probe, model = Probe(), network()
    state = {key: value.clone() for key, value in model.state_dict().items()}
    total = sum(len(y) for _, y in shards())
    for number in range(1, rounds + 1):
        mean = {key: torch.zeros_like(value) for key, value in state.items()}
        for client in range(CLIENTS):
            model.load_state_dict(state)
            size = train(model, client, number)
            for key, value in model.state_dict().items():
                mean[key] += value * (size / total)
        state = mean
        probe.round()
    model.load_state_dict(state)
    return probe, model


def with_fedlit(rounds: int, masked: bool = False) -> tuple[Probe, nn.Module]:
    """`FedAvg`, and `PairwiseMasking` if asked for."""
    import lightning.pytorch as pl
    from torch.utils.data import TensorDataset

    from fedlit import Client, FederatedStrategy
    from fedlit.data import FederatedLoader
    from fedlit.methods import FedAvg
    from fedlit.privacy import PairwiseMasking
    from fedlit.run.component import Component
    from fedlit.run.run import Run

    class Rounds(pl.Callback, Component):
        def on_round_end(self, run: Run) -> None:
            probe.round()

    probe, model = Probe(), network()
    names = [f"client{i}" for i in range(CLIENTS)]
    # The target holds its share too and has labels: all clients train, as in the plain loop.
    clients: list[str | Client] = [*names[:-1], Client(names[-1], role="target", labelled=True)]
    module = FedAvg(clients, names[-1], 10, model[:-1], model[-1], optimizer=sgd, reset_optimizer=True)
    privacy = PairwiseMasking() if masked else None
    options: dict[str, Any] = dict.fromkeys(["logger", "enable_checkpointing", "enable_progress_bar"], False)
    options |= {"enable_model_summary": False, "accelerator": "cpu", "max_epochs": 1, "callbacks": [Rounds()]}
    strategy = FederatedStrategy(num_threads=1, rounds_per_epoch=rounds, privacy=privacy)
    data = {name: TensorDataset(*shard) for name, shard in zip(names, shards(), strict=True)}
    pl.Trainer(strategy=strategy, **options).fit(module, FederatedLoader(data, BATCH, seed=0))
    return probe, module.replicas[names[0]]


def with_pfl(rounds: int) -> tuple[Probe, nn.Module]:
    """`FederatedAveraging` with `SimulatedBackend`."""
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.aggregate.weighting import WeightByDatapoints
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
    from pfl.metrics import Metrics, Weighted
    from pfl.model.pytorch import PyTorchModel

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = network()

        def loss(self, x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(self.network(x), y)

        @torch.no_grad()
        def metrics(self, x: Tensor, y: Tensor) -> dict[str, Any]:  # pfl wants some, and asks for them in round 1
            return {"loss": Weighted(float(self.loss(x, y)) * len(y), len(y))}

    class Rounds(TrainingProcessCallback):
        def after_central_iteration(self, *args: Any, **kwargs: Any) -> tuple[bool, Metrics]:
            probe.round()
            return False, Metrics()

    probe, model, calls = Probe(), Model(), itertools.count(CLIENTS)
    clients = FederatedDataset(
        lambda client: Dataset(shuffled(client, next(calls) // CLIENTS), user_id=str(client)),
        get_user_sampler("minimize_reuse", range(CLIENTS)),  # one after another, so all of them in each round
    )
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=rounds, evaluation_frequency=rounds, train_cohort_size=CLIENTS, val_cohort_size=0
        ),
        SimulatedBackend(clients, clients, postprocessors=[WeightByDatapoints()]),
        PyTorchModel(model, sgd, SGD(model.parameters(), lr=1.0)),
        NNTrainHyperParams(local_batch_size=BATCH, local_num_epochs=1, local_learning_rate=0.05),
        NNEvalHyperParams(local_batch_size=None),
        [Rounds()],
        send_metrics_to_platform=False,  # no table on the screen in each round
    )
    return probe, model.network


def train_message(message: Any, context: Any) -> Any:
    """A client of Flower, which Ray's processes call."""
    from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict

    model = network()
    load(model, message.content["arrays"].to_numpy_ndarrays())
    size = train(model, context.node_config["partition-id"], message.content["config"]["server-round"])
    found = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": size})}
    return Message(RecordDict(found), reply_to=message)


def workflow_client(context: Any) -> Any:
    """A client of Flower's older interface, which Ray's processes call."""
    from flwr.client import NumPyClient

    class Local(NumPyClient):
        def fit(self, parameters: list[Any], config: dict[str, Any]) -> tuple[list[Any], int, dict[str, Any]]:
            model = network()
            load(model, parameters)
            size = train(model, context.node_config["partition-id"], config["round"])
            return [param.detach().numpy() for param in model.parameters()], size, {}

    return Local().to_client()


def load(model: nn.Module, arrays: list[Any]) -> None:
    """Take arrays for weights."""
    for param, array in zip(model.parameters(), arrays, strict=True):
        param.data.copy_(torch.tensor(array))


def with_flower(rounds: int, workflow: bool = False, masked: bool = False) -> tuple[Probe, nn.Module]:
    """Its simulation in as many processes as there are cores; its older interface and SecAgg+ if asked for."""
    import ray  # noqa: F401, which the simulation imports later
    from flwr.app import ArrayRecord
    from flwr.client.mod import secaggplus_mod
    from flwr.clientapp import ClientApp
    from flwr.common import ndarrays_to_parameters
    from flwr.server import LegacyContext, ServerConfig
    from flwr.server import strategy as older
    from flwr.server.workflow import DefaultWorkflow, SecAggPlusWorkflow
    from flwr.serverapp import ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    probe, model, server = Probe(), network(), ServerApp()

    def at_round_end(number: int, arrays: Any, *_: Any) -> None:
        if number:  # 0 is before the first one
            probe.round()
            load(model, arrays if workflow else arrays.to_numpy_ndarrays())

    @server.main()
    def serve(grid: Any, context: Any) -> None:
        if not workflow:
            strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=CLIENTS, min_available_nodes=CLIENTS)
            strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=rounds, evaluate_fn=at_round_end)
            return
        first = older.FedAvg(
            fraction_evaluate=0.0,
            min_fit_clients=CLIENTS,
            min_available_clients=CLIENTS,
            evaluate_fn=at_round_end,
            on_fit_config_fn=lambda number: {"round": number},
            initial_parameters=ndarrays_to_parameters([param.detach().numpy() for param in model.parameters()]),
        )
        secure = SecAggPlusWorkflow(num_shares=1.0, reconstruction_threshold=0.66) if masked else None
        DefaultWorkflow(secure)(grid, LegacyContext(context, ServerConfig(num_rounds=rounds), first))

    clients = ClientApp(workflow_client if workflow else None, mods=[secaggplus_mod] if masked else None)
    if not workflow:
        clients.train()(train_message)
    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": {"num_cpus": os.cpu_count() or 1}}
    run_simulation(server, clients, CLIENTS, backend_config=resources)
    return probe, model


Way = Callable[..., tuple[Probe, nn.Module]]
WAYS: Mapping[str, tuple[Way, dict[str, bool], str | None]] = {
    "plain loop": (by_hand, {}, None),
    "fedlit": (with_fedlit, {}, None),
    "pfl-research": (with_pfl, {}, "pfl"),
    "Flower": (with_flower, {}, "flower"),
    "fedlit, PairwiseMasking": (with_fedlit, {"masked": True}, None),
    "Flower, workflow": (with_flower, {"workflow": True}, "flower"),
    "Flower, SecAgg+": (with_flower, {"workflow": True, "masked": True}, "flower"),
}
"""Function, arguments and environment."""

SECURE: Mapping[str, str] = {"fedlit, PairwiseMasking": "fedlit", "Flower, SecAgg+": "Flower, workflow"}
"""Runs with secure aggregation, and what they are compared with."""


def one(way: str, rounds: int) -> dict[str, Any]:
    """A run in this process."""
    function, arguments, place = WAYS[way]
    probe, model = function(rounds, **arguments)
    packages = {None: ("lightning",), "pfl": ("pfl",), "flower": ("flwr", "ray")}[place]
    versions = {name: version(name) for name in ("torch", "numpy", *packages)}
    return {**probe.figures(), "accuracy": accuracy(model), "versions": versions}


def apart(way: str, rounds: int, python: str) -> dict[str, Any]:
    """`one` in a fresh process, after which none is left."""
    mark = uuid.uuid4().hex
    variables = {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1", MARK: mark}
    command = [python, __file__, "--one", json.dumps({"way": way, "rounds": rounds})]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        variables = {**os.environ, **variables, "RAY_TMPDIR": folder, "FLWR_HOME": folder}
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=variables, cwd=folder)
            until = time.monotonic() + 30  # Ray's processes end after that which has started them
            while (left := processes(mark)) and time.monotonic() < until:
                time.sleep(0.1)
        finally:
            for pid in processes(mark):
                os.kill(pid, signal.SIGKILL)
    if done.returncode or left:
        raise RuntimeError(f"{way}: exit code {done.returncode}, {len(left)} processes left\n{done.stderr[-3000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def make(folder: Path, packages: str) -> str | None:
    """Make an environment if it is not there; why it cannot be made."""
    if folder.exists():
        return None
    try:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True, capture_output=True, text=True)
        (site,) = folder.glob("lib/python*/site-packages")
        (site / "behind.pth").write_text(sysconfig.get_path("purelib") + "\n")
        pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", packages]
        subprocess.run(pip, check=True, capture_output=True, text=True)
    except subprocess.CalledProcessError as error:
        shutil.rmtree(folder, ignore_errors=True)
        return str(error.stderr).strip()[-500:] or str(error)
    return None


def main() -> None:
    """Print the table and write the JSON next to it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--environments", type=Path, help="folder in which they are kept")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    parser.add_argument("--rounds", type=int, default=20, help=argparse.SUPPRESS)
    parser.add_argument("--one", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        import peers  # by its name, under which Ray's processes find it too, and keep the data

        print(json.dumps(peers.one(**options.one)))
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.environments or Path(temporary)).absolute()
        missing = {name: why for name, packages in PACKAGES.items() if (why := make(folder / name, packages))}
        for name, why in missing.items():
            print(f"no environment for {PACKAGES[name]}: {why}")
        runs: dict[str, list[dict[str, Any]]] = {way: [] for way, (_, _, place) in WAYS.items() if place not in missing}
        for repeat in range(options.repeats):
            for way in runs if repeat % 2 == 0 else reversed(runs):
                place = WAYS[way][2]
                python = str(folder / place / "bin" / "python") if place else sys.executable
                runs[way].append(apart(way, options.rounds, python))
    ways = {
        way: {figure: round(statistics.median(run[figure] for run in each), 2) for figure in FIGURES}
        for way, each in runs.items()
    }
    added = {
        masked: {figure: round(ways[masked][figure] - ways[plain][figure], 2) for figure in FIGURES[1:]}
        for masked, plain in SECURE.items()
        if masked in ways
    }
    result = {
        "what": f"FedAvg on digits, {CLIENTS} clients, {options.rounds} rounds, medians of {options.repeats}",
        "ways": ways,
        "added_by_secure_aggregation": added,
        "missing": missing,
        "runs": runs,
        "environment": environment(),
    }
    options.out.write_text(json.dumps(result, indent=2) + "\n")
    print(f"{'':26}{'first round':>14}{'wall/round':>14}{'CPU/round':>14}{'memory':>14}{'accuracy':>10}")
    for way, row in ways.items():
        times = f"{row['first_round_s']:12.2f} s{row['wall_ms']:11.1f} ms{row['cpu_ms']:11.1f} ms"
        print(f"{way:26}{times}{row['peak_mib']:10.0f} MiB{row['accuracy']:10.2f}")
    for way, row in added.items():
        times = f"{row['wall_ms']:.1f} ms of wall time and {row['cpu_ms']:.1f} ms of CPU time a round"
        print(f"{way} adds {times}; accuracy {row['accuracy']:+.2f}")
    print(f"{os.cpu_count()} cores, 1 thread a process, median of {options.repeats}; written to {options.out}")


if __name__ == "__main__":
    main()
