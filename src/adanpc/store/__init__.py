"""The bank on disk: a single file that is written atomically, or a folder in which every change is safe at once."""

from adanpc.store.check import BankFileError
from adanpc.store.durable import DurableBank
from adanpc.store.embeddings import EmbeddingsError, read_embeddings, write_parquet
from adanpc.store.file import load, save
from adanpc.store.log import Answered, BankInUseError, Log, LogError, LogWriteError
from adanpc.store.onnx_file import write_onnx
from adanpc.store.sqlite import SqliteLog
from adanpc.store.thumbnails import Thumbnails
from adanpc.store.verify import Report, verify

__all__ = [
    "Answered", "BankFileError", "BankInUseError", "DurableBank", "EmbeddingsError", "Log", "LogError",
    "LogWriteError", "Report", "SqliteLog", "Thumbnails", "load", "read_embeddings", "save", "verify", "write_onnx",
    "write_parquet",
]  # fmt: skip
