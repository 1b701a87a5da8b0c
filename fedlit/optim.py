"""Where `default_optimizer` was before `fedlit.training`: configurations of stored runs name it by this path."""

from fedlit.training.optimisation import default_optimizer

__all__ = ["default_optimizer"]
