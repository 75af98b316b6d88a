"""torchrun, Accelerate and Lightning find their devices and ranks: the real packages, on CPUs."""

import contextlib
import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("torch", reason="needs PyTorch (tox -e frameworks)")

pytestmark = pytest.mark.timeout(400)
MACHINE = "sim:A1:4"
TORCH = """
    import torch
    import torch.distributed as dist
    dist.init_process_group("gloo")
    total = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(total)
    tell(dist.get_rank(), dist.get_world_size(), total.item())
    dist.destroy_process_group()
"""
ACCELERATE = """
    import torch
    from accelerate import Accelerator
    accelerator = Accelerator(cpu=True)
    total = accelerator.reduce(torch.tensor([accelerator.process_index + 1.0]), "sum")
    tell(accelerator.process_index, accelerator.num_processes, total.item())
    accelerator.end_training()
"""
LIGHTNING = """
    import lightning, torch
    from torch.utils.data import DataLoader, TensorDataset

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(1, 1)
            self.seen = []

        def training_step(self, batch, index):
            self.seen += batch[0].flatten().tolist()
            return self.linear(batch[0]).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.01)

    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = lightning.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, **quiet)
    module = Module()
    trainer.fit(module, DataLoader(TensorDataset(torch.arange(8.0).reshape(8, 1)), batch_size=2))
    tell(trainer.global_rank, trainer.world_size, [sorted(module.seen), module.linear.weight.item()])
"""
TELL = """
    import json, os

    def tell(rank, count, result):
        names = ("ACME_VISIBLE", "MASTER_PORT")
        line = json.dumps([rank, count, result, *map(os.environ.get, names)])
        os.write(1, f"told: {line}\\n".encode())  # in one piece
"""


@pytest.fixture
def job(acme, tmp_path):
    """Start jobs whose ranks tell of themselves; returns a function that waits and reads what they told."""
    with contextlib.ExitStack() as running:

        def job(program, *command, flags=()):
            (tmp_path / "train.py").write_text("\n".join(line[4:] for line in (TELL + program).splitlines()))
            argv = [sys.executable, "-m", "anyaccel", "--machine", MACHINE, "run", "APU:2", *flags, "--", *command]
            bin_directory = os.path.dirname(sys.executable)
            environ = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": f"{bin_directory}{os.pathsep}{os.environ['PATH']}"}
            pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
            process = subprocess.Popen(argv, cwd=tmp_path, env=environ, text=True, **pipes)
            running.callback(end, process)

            def told():
                out, _ = process.communicate(timeout=300)
                assert process.returncode == 0, out
                return sorted(json.loads(line[6:]) for line in out.splitlines() if line.startswith("told: "))

            return told

        yield job


def end(process):
    if process.poll() is None:
        process.terminate()
        process.communicate(timeout=60)


def check_two_ranks(told):
    assert [line[:2] for line in told] == [[0, 2], [1, 2]]
    (mask,) = {line[3] for line in told}
    assert len(set(mask.split(","))) == 2
    return mask.split(",")


def test_torchrun_starts_a_rank_for_each_device_also_in_two_jobs_at_once(job):
    jobs = [job(TORCH, "torchrun", "train.py", flags=["--port"]) for _ in range(2)]
    told = [wait() for wait in jobs]
    devices = [device for each in told for device in check_two_ranks(each)]
    assert len(set(devices)) == 4
    assert {line[2] for each in told for line in each} == {3.0}
    assert {line[4] for line in told[0]}.isdisjoint(line[4] for line in told[1])


def test_what_the_command_line_of_torchrun_says_counts(job):
    told = job(TORCH, "torchrun", "--standalone", "--nproc-per-node", "1", "train.py", flags=["--port"])()
    assert [line[:3] for line in told] == [[0, 1, 1.0]]


def test_a_program_for_torchrun_needs_no_torchrun(job):
    told = job(TORCH, sys.executable, "train.py", flags=["--ranks"])()
    check_two_ranks(told)
    assert {line[2] for line in told} == {3.0}


def test_accelerate_finds_its_ranks(job):
    pytest.importorskip("accelerate", reason="needs Accelerate (tox -e frameworks)")
    told = job(ACCELERATE, sys.executable, "train.py", flags=["--ranks"])()
    check_two_ranks(told)
    assert {line[2] for line in told} == {3.0}


def test_the_launcher_of_accelerate_meets_at_the_port_of_the_job(job):
    pytest.importorskip("accelerate", reason="needs Accelerate (tox -e frameworks)")
    launch = "exec accelerate launch --multi_gpu --num_processes 2 --main_process_port $MASTER_PORT train.py"
    jobs = [job(ACCELERATE, "sh", "-c", launch, flags=["--port"]) for _ in range(2)]
    told = [wait() for wait in jobs]
    devices = [device for each in told for device in check_two_ranks(each)]
    assert len(set(devices)) == 4
    assert {line[2] for each in told for line in each} == {3.0}


@pytest.mark.parametrize("flags", [[], ["--ranks"]], ids=["starts its ranks itself", "is started as ranks"])
def test_lightning_finds_its_ranks(job, flags):
    pytest.importorskip("lightning", reason="needs Lightning (tox -e frameworks)")
    told = job(LIGHTNING, sys.executable, "train.py", flags=flags)()
    check_two_ranks(told)
    (seen, weight), (others, same) = (line[2] for line in told)
    assert sorted(seen + others) == list(range(8))  # each trained on its half
    assert weight == same
