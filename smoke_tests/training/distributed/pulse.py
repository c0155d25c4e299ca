"""The heartbeat of each rank, by which the others name the one that is lost."""

from __future__ import annotations

import socket
import threading
import time
from typing import Dict, List

import torch.distributed as dist

SILENCE = 8.0  # seconds that the end of a heart may take


class Pulse:
    """Each rank's heartbeat in the store that all ranks share, so that a silent rank can be named."""

    def __init__(self, store: dist.Store, rank: int, world: int) -> None:
        self.store, self.world = store, world
        store.set(f"host/{rank}", socket.gethostname())
        self.over = threading.Event()
        beating = store.clone()  # a connection of its own: the other may be waiting
        self.heart = threading.Thread(target=self._beat, args=(beating, f"beat/{rank}"), daemon=True)
        self.heart.start()

    def _beat(self, store: dist.Store, key: str) -> None:
        while not self.over.wait(0.5):
            store.add(key, 1)

    def end(self) -> None:
        """Stop beating, because a thread that is inside the store when Python ends aborts the process."""
        self.over.set()
        self.heart.join(SILENCE)

    def silent(self) -> str:
        """The ranks whose heart stands still for 3 s, with their hosts; empty if there is none."""
        counts: List[Dict[int, int]] = []
        for pause in (3.0, 0.0):
            counts.append({rank: self.store.add(f"beat/{rank}", 0) for rank in range(self.world)})
            time.sleep(pause)
        lost = [rank for rank in range(self.world) if counts[0][rank] == counts[1][rank]]
        return ", ".join("rank {} on host {}".format(rank, self.store.get(f"host/{rank}").decode()) for rank in lost)
