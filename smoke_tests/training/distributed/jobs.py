"""Training jobs of several processes: started with torchrun as users do, watched, killed and started again."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Callable, Dict, List, Optional, Sequence, Type

from smoke_tests import claims

PORT = 29400
RANK_ERROR = re.compile(r"(?!\S*ChildFailed)(?<![\w.])[\w.]+Error: .*")  # of a rank, not of torchrun
CHECKOUT = Path(__file__).resolve().parents[3]
# An Ethernet link between two network namespaces, in a user namespace in which this user may create them.
CABLE = r"""
set -e
mount -t tmpfs none /run
printf '127.0.0.1 localhost\n10.77.0.1 one\n10.77.0.2 two\n' > /run/hosts
mount --bind /run/hosts /etc/hosts
ip netns add one
ip netns add two
ip -n one link add eth0 type veth peer name eth0 netns two
for host in one two; do ip -n $host link set lo up; done
ip -n one address add 10.77.0.1/24 dev eth0
ip -n two address add 10.77.0.2/24 dev eth0
ip -n one link set eth0 up
ip -n two link set eth0 up
echo ready
exec sleep 3600
"""
NAMED = "import os, socket, sys; socket.sethostname(sys.argv[1]); os.execv(sys.argv[2], sys.argv[2:])"


def torchrun(
    script: str, arguments: Sequence[str], processes: int, options: Sequence[str] = (), package: str = __package__
) -> List[str]:
    """The command that starts a script of a package in that many processes, on one host unless options say more.

    Each process runs the script as a module, which needs a PYTHONPATH with the checkout; Job sets it.
    """
    where = list(options) or ["--standalone"]
    started = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
    return [*started, *where, "-m", f"{package}.{Path(script).stem}", *arguments]


class Job:
    """A command that runs; its output goes to `log`. Leaving the block kills every process that still runs.

    Jobs run at the same time. A job that is timed runs `alone`: it waits for the others, and they wait for it.
    """

    def __init__(self, command: Sequence[str], log: Path, alone: bool = False) -> None:
        self.log = log
        self.turn = open(Path(tempfile.gettempdir(), f"fusebox-jobs-{os.getuid()}"), "w")  # noqa: SIM115
        fcntl.flock(self.turn, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        variables = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "eth0" if "nsenter" in command else "lo",
            "FUSEBOX_JOB": str(log),  # marks every process that the job starts
            # Every process imports smoke_tests, whatever its working directory: nsenter changes that to /.
            "PYTHONPATH": os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH", ""), str(CHECKOUT)))),
        }
        with open(log, "wb") as file:
            self.process = subprocess.Popen(
                list(command), stdout=file, stderr=subprocess.STDOUT, env=variables, start_new_session=True
            )

    def __enter__(self) -> Job:
        return self

    def __exit__(
        self, kind: Optional[Type[BaseException]], error: Optional[BaseException], at: Optional[TracebackType]
    ) -> None:
        self.kill()

    def kill(self) -> None:
        """Send SIGKILL to the command and to every process that it started: torchrun's workers would outlive it."""
        try:
            for process in self.processes():
                with contextlib.suppress(ProcessLookupError):  # the process has just ended
                    os.kill(process, signal.SIGKILL)
            self.process.wait()
        finally:
            self.turn.close()

    def processes(self, variable: str = "") -> List[int]:
        """The ids of the job's processes that still run, or of those with a variable such as "RANK=1"."""
        marks = {f"FUSEBOX_JOB={self.log}".encode(), variable.encode()} - {b""}
        ids = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                variables = path.read_bytes().split(b"\0")
            except OSError:  # the process has ended, or belongs to another user
                continue
            if marks <= set(variables):
                ids.append(int(path.parent.name))
        return ids

    def printed(self) -> str:
        """Everything that the job printed."""
        return self.log.read_text(encoding="utf-8", errors="replace")

    def ended(self, seconds: float) -> int:
        """The exit code, once the job ends; AssertionError if it takes longer."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it still runs after {seconds} s: {self.printed()[-2000:]}") from None

    def reach(self, step: int, folder: Path, seconds: float = 120) -> None:
        """Wait until rank 0 has written this step."""
        self.wait(lambda: max(losses(folder), default=0) >= step, f"step {step}", seconds)

    def wait(self, until: Callable[[], bool], what: str, seconds: float = 120) -> None:
        """Wait for what the job does; AssertionError if it ends before, or takes longer."""
        end = time.monotonic() + seconds
        while not until():
            assert self.process.poll() is None, f"it ended before {what}: {self.printed()[-3000:]}"
            assert time.monotonic() < end, f"no {what} within {seconds} s: {self.printed()[-2000:]}"
            time.sleep(0.05)


def noted(folder: Path, rank: int = 0) -> List[Dict[str, Any]]:
    """The lines of numbers that a rank has written, one per step; a step that ran twice has two lines."""
    path = folder / f"rank{rank}.jsonl"
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []


def losses(folder: Path, rank: int = 0, number: str = "loss") -> Dict[int, float]:
    """Step -> loss (nats per token), or another number of the line; the last line of a step counts."""
    return {row["step"]: row[number] for row in noted(folder, rank)}


def of_the_loss(ranks: Sequence[List[Dict[str, Any]]]) -> List[Dict[str, Any]]:
    """Of all ranks' lines, those of a rank that sees the loss, in a pipeline the last stage; [] if there is none."""
    return next((lines for lines in ranks if lines and lines[0]["loss"] > 0), [])


def error_in(printed: str) -> str:
    """The first error of a rank in what a job printed, or ""."""
    error = RANK_ERROR.search(printed)
    return error[0] if error else ""


class TwoHosts:
    """Two hosts of one machine: each with a network, a name and processes of its own, joined by a cable.

    A claim that needs namespaces is unproven where they are not permitted.
    """

    def __enter__(self) -> TwoHosts:
        command = ["unshare", "--user", "--map-root-user", "--net", "--mount", "sh", "-c", CABLE]
        try:
            self.cable = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
            )
        except FileNotFoundError:
            raise claims.Elsewhere("two hosts need unshare (util-linux), which this machine lacks") from None
        assert self.cable.stdout
        if self.cable.stdout.readline() != b"ready\n":
            reason = self.cable.communicate()[1].decode().strip().split("\n")[-1]
            raise claims.Elsewhere(f"two hosts need network namespaces, which this machine does not permit ({reason})")
        return self

    def __exit__(
        self, kind: Optional[Type[BaseException]], error: Optional[BaseException], at: Optional[TracebackType]
    ) -> None:
        self.cable.kill()
        self.cable.communicate()

    def inside(self, *command: str) -> List[str]:
        """A command that runs in the namespaces of the cable."""
        place = ["nsenter", "--target", str(self.cable.pid), "--user", "--net", "--mount", "--preserve-credentials"]
        return [*place, *command]

    def start(self, host: str, script: str, arguments: Sequence[str], log: Path) -> Job:
        """Start torchrun with one process on a host; both meet on host "one"."""
        meeting = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-id", "job", "--rdzv-endpoint", f"one:{PORT}"]
        own = ["ip", "netns", "exec", host, "unshare", "--uts", "--pid", "--fork", "--kill-child"]
        command = [sys.executable, "-c", NAMED, host, *torchrun(script, arguments, 1, meeting)]
        return Job(self.inside(*own, *command), log)

    def plug(self, host: str, state: str) -> None:
        """Put a host's end of the cable "up" or "down"."""
        subprocess.run(self.inside("ip", "-n", host, "link", "set", "eth0", state), check=True)
