"""What the process has imported that others are forked from. It must not start threads, which a fork would lose."""
# ruff: noqa: E402  (the garbage collector is off before anything is imported)

from __future__ import annotations

import gc
import logging
import warnings

gc.disable()  # while importing

import torch

import helpers
import one_site  # noqa: F401
import peers  # noqa: F401
import small_federation  # noqa: F401

torch.set_num_threads(1)
warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
assert helpers.digits().clients  # drawn once for all
gc.freeze()  # what forks share is not looked through, and so not copied, in each of them
gc.enable()
