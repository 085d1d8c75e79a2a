# SPDX-License-Identifier: Apache-2.0
"""Divergence, verdict, loss and backward in one compiled step, and inside a model's training."""

import functools
import warnings

import pytest
import torch

import trm_ext as trm
from tests.trm_ext.test_losses import OPTIONS
from trm_ext import SequenceLayout
from trm_ext.masks import warn_identical

INF, NAN = float("inf"), float("nan")


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


def test_identical_log_probs_are_a_metric_inside_the_graph_and_no_warning():
    torch._dynamo.reset()
    layout, logp = SequenceLayout.from_lengths([2, 1]), torch.tensor([-1.0, -2.0, -3.0])

    def step(train, rollout):
        return trm.policy_loss(train, rollout, torch.ones(2), layout, estimator="token_is")

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    warn_identical.cache_clear()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="every log-ratio")
        _, metrics = compiled(logp.clone().requires_grad_(), logp)
        assert metrics["trm/ratio/identical"] == 1
        with pytest.raises(UserWarning, match="every log-ratio"):
            step(logp, logp)
    warn_identical.cache_clear()
    with pytest.warns(UserWarning, match="every log-ratio"):
        trm.as_floats(metrics)


class TestBadAdvantagesWhereNothingIsLookedAt:
    """Under torch.compile and on a GPU: the loss is NaN, and metrics say how many and where."""

    def test_compiled(self):
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
        for value in (NAN, INF, -INF):
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
            with pytest.raises(
                ValueError, match=rf"advantages is {value} at kept token \[{last}, "
            ):
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

    def data(self):
        torch.manual_seed(1)
        model, x = Head(), torch.randn(3, 4, 6)
        rollout, _, tokens, advantages = step_data(self.layout, torch.Generator().manual_seed(2))
        with torch.no_grad():
            rollout = model(x) + 0.1 * rollout
        return model, x, (rollout, tokens, advantages)

    def step(self, logits, rollout, tokens, advantages):
        loss, metrics = training_step(rollout, logits, tokens, advantages, self.layout)
        loss.backward()
        assert metrics["trm/accepted"] > 0
        return loss.detach()

    def test_activation_checkpointing_changes_nothing(self):
        results = []
        for checkpoint in (True, False):
            model, x, others = self.data()
            loss = self.step(model(x, checkpoint), *others)
            results.append((loss, [p.grad for p in model.parameters()]))
        torch.testing.assert_close(*results, rtol=0, atol=0)

    def test_autocast_rounds_the_logits_and_nothing_of_ours(self):
        model, x, others = self.data()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(x)
            logits.retain_grad()
            loss = self.step(logits, *others)
        assert logits.dtype == torch.bfloat16 and loss.dtype == torch.float32
        assert all(p.grad.abs().max() > 0 for p in model.parameters())
        # In float64, from the logits as they were stored. What is left: float32 log-probs in
        # (-4, 0] are rounded by 2^-23, a ratio holds two of them, and advantages are below 3; and
        # in the gradient one rounding to bfloat16, and four float32 roundings of terms below 1.
        wide = logits.detach().double().requires_grad_()
        wanted = self.step(wide, *(t.double() if t.is_floating_point() else t for t in others))
        torch.testing.assert_close(loss.double(), wanted, rtol=0, atol=2**-20)
        torch.testing.assert_close(logits.grad.double(), wide.grad, rtol=2**-8, atol=2**-22)
