# SPDX-License-Identifier: Apache-2.0
"""One way to call an op on every implementation: reference, cpu, emulator-SCHEDULE, cuda."""

from __future__ import annotations

import os

import pytest
import torch

from tests import emulator_build
from trm_ext import _lib
from trm_ext.reference import TWINS


class Backend:
    """Calls an op by the names of its arguments; those not given are None or 0."""

    def __init__(self, name, seed=3):
        self.name, _, self.schedule = name.partition("-")
        self.seed = seed
        self.calls = []  # how to repeat each of them

    def __call__(self, op, **named):
        schema = getattr(torch.ops.trm, op).default._schema
        names = [argument.name for argument in schema.arguments]
        assert set(named) <= set(names), (op, names)
        zeros = {"vocab_start": 0}
        arguments = [named.get(name, zeros.get(name)) for name in names]
        shapes = [f"{a.dtype}{list(a.shape)}" for a in arguments if isinstance(a, torch.Tensor)]
        self.calls.append(
            f"backend={self.name} kernel={op} shape={' '.join(shapes)} "
            f"schedule={self.schedule or None} seed={self.seed}"
        )
        if self.name == "reference":
            return TWINS[op](*arguments)
        if self.name == "emulator":
            run = getattr(emulator_build.module(), op)
            return run(*arguments, schedule=self.schedule, seed=self.seed)
        if self.name == "cpu":
            return getattr(torch.ops.trm, op)(*arguments)
        arguments = [on_device(a) if isinstance(a, torch.Tensor) else a for a in arguments]
        result = getattr(torch.ops.trm, op)(*arguments)
        return result.cpu() if isinstance(result, torch.Tensor) else [r.cpu() for r in result]


def on_device(tensor):
    """The tensor on the GPU with its strides and offset: cuda() alone would pack a view."""
    whole = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage()).cuda()
    return whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def usable(name):
    if name == "cuda" and (reason := _lib.describe()["cuda"]["reason"]) is not None:
        if os.environ.get("TRM_REQUIRE_CUDA") == "1":
            pytest.fail(f"TRM_REQUIRE_CUDA=1, but {reason}")
        pytest.skip(f"cuda: {reason}")
    if name.startswith("emulator") and (reason := emulator_build.why_not()) is not None:
        pytest.skip(f"emulator: {reason}")
    return Backend(name)
