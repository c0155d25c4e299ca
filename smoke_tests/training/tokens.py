"""Tokenizers: UTF-8 bytes, a Hugging Face folder's tokenizer.json, or an encoding of tiktoken."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any, Callable, List, NamedTuple, Optional, Tuple

import numpy as np

from smoke_tests.training.documents import TextError

END_OF_BYTES = 255  # between documents of bytes; no UTF-8 text has this byte
HUGGING_FACE = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")  # what is read of a folder


class Tokenizer(NamedTuple):
    """How text becomes tokens.

    name: "" for bytes, a folder, or "tiktoken:NAME". sha256: of what decides the tokens. vocabulary: the number of ids.
    end: the id that is put behind each document, the tokenizer's own end of text; None if it names none.
    encode: texts -> their tokens, [n] each. decode: ids -> text.
    """

    name: str
    sha256: str
    vocabulary: int
    end: Optional[int]
    encode: Callable[[List[str]], List[np.ndarray]]
    decode: Callable[[List[int]], str]

    @property
    def separator(self) -> int:
        """The id behind each document; TextError if the tokenizer names none."""
        if self.end is None:
            raise TextError(
                f"{self.name} names no eos_token in tokenizer_config.json or special_tokens_map.json: "
                "add it there, or name it with --eos of prepare_data"
            )
        return self.end


def is_folder(name: str) -> bool:
    """Whether a tokenizer's name is the folder of a Hugging Face tokenizer."""
    return bool(name) and not name.startswith("tiktoken:")


def opened(name: str, eos: str = "") -> Tokenizer:
    """The tokenizer of that name; eos: the token at the end of a document, if not the tokenizer's own."""
    if not name:
        if eos:
            raise TextError(f"--eos {eos} needs --tokenizer: bytes end with the byte {END_OF_BYTES}")
        return _of_bytes()
    return _hugging_face(name, eos) if is_folder(name) else _tiktoken(name, eos)


def _of_bytes() -> Tokenizer:
    def encode(texts: List[str]) -> List[np.ndarray]:
        return [np.frombuffer(text.encode("utf-8"), np.uint8) for text in texts]

    def decode(ids: List[int]) -> str:
        return bytes(token % 256 for token in ids).decode("utf-8", errors="replace")

    return Tokenizer("", hashlib.sha256(b"bytes").hexdigest(), 256, END_OF_BYTES, encode, decode)


def _hugging_face(folder: str, eos: str) -> Tokenizer:
    """The tokenizer of a folder. It adds no special tokens of its own, such as one before each text."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    try:
        from tokenizers import Tokenizer as Reader
    except ImportError:
        raise TextError("--tokenizer needs the package tokenizers, which this environment lacks") from None
    try:
        reader = Reader.from_file(str(Path(folder, "tokenizer.json")))
        digest = hashlib.sha256(Path(folder, "tokenizer.json").read_bytes()).hexdigest()
    except Exception as error:  # tokenizers raises nothing narrower
        raise TextError(f"--tokenizer: {folder} holds no tokenizer.json that can be read: {error}") from None
    reader.no_truncation()
    reader.no_padding()
    if hasattr(reader, "encode_special_tokens"):
        reader.encode_special_tokens = True  # "</s>" in a text is text, and ends no document
    of_batch = getattr(reader, "encode_batch_fast", reader.encode_batch)  # from 0.20 on, without offsets

    def encode(texts: List[str]) -> List[np.ndarray]:
        return [np.array(each.ids, np.uint32) for each in of_batch(texts, add_special_tokens=False)]

    named = eos or _declared_end(Path(folder))
    end = reader.token_to_id(named) if named else None
    if named and end is None:
        raise TextError(f"--tokenizer: {folder} has no token {named}, which should end its documents")
    size = reader.get_vocab_size(with_added_tokens=True)
    return Tokenizer(folder, digest, size, end, encode, lambda ids: str(reader.decode(ids)))


def _declared_end(folder: Path) -> str:
    """The eos_token that a folder's own files name, or ""."""
    for name in HUGGING_FACE[1:]:
        try:
            token: Any = json.loads((folder / name).read_text(encoding="utf-8")).get("eos_token")
        except FileNotFoundError:
            continue
        except (OSError, ValueError, AttributeError) as error:
            raise TextError(f"--tokenizer: {folder / name} cannot be read: {error}") from None
        if token:
            return str(token["content"] if isinstance(token, dict) else token)
    return ""


def _tiktoken(name: str, eos: str) -> Tokenizer:
    """An encoding of tiktoken, which it takes from the folder TIKTOKEN_CACHE_DIR or from the network."""
    if eos:
        raise TextError(f"--eos {eos} cannot be changed: {name} ends its documents with <|endoftext|>")
    try:
        import tiktoken
    except ImportError:
        raise TextError(f"--tokenizer {name} needs the package tiktoken, which this environment lacks") from None
    try:
        reader = tiktoken.get_encoding(name.partition(":")[2])
    except Exception as error:  # of requests, or for a name that it does not know
        reason = " ".join(str(error).split())
        raise TextError(f"--tokenizer {name} cannot be opened: {reason}") from None
    digest = hashlib.sha256()
    for token, rank in sorted(reader._mergeable_ranks.items(), key=lambda pair: pair[1]):
        digest.update(f"{token.hex()} {rank}\n".encode())

    def encode(texts: List[str]) -> List[np.ndarray]:
        return [
            np.array(ids, np.uint32) for ids in reader.encode_ordinary_batch(texts, num_threads=os.cpu_count() or 1)
        ]

    return Tokenizer(name, digest.hexdigest(), reader.n_vocab, reader.eot_token, encode, reader.decode)


def files_of(tokenizer: Tokenizer) -> Tuple[Path, ...]:
    """The files that a Hugging Face tokenizer was read from; none of the others."""
    if not is_folder(tokenizer.name):
        return ()
    return tuple(path for path in (Path(tokenizer.name, name) for name in HUGGING_FACE) if path.exists())
