"""Federation: the roster on its processes, and the messages between clients."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from fedlit.checks import check, check_positive
from fedlit.federation.account import Against
from fedlit.federation.channel import Channel, Open, Pairwise, Summed
from fedlit.federation.choices import Channels, Reports
from fedlit.federation.client import Client, names_of
from fedlit.federation.exchange import Exchange, Payloads, Received, by_receiver
from fedlit.federation.identities import Identities, Voucher
from fedlit.federation.leaks import with_other_participation
from fedlit.federation.metrics import share_numbers
from fedlit.federation.participants import Participants
from fedlit.federation.participation import Participation
from fedlit.federation.release import Budget, Releases
from fedlit.federation.roster import Roster
from fedlit.federation.streams import global_seed
from fedlit.federation.sums.driver import Recipe, Sums
from fedlit.federation.transport import NOTHING, OneProcess, Transport
from fedlit.federation.two_party import TwoPartyExchange
from fedlit.privacy import GaussianMechanism, PrivacyWarning, SecureAggregation, Terms, TwoPartyAffine
from fedlit.privacy.packing import Payload

_Clients = Iterable[Client | str]


class Federation(Participants):
    """The clients of a federation, those hosted by this process, and the exchanges between them.

    Every process calls `exchange`, `mean` and `sum` in the same order with the payloads of the clients it hosts;
    world size 1 hosts everybody. What leaves a client is detached and copied here, once, and nowhere else.

    Args:
        clients: The roster, at least two.
        target: Name of the target.
        channels: What may be sent; ``None``, for use without a method, allows every name.
        learners: Clients that take local steps; ``None`` is all with labels.
        transport: Joins the processes; default one process.
        placement: Client names per rank; ``None`` deals out contiguous shares.
        participation: Who is present in a round.
        heard: Per channel, which present clients participate. Subsets are nested in the order of the mapping: the
            second channel's clients are drawn from the first's, and so on (FedRF-TCA, Table II).
        nested_heard: ``False`` draws each channel's subset among all who are present (FedRF-TCA, Table XV).
        privacy: Backend for sums, one for all channels or one per channel; ``None`` is `Plain`. If channels are named,
            each one that is summed over has to be.
        two_party: Protocol of `affine`, likewise for pairwise channels; ``None`` is `PlainAffine`.
        differential_privacy: Mechanism that each client applies to what it sends, one for all channels or one per
            channel.
        reports: How clients report numbers for logging (`report`): ``"exact"``, ``"off"``, or through a mechanism,
            which is accounted for. ``None`` is ``"exact"``, and beside ``differential_privacy`` ``"off"``.
        encrypted: Whether messages from client to client are encrypted between the two (`Seals`); ``None`` is where a
            backend or protocol protects others.
        epsilon_budget: Greatest epsilon that a local client may spend, against those who see what is sent to the server
            (``epsilon("sum")``), at the largest ``delta`` of the mechanisms; a release above it is refused. ``None`` is
            no limit.
        account: Where that is written before each release, to count in all runs that name the same: a folder, in which
            each local client has a file of its name, or the file of each; see `Account`. ``None`` counts this run.
        seed: Of participation and random streams; ``None`` takes the one given to ``seed_everything``.

    Attributes:
        channels: By name, each with the backend, protocol and mechanism that it has in this run.
        batch_idx: Batch within the round.
        ledger: What crossed so far.
        accounts: Of differential privacy: see `Releases`.
        hosts_server: Whether the server lives in this process.
        seconds: Time spent so far by phase: ``"exchange"`` and ``"protection"``; others may add theirs.

    Raises:
        RosterError: If roster, target, placement or participation do not fit together.
        ChannelError: If a choice names a channel that there is not, or one that cannot take it; see `Channels`.
        TypeError: If ``privacy``, ``two_party`` or ``differential_privacy`` hold something else.
    """

    def __init__(
        self,
        clients: _Clients,
        target: str,
        *,
        channels: Iterable[Channel] | None = None,
        learners: _Clients | None = None,
        transport: Transport | None = None,
        placement: Sequence[Sequence[str]] | None = None,
        participation: Participation | None = None,
        heard: Mapping[str, Participation] | None = None,
        nested_heard: bool = True,
        privacy: SecureAggregation | Mapping[str, SecureAggregation] | None = None,
        two_party: TwoPartyAffine | Mapping[str, TwoPartyAffine] | None = None,
        differential_privacy: GaussianMechanism | Mapping[str, GaussianMechanism] | None = None,
        reports: Reports | None = None,
        encrypted: bool | None = None,
        epsilon_budget: float | None = None,
        account: str | Mapping[str, str] | None = None,
        seed: int | None = None,
    ) -> None:
        transport = OneProcess() if transport is None else transport
        seed = global_seed() if seed is None else seed
        roster = Roster(clients, target, transport, placement, participation, heard, nested_heard, seed)
        learning = None if learners is None else names_of(learners)
        choices = {"privacy": privacy, "two_party": two_party, "differential_privacy": differential_privacy}
        resolved = Channels(channels, roster.clients, learning, roster.participating, encrypted, reports, **choices)
        super().__init__(transport, roster, resolved)
        self._releases = Releases(self._messenger, resolved.mechanisms, self._budget(epsilon_budget, account))
        self.ledger, self.accounts = self._messenger.ledger, self._releases.accounts
        self._exchange = Exchange(self._messenger, self._releases, self.channels.encrypted)
        self._sums = Sums(self._messenger, self.channels, self._releases, self._timed)
        self._identities: Identities | None = None
        self._two_party = TwoPartyExchange(self._messenger, self._exchange, self._releases, self._timed)

    def _budget(self, epsilon: float | None, account: str | Mapping[str, str] | None) -> Budget:
        if epsilon is not None:
            check_positive("epsilon_budget", epsilon)
            rule, way_out = "left out without differential_privacy", "without noise nothing is private"
            check(bool(self.channels.mechanisms), "epsilon_budget", rule, epsilon, way_out)
        if isinstance(account, Mapping):
            missing = [client.name for client in self.local_clients if client.name not in account]
            check(not missing, "account", "a folder, or a file for each local client", account, f"add {missing}")
        return Budget(math.inf if epsilon is None else epsilon, account)

    # ---------------------------------------------------------------- who is lost, and comes back

    def roll_call(self, adapts: bool = False) -> frozenset[int]:
        """Find out which processes are there before a round; clients of lost ones are absent in it.

        Returns ranks that come back with this round: see `come_back`. ``adapts`` is whether the round is for the
        target, so that there is none without it. A `FederationError` if those without whom it would change nothing do
        not come back in time.
        """
        transport, lacks = self.transport, partial(self._lacks, adapts=adapts)
        back = transport.roll_call(lacks)
        while transport.lost and not transport.over and lacks(transport.lost):  # who were lost in the roll call itself
            back = back - transport.lost | transport.roll_call(lacks)
        self._send_away()
        return back

    def last_call(self) -> frozenset[int]:
        """Find out which processes are there after the last round, and wait a while for others to come back.

        Returns ranks that come back: see `come_back`.
        """
        transport = self.transport
        if not transport.losable:
            return frozenset()
        self.settle()
        transport.meet(NOTHING, "the end of the last round")  # who was lost since the last exchange
        back = transport.last_call() if transport.lost else frozenset()
        self._send_away()
        return back

    def compare_totals(self) -> None:
        """Compare the newest totals that processes have received, in pairs, where a backend hides.

        Raises:
            TermsError: On every process, if the server has sent two of them different ones.
        """
        if self._identities is not None:
            totals = self._sums.totals
            self._identities.compare(Terms({}, totals.received.listed(), totals.remembered))

    def _send_away(self) -> None:
        self.roster.send_away(self._messenger.lost)

    def public_state(self) -> dict[str, Any]:
        """Return what the server sends to processes that come back; nothing of it is a client's."""
        state = self.state_dict()
        return {**state, **self._sums.totals.public_state(), "seconds": dict(self.seconds)}

    def come_back(self, state: Mapping[str, Any]) -> None:
        """Go on where the server is, with its `public_state`, and what local clients have."""
        self.roster.go_on(state["roster"], state["seed"])
        self.round_idx, self.batch_idx = state["round_idx"], state["batch_idx"]
        self._messenger.call = state["calls"]
        self.ledger.load_state_dict(state["ledger"])
        self._releases.load_state_dict(state["accounts"])
        self._sums.totals.come_back(state)

    def welcome(self, have: Mapping[str, Mapping[str, int]]) -> None:
        """Go on with clients that have come back, which ``have`` these totals, and with new keys."""
        if self._identities is not None:
            self._identities.meet()
        self._sums.welcome()
        self._sums.totals.welcome(have)
        self._sums.totals.renew_keys()
        self._exchange.forget()
        self._two_party.forget()

    def identify(self, voucher: Voucher | None = None, allow_rejoin: Iterable[str] = ()) -> None:
        """State the identity keys of local clients to all, and use them from here on; every process calls it.

        Arguments and errors as of `fedlit.federation.identities.Identities`.
        """
        self._identities = Identities(self._messenger, voucher, allow_rejoin)
        self._identities.meet()
        self._exchange.identify(self._identities)
        self._sums.identify(self._identities)

    def have(self) -> dict[str, dict[str, int]]:
        """Which total of each channel local clients have, by client; 0 is none."""
        return self._sums.totals.versions()

    # ---------------------------------------------------------------- messages

    def exchange(
        self,
        channel: str,
        payloads: Payloads,
        to: _Clients | Mapping[str, _Clients] | None = None,
        around: Mapping[str, Payload] | None = None,
        absent_too: bool = False,
    ) -> Received:
        """Send messages from client to client.

        Args:
            channel: An `Open` one.
            payloads: ``{sender: {name: tensor}}`` of local clients, or ``{sender: {receiver: {name: tensor}}}`` for
                separate messages; shapes may differ between clients.
            to: Receivers of every message, or receivers by sender; ``None`` is all that the channel is declared for.
                Senders and receivers that are not present on the channel are left out.
            around: See `mean`.
            absent_too: See `mean`.

        Returns:
            ``{receiver: {sender: {name: tensor}}}`` for local receivers, which share the tensors: copy before writing.

        Raises:
            OutOfStepError: On every process, if another one is in a different exchange.
            DivergedError: On every process, if a payload has NaN or infinite entries.
            ChannelError: If the channel is not declared, or for others.
            RosterError: If a sender is unknown or not hosted here, or a receiver is unknown.
            PayloadError: If an entry has a type that cannot be sent.
        """
        with self._timed("exchange"):
            mine, receivers = self.roster.local(payloads), self.roster.by_sender("to", to)
            named = set().union(*receivers.values()) if to is not None else set()
            each = [name for name, payload in mine.items() if by_receiver(name, payload)]
            named = named.union(*(self.roster.names(f"payloads[{name!r}]", mine[name]) for name in each))
            resolved = self.channels.over(channel, Open, mine, named)
            if to is None:
                receivers = self.roster.by_sender("to", resolved.everyone("to"))
            return self._exchange.run(resolved, mine, around, self._participants(channel, absent_too), receivers)

    def affine(
        self,
        channel: str,
        moments: Mapping[str, Tensor],
        maps: Mapping[str, Mapping[str, tuple[Tensor, Tensor]]],
        pairs: Sequence[tuple[Client, Client]],
        num_outputs: int | Mapping[str, int],
    ) -> dict[str, dict[str, Tensor]]:
        """For pairs of clients: the second receives y = A m + b of the first's moments m and its own A and b.

        Neither learns the other's inputs, as far as the channel's protocol hides them. A mechanism of differential
        privacy noises the moments.

        Args:
            channel: A `Pairwise` one.
            moments: ``{client: m}`` of local clients that are first in a pair, each of shape (M,).
            maps: ``{client: {first: (A, b)}}`` of local clients that are second in a pair, of shapes (k, M) and (k,).
            pairs: Of (who holds m, who learns y), the same on every process. Pairs with absent clients are left out.
            num_outputs: Largest k that holders of moments accept, of everybody or by who is second.

        Returns:
            ``{second: {first: y}}`` for local clients that are second in a pair, each y of shape (k,), float64.

        Raises:
            PrivacyError: On every process, if one party cannot encode its numbers or refuses what it received.
            FederationError: Or `RosterError`, as `exchange`.
        """
        mine = self.roster.local(moments)
        holders, learners = (self.roster.names("pairs", [pair[side] for pair in pairs]) for side in (0, 1))
        resolved = self.channels.over(channel, Pairwise, holders, learners)
        participants = {*self._participants(channel, False)}
        active = [(first.name, second.name) for first, second in pairs if {first.name, second.name} <= participants]
        return self._two_party.run(resolved, mine, maps, active, num_outputs)

    def mean(
        self,
        channel: str,
        payloads: Mapping[str, Payload],
        among: _Clients | None = None,
        to: _Clients | None = None,
        weights: Mapping[str, float] | None = None,
        around: Mapping[str, Payload] | None = None,
        absent_too: bool = False,
    ) -> dict[str, dict[str, Tensor]]:
        """Weighted mean of payloads, through the channel's privacy backend: only the mean arrives.

        Args:
            channel: A `Summed` one.
            payloads: ``{client: {name: tensor}}`` of local clients, equal names and shapes for all. Integer entries
                are averaged and rounded.
            among: Senders, if they are present; ``None`` is all that the channel is declared for.
            to: Receivers, likewise.
            weights: By client, positive; ``None`` is uniform. They travel inside the sum.
            around: ``{client: {name: tensor}}`` of local clients: public values that payloads are close to. A
                mechanism of differential privacy clips the difference to them; otherwise of no effect.
            absent_too: Whether clients that are not present send and receive all the same, as at the end of a run.

        Returns:
            ``{receiver: {name: tensor}}`` for local receivers, which share the tensors: copy before writing. Empty if
            nobody was present to send, or too few (see `Summed`).

        Raises:
            PayloadError: On every process, if payloads differ in names, types or shapes, or the weight of a sender is
                missing or not positive.
            FederationError: On every process, if fewer clients send than the backend needs to hide them; and what
                `exchange` raises.
        """
        shares = dict.fromkeys(self.roster.rank_of, 1.0) if weights is None else dict(weights)
        return self._aggregate(channel, payloads, among, to, shares, around, absent_too)

    def sum(
        self,
        channel: str,
        payloads: Mapping[str, Payload],
        among: _Clients | None = None,
        to: _Clients | None = None,
        absent_too: bool = False,
    ) -> dict[str, dict[str, Tensor]]:
        """Sum of payloads, through the channel's privacy backend; otherwise as `mean`."""
        return self._aggregate(channel, payloads, among, to, None, None, absent_too)

    def senders(self, channel: str, among: _Clients | None = None, absent_too: bool = False) -> list[str]:
        """Clients over whom a mean or sum would be taken in this round, as in `mean`; none if too few to hide."""
        resolved = self.channels[channel]
        named = resolved.everyone("among") if among is None else self.roster.names("among", among)
        senders = [name for name in self._participants(channel, absent_too) if name in named]
        return senders if len(senders) >= resolved.backend.min_clients else []

    def bind(self, channel: str, to: str, spare: int) -> None:
        """Let the next mean or sum of ``channel`` rest on the last one of ``to``, which local clients have received.

        It is refused on every process, by a `FederationError` or `PrivacyError`, if more than ``spare`` of the clients
        in the last one lack in it: nothing is sent then, or no client lets its total be read.
        """
        self._sums.totals.bind(channel, to, spare)

    def catch_up(self, channel: str, absent_too: bool = False) -> dict[str, dict[str, Tensor]]:
        """Send the last mean or sum of ``channel`` to present clients that were absent when it was sent.

        Returns:
            ``{receiver: {name: tensor}}`` for local ones of them.
        """
        with self._timed("exchange"):
            return self._sums.totals.catch_up(channel, self._participants(channel, absent_too))

    def report(
        self, values: Mapping[str, Mapping[str, float]], names: Sequence[str], channel: str = "metrics"
    ) -> dict[str, dict[str, float]]:
        """Send a few numbers of each client to every process, for logging and model selection.

        Args:
            values: ``{client: {name: number}}`` of local clients; clients and names may be left out.
            names: The names there may be, the same on every process.
            channel: An `Open` one.

        Returns:
            ``{client: {name: number}}`` of all clients that reported, in roster order; empty where ``reports`` are off.
        """
        with self._timed("exchange"):
            resolved, reports = self.channels.over(channel, Open), self.channels.reports
            mine = self.roster.local(values)
            if reports == "off":
                return {}
            # Between two rounds, as in validation, a report is about the round that has ended.
            about = self.round_idx if self.batch_idx else max(0, self.round_idx - 1)
            resolved = replace(resolved, mechanism=None if reports == "exact" else reports)
            present = names_of(self.roster.present(about))
            return share_numbers(self._messenger, self._releases, resolved, mine, names, about, present)

    def epsilon(self, against: Against = "message") -> dict[str, float]:
        """Privacy loss in this run of each client that has released anything, at the largest ``delta`` of mechanisms.

        ``against`` whom: those who see single messages, or those who see sums only (`accounts`).
        """
        return self._releases.epsilon(against)

    def _aggregate(
        self,
        channel: str,
        payloads: Mapping[str, Payload],
        among: _Clients | None,
        to: _Clients | None,
        weights: Mapping[str, float] | None,
        around: Mapping[str, Payload] | None,
        absent_too: bool,
    ) -> dict[str, dict[str, Tensor]]:
        names = self.roster.names
        with self._timed("exchange", less="protection"):
            mine = self.roster.local(payloads)
            senders, receivers = names("among", among or ()), names("to", to or ())
            resolved = self.channels.over(channel, Summed, senders, receivers)
            senders = resolved.everyone("among") if among is None else senders
            receivers = resolved.everyone("to") if to is None else receivers
            participants = self._participants(channel, absent_too)
            absent = frozenset(receivers.difference(participants))
            sending = [name for name in participants if name in senders]
            receiving = [name for name in participants if name in receivers]
            return self._sums.run(Recipe(channel, sending, receiving, absent, weights), mine, around)

    # ---------------------------------------------------------------- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return round counter, ledger, participation and the last totals; it loads with ``weights_only=True``.

        Random streams and participation are pure functions of seed and round. Values are equal on all processes, but
        for ``"server"``, from where it lives, and ``"clients"``, by local client.
        """
        totals = self._sums.totals.state_dict()
        return {
            "roster": self.roster.state(),
            "seed": self.seed,
            "participation": self.roster.draws(self.round_idx),
            "round_idx": self.round_idx,
            "batch_idx": self.batch_idx,
            "calls": self._messenger.call,
            "ledger": self.ledger.state_dict(),
            "accounts": self._releases.state_dict(),
            **totals,
            "server": {"seconds": dict(self.seconds), "totals": totals["server"]},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` left off; a `RosterError` if the state belongs to another roster."""
        self.roster.go_on(state["roster"], state["seed"])
        self.round_idx, self.batch_idx = state["round_idx"], state["batch_idx"]
        draws = self.roster.draws(self.round_idx)
        if self.hosts_server and state.get("participation", draws) != draws:
            for sentence in with_other_participation(self.channels):
                warnings.warn(sentence, PrivacyWarning, stacklevel=2)
        self._messenger.call = max(self._messenger.call, state["calls"])  # never repeats: see `RoundId`
        self.ledger.load_state_dict(state["ledger"])
        self.seconds = dict(state["server"]["seconds"])
        self._releases.load_state_dict(state["accounts"])
        self._sums.totals.load_state_dict({**state, "server": state["server"]["totals"]})

    def __repr__(self) -> str:
        names = ", ".join(client.name for client in self.sources)
        return f"Federation(sources=[{names}], target={self.target.name!r}, round_idx={self.round_idx})"
