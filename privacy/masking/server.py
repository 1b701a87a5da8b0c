"""The server of masked sums: relays keys and encrypted shares, adds masked vectors, removes the masks of the sum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, final

import torch
from numpy.typing import NDArray
from torch import Tensor

from fedlit.checks import check
from fedlit.privacy import shamir
from fedlit.privacy.base import AggregationServer, RoundId
from fedlit.privacy.errors import AuthenticationError, DecodeError, QuorumError, ReplayError
from fedlit.privacy.links import (
    KEY_BYTES,
    TAG_BYTES,
    Identity,
    KeyPair,
    check_members,
    field_of,
    pack_fields,
    round_digest,
    unpack_fields,
)
from fedlit.privacy.masking.graph import draw_bytes
from fedlit.privacy.masking.parties import part_due, read_bodies, relay_identities
from fedlit.privacy.masking.round import (
    DROPPED,
    SERVER,
    SURVIVED,
    MaskedRound,
    Masks,
    binding,
    check_tag,
    party,
    read_header,
    write,
)
from fedlit.privacy.packing import check_equally_long
from fedlit.privacy.terms import Terms, different, digest_in

if TYPE_CHECKING:
    from fedlit.privacy.masking.backend import PairwiseMasking


@dataclass
class _ServerRound:
    """State of the open round."""

    opening: bytes
    """Digest of the round and its clients: binds messages before round keys are known."""
    roster: tuple[str, ...]
    names: tuple[str, ...]
    """Of the terms."""
    recovers: bool
    """Whether the total can do without some clients, so that these share secrets."""
    due: str = "keys"
    """What comes next: ``keys``, ``shares``, ``vectors``, and ``answers`` once their total is taken."""
    agreed: MaskedRound = field(init=False)
    """Once the keys are relayed."""
    commitments: dict[str, bytes] = field(default_factory=dict)
    """Of the clients that shared secrets, in roster order."""
    survivors: tuple[str, ...] = ()
    lengths: dict[str, int] = field(default_factory=dict)
    """Of the vectors added so far."""
    attested: dict[str, dict[str, bytes]] = field(default_factory=dict)
    """Tags for the witnesses of each of these, which show with whom their client has masked."""
    sum: NDArray[Any] | None = None
    """Of these."""
    confirming: tuple[str, ...] = ()
    """Survivors who are asked for shares."""


@final
class MaskingServer(AggregationServer):
    """Relays keys and encrypted shares, adds masked vectors, and removes the masks of the sum."""

    on_grid = True

    def __init__(self, backend: PairwiseMasking) -> None:
        self._backend = backend
        self._identity = Identity(SERVER)
        self._roster: tuple[str, ...] = ()
        self._round: _ServerRound | None = None

    def enrol(self, roster: Sequence[str]) -> None:
        """Begin enrolment; keys pinned earlier stay pinned."""
        self._roster = tuple(roster)
        self._round = None

    def open_round(self, round_id: RoundId, clients: Sequence[str]) -> None:
        """Begin a sum over ``clients``; raises as `MaskingClient.open_round`."""
        self._round = None
        self._backend.check_round(len(clients))
        for name in clients:
            self._identity.public_of(party(name))
        names = () if round_id.terms is None else round_id.terms.names
        self._round = _ServerRound(
            round_digest(round_id, clients), tuple(clients), names, self._backend.recovers(len(clients))
        )

    def relay(self, step: str, sent: Mapping[str, bytes]) -> dict[str, bytes]:
        """Identity keys, round keys, or encrypted shares of the clients that sent something, to each of them.

        Raises a `QuorumError` if too few did; in enrolment, if anybody did not.
        """
        messages = {name: message for name, message in sent.items() if message}
        if step == "identities":
            return relay_identities(self._identity, messages, self._roster)
        return self._relay_keys(messages) if step == "keys" else self._relay_shares(messages)

    def aggregate(self, messages: Mapping[str, Tensor]) -> Tensor:
        """Masked total, which `conclude` changes in place; clients without a message have dropped out.

        Raises a `QuorumError` if too few survived, a `ReplayError` if a vector is of another round or comes twice, an
        `AuthenticationError` if it was not made by its sender, a `DecodeError` if it is none, or not of equal length.
        """
        opened = self._due("vectors")
        check_members(messages, opened.commitments, "send vectors")
        opened.agreed.check_left(messages, "survived")
        opened.lengths, opened.sum = {}, None
        for name, message in messages.items():
            self.add(name, message)
        return self.total()

    def add(self, name: str, message: Tensor) -> None:
        """Add one vector, of which nothing is kept; raises as `aggregate`."""
        opened = self._due("vectors")
        if name in opened.lengths:
            raise ReplayError(f"client {name!r} has sent its vector of this round already")
        check_members([name], opened.commitments, "send vectors")
        witnesses = opened.agreed.witnesses(name, opened.commitments)
        numbers, attested = self._numbers(name, message, opened.agreed, len(witnesses))
        check_equally_long({**opened.lengths, name: len(numbers)})
        opened.attested[name] = dict(zip(witnesses, attested, strict=True))
        opened.lengths[name] = len(numbers)
        if opened.sum is None:
            opened.sum = numbers.copy()
        else:
            opened.sum += numbers

    def total(self) -> Tensor:
        """Masked total of the vectors that were added; raises as `aggregate`."""
        opened = self._due("vectors")
        opened.agreed.check_left(opened.lengths, "survived")
        opened.survivors = tuple(name for name in opened.commitments if name in opened.lengths)
        opened.due = "answers"
        return self._signed(opened)

    def ask(self, step: str, answers: Mapping[str, bytes]) -> dict[str, bytes]:
        """Ask each survivor to confirm who survived; then each one who did for shares, with the others' tags for it."""
        return self._ask_to_confirm() if step == "confirm" else self._ask_for_shares(answers)

    def conclude(self, answers: Mapping[str, bytes]) -> Tensor:
        """Total without masks, shape (n,), signed integers of the ring's size; then the round is forgotten.

        Raises a `QuorumError` if too few survivors answered, an `AuthenticationError` if a share is wrong.
        """
        opened = self._due("answers")
        agreed = opened.agreed
        if not opened.recovers:  # the masks of all cancel
            self._round = None
            return self._signed(opened)
        shares = self._open_answers(answers, opened, agreed)
        added: list[bytes] = []
        subtracted: list[bytes] = []
        survivors = set(opened.survivors)
        # pairwise masks of survivors cancel; left are their own masks, and those shared with clients that dropped out
        for name in opened.survivors:
            added.append(agreed.self_mask_key(self._restore_seed(name, shares[name], opened, agreed)))
        for name in opened.commitments:
            if name in survivors:
                continue
            keys = self._restore_keys(name, shares[name], agreed)
            for peer in agreed.neighbours(name):
                if peer in survivors:
                    key = agreed.mask_key(keys, name, peer)
                    (added if agreed.adds(peer, name) else subtracted).append(key)
        masks = Masks(subtracted, added, agreed.dtype)  # taken off: added and subtracted change places
        self._round = None  # from here on the total changes: a second try would start from half of one
        total = self._signed(opened)
        numbers = total.numpy().view(agreed.dtype)
        for start in range(0, len(numbers), masks.chunk):
            masks.apply(numbers[start : start + masks.chunk])
        return total

    def reveal(self, total: Tensor, num_clients: int) -> Tensor:
        """Reals of the total that `conclude` returned."""
        return self._backend.codec.decode(total)

    def _relay_keys(self, messages: Mapping[str, bytes]) -> dict[str, bytes]:
        opened = self._due("keys")
        bodies = read_bodies(self._identity, "keys", messages, opened.roster, opened.opening)
        size = KEY_BYTES + draw_bytes(len(opened.roster), self._backend.degree(len(opened.roster)))
        announced = {name: body[:size] for name, body in bodies.items()}
        for name, body in announced.items():
            self._identity.check_strong(body[:KEY_BYTES], name)
        more = {name: body[size:] for name, body in bodies.items()}
        deals = {} if opened.recovers else {name: unpack_fields(text) for name, text in more.items()}
        # the server need not know the terms, which the clients' masks depend on: it takes those of all
        terms = more if opened.recovers else {name: field_of(deal, "terms") for name, deal in deals.items()}
        first = next(iter(terms), "")
        for name, theirs in terms.items():
            if theirs != terms[first]:
                raise different(terms[first], theirs, first, name, opened.names)
        common = digest_in(terms.get(first, Terms().to_bytes()))
        opened.agreed = self._backend.agree(opened.opening, opened.roster, self._identity, announced, common)
        if opened.recovers:
            opened.due = "shares"
            return self._write("keys", opened.opening, dict.fromkeys(announced, pack_fields(announced)))
        opened.commitments, opened.due = dict.fromkeys(announced, b""), "vectors"
        relayed = {
            name: pack_fields(
                {
                    owner: announced[owner] + (b"" if owner == name else field_of(deals[owner], party(name)))
                    for owner in announced
                }
            )
            for name in announced
        }
        return self._write("keys", opened.opening, relayed)

    def _relay_shares(self, messages: Mapping[str, bytes]) -> dict[str, bytes]:
        opened = self._due("shares")
        agreed = opened.agreed
        bodies = read_bodies(self._identity, "shares", messages, agreed.clients, agreed.digest)
        deals = {name: unpack_fields(body) for name, body in bodies.items()}
        agreed.check_left(deals, "shared secrets")
        commitments = {name: field_of(deal, "commitment", 32) for name, deal in deals.items()}
        relayed: dict[str, bytes] = {}
        for name in deals:
            neighbours = set(agreed.neighbours(name))
            relayed[name] = pack_fields(
                {owner: field_of(deal, party(name)) if owner in neighbours else b"" for owner, deal in deals.items()}
            )
        opened.commitments, opened.due = commitments, "vectors"
        return self._write("shares", agreed.digest, relayed)

    def _write(self, step: str, bound_to: bytes, bodies: Mapping[str, bytes]) -> dict[str, bytes]:
        return {name: write(self._identity, party(name), step, bound_to, body) for name, body in bodies.items()}

    def _numbers(
        self, name: str, message: Tensor, agreed: MaskedRound, num_tags: int
    ) -> tuple[NDArray[Any], list[bytes]]:
        """Masked numbers of one vector, in the message's memory, and the tags after them."""
        form = f"{message.dtype} of shape {tuple(message.shape)}"
        is_row = message.dtype == torch.uint8 and message.dim() == 1
        check(is_row, f"vector of client {name!r}", "a row of bytes", form, error=DecodeError, shown=form)
        data = message.cpu().contiguous().numpy()
        bound_to, numbers = read_header(data, agreed.dtype, num_tags * TAG_BYTES)
        if bound_to != agreed.digest:
            raise ReplayError(f"the vector of client {name!r} was made for another round, roster or keys")
        check_tag(data, self._identity.link(party(name)), binding("vector", party(name), agreed.digest))
        starts = range(len(data) - num_tags * TAG_BYTES, len(data), TAG_BYTES)
        return numbers, [data[start : start + TAG_BYTES].tobytes() for start in starts]

    def _ask_to_confirm(self) -> dict[str, bytes]:
        opened = self._due("answers")
        fates = {name: SURVIVED if name in opened.survivors else DROPPED for name in opened.commitments}
        questions: dict[str, bytes] = {}
        for name in opened.survivors:
            tags = {owner: opened.attested[owner].get(name, b"") for owner in opened.survivors}
            questions[name] = pack_fields({owner: fate + tags.get(owner, b"") for owner, fate in fates.items()})
        return self._write("survivors", opened.agreed.digest, questions)

    def _ask_for_shares(self, answers: Mapping[str, bytes]) -> dict[str, bytes]:
        opened = self._due("answers")
        agreed = opened.agreed
        bodies = read_bodies(self._identity, "tags", answers, opened.survivors, agreed.digest)
        agreed.check_left(bodies, "confirmed who survived")
        tags = {name: unpack_fields(body) for name, body in bodies.items()}
        questions = {
            name: pack_fields({peer: field_of(made, name, TAG_BYTES) for peer, made in tags.items() if peer != name})
            for name in tags
        }
        opened.confirming = tuple(questions)
        return self._write("tags", agreed.digest, questions)

    def _open_answers(
        self, answers: Mapping[str, bytes], opened: _ServerRound, agreed: MaskedRound
    ) -> dict[str, dict[int, bytes]]:
        """Shares of each client's secret by the points of their holders."""
        shares: dict[str, dict[int, bytes]] = {name: {} for name in opened.commitments}
        for name, answer in answers.items():
            check_members([name], opened.confirming, "answer without being asked")
            if not answer:
                continue
            about = binding("unmask", party(name), agreed.digest)
            held = unpack_fields(self._identity.link(party(name)).open(answer, about))
            # fewer in a sparse graph, if somebody has attested nothing to this client
            expected = [owner for owner in agreed.owners(name) if owner in shares]
            if not {*held} <= {*expected} or (agreed.complete and len(held) < len(expected)):
                raise DecodeError(f"client {name!r} must answer with shares of {expected}, got {list(held)}")
            for owner, share in held.items():
                shares[owner][agreed.point(name)] = share
        return shares

    def _restore_seed(self, name: str, shares: Mapping[int, bytes], opened: _ServerRound, agreed: MaskedRound) -> bytes:
        seed = shamir.combine(shares, agreed.threshold)
        if agreed.commitment(name, seed) != opened.commitments[name]:
            raise AuthenticationError(f"the shares of the seed of client {name!r} do not fit: one is wrong")
        return seed

    def _restore_keys(self, name: str, shares: Mapping[int, bytes], agreed: MaskedRound) -> KeyPair:
        keys = KeyPair(shamir.combine(shares, agreed.threshold))
        if keys.public != agreed.keys[name]:
            raise AuthenticationError(f"the shares of the key of client {name!r} do not fit: one is wrong")
        return keys

    def _signed(self, opened: _ServerRound) -> Tensor:
        """The total of a round, in its memory."""
        if opened.sum is None:
            raise QuorumError("there is no vector to add")
        return torch.from_numpy(opened.sum.view(opened.agreed.signed_dtype))

    def _due(self, what: str) -> _ServerRound:
        return part_due(self._round, what, f"{list(self._backend.opening)}, vectors and answers")
