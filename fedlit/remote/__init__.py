"""Federations across organisations: a server without clients, and sites with their own data that call it."""

from fedlit.federation.errors import AheadOfServerError, LostClientsError
from fedlit.remote.carrier import BrokenError, Caller, Listener, RefusedError
from fedlit.remote.policy import Policy, PolicyError
from fedlit.remote.seats import Seat, Server, Site
from fedlit.remote.star import DismissedError, ServerLostError

__all__ = [
    "AheadOfServerError",
    "BrokenError",
    "Caller",
    "DismissedError",
    "Listener",
    "LostClientsError",
    "Policy",
    "PolicyError",
    "RefusedError",
    "Seat",
    "Server",
    "ServerLostError",
    "Site",
]
