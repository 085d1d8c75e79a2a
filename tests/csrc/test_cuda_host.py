# SPDX-License-Identifier: Apache-2.0
"""What the CUDA ops do on the host, recorded: devices, streams, launches, memory, and no waiting.

The host code is the library's own, compiled by nvcc and called through torch's dispatcher with CUDA
tensors; the runtime below it and the memory are pretended (tests/recorder.py). What the device
would then compute is the emulator's business; that a driver accepts the launches, a GPU's.
"""

import re
import subprocess
from concurrent.futures.process import BrokenProcessPool

import pytest
import torch

from benchmarks.cuda_build import short
from tests import recorder_build
from tests.recorder import DEVICE, Pretend, recording
from tests.trm_ext.test_masks import CRITERIA
from trm_ext.outputs import OUTPUTS, VALUES, encode

pytestmark = pytest.mark.skipif(
    recorder_build.why_not() is not None, reason=f"recorder: {recorder_build.why_not()}"
)

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
INT64, BOOL = torch.int64, torch.bool
KL, ALL = encode(["kl"]), encode(OUTPUTS)
TOKENLESS = encode([name for name in VALUES if not name.startswith("log")])
STATISTICS, STATE = 8, 14
# Below 2 x 132 multiprocessors several blocks share a row.
FEW, MANY, VOCAB = 8, 8192, 151936

# The mask's cost beside its sweep over the logits: launches over tokens or sequences, by us and by
# torch. More would be a regression; views launch nothing. Torch's are a padded layout's positions
# made contiguous, the zeros of `capped`, and temperatures.
REDUCTIONS, TORCH_OPS = 1, 3
VIEWS = re.compile(r"aten\.(view|detach|unbind|select|expand|alias|_unsafe_view|unsqueeze)\.")

# All that may happen during an op. Nothing here waits, copies, allocates or initialises.
ALLOWED = {
    "create_guard",  # torch's device guard, and its end
    "delete_guard",
    "current_stream",  # torch's current stream of a device
    "allocate",  # aten::empty: torch's caching allocator on a real device
    "cudaGetDevice",
    "cudaDeviceGetAttribute",
    "cudaLaunchKernelExC",
    "torch",  # another torch op, where more than one op is recorded
}
# What the objects of _C_cuda may refer to: what is allowed, the text of an error, and nvcc's own
# registration and launch stubs.
RUNTIME_SYMBOLS = {"cudaGetDevice", "cudaDeviceGetAttribute", "cudaLaunchKernelExC"}
RUNTIME_SYMBOLS |= {"cudaGetErrorString"}
STUB_SYMBOLS = {
    "__cudaRegisterFatBinary",
    "__cudaRegisterFatBinaryEnd",
    "__cudaUnregisterFatBinary",
    "__cudaRegisterFunction",
    "__cudaInitModule",
    "__cudaGetKernel",
    "__cudaPopCallConfiguration",
    "__cudaLaunchKernel",
}


@pytest.fixture(scope="module")
def record():
    with recording(recorder_build.library()) as recorder:
        yield recorder


def addresses(value):
    """Every pointer among a launch's arguments."""
    if isinstance(value, dict):
        return [a for v in value.values() for a in addresses(v)]
    if isinstance(value, list):
        return [a for v in value for a in addresses(v)]
    return [value] if isinstance(value, str) and re.search(r"\+\d+$|^unknown", value) else []


def check_execution(recording):
    """What every call keeps, whatever it computes."""
    assert recording.error is None
    guards = 0
    for event in recording.events:
        call = event["call"]
        assert call in ALLOWED, f"{call} was called"
        guards += (call == "create_guard") - (call == "delete_guard")
        if call in ("create_guard", "current_stream", "cudaDeviceGetAttribute"):
            assert event["device"] == DEVICE, f"{call} of device {event['device']}"
        if call.startswith("cuda"):
            assert guards == 1 and event["current"] == DEVICE, f"{call} outside the device guard"
    assert guards == 0 and recording.devices == (0, 0), "the device before is not current again"
    for launch in recording.launches:
        assert launch["stream"] == recording.stream, "a launch off torch's current stream"
        (x, y, z), block = launch["grid"], launch["block"]
        assert 1 <= x < 2**31 and y == z == 1, f"grid {launch['grid']}"
        assert 32 <= block[0] <= 1024 and block[1:] == [1, 1], f"block {block}"
        assert launch["shared"] == 0 and launch["attributes"] == 0
        found = addresses(launch["arguments"])
        assert found and not [a for a in found if a.startswith("unknown")], "an address of nobody"


def check_twice(record, target, given):
    """Twice, with another current stream: the same again, and nothing kept from the first time."""
    first, second = record.twice(target, given)
    assert first.stream != second.stream
    check_execution(first)
    check_execution(second)

    def without_stream(events):
        return [{k: v for k, v in event.items() if k != "stream"} for event in events]

    assert without_stream(first.events) == without_stream(second.events), "it differs when repeated"
    return first


def kernels(recording):
    """Short name and blocks of every launch."""
    return [(short(launch["kernel"]), launch["grid"][0]) for launch in recording.launches]


def argument(launch, kind):
    """What a launch hands its kernel under a type's name."""
    (found,) = [a["value"] for a in launch["arguments"] if a["type"] == f"trm::{kind}"]
    return found


def row_inputs(rows):
    return {
        "tokens": Pretend(INT64, rows),
        "token_mask": Pretend(BOOL, rows),
        "rollout_temperature": Pretend(FP64, rows),
        "train_temperature": Pretend(FP64, rows),
    }


def forward(rollout, train=None, outputs=KL, **more):
    given = {"rollout_logits": rollout, "train_logits": train or rollout}
    given |= {"vocab_size": rollout.shape[-1], "outputs": outputs}
    return "trm::token_divergence", given | more


def state(rollout, train=None, outputs=KL, **more):
    given = {"rollout_shard": rollout, "train_shard": train or rollout}
    given |= {"vocab_size": rollout.shape[-1], "outputs": outputs}
    return "trm::divergence_state", given | more


def backward(rollout, train=None, outputs=KL, sides=(False, True), **more):
    lead, wide = rollout.shape[:-1], FP64 in (rollout.dtype, (train or rollout).dtype)
    return "trm::token_divergence_backward", {
        "grad_values": Pretend(
            FP64 if wide else FP32, ((outputs & encode(VALUES)).bit_count(), *lead)
        ),
        "statistics": Pretend(FP64, (*lead, STATISTICS)),
        **forward(rollout, train, outputs, **more)[1],
        "want_rollout": sides[0],
        "want_train": sides[1],
    }


def merge(parts, rows, dtype=FP32):
    return "trm::divergence_state_merge", {"states": Pretend(dtype, (parts, rows, STATE))}


def finish(rows, dtype=FP32):
    given = {"state": Pretend(dtype, (rows, STATE)), "outputs": TOKENLESS}
    return "trm::divergence_finish", given


def reduce(tokens, sequences, dtype=FP32, ordered=False):
    return "trm::sequence_reduce", {
        "values": Pretend(dtype, (tokens,)),
        "positions": Pretend(INT64, (tokens,)),
        "token_mask": Pretend(BOOL, (tokens,)),
        "offsets": Pretend(INT64, (sequences + 1,)),
        **({"order": Pretend(INT64, (tokens,))} if ordered else {}),
    }


def judge(tokens, sequences, dtype=FP32, ordered=False):
    given = {"criterion": 0, "limit": 0.02, "reason": 1}
    return "trm::sequence_verdict", reduce(tokens, sequences, dtype, ordered)[1] | given


def rows(count, dtype=BF16, vocab=VOCAB, **view):
    return Pretend(dtype, (count, vocab), **view)


STREAM = "stream_divergence_kernel<{}, false, false, {}>"
SUMS = "stream_divergence_kernel<{}, true, true, {}>"
MERGE = "merge_regions_kernel<32>"
BOTH = "BFloat16, BFloat16"

# An op, and the kernels with their blocks that it launches.
CASES = {
    "many rows": (forward(rows(MANY)), [(STREAM.format(BOTH, "false"), MANY)]),
    "few rows": (
        forward(rows(FEW)),
        [(STREAM.format(BOTH, "false"), 4 * FEW), (MERGE, FEW)],
    ),
    "few short rows": (
        forward(rows(FEW, vocab=1000)),
        [(STREAM.format(BOTH, "false"), FEW)],
    ),
    "one row less than many": (
        forward(rows(263)),
        [(STREAM.format(BOTH, "false"), 4 * 263), (MERGE, 263)],
    ),
    "rows at odd addresses": (
        forward(rows(MANY, vocab=1001, offset=2)),
        [(STREAM.format(BOTH, "false"), MANY)],
    ),
    "views with two lead dimensions": (
        forward(Pretend(BF16, (4, 100, 1000), (200_000, 1000, 1))),
        [(STREAM.format(BOTH, "false"), 400)],
    ),
    "fp16": (forward(rows(MANY, FP16)), [(STREAM.format("Float16, Float16", "false"), MANY)]),
    "fp32": (forward(rows(MANY, FP32)), [(STREAM.format("float, float", "false"), MANY)]),
    "bf16 and fp32": (
        forward(rows(MANY), rows(MANY, FP32)),
        [(STREAM.format("BFloat16, float", "false"), MANY)],
    ),
    "fp32 and bf16": (
        forward(rows(MANY, FP32), rows(MANY)),
        [(STREAM.format("float, BFloat16", "false"), MANY)],
    ),
    "fp16 and fp32": (
        forward(rows(FEW, FP16), rows(FEW, FP32)),
        [("token_divergence_kernel<false, false>", FEW)],
    ),
    "fp64": (forward(rows(MANY, FP64)), [("token_divergence_kernel<false, false>", MANY)]),
    "every second column": (
        forward(rows(FEW, vocab=1000, strides=(2000, 2))),
        [("token_divergence_kernel<false, false>", FEW)],
    ),
    "temperatures": (
        forward(rows(MANY), **row_inputs((MANY,))),
        [(STREAM.format(BOTH, "true"), MANY)],
    ),
    "every output": (
        forward(rows(MANY), outputs=ALL, **row_inputs((MANY,))),
        [(SUMS.format(BOTH, "true"), MANY), ("diagnostics_kernel<float>", MANY)],
    ),
    "every output of few rows": (
        forward(rows(FEW), outputs=ALL, tokens=Pretend(INT64, (FEW,))),
        [
            (SUMS.format(BOTH, "false"), 4 * FEW),
            (MERGE, FEW),
            ("diagnostics_kernel<float>", FEW),
        ],
    ),
    "every output in fp64": (
        forward(rows(FEW, FP64), outputs=ALL, tokens=Pretend(INT64, (FEW,))),
        [("token_divergence_kernel<true, true>", FEW), ("diagnostics_kernel<double>", FEW)],
    ),
    "no columns": (forward(rows(FEW, vocab=0)), [(STREAM.format(BOTH, "false"), FEW)]),
    "state": (state(rows(MANY)), [(STREAM.format(BOTH, "false"), MANY)]),
    "state of few rows": (
        state(rows(FEW), vocab_start=VOCAB),
        [(STREAM.format(BOTH, "false"), 4 * FEW), (MERGE, FEW)],
    ),
    "state in fp64": (state(rows(FEW, FP64)), [("token_divergence_kernel<false, false>", FEW)]),
    "backward, train": (
        backward(rows(MANY)),
        [(f"stream_gradient_kernel<{BOTH}, true>", MANY)],
    ),
    "backward, both": (
        backward(rows(MANY), sides=(True, True)),
        [(f"stream_gradient_kernel<{BOTH}, false>", MANY)],
    ),
    "backward, few rows": (
        backward(rows(FEW)),
        [(f"stream_gradient_kernel<{BOTH}, true>", 38 * FEW)],
    ),
    "backward, every output": (
        backward(rows(MANY), outputs=encode(VALUES), sides=(True, True), **row_inputs((MANY,))),
        [(f"stream_gradient_kernel<{BOTH}, false>", MANY)],
    ),
    "backward, odd addresses": (
        backward(rows(MANY, vocab=1001, offset=2)),
        [("token_divergence_backward_kernel<float>", MANY)],
    ),
    "backward, fp64": (
        backward(rows(FEW, FP64), sides=(True, True)),
        [("token_divergence_backward_kernel<double>", FEW)],
    ),
    "merge": (merge(4, 1000), [("state_merge_kernel<float>", 8)]),
    "merge in fp64": (merge(2, 1, FP64), [("state_merge_kernel<double>", 1)]),
    "finish": (finish(1000), [("finish_kernel<float>", 8)]),
    "finish in fp64": (finish(129, FP64), [("finish_kernel<double>", 2)]),
    "sequences": (reduce(MANY, 70000), [("sequence_reduce_kernel<256>", 70000)]),
    "sequences in pieces, fp64": (
        reduce(100, 7, FP64, ordered=True),
        [("sequence_reduce_kernel<256>", 7)],
    ),
    "verdict": (judge(MANY, 70000), [("sequence_verdict_kernel<256>", 70000)]),
    "verdict in pieces, fp64": (
        judge(100, 7, FP64, ordered=True),
        [("sequence_verdict_kernel<256>", 7)],
    ),
}
NOTHING_TO_DO = {
    "forward": forward(rows(0)),
    "forward, every output": forward(rows(0), outputs=ALL, tokens=Pretend(INT64, (0,))),
    "forward, no batch": forward(Pretend(BF16, (0, 5, 100))),
    "forward, no tokens": forward(Pretend(BF16, (5, 0, 100))),
    "forward, fp64": forward(rows(0, FP64)),
    "state": state(rows(0)),
    "backward": backward(rows(0), sides=(True, True)),
    "backward, no columns": backward(rows(FEW, vocab=0), sides=(True, True)),
    "backward, no side": backward(rows(FEW), sides=(False, False)),
    "merge": merge(3, 0),
    "finish": finish(0),
    "sequences": reduce(0, 0),
    "verdict": judge(0, 0),
}


@pytest.mark.parametrize("case", CASES)
def test_launches(record, case):
    call, expected = CASES[case]
    assert kernels(check_twice(record, *call)) == expected


@pytest.mark.parametrize("case", NOTHING_TO_DO)
def test_nothing_to_do_launches_nothing(record, case):
    found = record(*NOTHING_TO_DO[case])
    check_execution(found)
    assert not found.launches


def test_the_cases_name_every_kernel(record):
    """A kernel that no case launches would be covered by nothing here."""
    names = {name.partition("<")[0] for _, expected in CASES.values() for name, _ in expected}
    pattern = r"__global__ void\s+(?:__launch_bounds__\((?:[^()]|\([^()]*\))*\)\s+)?(\w+)\("
    declared = set()
    for file in (recorder_build.ROOT / "csrc/include/trm/kernels").glob("*.cuh"):
        declared.update(re.findall(pattern, file.read_text()))
    assert names == declared


def test_an_old_device_gets_the_generic_kernels(record):
    found = record(*forward(rows(FEW)), capability=75, multiprocessors=40)
    check_execution(found)
    assert kernels(found) == [("token_divergence_kernel<false, false>", FEW)]


@pytest.mark.parametrize("processors,launches", ((132, 2), (100, 1)))
def test_the_device_decides_how_many_rows_are_few(record, processors, launches):
    found = record(*forward(rows(200)), multiprocessors=processors)
    assert len(found.launches) == launches


def test_a_launch_that_fails_is_an_error(record):
    """With the runtime's words and the op's name; nothing is launched after it."""
    for call, launches in ((forward(rows(FEW)), (1, 2)), (backward(rows(FEW)), (1,))):
        for number in launches:
            found = record(*call, failing_launch=number - 1)
            op = call[0]
            assert found.error is not None
            assert f"{op}: invalid configuration argument" in found.error
            assert len(found.launches) == number and found.devices == (0, 0)


class TestMemory:
    def test_outputs_and_workspace_come_from_torch(self, record):
        """And are all there is; the workspace is what few rows need, and many need none."""
        for count, workspace in ((FEW, FEW * 32 * STATE * 8), (MANY, 0)):
            found = record(*forward(rows(count)))
            sizes = [event["bytes"] for event in found.calls("allocate")]
            assert sizes == [4 * count, 0, 8 * STATISTICS * count, workspace]
            out = argument(found.launches[0], "DivergenceOutputs")
            assert out["values"] == "allocation 0+0" and out["statistics"] == "allocation 2+0"
            assert out["workspace"] == ("allocation 3+0" if workspace else None)
            assert found.results == ["allocation 0+0", "None", "allocation 2+0"]

    def test_gradients_are_allocated_for_the_sides_asked_for(self, record):
        for sides in ((False, True), (True, False), (True, True)):
            found = record(*backward(rows(MANY), sides=sides))
            sizes = [event["bytes"] for event in found.calls("allocate")]
            assert sizes == [2 * MANY * VOCAB * side for side in sides]
            args = argument(found.launches[0], "DivergenceBackwardArgs")
            assert [args[name] is not None for name in ("grad_rollout", "grad_train")] == [*sides]

    def test_every_argument_arrives(self, record):
        """Each tensor's address, with its offset, at its own place."""
        x = rows(FEW, vocab=1000, offset=32)
        found = record(*forward(x, rows(FEW, vocab=1000), **row_inputs((FEW,))))
        args = argument(found.launches[0], "DivergenceArgs")
        assert args["rollout"]["data"] == "rollout_logits+32"
        assert args["train"]["data"] == "train_logits+0"
        for name in ("tokens", "token_mask", "rollout_temperature", "train_temperature"):
            assert args[name] == {"data": f"{name}+0", "outer_stride": 0, "inner_stride": 1}

        found = record(*reduce(100, 7, ordered=True))
        args, out = (argument(found.launches[0], f"Sequence{kind}") for kind in ("Args", "Outputs"))
        given = ("values", "positions", "token_mask", "offsets", "order")
        assert [args[name] for name in given] == [f"{name}+0" for name in given]
        assert [args["tokens"], args["sequences"]] == [100, 7]
        assert [*out.values()] == found.results == [f"allocation {i}+0" for i in range(5)]

        found = record(*judge(100, 7, ordered=True))
        args, out = (argument(found.launches[0], k) for k in ("SequenceArgs", "VerdictOutputs"))
        assert [args[name] for name in given] == [f"{name}+0" for name in given]
        rule = argument(found.launches[0], "VerdictRule")
        assert rule == {"criterion": 0, "limit": 0.02, "reason": 1}
        assert [*out.values()] == found.results == [f"allocation {i}+0" for i in range(9)]
        sizes = [event["bytes"] for event in found.calls("allocate")]
        assert sizes == [7, 56, 56, 28, 28, 28, 56, 7, 100]


class TestSizes:
    """Pretended memory has any size, so offsets beyond 32 bits cost nothing."""

    @pytest.mark.parametrize("elements", (2**31, 2**32))
    def test_more_elements_than_32_bits_count(self, record, elements):
        count = elements // VOCAB + 3
        x = rows(count)
        for call, kind in (
            (forward(x, outputs=ALL, **row_inputs((count,))), "DivergenceArgs"),
            (backward(x, sides=(True, True)), "DivergenceBackwardArgs"),
        ):
            found = record(*call)
            check_execution(found)
            for launch in found.launches:
                args = argument(launch, kind)
                args = args.get("forward", args)
                assert launch["grid"][0] == args["rows"] == args["inner"] == count
                for side in ("rollout", "train"):
                    assert args[side]["inner_stride"] == args["vocab"] == VOCAB
        assert [event["bytes"] for event in found.calls("allocate")] == [2 * count * VOCAB] * 2
        assert count * VOCAB > elements

    @pytest.mark.parametrize("stride", (2**31 + 8, 2**32 + 8, 2**40))
    def test_rows_further_apart_than_32_bits_count(self, record, stride):
        x = Pretend(BF16, (3, 2, 1000), (2 * stride, stride, 1))
        upstream = Pretend(FP32, (1, 3, 2), (7, stride, 3 * stride))
        for call in (forward(x), backward(x, grad_values=upstream)):
            found = record(*call)
            check_execution(found)
            args = next(iter(found.launches[0]["arguments"]))["value"]
            rollout = args.get("forward", args)["rollout"]
            assert rollout["outer_stride"] == 2 * stride and rollout["inner_stride"] == stride
        assert [args["upstream"][f"{name}_stride"] for name in ("outer", "inner")] == [
            stride,
            3 * stride,
        ]

    @pytest.mark.parametrize("count", (65535, 65536, 2**29, 2**31 - 1))
    def test_any_number_of_rows_is_on_grid_x(self, record, count):
        """All rows are one: whether a kernel streams them or not, each has a block."""
        x = Pretend(BF16, (count, 8), (0, 1))
        sequences = reduce(1, count), judge(1, count)
        for call in (forward(x), backward(x), finish(count), merge(2, count), *sequences):
            found = record(*call)
            check_execution(found)
            threads = found.launches[0]["block"][0]
            records = call[0] in ("trm::divergence_finish", "trm::divergence_state_merge")
            blocks = (count + threads - 1) // threads if records else count
            assert [launch["grid"][0] for launch in found.launches] == [blocks]

    @pytest.mark.parametrize("count", (2**31, 2**32, 2**32 + 5))
    def test_more_rows_than_a_grid_has_are_refused(self, record, count):
        """Not wrapped: 2**32 + 5 rows are not 5."""
        x = Pretend(BF16, (count, 8), (0, 1))
        for call in (forward(x), backward(x), reduce(1, count), judge(1, count)):
            found = record(*call)
            assert found.error is not None
            assert f"{call[0]}: invalid configuration argument" in found.error

    def test_other_counts_are_64_bits_wide(self, record):
        found = record(*merge(3, 2**33))
        check_execution(found)
        values = [(a["type"], a["value"]) for a in found.launches[0]["arguments"]]
        assert values[2:] == [("long", 3), ("long", 2**33)]
        found = record(*reduce(2**33, 7))
        check_execution(found)
        assert argument(found.launches[0], "SequenceArgs")["tokens"] == 2**33


def layout(kind, batch, length):
    """Tensors of a layout as they are on a device."""
    shape = (batch, length) if kind == "padded" else (batch * length,)
    # A padded layout's indices are expanded, as SequenceLayout.from_mask makes them.
    strides = {"sequence_id": (1, 0), "position": (0, 1)} if kind == "padded" else {}
    given = {
        "sequence_id": Pretend(INT64, shape, strides.get("sequence_id")),
        "position": Pretend(INT64, shape, strides.get("position")),
        "token_mask": Pretend(BOOL, shape),
        "offsets": Pretend(INT64, (batch + 1,)),
    }
    if kind == "segments":
        given["order"] = Pretend(INT64, shape)
    return given


class TestWholeCalls:
    """Public functions with their Python, our ops, and torch's own ops around them."""

    @pytest.mark.parametrize("temperature", ("none", "number", "tensor"))
    @pytest.mark.parametrize("kind", ("padded", "packed", "segments"))
    @pytest.mark.parametrize("tokens", (16, MANY))
    def test_the_mask_sweeps_once_and_waits_for_nothing(self, record, kind, tokens, temperature):
        batch = 8
        given = layout(kind, batch, tokens // batch)
        lead = given["token_mask"].shape
        pair = Pretend(BF16, (*lead, VOCAB))
        given |= {"rollout_logits": pair, "train_logits": pair, "max_kl": 0.02}
        if temperature == "number":
            given["train_temperature"] = 0.7
        if temperature == "tensor":
            given["train_temperature"] = Pretend(FP32, lead)
        first = check_twice(record, "fused_mask", given)
        names = [name.partition("<")[0] for name, _ in kernels(first)]
        sweep = ["stream_divergence_kernel"] + ["merge_regions_kernel"] * (tokens < 264)
        reductions = names[len(sweep) :]
        assert names[: len(sweep)] == sweep
        assert reductions == ["sequence_verdict_kernel"] * REDUCTIONS
        args = argument(first.launches[0], "DivergenceArgs")
        assert args["token_mask"]["data"] == "token_mask+0"
        # Whoever else is handed the logits' addresses: a select that only looks at the shape.
        readers = [e for e in first.launches if "rollout_logits+0" in addresses(e["arguments"])]
        assert len(readers) == len(sweep)
        ops = [event["op"] for event in first.calls("torch")]
        assert len([op for op in ops if not VIEWS.search(op)]) <= TORCH_OPS

    @pytest.mark.parametrize("kind", ("padded", "packed", "segments"))
    def test_a_training_step_with_every_criterion(self, record, kind):
        """Forward: every output, every criterion, the loss and the metrics; nothing waits."""
        given = layout(kind, 8, MANY // 8)
        lead = given["token_mask"].shape
        pair = Pretend(BF16, (*lead, VOCAB))
        given |= {"rollout_logits": pair, "train_logits": pair}
        given |= {"tokens": Pretend(INT64, lead), "advantages": Pretend(FP32, (8,))}
        given["criteria"] = " & ".join(map(str, CRITERIA))
        first = check_twice(record, "training_step", given)
        sweeps = [name for name, blocks in kernels(first) if blocks == MANY]
        assert [name.partition("<")[0] for name in sweeps] == [
            "stream_divergence_kernel",
            "diagnostics_kernel",
        ]

    def test_what_waits_or_copies_is_seen(self, record):
        values = {"values": Pretend(FP32, (4,))}
        for name in ("read_a_value", "copy_to_the_host", "copy_from_the_host"):
            with pytest.raises(AssertionError):
                check_execution(record(name, values))


def test_only_known_functions_of_the_runtime_are_referred_to():
    """By any object of _C_cuda; the runtime is linked statically, so the library cannot tell."""
    recorder_build.library()
    found = set()
    for source in recorder_build.sources():
        command = ["nm", "--undefined-only", "--format=posix", recorder_build.object_of(source)]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        names = [line.split()[0] for line in text.splitlines()]
        found.update(name for name in names if re.match(r"(__)?cu(da)?[A-Z]", name))
    assert found == RUNTIME_SYMBOLS | STUB_SYMBOLS


SMALL = reduce(100, 7)
REDUCE = ("csrc/cuda/sequence_reduce.cu", "csrc/include/trm/kernels/sequence_reduce.cuh")
BIND = ("csrc/torch/bind_cuda.cpp", None)
OPS = ("csrc/torch/bind_cuda.cpp", "csrc/torch/ops.h")
# Broken host sides: the source and its header, what is replaced by what, which check then fails,
# and in which words (None: an assertion of the check's own).
MUTANTS = {
    "another stream": (
        ("csrc/cuda/sequence_reduce.cu", None),
        ("launch_sequence_reduce(args, out, stream)", "launch_sequence_reduce(args, out, nullptr)"),
        lambda record: check_twice(record, *SMALL),
        "off torch's current stream",
    ),
    "a stream that is kept": (
        BIND,
        (
            "void* stream = nullptr;\n    TORCH_ERROR",
            "static void* stream = nullptr;\n    if (stream == nullptr) TORCH_ERROR",
        ),
        lambda record: check_twice(record, *SMALL),
        "off torch's current stream",
    ),
    "no device guard": (
        BIND,
        ("guard_(tensor.get_device_index())", "guard_(0)"),
        lambda record: check_twice(record, *SMALL),
        "create_guard of device 0",
    ),
    "a guard that ends too early": (
        BIND,
        (
            "const DeviceScope scope(on);",
            "struct { cudaStream_t s; cudaStream_t stream() const { return s; } }\n"
            "        scope{DeviceScope(on).stream()};",
        ),
        lambda record: check_twice(record, *SMALL),
        "outside the device guard",
    ),
    "waiting for the stream": (
        REDUCE,
        ("return launch(config,", "cudaStreamSynchronize(stream);\n  return launch(config,"),
        lambda record: check_twice(record, *SMALL),
        "cudaStreamSynchronize was called",
    ),
    "memory of its own": (
        REDUCE,
        (
            "return launch(config,",
            "static void* kept = nullptr;\n"
            "  if (kept == nullptr) cudaMalloc(&kept, 8);\n  return launch(config,",
        ),
        lambda record: check_twice(record, *SMALL),
        "cudaMalloc was called",
    ),
    "a plan that is kept": (
        BIND,
        (
            "int64_t bytes = 0;\n    check(",
            "static int64_t bytes = 0;\n    if (bytes == 0) check(",
        ),
        lambda record: check_twice(record, *forward(rows(FEW))),
        "it differs when repeated",
    ),
    "a pointer of nobody": (
        REDUCE,
        (
            "args, out);\n}",
            "[&] { SequenceArgs a = args; a.offsets += 1000; return a; }(), out);\n}",
        ),
        lambda record: check_twice(record, *SMALL),
        "an address of nobody",
    ),
    "sequences on grid y": (
        REDUCE,
        ("{dim3(grid_blocks(", "{dim3(1, grid_blocks("),
        lambda record: check_twice(record, *SMALL),
        r"grid \[1, 7, 1\]",
    ),
    "a launch for no sequence": (
        REDUCE,
        ("if (args.sequences == 0) return cudaSuccess;", ""),
        lambda record: test_nothing_to_do_launches_nothing(record, "sequences"),
        "invalid configuration argument",
    ),
    "an error that is dropped": (
        BIND,
        ("STD_TORCH_CHECK(status == cudaSuccess,", "STD_TORCH_CHECK(status <= 999,"),
        lambda record: test_a_launch_that_fails_is_an_error(record),
        None,
    ),
    "a grid of the lowest 32 bits": (
        REDUCE,
        ("grid_blocks(args.sequences)", "static_cast<unsigned>(args.sequences)"),
        lambda record: TestSizes().test_more_rows_than_a_grid_has_are_refused(record, 2**32 + 5),
        None,
    ),
    "a stride of 32 bits": (
        OPS,
        (
            "view.inner_stride = logits.stride(",
            "view.inner_stride = (int32_t)logits.stride(",
        ),
        lambda record: TestSizes().test_rows_further_apart_than_32_bits_count(record, 2**32 + 8),
        None,
    ),
    "a mask that does not arrive": (
        OPS,
        ("optional_rows<bool>(rows.token_mask,", "optional_rows<bool>(std::optional<Tensor>(),"),
        lambda record: TestMemory().test_every_argument_arrives(record),
        None,
    ),
    "a workspace that does not arrive": (
        OPS,
        ("if (words > 0) out.workspace", "if (words < 0) out.workspace"),
        lambda record: TestMemory().test_outputs_and_workspace_come_from_torch(record),
        None,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_host_side_is_seen(name, tmp_path):
    place, change, check, said = MUTANTS[name]
    library = recorder_build.mutant(*place, *change, tmp_path)
    with recording(library) as record, pytest.raises(AssertionError, match=said):
        check(record)


@pytest.mark.slow
def test_host_code_that_reads_device_memory_dies(tmp_path):
    """Which is what shows that the code under test does not."""
    read = "if (args.sequences == 0) return cudaSuccess;"
    then = f"{read}\n  if (args.offsets[args.sequences] == 0) return cudaSuccess;"
    library = recorder_build.mutant(*REDUCE, read, then, tmp_path)
    with recording(library) as record, pytest.raises(BrokenProcessPool):
        record(*SMALL)


@pytest.mark.slow
def test_a_function_that_the_recorder_lacks_does_not_link(tmp_path):
    old, new = "return launch(config,", "cudaDeviceReset();\n  return launch(config,"
    with pytest.raises(AssertionError, match="undefined reference to `cudaDeviceReset'"):
        recorder_build.mutant(*REDUCE, old, new, tmp_path)
