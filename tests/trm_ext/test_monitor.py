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
from trm_ext import Monitor, SequenceLayout

INF, NAN = float("inf"), float("nan")


def rollouts(seed):
    """One step: layout, per-token values, rewards and verdict."""
    packed, kl, ratio = batch(seed)
    rewards = torch.rand(40, generator=torch.Generator().manual_seed(seed)) * 3 - 1
    return packed, 0.05 * kl, 0.1 * ratio, rewards


def per_rollout(layout, kl, ratio, rewards, low, cap):
    """Rows (keep at max KL 0.04, kl, gain, C0 statistic) of the rollouts that are not empty."""
    rows = []
    for b in range(layout.num_sequences):
        here = (layout.sequence_id == b) & layout.token_mask
        if not here.any():
            continue
        k, r = kl[here].double().numpy(), ratio[here].double().numpy()
        reward = float(rewards[b]) - low
        weight = min(math.exp(r.sum()), cap) - 1
        rows.append([k.max() <= 0.04, k.sum(), reward * np.expm1(r).sum(), reward * weight])
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
    monitor = Monitor(window=1000, reward_range=(-1, 2), alpha=0.1, max_weight=1.3)
    fill(monitor, range(3), move)
    found = monitor.metrics(sync=True)
    steps = [per_rollout(*rollouts(seed), -1, 1.3) for seed in range(3)]
    rows = np.concatenate(steps)
    n, z = len(rows), student.ppf(0.9, len(rows) - 1)
    sequence = rows[:, 2] - 3 * rows[:, 1]
    weight = steps[-1][:, 3]
    log_term = math.log(20)
    radius = math.sqrt(2 * weight.var(ddof=1) * log_term / len(weight))
    radius += 7 * 3 * 1.3 * log_term / (3 * (len(weight) - 1))
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
    monitor = Monitor(held_out=True)
    monitor.update(layout, divergence=divergence, rewards=rewards)
    found = monitor.metrics(sync=True)
    weight, seq_kl = monitor.certificates()
    direct = trm.certify(divergence, rewards, layout, held_out=True)
    for own, name, finite in ((weight, "truncated_weight", True), (seq_kl, "seq_kl", False)):
        (other,) = [c for c in direct.certificates if c.name == name and c.finite_sample == finite]
        assert own.lower_bound == pytest.approx(other.lower_bound, rel=1e-6)
        assert (own.label, own.rigorous, own.confidence) == (other.label, True, 0.95)
        assert own.parts["radius"] == pytest.approx(other.parts["radius"], rel=1e-6)
    assert found["trm/step/certificate_weight"] == pytest.approx(weight.lower_bound, rel=1e-9)
    assert found["trm/window/certificate_seq_kl"] == pytest.approx(seq_kl.lower_bound, rel=1e-9)
    assert found["trm/window/seq_kl"] == pytest.approx(direct.seq_kl.estimate, rel=1e-6)
    assert found["trm/window/surrogate"] == pytest.approx(
        certify.clt(rewards.double() * direct.sequence_shift, 0.05).estimate, rel=1e-6
    )


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
    monitor, found = small(kl=(NAN, 0.2))
    assert found["trm/window/missing"] == 1 and found["trm/window/seq_kl"] == pytest.approx(0.2)
    assert math.isnan(found["trm/window/certificate_seq_kl"])
    assert [c.name for c in monitor.certificates()] == ["truncated_weight"]
    monitor, found = small(kl=(INF, 0.2))
    assert found["trm/window/seq_kl"] == found["trm/window/seq_kl_upper"] == INF
    assert found["trm/window/certificate_seq_kl"] == -1.0  # the reward's span: it says nothing
    assert monitor.certificates()[1].lower_bound == -1.0
    monitor, found = small(ratio=(NAN, 0.1))  # the worst weight, 0, and no SeqKL
    assert monitor.rows[:2, 4].tolist() == pytest.approx([-1.0, 0.5 * math.expm1(0.1)])
    assert math.isnan(found["trm/window/certificate_seq_kl"])
    for reward in (NAN, 1.5, -0.1):
        monitor, found = small(rewards=(reward, 0.5))
        assert math.isnan(found["trm/step/certificate_weight"]) and monitor.certificates() == ()
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
        ("max_weight", {"max_weight": 3.0}),
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


def test_no_value_leaves_the_device():
    # Fake tensors have no values: any .item(), bool() or data-dependent shape would raise.
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        monitor = Monitor(group_size=2)
        layout = SequenceLayout.from_mask(torch.ones(4, 3, dtype=torch.bool))
        values = torch.rand(4, 3)
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
    ({"max_weight": INF}, "max_weight must be a finite number > 1, got inf"),
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
