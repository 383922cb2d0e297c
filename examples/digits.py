"""Prunes a small network on scikit-learn's handwritten digits, through the public API alone, and prints the report.

python examples/digits.py
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

import pareback as pb

EPOCHS, BATCH = 60, 64


def digits() -> tuple[Tensor, ...]:
    """Return 1,797 real 8×8 digits as training and test images and labels."""
    x, y = load_digits(return_X_y=True)
    parts = train_test_split(x / 16.0, y, test_size=0.25, random_state=0, stratify=y)
    train_x, test_x, train_y, test_y = parts
    return (
        torch.tensor(train_x, dtype=torch.float32),
        torch.tensor(train_y),
        torch.tensor(test_x, dtype=torch.float32),
        torch.tensor(test_y),
    )


def train(goal: pb.Goal | None) -> tuple[nn.Module, float]:
    """Train a 64-300-100-10 network, to a goal if there is one, and return it with its test accuracy in percent."""
    torch.manual_seed(0)
    train_x, train_y, test_x, test_y = digits()
    model = nn.Sequential(nn.Linear(64, 300), nn.ReLU(), nn.Linear(300, 100), nn.ReLU(), nn.Linear(100, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    batches = len(train_x) // BATCH
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * batches)
    pruner = goal and pb.Pruner(model, optimizer, goal, total_steps=EPOCHS * batches, min_size=100)
    for _ in range(EPOCHS):
        order = torch.randperm(len(train_x))
        for batch in order[: batches * BATCH].view(batches, BATCH):
            optimizer.zero_grad()
            F.cross_entropy(model(train_x[batch]), train_y[batch]).backward()
            optimizer.step()
            schedule.step()
    if pruner:
        pruner.finish()
    accuracy = (model(test_x).argmax(1) == test_y).float().mean()
    return model, 100 * float(accuracy)


def main() -> None:
    print(f"{'network':<12}{'test accuracy':>15}{'non-zero parameters':>22}")
    for name, goal in [
        ("dense", None),
        ("95 % sparse", pb.Budget(sparsity=0.95)),
        ("98 % sparse", pb.Budget(sparsity=0.98)),
    ]:
        model, accuracy = train(goal)
        print(f"{name:<12}{accuracy:>13.2f} %{pb.inspect(model).nonzeros:>22,}")
    print("\nThe last network, tensor by tensor:\n")
    print(pb.inspect(model, example_inputs=torch.zeros(1, 64)))


if __name__ == "__main__":
    main()
