"""``fedlit {fit,validate,test,predict} --config ...``: the Lightning CLI, over methods, data and federation.

``fedlit fit`` also runs small experiments: every combination of ``--seeds``, ``--targets`` and ``--compare`` is trained
one after the other, and one closing table has them all. ``fedlit {list,report,export,benchmark}`` run no Trainer.
"""

import gc

# What libraries make when they are imported stays: to look through it for garbage takes a sixth of the time.
_enabled = gc.isenabled()
gc.disable()
from fedlit.cli.command import main  # noqa: E402
from fedlit.cli.lightning_cli import FedlitCLI, quieten  # noqa: E402

if _enabled:
    gc.enable()

__all__ = ["FedlitCLI", "main", "quieten"]
