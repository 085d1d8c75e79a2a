# SPDX-License-Identifier: Apache-2.0
"""The verdict: a plain-Python oracle over padded, packed and segmented layouts, and its rules."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import trm_ext as trm
from tests.quoted import quoted
from tests.rows import KL_RTOL, base_rows
from trm_ext import Reason, SequenceLayout

INF, NAN = float("inf"), float("nan")


def oracle(kl, ids, positions, mask, batch, threshold):
    """Verdict by the definition, one sequence at a time, on Python floats."""
    rows = []
    for b in range(batch):
        here = [(p, v) for v, i, p, m in zip(kl, ids, positions, mask, strict=True) if i == b and m]
        here.sort()
        if not here:
            rows.append((True, Reason.EMPTY, -1, 0.0, 0.0, 0.0))
            continue
        values = [v for _, v in here]
        missing = [p for p, v in here if math.isnan(v)]
        total = math.fsum(values)
        if missing:
            rows.append((False, Reason.NON_FINITE, missing[0], NAN, NAN, NAN))
            continue
        worst = max(values)
        position = next(p for p, v in here if v == worst)
        keep = worst <= threshold
        reason = Reason.SUPPORT if worst == INF else Reason.KEPT if keep else Reason.MAX_KL
        keep = keep and worst != INF
        rows.append((keep, reason, position, worst, total / len(values), total))
    return rows


def assert_verdict(verdict, rows):
    for index, field in enumerate(("keep", "reason", "position")):
        assert getattr(verdict, field).tolist() == [row[index] for row in rows], field
    for index, field in ((3, "max_kl"), (4, "mean_kl"), (5, "sum_kl")):
        torch.testing.assert_close(
            getattr(verdict, field).double(),
            torch.tensor([row[index] for row in rows], dtype=torch.float64),
            rtol=2**-23,  # a float64 result, stored in float32
            atol=0,
            equal_nan=True,
        )


def random_kl(count, generator):
    kl = torch.rand(count, generator=generator)
    kl[torch.rand(count, generator=generator) < 0.3] = 0.25  # ties
    kl[torch.rand(count, generator=generator) < 0.03] = NAN
    kl[torch.rand(count, generator=generator) < 0.03] = INF
    return kl


@pytest.mark.parametrize("seed", range(20))
def test_every_layout_against_the_definition(seed):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 6, (7,), generator=generator)
    total = int(lengths.sum())
    kl = random_kl(total, generator)
    mask = torch.rand(total, generator=generator) < 0.8
    packed = SequenceLayout.from_cu_seqlens(
        torch.nn.functional.pad(lengths.cumsum(0), (1, 0)), mask
    )
    flat = (kl.tolist(), packed.sequence_id.tolist(), packed.position.tolist(), mask.tolist())
    rows = oracle(*flat, 7, 0.5)
    verdict = trm.max_kl_verdict(kl, packed, max_kl=0.5)
    assert_verdict(verdict, rows)
    assert verdict.token_keep.tolist() == [
        m and rows[i][0] for m, i in zip(mask.tolist(), flat[1], strict=True)
    ]
    # Padded: the same tokens at the same positions, poison everywhere else.
    padded_kl, padded_mask = torch.full((7, 6), NAN), torch.zeros(7, 6, dtype=torch.bool)
    padded_kl[packed.sequence_id, packed.position] = kl
    padded_mask[packed.sequence_id, packed.position] = mask
    padded = trm.max_kl_verdict(padded_kl, SequenceLayout.from_mask(padded_mask), max_kl=0.5)
    assert_verdict(padded, rows)
    # Segments: the same tokens in random order.
    order = torch.randperm(total, generator=generator)
    pieces = SequenceLayout.from_segments(
        packed.sequence_id[order], packed.position[order], 7, mask[order]
    )
    assert_verdict(trm.max_kl_verdict(kl[order], pieces, max_kl=0.5), rows)


def test_the_threshold_is_inclusive():
    layout = SequenceLayout.from_lengths([1, 1])
    kl = torch.tensor([0.02, torch.nextafter(torch.tensor(0.02), torch.tensor(1.0)).item()])
    at = float(kl[0])
    assert trm.max_kl_verdict(kl, layout, max_kl=at).keep.tolist() == [True, False]
    assert trm.max_kl_verdict(torch.zeros(2), layout, max_kl=0).keep.all()


def test_infinite_threshold_still_masks_a_support_violation():
    layout = SequenceLayout.from_lengths([1, 1])
    verdict = trm.max_kl_verdict(torch.tensor([1e30, INF]), layout, max_kl=INF)
    assert verdict.keep.tolist() == [True, False]
    assert verdict.reason.tolist() == [Reason.KEPT, Reason.SUPPORT]


@pytest.mark.parametrize("poison", (NAN, INF, -INF, 1e30))
def test_values_under_the_mask_are_never_used(poison):
    layout = SequenceLayout.from_mask(torch.tensor([[True, False, True]]))
    clean = trm.max_kl_verdict(torch.tensor([[0.1, 0.0, 0.2]]), layout, max_kl=0.5)
    dirty = trm.max_kl_verdict(torch.tensor([[0.1, poison, 0.2]]), layout, max_kl=0.5)
    assert all(torch.equal(a, b) for a, b in zip(clean, dirty, strict=True))
    assert dirty.position.tolist() == [2] and not dirty.token_keep[0, 1]


class TestFromLogits:
    def test_a_planted_divergence_is_found_where_it_is(self):
        x = base_rows("flat", 12, 500).float().reshape(3, 4, 500)
        y = x.clone()
        y[1, 2] += torch.randn(500)
        layout = SequenceLayout.from_mask(torch.ones(3, 4, dtype=torch.bool))
        verdict = trm.trust_region_mask(x, y, layout, max_kl=0.02)
        assert verdict.keep.tolist() == [True, False, True]
        assert verdict.reason.tolist() == [Reason.KEPT, Reason.MAX_KL, Reason.KEPT]
        assert verdict.position[1] == 2 and verdict.token_keep.sum() == 8
        # A hole over it: never read, so the sequence is kept.
        mask = torch.ones(3, 4, dtype=torch.bool)
        mask[1, 2] = False
        y[1, 2] = NAN
        holed = trm.trust_region_mask(x, y, SequenceLayout.from_mask(mask), max_kl=0.02)
        assert holed.keep.all()

    def test_packed_equals_padded(self):
        x, y = torch.randn(6, 90), torch.randn(6, 90)
        packed = trm.trust_region_mask(x, y, SequenceLayout.from_lengths([3, 3]), max_kl=1.0)
        padded = trm.trust_region_mask(
            x.reshape(2, 3, 90),
            y.reshape(2, 3, 90),
            SequenceLayout.from_lengths([3, 3], padded_length=3),
            max_kl=1.0,
        )
        for a, b in zip(packed, padded, strict=True):
            assert torch.equal(a.flatten(), b.flatten())

    def test_temperatures_of_both_sides(self):
        x, layout = torch.randn(4, 50), SequenceLayout.from_lengths([2, 2])
        per_token = torch.tensor([0.5, 0.7, 1.3, 2.0])
        for rollout, train in ((1.0, 0.6), (0.6, 1.0), (0.6, 0.6), (per_token, 1.0)):
            found = trm.trust_region_mask(
                x, x, layout, max_kl=0.1, rollout_temperature=rollout, train_temperature=train
            )
            p, q = (
                torch.log_softmax(x.double() / torch.as_tensor(t).reshape(-1, 1).double(), -1)
                for t in (rollout, train)
            )
            kl = (p.exp() * (p - q)).sum(-1).reshape(2, 2).amax(1)
            torch.testing.assert_close(found.max_kl.double(), kl, rtol=KL_RTOL, atol=1e-12)
            assert found.keep.tolist() == (kl <= 0.1).tolist()
        with pytest.raises(ValueError, match="train_temperature must be a finite number > 0"):
            trm.trust_region_mask(x, x, layout, max_kl=0.1, train_temperature=0.0)

    def test_no_gradient_flows(self):
        y = torch.randn(2, 9, requires_grad=True)
        verdict = trm.trust_region_mask(
            torch.randn(2, 9), y, SequenceLayout.from_lengths([2]), max_kl=1.0
        )
        assert not verdict.max_kl.requires_grad

    @pytest.mark.parametrize("kind", ("padded", "packed", "segments"))
    def test_no_value_leaves_the_device(self, kind):
        # Fake tensors have no values: any .item(), bool() or data-dependent shape would raise.
        from torch._subclasses.fake_tensor import FakeTensorMode

        real = {
            "padded": SequenceLayout.from_mask(torch.ones(2, 3, dtype=torch.bool)),
            "packed": SequenceLayout.from_lengths([2, 4]),
            "segments": SequenceLayout.from_segments(
                torch.tensor([1, 0, 1, 0, 0, 1]), torch.arange(6), 2
            ),
        }[kind]
        with FakeTensorMode() as mode:
            fields = {name: vars(real)[name] for name in vars(real) if vars(real)[name] is not None}
            layout = SequenceLayout(**{n: mode.from_tensor(t) for n, t in fields.items()})
            logits = torch.randn(*real.shape, 9)
            for temperature in (1.0, 0.7, torch.rand(real.shape)):
                verdict = trm.trust_region_mask(
                    logits, logits + 1, layout, max_kl=0.1, train_temperature=temperature
                )
        assert verdict.keep.shape == (2,)

    def test_compiles_in_one_graph(self):
        layout = SequenceLayout.from_lengths([2, 1])

        def mask(x, y):
            return trm.trust_region_mask(x, y, layout, max_kl=0.5)

        x, y = torch.randn(3, 9), torch.randn(3, 9)
        compiled = torch.compile(mask, fullgraph=True, backend="aot_eager")
        assert all(torch.equal(a, b) for a, b in zip(compiled(x, y), mask(x, y), strict=True))

    def test_compiles_with_a_limit_that_changes(self):
        """From the second value on the limit is a symbolic number of the compiler's."""
        token_mask = torch.ones(2, 5, dtype=torch.bool)
        kl = torch.rand(2, 5, generator=torch.Generator().manual_seed(0))

        def judge(kl, limit):
            return trm.max_kl_verdict(kl, SequenceLayout.from_mask(token_mask), max_kl=limit)[:8]

        compiled = torch.compile(judge, fullgraph=True, backend="aot_eager")
        for limit in (0.1, 0.5, float(kl[1].max()), 0.97):
            pairs = zip(compiled(kl, limit), judge(kl, limit), strict=True)
            assert all(torch.equal(a, b) for a, b in pairs), limit


class TestBadInput:
    @pytest.mark.parametrize("threshold", (-0.1, NAN))
    def test_threshold(self, threshold):
        x, layout = torch.zeros(1, 3), SequenceLayout.from_lengths([1])
        with pytest.raises(ValueError, match=f"max_kl must be >= 0, got {threshold}"):
            trm.trust_region_mask(x, x, layout, max_kl=threshold)

    def test_layout_of_another_shape(self):
        x, layout = torch.zeros(4, 3), SequenceLayout.from_lengths([3])
        with pytest.raises(ValueError, match=r"\[3\], got \[4\]"):
            trm.trust_region_mask(x, x, layout, max_kl=0.1)


# Criteria: a plain-Python oracle ---------------------------------------------------------------

GEO, SEQ, TOKEN = trm.GeoRatioBand, trm.SequenceRatioBand, trm.TokenRatioBand
ESTIMATE = {
    "k1": lambda x: -x,
    "k2": lambda x: x * x / 2,
    "k3": lambda x: math.expm1(x) - x,
    "abs_log_ratio": abs,
    "ratio_gap": lambda x: abs(math.expm1(x)),
}
CRITERIA = (
    trm.MaxDivergence("kl", 0.5),
    trm.MaxDivergence("k2", 0.1),
    trm.MeanDivergence("kl", 0.35),
    trm.MeanDivergence("k3", 0.1),
    trm.SumDivergence("kl", 1.4),
    trm.SumDivergence("k1", 0.3),
    trm.QuantileDivergence("kl", 0.4, 0.6),
    trm.QuantileDivergence("abs_log_ratio", 0.3, 0.5),
    GEO(0.9, 1.15),
    SEQ(0.6, 1.5),
    TOKEN(0.8, 1.25),
    trm.TokenDivergenceLimit("kl", 0.6),
    trm.LengthNormalized(0.25, max_kl=0.02),
    trm.LengthNormalized(0.25, max_kl=0.02, max_tv=0.07),
    trm.MeanDivergence("ratio_gap", 0.3),
)


def statistic(criterion, kl, ratio):
    """(statistic, failed) of one sequence by the definition, on lists of Python floats."""
    if isinstance(criterion, (GEO, SEQ, TOKEN)):
        low, high = math.log(criterion.low), math.log(criterion.high)
        if isinstance(criterion, TOKEN):
            return sum(low <= x <= high for x in ratio) / max(1, len(ratio)), False
        value = math.fsum(ratio) / (max(1, len(ratio)) if isinstance(criterion, GEO) else 1)
        return value, not low <= value <= high
    if isinstance(criterion, trm.LengthNormalized):
        tv = math.sqrt(criterion.max_kl / 2) if criterion.max_tv is None else criterion.max_tv
        after = [len(ratio) - 1 - t for t in range(len(ratio))]
        w = [min(1, n * tv, math.sqrt(n * criterion.max_kl / 2)) for n in after]
        terms = (v * abs(math.expm1(x)) for v, x in zip(w, ratio, strict=True))
        value = math.fsum(terms) / (sum(w) or 1)
        return value, value > criterion.limit
    named = criterion.quantity
    values = kl if named == "kl" else [ESTIMATE[named](x) for x in ratio]
    if isinstance(criterion, trm.TokenDivergenceLimit):
        return sum(v <= criterion.limit for v in values) / max(1, len(values)), False
    if not values:
        return 0.0, False
    if isinstance(criterion, trm.QuantileDivergence):
        ranked = sorted(values)
        value = next(v for v in ranked if sum(u <= v for u in ranked) >= criterion.level * len(kl))
    elif isinstance(criterion, trm.MaxDivergence):
        value = max(values)
    else:
        value = math.fsum(values)
        value /= len(values) if isinstance(criterion, trm.MeanDivergence) else 1
    return value, value > criterion.limit


def passing(criterion, kl, ratio):
    """Whether a token passes, by the definition."""
    if isinstance(criterion, TOKEN):
        return math.log(criterion.low) <= ratio <= math.log(criterion.high)
    return not isinstance(criterion, trm.TokenDivergenceLimit) or kl <= criterion.limit


def layouts(packed, poison):
    """The same batch packed, padded with poison and as shuffled segments: (layout, mover)."""
    width = int(packed.position.max()) + 1 if packed.position.numel() else 1
    mask = torch.zeros(packed.num_sequences, width, dtype=torch.bool)
    mask[packed.sequence_id, packed.position] = packed.token_mask

    def pad(values):
        padded = torch.full(mask.shape, poison, dtype=values.dtype)
        padded[packed.sequence_id, packed.position] = values
        return torch.where(mask, padded, poison)

    order = torch.randperm(packed.position.numel())
    segments = SequenceLayout.from_segments(
        packed.sequence_id[order],
        packed.position[order],
        packed.num_sequences,
        packed.token_mask[order],
    )
    return {
        "packed": (packed, lambda v: v),
        "padded": (SequenceLayout.from_mask(mask), pad),
        "segments": (segments, lambda v: v[order]),
    }


def batch(seed):
    """A packed layout with holes and empty sequences, and finite kl and log-ratios."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 7, (40,), generator=generator)
    total = int(lengths.sum())
    mask = torch.rand(total, generator=generator) < 0.8
    packed = SequenceLayout.from_cu_seqlens(
        torch.nn.functional.pad(lengths.cumsum(0), (1, 0)), mask
    )
    kl = torch.rand(total, generator=generator)
    ratio = torch.randn(total, generator=generator) * 0.4
    return packed, kl, ratio


@pytest.mark.parametrize("criterion", CRITERIA, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_each_criterion_on_every_layout(criterion, seed):
    packed, kl, ratio = batch(seed)
    rows, tokens = [], {}
    for b in range(40):
        here = (packed.sequence_id == b) & packed.token_mask
        k, r = kl[here].double().tolist(), ratio[here].double().tolist()
        found, failed = statistic(criterion, k, r)
        passes = [passing(criterion, x, y) for x, y in zip(k, r, strict=True)]
        keep = not failed and (not k or any(passes))
        code = Reason.TOKENS if not failed else criterion.code
        reason = Reason.EMPTY if not k else Reason.KEPT if keep else code
        rows.append((found, failed, keep, reason))
        for p, flag in zip(packed.position[here].tolist(), passes, strict=True):
            tokens[b, p] = flag and keep
    assert {row[2] for row in rows} == {True, False}, "both outcomes occur"
    for poison in (NAN, INF, -INF, 1e30):
        for name, (layout, move) in layouts(packed, poison).items():
            found = trm.verdict(
                criterion, layout, divergence={"kl": move(kl)}, log_ratio=move(ratio)
            )
            assert found.keep.tolist() == [row[2] for row in rows], name
            assert found.reason.tolist() == [row[3] for row in rows], name
            assert found.failed[0].tolist() == [row[1] for row in rows], name
            torch.testing.assert_close(
                found.statistics[0],
                torch.tensor([row[0] for row in rows], dtype=torch.float64),
                rtol=1e-6,  # k3 and ratio_gap of float32 log-ratios: a few float32 roundings
                atol=1e-7,
            )
            for index in layout.token_mask.nonzero().tolist():
                at = tuple(index)
                key = (int(layout.sequence_id[at]), int(layout.position[at]))
                assert bool(found.token_keep[at]) == tokens[key], name
            assert not found.token_keep[~layout.token_mask].any()


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64), ids=str)
@pytest.mark.parametrize("text", ("max_kl<=0.5", "mean_kl<=0.4", "sum_kl<=1.5", "max_tv<=0.5"))
def test_one_limit_is_judged_like_several_criteria(text, dtype):
    """Alone it is one op; beside one that says nothing new, Python puts the verdict together."""
    packed, kl, other = batch(4)
    kl[::7], kl[3::11], other[5::13], other[9::17] = NAN, INF, -INF, NAN
    reasons = set()
    for exact in ({"kl", "tv"}, {"tv"} if "tv" in text else {"kl"}):
        for name, (layout, move) in layouts(packed, NAN).items():
            given = {"kl": move(kl.to(dtype)), "tv": move(other.to(dtype))}
            given = {key: value for key, value in given.items() if key in exact}
            alone = trm.verdict(text, layout, divergence=given)
            again = f"{text} & {text.partition('<')[0]}<=inf"
            several = trm.verdict(again, layout, divergence=given)
            reasons.update(alone.reason.tolist())
            for field, one, two in zip(alone._fields, alone, several, strict=True):
                two = two[:1] if field in ("statistics", "failed") else two
                assert one.dtype == two.dtype, field
                torch.testing.assert_close(
                    one,
                    two,
                    rtol=0,
                    atol=0,
                    equal_nan=True,
                    msg=lambda m, n=(name, field): f"{n} {m}",
                )
    assert {Reason.KEPT, Reason.NON_FINITE, Reason.SUPPORT, Reason.EMPTY} <= reasons
    assert len(reasons) == 5, "some sequence is beyond the limit"


class Launches(TorchDispatchMode):
    """Counts the calls of our ops."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "trm":
            self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("text", "launches"),
    (
        ("max_kl<=0.02", ["sequence_verdict"]),
        ("sum_kl<=0.02", ["sequence_verdict"]),
        ("max_kl<=0.02 & mean_kl<=0.001 & sum_kl<=1", ["sequence_reduce"]),
        # log_ratio, |log_ratio| and the kl that a verdict reports
        ("0.9<=geo_ratio<=1.1 & seq_ratio<=5", ["sequence_reduce"] * 3),
        # k3, and the log_ratio that must be finite
        ("max_k3<=1 & mean_kl<=1", ["sequence_reduce"] * 3),
    ),
)
def test_no_values_are_reduced_twice(text, launches):
    packed, kl, ratio = batch(0)
    with Launches() as seen:
        trm.verdict(text, packed, divergence={"kl": kl}, log_ratio=ratio)
    assert seen.names == launches


def test_all_criteria_must_hold_and_the_first_one_that_fails_is_named():
    layout = SequenceLayout.from_lengths([2, 2, 2, 2])
    kl = torch.tensor([0.1, 0.2, 0.9, 0.0, 0.3, 0.3, 0.9, 0.9])
    lr = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.2, 0.5, 0.2, 0.5])
    found = trm.verdict("max_kl<=0.5 & geo_ratio<=1.1", layout, divergence={"kl": kl}, log_ratio=lr)
    assert found.keep.tolist() == [True, False, False, False]
    assert found.reason.tolist() == [
        Reason.KEPT,
        Reason.MAX_KL,
        Reason.GEO_RATIO,
        Reason.MAX_KL,
    ]
    assert found.position.tolist() == [1, 0, 1, 0]
    assert found.failed.tolist() == [[False, True, False, True], [False, False, True, True]]
    swapped = trm.verdict(
        ["geo_ratio<=1.1", trm.MaxDivergence("kl", 0.5)],
        layout,
        divergence={"kl": kl},
        log_ratio=lr,
    )
    assert swapped.keep.equal(found.keep)
    assert swapped.reason.tolist()[3] == Reason.GEO_RATIO and swapped.position[3] == 1


def test_a_token_criterion_does_not_change_what_another_one_sees():
    # One library masks tokens first and then finds the rest of the sequence acceptable.
    layout, lr = SequenceLayout.from_lengths([3]), torch.tensor([0.0, 3.0, 0.0])
    band = "0.5<=token_ratio<=2"
    assert trm.verdict(band, layout, log_ratio=lr).token_keep.tolist() == [True, False, True]
    for text in (f"{band} & geo_ratio<=1.5", f"geo_ratio<=1.5 & {band}"):
        assert not trm.verdict(text, layout, log_ratio=lr).keep.any()


class TestNonFinite:
    layout = SequenceLayout.from_lengths([2, 2, 2, 2, 2, 0])
    kl = torch.tensor([0.1, NAN, 0.1, INF, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1])
    lr = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, NAN, -INF, 0.0, 0.0, INF])

    @pytest.mark.parametrize(
        "exact", ("max_kl<=inf", "mean_kl<=inf", "q0.5_kl<=inf", "token_kl<=9")
    )
    @pytest.mark.parametrize("sampled", ("geo_ratio<=inf", "token_ratio<=9", "sum_k3<=inf"))
    def test_one_policy_for_every_criterion(self, exact, sampled):
        found = trm.verdict(
            f"{sampled} & {exact}", self.layout, divergence={"kl": self.kl}, log_ratio=self.lr
        )
        assert found.reason.tolist() == [
            Reason.NON_FINITE,
            Reason.SUPPORT,
            Reason.UNSCORED,
            Reason.SUPPORT,
            Reason.SUPPORT,
            Reason.EMPTY,
        ]
        assert found.keep.tolist() == [False] * 5 + [True]
        assert found.position.tolist() == [1, 1, 1, 0, 1, -1]
        assert not found.token_keep.any()

    def test_only_what_a_criterion_reads_is_judged(self):
        found = trm.verdict("max_kl<=1", self.layout, divergence={"kl": self.kl}, log_ratio=self.lr)
        assert found.keep.tolist() == [False, False, True, True, True, True]

    def test_log_probs_that_an_engine_did_not_report(self):
        # A missing log-prob written as 0 is probability 1; written as NaN it is unscored.
        layout = SequenceLayout.from_lengths([3])
        train = torch.tensor([-1.0, -10.8, -1.0])
        for missing, reason in ((NAN, Reason.UNSCORED), (0.0, Reason.MAX)):
            divergence = {
                "logp_train": train,
                "logp_rollout": torch.tensor([-1.0, missing, -1.0]),
            }
            found = trm.verdict("max_k2<=5", layout, divergence=divergence)
            assert found.reason.tolist() == [reason] and found.position.tolist() == [1]
            assert trm.verdict("max_binary_kl<=5", layout, divergence=divergence).reason == reason

    def test_no_clamp_hides_a_large_ratio(self):
        # Clamping log-ratios at 20 caps k2 at 200 and keeps both.
        layout = SequenceLayout.from_lengths([1, 1])
        lr = torch.tensor([50.0, -INF])
        found = trm.verdict("max_k2<=250", layout, log_ratio=lr)
        assert found.reason.tolist() == [Reason.MAX, Reason.SUPPORT]
        assert found.statistics[0, 0] == 1250


class TestInfinityCap:
    """Off by default; what it caps is judged as that number, and counted."""

    layout = SequenceLayout.from_lengths([2, 2, 1, 1])
    kl = torch.tensor([INF, 0.5, 0.1, 0.1, NAN, INF])
    lr = torch.tensor([-INF, 1.0, 0.0, INF, 0.0, NAN])

    @pytest.mark.parametrize(
        ("text", "statistic", "keep", "capped"),
        (
            ("max_kl<=2", [2, 0.1], [1, 1, 0, 1], [1, 0, 0, 1]),
            ("max_kl<=1.9", [2, 0.1], [0, 1, 0, 0], [1, 0, 0, 1]),
            ("mean_kl<=1.25", [1.25, 0.1], [1, 1, 0, 0], [1, 0, 0, 1]),
            ("sum_kl<=2.4", [2.5, 0.2], [0, 1, 0, 1], [1, 0, 0, 1]),
            ("token_kl<=1", [0.5, 1], [1, 1, 0, 0], [1, 0, 0, 1]),
            ("0.6<=geo_ratio<=2.7", [-0.5, 1], [1, 0, 1, 0], [1, 1, 0, 0]),
            ("seq_ratio<=1", [-1, 2], [1, 0, 1, 0], [1, 1, 0, 0]),
            ("max_k2<=2", [2, 2], [1, 1, 1, 0], [1, 1, 0, 0]),
            ("max_k3<=2", [math.expm1(-2) + 2, math.exp(2) - 3], [1, 0, 1, 0], [1, 1, 0, 0]),
            ("max_kl<=2 & max_k2<=2", [2, 0.1], [1, 1, 0, 0], [1, 1, 0, 1]),
        ),
    )
    def test_by_hand(self, text, statistic, keep, capped):
        given = {"divergence": {"kl": self.kl}, "log_ratio": self.lr}
        found = trm.verdict(text, self.layout, infinity_cap=2.0, **given)
        assert found.keep.tolist() == [bool(k) for k in keep]
        assert found.capped.tolist() == capped
        assert found.statistics[0, :2].tolist() == pytest.approx(statistic, rel=1e-6)
        assert found.metrics(sync=True)["trm/capped_tokens"] == sum(capped)
        assert Reason.SUPPORT not in found.reason.tolist()
        # The exact numbers stay what they are.
        assert found.max_kl[[0, 3]].tolist() == [INF, INF] and found.max_kl[2].isnan()
        off = trm.verdict(text, self.layout, **given)
        assert off.capped.tolist() == [0] * 4 and Reason.SUPPORT in off.reason.tolist()

    def test_binary_kl_of_an_impossible_token(self):
        logps = {"logp_train": torch.tensor([-INF]), "logp_rollout": torch.tensor([-1.0])}
        layout = SequenceLayout.from_lengths([1])
        found = trm.verdict("max_binary_kl<=7", layout, divergence=logps, infinity_cap=7.0)
        assert found.keep.all() and found.statistics.item() == 7 and found.capped.item() == 1

    def test_what_does_not_count_is_not_capped(self):
        layout = SequenceLayout.from_mask(torch.tensor([[True, False]]))
        found = trm.verdict(
            "max_kl<=1", layout, divergence={"kl": torch.tensor([[0.0, INF]])}, infinity_cap=0.5
        )
        assert found.capped.tolist() == [0] and found.statistics.item() == 0


class TestSupport:
    def test_a_truncated_rollout_has_a_finite_kl(self):
        # Top-2 of (.5, .3, .1, .1): the trainer normalises over everything.
        train = torch.tensor([[0.5, 0.3, 0.1, 0.1]], dtype=torch.float64).log()
        rollout = torch.tensor([[0.625, 0.375, 0.0, 0.0]], dtype=torch.float64).log()
        layout = SequenceLayout.from_lengths([1])
        exact = trm.token_divergence(rollout, train, outputs=("kl", "outside_mass"))
        found = trm.verdict("max_kl<=0.5 & max_outside_mass<=0.1", layout, divergence=exact)
        assert found.max_kl.item() == pytest.approx(0.223144, abs=1e-6)
        assert found.reason.tolist() == [Reason.MAX]
        assert found.statistics[1].item() == pytest.approx(0.2)
        mirrored = trm.token_divergence(train, rollout)
        assert trm.verdict("max_kl<=9", layout, divergence=mirrored).reason == Reason.SUPPORT

    def test_only_the_full_vocabulary_sees_what_was_not_sampled(self):
        p = torch.tensor([[0.5, 0.4, 0.05, 0.05]], dtype=torch.float64).log()
        q = torch.tensor([[0.5, 0.001, 0.2495, 0.2495]], dtype=torch.float64).log()
        layout, token = SequenceLayout.from_lengths([1]), torch.zeros(1, dtype=torch.int64)
        names = ("kl", "log_ratio", "logp_train", "logp_rollout")
        exact = trm.token_divergence(p, q, tokens=token, outputs=names)
        sampled = "max_k2<=0 & max_k3<=0 & max_binary_kl<=0 & max_binary_tv<=0 & 1<=geo_ratio<=1"
        assert trm.verdict(sampled, layout, divergence=exact).keep.all()
        assert not trm.verdict("max_kl<=2.2", layout, divergence=exact).keep.any()


class TestPeerTraps:
    """Inputs on which other libraries surprise; docs/conventions.md lists them."""

    def test_bounds_are_on_train_over_rollout(self):
        layout = SequenceLayout.from_lengths([1, 1])
        lr = torch.tensor([0.6, 1 / 0.6]).log()
        assert trm.verdict("0.5<=geo_ratio<=1.2", layout, log_ratio=lr).keep.tolist() == [
            True,
            False,
        ]

    def test_the_geometric_mean_is_blind_to_compensation_and_k2_is_not(self):
        layout, lr = SequenceLayout.from_lengths([2]), torch.tensor([100.0, 0.01]).log()
        assert trm.verdict("0.999<=geo_ratio<=1.001", layout, log_ratio=lr).keep.all()
        assert not trm.verdict("max_k2<=4", layout, log_ratio=lr).keep.any()

    def test_k3_is_one_sided_and_k2_is_not(self):
        layout, lr = SequenceLayout.from_lengths([1, 1]), torch.tensor([100.0, 0.01]).log()
        assert trm.verdict("max_k3<=4", layout, log_ratio=lr).keep.tolist() == [False, True]
        assert trm.verdict("max_k2<=4", layout, log_ratio=lr).keep.tolist() == [False, False]

    def test_a_product_leaves_a_band_with_length_and_a_mean_does_not(self):
        layout = SequenceLayout.from_lengths([2000, 100])
        lr = torch.cat([torch.full((2000,), -0.001), torch.full((100,), 0.012)])
        found = trm.verdict("seq_ratio<=3 & 0.5<=geo_ratio<=2", layout, log_ratio=lr)
        assert found.statistics.exp()[:, 0].tolist() == [quoted("0.1353"), quoted("0.9990")]
        assert found.keep.tolist() == [True, False]  # e^1.2 = 3.32
        assert found.reason[1] == Reason.SEQ_RATIO

    def test_routing_flips_and_uniform_drift_are_told_apart(self):
        layout = SequenceLayout.from_lengths([100, 100])
        kl = torch.cat([torch.zeros(100), torch.full((100,), 0.05)])
        kl[7] = 5.0
        found = trm.verdict("max_kl<=1", layout, divergence={"kl": kl})
        assert found.keep.tolist() == [False, True]
        found = trm.verdict("q0.99_kl<=0.01", layout, divergence={"kl": kl})
        assert found.keep.tolist() == [True, False] and found.position.tolist() == [7, 0]
        torch.testing.assert_close(found.mean_kl, torch.tensor([0.05, 0.05]))

    def test_the_bounds_are_inclusive(self):
        layout, lr = SequenceLayout.from_lengths([1] * 3), torch.tensor([0.5, 2.0, 5.0]).log()
        for text in ("0.5<=geo_ratio<=5", "0.5<=seq_ratio<=5", "0.5<=token_ratio<=5"):
            assert trm.verdict(text, layout, log_ratio=lr).keep.all()
        assert trm.verdict("0.51<=geo_ratio<=4.99", layout, log_ratio=lr).keep.tolist() == [
            False,
            True,
            False,
        ]

    def test_statistics_of_pieces_combine(self):
        # A rank reduces its pieces to (max, sum, count); the order of ranks does not matter.
        packed, kl, _ = batch(1)
        whole = trm.verdict("max_kl<=0.5", packed, divergence={"kl": kl})
        halves = [torch.arange(len(kl)) % 2 == r for r in (0, 1)]
        parts = [
            trm.verdict(
                "max_kl<=0.5",
                SequenceLayout.from_segments(
                    packed.sequence_id[h], packed.position[h], 40, packed.token_mask[h]
                ),
                divergence={"kl": kl[h]},
            )
            for h in halves
        ]
        assert torch.maximum(parts[0].max_kl, parts[1].max_kl).equal(whole.max_kl)
        torch.testing.assert_close(parts[0].sum_kl + parts[1].sum_kl, whole.sum_kl)


class TestStrings:
    @pytest.mark.parametrize("criterion", CRITERIA, ids=str)
    def test_round_trips(self, criterion):
        assert trm.parse_criteria(str(criterion)) == (criterion,)
        assert trm.criteria_from_json(trm.criteria_to_json(criterion)) == (criterion,)
        assert hash(criterion) == hash(trm.parse_criteria(str(criterion))[0])

    def test_exact_thresholds_survive(self):
        for value in (0.1 + 0.2, 5e-324, 1e300, INF, 1 / 3):
            (back,) = trm.parse_criteria(str(trm.MaxDivergence("kl", value)))
            assert isinstance(back, trm.MaxDivergence) and back.limit == value

    @pytest.mark.parametrize("level", (1e-5, 5e-324, 0.1 + 0.2, 1 / 3, 1))
    def test_exact_levels_survive(self, level):
        criterion = trm.QuantileDivergence("kl", 0.02, level)
        assert trm.parse_criteria(str(criterion)) == (criterion,)

    def test_forms(self):
        assert trm.parse_criteria(" max_kl <= 2e-2&ser<=.05 & geo_ratio>=0.9") == (
            trm.MaxDivergence("kl", 0.02),
            trm.MeanDivergence("ratio_gap", 0.05),
            GEO(low=0.9),
        )
        assert trm.parse_criteria("0.5<=token_ratio") == (TOKEN(low=0.5),)

    @pytest.mark.parametrize(
        "text", ("", "max_kl", "max_kl<0.1", "max_kl>=0.1", "kl<=1", "0<=max_kl<=1", "ln_trm<=1")
    )
    def test_what_cannot_be_read(self, text):
        with pytest.raises(ValueError, match=r"cannot read criterion|ln_trm takes max_kl"):
            trm.parse_criteria(text)


class TestBadCriteria:
    layout = SequenceLayout.from_lengths([1])

    @pytest.mark.parametrize(
        ("text", "message"),
        (
            ("max_kl<=-0.1", "max_kl must be >= 0, got -0.1"),
            ("1.2<=geo_ratio<=0.9", "geo_ratio lower bound 1.2 exceeds its upper bound 0.9"),
            ("seq_ratio<=0", "seq_ratio upper bound must be > 0, got 0.0"),
            ("seq_ratio<=-1", "seq_ratio bound must be >= 0, got -1.0"),
            ("max_kl<=nan", "max_kl must be >= 0, got nan"),
            ("q1.5_kl<=1", r"level must be a number in \(0, 1\], got 1.5"),
            ("max_k9<=1", "no per-token values of 'k9'; there are kl, k1, k2"),
            ("max_k3<=1", "k3 needs log_ratio"),
            ("max_binary_kl<=1", "binary_kl needs logp_train and logp_rollout"),
            ("geo_ratio<=1", "geo_ratio<=1.0 needs log_ratio"),
        ),
    )
    def test_one_sentence(self, text, message):
        with pytest.raises(ValueError, match=message):
            trm.verdict(text, self.layout, divergence={"kl": torch.zeros(1)})

    def test_a_quantity_that_reads_as_a_band(self):
        with pytest.raises(ValueError, match="token_ratio is the band of rho_t: TokenRatioBand"):
            trm.TokenDivergenceLimit("ratio", 2.0)

    def test_no_criterion(self):
        with pytest.raises(ValueError, match="criteria is empty"):
            trm.verdict([], self.layout, divergence={"kl": torch.zeros(1)})

    def test_packed_values_with_a_padded_layout(self):
        layout = SequenceLayout.from_lengths([2, 1], padded_length=2)
        with pytest.raises(
            ValueError, match=r"kl must have the layout's token shape \[2, 2\], got \[3\]"
        ):
            trm.verdict("max_kl<=1", layout, divergence={"kl": torch.zeros(3)})
        with pytest.raises(ValueError, match=r"log_ratio must have .* \[2, 2\], got \[3\]"):
            trm.verdict("max_k3<=1", layout, log_ratio=torch.zeros(3))

    def test_integers(self):
        with pytest.raises(TypeError, match=r"kl must be a floating-point tensor, got torch.int64"):
            trm.verdict(
                "max_kl<=1", self.layout, divergence={"kl": torch.zeros(1, dtype=torch.int64)}
            )


def test_metrics_of_a_verdict():
    layout = SequenceLayout.from_lengths([1, 1, 1, 1, 0])
    kl = torch.tensor([0.0, 1.0, NAN, INF])
    found = trm.max_kl_verdict(kl, layout, max_kl=0.5).metrics(sync=True)
    assert found["trm/accepted"] == 0.25 and found["trm/sequences"] == 4
    assert [found[f"trm/rejected/{r}"] for r in ("max_kl", "non_finite", "support")] == [0.25] * 3
    assert found["trm/all_rejected"] == 0
    nothing = trm.max_kl_verdict(kl[1:2], SequenceLayout.from_lengths([1]), max_kl=0.5)
    assert nothing.metrics()["trm/all_rejected"] == 1


def test_no_criterion_waits_for_the_device():
    from torch._subclasses.fake_tensor import FakeTensorMode

    text = " & ".join(map(str, CRITERIA))
    with FakeTensorMode():
        layout = SequenceLayout.from_mask(torch.ones(2, 3, dtype=torch.bool))
        values = torch.rand(2, 3)
        found = trm.verdict(text, layout, divergence={"kl": values}, log_ratio=values)
        found.metrics()
    assert found.statistics.shape == (len(CRITERIA), 2)


@pytest.mark.parametrize(
    "text", (" & ".join(map(str, CRITERIA)), "max_kl<=0.5"), ids=("all", "one")
)
def test_criteria_compile_in_one_graph(text):
    def judge(kl, lr, mask):
        layout = SequenceLayout.from_mask(mask)
        return trm.verdict(text, layout, divergence={"kl": kl}, log_ratio=lr)

    args = (torch.rand(3, 5), torch.randn(3, 5), torch.rand(3, 5) < 0.8)
    compiled = torch.compile(judge, fullgraph=True, backend="aot_eager")
    for a, b in zip(compiled(*args), judge(*args), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
