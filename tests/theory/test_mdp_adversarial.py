# SPDX-License-Identifier: Apache-2.0
import math

import numpy as np
import pytest

from tests.quoted import quoted
from theory import exact
from theory.bounds import paper, sharp
from theory.mdp.adversarial import (
    branch_then_binary,
    coordinate_search,
    hazard_error,
    rare_token_sup,
    reverse_branch,
    two_step_branch,
)
from theory.mdp.product import BernoulliProduct
from theory.mdp.routing_flip import rare_token_amplification, routing_flip


@pytest.mark.parametrize(("length", "eps"), [(2, 0.3), (10, 0.02), (200, 1e-4), (300, 0.05)])
def test_rare_token_closed_form_is_the_limit_of_product_policies(length, eps):
    rare = 1e-11
    pair = BernoulliProduct(rare, eps, length)
    # The rollout emits the token with probability at most T * rare: the limit is that close.
    assert pair.sup_error == pytest.approx(float(rare_token_sup(length, eps)), rel=1e-6)


def test_rare_token_has_exponent_two_and_makes_the_halved_classical_bound_sharp():
    lengths = np.array([16, 64, 256, 1024])
    worst = rare_token_sup(lengths, 1e-7)  # T eps <= 1e-4
    # While T eps << 1 it is T (T - 1) times a constant, but for terms of the order of T eps.
    slope, leading = (
        np.polyfit(np.log(lengths[1:]), np.log(growth[1:]), 1)[0]
        for growth in (worst, lengths * (lengths - 1.0))
    )
    assert slope == pytest.approx(leading, rel=0, abs=lengths[-1] * 1e-7)
    for t_eps, expected in ((1e-3, "0.9995"), (0.1, "0.95")):
        eps = t_eps / 1000
        half = paper.halved(paper.classical_tv(1000, eps)).value
        assert rare_token_sup(1000, eps) / half == quoted(expected)
        routes = sharp.forward(1000, max_tv=eps).value
        assert half >= routes >= rare_token_sup(1000, eps)
    assert rare_token_sup(1000, 1e-4) / sharp.forward(1000, max_tv=1e-4).value > 0.98
    # Beyond T eps = 1 the growth is linear.
    slope = np.diff(np.log(rare_token_sup([10**5, 10**6], 1e-3))) / np.log(10)
    assert slope[0] == pytest.approx(1, abs=1e-6)


def test_seq_kl_is_tight_on_the_two_step_branch():
    tree = two_step_branch()
    found = exact.summary(tree)
    assert found.outside_mass == 0
    ratio = exact.sup_error(tree) / sharp.seq_kl(found.seq_kl).value
    assert 0.999 <= ratio <= 1
    w, k = 1e6, 20.0
    predicted = (w - 1) * -math.expm1(-k) / (w - 1 - math.log(w) + k)
    # Left out: the branch's own second-order cost, about p w / 2 = 5e-5.
    assert ratio == pytest.approx(predicted, abs=1e-4)


@pytest.mark.parametrize("length", [3, 4, 5])
def test_the_other_direction_of_kl_does_not_bound_the_error(length):
    tree = reverse_branch(length)  # p = h = 1e-3, eta <= 1e-3
    wrong = float(exact.sequence_divergences(tree).kl_train_rollout)
    assert exact.sup_error(tree) / wrong > 0.99 * (length - 1)
    assert exact.sup_error(tree) <= exact.summary(tree).seq_kl


def test_hazard_closed_form_equals_enumeration_and_saturates():
    h, h_train, t = 1.0 / 6, 1.5 / 6, 6
    p, q = [1 - h, h], [1 - h_train, h_train]
    tree = exact.Tree(
        tuple(np.tile(p, (2**i, 1)) for i in range(t)),
        tuple(np.tile(q, (2**i, 1)) for i in range(t)),
        [1.0],
    )
    alive = (tree.tokens() == 0).all(axis=1).astype(float)
    assert exact.values(tree, alive).error == pytest.approx(
        float(hazard_error(6, 1.0, 1.5)), abs=1e-14
    )
    limit = math.exp(-1.5) - math.exp(-1) + 0.5 * math.exp(-1)
    values = hazard_error([64, 1024, 4096], 1.0, 1.5)
    assert values.round(5).tolist() == [0.03958, 0.03921, 0.03920]
    # The limit is reached like 1/T: 1 % away at 64, so 1.6e-4 at 4096.
    assert values[-1] == pytest.approx(limit, rel=2e-4)


def test_products_of_averages_are_not_bounds():
    """A rare branch followed by ten tokens: 4 sum Dbar TV(d_t) is far below the true supremum."""
    for p, sup, product, root in (
        (0.01, "0.00780", "0.00056", "0.00774"),
        (0.001, "0.00078", "5.6e-6", "2.4e-4"),
    ):
        tree = branch_then_binary(11, p, p, 0.5, 0.8)
        found = exact.summary(tree)
        truth = exact.sup_error(tree)
        assert truth == quoted(sup)
        prefix_kl = np.concatenate([[0.0], np.cumsum(found.mean_kl)[:-1]])
        wrong = 4 * float(found.mean_tv @ found.prefix_tv)
        wrong_root = 4 * float(found.mean_tv @ np.sqrt(prefix_kl / 2))
        assert wrong == quoted(product)
        assert wrong_root == quoted(root)
        assert wrong < truth and wrong_root < truth
        assert sharp.forward_moment(found.moment).value >= truth
        assert sharp.seq_kl(found.seq_kl).value >= truth


def test_coordinate_search_reaches_the_known_tightness():
    two = coordinate_search(2, delta=1e-4, sweeps=6)
    assert two.objective == pytest.approx(0.5, abs=5e-3)
    found = exact.summary(two.tree)
    assert found.max_kl == pytest.approx(1e-4, rel=1e-6)
    assert exact.sup_error(two.tree) / sharp.dyadic(2, max_kl=found.max_kl).value > 0.99
    three = coordinate_search(3, delta=1e-4, sweeps=6)
    assert three.objective > 0.55
    free = coordinate_search(3, "seq_kl", sweeps=10)
    assert 0.7 < free.objective <= 1
    reverse = coordinate_search(4, "kl_train_rollout", sweeps=10)
    assert reverse.objective > 1.5
    assert coordinate_search(2, sweeps=1).objective == coordinate_search(2, sweeps=1).objective


def test_routing_flip_touches_only_the_flipped_contexts():
    tree = routing_flip(0, 4, 5, flip_rate=0.05)
    rows = [exact.row_divergences(p, q) for p, q in zip(tree.rollout, tree.train, strict=True)]
    tv = np.concatenate([r.tv for r in rows])
    assert 0.0 < np.mean(tv > 0) < 0.12
    found = exact.summary(tree)
    # The maximum says nothing: T delta is far above D_seq, which is above the truth.
    assert found.seq_kl < 0.2 * found.horizon * found.max_kl
    assert exact.sup_error(tree) <= found.seq_kl
    same = routing_flip(0, 4, 5, flip_rate=0.05)
    assert all(np.array_equal(a, b) for a, b in zip(tree.train, same.train, strict=True))


def test_rare_tokens_are_amplified():
    tree = rare_token_amplification(0, 16, 3, strength=0.01, exponent=0.5, spread=3.0)
    p, q = tree.rollout[2], tree.train[2]
    size = np.abs(np.log(q) - np.log(p))
    rare = size[p < np.quantile(p, 0.25)].mean()
    common = size[p > np.quantile(p, 0.75)].mean()
    assert rare > 5 * common
    plain = rare_token_amplification(0, 16, 3, strength=0.01, exponent=0.0, spread=3.0)
    p, q = plain.rollout[2], plain.train[2]
    size = np.abs(np.log(q) - np.log(p))
    assert size[p < np.quantile(p, 0.25)].mean() < 2 * size[p > np.quantile(p, 0.75)].mean()


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: rare_token_sup(0, 0.1), "got 0"),
        (lambda: hazard_error(4, 5.0, 1.0), r"rollout_rate must lie in \[0, 4\], got 5"),
        (lambda: two_step_branch(0.1, 20), r"branch \* gain must lie in \[0, 1\], got 2"),
        (lambda: coordinate_search(2, "max_tv"), "Unknown objective 'max_tv'"),
        (lambda: branch_then_binary(40, 0.1, 0.1, 0.5, 0.5), r"V\^T = 2\^40"),
        (lambda: routing_flip(0, flip_rate=2), r"flip_rate must lie in \[0, 1\], got 2"),
    ],
)
def test_bad_input_is_one_sentence_with_the_value(call, sentence):
    with pytest.raises(ValueError, match=sentence):
        call()
