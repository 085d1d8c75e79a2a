# SPDX-License-Identifier: Apache-2.0
"""The device fixture: a GPU, and the rehearsal of the same tests on the CPU."""

import os

import pytest

from tests.gpu.device import Device
from trm_ext import _lib


@pytest.fixture(params=[pytest.param("cuda", marks=pytest.mark.gpu), "cpu"])
def device(request):
    if request.param == "cuda" and (reason := _lib.describe()["cuda"]["reason"]) is not None:
        if os.environ.get("TRM_REQUIRE_CUDA") == "1":
            pytest.fail(f"TRM_REQUIRE_CUDA=1, but {reason}")
        pytest.skip(f"cuda: {reason}")
    return Device(request.param)
