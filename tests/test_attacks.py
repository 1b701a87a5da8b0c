"""Attacks that once worked, as somebody would carry them out; each gets nothing now.

Others stand beside the tests of their target: tests/privacy/test_ckks_key.py, tests/federation/test_repeated_sums.py
and test_lying_server.py, tests/runs/test_reports.py, tests/data/test_files.py, tests/cli/test_report.py and
test_export.py.
"""

from __future__ import annotations

import json
import struct
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import processes
from fedlit.data import DatasetLayoutError, FeatureDomains
from fedlit.federation import Federation, FederationError, wire
from fedlit.federation.client import make_roster, place
from fedlit.federation.transport import ProcessGroup
from fedlit.privacy import BFV, CKKS, DecodeError, PairwiseMasking, PrivacyError, QuorumError
from fedlit.privacy.packing import unpack
from masking_parties import collude, names_of
from peers import join
from site_runs import start

ROUNDS = ["--method", "FedAvg", "--privacy", "PairwiseMasking()", "--everyone", "--steps", "3", "--rounds", "1"]


@pytest.mark.parametrize("number", [3, 5, 7, 9, 19])
def test_1_a_lying_server_and_one_client_read_no_vector(number: int) -> None:
    """It reports to each half of the others that the other half dropped out, and the client confirms both views."""
    backend, names = PairwiseMasking(), names_of(number)
    readable = collude(backend, names, 1).readable(backend.shares_needed(number))
    assert not [group for group in readable if len(group - {names[0]}) == 1]


class MakesFolder:
    """Makes a folder named after the rank that unpickles it."""

    def __init__(self, folder: Path) -> None:
        self.code = f"__import__('os').mkdir('{folder}/stolen from ' + __import__('os').environ['LOCAL_RANK'])"

    def __reduce__(self) -> Any:
        return eval, (self.code,)


def with_a_hostile_first_rank(folder: Path) -> None:
    """Rank 1 is honest; rank 0 sends it an object, as torch.distributed does."""
    join(folder, 2)
    transport = ProcessGroup(timedelta(seconds=3))
    with suppress(RuntimeError, FederationError, PrivacyError):
        if dist.get_rank():
            Federation(["a", "b", "t"], "t", transport=transport).agree("seed", 1)
        else:
            received: list[Any] = [None, None]
            dist.all_gather_object(received, MakesFolder(folder), group=transport._group)


@pytest.mark.multiprocess
def test_2_no_code_of_a_peer_is_run(tmp_path: Path) -> None:
    processes.run(with_a_hostile_first_rank, tmp_path, ranks=2)
    assert not (tmp_path / "stolen from 1").exists()


def test_6_a_process_of_its_own_keeps_the_server_from_taking_off_its_clients() -> None:
    roster = make_roster(["a", "b", "c", "t"], "t")
    assert place(roster, 3, [[], ["a", "b"], ["c", "t"]]) == [1, 1, 2, 2]


def aborting(data: bytes) -> bytes:
    """Bytes whose innermost header announces another compression and 2^38 bytes."""
    magic = b"\x5e\xa1\x10"
    nested = data.index(magic, data.index(magic) + 1)
    changed = bytearray(data)
    changed[nested + 5], changed[nested + 12] = 1, 64
    return bytes(changed)


def add_a_hostile_ciphertext(kind: type[BFV] | type[CKKS]) -> str:
    from fedlit.privacy.tenseal_keys import Context, join

    parameters = kind.parameters
    numbers = torch.zeros(parameters.slots, dtype=torch.int64 if kind is BFV else torch.float64)
    good = Context.generate(parameters).encrypt(numbers)
    try:
        kind().load_key(good).add([join([good]), join([aborting(good)])], parameters.slots)
    except DecodeError:
        return "refused"
    return "added"


@pytest.mark.multiprocess
@pytest.mark.parametrize("kind", [BFV, CKKS])
def test_8_a_ciphertext_does_not_end_the_process(kind: Any) -> None:
    pytest.importorskip("tenseal")
    (ended,) = processes.run(add_a_hostile_ciphertext, kind)
    assert (ended.exit_code, ended.result) == (0, "refused")


def test_9_a_header_of_many_digits_costs_no_time() -> None:
    """Sizes that are each within a header's bound, and whose product has a million digits."""
    sizes = [10**4000] * 900
    header = json.dumps([["w", "float32", sizes]]).encode()
    message = torch.frombuffer(bytearray(struct.pack("<I", len(header)) + header), dtype=torch.uint8)
    begun = time.process_time()
    with pytest.raises(DecodeError):
        wire.decode(message)
    assert time.process_time() - begun < 2


@pytest.mark.parametrize(
    ("total", "schema"),
    [
        (torch.full((2,), float("nan")), (("n", torch.int64, (2,)),)),
        (torch.full((1,), 1e30), (("n", torch.int16, (1,)),)),
        (torch.zeros(0), (("n", torch.float32, (0, 2**63)),)),
        (torch.zeros(0), ()),
    ],
)
def test_9_hostile_totals_and_schemas_are_refused_by_name(total: torch.Tensor, schema: Any) -> None:
    with pytest.raises(PrivacyError):
        unpack(total, schema, None, weighted=not schema)


@pytest.mark.parametrize("content", [b"no zip", b"PK\x03\x04" + bytes(40)], ids=["text", "cut off"])
def test_9_a_data_file_that_is_none_is_an_error_of_the_data(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "features.npz"
    path.write_bytes(content)
    with pytest.raises(DatasetLayoutError):
        FeatureDomains(str(path)).domain_names()


@pytest.mark.multiprocess
def test_10_process_0_writes_no_other_clients_weights_or_momentum(tmp_path: Path) -> None:
    """Three processes with their own data only, under masking; somebody looks at process 0's file."""
    start(*ROUNDS, "--devices", "3", "--own", "--save", str(tmp_path / "run.ckpt"))
    file = torch.load(tmp_path / "run.ckpt", weights_only=True)
    assert list(file["clients"]) == ["clean"]
    assert not [key for key in file["state_dict"] if key.startswith("replicas.")]


def test_two_clients_are_refused_unless_it_is_asked_for() -> None:
    """The one that colludes knows the other's vector from the sum."""
    payloads = {name: {"x": torch.ones(1)} for name in "ab"}
    with pytest.raises(QuorumError):
        PairwiseMasking().sum(payloads)
