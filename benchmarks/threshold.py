"""What sums cost of which nobody has the key (`ThresholdPaillier`), next to `Paillier`, whose key the clients share.

Run: python benchmarks/threshold.py [--repeats 3] [--out benchmarks/threshold.json]

Sums of 3 and of 5 clients under 3072 bits, all parties in one process with one thread and one worker, after a first
round that is left out (it builds tables). Microseconds of CPU time per number, medians over repeats, both backends in
turns: of one client (encrypt; add up, check and decrypt), of the server, and of all parties.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fedlit.privacy import Paillier, RoundId, SecureAggregation, ThresholdPaillier
from fedlit.privacy.driver import Carrier, Parties, Phase

CIPHERTEXTS = 10


class Sizes(Carrier):
    """Bytes of questions to and answers of the first client."""

    def __init__(self) -> None:
        self.up = self.down = 0

    def gather(self, messages: Any, phase: Phase) -> Any:
        """Count what the first client sends."""
        self.up += len(next(iter(messages.values()), b""))
        return messages

    def scatter(self, messages: Any, phase: Phase) -> Any:
        """Count what the first client receives."""
        self.down += len(next(iter(messages.values()), b""))
        return messages


class Rounds:
    """Rounds of one backend, and the CPU seconds of each step."""

    def __init__(self, backend: SecureAggregation, clients: int) -> None:
        self.backend, self.names, self.call = backend, [f"client{index}" for index in range(clients)], 0
        self.parties = Parties(backend, self.names)
        self.seconds: dict[str, float] = {}
        self.timed("enrol", lambda: self.parties.enrol(self.names))
        self.enrolment_s = self.seconds["enrol"]

    def timed(self, step: str, action: Callable[[], Any]) -> Any:
        """Result of an action, whose CPU seconds are added to its step."""
        start = time.process_time()
        result = action()
        self.seconds[step] = self.seconds.get(step, 0.0) + time.process_time() - start
        return result

    def run(self, length: int) -> dict[str, float]:
        """One sum, by party: microseconds per number, and bytes per number to and from one client."""
        generator, names = torch.Generator().manual_seed(0), self.names
        vectors = {name: torch.randn(length, generator=generator) for name in names}
        self.call, self.seconds = self.call + 1, {}
        sizes, server = Sizes(), self.parties.server
        whole = time.process_time()
        self.parties.open_round(RoundId(0, "w", self.call), names)
        clients = self.parties.clients
        messages = self.timed("encrypt", lambda: {name: clients[name].protect(vectors[name]) for name in names})
        total = self.timed("server", lambda: server.aggregate(messages))
        up, down = messages[names[0]].numel(), total.numel()
        if self.backend.closing:
            answers = self.timed("decrypt", lambda: self.parties.ask_survivors(names, sizes))
            total = self.timed("server", lambda: server.conclude(answers))
            holder: Any = server
            up, down = up + sizes.up, sizes.down
        else:
            holder = clients[names[0]]
        numbers = self.timed("server" if holder is server else "decrypt", lambda: holder.reveal(total, len(names)))
        whole = time.process_time() - whole
        true = torch.stack([vector.double() for vector in vectors.values()]).sum(dim=0)
        assert float((numbers - true).abs().max()) <= self.backend.error_bound(len(names))
        decrypting = len(names) if holder is server else 1
        micro = 1e6 / length
        return {
            "encrypt_one_client": self.seconds["encrypt"] / len(names) * micro,
            "decrypt_one_client": self.seconds["decrypt"] / decrypting * micro,
            "server": self.seconds["server"] * micro,
            "all_parties": whole * micro,
            "bytes_up": up / length,
            "bytes_down": down / length,
            "enrolment_s": self.enrolment_s,
        }


def main() -> None:
    """Run all cases, print and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, Any] = {"what": "CPU microseconds and bytes per number, 3072 bits", "repeats": options.repeats}
    for clients in (3, 5):
        backends = {"Paillier": Paillier(workers=1), "ThresholdPaillier": ThresholdPaillier(workers=1)}
        rounds = {name: Rounds(backend, clients) for name, backend in backends.items()}
        length = CIPHERTEXTS * backends["Paillier"].slots.count
        runs: dict[str, list[dict[str, float]]] = {name: [] for name in rounds}
        for repeat in range(options.repeats + 1):
            for name, some in rounds.items():
                run = some.run(length)
                runs[name] += [run] if repeat else []
        result[f"{clients} clients, {length} numbers"] = {
            name: {key: round(statistics.median(run[key] for run in each), 2) for key in each[0]}
            for name, each in runs.items()
        }
    print(json.dumps(result, indent=1))
    options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
