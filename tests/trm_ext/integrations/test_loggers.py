# SPDX-License-Identifier: Apache-2.0
"""TensorBoard and Weights & Biases get floats; nothing is imported before somebody asks."""

import subprocess
import sys

import pytest
import torch

from trm_ext.integrations import tensorboard, wandb

METRICS = {"trm/window/seq_kl": torch.tensor(0.25, dtype=torch.float64), "trm/kl/mean": 0.5}


def test_tensorboard_gets_scalars():
    calls = []

    class Writer:
        def add_scalar(self, name, value, step):
            calls.append((name, value, step))

    tensorboard.log(Writer(), METRICS, 7)
    assert calls == [("trm/window/seq_kl", 0.25, 7), ("trm/kl/mean", 0.5, 7)]


def test_wandb_gets_one_call():
    calls = []

    class Run:
        def log(self, values, step=None):
            assert all(type(value) is float for value in values.values())
            calls.append((values, step))

    wandb.log(Run(), METRICS, 7)
    wandb.log(Run(), METRICS)
    assert calls == [({"trm/window/seq_kl": 0.25, "trm/kl/mean": 0.5}, step) for step in (7, None)]


def test_a_real_event_file(tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(tmp_path) as writer:
        tensorboard.log(writer, METRICS, 3)
    events = EventAccumulator(str(tmp_path)).Reload()
    (event,) = events.Scalars("trm/window/seq_kl")
    assert (event.step, event.value) == (3, 0.25)


def test_adapters_are_short_and_import_nothing():
    code = (
        "import sys, trm_ext, trm_ext.integrations.tensorboard, trm_ext.integrations.wandb\n"
        "assert not {'tensorboard', 'wandb', 'torch.utils.tensorboard'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    for module in (tensorboard, wandb):
        with open(module.__file__) as file:
            assert len(file.readlines()) < 30
