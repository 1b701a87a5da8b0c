"""Small networks and pretrained extractors, and what one client holds of them."""

from fedlit.models.aligned import AlignedReplica, VotingReplica
from fedlit.models.extractors import MLP, Features, SmallCNN
from fedlit.models.replica import Replica, feature_width, make_classifier
from fedlit.models.resnet import ResNet

__all__ = [
    "MLP",
    "AlignedReplica",
    "Features",
    "Replica",
    "ResNet",
    "SmallCNN",
    "VotingReplica",
    "feature_width",
    "make_classifier",
]
