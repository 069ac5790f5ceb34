"""Use features from anywhere: embeddings of text, audio or sensor readings, without a model and without images."""

import numpy as np
import torch
from sklearn.datasets import load_wine
from sklearn.preprocessing import scale

from adanpc import AdaNPC, Admission, MemoryBank

wine = load_wine()
embedding = torch.from_numpy(scale(wine.data))  # any (n, D) array of float32, float64 or integers
label = torch.from_numpy(wine.target)
order = torch.from_numpy(np.random.default_rng(0).permutation(len(label)))
known, stream = order[:60], order[60:]

classifier = AdaNPC(
    MemoryBank(dim=13, classes=3, storage="float16", capacity=100, evict="balanced"),
    k=7,
    centering="stream",
    admission=Admission(min_confidence=0.8) & Admission(class_quota=40),
)
classifier.learn(embedding[known], label[known], keys=known)  # keys are your own row numbers

drifted = embedding + 0.8  # every sensor reads too high
right = 0
for sample in stream.tolist():  # one at a time: batches give the same answers, only faster
    answer = classifier.step(drifted[sample : sample + 1], keys=torch.tensor([sample]))
    right += int(answer.labels) == int(label[sample])
print(f"{right / len(stream):.1%} right; {int(classifier.bank.admitted.sum())} of {len(stream)} joined the bank")
