"""A training script with every step durable. Kill it, run it again: it goes on where it was.

python examples/train.py [/dev/shm/example]
"""

import sys

import torch
from torch import nn

import lightckpt


def main() -> None:
    path = sys.argv[1] if len(sys.argv) > 1 else "/dev/shm/lightckpt-example"
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 256), nn.Dropout(0.1), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=1000)
    examples = torch.utils.data.TensorDataset(torch.randn(4096, 32), torch.randint(10, (4096,)))
    loader = torch.utils.data.DataLoader(examples, batch_size=64, shuffle=True)

    with lightckpt.Checkpointer(
        path, model=model, optimizer=optimizer, scheduler=scheduler
    ) as checkpointer:
        start = checkpointer.restore()
        for step, (x, y) in checkpointer.iterate(loader, start=start, epochs=5):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            scheduler.step()
            if step % 50 == 0:
                print(f"step {step}: loss {loss.item():.3f}, durable {checkpointer.latest}")


if __name__ == "__main__":
    main()
