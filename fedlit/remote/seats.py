"""Seats: a process's part in a federation across organisations, as it is passed to a strategy."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, final

from fedlit.checks import check
from fedlit.federation.errors import FederationError
from fedlit.federation.identities import Voucher
from fedlit.federation.names import alike, check_list, difference, shown
from fedlit.remote.carrier import Caller, Listener
from fedlit.remote.policy import Policy
from fedlit.remote.star import ServerStar, SiteStar

STEP_TIMEOUT = 7200.0
"""Seconds for which a site that is connected may send nothing, unless the server's seat says otherwise."""

KIT_FILES = ("client.crt", "client.key", "rootCA.pem")
"""Of a site's startup kit in FLARE: its certificate, the key to it, and the authority's certificate."""


class Seat(ABC):
    """Joins a process to the others, in place of process groups."""

    is_server: bool
    journal: str | None = None
    """At a site: file of what it has released, see `fedlit.federation.journal`; ``None`` keeps none."""
    accounts: str | None = None
    """At a site: folder of its clients' accounts of privacy, if the strategy is given no ``account``."""
    allow_rejoin: Sequence[str] = ()
    """Clients whose identity key may be another one than before."""
    policy: Policy | None = None
    """At a site: what it takes part in; ``None`` is everything."""
    missing: Sequence[str] = ()
    """Clients that were lost when the run ended, and do not have its result."""

    @abstractmethod
    def open(self, facts: Mapping[str, Any]) -> ServerStar | SiteStar:
        """Join the others, who must have the same ``facts``; a `FederationError` if that takes too long or fails."""

    def voucher(self) -> Voucher | None:
        """Return who vouches for the identity keys of clients, if anybody does."""
        return None


@final
class CarriedServer(Seat):
    """The server's seat over a carrier that is there; other arguments as of `Server`."""

    is_server = True

    def __init__(
        self,
        listener: Listener,
        sites: Mapping[str, list[str]],
        wait_for: float,
        patience: float,
        step_timeout: float = STEP_TIMEOUT,
    ) -> None:
        self._listener, self._sites, self._times = listener, sites, (wait_for, patience, step_timeout)
        self._star: ServerStar | None = None
        self._ended: str | None = None

    @property
    def begun(self) -> bool:
        """Whether the first round has begun."""
        return self._star is not None and self._star.begun

    def end(self, why: str) -> None:
        """End the run, now or as soon as it starts; sites receive the reason."""
        self._ended = why
        if self._star is not None:
            self._star.close(why)

    def open(self, facts: Mapping[str, Any]) -> ServerStar:
        """See `Seat`."""
        self._star = star = ServerStar(self._listener, self._sites, facts, *self._times)
        if self._ended is not None:
            raise FederationError(self._ended)
        try:
            star.open()
        except BaseException as error:
            star.close(f"{type(error).__name__}: {error}")
            raise
        return star

    def presence(self) -> tuple[dict[str, str], str]:
        """See `Server`."""
        return _nobody(self._sites) if self._star is None else self._star.board.presence()


def _nobody(sites: Iterable[str]) -> tuple[dict[str, str], str]:
    """What `Server.presence` gives before the server listens."""
    return dict.fromkeys(sites, "has not come"), ""


class _SiteSeat(Seat):
    """A site's seat, with files of a certificate, its key and its authority, or without."""

    is_server = False
    files: tuple[Path, Path, Path] | None = None
    peers: Mapping[str, str] = MappingProxyType({})

    def voucher(self) -> Voucher | None:
        """See `Seat`."""
        from fedlit.remote.vouchers import CertificateVoucher

        return None if self.files is None else CertificateVoucher(*self.files, self.peers)


@final
class CarriedSite(_SiteSeat):
    """A site's seat over a carrier that is there; other arguments as of `Site`."""

    def __init__(self, caller: Caller, clients: list[str] | None, wait_for: float, patience: float) -> None:
        self._caller, self._clients, self._times = caller, clients, (wait_for, patience)

    def open(self, facts: Mapping[str, Any]) -> SiteStar:
        """See `Seat`."""
        star = SiteStar(self._caller, facts, self._clients, *self._times)
        try:
            star.open()
        except BaseException as error:
            star.close(type(error).__name__)
            raise
        return star


@final
class Server(Seat):
    """The server of sites that call it over gRPC with mutual TLS; it has no client, no data, and no model.

    Once all networks are compared, those that its module was given are emptied, and their memory is free.

    Args:
        address: Where it listens, ``HOST:PORT``; ``0.0.0.0:PORT`` is everywhere.
        sites: Clients of each site, by the name in its certificate; of a list, each site is the client of its name.
        certificate: File of its certificate, in PEM, which names the host that sites call.
        key: File of the key to it.
        ca: File of the certificate authority's certificate, by which sites' certificates are signed.
        wait_for: Seconds to wait for sites that are not there: before training starts, where none is left, and for
            those that were lost, when the last round is over.
        patience: Seconds after which a disconnected site times out, and the others go on.
        step_timeout: Seconds after which one times out that is connected, and has not sent what is due from it: more
            than its local training between two messages takes, and sending the longer of these.

    Raises:
        ValueError: If a number is not positive, a site has no client, names differ in capitals, blanks or Unicode
            normal form alone, or a file is not what it should be.
        TypeError: If a name is no text.
    """

    is_server = True

    def __init__(
        self,
        address: str,
        sites: list[str] | dict[str, list[str]],
        *,
        certificate: str,
        key: str,
        ca: str,
        wait_for: float = 600.0,
        patience: float = 20.0,
        step_timeout: float = STEP_TIMEOUT,
    ) -> None:
        self.address = _checked_address("address", address)
        check_list("sites", sites)
        if isinstance(sites, dict):
            for name, names in sites.items():
                check_list(f"sites[{name!r}]", names)
            self.sites = {name: list(names) for name, names in sites.items()}
        else:
            self.sites = {name: [name] for name in sites}
        some = bool(self.sites) and all(self.sites.values()) and len(self.sites) == len(sites)
        check(some, "sites", "at least one site, each once and with at least one client", sites)
        clients = [name for names in self.sites.values() for name in names]
        for what, names in (("sites", [*self.sites]), ("clients of sites", clients)):
            for group in alike(names):
                raise ValueError(
                    f"{what} must be different names, but {shown(group)} differ in {difference(group)}: rename one, or "
                    "name it once"
                )
        self.files = _checked_files(certificate, key, ca)
        _check_times(wait_for=wait_for, patience=patience, step_timeout=step_timeout)
        self.wait_for, self.patience, self.step_timeout = wait_for, patience, step_timeout
        self._carried: CarriedServer | None = None

    def open(self, facts: Mapping[str, Any]) -> ServerStar:
        """See `Seat`."""
        from fedlit.remote.grpc_carrier import GrpcListener

        listener: Listener = GrpcListener(self.address, *self.files, names=list(self.sites))
        self._carried = CarriedServer(listener, self.sites, self.wait_for, self.patience, self.step_timeout)
        return self._carried.open(facts)

    def presence(self) -> tuple[dict[str, str], str]:
        """What each site does at the moment, and what the server waits for, in words."""
        return _nobody(self.sites) if self._carried is None else self._carried.presence()


@final
class Site(_SiteSeat):
    """A site, which calls its server over gRPC with mutual TLS, and is called by nobody.

    Args:
        server: Where it is, ``HOST:PORT``.
        certificate: File of this site's certificate, in PEM; the server knows the site by the name in it.
        key: File of the key to it.
        ca: File of the certificate authority's certificate, by which the server's certificate is signed.
        clients: Those of this site, to be sure that the server has the same; ``None`` takes what the server has.
        wait_for: Seconds to wait for a server that is not there yet.
        patience: Seconds for which the server may not answer before this site gives up.
        journal: File of what this site has released, by which it releases nothing twice in two ways; it has to last
            as long as the run. ``None`` keeps none, but for ``fedlit join``, which has one beside its runs.
        peers: Who speaks for other sites' clients, by client: the name in their certificate, or its fingerprint,
            ``sha256:`` and 64 hexadecimal digits, for which no authority is needed. ``None``, and any client that is
            not in it, is a certificate of the client's own name.
        allow_rejoin: Clients whose identity key may be another one than before, as their site has lost its journal.
        policy: File of what this site takes part in, see `fedlit.remote.Policy`; ``None`` is everything. It is checked
            before the server is called.

    Raises:
        PolicyError: If the policy cannot be read.
        ValueError: If a number is not positive, or a file is not what it should be.
        TypeError: If a name is no text.
    """

    def __init__(
        self,
        server: str,
        *,
        certificate: str,
        key: str,
        ca: str,
        clients: list[str] | None = None,
        wait_for: float = 600.0,
        patience: float = 20.0,
        journal: str | None = None,
        peers: dict[str, str] | None = None,
        allow_rejoin: list[str] | None = None,
        policy: str | None = None,
    ) -> None:
        self.journal, self.peers = journal, dict(peers or {})
        check_list("allow_rejoin", allow_rejoin)
        self.allow_rejoin = allow_rejoin or []
        self.policy = None if policy is None else Policy.read(os.path.expanduser(policy))
        self.server = _checked_address("server", server)
        check_list("clients", clients)
        self.files = _checked_files(certificate, key, ca)
        self.voucher()
        self.clients = clients
        _check_times(wait_for=wait_for, patience=patience)
        self.wait_for, self.patience = wait_for, patience

    def open(self, facts: Mapping[str, Any]) -> SiteStar:
        """See `Seat`."""
        from fedlit.remote.grpc_carrier import GrpcCaller

        assert self.files is not None
        caller: Caller = GrpcCaller(self.server, *self.files)
        return CarriedSite(caller, self.clients, self.wait_for, self.patience).open(facts)


def _checked_address(argument: str, address: str) -> str:
    host, _, port = address.rpartition(":")
    valid = bool(host) and port.isdigit() and int(port) <= 65535
    check(valid, argument, "HOST:PORT, such as fed.example.org:8443", address)
    return address


def _checked_files(certificate: str, key: str, ca: str) -> tuple[Path, Path, Path]:
    from fedlit.remote.certificates import check_files

    files = [Path(os.path.expanduser(file)) for file in (certificate, key, ca)]
    check_files(*files)
    return files[0], files[1], files[2]


def _check_times(**times: float) -> None:
    for argument, seconds in times.items():
        check(0 < seconds < 1e9, argument, "positive seconds", seconds)  # waits of centuries overflow
