"""The service under load, beside the same without a disk and a bare echo: ``python -m benchmarks.serve``."""
