"""Pre-train a Mistral as the HARE guide does, with transformers' Trainer and accelerate, in bfloat16 or FP8.

    python -m smoke_tests.training.recipes.hare.train --model hare-1.1b --data data/corpus --precision fp8 \\
        --output_dir runs/hare --max_steps 1000 --save_steps 100

Every flag of transformers.TrainingArguments works; AdamW's betas are HARE's 0.9 and 0.95. In FP8, accelerate puts
Transformer Engine's linear layers, with delayed scaling, in place of torch's. `--deepspeed ds_config.json` takes the
configuration beside this file; torchrun has to start it then. `--resume_from_checkpoint last` continues from the newest
checkpoint.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from dataclasses import dataclass, field
from typing import Any, Dict, List, Optional, Sequence, Union

import torch
from transformers import (
    HfArgumentParser,
    MistralConfig,
    MistralForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)
from transformers.trainer_utils import IntervalStrategy, SchedulerType, get_last_checkpoint

from smoke_tests.training import model_config
from smoke_tests.training.command import Parser
from smoke_tests.training.documents import TextError
from smoke_tests.training.models import MODELS, Model
from smoke_tests.training.text import Text

PRECISIONS = ("float32", "bf16", "fp8")
# HARE's settings of accelerate's delayed scaling. Trainer takes settings of accelerate only from the environment.
FP8 = {"MIXED_PRECISION": "fp8", "FP8_BACKEND": "TE", "FP8_FORMAT": "HYBRID", "FP8_MARGIN": "0", "FP8_INTERVAL": "1"}


@dataclass
class Arguments(TrainingArguments):  # type: ignore[misc]
    """The flags of a run: transformers', with other defaults, and which model learns what in which precision."""

    model: str = field(default="tiny", metadata={"help": "name of the model", "choices": list(MODELS)})
    data: List[str] = field(default_factory=list, metadata={"help": "a folder of prepare_data, or text files"})
    tokenizer: str = field(default="", metadata={"help": "folder of a tokenizer; by default tokens are bytes"})
    precision: str = field(default="bf16", metadata={"help": "of the linear layers", "choices": PRECISIONS})
    per_device_train_batch_size: int = field(default=2, metadata={"help": "windows per forward pass"})
    learning_rate: float = field(default=3e-4, metadata={"help": "highest learning rate"})
    adam_beta2: float = field(default=0.95, metadata={"help": "second beta of AdamW"})
    weight_decay: float = field(default=0.1, metadata={"help": "weight decay of matrices"})
    lr_scheduler_type: Union[SchedulerType, str] = field(default="cosine", metadata={"help": "the schedule"})
    logging_strategy: Union[IntervalStrategy, str] = field(default="steps", metadata={"help": "when to log"})
    logging_steps: float = field(default=1, metadata={"help": "steps between two lines of the log"})
    report_to: Optional[List[str]] = field(default_factory=lambda: ["none"], metadata={"help": "where to log as well"})

    def __post_init__(self) -> None:
        self.bf16 = self.precision != "float32"  # DeepSpeed's too, which in FP8 holds what is not a linear layer's
        super().__post_init__()


class Windows(torch.utils.data.Dataset):  # type: ignore[misc]
    """The windows of a text, tokens [length] each; the model itself compares them with the ones that follow."""

    def __init__(self, text: Text) -> None:
        self.text = text

    def __len__(self) -> int:
        return self.text.count

    def __getitem__(self, index: int) -> Dict[str, torch.Tensor]:
        tokens = self.text.windows(index, 1)[0][0]
        return {"input_ids": tokens, "labels": tokens}


class Flags(HfArgumentParser):  # type: ignore[misc]
    """transformers' parser of dataclasses, which ends with one sentence about what is wrong."""

    error = Parser.error


def refuse_without_fp8() -> None:
    """SystemExit if this environment or its GPU cannot compute in FP8 with Transformer Engine."""
    if importlib.util.find_spec("transformer_engine") is None:
        sys.exit("fusebox: --precision fp8 needs Transformer Engine, which is not installed here; bf16 needs nothing")
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9):
        sys.exit("fusebox: --precision fp8 needs a GPU of compute capability 8.9 or newer; bf16 runs on any device")


def checkpoint_of(arguments: Arguments) -> Optional[str]:
    """The folder to continue from, or None; SystemExit if there is none."""
    asked = arguments.resume_from_checkpoint
    if asked is None:
        return None
    folder = arguments.output_dir if asked == "last" else asked
    last = get_last_checkpoint(folder) if asked == "last" and os.path.isdir(folder) else asked
    if last is None or not os.path.isdir(last):
        sys.exit(f"fusebox: --resume_from_checkpoint {asked}: {folder} has no checkpoint; leave the flag out to begin")
    return str(last)


def mistral(model: Model) -> MistralForCausalLM:
    """A Mistral of that shape, with fresh weights."""
    described = model_config.config_of(model, "float32", None)
    keys = described.keys() & {*model_config.SIZES, *model_config.OPTIONAL}
    return MistralForCausalLM(MistralConfig(**{key: described[key] for key in keys}, sliding_window=None))


def trainer_of(arguments: Arguments, callbacks: Sequence[TrainerCallback] = ()) -> Trainer:
    """A Trainer with a fresh model and its text."""
    set_seed(arguments.seed)
    model = MODELS[arguments.model]
    text = Text.read(
        arguments.data, arguments.tokenizer, model.shape.vocabulary, model.shape.length, seed=arguments.seed
    )
    os.environ.update({f"ACCELERATE_{name}": value for name, value in FP8.items() if arguments.precision == "fp8"})
    return Trainer(mistral(model), arguments, train_dataset=Windows(text), callbacks=list(callbacks))


def main(words: Sequence[str], callbacks: Sequence[TrainerCallback] = ()) -> List[Dict[str, Any]]:
    """Train as these flags say; the log of the run, one entry per logged step, those before a resume included."""
    (arguments,) = Flags(Arguments, prog="train").parse_args_into_dataclasses(list(words))
    if arguments.precision == "fp8":
        refuse_without_fp8()
    checkpoint = checkpoint_of(arguments)
    try:
        trainer = trainer_of(arguments, callbacks)
    except TextError as error:
        sys.exit(f"fusebox: {error}")
    trainer.train(resume_from_checkpoint=checkpoint)
    trainer.save_model()
    log: List[Dict[str, Any]] = trainer.state.log_history
    return log


if __name__ == "__main__":
    main(sys.argv[1:])
