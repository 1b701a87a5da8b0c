"""A site's journal of what it has released, so that nothing is released twice in two ways.

A server that has a sum repeated over other clients, as after a crash that it feigns, learns the difference of the two,
which may be one client's vector (So et al., Securing secure aggregation: mitigating multi-round privacy leakage, AAAI
2023). So before a hidden vector leaves a site, an entry is written and synchronised; and again before the site confirms
who survived. When the same sum comes again, the same vector goes to the same clients again, or nothing does.

So it is with exchanges of two parties (`fedlit.privacy.affine`): how many numbers the holder of moments grants is
written before, and counts in later processes too. An exchange that is repeated in its step counts once, as its receiver
asks for the same numbers again: for others its own journal refuses it.

A site numbers its sums itself: by round, batch, stage, and how many its program asked for before on the channel. No
number of the server has a part in that. A vector is also looked up by its content, so that a sum does not pass for one
of another round.
"""

from __future__ import annotations

import json
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from torch import Tensor

from fedlit.federation.errors import JournalError
from fedlit.federation.records import Records
from fedlit.privacy.links import derive, digest

_CHUNK = 1 << 28  # the library takes less than 2^31 bytes at once
_COINCIDENCE = 32
"""Numbers of a vector below which it may well be equal to one of another round by chance."""

Sum = tuple[object, ...]
"""Position of a sum in the run, its channel, and how many sums it had there before."""

Grant = tuple[str, Sum, str, bytes, int]
"""Holder of moments, step, receiver, `key_of` the moments, and how many numbers about them the receiver may learn."""


class Journal(Records):
    """Releases of a site's clients, one line of JSON for each, in a file that only its owner reads.

    It also has a secret, from which the noise of differential privacy is derived: a message that is sent again has the
    same noise, so that nobody takes the mean of several. So are the identity keys of its clients, and those of other
    sites' clients are kept beside them: see `fedlit.federation.identities`.

    Args:
        path: Of the file, which is made if it is missing.
        run: What identifies the run, plain data by name, which no resume changes: another run's journal is refused.
            ``None`` does not look. A journal that has none of it takes this one.

    Raises:
        JournalError: If the file cannot be read, written or locked, is open in another process, is no journal, or is
            that of another run.
    """

    _NOUN = "journal"
    _TITLE = "journal of releases"
    _WAY_OUT = "restore the file, or start the run anew (--fresh=true at all sites) with another seed_everything"

    def __init__(self, path: str | Path, run: Mapping[str, Any] | None = None) -> None:
        self._entries: dict[tuple[object, ...], dict[str, Any]] = {}  # by client and sum
        self._peers: dict[str, bytes] = {}  # identity keys of clients of other sites
        self._contents: dict[tuple[str, str, str], list[Sum]] = {}  # by client, channel and hash
        self._position: tuple[object, ...] = ()
        self._counts: dict[str, int] = {}
        self._written: set[str] = set()  # clients with a new entry of the sum under way
        self._grants: set[Grant] = set()
        self._run: dict[str, Any] = {}
        super().__init__(path)
        if run is not None:
            run = json.loads(json.dumps(run))
            if not self._run:
                self._append({"run": run})
            for name in [name for name in run if self._run.get(name) != run[name]]:
                what = f"is of another run ({name} was {self._run.get(name)!r}, and is {run[name]!r})"
                problem = self._problem(what, "name another file, or restore what the run began with")
                problem.public = f"a site's {self._TITLE} is of another run, with another {name}"  # type: ignore[attr-defined]
                raise problem

    def next_sum(self, position: Sequence[object], channel: str) -> Sum:
        """Name the sum or exchange that begins: the program of a run asks for them in the same order each time."""
        if self._position != (*position,):
            self._position, self._counts = (*position,), {}
        self._written.clear()
        number = self._counts[channel] = self._counts.get(channel, -1) + 1
        return (*position, channel, number)

    def noise_key(self, *about: object) -> bytes:
        """Return 32 bytes for the noise of a message, the same whenever all of ``about``, and so the message, is."""
        return derive(self._secret, "noise", *about)

    def secret_of(self, *about: object) -> bytes:
        """Return 32 secret bytes of this site for one use, the same in every process."""
        return derive(self._secret, "secret", *about)

    def pinned(self) -> dict[str, bytes]:
        """Return the identity keys of clients of other sites, as they were last."""
        return dict(self._peers)

    def pin(self, client: str, key: bytes) -> None:
        """Write the identity key of a client of another site; raises as `release`."""
        self._append({"peer": client, "key": key.hex()})

    def release(
        self,
        client: str,
        step: Sum,
        vector: Tensor,
        among: Sequence[str],
        once: bool = False,
        content: Sequence[Tensor] | None = None,
    ) -> None:
        """Write that a client's vector leaves it next.

        Args:
            client: Who sends.
            step: From `next_sum`.
            vector: Shape (n,), before it is hidden.
            among: Whose vectors it is added to.
            once: Whether a vector is refused that was released in another sum, over other clients.
            content: What the vector is made of by a weight, which depends on the others: by this it is known again.

        Raises:
            JournalError: If another vector, or the same one for other clients, was released in this step; or if the
                journal cannot be written.
        """
        hashed = self._hash(vector)
        parts = [vector] if content is None else [each for each in content if each.numel()]
        ends = {float(end) for each in parts for end in torch.aminmax(each.detach())} if once else ()
        # numbers that are few, or all the same, may well be those of another round by chance
        once = sum(each.numel() for each in parts) >= _COINCIDENCE and len(ends) > 1
        entry = {"client": client, "sum": [*step], "among": [*among], "hash": hashed, "once": once}
        if content is not None:
            entry["content"] = self._hash(*content)
        before = self._entries.get((client, *step))
        if before is not None:
            if before["among"] != entry["among"]:
                raise self._refusal(client, step, f"among {before['among']}, and now it would be among {[*among]}")
            if before["hash"] != hashed:
                raise self._refusal(client, step, "another vector")
            return
        for earlier in self._alike(client, step, _content(entry)) if once else ():
            if earlier["among"] != entry["among"]:
                what = f"the same vector in another round, among {earlier['among']}, now {[*among]}"
                raise self._refusal(client, step, what)
        self._append(entry)
        self._written.add(client)

    def survivors(self, client: str, step: Sum, survivors: Sequence[str]) -> None:
        """Write whose vectors a total has, before a client helps to unmask it; raises as `release`."""
        entry = self._entries.get((client, *step), {})
        before = entry.get("survivors")
        if before is None:
            for earlier in self._alike(client, step, _content(entry)) if entry.get("once") else ():
                if earlier.get("survivors", [*survivors]) != [*survivors]:
                    what = f"the same vector in a total of {earlier['survivors']}, now in one of {[*survivors]}"
                    raise self._refusal(client, step, what)
            self._append({"client": client, "sum": [*step], "survivors": [*survivors]})
        elif before != [*survivors]:
            raise self._refusal(client, step, f"a total of {before}, and now it would be one of {[*survivors]}")

    def _alike(self, client: str, step: Sum, hashed: str) -> list[dict[str, Any]]:
        """Entries of other sums in which a client released the same vector over the channel."""
        steps = self._contents.get((client, _channel(step), hashed), [])
        return [self._entries[client, *each] for each in steps if each != step]

    def withdraw(self, step: Sum) -> None:
        """Write that nothing has left in the sum under way after all; what left in an earlier process stays."""
        for client in sorted(self._written):
            self._append({"client": client, "sum": [*step], "withdrawn": True})
        self._written.clear()

    # ---------------------------------------------------------------- exchanges of two parties

    def granted(self, client: str, channel: str) -> Counter[bytes]:
        """Return how many numbers a holder of moments has granted to all receivers, by `key_of` the moments."""
        outputs: Counter[bytes] = Counter()
        for holder, step, _, moments, number in self._grants:
            if (holder, _channel(step)) == (client, channel):
                outputs[moments] += number
        return outputs

    def has_granted(self, grant: Grant) -> bool:
        """Return whether `grant` has written this already."""
        return grant in self._grants

    def grant(self, grant: Grant) -> None:
        """Write that a client lets a receiver learn so many numbers about moments; raises as `release`."""
        client, step, receiver, moments, outputs = grant
        self._append(
            {"client": client, "sum": [*step], "receiver": receiver, "moments": moments.hex(), "outputs": outputs}
        )

    def ask(self, client: str, step: Sum, holder: str, asked: Tensor) -> None:
        """Write which linear functions, of shape (n,), a client asks a holder of moments for.

        Raises:
            JournalError: If it has asked for others in this step, so that the holder would count two for one; or if
                the journal cannot be written.
        """
        *position, channel, number = step
        self.release(client, (*position, f"{channel}, of {holder}", number), asked, [holder])

    # ---------------------------------------------------------------- the file

    def _head(self) -> dict[str, Any]:
        return {"secret": secrets.token_hex(32)}

    def _open(self, head: Mapping[str, Any]) -> None:
        self._secret = bytes.fromhex(head["secret"])

    def _take(self, entry: Mapping[str, Any]) -> None:
        if "run" in entry:
            self._run = dict(entry["run"])
            return
        if "outputs" in entry:
            moments, outputs = bytes.fromhex(entry["moments"]), int(entry["outputs"])
            self._grants.add((str(entry["client"]), tuple(entry["sum"]), str(entry["receiver"]), moments, outputs))
            return
        if "peer" in entry:
            self._peers[str(entry["peer"])] = bytes.fromhex(entry["key"])
            return
        client, step = str(entry["client"]), tuple(entry["sum"])
        if "withdrawn" in entry:
            gone = self._entries.pop((client, *step))
            self._contents[client, _channel(step), _content(gone)].remove(step)
            return
        whole = self._entries.setdefault((client, *step), {})
        whole |= {key: entry[key] for key in ("among", "hash", "content", "once", "survivors") if key in entry}
        steps = self._contents.setdefault((client, _channel(step), _content(whole)), [])
        if step not in steps:
            steps.append(step)

    def _hash(self, *vectors: Tensor) -> str:
        # GMAC under a key that stays here, which is many times as fast as SHA-256 where processors lack it
        mac = Cipher(algorithms.AES256(self.secret_of("hash")), modes.GCM(bytes(12))).encryptor()
        for vector in vectors:
            mac.authenticate_additional_data(digest(str(vector.dtype), vector.numel()))
            content = vector.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            for start in range(0, len(content), _CHUNK):
                mac.authenticate_additional_data(content[start : start + _CHUNK].data)
        mac.finalize()
        return mac.tag.hex()

    def _refusal(self, client: str, step: Sum, what: str) -> JournalError:
        return JournalError(
            f"client {client!r} has released in this step ({_words(step)}) {what}. Sums of one step over different "
            "clients reveal what one of them sent, so nothing is sent. Wait until the same clients take part again, or "
            "start the run anew, with --fresh=true at all sites and another seed_everything"
        )


def _content(entry: Mapping[str, Any]) -> str:
    """Hash by which a message is known again, whatever its weight."""
    return str(entry.get("content", entry["hash"]))


def _channel(step: Sum) -> str:
    return str(step[-2])


def _words(step: Sum) -> str:
    *position, channel, number = step
    return f"channel {channel!r}, at {'/'.join(map(str, position))}, sum {number}"
