"""A stream on which adapting does harm at first, and what the guard sees: draws guard.png.

All digits are shifted by one pixel. First only ones arrive: the mean of the stream is what makes them ones, and without
it they could be anything. Then all digits arrive, mixed: the mean is the effect of the shift, and adapting helps.
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
    """Draws the accuracy over windows of 60 answers, and prints the accuracy in both parts of the stream."""
    windows = right.float().unfold(0, 60, 1).mean(1)
    upper.plot(torch.arange(60, len(right) + 1), 100 * windows, label=name)
    of_ones = 100 * right[: len(ones)].float().mean()
    of_all = 100 * right[len(ones) :].float().mean()
    print(f"{name}: {of_ones:.0f} % of the ones, then {of_all:.0f} % of all digits")


for stream, name in (("mixed", "always adapted"), ("unknown", "guarded, the default")):
    classifier = AdaNPC(MemoryBank(dim=64, classes=10, soft=True), preset="safe", stream=stream)
    classifier.learn(images[:900].flatten(1), labels[:900])
    answers = []
    frozen = []
    signs = []
    for query in shifted[arriving].flatten(1):
        answer = classifier.step(query[None])
        assert answer.frozen is not None  # the preset "safe" always gives it
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
