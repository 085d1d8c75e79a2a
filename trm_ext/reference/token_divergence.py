# SPDX-License-Identifier: Apache-2.0
"""Float64 twins of trm::token_divergence and its backward, in plain torch.

Conventions: p log(p/q) is 0 where p = 0; a column that is -inf on both sides does not exist;
rollout > -inf where train = -inf is a support violation (KL = +inf); NaN, +inf or a row with no
finite logit on a side has no value (NaN). Rows outside ``token_mask`` are 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trm_ext import outputs as output_names

INF = float("inf")


def psi(u: Tensor) -> Tensor:
    """The gap u + expm1(-u) >= 0, by its series where |u| <= 1/2."""
    series = torch.ones_like(u)
    for k in range(18, 2, -1):
        series = 1 - series * u / k
    return torch.where(u.abs() <= 0.5, u * u * series / 2, u + torch.expm1(-u))


def tempered(logits: Tensor, temperature: Tensor | None, vocab_size: int) -> Tensor:
    """The real columns over their row's temperature, in float64."""
    logits = logits[..., :vocab_size].detach().double()
    return logits if temperature is None else logits / temperature[..., None]


def difference_error(a: Tensor, b: Tensor, difference: Tensor) -> Tensor:
    """What fl(a - b) lost of a - b, exactly; of finite numbers."""
    b_part = a - difference
    return (a - (difference + b_part)) + (b_part - b)


def log_ratio_in_frame(x: Tensor, y: Tensor, shift: Tensor) -> Tensor:
    """(x - y) - shift with the rounding of x - y restored: one side may lie far from the other."""
    difference = x - y
    return (difference - shift) + difference_error(x, y, difference)


def train_exponent(y: Tensor, m: Tensor | float, shift: Tensor) -> Tensor:
    """The exponent y - m + shift, likewise; -inf where y is."""
    raised = y + shift
    error = difference_error(y, -shift, raised)
    return (raised - m) + torch.where(y > -INF, error, 0.0)


class Row:
    """Log-probabilities, probabilities and log(p/q) of every row, in float64."""

    def __init__(
        self,
        rollout_logits: Tensor,
        train_logits: Tensor,
        rollout_temperature: Tensor | None,
        train_temperature: Tensor | None,
        vocab_size: int,
    ) -> None:
        x = tempered(rollout_logits, rollout_temperature, vocab_size)
        y = tempered(train_logits, train_temperature, vocab_size)
        self.in_rollout = x > -INF
        self.in_train = y > -INF
        bad = ~((x < INF) & (y < INF)).all(-1)
        for temperature in (rollout_temperature, train_temperature):
            if temperature is not None:
                bad = bad | ~((temperature > 0) & (temperature < INF))
        self.undefined = bad | ~self.in_rollout.any(-1) | ~self.in_train.any(-1)
        blank = self.undefined[..., None]
        x, y = x.masked_fill(blank, 0.0), y.masked_fill(blank, 0.0)
        self.logp = torch.log_softmax(x, -1)
        self.logq = torch.log_softmax(y, -1)
        self.p, self.q = self.logp.exp(), self.logq.exp()
        self.frame = _frame(x, y)
        # log(p/q) from the logits' difference and one scalar per row, so that it is as accurate
        # as x - y even where p is 1e-300.
        both = self.in_rollout & self.in_train
        x_both, y_both = x.masked_fill(~both, 0.0), y.masked_fill(~both, 0.0)
        self.both = both
        shift, residual = (part[..., None] for part in self.frame[2:])
        u = log_ratio_in_frame(x_both, y_both, shift)
        self.t = (u - residual).masked_fill(~both, 0.0)
        self.violates = (self.in_rollout & ~self.in_train).any(-1)
        self.outside = (self.in_train & ~self.in_rollout).any(-1)


def _gap(weight: Tensor, other: Tensor, t: Tensor, both: Tensor) -> Tensor:
    """Sum over columns of weight t + other - weight >= 0, termwise non-negative."""
    near = both & (t.abs() <= 0.5)
    term = torch.where(near, weight * psi(t), weight * t + (other - weight))
    return term.sum(-1)


def token_divergence(
    rollout_logits: Tensor,
    train_logits: Tensor,
    tokens: Tensor | None,
    token_mask: Tensor | None,
    rollout_temperature: Tensor | None,
    train_temperature: Tensor | None,
    vocab_size: int,
    outputs: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Values, diagnostics and statistics, as the op returns them, in float64."""
    row = Row(rollout_logits, train_logits, rollout_temperature, train_temperature, vocab_size)
    shape = row.undefined.shape
    found: dict[str, Tensor] = {
        "kl": _gap(row.p, row.q, row.t, row.both).masked_fill(row.violates, INF),
        "kl_train_rollout": _gap(row.q, row.p, -row.t, row.both).masked_fill(row.outside, INF),
        "entropy_rollout": -(row.p * row.logp.masked_fill(~row.in_rollout, 0.0)).sum(-1),
        "entropy_train": -(row.q * row.logq.masked_fill(~row.in_train, 0.0)).sum(-1),
    }
    found |= _diagnostics(row)
    nothing = torch.full(shape, float("nan"), dtype=torch.float64)
    for name in output_names.TOKEN_OUTPUTS:
        found[name] = nothing
    if tokens is not None and vocab_size > 0:
        known = (tokens >= 0) & (tokens < vocab_size)
        index = tokens.clamp(0, vocab_size - 1)[..., None]
        pick = [
            part.gather(-1, index)[..., 0].masked_fill(~known, float("nan"))
            for part in (row.logp, row.logq, row.t, row.both.double())
        ]
        found["logp_rollout"], found["logp_train"] = pick[0], pick[1]
        found["log_ratio"] = torch.where(pick[3] == 1, -pick[2], pick[1] - pick[0])
    values, diagnostics = (
        _stacked([found[name] for name in names], row.undefined)
        for names in (
            output_names.decode(outputs & output_names.VALUE_BITS),
            output_names.decode(outputs & ~output_names.VALUE_BITS),
        )
    )
    asked = set(output_names.decode(outputs))
    entropies = {"entropy_rollout", "entropy_train"}
    carried = {"kl"} | asked & {"kl_train_rollout"} | (entropies if asked & entropies else set())
    full = [found[name] if name in carried else nothing for name in output_names.OUTPUTS[:4]]
    statistics = torch.stack([*row.frame, *full], -1)
    statistics = statistics.masked_fill(row.undefined[..., None], float("nan"))
    if token_mask is not None:
        values = values.masked_fill(~token_mask, 0.0)
        diagnostics = diagnostics.masked_fill(~token_mask, 0.0)
        statistics = statistics.masked_fill(~token_mask[..., None], 0.0)
    return values, diagnostics, statistics


def _stacked(rows: list[Tensor], undefined: Tensor) -> Tensor:
    if not rows:
        return torch.empty((0, *undefined.shape), dtype=torch.float64)
    return torch.stack([value.masked_fill(undefined, float("nan")) for value in rows])


def _diagnostics(row: Row) -> dict[str, Tensor]:
    """The second sweep's outputs, termwise without cancellation."""
    p, q, t = row.p, row.q, row.t
    near = row.both & (t.abs() <= 0.5)
    step = torch.where(near, torch.expm1(-t), 0.0)
    half = torch.where(near, torch.expm1(-t / 2), 0.0)
    logp, logq = row.logp.masked_fill(~row.both, 0.0), row.logq.masked_fill(~row.both, 0.0)
    square = torch.where(row.both, torch.exp(2 * logq - logp) - 2 * q + p, p)
    root = torch.where(row.both, torch.exp((logp + logq) / 2), 0.0)
    outside = torch.where(row.in_rollout, 0.0, q).sum(-1)
    chi2 = torch.where(near, p * step * step, torch.where(row.in_rollout, square, 0.0)).sum(-1)
    if t.shape[-1] == 0:
        largest = t.new_full(t.shape[:-1], -INF)
    else:
        largest = torch.where(row.both, -t, -INF).amax(-1)
    return {
        "tv": torch.where(near, p * step.abs(), (p - q).abs()).sum(-1) / 2,
        "chi2": chi2 - 2 * outside,
        "bhattacharyya": torch.where(near, p * half * half, p + q - 2 * root).sum(-1) / 2,
        "max_log_ratio": largest,
        "outside_mass": outside,
    }


def _frame(x: Tensor, y: Tensor) -> list[Tensor]:
    """M, log S, c, residual in the frame of the two maxima."""
    if x.shape[-1] == 0:
        return [x.new_full(x.shape[:-1], float("nan"))] * 4
    m, n = x.amax(-1), y.amax(-1)
    shift = m - n
    log_mass, log_train = (torch.logsumexp(z - z.amax(-1, keepdim=True), -1) for z in (x, y))
    return [m, log_mass, shift, (log_mass - log_train) + difference_error(m, n, shift)]


def token_divergence_backward(
    grad_values: Tensor,
    rollout_logits: Tensor,
    train_logits: Tensor,
    statistics: Tensor,
    tokens: Tensor | None,
    token_mask: Tensor | None,
    rollout_temperature: Tensor | None,
    train_temperature: Tensor | None,
    vocab_start: int,
    vocab_size: int,
    outputs: int,
    want_rollout: bool,
    want_train: bool,
) -> tuple[Tensor, Tensor]:
    """Gradients of both logits in float64; rows with zero upstream gradient are exactly 0."""
    x = tempered(rollout_logits, rollout_temperature, vocab_size)
    y = tempered(train_logits, train_temperature, vocab_size)
    m, log_mass, shift, residual, *full = (s[..., None] for s in statistics.double().unbind(-1))
    value = dict(zip(output_names.OUTPUTS, full, strict=False))
    in_rollout, in_train = x > -INF, y > -INF
    both = in_rollout & in_train
    logp = (x - m) - log_mass
    logq = train_exponent(y, m, shift) + residual - log_mass
    p, q = logp.exp(), logq.exp()
    t = torch.where(both, log_ratio_in_frame(x, y, shift) - residual, 0.0)
    q_minus_p = torch.where(both & (t.abs() <= 0.5), p * torch.expm1(-t), q - p)
    logp, logq = logp.masked_fill(~in_rollout, 0.0), logq.masked_fill(~in_train, 0.0)
    hot = torch.zeros_like(p)
    if tokens is not None:
        column = tokens - vocab_start
        inside = (column >= 0) & (column < vocab_size)
        if vocab_size:
            hot.scatter_(-1, column.clamp(0, vocab_size - 1)[..., None], inside[..., None].double())
    d_rollout, d_train = torch.zeros_like(p), torch.zeros_like(p)
    live = torch.zeros(p.shape[:-1], dtype=torch.bool)
    for slot, name in enumerate(output_names.decode(outputs & output_names.VALUE_BITS)):
        g = grad_values[slot].double()[..., None]
        v = value.get(name, g)
        live |= g[..., 0] != 0
        if name == "kl":
            d_rollout += torch.where(in_rollout & (g != 0), g * p * (t - v), 0.0)
            d_train += g * q_minus_p
        elif name == "kl_train_rollout":
            d_rollout -= g * q_minus_p
            d_train += torch.where(in_train & (g != 0), g * q * (-t - v), 0.0)
        elif name == "entropy_rollout":
            d_rollout -= torch.where(in_rollout, g * p * (logp + v), 0.0)
        elif name == "entropy_train":
            d_train -= torch.where(in_train, g * q * (logq + v), 0.0)
        elif name == "logp_rollout":
            d_rollout += g * (hot - p)
        elif name == "logp_train":
            d_train += g * (hot - q)
        elif name == "log_ratio":
            d_rollout -= g * (hot - p)
            d_train += g * (hot - q)
    if token_mask is not None:
        live &= token_mask
    nowhere = ~(in_rollout | in_train) & ~torch.isnan(log_mass)
    pad = (0, rollout_logits.shape[-1] - vocab_size)
    result = []
    for wanted, gradient, temperature in (
        (want_rollout, d_rollout, rollout_temperature),
        (want_train, d_train, train_temperature),
    ):
        if temperature is not None:
            gradient = gradient / temperature[..., None]
        gradient = torch.where(live[..., None], gradient.masked_fill(nowhere, 0.0), 0.0)
        gradient = torch.nn.functional.pad(gradient, pad)
        result.append(gradient if wanted else gradient.new_empty(0))
    return result[0], result[1]
