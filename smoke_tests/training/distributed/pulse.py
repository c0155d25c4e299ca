"""Where the ranks of a job meet, and the heartbeat of each, by which the others name the one that is lost."""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
import threading
import time
from typing import Dict, List

import torch.distributed as dist

SILENCE = 8.0  # seconds that the end of a heart may take


class Absent(RuntimeError):
    """The ranks cannot meet; the message is the end of a sentence that begins with this rank's name."""


class Pulse:
    """The heartbeat of this rank in the store that all ranks of torchrun's job share.

    store: for init_process_group; it has the keys of this start alone, even if torchrun started the job before.
    """

    def __init__(self, rank: int, world: int, patience: datetime.timedelta) -> None:
        """Wait until every rank is here; Absent names those that are not in time."""
        self.world, self.over = world, threading.Event()
        self.address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        # torchrun's store outlives its workers; an older torchrun has none, and rank 0 holds it.
        holds = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        # Hosts count restarts differently, so that the count distinguishes starts only where there is one host.
        one_host = os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]
        start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if one_host else "0"
        try:
            # The heart has a connection of its own, because the other may be waiting.
            connections = [
                dist.TCPStore(self.address, port, world, server, patience, wait_for_workers=False)
                for server in (holds, False)
            ]
        except RuntimeError as error:
            why = str(error).splitlines()[0]
            raise Absent(f"does not reach the store of the job at {self.address}:{port} ({why})") from None
        self.store, self._beats = (dist.PrefixStore(f"start {start}", each) for each in connections)
        self.store.set(f"host/{rank}", socket.gethostname())
        self._beats.add(f"beat/{rank}", 1)
        names = [f"host/{each}" for each in range(world)]
        try:
            self.store.wait(names, patience)
        except RuntimeError:
            absent = [str(each) for each, count in self._counts().items() if not count]
            waited = f"waited {patience.total_seconds():g} s for rank {', '.join(absent)}"
            raise Absent(f"{waited}: see on their hosts why they did not start, and start all again") from None
        self.hosts = [self.store.get(name).decode() for name in names]
        self._heart = threading.Thread(target=self._beat, args=(f"beat/{rank}",), daemon=True)
        self._heart.start()

    def _beat(self, key: str) -> None:
        with contextlib.suppress(RuntimeError):  # the store is lost, as silent() will say
            while not self.over.wait(0.5):
                self._beats.add(key, 1)

    def _counts(self) -> Dict[int, int]:
        """How often each heart has beaten."""
        return {rank: self._beats.add(f"beat/{rank}", 0) for rank in range(self.world)}

    def end(self) -> None:
        """Stop beating, because a thread that is inside the store when Python ends aborts the process."""
        self.over.set()
        self._heart.join(SILENCE)

    def silent(self) -> str:
        """The ranks whose heart stands still for 3 s, with their hosts, or the store's host; empty if all are there."""
        counts: List[Dict[int, int]] = []
        try:
            for pause in (3.0, 0.0):
                counts.append(self._counts())
                time.sleep(pause)
        except RuntimeError:
            return f"the store of the job on host {self.address}"
        lost = [rank for rank in range(self.world) if counts[0][rank] == counts[1][rank]]
        return ", ".join(f"rank {rank} on host {self.hosts[rank]}" for rank in lost)
