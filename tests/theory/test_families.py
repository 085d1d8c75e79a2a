# SPDX-License-Identifier: Apache-2.0
import math

import mpmath
import numpy as np
import pytest

from theory.divergences import logit_divergences
from theory.families import (
    VOCAB,
    GaussianNoise,
    Geometric,
    OneLogitShift,
    Temperature,
    TwoLevel,
    Zipf,
)

PROMISE = 1e-10
EXACT_LAWS = [
    OneLogitShift(0.3, 1e-3),
    OneLogitShift(1e-6, 5.0),
    OneLogitShift(0.9, -4.0),
    TwoLevel(0.2, 0.25),
    TwoLevel(1e-4, 3e-3, tokens=7),
    Geometric(0.9, 0.88),
    Geometric(0.95, 0.96),
    Zipf(1.0, 1.05),
    Zipf(1.2, 0.9),
    Temperature(1.1),
    Temperature(0.7, spread=2.0, seed=4),
]


def divergences_in(number, exp, log, sqrt, total, x, y, counts):
    """All divergences of softmax(x) against softmax(y), every (x, y) pair taken counts times."""
    a, b = [exp(v) for v in x], [exp(v) for v in y]
    n = [number(int(c)) for c in counts]
    z_a = total(m * u for m, u in zip(n, a, strict=True))
    z_b = total(m * u for m, u in zip(n, b, strict=True))
    p, q = [u / z_a for u in a], [u / z_b for u in b]
    shift = log(z_a) - log(z_b)
    ratio = [v - u + shift for u, v in zip(x, y, strict=True)]
    rows = list(zip(n, p, q, ratio, strict=True))
    return {
        "kl_rollout_train": -total(m * u * r for m, u, v, r in rows),
        "kl_train_rollout": total(m * v * r for m, u, v, r in rows),
        "tv": total(m * abs(v - u) for m, u, v, r in rows) / 2,
        "chi2": total(m * (v - u) ** 2 / u for m, u, v, r in rows),
        "bc": total(m * sqrt(u * v) for m, u, v, r in rows),
        "squared_hellinger": total(m * (sqrt(u) - sqrt(v)) ** 2 for m, u, v, r in rows) / 2,
        "max_log_ratio": max(ratio),
    }


def mpmath_divergences(rollout, train):
    pairs, counts = np.unique(np.stack([rollout, train], 1), axis=0, return_counts=True)
    with mpmath.workdps(30):
        x, y = ([mpmath.mpf(float(v)) for v in column] for column in pairs.T)
        found = divergences_in(
            mpmath.mpf, mpmath.exp, mpmath.log, mpmath.sqrt, mpmath.fsum, x, y, counts
        )
        return {name: float(value) for name, value in found.items()}


def long_double_divergences(rollout, train):
    """64-bit mantissa (80-bit extended) where the platform has it: about 1e-17 times sqrt(V)."""
    x, y = rollout.astype(np.longdouble), train.astype(np.longdouble)
    p, q = np.exp(x - x.max()), np.exp(y - y.max())
    z_p, z_q = p.sum(), q.sum()
    ratio = (y - y.max()) - (x - x.max()) - np.log(z_q) + np.log(z_p)
    p, q = p / z_p, q / z_q
    return {
        "kl_rollout_train": float(-(p * ratio).sum()),
        "kl_train_rollout": float((q * ratio).sum()),
        "tv": float(np.abs(q - p).sum() / 2),
        "chi2": float((p * np.expm1(ratio) ** 2).sum()),
        "bc": float(np.sqrt(p * q).sum()),
        "squared_hellinger": float(((np.sqrt(p) - np.sqrt(q)) ** 2).sum() / 2),
        "max_log_ratio": float(ratio.max()),
    }


def assert_close(found, expected, relative):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=relative), name


def name_of(law):
    return repr(law)


@pytest.mark.parametrize("law", EXACT_LAWS, ids=name_of)
def test_predictions_in_extended_precision_at_full_vocabulary(law):
    if np.finfo(np.longdouble).nmant < 63:
        pytest.skip("long double is not wider than double here; the mpmath lane still runs")
    assert_close(law.predicted(), long_double_divergences(*law.logits()), PROMISE)


@pytest.mark.parametrize("law", EXACT_LAWS[:5], ids=name_of)
def test_two_valued_laws_against_mpmath_at_full_vocabulary(law):
    rollout, train = law.logits()
    assert rollout.shape == train.shape == (VOCAB,)
    assert_close(law.predicted(), mpmath_divergences(rollout, train), PROMISE)


@pytest.mark.parametrize("law", EXACT_LAWS[5:], ids=name_of)
def test_other_laws_against_mpmath_at_a_small_vocabulary(law):
    vocab = 1600
    assert_close(law.predicted(vocab), mpmath_divergences(*law.logits(vocab)), PROMISE)


def mpmath_parameters(law, vocab):
    """The law's logits straight from its parameters, not rounded to float64."""
    mpf, log = mpmath.mpf, mpmath.log
    x = [mpf(0)] * vocab
    if isinstance(law, OneLogitShift):
        x[3] = log(mpf(law.p) / (1 - mpf(law.p))) + log(vocab - 1)
        return x, [*x[:3], x[3] + mpf(law.shift), *x[4:]]
    if isinstance(law, TwoLevel):
        sides = []
        for mass in (mpf(law.rollout_mass), mpf(law.train_mass)):
            top = log(mass / (1 - mass)) + log(mpf(vocab) / law.tokens - 1)
            sides.append([top] * law.tokens + x[law.tokens :])
        return sides
    if isinstance(law, Geometric):
        rates = log(mpf(law.rollout_ratio)), log(mpf(law.train_ratio))
        return [[i * rate for i in range(vocab)] for rate in rates]
    if isinstance(law, Zipf):
        exponents = mpf(law.rollout_exponent), mpf(law.train_exponent)
        return [[-c * log(i) for i in range(1, vocab + 1)] for c in exponents]
    z = [mpf(float(v)) for v in law.logits(vocab)[0]]
    return z, [v / mpf(law.temperature) for v in z]


@pytest.mark.parametrize(
    "law",
    [
        OneLogitShift(0.3, -1e-4),
        OneLogitShift(1e-4, 4.5e-3),
        OneLogitShift(0.3, -34.5),
        OneLogitShift(1e-4, 19.0),
        TwoLevel(0.2, 0.19998),
        TwoLevel(0.2, 3e-23),
        Geometric(0.85, 0.85001),
        Geometric(0.85, 0.1),
        Zipf(1.0, 1.00003),
        Zipf(1.0, 30.0),
        Temperature(1.00002),
        Temperature(0.03),
    ],
    ids=name_of,
)
def test_predictions_keep_their_digits_from_1e_9_to_10_nats(law):
    """The closed forms themselves, to 200 roundings: no cancellation, no overflow."""
    vocab = 300
    with mpmath.workdps(60):
        x, y = mpmath_parameters(law, vocab)
        exact = divergences_in(
            mpmath.mpf, mpmath.exp, mpmath.log, mpmath.sqrt, mpmath.fsum, x, y, [1] * vocab
        )
        exact = {name: float(value) for name, value in exact.items()}
    assert_close(law.predicted(vocab), exact, 200 * 2.0**-53)


@pytest.mark.parametrize("law", EXACT_LAWS, ids=name_of)
def test_sums_over_logits_against_mpmath(law):
    """The float64 sums that validation holds kernels to, on float32 logits."""
    logits = law.logits(1600, np.float32)
    found = logit_divergences(*logits)
    for name, value in mpmath_divergences(*logits).items():
        assert float(getattr(found, name)) == pytest.approx(value, rel=1e-12), name


@pytest.mark.parametrize(
    ("x", "y", "sentence"),
    [
        ([0.0, 1.0], [0.0], "logits of one shape, got \\(2,\\) and \\(1,\\)"),
        ([0.0, np.inf], [0.0, 1.0], "The rollout logits must be finite, got inf"),
        ([0.0, 1.0], [0.0, -np.inf], "The train logits must be finite, got -inf"),
    ],
)
def test_bad_logits_are_one_sentence(x, y, sentence):
    with pytest.raises(ValueError, match=sentence):
        logit_divergences(x, y)


@pytest.mark.slow
@pytest.mark.parametrize("law", EXACT_LAWS[5:], ids=name_of)
def test_other_laws_against_mpmath_at_full_vocabulary(law):
    assert_close(law.predicted(), mpmath_divergences(*law.logits()), PROMISE)


@pytest.mark.parametrize("sigma", [1e-3, 0.1, 1.0])
def test_gaussian_noise_within_its_own_sampling_error(sigma):
    """Six draws, six numbers, five standard deviations: false alarm below 36 * 6e-7 = 2e-5.

    The maximum is Gumbel, whose upper tail is heavier: 8 of its standard deviations keep its false
    alarm below 6 exp(-10) = 3e-4. Seeds are fixed, so the outcome is too.
    """
    for seed in range(6):
        law = GaussianNoise(sigma, seed)
        found, want, sd = (
            long_double_divergences(*law.logits()),
            law.predicted(),
            law.sampling_sd(),
        )
        for name, value in want.items():
            width = 8 if name == "max_log_ratio" else 5
            assert abs(found[name] - value) <= width * sd[name], name


def test_gaussian_sampling_sd_closed_forms_and_empirical_spread():
    law = GaussianNoise(0.8)
    sd = law.sampling_sd(4000)
    assert sd["kl_rollout_train"] == pytest.approx(
        math.sqrt((math.exp(0.64) - 1 - 0.64) / 4000), rel=1e-9
    )
    assert sd["kl_train_rollout"] == pytest.approx(
        math.sqrt((math.exp(0.64) * (0.64 + (0.64 - 1) ** 2) - 1) / 4000), rel=1e-9
    )
    # The relative sd of an empirical sd over 400 draws is 1/sqrt(800) = 3.5 percent: five of them.
    spread_rtol = 5 / math.sqrt(2 * 400)
    draws = [long_double_divergences(*GaussianNoise(0.8, seed).logits(4000)) for seed in range(400)]
    wide = [long_double_divergences(*GaussianNoise(1.5, s).logits(4000))["tv"] for s in range(400)]
    wide_sd = GaussianNoise(1.5).sampling_sd(4000)["tv"]
    assert np.std(wide) == pytest.approx(wide_sd, rel=spread_rtol)
    for name in ("kl_rollout_train", "kl_train_rollout", "tv", "bc"):
        spread = np.std([d[name] for d in draws])
        assert spread == pytest.approx(sd[name], rel=spread_rtol), name


def test_observed_values_of_one_unit_of_noise():
    found = GaussianNoise(1.0).predicted()
    expected = dict(kl_rollout_train=0.5, tv=0.38292, chi2=1.71828, bc=0.88250)
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, abs=5e-6)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_logits_have_the_requested_type(dtype):
    for law in (*EXACT_LAWS, GaussianNoise(0.1)):
        if dtype == np.float16 and isinstance(law, Geometric):
            continue  # i log r leaves the range of float16
        rollout, train = law.logits(300, dtype)
        assert rollout.dtype == train.dtype == dtype
        assert np.all(np.isfinite(rollout)) and np.all(np.isfinite(train))


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: OneLogitShift(0.0, 1.0), "p must lie strictly between 0 and 1, got 0"),
        (lambda: TwoLevel(0.5, 1.0), "train_mass must lie strictly between 0 and 1, got 1"),
        (lambda: TwoLevel(0.5, 0.4, tokens=9).logits(9), "fewer tokens than the vocabulary, got 9"),
        (lambda: Geometric(0.99, 0.98).predicted(100), "vocabulary 100 cuts a tail"),
        (lambda: Zipf(-1.0, 1.0), "must be a number >= 0, got -1"),
        (lambda: Temperature(0.0), "temperature must be > 0, got 0"),
        (lambda: GaussianNoise(-1.0), "sigma must be > 0, got -1"),
    ],
)
def test_bad_input_is_one_sentence_with_the_value(call, sentence):
    with pytest.raises(ValueError, match=sentence):
        call()
