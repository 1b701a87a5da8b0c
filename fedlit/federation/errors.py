"""Errors of a federation."""

from __future__ import annotations

from typing import TypeVar

_Error = TypeVar("_Error", bound=Exception)


def about(argument: str, value: object, error: _Error) -> _Error:
    """Return an error with the attributes of `fedlit.checks.ArgumentError`, where its text is another than theirs."""
    vars(error).update(argument=argument, value=value)
    return error


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
