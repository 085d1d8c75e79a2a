# SPDX-License-Identifier: Apache-2.0
"""The state's move, merge and finish against a 50-digit mpmath oracle."""

import mpmath as mp
import pytest
import torch

from tests.rows import base_rows
from trm_ext.outputs import VALUES, encode
from trm_ext.reference import TWINS

ALL = encode(VALUES)
TOKENLESS = encode(VALUES[:4])
COLUMNS = ("M", "c", "Sn", "An", "Gn", "Sf", "Af", "Qf", "flags", "R", "E", "Y")
HAS_BOTH = 3


def exact_sums(x, y, near, m, c):
    """Every sum of the state in frame (m, c), in 50 digits; ``near`` labels are given."""
    m, c = mp.mpf(m), mp.mpf(c)
    sums = dict.fromkeys(COLUMNS[2:], mp.mpf(0))
    for a, b, is_near in zip(x, y, near, strict=True):
        a, b = mp.mpf(a), mp.mpf(b)
        u, w, e = a - b - c, mp.exp(a - m), mp.exp(b - m + c)
        if is_near:
            sums["Sn"] += w
            sums["An"] += w * u
            sums["Gn"] += w * (u + mp.expm1(-u))
        else:
            sums["Sf"] += w
            sums["Af"] += w * u
            sums["Qf"] += e
        sums["R"] += w * (1 - mp.exp(-u) * (1 + u))
        sums["E"] += w * (a - m)
        sums["Y"] += e * (b - m + c)
    return sums


def state_of(x, y, wide=True):
    kind = torch.float64 if wide else torch.float32
    x, y = (torch.as_tensor(t, dtype=kind)[None] for t in (x, y))
    return torch.ops.trm.divergence_state(x, y, None, None, None, None, 0, x.shape[1], TOKENLESS)


def near_labels(x, y, state):
    return [abs((a - b) - float(state[0, 1])) <= 0.5 for a, b in zip(x, y, strict=True)]


# Turns (frame moves c' - c) of every size: tiny, just under and over the near limit, large, huge.
MOVES = [
    (0.0, 0.0),
    (0.1, 1e-9),
    (0.5, 0.03),
    (2.0, -0.1),
    (1.0, 0.49),
    (1.0, 0.51),
    (3.0, -2.0),
    (0.0, 35.0),
    (40.0, -35.0),
    (0.0, 300.0),
    (500.0, 900.0),
]


@pytest.fixture(autouse=True)
def _digits():
    with mp.workdps(50):
        yield


@pytest.mark.parametrize("lift,turn", MOVES)
def test_moves_and_merges_against_mpmath(lift, turn):
    # Part a holds ordinary columns, part b one column whose maxima force a's frame to move by
    # (lift, turn): M' = M + lift, c' = c + turn.
    x = [0.0, -0.3, -1.7, -4.0, -2.2, -9.0]
    y = [0.0, -0.31, -1.4, -1.0, -4.5, -8.9]
    top_x = lift
    top_y = lift - turn
    if top_y < 0:  # the train maximum stays a's: c' = lift - 0
        turn, top_y = lift, -1.0
    a, b = state_of(x, y), state_of([top_x], [top_y])
    near = near_labels(x, y, a) + near_labels([top_x], [top_y], b)
    if abs(turn) > 1:  # what was near in a is far
        near[: len(x)] = [False] * len(x)
    merged = torch.ops.trm.divergence_state_merge(torch.stack([a, b]))[0]
    m, c = float(merged[0]), float(merged[1])
    assert m == max(0.0, top_x)
    assert c == pytest.approx(m - max(0.0, top_y), rel=1e-15)
    want = exact_sums([*x, top_x], [*y, top_y], near, m, c)
    magnitude = exact_sums([*x, top_x], [*y, top_y], near, m, c)
    scale = {"An": magnitude["Sn"], "Af": magnitude["Sf"]}  # signed sums: error against their mass
    for index, name in enumerate(COLUMNS):
        if name in want and name != "flags":
            got = mp.mpf(float(merged[index]))
            unit = max(abs(want[name]), scale.get(name, 0) * (1 + abs(mp.mpf(turn))))
            assert abs(got - want[name]) <= unit * mp.mpf(2) ** -48, name


def exact_divergence(x, y):
    """KL both ways and both entropies in 50 digits."""
    x, y = [mp.mpf(float(v)) for v in x], [mp.mpf(float(v)) for v in y]
    lse_x, lse_y = (mp.log(mp.fsum(mp.exp(v) for v in row)) for row in (x, y))
    p, q = [v - lse_x for v in x], [v - lse_y for v in y]
    pairs = list(zip(p, q, strict=True))
    return [
        mp.fsum(mp.exp(a) * (a - b) for a, b in pairs),
        mp.fsum(mp.exp(b) * (b - a) for a, b in pairs),
        -mp.fsum(mp.exp(a) * a for a in p),
        -mp.fsum(mp.exp(b) * b for b in q),
    ]


@pytest.mark.parametrize("noise", (1e-6, 1e-4, 1e-2, 0.3, 3.0))
@pytest.mark.parametrize("kind", ("flat", "peaked", "sharp"))
def test_finished_values_against_mpmath(kind, noise):
    x = base_rows(kind, 1, 60)[0]
    y = x + torch.randn(60, dtype=torch.float64) * noise
    halves = torch.stack([state_of(x[:23], y[:23]), state_of(x[23:], y[23:])])
    merged = torch.ops.trm.divergence_state_merge(halves)
    values, _ = torch.ops.trm.divergence_finish(merged, TOKENLESS)
    want = exact_divergence(x, y)
    # Sums over 60 doubles, each term's u rounded at 2^-53 of |u| and its cancellation bounded by
    # the frame: a few hundred units of 2^-53 in kl; entropies lose 2^-53 of log S absolutely.
    for value, exact in zip(values[:2, 0].tolist(), want[:2], strict=True):
        assert abs(value - exact) <= exact * 1e-10
    for value, exact in zip(values[2:, 0].tolist(), want[2:], strict=True):
        assert abs(value - exact) <= 1e-14 * 10


def test_float_states_merge_in_double():
    x = base_rows("flat", 1, 4000)[0].float()
    y = x + torch.randn(4000) * 1e-4
    parts = torch.stack([state_of(x[i::7], y[i::7], wide=False) for i in range(7)])
    merged = torch.ops.trm.divergence_state_merge(parts)
    assert merged.dtype == torch.float32
    values, _ = torch.ops.trm.divergence_finish(merged, TOKENLESS)
    whole = TWINS["token_divergence"](x[None], y[None], None, None, None, None, 4000, TOKENLESS)[0]
    torch.testing.assert_close(values[:2].double(), whole[:2], rtol=2e-6, atol=0)
    torch.testing.assert_close(values[2:].double(), whole[2:], rtol=1e-6, atol=0)


def test_merge_is_commutative_to_the_bit():
    x, y = base_rows("flat", 2, 90), base_rows("flat", 2, 90, 5)
    a, b = state_of(x[0, :30], y[0, :30]), state_of(x[0, 30:], y[0, 30:])
    one = torch.ops.trm.divergence_state_merge(torch.stack([a, b]))
    other = torch.ops.trm.divergence_state_merge(torch.stack([b, a]))
    assert torch.equal(one, other)


def test_an_empty_state_is_neutral():
    state = state_of([0.5, -1.0], [0.1, 0.2])
    empty = state_of([], [])
    assert torch.equal(torch.ops.trm.divergence_state_merge(torch.stack([state, empty])), state)
    assert torch.equal(torch.ops.trm.divergence_state_merge(torch.stack([empty, state])), state)
    none = torch.ops.trm.divergence_state_merge(torch.stack([empty, empty]))
    assert torch.isnan(torch.ops.trm.divergence_finish(none, 1)[0]).all()


def test_train_mass_seen_before_any_rollout_mass():
    inf = float("inf")
    x, y = [-inf, -inf, 0.3, -0.2], [5.0, 1.0, 0.1, 0.2]
    parts = torch.stack([state_of(x[:2], y[:2]), state_of(x[2:], y[2:])])
    merged = torch.ops.trm.divergence_state_merge(parts)
    got = torch.ops.trm.divergence_finish(merged, 1)[0]
    want = torch.ops.trm.divergence_finish(state_of(x, y), 1)[0]
    torch.testing.assert_close(got, want, rtol=1e-14, atol=0)


def test_an_output_that_was_not_carried_is_nan():
    x = torch.zeros(1, 3, dtype=torch.float64)
    lean = torch.ops.trm.divergence_state(x, x + torch.arange(3), None, None, None, None, 0, 3, 1)
    full = state_of([0.0], [0.0])
    merged = torch.ops.trm.divergence_state_merge(torch.stack([lean, full]))
    values, _ = torch.ops.trm.divergence_finish(merged, ALL)
    assert values[0].isfinite().all() and torch.isnan(values[1:]).all()
