# SPDX-License-Identifier: Apache-2.0
"""Surrogate losses by value, forward and gradient.

Plain-Python definitions, exact expectations on a tree, and what went wrong in other libraries.
"""

import itertools
import math

import pytest
import torch

import trm_ext as trm
from tests.trm_ext.test_masks import batch, layouts
from theory import gradients as theory_gradients
from theory.mdp.tree import random_tree
from trm_ext import SequenceLayout, weights

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
