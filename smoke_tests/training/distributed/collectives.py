"""The traffic between GPUs: every element of the collectives, their bandwidth, and FSDP2's bytes in float8.

`python -m smoke_tests.training.distributed.collectives FOLDER [--cpu]`, started by torchrun, writes
FOLDER/rank<N>.json. Bandwidth is the bus's, in GB/s: what the links of one GPU carry, which compares with the
link's own for any number of GPUs.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Callable, Dict, List, Tuple
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

# Sums of up to 8 ranks' values stay below 256: exact in every one of these.
DTYPES = (torch.float32, torch.bfloat16, torch.int32)
SIZES = (1, 1000, 65_537, 4_000_003)  # elements a rank
WIDTH, LAYERS = 1024, 3
REPEATS = 20


def values(size: int, rank: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """The values that a rank sends, [size]: whole numbers below 31 that depend on the position and the rank."""
    places = torch.arange(size, dtype=torch.int64, device=device)
    return ((places * 7 + rank * 13) % 31).to(dtype)


def wrong_elements(rank: int, world: int, device: str) -> Dict[str, int]:
    """Collective and dtype -> how many elements, of all sizes, are not what they must be; and how many there were."""
    wrong: Dict[str, int] = {"checked": 0}

    def check(name: str, result: torch.Tensor, expected: torch.Tensor) -> None:
        key = f"{name} {result.dtype}".replace("torch.", "")
        wrong[key] = wrong.get(key, 0) + int((result != expected).sum())
        wrong["checked"] += result.numel()

    for dtype in DTYPES:
        for size in SIZES:
            everyones = [values(size * world, other, dtype, device) for other in range(world)]
            total = torch.stack(everyones).sum(0, dtype=dtype)
            reduced = everyones[rank].clone()
            dist.all_reduce(reduced)
            check("all-reduce", reduced, total)
            gathered = torch.empty(size * world, dtype=dtype, device=device)
            dist.all_gather_into_tensor(gathered, everyones[rank][:size].clone())
            check("all-gather", gathered, torch.cat([sent[:size] for sent in everyones]))
            scattered = torch.empty(size, dtype=dtype, device=device)
            dist.reduce_scatter_tensor(scattered, everyones[rank])
            check("reduce-scatter", scattered, total[rank * size : (rank + 1) * size])
    return wrong


def seconds(function: Callable[[], object], device: str) -> float:
    """The median time of a call, in seconds, each measured apart after a barrier."""
    times = []
    for turn in range(REPEATS + 3):
        dist.barrier()
        if device != "cpu":
            torch.cuda.synchronize()
        start = time.perf_counter()
        function()
        if device != "cpu":
            torch.cuda.synchronize()
        times += [time.perf_counter() - start] if turn >= 3 else []
    return sorted(times)[len(times) // 2]


def bandwidths(mib: int, world: int, device: str) -> Dict[str, float]:
    """Bus bandwidth of each collective on `mib` MiB, and all-gather's time in bfloat16 over that in float8."""
    count = mib * 2**20 // 2 // world * world
    whole = torch.zeros(count, dtype=torch.bfloat16, device=device)
    part, codes = whole[: count // world].clone(), torch.zeros(count, dtype=torch.uint8, device=device)
    code = codes[: count // world].clone()
    times = {
        "all-reduce": seconds(lambda: dist.all_reduce(whole), device),
        "all-gather": seconds(lambda: dist.all_gather_into_tensor(whole, part), device),
        "reduce-scatter": seconds(lambda: dist.reduce_scatter_tensor(part, whole), device),
    }
    crossing = whole.numel() * whole.element_size() * (world - 1) / world / 1e9  # GB that each GPU sends and receives
    rates = {name: crossing / taken * (2 if name == "all-reduce" else 1) for name, taken in times.items()}
    in_float8 = seconds(lambda: dist.all_gather_into_tensor(codes, code), device)
    return {**rates, "float8 faster": times["all-gather"] / in_float8}


def gathered_bytes(recipe: str, device: str, emulate: bool) -> Tuple[int, float]:
    """Bytes that FSDP2 gathers for the forward and backward of a stack of linear layers, and the output's sum.

    recipe: "none", "tensorwise", or "tensorwise-gathered".
    """
    torch.manual_seed(0)
    layers = [torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
    model: Any = torch.nn.Sequential(*layers).to(device)
    if recipe != "none":
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        config = Float8LinearConfig(enable_fsdp_float8_all_gather=recipe == "tensorwise-gathered", emulate=emulate)
        model = convert_to_float8_training(model, config=config)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for part in (*model, model):
        fully_shard(part, mp_policy=policy)
    sent: List[int] = []
    gather = dist.all_gather_into_tensor

    def note(output_tensor: torch.Tensor, input_tensor: torch.Tensor, **others: Any) -> Any:
        sent.append(output_tensor.numel() * output_tensor.element_size())
        if device == "cpu" and output_tensor.element_size() == 1:  # gloo has no float8
            output_tensor, input_tensor = output_tensor.view(torch.uint8), input_tensor.view(torch.uint8)
        return gather(output_tensor, input_tensor, **others)

    with ExitStack() as watched:
        for name in ("all_gather_into_tensor", "all_gather_single"):  # which FSDP2 calls depends on torch's version
            if hasattr(dist, name):
                watched.enter_context(mock.patch.object(dist, name, note))
        x = torch.randn(64, WIDTH, device=device, generator=torch.Generator(device).manual_seed(1))
        output = model(x)
        output.float().square().mean().backward()
    return sum(sent), float(output.detach().float().square().mean())


def identity(device: str) -> Dict[str, Any]:
    """The hardware and software of this process."""
    libraries = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/" in line}
    manifest = Path(sys.prefix, "fusebox", "manifest.json")
    on_gpu = device != "cpu"
    return {
        "host": socket.gethostname(),
        "gpu": str(torch.cuda.get_device_properties(device).uuid) if on_gpu else f"cpu {os.environ['RANK']}",
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if on_gpu else "none",
        "nccl files": sorted(path for path in libraries if Path(path).name.startswith("libnccl")),
        "stack": json.loads(manifest.read_text())["stack"],
        "torch": torch.__version__,
    }


def main() -> None:
    """Write what this rank found."""
    on_cpu = "--cpu" in sys.argv
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = "cpu" if on_cpu else "cuda:{}".format(os.environ["LOCAL_RANK"])
    if not on_cpu:
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if on_cpu else "nccl", device_id=None if on_cpu else torch.device(device))
    report: Dict[str, Any] = {"wrong": wrong_elements(rank, world, device), "identity": identity(device)}
    report["bandwidth"] = bandwidths(4 if on_cpu else 512, world, device)
    recipes = ("none", "tensorwise", "tensorwise-gathered")
    report["gathered"] = {recipe: gathered_bytes(recipe, device, emulate=on_cpu) for recipe in recipes}
    with open(Path(sys.argv[1]) / f"rank{rank}.json", "w") as file:
        json.dump(report, file)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
