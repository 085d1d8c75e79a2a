# SPDX-License-Identifier: Apache-2.0
"""Every op of torch.ops.trm has all its parts: a meta-test over the dispatcher, and opcheck."""

import re
from pathlib import Path

import pytest
import torch

from trm_ext import Reason, reference
from trm_ext._ops.divergence_state import STATE_COLUMNS
from trm_ext._ops.sequence_verdict import CRITERIA
from trm_ext._ops.token_divergence import STATISTICS
from trm_ext.outputs import OUTPUTS, VALUES, encode
from trm_ext.reference.divergence_state import _moved as moved

CSRC = Path(__file__).resolve().parents[2] / "csrc"


def _logits(requires_grad=False):
    x = torch.randn(2, 5, requires_grad=requires_grad)
    y = torch.randn(2, 5, requires_grad=requires_grad)
    return x, y


def _temperatures():
    return torch.tensor([0.6, 1.0]).double(), torch.tensor([0.6, 0.7]).double()


def _token_divergence():
    tokens, mask, one_sweep = torch.tensor([0, 3]), torch.tensor([True, False]), encode(VALUES[:4])
    yield (*_logits(True), tokens, mask, *_temperatures(), 5, encode(VALUES))
    yield (*_logits(), tokens, mask, None, None, 5, encode(OUTPUTS))
    yield (*_logits(True), None, None, None, None, 4, one_sweep)
    deep = torch.randn(2, 3, 5).bfloat16(), torch.randn(2, 3, 5)
    yield (*deep, None, None, None, None, 5, one_sweep)
    yield (*_logits(True), None, None, None, None, 5, 1)


def _token_divergence_backward():
    x, y = _logits()
    rows = (None, None, *_temperatures())
    statistics = torch.ops.trm.token_divergence(x, y, *rows, 5, 1)[2]
    for want in ((True, True), (False, True), (True, False)):
        yield (torch.ones(1, 2), x, y, statistics, *rows, 0, 5, 1, *want)


def _divergence_state():
    nothing = (None, None, None)
    yield (*_logits(), torch.tensor([0, 3]), *nothing, 0, 5, 1)
    yield (*(t.double() for t in _logits()), None, *nothing, 7, 3, encode(VALUES))
    yield (*_logits(), None, None, *_temperatures(), 0, 5, 1)


def _states(parts):
    shape = (parts, 2, 5)
    tokens = torch.zeros(parts, 2, dtype=torch.int64)
    return torch.ops.trm.divergence_state(
        torch.randn(shape), torch.randn(shape), tokens, None, None, None, 0, 5, encode(VALUES)
    )


def _divergence_state_merge():
    yield (_states(3),)


def _divergence_finish():
    yield (_states(1)[0], encode(VALUES))


def _sequence_reduce():
    order = torch.tensor([1, 3, 0, 2, 4])
    mask = torch.tensor([True, True, False, True, True])
    for values in (torch.rand(5), torch.rand(5).double()):
        for grouped in (None, order):
            yield values, torch.arange(5), mask, torch.tensor([0, 2, 2, 5]), grouped


def _sequence_verdict():
    for number, arguments in enumerate(_sequence_reduce()):
        yield (*arguments, number % 3, 0.5, 1)


SAMPLES = {
    "token_divergence": _token_divergence,
    "token_divergence_backward": _token_divergence_backward,
    "divergence_state": _divergence_state,
    "divergence_state_merge": _divergence_state_merge,
    "divergence_finish": _divergence_finish,
    "sequence_reduce": _sequence_reduce,
    "sequence_verdict": _sequence_verdict,
}


def in_frame(states, frames):
    """What states say whatever their frames: moved to these, near and far sums together."""
    out = []
    for state, (m, c) in zip(states.double().tolist(), frames.double().tolist(), strict=True):
        m, c, sn, an, gn, sf, af, qf, *rest = moved(state, m, c)
        out.append([m, c, sn + sf, an + af, (gn - an) + (qf - sf), *rest])
    return torch.tensor(out, dtype=torch.float64)


def op_names():
    """Names that the dispatcher itself knows, not those that happened to be used."""
    names = torch._C._dispatch_get_all_op_names()
    return sorted(name.removeprefix("trm::") for name in names if name.startswith("trm::"))


def test_there_are_ops():
    assert len(op_names()) >= 5


@pytest.mark.parametrize("name", op_names())
class TestEveryOp:
    def test_is_complete(self, name):
        qualified = f"trm::{name}"
        assert getattr(torch.ops.trm, name).default._schema.arguments
        for key in ("CPU", "Meta", "Autograd"):
            has = (
                torch._C._dispatch_has_kernel_for_dispatch_key(qualified, key)
                if key != "Autograd"
                else torch._C._dispatch_has_kernel_for_any_dispatch_key(
                    qualified, torch._C._dispatch_keyset_full()
                )
            )
            if key == "Meta":  # fakes live in torch's own registry
                has = torch._library.simple_registry.singleton.find(qualified).fake_impl.kernel
            assert has, f"{name} lacks {key}"
        assert torch._C._dispatch_has_kernel_for_dispatch_key(qualified, "AutogradCPU") or (
            torch._C._dispatch_has_kernel_for_dispatch_key(qualified, "Autograd")
        ), f"{name} neither has nor refuses autograd"
        assert name in reference.TWINS, f"{name} has no reference twin"
        assert reference.TWINS[name].__doc__
        assert name in SAMPLES, f"{name} has no opcheck sample"

    def test_has_a_cuda_implementation_in_source(self, name):
        # One template registers every backend, so a registration covers CPU and CUDA together.
        registered = re.findall(r'library\.impl\("(\w+)"', (CSRC / "torch/ops.h").read_text())
        assert name in registered
        for binding in ("bind_cpu.cpp", "bind_cuda.cpp"):
            assert "register_ops<" in (CSRC / "torch" / binding).read_text()

    def test_is_documented_in_its_schema(self, name):
        schema = (CSRC / "torch/schema.h").read_text()
        before = schema[: schema.index(f'"{name}(')].rstrip().splitlines()[-1]
        assert before.strip().startswith("//")

    def test_opcheck(self, name):
        op = getattr(torch.ops.trm, name)
        for sample in SAMPLES[name]():
            found = op(*sample)
            found = found if isinstance(found, tuple) else (found,)
            # aot_dispatch compares eager with traced results, and NaN is unequal to itself: where a
            # statistic was not asked for (NaN by contract), test_divergence.TestCompiled compares.
            tests = ["test_schema", "test_autograd_registration", "test_faketensor"]
            if all(bool(t.isfinite().all()) for t in found):
                tests.append("test_aot_dispatch_dynamic")
            result = torch.library.opcheck(op.default, sample, test_utils=tests)
            assert result == dict.fromkeys(tests, "SUCCESS")

    def test_equals_its_twin(self, name):
        for sample in SAMPLES[name]():
            sample = tuple(t.detach() if isinstance(t, torch.Tensor) else t for t in sample)
            got = getattr(torch.ops.trm, name)(*sample)
            want = reference.TWINS[name](*sample)
            for g, w in zip(
                got if isinstance(got, tuple) else (got,),
                want if isinstance(want, tuple) else (want,),
                strict=True,
            ):
                assert g.shape == w.shape
                if name in ("divergence_state", "divergence_state_merge"):
                    w = in_frame(w, g[:, :2])
                    g = in_frame(g, g[:, :2])
                # A float32 frame is rounded by moving the state: 2^-24 of maxima below 8.
                torch.testing.assert_close(
                    g.double(), w.double(), rtol=1e-5, atol=5e-7, equal_nan=True
                )


def test_constants_mirror_csrc():
    header = (CSRC / "include/trm/divergence_state.h").read_text()

    def members(enum):
        body = re.search(rf"enum {enum} : int32_t {{(.*?)}};", header, re.DOTALL).group(1)
        return re.findall(r"^\s*k(\w+)(?: = \w+)?,", body, re.MULTILINE)

    snake = [re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower() for name in members("Output")]
    assert [name for name in snake if name != "values"] == [*OUTPUTS, "outputs"]
    assert snake.index("values") == len(VALUES)
    assert len(members("StateColumn")) - 1 == STATE_COLUMNS
    assert len(members("Statistic")) - 1 == STATISTICS

    header = (CSRC / "include/trm/sequence_reduce.h").read_text()
    body = re.search(r"enum Criterion : int64_t {(.*?)}", header, re.DOTALL).group(1)
    assert re.findall(r"kCriterion(\w+)", body) == [name.title() for name in CRITERIA]
    body = re.search(r"enum Reason : int64_t {(.*?)}", header, re.DOTALL).group(1)
    codes = dict(re.findall(r"kReason(\w+) = (\d+)", body))
    assert len(codes) == 4
    for name, code in codes.items():
        assert Reason[re.sub(r"(?<!^)(?=[A-Z])", "_", name).upper()] == int(code)


@pytest.mark.parametrize(
    "name", ("divergence_state", "divergence_state_merge", "divergence_finish")
)
def test_state_ops_refuse_autograd_by_name(name):
    sample = [
        t.detach().requires_grad_() if isinstance(t, torch.Tensor) and t.is_floating_point() else t
        for t in next(SAMPLES[name]())
    ]
    got = getattr(torch.ops.trm, name)(*sample)
    first = got[0] if isinstance(got, tuple) else got
    with pytest.raises(RuntimeError, match=f"trm::{name} has no autograd.*shard_gradient"):
        first.sum().backward()


def test_sequence_reduce_refuses_autograd_by_name():
    values, *rest = next(SAMPLES["sequence_reduce"]())
    largest = torch.ops.trm.sequence_reduce(values.requires_grad_(), *rest)[0]
    with pytest.raises(RuntimeError, match=r"trm::sequence_reduce has no autograd"):
        largest.sum().backward()


class TestRawOpsStayInBounds:
    """A direct caller of torch.ops.trm gets an error, never a stray read."""

    def test_shapes(self):
        for x, y, mask, vocab in (
            (torch.zeros(2, 3), torch.zeros(2, 4), None, 3),
            (torch.zeros(2, 3), torch.zeros(3, 3), None, 3),
            (torch.zeros(2, 3), torch.zeros(2, 3), torch.ones(3, dtype=torch.bool), 3),
            (torch.zeros(2, 3), torch.zeros(2, 3), torch.ones(2), 3),
            (torch.zeros(2, 3), torch.zeros(2, 3), None, 4),
            (torch.zeros(2, 3).long(), torch.zeros(2, 3), None, 3),
        ):
            with pytest.raises(RuntimeError):
                torch.ops.trm.token_divergence(x, y, None, mask, None, None, vocab, 1)
        with pytest.raises(RuntimeError):
            torch.ops.trm.divergence_finish(torch.zeros(2, 3), 1)
