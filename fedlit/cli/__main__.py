"""``python -m fedlit.cli``."""

from fedlit.cli import main

main()
