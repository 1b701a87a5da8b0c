"""What one client that works with the server gives away, which nothing prevents; and that checkpoints hold no key."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch

import backends
from fedlit.federation import Federation
from fedlit.privacy import FixedPoint, RoundId, Tags
from fedlit.privacy.driver import Parties
from fedlit.privacy.shared_key import SharedKeyAggregation, _unframe

NAMES = ["a", "b", "c"]


@pytest.mark.parametrize("name", ["paillier", "bfv", "ckks"])
def test_one_client_and_the_server_read_every_vector_under_a_shared_key(name: str) -> None:
    vector = torch.tensor([1.5, -2.25, 0.125])
    parties: Any = Parties(backends.backend(name), NAMES)
    parties.enrol(NAMES)
    parties.open_round(RoundId(0, "w", 0), NAMES)
    message = parties.clients["a"].protect(vector)
    _, length, _, body = _unframe(parties.server._keys[1], "vector of a", message)
    read = parties.clients["b"]._keys[0].decrypt(body, length, 1)
    torch.testing.assert_close(read, vector.double(), atol=1e-6, rtol=0)


def test_one_client_and_the_server_make_tags_for_any_total() -> None:
    """So that a false total is found out by the masks' terms and comparisons alone."""
    codec = FixedPoint()
    tags = Tags(bytes(32), b"a sum", codec, 3)  # its key is the same at all clients
    false = [torch.full((5,), float(number)) for number in (7, 0, 0)]
    sent = [codec.encode(tags.append(vector, name)) for vector, name in zip(false, NAMES, strict=True)]
    total = codec.decode(torch.stack(sent).sum(dim=0))
    assert torch.equal(tags.check(total, NAMES), torch.full((5,), 7.0).double())


@pytest.mark.parametrize("name", ["masking", "paillier", "threshold", "bfv"])
def test_a_checkpoint_has_no_key(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[bytes] = []
    backend = backends.backend(name)
    if isinstance(backend, SharedKeyAggregation):
        generate = type(backend).generate_keys

        def noted(self: Any) -> tuple[bytes, bytes]:
            private, public = generate(self)
            made.append(private)
            return private, public

        monkeypatch.setattr(type(backend), "generate_keys", noted)
    federation = Federation(["a", "b", "c"], "c", privacy=backend, encrypted=True, seed=0)
    federation.identify()
    federation.sum("weights", {each: {"w": torch.ones(3)} for each in NAMES})
    federation.exchange("models", {"a": {"w": torch.ones(3)}})
    assert federation._identities is not None
    made += [keys.private_bytes() for keys in federation._identities.keys.values()]
    file = io.BytesIO()
    torch.save(federation.state_dict(), file)
    assert len(made) >= 3
    assert not any(key[:32] in file.getvalue() for key in made)
