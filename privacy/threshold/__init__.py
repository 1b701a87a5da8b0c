"""Paillier sums of which no party can open anything: the decryption exponent is in shares, of which t restore it.

The first client of the roster makes the modulus, cuts the decryption exponent into shares for all clients, sends each
its share through the server, encrypted for it alone, and forgets the rest. Whoever works with t - 1 clients then has
t - 1 shares, whose distribution does not depend on the exponent, up to 2^-128. Dealing has to be honest: a dealer that
keeps the key opens every vector by itself, as each client is sent all of them to add them up. So do t clients together,
without the server. The dealer is ``dealer``, or the first client that is not disconnected, whom a server that lies
chooses. Keys that nobody ever has, not even while they are made (Boneh and Franklin, 2001, for RSA moduli), need a
protocol of many rounds for each candidate prime, and are not here.

    step         client sends                                   server relays
    identities   long-term key                                  everybody's, which clients pin
    keys         the dealer: modulus, and encrypted for each    both
                 client its share of the exponent
    terms        the terms of the sum (`fedlit.privacy.terms`)  those of each, which clients compare
    protect      ciphertexts, a proof that it knows what they
                 hold, and a tag for each other client

    step         server asks                                    client answers
    confirm      who sent what? (hashes)                        a tag on that list for each other survivor
    decrypt      the tags made for each; all other vectors      its partial decryption of their sum

A server could ask to have a single vector decrypted, and a client cannot see what a ciphertext holds. So each client
adds up the ciphertexts itself, which costs it the download of all of them, and answers once in a round, for a sum that

- has its own vector, and those of q clients of the round or more; q is more than half of them, and at least t;
- is of vectors that their senders have tagged for this round and key, and who received the same terms;
- is of vectors whose senders know what is in them. Without that proof, a client that works with the server could send
  the ciphertexts of another, multiplied by a constant: the total would then hold that vector once more, where it can be
  told from the sum;
- is the one that q clients confirm. Of two sums in one round, the difference would be single vectors; two lists need 2q
  that confirm, and an honest client confirms one.

So a server that does as it likes, together with c clients of whom none has dealt, opens one sum in a round, of q
vectors or more, as long as c < t, c < 2q - n and c <= q - 2 (`ThresholdPaillier.colluders_borne`). As under
`fedlit.privacy.masking`, it may choose to leave out vectors that have arrived, down to q. Security is that of
Paillier's cryptosystem, with the hash of the proof taken for random (Fiat and Shamir, 1986); what is here is an
argument and not a machine-checked proof.

A client may send a wrong partial decryption. The total is then refused: by its form, unless the client adds an amount
on purpose, which is found out if more than t clients answer, as then two sets of them give different totals.
"""

from fedlit.privacy.threshold.backend import ThresholdPaillier
from fedlit.privacy.threshold.client import ThresholdClient
from fedlit.privacy.threshold.server import ThresholdServer

__all__ = ["ThresholdClient", "ThresholdPaillier", "ThresholdServer"]
