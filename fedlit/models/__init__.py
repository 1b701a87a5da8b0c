"""Small networks and pretrained extractors, and what one client holds of them."""

from fedlit.models.extractors import MLP, Features, SmallCNN
from fedlit.models.replica import Replica, make_classifier
from fedlit.models.resnet import ResNet

__all__ = ["MLP", "Features", "Replica", "ResNet", "SmallCNN", "make_classifier"]
