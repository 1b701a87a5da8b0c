"""``python -m fedlit.cli``."""

from fedlit.cli import run

run()
