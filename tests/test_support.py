"""The helpers that start processes and threads fail as they should: a test that hangs or hides an error is none."""

from __future__ import annotations

import operator
import os
import time
from contextlib import suppress

import pytest
import torch

import processes
from fedlit.federation.errors import FederationTimeoutError
from thread_transport import on_ranks

pytestmark = pytest.mark.multiprocess


def test_results_come_in_the_order_of_ranks() -> None:
    assert processes.results(os.getenv, "LOCAL_RANK", ranks=3) == ["0", "1", "2"]
    assert processes.results(os.getenv, "LOCAL_RANK") == [None]
    assert os.getpid() not in processes.results(os.getpid, ranks=2)


def test_an_error_reaches_the_test_with_its_traceback() -> None:
    with pytest.raises(AssertionError, match=r"(?s)rank 0 of 2 .*Traceback.*ZeroDivisionError: division by zero"):
        processes.results(operator.truediv, 1, 0, ranks=2)


def test_output_and_exit_code_are_returned() -> None:
    (ended,) = processes.run(os.system, "echo spoken")
    assert (ended.result, ended.error, ended.exit_code, ended.output) == (0, "", 0, "spoken\n")
    (ended,) = processes.run(os._exit, 3)
    assert (ended.result, ended.exit_code) == (None, 3)
    with pytest.raises(AssertionError, match="ended with 3"):
        processes.results(os._exit, 3)


def print_pid_and_sleep() -> None:
    print(os.getpid())
    time.sleep(60)


def test_after_the_time_limit_no_process_is_left() -> None:
    with pytest.raises(AssertionError, match=r"(?s)ranks \[0, 1\] did not end within 0\.5 s:\n\d+\n\n\d+\n") as raised:
        processes.run(print_pid_and_sleep, ranks=2, timeout=0.5)
    pids = [int(line) for line in str(raised.value).splitlines()[1:] if line]
    assert len(set(pids)) == 2
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, 0)
            raise AssertionError(f"{pid} is still there")


def test_threads_exchange_copies_in_rank_order_and_give_up_on_the_silent() -> None:
    def talk(transport):
        sent = torch.tensor([transport.rank])
        frames = transport.meet(sent, "a test")
        sent += 10
        gathered = transport.all_gather(transport.rank, "a test")
        swapped = transport.swap([(0, 1, 1), (1, 2, 1), (2, 0, 1)], [torch.tensor([transport.rank])], "a test")
        return [int(frame) for frame in frames], gathered, int(swapped[0])

    assert on_ranks(talk, 3) == [([0, 1, 2], [0, 1, 2], (rank - 1) % 3) for rank in range(3)]

    def silent(transport):
        if transport.rank == 0:
            transport.all_gather("anybody?", "a test")

    with pytest.raises(FederationTimeoutError, match=r"rank 1 was silent for 0\.2 s"):
        on_ranks(silent, 2, timeout=0.2)
