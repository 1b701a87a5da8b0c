"""The target's model by itself: as a plain network, and in files that are read without fedlit."""

from fedlit.export.target import TargetModel, export_target, target_model

__all__ = ["TargetModel", "export_target", "target_model"]
