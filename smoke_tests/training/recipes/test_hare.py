"""HARE's recipe on the tiny model: it learns, it continues after a kill, and it refuses what cannot be run."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Dict, Iterator, List, Sequence
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from smoke_tests.claims import proves
from smoke_tests.training.small_runs import refusal_of

pytestmark = pytest.mark.usefixtures("one_thread")
STEPS, SAVED, KILLED = 10, 4, 6
CONFIGURATION = Path(__file__).parent / "hare" / "ds_config.json"


@pytest.fixture(autouse=True)
def anew() -> Iterator[None]:
    """Leave no settings to the next Accelerator of this process."""
    from accelerate.state import AcceleratorState, GradientState

    with mock.patch.dict("os.environ"):
        yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def run(folder: Path, *words: str, callbacks: Sequence[Any] = ()) -> List[float]:
    """The losses of a run of the tiny model on the CPU, in nats per byte."""
    from smoke_tests.training.recipes.hare import train

    data = folder.parent / "text.py"
    data.write_text(Path(json.__file__).read_text(encoding="utf-8") * 4, encoding="utf-8")
    flags = ["--output_dir", folder, "--data", data, "--use_cpu", "--max_steps", STEPS, "--save_steps", SAVED]
    flags += ["--learning_rate", 3e-3, "--disable_tqdm", "True", *words]
    return [row["loss"] for row in train.main(list(map(str, flags)), callbacks) if "loss" in row]


def watcher(kill_at: int = 0) -> Any:
    """Notes the steps that a run takes; at the end of one it may stop the run as a kill does, and nothing is saved."""
    from transformers import TrainerCallback

    class Watcher(TrainerCallback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.steps: List[int] = []

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.steps.append(state.global_step)
            if state.global_step == kill_at:
                raise KeyboardInterrupt

    return Watcher()


@proves(
    "HARE's recipe trains a Mistral with transformers' Trainer in bfloat16, its loss falling by a nat per byte or "
    "more; after a kill it resumes from its checkpoint and logs the same losses as a run that was not killed",
    seed="A11",
    package="accelerate",
    until="1.11",
)
def test_recipe(tmp_path: Path, measured: Dict[str, Any]) -> None:
    whole = run(tmp_path / "whole")
    measured["first"], measured["last"] = whole[0], whole[-1]
    assert len(whole) == STEPS and all(map(math.isfinite, whole))
    assert whole[0] - whole[-1] >= 1
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "killed", callbacks=[watcher(kill_at=KILLED)])
    rest = watcher()
    assert run(tmp_path / "killed", "--resume_from_checkpoint", "last", callbacks=[rest]) == whole
    assert rest.steps == list(range(SAVED + 1, STEPS + 1)), "it did not begin at the checkpoint"
    weights = [load_file(tmp_path / name / "model.safetensors") for name in ("whole", "killed")]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weight, weights[1][name]) for name, weight in weights[0].items())


@proves(
    "DeepSpeed reads HARE's configuration, as transformers completes it from the flags, as bfloat16 without float16 "
    "and without ZeRO, and takes batch and clipping from the flags",
    seed="A08",
    package="accelerate",
    until="1.11",
)
def test_configuration(tmp_path: Path) -> None:
    from deepspeed.runtime.config import DeepSpeedConfig
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    from smoke_tests.training.recipes.hare.train import Arguments

    arguments = Arguments(str(tmp_path), use_cpu=True, per_device_train_batch_size=3, max_grad_norm=0.5)
    completed = HfTrainerDeepSpeedConfig(str(CONFIGURATION))
    completed.trainer_config_process(arguments)
    read = DeepSpeedConfig(completed.config)
    assert completed.config["bf16"] == {"enabled": True} and completed.config["fp16"] == {"enabled": False}
    assert read.zero_optimization_stage == 0
    assert (read.train_micro_batch_size_per_gpu, read.gradient_accumulation_steps) == (3, 1)
    assert read.gradient_clipping == 0.5
    # Newer versions have a separate table for each.
    assert read.bfloat16_config.enabled if hasattr(read, "bfloat16_config") else read.bfloat16_enabled
    assert not (read.float16_config.enabled if hasattr(read, "float16_config") else read.fp16_enabled)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--precision", "fp8"], "--precision fp8 needs"),
        (["--resume_from_checkpoint", "last"], "--resume_from_checkpoint last"),
        (["--model", "none"], "--model"),
        (["--data", "nowhere.txt"], "nowhere.txt"),
    ],
    ids=["fp8", "checkpoint", "model", "data"],
)
@proves(
    "HARE's recipe refuses in one sentence FP8 without Transformer Engine or a GPU for it, a checkpoint, a text and a "
    "model that do not exist",
    package="accelerate",
    until="1.11",
)
def test_refusals(words: List[str], named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    text = refusal_of(lambda: run(tmp_path / "out", *words))
    assert text.startswith("fusebox: ") and named in text
    assert not (tmp_path / "out").exists()
