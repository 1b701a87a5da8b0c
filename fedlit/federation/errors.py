"""What can go wrong between clients, sorted by what a caller could do about it."""


class FederationError(RuntimeError):
    """Base of everything that goes wrong while a federation runs."""


class RosterError(ValueError):
    """The clients given do not make a federation (too few, duplicated, unknown target, mismatched data)."""


class ChannelError(RosterError):
    """A channel is not declared, or used otherwise than declared, or was given what it cannot take."""


class OutOfStepError(FederationError):
    """Two processes asked for different exchanges at the same time."""


class FederationTimeoutError(FederationError):
    """A process did not answer within the strategy's ``timeout``."""


class PayloadError(FederationError, ValueError):
    """Payloads that should be added up differ in names, types or shapes."""


class DivergedError(FederationError):
    """A client's loss or message is NaN or infinite."""


class PeerFailedError(FederationError):
    """Another process raised an error, which is quoted in the message."""


class LabelGuardError(FederationError):
    """Labels of a client that has none were about to be read, or scores by them to select by."""
