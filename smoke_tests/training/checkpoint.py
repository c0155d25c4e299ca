"""Checkpoints that exist completely or not at all: model, optimizer, FP8 state, random state and step in one file."""

from __future__ import annotations

import inspect
import os
import random
import shutil
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional

import torch

from smoke_tests.operators.torch_adapter import version_of_torch
from smoke_tests.operators.transformer_engine_adapter import InFp8
from smoke_tests.training import ms_amp
from smoke_tests.training.llama import own_name
from smoke_tests.training.precision import inner

FORMAT = 1
FILE, FOLDER, PARTIAL = ".pt", ".dcp", ".partial"  # FOLDER: of a sharded run (sharded_checkpoint.py)
MOMENTS = ("exp_avg", "exp_avg_sq")  # as every AdamW calls them


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read; the message is one sentence that says why."""


def save(folder: Path, step: int, content: Dict[str, Any], keep: int, keep_every: int = 0) -> Path:
    """Write the checkpoint of a step, remove all but the last `keep` and every `keep_every`-th, and return its path.

    The file is written under another name, flushed to the disk and renamed; then the folder is flushed. So the newest
    file named *.pt is complete at every moment.
    """
    path = path_of(folder, step)
    partial = path.with_name(path.name + PARTIAL)
    try:
        write(partial, {"step": step, **content})
        os.replace(partial, path)
        flush(folder)
    except (OSError, RuntimeError) as error:  # torch's writer wraps the error of the disk
        if partial.exists():
            partial.unlink()
        raise not_written(folder, step, reason(error)) from None
    forget(folder, keep, keep_every)
    return path


def path_of(folder: Path, step: int, ending: str = FILE) -> Path:
    """The checkpoint of a step in the folder of a run."""
    return folder / f"step-{step:08}{ending}"


def step_of(path: Path) -> int:
    """The step of a checkpoint, by its name."""
    return int(path.stem[len("step-") :])


def write(path: Path, content: Dict[str, Any]) -> None:
    """Write a file that load() reads, and flush it to the disk."""
    with open(path, "wb") as file:
        torch.save({"format": FORMAT, **content}, file)
        file.flush()
        os.fsync(file.fileno())


def not_written(folder: Path, step: int, why: str) -> CheckpointError:
    """The error of a checkpoint that could not be written, which names the last one."""
    last = newest(folder)
    left = f"{last.name} is still there" if last else "there is none yet"
    return CheckpointError(f"the checkpoint of step {step} cannot be written to {folder} ({why}); {left}")


def forget(folder: Path, keep: int, keep_every: int = 0) -> None:
    """Remove all checkpoints but the last `keep` and those of every `keep_every`-th step."""
    for old in complete(folder)[:-keep]:
        if not keep_every or step_of(old) % keep_every:
            shutil.rmtree(old) if old.is_dir() else old.unlink()


def on_host(tree: Any) -> Any:
    """A nested state with its tensors copied into main memory, for a thread to write while training changes them."""
    if isinstance(tree, torch.Tensor):
        return tree.detach().to("cpu", copy=True)
    if isinstance(tree, dict):
        return {key: on_host(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(map(on_host, tree))
    return tree


def reason(error: BaseException) -> str:
    """The system's message at the root of an exception."""
    while error.__context__ is not None and not isinstance(error, OSError):
        error = error.__context__
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error).splitlines()[0]


def flush(folder: Path) -> None:
    """Flush the names in a folder to the disk."""
    handle = os.open(str(folder), os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def complete(folder: Path) -> List[Path]:
    """The checkpoints in a folder, by step."""
    return sorted([*folder.glob(f"step-*{FILE}"), *folder.glob(f"step-*{FOLDER}")])


def newest(folder: Path) -> Optional[Path]:
    """The checkpoint of the highest step in a folder, or None."""
    return max(complete(folder), default=None)


def load(path: Path, mmap: bool = False) -> Dict[str, Any]:
    """Read what save() wrote, with tensors in main memory, or with mmap in the file until they are used."""
    more: Dict[str, Any] = {"weights_only": True} if version_of_torch() >= (2, 1) else {}
    if mmap:
        more["mmap"] = True
    try:
        content: Dict[str, Any] = torch.load(str(path), map_location="cpu", **more)
        if content["format"] != FORMAT:
            raise ValueError("its format is {}, not {}".format(content["format"], FORMAT))
    except Exception as error:  # torch raises many kinds of errors for other files
        why = str(error).splitlines()[0].split(". ")[0]
        older = max((each for each in complete(path.parent) if each.name < path.name), default=None)
        further = f"; delete it to go on from {older.name}" if older else ""
        raise CheckpointError(f"{path} is not a whole checkpoint: {why}{further}") from None
    return content


def named(path: Path) -> Path:
    """The checkpoint that a path names: a file or a folder of its own, or the newest in the folder of a run."""
    last = newest(path) if path.is_dir() and path.suffix != FOLDER else path
    if last is None:
        raise CheckpointError(f"{path} holds no checkpoint")
    return last


# --- content ---


def state_of(model: torch.nn.Module) -> Dict[str, Dict[str, torch.Tensor]]:
    """The weights of a model and the state that FP8 adds."""
    return {"model": weights_of(model), "fp8": fp8_state_of(model)}


def weights_of(model: torch.nn.Module) -> Dict[str, torch.Tensor]:
    """The weights, by names that are the same in every precision."""
    named = inner(model).state_dict().items()
    return {own_name(name): ms_amp.plain(value) for name, value in named if not name.endswith("_extra_state")}


def fp8_state_of(model: torch.nn.Module) -> Dict[str, torch.Tensor]:
    """The scales and largest magnitudes of Transformer Engine's delayed scaling or of MS-AMP, by layer; else empty.

    Transformer Engine's state dict holds them as a pickle, which 2.18 and newer refuse to load; these are tensors.
    """
    state = ms_amp.scales_of(inner(model))
    for name, layer in inner(model).named_modules():
        products = products_of(name, layer)
        for way in ("scaling_fwd", "scaling_bwd"):
            scaling = getattr(layer, "fp8_meta", {}).get(way)
            for part in ("scale", "scale_inv", "amax_history"):  # scale_inv until 2.0
                held = getattr(scaling, part, None)
                if isinstance(held, torch.Tensor):
                    each = held.chunk(len(products), dim=-1)
                    state.update({f"{own}.{way}.{part}": values for own, values in zip(products, each)})
    return state


def products_of(name: str, layer: torch.nn.Module) -> List[str]:
    """The plain layers that correspond to a layer's products, in the order of its scales."""
    return [f"{name}.gate_up", f"{name}.down"] if hasattr(layer, "fc2_weight") else [name]


def restore(model: torch.nn.Module, content: Dict[str, Any]) -> bool:
    """Load the result of state_of(), in place; return whether delayed scaling starts anew for lack of scales."""
    own, saved = inner(model).state_dict(), content["model"]
    weights = {name: saved[own_name(name)] for name in own if own_name(name) in saved}
    inner(model).load_state_dict(ms_amp.like(weights, own), strict=False)
    differs = set(weights_of(model)) ^ set(content["model"])
    if differs:
        raise CheckpointError(f"the checkpoint is of another model: only one of them has {min(differs)}")
    for name, scale in ms_amp.scales_of(inner(model)).items():
        scale.copy_(content["fp8"][name])
    if not isinstance(model, InFp8) or not type(model.recipe).__name__.startswith("Delayed"):
        return False
    scaled = {name: layer for name, layer in inner(model).named_modules() if hasattr(layer, "fp8_meta")}
    products = {name: products_of(name, layer) for name, layer in scaled.items()}
    known = {name for name in scaled if all(f"{each}.scaling_fwd.scale" in content["fp8"] for each in products[name])}
    for name, layer in scaled.items():
        if name in known and not layer.fp8_meta_tensors_initialized:
            layer.fp8_meta.update(num_gemms=len(products[name]), recipe=model.recipe)
            takes = inspect.signature(layer.init_fp8_meta_tensors).parameters  # the recipe from 2.0 on
            layer.init_fp8_meta_tensors(*[model.recipe for _ in takes])
    now = fp8_state_of(model)
    for name in set(now) & set(content["fp8"]):
        now[name].copy_(content["fp8"][name])
    return known != set(scaled) or not set(now) <= set(content["fp8"])


def adamw_state(saved: Dict[str, Any], optimizer: torch.optim.Optimizer, column: str, step: int) -> Dict[str, Any]:
    """The saved state of any AdamW in the form of this implementation: the moments, and the number of steps done.

    torch keeps that count with each parameter as a tensor, which a step adds to in place, DeepSpeed as a number; apex
    and Transformer Engine keep it with each group, and what else a parameter has is a moment to the latter.
    """
    package = column.partition(".")[0]
    of_each: Dict[str, Callable[[], Dict[str, Any]]] = {
        "torch": lambda: {"step": torch.tensor(float(step))},
        "deepspeed": lambda: {"step": step},
    }
    count = of_each.get(package, dict)
    state = {
        index: {**{name: moments[name] for name in MOMENTS}, **count()} for index, moments in saved["state"].items()
    }
    own = optimizer.state_dict()["param_groups"]
    return {"state": state, "param_groups": [{**group, "step": step} for group in own]}


def random_state() -> Dict[str, Any]:
    """The state of Python's and torch's generators."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    version, words, gauss = random.getstate()
    return {"python": [version, list(words), gauss], "torch": torch.get_rng_state(), "cuda": cuda}


def restore_random_state(state: Dict[str, Any]) -> None:
    """Set the generators of Python and torch to a saved state."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    torch.set_rng_state(state["torch"])
    for device, own in zip(range(torch.cuda.device_count()), state["cuda"]):  # this machine may have fewer GPUs
        torch.cuda.set_rng_state(own, device)
