"""The settings of classifiers whose preset a test knows."""

from __future__ import annotations

from adanpc import AdaNPC
from adanpc.core.paper import PaperSettings
from adanpc.core.safe import SafeSettings


def paper(classifier: AdaNPC) -> PaperSettings:
    """The settings of a classifier of the preset "paper"."""
    settings = classifier.settings
    assert isinstance(settings, PaperSettings)
    return settings


def safe(classifier: AdaNPC) -> SafeSettings:
    """The settings of a classifier of the preset "safe"."""
    settings = classifier.settings
    assert isinstance(settings, SafeSettings)
    return settings
