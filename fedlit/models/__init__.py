"""Small networks, pretrained extractors, and the replicas of them that clients train."""

from fedlit.models.adapters import Adapters
from fedlit.models.aligned import AlignedReplica, VotingReplica
from fedlit.models.backbone import Backbone, ResNet
from fedlit.models.batchnorm import MixedBatchNorm, batchnorm_layers, estimate_statistics_, with_mixed_batchnorm
from fedlit.models.committee import Committee, MomentReplica
from fedlit.models.dictionary import Dictionary, DictionaryReplica
from fedlit.models.disentangling import DisentanglingReplica
from fedlit.models.extractors import MLP, Bottleneck, Features, Head, LeNet, SmallCNN
from fedlit.models.matching import MatchingReplica
from fedlit.models.memory import Anchor, RoundMemory
from fedlit.models.replica import (
    AdversarialReplica,
    Replica,
    feature_width,
    make_classifier,
    make_discriminator,
    part_of,
)
from fedlit.models.series import Recurrent, ResNet1D, SmallCNN1D, WidarNet
from fedlit.models.twins import Twins

__all__ = [
    "MLP",
    "Adapters",
    "AdversarialReplica",
    "AlignedReplica",
    "Anchor",
    "Backbone",
    "Bottleneck",
    "Committee",
    "Dictionary",
    "DictionaryReplica",
    "DisentanglingReplica",
    "Features",
    "Head",
    "LeNet",
    "MatchingReplica",
    "MixedBatchNorm",
    "MomentReplica",
    "Recurrent",
    "Replica",
    "ResNet",
    "ResNet1D",
    "RoundMemory",
    "SmallCNN",
    "SmallCNN1D",
    "Twins",
    "VotingReplica",
    "WidarNet",
    "batchnorm_layers",
    "estimate_statistics_",
    "feature_width",
    "make_classifier",
    "make_discriminator",
    "part_of",
    "with_mixed_batchnorm",
]
