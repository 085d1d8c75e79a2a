# SPDX-License-Identifier: Apache-2.0
"""How often certificates hold, and that the counting itself can tell."""

import json

import numpy as np
import pytest
from scipy.stats import binom

from theory import certify, coverage, exact
from theory.cli import main
from theory.mdp.markov import random_markov
from theory.mdp.tree import random_tree

#: Probability with which a test of this file fails although nothing is wrong, per statement. Seeds
#: are fixed, so an outcome is reproducible.
FALSE_ALARM = 1e-6


def test_finite_sample_certificates_cover_on_every_case():
    """60 batches; a certificate that holds with 95 % misses more than 15 with probability 3e-8."""
    found = coverage.coverage(batches=60, rollouts=300)
    names = {c.certificate for c in found if c.finite_sample}
    assert len(names) == 7 and {"frozen_budget", "frozen_budget (row maximum)"} < names
    for c in found:
        if c.finite_sample:
            least = binom.ppf(FALSE_ALARM, c.batches, c.confidence)
            assert c.covered >= least, c
            assert c.covered_limit is None or c.covered_limit >= least, c


@pytest.mark.slow
def test_95_percent_certificates_cover_95_percent_of_1000_batches():
    """The lower 95 % Clopper-Pearson limit of the coverage, not just its estimate.

    A certificate whose coverage is 0.974 or more fails this with probability below 1e-4; those
    here have slack, so theirs is near 1.
    """
    found = coverage.coverage(batches=1000, rollouts=1000)
    finite = [c for c in found if c.finite_sample]
    assert len(finite) == 7 * len(coverage.CASES)
    for c in finite:
        assert c.at_least >= c.confidence == 0.95, c
    for c in found:
        print(c.case, c.certificate, c.covered, c.covered_limit)


def test_a_bound_without_a_radius_is_caught(monkeypatch):
    """The plain estimate lies below its mean half of the time: 60 of 200 has probability 1e-8."""

    def no_radius(values, low, high, alpha):
        mean = float(np.mean(values))
        return certify.Interval(mean, mean, mean, alpha, "none", True)

    monkeypatch.setattr(certify, "empirical_bernstein", no_radius)
    (found,) = (
        c
        for c in coverage.coverage(batches=200, rollouts=300, cases=("coins",))
        if c.certificate == "sequence_mask"
    )
    assert 60 <= found.covered_limit <= 140
    assert found.covered >= 190  # the slack of the inequality hides it: why both are counted


def test_the_normal_approximation_certifies_what_did_not_improve():
    """Without the token that train drops, every log W is positive and the variance is 0.

    So the batch certifies an improvement of 0 exactly when all of its rollouts miss the token.
    """
    batches, rollouts = 300, 100
    found = {
        c.certificate: c
        for c in coverage.coverage(batches=batches, rollouts=rollouts, cases=("rare",))
    }
    missed = found["log (asymptotic)"].certified
    chance = 0.995**rollouts
    assert binom.ppf(FALSE_ALARM, batches, chance) <= missed
    assert missed <= binom.ppf(1 - FALSE_ALARM, batches, chance)
    assert found["log (asymptotic)"].covered == batches - missed
    assert found["sequence_mask"].covered == batches and found["sequence_mask"].certified == 0


@pytest.mark.parametrize("name", ["coins", "words", "rare"])
def test_limits_are_what_the_theory_says(name):
    case = coverage.CASES[name]()
    limits = coverage._limits(case, case.everything)
    p, tokens = case.everything.weight, case.everything.tokens
    assert p.sum() == pytest.approx(1, abs=1e-12)
    rho = np.exp(tokens.log_ratio)
    surrogate = p @ (case.everything.reward * (rho - 1).sum(1))
    k3 = p @ (case.everything.reward * exact.k3(rho).sum(1))
    seq_kl = p @ -tokens.log_ratio.sum(1)  # the chain rule
    assert limits["log (asymptotic)"] == pytest.approx(surrogate - k3, abs=1e-12)
    assert limits["seq_kl (asymptotic)"] == pytest.approx(surrogate - seq_kl, abs=1e-12)
    assert all(value <= case.gain + 1e-12 for value in limits.values())


def test_sampled_sequences_follow_the_rollout_policy():
    """Each count within its binomial limits, false alarm FALSE_ALARM in all."""
    tree, n = random_tree(3, vocab=3, length=3, prompts=2, eos=True, zero=0.3, outside=0.2), 20_000
    p = exact.law(tree).p
    counts = np.bincount(tree.sample(n, np.random.default_rng(0)), minlength=tree.sequences)
    share = FALSE_ALARM / (2 * p.size)
    assert np.all(counts >= binom.ppf(share, n, p)) and np.all(counts <= binom.isf(share, n, p))
    assert counts[p == 0].sum() == 0 and (p == 0).any()


def test_sampled_paths_follow_the_chain():
    pair, n, length = random_markov(1, 3), 20_000, 3
    states = pair.sample(length, n, np.random.default_rng(0))
    assert states.shape == (n, length + 1)
    index = states @ 3 ** np.arange(length, -1, -1)
    p = exact.law(pair.tree(length)).p
    counts = np.bincount(index, minlength=p.size)
    share = FALSE_ALARM / (2 * p.size)
    assert np.all(counts >= binom.ppf(share, n, p)) and np.all(counts <= binom.isf(share, n, p))


def test_a_certain_transition_is_always_taken_whatever_the_row_sums_to():
    # 1 - 1e-10 passes as a row sum; the rest must not fall on a token of probability 0.
    tree = random_tree(0, vocab=2, length=1)
    tree = type(tree)(([[1 - 1e-10, 0.0]],), ([[1.0, 0.0]],), [1.0])

    class Ones:
        def choice(self, size_of, size, p):
            return np.zeros(size, dtype=np.int64)

        def random(self, size):
            return np.full(size, 1 - 1e-16)

    assert tree.sample(4, Ones()).tolist() == [0, 0, 0, 0]


def test_command_prints_counts_and_refuses_bad_input(capsys):
    few = ["coverage", "--batches", "20", "--rollouts", "50", "--cases", "coins", "chain"]
    assert main([*few, "--format", "json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["finite-sample certificates below it"] == 0
    assert len(document["rows"]) == 2 * len(coverage.CERTIFICATES)
    assert document["rows"][0]["covers J(train) - J(rollout)"] == 1.0
    assert main(["coverage", "--cases", "dice"]) == 2
    assert capsys.readouterr().err == (
        "error: unknown case 'dice'; choose from coins, words, rare, chain.\n"
    )
    assert main(["coverage", "--rollouts", "1"]) == 2
    assert "At least 2 rollouts" in capsys.readouterr().err


def test_command_fails_when_a_certificate_does_not_hold(monkeypatch, capsys):
    def boastful(*arguments, **options):
        return certify.Certificate("sequence_mask", 9.0, 0.95, True, True, "guarantee", "")

    monkeypatch.setattr(certify, "sequence_mask_certificate", boastful)
    assert main(["coverage", "--batches", "20", "--rollouts", "50", "--cases", "coins"]) == 1
    assert "sequence_mask covers 0 of 20 batches of coins, stated 0.95" in capsys.readouterr().err
