"""Checkpoints of a sharded run: a folder, step-*.dcp, into which every rank writes its part of the weights and moments.

The parts are torch.distributed.checkpoint's, by the names "model/NAME" and "optimizer/INDEX/NAME"; rest.pt holds all
else. A run of any number of ranks reads its own parts out of them, and one process reads all.
"""

from __future__ import annotations

import os
import shutil
import warnings
from pathlib import Path
from typing import Any, Callable, Dict, Optional

import torch

from smoke_tests.training import checkpoint
from smoke_tests.training.checkpoint import MOMENTS, CheckpointError
from smoke_tests.training.parallel import Ranks

REST = "rest.pt"
Template = Callable[[str], torch.Tensor]  # a name in the folder -> a tensor like this rank's part of it


def save(folder: Path, step: int, content: Dict[str, Any], ranks: Ranks, keep: int, keep_every: int = 0) -> Path:
    """Write the checkpoint of a step as checkpoint.save() does: under another name, flushed, renamed.

    Every rank calls it; CheckpointError on all if one cannot write. A folder cannot be renamed to one that exists, so
    the checkpoint of a step that was saved before stays.
    """
    path = checkpoint.path_of(folder, step, checkpoint.FOLDER)
    if ranks.agreed(path.exists()):
        return path
    partial = path.with_name(path.name + checkpoint.PARTIAL)
    with ranks.together(CheckpointError):
        if ranks.first:
            shutil.rmtree(partial, ignore_errors=True)  # what a killed run left
    optimizer = content["optimizer"]
    tensors = {f"model/{name}": weight for name, weight in content["model"].items()}
    for index, state in optimizer["state"].items():
        tensors.update({f"optimizer/{index}/{name}": state[name] for name in MOMENTS})
    others = {**content, "step": step, "model": {}, "optimizer": {**optimizer, "state": {}}}
    why = _write(partial, tensors)
    with ranks.together(CheckpointError):
        try:
            if why:
                raise OSError(why)
            if ranks.first:
                checkpoint.write(partial / REST, others)
                os.replace(partial, path)
                checkpoint.flush(folder)
        except (OSError, RuntimeError) as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise checkpoint.not_written(folder, step, checkpoint.reason(error)) from None
        if ranks.first:
            checkpoint.forget(folder, keep, keep_every)
    return path


def _write(folder: Path, tensors: Dict[str, torch.Tensor]) -> str:
    """Write every rank's parts; why that failed, on the ranks that know, or ""."""
    import torch.distributed.checkpoint as dcp

    try:
        dcp.save(tensors, checkpoint_id=str(folder))
    except dcp.api.CheckpointException as error:
        return "; ".join(f"rank {rank}: {checkpoint.reason(failure[0])}" for rank, failure in error.failures.items())
    return ""


def load(path: Path) -> Dict[str, Any]:
    """Read a checkpoint, a file or a folder, with whole tensors in main memory."""
    return placed(rest(path), path)


def rest(path: Path, mmap: bool = False) -> Dict[str, Any]:
    """Read all of a checkpoint but the parts of a folder; mmap: leave its tensors in the file until they are used."""
    return checkpoint.load(path / REST if path.is_dir() else path, mmap)


def placed(content: Dict[str, Any], path: Path, template: Optional[Template] = None) -> Dict[str, Any]:
    """A checkpoint with its weights and moments, given what rest() read of it.

    template: of a sharded run, which gets this rank's parts, and of which every rank calls it; otherwise whole tensors.
    """
    if not path.is_dir():
        return content if template is None else _sharded(content, template)
    import torch.distributed.checkpoint as dcp

    try:
        entries = dcp.FileSystemReader(str(path)).read_metadata().state_dict_metadata
        tensors = {
            name: torch.empty(entry.size, dtype=entry.properties.dtype) if template is None else template(name)
            for name, entry in entries.items()
        }
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is", UserWarning)  # a single process reads it
            dcp.load(tensors, checkpoint_id=str(path))
    except (Exception, dcp.api.CheckpointException) as error:  # the latter is not a subclass of Exception
        raise CheckpointError(f"{path} is not a checkpoint: {str(error).splitlines()[0]}") from None
    model, state = content["model"], content["optimizer"]["state"]
    for name, tensor in tensors.items():
        kind, _, own = name.partition("/")
        if kind == "model":
            model[own] = tensor
        else:
            index, _, moment = own.partition("/")
            state.setdefault(int(index), {})[moment] = tensor
    return content


def _sharded(content: Dict[str, Any], template: Template) -> Dict[str, Any]:
    """A checkpoint of whole tensors with this rank's part of each instead."""
    from torch.distributed.tensor import distribute_tensor

    def part(name: str, tensor: torch.Tensor) -> torch.Tensor:
        like: Any = template(name)
        own: torch.Tensor = distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements)
        return own

    model = {name: part(f"model/{name}", weight) for name, weight in content["model"].items()}
    state = {
        index: {name: part(f"optimizer/{index}/{name}", moments[name]) for name in MOMENTS}
        for index, moments in content["optimizer"]["state"].items()
    }
    return {**content, "model": model, "optimizer": {**content["optimizer"], "state": state}}


def template(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Template:
    """The template of a sharded model and its optimizer; KeyError of a name that they lack."""
    weights = checkpoint.weights_of(model)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]

    def like(name: str) -> torch.Tensor:
        kind, _, own = name.partition("/")
        return torch.empty_like(weights[own] if kind == "model" else parameters[int(own.partition("/")[0])])

    return like
