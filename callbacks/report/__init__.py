"""``fedlit report``: what ``fedlit fit`` leaves in a run's folder, read back and made into a page.

A run's folder is read (``run_folder``), what is in it becomes blocks (``contents``) with pictures of its curves
(``curves``), and the blocks become HTML and Markdown (``pages``).
"""

from fedlit.callbacks.report.contents import report_on, write_report
from fedlit.callbacks.report.run_folder import RunFolder, read_runs

__all__ = ["RunFolder", "read_runs", "report_on", "write_report"]
