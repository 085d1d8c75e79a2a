# SPDX-License-Identifier: Apache-2.0
"""The derivations behind the formulas, done by sympy and run as tests.

Each function returns named residuals, expressions that must simplify to zero; :func:`verify`
checks all of them. sympy is an optional dependency and imported when a function is called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = [
    "DERIVATIONS",
    "estimator_expectations",
    "finite_sums",
    "gaussian_noise",
    "hazard_limit",
    "is_zero",
    "kernel_state",
    "one_logit_shift",
    "pathwise_k3",
    "performance_difference",
    "seq_kl",
    "verify",
]

Residuals = dict[str, Any]


def _sympy() -> Any:
    try:
        import sympy
    except ImportError as missing:  # pragma: no cover - depends on the installation
        raise ImportError("theory.symbolic needs sympy; install the 'symbolic' extra.") from missing
    return sympy


def is_zero(expression: Any) -> bool:
    """Decide whether an expression is identically zero.

    simplify(expand_log(expand(e))) == 0

    Assumes nothing; a False may also mean that sympy could not show it. Source: sympy.

    Example:
        >>> x = _sympy().Symbol("x", positive=True)
        >>> is_zero((x + 1) ** 2 - x**2 - 2 * x - 1), is_zero(x - 1)
        (True, False)
    """
    sympy = _sympy()
    if expression == 0:
        return True
    once = sympy.expand(sympy.expand_log(sympy.sympify(expression), force=True))
    if once == 0:
        return True
    return bool(sympy.simplify(sympy.expand_log(sympy.simplify(once), force=True)) == 0)


def _two_step_tree() -> Any:
    """Symbols of a binary two-step tree: policies, reward, and every derived quantity."""
    sympy = _sympy()
    p, q = sympy.symbols("p:3", positive=True), sympy.symbols("q:3", positive=True)
    r = sympy.symbols("R00 R01 R10 R11")

    def law(s: Any) -> list[Any]:
        first, after = (1 - s[0], s[0]), ((1 - s[1], s[1]), (1 - s[2], s[2]))
        return [first[i] * after[i][j] for i in (0, 1) for j in (0, 1)]

    def steps(s: Any) -> Any:
        return (1 - s[0], s[0]), ((1 - s[1], s[1]), (1 - s[2], s[2]))

    return p, q, r, law, steps


def performance_difference() -> Residuals:
    """Performance-difference identity and the error's identities on a symbolic two-step tree.

    J(train) - J(rollout) - L' = I1 = I2 = E_rollout[R (W - 1 - S)]

    Assumes binary tokens and T = 2, where every sum is written out. Reward units.
    Source: Kakade and Langford 2002; docs/theory.md#identities.

    Example:
        >>> all(is_zero(e) for e in performance_difference().values())
        True
    """
    p, q, r, law, steps = _two_step_tree()
    probability, train = law(p), law(q)
    (p1, p2), (q1, q2) = steps(p), steps(q)
    j_roll = sum(a * b for a, b in zip(probability, r, strict=True))
    j_train = sum(a * b for a, b in zip(train, r, strict=True))
    index = [(i, j) for i in (0, 1) for j in (0, 1)]
    s = [q1[i] / p1[i] - 1 + q2[i][j] / p2[i][j] - 1 for i, j in index]
    surrogate = sum(a * b * c for a, b, c in zip(probability, r, s, strict=True))
    error = j_train - j_roll - surrogate
    value_roll = [sum(p2[i][j] * r[2 * i + j] for j in (0, 1)) for i in (0, 1)]
    value_train = [sum(q2[i][j] * r[2 * i + j] for j in (0, 1)) for i in (0, 1)]
    g_first = sum((q1[i] - p1[i]) * value_roll[i] for i in (0, 1))
    g_second = [sum((q2[i][j] - p2[i][j]) * r[2 * i + j] for j in (0, 1)) for i in (0, 1)]
    forward = sum((q1[i] - p1[i]) * g_second[i] for i in (0, 1))
    backward = sum((q1[i] - p1[i]) * (value_train[i] - value_roll[i]) for i in (0, 1))
    measure = sum(
        a * b * (t / a - 1 - c) for a, b, t, c in zip(probability, r, train, s, strict=True)
    )
    difference = g_first + sum(q1[i] * g_second[i] for i in (0, 1))
    return {
        "performance difference": j_train - j_roll - difference,
        "I1": error - forward,
        "I2": error - backward,
        "I4": error - measure,
        "E[Z] = 0": sum(a * (t / a - 1 - c) for a, t, c in zip(probability, train, s, strict=True)),
    }


def pathwise_k3(length: int = 4) -> Residuals:
    """The pathwise identity behind SeqKL.

    W - 1 - S = k3(W) - sum_t k3(rho_t),  k3(x) = x - 1 - log x,  and both sides' martingale form
    W - 1 - S = sum_t (W_{t-1} - 1)(rho_t - 1)

    Assumes rho_t > 0. Source: ours, docs/theory.md#k3.

    Example:
        >>> all(is_zero(e) for e in pathwise_k3(3).values())
        True
    """
    sympy = _sympy()
    rho = sympy.symbols(f"rho1:{length + 1}", positive=True)

    def k3(x: Any) -> Any:
        return x - 1 - sympy.log(x)

    w, prefix, martingale = sympy.Integer(1), sympy.Integer(1), sympy.Integer(0)
    for x in rho:
        martingale += (prefix - 1) * (x - 1)
        prefix *= x
    w = prefix
    s = sum(x - 1 for x in rho)
    return {
        "k3": w - 1 - s - (k3(w) - sum(k3(x) for x in rho)),
        "martingale": w - 1 - s - martingale,
    }


def seq_kl() -> Residuals:
    """Both means of the pathwise identity are D_seq, so |E[R Z]| <= D_seq in one line.

    E[k3(W)] = E[sum k3(rho_t)] = KL(P||Q) = sum_t E[KL(c_t)];
    0 <= k3 and 0 <= R <= 1 give  -D_seq <= -E[R sum k3] <= E[R Z] <= E[R k3(W)] <= D_seq

    Assumes a two-step binary tree. Direction ``kl_rollout_train``, nats. The last residual
    checks that the two signed parts of the bound add up to Z itself.
    Source: ours, docs/theory.md#seqkl.

    Example:
        >>> all(is_zero(e) for e in seq_kl().values())
        True
    """
    sympy = _sympy()
    p, q, _, law, steps = _two_step_tree()
    probability, train = law(p), law(q)
    (p1, p2), (q1, q2) = steps(p), steps(q)
    # Free positive symbols for the logarithms' arguments keep sympy from branching.
    l1 = [sympy.log(p1[i]) - sympy.log(q1[i]) for i in (0, 1)]
    l2 = [[sympy.log(p2[i][j]) - sympy.log(q2[i][j]) for j in (0, 1)] for i in (0, 1)]
    chain = sum(p1[i] * l1[i] for i in (0, 1)) + sum(
        p1[i] * p2[i][j] * l2[i][j] for i in (0, 1) for j in (0, 1)
    )
    index = [(i, j) for i in (0, 1) for j in (0, 1)]
    w = [t / a for t, a in zip(train, probability, strict=True)]
    k3_w = [x - 1 + l1[i] + l2[i][j] for x, (i, j) in zip(w, index, strict=True)]
    k3_sum = [q1[i] / p1[i] - 1 + l1[i] + q2[i][j] / p2[i][j] - 1 + l2[i][j] for i, j in index]
    z = [
        x - 1 - (q1[i] / p1[i] - 1) - (q2[i][j] / p2[i][j] - 1)
        for x, (i, j) in zip(w, index, strict=True)
    ]
    mean_w = sum(a * b for a, b in zip(probability, k3_w, strict=True))
    mean_sum = sum(a * b for a, b in zip(probability, k3_sum, strict=True))
    return {
        "E[k3(W)] = D_seq": mean_w - chain,
        "E[sum k3(rho)] = D_seq": mean_sum - chain,
        "Z = k3(W) - sum k3": sum(
            (a - b - c) ** 2 for a, b, c in zip(k3_w, k3_sum, z, strict=True)
        ),
    }


def finite_sums() -> Residuals:
    """The sums over positions behind the printed constants.

    4 eps^2 sum_{t<=T} (t-1) = 2 T (T-1) eps^2, which is T (T-1) delta at eps^2 = delta/2
    4 (delta/2) integral_0^T sqrt(x) dx = (4/3) T^{3/2} delta
    sum_t X ((1+X)^{t-1} - 1) = (1+X)^T - 1 - T X

    Assumes T a positive integer. Units as in ``theory.bounds``.
    Source: docs/theory.md#finite-sums.

    Example:
        >>> all(is_zero(e) for e in finite_sums().values())
        True
    """
    sympy = _sympy()
    length, t = sympy.symbols("T t", integer=True, positive=True)
    eps, delta, x, y = sympy.symbols("epsilon delta X y", positive=True)
    classical = 4 * eps**2 * sympy.summation(t - 1, (t, 1, length))
    integral = 4 * (delta / 2) * sympy.integrate(sympy.sqrt(y), (y, 0, length))
    geometric = sympy.summation((1 + x) ** (t - 1), (t, 1, length))
    if isinstance(geometric, sympy.Piecewise):
        geometric = geometric.args[-1][0]
    return {
        "classical": classical - 2 * length * (length - 1) * eps**2,
        "classical with Pinsker": classical.subs(eps, sympy.sqrt(delta / 2))
        - length * (length - 1) * delta,
        "pinsker-marginal": integral
        - sympy.Rational(4, 3) * length ** sympy.Rational(3, 2) * delta,
        "chi-square": sympy.simplify(
            x * (geometric - length) - ((1 + x) ** length - 1 - length * x)
        ),
    }


def kernel_state(tokens: int = 2) -> Residuals:
    """Move, merge and finish identities of a one-pass KL state.

    u = (x - y) - c, w = e^{x-M}, psi(u) = u + e^{-u} - 1, S = sum w, A = sum w u, G = sum w psi(u):
    finish  KL = G/S - (b - log(1 + b)), b = (G - A)/S;  move to (M', c'), k = e^{M-M'}, D = c' - c,
    e = e^D - 1:  S' = k S,  A' = k (A - D S),  G' = k (G + e (G - A) + (e - D) S);
    merge   K = K1 + K2 + P1 psi(u1) + P2 psi(u2), u_i = log(P_i/Q_i) - log(P/Q)  (K = P KL within)

    Assumes real logits. KL: ``kl_rollout_train``, nats, with rollout logits x and train logits y.
    Source: ours, docs/theory.md#kernel-state.

    Example:
        >>> all(is_zero(e) for e in kernel_state().values())
        True
    """
    sympy = _sympy()
    x, y = sympy.symbols(f"x:{tokens}", real=True), sympy.symbols(f"y:{tokens}", real=True)
    m, m_new, c, c_new = sympy.symbols("M M' c c'", real=True)

    def psi(u: Any) -> Any:
        return u + sympy.exp(-u) - 1

    def state(top: Any, shift: Any) -> tuple[Any, Any, Any]:
        u = [a - b - shift for a, b in zip(x, y, strict=True)]
        w = [sympy.exp(a - top) for a in x]
        return (
            sum(w),
            sum(i * j for i, j in zip(w, u, strict=True)),
            sum(i * psi(j) for i, j in zip(w, u, strict=True)),
        )

    s, a, g = state(m, c)
    s_new, a_new, g_new = state(m_new, c_new)
    k, d = sympy.exp(m - m_new), c_new - c
    e = sympy.exp(d) - 1
    # Finish: 1 + b = e^{c} sum e^y / sum e^x, written with positive symbols for the two totals.
    p_total, q_total, cross = sympy.symbols("P Q C", positive=True)  # sums of e^x, e^y, e^x (x-y)
    b = (q_total * sympy.exp(c) - p_total) / p_total
    finish_g = (cross - c * p_total + q_total * sympy.exp(c) - p_total) / p_total
    log_one_plus_b = c + sympy.log(q_total) - sympy.log(p_total)
    kl = cross / p_total - sympy.log(p_total) + sympy.log(q_total)
    # Merge: two groups with masses P_i, Q_i and inner sums K_i = C_i - P_i log(P_i / Q_i).
    p1, p2, q1, q2, k1, k2 = sympy.symbols("P1 P2 Q1 Q2 K1 K2", positive=True)
    p, q = p1 + p2, q1 + q2
    whole = (
        k1
        + p1 * (sympy.log(p1) - sympy.log(q1))
        + k2
        + p2 * (sympy.log(p2) - sympy.log(q2))
        - p * (sympy.log(p) - sympy.log(q))
    )
    u = [
        sympy.log(p1) - sympy.log(q1) - sympy.log(p) + sympy.log(q),
        sympy.log(p2) - sympy.log(q2) - sympy.log(p) + sympy.log(q),
    ]
    inverse = [q1 * p / (p1 * q), q2 * p / (p2 * q)]  # e^{-u_i}
    merged = k1 + k2 + p1 * (u[0] + inverse[0] - 1) + p2 * (u[1] + inverse[1] - 1)
    return {
        "move S": sympy.simplify(s_new - k * s),
        "move A": sympy.simplify(a_new - k * (a - d * s)),
        "move G": sympy.simplify(sympy.expand(g_new - k * (g + e * (g - a) + (e - d) * s))),
        "finish": finish_g - (b - log_one_plus_b) - kl,
        "b from the state": sympy.simplify(
            sympy.expand(
                (g - a) - sum(sympy.exp(j - m + c) for j in y) + sum(sympy.exp(i - m) for i in x)
            )
        ),
        "merge": sympy.simplify(whole - merged),
    }


def estimator_expectations() -> Residuals:
    """Means of the sampled-token estimators under the rollout policy.

    E[k1] = E[-log rho] = KL,  E[k3] = E[rho - 1 - log rho] = KL,  E[-log rho + lam (rho - 1)] = KL,
    and the form (1/rho - 1) + log rho has mean chi2(rollout||train) - KL instead

    Assumes binary tokens, rollout p and train q. KL: ``kl_rollout_train``, nats.
    Source: Schulman 2020; ours for the last two, docs/theory.md#corrections.

    Example:
        >>> all(is_zero(e) for e in estimator_expectations().values())
        True
    """
    sympy = _sympy()
    p, q, lam = sympy.symbols("p q lambda", positive=True)
    roll, train = (p, 1 - p), (q, 1 - q)
    log_rho = [sympy.log(b) - sympy.log(a) for a, b in zip(roll, train, strict=True)]
    rho = [b / a for a, b in zip(roll, train, strict=True)]
    kl = sum(-a * b for a, b in zip(roll, log_rho, strict=True))

    def mean(values: list[Any]) -> Any:
        return sum(a * b for a, b in zip(roll, values, strict=True))

    chi2 = sum(a * a / b for a, b in zip(roll, train, strict=True)) - 1
    return {
        "k1": mean([-x for x in log_rho]) - kl,
        "k3": mean([r - 1 - x for r, x in zip(rho, log_rho, strict=True)]) - kl,
        "every lambda": mean([-x + lam * (r - 1) for r, x in zip(rho, log_rho, strict=True)]) - kl,
        "inverted k3": mean([1 / r - 1 + x for r, x in zip(rho, log_rho, strict=True)])
        - (chi2 - kl),
    }


def one_logit_shift() -> Residuals:
    """Closed forms of the one-logit shift, from the definitions.

    q = p e^s / (1 + p (e^s - 1)), the rest scaled by e^{-G}, G = log(1 + p (e^s - 1))

    Assumes the other tokens in one group, which is exact because their ratios agree. Nats.
    Source: ours, docs/theory.md#families; the formulas of ``theory.families.OneLogitShift``.

    Example:
        >>> all(is_zero(e) for e in one_logit_shift().values())
        True
    """
    sympy = _sympy()
    p, t = sympy.symbols("p t", positive=True)  # t = e^{s/2}
    s = 2 * sympy.log(t)
    total = 1 + p * (t**2 - 1)
    g = sympy.log(total)
    q, rest, root = p * t**2 / total, (1 - p) / total, sympy.sqrt(total)
    log_q = s - g  # log(q/p)
    return {
        "normalised": q + rest - 1,
        "kl_rollout_train": (-p * log_q + (1 - p) * g) - (g - p * s),
        "kl_train_rollout": (q * log_q - rest * g) - (q * s - g),
        "chi2": (q**2 / p + rest**2 / (1 - p) - 1) - ((1 + p * (t**4 - 1)) / total**2 - 1),
        "chi2 from tv": (q**2 / p + rest**2 / (1 - p) - 1) - (q - p) ** 2 / (p * (1 - p)),
        # sqrt(q/p) = t / sqrt(total) and sqrt(rest/(1-p)) = 1 / sqrt(total): squares compared.
        "bc": (p * t / root + (1 - p) / root) - (1 + p * (t - 1)) / root,
        "bc, first root": (t / root) ** 2 - q / p,
        "bc, second root": (1 / root) ** 2 - rest / (1 - p),
        "tv": (q - p) - p * (1 - p) * (t**2 - 1) / total,
    }


def gaussian_noise() -> Residuals:
    """Divergences of flat logits with Gaussian noise, and the constant of the product policy.

    u = e^{sigma x - sigma^2/2}, x normal:  E[-log u] = sigma^2/2,  E[u log u] = sigma^2/2,
    E[u^2] - 1 = e^{sigma^2} - 1,  E[sqrt u] = e^{-sigma^2/8};  (1/2) E|N^2 - 1| = sqrt(2/pi)
    e^{-1/2}

    Assumes V to infinity. Nats. Source: ours, docs/theory.md#families and #scaling.

    Example:
        >>> all(is_zero(e) for e in gaussian_noise().values())
        True
    """
    sympy = _sympy()
    x = sympy.Symbol("x", real=True)
    sigma = sympy.Symbol("sigma", positive=True)
    density = sympy.exp(-(x**2) / 2) / sympy.sqrt(2 * sympy.pi)

    def mean(f: Any) -> Any:
        return sympy.integrate(sympy.expand(f * density), (x, -sympy.oo, sympy.oo))

    def tilted(power: Any, factor: Any) -> Any:
        """E[u^power factor(x)] by completing the square: x -> x + power sigma."""
        shift = sympy.exp(power * (power - 1) * sigma**2 / 2)
        return shift * mean(factor.subs(x, x + power * sigma))

    log_u = sigma * x - sigma**2 / 2
    half_second = sympy.integrate((x**2 - 1) * density, (x, 1, sympy.oo))
    return {
        "kl_rollout_train": mean(-log_u) - sigma**2 / 2,
        "kl_train_rollout": tilted(sympy.Integer(1), log_u) - sigma**2 / 2,
        "chi2": tilted(sympy.Integer(2), sympy.Integer(1) + 0 * x) - sympy.exp(sigma**2),
        "bc": tilted(sympy.Rational(1, 2), sympy.Integer(1) + 0 * x) - sympy.exp(-(sigma**2) / 8),
        "0.4839": 2 * half_second - sympy.sqrt(2 / sympy.pi) * sympy.exp(-sympy.Rational(1, 2)),
    }


def hazard_limit() -> Residuals:
    """Limit of the hazard family's error at fixed total hazard.

    (1-a'/T)^T - (1-a/T)^T + (a'-a)(1-a/T)^{T-1}  ->  e^{-a'} - e^{-a} + (a'-a) e^{-a}

    Assumes rates a, a' > 0. Reward units. Source: ours, docs/theory.md#scaling.

    Example:
        >>> all(is_zero(e) for e in hazard_limit().values())
        True
    """
    sympy = _sympy()
    a, a_train, length = sympy.symbols("a a' T", positive=True)
    error = (
        (1 - a_train / length) ** length
        - (1 - a / length) ** length
        + (a_train - a) * (1 - a / length) ** (length - 1)
    )
    limit = sum(
        sympy.limit(term, length, sympy.oo) for term in sympy.expand(error).as_ordered_terms()
    )
    wanted = sympy.exp(-a_train) - sympy.exp(-a) + (a_train - a) * sympy.exp(-a)
    return {"hazard": limit - wanted}


DERIVATIONS: dict[str, Callable[[], Residuals]] = {
    "performance_difference": performance_difference,
    "pathwise_k3": pathwise_k3,
    "seq_kl": seq_kl,
    "finite_sums": finite_sums,
    "kernel_state": kernel_state,
    "estimator_expectations": estimator_expectations,
    "one_logit_shift": one_logit_shift,
    "gaussian_noise": gaussian_noise,
    "hazard_limit": hazard_limit,
}


def verify() -> dict[str, bool]:
    """Run every derivation.

    {"derivation: identity": residual is identically zero}

    Assumes sympy is installed. Source: the functions of this module.

    Example:
        >>> list(DERIVATIONS)[0]
        'performance_difference'
    """
    return {
        f"{name}: {identity}": is_zero(residual)
        for name, derive in DERIVATIONS.items()
        for identity, residual in derive().items()
    }
