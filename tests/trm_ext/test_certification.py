# SPDX-License-Identifier: Apache-2.0
"""Certificates of a batch: against theory.certify on sums written out by hand, and known truths."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from scipy.stats import binom

import trm_ext
from theory import certify as theory_certify
from theory.bounds import paper, sharp
from theory.mdp.product import BernoulliProduct
from trm_ext import GateConstants, SequenceLayout, TokenDivergence, Verdict, certify
from trm_ext.certification import Primary, as_dict, certify_file, radius
from trm_ext.io import PairMetadata, PolicyRecord, RolloutPairWriter
from trm_ext.token_statistics import TokenStatistics, write_statistics

NAN, INF = math.nan, math.inf
FINITE: tuple[Primary, ...] = get_args(Primary)


def coins(
    n: int, length: int, p: float, q: float, seed: int = 0
) -> tuple[TokenDivergence, torch.Tensor, SequenceLayout, float]:
    """Independent coins: statistics, reward 1 for more heads than tails, and the true gain."""
    pair = BernoulliProduct(p, q, length)
    heads = np.random.default_rng(seed).random((n, length)) < p
    ratio = np.where(heads, math.log(q / p), math.log((1 - q) / (1 - p)))
    token = pair.token
    full = torch.ones(n, length, dtype=torch.float64)
    found = TokenDivergence(
        kl=full * token["max_kl"],
        log_ratio=torch.from_numpy(ratio),
        tv=full * abs(q - p),
        chi2=full * (q - p) ** 2 / (p * (1 - p)),
        outside_mass=full * 0,
    )
    rewarded = [k for k in range(length + 1) if 2 * k > length]

    def value(x: float) -> float:
        return sum(math.comb(length, k) * x**k * (1 - x) ** (length - k) for k in rewarded)

    reward = torch.from_numpy((heads.sum(1) * 2 > length).astype(float))
    layout = SequenceLayout.from_lengths([length] * n, padded_length=length)
    return found, reward, layout, value(q) - value(p)


def noisy(n: int = 12, seed: int = 0, noise: float = 0.3, **change: Any) -> dict[str, Any]:
    """Logits with ragged lengths and holes, as keyword arguments of :func:`certify`."""
    rng = torch.Generator().manual_seed(seed)
    mask = torch.rand(n, 7, generator=rng) < 0.8
    mask[:, 0] = True
    x = torch.randn(n, 7, 11, generator=rng, dtype=torch.float64)
    y = x + noise * torch.randn(n, 7, 11, generator=rng, dtype=torch.float64)
    tokens = torch.randint(0, 11, (n, 7), generator=rng)
    found = trm_ext.token_divergence(
        x, y, tokens=tokens, token_mask=mask, outputs=trm_ext.outputs.OUTPUTS
    )
    return {
        "divergence": found,
        "rewards": torch.rand(n, generator=rng, dtype=torch.float64),
        "layout": SequenceLayout.from_mask(mask),
        "held_out": True,
        **change,
    }


def sums(batch: dict[str, Any]) -> dict[str, Any]:
    """Per-sequence lists of the tokens that count, by plain loops."""
    found, mask = batch["divergence"], batch["layout"].token_mask
    out: dict[str, Any] = {"ratio": [], "kl": [], "position": []}
    for b in range(mask.shape[0]):
        where = [t for t in range(mask.shape[1]) if mask[b, t]]
        out["ratio"].append([float(found.log_ratio[b, t]) for t in where])
        out["kl"].append([float(found.kl[b, t]) for t in where])
        out["position"].append(where)
    out["log_weight"] = [sum(r) for r in out["ratio"]]
    out["shift"] = [sum(math.expm1(v) for v in r) for r in out["ratio"]]
    out["total"] = [sum(k) for k in out["kl"]]
    out["largest"] = [max(k) for k in out["kl"]]
    return out


def limits(result: trm_ext.Certification) -> dict[tuple[str, bool], float]:
    return {(c.name, c.finite_sample): c.lower_bound for c in result.certificates}


def test_every_number_of_a_ragged_batch() -> None:
    constants = GateConstants(0.1, 1.5, 0.9, 0.2, 0.7, 0.4)
    batch = noisy(n=200)
    made = certify(**batch, constants=constants, horizon=7, reward_range=(-1.0, 1.0))
    by_hand = sums(batch)
    reward = batch["rewards"].numpy()
    r = reward + 1
    kept = np.array(by_hand["largest"]) <= 0.1
    assert 0 < kept.sum() < 200
    shared: dict[str, Any] = {"reward_range": (-1.0, 1.0)}
    width = max(map(len, by_hand["kl"]))
    ratio, kl, mask = (np.zeros((200, width)) for _ in range(3))
    for b, (row_r, row_k) in enumerate(zip(by_hand["ratio"], by_hand["kl"], strict=True)):
        ratio[b, : len(row_r)], kl[b, : len(row_k)], mask[b, : len(row_k)] = row_r, row_k, 1
    budget, drift = (
        theory_certify.gate(
            ratio,
            kl,
            mask.astype(bool),
            max_kl=0.1,
            mode=mode,
            shift_budget=b,
            kl_budget=0.2,
            ratio_cap=1.5,
            horizon=7,
        )
        for mode, b in (("budget", 0.9), ("drift", 0.4))
    )
    assert 0 < drift.hit.sum() < 200 and (budget.shift != drift.shift).any()
    log_weight, shift, total = (by_hand[name] for name in ("log_weight", "shift", "total"))
    baseline = float(r.mean())
    expected = {
        ("truncated_weight", True): theory_certify.truncated_weight_certificate(
            reward, log_weight, max_weight=1.7, **shared
        ),
        ("sequence_mask", True): theory_certify.sequence_mask_certificate(
            reward, log_weight, kept, max_abs_log_weight=0.7, **shared
        ),
        **{
            (f"frozen_{gate.mode}", not asymptotic): theory_certify.frozen_certificate(
                reward, gate, asymptotic=asymptotic, **shared
            )
            for gate in (budget, drift)
            for asymptotic in (False, True)
        },
        ("sequence_mask", False): theory_certify.sequence_mask_certificate(
            reward, log_weight, kept, **shared
        ),
        ("log", False): theory_certify.log_certificate(reward, log_weight, **shared),
        ("seq_kl", False): theory_certify.seq_kl_certificate(
            reward, shift, total, baseline=baseline, **shared
        ),
    }
    found = limits(made)
    assert set(found) == set(expected)
    for key, certificate in expected.items():
        assert found[key] == pytest.approx(certificate.lower_bound, rel=1e-11), key
    gain = (r - baseline) * np.array(shift)
    assert made.surrogate.estimate == pytest.approx(gain.mean(), rel=1e-10)
    assert made.seq_kl.upper == pytest.approx(theory_certify.clt(total, 0.05).upper, rel=1e-12)
    assert made.min_certifiable_gain == pytest.approx(2 * made.seq_kl.upper, rel=1e-12)
    assert made.seq_kl_lower == theory_certify.nonnegative_lower(made.sequence_kl.numpy(), 0.05)
    assert made.sequence_kl.tolist() == pytest.approx(total, rel=1e-12)
    assert made.sequence_max_kl.tolist() == by_hand["largest"]
    assert made.sequence_tokens.tolist() == [len(k) for k in by_hand["kl"]]
    assert made.keep.tolist() == kept.tolist() and made.accepted == kept.mean()
    assert made.hit.tolist() == budget.hit.tolist()
    positions = np.zeros(7)
    for where, values in zip(by_hand["position"], by_hand["kl"], strict=True):
        for t, value in zip(where, values, strict=True):
            positions[t] += value / 200
    assert made.position_kl.tolist() == pytest.approx(list(positions), rel=1e-12)
    assert float(made.position_kl.sum()) == pytest.approx(made.seq_kl.estimate, rel=1e-12)
    tv = sum(float(v) for v in batch["divergence"].tv.flatten()) / 200
    chi2 = sum(float(v) for v in batch["divergence"].chi2.flatten()) / 200
    least = min(tv, math.sqrt(chi2) / 2, math.sqrt(7 * made.seq_kl.estimate / 2))
    assert made.attainable == pytest.approx(2 * least, rel=1e-10)


def test_every_layout_and_both_kinds_of_file_say_the_same(tmp_path: Path) -> None:
    rng = torch.Generator().manual_seed(1)
    lengths = [4, 2, 5, 1, 3]
    x = torch.randn(15, 9, generator=rng)
    y = x + 0.1 * torch.randn(15, 9, generator=rng)
    tokens = torch.randint(0, 9, (15,), generator=rng)
    rewards = torch.tensor([0.0, 1.0, 0.5, 1.0, 0.25])
    with RolloutPairWriter(
        tmp_path / "pair", PairMetadata(PolicyRecord("e"), extra={"max_new_tokens": 8})
    ) as writer:
        start = 0
        for n, reward in zip(lengths, rewards.tolist(), strict=True):
            part = slice(start, start + n)
            writer.append_sequence(x[part], y[part], tokens[part], reward=reward)
            start += n
    outputs = [name for name in trm_ext.outputs.OUTPUTS]
    packed = trm_ext.token_divergence(x, y, tokens=tokens, outputs=outputs)
    layout = SequenceLayout.from_lengths(lengths)
    first = certify(packed, rewards, layout, held_out=True, horizon=8)
    # pieces in another order
    order = torch.randperm(15, generator=rng)
    pieces = SequenceLayout.from_segments(layout.sequence_id[order], layout.position[order], 5)
    shuffled = TokenDivergence(*(None if v is None else v[order] for v in packed))
    others = [certify(shuffled, rewards, pieces, held_out=True, horizon=8)]
    # padded
    padded = SequenceLayout.from_lengths(lengths, padded_length=6)
    spread = TokenDivergence(
        *(
            None if v is None else torch.full((5, 6), NAN).masked_scatter(padded.token_mask, v)
            for v in packed
        )
    )
    others.append(certify(spread, rewards, padded, held_out=True, horizon=8))
    others.append(certify_file(tmp_path / "pair", held_out=True, chunk_rows=2))
    write_statistics(tmp_path / "statistics", others[-1].statistics)
    others.append(certify_file(tmp_path / "statistics", held_out=True))
    drop = ("file", "rollout", "train")
    want = {k: v for k, v in as_dict(first).items() if k not in drop}
    for other in others:
        assert {k: v for k, v in as_dict(other).items() if k not in drop} == want
    assert others[-1].horizon == 8  # the file declares it


def test_certified_and_harmful_tell_the_truth() -> None:
    found, reward, layout, gain = coins(4000, 5, 0.5, 0.6)
    good = certify(found, reward, layout, held_out=True)
    assert good.verdict is Verdict.CERTIFIED and good.asymptotic_verdict is Verdict.CERTIFIED
    assert 0 < good.primary.lower_bound < gain
    assert good.primary.name == "truncated_weight" and good.primary.certifies_improvement
    assert f">= {good.primary.lower_bound:.3g} with probability 0.95" in good.reasons[0]
    assert all(limit < gain for limit in limits(good).values())
    bad = certify(found, 1 - reward, layout, held_out=True)
    assert bad.verdict is Verdict.HARMFUL and bad.asymptotic_verdict is Verdict.HARMFUL
    assert f"<= {-good.primary.lower_bound:.3g} with" in bad.reasons[0]  # the mirror image


def test_vacuous_from_four_rollouts() -> None:
    found, _, layout, _ = coins(4, 8, 0.1, 0.9, seed=3)
    made = certify(found, torch.tensor([0.0, 1.0, 0.0, 1.0]), layout, held_out=True)
    assert made.verdict is Verdict.VACUOUS and made.asymptotic_verdict is Verdict.VACUOUS
    assert made.seq_kl_lower.lower > 1
    assert "the error bound is above the reward span" in made.reasons[0]
    assert not next(b for b in made.bounds if b.name == "seq_kl").below_range


def test_the_same_data_are_never_certified() -> None:
    found, reward, layout, _ = coins(4000, 5, 0.5, 0.6)
    made = certify(found, reward, layout)
    assert made.verdict is made.asymptotic_verdict is Verdict.NOT_CERTIFIED
    assert made.label == "optimistic: same data" and made.notes[0].startswith(made.label)
    assert "on the data that the policy was trained on" in made.reasons[0]
    assert all(c.label.startswith("not a guarantee") for c in made.certificates)
    # what is bad on the data that flatter it is bad
    assert certify(found, 1 - reward, layout).verdict is Verdict.HARMFUL


def test_each_certificate_can_decide() -> None:
    found, reward, layout, _ = coins(60_000, 5, 0.5, 0.55)
    for name in FINITE:
        made = certify(found, reward, layout, held_out=True, primary=name)
        assert made.verdict is Verdict.CERTIFIED, name
        assert made.primary.name == name and name in made.reasons[0]
    with pytest.raises(ValueError, match=r"primary must be one of truncated_weight, .* got 'x'"):
        certify(found, reward, layout, primary="x")  # type: ignore[arg-type]


def test_every_certificate_is_judged_as_if_it_decided() -> None:
    batches = (
        (*coins(12_000, 5, 0.5, 0.57)[:3], True),
        (*coins(2000, 5, 0.5, 0.57)[:3], True),
        (*coins(12_000, 5, 0.5, 0.57)[:3], False),
        (*coins(4, 8, 0.1, 0.9, seed=3)[:3], True),
    )
    seen = set()
    for found, reward, layout, held_out in batches:
        for rewards in (reward, 1 - reward):
            first = certify(found, rewards, layout, held_out=held_out)
            assert tuple(j.certificate for j in first.judgements) == FINITE
            assert first.joint_confidence == pytest.approx(0.8)
            seen.update((j.certificate, j.verdict) for j in first.judgements)
            for name in FINITE if rewards is reward else ():
                made = certify(found, rewards, layout, held_out=held_out, primary=name)
                judged = first.judgement(name)
                assert (made.verdict, made.reasons[0]) == (judged.verdict, judged.reason)
    assert seen == {(name, verdict) for name in FINITE for verdict in Verdict}


def engine_pair(mean_kl: float) -> dict[str, Any]:
    """Eight rollouts of 64 tokens between engines whose logits differ by noise, at a mean KL."""
    rng = torch.Generator().manual_seed(11)
    x = 2 * torch.randn(8, 64, 100, generator=rng, dtype=torch.float64)
    noise = torch.randn(x.shape, generator=rng, dtype=torch.float64)
    tokens = torch.multinomial(x.softmax(-1).reshape(512, -1), 1, generator=rng).reshape(8, 64)
    scale = 1e-3
    for _ in range(8):  # the KL grows with the square of the noise
        found = trm_ext.token_divergence(
            x, x + scale * noise, tokens=tokens, outputs=trm_ext.outputs.OUTPUTS
        )
        assert found.kl is not None
        scale *= math.sqrt(mean_kl / float(found.kl.mean()))
    assert float(found.kl.mean()) == pytest.approx(mean_kl, rel=1e-3)
    return {
        "divergence": found,
        "rewards": torch.rand(8, generator=rng, dtype=torch.float64),
        "layout": SequenceLayout.from_mask(torch.ones(8, 64, dtype=torch.bool)),
        "held_out": True,
        "horizon": 64,
    }


@pytest.mark.parametrize("constants", [None, "split"])
def test_an_engine_that_rounds_is_no_obstacle_and_one_that_quantises_is_vacuous(
    constants: Any,
) -> None:
    """As CTranslate2 float32 and int8 against torch, whatever certificate decides."""
    rounding = certify(**engine_pair(1e-11), constants=constants)
    assert rounding.min_certifiable_gain < 1e-6
    assert {j.verdict for j in rounding.judgements} == {Verdict.NOT_CERTIFIED}
    quantised = certify(**engine_pair(5e-2), constants=constants)
    assert {j.verdict for j in quantised.judgements} == {Verdict.VACUOUS}


def test_the_smallest_certifiable_gain_is_what_the_estimate_must_exceed() -> None:
    for n in (10, 4000):  # with ten rollouts every limit is cut to the range
        found, reward, layout, _ = coins(n, 5, 0.5, 0.6)
        for name in FINITE:
            made = certify(found, reward, layout, held_out=True, primary=name)
            parts = made.primary.parts
            estimate = parts.get("estimate", parts.get("surrogate", NAN))
            least = made.min_certifiable_gain_finite
            assert (made.primary.lower_bound > 0) == (estimate > least)
            assert made.primary.lower_bound == pytest.approx(max(estimate - least, -1), abs=1e-12)
            assert radius(made.primary) <= least
    assert made.min_certifiable_gain_finite > 0
    few = certify(*coins(10, 5, 0.5, 0.6)[:3], held_out=True)
    variance = np.var(few.rewards.numpy() * (np.exp(few.sequence_log_weight.numpy()) - 1), ddof=1)
    log_term = math.log(2 / 0.05)
    width = math.sqrt(2 * variance * log_term / 10) + 7 * 2 * log_term / (3 * 9)
    assert few.min_certifiable_gain_finite == pytest.approx(width, rel=1e-9)


def test_a_reward_range_moves_and_scales_everything() -> None:
    one = certify(**noisy(n=60))
    batch = noisy(n=60)
    batch["rewards"] = 4 * batch["rewards"] - 3
    four = certify(**batch, reward_range=(-3.0, 1.0))
    for key, limit in limits(one).items():
        assert limits(four)[key] == pytest.approx(4 * limit, rel=1e-9), key
    assert four.min_certifiable_gain == pytest.approx(4 * one.min_certifiable_gain)
    assert four.attainable == pytest.approx(4 * one.attainable)
    assert [b.value for b in four.bounds] == pytest.approx([4 * b.value for b in one.bounds])
    assert four.verdict is one.verdict


def test_bounds_beside() -> None:
    found, reward, layout, _ = coins(50, 6, 0.5, 0.53)
    made = certify(found, reward, layout, held_out=True)
    delta, eps = float(made.sequence_max_kl[0]), 0.03
    value = {b.name: b.value for b in made.bounds}
    assert value["classical_kl"] == pytest.approx(30 * delta)
    assert value["coupling"] == pytest.approx(float(paper.coupling(6, eps).value))
    assert value["mixed_kl"] == pytest.approx(float(paper.mixed_kl(6, delta, 6 * delta).value))
    assert value["adaptive"] == pytest.approx(float(paper.adaptive([eps] * 6, delta, eps).value))
    assert value["split"] == pytest.approx(
        float(sharp.split(seq_kl=6 * delta, mean_tv=[eps] * 6).value)
    )
    assert value["seq_kl"] == pytest.approx(6 * delta)
    by_name = {b.name: b for b in made.bounds}
    assert by_name["classical_kl"].published and by_name["classical_kl"].assumes_maximum
    assert not by_name["seq_kl"].published and not by_name["seq_kl"].assumes_maximum
    for b in made.bounds:
        assert b.below_range == (b.value < 1)
        assert b.certifying == (b.value < made.attainable)
        assert b.instance == (b.value < made.surrogate.estimate)
    longer = certify(found, reward, layout, held_out=True, horizon=10)
    assert {b.name: b.value for b in longer.bounds}["classical_kl"] == pytest.approx(90 * delta)


def test_outside_mass_is_added_and_moves_the_baseline() -> None:
    batch = noisy(n=50)
    clean = certify(**batch)
    dirty = batch["divergence"]._replace(
        outside_mass=torch.full((50, 7), 0.01, dtype=torch.float64)
    )
    tokens = clean.sequence_tokens.double().mean().item()
    made = certify(**{**batch, "divergence": dirty})
    for a, b in zip(clean.bounds, made.bounds, strict=True):
        extra = 0 if a.name == "seq_kl" else 0.01 * tokens
        assert b.value - a.value == pytest.approx(extra, abs=1e-12)
    shift = clean.surrogate.estimate - made.surrogate.estimate
    assert shift == pytest.approx(batch["rewards"].mean().item() * 0.01 * tokens)
    assert any("mass per sequence outside" in note for note in made.notes)
    # an unknown outside mass: no baseline
    unknown = certify(**{**batch, "divergence": dirty._replace(outside_mass=None)})
    plain = (batch["rewards"] * clean.sequence_shift).mean().item()
    assert unknown.surrogate.estimate == pytest.approx(plain)


def test_the_bottleneck_is_found_where_it_was_planted() -> None:
    batch = noisy(n=40, noise=0.01)
    kl = batch["divergence"].kl.clone()
    kl[3, 0] += 2.5
    kl[17, 0] += 2.0
    kl[31, 0] += 3.0
    made = certify(**{**batch, "divergence": batch["divergence"]._replace(kl=kl)})
    b = made.bottleneck
    assert b is not None
    assert b.sequences == (31, 3, 17) and b.positions == (0,)
    assert b.first_token_share == pytest.approx(float(kl[:, 0].sum() / kl.sum()))
    assert b.sentences[1] == "80% of it comes from 3 (31, 3, 17) of 40 sequences"
    # the fewest: without the last one the share is missed
    total = made.sequence_kl
    assert total[[31, 3]].sum() < 0.8 * total.sum() <= total[list(b.sequences)].sum()


def test_rollouts_needed_are_the_fewest() -> None:
    found, reward, layout, _ = coins(200, 5, 0.5, 0.57)
    made = certify(found, reward, layout, held_out=True)
    n = made.rollouts_needed.truncated_weight
    assert n is not None and made.verdict is Verdict.NOT_CERTIFIED
    assert f"about {n} rollouts would do if mean and variance stay" in made.reasons[0]
    noise = certify(*coins(12, 5, 0.5, 0.505, seed=1)[:3], held_out=True)
    error = noise.primary.parts["standard_error"]
    assert 0 < noise.primary.parts["estimate"] < 2 * error
    few = noise.rollouts_needed.truncated_weight
    assert f"about {few} rollouts if the estimate, within two standard errors" in noise.reasons[0]
    x = reward.numpy() * (np.minimum(np.exp(made.sequence_log_weight.numpy()), 2.0) - 1)

    def width(count: int) -> float:
        return theory_certify.bernstein_radius(x.var(ddof=1), 2.0, count, 0.05)

    assert width(n) <= x.mean() < width(n - 1)
    enough = certify(*coins(3 * n, 5, 0.5, 0.57, seed=1)[:3], held_out=True)
    assert enough.verdict is Verdict.CERTIFIED
    budget, drift = enough.rollouts_needed.frozen_budget, enough.rollouts_needed.frozen_drift
    assert budget is not None and drift is not None and budget > drift > n
    beside = enough.judgement("frozen_budget")
    assert beside.verdict is Verdict.NOT_CERTIFIED and f"about {budget} rollouts" in beside.reason
    for name, count in (("frozen_budget", budget), ("frozen_drift", drift)):
        more = certify(*coins(3 * count, 5, 0.5, 0.57, seed=2)[:3], held_out=True)
        assert more.judgement(name).verdict is Verdict.CERTIFIED
    mask = enough.rollouts_needed.sequence_mask
    assert mask is not None and mask >= enough.rollouts_needed.truncated_weight
    hopeless = certify(found, 1 - reward, layout, held_out=True).rollouts_needed
    assert (hopeless.truncated_weight, hopeless.seq_kl) == (None, None)
    assert (hopeless.frozen_budget, hopeless.frozen_drift) == (None, None)


def test_a_split_chooses_on_every_fourth_and_certifies_on_the_others() -> None:
    batch = noisy(n=400, noise=0.1)
    made = certify(**batch, constants="split")
    assert (made.num_split, made.num_sequences) == (100, 300)
    assert made.constants_origin == "chosen on a split"
    rest = [b for b in range(400) if b % 4]
    assert made.sequence_index.tolist() == rest
    assert torch.equal(made.rewards, batch["rewards"][rest])
    # the certificates are those of the others with these constants
    others = TokenDivergence(*(None if v is None else v[rest] for v in batch["divergence"]))
    layout = SequenceLayout.from_mask(batch["layout"].token_mask[rest])
    direct = certify(
        others, batch["rewards"][rest], layout, held_out=True, constants=made.constants
    )
    assert limits(direct) == limits(made)
    # nothing of the others enters the choice
    changed = batch["rewards"].clone()
    changed[rest] = 1 - changed[rest]
    kl = batch["divergence"].kl.clone()
    kl[rest] *= 3
    again = certify(
        batch["divergence"]._replace(kl=kl), changed, batch["layout"], constants="split"
    )
    assert again.constants == made.constants
    assert made.bottleneck is not None and set(made.bottleneck.sequences) <= set(rest)
    # each gate's budget is a quantile of its own sums on the split, a quarter above
    spent, drifted = [], []
    split = [x for b, x in enumerate(sums(batch)["ratio"]) if b % 4 == 0]
    for steps in ([math.expm1(v) for v in x] for x in split):
        spent.append(sum(map(abs, steps)))
        drifted.append(max(abs(sum(steps[: t + 1])) for t in range(len(steps))))
    levels = (0.5, 0.75, 0.9, 1.0)
    for chosen, values in (
        (made.constants.shift_budget, spent),
        (made.constants.drift_budget, drifted),
    ):
        assert any(chosen == pytest.approx(1.25 * x) for x in np.quantile(values, levels))
    with pytest.raises(ValueError, match='constants="split" needs at least 5 sequences, got 4'):
        certify(**noisy(n=4), constants="split")


def check_coverage(batches: int, rollouts: int, constants: Any) -> None:
    """Limits that hold with probability 0.95 hold less often with a probability of 1e-6."""
    covered, together = dict.fromkeys(FINITE, 0), 0
    for seed in range(batches):
        found, reward, layout, gain = coins(rollouts, 5, 0.5, 0.57, seed=seed)
        made = certify(found, reward, layout, held_out=True, constants=constants)
        below = {c.name: c.lower_bound <= gain for c in made.certificates if c.finite_sample}
        for name in FINITE:
            covered[name] += below[name]
        together += all(below.values())
    for name, count in covered.items():
        assert count >= binom.ppf(1e-6, batches, 0.95), name
    assert together >= binom.ppf(1e-6, batches, made.joint_confidence)
    if batches >= 1000:
        for name, count in covered.items():
            assert theory_certify.clopper_pearson(count, batches, 0.05).lower >= 0.95, name


@pytest.mark.parametrize("constants", [None, "split"])
def test_limits_hold_as_often_as_they_say(constants: Any) -> None:
    check_coverage(30, 400, constants)


@pytest.mark.slow
@pytest.mark.parametrize("constants", [None, "split"])
def test_limits_hold_in_1000_batches(constants: Any) -> None:
    check_coverage(1000, 400, constants)


def test_missing_evidence_counts_as_the_worst_case() -> None:
    batch = noisy(n=30)
    kl, ratio = (getattr(batch["divergence"], n).clone() for n in ("kl", "log_ratio"))
    kl[2, 0] = NAN
    ratio[5, 0] = NAN
    made = certify(**{**batch, "divergence": batch["divergence"]._replace(kl=kl, log_ratio=ratio)})
    assert {name for name, _ in made.missing} == {"seq_kl", "log"}
    assert made.missing[0][1] == "KL or log-ratio is NaN in 2 of 30 sequences"
    assert math.isnan(made.seq_kl.estimate) and math.isnan(made.min_certifiable_gain)
    assert "2 tokens without evidence (NaN) count as the worst case" in made.notes
    assert math.isnan(made.sequence_max_kl[2]) and not made.keep[2] and made.hit[2]
    # rho = 0 in the place of the NaN ratio gives the same finite-sample limits
    ratio[5, 0] = -INF
    worst = certify(**{**batch, "divergence": batch["divergence"]._replace(kl=kl, log_ratio=ratio)})
    for name in FINITE:
        assert limits(worst)[name, True] == limits(made)[name, True]
    clean = certify(**batch)
    assert limits(made)["truncated_weight", True] <= limits(clean)["truncated_weight", True]
    json.dumps(as_dict(made), allow_nan=False)


def test_a_support_violation_makes_seq_kl_vacuous_and_names_its_place() -> None:
    batch = noisy(n=30)
    kl = batch["divergence"].kl.clone()
    kl[4, 0] = INF
    made = certify(**{**batch, "divergence": batch["divergence"]._replace(kl=kl)})
    assert made.verdict is Verdict.VACUOUS
    where = "(sequence 4, position 0)"
    assert made.reasons[0].startswith("D_seq is infinite") and where in made.reasons[0]
    assert made.seq_kl.estimate == INF and made.bounds == () and made.bottleneck is None
    assert {name for name, _ in made.missing} == {"seq_kl", "log"}
    json.dumps(as_dict(made), allow_nan=False)


@pytest.mark.parametrize("value", [-INF, INF, 1e4])
def test_a_ratio_that_no_sum_holds_leaves_the_sums_missing(value: float) -> None:
    batch = noisy(n=30)
    ratio = batch["divergence"].log_ratio.clone()
    ratio[4, 0] = value
    made = certify(**{**batch, "divergence": batch["divergence"]._replace(log_ratio=ratio)})
    why = "the ratio of a sampled token is 0 or too large to sum"
    assert [entry for entry in made.missing if entry[1] == why] == [("seq_kl", why), ("log", why)]
    weight = made.sequence_log_weight[4]
    assert limits(made)["truncated_weight", True] <= 1 and (weight > 1e3 or weight == -INF)
    json.dumps(as_dict(made), allow_nan=False)


def test_nothing_kept_cannot_be_certified_by_a_mask() -> None:
    batch = noisy(n=30)
    made = certify(**batch, constants=GateConstants(max_kl=0.0))
    assert made.accepted == 0 and made.hit.all()
    assert ("sequence_mask", "no sequence has every KL <= 0") in made.missing
    assert made.verdict is Verdict.NOT_CERTIFIED
    for name in ("frozen_budget", "frozen_drift"):
        assert limits(made)[name, True] == -1  # the span: nothing is known


def test_the_same_policy_on_both_sides_is_no_update() -> None:
    full = torch.zeros(20, 4, dtype=torch.float64)
    layout = SequenceLayout.from_lengths([4] * 20, padded_length=4)
    made = certify(TokenDivergence(kl=full, log_ratio=full), full[:, 0], layout, held_out=True)
    assert made.verdict is made.asymptotic_verdict is Verdict.NOT_CERTIFIED
    assert "equals the rollout policy on every token" in made.reasons[0]
    assert math.isnan(made.min_certifiable_gain) and made.bottleneck is None
    assert any("every reward is 0" in note for note in made.notes)


def test_prompts_shared_by_rollouts_are_said() -> None:
    batch = noisy(n=8)
    made = certify(**batch)
    statistics = replace(made.statistics, group_ids=torch.arange(8) // 2)
    again = trm_ext.certification.certify_statistics(statistics, held_out=True)
    assert any(note.startswith("rollouts of 4 prompts") for note in again.notes)
    assert any(note == "8 rollouts: the normal approximation is rough" for note in again.notes)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "one sequence": ({"n": 1}, "a certificate needs at least 2 sequences, got 1"),
    "nan": ({"rewards": torch.tensor([0.0, NAN, 1.0])}, "the reward of sequence 1 is NaN"),
    "outside": (
        {"rewards": torch.tensor([0.0, 0.5, 1.5])},
        "the reward of sequence 2 is 1.5, outside [0, 1]",
    ),
    "too few": ({"rewards": torch.zeros(2)}, "rewards must be [B] with B = 3, got [2]"),
    "range": ({"reward_range": (1.0, 1.0)}, "reward_range must be finite with low < high, got"),
    "alpha": ({"alpha": 0.0}, "alpha must lie strictly between 0 and 1, got 0"),
    "horizon": ({"horizon": 3}, "horizon 3 is below the longest sequence"),
    "constants": ({"constants": "best"}, 'constants must be GateConstants, "split" or None'),
    "no tokens": (
        {"layout": SequenceLayout.from_mask(torch.zeros(3, 7, dtype=torch.bool))},
        "no token counts, so there is nothing to compare",
    ),
    "no ratio": (
        {"divergence": TokenDivergence(kl=torch.zeros(3, 7))},
        "a certificate needs log_ratio: ask token_divergence for outputs=('kl', 'log_ratio')",
    ),
    "negative": (
        {"divergence": TokenDivergence(kl=torch.full((3, 7), -0.5), log_ratio=torch.zeros(3, 7))},
        "kl must be >= 0, got -0.5",
    ),
    "shape": (
        {"divergence": TokenDivergence(kl=torch.zeros(3, 6), log_ratio=torch.zeros(3, 6))},
        "kl must have the layout's token shape [3, 7], got [3, 6]",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_sentence(case: str) -> None:
    change, message = BAD[case]
    change = dict(change)
    batch = noisy(n=change.pop("n", 3))
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        certify(**{**batch, **change})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_kl": -1.0}, "max_kl must be a finite number >= 0, got -1.0"),
        ({"max_ratio": 0.5}, "max_ratio must be a finite number >= 1, got 0.5"),
        ({"kl_budget": NAN}, "kl_budget must be a finite number >= 0, got nan"),
        ({"drift_budget": INF}, "drift_budget must be a finite number >= 0, got inf"),
        ({"max_abs_log_weight": 0.0}, "max_abs_log_weight must be a finite number > 0, got 0.0"),
    ],
)
def test_bad_constants_are_one_sentence(change: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        GateConstants(**change)


def test_a_file_without_rewards_is_one_sentence(tmp_path: Path) -> None:
    with RolloutPairWriter(tmp_path / "pair") as writer:
        for _ in range(3):
            writer.append_sequence(torch.zeros(2, 4), torch.zeros(2, 4), torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="pair: no rewards: a certificate is about the expected"):
        certify_file(tmp_path / "pair")


def test_rollouts_of_another_law_than_their_logits_are_refused(tmp_path: Path) -> None:
    for kind in ("raw", "processed"):
        side = PolicyRecord("e", top_p=0.9, logits=kind)
        with RolloutPairWriter(tmp_path / kind, PairMetadata(side)) as writer:
            for reward in (0.0, 1.0):
                x = torch.zeros(2, 4)
                writer.append_sequence(x, x + x, torch.tensor([0, 1]), reward=reward)
    with pytest.raises(ValueError, match=r"truncated \(top_k 0, top_p 0\.9, min_p 0\.0\) but the"):
        certify_file(tmp_path / "raw")
    assert certify_file(tmp_path / "processed").num_sequences == 2


def test_gradients_and_low_precision_are_no_obstacle() -> None:
    batch = noisy(n=6)
    found = TokenDivergence(
        kl=batch["divergence"].kl.float().requires_grad_(),
        log_ratio=batch["divergence"].log_ratio.to(torch.bfloat16),
    )
    made = certify(found, batch["rewards"].to(torch.float16), batch["layout"])
    assert isinstance(made.statistics, TokenStatistics) and made.num_sequences == 6
