# SPDX-License-Identifier: Apache-2.0
"""The launch plan, a pure function, over a grid of devices, sizes, types and addresses."""

import itertools

import pytest

from tests import emulator_build
from trm_ext.outputs import encode

pytestmark = pytest.mark.skipif(
    emulator_build.why_not() is not None, reason=str(emulator_build.why_not())
)
# name: (compute capability, multiprocessors)
DEVICES = {
    "A100": (80, 108),
    "H100": (90, 132),
    "H200": (90, 132),
    "B200": (100, 148),
    "RTX 5090": (120, 170),
}
TYPES = {"fp32": (0, 4), "bf16": (1, 2), "fp16": (2, 2), "fp64": (3, 8)}
STREAMED = {("bf16", "bf16"), ("fp16", "fp16"), ("fp32", "fp32"), ("bf16", "fp32")} | {
    ("fp32", "bf16")
}
VOCABULARIES = (1, 7, 255, 257, 4099, 32000, 50257, 151936, 262144)
ROWS = (1, 3, 100, 263, 264, 8192, 70000)
ALIGNED = 1 << 20  # an address


def side(kind, vocab, *, address=ALIGNED, row=None, column=1):
    return dict(
        address=address,
        type=TYPES[kind][0],
        outer_stride=0,
        inner_stride=vocab if row is None else row,
        column_stride=column,
    )


def forward(device, rows, vocab, pair=("bf16", "bf16"), **given):
    rollout, train = (side(kind, vocab, **given) for kind in pair)
    return emulator_build.module().plan_forward(*device, rows, vocab, rollout, train)


def backward(device, rows, vocab, pair=("bf16", "bf16"), outputs=("kl",), **given):
    columns = given.pop("columns", vocab)
    gradients = given.pop("gradients", (0, ALIGNED))
    rollout, train = (side(kind, vocab, row=columns, **given) for kind in pair)
    return emulator_build.module().plan_backward(
        *device, rows, vocab, columns, rollout, train, encode(outputs), *gradients
    )


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
@pytest.mark.parametrize("pair", list(itertools.product(TYPES, TYPES)), ids="-".join)
def test_which_types_stream(device, pair):
    assert forward(device, 300, 1024, pair)["streamed"] == (pair in STREAMED)
    assert backward(device, 300, 1024, pair)["streamed"] == (pair in STREAMED)


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
@pytest.mark.parametrize("vocab", VOCABULARIES)
@pytest.mark.parametrize("pair", sorted(STREAMED), ids="-".join)
def test_regions_cut_a_row_whatever_the_rows_and_the_device(device, vocab, pair):
    run = 4 if "fp32" in pair else 8
    plans = [forward(device, rows, vocab, pair) for rows in ROWS]
    for plan, rows in zip(plans, ROWS, strict=True):
        assert plan["region_columns"] == plans[0]["region_columns"]
        assert plan["region_columns"] % (32 * run) == 0
        assert sum(max(size, 0) for size in plan["regions"]) == vocab
        split = rows < 2 * device[1] and vocab > 8 * plan["region_columns"]
        assert plan["blocks_per_row"] == (4 if split else 1)
        assert plan["blocks"] == rows * plan["blocks_per_row"] < 2**31
        assert plan["workspace_bytes"] == (rows * 32 * 14 * 8 if split else 0)


@pytest.mark.parametrize(
    "pair,given,load_bytes",
    [
        (("bf16", "bf16"), {}, 16),
        (("bf16", "bf16"), dict(address=ALIGNED + 8), 4),
        (("bf16", "bf16"), dict(address=ALIGNED + 2), 2),
        (("bf16", "bf16"), dict(row=1024 + 8), 16),
        (("bf16", "bf16"), dict(row=1024 + 2), 4),
        (("bf16", "bf16"), dict(row=1024 + 1), 2),
        (("fp32", "fp32"), dict(row=1024 + 1), 4),
        (("bf16", "fp32"), dict(row=1024 + 4), 16),  # 8 bytes of one are a run, 16 of the other
        (("bf16", "fp32"), dict(row=1024 + 2), 4),
    ],
)
def test_width_of_loads_follows_addresses_and_strides(pair, given, load_bytes):
    assert forward((90, 132), 300, 1024, pair, **given)["load_bytes"] == load_bytes


def test_one_row_needs_no_stride():
    assert forward((90, 132), 1, 1024, row=1025)["load_bytes"] == 16


def test_what_goes_to_the_generic_kernel():
    assert not forward((90, 132), 300, 1024, column=2)["streamed"]
    assert forward((90, 132), 300, 1, column=2)["streamed"]  # there is no second column
    assert not forward((75, 40), 300, 1024)["streamed"]
    assert not forward((90, 132), 2**30, 8)["streamed"]
    h100 = (90, 132)
    assert not backward(h100, 300, 1024, columns=1025)["streamed"]
    assert not backward(h100, 300, 1024, address=ALIGNED + 2)["streamed"]
    assert not backward(h100, 300, 1024, gradients=(0, ALIGNED + 8))["streamed"]
    assert backward(h100, 300, 1000, columns=1024)["streamed"]


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
@pytest.mark.parametrize("vocab", VOCABULARIES)
@pytest.mark.parametrize("rows", ROWS)
def test_gradient_blocks_cover_a_row(device, vocab, rows):
    columns = (vocab + 7) // 8 * 8
    plan = backward(device, rows, vocab, columns=columns)
    assert plan["streamed"] and plan["kl_only"]
    assert plan["blocks"] == rows * plan["blocks_per_row"] < 2**31
    covered = plan["block_columns"] * plan["blocks_per_row"]
    assert columns <= covered < columns + plan["block_columns"]
    if rows >= 2 * device[1]:
        assert plan["blocks_per_row"] == 1
    elif vocab == 262144:  # few rows of a large vocabulary: enough blocks for every processor
        assert plan["blocks"] >= min(2 * device[1], 128 * rows)


def test_only_the_plain_gradient_takes_the_short_formula():
    h100 = (90, 132)
    assert backward(h100, 300, 1024)["kl_only"]
    assert not backward(h100, 300, 1024, outputs=("kl", "entropy_train"))["kl_only"]
    assert not backward(h100, 300, 1024, gradients=(ALIGNED, ALIGNED))["kl_only"]
