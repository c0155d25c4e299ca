"""Runs of pretrain.py on some processes of a CPU, started as torchrun would, but so that torch is imported once.

The processes are forks of a server, which imports all that they need; a test's own process may have threads and cannot
be forked. As under torchrun, they meet in a store that their parent holds, whose port the system chose and nobody else
can take.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import sys
import time
from multiprocessing import connection, forkserver
from pathlib import Path
from typing import Dict, List
from unittest import mock

import torch.distributed as dist

from smoke_tests.training.distributed import jobs

SECONDS = 120  # the most that a run may take; then each of its processes writes where it waits, and exits
FORKS = multiprocessing.get_context("forkserver")


def serve() -> None:
    """Start the server, which imports while the caller does something else."""
    FORKS.set_forkserver_preload(["pytest", f"{__package__}.preloaded"])
    path = os.pathsep.join(filter(None, (str(jobs.CHECKOUT), os.environ.get("PYTHONPATH"))))
    with mock.patch.dict(os.environ, PYTHONPATH=path):
        forkserver.ensure_running()


def run(processes: int, flags: List[str], log: Path) -> None:
    """Run the command on that many processes; AssertionError with their output if one fails or takes too long."""
    serve()
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    common = {"TORCHELASTIC_RUN_ID": "forks", "TORCHELASTIC_USE_AGENT_STORE": "True", "GLOO_SOCKET_IFNAME": "lo"}
    common.update(MASTER_ADDR="localhost", MASTER_PORT=str(store.port))
    common.update(WORLD_SIZE=str(processes), LOCAL_WORLD_SIZE=str(processes))
    ranks = []
    for rank in map(str, range(processes)):
        given = flags, {**common, "RANK": rank, "LOCAL_RANK": rank}, log
        ranks.append(FORKS.Process(target=rank_main, args=given, daemon=True))
        ranks[-1].start()
    end = time.monotonic() + SECONDS + 5
    running, failed = list(ranks), False
    while running and not failed and time.monotonic() < end:
        connection.wait([each.sentinel for each in running], end - time.monotonic())
        running = [each for each in ranks if each.exitcode is None]
        failed = any(each.exitcode for each in ranks)
    for each in ranks:
        each.kill()
        each.join()
    assert not any(each.exitcode for each in ranks), log.read_text(encoding="utf-8")[-4000:]


def rank_main(flags: List[str], variables: Dict[str, str], log: Path) -> None:
    """What one rank does: the command, as torchrun starts it."""
    with open(log, "ab") as file:
        for output in (sys.stdout, sys.stderr):
            os.dup2(file.fileno(), output.fileno())
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    os.environ.update(variables)
    from smoke_tests.training import pretrain

    sys.exit(pretrain.main(flags))
