"""Targets that ask for so many, or such, numbers that the source's moments can be solved from them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedlit.federation import ChannelError, Federation
from fedlit.federation.errors import JournalError
from fedlit.federation.journal import Journal
from fedlit.federation.transport import Transport
from fedlit.methods import FedMMD
from fedlit.privacy import (
    CKKSAffine,
    FixedPoint,
    PaillierAffine,
    PlainAffine,
    PrivacyError,
    PrivacyWarning,
    RoundId,
    SolvableError,
    TwoPartyAffine,
)
from fedlit.privacy import affine as affine_module
from fedlit.privacy import affine_ckks as ckks_module
from fedlit.privacy.affine import AffineGrid, AffineSource
from fedlit.privacy.links import unpack_fields
from helpers import fit
from refused import slow
from thread_transport import on_ranks

phe = pytest.importorskip("phe.paillier")

KEY: dict[str, Any] = {"key_bits": 512, "insecure_test_keys": True, "workers": 1}  # tests arithmetic, not secrecy
HIDES, REVEALS = PaillierAffine(**KEY), PaillierAffine(**KEY, reveal_moments=True)


def problem(num_moments: int, num_outputs: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((num_moments,), (num_outputs, num_moments), (num_outputs,))
    return tuple(torch.randn(shape, generator=generator).double() for shape in shapes)  # type: ignore[return-value]


def reduced(grid: AffineGrid, matrix: Tensor, y: Tensor) -> set[tuple[int, ...]]:
    """Moments, in steps, among the short vectors of the lattice {(m, A m - y)} (Lenstra, Lenstra, Lovasz, 1982)."""
    matrices = pytest.importorskip("sympy.polys.matrices")
    integers = pytest.importorskip("sympy").ZZ
    steps, entries = (y * 2.0**grid.fraction_bits).long().tolist(), grid.matrix.encode(matrix).tolist()
    (k, num_moments), typical, large = matrix.shape, 2**20, 2**60
    rows = [
        [int(i == j) for j in range(num_moments)] + [0] + [large * entries[row][i] for row in range(k)]
        for i in range(num_moments)
    ]
    rows.append([0] * num_moments + [typical] + [-large * step for step in steps])
    shape = (num_moments + 1, num_moments + 1 + k)
    lattice = matrices.DomainMatrix([[integers(x) for x in row] for row in rows], shape, integers)
    short = [[int(x) for x in row] for row in lattice.lll().to_list()]
    signs = [(row, 1 if row[num_moments] > 0 else -1) for row in short if abs(row[num_moments]) == typical]
    return {tuple(sign * x for x in row[:num_moments]) for row, sign in signs}


# -------------------------------------------------------------------------------- honest numbers, too many


def test_a_lattice_has_the_moments_of_what_is_refused_and_not_of_what_is_granted() -> None:
    """8 moments of 26 bits: T finds them from 5 numbers of an exact y, and S grants 1."""
    moments, matrix, offset = problem(8, 5)
    secret = tuple(HIDES.grid.moments.encode(moments).tolist())
    y = REVEALS(moments, matrix, 0 * offset)
    assert secret in reduced(HIDES.grid, matrix, y)
    most = HIDES.most_outputs(8)
    assert most == 8 * 26 // (2 * 55) == 1
    granted = HIDES(moments, matrix[:most], 0 * offset[:most])
    assert torch.equal(granted, y[:most])
    assert secret not in reduced(HIDES.grid, matrix[:most], granted)
    with pytest.raises(SolvableError, match="at most 1, in all"):
        HIDES(moments, matrix[: most + 1], offset[: most + 1])
    assert REVEALS.most_outputs(8) is None


@pytest.mark.parametrize("backend", [HIDES, PaillierAffine(AffineGrid(FixedPoint(20, 1.0)), **KEY), slow("ckks")])
@pytest.mark.parametrize("num_moments", [1, 14, 164, 2144])
def test_granted_numbers_have_fewer_than_half_of_the_moments_bits(backend: Any, num_moments: int) -> None:
    backend = CKKSAffine() if backend == "ckks" else backend
    most = backend.most_outputs(num_moments)
    bits, of_moment = backend.output_bits(num_moments), math.log2(2 * backend.grid.moments.limit + 1)
    assert most * bits < num_moments * (math.ceil(of_moment)) / 2 <= (most + 1) * bits
    assert most < num_moments, "so that the rank is not full either"


def test_what_is_granted_about_the_same_moments_adds_up_over_exchanges_and_receivers() -> None:
    source = HIDES.source()
    moments = torch.randn(40).double()
    most = HIDES.most_outputs(40)
    assert most == 9

    def ask(outputs: int, about: Tensor, call: int) -> None:
        source.open_round(RoundId(0, "moments", call))
        source.protect(about, outputs)

    ask(5, moments, 0)
    ask(4, moments, 1)
    with pytest.raises(SolvableError, match="got 10"):
        ask(1, moments, 2)
    ask(9, moments + 2.0**-20, 3)

    def federated(outputs: int) -> None:
        federation = Federation(["a", "b", "t"], "t", two_party=HIDES)
        matrix, offset = torch.randn(outputs, 40), torch.zeros(outputs)
        maps = {name: {"t": (matrix, offset)} for name in "ab"}
        federation.affine("dot", {"t": moments}, maps, [(federation.target, s) for s in federation.sources], outputs)

    federated(4)
    with pytest.raises(SolvableError, match="client 't'"):  # a and b may pool what they learn
        federated(5)


def restarted(journal: Path | None, round_idx: int, matrix: Tensor, moments: Tensor, backend: Any = HIDES) -> Tensor:
    """What a receiver learns of a source that has just started (again), in a round."""
    federation = Federation(["a", "t"], "t", two_party=backend, seed=0)
    federation.round_idx = round_idx
    if journal is not None:
        federation.journal = Journal(journal)
    maps = {"a": {"t": (matrix, torch.zeros(len(matrix)))}}
    pairs = [(federation.target, federation.sources[0])]
    return federation.affine("dot", {"t": moments}, maps, pairs, len(matrix))["a"]["t"]


def test_a_source_that_starts_again_grants_no_more(tmp_path: Path) -> None:
    """Before the mend five starts gave 45 numbers about the same 40 moments, which least squares solve for."""
    moments, matrix, _ = problem(40, 45)
    cuts = [(start, matrix[9 * start :][:9]) for start in range(5)]
    y = torch.cat([restarted(None, *cut, moments) for cut in cuts])
    assert worst_error(moments, matrix, torch.zeros(45), y) < 1e-5

    journal = tmp_path / "journal"
    first = restarted(journal, *cuts[0], moments)
    for round_idx, asked in cuts[1:]:
        with pytest.raises(SolvableError, match="got 18"):
            restarted(journal, round_idx, asked, moments)
    restarted(journal, 1, cuts[1][1], moments + 2.0**-20)
    # a round that is repeated counts once, and answers what was asked before and nothing else
    assert torch.equal(restarted(journal, *cuts[0], moments), first)
    with pytest.raises(JournalError, match="client 'a'"):
        restarted(journal, 0, cuts[1][1], moments)
    with pytest.raises(SolvableError):
        restarted(journal, 7, cuts[0][1], moments)
    restarted(journal, 8, matrix, moments, REVEALS)  # hides nothing, and is not counted


def test_what_is_granted_is_written_before_it_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = Journal._write

    def full(journal: Journal, entry: Any) -> None:
        if "outputs" in entry:
            raise OSError(28, "No space left on device")
        write(journal, entry)

    monkeypatch.setattr(Journal, "_write", full)
    moments, matrix, _ = problem(40, 9)
    with pytest.raises(JournalError, match="nothing is sent"):
        restarted(tmp_path / "journal", 0, matrix, moments)


def test_two_processes_answer_each_other_in_the_same_step_alone(tmp_path: Path) -> None:
    """A server that has one of them a batch behind: the receiver would ask for others of numbers granted before."""

    def exchanged(transport: Transport, behind: int) -> None:
        federation = Federation(["a", "t"], "t", two_party=HIDES, transport=transport, seed=0)
        federation.batch_idx = behind * transport.rank
        moments, matrix, offset = problem(40, 9)
        pairs = [(federation.target, federation.sources[0])]
        mine = {"t": moments} if transport.rank else {}
        federation.affine("dot", mine, {} if mine else {"a": {"t": (matrix, offset)}}, pairs, 9)

    on_ranks(lambda transport: exchanged(transport, 0), 2)
    with pytest.raises(PrivacyError):
        on_ranks(lambda transport: exchanged(transport, 1), 2)


# -------------------------------------------------------------------------------- one number, packed


def test_moments_packed_into_one_plaintext_do_not_come_out() -> None:
    """T sends the ciphertext of sum_j 2^(27 j) m_j, under its mask, as the one number that it was granted."""
    source = opened(PaillierAffine(key_bits=2048, insecure_test_keys=True, workers=1))
    moments, _, _ = problem(60, 1)
    steps = AffineGrid().moments.encode(moments).tolist()
    protected = source.protect(moments, 1)
    modulus = source._modulus  # type: ignore[attr-defined]
    packed = modulus.embed(2**1700)  # so that the sum is positive
    for place, ciphertext in enumerate(modulus.read(unpack_fields(protected)["body"], 60)):
        packed = packed * pow(ciphertext, 2 ** (27 * place), modulus.square) % modulus.square
    whole = int(modulus.centre(modulus.decrypt([packed], 1)[0]))
    assert unpacked(whole, 60) == steps, "all are in there"

    assert source._round is not None
    answer = source.unlock(affine_module._frame("evaluate", source._round, 1, modulus.write([packed])))
    body = unpack_fields(answer)["body"]
    assert len(body) == 8, "of 2048 bits"
    assert int.from_bytes(body, "big") < 2 ** source._backend.output_bits(60)
    read = unpacked(int.from_bytes(body, "big"), 60)
    assert [place for place in range(60) if read[place] == steps[place]] == [0, 1]


def opened(backend: TwoPartyAffine) -> AffineSource:
    source = backend.source()
    source.open_round(RoundId(0, "moments", 0))
    return source


def unpacked(number: int, count: int) -> list[int]:
    """Signed digits of 27 bits, the lowest first."""
    digits = []
    for _ in range(count):
        digit = (number + 2**26) % 2**27 - 2**26
        digits.append(digit)
        number = (number - digit) >> 27
    return digits


def test_a_number_of_ckks_tells_fewer_bits_than_are_counted() -> None:
    """Capacity of a channel with this amplitude and S's Gaussian noise (Shannon, 1949)."""
    amplitude = ckks_module.LARGEST_OUTPUT + ckks_module._LARGEST_MASK + 1
    signal_to_noise = (amplitude / ckks_module._ANSWER_NOISE) ** 2
    assert math.log2(1 + signal_to_noise) / 2 < ckks_module._OUTPUT_BITS


# -------------------------------------------------------------------------------- runs


def exchanges(width: int, degree: int, backend: TwoPartyAffine) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Moments, A, b and y of each exchange of a run of FedMMD, one for each learner."""
    torch.manual_seed(0)
    names = ["c0", "c1", "c2"]
    module = FedMMD(names, "c2", 2, nn.Linear(5, width), warmup_rounds=0, degree=degree, exchange="pairwise")
    found = []
    affine = Federation.affine

    def noted(self: Any, channel: str, moments: Any, maps: Any, pairs: Any, most: Any) -> Any:
        outputs = affine(self, channel, moments, maps, pairs, most)
        for learner, by_holder in outputs.items():
            found.extend((moments[each], *maps[learner][each], y) for each, y in by_holder.items())
        return outputs

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Federation, "affine", noted)
        fit(module, rounds=2, strategy={"two_party": backend})
    return found


def worst_error(moments: Tensor, matrix: Tensor, offset: Tensor, y: Tensor) -> float:
    """Of the moments that numpy solves for, from what T knows of A and b: their steps, too."""
    grid = HIDES.grid
    a, b = grid.matrix.encode(matrix.double()) / grid.matrix.scale, grid.offset.encode(offset) / grid.offset.scale
    solved, *_ = np.linalg.lstsq(a.numpy(), (y - b).numpy(), rcond=None)
    return float(np.abs(solved - moments.numpy()).max())


@pytest.mark.filterwarnings("ignore")
def test_fedmmd_with_the_papers_numbers_is_solved_by_name_and_else_refused() -> None:
    with pytest.raises(ChannelError, match="4 features and degree 2"):
        exchanges(4, 2, HIDES)
    found = [each for each in exchanges(4, 2, REVEALS) if len(each[3]) > 1]
    assert len(found) == 8
    assert all(int(torch.linalg.matrix_rank(matrix)) == len(m) == 14 for m, matrix, _, _ in found)
    assert max(worst_error(*each) for each in found) < 1e-6


@pytest.mark.filterwarnings("ignore")
def test_fedmmd_pairwise_asks_by_default_for_numbers_from_which_nobody_solves() -> None:
    about: dict[bytes, list[tuple[Tensor, Tensor, Tensor, Tensor]]] = {}
    for each in exchanges(8, 3, HIDES):
        about.setdefault(each[0].numpy().tobytes(), []).append(each)
    assert len(about) == 6, "three clients, two steps"
    for same in about.values():
        matrix, offset, y = (torch.cat([each[part] for each in same]) for part in (1, 2, 3))
        assert matrix.shape[1] == 164
        assert int(torch.linalg.matrix_rank(matrix)) <= len(y) <= HIDES.most_outputs(164) == 37
        assert len(y) >= 2 * 9, "each learner has the gradient of one sample and more"
        assert worst_error(same[0][0], matrix, offset, y) > 0.05


def test_a_run_says_by_name_that_nothing_is_hidden() -> None:
    with pytest.warns(PrivacyWarning, match="hides no moments"):
        exchanges(2, 1, REVEALS)
    assert REVEALS.describe().hidden.startswith("nothing from the target")
    assert HIDES.describe().hidden.startswith("the moments, from the target")
    assert PlainAffine().most_outputs(3) is None
