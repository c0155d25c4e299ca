"""A training loop of one's own under the guard; it goes on from checkpoint.pt if that is there."""

from pathlib import Path

import torch
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

from smoke_tests.training.guard import Guard

model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 16))
model = convert_to_float8_training(model, config=Float8LinearConfig(emulate=True))  # a GPU with FP8 emulates nothing
optimizer = torch.optim.AdamW(model.parameters())
file = Path("checkpoint.pt")
saved = torch.load(file) if file.exists() else {"step": 0}


def step(batch: torch.Tensor) -> float:
    optimizer.zero_grad()
    loss = (model(batch) - batch[:, :16].sin()).square().mean()
    loss.backward()
    optimizer.step()
    return float(loss.detach())


guard = Guard(step, model, optimizer, every=20, steps=4, begun=saved["step"])
parts = {"model": model, "optimizer": optimizer, "guard": guard}
for name in parts if saved["step"] else ():
    parts[name].load_state_dict(saved[name])
for number in range(saved["step"], saved["step"] + 30):
    guard(torch.randn(32, 64))
    for event in guard.news():
        print(number, event["kind"], event["verified"], event["text"])
torch.save({"step": number + 1, **{name: parts[name].state_dict() for name in parts}}, file)
