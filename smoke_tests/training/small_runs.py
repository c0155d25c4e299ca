"""Runs of the tiny model that take a second, what tests ask of them, and a tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Callable, Dict, List

import pytest
import torch

from smoke_tests.training import (
    checkpoint,
    deepspeed_config,
    logs,
    pretrain,
    trainer,
)
from smoke_tests.training.options import Options, Refused

FP8 = ("torchao.tensorwise", "torchao.rowwise")


PARTS = ("attention", "rms_norm", "rope", "swiglu", "cross_entropy")


def small(precision: str = "float32", steps: int = 6, **others: Any) -> Options:
    """A run of the tiny model that takes a second."""
    fields: Dict[str, Any] = {
        "batch_size": 2,
        "warmup": 2,
        "checkpoint_every": 2,
        "device": "cpu",
        "learning_rate": 3e-3,
    }
    return Options(**{**fields, "precision": precision, "steps": steps, **others})


def trained(options: Options, say: Callable[[str], None] = lambda line: None) -> List[float]:
    """The losses of a run, from its first step or from where it was left."""
    try:
        run, _ = pretrain.start(options)
        assert trainer.train(run, say) == 0
    finally:
        torch.use_deterministic_algorithms(False)  # as the next claim expects it
    return [row["loss"] for row in logs.read_log(Path(options.out) / "log.jsonl")]


def begun(options: Options, done: int) -> None:
    """Do the first steps of a run, and leave it with a checkpoint."""
    run, _ = pretrain.start(options)
    for step in range(done):
        run.update(step)
    run.save()
    run.release()


def last_of(folder: Path) -> Path:
    """The newest checkpoint of a run."""
    last = checkpoint.newest(folder)
    assert last is not None
    return last


def refusal_of(call: Callable[[], Any]) -> str:
    """The one sentence that a call ends with."""
    with pytest.raises((SystemExit, Refused, deepspeed_config.Unmapped)) as caught:
        call()
    text = str(caught.value)
    assert "\n" not in text and "Traceback" not in text
    return text


def words(folder: Path, eos: Any = "</s>") -> str:
    """A Hugging Face tokenizer of a few words; its folder."""
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {"?": 0, "nothing": 1, "else": 2, "<": 3, "/": 4, "s": 5, ">": 6}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="?"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.add_special_tokens(["<s>", "</s>"])
    made.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 7)])
    folder.mkdir(exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
    return str(folder)
