"""Two hosts over a network: a training job, one of them lost and returned."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Dict

from smoke_tests.claims import long, proves
from smoke_tests.training.distributed import jobs

STEPS, LOST_AT, EVERY = 50, 22, 5


@long
@proves(
    "when one of two hosts that train a sharded Llama is cut off and killed, the other ends within a minute and names"
    " the lost rank and host, and both, started again, resume from the checkpoint to the losses of one process",
    package="torch",
    since="2.13",  # not tried with an older one
)
def test_a_host_is_lost_and_returns(tmp_path: Path, measured: Dict[str, Any]) -> None:
    alone, shared = tmp_path / "alone", tmp_path / "shared"
    for folder in (alone, shared):
        folder.mkdir()
    with jobs.TwoHosts() as hosts:
        given = [str(shared), str(STEPS)]
        with hosts.start("one", "sharded.py", given, tmp_path / "one.log") as first, hosts.start(
            "two", "sharded.py", given, tmp_path / "two.log"
        ) as second:
            first.reach(LOST_AT, shared)
            hosts.plug("two", "down")  # no connection is closed, as when the power fails
            second.kill()
            lost = time.monotonic()
            with ThreadPoolExecutor() as pool:
                ending = pool.submit(lambda: (first.ended(60), time.monotonic() - lost))
                # Here, because the machine is idle until the other host gives up.
                from smoke_tests.training.distributed import sharded

                sharded.train(alone, STEPS, rank=0, world=1)
                code, measured["seconds to the end"] = ending.result()
            assert code != 0 and "lost rank" in first.printed(), first.printed()[-3000:]
            silent = first.printed().partition("lost rank ")[2].split("\n")[0]
            assert silent.endswith("on host two"), silent
        before = max(jobs.losses(shared))
        hosts.plug("two", "up")
        with hosts.start("one", "sharded.py", given, tmp_path / "one.log") as first, hosts.start(
            "two", "sharded.py", given, tmp_path / "two.log"
        ) as second:
            assert first.ended(120) == 0, first.printed()[-3000:]
            assert second.ended(30) == 0, second.printed()[-3000:]
    steps = [row["step"] for row in jobs.noted(shared)]
    again = steps[steps.index(before) + 1]
    measured["lost after step"], measured["resumed at step"] = before, again
    assert again == before // EVERY * EVERY + 1, f"it resumed at step {again}, and {before} was the last"
    truth, resumed = jobs.losses(alone), jobs.losses(shared)
    assert sorted(resumed) == sorted(truth) == list(range(1, STEPS + 1))
    measured["apart"] = max(abs(resumed[step] - truth[step]) for step in truth)
    # Both compute in float32 and differ only in the order of sums; a batch in the wrong place would change 0.1 nats.
    assert measured["apart"] < 1e-3, measured["apart"]
