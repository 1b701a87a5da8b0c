"""Where `default_optimizer` was before `fedlit.training`: configurations of stored runs name it by this path."""

import warnings

from fedlit.training.optimisation import default_optimizer

__all__ = ["default_optimizer"]

warnings.warn(
    "fedlit.optim is now called fedlit.training.optimisation; fedlit 0.4 has the new name only",
    FutureWarning,
    stacklevel=2,
)
