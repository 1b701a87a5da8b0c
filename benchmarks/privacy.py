"""What each privacy backend costs, next to naive phe (one ciphertext per float) and to the plain sum.

Run: python benchmarks/privacy.py [--repeats 5] [--out benchmarks/privacy.json]

Secure sums over K = 10 clients, all parties in one process with one thread and one worker, after a first round that is
left out (it builds tables and touches memory). A figure is the median of CPU time over repeats; what is compared is
timed in turns, in one run. Decryption is counted once: all receivers read the same total. Memory comes from a fresh
process. Errors are against the exact sum of the float32 vectors.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import gmpy2
import numpy as np
import tenseal as ts
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from phe import paillier as phe
from torch import Tensor

from fedlit.federation.sealing import MAC_BYTES, WRAP_BYTES, Seals
from fedlit.federation.wire import decode, encode, wire_size
from fedlit.privacy import (
    BFV,
    CKKS,
    FixedPoint,
    Paillier,
    PaillierAffine,
    PairwiseMasking,
    Plain,
    RoundId,
    SecureAggregation,
    driver,
)

CLIENTS = [f"client{index}" for index in range(10)]
LONG = 1_000_000
MEMORY_LENGTH = 10_000_000
NAIVE_NUMBERS = 2


def vectors(length: int) -> dict[str, Tensor]:
    """One random vector per client."""
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(length, generator=generator) for name in CLIENTS}


class Parties(driver.Parties):
    """All parties of a backend, enrolled; times each step of a round."""

    def __init__(self, backend: SecureAggregation) -> None:
        super().__init__(backend, CLIENTS)
        self.backend, self.call = backend, 0
        self.enrol(CLIENTS)

    def round(self, sent: Mapping[str, Tensor], opened_by: list[str] = CLIENTS) -> dict[str, Any]:
        """One sum over ``sent``; clients of ``opened_by`` that send nothing have vanished. CPU seconds by step."""
        gc.collect()
        round_id, self.call = RoundId(self.call, "benchmark", self.call), self.call + 1
        clock = [time.process_time()]
        self.open_round(round_id, opened_by)
        clock.append(time.process_time())
        messages = {name: self.clients[name].protect(vector) for name, vector in sent.items()}
        clock.append(time.process_time())
        total = self.server.aggregate(messages)
        clock.append(time.process_time())
        if self.backend.closing:
            total = self.server.conclude(self.ask_survivors(list(sent)))
        clock.append(time.process_time())
        holder = self.server if self.backend.key_holder == "server" else self.clients[CLIENTS[0]]
        total = holder.reveal(total, len(sent))
        clock.append(time.process_time())
        steps = dict(zip(("open", "protect", "add", "recover", "reveal"), clock[1:], strict=True))
        seconds = {step: end - start for (step, end), start in zip(steps.items(), clock, strict=False)}
        size = next(iter(messages.values()))
        return {
            **seconds,
            "all": clock[-1] - clock[0],
            "total": total,
            "bytes": size.numel() * size.element_size() / len(total),
        }


def error(total: Tensor, sent: Mapping[str, Tensor]) -> float:
    """Greatest difference to the exact sum."""
    true = torch.stack([vector.double() for vector in sent.values()]).sum(dim=0)
    return float((total.double() - true).abs().max())


def cpu(action: Callable[[], object]) -> float:
    """CPU seconds of ``action``."""
    gc.collect()
    start = time.process_time()
    action()
    return time.process_time() - start


def paillier(key_bits: int, repeats: int) -> dict[str, float]:
    """A packed secure mean against one phe ciphertext per float, per number, with all parties."""
    backend = Paillier(key_bits=key_bits, workers=1)
    parties = Parties(backend)
    length = 40 * backend.slots.count
    sent = vectors(length)
    parties.round(sent)
    public, private = phe.generate_paillier_keypair(n_length=key_bits)

    def naive() -> None:
        for place in range(NAIVE_NUMBERS):
            ciphertexts = [public.encrypt(float(vector[place])) for vector in sent.values()]
            private.decrypt(sum(ciphertexts[1:], ciphertexts[0]) * (1 / len(sent)))

    ours, theirs = [], []
    for _ in range(repeats):
        result = parties.round(sent)
        ours.append(result["all"] / length)
        theirs.append(cpu(naive) / NAIVE_NUMBERS)
    ratios = [b / a for a, b in zip(ours, theirs, strict=True)]
    return {
        "us_per_number": 1e6 * statistics.median(ours),
        "naive_us_per_number": 1e6 * statistics.median(theirs),
        "times_faster": statistics.median(ratios),
        "times_faster_min": min(ratios),
        "bytes_per_number": result["bytes"],
        "naive_bytes_per_number": key_bits / 4,
        "error": error(result["total"], sent),
    }


def masking(repeats: int) -> dict[str, float]:
    """A million floats: protecting against the raw keystream, recovery with and without a client that vanished."""
    sent = vectors(LONG)
    parties, plain = Parties(PairwiseMasking()), Parties(Plain())
    in_pairs = Parties(PairwiseMasking(threshold=1.0))  # a round that nobody may leave
    all_but_one = {name: sent[name] for name in CLIENTS[:-1]}
    stacked = list(sent.values())
    chunk = bytes(2**18)
    buffer = bytearray(2**18 + 16)

    def keystream(added: np.ndarray | None = None) -> None:
        """As many bytes of AES-256-CTR as one client's masks: one for itself and one for each other client.

        With ``added`` each piece is added to numbers that stay in the cache, as a client at least does with it.
        """
        for _ in CLIENTS:
            encryptor = Cipher(algorithms.AES256(os.urandom(32)), modes.CTR(bytes(16))).encryptor()
            for _ in range(-(-4 * LONG // len(chunk))):
                encryptor.update_into(chunk, buffer)
                if added is not None:
                    np.add(added, np.frombuffer(buffer, added.dtype, len(added)), out=added)

    numbers = np.zeros(len(chunk) // 4, dtype=np.uint32)

    def plain_sum() -> None:
        total = stacked[0].clone()
        for vector in stacked[1:]:
            total += vector

    checks: list[float] = []
    check = parties.server._numbers

    def timed(*arguments: Any) -> Any:
        """The check of one vector's tag, timed apart from its addition."""
        start = time.process_time()
        numbers = check(*arguments)
        checks.append(time.process_time() - start)
        return numbers

    parties.server._numbers = timed
    columns: dict[str, list[float]] = {}
    for repeat in range(repeats + 1):
        dropped, whole = parties.round(all_but_one), parties.round(sent)
        row = {
            "protect": whole["protect"] / len(CLIENTS),
            "keystream": cpu(keystream),
            "keystream_added": cpu(lambda: keystream(numbers)),
            "add": whole["add"] - sum(checks[-len(CLIENTS) :]),
            "check_and_add": whole["add"],
            "plain_sum": cpu(plain_sum),
            "recover": whole["recover"],
            "recover_one_dropped": dropped["recover"],
            "all": whole["all"],
            "in_pairs_all": in_pairs.round(sent)["all"],
            "plain_all": plain.round(sent)["all"],
        }
        if repeat:
            for name, value in row.items():
                columns.setdefault(name, []).append(value)

    def ratio(one: str, other: str) -> float:
        return statistics.median(a / b for a, b in zip(columns[one], columns[other], strict=True))

    return {
        **{f"{name}_ms": 1e3 * statistics.median(values) for name, values in columns.items()},
        "protect_over_keystream": ratio("protect", "keystream"),
        "keystream_added_over_keystream": ratio("keystream_added", "keystream"),
        "recovery_with_one_dropped_over_without": ratio("recover_one_dropped", "recover"),
        "in_pairs_over_shares": ratio("in_pairs_all", "all"),
        # a client's masks are a tenth for itself, which the server makes once more; in pairs there are none of these
        "all_over_keystreams": ratio("all", "keystream") / (len(CLIENTS) + 1),
        "in_pairs_over_keystreams": ratio("in_pairs_all", "keystream") / (len(CLIENTS) - 1),
        "add_over_plain_sum": ratio("add", "plain_sum"),
        "check_and_add_over_plain_sum": ratio("check_and_add", "plain_sum"),
        "bytes_per_number": whole["bytes"],
        "error": error(whole["total"], sent),
    }


def thresholds(repeats: int) -> dict[str, dict[str, float]]:
    """A round in which one of ten vanishes: shares of more than two thirds, next to a majority, which bears fewer."""
    backends = {"majority": PairwiseMasking(threshold=0.501, colluders=0), "default": PairwiseMasking()}
    found = {}
    for length in (1000, LONG):
        sent = dict(list(vectors(length).items())[:-1])
        parties = {name: Parties(backend) for name, backend in backends.items()}
        runs: dict[str, list[dict[str, Any]]] = {name: [] for name in backends}
        for repeat in range(repeats + 1):
            for name, some in parties.items():
                result = some.round(sent)
                runs[name] += [result] if repeat else []
        found[str(length)] = {
            "majority_ms": 1e3 * statistics.median(run["all"] for run in runs["majority"]),
            "default_ms": 1e3 * statistics.median(run["all"] for run in runs["default"]),
            "ratio": statistics.median(
                new["all"] / old["all"] for new, old in zip(runs["default"], runs["majority"], strict=True)
            ),
            "error": error(runs["default"][-1]["total"], sent),
            "shares_majority": backends["majority"].shares_needed(len(CLIENTS)),
            "shares_default": backends["default"].shares_needed(len(CLIENTS)),
            "colluders_borne_majority": backends["majority"].colluders_borne(len(CLIENTS)),
            "colluders_borne_default": backends["default"].colluders_borne(len(CLIENTS)),
        }
    return found


def sealing(repeats: int) -> dict[str, dict[str, float]]:
    """A message from one client to nine on processes of their own: encrypted between them, next to in the clear."""
    apart = {name: Seals([name]) for name in CLIENTS}
    keys = {name: seals.public_keys()[name] for name, seals in apart.items()}
    for name, seals in apart.items():
        seals.introduce({name: {other: key for other, key in keys.items() if other != name}})
    sender, readers = CLIENTS[0], [[name] for name in CLIENTS[1:]]
    found = {}
    for length in (1000, LONG):
        message = {"w": vectors(length)[sender]}
        rows: dict[str, list[float]] = {"clear": [], "sealed": []}

        def clear(message: dict[str, Tensor] = message) -> None:
            encoded = encode(message)
            for _ in readers:
                decode(encoded.clone())

        def sealed(message: dict[str, Tensor] = message) -> None:
            copies = apart[sender].close(encode(message), sender, readers, b"benchmark")
            for (name,), copy in zip(readers, copies, strict=True):
                decode(apart[name].open(copy, sender, [name], b"benchmark"))

        for repeat in range(repeats + 1):
            for name, action in (("clear", clear), ("sealed", sealed)):
                seconds = cpu(action)
                rows[name] += [seconds] if repeat else []
        found[str(length)] = {
            "clear_ms": 1e3 * statistics.median(rows["clear"]),
            "sealed_ms": 1e3 * statistics.median(rows["sealed"]),
            "ratio": statistics.median(new / old for new, old in zip(rows["sealed"], rows["clear"], strict=True)),
            "bytes_clear": float(wire_size(message)),
            "bytes_more": float(MAC_BYTES + WRAP_BYTES),
        }
    return found


def public_key_ckks(sent: Mapping[str, Tensor]) -> Callable[[], object]:
    """Bare TenSEAL on the parameters of `CKKS`, encrypting with the public key, without checks or authentication."""
    context = ts.context(ts.SCHEME_TYPE.CKKS, 4096, coeff_mod_bit_sizes=[60, 49], n_threads=1)
    context.global_scale = 2.0**45
    server = ts.context_from(context.serialize(save_galois_keys=False, save_relin_keys=False), 1)
    arrays = [vector.double().numpy() for vector in sent.values()]

    def run() -> None:
        messages = [
            [ts.CKKSVector(context, ts.plain_tensor(part, dtype="float")).serialize() for part in parts(array)]
            for array in arrays
        ]
        for chunks in zip(*messages, strict=True):
            total = ts.CKKSVector.load(server, chunks[0])
            for chunk in chunks[1:]:
                total.add_(ts.CKKSVector.load(server, chunk))
            ts.CKKSVector.load(context, total.serialize()).decrypt()

    def parts(array: Any) -> list[Any]:
        return [array[start : start + 2048] for start in range(0, len(array), 2048)]

    return run


def lattices(repeats: int) -> dict[str, dict[str, float]]:
    """BFV and CKKS side by side, and next to CKKS with a public key."""
    length = 25 * 4096
    sent = vectors(length)
    public = public_key_ckks(sent)
    public()
    backends: dict[str, SecureAggregation] = {"BFV": BFV(), "CKKS": CKKS()}
    parties = {name: Parties(backend) for name, backend in backends.items()}
    for some in parties.values():
        some.round(sent)
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in backends}
    public_seconds = []
    for _ in range(repeats):
        for name, some in parties.items():
            runs[name].append(some.round(sent))
        public_seconds.append(cpu(public))
    exact = Plain(FixedPoint()).sum({name: {"w": vector} for name, vector in sent.items()})["w"]
    return {
        name: {
            "us_per_number": 1e6 * statistics.median(run["all"] for run in rows) / length,
            "bytes_per_number": rows[0]["bytes"],
            "error": error(rows[0]["total"], sent),
            "error_against_grid": float((rows[0]["total"].float() - exact).abs().max()),
            "declared_error": backends[name].error_bound(len(CLIENTS)),
            "public_key_ckks_us_per_number": 1e6 * statistics.median(public_seconds) / length,
            "over_public_key_ckks": statistics.median(
                run["all"] / seconds for run, seconds in zip(rows, public_seconds, strict=True)
            ),
        }
        for name, rows in runs.items()
    }


def affine(repeats: int) -> dict[str, float]:
    """Y = A m + b at 3072 bits, 21 moments and 256 outputs: one direction of a FedMMD batch (L = 4, degree 2)."""
    backend = PaillierAffine(reveal_moments=True)
    source, target = backend.source(), backend.target()
    key = source.public_key()
    target.receive_key(key)
    generator = torch.Generator().manual_seed(0)
    moments, matrix, offset = (torch.rand(shape, generator=generator) for shape in ((21,), (256, 21), (256,)))
    seconds, sizes, got = [], [0], torch.zeros(0)
    for repeat in range(repeats + 1):
        start = time.process_time()
        round_id = RoundId(repeat, "benchmark", repeat)
        source.open_round(round_id)
        target.open_round(round_id)
        protected = source.protect(moments, len(matrix))
        reply = target.evaluate(protected, matrix, offset)
        unlocked = source.unlock(reply)
        got = target.reveal(unlocked)
        seconds.append(time.process_time() - start)
        sizes = [len(protected), len(reply), len(unlocked)]
    true = matrix.double() @ moments.double() + offset.double()
    return {
        "cpu_s": statistics.median(seconds[1:]),
        "first_cpu_s": seconds[0],
        "bytes": sum(sizes),
        "key_bytes": len(key),
        "error": float((got - true).abs().max()),
    }


def memory() -> dict[str, float]:
    """Peak memory of a client that masks 1e7 floats and of a server that adds them, over the size of the vector."""
    backend = PairwiseMasking()
    names = CLIENTS[:3]
    parties = driver.Parties(backend, names)
    parties.enrol(names)
    parties.open_round(RoundId(0, "memory", 0), names)
    clients, server = parties.clients, parties.server
    before = _resident()
    vector = torch.randn(MEMORY_LENGTH)
    size = vector.numel() * vector.element_size()
    messages = {names[0]: clients[names[0]].protect(vector)}
    client_peak = _peak() - before
    for name in names[1:]:
        messages[name] = clients[name].protect(vector)
    _forget_peak()
    before = _resident()
    total = server.aggregate(messages)
    total = server.conclude(parties.ask_survivors(names))
    server_peak = _peak() - before
    assert len(total) == MEMORY_LENGTH
    return {"client_over_vector": client_peak / size, "server_beyond_messages_over_vector": server_peak / size}


def _status(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return 1024 * int(line.split()[1])


def _resident() -> int:
    return _status("VmRSS")


def _peak() -> int:
    return _status("VmHWM")


def _forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def main() -> None:
    """Run all cases, print a table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    parser.add_argument("--memory", action="store_true", help="only that, as JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if options.memory:
        print(json.dumps(memory()))
        return
    fresh = subprocess.run([sys.executable, __file__, "--memory"], capture_output=True, text=True, check=True)
    result: dict[str, Any] = {
        "what": "secure sums over 10 clients; CPU time, medians",
        "paillier": {str(bits): paillier(bits, options.repeats) for bits in (2048, 3072)},
        "masking": masking(options.repeats),
        "thresholds": thresholds(options.repeats),
        "sealing": sealing(options.repeats),
        "lattices": lattices(options.repeats),
        "paillier_affine": affine(options.repeats),
        "memory": json.loads(fresh.stdout.strip().splitlines()[-1]),
        "repeats": options.repeats,
        "seed": 0,
        "cores": os.cpu_count(),
        "threads": 1,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "gmpy2": gmpy2.version(),
            **{name: version(name) for name in ("phe", "tenseal", "cryptography", "numpy")},
        },
    }
    options.out.write_text(json.dumps(result, indent=2) + "\n")
    show(result)
    print(f"{os.cpu_count()} cores, 1 thread, median of {options.repeats}, {result['versions']}; {options.out}")


def show(result: Mapping[str, Any]) -> None:
    """Print every figure next to what it is compared with."""
    for bits, case in result["paillier"].items():
        print(
            f"Paillier {bits} bit  {case['us_per_number']:9.1f} us per number, naive phe "
            f"{case['naive_us_per_number']:.0f} us: {case['times_faster']:.0f}x (at least "
            f"{case['times_faster_min']:.0f}x); {case['bytes_per_number']:.2f} bytes up, "
            f"naive {case['naive_bytes_per_number']:.0f}; error {case['error']:.1e}"
        )
    case = result["masking"]
    print(
        f"masking, 1e6 floats   protect {case['protect_ms']:.1f} ms, keystream {case['keystream_ms']:.1f} ms: "
        f"{case['protect_over_keystream']:.2f}x; {case['bytes_per_number']:.3f} bytes per number up; "
        f"error {case['error']:.1e}"
    )
    print(
        f"                      recovery {case['recover_ms']:.1f} ms, one of ten dropped "
        f"{case['recover_one_dropped_ms']:.1f} ms: {case['recovery_with_one_dropped_over_without']:.2f}x"
    )
    print(
        f"                      server adds in {case['add_ms']:.1f} ms, plain sum {case['plain_sum_ms']:.1f} ms: "
        f"{case['add_over_plain_sum']:.2f}x; with the "
        f"check of all tags {case['check_and_add_ms']:.1f} ms: {case['check_and_add_over_plain_sum']:.2f}x\n"
        f"                      a whole round {case['all_ms']:.0f} ms, through Plain "
        f"{case['plain_all_ms']:.0f} ms"
    )
    for length, case in result["thresholds"].items():
        print(
            f"masking, {length:>7} floats, one of ten dropped: {case['default_ms']:.1f} ms with "
            f"{case['shares_default']} shares, {case['majority_ms']:.1f} ms with {case['shares_majority']}: "
            f"{case['ratio']:.2f}x; colluders borne {case['colluders_borne_default']} and "
            f"{case['colluders_borne_majority']}"
        )
    for length, case in result["sealing"].items():
        print(
            f"one client to nine, {length:>7} floats: sealed {case['sealed_ms']:.2f} ms, in the clear "
            f"{case['clear_ms']:.2f} ms: {case['ratio']:.2f}x; {case['bytes_more']:.0f} bytes more than "
            f"{case['bytes_clear']:.0f}"
        )
    for name, case in result["lattices"].items():
        print(
            f"{name:20}  {case['us_per_number']:9.1f} us per number, public-key CKKS "
            f"{case['public_key_ckks_us_per_number']:.1f} us: {case['over_public_key_ckks']:.2f}x; "
            f"{case['bytes_per_number']:.2f} bytes per number up; error {case['error']:.1e} (declared "
            f"{case['declared_error']:.1e}), against the sum on the grid {case['error_against_grid']:.1e}"
        )
    case = result["paillier_affine"]
    print(
        f"Paillier affine       21 moments, 256 outputs, 3072 bit: {case['cpu_s']:.2f} s CPU (first "
        f"{case['first_cpu_s']:.2f} s), {case['bytes'] / 1e3:.1f} kB and {case['key_bytes'] / 1e3:.1f} kB of key; "
        f"error {case['error']:.1e}"
    )
    case = result["memory"]
    print(
        f"memory, 1e7 floats    client {case['client_over_vector']:.2f}x of the vector, vector included; server "
        f"{case['server_beyond_messages_over_vector']:.2f}x beyond the messages"
    )


if __name__ == "__main__":
    main()
