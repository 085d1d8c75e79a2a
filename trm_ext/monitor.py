# SPDX-License-Identifier: Apache-2.0
"""Watch a training run: rolling D_seq, acceptance and certificates, without waiting for the device.

Every step leaves a few numbers per rollout in a ring on the device; what is reported is computed
from the ring when somebody asks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from trm_ext import _sequences
from trm_ext._budget_gate import budget_gate
from trm_ext.certification import GateConstants
from trm_ext.divergence import TokenDivergence
from trm_ext.layout import SequenceLayout
from trm_ext.masks import SequenceVerdict, _evidence, as_floats

if TYPE_CHECKING:
    from theory.certify import Certificate

__all__ = ["Monitor"]

# Columns of the ring, one row per group of rollouts.
_STEP, _KEEP, _KL, _GAIN, _WEIGHT, _GATE_GAIN, _GATE_KL, _GATE_HIT = range(8)
_COLUMNS = 8


class Monitor(torch.nn.Module):
    """Rolling statistics of the last ``window`` rollouts and of the newest step.

    Each rollout leaves, with a the lowest reward and W its sequence weight ``Π rho_t``:
    whether it was kept, its total KL, ``(R - a) Σ (rho_t - 1)``, ``(R - a)(min(W, 1 + K) - 1)``,
    and of the budget gate ``(R - a) Σ gate_t (min(rho_t, C) - 1)``, ``Σ gate_t kl_t`` and whether
    it closed. From their means follow D_seq, the surrogate gain L', and three lower limits of
    J(train) - J(rollout):

    * SeqKL, ``L' - (b - a) D_seq``, over the window, asymptotic (Student's t);
    * C0, ``E[(R - a)(min(W, 1 + K) - 1)]``, over the newest step, at finite samples (empirical
      Bernstein);
    * C3', ``L~ - (b - a)(D~ + P~(hit))`` of the policy that the budget gate freezes, over the
      newest step, at finite samples (empirical Bernstein for L~ and D~, Chernoff for the hits,
      alpha/3 each).

    Each limit holds with probability 1 - alpha on its own. Rollouts of one step are independent
    given the policies; those of several steps are not, as each update depends on the steps before.
    The gate is applied to the whole sequence: a layout of pieces sees only its pieces.

    Over a window of several steps the policies change, and the mean is that of the steps.
    A rollout without counted tokens does not enter.

    Args:
        window: rollouts (groups, where ``group_size`` is above 1) that are remembered.
        reward_range: [a, b], declared and not read off the data.
        alpha: failure probability of each one-sided limit.
        constants: of the gate and of C0, fixed beforehand: delta, C, b, k and K, as
            :class:`trm_ext.certify` takes them. ``drift_budget`` is not used.
        held_out: state that rollouts are drawn after the train policy was fixed: the update is
            called before the step trains on them. Without it nothing is a guarantee.
        group_size: rollouts ``i group_size ... (i + 1) group_size - 1`` of a batch share a prompt;
            their mean counts as one draw, since they are not independent.

    Raises:
        ValueError: a number out of range.

    Source:
        docs/theory.md#seqkl, docs/theory.md#weight-certificate, docs/theory.md#frozen-policy.

    >>> layout = SequenceLayout.from_lengths([2, 1])
    >>> kl, ratio = torch.tensor([0.01, 0.03, 0.02]), torch.tensor([0.1, -0.1, 0.2])
    >>> monitor = Monitor()
    >>> monitor.update(layout, divergence={"kl": kl}, log_ratio=ratio,
    ...                rewards=torch.tensor([1.0, 0.0]))
    >>> round(monitor.metrics(sync=True)["trm/window/seq_kl"], 6)
    0.03
    """

    rows: Tensor
    cursor: Tensor
    steps: Tensor
    quantiles: Tensor

    def __init__(
        self,
        *,
        window: int = 4096,
        reward_range: tuple[float, float] = (0.0, 1.0),
        alpha: float = 0.05,
        constants: GateConstants | None = None,
        held_out: bool = False,
        group_size: int = 1,
    ) -> None:
        from scipy.stats import t as student

        super().__init__()
        low, high = map(float, reward_range)
        if not (math.isfinite(low) and math.isfinite(high) and low < high):
            raise ValueError(
                f"reward_range must be finite with low < high, got [{low:g}, {high:g}]"
            )
        if not 0 < alpha < 1:
            raise ValueError(f"alpha must lie strictly between 0 and 1, got {alpha}")
        for name, value, least in (("window", window, 2), ("group_size", group_size, 1)):
            if value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")
        self.window, self.reward_range, self.alpha = window, (low, high), float(alpha)
        self.constants = GateConstants() if constants is None else constants
        self.held_out = held_out
        self.group_size = group_size
        empty = torch.zeros(window, _COLUMNS, dtype=torch.float64)
        self.register_buffer("rows", empty)  # step 0: nothing there yet
        self.register_buffer("cursor", torch.zeros((), dtype=torch.int64))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        # Student's t for every number of rollouts that the window can hold, n - 1 from 1.
        freedom = np.arange(1, window)
        quantiles = torch.from_numpy(student.isf(self.alpha, freedom))
        self.register_buffer("quantiles", quantiles, persistent=False)
        self.register_load_state_dict_pre_hook(_check_state)  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def update(
        self,
        layout: SequenceLayout,
        *,
        divergence: TokenDivergence | Mapping[str, Tensor],
        log_ratio: Tensor | None = None,
        rewards: Tensor | None = None,
        verdict: SequenceVerdict | None = None,
    ) -> None:
        """Remember one batch of rollouts. No host synchronisation; compiles without a break.

        Args:
            layout: which tokens belong to which sequence, and which count.
            divergence: per-token values with ``kl``: a TokenDivergence or a dict.
            log_ratio: logp_train - logp_rollout of the sampled tokens, nats; None takes it from
                the log-probs in ``divergence``, or goes without.
            rewards: ``[B]`` in ``reward_range``; None goes without certificates.
            verdict: for the acceptance.

        Raises:
            TypeError: values that are not floating-point tensors.
            ValueError: a shape other than the layout's, no ``kl``, a batch that does not divide
                into groups or does not fit the window.
        """
        evidence = _evidence(layout, divergence, log_ratio)
        kl = evidence.values("kl")
        ratio = evidence.log_ratio
        if ratio is None and isinstance(divergence, TokenDivergence):
            ratio = divergence.log_ratio
        batch = layout.num_sequences
        if batch % self.group_size:
            raise ValueError(f"{batch} sequences do not divide into groups of {self.group_size}")
        groups = batch // self.group_size
        if groups > self.window:
            raise ValueError(f"a batch of {groups} rollouts does not fit a window of {self.window}")
        if rewards is not None and tuple(rewards.shape) != (batch,):
            raise ValueError(f"rewards must be [B] with B = {batch}, got {list(rewards.shape)}")
        exact = _sequences.reduce_tokens(kl, layout)
        unknown = torch.full((batch,), math.nan, dtype=torch.float64, device=kl.device)
        keep = unknown if verdict is None else verdict.keep.double()
        gain = weight = gate_gain = gate_kl = gate_hit = unknown
        if ratio is not None and rewards is not None:
            low, high = self.reward_range
            reward = rewards.detach().double()
            reward = torch.where((reward >= low) & (reward <= high), reward - low, math.nan)
            shift = _sequences.reduce_tokens(torch.expm1(ratio.double()), layout).total
            log_weight = _sequences.reduce_tokens(ratio.double(), layout).total
            # No evidence: the worst weight, 0.
            worst = torch.where(torch.isnan(log_weight), -math.inf, log_weight)
            gain = reward * shift
            cap = math.log1p(self.constants.max_abs_log_weight)
            weight = reward * torch.expm1(worst.clamp(max=cap))
            gated = budget_gate(kl, ratio, layout, self.constants)
            gate_gain, gate_kl, gate_hit = reward * gated.shift, gated.kl, gated.hit.double()
        counts = exact.tokens > 0
        columns = torch.stack(
            [keep, exact.total, gain, weight, gate_gain, gate_kl, gate_hit], dim=1
        )
        rows, some = self._grouped(columns, counts)
        step = torch.where(some, (self.steps + 1).double(), 0.0)
        rows = torch.cat([step[:, None], torch.where(some[:, None], rows, 0.0)], dim=1)
        index = (self.cursor + torch.arange(groups, device=rows.device)) % self.window
        self.rows.index_copy_(0, index, rows)
        self.cursor.copy_((self.cursor + groups) % self.window)
        self.steps.add_(1)

    @torch.no_grad()
    def metrics(self, *, sync: bool = False) -> dict[str, Tensor | float]:
        """What the window says, as ``trm/...`` keys.

        ======================================  ================================================
        ``trm/window/rollouts``                 how many (groups) are remembered
        ``trm/window/steps``                    from how many steps
        ``trm/window/accepted``                 share that the verdicts kept
        ``trm/window/missing``                  rollouts with a NaN KL
        ``trm/window/seq_kl``, ``..._upper``    D_seq over the others, and its upper limit
        ``trm/window/surrogate``                L' = mean of (R - a) Σ (rho_t - 1)
        ``trm/window/certificate_seq_kl``       lower limit of J(train) - J(rollout), over the
                                                window; asymptotic (Student's t)
        ``trm/step/rollouts``                   of the newest step
        ``trm/step/certificate_weight``         lower limit from C0; finite samples, newest step
        ``trm/step/certificate_budget_gate``    lower limit from C3' with the budget gate; likewise
        ``trm/step/gate_closed``                share of rollouts on which the gate closed
        ======================================  ================================================

        A number that nothing supports (no verdict, no reward, fewer than two rollouts, a reward
        outside the range) is NaN, and so is SeqKL where a KL or log-ratio is NaN. In C0 a NaN
        log-ratio counts as its worst case, W = 0, in C3' as rho = 0, and there a KL that is NaN or
        +inf closes the gate. A KL of +inf makes D_seq infinite. No limit is below a - b: a gain
        cannot be.

        Args:
            sync: True returns Python floats, which waits for the device once.

        Returns:
            A dict of 0-d float64 tensors, or of floats.
        """
        span = self.reward_range[1] - self.reward_range[0]
        step, keep, kl, gain, weight, gate_gain, gate_kl, gate_hit = self.rows.unbind(1)
        there = step > 0
        number = there.sum()
        missing = there & torch.isnan(kl)
        mean_kl, upper_kl = self._student(kl, there & ~missing, +1)
        mean_gain, _ = self._student(gain, there, +1)
        _, lower = self._student(gain - span * kl, there, -1)
        newest = there & (step == self.steps)
        found: dict[str, Tensor | float] = {
            "trm/window/rollouts": number.double(),
            "trm/window/steps": _distinct(step, there),
            "trm/window/accepted": self._student(keep, there, +1)[0],
            "trm/window/missing": missing.sum().double(),
            "trm/window/seq_kl": mean_kl,
            "trm/window/seq_kl_upper": upper_kl,
            "trm/window/surrogate": mean_gain,
            "trm/window/certificate_seq_kl": lower.clamp(min=-span),
            "trm/step/rollouts": newest.sum().double(),
            "trm/step/certificate_weight": self._weight_limit(weight, newest),
            "trm/step/certificate_budget_gate": self._gate_limit(
                gate_gain, gate_kl, gate_hit, newest
            ),
            "trm/step/gate_closed": _mean(gate_hit, newest)[0],
        }
        return as_floats(found) if sync else found

    def certificates(self) -> tuple[Certificate, ...]:
        """The three lower limits with their labels; waits for the device.

        Returns:
            C0 and C3' of the newest step and SeqKL of the window, as
            :class:`theory.certify.Certificate`; the terms and radii are in ``parts``. Each is left
            out where :meth:`metrics` has NaN.
        """
        from theory import certify

        rows = self.rows.cpu().numpy()
        rows = rows[rows[:, _STEP] > 0]
        low, high = self.reward_range
        span = high - low
        newest = rows[rows[:, _STEP] == float(self.steps)]
        made = []

        def add(
            name: str, lower: float, finite: bool, anchor: str, values: Any, **parts: float
        ) -> None:
            label = "guarantee" if finite else "asymptotic"
            if not self.held_out:
                label = "not a guarantee: the rollouts are the batch that the policy is trained on"
            made.append(
                certify.Certificate(
                    name=name,
                    lower_bound=max(lower, -span),
                    confidence=1 - self.alpha,
                    finite_sample=finite,
                    rigorous=self.held_out,
                    label=label,
                    source=f"ours, docs/theory.md#{anchor}",
                    parts={**parts, "rollouts": float(len(values))},
                )
            )

        def supported(values: Any) -> bool:
            return len(values) >= 2 and not np.isnan(values).any()

        weight = newest[:, _WEIGHT]
        if supported(weight):
            top = self.constants.max_abs_log_weight * span
            found = certify.empirical_bernstein(weight, -span, top, self.alpha)
            add(
                "truncated_weight",
                found.lower,
                True,
                "weight-certificate",
                weight,
                estimate=found.estimate,
                radius=found.radius,
            )
        gain = newest[:, _GATE_GAIN]
        if supported(gain):
            c, part = self.constants, self.alpha / 3
            low, high = -(c.shift_budget + 1) * span, (c.shift_budget + c.max_ratio - 1) * span
            found = certify.empirical_bernstein(gain, low, high, part)
            limit = c.kl_budget + c.max_kl
            divergence = certify.empirical_bernstein(newest[:, _GATE_KL], 0.0, limit, part)
            closed = float(newest[:, _GATE_HIT].mean())
            hit = certify.binary_kl_inverse(closed, math.log(1 / part) / len(gain))
            worst = certify.binary_kl_inverse(hit, divergence.upper)
            add(
                "frozen_budget",
                found.lower - span * (divergence.upper + worst),
                True,
                "frozen-policy",
                gain,
                surrogate=found.estimate,
                surrogate_radius=found.radius,
                seq_kl=divergence.estimate,
                seq_kl_radius=divergence.radius,
                error_bound=divergence.upper,
                hit_rate=closed,
                hit_bound=worst,
            )
        difference = rows[:, _GAIN] - span * rows[:, _KL]
        if supported(difference):
            if np.isinf(difference).any():
                found = certify.Interval(-math.inf, -math.inf, math.inf, self.alpha, "", False)
            else:
                found = certify.clt(difference, self.alpha)
            add(
                "seq_kl",
                found.lower,
                False,
                "seqkl",
                difference,
                estimate=found.estimate,
                radius=found.radius,
            )
        return tuple(made)

    def get_extra_state(self) -> dict[str, Any]:
        """What the numbers in the ring depend on."""
        return {
            "window": self.window,
            "reward_range": list(self.reward_range),
            "alpha": self.alpha,
            "constants": asdict(self.constants),
            "held_out": self.held_out,
            "group_size": self.group_size,
        }

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Nothing is left to do: loading has checked that the state belongs to this monitor."""

    def _grouped(self, columns: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        """Means over the rollouts of each group that have counted tokens, and which have any."""
        groups = columns.shape[0] // self.group_size
        number = counts.reshape(groups, self.group_size).sum(1)
        total = torch.where(counts[:, None], columns, 0.0)
        total = total.reshape(groups, self.group_size, -1).sum(1)
        return total / number[:, None], number > 0

    def _weight_limit(self, weight: Tensor, where: Tensor) -> Tensor:
        """C0 on the device."""
        span = self.reward_range[1] - self.reward_range[0]
        width = (1 + self.constants.max_abs_log_weight) * span
        mean, radius = _bernstein(weight, where, width, self.alpha)
        return torch.where(where.sum() >= 2, (mean - radius).clamp(min=-span), math.nan)

    def _gate_limit(self, gain: Tensor, kl: Tensor, hit: Tensor, where: Tensor) -> Tensor:
        """C3' on the device."""
        span, c, part = self.reward_range[1] - self.reward_range[0], self.constants, self.alpha / 3
        number = where.sum()
        mean, radius = _bernstein(gain, where, (2 * c.shift_budget + c.max_ratio) * span, part)
        lower = (mean - radius).clamp(min=-(c.shift_budget + 1) * span)
        limit = c.kl_budget + c.max_kl
        used, noise = _bernstein(kl, where, limit, part)
        error = (used + noise).clamp(max=limit)
        closed = _binary_kl_inverse(_mean(hit, where)[0], math.log(1 / part) / number.double())
        lower = lower - span * (error + _binary_kl_inverse(closed, error))
        return torch.where(number >= 2, lower.clamp(min=-span), math.nan)

    def _student(self, values: Tensor, where: Tensor, side: int) -> tuple[Tensor, Tensor]:
        """Mean, and its one-sided limit from Student's t; an infinite mean is its own limit."""
        number = where.sum()
        mean, deviation = _mean(values, where)
        index = (number - 2).clamp(0, len(self.quantiles) - 1)
        # gather, not indexing: a 0-d index is read by the host
        quantile = self.quantiles.gather(0, index.reshape(1)).squeeze(0)
        limit = torch.where(torch.isinf(mean), mean, mean + side * quantile * deviation)
        return mean, torch.where(number >= 2, limit, math.nan)


def _bernstein(values: Tensor, where: Tensor, width: float, alpha: float) -> tuple[Tensor, Tensor]:
    """Mean, and its radius by the empirical Bernstein inequality for a range of that width."""
    mean, deviation = _mean(values, where)
    log_term = math.log(2 / alpha)
    rest = 7 * width * log_term / (3 * (where.sum().double() - 1))
    return mean, deviation * math.sqrt(2 * log_term) + rest


def _binary_kl_inverse(p: Tensor, kl: Tensor) -> Tensor:
    """``theory.certify.binary_kl_inverse`` of 0-d tensors, on their device, and never below it.

    Newton's method on a convex function that starts above its root stays above it; the start is
    where the smaller part of the function, -h(p) - (1 - p) log(1 - b), reaches kl.

    >>> x = torch.tensor(0.01).double()
    >>> round(float(_binary_kl_inverse(x, x)), 4)
    0.0311
    """
    entropy = -torch.xlogy(p, p) - torch.xlogy(1 - p, 1 - p)
    b = -torch.expm1(-(kl + entropy) / (1 - p))
    for _ in range(30):
        excess = -entropy - torch.xlogy(p, b) - (1 - p) * torch.log1p(-b) - kl
        step = excess * b * (1 - b) / (b - p)
        b = torch.where(step > 0, b - step, b)
    return torch.where(p < 1, torch.maximum(b, p), 1.0)


def _mean(values: Tensor, where: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and its standard error; NaN over too few."""
    number = where.sum().double()
    chosen = torch.where(where, values, 0.0)
    mean = chosen.sum() / number
    squares = torch.where(where, (values - mean).square(), 0.0).sum()
    return mean, (squares / (number - 1) / number).sqrt()


def _distinct(step: Tensor, where: Tensor) -> Tensor:
    """Number of different steps; rows of one step lie side by side in the ring."""
    ranked = torch.where(where, step, 0.0).sort().values
    return ((ranked[1:] != ranked[:-1]).sum() + (ranked[0] > 0)).double()


def _check_state(
    module: torch.nn.Module, state: Mapping[str, Any], prefix: str, *_: object
) -> None:
    """Refuse the state of a monitor with other settings before anything is copied."""
    assert isinstance(module, Monitor)
    given = state.get(prefix + "_extra_state")
    wanted = module.get_extra_state()
    for name, value in wanted.items():
        if given is None or given.get(name) != value:
            shown = "nothing" if given is None else given.get(name)
            raise ValueError(f"the state was saved with {name} {shown}, this monitor has {value}")
