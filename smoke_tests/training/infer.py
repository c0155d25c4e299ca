"""Generate from a checkpoint: `python -m smoke_tests.training.infer runs/NAME --precision fp8 --prompt "def "`.

Prints the speed, and the perplexity of text that the model was not trained on, in that precision and in bf16.
"""

from __future__ import annotations

import math
import sys
import time
from pathlib import Path
from typing import Any, List, NamedTuple

import torch

from smoke_tests.operators.transformer_engine_adapter import InFp8
from smoke_tests.training import checkpoint, sharded_checkpoint
from smoke_tests.training.columns import columns_of
from smoke_tests.training.command import Parser
from smoke_tests.training.documents import TextError
from smoke_tests.training.llama import Llama
from smoke_tests.training.options import Options, Refused, model_of, recalled
from smoke_tests.training.precision import PRECISIONS, column_of, convert, inner
from smoke_tests.training.text import Text, tokenizer_of

ROWS = 16  # texts generated at a time, as FP8 products need a multiple of this


class Reader(NamedTuple):
    """A trained model and the way to call it."""

    model: torch.nn.Module
    options: Options
    device: str
    half: bool
    text: str  # the identity of its training text

    def __call__(self, *inputs: Any, **named: Any) -> torch.Tensor:
        with torch.no_grad(), torch.autocast(self.device, torch.bfloat16, enabled=self.half):
            output: torch.Tensor = self.model(*inputs, **named)
        return output


def opened(path: Path, precision: str, ops: str, device: str) -> Reader:
    """The model of a checkpoint, in any precision; FP8 takes its scales from the checkpoint if they are there."""
    if column_of(precision).startswith("transformer-engine") and device != "cuda":
        raise Refused(f"--precision {precision} needs a GPU; torchao.tensorwise is emulated on a CPU")
    content = sharded_checkpoint.load(path)
    options = recalled(content["options"])
    half = precision == "bf16" or (device == "cuda" and precision != "float32")
    model, dtype = model_of(options), torch.bfloat16 if half else torch.float32
    columns = columns_of(ops, device == "cuda", model.shape.head_size, half, options.document_masks)
    with torch.device(device):
        made = Llama(model, columns, dtype)
    converted = convert(made, precision).eval()
    checkpoint.restore(converted, content)
    return Reader(converted, options, device, half, content["text"])


def generate(reader: Reader, prompt: List[int], count: int, temperature: float, seed: int) -> torch.Tensor:
    """ROWS continuations of a prompt by `count` tokens, [ROWS, count]; temperature 0 takes the likeliest token.

    The first pass fills the KV cache; every further token is a pass of one position.
    """
    draw = torch.Generator(reader.device).manual_seed(seed)
    cache = inner(reader.model).empty_cache(ROWS)
    logits = reader(torch.tensor([prompt] * ROWS, device=reader.device), cache=cache)[:, -1]
    chosen = []
    for _ in range(count):
        if temperature:
            shares = torch.softmax(logits.float() / temperature, dim=-1)
            token = torch.multinomial(shares, 1, generator=draw)
        else:
            token = logits.argmax(dim=-1, keepdim=True)
        chosen.append(token)
        logits = reader(token, cache=cache)[:, -1]
    return torch.cat(chosen, dim=1)


def perplexity(reader: Reader, text: Text, windows: int) -> float:
    """exp of the mean loss on windows that no step of training takes, with the masks that it was trained with."""
    inner(reader.model).separator = text.separator if reader.options.document_masks else None
    tokens, targets = (each.to(reader.device) for each in text.unseen(windows))
    losses = [len(part) * float(reader(part, after)) for part, after in zip(tokens.split(8), targets.split(8))]
    return math.exp(sum(losses) / len(tokens))


def fp8_layers(reader: Reader) -> int:
    """How many layers of the model compute in FP8."""
    layers = inner(reader.model).modules()
    kinds = ("Float8Linear", "Linear") if isinstance(reader.model, InFp8) else ("Float8Linear",)
    return sum(type(layer).__name__ in kinds and type(layer) is not torch.nn.Linear for layer in layers)


def main(arguments: List[str]) -> int:
    """The command; its exit code."""
    parser = Parser(prog="infer", description="Generate from a checkpoint.")
    parser.add_argument("folder", type=Path, help="of a run, or one checkpoint")
    parser.add_argument("--precision", choices=PRECISIONS, default="bf16")
    parser.add_argument("--ops", default="fused")
    parser.add_argument("--prompt", default="def ")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--windows", type=int, default=64, help="of unseen text, for the perplexity")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    asked = parser.parse_args(arguments)
    try:
        path = checkpoint.named(asked.folder)
        precisions = dict.fromkeys((asked.precision, "bf16"))
        readers = {name: opened(path, name, asked.ops, asked.device) for name in precisions}
        options = readers["bf16"].options
        tokenizer, shape = tokenizer_of(options.data, options.tokenizer), model_of(options).shape
        prompt = tokenizer.encode([asked.prompt])[0].tolist()
        if not prompt or asked.tokens < 1 or len(prompt) + asked.tokens > shape.length:
            what = f"prompt and tokens are {len(prompt)} and {asked.tokens}"
            raise Refused(f"{what}, and have to be 1 or more each and {shape.length} at most together")
        text = Text.read(options.data, options.tokenizer, shape.vocabulary, shape.length, options.seed)
        if text.identity() != readers["bf16"].text:
            raise Refused(f"{path} was trained on another text: what it has not seen is not known from this one")
    except (Refused, TextError, checkpoint.CheckpointError) as error:
        sys.exit(f"fusebox: {error}")
    for name, reader in readers.items():
        generate(reader, prompt, min(2, asked.tokens), 0.0, 0)  # a first call, for what is chosen or compiled once
        began = time.perf_counter()
        made = generate(reader, prompt, asked.tokens, asked.temperature, options.seed).cpu()
        rate = made.numel() / (time.perf_counter() - began)
        print(f"{name}: {fp8_layers(reader)} FP8 layers, {rate:,.0f} tokens/s for {ROWS} texts at a time, ", end="")
        print(f"perplexity {perplexity(reader, text, asked.windows):.4f} on unseen text")
        print("  " + repr(asked.prompt + tokenizer.decode(made[0].tolist())))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
