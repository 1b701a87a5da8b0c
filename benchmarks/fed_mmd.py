r"""What the exchanges of FedMMD cost per mini-batch: CPU seconds and bytes, beside what the paper reports.

Run from the repository root: python benchmarks/fed_mmd.py [--parts pairwise summed unoptimised sizes] [--out ...]

Source and target have batches of 64 features of length 1 (normal rows, divided by their norm), alpha is 1/4, the kernel
is expanded around 0. Times are CPU seconds of all parties in one process with one thread (time.process_time), medians
after a first round that builds tables; bytes are all messages of a batch, without those that exchange keys.

pairwise     The paper's protocol with both its optimisations, one source: the target learns the gradient by its 64 L
             features and the loss from the source's encrypted moments, then the source its gradient from the target's.
             Gradients are those of 64 times the mean, so that the grid's steps of 2^-20 are small next to them; so
             are the errors shown. A cell that would take longer than a minute is measured on some samples and moments
             in one direction, and extrapolated: marked with "~". Asked: at L = 4 and degree 2, Paillier under 2.5 s
             and 80 kB.
summed       Three sources put their moments into one secure sum that the target reads; the target sends them its own in
             the clear; gradients are local, by autograd. Asked: under 50 ms and 10 kB per client at L = 4, under 1 s at
             L = 256 and degree 1.
unoptimised  What the optimisations save at L = 4, one source, through phe with one ciphertext per number, as in the
             paper. With keys of 512 and 1024 bits both directions are run and compared with autograd; with 3072 bits
             it is phe's primitives, timed one by one, times the number of operations, marked with "~". A: a monomial's
             sum over the batch is sent, instead of every sample's. B: gradients by features are exchanged, instead of
             those by the 1,444 parameters of the paper's extractor for PAMAP2. Operations are the fewest that a variant
             allows: without A the receiver first adds up the samples' ciphertexts. Keys of 512 and 1024 bits, as in the
             paper, are insecure: they can be factored.

sizes        The same savings for the paper's three data sets, with its keys, numbers of sources and extractors: that of
             Widar3.0 with 4 units behind it, a ResNet-18's first block (tables 5 and 6), and PAMAP2's. All is phe's
             primitives times the number of operations; the target encrypts its monomials once for all sources.

In the first round of a cell, gradients and losses are compared with autograd through the truncated kernel of all pairs,
up to the error that the backend declares.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import math
import operator
import os
import platform
import random
import secrets
import statistics
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

# before torch is imported: CPU time sums over threads
os.environ["OPENBLAS_NUM_THREADS"] = os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"

import gmpy2
import numpy as np
import torch
from phe import EncodedNumber
from phe import paillier as phe
from torch import Tensor, nn

from fedlit.functional.taylor_mmd import (
    gradient_map,
    num_taylor_moments,
    pair_with_kernel,
    taylor_coefficients,
    taylor_moments,
)
from fedlit.models import WidarNet
from fedlit.privacy import (
    BFV,
    CKKS,
    CKKSAffine,
    FixedPoint,
    Paillier,
    PaillierAffine,
    PairwiseMasking,
    Plain,
    PlainAffine,
    PrivacyError,
    RoundId,
    SecureAggregation,
    TwoPartyAffine,
)
from fedlit.privacy.affine import AffineGrid
from fedlit.privacy.affine_bound import most_outputs
from fedlit.privacy.affine_ckks import PARAMETERS as CKKS_PARAMETERS

BATCH, ALPHA, CENTER = 64, 0.25, 0.0
CELLS = [(4, 1), (4, 2), (64, 1), (64, 2), (256, 1), (256, 2)]
"""L and degree."""

GRID = AffineGrid(FixedPoint(20, 1.0), FixedPoint(20, 4.0), FixedPoint(20, 4.0))
"""Moments of features of length 1 are at most 1; the default bounds of 32 are too wide for 33,410 moments."""

ASKED: dict[tuple[str, str], dict[str, float]] = {
    ("pairwise", "4,2"): {"cpu_s": 2.5, "kB": 80},
    ("summed", "4,1"): {"cpu_s": 0.05, "client_kB": 10},
    ("summed", "4,2"): {"cpu_s": 0.05, "client_kB": 10},
    ("summed", "256,1"): {"cpu_s": 1},
}
"""Most of each figure, by part and cell; of the pairwise backends, for Paillier."""

NUM_SOURCES = 3
PARTIES = ("target", "source")
SLOW = 20.0
"""Seconds: a round that takes longer is not repeated."""

# Kang, Li and Zhang 2022: table 5 (seconds) and table 6 (kB, total of all domains), of one batch at L = 4, degree 2, a
# target batch of 64. Its "ciphertext length" may be that of the key. Seconds are wall time, with 4 cores per client.
REPORTED = {
    "PAMAP2": {
        "ciphertext_bits": 512, "sources": 4, "optimised_s": 9.45, "optimised_kB": 461.5,
        "unoptimised_s": 89.24, "unoptimised_kB": 11375.4,
    },
    "Widar 3.0": {
        "ciphertext_bits": 1024, "sources": 3, "optimised_s": 10.86, "optimised_kB": 780.9,
        "unoptimised_s": 1253.0, "unoptimised_kB": 125302.2,
    },
    "Office": {
        "ciphertext_bits": 512, "sources": 1, "optimised_s": 13.23, "optimised_kB": 241031.9,
        "unoptimised_s": 3873.51, "unoptimised_kB": 106716311.7,
    },
}  # fmt: skip

PIECES = {
    ("PaillierAffine", 64, 2): [(4, 552), (4, 2210), (16, 552)],
    ("PaillierAffine", 256, 2): [(1, 2048), (1, 8192), (4, 2048)],
    ("CKKSAffine", 64, 2): [(32, 2048)],
    ("CKKSAffine", 256, 2): [(8, 2048)],
}
"""Samples and moments of what is measured in place of a cell; a ciphertext of CKKS takes 2048 of either."""

CHECKED_SAMPLES = 2
"""Whose gradients are compared where a matrix for all of them would not fit the memory."""

PRECISION = 2.0**-20
"""Grid of the unoptimised variants: phe then need not align exponents to add."""

KEY_BITS = (512, 1024, 3072)
RUN_BITS = (512, 1024)
"""Keys with which the unoptimised forms are run, in seconds; with 3072 bits they take minutes per batch."""

INPUTS, HIDDEN, FEATURES = 40, 32, 4
HIDDEN_PARAMETERS, LAST_PARAMETERS = INPUTS * HIDDEN + HIDDEN, HIDDEN * FEATURES + FEATURES
"""Of the paper's extractor for PAMAP2, layers of 32 and 4 units: one of the last's moves one feature. The paper does
not tell how many inputs there are: 40 are ours."""

Case = dict[str, Any]
Monomial = tuple[int, ...]


def features(length: int, seed: int) -> Tensor:
    """A batch of features of length 1."""
    x = torch.randn(BATCH, length, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x / x.norm(dim=1, keepdim=True)


def mean_kernel(x: Tensor, y: Tensor, coefficients: Sequence[float]) -> Tensor:
    """Mean of the truncated kernel over all pairs, one by one."""
    squared = (x[:, None] - y[None]).square().sum(dim=2)
    return sum((a * squared**q for q, a in enumerate(coefficients)), torch.zeros_like(squared)).mean()


def gradient(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    leaf = x.detach().clone().requires_grad_()
    return torch.autograd.grad(function(leaf), leaf)[0]


# ---------------------------------------------------------------- the paper's protocol


class Pair:
    """Who holds moments and who learns gradients from them, with their keys."""

    def __init__(self, backend: TwoPartyAffine) -> None:
        self.holder, self.learner = backend.source(), backend.target()
        key = self.holder.public_key()
        self.learner.receive_key(key)
        self.key_bytes = len(key)
        self._calls = 0

    def exchange(
        self, moments: Tensor, matrix: Tensor, offset: Tensor
    ) -> tuple[Tensor, dict[str, float], tuple[int, int, int]]:
        """What the learner reads, CPU seconds by step, bytes of the three messages."""
        clock = [time.process_time()]
        round_id, self._calls = RoundId(self._calls, "benchmark", self._calls), self._calls + 1
        self.holder.open_round(round_id)
        self.learner.open_round(round_id)
        protected = self.holder.protect(moments, len(offset))
        clock.append(time.process_time())
        reply = self.learner.evaluate(protected, matrix, offset)
        clock.append(time.process_time())
        answer = self.holder.unlock(reply)
        clock.append(time.process_time())
        outputs = self.learner.reveal(answer)
        clock.append(time.process_time())
        names = ("protect", "evaluate", "unlock", "reveal")
        seconds = {name: end - start for name, start, end in zip(names, clock, clock[1:], strict=False)}
        return outputs, seconds, (len(protected), len(reply), len(answer))


def affine_map(x: Tensor, coefficients: Sequence[float], with_loss: bool) -> tuple[Tensor, Tensor]:
    """Matrix and offset of a learner: the first moment is 1 and stays at home."""
    matrix = gradient_map(x, coefficients) * len(x)
    if with_loss:
        own = taylor_moments(x, len(coefficients) - 1)
        matrix = torch.cat([matrix, pair_with_kernel(own, x.shape[1], coefficients)[None]])
    return matrix[:, 1:], matrix[:, 0]


def pairwise_batch(backend: TwoPartyAffine, pairs: Mapping[str, Pair], length: int, degree: int) -> Case:
    """Both directions of a batch; compared with autograd outside the clock."""
    coefficients = taylor_coefficients(ALPHA, degree, CENTER)
    data = {party: features(length, seed) for seed, party in enumerate(PARTIES)}
    seconds: defaultdict[str, float] = defaultdict(float)
    sizes, errors, determined = 0, [], False
    for learner, holder in (PARTIES, PARTIES[::-1]):
        gc.collect()
        start = time.process_time()
        moments = taylor_moments(data[holder], degree)[1:]
        matrix, offset = affine_map(data[learner], coefficients, with_loss=learner == "target")
        seconds["map"] += time.process_time() - start
        outputs, steps, messages = pairs[learner].exchange(moments, matrix, offset)
        determined |= len(matrix) > granted(backend, len(moments))
        for step, taken in steps.items():
            seconds[step] += taken
        sizes += sum(messages)
        got = outputs[: data[learner].numel()].reshape(data[learner].shape) / BATCH

        def loss(x: Tensor, other: Tensor = data[holder]) -> Tensor:
            return mean_kernel(x, other, coefficients)

        errors.append(float((got - gradient(loss, data[learner])).abs().max()) * BATCH)
        if learner == "target":
            errors.append(abs(float(outputs[-1]) - float(loss(data[learner]))))
    return {"seconds": dict(seconds), "bytes": sizes, "error": max(errors), "determined": determined}


def pairwise_cell(backend: TwoPartyAffine, pairs: Mapping[str, Pair], length: int, degree: int, repeats: int) -> Case:
    """A cell as it is. The first round checks, and is left out unless it is slow."""
    runs = [pairwise_batch(backend, pairs, length, degree)]
    bound = backend.error_bound(num_taylor_moments(length, degree) - 1) + 1e-12  # of float64 sums
    assert runs[0]["error"] <= bound, (runs[0]["error"], bound)
    if sum(runs[0]["seconds"].values()) < SLOW:
        runs = [pairwise_batch(backend, pairs, length, degree) for _ in range(repeats)]
    return {
        "cpu_s": statistics.median(sum(run["seconds"].values()) for run in runs),
        "steps_s": {step: statistics.median(run["seconds"][step] for run in runs) for step in runs[0]["seconds"]},
        "kB": runs[0]["bytes"] / 1e3,
        "error": max(run["error"] for run in runs),
        "error_bound": bound,
        "outputs_may_determine_moments": runs[0]["determined"],
        "extrapolated": False,
        "repeats": len(runs),
    }


def extrapolated_cell(backend: PaillierAffine | CKKSAffine, pair: Pair, length: int, degree: int) -> Case:
    """Twice one direction of a cell, from pieces: some samples' rows, and moments spread evenly over all of them."""
    pair.exchange(torch.ones(1), torch.ones(2, 1), torch.zeros(2))  # the one warning, which takes a rank
    coefficients = taylor_coefficients(ALPHA, degree, CENTER)
    num_moments, num_rows = num_taylor_moments(length, degree) - 1, BATCH * length
    x, y = features(length, 0), features(length, 1)
    moments = taylor_moments(y, degree)
    sizes, evaluate, error = [], [], 0.0
    for num_samples, num_columns in PIECES[type(backend).__name__, length, degree]:
        start = time.process_time()
        part = x[:num_samples]
        whole = gradient_map(part, coefficients) * len(part)
        map_seconds = (time.process_time() - start) / num_samples * BATCH
        columns = torch.linspace(1, num_moments, num_columns, dtype=torch.float64).long()
        matrix, offset = whole[:, columns], whole[:, 0]
        outputs, seconds, messages = pair.exchange(moments[columns], matrix, offset)
        error = max(error, float((outputs - matrix @ moments[columns] - offset).abs().max()))
        assert error <= backend.error_bound(num_columns) + 1e-12
        sizes.append((num_columns, len(offset)))
        evaluate.append(seconds["evaluate"])
    # products of moments and rows; with more pieces, tables for each moment and noise for each row
    terms = np.array([[m * r, m, r] for m, r in [*sizes, (num_moments, num_rows)]])[:, : len(sizes)].astype(float)
    wanted = message_units(backend, num_moments, num_rows)
    ratios = [full / piece for full, piece in zip(wanted, message_units(backend, *sizes[-1]), strict=True)]
    steps = {
        "map": map_seconds,
        "protect": seconds["protect"] * num_moments / num_columns,
        "evaluate": float(terms[-1] @ np.linalg.solve(terms[:-1], np.array(evaluate))),
        "unlock": seconds["unlock"] * ratios[1],
        "reveal": seconds["reveal"] * ratios[1],
    }
    both = {step: 2 * value for step, value in steps.items()}
    return {
        "cpu_s": sum(both.values()),
        "steps_s": both,
        "kB": 2 * sum(size * ratio for size, ratio in zip(messages, ratios, strict=True)) / 1e3,
        "error": error,
        "extrapolated": True,
        "pieces": [{"moments": m, "rows": r} for m, r in sizes],
        "of": {"moments": num_moments, "rows": num_rows},
    }


def message_units(backend: PaillierAffine | CKKSAffine, num_moments: int, num_rows: int) -> tuple[int, int, int]:
    """What the sizes of the three messages are proportional to."""
    if isinstance(backend, PaillierAffine):
        replies = backend.slots(num_moments).integers(num_rows)
        return num_moments, replies, replies
    block = CKKS_PARAMETERS.slots // 2
    replies = math.ceil(num_rows / (CKKS_PARAMETERS.slots + 1 - min(block, num_moments)))
    return math.ceil(num_moments / block), replies, num_rows


def granted(backend: TwoPartyAffine, num_moments: int) -> int:
    """Outputs up to which the moments stay hidden."""
    return most_outputs(num_moments, (2 * GRID.moments.limit).bit_length(), backend.output_bits(num_moments))


def pairwise(repeats: int) -> Case:
    """All cells of all backends; those of a backend share its keys."""
    backends: list[PlainAffine | PaillierAffine | CKKSAffine] = [
        PlainAffine(),
        PaillierAffine(GRID, key_bits=3072, workers=1, reveal_moments=True),
        CKKSAffine(GRID, reveal_moments=True),
    ]
    result: Case = {}
    for backend in backends:
        name = type(backend).__name__
        pairs = {party: Pair(backend) for party in PARTIES}
        result[name] = {"key_kB": sum(pair.key_bytes for pair in pairs.values()) / 1e3}
        for length, degree in CELLS:
            if isinstance(backend, PlainAffine) and degree == 2 and length > 4:
                continue  # all the time goes into the matrix, which others need as well
            try:
                if (name, length, degree) in PIECES and not isinstance(backend, PlainAffine):
                    case = extrapolated_cell(backend, pairs["target"], length, degree)
                else:
                    case = pairwise_cell(backend, pairs, length, degree, repeats)
            except PrivacyError as error:
                case = {"refused": str(error).splitlines()[0]}
            result[name][f"{length},{degree}"] = case
            print(f"  {name:15} {length:4} {degree:3}  {cell_text(case)}", flush=True)
    return result


def cell_text(case: Case) -> str:
    if "refused" in case:
        return f"refused: {case['refused']}"
    mark = "~" if case["extrapolated"] else " "
    steps = ", ".join(f"{step} {value:.3g}" for step, value in case["steps_s"].items())
    known = "  outputs may determine the moments" if case.get("outputs_may_determine_moments") else ""
    return f"{mark}{case['cpu_s']:10.3f} s {mark}{case['kB']:10.1f} kB  error {case['error']:.0e}  ({steps}){known}"


# ---------------------------------------------------------------- the summed form


class Books:
    """CPU seconds, bytes sent and bytes received by party."""

    def __init__(self) -> None:
        self.cpu: defaultdict[str, float] = defaultdict(float)
        self.sent: Counter[str] = Counter()
        self.received: Counter[str] = Counter()

    @contextmanager
    def working(self, party: str) -> Iterator[None]:
        """What happens inside is this party's work."""
        start = time.process_time()
        yield
        self.cpu[party] += time.process_time() - start

    def carry(self, sender: str, receiver: str, size: int) -> None:
        """A message went from one to the other."""
        self.sent[sender] += size
        self.received[receiver] += size


class Federation:
    """Sources that add up their moments, the target that reads the sum, a server that adds; enrolled once."""

    def __init__(self, backend: SecureAggregation) -> None:
        self.backend = backend
        self.sources = [f"source{idx}" for idx in range(NUM_SOURCES)]
        roster = [*self.sources, "target"]
        self.clients = {name: backend.client(name) for name in roster}
        self.server = backend.server()
        for party in (*self.clients.values(), self.server):
            party.enrol(roster)
        for step in backend.enrolment:
            sent = {name: client.send(step) for name, client in self.clients.items()}
            relayed = self.server.relay(step, sent)
            for name, client in self.clients.items():
                client.receive(step, relayed.get(name, b""))
        self._calls = 0

    def mean(self, vectors: Mapping[str, Tensor], books: Books) -> Tensor:
        """The sources' mean, as the target reads it."""
        round_id, self._calls = RoundId(self._calls, "benchmark", self._calls), self._calls + 1
        self._open(round_id, books)
        messages = {}
        for name, vector in vectors.items():
            with books.working(name):
                messages[name] = self.clients[name].protect(vector)
            books.carry(name, "server", messages[name].nbytes)
        with books.working("server"):
            total = self.server.aggregate(messages)
        if self.backend.closing:
            total = self._close(books)
        if self.backend.key_holder == "server":
            with books.working("server"):
                total = self.server.reveal(total, len(vectors))
        books.carry("server", "target", total.nbytes)
        with books.working("target"):
            if self.backend.key_holder == "clients":
                total = self.clients["target"].reveal(total, len(vectors))
            return total / len(vectors)

    def _open(self, round_id: RoundId, books: Books) -> None:
        with books.working("server"):
            self.server.open_round(round_id, self.sources)
        for name in self.sources:
            with books.working(name):
                self.clients[name].open_round(round_id, self.sources)
        for step in self.backend.steps(len(self.sources))[0]:
            sent = {}
            for name in self.sources:
                with books.working(name):
                    sent[name] = self.clients[name].send(step)
                books.carry(name, "server", len(sent[name]))
            with books.working("server"):
                relayed = self.server.relay(step, sent)
            for name in self.sources:
                received = relayed.get(name, b"")
                books.carry("server", name, len(received))
                with books.working(name):
                    self.clients[name].receive(step, received)

    def _close(self, books: Books) -> Tensor:
        answers: dict[str, bytes] = {}
        for step in self.backend.steps(len(self.sources))[1]:
            with books.working("server"):
                asked = self.server.ask(step, answers)
            answers = {}
            for name, question in asked.items():
                books.carry("server", name, len(question))
                with books.working(name):
                    answers[name] = self.clients[name].answer(step, question)
                books.carry(name, "server", len(answers[name]))
        with books.working("server"):
            return self.server.conclude(answers)


def summed_batch(federation: Federation, length: int, degree: int) -> tuple[Books, dict[str, Tensor], Tensor]:
    """A batch: books, gradients of the mean kernel by client, and the mean that the target read."""
    gc.collect()
    coefficients = taylor_coefficients(ALPHA, degree, CENTER)
    books = Books()
    leaves = {name: batch_of(name, length).requires_grad_() for name in federation.clients}
    moments, gradients = {}, {}
    for name, leaf in leaves.items():
        with books.working(name):
            moments[name] = taylor_moments(leaf, degree)
    mean = federation.mean({name: moments[name].detach()[1:] for name in federation.sources}, books)
    for name in federation.sources:
        books.carry("target", name, moments["target"][1:].nbytes)
    own = moments["target"].detach()
    for name, leaf in leaves.items():
        with books.working(name):
            other = torch.cat([torch.ones(1, dtype=torch.float64), mean]) if name == "target" else own
            kernel = moments[name] @ pair_with_kernel(other, length, coefficients)
            gradients[name] = torch.autograd.grad(kernel, leaf)[0]
    return books, gradients, mean


def batch_of(client: str, length: int) -> Tensor:
    return features(length, 0 if client == "target" else 1 + int(client.removeprefix("source")))


def check_summed(federation: Federation, length: int, degree: int, gradients: Mapping[str, Tensor]) -> float:
    """Greatest error of a gradient against all pairs one by one, after comparing it with what the backend declares."""
    coefficients = taylor_coefficients(ALPHA, degree, CENTER)
    target = batch_of("target", length)
    sources = {name: batch_of(name, length) for name in federation.sources}
    errors = []
    for name, x in sources.items():
        true = gradient(lambda leaf: mean_kernel(leaf, target, coefficients), x)
        errors.append(float((gradients[name] - true).abs().max()))
    assert max(errors) <= 1e-12, errors  # nothing was rounded
    true = torch.stack(
        [gradient(lambda leaf, y=y: mean_kernel(leaf, y, coefficients), target) for y in sources.values()]
    ).mean(dim=0)
    difference = (gradients["target"] - true).abs()
    moment_error = federation.backend.error_bound(NUM_SOURCES) / NUM_SOURCES
    checked = target[:CHECKED_SAMPLES]
    rows = (gradient_map(checked, coefficients) * len(checked))[:, 1:].abs().sum(dim=1) / BATCH
    bound = rows * moment_error + 1e-12
    assert bool((difference[:CHECKED_SAMPLES].flatten() <= bound).all())
    return float(difference.max())


def summed(repeats: int) -> Case:
    """All cells of all backends."""
    backends: dict[str, SecureAggregation] = {
        "Plain on the grid": Plain(FixedPoint()),
        "PairwiseMasking": PairwiseMasking(),
        "Paillier 3072": Paillier(key_bits=3072, workers=1),
        "BFV": BFV(),
        "CKKS": CKKS(),
    }
    result: Case = {}
    for name, backend in backends.items():
        federation = Federation(backend)
        result[name] = {}
        for length, degree in CELLS:
            try:
                _, gradients, _ = summed_batch(federation, length, degree)
                error = check_summed(federation, length, degree, gradients)
                runs = [summed_batch(federation, length, degree)[0] for _ in range(repeats)]
            except PrivacyError as refusal:
                result[name][f"{length},{degree}"] = {"refused": str(refusal).splitlines()[0]}
                continue
            clients = list(federation.clients)
            case = {
                "cpu_s": statistics.median(sum(books.cpu.values()) for books in runs),
                "client_cpu_s": statistics.median(max(books.cpu[client] for client in clients) for books in runs),
                "client_kB": max(runs[0].sent[client] + runs[0].received[client] for client in clients) / 1e3,
                "source_sent_kB": runs[0].sent["source0"] / 1e3,
                "source_received_kB": runs[0].received["source0"] / 1e3,
                "target_sent_kB": runs[0].sent["target"] / 1e3,
                "target_received_kB": runs[0].received["target"] / 1e3,
                "error": error,
            }
            result[name][f"{length},{degree}"] = case
            print(
                f"  {name:17} {length:4} {degree:3}  {1e3 * case['cpu_s']:9.1f} ms, a client at most "
                f"{1e3 * case['client_cpu_s']:8.1f} ms, {case['client_kB']:8.1f} kB (a source sends "
                f"{case['source_sent_kB']:.1f}, receives {case['source_received_kB']:.1f}; the target "
                f"{case['target_sent_kB']:.1f}, {case['target_received_kB']:.1f})  error {error:.0e}",
                flush=True,
            )
    return result


# ---------------------------------------------------------------- without the optimisations


def expansion(length: int, degree: int) -> dict[tuple[Monomial, Monomial], float]:
    """The truncated kernel as products of monomials, those of one side's features and of the other's."""
    zero = (0,) * (2 * length)

    def monomial(*places: int) -> Monomial:
        return tuple(places.count(place) for place in range(2 * length))

    squared: Counter[Monomial] = Counter()
    for place in range(length):
        squared.update({monomial(place, place): 1, monomial(length + place, length + place): 1})
        squared[monomial(place, length + place)] -= 2
    power, total = {zero: 1.0}, dict[Monomial, float]()
    for coefficient in taylor_coefficients(ALPHA, degree, CENTER):
        for key, value in power.items():
            total[key] = total.get(key, 0.0) + coefficient * value
        grown: dict[Monomial, float] = {}
        for key, value in power.items():
            for other, factor in squared.items():
                both = tuple(a + b for a, b in zip(key, other, strict=True))
                grown[both] = grown.get(both, 0.0) + value * factor
        power = grown
    return {(key[:length], key[length:]): value for key, value in total.items()}


def needed(products: Mapping[tuple[Monomial, Monomial], float], of_features: Sequence[int]) -> int:
    """How many of the other side's encrypted monomials a derivative takes that moves only these own features."""
    return len({f for f, g in products if any(f) and any(g[place] for place in of_features)})


def operations(
    length: int,
    degree: int,
    sums: bool,
    chain: bool,
    parameters: tuple[int, int] = (HIDDEN_PARAMETERS, LAST_PARAMETERS),
    sources: int = 1,
    one_domain: bool = False,
) -> Counter[str]:
    """Primitives of a batch in all directions, ciphertexts sent, plain numbers sent.

    Args:
        length: Number L of features.
        degree: Of the polynomial.
        sums: Optimisation A.
        chain: Optimisation B.
        parameters: Of the extractor, those that move all features, and those that move one.
        sources: How many the target exchanges with, all by one key pair and the same ciphertexts.
        one_domain: Whether the sources are one domain (equations 16 and 17), and each exchanges with the others too.
    """
    products = expansion(length, degree)
    monomials = len({f for f, _ in products if any(f)})
    of_one, of_all = needed(products, [0]), needed(products, range(length))
    count: Counter[str] = Counter()
    # by source: what the target learns, what the source learns from the target, and from each other source, whose
    # ciphertexts are those that the target has got
    for with_loss, new in ((True, 1.0), (False, 1 / sources), *[(False, 0.0)] * ((sources - 1) * one_domain)):
        multiplied = [of_one] * (BATCH * length) if chain else [of_all] * parameters[0] + [of_one] * parameters[1]
        gradients = len(multiplied)
        if with_loss:
            multiplied.append(monomials)
        outputs = len(multiplied)
        encrypted = monomials * (1 if sums else BATCH)
        # what goes back gets fresh noise, or it would show the factors
        count["encrypt"] += encrypted * new + outputs
        count["multiply"] += sum(multiplied)
        # the last addition of an output is that of the mask with what needs no ciphertext
        count["add"] += sum(multiplied) + (0 if sums else monomials * (BATCH - 1))
        count["decrypt"] += outputs
        count["ciphertexts"] += encrypted + outputs
        count["numbers"] += gradients  # the loss stays with who decrypts it
    return Counter({name: round(sources * number) for name, number in count.items()})


def primitives(key_bits: int, repeats: int) -> dict[str, float]:
    """CPU seconds of phe's operations on one number."""
    public, private = phe.generate_paillier_keypair(n_length=key_bits)
    generator = random.Random(0)
    numbers = [generator.uniform(-1, 1) for _ in range(10)]
    ciphertexts = [public.encrypt(number, precision=PRECISION) for number in numbers]
    products = [
        ciphertext * EncodedNumber.encode(public, number, precision=PRECISION)
        for ciphertext, number in zip(ciphertexts, numbers, strict=True)
    ]
    actions: dict[str, Callable[[], object]] = {
        "encrypt": lambda: [public.encrypt(number, precision=PRECISION) for number in numbers],
        "multiply": lambda: [
            ciphertext * EncodedNumber.encode(public, number, precision=PRECISION)
            for ciphertext, number in zip(ciphertexts, numbers[::-1], strict=True)
        ],
        "add": lambda: [one + other for one, other in zip(products, products[::-1], strict=True)],
        "decrypt": lambda: [private.decrypt(product) for product in products],
    }
    taken: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(repeats):
        for name, action in actions.items():
            start = time.process_time()
            action()
            taken[name].append((time.process_time() - start) / len(numbers))
    return {name: statistics.median(seconds) for name, seconds in taken.items()}


class Extractor(nn.Module):
    """As wide as the paper's for PAMAP2, with a smooth activation, so that every parameter moves the features."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.hidden = nn.Linear(INPUTS, HIDDEN, dtype=torch.float64)
        self.last = nn.Linear(HIDDEN, FEATURES, dtype=torch.float64)

    def forward(self, inputs: Tensor) -> Tensor:
        """Features, shape (n, 4), around 0.3 long."""
        features: Tensor = self.last(torch.tanh(self.hidden(inputs)))
        return features


class Party:
    """A client of the paper's protocol, with a key pair of its own."""

    def __init__(self, seed: int, key_bits: int) -> None:
        self.public, self.private = phe.generate_paillier_keypair(n_length=key_bits)
        self.extractor = Extractor(seed)
        self.inputs = torch.randn(BATCH, INPUTS, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        with torch.no_grad():
            self.features = self.extractor(self.inputs)

    def jacobian(self) -> Tensor:
        """Derivatives of features by parameters, shape (64, 4, parameters)."""
        params = dict(self.extractor.named_parameters())

        def features(values: dict[str, Tensor], one: Tensor) -> Tensor:
            found: Tensor = torch.func.functional_call(self.extractor, values, (one[None],))
            return found[0]

        each = torch.func.vmap(torch.func.jacrev(features), in_dims=(None, 0))(params, self.inputs)
        return torch.cat([each[name].reshape(BATCH, FEATURES, -1) for name in params], dim=2)


def value(samples: Tensor, monomial: Monomial) -> Tensor:
    """A monomial of each sample, shape (n,)."""
    return (samples ** torch.tensor(monomial)).prod(dim=1)


def rows_of(
    learner: Party, products: Mapping[tuple[Monomial, Monomial], float], names: Sequence[Monomial], chain: bool
) -> tuple[Tensor, Tensor]:
    """Factors of the other side's monomials in 64 times each gradient, (gradients, M), and which can be other than 0.

    Args:
        learner: Whose gradients.
        products: See `expansion`.
        names: The other side's monomials, in order.
        chain: Optimisation B: by features; without it by parameters.
    """
    slopes = torch.zeros(BATCH, FEATURES, len(names), dtype=torch.float64)
    there = torch.zeros(FEATURES, len(names), dtype=torch.bool)
    for (f, g), coefficient in products.items():
        for place in range(FEATURES):
            if g[place]:
                lower = (*g[:place], g[place] - 1, *g[place + 1 :])
                slopes[:, place, names.index(f)] += coefficient * g[place] * value(learner.features, lower)
                there[place, names.index(f)] = True
    if chain:
        return slopes.flatten(0, 1), there.repeat(BATCH, 1)
    jacobian = learner.jacobian()
    moved = (jacobian != 0).any(dim=0).double()  # (4, parameters)
    return torch.einsum("ilp,ilf->pf", jacobian, slopes), moved.T @ there.double() > 0


def phe_direction(
    learner: Party, holder: Party, degree: int, sums: bool, chain: bool, with_loss: bool
) -> tuple[Counter[str], float]:
    """One direction of a batch through phe; how many operations it took, and its largest error against autograd."""
    products = expansion(FEATURES, degree)
    names = sorted({f for f, _ in products})
    one = (0,) * FEATURES
    public, count = holder.public, Counter[str]()

    def encoded(number: float) -> EncodedNumber:
        return EncodedNumber.encode(public, number, precision=PRECISION)

    # the holder encrypts its monomials
    values = {f: value(holder.features, f) for f in names if f != one}
    told = {
        f: [public.encrypt(encoded(float(v))) for v in (each.mean()[None] if sums else each)]
        for f, each in values.items()
    }
    count["encrypt"] += sum(map(len, told.values()))
    # the learner sums them if that is not done, and multiplies
    means = {f: functools.reduce(operator.add, each) for f, each in told.items()}
    count["add"] += sum(len(each) - 1 for each in told.values())
    rows, there = rows_of(learner, products, names, chain)
    if with_loss:
        of_loss = torch.zeros(1, len(names), dtype=torch.float64)
        for (f, g), coefficient in products.items():
            of_loss[0, names.index(f)] += coefficient * float(value(learner.features, g).mean())
        rows, there = torch.cat([rows, of_loss]), torch.cat([there, torch.ones_like(there[:1])])
    scale = 1.0 if sums else 1 / BATCH
    gradients = len(rows) - with_loss
    masks, masked = [], []
    for index, (row, needs) in enumerate(zip(rows.tolist(), there.tolist(), strict=True)):
        terms = [
            means[f] * encoded(factor * scale)
            for f, factor, need in zip(names, row, needs, strict=True)
            if need and f != one
        ]
        known = EncodedNumber.encode(public, row[names.index(one)], precision=PRECISION**2)
        mask = secrets.randbelow(public.n) if index < gradients else 0  # the loss stays with who decrypts it
        masks.append(mask)
        assert known.exponent == terms[0].exponent  # so that nothing is rescaled
        fresh = EncodedNumber(public, (known.encoding + mask) % public.n, known.exponent)
        masked.append(functools.reduce(operator.add, terms) + public.encrypt(fresh))
        count["multiply"] += len(terms)
        count["add"] += len(terms)
        count["encrypt"] += 1
    # the holder decrypts, the learner takes the mask off
    numbers = [holder.private.decrypt_encoded(output) for output in masked]
    count["decrypt"] += len(numbers)
    found = torch.tensor(
        [
            EncodedNumber(public, (number.encoding - mask) % public.n, number.exponent).decode()
            for number, mask in zip(numbers, masks, strict=True)
        ],
        dtype=torch.float64,
    )
    count["ciphertexts"] = sum(map(len, told.values())) + len(masked)
    count["numbers"] = gradients
    return count, error_of(found, learner, holder, degree, chain)


def error_of(found: Tensor, learner: Party, holder: Party, degree: int, chain: bool) -> float:
    """Largest difference to autograd through the truncated kernel of all pairs."""
    coefficients = taylor_coefficients(ALPHA, degree, CENTER)
    features = learner.extractor(learner.inputs)
    features.retain_grad()
    loss = mean_kernel(features, holder.features, coefficients)
    learner.extractor.zero_grad()
    loss.backward()
    by_parameters = [param.grad.flatten() for param in learner.extractor.parameters() if param.grad is not None]
    assert features.grad is not None
    true = BATCH * (features.grad.flatten() if chain else torch.cat(by_parameters))
    errors = (found[: len(true)] - true).abs().max()
    return max(float(errors), *[abs(float(found[-1] - loss))] if len(found) > len(true) else [0.0])


def phe_batch(parties: Mapping[str, Party], degree: int, sums: bool, chain: bool) -> tuple[float, Counter[str], float]:
    """Both directions of a batch: CPU seconds, operations, and the largest error."""
    gc.collect()
    start = time.process_time()
    target, source = parties["target"], parties["source"]
    one, error = phe_direction(target, source, degree, sums, chain, with_loss=True)
    two, other = phe_direction(source, target, degree, sums, chain, with_loss=False)
    return time.process_time() - start, one + two, max(error, other)


def unoptimised(repeats: int) -> Case:
    """Seconds and bytes of the four variants: run with the paper's keys, extrapolated with a secure one."""
    result: Case = {"key_bits": {}}
    for degree in (1, 2):
        products = expansion(FEATURES, degree)
        assert (len(products), len({f for f, _ in products})) == {1: (13, 9), 2: (87, 41)}[degree]
    for bits in KEY_BITS:
        seconds = primitives(bits, repeats)
        parties = {name: Party(seed, bits) for seed, name in enumerate(PARTIES)} if bits in RUN_BITS else None
        for party in (parties or {}).values():
            party.jacobian()  # torch takes its time for the first one
        variants = []
        for degree in (1, 2):
            for sums, chain in ((True, True), (False, True), (True, False), (False, False)):
                count = operations(FEATURES, degree, sums, chain)
                case: Case = {"degree": degree, "A": sums, "B": chain, "operations": dict(count)}
                case["from_primitives_s"] = sum(seconds[name] * count[name] for name in seconds)
                case["kB"] = (count["ciphertexts"] * bits / 4 + 8 * count["numbers"]) / 1e3
                if parties is None:
                    case |= {"cpu_s": case["from_primitives_s"], "extrapolated": True}
                else:
                    case["cpu_s"], counted, case["error"] = phe_batch(parties, degree, sums, chain)
                    assert counted == count, (counted, count)
                    assert case["error"] < 1e-3, case
                    case["extrapolated"] = False
                variants.append(case)
        result["key_bits"][str(bits)] = {"secure": bits >= 3072, "primitives_s": seconds, "variants": variants}
        show_variants(bits, result["key_bits"][str(bits)])
    result["reported"] = REPORTED
    for name, case in REPORTED.items():
        print(
            f"  paper, {name}: {case['sources']} sources, ciphertexts of {case['ciphertext_bits']} bit, degree 2: "
            f"both on {case['optimised_s']:.2f} s and {case['optimised_kB']:.1f} kB, "
            f"both off {case['unoptimised_s']:.2f} s and {case['unoptimised_kB']:.1f} kB"
        )
    return result


def extractors() -> dict[str, tuple[int, int]]:
    """Parameters of the paper's extractors, those that move all 4 features, and those that move one of them."""
    from torchvision.models import resnet18

    whole = resnet18()
    block = [*whole.conv1.parameters(), *whole.bn1.parameters(), *whole.layer1.parameters()]
    return {
        "Widar 3.0": (sum(param.numel() for param in WidarNet(width=FEATURES).parameters()), 0),
        "Office": (sum(param.numel() for param in block), 65 * FEATURES),
        "PAMAP2": (HIDDEN_PARAMETERS, LAST_PARAMETERS),
    }


def sizes(repeats: int) -> Case:
    """Seconds and kilobytes of a batch at degree 2 on the paper's data sets, with and without its optimisations."""
    parameters = extractors()
    times = {bits: primitives(bits, repeats) for bits in RUN_BITS}

    def cost(
        name: str, sums: bool, chain: bool, bits: int | None = None, one_domain: bool = False
    ) -> tuple[float, float]:
        reported = REPORTED[name]
        bits = bits or int(reported["ciphertext_bits"])
        count = operations(FEATURES, 2, sums, chain, parameters[name], int(reported["sources"]), one_domain)
        seconds = times.get(bits, {})
        kilobytes = (count["ciphertexts"] * bits / 4 + 8 * count["numbers"]) / 1e3
        return sum(taken * count[each] for each, taken in seconds.items()), kilobytes

    found: Case = {"parameters": {name: sum(each) for name, each in parameters.items()}, "seconds": {}, "kB": {}}
    for name in parameters:
        for place, unit in enumerate(("seconds", "kB")):
            with_both, without = (cost(name, on, on)[place] for on in (True, False))
            found[unit][name] = {
                "w/ optimization (multi-source)": round(with_both, 3),
                "w/ optimization (single-source)": round(cost(name, True, True, one_domain=True)[place], 3),
                "w/o optimization": round(without, 1),
                "times": round(without / with_both, 1),
            }
            print(f"  {name:10} {parameters[name]} parameters, {unit}: {found[unit][name]}, paper {REPORTED[name]}")
    ways = {"neither": (False, False), "A": (True, False), "B": (False, True), "A and B": (True, True)}
    costs = {way: cost("PAMAP2", *on) for way, on in ways.items()}
    found["ablation"] = {way: {"seconds": round(s, 3), "kB": round(kB, 1)} for way, (s, kB) in costs.items()}
    found["ciphertext_kB"] = {
        str(bits): {way: round(cost("PAMAP2", *ways[way], bits)[1], 1) for way in ("A and B", "neither")}
        for bits in (512, 1024, 2048)
    }
    return found


def show_variants(bits: int, case: Case) -> None:
    times = ", ".join(f"{name} {1e6 * value:.0f}" for name, value in case["primitives_s"].items())
    print(f"  phe {bits} bit{'' if case['secure'] else ' (insecure)'}, us per number: {times}")
    both_on = {row["degree"]: row for row in case["variants"] if row["A"] and row["B"]}
    for row in case["variants"]:
        best = both_on[row["degree"]]
        print(
            f"    degree {row['degree']}  A {'on ' if row['A'] else 'off'}  B {'on ' if row['B'] else 'off'} "
            f"{'~' if row['extrapolated'] else ' '}{row['cpu_s']:9.2f} s ({row['cpu_s'] / best['cpu_s']:5.1f}x) "
            f"{row['kB']:9.1f} kB "
            f"({row['kB'] / best['kB']:5.1f}x)",
            flush=True,
        )


def compared(result: Mapping[str, Any]) -> list[Case]:
    """What was asked of the parts that ran, and what was found."""
    rows: list[Case] = []
    for (part, cell), figures in ASKED.items():
        for backend, cells in result.get(part, {}).items():
            if part == "pairwise" and backend != "PaillierAffine":
                continue
            for figure, most in figures.items():
                found = cells[cell][figure]
                rows.append(
                    {"part": part, "backend": backend, "cell": cell, "figure": figure, "most": most, "found": found}
                )
                print(
                    f"  {part:8} {backend:17} {cell:5} {figure:9} {found:8.3f}, at most {most}: "
                    f"{'met' if found <= most else 'not met'}"
                )
    return rows


def main() -> None:
    """Run the parts asked for, print a table, write the JSON."""
    parts: dict[str, Callable[[int], Case]] = {"pairwise": pairwise, "summed": summed, "unoptimised": unoptimised}
    parts["sizes"] = sizes
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=list(parts), default=list(parts))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    kept = json.loads(options.out.read_text()) if options.out.exists() else {}
    result: Case = kept | {
        "what": "exchanges of FedMMD per mini-batch; CPU seconds of all parties, medians; kB of all messages but keys",
        "cells": "L,degree",
    }
    for name in options.parts:
        print(name)
        result[name] = parts[name](options.repeats)
    facts: Case = {
        "batch": BATCH, "alpha": ALPHA, "center": CENTER, "summed_sources": NUM_SOURCES, "pairwise_sources": 1,
        "seeds": "target 0, sources from 1", "repeats": options.repeats, "threads": 1, "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "command": f"python benchmarks/fed_mmd.py --parts {' '.join(options.parts)}",
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "gmpy2": gmpy2.version(),
            **{name: version(name) for name in ("phe", "tenseal", "cryptography", "numpy")},
        },
    }  # fmt: skip
    if set(options.parts) == set(parts) or not kept:
        print("asked")
        result |= {"asked": compared(result)} | facts
    else:  # the others' figures stay, with what they were made by
        result["made_later"] = kept.get("made_later", {}) | dict.fromkeys(options.parts, facts)
    options.out.write_text(json.dumps(result, indent=2) + "\n")
    print(f"{os.cpu_count()} cores, 1 thread, median of {options.repeats}, {facts['versions']}; {options.out}")


if __name__ == "__main__":
    main()
