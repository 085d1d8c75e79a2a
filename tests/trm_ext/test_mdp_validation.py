# SPDX-License-Identifier: Apache-2.0
"""Rollouts of MDPs whose truth is enumerated, through the kernels, the masks and the losses.

The MDPs' policies become tables of logits. Everything that is a function of a context or of a
sequence must equal ``theory.exact`` to rounding; everything that is an average over sampled
rollouts must lie within a limit that fails with probability FALSE_ALARM per statement.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from scipy.stats import binom

import trm_ext as trm
from tests.mdp_tables import kernel_divergences, kernel_row_divergences, tables_of
from tests.rows import KL_RTOL
from theory import coverage, every_bound, exact, gradients
from theory.mdp import markov
from theory.mdp.markov import random_markov
from theory.mdp.tree import random_tree
from trm_ext.masks import Reason

FALSE_ALARM = 1e-9
TREES = {
    "inside": random_tree(1, vocab=4, length=4, prompts=2, mismatch=0.4),
    "close": random_tree(2, vocab=4, length=4, mismatch=1e-3),
    "eos": random_tree(3, vocab=3, length=5, mismatch=0.5, eos=True),
    "zero": random_tree(4, vocab=4, length=4, mismatch=0.5, zero=0.3, eos=True),
    "outside": random_tree(5, vocab=4, length=4, mismatch=0.5, outside=0.3),
    "dropped": random_tree(6, vocab=4, length=4, mismatch=0.5, dropped=0.1),
}
RTOL = {torch.float64: 1e-10, torch.float32: KL_RTOL}


def assert_equal(found, want, rtol, what):
    # Differences of probabilities of order one: nothing is promised below 1e-14.
    np.testing.assert_allclose(found, want, rtol=rtol, atol=1e-14, err_msg=what)


@pytest.mark.parametrize("dtype", RTOL, ids=str)
@pytest.mark.parametrize("name", TREES)
def test_every_divergence_of_every_context(name, dtype):
    tables = tables_of(TREES[name], dtype)
    for t, want in enumerate(exact.law(tables.tree).rows):
        found = kernel_divergences(tables.rollout[t], tables.train[t])
        for field in dataclasses.fields(want):
            values = (getattr(found, field.name), getattr(want, field.name))
            assert_equal(*values, RTOL[dtype], f"{field.name} at depth {t}")
    assert name != "dropped" or np.isinf(exact.summary(tables.tree).max_kl)


@pytest.mark.parametrize("name", TREES)
def test_every_average_and_every_bound_of_a_tree(name, monkeypatch):
    tree = TREES[name]
    want, want_bounds = exact.summary(tree), exact.bounds(tree)
    monkeypatch.setattr(exact, "row_divergences", kernel_row_divergences)
    found, found_bounds = exact.summary(tree), exact.bounds(tree)
    for field in dataclasses.fields(want):
        values = (getattr(found, field.name), getattr(want, field.name))
        assert_equal(*values, 1e-9, field.name)
    assert [b.name for b in found_bounds] == [b.name for b in want_bounds]
    for b, other in zip(found_bounds, want_bounds, strict=True):
        assert b.rigorous == other.rigorous
        assert_equal(b.value, other.value, 1e-9, b.name)


@pytest.mark.parametrize(("mismatch", "length"), [(0.3, 12), (0.01, 500)])
def test_every_average_and_every_bound_of_a_chain(mismatch, length, monkeypatch):
    pair = random_markov(2, 5, mismatch=mismatch)
    want = pair.summary(length)
    monkeypatch.setattr(markov, "row_divergences", kernel_row_divergences)
    found = pair.summary(length)
    for name, value in {**want.known(), "mean_kl": want.mean_kl}.items():
        other = found.mean_kl if name == "mean_kl" else found.known()[name]
        assert_equal(other, value, 1e-9, name)
    bounds = every_bound(length, **want.known())
    for b, other in zip(every_bound(length, **found.known()), bounds, strict=True):
        assert_equal(b.value, other.value, 1e-9, b.name)


CRITERIA = "max_kl<=0.12 & 0.6<=seq_ratio<=1.6 & mean_k3<=0.2"


def enumerated_reasons(tree):
    """Reason of every sequence, decided token by token from the exact policies."""
    tokens, the = tree.tokens(), exact.law(tree)
    reasons = np.empty(tree.sequences, dtype=np.int64)
    for i, sequence in enumerate(tokens):
        kls, ratios, count = [], [], 0
        for t, token in enumerate(sequence):
            c = tree.contexts(t)[i]
            kls.append(the.rows[t].kl_rollout_train[c])
            p, q = tree.rollout[t][c, token], tree.train[t][c, token]
            ratios.append(math.inf if p == 0 else q / p)
            count += 1
        log_w = sum(math.log(r) if r > 0 else -math.inf for r in ratios)
        if math.isinf(max(kls)) or math.isinf(log_w):
            reasons[i] = Reason.SUPPORT
        elif max(kls) > 0.12:
            reasons[i] = Reason.MAX_KL
        elif not math.log(0.6) <= log_w <= math.log(1.6):
            reasons[i] = Reason.SEQ_RATIO
        elif sum(r - 1 - math.log(r) for r in ratios) / count > 0.2:
            reasons[i] = Reason.MEAN
        else:
            reasons[i] = Reason.KEPT
    return reasons


def judged(batch, criteria=CRITERIA):
    divergence = trm.token_divergence(
        batch.rollout_logits,
        batch.train_logits,
        tokens=batch.tokens,
        token_mask=batch.layout.token_mask,
        outputs=("kl", "log_ratio"),
    )
    verdict = trm.verdict(
        criteria, batch.layout, divergence=divergence, log_ratio=divergence.log_ratio
    )
    return divergence, verdict


def within(mean, truth, variance, span, n):
    """Bernstein's inequality with the true variance."""
    log_term = math.log(2 / FALSE_ALARM)
    return abs(mean - truth) <= math.sqrt(2 * variance * log_term / n) + span * log_term / (3 * n)


def moments(p, x):
    """Mean, variance and span of a function of the sequence, over those that occur."""
    seen = p > 0
    mean = float(p[seen] @ x[seen])
    return mean, float(p[seen] @ (x[seen] - mean) ** 2), float(np.ptp(x[seen]))


SAMPLED = {
    "inside": random_tree(11, vocab=4, length=4, prompts=2, mismatch=0.45),
    "eos": random_tree(16, vocab=3, length=6, mismatch=0.4, eos=True),
    "dropped": random_tree(12, vocab=4, length=4, mismatch=0.45, dropped=0.06),
}


@pytest.mark.parametrize("dtype", RTOL, ids=str)
@pytest.mark.parametrize("name", SAMPLED)
def test_acceptance_and_reasons_of_sampled_rollouts(name, dtype):
    n = 20_000
    tables = tables_of(SAMPLED[name], dtype)
    tree, p = tables.tree, exact.law(tables.tree).p
    truth = enumerated_reasons(tree)
    likely = p > 0
    every = judged(tables.batch(np.arange(tree.sequences)))[1].reason.numpy()
    assert np.array_equal(every[likely], truth[likely])
    rows = tree.sample(n, np.random.default_rng(7))
    _, verdict = judged(tables.batch(rows))
    counts = np.bincount(verdict.reason.numpy(), minlength=len(Reason))
    expected = np.bincount(truth, p, minlength=len(Reason))
    for reason in Reason:
        low, high = (
            f(FALSE_ALARM / 2, n, min(float(expected[reason]), 1.0)) for f in (binom.ppf, binom.isf)
        )
        assert low <= counts[reason] <= high, reason
    assert torch.equal(verdict.keep, verdict.reason == int(Reason.KEPT))
    occurring = {Reason(r) for r in np.flatnonzero(expected > 0.005)}
    assert {Reason.KEPT, Reason.MAX_KL, Reason.SEQ_RATIO} <= occurring
    assert (Reason.SUPPORT in occurring) == (name == "dropped")


@pytest.mark.parametrize("eos", [False, True])
def test_total_kl_and_surrogates_of_sampled_rollouts(eos):
    n, max_kl = 20_000, 0.12
    tables = tables_of(SAMPLED["eos"], torch.float32)
    tree, the = tables.tree, exact.law(tables.tree)
    reward = np.random.default_rng(8).random(tree.sequences)
    statistics = exact.token_statistics(tree)
    keep = statistics.kl.max(1) <= max_kl
    rows = tree.sample(n, np.random.default_rng(9))
    batch = tables.batch(rows, eos=eos)
    divergence, verdict = judged(batch, f"max_kl<={max_kl}")
    assert np.array_equal(verdict.keep.numpy(), keep[rows])

    d_seq, variance, span = moments(the.p, statistics.kl.sum(1))
    assert d_seq == pytest.approx(exact.summary(tree).seq_kl, rel=1e-12)
    assert within(float(verdict.sum_kl.double().mean()), d_seq, variance, span, n)

    shift = torch.where(batch.layout.token_mask, divergence.log_ratio.expm1(), 0.0).double().sum(1)
    r = torch.from_numpy(reward[rows])
    truth = moments(the.p, reward * the.s)
    assert truth[0] == pytest.approx(exact.values(tree, reward).surrogate, abs=1e-12)
    assert within(float((r * shift).mean()), *truth, n)
    masked = moments(the.p, reward * keep * the.s)
    assert within(float((r * verdict.keep * shift).mean()), *masked, n)

    # The loss of TRM is minus the surrogate of the kept sequences, plus what rho = 1 would give.
    logp_rollout = torch.zeros_like(divergence.log_ratio)
    loss, _ = trm.policy_loss(
        divergence.log_ratio, logp_rollout, r, batch.layout, estimator="trm", verdict=verdict
    )
    tokens = batch.layout.token_mask.sum(1)
    constant = float((r * verdict.keep * tokens).mean())
    assert -float(loss) - constant == pytest.approx(
        float((r * verdict.keep * shift).mean()), abs=1e-5
    )


def test_rollouts_of_a_long_chain_packed():
    n, length, max_kl = 3000, 64, 0.004
    pair = random_markov(5, 6, mismatch=0.1)
    kl = pair.rows.kl_rollout_train
    good = kl <= max_kl
    assert 0 < good.sum() < kl.size
    # A path is kept iff the states it leaves are all good.
    alive = pair.start * good
    for _ in range(length - 1):
        alive = (alive @ pair.rollout) * good
    accepted = float(alive.sum())
    paths = torch.from_numpy(pair.sample(length, n, np.random.default_rng(3)))
    rollout, train = (torch.from_numpy(np.log(k)).float() for k in (pair.rollout, pair.train))
    before = paths[:, :-1].flatten()
    layout = trm.SequenceLayout.from_lengths([length] * n)
    verdict = trm.trust_region_mask(rollout[before], train[before], layout, max_kl=max_kl)
    kept = int(verdict.keep.sum())
    assert (
        binom.ppf(FALSE_ALARM / 2, n, accepted) <= kept <= binom.isf(FALSE_ALARM / 2, n, accepted)
    )
    # Hoeffding: a total lies in [0, T max kl].
    radius = length * kl.max() * math.sqrt(math.log(2 / FALSE_ALARM) / (2 * n))
    assert abs(float(verdict.sum_kl.double().mean()) - pair.summary(length).seq_kl) <= radius


ESTIMATORS = {
    "token_is": {},
    "ppo_clip": {"clip": 0.2},
    "token_mask": {},
    "seq_is": {},
    "seq_tis": {"clip": 2.0},
    "seq_mis": {"clip": 2.0},
    "geo_mask": {"band": (0.9, 1.1)},
    "geo_mask_token_tis": {"clip": 2.0, "band": (0.9, 1.1)},
    "trm": {},
}


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_gradient_of_every_loss_is_the_enumerated_one(estimator):
    """All sequences, each weighted by its probability, from logits to the gradient of logits."""
    assert set(ESTIMATORS) == set(gradients.ESTIMATORS)
    tables = tables_of(random_tree(21, vocab=3, length=4, prompts=2, mismatch=0.4, zero=0.15))
    tree, p = tables.tree, exact.law(tables.tree).p
    reward = np.random.default_rng(1).random(tree.sequences)
    settings = gradients.Settings()
    want = gradients.estimate(tree, reward, estimator, settings).mean
    leaves = [table.clone().requires_grad_() for table in tables.train]
    batch = tables._replace(train=leaves).batch(np.flatnonzero(p > 0))
    d = trm.token_divergence(
        batch.rollout_logits,
        batch.train_logits,
        tokens=batch.tokens,
        outputs=("kl", "logp_rollout", "logp_train"),
    )
    limit = {"trm": "max_kl", "token_mask": "token_kl"}.get(estimator)
    verdict = None
    if limit is not None:
        verdict = trm.verdict(f"{limit}<={settings.max_kl}", batch.layout, divergence=d)
        assert verdict.token_keep.any() and not verdict.token_keep.all()
    advantages = torch.from_numpy((reward * p)[p > 0])
    loss, _ = trm.policy_loss(
        d.logp_train,
        d.logp_rollout,
        advantages,
        batch.layout,
        estimator=estimator,
        verdict=verdict,
        denominator=1.0,
        **ESTIMATORS[estimator],
    )
    loss.backward()
    found = -torch.cat([leaf.grad.flatten() for leaf in leaves]).numpy()
    np.testing.assert_allclose(found, want, rtol=1e-9, atol=1e-13)
    assert np.abs(want).max() > 1e-3


def kernel_case() -> coverage.Case:
    """Certificates from what the kernels return on float32 logits, in place of the exact rows."""
    tables = tables_of(random_tree(31, vocab=3, length=5, mismatch=0.15, eos=True), torch.float32)
    tree, p = tables.tree, exact.law(tables.tree).p
    reward = np.random.default_rng(2).random(tree.sequences)
    batch = tables.batch(np.arange(tree.sequences))
    d = trm.token_divergence(
        batch.rollout_logits,
        batch.train_logits,
        tokens=batch.tokens,
        outputs=("kl", "log_ratio", "max_log_ratio"),
    )
    likely = np.flatnonzero(p > 0)
    tokens = exact.TokenStatistics(
        *(x.double().numpy() for x in (d.log_ratio, d.kl, d.max_log_ratio))
    )

    def pick(rows, weight):
        return coverage.Batch(
            reward[rows],
            exact.TokenStatistics(
                tokens.log_ratio[rows], tokens.kl[rows], tokens.max_log_ratio[rows]
            ),
            weight,
        )

    value = exact.values(tree, reward)
    return coverage.Case(
        gain=value.j_train - value.j_rollout,
        draw=lambda n, rng: pick(tree.sample(n, rng), np.full(n, 1 / n)),
        everything=pick(likely, p[likely]),
        max_kl=0.02,
        max_log_ratio=0.4,
        max_abs_log_weight=0.8,
        shift_budget=0.8,
        kl_budget=0.05,
    )


def check_coverage(monkeypatch, batches, rollouts):
    monkeypatch.setitem(coverage.CASES, "kernels", kernel_case)
    found = coverage.coverage(batches=batches, rollouts=rollouts, cases=("kernels",))
    finite = [c for c in found if c.finite_sample]
    assert len({c.certificate for c in finite}) == len(finite) == 7
    for c in finite:
        # A certificate that holds with probability 0.95 covers fewer with probability FALSE_ALARM.
        least = binom.ppf(FALSE_ALARM, batches, 0.95)
        assert c.covered >= least and c.covered_limit >= least, c
    return found


def test_certificates_from_kernel_outputs_cover(monkeypatch):
    check_coverage(monkeypatch, batches=100, rollouts=200)


@pytest.mark.slow
def test_certificates_from_kernel_outputs_cover_in_1000_batches(monkeypatch):
    for c in check_coverage(monkeypatch, batches=1000, rollouts=1000):
        assert not c.finite_sample or c.at_least >= 0.95, c


def planted_tables(depth, dtype):
    """Train equals rollout, bit by bit, in every context but one; and that context's row."""
    tree = random_tree(41, vocab=3, length=5, prompts=2, eos=True)
    open_ended = np.where(tree.rollout[depth].max(1) < 1, exact.law(tree).visits_rollout[depth], 0)
    row = int(open_ended.argmax())
    train = [p.copy() for p in tree.rollout]
    train[depth][row] = train[depth][row][::-1]
    tables = tables_of(tree.with_train(train), dtype)
    planted = tables.train[depth][row]
    tables = tables._replace(train=[x.clone() for x in tables.rollout])
    tables.train[depth][row] = planted
    return tables, row


@pytest.mark.parametrize("depth", range(5))
def test_a_planted_divergence_is_found_where_it_is_and_nowhere_else(depth):
    tables, row = planted_tables(depth, torch.float32)
    tree = tables.tree
    rows = tree.sample(4000, np.random.default_rng(5))
    visits = tree.contexts(depth)[rows] == row
    assert 0 < visits.sum() < len(rows)
    batch = tables.batch(rows, eos=True)
    kl = trm.token_divergence(
        batch.rollout_logits, batch.train_logits, token_mask=batch.layout.token_mask
    ).kl.numpy()
    where = np.zeros_like(kl, dtype=bool)
    where[visits, depth] = True
    assert np.all(kl[where] > 1e-3) and np.all(kl[~where] == 0)

    verdict = trm.trust_region_mask(*batch[:2], batch.layout, max_kl=1e-3)
    assert np.array_equal(~verdict.keep.numpy(), visits)
    assert np.all(verdict.position.numpy()[visits] == depth)
    reasons = np.where(visits, int(Reason.MAX_KL), int(Reason.KEPT))
    assert np.array_equal(verdict.reason.numpy(), reasons)
    assert np.array_equal(
        verdict.token_keep.numpy(), batch.layout.token_mask.numpy() & ~visits[:, None]
    )

    # Packed, the same sequences get the same verdict.
    mask = batch.layout.token_mask
    packed = trm.SequenceLayout.from_lengths(mask.sum(1))
    other = trm.trust_region_mask(
        batch.rollout_logits[mask], batch.train_logits[mask], packed, max_kl=1e-3
    )
    for name in ("keep", "reason", "position", "max_kl", "sum_kl"):
        assert torch.equal(getattr(other, name), getattr(verdict, name)), name


def test_a_planted_divergence_changes_no_other_sequence():
    """Loss terms and gradients of sequences that do not visit the context stay the same bits."""
    depth = 2
    planted, row = planted_tables(depth, torch.float64)
    rows = planted.tree.sample(500, np.random.default_rng(6))
    visits = torch.from_numpy(planted.tree.contexts(depth)[rows] == row)
    advantages = torch.randn(len(rows), dtype=torch.float64)
    clean = planted._replace(train=planted.rollout)
    gradients_of = []
    for side in (clean, planted):
        batch = side.batch(rows)
        leaf = batch.train_logits.clone().requires_grad_()
        d = trm.token_divergence(
            batch.rollout_logits,
            leaf,
            tokens=batch.tokens,
            outputs=("kl", "logp_rollout", "logp_train"),
        )
        verdict = trm.verdict("max_kl<=1e-3", batch.layout, divergence=d)
        loss, _ = trm.policy_loss(
            d.logp_train, d.logp_rollout, advantages, batch.layout, verdict=verdict
        )
        loss.backward()
        gradients_of.append(leaf.grad)
    before, after = gradients_of
    assert torch.equal(before[~visits], after[~visits])
    assert not after[visits].any() and before[visits].any()


def test_a_planted_state_of_a_chain_is_found_at_its_first_visit():
    states, planted, length, n = 5, 3, 6, 400
    pair = random_markov(8, states)
    train = pair.rollout.copy()
    train[planted] = train[planted][::-1]
    paths = pair.sample(length, n, np.random.default_rng(1))
    before = torch.from_numpy(paths[:, :-1])
    rollout, other = (torch.from_numpy(np.log(k)).float() for k in (pair.rollout, train))
    layout = trm.SequenceLayout.from_mask(torch.ones(n, length, dtype=torch.bool))
    verdict = trm.trust_region_mask(rollout[before], other[before], layout, max_kl=1e-3)
    hit = paths[:, :-1] == planted
    assert 0 < hit.any(1).sum() < n and (hit.sum(1) > 1).any()
    assert np.array_equal(~verdict.keep.numpy(), hit.any(1))
    assert np.array_equal(verdict.position.numpy()[hit.any(1)], hit.argmax(1)[hit.any(1)])


def test_the_enumeration_is_of_the_stored_policies():
    """The tables' tree is that of the logits as stored: rounding to float32 moved it."""
    tree = TREES["inside"]
    stored = tables_of(tree, torch.float32).tree
    moved = max(np.abs(a - b).max() for a, b in zip(stored.train, tree.train, strict=True))
    assert 1e-9 < moved < 1e-5
