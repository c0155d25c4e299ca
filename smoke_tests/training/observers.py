"""Who watches a run from outside, by flag: TensorBoard, Weights & Biases, and torch's profiler."""

from __future__ import annotations

import contextlib
import importlib
import secrets
from pathlib import Path
from typing import Any, Callable, ContextManager, Dict, List

import torch

from smoke_tests.training.options import Options, Refused

Observer = Callable[[int, Dict[str, float]], Any]  # takes a step and its numbers, by name


def refuse(options: Options) -> None:
    """Refuse an observer whose package is not installed, and a step to profile that the run does not have."""
    for asked, flag, module, package in (
        (options.tensorboard, "--tensorboard", "torch.utils.tensorboard", "tensorboard"),
        (options.wandb, "--wandb", "wandb", "wandb"),
    ):
        try:
            if asked:
                importlib.import_module(module)
        except ImportError:
            raise Refused(
                f"{flag} needs the package {package}, which this environment lacks: install it or leave the flag out"
            ) from None
    if options.profile > options.steps:
        raise Refused(f"--profile {options.profile}: the run has {options.steps} steps: name one of them")


def observers(options: Options, step: int, stack: contextlib.ExitStack) -> List[Observer]:
    """The observers of a run that begins at a step; the stack closes them."""
    watching: List[Observer] = []
    if options.tensorboard:
        module = importlib.import_module("torch.utils.tensorboard")
        writer = module.SummaryWriter(str(Path(options.out, "tensorboard")), purge_step=step)
        stack.callback(writer.close)
        watching.append(lambda step, row: [writer.add_scalar(name, value, step) for name, value in row.items()])
    if options.wandb:
        wandb = importlib.import_module("wandb")
        identity = Path(options.out, "wandb-id")  # a resumed run goes on in the same plots
        if not identity.exists():
            identity.write_text(secrets.token_hex(4), encoding="utf-8")
        mine = {"id": identity.read_text(encoding="utf-8"), "resume": "allow", "dir": options.out}
        run = wandb.init(project=options.wandb, name=Path(options.out).name, config=vars(options), **mine)
        stack.callback(run.finish)
        watching.append(lambda step, row: run.log(row, step=step))
    return watching


@contextlib.contextmanager
def _traced(path: Path) -> Any:
    """The context whose operators and kernels are written as a Chrome trace, for chrome://tracing or Perfetto."""
    with torch.profiler.profile(record_shapes=True) as profiler:
        yield
    profiler.export_chrome_trace(str(path))


def profiled(options: Options, step: int) -> ContextManager[Any]:
    """The context in which a step is done: --profile N has the N-th one traced."""
    if step + 1 != options.profile:
        return contextlib.nullcontext()
    return _traced(Path(options.out, f"trace-{options.profile}.json"))
