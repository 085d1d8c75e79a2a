# SPDX-License-Identifier: Apache-2.0
"""Fixtures that every test file may use."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(20251223)
