"""RPL: the generalized cross-entropy of the model's own labels."""

from __future__ import annotations

import pytest
import torch
from sources import images, source
from torch.optim import Adam

from adanpc.errors import AdaNPCError
from adanpc.lab.adapt.robust_labels import RPL
from adanpc.lab.adapt.statistics import affine, use_batch_statistics


def test_a_step_is_that_of_the_loss_written_out() -> None:
    batch = images(12, seed=1)
    adapter = RPL(source("batch2d"))
    model = source("batch2d").model
    use_batch_statistics(model)
    optimizer = Adam(affine(model), lr=1e-3)
    for _ in range(3):
        logits = model(batch)
        losses = []
        for row in logits:
            probs = row.softmax(0)
            losses.append((1 - probs[int(row.argmax())] ** 0.8) / 0.8)
        assert torch.allclose(adapter.step(batch), logits.softmax(1).detach(), atol=1e-5)
        optimizer.zero_grad()
        (sum(losses) / len(losses)).backward()
        optimizer.step()


def test_bad_settings_are_refused() -> None:
    with pytest.raises(AdaNPCError, match="q must be"):
        RPL(source("batch2d"), q=0.0)
