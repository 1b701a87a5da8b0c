"""One-time pads as a backend of secure sums that logs what happens to its parties."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from fedlit.federation import SERVER
from fedlit.privacy import AggregationClient, AggregationServer, Description, RoundId, SecureAggregation


class AdditivePads(SecureAggregation):
    """Adds a pad that clients know and the server does not; for tests of the federation, so its pads are no secret."""

    key_holder: ClassVar[Literal["server", "clients"]] = "clients"
    min_clients: ClassVar[int] = 2
    enrolment = ("greet",)
    opening = ("agree",)
    codec = None
    scale = 2.0**24

    def __init__(self) -> None:
        self.log: list[tuple[Any, ...]] = []

    def client(self, name: str) -> AggregationClient:
        return PadClient(name, self)

    def server(self) -> AggregationServer:
        return PadServer(self)

    def error_bound(self, num_clients: int) -> float:
        return num_clients / self.scale / 2

    def describe(self) -> Description:
        return Description("AdditivePads", "server", "vectors", "the sum", "server and a client", "none", 8.0, "tiny")

    def unpadded(self, total: Tensor, roster: Sequence[str]) -> Tensor:
        """The last number is a bit mask of who has sent."""
        total, mask = total[:-1], int(total[-1])
        for index, name in enumerate(roster):
            if mask >> index & 1:
                total = total - pad(name, len(total))
        return (total.double() / self.scale).float()


def pad(client: str, length: int) -> Tensor:
    seed = int.from_bytes(hashlib.sha256(f"test only {client}".encode()).digest()[:7], "little")
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**63), 2**63 - 1, (length,), generator=generator, dtype=torch.int64)


class Logged:
    backend: AdditivePads
    name: str

    def enrol(self, roster: Sequence[str]) -> None:
        self.roster = list(roster)
        self.backend.log.append(("enrol", self.name))

    def open_round(self, round_id: RoundId, clients: Sequence[str]) -> None:
        self.backend.log.append(("open_round", self.name, tuple(clients), round_id))


class PadClient(Logged, AggregationClient):
    def __init__(self, name: str, backend: AdditivePads) -> None:
        super().__init__(name)
        self.backend = backend

    def send(self, step: str) -> bytes:
        return f"{self.name} {step}".encode()

    def receive(self, step: str, message: bytes) -> None:
        assert message == f"{self.name} {step} ok".encode()
        self.backend.log.append(("receive", self.name, step))

    def protect(self, vector: Tensor) -> Tensor:
        self.backend.log.append(("protect", self.name))
        encoded = (vector.double() * self.backend.scale).round().long() + pad(self.name, len(vector))
        return torch.cat([encoded, torch.tensor([1 << self.roster.index(self.name)])])

    def reveal(self, total: Tensor, num_clients: int) -> Tensor:
        self.backend.log.append(("reveal", self.name, num_clients))
        return self.backend.unpadded(total, self.roster)

    def reissue(self, total: Tensor, num_clients: int) -> Tensor:
        self.backend.log.append(("reissue", self.name))
        return torch.cat([(total.double() * self.backend.scale).round().long(), torch.tensor([0])])


class PadServer(Logged, AggregationServer):
    name = SERVER

    def __init__(self, backend: AdditivePads) -> None:
        self.backend = backend

    def relay(self, step: str, sent: Mapping[str, bytes]) -> dict[str, bytes]:
        self.backend.log.append(("relay", step, tuple(sent)))
        return {name: text + b" ok" for name, text in sent.items()}

    def aggregate(self, messages: Mapping[str, Tensor]) -> Tensor:
        self.backend.log.append(("aggregate", tuple(messages)))
        return torch.stack(list(messages.values())).sum(dim=0)

    def reveal(self, total: Tensor, num_clients: int) -> Tensor:
        self.backend.log.append(("reveal", SERVER, num_clients))
        return self.backend.unpadded(total, self.roster)


class ServerPads(AdditivePads):
    key_holder: ClassVar[Literal["server", "clients"]] = "server"
