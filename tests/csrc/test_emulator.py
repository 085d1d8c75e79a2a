# SPDX-License-Identifier: Apache-2.0
"""The emulator itself, and our kernels as small programs under it, lane by lane."""

import re
import statistics
import subprocess

import pytest

from tests import emulator_build
from tests.emulator_build import SCHEDULES, run

pytestmark = pytest.mark.skipif(
    emulator_build.why_not() is not None, reason=str(emulator_build.why_not())
)

COLLECTIVES = (
    "atomics",
    "barriers",
    "clusters",
    "fences",
    "half_warps",
    "indices",
    "matches",
    "reductions",
    "shuffles",
    "syncwarp",
    "templates",
    "votes",
)
KERNELS = (
    "forward_backward",
    "forward_backward_runs",
    "forward_backward_runs_bf16",
    "forward_backward_wide",
    "sequences",
    "state_merge_finish",
    "state_merge_finish_wide",
)
THREAD = re.compile(r"thread \(\d+,\d+,\d+\) of block \(\d+,\d+,\d+\), lane \d+ of warp \d+")
LINE = re.compile(r"at (\S*/)?(tests|csrc)/\S+:\d+ in ")
REPRO = re.compile(r"repro: kernel=\w+ grid=\(.*\) block=\(.*\) shape=\".*\" schedule=\S+ seed=\d+")

# case: (what the emulator says, whether it can name a thread and a line)
STRICT = {
    "lane_outside_mask": (r"lane \d+ is missing from its own mask 0x0000ffff", True),
    "exited_lane_in_mask": ("mask 0xffffffff names lane", True),
    "absent_lane_in_mask": ("names lanes 0xffffff00, which do not exist", True),
    "different_call_sites": ("lanes of mask 0xffffffff are at different call sites", True),
    "different_masks": ("with mask 0x.* meets __shfl_sync with mask 0x|missing from its own", True),
    "shuffle_from_outside_mask": (r"reads from lane \d+, which is not in its mask", True),
    "shuffle_width": ("width 24 is not a power of two", True),
    "barrier_after_exit": ("a thread exits while others wait|after threads .* have exited", True),
    "barriers_at_two_sites": ("__syncthreads meets __syncthreads at", True),
    "barrier_against_collective": ("deadlock: nobody can run", False),
    "uninitialised_shared": ("uninitialised shared memory, `tile` at byte 68", True),
    "uninitialised_atomic": ("atomicAdd: .*uninitialised shared memory, `sum`", True),
    "shared_overrun": ("outside shared `tile`, at byte 256 of 256", True),
    "shared_underrun": ("outside shared `dynamic shared memory`, at byte -4 of 256", True),
    "misaligned_vector": ("load_vector: misaligned read of 16 bytes", True),
    "misaligned_pointer": ("misaligned read of 16 bytes", True),
    "misaligned_atomic": ("atomicAdd: misaligned write of 8 bytes", True),
    "global_overrun": ("outside every registered buffer: .*`in`, at byte 256 of 256", True),
    "writes_an_input": ("write into `in`, which is an input", True),
    "reads_an_unwritten_output": ("read of `out` .*nobody has written", True),
    "leaves_an_output_unwritten": ("`out` was left unwritten at byte 252 of 256", False),
    "reads_anothers_stack": ("read of another thread's local memory", True),
    "too_many_threads": ("1025 threads, the limit is 1024", False),
    "empty_grid": (r"invalid configuration: grid \(0,1,1\)", False),
    "rows_on_grid_y": (r"invalid configuration: grid \(1,65536,1\)", False),
    "cluster_does_not_divide": ("clusters of 2 blocks", False),
    "too_much_dynamic_shared": ("307200 bytes of dynamic shared memory", False),
    "too_much_static_shared": ("static shared memory to 53248 bytes", True),
    "no_dynamic_shared": ("the launch asked for none", True),
    "leaves_a_cluster": ("exits while others wait in cluster_sync|after threads", True),
    "spins_forever": ("livelock: atomics spin", False),
}


def test_every_case_of_the_programs_is_listed_here():
    for name, known in (("collectives", COLLECTIVES), ("strict", STRICT)):
        listed = subprocess.run(
            [emulator_build.program(name), "list"], capture_output=True, text=True, check=True
        )
        assert sorted(listed.stdout.split()) == sorted(known)


@pytest.mark.parametrize("case", COLLECTIVES)
def test_collective_meets_its_specification(case):
    outcome = run("collectives", "plain", case, seeds=3)
    assert outcome.caught == "", outcome.text


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("case", STRICT)
def test_strict_check_fires(case, schedule):
    says, names_a_place = STRICT[case]
    outcome = run("strict", "plain", case, schedule, first_seed=11)
    assert re.search(f"^emulator: .*({says})", outcome.text), outcome.text
    assert REPRO.search(outcome.text), outcome.text
    assert f"schedule={schedule} seed=11" in outcome.text
    if names_a_place:
        assert THREAD.search(outcome.text) and LINE.search(outcome.text), outcome.text


def test_a_deadlock_says_who_waits_where():
    text = run("strict", "plain", "barrier_against_collective", "inorder").text
    assert re.search(r"warp 0 lanes 0x00000001: waits in __syncwarp at \S+strict.cpp:\d+", text)
    assert re.search(r"warp 0 lanes 0xfffffffe: waits in __syncthreads at \S+strict.cpp:", text)
    assert re.search(r"warp 1 lanes 0xffffffff: waits in __syncthreads at \S+strict.cpp:", text)


@pytest.mark.parametrize("case", KERNELS)
def test_kernel_is_right_and_schedule_independent(case):
    outcome = run("kernels", "plain", case, seeds=2)
    assert outcome.caught == "", outcome.text


@pytest.mark.slow
@pytest.mark.parametrize("case", KERNELS)
def test_kernel_raises_nothing_on_200_seeds(case):
    outcome = run("kernels", "plain", case, seeds=200)
    assert outcome.caught == "", outcome.text


def test_a_correct_kernel_raises_nothing_on_200_seeds():
    # A row kernel with shuffles, vector loads and shared memory used twice; ours: see above.
    outcome = run("planted", "plain", "none", seeds=200)
    assert outcome.caught == "", outcome.text


def test_a_switch_is_cheap():
    printed = subprocess.run(
        [emulator_build.program("switch_cost")], capture_output=True, text=True, check=True
    ).stdout
    cost = {line.split()[0]: float(line.split()[1]) for line in printed.splitlines()}
    assert sorted(cost) == sorted(SCHEDULES)
    # 30 to 40 ns where it was written; ucontext, with its system calls, takes 480.
    assert statistics.median(cost.values()) < 400


@pytest.mark.slow
@pytest.mark.parametrize("case", COLLECTIVES)
def test_collective_under_asan_and_ubsan(case):
    outcome = run("collectives", "asan", case)
    assert outcome.caught == "", outcome.text


@pytest.mark.slow
@pytest.mark.parametrize("case", KERNELS)
def test_kernel_under_asan_and_ubsan(case):
    outcome = run("kernels", "asan", case)
    assert outcome.caught == "", outcome.text


@pytest.mark.slow
@pytest.mark.parametrize("case", COLLECTIVES)
def test_collective_has_no_race(case):
    outcome = run("collectives", "tsan", case)
    assert outcome.caught == "", outcome.text


# The race detector reasons by happens-before, so one schedule decides; two, to be sure of that.
@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["inorder", "greedy-one-warp"])
@pytest.mark.parametrize("case", KERNELS)
def test_kernel_has_no_race(case, schedule):
    outcome = run("kernels", "tsan", case, schedule)
    assert outcome.caught == "", outcome.text


RACES = (
    "race_between_blocks",
    "race_consume_without_fence",
    "race_other_warp",
    "race_plain_next_to_atomic",
    "race_publish_without_fence",
    "race_shuffle_is_no_fence",
)
NO_RACES = ("fine_atomics", "fine_launches", "fine_publish", "fine_syncwarp")


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("case", RACES + NO_RACES)
def test_race_detector_knows_what_orders_memory(case, schedule):
    outcome = run("races", "tsan", case, schedule)
    if case in RACES:
        assert outcome.caught.startswith("TSan: data race"), outcome.text
    else:
        assert outcome.caught == "", outcome.text
