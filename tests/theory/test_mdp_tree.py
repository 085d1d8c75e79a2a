# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from theory.exact import law
from theory.mdp.tree import Tree, random_tree


def test_row_order_matches_the_token_matrix():
    tree = random_tree(0, vocab=3, length=3, prompts=2)
    tokens = tree.tokens()
    assert tokens.shape == (54, 3)
    assert tokens[5].tolist() == [0, 1, 2]  # 5 = 0 * 9 + 1 * 3 + 2
    the = law(tree)
    for i in (0, 5, 26, 27, 53):
        prompt, p = i // 27, tree.prompts[i // 27]
        row = prompt
        for t in range(3):
            assert tree.contexts(t)[i] == row
            p = p * tree.rollout[t][row, tokens[i, t]]
            row = row * 3 + tokens[i, t]
        assert the.p[i] == pytest.approx(p, rel=1e-14)


def test_eos_is_absorbing_for_both_policies():
    tree = random_tree(1, vocab=3, length=4, eos=True)
    the, tokens = law(tree), tree.tokens()
    for i in np.flatnonzero(the.p > 0):
        ended = False
        for token in tokens[i]:
            assert not (ended and token != 0)
            ended = ended or token == 0
    # After EOS every divergence is zero, so T is only a maximum length.
    for depth in range(1, 4):
        seen = tokens[:, :depth] == 0
        over = np.unique(tree.contexts(depth)[seen.any(axis=1)])
        assert np.all(the.rows[depth].tv[over] == 0)
        assert np.all(the.rows[depth].kl_rollout_train[over] == 0)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.booleans(), st.sampled_from([0.0, 0.3]))
def test_random_trees_are_valid_and_seeded(seed, eos, zero):
    tree = random_tree(seed, 3, 3, prompts=2, eos=eos, zero=zero, outside=zero, dropped=zero)
    again = random_tree(seed, 3, 3, prompts=2, eos=eos, zero=zero, outside=zero, dropped=zero)
    the = law(tree)
    assert the.p.sum() == pytest.approx(1, abs=1e-12)
    assert the.q.sum() == pytest.approx(1, abs=1e-12)
    for a, b in zip(tree.train, again.train, strict=True):
        assert np.array_equal(a, b)


def test_support_options():
    inside = law(random_tree(5, 4, 3, zero=0.4))
    assert np.any(inside.p == 0) and np.all(inside.q[inside.p == 0] == 0)
    leaving = law(random_tree(5, 4, 3, outside=0.4))
    assert leaving.q[leaving.p == 0].sum() > 0
    dropping = law(random_tree(5, 4, 3, dropped=0.4))
    assert np.any((dropping.q == 0) & (dropping.p > 0))


def test_frozen_train_replaces_the_closed_contexts_only():
    tree = random_tree(2, 3, 3)
    frozen = tree.frozen_train(lambda depth: np.arange(3**depth) % 2 == 0)
    for depth in range(3):
        open_ = np.arange(3**depth) % 2 == 0
        assert np.array_equal(frozen.train[depth][open_], tree.train[depth][open_])
        assert np.array_equal(frozen.train[depth][~open_], tree.rollout[depth][~open_])


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (
            lambda: Tree(([[0.5, 0.4]],), ([[0.5, 0.5]],), [1.0]),
            "must sum to 1, but a row sums to 0.9",
        ),
        (lambda: Tree(([[1.5, -0.5]],), ([[0.5, 0.5]],), [1.0]), "numbers >= 0, got -0.5"),
        (lambda: Tree(([[0.5, 0.5]],), ([[0.5, 0.5]],), [0.7]), "prompt .* sums to 0.7"),
        (lambda: Tree(([[0.5, 0.5]],), (), [1.0]), "got 1 and 0"),
        (
            lambda: Tree(([[0.5, 0.5]] * 2,), ([[0.5, 0.5]] * 2,), [1.0]),
            r"must have shape \(1, 2\), got \(2, 2\)",
        ),
        (lambda: random_tree(0, 50, 10), r"V\^T = 50\^10 .* more than the limit 4194304"),
    ],
)
def test_bad_input_is_one_sentence_with_the_value(call, sentence):
    with pytest.raises(ValueError, match=sentence):
        call()
