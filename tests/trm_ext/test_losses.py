# SPDX-License-Identifier: Apache-2.0
"""Surrogate losses by value, forward and gradient.

Plain-Python definitions, exact expectations on a tree, and what went wrong in other libraries.
"""

import functools
import itertools
import math
import warnings

import pytest
import torch

import trm_ext as trm
from tests.trm_ext.test_masks import batch, layouts
from theory import gradients as theory_gradients
from theory.mdp.tree import random_tree
from trm_ext import SequenceLayout, weights
from trm_ext.masks import warn_identical

INF, NAN = float("inf"), float("nan")
DENOMINATORS = (*trm.DENOMINATORS, 7.5)
MAX_KL = 0.9
#: Options of each estimator in these tests: tight enough that both outcomes occur.
OPTIONS = {
    "token_is": {},
    "ppo_clip": {"clip": (0.2, 0.3, 1.5)},
    "token_tis": {"clip": 1.2},
    "token_mask": {"band": (0.8, 1.25)},
    "icepop": {"band": (0.7, 1.4)},
    "seq_is": {},
    "seq_tis": {"clip": 1.1},
    "seq_mis": {"clip": 1.1},
    "geo_mask": {"band": (0.9, 1.1)},
    "geo_mask_token_tis": {"band": (0.9, 1.1), "clip": 1.2},
    "gspo": {"clip": (0.1, 0.15)},
    "trm": {},
}


def terms(name, x, a):
    """[(value, gradient weight, kept)] of one sequence's tokens; x log-ratios, a advantages."""
    o = OPTIONS[name]
    rho = [math.exp(v) for v in x]
    product, geometric = math.exp(math.fsum(x)), math.exp(math.fsum(x) / len(x))
    inside = [o["band"][0] <= r <= o["band"][1] for r in rho] if "band" in o else []
    band = o.get("band", (0, INF))
    accepted = band[0] <= geometric <= band[1]

    def ppo(r, a, low, high, dual, share=1.0):
        clipped = min(max(r, 1 - low), 1 + high)
        best = min(r * a, clipped * a)
        value = max(best, dual * a) if a < 0 else best
        active = value == r * a
        return (value / a if a else r) * share, r * share * active, True

    if name == "ppo_clip":
        return [ppo(r, v, *o["clip"]) for r, v in zip(rho, a, strict=True)]
    if name == "gspo":
        return [ppo(geometric, v, *o["clip"], INF, 1 / len(x)) for v in a]
    w = {
        "token_is": rho,
        "trm": rho,
        "token_tis": [min(r, o.get("clip", INF)) for r in rho],
        "token_mask": rho,
        "icepop": rho,
        "seq_is": [product] * len(x),
        "seq_tis": [min(product, o.get("clip", INF))] * len(x),
        "seq_mis": [product] * len(x),
        "geo_mask": [1.0] * len(x),
        "geo_mask_token_tis": [min(r, o.get("clip", INF)) for r in rho],
    }[name]
    kept = [True] * len(x)
    if name in ("token_mask", "icepop"):
        kept = inside
    elif name == "seq_mis":
        kept = [product <= o["clip"]] * len(x)
    elif name.startswith("geo_mask"):
        kept = [accepted] * len(x)
    return [(v, v, k) for v, k in zip(w, kept, strict=True)]


def definition(name, packed, x, advantages, kl, keep, kl_coef):
    """Numerator, its gradient per token, and every count, on Python floats."""
    gradient = [0.0] * len(x)
    numerator, penalty, kept_tokens, kept_sequences, penalised = 0.0, 0.0, 0, 0, []
    for b in range(packed.num_sequences):
        here = ((packed.sequence_id == b) & packed.token_mask).nonzero().flatten().tolist()
        if not here or not keep[b]:
            continue
        found = terms(name, [x[t] for t in here], [advantages[t] for t in here])
        kept_sequences += any(kept for _, _, kept in found)
        for t, (value, weight, kept) in zip(here, found, strict=True):
            if kept:
                numerator -= advantages[t] * value
                gradient[t] = -advantages[t] * weight
                penalty += kl_coef * kl[t]
                penalised.append(t)
                kept_tokens += 1
    count = {
        "sequences": packed.num_sequences,
        "kept_sequences": max(1, kept_sequences),
        "tokens": int(packed.token_mask.sum()),
        "kept_tokens": max(1, kept_tokens),
        7.5: 7.5,
    }
    return numerator + penalty, gradient, count, penalised


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("per_token", (False, True), ids=("per_sequence", "per_token"))
@pytest.mark.parametrize("poison", (NAN, INF, -INF, 1e30))
def test_estimator_denominator_layout(name, per_token, poison):
    packed, kl, ratio = batch(5)
    generator = torch.Generator().manual_seed(2)
    rollout = -torch.rand(ratio.shape, generator=generator) * 3
    train = rollout + ratio
    x = (train - rollout).double()
    shape = ratio.shape if per_token else (packed.num_sequences,)
    advantages = torch.randn(shape, generator=generator)
    spread = advantages if per_token else advantages[packed.sequence_id]
    counted = torch.where(packed.token_mask, kl, 0.0)
    verdict_keep = [
        bool((counted[packed.sequence_id == b] <= MAX_KL).all())
        for b in range(packed.num_sequences)
    ]
    numerator, gradient, count, penalised = definition(
        name,
        packed,
        x.tolist(),
        spread.double().tolist(),
        kl.double().tolist(),
        verdict_keep,
        0.25,
    )
    assert 0 < len(penalised) < int(packed.token_mask.sum()), "something is kept and masked"
    for label, (layout, move) in layouts(packed, poison).items():
        moved = move(torch.arange(len(x), dtype=torch.float64))
        dirty = {
            key: torch.where(layout.token_mask, move(value), poison)
            for key, value in (("train", train), ("rollout", rollout), ("kl", kl))
        }
        given = torch.where(layout.token_mask, move(spread), poison) if per_token else advantages
        found_verdict = trm.max_kl_verdict(dirty["kl"], layout, max_kl=MAX_KL)
        assert found_verdict.keep.tolist() == verdict_keep
        for denominator in DENOMINATORS:
            logp = dirty["train"].clone().requires_grad_()
            exact = dirty["kl"].clone().requires_grad_()
            loss, metrics = trm.policy_loss(
                logp,
                dirty["rollout"],
                given,
                layout,
                estimator=name,
                verdict=found_verdict,
                denominator=denominator,
                kl=exact,
                kl_coef=0.25,
                **OPTIONS[name],
            )
            loss.backward()
            d = count[denominator]
            # A few float32 roundings per token, weights up to e^2, then a float64 sum.
            scale = sum(map(abs, gradient)) / d + 1
            assert loss.item() == pytest.approx(numerator / d, abs=2e-6 * scale), label
            assert metrics["trm/loss/denominator"].item() == d
            assert logp.grad is not None and exact.grad is not None
            for index in itertools.product(*map(range, layout.shape)):
                t = moved[index].item()
                real = bool(layout.token_mask[index])
                wanted = gradient[int(t)] / d if real else 0.0
                assert logp.grad[index].item() == pytest.approx(wanted, rel=3e-6, abs=1e-9)
                wanted = 0.25 / d if real and int(t) in penalised else 0.0
                assert exact.grad[index].item() == pytest.approx(wanted, rel=1e-6)


def differentiated(name, x, a):
    """d(-Σ a v)/dx of one sequence's kept tokens, by central differences of the definition."""

    def total(x):
        found = zip(terms(name, x, a), a, strict=True)
        return -math.fsum(weight * value for (value, _, kept), weight in found if kept)

    h = 1e-6  # error h² times the third derivative, and 2e-16/h, below 1e-9 for these sizes
    found = []
    for i in range(len(x)):
        up, down = ([*x[:i], x[i] + s, *x[i + 1 :]] for s in (h, -h))
        found.append((total(up) - total(down)) / (2 * h))
    return found


#: Estimators whose gradient depends on detach; ``gspo`` only where advantages vary in a sequence.
DETACH_MATTERS = {"token_tis", "geo_mask_token_tis", "seq_is", "seq_tis", "seq_mis", "gspo"}


class TestWithoutDetach:
    """The loss is differentiated through its weights; its value is the same."""

    @pytest.mark.parametrize("name", [name for name in OPTIONS if name != "geo_mask"])
    def test_every_estimator_on_every_layout(self, name):
        packed, kl, ratio = batch(5)
        generator = torch.Generator().manual_seed(2)
        x = ratio.double()
        rollout = -torch.rand(x.shape, generator=generator).double() * 3
        advantages = torch.randn(x.shape, generator=generator).double()
        verdict = trm.max_kl_verdict(kl, packed, max_kl=MAX_KL)
        wanted = torch.zeros_like(x)
        for b in verdict.keep.nonzero().flatten().tolist():
            here = (packed.sequence_id == b) & packed.token_mask
            found = differentiated(name, x[here].tolist(), advantages[here].tolist())
            wanted[here] = torch.tensor(found, dtype=torch.float64)
        for label, (layout, move) in layouts(packed, NAN).items():
            results = []
            for detach in (False, True):
                logp = move(rollout + x).clone().requires_grad_()
                loss, _ = trm.policy_loss(
                    logp,
                    move(rollout),
                    move(advantages),
                    layout,
                    estimator=name,
                    verdict=trm.max_kl_verdict(move(kl), layout, max_kl=MAX_KL),
                    denominator=7.5,
                    detach=detach,
                    **OPTIONS[name],
                )
                loss.backward()
                results.append((loss.item(), logp.grad))
            (loss, gradient), (detached_loss, detached) = results
            moved = torch.where(layout.token_mask, move(wanted), 0.0) / 7.5
            torch.testing.assert_close(gradient, moved, rtol=1e-7, atol=1e-8, msg=label)
            assert loss == detached_loss
            differs = not torch.allclose(gradient, detached, rtol=1e-9, atol=1e-12)
            assert differs == (name in DETACH_MATTERS)

    @pytest.mark.parametrize(
        ("name", "function"),
        (
            ("token_is", weights.token_is),
            ("token_tis", weights.token_tis),
            ("icepop", weights.token_mask),
            ("seq_is", weights.seq_is),
            ("seq_tis", weights.seq_tis),
            ("seq_mis", weights.seq_mis),
            ("geo_mask_token_tis", weights.geo_mask_token_tis),
        ),
    )
    def test_it_means_what_it_means_in_weights(self, name, function):
        layout = SequenceLayout.from_lengths([3, 0, 2, 1])
        x = torch.tensor([1.0, -0.9, -0.1001, 2.0, 0.1, 90.0], dtype=torch.float64)
        a = torch.tensor([1.0, 2.0, 3.0, -1.0, 0.5, 1.0], dtype=torch.float64)
        found, wanted = (x.clone().requires_grad_() for _ in range(2))
        loss, _ = trm.policy_loss(
            found, torch.zeros_like(x), a, layout, estimator=name, detach=False
        )
        loss.backward()
        direct = -(a * function(wanted, layout, detach=False)).sum() / layout.num_sequences
        direct.backward()
        assert loss.item() == pytest.approx(direct.item(), rel=1e-14)
        torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-13, atol=0)

    @pytest.mark.parametrize(
        ("name", "options", "detached", "attached"),
        (
            # ratios (4, 1/2), advantages (1, 3)
            ("token_tis", {"clip": 2.0}, (2.0, 1.5), (0.0, 1.5)),
            ("geo_mask_token_tis", {"clip": 2.0, "band": (1, 2)}, (2.0, 1.5), (0.0, 1.5)),
            ("seq_is", {}, (2.0, 6.0), (8.0, 8.0)),
            ("seq_tis", {"clip": 3.0}, (2.0, 6.0), (8.0, 8.0)),
            ("seq_tis", {"clip": 1.5}, (1.5, 4.5), (0.0, 0.0)),
            ("seq_mis", {"clip": 3.0}, (2.0, 6.0), (8.0, 8.0)),
            ("gspo", {"clip": 1.0}, (2**0.5 / 2, 2**0.5 * 3 / 2), (2**0.5, 2**0.5)),
            ("token_is", {}, (4.0, 1.5), (4.0, 1.5)),
            ("ppo_clip", {}, (0.0, 1.5), (0.0, 1.5)),
            ("icepop", {}, (4.0, 1.5), (4.0, 1.5)),
        ),
    )
    def test_by_hand(self, name, options, detached, attached):
        lr, advantages = torch.tensor([[4.0, 0.5]]).log(), [[1.0, 3.0]]
        values = []
        for detach, wanted in ((True, detached), (False, attached)):
            loss, gradient, _ = simple(lr, advantages, estimator=name, detach=detach, **options)
            assert gradient[0] == pytest.approx([-w for w in wanted], rel=1e-6)
            values.append(loss)
        assert values[0] == values[1]

    def test_a_token_that_a_verdict_masks_gets_no_gradient(self):
        # Its ratio stays in the sequence's product, as a constant.
        layout = SequenceLayout.from_lengths([2])
        lr = torch.tensor([4.0, 0.5]).log()
        verdict = trm.verdict("token_kl<=1", layout, divergence={"kl": torch.tensor([0.0, 9.0])})
        for detach in (True, False):
            loss, gradient, _ = simple(
                lr, [3.0], layout=layout, estimator="seq_is", verdict=verdict, detach=detach
            )
            assert loss == pytest.approx(-6, rel=1e-6)
            assert gradient == pytest.approx([-6, 0], rel=1e-6)

    def test_an_indicator_has_no_derivative(self):
        with pytest.raises(ValueError, match="'geo_mask' has no weight to differentiate"):
            simple([[0.0]], [1.0], estimator="geo_mask", detach=False)


class TestInfinityCap:
    """What an infinite log-ratio or KL counts as, for who does not want to lose its sequence."""

    layout = SequenceLayout.from_lengths([2, 1])

    def loss(self, train, rollout, *, kl=None, **options):
        logp = torch.tensor(train, dtype=torch.float64, requires_grad=True)
        exact = None if kl is None else torch.tensor(kl, dtype=torch.float64, requires_grad=True)
        loss, metrics = trm.policy_loss(
            logp,
            torch.tensor(rollout, dtype=torch.float64),
            torch.ones(2, dtype=torch.float64),
            self.layout,
            denominator=1,
            kl=exact,
            **{"estimator": "token_is", **options},
        )
        loss.backward()
        return loss.item(), logp.grad.tolist(), metrics, exact

    def test_off_by_default(self):
        loss, gradient, metrics, _ = self.loss([-INF, -1.0, -1.0], [-1.0] * 3)
        assert loss == -1 and gradient == [0, 0, -1]
        assert metrics["trm/loss/unusable_sequences"] == 1
        assert metrics["trm/loss/capped_tokens"] == 0

    @pytest.mark.parametrize("detach", (True, False))
    def test_the_capped_ratio_is_a_constant(self, detach):
        options = {"infinity_cap": 2.0, "detach": detach}
        small, large = math.exp(-2), math.exp(2)
        loss, gradient, metrics, _ = self.loss([-INF, -1.0, -1.0], [-1.0] * 3, **options)
        assert loss == pytest.approx(-(small + 2), rel=1e-14) and gradient == [0, -1, -1]
        assert metrics["trm/loss/unusable_sequences"] == 0
        assert metrics["trm/loss/capped_tokens"] == 1
        assert metrics["trm/ratio/log_min"] == -INF  # raw
        loss, gradient, _, _ = self.loss([-1.0] * 3, [-INF, -1.0, -1.0], **options)
        assert loss == pytest.approx(-(large + 2), rel=1e-14) and gradient == [0, -1, -1]
        loss, gradient, _, _ = self.loss(
            [-INF, -1.0, -1.0], [-1.0] * 3, estimator="seq_is", **options
        )
        assert loss == pytest.approx(-(2 * small + 1), rel=1e-14)
        once = small if detach else 2 * small
        assert gradient == pytest.approx([0, -once, -1], rel=1e-14)

    def test_a_capped_penalty_is_a_constant(self):
        loss, gradient, metrics, kl = self.loss(
            [-1.0] * 3, [-1.0] * 3, kl=[INF, 0.5, 0.25], kl_coef=2.0, infinity_cap=3.0
        )
        assert loss == -3 + 2 * (3 + 0.5 + 0.25) and gradient == [-1, -1, -1]
        assert kl.grad.tolist() == [0, 2, 2] and metrics["trm/loss/capped_tokens"] == 1
        assert metrics["trm/loss/kl"] == 7.5

    def test_missing_evidence_is_not_capped(self):
        loss, gradient, metrics, _ = self.loss([NAN, -1.0, -1.0], [-1.0] * 3, infinity_cap=2.0)
        assert loss == -1 and gradient == [0, 0, -1]
        assert metrics["trm/loss/capped_tokens"] == 0

    def test_the_verdict_keeps_its_own_counsel(self):
        lr = torch.tensor([-INF, 0.0, 0.0])
        train, rollout = [-INF, -1.0, -1.0], [-1.0] * 3
        for cap, kept in ((None, 1), (2.0, 2)):
            verdict = trm.verdict("max_k2<=9", self.layout, log_ratio=lr, infinity_cap=cap)
            _, _, metrics, _ = self.loss(train, rollout, verdict=verdict, infinity_cap=2.0)
            assert metrics["trm/loss/sequences_kept"] == kept
            number = trm.loss_denominator(
                "kept_sequences",
                torch.tensor(train),
                torch.tensor(rollout),
                self.layout,
                verdict=verdict,
                infinity_cap=2.0,
            )
            assert number == kept

    def test_from_logits_that_mask_a_sampled_token(self):
        # The trainer's kept set is not the rollout's: -inf at a sampled token.
        rollout = torch.tensor([[0.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
        train = torch.tensor([[-INF, 0.0, 0.5], [0.0, 0.5, 0.0]], requires_grad=True)
        layout = SequenceLayout.from_lengths([2])
        exact = trm.token_divergence(
            rollout,
            train,
            tokens=torch.tensor([0, 1]),
            outputs=("kl", "logp_train", "logp_rollout", "log_ratio"),
        )
        assert exact.kl[0] == INF and exact.logp_train[0] == -INF
        off = trm.verdict("mean_kl<=11", layout, divergence=exact)
        assert off.reason.tolist() == [trm.Reason.SUPPORT]
        verdict = trm.verdict("mean_kl<=11", layout, divergence=exact, infinity_cap=20.0)
        assert verdict.keep.all() and verdict.capped.tolist() == [1]
        loss, _ = trm.policy_loss(
            exact.logp_train,
            exact.logp_rollout,
            torch.ones(1),
            layout,
            verdict=verdict,
            kl=exact.kl,
            kl_coef=0.1,
            infinity_cap=20.0,
        )
        loss.backward()
        assert torch.isfinite(loss) and torch.isfinite(train.grad).all()
        assert (train.grad[0] == 0).all() and train.grad[1].abs().max() > 0

    @pytest.mark.parametrize("cap", (0, -1.0, INF, NAN, "20"))
    def test_bad_caps(self, cap):
        with pytest.raises(ValueError, match="a cap of infinite values must be a finite number"):
            self.loss([-1.0] * 3, [-1.0] * 3, infinity_cap=cap)
        with pytest.raises(ValueError, match="a cap of infinite values must be a finite number"):
            trm.verdict("max_k2<=9", self.layout, log_ratio=torch.zeros(3), infinity_cap=cap)


class TestExactExpectation:
    """All sequences of a tree, weighted by their probability: the mean gradient, no sampling."""

    settings = theory_gradients.Settings(
        clip=0.1, ratio_cap=1.3, geo_low=0.85, geo_high=1.2, token_cap=1.25, max_kl=0.05
    )
    options = {  # noqa: RUF012
        "token_is": {},
        "ppo_clip": {"clip": 0.1},
        "token_mask": {},
        "seq_is": {},
        "seq_tis": {"clip": 1.3},
        "seq_mis": {"clip": 1.3},
        "geo_mask": {"band": (0.85, 1.2)},
        "geo_mask_token_tis": {"band": (0.85, 1.2), "clip": 1.25},
        "trm": {},
    }

    @pytest.mark.parametrize("name", options)
    @pytest.mark.parametrize("baseline", (0.0, 0.4))
    def test_against_theory(self, name, baseline):
        tree = random_tree(4)
        tokens = torch.tensor(tree.tokens())
        count, length = tokens.shape
        generator = torch.Generator().manual_seed(0)
        reward = torch.rand(count, generator=generator, dtype=torch.float64)
        logits, logp, exact, law = [], [], [], torch.ones(count, dtype=torch.float64)
        rollout_logp = []
        context_of = [torch.tensor(tree.contexts(t)) for t in range(length)]
        law = torch.tensor(tree.prompts)[context_of[0]].double()
        for t in range(length):
            p = torch.tensor(tree.rollout[t])
            z = torch.tensor(tree.train[t]).log().requires_grad_()
            logits.append(z)
            kl = trm.token_divergence(p.log(), z.detach()).kl
            assert kl is not None
            at = (context_of[t], tokens[:, t])
            logp.append(torch.log_softmax(z, -1)[at])
            rollout_logp.append(p.log()[at])
            exact.append(kl[context_of[t]])
            law = law * p[at]
        layout = SequenceLayout.from_mask(torch.ones(count, length, dtype=torch.bool))
        kl = torch.stack(exact, 1)
        criterion = "token_kl<=0.05" if name == "token_mask" else "max_kl<=0.05"
        verdict = trm.verdict(criterion, layout, divergence={"kl": kl})
        masked = name in ("token_mask", "trm")
        assert 0 < verdict.token_keep.double().mean() < 1
        loss, _ = trm.policy_loss(
            torch.stack(logp, 1),
            torch.stack(rollout_logp, 1),
            (reward - baseline) * law,
            layout,
            estimator=name,
            verdict=verdict if masked else None,
            denominator=1,
            **self.options[name],
        )
        found = torch.cat([g.flatten() for g in torch.autograd.grad(-loss, logits)])
        exact_moments = theory_gradients.estimate(
            tree, reward.numpy(), name, self.settings, baseline
        )
        wanted = torch.tensor(exact_moments.mean)
        torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-14)
        assert wanted.abs().max() > 1e-4


def simple(lr, advantages, *, estimator="token_is", layout=None, mask=None, **options):
    """(loss, gradient, metrics) with logp_rollout = 0 at tokens that count."""
    lr = torch.as_tensor(lr)
    if layout is None:
        layout = SequenceLayout.from_mask(
            torch.ones_like(lr, dtype=torch.bool) if mask is None else torch.as_tensor(mask)
        )
    logp = lr.clone().requires_grad_()
    advantages = torch.as_tensor(advantages)
    loss, metrics = trm.policy_loss(
        logp, torch.zeros_like(lr), advantages, layout, estimator=estimator, **options
    )
    loss.backward()
    return loss.item(), logp.grad.tolist(), metrics


class TestPPOSigns:
    @pytest.mark.parametrize(
        ("rho", "advantage", "value", "weight"),
        (
            (1.5, 1.0, 1.2, 0.0),  # rose with A > 0: clipped
            (0.5, 1.0, 0.5, 0.5),  # fell with A > 0: not clipped
            (1.5, -1.0, 1.5, 1.5),  # rose with A < 0: not clipped
            (0.5, -1.0, 0.8, 0.0),  # fell with A < 0: clipped
            (4.0, -1.0, 3.0, 0.0),  # rose far with A < 0: the dual clip
            (1.2, 1.0, 1.2, 1.2),  # the boundary is not clipped
            (0.8, -1.0, 0.8, 0.8),
        ),
    )
    def test_cases(self, rho, advantage, value, weight):
        loss, gradient, metrics = simple(
            [[math.log(rho)]], [advantage], estimator="ppo_clip", clip=(0.2, 0.2, 3.0)
        )
        assert loss == pytest.approx(-advantage * value, rel=1e-6)
        assert gradient[0][0] == pytest.approx(-advantage * weight, rel=1e-6)
        clipped = [metrics[f"trm/clip/{end}"].item() for end in ("high", "low", "dual")]
        assert sum(clipped) == (weight == 0)

    def test_zero_advantage_is_never_clipped(self):
        _, _, metrics = simple([[5.0, -5.0]], [0.0], estimator="ppo_clip", clip=(0.2, 0.2, 3.0))
        assert all(metrics[f"trm/clip/{end}"] == 0 for end in ("high", "low", "dual"))


class TestNothingLeft:
    @pytest.mark.parametrize("name", OPTIONS)
    @pytest.mark.parametrize("denominator", trm.DENOMINATORS)
    def test_all_rejected(self, name, denominator):
        layout = SequenceLayout.from_lengths([2, 1])
        verdict = trm.max_kl_verdict(torch.tensor([9.0, 0.0, INF]), layout, max_kl=1)
        kl = torch.tensor([9.0, 0.0, INF], requires_grad=True)
        logp = torch.tensor([-1.0, NAN, -INF], requires_grad=True)
        loss, metrics = trm.policy_loss(
            logp,
            torch.full((3,), -1.0),
            torch.tensor([1.0, NAN]),
            layout,
            estimator=name,
            verdict=verdict,
            denominator=denominator,
            kl=kl,
            kl_coef=1.0,
        )
        loss.backward()
        assert loss.item() == 0 and loss.requires_grad
        assert logp.grad.tolist() == kl.grad.tolist() == [0, 0, 0]
        assert metrics["trm/loss/all_rejected"] == 1 and metrics["trm/loss/kept_ratio"] == 0

    @pytest.mark.parametrize(
        "layout",
        (
            SequenceLayout.from_lengths([]),
            SequenceLayout.from_lengths([0, 0]),
            SequenceLayout.from_lengths([0, 0], padded_length=3),
        ),
    )
    def test_empty(self, layout):
        logp = torch.full(layout.shape, NAN, requires_grad=True)
        for name in OPTIONS:
            verdict = trm.max_kl_verdict(logp.detach(), layout, max_kl=1)
            loss, metrics = trm.policy_loss(
                logp,
                logp.detach(),
                torch.zeros(layout.num_sequences),
                layout,
                estimator=name,
                verdict=verdict,
            )
            (gradient,) = torch.autograd.grad(loss, logp)
            assert loss.item() == 0 and (gradient == 0).all()
            assert all(torch.isfinite(v) for v in metrics.values())


class TestRegressions:
    """Failures reported against RL libraries, smallest input, right value."""

    def test_overflow_under_padding_poisons_no_gradient(self):
        clean = simple([[0.0, 0.0]], [1.0], estimator="ppo_clip")
        dirty = simple(
            [[0.0, 0.0, 200.0]], [1.0], estimator="ppo_clip", mask=[[1 > 0, 1 > 0, 0 > 1]]
        )
        assert dirty[0] == clean[0] and dirty[1][0] == [*clean[1][0], 0.0]

    @pytest.mark.parametrize("value", (200.0, -200.0, INF, -INF, NAN))
    @pytest.mark.parametrize("name", OPTIONS)
    def test_masked_positions_leave_loss_metrics_and_gradients_bit_equal(self, name, value):
        mask = torch.tensor([[False, True, True, False], [True, True, False, False]])
        results = []
        for fill in (0.0, value):
            lr = torch.where(mask, torch.tensor([0.1, -0.3, 0.2, 0.0]), fill)
            verdict = trm.verdict("max_k2<=9", SequenceLayout.from_mask(mask), log_ratio=lr)
            results.append(
                simple(lr, [1.0, -2.0], estimator=name, mask=mask, verdict=verdict, **OPTIONS[name])
            )
        (loss, gradient, metrics), (other, other_gradient, other_metrics) = results
        assert loss == other and gradient == other_gradient
        assert all(torch.equal(metrics[key], other_metrics[key]) for key in metrics)

    @pytest.mark.parametrize("value", (200.0, -200.0, INF, -INF, NAN))
    @pytest.mark.parametrize("name", OPTIONS)
    def test_excluded_sequences_leave_loss_and_gradients_bit_equal(self, name, value):
        layout = SequenceLayout.from_lengths([2, 3, 1])
        kl = torch.tensor([0.1, 0.1, 9.0, 0.1, 0.1, 0.1])
        verdict = trm.max_kl_verdict(kl, layout, max_kl=1)
        results = []
        for fill in (0.0, value):
            lr = torch.tensor([0.1, -0.15, fill, fill, 0.0, 0.02])
            results.append(
                simple(
                    lr,
                    [1.0, fill, -3.0],
                    layout=layout,
                    estimator=name,
                    verdict=verdict,
                    **OPTIONS[name],
                )
            )
        assert results[0][:2] == results[1][:2] and results[0][0] != 0

    @pytest.mark.parametrize("value", (NAN, INF, -INF))
    def test_every_path_to_the_ratio_has_one_policy(self, value):
        # Two code paths of one library disagreed on NaN: weights, verdict, loss and metrics here.
        layout = SequenceLayout.from_lengths([2, 2])
        train = torch.tensor([-1.0, value, -1.0, -0.5], requires_grad=True)
        rollout = torch.full((4,), -1.0)
        lr = trm.log_ratio(train, rollout).detach()
        logps = {"logp_train": train.detach(), "logp_rollout": rollout}
        for criteria in ("max_k2<=9", "geo_ratio<=9", "token_ratio<=9", "max_binary_kl<=99"):
            given = {"divergence": logps} if "binary" in criteria else {"log_ratio": lr}
            for evidence in ({"divergence": logps}, given):
                assert trm.verdict(criteria, layout, **evidence).keep.tolist() == [False, True]
        loss, metrics = trm.policy_loss(train, rollout, torch.ones(2), layout, estimator="token_is")
        loss.backward()
        assert loss.item() == pytest.approx(-(1 + math.exp(0.5)) / 2, rel=1e-6)
        assert train.grad.tolist() == pytest.approx([0, 0, -0.5, -math.exp(0.5) / 2], rel=1e-6)
        assert metrics["trm/loss/unusable_sequences"] == 1
        assert trm.batch_metrics(layout, log_ratio=lr)["trm/k1"] == pytest.approx(-0.5 / 3)

    def test_a_rejected_stale_token_contributes_exactly_nothing(self):
        layout = SequenceLayout.from_lengths([1, 1])
        train = torch.tensor([-1.0, -1.0], requires_grad=True)
        rollout = torch.tensor([-100.0, -1.0])
        lr = trm.log_ratio(train, rollout)
        verdict = trm.verdict("max_k2<=10", layout, log_ratio=lr)
        loss, _ = trm.policy_loss(train, rollout, torch.ones(2), layout, verdict=verdict)
        loss.backward()
        assert loss.item() == -0.5 and train.grad.tolist() == [0.0, -0.5]

    def test_accepted_by_the_mean_with_one_huge_token(self):
        loss, gradient, _ = simple([[100.0, -100.0, 0.0]], [1.0], estimator="geo_mask_token_tis")
        assert gradient[0] == pytest.approx([-2, -3.7835e-44, -1], rel=1e-3)
        assert loss == pytest.approx(-3)
        loss, gradient, _ = simple([[100.0, -99.0, 0.0]], [1.0], estimator="geo_mask_token_tis")
        assert loss == 0 and gradient[0] == [0, 0, 0]

    def test_unscored_and_impossible_tokens_reject_their_sequence(self):
        for value in (NAN, INF, -INF):
            loss, gradient, metrics = simple([[0.0, value], [0.0, 0.0]], [1.0, 1.0])
            assert loss == -1 and gradient == [[0, 0], [-0.5, -0.5]]
            assert metrics["trm/loss/unusable_sequences"] == 1

    @pytest.mark.parametrize("value", (NAN, INF))
    def test_a_penalty_that_is_not_finite_rejects_its_sequence(self, value):
        kl = torch.tensor([[0.5, value], [0.5, 0.5]], requires_grad=True)
        loss, gradient, _ = simple([[0.0, 0.0], [0.0, 0.0]], [1.0, 1.0], kl=kl, kl_coef=1.0)
        assert loss == -0.5 and gradient == [[0, 0], [-0.5, -0.5]]
        assert kl.grad.tolist() == [[0, 0], [0.5, 0.5]]

    def test_both_denominators_and_the_kept_ratio(self):
        lr = [[0.1, -1.5, 0.8, -10.0, 0.3]]
        numerator = -(math.exp(0.1) + math.exp(0.3))
        for denominator, d in (("kept_tokens", 2), ("tokens", 5)):
            loss, gradient, metrics = simple(
                lr, [1.0], estimator="icepop", band=(0.5, 2.0), denominator=denominator
            )
            assert loss == pytest.approx(numerator / d, rel=1e-6)
            wanted = [-math.exp(0.1) / d, 0, 0, 0, -math.exp(0.3) / d]
            assert gradient[0] == pytest.approx(wanted, rel=1e-6)
            assert metrics["trm/loss/kept_token_ratio"].item() == 0.4

    def test_one_effective_mask_in_every_reduction(self):
        # The sequence-mean reduction once used the mask from before the token mask.
        lr = [[0.0, 9.0], [0.0, 0.0]]
        for denominator, d in (("sequences", 2), ("tokens", 4), ("kept_tokens", 3)):
            loss, gradient, _ = simple(lr, [1.0, 1.0], estimator="icepop", denominator=denominator)
            assert loss == pytest.approx(-3 / d)
            assert [*gradient[0], *gradient[1]] == pytest.approx([-1 / d, 0, -1 / d, -1 / d])

    def test_everything_rejected_by_a_narrow_band_goes_on(self):
        loss, gradient, metrics = simple(
            [[0.3], [-0.3]], [1.0, 1.0], estimator="geo_mask", band=(0.99, 1.001)
        )
        assert loss == 0 and gradient == [[0], [0]] and metrics["trm/loss/all_rejected"] == 1

    def test_a_rejected_sequence_never_trains_through_its_last_token(self):
        # The outcome reward sat on a masked last token and still reached the loss.
        layout = SequenceLayout.from_lengths([2, 2])
        kl = torch.tensor([0.0, 5.0, 0.0, 0.0])
        verdict = trm.max_kl_verdict(kl, layout, max_kl=1)
        loss, gradient, _ = simple(
            [0.0] * 4, [9.0, 1.0], layout=layout, verdict=verdict, estimator="trm"
        )
        assert loss == -1 and gradient == [0, 0, -0.5, -0.5]

    def test_a_token_mask_does_not_take_the_outcome_reward_away(self):
        layout = SequenceLayout.from_lengths([3])
        kl = torch.tensor([0.0, 0.0, 5.0])  # where an engine puts the reward
        verdict = trm.verdict("token_kl<=1", layout, divergence={"kl": kl})
        loss, gradient, _ = simple(
            [0.0] * 3, [2.0], layout=layout, verdict=verdict, estimator="token_mask"
        )
        assert loss == -4 and gradient == [-2, -2, 0]

    def test_rejected_siblings_do_not_move_the_kept_ones(self):
        # Rewards 100 (rejected) and 1: the kept row once trained on -49.5.
        layout = SequenceLayout.from_lengths([1, 1])
        verdict = trm.max_kl_verdict(torch.tensor([9.0, 0.0]), layout, max_kl=1)
        groups = torch.zeros(2, dtype=torch.int64)
        advantages = trm.group_advantages(torch.tensor([100.0, 1.0]), groups, verdict.keep)
        loss, gradient, _ = simple([0.0, 0.0], advantages, layout=layout, verdict=verdict)
        assert loss == -0.5 and gradient == [0, -0.5]

    def test_what_length_does_to_a_product_and_not_to_a_mean(self):
        T, drift = 2000, -0.001
        lr = torch.full((1, T), drift, dtype=torch.float64)
        one = torch.ones(1, dtype=torch.float64)
        _, product, _ = simple(lr, one, estimator="seq_is")
        _, mean, _ = simple(lr, one, estimator="gspo", clip=1.0)
        assert product[0][0] == pytest.approx(-0.1353, abs=5e-5)
        assert T * mean[0][0] == pytest.approx(-0.9990, abs=5e-5)
        # 0.012 over 100 tokens: past a product's cap of 3, well inside one of the mean's.
        lr = torch.full((1, 100), 0.012, dtype=torch.float64)
        loss, product, _ = simple(lr, one, estimator="seq_mis", clip=3.0)
        assert loss == 0 and product[0][0] == 0
        loss, mean, _ = simple(lr, one, estimator="geo_mask", band=(0.5, 3.0))
        assert loss == -100 and mean[0][0] == -1

    def test_ratios_of_a_truncated_rollout(self):
        # Top-2 of (.5, .3, .1, .1): processed rollout log-probs make every ratio 0.8 = S.
        layout = SequenceLayout.from_lengths([2])
        law = torch.tensor([0.5, 0.3, 0.1, 0.1], dtype=torch.float64)
        rollout = torch.tensor([0.625, 0.375, 0.0, 0.0], dtype=torch.float64).log().expand(2, 4)
        tokens = torch.tensor([0, 1])
        names = ("kl", "logp_train", "logp_rollout", "log_ratio")
        z = law.log().expand(2, 4).clone().requires_grad_()
        exact = trm.token_divergence(rollout, z, tokens=tokens, outputs=names)
        assert exact.log_ratio.exp().tolist() == pytest.approx([0.8, 0.8], rel=1e-12)
        assert exact.kl.tolist() == pytest.approx([-math.log(0.8)] * 2, rel=1e-12)
        loss, _ = trm.policy_loss(
            exact.logp_train,
            exact.logp_rollout,
            torch.ones(1).double(),
            layout,
            estimator="token_is",
            kl=exact.kl,
            kl_coef=1.0,
        )
        (gradient,) = torch.autograd.grad(loss, z)
        one_hot = torch.nn.functional.one_hot(tokens, 4)
        wanted = -0.8 * (one_hot - law) + (law - rollout.exp())
        torch.testing.assert_close(gradient, wanted, rtol=1e-12, atol=1e-14)
        # The same support replayed on the train side: nothing is left.
        replayed = torch.where(rollout == -INF, -INF, law.log().expand(2, 4))
        exact = trm.token_divergence(rollout, replayed, tokens=tokens, outputs=names)
        assert exact.kl.abs().max() < 1e-15 and exact.log_ratio.abs().max() < 1e-15

    def test_a_temperature_that_one_side_forgets(self):
        # Sampled at 0.6, scored at 1: every ratio is off. Given to both sides, nothing is left.
        z = torch.tensor([[1.0, 0.2, -0.5]], dtype=torch.float64, requires_grad=True)
        layout, tokens = SequenceLayout.from_lengths([1]), torch.tensor([0])
        names = ("kl", "logp_train", "logp_rollout", "log_ratio")
        for train_temperature in (0.6, 1.0):
            exact = trm.token_divergence(
                z.detach(),
                z,
                tokens=tokens,
                rollout_temperature=0.6,
                train_temperature=train_temperature,
                outputs=names,
            )
            p, q = (torch.softmax(z.detach() / t, -1) for t in (0.6, train_temperature))
            assert exact.kl.item() == pytest.approx(float((p * (p / q).log()).sum()), abs=1e-15)
            loss, _ = trm.policy_loss(
                exact.logp_train,
                exact.logp_rollout,
                torch.ones(1).double(),
                layout,
                estimator="token_is",
                kl=exact.kl,
                kl_coef=1.0,
            )
            (gradient,) = torch.autograd.grad(loss, z)
            rho = float(q[0, 0] / p[0, 0])
            assert exact.log_ratio.item() == pytest.approx(math.log(rho), abs=1e-15)
            policy = -rho * (torch.tensor([[1.0, 0.0, 0.0]]) - q)
            wanted = (policy + q - p) / train_temperature
            torch.testing.assert_close(gradient, wanted, rtol=1e-12, atol=1e-15)
            assert (rho == 1) == (train_temperature == 0.6)
        with pytest.raises(ValueError, match="rollout_temperature must be a finite number > 0"):
            trm.token_divergence(z, z, rollout_temperature=0.0)

    def test_the_loss_does_not_depend_on_who_holds_which_tokens(self):
        # Context parallelism: two ranks hold interleaved pieces and the verdict of the whole.
        packed, kl, ratio = batch(6)
        advantages = torch.randn(40, generator=torch.Generator().manual_seed(0)).double()
        verdict = trm.max_kl_verdict(kl, packed, max_kl=0.9)
        train, rollout = ratio.double().requires_grad_(), torch.zeros_like(ratio).double()
        whole, _ = trm.policy_loss(train, rollout, advantages, packed, verdict=verdict)
        (wanted,) = torch.autograd.grad(whole, train)
        total = 0.0
        for rank in (0, 1):
            here = (packed.position % 2 == rank).nonzero().flatten().flip(0)
            layout = SequenceLayout.from_segments(
                packed.sequence_id[here], packed.position[here], 40, packed.token_mask[here]
            )
            part = verdict._replace(token_keep=verdict.token_keep[here])
            loss, _ = trm.policy_loss(
                train[here], rollout[here], advantages, layout, verdict=part, denominator=40
            )
            loss.backward()
            total += loss.item()
        assert total == pytest.approx(whole.item(), rel=1e-13) and total != 0
        torch.testing.assert_close(train.grad, wanted, rtol=1e-13, atol=0)

    def test_clip_fractions_count_the_same_mask_above_and_below(self):
        lr = torch.tensor([[1.0, 0.0, 1.0, 1.0]])
        mask = torch.tensor([[True, True, False, False]])
        _, _, metrics = simple(lr, [1.0], estimator="ppo_clip", mask=mask)
        assert metrics["trm/clip/high"] == 0.5

    def test_diagnostics_are_taken_before_the_cap(self):
        _, _, metrics = simple([[3.0, 0.0]], [1.0], estimator="token_tis", clip=2.0)
        assert metrics["trm/ratio/log_max"] == 3 and metrics["trm/clip/high"] == 0.5

    def test_identical_log_probs_are_flagged(self):
        assert simple([[0.0, 0.0]], [1.0])[2]["trm/ratio/identical"] == 1
        assert simple([[0.0, 1e-7]], [1.0])[2]["trm/ratio/identical"] == 0
        assert simple([[0.1, 0.1]], [1.0])[2]["trm/ratio/identical"] == 0

    def test_identical_log_probs_warn_once(self):
        zero, other = [[0.0, 0.0]], [[0.0, 0.1]]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warn_identical.cache_clear()
            simple(other, [1.0])
            simple([[0.1, 0.1]], [1.0])
            with pytest.raises(UserWarning, match="exactly 0: logp_train and logp_rollout are"):
                simple(zero, [1.0])
        warn_identical.cache_clear()
        with pytest.warns(UserWarning, match="exactly 0") as caught:
            simple(zero, [1.0])
            simple(zero, [1.0])
        assert len(caught) == 1 and caught[0].filename == __file__

    def test_a_warning_where_the_metrics_reach_the_host(self):
        # On a GPU the loss looks at nothing: what reads its metrics warns.
        _, _, metrics = simple([[0.0, 0.0]], [1.0])
        layout, zero = SequenceLayout.from_lengths([2]), torch.zeros(2)
        calls = (
            lambda: trm.as_floats(metrics),
            lambda: trm.batch_metrics(layout, log_ratio=zero, sync=True),
        )
        for call in calls:
            warn_identical.cache_clear()
            with pytest.warns(UserWarning, match="exactly 0") as caught:
                call()
                call()
            assert len(caught) == 1
        warn_identical.cache_clear()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            trm.batch_metrics(layout, log_ratio=zero)
            trm.as_floats(simple([[0.0, 0.1]], [1.0])[2])

    def test_a_sampled_kl_has_no_gradient_and_the_exact_one_has(self):
        # E[grad k1] = 0 by enumeration; the exact penalty's gradient is q - p.
        p = torch.tensor([[0.5, 0.3, 0.2]], dtype=torch.float64)
        z = torch.tensor([[0.2, 0.1, -0.4]], dtype=torch.float64, requires_grad=True)
        q = torch.log_softmax(z, -1)
        (sampled,) = torch.autograd.grad((q.exp().detach() * -q).sum(), z, retain_graph=True)
        assert sampled.abs().max() < 1e-15
        layout = SequenceLayout.from_lengths([1])
        kl = trm.token_divergence(p.log(), z).kl
        loss, _ = trm.policy_loss(
            q[:, 0],
            p.log()[:, 0],
            torch.zeros(1).double(),
            layout,
            estimator="token_is",
            kl=kl,
            kl_coef=2.0,
        )
        (exact,) = torch.autograd.grad(loss, z)
        torch.testing.assert_close(exact, 2 * (q.exp() - p).detach(), rtol=1e-10, atol=1e-12)

    def test_coarse_log_probs_are_subtracted_in_float32(self):
        train = torch.tensor([[-0.998]], dtype=torch.bfloat16, requires_grad=True)
        loss, _ = trm.policy_loss(
            train,
            torch.tensor([[-1.0]]),
            torch.ones(1),
            SequenceLayout.from_lengths([1], padded_length=1),
            estimator="token_is",
        )
        assert loss.dtype == torch.float32
        assert loss.item() == pytest.approx(-math.exp(1 - 0.99609375), rel=1e-6)
        (gradient,) = torch.autograd.grad(loss, train)
        assert gradient.dtype == torch.bfloat16 and torch.isfinite(gradient).all()


class TestGroupAdvantages:
    def test_rejected_siblings_stay_out_of_the_baseline(self):
        rewards, groups = torch.tensor([100.0, 1.0]), torch.zeros(2, dtype=torch.int64)
        keep = torch.tensor([False, True])
        assert trm.group_advantages(rewards, groups, keep).tolist() == [0, 1]  # not -49.5
        assert trm.group_advantages(rewards, groups, keep, lone="zero").tolist() == [0, 0]
        assert trm.group_advantages(rewards, groups).tolist() == [49.5, -49.5]

    @pytest.mark.parametrize("poison", (NAN, INF, 1e30))
    @pytest.mark.parametrize("normalize", (False, True))
    def test_against_the_definition(self, poison, normalize):
        generator = torch.Generator().manual_seed(1)
        rewards = torch.rand(40, generator=generator)
        groups = torch.randint(0, 9, (40,), generator=generator)
        keep = torch.rand(40, generator=generator) < 0.6
        wanted = []
        for i in range(40):
            r = [rewards[j].item() for j in range(40) if keep[j] and groups[j] == groups[i]]
            if not keep[i]:
                wanted.append(0.0)
                continue
            mean = sum(r) / len(r)
            std = math.sqrt(sum((v - mean) ** 2 for v in r) / max(1, len(r) - 1))
            scale = std + 1e-6 if normalize else 1.0
            wanted.append(rewards[i].item() if len(r) == 1 else (rewards[i].item() - mean) / scale)
        found = trm.group_advantages(
            torch.where(keep, rewards, poison), groups, keep, num_groups=9, normalize=normalize
        )
        assert found.tolist() == pytest.approx(wanted, rel=1e-6, abs=1e-7)

    def test_bad_input(self):
        zeros = torch.zeros(2)
        with pytest.raises(TypeError, match=r"groups must be int64, got torch.float32"):
            trm.group_advantages(zeros, zeros)
        with pytest.raises(ValueError, match=r"must all be \[B\], got \[2\], \[3\], \[3\]"):
            trm.group_advantages(zeros, torch.zeros(3, dtype=torch.int64))
        with pytest.raises(ValueError, match="unknown lone 'mean'; choose from reward, zero"):
            trm.group_advantages(zeros, torch.zeros(2, dtype=torch.int64), lone="mean")
        with pytest.raises(ValueError, match=r"groups must be in 0\.\.1 \(num_groups\), got 7"):
            trm.group_advantages(zeros, torch.tensor([0, 7]))
        with pytest.raises(ValueError, match=r"groups must be in 0\.\.1 \(num_groups\), got -1"):
            trm.group_advantages(zeros, torch.tensor([0, -1]))


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("denominator", trm.DENOMINATORS)
def test_micro_batches_add_up_to_the_batch(name, denominator):
    generator = torch.Generator().manual_seed(8)
    mask = torch.rand(6, 5, generator=generator) < 0.8
    kl = torch.rand(6, 5, generator=generator).double()
    rollout = -torch.rand(6, 5, generator=generator).double()
    ratio = 0.4 * torch.randn(6, 5, generator=generator)
    train = (rollout + ratio).requires_grad_()
    advantages = torch.randn(6, generator=generator).double()

    def part(rows):
        layout = SequenceLayout.from_mask(mask[rows])
        verdict = trm.max_kl_verdict(kl[rows], layout, max_kl=0.95)
        return (
            (train[rows], rollout[rows]),
            layout,
            {"estimator": name, "verdict": verdict, **OPTIONS[name]},
        )

    logps, layout, options = part(slice(None))
    whole, _ = trm.policy_loss(*logps, advantages, layout, denominator=denominator, **options)
    (wanted,) = torch.autograd.grad(whole, train)
    chunks = [part(rows) for rows in (slice(0, 1), slice(1, 4), slice(4, 6))]
    number = sum(
        trm.loss_denominator(denominator, *logps, layout, **options)
        for logps, layout, options in chunks
    )
    total = 0.0
    train.grad = None
    for (logps, layout, options), rows in zip(
        chunks, (slice(0, 1), slice(1, 4), slice(4, 6)), strict=True
    ):
        loss, _ = trm.policy_loss(*logps, advantages[rows], layout, denominator=number, **options)
        loss.backward()
        total += loss.item()
    assert total == pytest.approx(whole.item(), rel=1e-11)
    torch.testing.assert_close(train.grad, wanted, rtol=1e-12, atol=1e-15)


class TestBadInput:
    layout = SequenceLayout.from_lengths([2, 1])
    good = (torch.zeros(3), torch.zeros(3), torch.zeros(2))

    @pytest.mark.parametrize(
        ("options", "message"),
        (
            ({"estimator": "tis"}, "unknown estimator 'tis'; choose from token_is, ppo_clip"),
            ({}, "estimator 'trm' needs verdict"),
            ({"estimator": "token_mask"}, "estimator 'token_mask' needs a verdict or a band"),
            ({"estimator": "seq_is", "clip": 2.0}, "estimator 'seq_is' takes no clip, got 2.0"),
            ({"estimator": "ppo_clip", "band": (1, 2)}, "'ppo_clip' takes no band"),
            ({"estimator": "ppo_clip", "clip": -0.1}, "clip epsilon must be >= 0, got -0.1"),
            ({"estimator": "ppo_clip", "clip": (0.2,)}, "clip is eps"),
            ({"estimator": "ppo_clip", "clip": (0.2, 0.2, 1.1)}, "dual clip must exceed 1"),
            ({"estimator": "token_tis", "clip": 0.0}, "cap must be > 0, got 0"),
            ({"estimator": "token_tis", "clip": (1, 2)}, "'token_tis' is one number C"),
            ({"estimator": "icepop", "band": (5, 0.5)}, "lower bound 5.0 exceeds its upper"),
            ({"estimator": "token_is", "denominator": "mean"}, "unknown denominator 'mean'"),
            ({"estimator": "token_is", "denominator": 0}, "finite number > 0, got 0"),
            ({"estimator": "icepop", "band": (0.5,)}, r"band must be \(low, high\), got \(0.5,\)"),
            ({"estimator": "icepop", "band": 2.0}, r"band must be \(low, high\), got 2.0"),
            ({"estimator": "token_is", "kl_coef": 0.1}, "kl_coef is 0.1 but kl is missing"),
            (
                {"estimator": "token_is", "kl": torch.zeros(3), "kl_coef": -0.1},
                "kl_coef must be a finite number >= 0, got -0.1",
            ),
            (
                {"estimator": "token_is", "kl": torch.zeros(3), "kl_coef": NAN},
                "kl_coef must be a finite number >= 0, got nan",
            ),
        ),
    )
    def test_options(self, options, message):
        with pytest.raises(ValueError, match=message):
            trm.policy_loss(*self.good, self.layout, **options)

    def test_a_denominator_that_is_no_count_is_not_replaced(self):
        for value, wanted in ((2.0, -1.0), (0.0, -2.0), (-1.0, NAN), (NAN, NAN)):
            loss, _ = trm.policy_loss(
                torch.zeros(3),
                torch.tensor([0.0, 0.0, 0.5]),
                torch.tensor([1.0, 0.0]),
                self.layout,
                estimator="token_is",
                denominator=torch.tensor(value),
            )
            assert loss.item() == pytest.approx(wanted, nan_ok=True)

    def test_advantages(self):
        a, b, _ = self.good
        with pytest.raises(
            TypeError, match="advantages must be a floating-point tensor, got torch"
        ):
            trm.policy_loss(a, b, torch.zeros(2, dtype=torch.int64), self.layout)
        with pytest.raises(ValueError, match=r"advantages must be \[2\] or .* \[3\], got \[4\]"):
            trm.policy_loss(a, b, torch.zeros(4), self.layout)
        nan = torch.tensor([0.0, NAN])
        with pytest.raises(ValueError, match="advantages is nan at kept token 2"):
            trm.policy_loss(a, b, nan, self.layout, estimator="token_is")
        padded = SequenceLayout.from_lengths([2, 1], padded_length=2)
        with pytest.raises(ValueError, match=r"advantages is inf at kept token \[1, 0\]"):
            trm.policy_loss(
                torch.zeros(2, 2),
                torch.zeros(2, 2),
                torch.tensor([0.0, INF]),
                padded,
                estimator="token_is",
            )

    def test_packed_input_with_a_padded_layout(self):
        padded = SequenceLayout.from_lengths([2, 1], padded_length=2)
        with pytest.raises(ValueError, match=r"logp_train must have .* \[2, 2\], got \[3\]"):
            trm.policy_loss(*self.good, padded, estimator="token_is")
        verdict = trm.max_kl_verdict(torch.zeros(2, 2), padded, max_kl=1)
        with pytest.raises(ValueError, match=r"the verdict must have .* \[3\], got \[2, 2\]"):
            trm.policy_loss(*self.good, self.layout, verdict=verdict)
        with pytest.raises(ValueError, match="differ in shape"):
            trm.policy_loss(torch.zeros(3), torch.zeros(2), torch.zeros(2), self.layout)


# One compiled training step --------------------------------------------------------------------


def training_step(rollout_logits, train_logits, tokens, advantages, layout):
    """Divergence, verdict, loss with penalty and all metrics."""
    exact = trm.token_divergence(
        rollout_logits,
        train_logits,
        tokens=tokens,
        token_mask=layout.token_mask,
        outputs=("kl", "logp_train", "logp_rollout", "log_ratio"),
    )
    verdict = trm.verdict("max_kl<=0.3 & 0.5<=geo_ratio<=2", layout, divergence=exact)
    loss, metrics = trm.policy_loss(
        exact.logp_train,
        exact.logp_rollout,
        advantages,
        layout,
        verdict=verdict,
        kl=exact.kl,
        kl_coef=0.1,
    )
    return loss, {**metrics, **trm.batch_metrics(layout, verdict=verdict, divergence=exact)}


def step_data(layout, generator, vocab=17):
    rollout = torch.randn(*layout.shape, vocab, generator=generator)
    size = torch.where(layout.sequence_id % 2 == 1, 1.5, 0.1)[..., None]  # odd ones are far
    train = rollout + size * torch.randn(*layout.shape, vocab, generator=generator)
    tokens = torch.randint(0, vocab, layout.shape, generator=generator)
    advantages = torch.randn(layout.num_sequences, generator=generator)
    return rollout, train.requires_grad_(), tokens, advantages


class CompileCount:
    """A backend that counts the graphs it is given, forward and backward."""

    def __init__(self):
        from functorch.compile import make_boxed_func
        from torch._dynamo.backends.common import aot_autograd

        def counting(kind):
            def compiler(graph, _example):
                setattr(self, kind, getattr(self, kind) + 1)
                return make_boxed_func(graph.forward)

            return compiler

        self.forward = self.backward = 0
        self.backend = aot_autograd(
            fw_compiler=counting("forward"), bw_compiler=counting("backward")
        )


@pytest.mark.parametrize("kind", ("padded", "packed"))
def test_one_graph_each_way_for_every_length(kind):
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    count = CompileCount()
    compiled = torch.compile(training_step, fullgraph=True, backend=count.backend, dynamic=True)
    generator = torch.Generator().manual_seed(3)
    for lengths in ([7, 5, 3, 7], [9, 2, 8, 9], [12, 0, 3, 4], [20, 19, 3, 11, 6]):
        width = max(lengths) if kind == "padded" else None
        layout = SequenceLayout.from_lengths(lengths, padded_length=width)
        data = step_data(layout, generator)
        results = []
        for f in (compiled, training_step):
            loss, metrics = f(*data, layout)
            (gradient,) = torch.autograd.grad(loss, data[1])
            results.append((loss.detach(), gradient, metrics))
        torch.testing.assert_close(results[0], results[1], rtol=1e-6, atol=1e-7, equal_nan=True)
        assert 0 < results[0][2]["trm/accepted"] < 1 and results[0][1].abs().max() > 0
    assert (count.forward, count.backward) == (1, 1)
    assert not counters["graph_break"]


def test_the_layout_can_be_made_inside_the_graph():
    def step(rollout, train, tokens, advantages, mask):
        return training_step(rollout, train, tokens, advantages, SequenceLayout.from_mask(mask))

    torch._dynamo.reset()
    layout = SequenceLayout.from_lengths([3, 2], padded_length=4)
    data = step_data(layout, torch.Generator().manual_seed(0))
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert compiled(*data, layout.token_mask)[0].item() == pytest.approx(
        training_step(*data, layout)[0].item(), rel=1e-6
    )


def total_loss(names, train, rollout, advantages, kl, mask):
    """The sum of the estimators' losses, differentiated through weights, and their metrics."""
    layout = SequenceLayout.from_mask(mask)
    verdict = trm.verdict("max_kl<=0.9", layout, divergence={"kl": kl}, infinity_cap=5.0)
    total, metrics = train.new_zeros(()), {}
    for name in names:
        loss, metrics[name] = trm.policy_loss(
            train,
            rollout,
            advantages,
            layout,
            estimator=name,
            verdict=verdict,
            detach=name == "geo_mask",
            infinity_cap=5.0,
            **OPTIONS[name],
        )
        total = total + loss
    return total, metrics


def total_loss_data():
    generator = torch.Generator().manual_seed(4)
    mask = torch.rand(6, 5, generator=generator) < 0.8
    rollout = -torch.rand(6, 5, generator=generator)
    train = rollout + 0.3 * torch.randn(6, 5, generator=generator)
    advantages = torch.randn(6, generator=generator)
    kl = torch.rand(6, 5, generator=generator)
    mask[0], kl[0] = True, 0.1
    return train, rollout, advantages, kl, mask


@pytest.mark.parametrize(
    "names",
    (
        ("gspo",),
        pytest.param(tuple(OPTIONS), marks=pytest.mark.slow, id="every_estimator"),
    ),
)
def test_estimators_compile_in_one_graph(names):
    torch._dynamo.reset()
    step = functools.partial(total_loss, names)
    train, *others = total_loss_data()
    train[0, 1] = -INF  # capped
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    results = []
    for f in (compiled, step):
        live = train.clone().requires_grad_()
        loss, metrics = f(live, *others)
        loss.backward()
        results.append((loss.detach(), live.grad, metrics))
    torch.testing.assert_close(results[0], results[1], rtol=1e-6, atol=1e-7)
    assert all(m["trm/loss/capped_tokens"] == 1 for m in results[0][2].values())
    assert results[0][1][0, 1] == 0 and results[0][1].abs().max() > 0


class TestBadAdvantagesWhereNothingIsLookedAt:
    """Under torch.compile and on a GPU: the loss is NaN, and metrics say how many and where."""

    @pytest.mark.parametrize("value", (NAN, INF, -INF))
    def test_compiled(self, value):
        torch._dynamo.reset()
        train, rollout, advantages, kl, mask = total_loss_data()
        layout = SequenceLayout.from_mask(mask)
        keep = trm.max_kl_verdict(kl, layout, max_kl=0.9).keep
        assert keep[0] and not keep.all()

        def step(train, advantages):
            layout = SequenceLayout.from_mask(mask)
            verdict = trm.max_kl_verdict(kl, layout, max_kl=0.9)
            return trm.policy_loss(train, rollout, advantages, layout, verdict=verdict)

        compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
        # In a rejected sequence it does not matter.
        harmless = torch.where(keep, advantages, value)
        live = train.clone().requires_grad_()
        loss, metrics = compiled(live, harmless)
        loss.backward()
        assert torch.isfinite(loss) and torch.isfinite(live.grad).all()
        assert metrics["trm/loss/bad_advantages"] == 0
        assert metrics["trm/loss/first_bad_advantage"] == -1
        # In one that stays the loss says so, and an optimiser step must not follow.
        last = int(keep.nonzero()[-1])
        bad = torch.where(torch.arange(6) == last, value, advantages)
        live = train.clone().requires_grad_()
        loss, metrics = compiled(live, bad)
        loss.backward()
        assert torch.isnan(loss)
        assert metrics["trm/loss/bad_advantages"] == mask[last].sum()
        first = 5 * last + int(mask[last].nonzero()[0])
        assert metrics["trm/loss/first_bad_advantage"] == first
        assert not torch.isfinite(live.grad[last][mask[last]]).any()
        assert (live.grad[~mask] == 0).all() and torch.isfinite(live.grad[:last]).all()
        with pytest.raises(ValueError, match=rf"advantages is {value} at kept token \[{last}, "):
            step(train, bad)

    @pytest.mark.parametrize("name", OPTIONS)
    def test_no_estimator_hides_it(self, name, monkeypatch):
        # Clipped, capped and rejected tokens too: 0 * NaN is NaN, and a mask of its own is none.
        monkeypatch.setattr("trm_ext.losses._free_to_look", lambda values: False)
        train, rollout, advantages, kl, mask = total_loss_data()
        layout = SequenceLayout.from_mask(mask)
        for detach in (True, False)[: 1 + (name != "geo_mask")]:
            for row in range(6):
                bad = torch.where(torch.arange(6) == row, NAN, advantages)
                loss, metrics = trm.policy_loss(
                    train,
                    rollout,
                    bad,
                    layout,
                    estimator=name,
                    verdict=trm.max_kl_verdict(kl, layout, max_kl=0.9),
                    detach=detach,
                    **OPTIONS[name],
                )
                assert torch.isnan(loss) == (metrics["trm/loss/bad_advantages"] > 0)

    def test_no_value_is_read_off_another_device(self):
        # Meta tensors have no values: reading one raises.
        layout = SequenceLayout.from_mask(torch.ones(2, 3, dtype=torch.bool, device="meta"))
        values = torch.empty(2, 3, device="meta", requires_grad=True)
        for name in OPTIONS:
            verdict = trm.verdict("max_kl<=1", layout, divergence={"kl": values})
            loss, metrics = trm.policy_loss(
                values,
                values,
                torch.empty(2, device="meta"),
                layout,
                estimator=name,
                verdict=verdict,
                detach=name == "geo_mask",
                infinity_cap=20.0,
            )
            loss.backward()
            assert loss.device.type == "meta"
            assert all(value.device.type == "meta" for value in metrics.values())

    @pytest.mark.gpu
    def test_on_a_gpu(self):
        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")
        train, rollout, advantages, kl, mask = (x.cuda() for x in total_loss_data())
        advantages[0] = NAN
        live = train.requires_grad_()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            loss, metrics = total_loss(OPTIONS, live, rollout, advantages, kl, mask)
            loss.backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.isnan(loss)
        found = trm.as_floats(metrics["trm"])
        assert found["trm/loss/bad_advantages"] == 5
        assert found["trm/loss/first_bad_advantage"] == 0


@pytest.mark.slow
def test_inductor_keeps_a_bad_advantage_visible():
    torch._dynamo.reset()
    train, rollout, advantages, kl, mask = total_loss_data()
    advantages[0] = NAN
    step = torch.compile(functools.partial(total_loss, ("ppo_clip",)), fullgraph=True)
    loss, metrics = step(train, rollout, advantages, kl, mask)
    assert torch.isnan(loss) and metrics["ppo_clip"]["trm/loss/bad_advantages"] == 5


@pytest.mark.slow
def test_inductor_agrees():
    torch._dynamo.reset()
    layout = SequenceLayout.from_lengths([3, 2, 4], padded_length=4)
    data = step_data(layout, torch.Generator().manual_seed(0))
    results = []
    for f in (torch.compile(training_step, fullgraph=True), training_step):
        loss, metrics = f(*data, layout)
        (gradient,) = torch.autograd.grad(loss, data[1])
        results.append((loss.detach(), gradient, metrics))
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-6, equal_nan=True)


class Head(torch.nn.Module):
    """The smallest model that produces train logits."""

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(6, 6)
        self.out = torch.nn.Linear(6, 17)

    def forward(self, x, checkpoint=False):
        if checkpoint:
            x = torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)
        else:
            x = self.inner(x)
        return self.out(torch.tanh(x))


class TestInsideTraining:
    layout = SequenceLayout.from_lengths([4, 2, 3], padded_length=4)

    def gradients(self, *, checkpoint=False, autocast=False):
        torch.manual_seed(1)
        model, x = Head(), torch.randn(3, 4, 6)
        rollout, _, tokens, advantages = step_data(self.layout, torch.Generator().manual_seed(2))
        with torch.no_grad():
            rollout = model(x) + 0.1 * rollout
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            logits = model(x, checkpoint)
            assert logits.dtype == (torch.bfloat16 if autocast else torch.float32)
            loss, metrics = training_step(rollout, logits, tokens, advantages, self.layout)
        loss.backward()
        assert loss.dtype == torch.float32 and metrics["trm/accepted"] > 0
        return loss.item(), [p.grad for p in model.parameters()]

    def test_activation_checkpointing_changes_nothing(self):
        torch.testing.assert_close(
            self.gradients(checkpoint=True), self.gradients(), rtol=0, atol=0
        )

    def test_autocast(self):
        # bfloat16 logits of size ~1: relative 2^-9 each, a handful of them per gradient entry.
        loss, gradients = self.gradients(autocast=True)
        wanted_loss, wanted = self.gradients()
        assert loss == pytest.approx(wanted_loss, abs=0.02) and loss != wanted_loss
        for a, b in zip(gradients, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0.03 * float(b.abs().max()) + 0.01)
