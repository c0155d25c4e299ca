"""Export a checkpoint to transformers: `python -m smoke_tests.training.export runs/NAME --into FOLDER`.

AutoModelForCausalLM.from_pretrained reads the folder, which appears under its name when every file is on the disk.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import torch

from smoke_tests.training import checkpoint, hugging_face, model_config, sharded_checkpoint, shards
from smoke_tests.training.command import Parser
from smoke_tests.training.documents import TextError
from smoke_tests.training.options import Options, Refused, model_of, recalled
from smoke_tests.training.text import tokenizer_of
from smoke_tests.training.tokens import files_of

UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def size_of(text: str) -> int:
    """The number of bytes that "5GB" or "500MiB" says."""
    match = re.fullmatch(r"([1-9]\d*) ?([KMG]i?B)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text} is not a size such as 5GB or 500MiB")
    return int(match.group(1)) * UNITS[match.group(2)]


def groups_of(state: Dict[str, torch.Tensor], most: int, width: int) -> List[List[str]]:
    """The names of weights in groups of at most `most` bytes, in order; a larger weight is a group by itself.

    width: bytes per number.
    """
    groups: List[List[str]] = []
    room = 0
    for name, weight in state.items():
        size = weight.numel() * width
        if not groups or size > room:
            groups.append([])
            room = most
        groups[-1].append(name)
        room -= size
    return groups


def write_weights(folder: Path, state: Dict[str, torch.Tensor], dtype: torch.dtype, most: int) -> int:
    """Write weights as safetensors, with an index if they are several files; the number of files."""
    from safetensors.torch import save_file

    width = torch.empty((), dtype=dtype).element_size()
    groups = groups_of(state, most, width)
    where: Dict[str, str] = {}
    for number, names in enumerate(groups, start=1):
        file = hugging_face.WHOLE
        if len(groups) > 1:
            file = file.replace(".", f"-{number:05}-of-{len(groups):05}.")
        # A copy, because a file may not hold parts of one larger tensor.
        copies = {name: state[name].to(dtype, copy=True).contiguous() for name in names}
        save_file(copies, str(folder / file), metadata={"format": "pt"})
        where.update(dict.fromkeys(names, file))
    if len(groups) > 1:
        total = sum(weight.numel() for weight in state.values()) * width
        write_json(folder / hugging_face.INDEX, {"metadata": {"total_size": total}, "weight_map": where})
    return len(groups)


def write_json(path: Path, content: Dict[str, object]) -> None:
    """Write a file of JSON."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


class Ids(NamedTuple):
    """What is known of a run's tokens: the files of its tokenizer, the id behind each document, and a note."""

    files: Tuple[Path, ...]
    end: Optional[int]
    note: str


def ids_of(options: Options) -> Ids:
    """The tokenizer of a run, as its data folder or --tokenizer has it today."""
    gone = [file for file in options.data if not Path(file).exists()]
    if gone:
        return Ids((), None, f"without a tokenizer, because {gone[0]} is not there")
    try:
        tokenizer = tokenizer_of(options.data, options.tokenizer)
        prepared = [Path(file) for file in options.data if shards.is_prepared(file)]
        # prepare_data's --eos may have named another token than the tokenizer's own.
        end = shards.read_index(prepared[0])["tokenizer"]["end"] if prepared else tokenizer.end
    except TextError as error:
        return Ids((), None, f"without a tokenizer: {error}")
    files = files_of(tokenizer)
    lacking = f"without a tokenizer, because {tokenizer.name or 'the byte tokenizer'} has no files"
    return Ids(files, end, "with its tokenizer" if files else lacking)


@contextlib.contextmanager
def appearing(folder: Path) -> Iterator[Path]:
    """The context that fills a folder under another name, and renames it when all is on the disk, or removes it."""
    partial = folder.with_name(folder.name + checkpoint.PARTIAL)
    try:
        partial.mkdir(parents=True)
    except FileExistsError:
        raise Refused(f"{partial} is there already: wait for the export that writes it, or remove it") from None
    try:
        yield partial
        for file in partial.iterdir():
            file.chmod(partial.stat().st_mode & 0o666)  # safetensors makes files that only their owner reads
            checkpoint.flush(file)
        checkpoint.flush(partial)
        os.replace(str(partial), str(folder))
        checkpoint.flush(folder.parent)
    except BaseException:
        shutil.rmtree(str(partial), ignore_errors=True)
        raise


def export(path: Path, into: Path, most: int, dtype: str) -> str:
    """Write the folder of a checkpoint; a line about it. Refused or CheckpointError if that is not possible."""
    package = hugging_face.package()
    if into.exists() and (not into.is_dir() or any(into.iterdir())):
        raise Refused(f"--into {into} is not an empty folder: name another one")
    path = checkpoint.named(path)
    content = sharded_checkpoint.load(path)
    options = recalled(content["options"])
    model, ids = model_of(options), ids_of(options)
    state = hugging_face.split(content["model"], model)
    dtype = dtype or str(next(iter(state.values())).dtype).partition(".")[2]
    try:
        with appearing(into) as folder:
            files = write_weights(folder, state, getattr(torch, dtype), most)
            write_json(folder / "config.json", model_config.config_of(model, dtype, ids.end))
            for file in ids.files:
                shutil.copyfile(str(file), str(folder / file.name))
    except (OSError, package.SafetensorError) as error:
        raise Refused(f"--into {into} cannot be written: {checkpoint.reason(error)}") from None
    where = f"{into}, {files} file{'s' if files > 1 else ''} of weights, {ids.note}"
    return f"{model.parameters:,} parameters of step {content['step']} of {path.parent} in {dtype}: {where}"


def main(arguments: Sequence[str]) -> int:
    """The command; its exit code."""
    parser = Parser(prog="export", description="Export a checkpoint to transformers.", allow_abbrev=False)
    parser.add_argument("checkpoint", type=Path, help="folder of a run, or one checkpoint")
    parser.add_argument("--into", type=Path, required=True, help="folder to write, which is empty or does not exist")
    parser.add_argument("--shard-size", type=size_of, default="5GB", help="bytes of weights per file, at most (5GB)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="", help="by default the checkpoint's")
    asked = parser.parse_args(arguments)
    try:
        print(export(asked.checkpoint, asked.into.resolve(), asked.shard_size, asked.dtype))
    except (Refused, checkpoint.CheckpointError) as error:
        sys.exit(f"fusebox: {error}")
    except KeyboardInterrupt:
        sys.exit(f"fusebox: stopped; nothing was written to {asked.into}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
