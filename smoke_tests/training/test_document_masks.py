"""Documents that share a window, each attending to itself alone."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any, Dict, List
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from smoke_tests.claims import needs, proves
from smoke_tests.operators import bounds, references
from smoke_tests.operators.torch_adapter import version_of_torch
from smoke_tests.training import document_masks, infer, prepare_data, pretrain, trainer, validation
from smoke_tests.training.columns import columns_of, refuse
from smoke_tests.training.llama import Llama
from smoke_tests.training.models import MODELS
from smoke_tests.training.small_runs import PARTS, last_of, refusal_of, small, words
from smoke_tests.training.text import Text

pytestmark = pytest.mark.usefixtures("one_thread")

END = 7
# The lengths of the documents of each window, separators included; two have a document without text.
LENGTHS = [[5, 1, 20, 14], [17, 8, 1, 14], [3, 37]]
ROUNDINGS = 200 * 2.0**-24  # some 200 of float32 behind one another


def windows() -> torch.Tensor:
    """Tokens [3, 40] of LENGTHS; the last document of the second window has no end."""
    tokens = torch.randint(8, 256, (3, 40))
    for row, lengths in zip(tokens, LENGTHS):
        row[torch.tensor(lengths).cumsum(0) - 1] = END
    tokens[1, -1] = 9
    return tokens


def loud(model: torch.nn.Module) -> None:
    """Make the weights so large that attention prefers."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.5 if parameter.dim() == 1 else 0.15)


def packing(operators: str) -> Llama:
    """A Llama in float32 whose tokens attend to their own document."""
    columns = dict.fromkeys(PARTS, operators)
    if version_of_torch() < (2, 4):
        columns["rms_norm"] = "naive"  # it has none of its own
    llama = Llama(MODELS["tiny"], columns, torch.float32)
    loud(llama)
    llama.separator = END
    return llama


def alone(llama: Llama, tokens: torch.Tensor, lengths: List[List[int]]) -> torch.Tensor:
    """The logits of each document run alone, without masks, in the places of the windows."""
    before, llama.separator = llama.separator, None
    logits = [torch.cat([llama(part[None])[0] for part in row.split(sizes)]) for row, sizes in zip(tokens, lengths)]
    llama.separator = before
    return torch.stack(logits)


def split(tokens: torch.Tensor, separator: int) -> List[List[int]]:
    """The lengths of the documents of each window, by a loop over its tokens."""
    lengths = []
    for row in tokens.tolist():
        sizes = [0]
        for index, token in enumerate(row):
            sizes[-1] += 1
            if token == separator and index + 1 < len(row):
                sizes.append(0)
        lengths.append(sizes)
    return lengths


@pytest.mark.parametrize("operators", ["naive", "torch"])
@proves(
    "with document masks a window has the logits, the loss and every gradient of its documents run alone, also with "
    "recomputed activations",
    package="torch",
    since="2.1",
)
def test_packed_as_alone(operators: str, measured: Dict[str, Any]) -> None:
    llama, tokens, targets = packing(operators), windows(), torch.randint(256, (3, 40))
    true = alone(llama, tokens, LENGTHS)
    loss = F.cross_entropy(true.flatten(0, 1), targets.flatten())
    loss.backward()
    gradients = {name: each.grad.double() for name, each in llama.named_parameters()}
    for recompute in (None, trainer._recomputing("float32")):
        llama.recompute = recompute
        llama.zero_grad()
        packed = llama(tokens, targets)
        packed.backward()
        errors = [bounds.relative_error(llama(tokens).detach(), true.detach().double())]
        errors.append(abs(float(packed.detach() / loss.detach()) - 1))
        errors += [bounds.relative_error(each.grad, gradients[name]) for name, each in llama.named_parameters()]
        measured["error"] = max(errors)
        assert measured["error"] <= ROUNDINGS, f"errors {errors}"
    llama.separator = None
    assert bounds.relative_error(llama(tokens).detach(), true.detach().double()) > 0.01, "no mask decides anything"


@pytest.mark.parametrize("operators", ["naive", "torch"])
@proves(
    "with document masks another token changes no bit of another document's logits, nor of what is before it",
    package="torch",
    since="2.1",
)
def test_documents_apart(operators: str) -> None:
    llama, tokens = packing(operators).eval(), windows()
    with torch.no_grad():
        logits = llama(tokens)
        for row, lengths in enumerate(LENGTHS):
            begin = 0
            for length in lengths:
                other, end = tokens.clone(), begin + length
                other[row, begin] = 8 if tokens[row, begin] != 8 else 9
                if length > 1:  # else that would end its document no more
                    changed = (llama(other) != logits).any(-1)
                    inside = torch.zeros_like(changed)
                    inside[row, begin:end] = True
                    assert torch.equal(changed, inside)
                begin = end


@pytest.mark.parametrize("operators", ["naive", "torch"])
@proves("document masks change nothing where a window is one document", package="torch", since="2.1")
def test_one_document(operators: str) -> None:
    llama, tokens = packing(operators), torch.randint(8, 256, (2, 40))
    tokens[0, -1] = END  # which belongs to the document that it ends
    logits = llama(tokens).detach()
    llama.separator = None
    plain = llama(tokens).detach()
    assert torch.equal(logits, plain) or operators == "torch"  # whose kernel for masks may add in another order
    assert bounds.relative_error(logits, plain.double()) <= ROUNDINGS


@proves(
    "documents of a window are counted from 0, a separator ends its own, and the places where they begin are those "
    "that kernels for variable lengths take",
    package="torch",
    since="2.1",
)
def test_places() -> None:
    tokens = torch.tensor([[1, END, 2, 3, END], [END, END, 4, 5, 6]])
    documents = document_masks.documents_of(tokens, END)
    assert documents.tolist() == [[0, 0, 1, 1, 1], [0, 1, 2, 2, 2]]
    starts = document_masks.starts_of(documents)
    assert starts.tolist() == [0, 2, 5, 6, 7, 10] and starts.dtype is torch.int32
    mask = document_masks.mask_of(documents)
    assert mask.shape == (2, 1, 5, 5)
    first = [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 1, 1, 1]]
    assert mask[0, 0].int().tolist() == first


@proves(
    "pretrain --document-masks trains and evaluates with the documents of its text, whose separator is that of "
    "prepare_data, and infer takes the same masks",
    package="torch",
    since="2.1",
)
def test_runs(tmp_path: Path) -> None:
    documents, folder = tmp_path / "lines.jsonl", str(tmp_path / "shards")
    documents.write_text("".join('{"text": "%s"}\n' % ("some words " * (index % 4)) for index in range(400)), "utf-8")
    assert prepare_data.main([str(documents), "--out", folder]) == 0
    for name in ("text", "shards"):
        data, out = (str(documents) if name == "text" else folder), str(tmp_path / "runs" / name)
        run, _ = pretrain.start(small(document_masks=True, data=(data,), batch_size=4, eval_windows=3, out=out))
        loud(run.model)

        def loss(tokens: torch.Tensor, targets: torch.Tensor, model: Any = run.model) -> float:
            lengths = split(tokens, 255)
            assert min(map(len, lengths)) > 1
            return float(F.cross_entropy(alone(model, tokens, lengths).detach().flatten(0, 1), targets.flatten()))

        unseen = loss(*run.text.unseen(3))
        assert float(run.gradients(2)) == pytest.approx(loss(*run.text.windows(8, 4)), rel=1e-5)
        assert validation.losses(run)["validation"] == pytest.approx(unseen, rel=1e-5)
        run.save()
        run.release()
        reader = infer.opened(last_of(Path(out)), "float32", "fused", "cpu")
        assert math.log(infer.perplexity(reader, run.text, 3)) == pytest.approx(unseen, rel=1e-5)
        without = small(data=(data,), batch_size=4, out=out, resume=True)
        assert "--document-masks" in refusal_of(lambda without=without: pretrain.start(without))  # type: ignore[misc]


@proves(
    "the separator of a folder is the token that --eos named for it",
    package="torch",
    since="2.1",
)
def test_separator(tmp_path: Path) -> None:
    path, out = tmp_path / "text.txt", str(tmp_path / "shards")
    path.write_text("nothing else " * 99, "utf-8")
    folder = words(tmp_path / "words")
    assert prepare_data.main([str(path), "--tokenizer", folder, "--eos", "<s>", "--out", out]) == 0
    text = Text.read([out], "", 256, 9, 0)
    assert text.separator == int(text.tokens[len(text.tokens) - 1 : len(text.tokens)][0])
    assert text.separator != Text.read([str(path)], folder, 256, 9, 0).separator


@proves(
    "an attention that cannot keep to documents, and CUDA graphs, are refused by name with --document-masks; fused "
    "attention is then one that can",
    package="torch",
    since="2.5",
)
def test_refused() -> None:
    for column in ("torch.cudnn", "torch.flash"):
        named = f"attention={column}"
        assert columns_of(named, True, 64, True)["attention"] == column
        assert named in refusal_of(lambda named=named: columns_of(named, True, 64, True, masked=True))  # type: ignore[misc]
    assert columns_of("fused", True, 64, True, masked=True)["attention"] in ("flash-attn", "naive")
    assert columns_of("fused", False, 64, True, masked=True)["attention"] == "torch"
    assert columns_of("attention=naive", True, 64, True, masked=True)["attention"] == "naive"
    graphed = small(graphs=True, document_masks=True)
    with mock.patch.object(torch.cuda, "is_available", lambda: True):
        assert "--document-masks" in refusal_of(lambda: refuse(graphed, True))


@needs(cuda=True)
@proves(
    "flash-attn's attention of documents that share a window is that of each alone in float64, with its gradients, and "
    "the values of one change no bit of another",
    package="flash-attn",
    since="2.0",
)
def test_flash_attn_of_documents(device: str, measured: Dict[str, Any]) -> None:
    starts = document_masks.starts_of(document_masks.documents_of(windows(), END)).to(device)
    inputs = [torch.randn(3, heads, 40, 64, device=device, dtype=torch.bfloat16) for heads in (6, 2, 2)]
    gradient = torch.randn_like(inputs[0])
    taken = [each.clone().requires_grad_() for each in inputs]
    attend = partial(document_masks.flash_attention, starts=starts)
    output = attend(*taken)
    output.backward(gradient)
    exact = [each.cpu().double().requires_grad_() for each in inputs]
    rows = []
    for row, sizes in enumerate(LENGTHS):
        documents = zip(*(each[row : row + 1].split(sizes, 2) for each in exact))
        rows.append(torch.cat([references.attention(*each) for each in documents], 2))
    truth = torch.cat(rows)
    truth.backward(gradient.cpu().double())
    results = (output, *(each.grad for each in taken))
    for name, result, true in zip("oqkv", results, (truth, *(each.grad for each in exact))):
        measured[name] = bounds.relative_error(result.detach().cpu(), true.detach())
        assert measured[name] <= 2.0**-6, name
    inputs[2][0, :, :5] += 1  # of the first document of the first window
    changed = (attend(*inputs) != output).any(-1).any(1)
    assert bool(changed[0, :5].all()) and int(changed.sum()) == 5
