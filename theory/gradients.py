# SPDX-License-Identifier: Apache-2.0
"""Exact bias and variance of every gradient estimator of the table, by enumeration.

The train policy is a softmax with one logit per (context, token): the gradient of log train(y|c)
with
respect to the logits of c is ``onehot(y) - train(.|c)``. An estimator is a per-token weight w_t:

    g = A sum_t w_t grad log train(y_t|c_t),  A = R - baseline,  y ~ rollout

| name               | w_t                                                                |
|--------------------|--------------------------------------------------------------------|
| token_is           | rho_t                                                              |
| ppo_clip           | rho_t, or 0 where the clipped branch of the minimum is active      |
| token_mask         | rho_t 1[kl(c_t) <= delta]                                          |
| seq_is             | W                                                                  |
| seq_tis            | min(W, C)                                                          |
| seq_mis            | W 1[W <= C]                                                        |
| geo_mask           | 1[low <= W^{1/T} <= high]                                          |
| geo_mask_token_tis | 1[low <= W^{1/T} <= high] min(rho_t, C_token)                      |
| trm                | 1[max_t kl(c_t) <= delta] rho_t                                    |

Different positions touch different logits, so the total variance (the trace of the covariance)
needs no cross terms.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from theory import checks, exact
from theory.mdp.product import BernoulliProduct
from theory.mdp.tree import Tree

__all__ = [
    "ESTIMATORS",
    "Moments",
    "Settings",
    "SignFlip",
    "estimate",
    "estimators",
    "fit_exponent",
    "geometric_log_ratio",
    "grad_j",
    "grad_surrogate",
    "importance_mass",
    "limits",
    "masked_gradient",
    "outlier_bias",
    "ppo_leakage",
    "product_estimators",
    "score_moments",
    "seq_mis_bias",
    "token_is_bias_growth",
    "truncation_sweep",
]

Array = NDArray[np.float64]

ESTIMATORS = (
    "token_is",
    "ppo_clip",
    "token_mask",
    "seq_is",
    "seq_tis",
    "seq_mis",
    "geo_mask",
    "geo_mask_token_tis",
    "trm",
)


@dataclass(frozen=True)
class Settings:
    """Thresholds of the estimators.

    Attributes:
        clip: PPO's epsilon.
        ratio_cap: C of Seq-TIS and Seq-MIS.
        geo_low: lower limit of W^{1/T}.
        geo_high: upper limit of W^{1/T}.
        token_cap: C of the per-token truncation.
        max_kl: delta of the token mask and of TRM, nats (``kl_rollout_train``).
    """

    clip: float = 0.2
    ratio_cap: float = 2.0
    geo_low: float = 0.9
    geo_high: float = 1.1
    token_cap: float = 2.0
    max_kl: float = 0.05


@dataclass(frozen=True)
class Moments:
    """Exact moments of one estimator.

    Attributes:
        mean: expectation, one entry per logit.
        variance: trace of the covariance of a single rollout's gradient.
        bias_j: Euclidean norm of mean - grad J(train).
        bias_surrogate: Euclidean norm of mean - grad L'(train).
        accepted: rollout probability of a sequence that contributes.
    """

    mean: Array
    variance: float
    bias_j: float
    bias_surrogate: float
    accepted: float


def _mean(tree: Tree, probability: Array, factor: Array) -> Array:
    """E[sum_t factor_t grad log train(y_t|c_t)], factor of shape (sequences, T)."""
    tokens = tree.tokens()
    parts = []
    for t, q in enumerate(tree.train):
        cell = tree.contexts(t) * tree.vocab + tokens[:, t]
        mass = np.bincount(cell, probability * factor[:, t], q.size).reshape(q.shape)
        parts.append((mass - q * mass.sum(axis=1, keepdims=True)).ravel())
    return np.concatenate(parts)


def _second_moment(tree: Tree, probability: Array, factor: Array) -> float:
    """E |sum_t factor_t grad log train(y_t|c_t)|^2."""
    tokens = tree.tokens()
    total = 0.0
    for t, q in enumerate(tree.train):
        c = tree.contexts(t)
        norm = 1 - 2 * q[c, tokens[:, t]] + (q * q).sum(axis=1)[c]
        total += float(probability @ (factor[:, t] ** 2 * norm))
    return total


def _reward(tree: Tree, reward: ArrayLike) -> Array:
    r = np.asarray(reward, dtype=np.float64)
    if r.shape != (tree.sequences,):
        raise ValueError(f"The reward must have shape ({tree.sequences},), got {r.shape}.")
    return r


def grad_j(tree: Tree, reward: ArrayLike) -> Array:
    """Gradient of the true objective with respect to train's logits.

    grad J = E_train[R sum_t grad log train(y_t|c_t)]

    Assumes the softmax parametrisation of the module. Reward units per nat; one entry per logit,
    depth by depth. Range (-inf, inf). Raises ValueError on a wrong shape.
    Source: policy-gradient theorem; finite differences in the tests.

    Example:
        >>> grad_j(Tree(([[0.5, 0.5]],), ([[0.5, 0.5]],), [1.0]), [0.0, 1.0]).tolist()
        [-0.25, 0.25]
    """
    r = _reward(tree, reward)
    return _mean(tree, exact.law(tree).q, np.tile(r[:, None], tree.length))


def grad_surrogate(tree: Tree, reward: ArrayLike) -> Array:
    """Gradient of the surrogate L' with respect to train's logits.

    grad L' = E_rollout[R sum_t rho_t grad log train(y_t|c_t)], which is what Token-IS estimates

    Assumes the softmax parametrisation of the module. At train = rollout it equals grad J, and
    L(rollout) = J(rollout) + L'(rollout) = J(rollout). Reward units per nat.
    Range (-inf, inf). Raises ValueError on a wrong shape.
    Source: docs/theory.md#setting; finite differences in the tests.

    Example:
        >>> grad_surrogate(Tree(([[0.5, 0.5]],), ([[0.5, 0.5]],), [1.0]), [0.0, 1.0]).tolist()
        [-0.25, 0.25]
    """
    r = _reward(tree, reward)
    return _mean(tree, exact.law(tree).p, r[:, None] * _rho(tree))


def _rho(tree: Tree) -> Array:
    tokens = tree.tokens()
    columns = []
    for t, (p, q) in enumerate(zip(tree.rollout, tree.train, strict=True)):
        ratio = np.where(p > 0, q / np.where(p > 0, p, 1.0), 1.0)
        columns.append(ratio[tree.contexts(t), tokens[:, t]])
    return np.stack(columns, axis=1)


def _context_kl(tree: Tree, the: exact.Law) -> Array:
    return np.stack(
        [row.kl_rollout_train[tree.contexts(t)] for t, row in enumerate(the.rows)], axis=1
    )


def _weights(tree: Tree, name: str, advantage: Array, settings: Settings) -> Array:
    """w_t of an estimator, shape (sequences, T)."""
    the = exact.law(tree)
    rho, w = _rho(tree), the.w[:, None]
    geometric = np.where(w > 0, np.log(np.where(w > 0, w, 1.0)) / tree.length, -np.inf)
    inside = (geometric >= np.log(settings.geo_low)) & (geometric <= np.log(settings.geo_high))
    kl = _context_kl(tree, the)
    sign = advantage[:, None]
    clipped = np.where(sign >= 0, rho > 1 + settings.clip, rho < 1 - settings.clip)
    ones = np.ones_like(rho)
    table: dict[str, Array] = {
        "token_is": rho,
        "ppo_clip": np.where(clipped, 0.0, rho),
        "token_mask": np.where(kl <= settings.max_kl, rho, 0.0),
        "seq_is": w * ones,
        "seq_tis": np.minimum(w, settings.ratio_cap) * ones,
        "seq_mis": np.where(w <= settings.ratio_cap, w, 0.0) * ones,
        "geo_mask": inside * ones,
        "geo_mask_token_tis": inside * np.minimum(rho, settings.token_cap),
        "trm": np.where(kl.max(axis=1, keepdims=True) <= settings.max_kl, rho, 0.0),
    }
    if name not in table:
        raise ValueError(f"Unknown estimator {name!r}; known ones are {', '.join(ESTIMATORS)}.")
    return np.asarray(table[name], dtype=np.float64)


def estimate(
    tree: Tree,
    reward: ArrayLike,
    name: str,
    settings: Settings | None = None,
    baseline: float = 0.0,
) -> Moments:
    """Exact mean, variance and biases of one estimator.

    mean = E_rollout[g],  variance = E|g|^2 - |mean|^2,  g = (R - baseline) sum_t w_t grad log train

    Assumes one rollout per estimate and division by the number of rollouts, rejected ones included.
    Reward units per nat; variance in their square.

    Args:
        tree: the two policies.
        reward: R per sequence, shape (sequences,).
        name: one of ``ESTIMATORS``.
        settings: thresholds; default ``Settings()``.
        baseline: subtracted from every reward. It matters once sequences are masked.

    Returns:
        The moments.

    Raises:
        ValueError: on an unknown name or a wrong shape.

    Range: norms and variances in [0, inf).
    Source: definitions; docs/theory.md#gradients.

    Example:
        >>> from theory.mdp.tree import random_tree
        >>> tree = random_tree(0)
        >>> m = estimate(tree, tree.tokens()[:, 0] == 0, "token_is")
        >>> bool(m.bias_surrogate < 1e-15)
        True
    """
    r = _reward(tree, reward)
    the = exact.law(tree)
    advantage = r - baseline
    weights = _weights(tree, name, advantage, settings or Settings())
    factor = np.where(the.p[:, None] > 0, advantage[:, None] * weights, 0.0)
    mean = _mean(tree, the.p, factor)
    second = _second_moment(tree, the.p, factor)
    return Moments(
        mean,
        max(second - float(mean @ mean), 0.0),
        float(np.linalg.norm(mean - grad_j(tree, r))),
        float(np.linalg.norm(mean - grad_surrogate(tree, r))),
        float(the.p[(weights != 0).any(axis=1)].sum()),
    )


def estimators(
    tree: Tree, reward: ArrayLike, settings: Settings | None = None, baseline: float = 0.0
) -> dict[str, Moments]:
    """Exact moments of every estimator of the table.

    {name: estimate(tree, reward, name)}

    Assumes as :func:`estimate`. Range: norms and variances in [0, inf).
    Source: docs/theory.md#gradients.

    Example:
        >>> from theory.mdp.tree import random_tree
        >>> tree = random_tree(0)
        >>> found = estimators(tree, tree.tokens()[:, 0] == 0)
        >>> bool(found["seq_is"].bias_j < 1e-15)
        True
    """
    return {name: estimate(tree, reward, name, settings, baseline) for name in ESTIMATORS}


def score_moments(tree: Tree, reward: ArrayLike) -> tuple[float, float, float]:
    """Second moments and maximum of f = R sum_t grad log train(y_t|c_t).

    (E_rollout |f|^2,  E_train |f|^2,  max |f| over reachable sequences)

    Assumes the softmax parametrisation. They enter the variance limits
    Var(Seq-MIS) <= C E_train[|f|^2 1(W <= C)] <= C^2 E_rollout|f|^2, Var(Geo-Mask) <=
    E_rollout|f|^2 and Var(Seq-IS) <= max|f|^2 (1 + chi2(P_train || P_rollout)).
    Squares of reward units per nat. Range [0, inf). Raises ValueError on a wrong shape.
    Source: docs/theory.md#gradients.

    Example:
        >>> tree = Tree(([[0.5, 0.5]],), ([[0.5, 0.5]],), [1.0])
        >>> score_moments(tree, [0.0, 1.0])[0]
        0.25
    """
    r = _reward(tree, reward)
    the = exact.law(tree)
    factor = np.tile(r[:, None], tree.length)
    tokens = tree.tokens()
    size = np.zeros(tree.sequences)
    for t, q in enumerate(tree.train):
        c = tree.contexts(t)
        size += 1 - 2 * q[c, tokens[:, t]] + (q * q).sum(axis=1)[c]
    seen = (the.p > 0) | (the.q > 0)
    return (
        _second_moment(tree, the.p, factor),
        _second_moment(tree, the.q, factor),
        float(np.sqrt((r**2 * size)[seen].max())),
    )


def limits(tree: Tree, reward: ArrayLike, ratio_cap: float = 2.0) -> dict[str, tuple[float, float]]:
    """Biases against total variation, variances against chi-square: each with its limit.

    no weights:  |E_rollout f - grad J| <= 2 max|f| TV_seq
    Seq-TIS:     |bias| <= max|f| E_train[(1 - C/W)_+]
    Seq-IS:      variance <= max|f|^2 (1 + chi2(P_train || P_rollout))
    Seq-MIS:     variance <= C E_train[|f|^2 1(W <= C)]
    Geo-Mask:    variance <= E_rollout |f|^2

    Assumes no outside mass and the softmax parametrisation. Reward units per nat
    (squared for variances).

    Args:
        tree: the two policies.
        reward: R per sequence.
        ratio_cap: C.

    Returns:
        {statement: (value, limit)}, value <= limit.

    Raises:
        ValueError: on a wrong shape.

    Range [0, inf).
    Source: docs/theory.md#gradients.

    Example:
        >>> from theory.mdp.tree import random_tree
        >>> tree = random_tree(0)
        >>> all(value <= limit for value, limit in limits(tree, tree.tokens()[:, 0] == 0).values())
        True
    """
    r = _reward(tree, reward)
    the, whole = exact.law(tree), exact.sequence_divergences(tree)
    everything = Settings(geo_low=1e-300, geo_high=1e300, ratio_cap=ratio_cap)
    plain = estimate(tree, r, "geo_mask", everything)
    truncated = estimate(tree, r, "seq_tis", everything)
    roll, _, top = score_moments(tree, r)
    kept = score_moments(tree, np.where(the.w <= ratio_cap, r, 0.0))[1]
    seen = the.w > 0
    lost = float(the.q[seen] @ np.maximum(1 - ratio_cap / the.w[seen], 0))
    return {
        "bias without weights": (plain.bias_j, 2 * top * float(whole.tv)),
        "bias of seq_tis": (truncated.bias_j, top * lost),
        "variance of seq_is": (
            estimate(tree, r, "seq_is").variance,
            top**2 * (1 + float(whole.chi2)),
        ),
        "variance of seq_mis": (
            estimate(tree, r, "seq_mis", everything).variance,
            ratio_cap * kept,
        ),
        "variance of geo_mask": (estimate(tree, r, "geo_mask").variance, roll),
    }


def seq_mis_bias(tree: Tree, reward: ArrayLike, ratio_cap: float) -> Array:
    """Bias of Seq-MIS in closed form.

    E[Seq-MIS] - grad J = -E_train[f 1(W > C)],  f = R sum_t grad log train

    Assumes no outside mass. The lost mass P_train(W > C) tends to 1 with length, so the gradient
    shrinks silently. Reward units per nat. Range (-inf, inf). Raises ValueError on a wrong shape.
    Source: docs/theory.md#gradients.

    Example:
        >>> from theory.mdp.tree import random_tree
        >>> tree = random_tree(0)
        >>> bool(np.all(seq_mis_bias(tree, np.ones(tree.sequences), 1e9) == 0))
        True
    """
    r = _reward(tree, reward)
    the = exact.law(tree)
    lost = np.where(the.w > ratio_cap, r, 0.0)
    return -_mean(tree, the.q, np.tile(lost[:, None], tree.length))


def truncation_sweep(
    tree: Tree, reward: ArrayLike, caps: ArrayLike
) -> list[tuple[float, float, float]]:
    """Bias and variance of Seq-TIS over the truncation level.

    rows (C, |E[Seq-TIS] - grad J|, variance);  bias <= max|f| E_train[(1 - C/W)_+]

    Assumes no outside mass. The bias falls and the variance grows with C; at C = max W it is
    Seq-IS. Reward units per nat, squared for variances, in [0, inf). Raises ValueError on a
    negative or NaN cap. Source: docs/theory.md#gradients.

    Example:
        >>> from theory.mdp.tree import random_tree
        >>> tree = random_tree(0)
        >>> rows = truncation_sweep(tree, np.ones(tree.sequences), [1.0, 1e9])
        >>> bool(rows[1][1] < 1e-14)
        True
    """
    rows = []
    for cap in np.ravel(checks.divergence("caps", caps)):
        m = estimate(tree, reward, "seq_tis", Settings(ratio_cap=float(cap)))
        rows.append((float(cap), m.bias_j, m.variance))
    return rows


def outlier_bias(
    tree: Tree, reward: ArrayLike, sequence: int, share: float, ratio_cap: float
) -> dict[str, float]:
    """Bias caused by planted outliers: Seq-TIS keeps them with weight C, Seq-MIS drops them.

    a share eta of the batch is one fixed sequence whose recorded weight is far above C although it
    carries no train mass:  added bias = eta C |f| for Seq-TIS, 0 for Seq-MIS

    Assumes the rest of the batch follows the rollout policy (weight 1 - eta). Reward units per nat.

    Args:
        tree: the two policies.
        reward: R per sequence.
        sequence: index of the outlier.
        share: eta in [0, 1].
        ratio_cap: C.

    Returns:
        Norms of E[g] - grad J: keys "seq_tis", "seq_mis", and for the clean batch "seq_tis_clean",
        "seq_mis_clean".

    Raises:
        ValueError: on a share outside [0, 1].

    Source: docs/theory.md#gradients.

    Example:
        >>> from theory.mdp.tree import random_tree
        >>> tree = random_tree(0)
        >>> found = outlier_bias(tree, np.ones(tree.sequences), 5, 0.01, 10.0)
        >>> found["seq_tis"] > found["seq_mis"]
        True
    """
    checks.scalar("share", share, 0, 1)
    r = _reward(tree, reward)
    truth = grad_j(tree, r)
    settings = Settings(ratio_cap=ratio_cap)
    single = np.zeros(tree.sequences)
    single[sequence] = 1.0
    planted = ratio_cap * _mean(tree, single, np.tile(r[:, None], tree.length))
    out = {}
    for name, extra in (("seq_tis", planted), ("seq_mis", np.zeros_like(planted))):
        clean = estimate(tree, r, name, settings).mean
        out[name] = float(np.linalg.norm((1 - share) * clean + share * extra - truth))
        out[f"{name}_clean"] = float(np.linalg.norm(clean - truth))
    return out


def geometric_log_ratio(tree: Tree) -> float:
    """Expected log of the geometric mean ratio.

    E_rollout[log W^{1/T}] = -D_seq / T

    Assumes D_seq finite; it is minus the average ``kl_rollout_train`` per token, never positive. A
    positive sample is fluctuation, not a "negative divergence". Nats.
    Range [-inf, 0].
    Source: docs/theory.md#gradients.

    Example:
        >>> from theory.mdp.tree import random_tree
        >>> tree = random_tree(0)
        >>> bool(np.isclose(geometric_log_ratio(tree), -exact.summary(tree).seq_kl / 4))
        True
    """
    the = exact.law(tree)
    seen = the.p > 0
    with np.errstate(divide="ignore"):
        return float(the.p[seen] @ np.log(the.w[seen])) / tree.length


def ppo_leakage(
    tree: Tree, reward: ArrayLike, clip: float = 0.2, baseline: float = 0.0
) -> tuple[float, float]:
    """Gradient that PPO lets through although the ratio has left the clip range.

    share = sum over tokens outside [1-eps, 1+eps] that still have a gradient of E|A rho_t| / E|A
    rho_t| largest = largest rho_t among them

    Assumes A = R - baseline. The leaking tokens have A < 0 and rho > 1 + eps (weight unbounded) or
    A >= 0 and rho < 1 - eps. Dimensionless, share in [0, 1].

    Args:
        tree: the two policies.
        reward: R per sequence.
        clip: eps.
        baseline: subtracted from the reward.

    Returns:
        (share, largest leaking ratio; 0 when nothing leaks).

    Raises:
        ValueError: on a wrong shape.

    Source: docs/theory.md#gradients.

    Example:
        >>> from theory.mdp.tree import random_tree
        >>> tree = random_tree(0, mismatch=1.0)
        >>> share, largest = ppo_leakage(tree, tree.tokens()[:, 0] == 0, baseline=0.5)
        >>> share > 0.1 and largest > 1.2
        True
    """
    the = exact.law(tree)
    advantage = _reward(tree, reward) - baseline
    rho = _rho(tree)
    kept = _weights(tree, "ppo_clip", advantage, Settings(clip=clip)) > 0
    outside = (np.abs(rho - 1) > clip) & kept & (the.p[:, None] > 0)
    size = the.p[:, None] * np.abs(advantage[:, None]) * rho
    total = float(size.sum())
    share = float(size[outside].sum()) / total if total > 0 else 0.0
    return share, float(rho[outside].max()) if outside.any() else 0.0


@dataclass(frozen=True)
class SignFlip:
    """One logit whose masked gradient points the wrong way.

    Attributes:
        logit: index of the logit in the gradient vector.
        exact: dL'/dz of the full surrogate.
        masked: the same component of E[M g], normalised by all rollouts.
        per_accepted: divided by the acceptance rate, which is another (biased) quantity.
        accepted: acceptance rate.
    """

    logit: int
    exact: float
    masked: float
    per_accepted: float
    accepted: float

    @property
    def opposed(self) -> bool:
        """True when the two have opposite signs; False when no logit does."""
        return self.exact * self.masked < 0


def masked_gradient(tree: Tree, reward: ArrayLike, max_kl: float) -> SignFlip:
    """Compare the masked gradient with the exact one where they disagree most in sign.

    E_rollout[M R sum rho grad log train] against grad L',  M = 1[max_t kl(c_t) <= delta]

    Assumes nothing about which contexts are rejected. The masked mean is an unbiased estimate of
    the gradient of E[M ...], which is neither grad J nor grad L'. Reward units per nat.
    Range (-inf, inf).
    Source: docs/theory.md#gradients; corrects "remains unbiased over the unmasked samples".

    Example:
        >>> from theory.mdp.tree import random_tree
        >>> tree = random_tree(0, 2, 3, mismatch=1.0)
        >>> flip = masked_gradient(tree, tree.tokens()[:, -1], 0.2)
        >>> 0 <= flip.accepted <= 1
        True
    """
    full = grad_surrogate(tree, reward)
    m = estimate(tree, reward, "trm", Settings(max_kl=max_kl))
    opposed = np.where(full * m.mean < 0, np.minimum(np.abs(full), np.abs(m.mean)), -1.0)
    worst = int(np.argmax(opposed))
    rate = m.accepted
    return SignFlip(
        worst,
        float(full[worst]),
        float(m.mean[worst]),
        float(m.mean[worst]) / rate if rate > 0 else 0.0,
        rate,
    )


def product_estimators(
    pair: BernoulliProduct, reward_by_count: ArrayLike, settings: Settings | None = None
) -> dict[str, tuple[float, float, float]]:
    """Every estimator on a product policy with one shared logit, at any length.

    parameter phi with q = sigmoid(phi); reward a function of the number K of ones; O(T) sums
    values (mean, bias against dJ/dphi, variance)

    Assumes 0 < p, q < 1. All contexts share one KL, so token_mask and trm accept all or nothing.
    Reward units per nat.

    Args:
        pair: the two policies.
        reward_by_count: R(K) for K = 0..T.
        settings: thresholds; default ``Settings()``.

    Returns:
        Per estimator (mean, bias, variance).

    Raises:
        ValueError: on a reward of the wrong shape.

    Source: docs/theory.md#gradients.

    Example:
        >>> pair = BernoulliProduct(0.5, 0.52, 50)
        >>> found = product_estimators(pair, np.arange(51) >= 25)
        >>> bool(abs(found["seq_is"][1]) < 1e-12)
        True
    """
    use = settings or Settings()
    t, p, q = pair.length, pair.p, pair.q
    r = np.asarray(reward_by_count, dtype=np.float64)
    if r.shape != (t + 1,):
        raise ValueError(f"reward_by_count must have shape ({t + 1},), got {r.shape}.")
    law = pair.law
    k = np.arange(t + 1.0)
    up, down = q / p, (1 - q) / (1 - p)
    log_w = k * np.log(up) + (t - k) * np.log(down)
    with np.errstate(over="ignore"):
        w = np.exp(log_w)
    score = k * (1 - q) - (t - k) * q

    def tokens(weight_one: ArrayLike, weight_zero: ArrayLike) -> Array:
        one, zero = np.asarray(weight_one, float), np.asarray(weight_zero, float)
        return np.asarray(k * one * (1 - q) - (t - k) * zero * q)

    geo = (log_w >= t * np.log(use.geo_low)) & (log_w <= t * np.log(use.geo_high))
    trusted = float(pair.token["max_kl"] <= use.max_kl)
    cap = use.ratio_cap
    ratio_is = tokens(up, down)
    table = {
        "token_is": ratio_is,
        "ppo_clip": tokens(  # rewards are advantages here; a negative one clips from below
            np.where(np.where(r >= 0, up > 1 + use.clip, up < 1 - use.clip), 0.0, up),
            np.where(np.where(r >= 0, down > 1 + use.clip, down < 1 - use.clip), 0.0, down),
        ),
        "token_mask": trusted * ratio_is,
        "seq_tis": np.minimum(w, cap) * score,
        "seq_mis": np.where(w <= cap, np.minimum(w, cap), 0.0) * score,
        "geo_mask": geo * score,
        "geo_mask_token_tis": geo * tokens(min(up, use.token_cap), min(down, use.token_cap)),
        "trm": trusted * ratio_is,
    }
    truth = float(law.q @ (r * score))
    out = {}
    for name in ESTIMATORS:
        if name == "seq_is":  # P W = Q, and E_rollout[W^2 f^2] = E_train[W f^2]
            mean = truth
            with np.errstate(over="ignore", invalid="ignore"):
                second = float(np.exp(np.log(np.maximum(law.q, 1e-320)) + log_w) @ (r * score) ** 2)
        else:
            g = r * table[name]
            mean, second = float(law.p @ g), float(law.p @ g**2)
        out[name] = (mean, mean - truth, max(second - mean**2, 0.0))
    return out


def token_is_bias_growth(horizons: ArrayLike, eps: float = 1e-6) -> tuple[Array, float]:
    """Growth of Token-IS' bias with length on the rare token, and its exponent.

    J = 1 - (1-q)^T at q = eps, rollout probability to 0:
    dL'/dphi - dJ/dphi = T q (1-q) (1 - (1-q)^{T-1}),  about T^2 eps^2 while T eps << 1

    Assumes reward 1 when the rare token appears at least once, and one shared logit phi. Reward
    units per nat.

    Args:
        horizons: T, several values >= 2.
        eps: probability of the rare token under train.

    Returns:
        Bias per horizon, and the exponent fitted on all of them.

    Raises:
        ValueError: on T < 1 or eps outside [0, 1].

    Source: docs/theory.md#gradients (the quadratic growth that the blog states as O(T^2)).

    Example:
        >>> round(token_is_bias_growth([64, 256, 1024])[1], 2)
        2.01
    """
    t = checks.horizon(horizons).astype(np.float64)
    checks.scalar("eps", eps, 0, 1)
    bias = t * eps * (1 - eps) * -np.expm1((t - 1) * np.log1p(-eps))
    return bias, fit_exponent(t, bias)


def fit_exponent(horizons: ArrayLike, values: ArrayLike) -> float:
    """Least-squares slope in log-log coordinates.

    values ~ constant * T^slope

    Assumes positive values. Dimensionless. Range (-inf, inf).
    Source: ordinary least squares.

    Example:
        >>> round(fit_exponent([1, 10, 100], [2, 200, 20000]), 12)
        2.0
    """
    x, y = np.log(np.asarray(horizons, float)), np.log(np.abs(np.asarray(values, float)))
    return float(np.polyfit(x, y, 1)[0])


def importance_mass(pair: BernoulliProduct, ratio_cap: float) -> tuple[float, float]:
    """What a cap on the sequence ratio accepts, and the importance mass that it keeps.

    accepted = P_rollout(W <= C) >= 1 - 1/C (Markov),  kept = E_rollout[W 1(W <= C)] =
    P_train(W <= C)

    Assumes a product policy. With length nearly everything is accepted and nearly all mass is lost.
    Dimensionless, both in [0, 1].

    Args:
        pair: the two policies with their length.
        ratio_cap: C > 0.

    Returns:
        (accepted, kept).

    Raises:
        ValueError: on C <= 0.

    Source: docs/theory.md#gradients; corrects "almost all long samples are rejected".

    Example:
        >>> accepted, kept = importance_mass(BernoulliProduct(0.5, 0.5224, 5000), 5.0)
        >>> accepted > 0.95 and kept < 0.2
        True
    """
    if not ratio_cap > 0:
        raise ValueError(f"ratio_cap must be > 0, got {ratio_cap}.")
    k = np.arange(pair.length + 1.0)
    log_w = k * np.log(pair.q / pair.p) + (pair.length - k) * np.log((1 - pair.q) / (1 - pair.p))
    kept = log_w <= np.log(ratio_cap)
    return float(pair.law.p[kept].sum()), float(pair.law.q[kept].sum())
