"""``fedlit {fit,validate,test,predict} --config ...``: the Lightning CLI, over methods, data and federation.

``fedlit fit`` also runs small experiments: every combination of ``--seeds``, ``--targets`` and ``--compare`` is trained
one after the other, and one closing table has them all. ``fedlit {list,report,export,benchmark}`` run no Trainer.
"""

import atexit
import gc

# What libraries make when they are imported stays: looking through it for garbage again and again takes seconds.
_enabled = gc.isenabled()
gc.disable()
from fedlit.cli.command import main, run  # noqa: E402
from fedlit.cli.lightning_cli import FedlitCLI, quieten  # noqa: E402

gc.freeze()
atexit.register(gc.unfreeze)  # or extensions would tell of leaks when the process ends
if _enabled:
    gc.enable()

__all__ = ["FedlitCLI", "main", "quieten", "run"]
