"""A run on several processes, which torchrun started: what its ranks share, and what they agree on.

    ddp      every rank has the whole model; torch's DistributedDataParallel takes the mean of the gradients
    fsdp2    every rank has its part of each weight, gradient and moment; fully_shard gathers a block where it is used

Rank 0 alone prints, and writes the logs. A rank that fails says so in one sentence; the others name it and end.
"""

from __future__ import annotations

import contextlib
import datetime
import inspect
import os
import signal
import socket
import sys
import traceback
from typing import Any, ContextManager, Dict, Iterator, List, NoReturn, Type

import torch
import torch.distributed as dist

from smoke_tests.operators.torch_adapter import version_of_torch
from smoke_tests.training import ms_amp
from smoke_tests.training.options import Options, Refused
from smoke_tests.training.precision import column_of

# How long a rank waits for another, which may be starting or writing a checkpoint.
PATIENCE = datetime.timedelta(minutes=10)
# Options that a way does not support, and why.
WITHOUT: Dict[str, Dict[str, str]] = {
    "ddp": {"graphs": "a graph does not hold what the ranks send"},
    "fsdp2": {
        "graphs": "a graph does not hold what the ranks send",
        "async_checkpoint": "each rank writes its part, and no thread of a rank can wait for the others",
        "guard": "the guard compares whole matrices, of which a rank has a part",
        "te_modules": "Transformer Engine's modules have not been tried with sharded weights",
    },
}


class Ranks:
    """The ranks of a run, as one of them knows them; a process alone is the only one.

    way: "ddp", "fsdp2", or "" without torchrun. Methods with "every rank calls it" are collectives.
    """

    def __init__(self, way: str = "", rank: int = 0, world: int = 1) -> None:
        self.way, self.rank, self.world = way, rank, world

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which logs."""
        return self.rank == 0

    def gathered(self, value: Any) -> List[Any]:
        """The value of each rank, by rank; every rank calls it."""
        values: List[Any] = [value] * self.world
        if self.world > 1:
            dist.all_gather_object(values, value)
        return values

    def agreed(self, value: Any) -> Any:
        """Rank 0's value; every rank calls it."""
        values = [value]
        if self.world > 1:
            dist.broadcast_object_list(values)
        return values[0]

    def mean(self, value: torch.Tensor) -> torch.Tensor:
        """The mean of a number [] over the ranks, in float32, the same bits on each; every rank calls it."""
        if self.world == 1:
            return value
        return self.total(value.float() / self.world)

    def total(self, value: torch.Tensor) -> torch.Tensor:
        """The sum of a number [] over the ranks, in its dtype, the same bits on each; every rank calls it."""
        if self.world > 1:
            dist.all_reduce(value)
        return value

    def any(self, here: bool, device: str) -> bool:
        """Whether it is true on any rank; every rank calls it."""
        if self.world == 1:
            return here
        count = torch.tensor(float(here), device=device)
        dist.all_reduce(count)
        return bool(count)

    @contextlib.contextmanager
    def together(self, *kinds: Type[Exception]) -> Iterator[None]:
        """A context in which no rank waits for another; an error of these kinds on one rank ends it on all of them.

        The first kind is raised, with the first such rank's sentence, and its name unless it is rank 0. Every rank
        enters it.
        """
        if self.world == 1:
            yield
            return
        sentence = ""
        try:
            yield
        except kinds as error:
            sentence = str(error)
        named = [f"rank {rank}: {text}" if rank else text for rank, text in enumerate(self.gathered(sentence)) if text]
        if named:
            raise kinds[0](named[0])

    # --- the model ---

    def shared(self, model: torch.nn.Module, dtype: torch.dtype) -> Any:
        """What computes the loss so that backward leaves the gradient of all ranks; every rank calls it.

        With fsdp2, the model's parameters become DTensors of which each rank holds a part, and are gathered in `dtype`.
        """
        if self.way == "ddp":
            ddp = torch.nn.parallel.DistributedDataParallel
            renamed = "forward_sync_buffers" in inspect.signature(ddp).parameters  # from 2.13 on
            alike = {"forward_sync_buffers" if renamed else "broadcast_buffers": False}  # every rank computed the same
            return ddp(model, gradient_as_bucket_view=True, **alike)
        if self.way == "fsdp2":
            from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

            policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
            for part in (*model.blocks, model):
                fully_shard(part, mp_policy=policy)
        return model

    def own(self, turn: int) -> int:
        """The pass of this rank, counted over all ranks and steps, in a turn in which each rank does one."""
        return turn * self.world + self.rank

    def in_pass(self, part: int, parts: int, forward: Any) -> ContextManager[Any]:
        """The context of a pass of a step: with ddp, gradients are sent once, after the last."""
        sends = self.way != "ddp" or part + 1 == parts
        context: ContextManager[Any] = contextlib.nullcontext() if sends else forward.no_sync()
        return context


ALONE = Ranks()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of which each rank has a part, gathered; any other as it is. Every rank calls it."""
    gathered: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return gathered


def refuse(options: Options, ranks: Ranks) -> None:
    """Refuse a run that is not possible on these ranks, for the first reason that applies."""
    if not ranks.way:
        if options.parallel:
            raise Refused(f"--parallel {options.parallel} needs the processes that torchrun starts: start it with that")
        return
    asked = f"--parallel {ranks.way}"
    if ranks.way == "fsdp2" and version_of_torch() < (2, 6):
        raise Refused(f"{asked} needs torch 2.6 or newer, and this is {torch.__version__}: use --parallel ddp")
    for name, why in WITHOUT[ranks.way].items():
        if getattr(options, name):
            raise Refused("--{} and {} cannot be combined: {}".format(name.replace("_", "-"), asked, why))
    if options.precision in ms_amp.PRECISIONS:
        raise Refused(f"--precision {options.precision} and {asked} cannot be combined: it runs on one process only")
    if ranks.way == "fsdp2":
        if column_of(options.precision).startswith("transformer-engine"):
            raise Refused(f"--precision {options.precision} has not been tried with {asked}: use torchao.tensorwise")
        if options.weights != "float32":
            raise Refused(f"--weights {options.weights} and {asked} cannot be combined: its AdamW needs whole weights")
        if any(pair.startswith("adamw=") and pair != "adamw=torch" for pair in options.ops.split(",")):
            raise Refused(f"--ops {options.ops} and {asked} cannot be combined: only adamw=torch takes sharded weights")


def refuse_unlike(values: Dict[str, Any], ranks: Ranks) -> None:
    """Refuse ranks that were started differently, by the first flag; values: what must be alike, by flag.

    Every rank calls it.
    """
    everywhere = ranks.gathered(values)
    for rank, others in enumerate(everywhere):
        for flag, value in others.items():
            if value != everywhere[0][flag]:
                raise Refused(
                    f"{flag} differs between rank 0 and rank {rank}: start every host with the same flags and files"
                )


# --- the processes ---


def under_torchrun() -> bool:
    """Whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


@contextlib.contextmanager
def first_speaks() -> Iterator[None]:
    """A context in which only rank 0 prints, and only the first rank of each host says why all end."""
    if not under_torchrun() or os.environ["RANK"] == "0":
        yield
        return
    with open(os.devnull, "w", encoding="utf-8") as nowhere, contextlib.redirect_stdout(nowhere):
        try:
            yield
        except SystemExit as end:
            spoken = isinstance(end.code, str) and os.environ["LOCAL_RANK"] != "0"
            sys.exit(1 if spoken else end.code)


@contextlib.contextmanager
def joined(options: Options) -> Iterator[Ranks]:
    """The ranks of this run, which can reach each other inside this context; ALONE without torchrun.

    An error inside ends the process with one sentence: the lost ranks if there are any, or else that this one failed.
    """
    if not under_torchrun():
        yield ALONE
        return
    from smoke_tests.training.distributed.pulse import Absent, Pulse

    rank, world, own = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    here = f"rank {rank} of {world} on host {socket.gethostname()}"
    on_gpu = options.device != "cpu" and torch.cuda.is_available()
    if on_gpu:
        if own >= torch.cuda.device_count():
            ends(f"{here} has no GPU of its own: this host has {torch.cuda.device_count()}; lower --nproc-per-node")
        torch.cuda.set_device(own)
    try:
        pulse = Pulse(rank, world, PATIENCE)
    except Absent as error:
        ends(f"{here} {error}")
    try:
        connect("nccl" if on_gpu else "gloo", pulse.store, rank, world, here)
        yield Ranks(options.parallel or "ddp", rank, world)
    except Exception as error:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # by which torchrun ends the others as soon as one has ended
        lost = pulse.silent() if isinstance(error, RuntimeError) and world > 1 else ""
        if not lost:
            traceback.print_exc()
        reason = (str(error).splitlines() or [""])[0]
        ends(f"{here} lost {lost} and ends" if lost else f"{here} failed: {type(error).__name__}: {reason}")
    finally:
        pulse.end()
    dist.destroy_process_group()


def connect(backend: str, store: dist.Store, rank: int, world: int, here: str) -> None:
    """Connect the ranks, which are all here; or end this process with a sentence after PATIENCE."""
    try:
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=PATIENCE)
    except RuntimeError as error:
        variable, why = f"{backend.upper()}_SOCKET_IFNAME", str(error).splitlines()[0]
        ends(
            f"{here} could not connect to the other ranks within {PATIENCE.total_seconds():g} s ({why}): start all "
            f"again, and if it happens again, name the network interface between the hosts in {variable}"
        )


def ends(sentence: str) -> NoReturn:
    """End this process, whatever its rank, with a sentence."""
    print(f"fusebox: {sentence}", file=sys.stderr, flush=True)
    sys.exit(1)
