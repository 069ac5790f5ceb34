"""``python -m adanpc``, for torchrun and for environments without scripts."""

from adanpc.cli import main

main()
