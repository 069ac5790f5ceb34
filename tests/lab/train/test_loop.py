"""The training loop: what it writes, and what it survives."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize, one_hot
from typer.testing import CliRunner

from adanpc import cli
from adanpc.core import AdaNPC, Append, MemoryBank
from adanpc.errors import AdaNPCError
from adanpc.lab.data.domain import Domain
from adanpc.lab.networks.source import SourceModel
from adanpc.lab.train.algorithm import Algorithm, Batch
from adanpc.lab.train.assemble import assemble, load_algorithm, splits, start
from adanpc.lab.train.loop import accuracy_of, train
from adanpc.lab.train.registry import ALGORITHMS
from adanpc.lab.train.run import BEST, CHECKPOINT, RECORDS, Run, RunError
from adanpc.lab.train.spec import Spec

DOMAINS = ("dim", "plain", "bright")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone")
TWO_PROCESSES = (*TORCHRUN, "--nproc-per-node", "2", "-m", "adanpc")


def spec(**settings: Any) -> Spec:
    usual = {"encoder": "convnet", "steps": 6, "batch": 4, "every": 2, "hyper": {"lr": 1e-3}, "augment": False}
    return Spec("folder", ("bright",), **{**usual, **settings})


def weights(run: Run) -> dict[str, Tensor]:
    state = run.state(CHECKPOINT)
    assert state is not None
    tensors: dict[str, Tensor] = {
        name: value for name, value in state["algorithm"]["weights"].items() if isinstance(value, Tensor)
    }
    return tensors


def assert_same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_run_says_everything_that_is_needed_to_repeat_it(tmp_path: Path, data_dir: Path) -> None:
    run = start(spec(), data_dir, tmp_path / "run")
    last = train(run, workers=0)
    document = json.loads((run.folder / "spec.json").read_text())
    assert document["spec"] == json.loads(json.dumps(run.spec.document()))
    assert document["data"]["domains"] == dict.fromkeys(sorted(DOMAINS), 30)
    assert {"machine", "versions", "command", "commit"} <= set(document["environment"])
    assert document["environment"]["versions"]["torch"] == torch.__version__
    records = run.records()
    assert [record["step"] for record in records] == [2, 4, 6]
    assert records[-1] == last
    assert all(set(record["held_out"]) == set(DOMAINS) for record in records)
    assert set(last["target"]) == {"bright"}
    sources = [last["held_out"][name] for name in ("dim", "plain")]
    assert last["source"] == pytest.approx(sum(sources) / 2)
    again = start(Run(run.folder).spec, data_dir, tmp_path / "again")
    train(again, workers=0)
    assert_same(weights(run), weights(again))


def test_the_model_learns_and_is_loaded_as_it_was_trained(tmp_path: Path, data_dir: Path) -> None:
    run = start(spec(steps=30, every=5, hyper={"lr": 3e-3}), data_dir, tmp_path / "run")
    last = train(run, workers=0)
    assert last["source"] > 70  # chance: 33
    for which in ("best", "last"):
        model = load_algorithm(run, which).model
        assert not model.training
        domain = splits(run, model.preprocessing)["bright"].large
        with torch.no_grad():
            right = (model(domain.take(range(len(domain)))).argmax(1) == domain.labels).float().mean().item()
        if which == "last":
            assert 100 * right == pytest.approx(last["target"]["bright"])
    best = max(record["source"] for record in run.records())
    step = next(record["step"] for record in run.records() if record["source"] == best)
    state = run.state(BEST)
    assert state is not None
    assert state["algorithm"]["step"] == step
    with pytest.raises(AdaNPCError, match="which must be one of best, last, got 'first'"):
        load_algorithm(run, "first")


@pytest.mark.parametrize(
    "settings", [{}, {"algorithm": "knn", "hyper": {"k": 3, "size": 9}}, {"dropout": 0.5}, {"augment": True}]
)
def test_an_interrupted_run_continues_to_the_same_weights(
    tmp_path: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    whole = start(spec(**settings), data_dir, tmp_path / "whole")
    train(whole, workers=0)
    parts = start(spec(**settings), data_dir, tmp_path / "parts")
    kind = ALGORITHMS[parts.spec.algorithm]

    class Cut(kind):  # type: ignore[valid-type, misc]
        def update(self, batches: Sequence[Batch]) -> dict[str, float]:
            if self.step == 2:
                os.kill(os.getpid(), signal.SIGINT)
            made: dict[str, float] = super().update(batches)
            return made

    monkeypatch.setitem(ALGORITHMS, parts.spec.algorithm, Cut)
    with pytest.raises(KeyboardInterrupt):
        train(parts, workers=0)
    state = parts.state(CHECKPOINT)
    assert state is not None
    assert state["algorithm"]["step"] == 3  # the step at hand was finished, though none was due to be saved
    monkeypatch.setitem(ALGORITHMS, parts.spec.algorithm, kind)
    torch.manual_seed(99)  # what happened in between must not matter
    train(parts, workers=0)
    assert_same(weights(whole), weights(parts))
    losses = [[record["loss"] for record in run.records()] for run in (whole, parts)]
    assert losses[0] == losses[1]


def vote_by_hand(run: Run, model: SourceModel, name: str, part: str) -> float:
    """The percentage of a domain that the 5 nearest training rows get right, in float64 and without a bank."""
    parts = splits(run, model.preprocessing)
    queries = getattr(parts[name], part)

    def encoded(domain: Domain) -> Tensor:
        with torch.no_grad():
            return normalize(model.features(domain.take(range(len(domain)))).double(), dim=1)

    sources = [parts[source].large for source in ("dim", "plain")]
    rows = torch.cat([encoded(domain) for domain in sources])
    labels = torch.cat([domain.labels for domain in sources])
    near = (encoded(queries) @ rows.T).topk(5)
    weights = (near.values / 0.1).softmax(1)
    shares = (weights[:, :, None] * one_hot(labels[near.indices], 3)).sum(1)
    right: Tensor = (shares.argmax(1) == queries.labels).double()
    return 100 * right.mean().item()


def test_a_run_of_the_knn_loss_is_judged_by_the_vote(tmp_path: Path, data_dir: Path) -> None:
    """By its head, which learns beside the vote, it would look worse than what will answer, and another step best."""
    settings = {"algorithm": "knn", "hyper": {"k": 5, "lr": 1e-3}, "steps": 8, "every": 2}
    run = start(spec(**settings), data_dir, tmp_path / "run")
    last = train(run, workers=0)
    model = load_algorithm(run, "last").model
    assert last["held_out"] == {name: pytest.approx(vote_by_hand(run, model, name, "small")) for name in DOMAINS}
    assert last["target"] == {"bright": pytest.approx(vote_by_hand(run, model, "bright", "large"))}
    assert last["source"] == pytest.approx((last["held_out"]["dim"] + last["held_out"]["plain"]) / 2)
    domain = splits(run, model.preprocessing)["dim"].small
    with torch.no_grad():
        right = (model(domain.take(range(len(domain)))).argmax(1) == domain.labels).float().mean().item()
    assert last["held_out_by_head"]["dim"] == pytest.approx(100 * right)
    assert last["held_out_by_head"] != last["held_out"]
    assert set(last["target_by_head"]) == {"bright"}
    best = max(record["source"] for record in run.records())
    state = run.state(BEST)
    assert state is not None
    assert state["algorithm"]["step"] == next(r["step"] for r in run.records() if r["source"] == best)
    assert all("held_out_by_head" in record for record in run.records())


def test_head_and_vote_are_evaluated_on_the_same_features(tmp_path: Path, data_dir: Path) -> None:
    """Encoding is most of an evaluation, so every image is encoded once for both."""
    run = start(spec(algorithm="knn", hyper={"k": 5}, steps=1), data_dir, tmp_path / "run")
    train(run, workers=0)
    model = load_algorithm(run, "last").model
    domain = splits(run, model.preprocessing)["dim"].small
    bank = MemoryBank(model.dim, model.classes)
    bank.apply(Append(torch.eye(model.dim)[:3], torch.arange(3)))
    encoded = []
    model.encoder.register_forward_hook(lambda module, inputs, outputs: encoded.append(len(outputs)))
    accuracy_of(model, domain, AdaNPC(bank, k=1), workers=0)
    assert sum(encoded) == len(domain)


def test_a_run_that_its_head_answers_for_has_one_accuracy(tmp_path: Path, data_dir: Path) -> None:
    run = start(spec(steps=1), data_dir, tmp_path / "run")
    assert not [name for name in train(run, workers=0) if name.endswith("_by_head")]


def test_the_command_shows_vote_and_head(tmp_path: Path, data_dir: Path) -> None:
    arguments = ["--data", "folder", "--data-dir", str(data_dir), "--target", "bright", "--encoder", "convnet"]
    options = ["--steps", "1", "--batch-size", "2", "--algorithm", "knn", "--out", str(tmp_path / "run")]
    done = CliRunner().invoke(cli.app, ["train", *arguments, *options])
    assert done.exit_code == 0, done.output
    lines = [line.split() for line in done.stdout.splitlines()]
    assert ["domain", "vote,", "held", "out", "head,", "held", "out", "vote,", "rest", "head,", "rest"] in lines
    assert [len(line) for line in lines if line[:2] == ["bright", "target"]] == [6]


def test_workers_change_nothing(tmp_path: Path, data_dir: Path) -> None:
    runs = [start(spec(augment=True), data_dir, tmp_path / str(workers)) for workers in (0, 2)]
    for workers, run in zip((0, 2), runs, strict=True):
        train(run, workers=workers)
    assert_same(weights(runs[0]), weights(runs[1]))


def test_em_mode_finds_neighbors_among_all_source_samples(tmp_path: Path, data_dir: Path) -> None:
    run = start(spec(algorithm="knn", hyper={"k": 3, "refresh": 2}), data_dir, tmp_path / "run")
    train(run, workers=0)
    state = run.state(CHECKPOINT)
    assert state is not None
    fixed = state["algorithm"]["weights"]["knn._extra_state"]["fixed"]
    assert sorted(fixed) == list(range(48))  # four fifths of two domains of 30
    assert all(key not in near for key, near in fixed.items())


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 900
    while not path.exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def whole(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run that nothing stopped."""
    run = start(spec(), data_dir, tmp_path_factory.mktemp("runs") / "whole")
    train(run, workers=0)
    return run


# The program, which says when it is in its third step and does not end that before it is told to.
WAITING = """
import sys
from adanpc.cli import main
from adanpc.lab.train.erm import ERM

update = ERM.update

def waiting(algorithm, batches):
    report = update(algorithm, batches)
    if algorithm.step == 3:
        print("in the third step", flush=True)
        sys.stdin.readline()
    return report

ERM.update = waiting
main()
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 130), (signal.SIGKILL, -9)])
def test_a_process_that_is_stopped_loses_nothing(
    tmp_path: Path, data_dir: Path, whole: Run, number: signal.Signals, code: int
) -> None:
    settings = ["--data", "folder", "--data-dir", str(data_dir), "--target", "bright", "--encoder", "convnet"]
    settings += ["--steps", "6", "--batch-size", "4", "--every", "2", "--set", "lr=0.001", "--no-augment"]
    folder = tmp_path / "run"
    command = [sys.executable, "-c", WAITING, "train", *settings, "--workers", "1", "--out", str(folder)]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, text=True, stdin=pipe, stdout=pipe, stderr=pipe)
    assert process.stdout is not None
    assert "in the third step\n" in iter(process.stdout.readline, ""), process.communicate()
    process.send_signal(number)
    _, err = process.communicate("go on\n")
    assert process.returncode == code, err
    if number != signal.SIGKILL:
        assert f"continue with: adanpc train --resume {folder}" in err
        assert "Traceback" not in err
    done = CliRunner().invoke(cli.app, ["train", "--resume", str(folder)])
    assert "After 6 steps" in done.stdout, done.output
    assert Run(folder).spec == whole.spec
    assert_same(weights(whole), weights(Run(folder)))
    assert [record["step"] for record in Run(folder).records()] == [2, 4, 6]


def test_two_processes_train_as_one_with_twice_the_batch(tmp_path: Path, data_dir: Path) -> None:
    one = start(spec(batch=8, every=1), data_dir, tmp_path / "one")
    train(one, workers=0)
    command = [
        *TWO_PROCESSES,
        "train",
        "--data",
        "folder",
        "--data-dir",
        str(data_dir),
        "--target",
        "bright",
        "--encoder",
        "convnet",
    ]
    command += ["--steps", "6", "--batch-size", "4", "--every", "1", "--set", "lr=0.001", "--no-augment", "--workers"]
    command += ["0", "--out", str(tmp_path / "two")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    two = Run(tmp_path / "two")
    curves = [[record["loss"] for record in run.records()] for run in (one, two)]
    assert curves[0] == pytest.approx(curves[1], rel=1e-4)
    assert all(torch.allclose(weights(one)[name], value, atol=1e-4) for name, value in weights(two).items())


GROUP_THAT_ENDS = """
from pathlib import Path
from torch import nn, ones
from torch.nn.parallel import DistributedDataParallel
from adanpc.lab.train.process_group import process_group

with process_group() as group:
    DistributedDataParallel(nn.Linear(2, 1))(ones(1, 2)).sum().backward()
    group.wait()
threads = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
assert not any("gloo" in name for name in threads), threads
"""


@pytest.mark.skipif(sys.platform != "linux", reason="names of threads are read from /proc")
def test_no_thread_of_a_process_group_outlives_it(tmp_path: Path) -> None:
    """A thread that frees a tensor while Python exits aborts the process, once in a few hundred times."""
    script = tmp_path / "group.py"
    script.write_text(GROUP_THAT_ENDS)
    done = subprocess.run([*TORCHRUN, "--nproc-per-node", "2", str(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


SLOW_TO_EVALUATE = """
import time
from pathlib import Path
from adanpc.lab.train.erm import ERM

class Slow(ERM):
    def __init__(self, *arguments, **settings):
        super().__init__(*arguments, **settings)
        self.model.encoder.register_forward_pre_hook(self.pause)

    def pause(self, encoder, inputs):
        evaluating = Path("evaluating")
        if not encoder.training and not evaluating.exists():
            evaluating.touch()
            time.sleep(3600)
"""


def test_an_interrupted_evaluation_of_two_processes_is_saved_and_made_again(tmp_path: Path, data_dir: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW_TO_EVALUATE)
    settings = ["--data", "folder", "--data-dir", str(data_dir), "--target", "bright", "--encoder", "convnet"]
    settings += ["--steps", "4", "--batch-size", "4", "--every", "2", "--set", "lr=0.001", "--no-augment"]
    settings += ["--workers", "0", "--out", "run"]
    command = [*TWO_PROCESSES, "train", "--algorithm", "slow.py:Slow"]
    pipes: dict[str, Any] = {"text": True, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "cwd": tmp_path}
    process = subprocess.Popen([*command, *settings], **pipes)
    wait_for(tmp_path / "evaluating", process)
    process.send_signal(signal.SIGINT)  # torchrun passes it on, waits half a minute, and kills
    _, err = process.communicate(timeout=600)
    assert err.count("Stopped and saved; continue with: adanpc train --resume run --algorithm slow.py:Slow") == 1, err
    done = subprocess.run([*command, "--resume", "run", "--workers", "0"], **pipes)
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in (tmp_path / "run" / RECORDS).read_text().splitlines()]
    assert [record["step"] for record in records] == [2, 4]


def test_algorithms_of_several_steps_train_in_one_process() -> None:
    several = [kind for kind in ALGORITHMS.values() if kind.update is not Algorithm.update]
    for kind in several:
        with pytest.raises(AdaNPCError, match="trains in one process only"):
            kind.distribute(object.__new__(kind))


def test_scalars_for_tensorboard(tmp_path: Path, data_dir: Path) -> None:
    run = start(spec(), data_dir, tmp_path / "run")
    train(run, workers=0, tensorboard=True)
    events = list((run.folder / "tensorboard").iterdir())
    assert len(events) == 1
    assert b"held_out/bright" in events[0].read_bytes()


def test_what_cannot_be_trained_is_refused_with_a_remedy(tmp_path: Path, data_dir: Path) -> None:
    folder = tmp_path / "run"
    with pytest.raises(AdaNPCError, match="erm has no setting 'speed'; it has: lr, weight_decay"):
        spec(hyper={"speed": 1})
    cases = [
        (Spec("folder", ("dark",), encoder="convnet"), "no domain 'dark'; it has: bright, dim, plain"),
        (Spec("folder", ("brigt",), encoder="convnet"), "it has: bright, dim, plain; did you mean 'bright'?"),
        (Spec("folder", DOMAINS, encoder="convnet"), "no source domain is left"),
    ]
    for bad, sentence in cases:
        with pytest.raises(AdaNPCError, match=sentence):
            start(bad, data_dir, folder)
        assert not folder.exists()
    start(spec(), data_dir, folder)
    with pytest.raises(RunError, match="already holds a run: resume that one, or choose another folder"):
        start(spec(), data_dir, folder)
    with pytest.raises(RunError, match="has no best model yet"):
        load_algorithm(Run(folder))


def test_damage_is_named(tmp_path: Path, data_dir: Path) -> None:
    run = start(spec(), data_dir, tmp_path / "run")
    train(run, workers=0)
    (run.folder / CHECKPOINT).write_bytes((run.folder / CHECKPOINT).read_bytes()[:500])
    with pytest.raises(RunError, match=r"checkpoint.safetensors is damaged: its contents do not match its seal"):
        train(run, workers=0)
    with pytest.raises(RunError, match="is not a run of adanpc train"):
        Run(tmp_path)
    document = json.loads((run.folder / "spec.json").read_text())
    (run.folder / "spec.json").write_text(json.dumps({**document, "format": 4}))
    with pytest.raises(RunError, match="has format 4, this version reads 3: update adanpc"):
        Run(run.folder)
    document["data"]["domains"]["dim"] = 29
    (run.folder / "spec.json").write_text(json.dumps(document))
    with pytest.raises(RunError, match="has changed"):
        splits(Run(run.folder), None)


def test_a_line_that_a_crash_cut_off_is_skipped(tmp_path: Path, data_dir: Path) -> None:
    run = start(spec(), data_dir, tmp_path / "run")
    assert run.records() == []
    run.record({"step": 1, "loss": 3.0})
    with (run.folder / RECORDS).open("a") as file:
        file.write('{"step": 2, "lo')
    run.record({"step": 2, "loss": 2.0})
    run.record({"step": 2, "loss": 1.0})
    assert run.records() == [{"step": 1, "loss": 3.0}, {"step": 2, "loss": 1.0}]


def test_the_initial_weights_are_decided_by_the_seed(tmp_path: Path, data_dir: Path) -> None:
    states: list[Tensor] = []
    for seed in (0, 0, 1):
        torch.manual_seed(len(states))
        run = start(spec(seed=seed), data_dir, tmp_path / str(len(states)))
        states.append(assemble(run, fresh=True).model.state_dict()["head.weight"])
    assert torch.equal(states[0], states[1])
    assert not torch.equal(states[0], states[2])
