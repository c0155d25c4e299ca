"""A DeepSpeed configuration as options of pretrain.py: each field is mapped, has no effect, or is refused by name."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, Dict, Iterator, Tuple


class Unmapped(ValueError):
    """A field cannot be followed; the message is one sentence that says why."""


# Field (dots lead into tables) -> option.
MAPPED = {
    "train_micro_batch_size_per_gpu": "batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "clip",
    "steps_per_print": "log_every",
    "optimizer.params.lr": "learning_rate",
    "optimizer.params.eps": "eps",
    "optimizer.params.weight_decay": "weight_decay",
    "scheduler.params.warmup_max_lr": "learning_rate",
    "scheduler.params.warmup_num_steps": "warmup",
    "scheduler.params.total_num_steps": "steps",
    "scheduler.params.cos_min_ratio": "min_lr_factor",
}
SCHEDULES = {"WarmupLR": "constant", "WarmupCosineLR": "cosine"}
# The parameters that a schedule must set, because DeepSpeed's defaults differ from ours (runtime/lr_schedules.py).
REQUIRED = {
    "WarmupLR": ("warmup_type", "warmup_num_steps"),
    "WarmupCosineLR": ("warmup_type", "warmup_num_steps", "cos_min_ratio"),
}
# Field -> the values that change nothing here.
WITHOUT_EFFECT: Dict[str, Tuple[Any, ...]] = {
    "zero_optimization.stage": (0,),
    "fp16.enabled": (False,),
    "msamp.enabled": (False,),
    "optimizer.type": ("Adam", "AdamW"),
    "optimizer.params.adam_w_mode": (True,),
    "scheduler.params.warmup_min_lr": (0, 0.0),
    "scheduler.params.warmup_type": ("linear",),
    "wall_clock_breakdown": (True, False),
    "zero_allow_untested_optimizer": (True, False),
}


def applied(path: str, options: Any, processes: int = 1) -> Any:
    """The options as changed by the file; Unmapped names the first field that cannot be followed.

    "auto" leaves an option unchanged, as in transformers.
    """
    table = _read(path)
    changed: Dict[str, Any] = {}
    off = {name for name, part in table.items() if isinstance(part, dict) and part.get("enabled") is False}
    total = None
    for name, value in _leaves(table):
        if value == "auto" or (name.partition(".")[0] in off and not name.endswith(".enabled")):
            continue
        if name == "train_batch_size":
            total = value
            continue
        try:
            changed.update(_changes(name, value, table, options))
        except Unmapped as error:
            raise Unmapped(f"--deepspeed {path}: {error}") from None
    options = dataclasses.replace(options, **changed)
    product = options.batch_size * options.gradient_accumulation_steps * processes
    if total not in (None, product):
        makes = "one process makes" if processes == 1 else f"{processes} processes make"
        raise Unmapped(f"--deepspeed {path}: train_batch_size is {total}, and {makes} it {product}")
    return options


def _read(path: str) -> Dict[str, Any]:
    """The JSON object in the file."""
    try:
        table = json.loads(Path(path).read_text(encoding="utf-8"))
        if not isinstance(table, dict):
            raise ValueError("it is not a JSON object")
    except (OSError, ValueError) as error:
        raise Unmapped(f"--deepspeed {path} cannot be read: {error}") from None
    return table


def _changes(name: str, value: Any, table: Dict[str, Any], options: Any) -> Dict[str, Any]:
    """The options that a field of the file changes; Unmapped if it cannot be followed."""
    if name in MAPPED:
        kind = type(getattr(options, MAPPED[name]))
        if isinstance(value, bool) or not isinstance(value, (int, float)) or kind(value) != value:
            raise Unmapped(f"{name} is {value!r}, not a number that an option can hold")
        return {MAPPED[name]: kind(value)}
    if name == "optimizer.params.betas":
        if not isinstance(value, list) or [type(beta) for beta in value] != [float, float]:
            raise Unmapped(f"{name} is {value!r}, and has to be two numbers below 1")
        return {"beta1": value[0], "beta2": value[1]}
    if name == "scheduler.type" and value in SCHEDULES:
        for missing in sorted(set(REQUIRED[value]) - set(table["scheduler"].get("params", {}))):
            raise Unmapped(f"scheduler.params.{missing} is not set, and its default differs: set it")
        return {"schedule": SCHEDULES[value]}
    if name == "bf16.enabled":
        if value != (options.precision != "float32"):
            raise Unmapped(f"bf16.enabled is {value}, and --precision is {options.precision}")
        return {}
    known = WITHOUT_EFFECT.get(name, ())
    if not any(value == each and type(value) is type(each) for each in known):
        allowed = f"only {' or '.join(map(str, known))} is" if known else "it is not"
        raise Unmapped(f"{name} is {value!r}, and {allowed} supported: remove it")
    return {}


def _leaves(table: Dict[str, Any], prefix: str = "") -> Iterator[Tuple[str, Any]]:
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value
