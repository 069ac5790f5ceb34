"""A sweep on a real Ray cluster of two nodes, one of which is killed in the middle; a program of its own.

Ray writes and warns a great deal, and starts processes that must be gone in the end, whatever happens.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster
from sweeping import Chore, note, noted

import adanpc.lab.sweep.sweep
from adanpc.errors import AdaNPCError
from adanpc.lab.sweep.records import Records
from adanpc.lab.sweep.subjects import Workspace
from adanpc.lab.sweep.sweep import sweep

NODE: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 80 * 2**20}
NAMES = [f"chore {number}" for number in range(9)]
DOOMED = "to be killed:"  # begins the line of the log that names a node
WAITING = "at work there:"  # begins the line of the log that names a chore
LIMIT = 840  # seconds, for a busy machine; the test waits a little longer


class Roaming(Chore):
    """A chore that never ends on the node that is to be killed, once it is known which one that is.

    On the other node, it waits until that has happened, so that something is left for the one to be killed.
    """

    def run(self, workspace: Workspace) -> dict[str, Any]:
        if ray.get_runtime_context().get_node_id() in noted(workspace, DOOMED):
            note(workspace, f"begin {self.name}")
            note(workspace, f"{WAITING} {self.name}")
            time.sleep(LIMIT)
        while noted(workspace, DOOMED) and not noted(workspace, WAITING):
            time.sleep(0.02)
        return super().run(workspace)


def kill(cluster: Cluster, node: Any, workspace: Workspace) -> None:
    """Kills the node once three tasks are recorded and another is at work there; tells what it saw."""
    while len(Records(workspace.folder).entries) < 3:
        time.sleep(0.02)
    note(workspace, f"{DOOMED} {node.node_id}")
    while not noted(workspace, WAITING):
        time.sleep(0.02)
    recorded = [entry["task"]["name"] for entry in Records(workspace.folder).entries.values()]
    cluster.remove_node(node, allow_graceful=False)
    seen = {"recorded": recorded, "there": noted(workspace, WAITING)}
    (workspace.folder / "seen.json").write_text(json.dumps(seen))


def main() -> None:
    """Takes the folder."""
    signal.signal(signal.SIGALRM, lambda *_: sys.exit(f"not finished after {LIMIT} seconds"))
    signal.alarm(LIMIT)
    workspace = Workspace(Path(sys.argv[1]), Path(sys.argv[1]))
    cluster = Cluster(True, head_node_args={**NODE, "include_dashboard": False})
    try:
        lose_a_node(cluster, workspace)
        fail(cluster, workspace)
    finally:
        cluster.shutdown()


def lose_a_node(cluster: Cluster, workspace: Workspace) -> None:
    """A sweep in the middle of which one of two nodes is killed."""
    node = cluster.add_node(**NODE)
    threading.Thread(target=kill, args=(cluster, node, workspace), daemon=True).start()
    sweep([Roaming(name, seconds=1.0) for name in NAMES], workspace, Records(workspace.folder), ray=cluster.address)


def fail(cluster: Cluster, workspace: Workspace) -> None:
    """A task with a mistake, and one that kills its process every time, which is tried once more to save time."""
    adanpc.lab.sweep.sweep.RETRIES = 1
    for chore in (Chore("mistaken", fate="wrong"), Chore("deadly", fate="killed")):
        try:
            sweep([chore], workspace, Records(workspace.folder), ray=cluster.address)
        except (ZeroDivisionError, AdaNPCError) as error:
            note(workspace, f"raised {type(error).__name__}: {error}".splitlines()[0])
