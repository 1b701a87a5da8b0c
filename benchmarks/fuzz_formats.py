"""Messages, keys and ciphertexts for `fuzz.py`: a few that the package made, how to spoil them, and who reads them.

Bytes alone carry no promise of a right content: whoever makes them may say what they like. So here a case is fine if it
is read, or refused by an error that the reader documents; sums are checked by the whole conversations.
"""

from __future__ import annotations

import json
import math
import struct
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
import zstandard
from torch import Tensor

import mutations
from fedlit.federation import FederationError, RosterError
from fedlit.federation.client import introductions
from fedlit.federation.documents import document, fingerprint, read_document
from fedlit.federation.sealing import Seals
from fedlit.federation.wire import decode as decode_wire
from fedlit.federation.wire import encode, schema_from, schema_text
from fedlit.privacy import BFV, CKKS, CKKSAffine, FixedPoint, Paillier, PaillierAffine, PrivacyError, shamir
from fedlit.privacy.affine_ckks import PARAMETERS as AFFINE_PARAMETERS
from fedlit.privacy.links import KeyPair, Link, derive, field_of, pack_fields, unpack_fields
from fedlit.privacy.masking.round import HEADER_BYTES, binding, check_tag, read_header, write_header
from fedlit.privacy.packing import is_wide, schema_of, unpack
from fedlit.privacy.seal_format import fields as buffer_fields
from fedlit.privacy.shared_key import HomomorphicKey
from fedlit.privacy.tenseal_keys import Context, join
from fedlit.run.gathering import Part
from mutations import Mutation, spoil


class WrongSumError(AssertionError):
    """A sum came out that is not that of the vectors, although the backend promises a right one or an error."""


@dataclass(frozen=True)
class Format:
    """One kind of input.

    Args:
        share: Of all cases, relative to those of other formats.
        draw: A case from a random generator.
        read: Reads a case.
        typed: What it may raise.
    """

    share: int
    draw: Callable[[Random], bytes]
    read: Callable[[bytes], object]
    typed: tuple[type[BaseException], ...]


Make = Callable[[Path], Format]
"""Makes a format's first inputs, with a folder for files."""

REFUSED: tuple[type[BaseException], ...] = (PrivacyError, FederationError, RosterError)

GENERATOR = torch.Generator().manual_seed(0)
PAYLOADS: list[dict[str, Tensor]] = [
    {"w": torch.randn(3, 2, generator=GENERATOR), "n": torch.tensor(7)},
    {
        "a.b": torch.randn(5, generator=GENERATOR).double(),
        "flags": torch.tensor([True, False]),
        "none": torch.zeros(0, 4),
    },
    {"h": torch.ones(2).half(), "b": torch.ones(2).bfloat16(), "i": torch.tensor([3, -4], dtype=torch.int16)},
    {"u": torch.tensor([2**63], dtype=torch.uint64), "x": torch.tensor(1.5)},
    {},
]
DOCUMENTS: list[Any] = [
    {"a": (10, (2, 2)), "b": (3, ())},
    ["DivergedError", "the loss is NaN"],
    {
        "clients": {"t": {"weights": {"w": torch.randn(2, 2, generator=GENERATOR)}}},
        "public": {"x": "y"},
        "callbacks": {},
    },
    {1: {2.5, "x"}, "nested": [[[(None, True)]]], "bytes": b"abc", "array": np.arange(3), "inf": float("inf")},
    7,
]


def tensor_of(data: bytes) -> Tensor:
    """Bytes as messages are carried."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.zeros(0, dtype=torch.uint8)


def bytes_of(message: Tensor) -> bytes:
    """Inverse of `tensor_of`."""
    return bytes(message.numpy().tobytes())


def spoilt(pool: Sequence[bytes], ways: Sequence[Mutation] = mutations.BYTES) -> Callable[[Random], bytes]:
    """Draws one of a few inputs, with a few mutations."""
    return lambda rng: spoil(rng, rng.choice(pool), pool, ways)


# ---------------------------------------------------------------- messages and documents


def wire_header(rng: Random, data: bytes, pool: Sequence[bytes]) -> bytes:
    """The JSON of a message's header spoilt, with its length told rightly, so that its content is what is read."""
    if len(data) < 4 or len(data) < 4 + int.from_bytes(data[:4], "little"):
        return data
    stop = 4 + int.from_bytes(data[:4], "little")
    text = spoil(
        rng, data[4:stop], [other[4 : 4 + int.from_bytes(other[:4], "little")] for other in pool], mutations.TEXT
    )
    return len(text).to_bytes(4, "little") + text + data[stop:]


WIRE = (*mutations.BYTES, wire_header, wire_header, wire_header)


def wire(folder: Path) -> Format:
    pool = [bytes_of(encode(payload)) for payload in PAYLOADS]
    return Format(150, spoilt(pool, WIRE), lambda data: encode(decode_wire(tensor_of(data))), REFUSED)


def schemas(folder: Path) -> Format:
    """What is announced of a sum, and totals that do not fit it: of any type, not finite, too long or too short."""
    pool = [schema_text(schema_of(payload)) for payload in PAYLOADS]
    kinds = sorted({dtype for text in pool for _, dtype, _ in json.loads(text)} | {"uint8", "int8", "int32", "uint32"})
    odd = (float("nan"), float("inf"), 1e300, -1e19, 2.0**53, 2.0**63, -1.0, 0.5)

    def draw(rng: Random) -> bytes:
        if rng.random() < 0.5:
            return spoil(rng, rng.choice(pool), pool, mutations.TEXT)
        sizes = (0, 1, 2, 3, rng.choice((*mutations.EDGES, -1, 2**80)))
        names = rng.choices(("a", "b", "c", ""), k=rng.randrange(4))
        return json.dumps(
            [[name, rng.choice(kinds), rng.choices(sizes, k=rng.randrange(4))] for name in names]
        ).encode()

    def read(data: bytes) -> None:
        rng, schema = Random(data), schema_from(data)
        codec = rng.choice((None, FixedPoint()))
        wide = {dtype: 2 if codec is not None and is_wide(dtype) else 1 for _, dtype, _ in schema}
        size = sum(wide[dtype] * math.prod(shape) for _, dtype, shape in schema) + rng.choice((0, 0, 0, 1, 1, -1))
        total = torch.ones(max(0, size) if size < 10_000 else 5, dtype=rng.choice((torch.float64, torch.float32)))
        if len(total) and rng.random() < 0.7:
            total[rng.randrange(len(total))] = torch.tensor(rng.choice(odd), dtype=torch.float64).to(total.dtype)
        unpack(total, schema, codec, weighted=rng.random() < 0.5)

    return Format(100, draw, read, REFUSED)


def documents(folder: Path) -> Format:
    pool = [bytes_of(document(value, "")) for value in DOCUMENTS]

    def draw(rng: Random) -> bytes:
        data = rng.choice(pool)
        if rng.random() < 0.3:
            return spoil(rng, data, pool, WIRE)
        tensors = decode_wire(tensor_of(data))
        text = spoil(rng, bytes_of(tensors.pop("structure")), (), mutations.TEXT)
        return bytes_of(encode({"structure": tensor_of(text), **tensors}))

    def read(data: bytes) -> None:
        value = read_document(tensor_of(data))
        fingerprint(value)
        refused(lambda: introductions([{}, value], {"t": 1, "a": 1, "b": 1}))
        refused(lambda: Part.read(["t"], tensor_of(data)))

    return Format(120, draw, read, REFUSED)


# ---------------------------------------------------------------- what the parties of a backend say


def frames(folder: Path) -> Format:
    pool = [pack_fields(fields) for fields in ({"a": b"xyz", "b": b""}, {}, {"client é": bytes(40), "x": bytes(3)})]

    def read(data: bytes) -> None:
        fields = unpack_fields(data)
        if pack_fields(fields) != data:
            raise AssertionError("a message that is read comes back differently")
        field_of(fields, "a", 3)

    return Format(90, spoilt(pool), read, REFUSED)


def headers(folder: Path) -> Format:
    """Masked vectors, whose tag is checked after the header: whatever is changed, nothing comes out."""
    link, about, dtype = Link(bytes(32), "a"), binding("vector", "client a", bytes(32)), np.dtype("<u4")
    pool = []
    for length in (0, 1, 6):
        message = np.zeros(HEADER_BYTES + 4 * length, np.uint8)
        write_header(message, link, about, bytes(range(32)), dtype)
        pool.append(message.tobytes())

    def read(data: bytes) -> None:
        message = np.frombuffer(data, np.uint8)
        read_header(message, dtype)
        check_tag(message, link, about)
        if data not in pool:
            raise WrongSumError("a masked vector that was changed passes its check")

    return Format(90, spoilt(pool), read, REFUSED)


def links(folder: Path) -> Format:
    """Sealed messages, and public keys to agree with."""
    link, keys = Link(derive(bytes(32), "x"), "a"), KeyPair()
    pool = [link.seal(text, b"about") for text in (b"", b"share" * 13)] + [KeyPair().public, bytes(32)]

    def read(data: bytes) -> None:
        if len(data) == 32:
            keys.agree(data, "a")
        link.open(data, b"about")
        if data not in pool:
            raise WrongSumError("a sealed message that was changed opens")

    return Format(90, spoilt(pool), read, REFUSED)


def sealed_messages(folder: Path) -> Format:
    """From client to client: what opens is what was closed, for the exchange that it was closed for."""
    first, second = Seals(["a"]), Seals(["b", "c"])
    keys = {**first.public_keys(), **second.public_keys()}
    first.introduce({"a": {name: keys[name] for name in "bc"}})
    second.introduce({name: {"a": keys["a"]} for name in "bc"})
    messages = [encode({"w": torch.arange(float(length))}) for length in (0, 1, 50)]
    pool = [
        bytes_of(copy)
        for message in messages
        for about in (b"this", b"another")
        for copy in first.close(message, "a", [["b", "c"]], about)
    ]
    meant = {bytes_of(message) for message in messages}

    def read(data: bytes) -> None:
        if bytes_of(second.open(tensor_of(data), "a", ["b", "c"], b"this")) not in meant:
            raise WrongSumError("a message that was spoilt on its way opens")

    return Format(60, spoilt(pool), read, REFUSED)


def shares(folder: Path) -> Format:
    """Shares of a secret, as an answer holds them; changed ones give another secret, which its owner's word refutes."""
    pool = [pack_fields({str(p): s for p, s in shamir.split(bytes(range(32)), 2, range(1, 4)).items()})]

    def draw(rng: Random) -> bytes:
        if rng.random() < 0.3:
            return spoil(rng, pool[0])
        points = unpack_fields(pool[0])
        point = rng.choice(list(points))
        points[point] = spoil(rng, points[point], list(points.values()))
        return pack_fields(points)

    def read(data: bytes) -> None:
        found = unpack_fields(data)
        shamir.combine({len(name) + place: share for place, (name, share) in enumerate(found.items())}, 2)

    return Format(60, draw, read, REFUSED)


# ---------------------------------------------------------------- ciphertexts and keys


def paillier(folder: Path) -> Format:
    """Public keys, ciphertexts at the server, totals at a client, and the messages of the two-party exchange."""
    scheme = Paillier(key_bits=512, insecure_test_keys=True, workers=1)
    private, public = scheme.generate_keys()
    key, adder = scheme.load_key(public, private), scheme.load_key(public)
    bodies = [b"".join(key.encrypt(torch.tensor([1.5, -2.0, number]))) for number in (0.0, 31.0)]
    source = PaillierAffine(key_bits=512, insecure_test_keys=True, workers=1).source()
    pool = {"v": [*bodies, bytes(len(bodies[0]))], "p": [public], "k": [private], "s": [source.public_key()]}

    def draw(rng: Random) -> bytes:
        kind = rng.choice("vvvpks")
        return kind.encode() + spoil(rng, rng.choice(pool[kind]), [*pool[kind], *bodies, public])

    def read(case: bytes) -> None:
        kind, data = case[:1], case[1:]
        if kind == b"v":
            refused(lambda: key.decrypt(data, 3, 2))
            key.decrypt(added(adder, [bodies[0], data]), 3, 2)
        elif kind == b"p":
            refused(lambda: scheme.load_key(data, private))
            added(scheme.load_key(data), bodies)
        elif kind == b"k":
            scheme.load_key(public, data)
        else:
            PaillierAffine(key_bits=512, insecure_test_keys=True).target().receive_key(data)

    return Format(20, draw, read, REFUSED)


def added(key: HomomorphicKey, bodies: Sequence[bytes]) -> bytes:
    """What a server makes of the ciphertexts of vectors of three numbers."""
    total: deque[Any] = deque()
    for body in bodies:
        key.add(total, body, 3)
    return b"".join(key.write(total))


def refused(step: Callable[[], object]) -> None:
    """Take a step that may be refused by an error of the package; any other passes."""
    with suppress(*REFUSED):
        step()


def sealed(rng: Random, data: bytes, pool: Sequence[bytes]) -> bytes:
    """One of SEAL's objects in a message of TenSEAL's spoilt under its compression, and wrapped up as SEAL does it."""
    try:
        found = list(buffer_fields(data))
        places = [place for place, (_, held) in enumerate(found) if isinstance(held, bytes) and len(held) > 16]
        at = rng.choice(places)
    except (ValueError, IndexError):
        return mutations.flip(rng, data, pool)
    parts = []
    for place, (number, held) in enumerate(found):
        if place == at and isinstance(held, bytes):
            held = reseal(rng, held)
        body = varint(held) if isinstance(held, int) else varint(len(held)) + held
        fixed = isinstance(held, bytes) and number == 3 and len(held) == 8  # the scale, a double
        parts.append(
            varint(8 * number + 1) + held if fixed else varint(8 * number + 2 * isinstance(held, bytes)) + body
        )
    return b"".join(parts)


def reseal(rng: Random, held: bytes) -> bytes:
    """An object of SEAL with its content spoilt, or whatever is wrapped in a message of its own."""
    head = struct.Struct("<HBBBBHQ")
    if len(held) < head.size or int.from_bytes(held[:2], "little") != 0xA15E:
        return sealed(rng, held, ())
    try:
        content = zstandard.ZstdDecompressor().stream_reader(held[head.size :]).read(1 << 24)
    except zstandard.ZstdError:  # spoilt before
        return mutations.flip(rng, held, ())
    body = zstandard.ZstdCompressor(1).compress(spoil(rng, content))
    magic, size, major, minor, kind, reserved, _ = head.unpack_from(held)
    return head.pack(magic, size, major, minor, kind, reserved, head.size + len(body)) + body


def varint(value: int) -> bytes:
    """A number as protocol buffers write it."""
    more = b""
    while value > 127:
        more, value = more + bytes([value & 127 | 128]), value >> 7
    return more + bytes([value])


SEAL = (*mutations.BYTES, sealed, sealed, sealed, sealed)


def lattice(backend: BFV | CKKS, share: int) -> Format:
    """Ciphertexts at the server and at a client, and both halves of the key."""
    scheme = backend
    private, public = scheme.generate_keys()
    key, adder = scheme.load_key(public, private), scheme.load_key(public)
    bodies = [b"".join(key.encrypt(torch.tensor([1.5, -2.0, number]))) for number in (0.0, 31.0)]
    pool, keys = [body[4:] for body in bodies], [public, private]

    def draw(rng: Random) -> bytes:
        kind = rng.choice("vvvvdk")
        data = spoil(rng, rng.choice(keys if kind == "k" else pool), pool + keys, SEAL)
        if rng.random() < 0.1:
            return kind.encode() + spoil(rng, join([data]), bodies)
        return kind.encode() + (data if kind == "k" else join([data]))

    def read(case: bytes) -> None:
        kind, data = case[:1], case[1:]
        if kind == b"k":
            refused(lambda: scheme.load_key(data))
            scheme.load_key(public, data)
        elif kind == b"d":
            key.decrypt(data, 3, 2)
        else:
            key.decrypt(added(adder, [bodies[0], data]), 3, 2)

    return Format(share, draw, read, REFUSED)


def rotation_keys(folder: Path) -> Format:
    """The public key of `CKKSAffine`, of megabytes."""
    pool = [CKKSAffine().source().public_key()]
    return Format(1, spoilt(pool, SEAL), lambda data: Context.load(AFFINE_PARAMETERS, data, private=False), REFUSED)


FORMATS: dict[str, Make] = {
    "wire messages": wire,
    "schemas and totals": schemas,
    "documents": documents,
    "frames": frames,
    "headers of masked vectors": headers,
    "links and keys": links,
    "sealed messages": sealed_messages,
    "shares": shares,
    "Paillier": paillier,
    "BFV": lambda folder: lattice(BFV(), 8),
    "CKKS": lambda folder: lattice(CKKS(), 8),
    "rotation keys": rotation_keys,
}
