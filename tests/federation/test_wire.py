"""Messages on the wire, and payloads as flat vectors."""

from __future__ import annotations

import json
import pickle
import struct
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fedlit.federation import PayloadError
from fedlit.federation.wire import _DTYPES, decode, encode, to_host, wire_size

shapes = st.lists(st.integers(0, 4), max_size=3)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    dtype, shape = draw(st.sampled_from(list(_DTYPES.values()))), draw(shapes)
    count = torch.Size(shape).numel() * dtype.itemsize
    data = draw(st.binary(min_size=count, max_size=count))
    if dtype == torch.bool:
        return torch.tensor([byte % 2 == 1 for byte in data], dtype=torch.bool).reshape(shape)
    return torch.frombuffer(bytearray(data) or bytearray(8), dtype=dtype)[: torch.Size(shape).numel()].reshape(shape)


payloads = st.dictionaries(st.text("ab \0é𐍈", max_size=8), tensors(), max_size=4)


def same_bits(one: Tensor, other: Tensor) -> bool:
    views = [t.contiguous().reshape(-1).view(torch.uint8) if t.numel() else torch.empty(0) for t in (one, other)]
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(*views)


def message(header: object, body: bytes = b"") -> Tensor:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return torch.frombuffer(bytearray(struct.pack("<I", len(text)) + text + body), dtype=torch.uint8)


def test_a_message_by_hand() -> None:
    # 4 bytes of length, 19 bytes of header, then 1 and 2
    wire = encode({"a": torch.tensor([1, 2], dtype=torch.uint8)})
    assert wire.numpy().tobytes() == b'\x13\0\0\0[["a","uint8",[2]]]\x01\x02'


@settings(deadline=None)
@given(payloads)
def test_every_payload_survives_the_wire_bit_by_bit_at_its_announced_size(payload: dict[str, Tensor]) -> None:
    wire = encode(payload)
    assert len(wire) == wire_size(payload)
    back = decode(wire)
    assert list(back) == list(payload)
    assert all(same_bits(back[name], tensor) for name, tensor in payload.items())


def test_strided_and_differentiable_tensors_can_be_sent() -> None:
    parameter = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3))
    back = decode(encode({"w": parameter.t(), "column": parameter[:, 1]}))
    assert torch.equal(back["w"], parameter.detach().t())
    assert back["column"].tolist() == [1.0, 4.0]
    assert not back["w"].requires_grad


def test_what_was_decoded_does_not_share_memory_with_the_message() -> None:
    wire = encode({"a": torch.zeros(3)})
    back = decode(wire)
    wire.fill_(255)
    assert back["a"].tolist() == [0.0, 0.0, 0.0]


@settings(deadline=None)
@given(payloads, st.data())
def test_every_truncated_or_lengthened_message_is_refused(payload: dict[str, Tensor], data: st.DataObject) -> None:
    wire = encode(payload)
    cut = wire[: data.draw(st.integers(0, len(wire) - 1))]
    for bad in (cut, torch.cat([wire, torch.zeros(1, dtype=torch.uint8)])):
        with pytest.raises(ValueError, match="message "):
            decode(bad)


@pytest.mark.parametrize(
    "header",
    [
        [["a", "float32", [2**32, 2**32]]],  # the number of elements wraps to 0 in 64 bits
        [["a", "float32", [10**12]]],
        [["a", "float32", [0, 2**62, 2**62]]],
        [["a", "float32", [0, 10**40]]],
        [["a", "float32", [10**4000] * 900]],  # each size within a header's bound, and a product of a million digits
        *([["a", "float32", shape]] for shape in ([-1], [-1, -1], [1.0], [True], ["x"], "abc", [None])),
        [["a", "complex64", [1]]],
        [["a", "nonsense", [1]]],
        [["a", ["float32"], [1]]],
        [["a", "float32"]],
        [["a", "float32", [0], 1]],
        [[1, "float32", [0]]],
        [["a", "uint8", [0]], ["a", "uint8", [0]]],
        *({"a": 1}, 5, None, "text", b"[" * 100_000, b"\xff\xfe"),
        b'[["a","float32",[' + b"9" * 5000 + b"]]]",
        pickle.dumps([("a", "float32", [0])]),
    ],
    ids=lambda header: str(header)[:40],
)
def test_hostile_headers_are_refused_at_once(header: object) -> None:
    start = time.process_time()
    with pytest.raises(ValueError, match="message "):
        decode(message(header, b"\0" * 4))
    assert time.process_time() - start < 2.0


def test_a_float_size_does_not_meet_the_cached_header_of_an_integer() -> None:
    decode(message([["a", "uint8", [1]]], b"\x07"))
    with pytest.raises(ValueError, match="a shape is not a list of sizes"):
        decode(message(b'[["a","uint8",[1.0]]]', b"\x07"))


def test_bytes_that_are_no_booleans_become_booleans() -> None:
    back = decode(message([["a", "bool", [3]]], b"\x00\x01\x07"))["a"]
    assert back.view(torch.uint8).tolist() == [0, 1, 1]


def test_a_type_that_no_message_can_hold_is_refused_by_the_sender() -> None:
    with pytest.raises(PayloadError, match="'z' has type"):
        encode({"a": torch.zeros(1), "z": torch.zeros(1, dtype=torch.complex64)})


def test_long_vectors_of_a_gpu_go_to_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[int] = []
    empty_like = torch.empty_like

    def recorded(tensor: Tensor, **options: object) -> Tensor:
        pinned.append(tensor.nbytes)
        assert options.pop("pin_memory") is True
        return empty_like(tensor, **options)

    monkeypatch.setattr(torch, "empty_like", recorded)
    with FakeTensorMode():
        for length in (1 << 18, (1 << 18) - 1):
            found = to_host(torch.empty(length, device="cuda"))
            assert (found.device.type, found.dtype, len(found)) == ("cpu", torch.float32, length)
    here = torch.ones(1 << 18)
    assert to_host(here) is here
    assert pinned == [1 << 20]
