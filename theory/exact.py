# SPDX-License-Identifier: Apache-2.0
"""Everything about a token tree, exactly: returns, surrogate, error, divergences, supremum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import rel_entr

from theory import checks
from theory.bounds.catalogue import every_bound
from theory.divergences import RowDivergences, k3, row_divergences
from theory.mdp.tree import Tree
from theory.records import Bound

__all__ = [
    "Law",
    "RowDivergences",
    "Summary",
    "TokenStatistics",
    "Values",
    "bounds",
    "k3",
    "law",
    "pair_terms",
    "row_divergences",
    "sequence_divergences",
    "summary",
    "sup_error",
    "sup_surrogate",
    "token_statistics",
    "values",
]

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Law:
    """Per-sequence and per-context quantities of a tree.

    Attributes:
        p: rollout probability of each sequence, prompts included.
        q: train probability of each sequence.
        w: W = prod rho_t where p > 0, else 1 (a value that no expectation sees).
        s: S = sum (rho_t - 1) where p > 0, else 0.
        k3_sum: sum k3(rho_t) where p > 0, else 0.
        visits_rollout: d_t of the rollout policy, one array per depth 0..T.
        visits_train: d_t of the train policy.
        rows: divergences of every context, one record per depth 0..T-1.
        reachable: contexts that the rollout policy reaches, per depth.
    """

    p: Array
    q: Array
    w: Array
    s: Array
    k3_sum: Array
    visits_rollout: tuple[Array, ...]
    visits_train: tuple[Array, ...]
    rows: tuple[RowDivergences, ...]
    reachable: tuple[NDArray[np.bool_], ...]

    @property
    def z(self) -> Array:
        """Z = W - 1 - S per sequence; Error = E_rollout[R Z] without outside mass."""
        return self.w - 1 - self.s


def law(tree: Tree) -> Law:
    """Enumerate a tree.

    W_t = prod_{s<=t} rho_s,  S = sum_t (rho_t - 1),  d_{t+1}(c y) = d_t(c) policy(y|c)

    Assumes only a valid tree; memory O(V^T). KLs in nats.
    Ranges: probabilities in [0, 1], W in [0, inf).
    Source: docs/theory.md#setting.

    Example:
        >>> one = law(Tree(([[0.5, 0.5]],), ([[0.25, 0.75]],), [1.0]))
        >>> one.w.tolist(), one.z.tolist()
        ([0.5, 1.5], [0.0, 0.0])
    """
    p = q = tree.prompts
    w, s, k = np.ones_like(p), np.zeros_like(p), np.zeros_like(p)
    reach = tree.prompts > 0
    visits_p, visits_q, rows, reachable = [p], [q], [], [reach]
    for roll, train in zip(tree.rollout, tree.train, strict=True):
        rows.append(row_divergences(roll, train))
        rho = np.where(roll > 0, train / np.where(roll > 0, roll, 1.0), 1.0)
        p, q = (p[:, None] * roll).ravel(), (q[:, None] * train).ravel()
        w = (w[:, None] * rho).ravel()
        s = (s[:, None] + (rho - 1)).ravel()
        k = (k[:, None] + k3(rho)).ravel()
        reach = (reach[:, None] & (roll > 0)).ravel()
        visits_p.append(p)
        visits_q.append(q)
        reachable.append(reach)
    seen = p > 0
    return Law(
        p,
        q,
        np.where(seen, w, 1.0),
        np.where(seen, s, 0.0),
        np.where(seen, k, 0.0),
        tuple(visits_p),
        tuple(visits_q),
        tuple(rows),
        tuple(reachable),
    )


@dataclass(frozen=True)
class TokenStatistics:
    """What rollouts show at every token of every sequence, shape (sequences, T) each.

    Attributes:
        log_ratio: log rho_t of the sampled token, nats; 0 where the rollout cannot sample it.
        kl: ``kl_rollout_train`` of the context, nats.
        max_log_ratio: largest log(train/rollout) over the context's vocabulary, nats.
    """

    log_ratio: Array
    kl: Array
    max_log_ratio: Array


def token_statistics(tree: Tree) -> TokenStatistics:
    """Per-token statistics of all sequences, in the form that ``theory.certify`` takes.

    log rho_t = log train(y_t|c_t) - log rollout(y_t|c_t), kl(c_t), max_v log(train/rollout)(v|c_t)

    Assumes only a valid tree. Range: log_ratio [-inf, inf), kl [0, inf]. Nats.
    Source: definitions; docs/theory.md#setting.

    Example:
        >>> one = token_statistics(Tree(([[0.5, 0.5]],), ([[0.25, 0.75]],), [1.0]))
        >>> one.log_ratio.round(3).ravel().tolist()
        [-0.693, 0.405]
    """
    tokens, the = tree.tokens(), law(tree)
    found = TokenStatistics(*(np.zeros(tokens.shape) for _ in range(3)))
    for t in range(tree.length):
        c = tree.contexts(t)
        p, q = tree.rollout[t][c, tokens[:, t]], tree.train[t][c, tokens[:, t]]
        seen = p > 0
        with np.errstate(divide="ignore"):
            found.log_ratio[seen, t] = np.log(q[seen]) - np.log(p[seen])
        found.kl[:, t] = the.rows[t].kl_rollout_train[c]
        found.max_log_ratio[:, t] = the.rows[t].max_log_ratio[c]
    return found


@dataclass(frozen=True)
class Values:
    """Returns, surrogate and error for one reward.

    Attributes:
        j_rollout: J(rollout) = E_rollout[R].
        j_train: J(train) = E_train[R].
        surrogate: L' = E_rollout[R sum (rho_t - 1)], what samples can estimate.
        error: j_train - j_rollout - surrogate.
        error_forward: the same by identity I1 (train's contexts against the rollout's).
        error_backward: the same by identity I2 (values of the two policies).
        error_measure: the same by identity I4, E_rollout[R Z] + E_train[R; left the support].
        outside_term: part of the error due to outside mass, 0 inside the support.
    """

    j_rollout: float
    j_train: float
    surrogate: float
    error: float
    error_forward: float
    error_backward: float
    error_measure: float
    outside_term: float


def _values_by_depth(policy: tuple[Array, ...], reward: Array) -> list[Array]:
    """Return V_t for t = 0..T, V_T being the reward."""
    out = [reward]
    for rows in reversed(policy):
        out.append((rows * out[-1].reshape(rows.shape)).sum(1))
    return out[::-1]


def values(tree: Tree, reward: ArrayLike, low: float = 0.0, high: float = 1.0) -> Values:
    """Evaluate both policies and the surrogate, and the error in four ways.

    Error = sum_t (E_{d_t^train} - E_{d_t^rollout}) g_t                                  (I1)
          = sum_t E_{d_t^rollout} sum_y (train - rollout)(y|c) (V^train - V^rollout)(c y)  (I2)
          = E_rollout[R Z]                                                              (I4)

    Assumes a terminal reward in the stated range; the surrogate uses R as given, so pass R - low
    when the range does not start at 0. I1 and I2 need the term that sampling misses,
    sum_t E_rollout sum_{y outside} train(y|c) V^rollout(c y), and I4 the reward of the sequences
    that left the support; both are added here. Reward units.

    Args:
        tree: the two policies.
        reward: R for every sequence, shape (sequences,).
        low: smallest possible reward.
        high: largest possible reward.

    Returns:
        The values; the four errors agree to rounding.

    Raises:
        ValueError: on a wrong shape or a reward outside the range.

    Source: Kakade and Langford 2002 (I1); ours, docs/theory.md#identities.

    Example:
        >>> tree = Tree(([[0.5, 0.5]],), ([[0.25, 0.75]],), [1.0])
        >>> v = values(tree, [0.0, 1.0])
        >>> v.j_rollout, v.j_train, v.surrogate, v.error
        (0.5, 0.75, 0.25, 0.0)
    """
    r = checks.rewards(reward, low, high)
    if r.shape != (tree.sequences,):
        raise ValueError(f"The reward must have shape ({tree.sequences},), got {r.shape}.")
    the = law(tree)
    v_roll = _values_by_depth(tree.rollout, r)
    v_train = _values_by_depth(tree.train, r)
    forward = backward = outside = 0.0
    for t, (p, q) in enumerate(zip(tree.rollout, tree.train, strict=True)):
        next_roll = v_roll[t + 1].reshape(p.shape)
        next_train = v_train[t + 1].reshape(p.shape)
        d_roll, d_train = the.visits_rollout[t], the.visits_train[t]
        g = ((q - p) * next_roll).sum(1)
        forward += float((d_train - d_roll) @ g)
        backward += float(d_roll @ ((q - p) * (next_train - next_roll)).sum(1))
        outside += float(d_roll @ np.where(p > 0, 0.0, q * next_roll).sum(1))
    j_rollout, j_train = float(the.p @ r), float(the.q @ r)
    surrogate = float(the.p @ (r * the.s))
    left = np.where(the.p > 0, 0.0, the.q)
    return Values(
        j_rollout=j_rollout,
        j_train=j_train,
        surrogate=surrogate,
        error=j_train - j_rollout - surrogate,
        error_forward=forward + outside,
        error_backward=backward + outside,
        error_measure=float(the.p @ (r * the.z) + left @ r),
        outside_term=outside,
    )


def pair_terms(tree: Tree, reward: ArrayLike) -> Array:
    """Error as a sum over pairs of positions.

    pair(s, t) = E_{c_s~rollout} sum_y (train - rollout)(y|c_s) E_train[g_t | c_s y],  s < t
    (I3)

    Assumes no outside mass; summing over s gives the terms of I1, over t those of I2. Reward units;
    shape (T, T), zero on and below the diagonal.
    Range of each pair [-2, 2].
    Source: ours, docs/theory.md#identities; the base of the dyadic bound.

    Example:
        >>> tree = Tree(([[0.5, 0.5]],), ([[0.25, 0.75]],), [1.0])
        >>> pair_terms(tree, [0.0, 1.0]).tolist()
        [[0.0]]
    """
    r = np.asarray(reward, dtype=np.float64)
    v_roll = _values_by_depth(tree.rollout, r)
    visits = law(tree).visits_rollout
    out = np.zeros((tree.length, tree.length))
    for t in range(tree.length):
        p, q = tree.rollout[t], tree.train[t]
        h = ((q - p) * v_roll[t + 1].reshape(p.shape)).sum(1)
        for s in range(t - 1, -1, -1):
            p, q = tree.rollout[s], tree.train[s]
            h = h.reshape(p.shape)
            out[s, t] = visits[s] @ ((q - p) * h).sum(1)
            h = (q * h).sum(1)
    return out


def sup_error(tree: Tree) -> float:
    """Largest |Error| over all rewards in [0, 1].

    sup_R |Error| = (1/2) E_rollout |W - 1 - S|;  with outside mass the larger of the two signed
    parts of Q - P (1 + S) summed over sequences

    Assumes only a valid tree. Reached by the indicator of the positive part. Reward units,
    [0, inf). Source: ours, docs/theory.md#measure-identity.

    Example:
        >>> sup_error(Tree(([[1.0, 0.0]],), ([[0.9, 0.1]],), [1.0]))
        0.1
    """
    the = law(tree)
    signed = the.q - the.p * (1 + the.s)
    return float(signed[signed > 0].sum())


def sup_surrogate(tree: Tree) -> float:
    """Largest |L'| over all rewards in [0, 1]: what a certificate has to beat.

    sup_R |L'| = (1/2) E_rollout |S| inside the support, S = sum (rho_t - 1)

    Assumes only a valid tree. Reward units, [0, inf).
    Source: ours, docs/theory.md#vacuity.

    Example:
        >>> sup_surrogate(Tree(([[0.5, 0.5]],), ([[0.25, 0.75]],), [1.0]))
        0.25
    """
    the = law(tree)
    signed = the.p * the.s
    return float(max(signed[signed > 0].sum(), -signed[signed < 0].sum()))


@dataclass(frozen=True)
class Summary:
    """Every divergence of a tree, as maximum and as average.

    KLs in nats; maxima run over the contexts that the rollout policy reaches.

    Attributes:
        horizon: T.
        max_tv: eps.
        max_kl: delta, ``kl_rollout_train``.
        max_kl_train_rollout: the other direction.
        min_bc: beta.
        max_chi2: X.
        max_log_ratio: M.
        seq_kl: D_seq = KL(P_rollout || P_train).
        seq_tv: TV(P_rollout, P_train).
        seq_chi2: X_seq, rollout average of the summed chi-square.
        mean_tv: Dbar_t, shape (T,).
        mean_kl: rollout average of ``kl_rollout_train`` per position, shape (T,).
        mean_kl_train_rollout: rollout average of the other direction per position. Its sum is not
            KL(P_train || P_rollout), which averages over train's contexts.
        mean_chi2: rollout average of the chi-square per position.
        mean_bc: rollout average of the affinity per position.
        prefix_tv: TV between the two laws of c_t, shape (T,).
        moment: sum_t E_rollout[|W_{t-1} - 1| tv(c_t)].
        second_moment: E_rollout[Z^2], inf with outside mass.
        outside_mass: S_out = E_rollout sum_t s(c_t).
    """

    horizon: int
    max_tv: float
    max_kl: float
    max_kl_train_rollout: float
    min_bc: float
    max_chi2: float
    max_log_ratio: float
    seq_kl: float
    seq_tv: float
    seq_chi2: float
    mean_tv: Array
    mean_kl: Array
    mean_kl_train_rollout: Array
    mean_chi2: Array
    mean_bc: Array
    prefix_tv: Array
    moment: float
    second_moment: float
    outside_mass: float

    def known(self) -> dict[str, Any]:
        """Quantities in the form that ``theory.bounds.every_bound`` takes.

        Example:
            >>> from theory.mdp.tree import random_tree
            >>> sorted(summary(random_tree(0)).known())[:3]
            ['max_chi2', 'max_kl', 'max_kl_train_rollout']
        """
        unused = ("horizon", "prefix_tv", "outside_mass")
        return {
            k: v
            for k, v in self.__dict__.items()
            if k not in unused and (k == "mean_tv" or not k.startswith("mean_"))
        }


def _average(weights: Array, x: Array) -> float:
    return float(np.where(weights > 0, weights * np.where(weights > 0, x, 0.0), 0.0).sum())


def summary(tree: Tree) -> Summary:
    """Every divergence of a tree, exactly.

    D_seq = sum_t E_{d_t^rollout}[KL(rollout||train)(c_t)],  TV_seq = (1/2) sum |P - Q|, and so on

    Assumes only a valid tree. KL direction as named, nats.

    Returns:
        The :class:`Summary`.

    Ranges as listed in :class:`Summary`.
    Source: definitions; docs/theory.md#setting.

    Example:
        >>> s = summary(Tree(([[0.5, 0.5]],), ([[0.25, 0.75]],), [1.0]))
        >>> s.max_tv, s.seq_tv, round(s.seq_kl, 6)
        (0.25, 0.25, 0.143841)
    """
    the = law(tree)
    reach = the.reachable[:-1]

    def largest(name: str) -> float:
        return max(
            float(getattr(row, name)[r].max()) for row, r in zip(the.rows, reach, strict=True)
        )

    def per_position(name: str) -> Array:
        return np.array(
            [
                _average(d, getattr(row, name))
                for d, row in zip(the.visits_rollout[:-1], the.rows, strict=True)
            ]
        )

    shifts = [np.abs(a - b) for a, b in zip(the.visits_train, the.visits_rollout, strict=True)]
    outside = float(per_position("outside").sum())
    mean_chi2 = per_position("chi2")
    mean_kl = per_position("kl_rollout_train")
    return Summary(
        horizon=tree.length,
        max_tv=largest("tv"),
        max_kl=largest("kl_rollout_train"),
        max_kl_train_rollout=largest("kl_train_rollout"),
        min_bc=min(float(row.bc[r].min()) for row, r in zip(the.rows, reach, strict=True)),
        max_chi2=largest("chi2"),
        max_log_ratio=largest("max_log_ratio"),
        seq_kl=float(mean_kl.sum()),
        seq_tv=min(float(shifts[-1].sum()) / 2, 1.0),
        seq_chi2=float(mean_chi2.sum()),
        mean_tv=per_position("tv"),
        mean_kl=mean_kl,
        mean_kl_train_rollout=per_position("kl_train_rollout"),
        mean_chi2=mean_chi2,
        mean_bc=per_position("bc"),
        prefix_tv=np.array([float(x.sum()) / 2 for x in shifts[:-1]]),
        moment=sum(
            _average(np.where(r, shift, 0.0), row.tv)
            for shift, row, r in zip(shifts[:-1], the.rows, reach, strict=True)
        ),
        second_moment=float(the.p @ the.z**2) if outside == 0 else float("inf"),
        outside_mass=outside,
    )


def bounds(tree: Tree) -> list[Bound]:
    """Every bound of the catalogue for a tree, made valid for its support.

    |Error| <= value for every reward in [0, 1]; S_out is added where the theorem assumes support

    Assumes only a valid tree. Reward units.
    Source: each record's theorem; docs/theory.md#outside-mass.

    Example:
        >>> from theory.mdp.tree import random_tree
        >>> tree = random_tree(1)
        >>> all(b.value >= sup_error(tree) for b in bounds(tree))
        True
    """
    found = summary(tree)
    return [
        b.with_outside_mass(found.outside_mass) for b in every_bound(found.horizon, **found.known())
    ]


def sequence_divergences(tree: Tree) -> RowDivergences:
    """Divergences between the two laws of whole sequences.

    kl_rollout_train = sum P log(P/Q), and the other formulas of ``row_divergences`` with P and Q

    Assumes only a valid tree. KLs in nats.

    Ranges as for one row.
    Source: definitions; used to check the chain rules in the tests.

    Example:
        >>> from theory.mdp.tree import random_tree
        >>> tree = random_tree(1)
        >>> bool(np.isclose(sequence_divergences(tree).kl_rollout_train, summary(tree).seq_kl))
        True
    """
    the = law(tree)
    p, q = the.p, the.q
    return RowDivergences(
        tv=np.abs(p - q).sum() / 2,
        kl_rollout_train=rel_entr(p, q).sum(),
        kl_train_rollout=rel_entr(q, p).sum(),
        chi2=np.where(p > 0, q * q / np.where(p > 0, p, 1), np.where(q > 0, np.inf, 0)).sum() - 1,
        bc=np.sqrt(p * q).sum(),
        squared_hellinger=((np.sqrt(p) - np.sqrt(q)) ** 2).sum() / 2,
        max_log_ratio=np.log(np.max(q[p > 0] / p[p > 0])),
        outside=q[p == 0].sum(),
    )
