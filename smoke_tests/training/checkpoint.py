"""Checkpoints that are there whole or not at all: model, optimizer, FP8 state, random state and step in one file."""

from __future__ import annotations

import io
import os
import random
from pathlib import Path
from typing import Any, Dict, Optional

import torch

from fused_ops import version_of_torch
from training.precision import inner

FORMAT = 1
PARTIAL = ".partial"


class CheckpointError(RuntimeError):
    """A checkpoint that could not be written or read, and why, in one sentence."""


def save(folder: Path, step: int, content: Dict[str, Any], keep: int) -> Path:
    """Write the checkpoint of a step and remove all but the last `keep`; its path.

    It is written under another name, flushed to the disk and renamed, and then the folder is flushed: at every moment
    the newest file named *.pt is whole.
    """
    path = folder / f"step-{step:08}.pt"
    partial = path.with_name(path.name + PARTIAL)
    last = newest(folder)
    try:
        with open(partial, "wb") as file:
            torch.save({"format": FORMAT, "step": step, **content}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
        flush(folder)
    except (OSError, RuntimeError) as error:  # torch's writer turns what the disk says into its own
        if partial.exists():
            partial.unlink()
        kept = f"{last.name} is still there" if last else "there is none yet"
        raise CheckpointError(
            f"the checkpoint of step {step} cannot be written to {folder} ({reason(error)}); {kept}"
        ) from None
    for old in sorted(folder.glob("step-*.pt"))[:-keep]:
        old.unlink()
    return path


def reason(error: BaseException) -> str:
    """What the system said, at the root of an exception."""
    while error.__context__ is not None and not isinstance(error, OSError):
        error = error.__context__
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error).splitlines()[0]


def flush(folder: Path) -> None:
    """Make the names in a folder last."""
    handle = os.open(str(folder), os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def newest(folder: Path) -> Optional[Path]:
    """The checkpoint of the highest step in a folder, or None."""
    return max(folder.glob("step-*.pt"), default=None)


def load(path: Path) -> Dict[str, Any]:
    """What save() wrote, its tensors in main memory."""
    only_data = {"weights_only": True} if version_of_torch() >= (2, 1) else {}
    try:
        content: Dict[str, Any] = torch.load(str(path), map_location="cpu", **only_data)
        if content["format"] != FORMAT:
            raise ValueError("its format is {}, not {}".format(content["format"], FORMAT))
    except Exception as error:  # whatever a file of anything makes torch say
        raise CheckpointError(f"{path} is no checkpoint: {str(error).splitlines()[0]}") from None
    return content


# --- what is in it ---


def weights_of(model: torch.nn.Module) -> Dict[str, torch.Tensor]:
    """The weights, by the names that they have in any precision."""
    return {name: value for name, value in inner(model).state_dict().items() if not name.endswith("_extra_state")}


def fp8_state_of(model: torch.nn.Module) -> Dict[str, Dict[str, Any]]:
    """Transformer Engine's scales and amax histories, by layer; empty in any other precision."""
    found = {}
    for name, state in inner(model).state_dict().items():
        if name.endswith("_extra_state") and state is not None:
            stream = isinstance(state, io.BytesIO)  # so until 2.0
            code = torch.frombuffer(bytearray(state.getvalue()), dtype=torch.uint8) if stream else state
            found[name] = {"stream": stream, "code": code.cpu()}
    return found


def restore(model: torch.nn.Module, content: Dict[str, Any]) -> bool:
    """Load weights and, where the model and the checkpoint have one, FP8 state; whether the scales start anew."""
    model = inner(model)
    wanted = {name for name in model.state_dict() if name.endswith("_extra_state")}
    state = dict(content["model"])
    for name in wanted & set(content["fp8"]):
        entry = content["fp8"][name]
        state[name] = io.BytesIO(entry["code"].numpy().tobytes()) if entry["stream"] else entry["code"]
    model.load_state_dict(state, strict=False)
    missing = set(weights_of(model)) ^ set(content["model"])
    if missing:
        raise CheckpointError(f"the checkpoint is of another model: {min(missing)} is in one of them only")
    return bool(wanted - set(content["fp8"]))


def random_state() -> Dict[str, Any]:
    """The state of Python's and torch's generators."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    version, words, gauss = random.getstate()
    return {"python": [version, list(words), gauss], "torch": torch.get_rng_state(), "cuda": cuda}


def restore_random_state(state: Dict[str, Any]) -> None:
    """Set the generators to that state."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available() and state["cuda"]:
        torch.cuda.set_rng_state_all(state["cuda"])
