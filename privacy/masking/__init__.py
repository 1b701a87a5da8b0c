"""Pairwise masks that cancel in the sum (Bonawitz et al., 2017), along a sparse graph of pairs (Bell et al., 2020).

A client adds to its vector, in the ring of integers modulo 2^32 or 2^64, one mask for each neighbour, which that
neighbour subtracts, and one mask of its own. Both types come from short secrets, of which every neighbour holds a
share. Once the server has the vectors, survivors send it shares of the own mask of each survivor and of the round key
of each client that dropped out, never both of one client, and it removes what is left in the sum.

    step         client sends                                   server relays
    identities   long-term key                                  everybody's, which clients pin
    keys         round key, and the neighbours it has drawn     round keys and draws of those who sent one
    shares       for each drawn neighbour, encrypted: shares    what was encrypted for each
                 of its seed and of its round key
    protect      masked vector

    step         server asks                                    client answers
    confirm      who survived?                                  a tag for each other survivor
    unmask       the tags made for each                         shares, by who survived

Round keys are authentic because the shares are encrypted with identity keys and bound to the digest of the round, which
covers all keys and draws: they open only between clients that received the same. In a sparse graph, neighbours that
hold no share get such a message too.

Where a total cannot do without any client (by default of two or three; with threshold=1.0, of any number), nobody
shares a secret, and nothing is asked after the vectors: each client masks in pairs alone, and the masks of all cancel.
With its round key it sends each other client the terms of the sum, encrypted with identity keys and bound to that round
key, which so proves to be its own. What is left to a server that lies is to spoil the total.

Where there are shares, a server may lie nevertheless, and report to clients differently who shared secrets or survived.
So each client confirms to all others the one view that it received, and sends shares only once enough confirm the same:
q of the n clients of the round, itself included, where q is more than half and at least the threshold, and a threshold
of those who hold shares of any one client. Two views need 2q clients that confirm, and an honest one confirms one:
without 2q - n that confirm both, clients act on one view at most. By default q is above 2n/3, so that these would be
above n/3. Whoever received another view masked with somebody who sent a share of its seed, as both are more than half
of those who hold such shares. That one survived, so its round key stays secret, and what it masked stays masked: in the
complete graph, but for the sum of all survivors. Of these there are q or more, so with q - 2 that collude it is still a
sum of two others.

In a sparse graph, colluders that are few among all may be many among the holders of one client's shares, who then
release its seed although it received another list of those who shared secrets. So each masked vector comes with a tag
for each holder, on the list with which it was masked, and holders release shares of its seed only if that is theirs.

One lie stays unnoticed here: the server reports to everybody alike that a client dropped out whose vector has arrived.
It then learns the sum of the others, who are q or more, in place of the sum of all. In a sparse graph it could so cut
the survivors into groups, and learn the sum of each: `fedlit.privacy.masking.graph` has so many neighbours that this
fails but for a probability of 2^-40, whichever clients it reports. In a federation, clients compare the weight in a
mean with that of the clients that announced a vector, and refuse a mean in which it differs: see `Aggregation`.

Masks are bound to the terms of the sum (`fedlit.privacy.terms`), such as weights and earlier totals: clients that have
received different ones hold masks that do not cancel, and find that out when they open each other's shares (or terms).

Nothing here keeps a sum from being repeated over other clients, whose vectors a server then reads, or vouches for
identity keys when they are pinned: a federation has journals and certificates for that (`fedlit.federation.journal`,
`fedlit.federation.identities`).
"""

from fedlit.privacy.masking.backend import PairwiseMasking
from fedlit.privacy.masking.client import MaskingClient
from fedlit.privacy.masking.server import MaskingServer

__all__ = ["MaskingClient", "MaskingServer", "PairwiseMasking"]
