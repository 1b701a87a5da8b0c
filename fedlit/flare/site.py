"""The process of a site that trains: ``python -m fedlit.flare.site ARGUMENTS``, which `FedlitExecutor` starts.

It is apart from FLARE's, so that one that dies of its data or of its memory is started again, and takes part again.
"""

from __future__ import annotations

import os
import sys

from fedlit.cli.arguments import normalise
from fedlit.cli.experiment import Experiment
from fedlit.cli.lightning_cli import quieten
from fedlit.cli.seats import AGAIN, check_one_run, start_again, take_seat, tell_who_comes
from fedlit.federation import FederationError
from fedlit.remote.message_carrier import MessageCaller
from fedlit.remote.relay import RelayedSender
from fedlit.remote.seats import CarriedSite

TIMES = "FEDLIT_TIMES"
"""In the environment: the seconds ``wait_for`` and ``patience``."""


def main() -> None:
    """Take part in the run."""
    quieten()
    tell_who_comes()
    experiment = Experiment.parse(normalise(["fit", *sys.argv[1:]]))
    check_one_run(experiment, "a job of FLARE")
    wait_for, patience = map(float, os.environ[TIMES].split())
    seat = CarriedSite(MessageCaller(RelayedSender()), None, wait_for, patience)
    try:
        take_seat(experiment, seat)
    except AGAIN as error:
        start_again(error, "fedlit.flare.site")
    except FederationError as error:
        sys.exit(f"fedlit: {type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
