"""The small Llama, its parameters and optimizer states sharded by FSDP2 over the processes that torchrun started.

`python -m smoke_tests.training.distributed.sharded FOLDER STEPS` writes the loss of each step to FOLDER/rank<N>.jsonl,
saves every fifth step, and goes on from the newest checkpoint. One process alone shards nothing: the others are
compared with it.
"""

from __future__ import annotations

import datetime
import json
import os
import socket
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoints
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import fully_shard

from smoke_tests.training.distributed.pulse import SILENCE, Pulse
from smoke_tests.training.models import Shape
from smoke_tests.training.short_training import batches, small_llama, standard_library_text

COLUMNS = dict.fromkeys(("rms_norm", "rope", "attention", "swiglu", "cross_entropy", "adamw"), "torch")
EVERY = 5  # steps between checkpoints


def train(folder: Path, steps: int, rank: int, world: int) -> None:
    """Train on batches of 8 windows, 8 / world of them each, in float32."""
    torch.manual_seed(0)
    model = small_llama(Shape(), COLUMNS)
    if world > 1:
        for part in (*model.blocks, model):
            fully_shard(part)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.5e-3, betas=(0.9, 0.95), weight_decay=0.1)
    saved = sorted(int(path.parent.name) for path in folder.glob("*/.metadata"))  # written last, so it is complete
    start = saved[-1] if saved else 0
    if start:
        weights, states = get_state_dict(model, optimizer)
        checkpoints.load({"model": weights, "optimizer": states}, checkpoint_id=str(folder / str(start)))
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
    drawn = batches(standard_library_text(400_000), Shape().length, steps, seed=0)
    for step, (tokens, targets) in enumerate(drawn, 1):
        if step <= start:
            continue
        logits = model(tokens[rank::world]).flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, targets[rank::world].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        whole = loss.detach() / world
        if world > 1:
            dist.all_reduce(whole)
        with open(folder / f"rank{rank}.jsonl", "a") as file:
            file.write(json.dumps({"step": step, "loss": float(whole)}) + "\n")
        if step % EVERY == 0:
            weights, states = get_state_dict(model, optimizer)
            checkpoints.save({"model": weights, "optimizer": states}, checkpoint_id=str(folder / str(step)))


@record  # type: ignore[untyped-decorator]
def main() -> None:
    """Train; where another process is gone, end with its rank and host."""
    folder, steps, rank, world = (
        Path(sys.argv[1]),
        int(sys.argv[2]),
        int(os.environ["RANK"]),
        int(os.environ["WORLD_SIZE"]),
    )
    pulse = Pulse(rank, world, datetime.timedelta(minutes=1))
    patience = datetime.timedelta(seconds=SILENCE)
    dist.init_process_group("gloo", store=pulse.store, rank=rank, world_size=world, timeout=patience)
    try:
        train(folder, steps, rank, world)
    except RuntimeError as error:
        raise RuntimeError(f"rank {rank} on host {socket.gethostname()} lost {pulse.silent() or 'no rank'}") from error
    finally:
        pulse.end()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
