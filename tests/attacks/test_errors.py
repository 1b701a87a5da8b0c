"""What other processes read of an error: never a value of the data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fedlit.data import CSVDomains
from fedlit.data.source import check_classes
from fedlit.federation import DivergedError, Federation, FederationError, RosterError
from fedlit.federation.errors import PeerFailedError, public_text, with_place
from fedlit.federation.transport import Transport
from fedlit.privacy import DecodeError, InputError, PairwiseMasking, QuorumError, RangeError
from thread_transport import on_ranks

SECRET = "Jane Doe, C50.9"


def raised(call: Callable[[], Any]) -> BaseException:
    with pytest.raises(Exception) as caught:  # noqa: PT011, any
        call()
    return caught.value


def of_a_users_code() -> None:
    raise KeyError(SECRET)


def of_a_table() -> None:
    check_classes([SECRET, SECRET])


@pytest.mark.parametrize("error", [KeyError(SECRET), RangeError(SECRET), InputError(SECRET), RosterError(SECRET)])
def test_texts_that_may_quote_data_stay_at_their_process(error: Exception) -> None:
    assert SECRET not in public_text(error)
    assert SECRET not in public_text(with_place(error, "client 'a'"))
    assert public_text(with_place(error, "client 'a'")).startswith("client 'a': ")


@pytest.mark.parametrize("call", [of_a_users_code, of_a_table])
def test_errors_as_they_are_raised_say_where(call: Callable[[], None]) -> None:
    error = raised(call)
    assert SECRET in str(error)
    text = public_text(error)
    assert SECRET not in text
    assert ("fedlit.data" in text) == (call is of_a_table)


@pytest.mark.parametrize("error", [DivergedError("x"), FederationError("x"), QuorumError("x"), DecodeError("x")])
def test_texts_of_the_protocol_cross(error: Exception) -> None:
    assert public_text(error) == "x"


def test_an_error_of_the_roster_crosses_from_the_federation_alone() -> None:
    assert "at least 2 clients" in public_text(raised(lambda: Federation(["a"], "a")))
    assert SECRET not in public_text(raised(lambda: CSVDomains({SECRET: "a.csv"}, label="y", target="a")))


def test_a_number_out_of_range_is_read_at_its_own_process_alone() -> None:
    """Another process reads the client, the channel and the type of the error."""

    def mean(transport: Transport) -> str:
        federation = Federation(["a", "b", "c"], "c", transport=transport, privacy=PairwiseMasking(), seed=0)
        payloads = {client.name: {"w": torch.full((2,), 1e9)} for client in federation.local_clients[:1]}
        payloads |= {client.name: {"w": torch.zeros(2)} for client in federation.local_clients if client.name != "a"}
        try:
            federation.sum("weights", payloads)
        except (RangeError, PeerFailedError) as error:
            return str(error)
        return ""

    first, *others = on_ranks(mean, 3)
    assert "1e+09" in first or "1000000000" in first
    for text in others:
        assert "client 'a', channel 'weights'" in text
        assert "1e+09" not in text and "1000000000" not in text  # noqa: PT018, one statement
