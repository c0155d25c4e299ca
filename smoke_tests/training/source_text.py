"""Text for a long run: the source files of programs as documents, and a tokenizer trained on them.

    python -m smoke_tests.training.source_text FOLDER ... --out TEXT
    python -m smoke_tests.training.prepare_data TEXT/*.jsonl --tokenizer TEXT --out DATA

The sources that a Linux distribution packages, such as linux-source, are hundreds of millions of tokens.
"""

from __future__ import annotations

import hashlib
import importlib.util
import itertools
import json
import sys
from pathlib import Path
from typing import Iterator, Sequence, Set

from smoke_tests.training.command import Parser
from smoke_tests.training.documents import TextError

SUFFIXES = {".c", ".h", ".cc", ".cpp", ".s", ".py", ".pl", ".sh", ".rst", ".md", ".txt", ".texi", ".awk", ".go", ".ads"}
SUFFIXES |= {".adb", ".d", ".f90", ".f", ".m", ".m4", ".exp", ".def", ".dts", ".dtsi", ".yaml"}
SHORTEST, LONGEST = 2**8, 2**18  # characters of a document; longer ones are mostly tables that a program wrote
END = "<|end|>"
EVERY = 16  # the tokenizer is trained on every 16th document


def sources(folder: Path, seen: Set[bytes]) -> Iterator[str]:
    """The source files of a folder in UTF-8, by name; none twice, where `seen` has the hashes of those before."""
    for path in sorted(folder.rglob("*")):
        if path.suffix.lower() not in SUFFIXES or path.is_symlink() or not path.is_file():
            continue
        try:
            text = path.read_bytes().decode("utf-8")
        except UnicodeDecodeError:
            continue
        digest = hashlib.sha256(text.encode()).digest()
        if SHORTEST <= len(text) <= LONGEST and digest not in seen:
            seen.add(digest)
            yield text


def train_tokenizer(files: Sequence[Path], vocabulary: int, out: Path) -> None:
    """Train a byte-level BPE of at most so many tokens on documents of .jsonl files; write a Hugging Face folder."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    def lines(path: Path) -> Iterator[str]:
        with open(path, encoding="utf-8") as file:
            yield from (json.loads(line)["text"] for line in itertools.islice(file, 0, None, EVERY))

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=sys.stdout.isatty(),
    )
    tokenizer.train_from_iterator(itertools.chain.from_iterable(map(lines, files)), trainer)
    (out / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}) + "\n", encoding="utf-8")
    tokenizer.save(str(out / "tokenizer.json"))


def main(arguments: Sequence[str]) -> int:
    """The command; its exit code."""
    parser = Parser(prog="source_text", description="Make text and a tokenizer from source files.", allow_abbrev=False)
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="folders with source files")
    parser.add_argument("--out", required=True, type=Path, help="folder for a .jsonl of each, and the tokenizer")
    parser.add_argument("--vocabulary", type=int, default=32000, help="tokens of the tokenizer, at most (32000)")
    asked = parser.parse_args(arguments)
    if asked.vocabulary <= 256:
        parser.error(f"--vocabulary is {asked.vocabulary}, but must be more than the 256 bytes")
    for folder in asked.folders:
        if not folder.is_dir():
            parser.error(f"{folder} is not a folder")
    if importlib.util.find_spec("tokenizers") is None:
        parser.error("a tokenizer is trained with the package tokenizers, which this environment lacks")
    files = [asked.out / f"{folder.resolve().name}.jsonl" for folder in asked.folders]
    if len(set(files)) < len(files):
        parser.error("two folders have the same name, and the .jsonl of each takes it: rename one")
    try:
        asked.out.mkdir(parents=True, exist_ok=True)
        seen: Set[bytes] = set()
        for folder, path in zip(asked.folders, files):
            write_documents(path, sources(folder, seen))
        train_tokenizer(files, asked.vocabulary, asked.out)
    except TextError as error:
        sys.exit(f"fusebox: {error}")
    except OSError as error:
        place = error.filename or f"--out {asked.out}"  # a full disk has no name
        sys.exit(f"fusebox: {place}: {error.strerror or error}; {asked.out} is incomplete: correct this and run again")
    return 0


def write_documents(path: Path, texts: Iterator[str]) -> None:
    """Write a .jsonl file of these documents; TextError if there are none."""
    count = 0
    with open(path, "w", encoding="utf-8") as file:
        for text in texts:
            file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
            count += 1
    if not count:
        path.unlink()
        raise TextError(f"{path.stem} has no source file that an earlier folder does not have: name another folder")
    print(f"{path}: {count:,} documents, {path.stat().st_size:,} bytes", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
