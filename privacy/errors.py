"""Errors of a private exchange, sorted by what a caller could do about them."""


class PrivacyError(RuntimeError):
    """Base of everything that a backend refuses; no sum comes out, neither partial nor wrong."""


class InputError(PrivacyError, ValueError):
    """A client's vector cannot be protected: NaN, infinity, another length or type than announced."""


class RangeError(InputError, OverflowError):
    """A number is outside the bound of the fixed-point grid, or a sum of so many clients would be."""


class QuorumError(PrivacyError):
    """Too few clients take part, or too few are left, to hide or to reveal their sum."""


class ReplayError(PrivacyError):
    """A message belongs to another round, comes twice, or comes too late."""


class AuthenticationError(PrivacyError):
    """A message was not made by whom it claims, or was changed on its way."""


class TermsError(PrivacyError):
    """Clients of one sum have received different terms of it, so that their masks do not cancel."""


class SolvableError(PrivacyError):
    """So many numbers were asked of a party that its secret could be solved from them."""


class KeyCheckError(PrivacyError):
    """A public key is malformed, weak, or another one than its owner had before."""


class DecodeError(PrivacyError, ValueError):
    """Bytes are not a message of this protocol, or not of the announced size."""


class PrivacyWarning(UserWarning):
    """Less is hidden than one might think; the exchange goes on."""
