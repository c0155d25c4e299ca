"""Runs of pretrain.py on a CPU, one after the other, each on some processes: `python -m ...forks 2 FLAGS [/ 4 FLAGS]`.

The processes are forks of this one, with the variables that torchrun would set: torch is imported once, not by each.
As under torchrun, they meet in a store that their parent holds, whose port the system chose and nobody else can take.
"""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import multiprocessing
import os
import sys
from typing import Any, Dict, List

import torch
import torch._dynamo
import torch.distributed as dist
import torch.distributed.checkpoint
import torch.distributed.fsdp

from smoke_tests.training import pretrain

with contextlib.suppress(ImportError):  # like the above, so that no rank has to
    import torchao.float8  # noqa: F401

SECONDS = 120  # that a run may take


def rank_main(flags: List[str], variables: Dict[str, str], ports: Any) -> None:
    """What one rank does: the command, as torchrun starts it."""
    faulthandler.dump_traceback_later(SECONDS, exit=True)  # where it waits
    os.environ.update(variables, MASTER_PORT=str(ports.get()))
    sys.exit(pretrain.main(flags))


def run(processes: int, flags: List[str]) -> int:
    """Run the command on that many processes; the first exit code that is not 0, or 0."""
    place = {"TORCHELASTIC_RUN_ID": "forks", "TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "localhost"}
    fork, ranks = multiprocessing.get_context("fork"), []
    ports = fork.SimpleQueue()
    for rank in range(processes):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes)}
        ranks.append(fork.Process(target=rank_main, args=(flags, {**place, **own}, ports), daemon=True))
        ranks[-1].start()
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # its thread starts after the forks
    for _ in ranks:
        ports.put(store.port)
    for each in ranks:
        each.join()
    return next((each.exitcode for each in ranks if each.exitcode), 0)


if __name__ == "__main__":
    os.environ.update(CUDA_VISIBLE_DEVICES="", GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    for is_run, words in itertools.groupby(sys.argv[1:], lambda word: word != "/"):
        if is_run:
            count, *given = words
            code = run(int(count), given)
            if code:
                sys.exit(code)
