"""A stream on which adapting would do harm at first, and what the guard sees: draws guard.png.

All digits are shifted by one pixel. First nothing but ones arrives, and the mean of the stream is what makes them
ones: without it they are anything. Then digits arrive mixed, the mean is what the shift has done, and adapting helps.
"""

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits

from adanpc import AdaNPC, MemoryBank

digits = load_digits()
order = torch.randperm(len(digits.images), generator=torch.Generator().manual_seed(0))
images = torch.tensor(digits.images).float()[order]
labels = torch.tensor(digits.target)[order]
shifted = torch.nn.functional.pad(images, (1, 0))[:, :, :8]
ones = (labels == 1).nonzero()[:, 0]
arriving = torch.cat([ones, torch.arange(900, 1400)])
truth = labels[arriving]

figure, (upper, lower) = plt.subplots(2, 1, figsize=(8, 6), sharex=True, layout="constrained")


def draw_accuracy(name: str, right: torch.Tensor) -> None:
    """Draws the accuracy in windows of 60 answers, and prints that of both parts of the stream."""
    windows = right.float().unfold(0, 60, 1).mean(1)
    upper.plot(torch.arange(60, len(right) + 1), 100 * windows, label=name)
    both = [f"{100 * part.float().mean():.0f} %" for part in right.split([len(ones), len(right) - len(ones)])]
    print(f"{name}: {both[0]} of the ones, then {both[1]} of all digits")


for stream, name in (("mixed", "always adapted"), ("unknown", "guarded, the default")):
    classifier = AdaNPC(MemoryBank(dim=64, classes=10, soft=True), preset="safe", stream=stream)
    classifier.learn(images[:900].flatten(1), labels[:900])
    answers = []
    frozen = []
    signs = []
    for query in shifted[arriving].flatten(1):
        answer = classifier.step(query[None])
        assert answer.frozen is not None  # it is the preset "safe"
        answers.append(int(answer.labels))
        frozen.append(int(answer.frozen.argmax()))
        signs.append(classifier.signs())
    draw_accuracy(name, torch.tensor(answers) == truth)
draw_accuracy("frozen", torch.tensor(frozen) == truth)

for sign in ("mixed", "agreement", "trust"):
    lower.plot([getattr(seen, sign) for seen in signs], label=sign)
upper.set_ylabel("accuracy of 60 answers, %")
lower.set_ylabel("what the guard sees")
lower.set_xlabel("queries")
for axes in (upper, lower):
    axes.axvline(len(ones), color="gray", linestyle=":")
    axes.legend()
figure.savefig("guard.png", dpi=110)
