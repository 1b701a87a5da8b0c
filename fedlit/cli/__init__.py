"""``fedlit {fit,validate,test,predict} --config ...``: the Lightning CLI, over methods, data and federation.

``fedlit fit`` also runs small experiments: every combination of ``--seeds``, ``--targets`` and ``--compare`` is trained
one after the other, and one closing table has them all. ``fedlit {list,report,export,benchmark}`` run no Trainer.
"""

from fedlit.cli.command import main
from fedlit.cli.lightning_cli import FedlitCLI, quieten

__all__ = ["FedlitCLI", "main", "quieten"]
