# SPDX-License-Identifier: Apache-2.0
"""Twelve planted bugs, each caught by a named lane; the tests print who caught what."""

import pytest

from tests import emulator_build
from tests.emulator_build import SCHEDULES, run

pytestmark = pytest.mark.skipif(
    emulator_build.why_not() is not None, reason=str(emulator_build.why_not())
)

# bug: {lane: the beginning of what it must say}. A plain lane with a schedule's name is that
# schedule alone, on every seed tried; "plain" is any schedule.
PLANTED = {
    "missing_barrier_after_write": {
        "plain": "strict check: read of 4 bytes of uninitialised shared memory",
        "tsan": "TSan: data race",
    },
    "missing_barrier_before_reuse": {
        "greedy-one-warp": "wrong answer",
        "tsan": "TSan: data race",
    },
    "wrong_mask": {
        "plain": "strict check: __shfl_down_sync",
        "asan": "strict check: __shfl_down_sync",
    },
    "shared_index_off_by_one": {
        "plain": "strict check: write of 4 bytes outside shared `parts`",
        "asan": "UBSan: index 4 out of bounds",
    },
    "row_offset_32_bit": {
        "plain": "strict check: load_vector: read of 16 bytes outside every registered buffer",
        "asan": "UBSan: signed integer overflow",
    },
    "misaligned_vector_load": {
        "plain": "strict check: load_vector: misaligned read",
        "asan": "strict check: load_vector: misaligned",
    },
    "lost_tail": {"plain": "wrong answer: mass of row 1, vocab 7"},
    "phantom_column": {"plain": "wrong answer: mass of row 1, vocab 7"},
    "merge_order": {"plain": "wrong answer: bits differ between schedules"},
    "uninitialised_accumulator": {"plain": "wrong answer: mass of row 0, vocab 1"},
    "early_return": {
        "plain": "strict check: ",
        "tsan": "strict check: ",
    },
    "wrong_shuffle_lane": {"plain": "wrong answer"},
}
SEEDS = 10


def outcome_in(bug, lane):
    if lane in SCHEDULES:
        # On every seed: a schedule that finds it only sometimes is not a test.
        found = [run("planted", "plain", bug, lane, seed).caught for seed in range(SEEDS)]
        return found[0] if all(found) else ""
    return run("planted", lane, bug, "all" if lane == "plain" else "inorder", seeds=3).caught


def print_table(rows, capsys):
    width = max(len(bug) for bug in PLANTED)
    with capsys.disabled():
        print("\n")
        for bug, lane, caught in rows:
            print(f"  {bug:<{width}}  {lane:<15}  {caught[:90]}")


@pytest.mark.parametrize("bug", PLANTED)
def test_the_plain_lane_catches(bug):
    lane, says = next(iter(PLANTED[bug].items()))
    assert outcome_in(bug, lane).startswith(says)


def test_planted_bug_table(capsys):
    rows = [
        (bug, lane, outcome_in(bug, lane)) for bug in PLANTED for lane in [next(iter(PLANTED[bug]))]
    ]
    print_table(rows, capsys)
    assert all(caught for _, _, caught in rows) and len(rows) == 12


@pytest.mark.slow
def test_planted_bug_table_of_the_sanitizer_lanes(capsys):
    rows = [(bug, lane, outcome_in(bug, lane)) for bug in PLANTED for lane in ("asan", "tsan")]
    print_table(rows, capsys)
    for bug, lane, caught in rows:
        assert caught.startswith(PLANTED[bug].get(lane, "")), (bug, lane, caught)


@pytest.mark.slow
@pytest.mark.parametrize("lane", ["asan", "tsan"])
def test_the_kernel_without_a_bug_passes(lane):
    assert run("planted", lane, "none").caught == ""
