"""KD3A (Feng, You, Chen, Zhang, Zhu, Wu, Wu and Chen, ICML 2021), Algorithm 1.

Differences from the paper, or from its code where the two differ:

- All clients train at once, the target on votes of the sources' models of the round before; in the paper it waits.
- ``exchange="votes"`` is new, and not the default.
- The soft vote is the paper's, the hard one (default) the code's; its loss, the cross-entropy, differs from the paper's
  divergence by a constant. Leave-one-out focus is the paper's, Shapley values the code's; both of hard votes (code).
- ``weighting="uniform"`` (default) and momentum are the code's shares, ``"samples"`` the paper's. Without a confident
  vote all sources count alike, and by the code's shares the target not at all.
- Means of BatchNorm's statistics keep the spread of the means (paper, equation 17); the code averages variances.
- The target's samples are scored in evaluation mode; the code's training mode takes the target's statistics. The code
  mixes samples even if set not to, and labels samples without votes; here neither.
- Classifiers start equal, and are never averaged after a warm-up (paper).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from fedlit.checks import check, check_at_least, check_one_of, refuse
from fedlit.federation import Channel, Client, Open, Summed
from fedlit.federation.nested import mapped
from fedlit.functional import confident_votes, consensus_focus, left_out_focus
from fedlit.functional.knowledge import (
    FocusRule,
    agreeing,
    agreement,
    draw_mixup,
    first_and_last_gate,
    soft_knowledge,
    standing_votes,
)
from fedlit.methods.taught_target import ExchangeName, TaughtTarget
from fedlit.run.batchnorm import as_second_moments, variances_of
from fedlit.run.run import Run


class KD3A(TaughtTarget):
    r"""The target learns what confident sources agree on (Feng et al., ICML 2021, Algorithm 1).

    .. math:: \theta \leftarrow \alpha_T \theta_T + (1 - \alpha_T) \sum_k \frac{CF_k}{\sum_j CF_j} \theta_k

    At the end of a round sources whose largest probability is above the gate vote on each of the target's training
    samples; the target learns these votes in the next round. A source's consensus focus CF is what it adds to the
    confidence of the votes; source and target extractors are averaged by it, for everyone. Classifiers stay.

    Args:
        gate: Probability above which a source's vote counts, in [0, 1); or two, between which it rises over a run.
            Where few samples of few classes pass (small networks are seldom as sure as the paper's 0.9), the target
            unlearns the other classes. The share that passes is logged (``confident``).
        vote: ``"hard"`` teaches classes, ``"soft"`` mean probabilities: see `knowledge_vote`.
        focus: ``"leave_one_out"`` or ``"shapley"``, which needs single votes and so ``exchange="models"``.
        exchange: ``"models"`` (paper): every source sends its model to the target. ``"votes"``: the target sends the
            inputs of all its training samples to every source, with a warning; sources answer in secure sums. Equal
            predictions.
        mixup: beta of the mixture of samples in a batch, whose shares are Beta(beta, beta); 0 mixes nothing.
        momentum: Of the shares alpha, in [0, 1): what they keep from the round before.
        bn: Of BatchNorm's variances, ``"moments"`` averages them and the spread of the means, ``"mean"`` them alone.
        weighting: ``"uniform"``, or ``"samples"``: CF_k times the source's number of samples, and alpha_T the target's
            share of all samples instead of its confident share over K + 1. Of a warm-up's mean, too.
        kwargs: See `FederatedModule`.

    Raises:
        ValueError: With Shapley values of votes, which are only summed.

    Notes:
        With models, |G| + |h| numbers of each source go to the target alone in each round; it sends each its share.

        With votes, a backend masks single votes and focus: a source learns their totals; of two sources each knows the
        other's by subtraction. Every source receives and keeps the target's inputs, in checkpoints too; beside a
        backend they are encrypted on their way. Down to each source go n_T |x| numbers once, up n_T C in each round
        (with soft votes twice as many, and n_T (C + 1) in a second sum).

        The mean of the extractors goes through one secure sum over sources and target.
    """

    def __init__(
        self,
        *args: Any,
        gate: float | tuple[float, float] = (0.9, 0.95),
        vote: Literal["hard", "soft"] = "hard",
        focus: FocusRule = "leave_one_out",
        exchange: ExchangeName = "models",
        mixup: float = 2.0,
        momentum: float = 0.9,
        bn: Literal["moments", "mean"] = "moments",
        weighting: Literal["samples", "uniform"] = "uniform",
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, exchange=exchange, weighting=weighting, **kwargs)
        self.gates = first_and_last_gate(gate)
        check_one_of("vote", vote, ("hard", "soft"))
        check_one_of("focus", focus, get_args(FocusRule))
        check_one_of("bn", bn, ("moments", "mean"))
        check_one_of("weighting", weighting, ("samples", "uniform"))
        if focus == "shapley" and exchange == "votes":
            way_out = "take focus='leave_one_out', which needs the sum alone, or exchange='models'"
            refuse("focus", "'leave_one_out' with exchange='votes', which only adds votes up", focus, way_out)
        check_at_least("mixup (beta)", mixup, 0, way_out="0 mixes nothing")
        check(0 <= momentum < 1, "momentum", "in [0, 1)", momentum, "at 1 shares would never change")
        self.vote = vote
        self.focus: FocusRule = focus
        self.mixup = mixup
        self.momentum = momentum
        self.bn = bn

    @property
    def channels(self) -> tuple[Channel, ...]:
        """Models or samples, votes, focus, and extractors."""
        noise = "noise would be votes where there are none"
        divided = "weights are divided by it"
        backbone = Summed("backbone", "extractor, times the share of its client, and that share", too_few="skip",
                          unblurred=divided)  # fmt: skip
        if self.exchange == "models":
            return self.teaching, Open("focus", "share of the source", "target", "sources"), backbone
        votes = Summed("votes", "confident votes on each of the target's samples", "sources", too_few="skip",
                       unblurred=noise)  # fmt: skip
        agreed = Summed("agreed", "probabilities of sources that agree", "sources", "target", too_few="skip",
                        unblurred=noise)  # fmt: skip
        focus = Summed("focus", "what a source adds to the votes", "sources", too_few="skip", unblurred=divided)
        return (self.teaching, votes, *((agreed,) if self.vote == "soft" else ()), focus, backbone)

    # ---------------------------------------------------------------- a local step

    def loss(self, client: Client, batch: Sequence[Any]) -> Tensor:
        """Return a source's loss on its labels, the target's on mixtures of its samples and pseudo-labels."""
        if not client.is_target:
            return super().loss(client, batch)
        replica, pseudo = self.replicas[client], self.pseudo_labels()
        if not pseudo:
            return cast(Tensor, 0 * replica(batch[0]).sum() + self.labelled_loss(replica, batch))
        # samples without a confident vote have weight 0, as partners too
        mix = draw_mixup(len(pseudo["targets"]), self.mixup)
        targets = mix(pseudo["targets"] * pseudo["weights"][:, None])
        outputs = replica(mapped(mix, batch[0]))
        return F.cross_entropy(outputs, targets.to(outputs.dtype)) + self.labelled_loss(replica, batch)

    # ---------------------------------------------------------------- the end of a round

    def on_round_start(self, run: Run) -> None:
        """Let clients that were absent fetch the newest extractor."""
        super().on_round_start(run)
        self.load_mean_(self.federation.catch_up("backbone"))

    def on_round_end(self, run: Run) -> None:
        """Collect the sources' votes, make pseudo-labels of them, and average extractors by consensus focus."""
        teachers = self.teachers()
        if not teachers:
            return
        gate = self.gates[0] + (self.gates[1] - self.gates[0]) * self.share_over()
        answers = self.ask_(teachers)
        ballots = {name: self.ballot(own, confident_votes(own, gate)) for name, own in answers.items()}
        added = self.add_("votes", ballots, teachers)
        totals = {name: {**total, "votes": standing_votes(total["votes"], gate)} for name, total in added.items()}
        teachers = self.contributors("votes", teachers)
        if not teachers:
            return
        self.make_pseudo_labels_(answers, ballots, totals, teachers)
        confident = {name: float((total["votes"].amax(dim=1) > 0).double().mean()) for name, total in totals.items()}
        if self.exchange == "votes":  # each source computes its focus in the total
            own = [name for name in ballots if name in totals]
            focus = {name: left_out_focus(totals[name]["votes"], ballots[name]["votes"]) for name in own}
        else:
            each = consensus_focus(torch.stack([*answers.values()]), gate, self.focus) if answers else ()
            focus = dict(zip(answers, each, strict=True))
        sharers = self.share_(focus, confident, teachers)
        if sharers:
            self.average_extractors_(sharers)
        self._log(confident)

    def ballot(self, probabilities: Tensor, votes: Tensor) -> dict[str, Tensor]:
        """Return what a source sends: its votes, shape (n_T, C), and for soft votes confident probabilities."""
        if self.vote == "hard":
            return {"votes": votes}
        confident = votes.amax(dim=1, keepdim=True) > 0
        return {"votes": votes, "probabilities": torch.where(confident, probabilities, 0.0)}

    def make_pseudo_labels_(
        self,
        answers: Mapping[str, Tensor],
        ballots: Mapping[str, Mapping[str, Tensor]],
        totals: Mapping[str, Mapping[str, Tensor]],
        teachers: Sequence[str],
    ) -> None:
        """Make the target's pseudo-labels; in a soft vote first the class, then the mean of those that agree."""
        target = self.target.name
        if self.vote == "hard":
            if target in totals:
                votes = totals[target]["votes"]
                classes = F.one_hot(votes.argmax(dim=1), self.num_classes).float()
                self._pseudo_labels = {"targets": classes, "weights": (votes.amax(dim=1) > 0).float()}
            return
        decided = {name: agreement(total["votes"], total["probabilities"]) for name, total in totals.items()}
        agreed = {}
        for name, own in answers.items():
            members = agreeing(own, ballots[name]["votes"], *decided[name if self.exchange == "votes" else target])
            agreed[name] = {"probabilities": torch.where(members[:, None], own, 0.0), "numbers": members.float()}
        for name, total in self.add_("agreed", agreed, teachers).items():
            numbers = total["numbers"].round().clamp(min=1)
            vote = soft_knowledge(*decided[name], total["probabilities"], numbers, total["probabilities"])
            self._pseudo_labels = {"targets": vote.targets, "weights": vote.weights}

    def share_(self, focus: Mapping[str, Tensor], confident: Mapping[str, float], teachers: Sequence[str]) -> list[str]:
        """Update each source's alpha from its focus and the sum of all; return the sources whose focus counted.

        ``focus`` has a scalar by source; ``confident`` the share of confident samples, by client that knows it.
        """
        models, target = self.exchange == "models", self.target.name
        by_size = self.run.weights.averaging.weighting == "samples"
        sizes = self.federation.weights if by_size else dict.fromkeys([client.name for client in self.clients], 1)
        largest = max(sizes[client.name] for client in self.sources)
        adds = {name: own.reshape(1) * (sizes[name] / largest) for name, own in focus.items()}
        summed = self.add_("focus", {name: {"focus": own} for name, own in adds.items()}, teachers)
        teachers = self.contributors("focus", teachers)
        of_target = sizes[target] / (sizes[target] + sum(sizes[name] for name in teachers))
        for holder, total in summed.items():
            if holder not in (*teachers, target):
                continue
            rest = 1 - of_target * (1.0 if by_size else confident[holder])
            if holder == target:
                self.move_share_(target, 1 - rest)
            everybody = float(total["focus"])
            for name in (name for name in adds if models or name == holder):
                self.move_share_(name, rest * (float(adds[name]) / everybody if everybody else 1 / len(teachers)))
        if models:
            message = {target: {name: {"share": self.kept(name)["share"]} for name in adds}} if adds else {}
            for name, messages in self.federation.exchange("focus", message, to=teachers).items():
                self.kept(name)["share"] = messages[target]["share"].cpu()
        return [*teachers]

    def move_share_(self, client: str, share: float) -> None:
        """Move a client's alpha towards this round's; the first is taken as it is."""
        before = self.kept(client).get("share")
        kept = share if before is None else self.momentum * float(before) + (1 - self.momentum) * share
        self.kept(client)["share"] = torch.tensor([kept], dtype=torch.float64)

    @torch.no_grad()
    def average_extractors_(self, sharers: Sequence[str]) -> None:
        """Average extractors by their shares, for everyone: sum weights times shares, and shares."""
        payloads, among = {}, [*sharers, self.target.name]
        for name in (name for name in among if self.federation.is_local(name)):
            share = self.kept(name)["share"].to(self.device, torch.float32)
            state = {key: tensor for key, tensor in self.run.weights.of(name).items() if key.startswith("extractor.")}
            if self.bn == "moments":
                state = as_second_moments(state, variances_of(self.replicas[name]))
            # shares go along, as the total is divided by the sum of those that arrived
            scaled = {key: share[0] * tensor for key, tensor in state.items() if tensor.is_floating_point()}
            payloads[name] = {**scaled, "share": share}
        self.load_mean_(self.federation.sum("backbone", payloads, among=among))

    def load_mean_(self, totals: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Load the mean of extractors, from the sums of `average_extractors_`, into local replicas."""
        for name, total in totals.items():
            mean = {key: tensor / total["share"][0] for key, tensor in total.items() if key != "share"}
            self.run.weights.load_({name: mean})

    def _log(self, confident: Mapping[str, float]) -> None:
        """Log the share of confident samples, and alphas, as far as the target knows them."""
        target, reported = self.target.name, {}
        if target in confident:
            known = [name for name in self._kept if self.exchange == "models" or name == target]
            alphas = {f"share/{name}": float(self.kept(name)["share"]) for name in known}
            reported = {target: {"confident": confident[target], **alphas}}
        every = ["confident", *(f"share/{client.name}" for client in self.clients)]
        self.run.log(self.federation.report(reported, every).get(target, {}), self.target)
