"""Errors of a federation."""

from __future__ import annotations

import traceback
from typing import TypeVar

from fedlit.privacy.errors import InputError, PrivacyError, QuorumError

_Error = TypeVar("_Error", bound=Exception)


def about(argument: str, value: object, error: _Error) -> _Error:
    """Return an error with the attributes of `fedlit.checks.ArgumentError`, where its text is another than theirs."""
    vars(error).update(argument=argument, value=value)
    return error


def public_text(error: BaseException) -> str:
    """Return what other processes may read of an error: nothing that may quote data.

    Errors of the protocol have texts without data, and others may say so by an attribute ``public``. Of all others,
    such as those of a data file or of a number out of range, only the type, the argument and the place in fedlit are
    sent; the whole text is in the output of the process that raised it.
    """
    if hasattr(error, "public"):
        return str(error.public)
    places = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    places = [place for place in places if place.startswith("fedlit.") and place != "fedlit.checks"]
    of_protocol = isinstance(error, FederationError | PrivacyError) and not isinstance(error, InputError)
    of_roster = isinstance(error, RosterError) and places[-1:] and places[-1].startswith(_PROTOCOL)
    if of_protocol or of_roster:
        return str(error)
    argument = getattr(error, "argument", "")
    about = f" of {argument!r}" if isinstance(argument, str) and argument.isidentifier() else ""
    where = f" in {places[-1]}" if places else ""
    return f"an error{about}{where}: its text, which may quote data, is in the output of its process alone"


def printable(text: object) -> str:
    """Return a text that a peer sent, on one line, without characters that would steer a terminal."""
    return "".join(each if each.isprintable() else f"\\x{ord(each):02x}" for each in " ".join(str(text).split()))


def with_place(error: _Error, place: str) -> _Error:
    """Return an error of the same type whose text, and what others read of it, begin with ``place``."""
    placed = type(error)(f"{place}: {error}")
    placed.public = f"{place}: {public_text(error)}"  # type: ignore[attr-defined]
    return placed


_PROTOCOL = ("fedlit.federation.", "fedlit.remote.")
"""Modules whose errors of the roster are about names and settings."""


class FederationError(RuntimeError):
    """Base of everything that goes wrong while a federation runs."""


class RosterError(ValueError):
    """The clients given do not make a federation (too few, duplicated, unknown target, mismatched data)."""


class ChannelError(RosterError):
    """A channel is not declared, or used otherwise than declared, or was given what it cannot take."""


class SampleError(RosterError):
    """A client's samples are not what the run can take: their inputs, or their labels.

    Attributes:
        public: Text that is sent to other processes, without what is about data.
    """

    public = "a client has samples that the run cannot take: the error raised at its process states which"


class OutOfStepError(FederationError):
    """Two processes asked for different exchanges at the same time."""


class FederationTimeoutError(FederationError):
    """A process did not answer within the strategy's ``timeout``."""


class JournalError(FederationError):
    """A site's journal or account of releases cannot be used, or has another release of the same step."""


class BudgetError(FederationError):
    """A client's privacy budget does not suffice for its next release."""


class LostClientsError(FederationError, QuorumError):
    """A sum cannot be had without clients that have dropped out: all start again once these are back."""


class PayloadError(FederationError, ValueError):
    """Payloads that should be added up differ in names, types or shapes."""


class DivergedError(FederationError):
    """A client's loss or message is NaN or infinite."""


class NotTrainedError(FederationError):
    """A client's local steps change none of its weights."""


class PeerFailedError(FederationError):
    """Another process raised an error, which is quoted in the message."""


class LabelGuardError(FederationError):
    """Labels of a client that has none were about to be read, or scores by them to select by."""


class AheadOfServerError(FederationError):
    """A process resumes from a later round than the server, whose round is the one that counts.

    Args:
        own_round: From which this process resumes.
        server_round: The server's.
    """

    def __init__(self, own_round: int, server_round: int) -> None:
        super().__init__(
            f"this process resumes from round {own_round}, and the server from round {server_round}, which counts: "
            "resume from a checkpoint of that round or an earlier one, or without one"
        )
        self.server_round = server_round
