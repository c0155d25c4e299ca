"""The guard in a loop of one's own: `python -m smoke_tests.training.guard_example`, which a CPU can run."""

import torch

from smoke_tests.training.guard import Guard


def main(steps: int = 24) -> Guard:
    """Train two layers in FP8 to double their input, on random batches of [32, 64]; the guard at the end."""
    from torchao.float8 import convert_to_float8_training

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 64))
    optimizer = torch.optim.AdamW(convert_to_float8_training(model).parameters(), lr=1e-3)

    def step(batch: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(batch) - 2 * batch).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    guard = Guard(step, model, optimizer, every=8)
    for number, batch in enumerate(torch.randn(steps, 32, 64)):
        print(number, f"{guard(batch):.3f}", *(event["kind"] for event in guard.news()))
    return guard


if __name__ == "__main__":
    main()
