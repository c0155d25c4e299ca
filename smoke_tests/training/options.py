"""What a run of pretrain.py is asked for: one field per flag, and the command line that fills the fields in."""

from __future__ import annotations

import argparse
import dataclasses
import operator as operators
import sys
from typing import Any, Callable, Dict, NoReturn, Sequence, Tuple

from smoke_tests.training import ms_amp
from smoke_tests.training.models import MODELS, Model, parameters_of
from smoke_tests.training.precision import PRECISIONS, column_of


class Refused(ValueError):
    """A run that cannot be made, and why, in one sentence."""


def flag(default: Any, text: str, **named: Any) -> Any:
    """A field that is a command line flag with this help."""
    return dataclasses.field(default=default, metadata={"help": text, **named})


@dataclasses.dataclass
class Options:
    """What a run is asked for; each field is a flag."""

    model: str = flag("tiny", "which model", choices=list(MODELS))
    precision: str = flag(
        "bf16",
        "of the linear layers; fp8 is transformer-engine.delayed",
        choices=(*PRECISIONS, *ms_amp.PRECISIONS),
    )
    weights: str = flag(
        "float32",
        "their dtype, and that of gradients; of bfloat16 ones AdamW keeps the other 16 bits of float32",
        choices=("float32", "bfloat16"),
    )
    ops: str = flag("fused", "naive, fused, or pairs: attention=flash-attn,rope=torch (the rest stays fused)")
    te_modules: bool = flag(False, "a block's norms, gate and products as Transformer Engine's modules")
    batch_size: int = flag(8, "windows of a forward pass", least=1)
    gradient_accumulation_steps: int = flag(1, "forward passes of a step", least=1)
    length: int = flag(0, "tokens of a window; 0: the model's", least=0)
    layers: int = flag(0, "layers, to try a part of a model; 0: the model's", least=0)
    steps: int = flag(200, "of the whole run", least=1)
    seed: int = flag(0, "of weights and order", least=0)
    data: Tuple[str, ...] = flag((), "text or .jsonl files; without, the standard library's sources")
    tokenizer: str = flag("", "folder of a Hugging Face tokenizer; without, tokens are bytes")
    learning_rate: float = flag(6e-4, "at its highest", above=0.0)
    schedule: str = flag(
        "cosine", "cosine (down to a tenth) or constant, after the warm-up", choices=("cosine", "constant")
    )
    warmup: int = flag(20, "steps until the learning rate is reached", least=0)
    weight_decay: float = flag(0.1, "of matrices", least=0.0)
    beta1: float = flag(0.9, "of AdamW", least=0.0, below=1.0)
    beta2: float = flag(0.95, "of AdamW", least=0.0, below=1.0)
    eps: float = flag(1e-8, "of AdamW", above=0.0)
    clip: float = flag(1.0, "largest norm of the gradient; 0: none", least=0.0)
    recompute: bool = flag(False, "keep no activations of a block (activation checkpointing)")
    compile: bool = flag(False, "compile each block by torch.compile")
    graphs: bool = flag(False, "replay forward and backward as a CUDA graph")
    deterministic: bool = flag(False, "only algorithms that repeat to the last bit; one thread on a CPU")
    guard: int = flag(0, "compare with high precision every N steps and fall back where they differ; 0: never", least=0)
    guard_steps: int = flag(4, "steps of such a comparison", least=1)
    deepspeed: str = flag("", "a DeepSpeed configuration; it wins over flags")
    out: str = flag("", "folder; by default runs/MODEL-PRECISION-SEED")
    resume: bool = flag(False, "go on with the newest checkpoint in --out")
    checkpoint_every: int = flag(100, "steps; 0: at the end only", least=0)
    keep: int = flag(2, "how many checkpoints stay", least=1)
    log_every: int = flag(10, "steps between lines where the output is no terminal", least=1)
    device: str = flag("", "cuda or cpu; by default cuda where there is a GPU", choices=("", "cuda", "cpu"))


# What a resumed run may have otherwise than the one that wrote the checkpoint.
FREE = {
    "precision",
    "ops",
    "te_modules",
    "steps",
    "recompute",
    "compile",
    "graphs",
    "guard",
    "guard_steps",
    "deepspeed",
    "out",
    "resume",
}
FREE |= {"checkpoint_every", "keep", "log_every", "device", "data", "tokenizer"}  # of the text its hash is compared


def model_of(options: Options) -> Model:
    """The model that a run is of: the named one, or a part of it."""
    model = MODELS[options.model]
    shape = model.shape._replace(
        length=options.length or model.shape.length, layers=options.layers or model.shape.layers
    )
    return model._replace(shape=shape, parameters=parameters_of(shape))


class Parser(argparse.ArgumentParser):
    """One that says what is wrong in one sentence."""

    def error(self, message: str) -> NoReturn:
        sys.exit(f"fusebox: {message}; --help lists all flags")


def flag_name(field: Any) -> str:
    """The command line flag of a field of Options."""
    return "--" + str(field.name).replace("_", "-")


def parse(arguments: Sequence[str]) -> Options:
    """Options from flags; exits with one sentence where they are wrong."""
    parser = Parser(prog="pretrain", description="Pre-train a Llama.", allow_abbrev=False)
    for field in dataclasses.fields(Options):
        more = {"choices": field.metadata["choices"]} if "choices" in field.metadata else {}
        text, default = field.metadata["help"], field.default
        if isinstance(default, bool):
            parser.add_argument(flag_name(field), action="store_true", help=text)
        elif isinstance(default, tuple):
            parser.add_argument(flag_name(field), nargs="+", default=default, help=text, metavar="FILE")
        else:
            shown = text + ("" if default in ("", 0) else f" ({default})")
            parser.add_argument(flag_name(field), type=type(default), default=default, help=shown, **more)
    values = vars(parser.parse_args(arguments))
    options = Options(**{**values, "data": tuple(values["data"])})
    if wrong := out_of_bounds(options):
        parser.error(wrong)
    if options.guard and options.guard_steps > options.guard:
        parser.error(f"--guard-steps is {options.guard_steps}, more than the {options.guard} of --guard")
    if options.guard and column_of(options.precision) == "torch":
        parser.error(f"--guard watches FP8, and --precision {options.precision} has none")
    return options


def out_of_bounds(options: Options) -> str:
    """The first option that is none of the numbers it may be, and what it has to be; else nothing."""
    bounds: Dict[str, Tuple[str, Callable[[Any, Any], bool]]] = {
        "least": ("at least", operators.ge),
        "above": ("more than", operators.gt),
        "below": ("less than", operators.lt),
    }
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        for name, (words, holds_for) in bounds.items():
            bound = field.metadata.get(name)
            if bound is not None and not holds_for(value, bound):
                return f"{flag_name(field)} is {value}, and has to be {words} {bound}"
    return ""
