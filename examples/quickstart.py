"""Wrap a trained PyTorch model, let it adapt to shifted data, and save it. Runs in a few seconds."""

import tempfile
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import adanpc

torch.manual_seed(0)
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32)[:, None]
labels = torch.tensor(digits.target)
source = slice(0, 1000)
target = slice(1000, None)

# A classifier like yours: a network that ends in a linear layer.
model = nn.Sequential(
    nn.Conv2d(1, 32, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(288, 64), nn.ReLU(), nn.Linear(64, 10)
)
optimizer = torch.optim.Adam(model.parameters(), 1e-3)
for _ in range(60):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(images[source]), labels[source]).backward()
    optimizer.step()

# The world changes: the camera overexposes and its contrast falls.
shifted = 0.5 * images[target] + 8.0
before = (model(shifted).argmax(1) == labels[target]).float().mean()

# Three lines: a bank of the training data answers by its nearest rows, and the stream joins the bank.
loader = DataLoader(TensorDataset(images[source], labels[source]), batch_size=128)
wrapped = adanpc.wrap(model, loader, preprocessing="pixels 0 to 16")
answer = wrapped.step(shifted)

after = (answer.labels == labels[target]).float().mean()
print(f"linear head {before:.1%}, adapted {after:.1%}; {int((answer.joined >= 0).sum())} answers joined the bank")
print(wrapped.explain(answer, query=len(answer.labels) - 1))

with tempfile.TemporaryDirectory() as folder:
    path = Path(folder, "bank.safetensors")
    adanpc.save(wrapped, path)
    again = adanpc.load(path, model, preprocessing="pixels 0 to 16")
    print("reloaded:", again.classifier.bank.digest() == wrapped.classifier.bank.digest())
