"""Use features from anywhere: embeddings of text, audio or sensor readings, without a model and without images."""

import numpy as np
import torch
from sklearn.datasets import load_wine
from sklearn.preprocessing import scale

from adanpc import AdaNPC, MemoryBank

wine = load_wine()
embedding = torch.from_numpy(scale(wine.data))  # any (n, D) array of float32, float64 or integers
label = torch.from_numpy(wine.target)
order = torch.from_numpy(np.random.default_rng(0).permutation(len(label)))
known, stream = order[:60], order[60:]

bank = MemoryBank(dim=13, classes=3, soft=True, storage="float16", capacity=100, evict="balanced")
classifier = AdaNPC(bank, preset="safe")
classifier.learn(embedding[known], label[known], keys=known)  # keys are your own row numbers

drifted = embedding + 0.8  # every sensor reads too high
unadapted = classifier.predict(drifted[stream])  # learns nothing
adapted = classifier.step(drifted[stream], keys=stream)  # learns from each sample, as it would one at a time

for name, answer in (("unadapted", unadapted), ("adapted", adapted)):
    print(f"{name}: {(answer.labels == label[stream]).double().mean():.1%} right")
print(f"{int(bank.admitted.sum())} samples of the stream are in the bank, which keeps 100 at most")
