"""``fedlit {fit,validate,test,predict} --config ...``: the Lightning CLI, over methods, data and federation.

``fedlit fit`` also runs small experiments: every combination of ``--seeds``, ``--targets`` and ``--compare`` is trained
one after the other, and one closing table has them all. ``fedlit {list,report,export,benchmark}`` run no Trainer.

What needs neither torch nor Lightning answers without them: importing both takes seconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fedlit.cli.command import main, run
from fedlit.cli.known import load

if TYPE_CHECKING:
    from fedlit.cli.lightning_cli import FedlitCLI, quieten

__all__ = ["FedlitCLI", "main", "quieten", "run"]


def __getattr__(name: str) -> Any:
    if name in ("FedlitCLI", "quieten"):
        return load(f"fedlit.cli.lightning_cli:{name}")
    raise AttributeError(f"module 'fedlit.cli' has no attribute {name!r}")
