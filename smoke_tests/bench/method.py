"""How a number is measured: arms timed in turns, and checks of what the numbers may claim.

All arms of a cell run in one process on random data, interleaved A B C C B A, with the L2 cache flushed before each
call. GPU time lies between two events; ahead of the first one the GPU is kept busy for as long as the host needs to
enqueue the call, so that gaps between launches are not counted. What a user waits for is the longer of GPU time and
host time; where that is the host's, the cell is launch-bound. Ratios are medians over pairs with a bootstrap interval.
"""

from __future__ import annotations

import statistics
import time
from types import MappingProxyType
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Tuple

import torch

from smoke_tests.bench.rows import Row, ratio
from smoke_tests.operators import kernels

LONGEST = 4  # kernels of a call that a row names, with the ms of each
LAUNCHES_MS = 8.0  # a GPU queues some 1024 launches, so no call is enqueued more than this many ms ahead


class Check(NamedTuple):
    """An error of the same call's numbers, and the two bounds that its format sets."""

    error: float
    floor: float
    ceiling: float


class Arm(NamedTuple):
    """One implementation, timed in turns with the others of its cell.

    call: what is timed. before: what each call needs first, untimed. check: its numbers against the truth.
    precision: that of its products ("fp8", "bf16", "tf32", "fp32"). base: the arm that it is compared with.
    flops, bytes: what the call must compute and move at least; 0 if that is not the point.
    state_bytes: what it holds between calls (weights, gradients, optimizer). comparable: does the base do the same
    work, so that the precisions alone bound the ratio? ungraphed: the call that a graph was captured of, by which
    memory is measured, because a replay allocates none. waits: the call itself waits for the GPU, so that the host's
    time, which is then the GPU's, says nothing of launches.
    """

    call: Callable[[], Any]
    precision: str = "bf16"
    base: str = ""
    flops: float = 0.0
    bytes: float = 0.0
    check: Optional[Callable[[Any], List[Check]]] = None
    before: Callable[[], object] = lambda: None
    state_bytes: float = 0.0
    comparable: bool = True
    ungraphed: Optional[Callable[[], Any]] = None
    waits: bool = False


class Cell(NamedTuple):
    """One row to be: a key, the facts that the report sorts by, and its arms, each made when it is its turn.

    seconds and gib: what it is expected to take on a large GPU. pairs: how many, 0 for what the run says. jobs: in
    place of arms, what measures each in processes of its own, `seconds` together; compare: puts beside each how it
    compares with its base.
    """

    key: str
    facts: Dict[str, Any]
    arms: Callable[[], Dict[str, Callable[[], Arm]]]
    seconds: float = 5.0
    gib: float = 2.0
    pairs: int = 0
    jobs: Mapping[str, Callable[[], Row]] = MappingProxyType({})
    compare: Optional[Callable[[Dict[str, Row]], None]] = None


class Effort(NamedTuple):
    """How hard a run tries: pairs, and seconds at most to warm up each cell."""

    pairs: int = 30
    warm_up: float = 3.0


QUICK = Effort(10, 0.5)


# --- timing ---


class Timer:
    """Times single calls on a device."""

    def __init__(self, device: str) -> None:
        self.cuda = device == "cuda"
        cache = 64 << 20
        if self.cuda:
            cache = 4 * getattr(torch.cuda.get_device_properties(0), "L2_cache_size", 64 << 20)
        self.flush = torch.empty(cache, dtype=torch.int8, device=device)
        self.cycles_per_ms = 1e6
        if self.cuda:
            for _ in range(2):  # the first one loads the kernel
                took, _ = self.sample(Arm(lambda: torch.cuda._sleep(20_000_000)))
            self.cycles_per_ms = 20_000_000 / took

    def sample(self, arm: Arm, lead_ms: float = 0.0) -> Tuple[float, float]:
        """GPU and host milliseconds of one call, from a flushed cache; on a CPU both are the call's."""
        arm.before()
        self.flush.zero_()
        if not self.cuda:
            start = time.perf_counter()
            arm.call()
            took = (time.perf_counter() - start) * 1e3
            return took, took
        if lead_ms:
            torch.cuda._sleep(int(lead_ms * self.cycles_per_ms))
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        start = time.perf_counter()
        arm.call()
        host = (time.perf_counter() - start) * 1e3
        last.record()
        last.synchronize()
        return float(first.elapsed_time(last)), host


def graphed(call: Callable[[], Any], pool: Any = None) -> Callable[[], Any]:
    """The call captured as a CUDA graph; what it returns is the same memory each time."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        result = call()

    def replay() -> Any:
        graph.replay()
        return result

    return replay


def interleaved(timer: Timer, arms: Dict[str, Arm], effort: Effort) -> Dict[str, List[Tuple[float, float]]]:
    """(GPU, host) milliseconds of each arm, pair by pair, in the order A B C C B A, after a warm-up.

    It is warm when three rounds in a row take the same within 2 %, or when its time is over.
    """
    alone = [{name: timer.sample(arm) for name, arm in arms.items()} for _ in range(2)][1]  # the first may compile
    leads = {name: lead_for(host) if timer.cuda else 0.0 for name, (_, host) in alone.items()}
    rounds: List[float] = []
    waited = dict.fromkeys(arms, 0)
    stop = time.monotonic() + effort.warm_up
    while len(rounds) < 3 or (max(rounds[-3:]) > 1.02 * min(rounds[-3:]) and time.monotonic() < stop):
        took = {name: timer.sample(arm, leads[name]) for name, arm in arms.items()}
        rounds.append(sum(gpu for gpu, _ in took.values()))
        for name, (_, host) in took.items():
            waited[name] += host > alone[name][1] + leads[name] / 2
    for name, times in waited.items():
        if 2 * times > len(rounds):  # one slow call says nothing about it
            leads[name] = 0.0  # the call itself waits for the GPU, and so for what keeps it busy
    samples: Dict[str, List[Tuple[float, float]]] = {name: [] for name in arms}
    for turn in range(effort.pairs):
        for name in list(arms) if turn % 2 == 0 else reversed(list(arms)):
            samples[name].append(timer.sample(arms[name], leads[name]))
    return samples


def lead_for(host_ms: float) -> float:
    """For how many ms the GPU must be busy so that a call is enqueued before it begins; 0 if that is too long."""
    return 1.3 * host_ms + 0.05 if host_ms < LAUNCHES_MS else 0.0


# --- one cell ---


def measure(cell: Cell, timer: Timer, effort: Effort) -> Row:
    """Make the arms of a cell, check their numbers, time them in turns: its row, without the verdict.

    An arm that cannot be made or called is in the row with its error; it does not cost the others.
    """
    rows: Dict[str, Row] = {}
    arms: Dict[str, Arm] = {}
    for name, make in cell.arms().items():
        try:
            arm = make()
            rows[name] = _first_calls(arm, timer.cuda)
            arms[name] = arm
        except Exception as error:
            if timer.cuda:
                torch.cuda.synchronize()  # a broken device ends the run, since no later number could be trusted
            rows[name] = {"error": one_line(error)}
    samples = interleaved(timer, arms, effort._replace(pairs=cell.pairs or effort.pairs)) if arms else {}
    seen = {name: [max(pair) for pair in pairs] for name, pairs in samples.items()}
    for name, arm in arms.items():
        rows[name].update(_numbers(arm, samples[name], timer.cuda))
        if arm.base in arms and arm.base != name:
            rows[name].update(zip(("ratio", "low", "high"), ratio(seen[arm.base], seen[name])))
            rows[name].update(base=arm.base, comparable=arm.comparable)
    return {"key": cell.key, "facts": cell.facts, "pairs": cell.pairs or effort.pairs, "arms": rows}


def _first_calls(arm: Arm, cuda: bool) -> Row:
    """What is seen at the first calls of an arm: its numbers, its memory beyond what was there, its kernels."""
    arm.before()
    result = arm.call()
    checks = arm.check(result) if arm.check else []
    del result
    row: Row = {"checks": [list(check) for check in checks], "state_mib": round(arm.state_bytes / 2**20)}
    if cuda:
        arm.before()
        torch.cuda.synchronize()
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        (arm.ungraphed or arm.call)()
        torch.cuda.synchronize()
        row["peak_mib"] = round((torch.cuda.max_memory_allocated() - held) / 2**20)
        arm.before()
        times = {name: sum(launches) for name, launches in kernels.gpu_launches(arm.call).items()}
        longest = sorted(times, key=times.__getitem__, reverse=True)[:LONGEST]
        row["kernels"] = [[name[:80], shown(times[name])] for name in longest]
        if arm.precision == "fp8":
            row["fp8_kernels"] = sorted(name[:80] for name in kernels.products(times) if kernels.FLOAT8.search(name))
    elif arm.precision == "fp8":
        row["fp8_kernels"] = []  # a CPU emulates them
    return row


def _numbers(arm: Arm, samples: List[Tuple[float, float]], cuda: bool) -> Row:
    gpu, host = (statistics.median(times) for times in zip(*samples))
    row: Row = {"precision": arm.precision, "ms": statistics.median(max(pair) for pair in samples), "gpu_ms": gpu}
    row["samples_ms"] = [shown(pair[0]) for pair in samples]
    if cuda and not arm.waits:
        row.update(host_ms=host, host_samples_ms=[shown(pair[1]) for pair in samples])
    if arm.flops:
        row.update(flops=arm.flops, flops_per_second=arm.flops / gpu * 1e3)
    if arm.bytes:
        row.update(bytes=arm.bytes, bytes_per_second=arm.bytes / gpu * 1e3)
    return row


def shown(value: float) -> float:
    """Round to four digits, which is more than a time is worth."""
    return float(f"{value:.4g}")


def one_line(error: BaseException) -> str:
    """An exception in one line: its type and the first line of its message."""
    line = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {line[:200]}"
