# SPDX-License-Identifier: Apache-2.0
from dataclasses import replace

import numpy as np

from theory import exact, selfcheck
from theory.bounds import paper


def test_two_hundred_trees_of_each_kind_hold_every_bound():
    report = selfcheck.selfcheck(200)
    assert report.violations == []
    assert report.largest_identity_gap < 1e-12
    assert set(report.largest_ratio) == {"inside", "outside"}
    inside = report.largest_ratio["inside"]
    # The published constants never get above one half: the factor 2 is real.
    for name in ("classical_tv", "coupling", "pinsker_marginal_kl", "mixed_kl", "adaptive_linear"):
        assert inside[name] <= 0.5
    assert inside["forward_moment"] > 1 - 1e-9  # attained at T = 2


def test_a_bound_that_is_too_small_is_caught(monkeypatch):
    original = exact.bounds

    def with_a_wrong_one(tree):
        return [
            replace(paper.halved(b), name="quarter", value=b.value / 4)
            if b.name == "adaptive"
            else b
            for b in original(tree)
        ]

    monkeypatch.setattr(exact, "bounds", with_a_wrong_one)
    report = selfcheck.selfcheck(40)
    assert any("quarter" in sentence for sentence in report.violations)


def test_forgetting_the_outside_mass_is_caught(monkeypatch):
    def forgetful(tree):
        found = exact.summary(tree)
        return exact.every_bound(found.horizon, **found.known())

    monkeypatch.setattr(exact, "bounds", forgetful)
    report = selfcheck.selfcheck(40)
    assert any(sentence.startswith("outside") for sentence in report.violations)
    assert not any(sentence.startswith("inside") for sentence in report.violations)
    assert not any("seq_kl =" in sentence for sentence in report.violations)


def test_a_broken_identity_is_caught(monkeypatch):
    original = exact.values

    def wrong(tree, reward):
        v = original(tree, reward)
        return replace(v, error_backward=v.error_backward + 1e-9)

    monkeypatch.setattr(exact, "values", wrong)
    assert any("identities disagree" in s for s in selfcheck.selfcheck(2).violations)


def test_cases_cover_prompts_eos_zero_tokens_and_infinite_kl():
    found = [exact.summary(selfcheck.random_case(i, False)) for i in range(100)]
    assert any(np.isinf(f.max_kl) for f in found)
    assert any(selfcheck.random_case(i, False).prompts.size > 1 for i in range(20))
    assert all(f.outside_mass == 0 for f in found)
