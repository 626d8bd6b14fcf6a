"""Train on digits with Accelerate; the lines with a comment are what gossip changes.

torchrun --standalone --nproc-per-node 2 examples/accelerate_digits.py
"""

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pyparallel import SGP
from pyparallel.integrations.accelerate import prepare_gossip  # needs accelerate 1.0

accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
digits = load_digits()
images = torch.tensor(digits.data, dtype=torch.float32) / 16
labels = torch.tensor(digits.target)
loader = DataLoader(TensorDataset(images[:1536], labels[:1536]), batch_size=32, shuffle=True)
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
model, optimizer = prepare_gossip(accelerator, model, optimizer, SGP(overlap=1))  # was prepare
loader = accelerator.prepare(loader)


def train(epochs):
    for _ in range(epochs):
        for inputs, targets in loader:
            loss = nn.functional.cross_entropy(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    with model.consensus() as averaged, torch.no_grad():  # the exact average of all ranks
        found = averaged(images[1536:]).argmax(1)
    return (found == labels[1536:]).float().mean()


accelerator.print(f"accuracy {train(0):.2f}, after 2 epochs accuracy {train(2):.2f}")
accelerator.save_state("runs/accelerate")
train(2)
accelerator.load_state("runs/accelerate")  # each rank's own state
accelerator.print(f"resumed, after 4 epochs accuracy {train(2):.2f}")
accelerator.print(f"{model.metrics()['rank/bytes_sent'] / 1e6:.1f} MB sent")
