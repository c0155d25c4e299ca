"""The program that trains a sharded Llama, in one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from smoke_tests.claims import proves
from smoke_tests.training.models import Shape
from smoke_tests.training.short_training import batches, small_llama, standard_library_text

pytestmark = pytest.mark.usefixtures("one_thread")


@proves(
    "what a process does that trains the sharded Llama alone is one step of AdamW on each batch, its gradients clipped "
    "to 1, and it goes on from its newest checkpoint with the same losses",
    package="torch",
    since="2.13",  # not tried with an older one
)
def test_sharded_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from smoke_tests.training.distributed import sharded

    monkeypatch.setattr(sharded, "EVERY", 3)
    steps = 10  # three checkpoints, and one step more
    torch.manual_seed(0)
    model = small_llama(Shape(), sharded.COLUMNS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.5e-3, betas=(0.9, 0.95), weight_decay=0.1)
    true = []
    for tokens, targets in batches(standard_library_text(400_000), Shape().length, steps, 0):
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        true.append(float(loss.detach()))
    for until in (steps - 1, steps):
        sharded.train(tmp_path, until, rank=0, world=1)
    rows = [json.loads(line) for line in (tmp_path / "rank0.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    assert [row["loss"] for row in rows] == true
