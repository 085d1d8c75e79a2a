# SPDX-License-Identifier: Apache-2.0
"""The monitor: numpy on the remembered rollouts, every layout, no device wait, state kept."""

import copy
import math

import numpy as np
import pytest
import torch
from scipy.stats import t as student

import trm_ext as trm
from tests.trm_ext.test_masks import batch, layouts
from theory import certify
from trm_ext import GateConstants, Monitor, SequenceLayout
from trm_ext._budget_gate import budget_gate
from trm_ext.monitor import _binary_kl_inverse

INF, NAN = float("inf"), float("nan")


def rollouts(seed):
    """One step: layout, per-token values, rewards and verdict."""
    packed, kl, ratio = batch(seed)
    rewards = torch.rand(40, generator=torch.Generator().manual_seed(seed)) * 3 - 1
    return packed, 0.05 * kl, 0.1 * ratio, rewards


CONSTANTS = GateConstants(
    max_kl=0.05, max_ratio=1.05, shift_budget=0.17, kl_budget=0.1, max_abs_log_weight=0.3
)


def gated(k, r, constants=CONSTANTS):
    """The budget gate token by token: sum of (min(rho, C) - 1), sum of kl, whether it closed."""
    shift = used = spent = 0.0
    for kl, ratio in zip(k.tolist(), r.tolist(), strict=True):
        within = spent <= constants.shift_budget and used <= constants.kl_budget
        if not (within and kl <= constants.max_kl):
            return shift, used, True
        step = min(math.exp(ratio), constants.max_ratio) - 1
        shift, used, spent = shift + step, used + kl, spent + abs(step)
    return shift, used, False


def per_rollout(layout, kl, ratio, rewards, low):
    """Every column of the rollouts that are not empty, the mask at max KL 0.04."""
    rows = []
    for b in range(layout.num_sequences):
        here = (layout.sequence_id == b) & layout.token_mask
        if not here.any():
            continue
        k, r = kl[here].double().numpy(), ratio[here].double().numpy()
        reward = float(rewards[b]) - low
        weight = min(math.exp(r.sum()), 1.3) - 1
        shift, used, closed = gated(k, r)
        row = [k.max() <= 0.04, k.sum(), reward * np.expm1(r).sum(), reward * weight]
        rows.append([*row, reward * shift, used, closed])
    return np.array(rows, dtype=np.float64)


def fill(monitor, seeds, move="packed", poison=NAN):
    for seed in seeds:
        packed, kl, ratio, rewards = rollouts(seed)
        layout, mover = layouts(packed, poison)[move]
        kl, ratio = mover(kl), mover(ratio)
        verdict = trm.max_kl_verdict(kl, layout, max_kl=0.04)
        monitor.update(
            layout, verdict=verdict, divergence={"kl": kl}, rewards=rewards, log_ratio=ratio
        )


@pytest.mark.parametrize("move", ["packed", "padded", "segments"])
def test_every_number_against_numpy(move):
    monitor = Monitor(window=1000, reward_range=(-1, 2), alpha=0.1, constants=CONSTANTS)
    seeds = (1, 2, 0)
    fill(monitor, seeds, move)
    found = monitor.metrics(sync=True)
    steps = [per_rollout(*rollouts(seed), -1) for seed in seeds]
    rows = np.concatenate(steps)
    n, z = len(rows), student.ppf(0.9, len(rows) - 1)
    sequence = rows[:, 2] - 3 * rows[:, 1]
    weight = steps[-1][:, 3]
    log_term = math.log(20)
    radius = math.sqrt(2 * weight.var(ddof=1) * log_term / len(weight))
    radius += 7 * 3 * 1.3 * log_term / (3 * (len(weight) - 1))
    gain, used, closed = steps[-1][:, 4:].T
    assert closed.any() and not closed.all()
    low, high = -1.17 * 3, 0.22 * 3
    shift = certify.empirical_bernstein(gain, low, high, 0.1 / 3)
    error = certify.empirical_bernstein(used, 0, 0.15, 0.1 / 3).upper
    hit = certify.binary_kl_inverse(closed.mean(), math.log(30) / len(closed))
    gate = shift.lower - 3 * (error + certify.binary_kl_inverse(hit, error))
    assert gate > -3
    wanted = {
        "trm/window/rollouts": n,
        "trm/window/steps": 3,
        "trm/window/accepted": rows[:, 0].mean(),
        "trm/window/missing": 0,
        "trm/window/seq_kl": rows[:, 1].mean(),
        "trm/window/seq_kl_upper": rows[:, 1].mean() + z * rows[:, 1].std(ddof=1) / math.sqrt(n),
        "trm/window/surrogate": rows[:, 2].mean(),
        "trm/window/certificate_seq_kl": max(
            sequence.mean() - z * sequence.std(ddof=1) / math.sqrt(n), -3
        ),
        "trm/step/rollouts": len(weight),
        "trm/step/certificate_weight": weight.mean() - radius,
        "trm/step/certificate_budget_gate": gate,
        "trm/step/gate_closed": closed.mean(),
    }
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name] == pytest.approx(float(value), rel=1e-6), name


def test_certificates_are_those_of_certify_and_of_the_metrics():
    layout = SequenceLayout.from_lengths([3] * 200)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(600, 20, generator=generator)
    y = x + 0.05 * torch.randn(600, 20, generator=generator)
    tokens = torch.multinomial(x.softmax(-1), 1, generator=generator)[:, 0]
    divergence = trm.token_divergence(x, y, tokens=tokens, outputs=("kl", "log_ratio"))
    rewards = torch.rand(200, generator=generator)
    # no gate closes: Chernoff and Clopper-Pearson agree at 0 of N
    monitor = Monitor(held_out=True)
    monitor.update(layout, divergence=divergence, rewards=rewards)
    found = monitor.metrics(sync=True)
    weight, gate, seq_kl = monitor.certificates()
    direct = trm.certify(divergence, rewards, layout, held_out=True)
    assert -1 < gate.lower_bound < 0
    for own, name, finite in (
        (weight, "truncated_weight", True),
        (gate, "frozen_budget", True),
        (seq_kl, "seq_kl", False),
    ):
        (other,) = [c for c in direct.certificates if c.name == name and c.finite_sample == finite]
        assert own.lower_bound == pytest.approx(other.lower_bound, rel=1e-6)
        assert (own.label, own.rigorous, own.confidence) == (other.label, True, 0.95)
        for part in own.parts.keys() & other.parts.keys():
            assert own.parts[part] == pytest.approx(other.parts[part], rel=1e-6, abs=1e-12), part
        assert own.parts.keys() & {"radius", "surrogate_radius"}
    assert found["trm/step/certificate_weight"] == pytest.approx(weight.lower_bound, rel=1e-9)
    assert found["trm/step/certificate_budget_gate"] == pytest.approx(gate.lower_bound, rel=1e-9)
    assert found["trm/window/certificate_seq_kl"] == pytest.approx(seq_kl.lower_bound, rel=1e-9)
    assert found["trm/window/seq_kl"] == pytest.approx(direct.seq_kl.estimate, rel=1e-6)
    assert found["trm/window/surrogate"] == pytest.approx(
        certify.clt(rewards.double() * direct.sequence_shift, 0.05).estimate, rel=1e-6
    )


@pytest.mark.parametrize("move", ["packed", "padded", "segments"])
def test_the_gate_is_that_of_theory(move):
    for seed in range(3):
        packed, kl, ratio, _ = rollouts(seed)
        kl[::17], ratio[::13] = NAN, NAN
        layout, mover = layouts(packed, INF)[move]
        found = budget_gate(mover(kl), mover(ratio), layout, CONSTANTS)
        lengths = [int(((packed.sequence_id == b) & packed.token_mask).sum()) for b in range(40)]
        k, r = (np.zeros((40, max(lengths))) for _ in range(2))
        for b, n in enumerate(lengths):
            here = (packed.sequence_id == b) & packed.token_mask
            k[b, :n], r[b, :n] = kl[here].double(), ratio[here].double()
        there = np.arange(max(lengths)) < np.array(lengths)[:, None]
        c = CONSTANTS
        wanted = certify.gate(
            np.where(np.isnan(r), -INF, r),
            k,
            there,
            max_kl=c.max_kl,
            mode="budget",
            shift_budget=c.shift_budget,
            kl_budget=c.kl_budget,
            ratio_cap=c.max_ratio,
            horizon=INF,
        )
        assert found.hit.tolist() == wanted.hit.tolist() and 0 < wanted.hit.sum() < 40
        np.testing.assert_allclose(found.shift.numpy(), wanted.shift, rtol=1e-12, atol=1e-15)
        np.testing.assert_allclose(found.kl.numpy(), wanted.kl, rtol=1e-12, atol=1e-15)


def test_a_gate_does_not_see_other_sequences():
    """At a tie, a sum that carried another sequence's rounding would close it, or open it."""
    constants = GateConstants(max_kl=1.0, max_ratio=2.0, shift_budget=0.3, kl_budget=0.3)
    step, n = 0.1, 50
    layout = SequenceLayout.from_lengths([4] * n)
    kl = torch.full((4 * n,), step, dtype=torch.float64)
    ratio = torch.log1p(torch.full((4 * n,), step, dtype=torch.float64))
    alone = budget_gate(kl[:4], ratio[:4], SequenceLayout.from_lengths([4]), constants)
    together = budget_gate(kl, ratio, layout, constants)
    for one, all_of_them in zip(alone, together, strict=True):
        assert torch.equal(all_of_them, one.expand(n))
    # 0.1 + 0.1 + 0.1 > 0.3 in floating point, and rounded up: never beyond the budget
    assert alone.hit.item() and float(alone.kl) <= 0.3 + 1e-15


def test_the_inverse_on_the_device_is_never_below_the_root():
    for p in (0.0, 1e-6, 0.004, 0.3, 0.9, 1.0):
        for kl in (1e-7, 1e-4, 0.02, 0.5, 3.0):
            wanted = certify.binary_kl_inverse(p, kl)
            found = _binary_kl_inverse(*(torch.tensor(x, dtype=torch.float64) for x in (p, kl)))
            assert float(found) == pytest.approx(wanted, rel=1e-9, abs=1e-14)
            assert float(found) >= wanted * (1 - 1e-13) - 1e-14
    assert math.isnan(_binary_kl_inverse(torch.tensor(0.1), torch.tensor(NAN)))


def test_without_the_statement_nothing_is_a_guarantee():
    monitor = Monitor(reward_range=(-1, 2))
    fill(monitor, range(2))
    for certificate in monitor.certificates():
        assert not certificate.rigorous and certificate.label.startswith("not a guarantee")


@pytest.mark.parametrize("window", [40, 50, 85, 120])
def test_the_window_forgets_the_oldest(window):
    monitor = Monitor(window=window, reward_range=(-1, 2))
    fill(monitor, range(5))
    # The ring holds the newest `window` rollouts, empty ones included; they never enter a mean.
    kls, steps = [], []
    for seed in range(5):
        layout, kl, _, _ = rollouts(seed)
        for b in range(40):
            here = (layout.sequence_id == b) & layout.token_mask
            kls.append(float(kl[here].double().sum()) if here.any() else NAN)
            steps.append(seed)
    recent, of = np.array(kls)[-window:], np.array(steps)[-window:]
    found = monitor.metrics(sync=True)
    assert found["trm/window/seq_kl"] == pytest.approx(np.nanmean(recent), rel=1e-6)
    assert found["trm/window/rollouts"] == (~np.isnan(recent)).sum()
    assert found["trm/window/steps"] == len(np.unique(of[~np.isnan(recent)]))


def test_a_group_is_one_draw():
    layout = SequenceLayout.from_lengths([1] * 6)
    kl = torch.tensor([0.1, 0.3, 0.2, 0.2, 0.0, 0.4], dtype=torch.float64)
    ratio = torch.tensor([0.1, 0.2, 0.0, 0.3, -0.1, 0.0], dtype=torch.float64)
    rewards = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 1.0])
    monitor = Monitor(group_size=2)
    monitor.update(layout, divergence={"kl": kl}, log_ratio=ratio, rewards=rewards)
    found = monitor.metrics(sync=True)
    means = np.array([0.2, 0.2, 0.2])
    assert found["trm/window/rollouts"] == 3
    assert found["trm/window/seq_kl_upper"] == pytest.approx(means.mean())  # no spread left
    gain = (rewards.double() * torch.expm1(ratio)).reshape(3, 2).mean(1).numpy()
    assert found["trm/window/certificate_seq_kl"] == pytest.approx(
        certify.clt(gain - means, 0.05).lower
    )
    mask = torch.tensor([True, False, False, False, True, True])
    monitor = Monitor(group_size=2)
    layout = SequenceLayout.from_cu_seqlens(torch.arange(7), mask)
    monitor.update(layout, divergence={"kl": kl})
    found = monitor.metrics(sync=True)
    assert found["trm/window/rollouts"] == 2  # the middle group is empty
    assert found["trm/window/seq_kl"] == pytest.approx((0.1 + 0.2) / 2)


def small(kl=(0.1, 0.2), ratio=(0.1, 0.1), rewards=(1.0, 0.5), **options):
    monitor = Monitor(**options)
    monitor.update(
        SequenceLayout.from_lengths([1, 1]),
        divergence={"kl": torch.tensor(kl)},
        log_ratio=torch.tensor(ratio),
        rewards=torch.tensor(rewards),
    )
    return monitor, monitor.metrics(sync=True)


def test_missing_evidence_and_support_violations():
    monitor, found = small(kl=(NAN, 0.2), constants=GateConstants(max_kl=0.3))
    assert found["trm/window/missing"] == 1 and found["trm/window/seq_kl"] == pytest.approx(0.2)
    assert math.isnan(found["trm/window/certificate_seq_kl"])
    assert [c.name for c in monitor.certificates()] == ["truncated_weight", "frozen_budget"]
    assert found["trm/step/gate_closed"] == 0.5
    monitor, found = small(kl=(INF, 0.2), constants=GateConstants(max_kl=0.3))
    assert found["trm/window/seq_kl"] == found["trm/window/seq_kl_upper"] == INF
    assert found["trm/window/certificate_seq_kl"] == -1.0  # the reward's span: it says nothing
    assert monitor.certificates()[2].lower_bound == -1.0 and found["trm/step/gate_closed"] == 0.5
    # the worst weight, 0, and no SeqKL
    monitor, found = small(ratio=(NAN, 0.1), constants=GateConstants(max_kl=0.3))
    for column in (4, 5):
        assert monitor.rows[:2, column].tolist() == pytest.approx([-1.0, 0.5 * math.expm1(0.1)])
    assert math.isnan(found["trm/window/certificate_seq_kl"])
    for reward in (NAN, 1.5, -0.1):
        monitor, found = small(rewards=(reward, 0.5))
        assert math.isnan(found["trm/step/certificate_weight"]) and monitor.certificates() == ()
        assert math.isnan(found["trm/step/certificate_budget_gate"])
        assert found["trm/window/seq_kl"] == pytest.approx(0.15)


def test_nothing_is_nan_and_not_an_error():
    found = Monitor().metrics(sync=True)
    assert found["trm/window/rollouts"] == found["trm/window/steps"] == 0
    assert math.isnan(found["trm/window/seq_kl"]) and Monitor().certificates() == ()
    monitor = Monitor()
    monitor.update(SequenceLayout.from_lengths([1]), divergence={"kl": torch.tensor([0.5])})
    found = monitor.metrics(sync=True)
    assert found["trm/window/seq_kl"] == 0.5 and math.isnan(found["trm/window/accepted"])
    assert math.isnan(found["trm/window/seq_kl_upper"])  # one rollout has no spread
    monitor.update(SequenceLayout.from_lengths([0]), divergence={"kl": torch.zeros(0)})
    assert monitor.metrics(sync=True)["trm/step/rollouts"] == 0


def test_state_goes_round_and_goes_on():
    first, second = (Monitor(window=70, reward_range=(-1, 2)) for _ in range(2))
    fill(first, range(3))
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    fill(first, [3])
    fill(second, [3])
    assert first.metrics(sync=True) == second.metrics(sync=True)
    assert torch.equal(first.rows, second.rows)


def test_the_state_survives_a_checkpoint(tmp_path):
    first = Monitor(reward_range=(-1, 2))
    fill(first, range(2))
    torch.save(first.state_dict(), tmp_path / "state.pt")
    second = Monitor(reward_range=(-1, 2))
    second.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert first.metrics(sync=True) == second.metrics(sync=True)


@pytest.mark.parametrize(
    "name, options",
    [
        ("window", {"window": 71}),
        ("reward_range", {"reward_range": (0, 2)}),
        ("alpha", {"alpha": 0.01}),
        ("constants", {"constants": GateConstants(shift_budget=3.0)}),
        ("held_out", {"held_out": True}),
        ("group_size", {"group_size": 2}),
    ],
)
def test_a_state_of_other_settings_is_refused_before_it_is_copied(name, options):
    first = Monitor(window=70, reward_range=(-1, 2))
    fill(first, range(2))
    other = Monitor(**{"window": 70, "reward_range": (-1, 2), **options})
    with pytest.raises(ValueError, match=f"the state was saved with {name} .*, this monitor has"):
        other.load_state_dict(first.state_dict())
    assert other.steps == 0 and not other.rows.any()


@pytest.mark.parametrize("pieces", [False, True])
def test_no_value_leaves_the_device(pieces):
    # Fake tensors have no values: any .item(), bool() or data-dependent shape would raise.
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        monitor = Monitor(group_size=2)
        layout = SequenceLayout.from_mask(torch.ones(4, 3, dtype=torch.bool))
        values = torch.rand(4, 3)
        if pieces:
            ids, position = layout.sequence_id.reshape(-1), layout.position.reshape(-1)
            mask, order = layout.token_mask.reshape(-1), torch.argsort(ids, stable=True)
            layout = SequenceLayout(ids, position, mask, layout.offsets, order)
            values = values.reshape(-1)
        monitor.update(
            layout,
            verdict=trm.max_kl_verdict(values, layout, max_kl=0.5),
            divergence={"kl": values},
            log_ratio=values,
            rewards=torch.rand(4),
        )
        found = monitor.metrics()
    assert all(isinstance(v, torch.Tensor) and v.dim() == 0 for v in found.values())


def test_compiles_without_a_break_and_without_compiling_again():
    eager, compiled = (Monitor(window=70, reward_range=(-1, 2)) for _ in range(2))
    graphs = 0

    def backend(graph, inputs):
        nonlocal graphs
        graphs += 1
        return graph.forward

    def step(layout_tensors, kl, ratio, rewards):
        layout = SequenceLayout(*layout_tensors)
        verdict = trm.max_kl_verdict(kl, layout, max_kl=0.04)
        compiled.update(
            layout, verdict=verdict, divergence={"kl": kl}, log_ratio=ratio, rewards=rewards
        )

    run = torch.compile(step, fullgraph=True, backend=backend, dynamic=True)
    for seed in range(4):
        layout, kl, ratio, rewards = rollouts(seed)
        tensors = (layout.sequence_id, layout.position, layout.token_mask, layout.offsets)
        run(tensors, kl, ratio, rewards)
        fill(eager, [seed])
    assert graphs == 1
    assert eager.metrics(sync=True) == compiled.metrics(sync=True)


BAD = [
    ({"window": 1}, "window must be at least 2, got 1"),
    ({"group_size": 0}, "group_size must be at least 1, got 0"),
    ({"alpha": 1.0}, "alpha must lie strictly between 0 and 1, got 1.0"),
    ({"reward_range": (1, 1)}, r"reward_range must be finite with low < high, got \[1, 1\]"),
]


@pytest.mark.parametrize("options, message", BAD)
def test_bad_settings(options, message):
    with pytest.raises(ValueError, match=message):
        Monitor(**options)


def test_bad_batches():
    layout = SequenceLayout.from_lengths([1, 1, 1])
    kl = {"kl": torch.zeros(3)}
    with pytest.raises(ValueError, match="3 sequences do not divide into groups of 2"):
        Monitor(group_size=2).update(layout, divergence=kl)
    with pytest.raises(ValueError, match="a batch of 3 rollouts does not fit a window of 2"):
        Monitor(window=2).update(layout, divergence=kl)
    with pytest.raises(ValueError, match=r"rewards must be \[B\] with B = 3, got \[2\]"):
        Monitor().update(layout, divergence=kl, rewards=torch.zeros(2))
    with pytest.raises(ValueError, match="no per-token values of 'kl'"):
        Monitor().update(layout, divergence={"tv": torch.zeros(3)})
    with pytest.raises(ValueError, match=r"kl must have .* \[3\], got \[2\]"):
        Monitor().update(layout, divergence={"kl": torch.zeros(2)})
