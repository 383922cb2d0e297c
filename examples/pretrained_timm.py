"""Fine-tunes an image model of timm to half of its FLOPs on scikit-learn's digits.

python examples/pretrained_timm.py [--pretrained]
"""

from __future__ import annotations

import sys

import timm
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits

import pareback as pb

EPOCHS, BATCH = 2, 64


def main() -> None:
    torch.manual_seed(0)
    pretrained = "--pretrained" in sys.argv  # fetches its weights
    model = timm.create_model("test_efficientnet.r160_in1k", pretrained=pretrained, num_classes=10, in_chans=1)
    images, labels = load_digits(return_X_y=True)
    x = F.interpolate(torch.tensor(images / 16.0, dtype=torch.float32).view(-1, 1, 8, 8), size=32)
    y = torch.tensor(labels)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    steps = EPOCHS * (len(x) // BATCH)
    goal = pb.Budget(flops=0.5)
    pruner = pb.Pruner(model, optimizer, goal, total_steps=steps, min_size=100, example_inputs=x[:1])
    model.train()
    for _ in range(EPOCHS):
        for batch in torch.randperm(len(x))[: steps // EPOCHS * BATCH].view(-1, BATCH):
            optimizer.zero_grad()
            F.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
    print(pruner.finish())


if __name__ == "__main__":
    main()
