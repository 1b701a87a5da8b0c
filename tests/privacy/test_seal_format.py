"""Bytes at which SEAL aborts are refused before SEAL reads them."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch

pytest.importorskip("tenseal")

import processes
from bodies import added
from fedlit.privacy import BFV, CKKS, DecodeError, KeyCheckError, seal_format
from fedlit.privacy.affine_ckks import PARAMETERS as AFFINE
from fedlit.privacy.lattices import BFV_PARAMETERS as INTEGERS
from fedlit.privacy.lattices import CKKS_PARAMETERS as REALS
from fedlit.privacy.tenseal_keys import Context, Parameters, join

pytestmark = pytest.mark.multiprocess

MAGIC = b"\x5e\xa1\x10"


def aborting(data: bytes) -> bytes:
    """Bytes whose innermost header announces another compression and 2^38 bytes: SEAL calls ``abort``."""
    nested = data.index(MAGIC, data.index(MAGIC) + 1)  # the first header is the outer one; the seed behind is random
    changed = bytearray(data)
    changed[nested + 5], changed[nested + 12] = 1, 64
    return bytes(changed)


def add(backend: BFV | CKKS, parameters: Parameters, evil: bool) -> str:
    """A server adds two vectors, one of which may be hostile."""
    numbers = torch.zeros(parameters.slots, dtype=torch.int64 if backend is BFV else torch.float64)
    good = Context.generate(parameters).encrypt(numbers)
    key = backend().load_key(good)
    try:
        added(key, [join([good]), join([aborting(good) if evil else good])], parameters.slots)
    except DecodeError as error:
        return str(error)
    return "added"


def load_public(backend: BFV | CKKS, parameters: Parameters) -> str:
    """A server loads a hostile public key."""
    numbers = torch.zeros(parameters.slots, dtype=torch.int64 if backend is BFV else torch.float64)
    try:
        backend().load_key(aborting(Context.generate(parameters).encrypt(numbers)))
    except KeyCheckError as error:
        return str(error)
    return "loaded"


@pytest.mark.parametrize(("backend", "parameters"), [(BFV, INTEGERS), (CKKS, REALS)])
def test_a_hostile_ciphertext_or_public_key_is_an_error_and_not_the_end_of_the_process(backend, parameters) -> None:
    assert processes.results(add, backend, parameters, False) == ["added"]
    for function, arguments in ((add, (True,)), (load_public, ())):
        (ended,) = processes.run(function, backend, parameters, *arguments)
        assert ended.exit_code == 0, "SEAL aborted"
        assert "a header of SEAL that is not that of an object of" in ended.result


@pytest.mark.parametrize("parameters", [INTEGERS, REALS, pytest.param(AFFINE, marks=pytest.mark.slow)])
def test_no_change_of_a_byte_ends_the_process(parameters: Parameters) -> None:
    """Of a context with its keys, and of a ciphertext: each byte of the headers in front is set to each of some."""
    assert processes.results(change_bytes, parameters, timeout=300) == ["all were refused or read"]


def change_bytes(parameters: Parameters) -> str:
    context = Context.generate(parameters)
    numbers = torch.zeros(parameters.slots, dtype=torch.int64 if parameters.name == "BFV" else torch.float64)
    good, private = context.encrypt(numbers), context.save(private=True)
    for position in range(140):
        for value in (0, 255):
            changed = bytearray(good)
            changed[position] = value
            with suppress(DecodeError):
                context.read(bytes(changed), parameters.slots, parameters.levels)
            changed = bytearray(private)
            changed[position] = value
            with suppress(KeyCheckError):
                Context.load(parameters, bytes(changed), private=True)
    return "all were refused or read"


def test_little_that_unpacks_to_much_is_refused() -> None:
    import zstandard

    bomb = zstandard.ZstdCompressor().compress(bytes(10**8))
    blob = seal_format._HEADER.pack(0xA15E, 16, 4, 3, 2, 0, 16 + len(bomb)) + bomb
    assert len(blob) < 20_000
    with pytest.raises(ValueError, match=r"more than 65633 bytes, once decompressed"):
        seal_format.check_ciphertext(blob, 4096, 1)
