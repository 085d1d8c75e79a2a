# SPDX-License-Identifier: Apache-2.0
"""Float64 twins of the pair state: its definition as sums over a shard, its merge, its finish.

Columns (version 1): M, c, Sn, An, Gn, Sf, Af, Qf, flags, R, E, Y, x_token, y_token; the meaning of
each is written at the top of ``csrc/include/trm/divergence_state.h``.
"""

from __future__ import annotations

import math
from fractions import Fraction

import torch
from torch import Tensor

from trm_ext import outputs as output_names
from trm_ext.reference.token_divergence import (
    INF,
    log_ratio_in_frame,
    psi,
    tempered,
    train_exponent,
)

HAS_ROLLOUT, HAS_TRAIN, NON_FINITE, VIOLATES, OUTSIDE, HAS_TOKEN, TRAIN_GAP, ENTROPY = (
    1 << bit for bit in range(8)
)
CARRIES = TRAIN_GAP | ENTROPY


def _carried(outputs: int) -> int:
    names = output_names.decode(outputs)
    train_gap = TRAIN_GAP if "kl_train_rollout" in names else 0
    entropy = ENTROPY if {"entropy_rollout", "entropy_train"} & set(names) else 0
    return train_gap | entropy


def _frame(max_rollout: float, max_train: float) -> tuple[float, float]:
    if max_rollout == -INF and max_train == -INF:
        return 0.0, 0.0
    if max_rollout == -INF:
        return max_train, 0.0
    if max_train == -INF:
        return max_rollout, 0.0
    return max_rollout, max_rollout - max_train


def _state_of(x: Tensor, y: Tensor, column: int, carried: int) -> list[float]:
    """State of one row's shard; x and y are float64 [V], column is the token's or -1."""
    bad = ~((x < INF) & (y < INF))
    token = (float(x[column]), float(y[column])) if column >= 0 else (0.0, 0.0)
    flags = carried | (HAS_TOKEN if column >= 0 else 0) | (NON_FINITE if bool(bad.any()) else 0)
    finite_x, finite_y = x[(x > -INF) & (x < INF)], y[(y > -INF) & (y < INF)]
    m, c = _frame(
        float(finite_x.max()) if len(finite_x) else -INF,
        float(finite_y.max()) if len(finite_y) else -INF,
    )
    flags |= (HAS_ROLLOUT if len(finite_x) else 0) | (HAS_TRAIN if len(finite_y) else 0)
    x, y = x[~bad], y[~bad]
    in_x, in_y = x > -INF, y > -INF
    flags |= VIOLATES if bool((in_x & ~in_y).any()) else 0
    flags |= OUTSIDE if bool((in_y & ~in_x).any()) else 0
    both = in_x & in_y
    shift = torch.tensor(c, dtype=torch.float64)
    u = torch.where(both, log_ratio_in_frame(x, y, shift), 0.0)
    log_e = train_exponent(y, m, shift)
    w, e = torch.exp(x - m), torch.exp(log_e)
    near = both & (u.abs() <= 0.5)
    far = ~near
    log_w, log_e = torch.where(in_x, x - m, 0.0), torch.where(in_y, log_e, 0.0)
    chi = torch.where(near, w * (u * u - psi(u) * (1 + u)), w - e * (1 + u))
    chi = torch.where(in_x, chi, 0.0)
    return [
        m,
        c,
        float(w[near].sum()),
        float((w * u)[near].sum()),
        float((w * psi(u))[near].sum()),
        float(w[far].sum()),
        float((w * u)[far & both].sum()),
        float(e[far].sum()),
        float(flags),
        float(chi.sum()) if carried & TRAIN_GAP else 0.0,
        float((w * log_w).sum()) if carried & ENTROPY else 0.0,
        float((e * log_e).sum()) if carried & ENTROPY else 0.0,
        *token,
    ]


def divergence_state(
    rollout_shard: Tensor,
    train_shard: Tensor,
    tokens: Tensor | None,
    token_mask: Tensor | None,
    rollout_temperature: Tensor | None,
    train_temperature: Tensor | None,
    vocab_start: int,
    vocab_size: int,
    outputs: int,
) -> Tensor:
    """State of a shard in the frame of its own maxima; float64 [*lead, 14]."""
    lead = rollout_shard.shape[:-1]
    x = tempered(rollout_shard, rollout_temperature, vocab_size).flatten(0, -2)
    y = tempered(train_shard, train_temperature, vocab_size).flatten(0, -2)
    count = int(torch.tensor(lead).prod())
    columns = torch.full((count,), -1)
    if tokens is not None:
        columns = tokens.reshape(-1) - vocab_start
        columns = torch.where((columns >= 0) & (columns < vocab_size), columns, -1)
    kept = torch.ones(count, dtype=torch.bool) if token_mask is None else token_mask.reshape(-1)
    carried = _carried(outputs)
    empty = torch.empty(0, dtype=torch.float64)
    rows = [
        _state_of(x[i], y[i], int(columns[i]), carried)
        if bool(kept[i])
        else _state_of(empty, empty, -1, carried)
        for i in range(count)
    ]
    return torch.tensor(rows, dtype=torch.float64).reshape(*lead, 14)


def _moved(s: list[float], m: float, c: float) -> list[float]:
    """The state re-expressed in frame (m, c): every sum rewritten through exp(M-M'), exp(c'-c)."""
    flags = int(s[8])
    drop, turn = torch.tensor([s[0] - m, c - s[1]], dtype=torch.float64)
    train_drop = float(sum(map(Fraction, (s[0], -m, c, -s[1]))))  # huge ones leave little of it
    k = float(torch.exp(drop)) if flags & HAS_ROLLOUT else 0.0
    k_train = math.exp(train_drop) if flags & HAS_TRAIN else 0.0
    d, fall = float(turn), float(drop)
    _, _, sn, an, gn, sf, af, qf, _, r, e, y, xt, yt = s
    near_train, mass = sn + gn - an, sn + sf
    train = near_train + qf
    both = flags & HAS_ROLLOUT and flags & HAS_TRAIN
    if both:
        near_first, far_first = k * (an - d * sn), k * (af - d * sf)
        gap = float(psi(-turn))
        near_gap = k * (gn + (d + gap) * (gn - an) + gap * sn)
        bend = float(turn * turn - psi(-turn) * (1 - turn)) * k
        if abs(d) > 0.5:
            near_gap = k_train * near_train - k * sn + near_first
            bend = k_train * (d - 1) + k
        r = k_train * (r + d * ((gn - an) + (qf - sf))) + mass * bend
        an, af, gn = near_first, far_first, near_gap
        if abs(d) > 1:  # what was near is far
            sn, an, gn, sf, af, qf = 0.0, 0.0, 0.0, mass, an + af, train
    else:
        r *= k
    e = k * (e + fall * mass)
    y = k_train * (y + train_drop * train)
    return [m, c, k * sn, an, gn, k * sf, af, k_train * qf, s[8], r, e, y, xt, yt]


def _merged(a: list[float], b: list[float]) -> list[float]:
    flag_a, flag_b = int(a[8]), int(b[8])
    m, c = _frame(
        max(s[0] if f & HAS_ROLLOUT else -INF for s, f in ((a, flag_a), (b, flag_b))),
        max(s[0] - s[1] if f & HAS_TRAIN else -INF for s, f in ((a, flag_a), (b, flag_b))),
    )
    a, b = _moved(a, m, c), _moved(b, m, c)
    flags = ((flag_a | flag_b) & ~CARRIES) | (flag_a & flag_b & CARRIES)
    token = a[12:] if flag_a & HAS_TOKEN else b[12:]
    total = [u + v for u, v in zip(a, b, strict=True)]
    return [m, c, *total[2:8], float(flags), *total[9:12], *token]


def divergence_state_merge(states: Tensor) -> Tensor:
    """States [parts, *lead, 14] merged in order of the parts; float64."""
    parts = states.double().reshape(states.shape[0], -1, 14).tolist()
    merged = parts[0]
    for part in parts[1:]:
        merged = [_merged(a, b) for a, b in zip(merged, part, strict=True)]
    return torch.tensor(merged, dtype=torch.float64).reshape(states.shape[1:])


def divergence_finish(state: Tensor, outputs: int) -> tuple[Tensor, Tensor]:
    """Values and statistics of whole rows from their states; float64."""
    m, c, sn, an, gn, sf, af, qf, flags, r, e, y, xt, yt = state.double().unbind(-1)
    flag = flags.long()

    def has(bit: int) -> Tensor:
        return (flag & bit) != 0

    mass, train = sn + sf, sn + gn - an + qf
    b = ((gn - an) + (qf - sf)) / mass
    gain = torch.where(b.abs() > 0.5, torch.log(train / mass), torch.log1p(b))
    # b - log1p(b) = psi(log1p(b)) since b = expm1(log1p(b)); likewise (1+b) log1p(b) - b.
    lost = torch.expm1(gain) - gain
    lost = torch.where(gain.abs() <= 0.5, psi(-gain), lost)
    bent = (1 + b) * gain - b
    bent = torch.where(gain.abs() <= 0.5, gain * gain - psi(-gain) * (1 - gain), bent)
    kl = (gn + (qf - sf + af)) / mass - lost
    kl = torch.where(b.abs() > 0.5, (an + af) / mass + gain, kl)
    other = (r / mass - bent) / (1 + b)
    finite = (xt > -INF) & (yt > -INF)
    u = torch.where(finite, log_ratio_in_frame(xt, yt, c), xt - yt)
    found = {
        "kl": kl.clamp(min=0).masked_fill(has(VIOLATES), INF),
        "kl_train_rollout": other.clamp(min=0)
        .masked_fill(has(OUTSIDE), INF)
        .masked_fill(~has(TRAIN_GAP), float("nan")),
        "entropy_rollout": (mass.log() - e / mass).clamp(min=0),
        "entropy_train": (train.log() - y / train).clamp(min=0),
        "logp_rollout": (xt - m - mass.log()).clamp(max=0),
        "logp_train": (train_exponent(yt, m, c) - mass.log() - gain).clamp(max=0),
        "log_ratio": -(u + gain),
    }
    undefined = has(NON_FINITE) | ~has(HAS_ROLLOUT) | ~has(HAS_TRAIN)
    rows = []
    for name in output_names.decode(outputs & output_names.VALUE_BITS):
        value = found[name].masked_fill(undefined, float("nan"))
        if name.startswith("entropy"):
            value = value.masked_fill(~has(ENTROPY), float("nan"))
        if name in output_names.TOKEN_OUTPUTS:
            value = value.masked_fill(~has(HAS_TOKEN), float("nan"))
        rows.append(value)
    entropies = [
        found[name].masked_fill(~has(ENTROPY), float("nan"))
        for name in ("entropy_rollout", "entropy_train")
    ]
    full = [found["kl"], found["kl_train_rollout"], *entropies]
    statistics = torch.stack([m, mass.log(), c, -gain, *full], -1)
    statistics = statistics.masked_fill(undefined[..., None], float("nan"))
    shape = (0, *flags.shape)
    return (torch.stack(rows) if rows else torch.empty(shape, dtype=torch.float64)), statistics
