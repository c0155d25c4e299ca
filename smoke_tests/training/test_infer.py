"""Text generated from a checkpoint, and its perplexity."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Dict

import pytest
import torch
import torch.nn.functional as F

from smoke_tests.claims import proves
from smoke_tests.training import (
    checkpoint,
    infer,
)
from smoke_tests.training.llama import Llama
from smoke_tests.training.models import MODELS
from smoke_tests.training.small_runs import PARTS, small, trained
from smoke_tests.training.text import Text
from smoke_tests.training.trainer import Run

pytestmark = pytest.mark.usefixtures("one_thread")


@proves(
    "reading with a KV cache, token by token, gives what one pass over the whole text gives, in FP8 too",
    package="torchao",
)
def test_cache(tmp_path: Path, measured: Dict[str, Any]) -> None:
    trained(small(steps=2, out=str(tmp_path)))
    path = checkpoint.newest(tmp_path)
    assert path is not None
    tokens = torch.randint(256, (16, 24))
    for precision in ("float32", "torchao.rowwise"):  # one scale for all would depend on the other tokens
        reader = infer.opened(path, precision, "fused", "cpu")
        measured[precision] = infer.fp8_layers(reader)
        whole, cache = reader(tokens), reader.model.empty_cache(16)
        parts = [reader(part, cache=cache) for part in (tokens[:, :9], *tokens[:, 9:].split(1, dim=1))]
        torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-3, atol=1e-5)
    assert measured["float32"] == 0 and measured["torchao.rowwise"] == 8
    assert infer.generate(reader, tokens[0, :5].tolist(), 4, 0.0, 0).shape == (16, 4)


@proves(
    "reading with a KV cache, in parts and token by token, gives the logits of one pass over the whole text",
    package="torch",
    since="2.1",
)
def test_cache_in_float32() -> None:
    reader, tokens = untrained(), torch.randint(256, (3, 24))
    whole, cache = reader(tokens), reader.model.empty_cache(3)
    parts = [reader(part, cache=cache) for part in (tokens[:, :9], *tokens[:, 9:].split(1, dim=1))]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-3, atol=1e-4)
    assert [tuple(half.shape) for half in cache[0]] == [(3, 2, 24, 16)] * 2


def untrained() -> infer.Reader:
    """A reader whose tokens are far from equally likely."""
    model = Llama(MODELS["tiny"], dict.fromkeys(PARTS, "naive"), torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.15)
    return infer.Reader(model.eval(), small(), "cpu", False, "")


@proves(
    "at temperature 0 all sixteen texts go on with the likeliest token of one pass over what is before it; above it "
    "they go on apart, at a low one as at 0, and the same again from the same seed",
    package="torch",
    since="2.1",
)
def test_generate() -> None:
    reader, prompt = untrained(), torch.randint(256, (7,)).tolist()
    likeliest = infer.generate(reader, prompt, 6, 0.0, 0)
    assert likeliest.shape == (16, 6) and bool((likeliest == likeliest[:1]).all())
    logits = reader(torch.tensor([[*prompt, *likeliest[0].tolist()]]))[0]
    assert torch.equal(logits[len(prompt) - 1 : -1].argmax(-1), likeliest[0])
    assert torch.equal(infer.generate(reader, prompt, 6, 1e-5, 0), likeliest)
    drawn = [infer.generate(reader, prompt, 6, 1e3, seed) for seed in (0, 0, 1)]
    assert len(drawn[0][:, 0].unique()) > 8
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])


@proves("the perplexity of a text is exp of its mean loss over all unseen tokens", package="torch", since="2.1")
def test_perplexity_in_closed_form(measured: Dict[str, Any]) -> None:
    # Of 1,101 windows, eleven of them held out.
    reader, text = untrained(), Text(torch.randint(256, (22_021,)), 20, 0)
    for windows in (1, 8, 11):
        tokens, targets = text.unseen(windows)
        assert len(tokens) == windows
        true = math.exp(F.cross_entropy(reader(tokens).double().flatten(0, 1), targets.flatten()))
        measured[f"of {windows}"] = infer.perplexity(reader, text, windows)
        assert measured[f"of {windows}"] == pytest.approx(true, rel=1e-5)


@proves("the perplexity of unseen text in FP8 is within 2 % of bfloat16's and not the same", package="torchao")
def test_perplexity(tmp_path: Path, measured: Dict[str, Any]) -> None:
    options = small(steps=30, batch_size=8, out=str(tmp_path))
    trained(options)
    path, text = checkpoint.newest(tmp_path), Run(options).text
    assert path is not None
    for precision in ("float32", "bf16", "torchao.tensorwise"):
        measured[precision] = infer.perplexity(infer.opened(path, precision, "fused", "cpu"), text, 16)
    assert 10 < measured["float32"] < 200
    assert measured["torchao.tensorwise"] != measured["float32"] == pytest.approx(measured["bf16"], rel=0.02)
    assert measured["torchao.tensorwise"] == pytest.approx(measured["bf16"], rel=0.02)
