"""``fedlit report``: what ``fedlit fit`` leaves in a run's folder, read back and made into a page.

Runs' folders are read (``run_folder``). What is in them becomes blocks (``contents``): the ``verdict`` on all runs, and
each ``run`` by itself, with ``charts``; or ``live``, runs as they go. Blocks become HTML and Markdown (``pages``).
"""

from fedlit.callbacks.report.contents import report_on, write_report
from fedlit.callbacks.report.live import LiveRuns
from fedlit.callbacks.report.run_folder import RunFolder, read_runs

__all__ = ["LiveRuns", "RunFolder", "read_runs", "report_on", "write_report"]
