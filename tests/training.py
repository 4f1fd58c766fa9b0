"""Short deterministic training for the facade's tests: one model, one optimizer, one update."""

import copy

import torch
from torch import nn


def make(seed=0, width=6, **options):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(width, 12), nn.Tanh(), nn.Dropout(0.3), nn.Linear(12, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **options)
    return model, optimizer


def update(model, optimizer, step):
    generator = torch.Generator().manual_seed(step)
    width = next(model.parameters()).shape[1]
    x = torch.randn(5, width, generator=generator)
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()


def state_of(model, optimizer):
    return copy.deepcopy((model.state_dict(), optimizer.state_dict()["state"]))
