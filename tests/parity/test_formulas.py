# SPDX-License-Identifier: Apache-2.0
"""AReaL's and SkyRL's masks from their documented formulas, and where they differ from ours."""

import math

import pytest
import torch

import trm_ext as trm
from trm_ext import SequenceLayout


def areal(lr, metric, aggregate, upper, lower=-math.inf):
    """Whether AReaL keeps a sequence: ratios aggregate as logarithms, KLs arithmetically."""
    values = {
        "ratio": lambda x: x,
        "kl_k1": lambda x: x,  # written for samples from the other policy: the sign of ours
        "kl_k2": lambda x: x * x / 2,
        "kl_k3": lambda x: math.exp(-x) - 1 + x,  # likewise mirrored
    }[metric]
    found = [values(x) for x in lr]
    total = {"sum": sum(found), "mean": sum(found) / len(found), "max": max(found)}[aggregate]
    return lower <= (math.exp(total) if metric == "ratio" else total) <= upper


@pytest.mark.parametrize(
    ("arguments", "criterion"),
    (
        (("ratio", "mean", 1.2, 0.9), "0.9<=geo_ratio<=1.2"),
        (("ratio", "sum", 1.8, 0.7), "0.7<=seq_ratio<=1.8"),
        (("kl_k2", "max", 0.3), "max_k2<=0.3"),
        (("kl_k2", "mean", 0.1), "mean_k2<=0.1"),
        (("kl_k2", "sum", 0.6), "sum_k2<=0.6"),
    ),
)
def test_areal_agrees(arguments, criterion):
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 9, (60,), generator=generator)
    lr = 0.4 * torch.randn(int(lengths.sum()), generator=generator)
    found = trm.verdict(criterion, SequenceLayout.from_lengths(lengths), log_ratio=lr)
    wanted = [areal(part.tolist(), *arguments) for part in lr.split(lengths.tolist())]
    assert found.keep.tolist() == wanted and 5 < sum(wanted) < 55


def test_areal_k3_is_the_mirror_image_of_ours():
    layout, rho = SequenceLayout.from_lengths([1, 1]), [100.0, 0.01]
    ours = trm.verdict("max_k3<=4", layout, log_ratio=torch.tensor(rho).log())
    assert ours.keep.tolist() == [False, True]
    assert [areal([math.log(r)], "kl_k3", "max", 4) for r in rho] == [True, False]


def test_areal_keeps_an_impossible_token_by_its_ratio_and_we_do_not():
    # It replaces a log-ratio that is not finite by 0.
    layout = SequenceLayout.from_lengths([1])
    found = trm.verdict("max_k2<=9 & geo_ratio<=5", layout, log_ratio=torch.tensor([-math.inf]))
    assert found.reason.tolist() == [trm.Reason.SUPPORT]
    assert areal([0.0], "ratio", "mean", 5)


def skyrl(lr, token_band, geometric_band):
    """SkyRL: token mask first, then the geometric mean of the survivors; NaN compares as inside."""
    survivors = [x for x in lr if token_band[0] <= math.exp(x) <= token_band[1]]
    mean = math.exp(sum(survivors) / max(1, len(survivors)))
    return not (mean > geometric_band[1] or mean < geometric_band[0])


def test_skyrl_agrees_where_no_token_is_masked_and_differs_where_one_is():
    layout = SequenceLayout.from_lengths([3, 3])
    lr = torch.tensor([0.1, 0.2, 0.0, 0.0, 3.0, 0.0])
    found = trm.verdict("0.5<=token_ratio<=2 & 0.9<=geo_ratio<=1.2", layout, log_ratio=lr)
    wanted = [skyrl(part.tolist(), (0.5, 2), (0.9, 1.2)) for part in lr.split([3, 3])]
    assert wanted == [True, True] and found.keep.tolist() == [True, False]


def test_skyrl_keeps_a_sequence_with_a_missing_value_and_we_do_not():
    layout, lr = SequenceLayout.from_lengths([2]), torch.tensor([math.nan, 0.0])
    assert skyrl([math.nan, 0.0][1:], (0.5, 2), (0.9, 1.2))
    mean = math.nan  # exp(mean of anything with NaN): neither above nor below
    assert not (mean > 1.2 or mean < 0.9)
    assert trm.verdict("geo_ratio<=1.2", layout, log_ratio=lr).reason == trm.Reason.UNSCORED
