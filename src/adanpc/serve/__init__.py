"""A durable bank over HTTP: predictions, explanations, and an expert's corrections."""

from adanpc.serve.app import create
from adanpc.serve.limits import Limits
from adanpc.serve.running import ended_by_signals, listening, run, serving
from adanpc.serve.tokens import Tokens, add_token, read_tokens, remove_token

__all__ = [
    "Limits",
    "Tokens",
    "add_token",
    "create",
    "ended_by_signals",
    "listening",
    "read_tokens",
    "remove_token",
    "run",
    "serving",
]
