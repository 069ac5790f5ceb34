"""An expert questions an answer: see who voted, veto a wrong row, see the vote change, and correct its label."""

import torch

from adanpc import AdaNPC, MemoryBank, Relabel, Restore, Veto

classifier = AdaNPC(MemoryBank(dim=2, classes=2), k=2)
features = torch.tensor([[1.0, 0.1], [1.0, 0.2], [0.9, 0.3], [0.1, 1.0], [0.2, 1.0]])
labels = torch.tensor([1, 0, 0, 1, 1])  # row 0 was labeled by mistake
classifier.learn(features, labels)

query = torch.tensor([[1.0, 0.12]])
answer = classifier.predict(query)
print(f"class {int(answer.labels)} with confidence {float(answer.confidence):.2f}; who voted:")
for row, label, similarity, weight in zip(
    answer.neighbors.ids[0].tolist(),
    answer.neighbors.labels[0].tolist(),
    answer.neighbors.similarity[0].tolist(),
    answer.weights[0].tolist(),
    strict=True,
):
    print(f"  row {row}: class {label}, similarity {similarity:.3f}, {weight:.0%} of the vote")

classifier.apply(Veto((0,), who="Dr. Ada", why="mislabeled in 2023"))
after = classifier.predict(query)
print(f"without row 0: class {int(after.labels)} with confidence {float(after.confidence):.2f}")

# Correcting a label is one change, and the row keeps its history.
classifier.apply(Restore((0,), who="Dr. Ada", why="the image is fine"))
classifier.apply(Relabel((0,), 0, who="Dr. Ada", why="the label was not"))
corrected = classifier.predict(query)
print(f"corrected: class {int(corrected.labels)} with confidence {float(corrected.confidence):.2f}")
for judgment in classifier.bank.history(0):
    print(f"  {judgment.verdict} by {judgment.who}: {judgment.why} (class {judgment.label} before)")
