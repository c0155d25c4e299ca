"""Text tokenized into shards: what is in them, what goes on after a kill, and how a run takes them."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Dict, List
from unittest import mock

import numpy as np
import pytest
import torch

from smoke_tests.claims import proves
from smoke_tests.training import documents, infer, prepare_data, pretrain, source_text
from smoke_tests.training.documents import TextError
from smoke_tests.training.shards import Shards, read_index
from smoke_tests.training.small_runs import refusal_of, small, trained, words
from smoke_tests.training.text import Text
from smoke_tests.training.tokens import opened
from smoke_tests.training.trainer import Run

pytestmark = pytest.mark.usefixtures("one_thread")
ROOT = Path(__file__).parents[2]
HELD = ["d\u00e9j\u00e0 vu\r\n" * 40, "", "one\u2028two " * 70, "nothing </s> else\n" * 90]


def written(folder: Path, held: List[str], name: str = "lines.jsonl") -> str:
    """A .jsonl file of these documents."""
    path = folder / name
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in held), "utf-8")
    return str(path)


def prepared(out: Path, *arguments: str) -> List[int]:
    """The tokens of a folder after prepare_data."""
    assert prepare_data.main([*arguments, "--out", str(out)]) == 0
    return [int(token) for token in Shards(out)[:]]


@proves(
    "prepared tokens are the documents' bytes with 255 behind each, whatever the size of the shards and of the pieces "
    "that a long document is read in, and a run takes the windows that it takes of the text itself",
    package="torch",
    since="2.1",
)
def test_shards(tmp_path: Path) -> None:
    path = written(tmp_path, HELD)
    expected = [each for text in HELD for each in (*text.encode("utf-8"), 255)]
    for number, (size, piece) in enumerate(((300, 64), (300, 2**20), (2**26, 16))):
        with mock.patch.object(documents, "PIECE", piece):
            folder = tmp_path / f"shards-{number}"
            assert prepared(folder, path, "--shard-tokens", str(size)) == expected
        index = read_index(folder)
        assert sum(row["documents"] for row in index["shards"]) == len(HELD) and index["dtype"] == "uint8"
        assert (len(index["shards"]) == 1) == (size == 2**26)
        whole, mapped = (Text.read([each], "", 256, 9, 3) for each in (path, str(folder)))
        assert isinstance(mapped.tokens, Shards) and all(isinstance(each, np.memmap) for each in mapped.tokens._maps)
        assert (mapped.count, mapped.held_out) == (whole.count, whole.held_out)
        for first, count in ((0, whole.count), (whole.count - 2, 5)):
            pairs = zip(mapped.windows(first, count), whole.windows(first, count))
            assert all(torch.equal(one, other) for one, other in pairs)
        assert torch.equal(mapped.unseen(9)[1], whole.unseen(9)[1])
        nothing = mapped.tokens[7:7]
        assert nothing.size == 0 and nothing.dtype == np.int64


@proves(
    "the windows of a step are the same in one part and in two, as two processes would take them, and none of them "
    "overlaps a target that is held out",
    package="torch",
    since="2.1",
)
def test_parts_of_a_batch(tmp_path: Path) -> None:
    folder = tmp_path / "shards"
    path = written(tmp_path, [bytes(range(97, 123)).decode() * 99])
    tokens = prepared(folder, path, "--shard-tokens", "100")
    text = Text.read([str(folder)], "", 256, 5, 1)
    for first in (0, text.count - 3):
        whole = text.windows(first, 6)
        halves = [Text.read([str(folder)], "", 256, 5, 1).windows(first + 3 * rank, 3) for rank in (0, 1)]
        for index in (0, 1):
            assert torch.equal(whole[index], torch.cat([half[index] for half in halves]))
    assert max(text._place(sample) for sample in range(text.count)) == text.count - 1
    assert text.unseen(1)[0].tolist()[0] == tokens[5 * text.count : 5 * text.count + 5]


def write_zst(path: Path, package: Any, lines: bytes) -> None:
    frames = [package.ZstdCompressor().compress(part) for part in (lines[:900], lines[900:])]
    path.write_bytes(b"".join(frames))
    cut = path.with_name("cut.jsonl.zst")
    cut.write_bytes(b"".join(frames)[:-3])
    with pytest.raises(TextError, match="the middle of a zstd frame"):
        list(documents.documents([str(cut)]))


def write_parquet(path: Path, package: Any, lines: bytes) -> None:
    table = importlib.import_module("pyarrow").table({"text": HELD, "more": [1] * len(HELD)})
    package.write_table(table, str(path), row_group_size=2)
    with pytest.raises(TextError, match="no column txt, but text, more"):
        list(documents.documents([str(path)], "txt"))


def write_dataset(path: Path, package: Any, lines: bytes) -> None:
    package.Dataset.from_dict({"text": HELD}).save_to_disk(str(path))


@proves(
    "documents become the same tokens from .jsonl and from those of .zst, Parquet and datasets that can be read here; "
    "the rest is refused by the name of the package",
    package="torch",
    since="2.1",
)
def test_formats(tmp_path: Path) -> None:
    path = written(tmp_path, HELD)
    expected = list(documents.documents([path]))
    assert expected == HELD
    pieces = list(documents.pieces(path))
    assert all(piece.last is True for piece in pieces) and 0 < pieces[0].share <= pieces[-1].share == 1.0

    for name, module, write in (
        ("lines.jsonl.zst", "zstandard", write_zst),
        ("table.parquet", "pyarrow.parquet", write_parquet),
        ("rows", "datasets", write_dataset),
    ):
        other = tmp_path / name
        try:
            package = importlib.import_module(module)
        except ImportError:
            if name == "rows":
                other.mkdir()
                (other / "state.json").touch()
            else:
                other.touch()
            with pytest.raises(TextError, match=f"needs the package {module.partition('.')[0]}, which"):
                list(documents.documents([str(other)]))
        else:
            write(other, package, Path(path).read_bytes())
            assert list(documents.documents([str(other)])) == expected


@proves(
    "with a Hugging Face tokenizer, the separator is the eos_token that its folder names, or that of --eos, and no "
    "other special token is added, nor made of a document's text",
    package="torch",
    since="2.1",
)
def test_separator(tmp_path: Path) -> None:
    folder = words(tmp_path / "words")
    path = written(tmp_path, ["nothing else", "</s> nothing"])
    expected = [1, 2, 8, 0, 5, 6, 1, 8]
    assert opened(folder).encode(["</s>"])[0].tolist() != [8], "a document's text ends it"
    text = opened(folder).encode(["</s> nothing"])[0].tolist()
    expected = [1, 2, 8, *text, 8]
    out = tmp_path / "shards"
    assert prepared(out, path, "--tokenizer", folder) == expected
    assert Text.read([path], folder, 9, 3, 0).tokens[:].tolist() == expected
    assert prepared(tmp_path / "other", path, "--tokenizer", folder, "--eos", "<s>")[2] == 7
    assert (out / "tokenizer.json").read_bytes() == Path(folder, "tokenizer.json").read_bytes()
    assert Text.read([str(out)], folder, 9, 3, 0).identity() == Text.read([str(out)], "", 9, 3, 0).identity()
    other = words(tmp_path / "others", {"content": "<s>"})
    assert opened(other).separator == 7
    for more, named in (
        (["--eos", "<end>"], "<end>"),
        (["--eos", ""], "eos_token"),
    ):
        folder = words(tmp_path / "none", None)
        arguments = [path, "--out", str(tmp_path / "refused"), "--tokenizer", folder, *more]
        assert named in refusal_of(lambda arguments=arguments: prepare_data.main(arguments))  # type: ignore[misc]
    assert not (tmp_path / "refused").exists()


@proves(
    "after SIGKILL, prepare_data goes on behind its last complete shard, and the result is bit for bit that of a run "
    "that nobody killed; meanwhile the folder is refused",
    package="torch",
    since="2.1",
)
def test_kill(tmp_path: Path) -> None:
    paths = [written(tmp_path, [f"document {n} of {part}" for n in range(3000)], f"{part}.jsonl") for part in (1, 2)]
    with_shards = [*paths, "--shard-tokens", "3000"]
    expected = prepared(tmp_path / "whole", *with_shards)
    out = tmp_path / "killed"
    command = [sys.executable, "-m", "smoke_tests.training.prepare_data", *with_shards, "--out", str(out)]
    process = subprocess.Popen(command, cwd=str(ROOT), stdout=subprocess.DEVNULL)
    until = time.monotonic() + 60
    while not (out / "00004.bin").exists() and time.monotonic() < until:
        time.sleep(0.001)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    index = read_index(out)
    assert not index["complete"] and len(index["shards"]) >= 4
    assert "not complete" in refusal_of(
        lambda: pretrain.main(["--data", str(out), "--device=cpu", "--steps=1", f"--out={out}/run"])
    )
    first = (out / "00000.bin").stat()
    assert prepared(out, *with_shards) == expected
    assert (out / "00000.bin").stat().st_mtime_ns == first.st_mtime_ns, "a complete shard was written again"
    rows: List[Dict[str, Any]] = [read_index(each)["shards"] for each in (out, tmp_path / "whole")]
    assert rows[0] == rows[1] and not list(out.glob("*.partial"))


@proves(
    "prepared tokens that do not fit the model, the tokenizer or their index are refused by name, and so is another "
    "request for the same folder",
    package="torch",
    since="2.1",
)
def test_refusals(tmp_path: Path) -> None:
    path, out = written(tmp_path, HELD), tmp_path / "shards"
    prepared(out, path)
    has_tokenizers = importlib.util.find_spec("tokenizers") is not None
    missing = "tokenizer.json" if has_tokenizers else "package tokenizers"
    for arguments, named in (
        ([str(tmp_path / "none.txt"), "--out", str(out)], "none.txt"),
        ([path, path, "--out", str(out)], "other inputs"),
        ([path, "--out", str(out), "--field", "txt"], "other field"),
        ([path, "--out", str(tmp_path / "new"), "--field", "txt"], "line 1"),
        ([str(tmp_path), "--out", str(tmp_path / "new")], "save_to_disk"),
        ([path, "--out", str(tmp_path / "new"), "--shard-tokens", "0"], "--shard-tokens"),
        ([path, "--out", str(tmp_path / "new"), "--tokenizer", str(tmp_path)], missing),
        ([path, "--out", str(tmp_path / "new"), "--tokenizer", "tiktoken:none"], "tiktoken"),
        ([path, "--out", str(tmp_path / "new"), "--eos", "</s>"], "--eos"),
        ([path, "--out", "/proc/none"], "--out"),
    ):
        assert named in refusal_of(lambda arguments=arguments: prepare_data.main(arguments))  # type: ignore[misc]
    with prepare_data.locked(out):
        assert "another process" in refusal_of(lambda: prepare_data.main([path, "--out", str(out)]))
    with mock.patch.object(documents, "LONGEST", 99), pytest.raises(TextError, match="line 1: has more than 99"):
        list(documents.documents([path]))
    text = Text.read([str(out)], "", 256, 9, 0)
    with pytest.raises(TextError, match=r"token 255 of .* vocabulary of 255"):
        Text.read([str(out)], "", 255, 9, 0)
    with pytest.raises(TextError, match="cannot be joined"):
        Text.read([str(out), path], "", 256, 9, 0)
    if has_tokenizers:
        with pytest.raises(TextError, match="is not the tokenizer that"):
            Text.read([str(out)], words(tmp_path / "words"), 256, 9, 0)
    shard = out / "00000.bin"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(TextError, match=f"00000.bin has {len(text.tokens) - 1:,} bytes"):
        Shards(out)
    (out / "index.json").write_text("[]")
    with pytest.raises(TextError, match=r"index\.json is not the index"):
        Shards(out)


@proves(
    "a run on prepared tokens resumes bit for bit, and with other tokens it is refused; infer reads their held-out "
    "part",
    package="torch",
    since="2.1",
)
def test_resume(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "shards"
    prepared(data, written(tmp_path, ["some text to learn from, again and again. " * 200]), "--shard-tokens", "999")
    options: Dict[str, Any] = {"data": (str(data),), "deterministic": True, "steps": 4}
    whole = trained(small(**options, out=str(tmp_path / "whole")))
    run = Run(small(**options, out=str(tmp_path / "parts")))
    Path(run.options.out).mkdir()
    first = [run.update(step)["loss"] for step in range(2)]
    run.save()
    resumed = trained(small(**options, resume=True, out=str(tmp_path / "parts")))
    assert first + resumed == whole
    assert infer.main([str(tmp_path / "parts"), "--device=cpu", "--tokens=2", "--windows=2"]) == 0
    assert "on unseen text" in capsys.readouterr().out
    other = tmp_path / "other"
    prepared(other, written(tmp_path, ["another text to learn from, now and then. " * 200], "other.jsonl"))
    again = small(**{**options, "data": (str(other),)}, resume=True, out=str(tmp_path / "whole"))
    try:
        assert "another text" in refusal_of(lambda: pretrain.start(again))
    finally:
        torch.use_deterministic_algorithms(False)


@proves(
    "source files become documents, each text once and neither tables nor other encodings, with a tokenizer that is "
    "trained on them: prepared by it, the tokens decode to the same documents, with its end behind each",
    package="torch",
    since="2.1",
)
def test_source_text(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    texts = {name: f"int {name}(void)\n{{\n\treturn sizeof({name});\n}}\n" * 9 for name in ("first", "second")}
    files = {"a/b.c": texts["first"], "a/c.H": texts["second"], "a/too.bin": "x" * 300, "a/short.c": "int x;\n"}
    files.update(
        {"other/same.c": texts["first"], "other/d.py": "d\u00e9j\u00e0 = 1\n" * 50, "other/e.c": "y" * (2**18 + 1)}
    )
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, "utf-8")
    (tmp_path / "a" / "latin.c").write_bytes(b"\xe9" * 300)
    (tmp_path / "a" / "link.c").symlink_to(tmp_path / "other" / "d.py")
    out, folders = tmp_path / "text", [str(tmp_path / "a"), str(tmp_path / "other")]
    assert source_text.main([*folders, "--out", str(out), "--vocabulary", "300"]) == 0
    expected = [texts["first"], texts["second"], files["other/d.py"]]
    lines = [str(out / "a.jsonl"), str(out / "other.jsonl")]
    assert [text for line in lines for text in documents.documents([line])] == expected
    tokenizer = opened(str(out))
    assert tokenizer.vocabulary <= 300
    tokens = prepared(tmp_path / "tokens", *lines, "--tokenizer", str(out))
    ends = [index for index, token in enumerate(tokens) if token == tokenizer.separator]
    spans = zip([0, *(end + 1 for end in ends)], ends)
    assert [tokenizer.decode(tokens[begin:end]) for begin, end in spans] == expected and ends[-1] == len(tokens) - 1
    assert len(tokens) < sum(map(len, expected)) / 2
    for arguments, reason in (
        ([folders[0], folders[0]], "two folders have the same name"),
        ([folders[0], str(tmp_path / "tokens")], "tokens has no source file"),
        ([str(tmp_path / "nowhere")], "nowhere is not a folder"),
        ([folders[0], "--vocabulary", "256"], "must be more than the 256 bytes"),
    ):
        request = [*arguments, "--out", str(tmp_path / "refused")]
        assert reason in refusal_of(lambda request=request: source_text.main(request))  # type: ignore[misc]
