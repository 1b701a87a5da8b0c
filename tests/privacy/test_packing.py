"""Payloads as flat vectors: as floats, and on a grid."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedlit.privacy import DecodeError, FixedPoint, InputError, Plain, PrivacyError, QuorumError, RangeError, packing
from fedlit.privacy.packing import check_weight, pack, relative_weights, schema_of, unpack

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.int8, torch.bool]
shapes = st.lists(st.integers(0, 4), max_size=3)
layouts = st.dictionaries(
    st.text("ab \0é𐍈", max_size=4), st.tuples(st.sampled_from(DTYPES), shapes), min_size=1, max_size=4
)


@pytest.mark.parametrize("weight", [None, 0.5])
def test_a_payload_of_several_devices_is_packed_on_the_first(weight: float | None) -> None:
    """FedGP(beta="auto") adds a number made on the CPU to weights that are on a GPU; here both devices can be had."""
    vector = pack({"weights": torch.zeros(2, 2, device="meta"), "beta": torch.tensor(0.5)}, None, weight)
    assert vector.device == torch.device("meta")
    assert vector.shape == (5 if weight is None else 6,)


def test_a_payload_is_packed_in_its_order() -> None:
    payload = {"b": torch.tensor([[1.0, 2.0], [3.0, 4.0]]), "a": torch.tensor(5.0), "none": torch.zeros(0, 3)}
    for codec in (None, FixedPoint()):
        assert pack(payload, codec).tolist() == [1.0, 2.0, 3.0, 4.0, 5.0]
        # on the grid, the weight is counted in steps of 2^-24 and sent as half of 2^24 steps of 2^-20
        last = 0.5 if codec is None else 8.0
        assert pack(payload, codec, weight=0.5).tolist() == [0.5, 1.0, 1.5, 2.0, 2.5, last]


@pytest.mark.parametrize("weight", [None, 0.3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_entries_of_any_layout_are_packed_alike_and_share_no_memory(dtype: torch.dtype, weight: float | None) -> None:
    plain = torch.randn(6, 4, dtype=dtype)
    layouts = {"rows": plain, "columns": plain.T.contiguous().T, "number": plain[0, 0], "none": plain[:0]}
    packed = {name: pack({name: entry, "last": plain}, None, weight) for name, entry in layouts.items()}
    factor = 1.0 if weight is None else weight
    for name, entry in layouts.items():
        expected = [entry.reshape(-1) * factor, plain.reshape(-1) * factor]
        expected += [] if weight is None else [torch.tensor([weight], dtype=dtype)]
        assert torch.equal(packed[name], torch.cat(expected))
    alone = pack({"rows": plain}, None, None)
    alone.zero_()
    assert plain.any()


def test_wide_entries_are_two_digits_on_a_grid_by_hand() -> None:
    # 4 fraction bits and a bound of 2: 32 steps, so digits in base 32. 10.25 * 16 = 164 = 5 * 32 + 4; -3 * 16 = -48,
    # half way between -1 and -2 times 32, goes to the even -2: -48 = -2 * 32 + 16
    codec = FixedPoint(fraction_bits=4, bound=2.0)
    payload = {"d": torch.tensor([10.25], dtype=torch.float64), "n": torch.tensor([-3])}
    vector = pack(payload, codec)
    assert (vector * 16).tolist() == [5.0, 4.0, -2.0, 16.0]
    assert unpack(vector.double(), schema_of(payload), codec, weighted=False) == payload


@pytest.mark.parametrize("weight", [None, 0.3])
def test_digits_of_a_long_entry_are_made_in_pieces(weight: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    payload = {"d": torch.linspace(-900, 900, 10, dtype=torch.float64), "n": torch.arange(7), "w": torch.ones(2)}
    whole = pack(payload, FixedPoint(), weight)
    monkeypatch.setattr(packing, "_LONG", 3)
    assert torch.equal(pack(payload, FixedPoint(), weight), whole)
    payload["n"][6] = 2**52
    with pytest.raises(RangeError, match="entry 'n' has a number of"):
        pack(payload, FixedPoint(), weight)


@settings(deadline=None)
@given(layouts, st.integers(0, 1000), st.sampled_from([None, FixedPoint(fraction_bits=6, bound=64.0)]))
def test_numbers_on_the_grid_come_back_in_their_types_with_and_without_a_codec(
    layout: dict[str, tuple[torch.dtype, list[int]]], seed: int, codec: FixedPoint | None
) -> None:
    generator = torch.Generator().manual_seed(seed)
    drawn = {name: torch.randint(-500, 500, shape, generator=generator) / 64 for name, (_, shape) in layout.items()}
    on_the_grid = {name: drawn[name].to(dtype).float() * 64 for name, (dtype, _) in layout.items()}
    payload = {name: (on_the_grid[name].round() / 64).to(dtype) for name, (dtype, _) in layout.items()}
    vector = pack(payload, codec)
    back = unpack(codec.decode(codec.encode(vector)) if codec else vector, schema_of(payload), codec, weighted=False)
    assert list(back) == list(payload)
    for name, tensor in payload.items():
        assert back[name].dtype == tensor.dtype
        assert torch.equal(back[name], tensor)  # equal and not bit by bit: a grid of integers has no -0.0


def test_integer_entries_are_rounded_half_to_even() -> None:
    schema = schema_of({"n": torch.zeros(4, dtype=torch.int64)})
    vector = torch.tensor([0.5, 1.5, -2.5, 2.4999], dtype=torch.float64)
    assert unpack(vector, schema, None, weighted=False)["n"].tolist() == [0, 2, -2, 2]


def test_integers_up_to_half_a_billion_are_exact_on_the_default_grid_and_more_is_refused() -> None:
    most = 2**24 * 2**23 // 2**20  # two digits of 24 bits, the higher one up to half the base, 20 bits of fraction
    payload = {"n": torch.tensor([most, -most, 12345, -1, 0])}
    assert Plain(FixedPoint()).sum({"a": payload, "b": payload})["n"].tolist() == [2 * most, -2 * most, 24690, -2, 0]
    with pytest.raises(RangeError, match="two digits"):
        Plain(FixedPoint()).sum({"a": {"n": torch.tensor([2 * most])}})


def test_a_sum_that_leaves_its_integer_type_is_refused_and_does_not_wrap() -> None:
    payload = {"n": torch.tensor([100], dtype=torch.int8)}
    for backend in (Plain(), Plain(FixedPoint())):
        assert backend.sum({"a": payload})["n"].tolist() == [100]
        with pytest.raises(RangeError, match="entry 'n' goes from 200 to 200"):
            backend.sum({"a": payload, "b": payload})


def test_integers_and_sums_that_would_not_be_exact_are_refused() -> None:
    with pytest.raises(RangeError, match=r"entry 'n' has an integer of 9\.0072e\+15"):
        Plain().sum({"a": {"n": torch.tensor([2**53 + 2])}})
    big = {"n": torch.tensor([2**53 - 1])}
    assert Plain().sum({"a": big})["n"].tolist() == [2**53 - 1]
    with pytest.raises(RangeError, match="entry 'n' goes from"):
        Plain().sum({"a": big, "b": big})
    half = {"h": torch.tensor([60000.0]).half()}
    with pytest.raises(RangeError, match=r"leaves the range of torch\.float16"):
        Plain().sum({"a": half, "b": half})


def test_plain_vectors_of_unequal_length_are_refused_and_not_broadcast() -> None:
    with pytest.raises(DecodeError, match="rows of equal type and length"):
        Plain().server().aggregate({"a": torch.ones(3), "b": torch.ones(1)})
    with pytest.raises(QuorumError, match="no vector"):
        Plain().server().aggregate({})
    with pytest.raises(DecodeError, match="must be 3, as of payloads, got 4"):
        unpack(torch.zeros(4), schema_of({"w": torch.zeros(3)}), None, weighted=False)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
def test_plain_vectors_of_types_that_nobody_packs_are_refused(dtype: torch.dtype) -> None:
    vector, schema = torch.ones(3).to(dtype), schema_of({"w": torch.zeros(3)})
    with pytest.raises(DecodeError, match=r"must be of torch\.float32 or torch\.float64"):
        Plain().server().aggregate({"a": vector, "b": vector})
    for total in (vector, torch.zeros(3, 1)):
        with pytest.raises(DecodeError, match="must be a row of floats"):
            unpack(total, schema, None, weighted=False)


def test_a_coarse_grid_still_weighs_finely() -> None:
    codec = FixedPoint(fraction_bits=0, bound=1000.0)
    sent = {"a": {"w": torch.tensor([0.0])}, "b": {"w": torch.tensor([1000.0])}}
    assert Plain(codec).mean(sent, {"a": 1.0, "b": 3.0})["w"].item() == pytest.approx(750.0, abs=0.5)
    small = FixedPoint(fraction_bits=20, bound=0.5)  # a bound below the largest weight, which is 1
    assert Plain(small).mean({"a": {"w": torch.tensor([0.25])}})["w"].item() == 0.25


def test_weights_are_on_the_grid_so_that_a_mean_of_equals_is_itself() -> None:
    codec = FixedPoint(fraction_bits=4, bound=8.0)  # 128 steps up to the bound
    weights = relative_weights({"a": 3.0, "b": 1.0, "c": 1e-9}, ["a", "b", "c"], codec)
    assert weights == {"a": 1.0, "b": 43 / 128, "c": 1 / 128}  # 1/3 is nearest to 43/128; at least one step
    equal = {name: {"w": torch.tensor([4.0])} for name in weights}
    assert Plain(codec).mean(equal, {"a": 3.0, "b": 1.0, "c": 1e-9})["w"].item() == 4.0


def test_payloads_that_differ_and_complex_ones_are_refused() -> None:
    with pytest.raises(InputError, match=r"client 'b' differs from 'a', 'w' is"):
        Plain().sum({"a": {"w": torch.zeros(2)}, "b": {"w": torch.zeros(3)}})
    with pytest.raises(InputError, match=r"entry 'z' has type torch\.complex64: send its real"):
        Plain().sum({"a": {"z": torch.zeros(2, dtype=torch.complex64)}})


@pytest.mark.parametrize("codec", [None, FixedPoint()])
@pytest.mark.parametrize("number", [2, 63])
def test_weights_of_many_clients_add_up_as_announced(codec: Any, number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    weights = {str(place): float(10 ** torch.rand(1, generator=generator) * 5) for place in range(number)}
    shares = relative_weights(weights, list(weights), codec)
    vectors = [pack({"x": torch.randn(4, generator=generator)}, codec, share) for share in shares.values()]
    if codec is not None:
        vectors = [codec.decode(codec.encode(vector)) for vector in vectors]
    check_weight(torch.stack(vectors).sum(0), codec, shares)
    with pytest.raises(DecodeError, match="left a vector out"):
        check_weight(torch.stack(vectors).sum(0) - vectors[0], codec, shares)


@pytest.mark.parametrize(
    ("total", "schema"),
    [
        (torch.full((2,), float("nan")), (("n", torch.int64, (2,)),)),
        (torch.full((1,), 1e30), (("n", torch.int16, (1,)),)),
        (torch.zeros(0), (("n", torch.float32, (0, 2**63)),)),
        (torch.zeros(0), ()),
    ],
)
def test_hostile_totals_and_schemas_are_refused(total: torch.Tensor, schema: Any) -> None:
    with pytest.raises(PrivacyError):
        unpack(total, schema, None, weighted=not schema)
