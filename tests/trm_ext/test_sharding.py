# SPDX-License-Identifier: Apache-2.0
"""Split vocabularies against the whole row, forward and backward."""

import pytest
import torch

import trm_ext as trm
from tests.rows import GRADIENT_RTOL, row_pair
from trm_ext.outputs import VALUES

INF = float("inf")
# Unequal on purpose; with an empty shard, and one that is padding only.
SPLITS = {
    1: [5000],
    2: [1, 4999],
    7: [0, 3, 2048, 1, 1000, 1947, 1],
    8: [625, 0, 1250, 600, 25, 1900, 599, 1],
}
# As KL_RTOL, for 5000 columns in 16 lanes: twice sqrt(313) roundings of 2^-24.
SHARD_RTOL = 2e-6


def sharded(x, y, sizes, tokens=None, outputs=("kl",), vocab_sizes=None):
    states, start = [], 0
    for index, (a, b) in enumerate(zip(x.split(sizes, 1), y.split(sizes, 1), strict=True)):
        states.append(
            trm.divergence_state(
                a,
                b,
                tokens=tokens,
                vocab_start=start,
                outputs=outputs,
                vocab_size=None if vocab_sizes is None else vocab_sizes[index],
            )
        )
        start += a.shape[1]
    return trm.divergence_finish(trm.divergence_state_merge(torch.stack(states)), outputs=outputs)


@pytest.mark.parametrize("shards", SPLITS)
@pytest.mark.parametrize("kl", (1e-9, 1e-4, 1.0))
@pytest.mark.parametrize("kind", ("flat", "sharp"))
def test_values(kind, kl, shards):
    x, y = row_pair(kind, 2, 5000, kl)
    x, y = x.float(), torch.log_softmax(y, -1).float()
    tokens = torch.tensor([0, 4321])
    got, _ = sharded(x, y, SPLITS[shards], tokens, VALUES)
    want = trm.token_divergence(x.double(), y.double(), tokens=tokens, outputs=VALUES)
    for name in ("kl", "kl_train_rollout"):
        torch.testing.assert_close(
            getattr(got, name).double(), getattr(want, name), rtol=SHARD_RTOL, atol=0
        )
    for name in VALUES[2:]:
        torch.testing.assert_close(
            getattr(got, name).double(), getattr(want, name), rtol=SHARD_RTOL, atol=1e-6, msg=name
        )


@pytest.mark.parametrize("shards", SPLITS)
def test_gradients(shards):
    x, y = row_pair("flat", 3, 5000, 1e-4)
    x, y = x.float(), y.float()
    upstream = torch.tensor([1.0, 0.0, -2.0])
    _, statistics = sharded(x, y, SPLITS[shards])
    x_leaf, y_leaf = x.double().requires_grad_(), y.double().requires_grad_()
    want = torch.autograd.grad(
        trm.token_divergence(x_leaf, y_leaf).kl, (x_leaf, y_leaf), upstream.double()
    )
    pieces = [
        trm.shard_gradient(trm.TokenDivergence(kl=upstream), statistics, a, b, want_rollout=True)
        for a, b in zip(x.split(SPLITS[shards], 1), y.split(SPLITS[shards], 1), strict=True)
    ]
    for side in (0, 1):
        got = torch.cat([piece[side] for piece in pieces], 1).double()
        assert float((got - want[side]).norm() / want[side].norm()) <= GRADIENT_RTOL
    assert pieces[0][1].dtype == torch.float32


def test_token_gradient_lands_in_its_shard():
    x, y = torch.randn(1, 10), torch.randn(1, 10)
    tokens = torch.tensor([7])
    leaf = y.clone().requires_grad_()
    trm.token_divergence(
        x, leaf, tokens=tokens, outputs=("logp_train",)
    ).logp_train.sum().backward()
    _, statistics = sharded(x, y, [4, 6], tokens, ("logp_train",))
    got = torch.cat(
        [
            trm.shard_gradient(
                trm.TokenDivergence(logp_train=torch.ones(1)),
                statistics,
                x[:, a:b],
                y[:, a:b],
                tokens=tokens,
                vocab_start=a,
            )[1]
            for a, b in ((0, 4), (4, 10))
        ],
        1,
    )
    torch.testing.assert_close(got, leaf.grad, rtol=1e-6, atol=1e-7)


def test_padding_only_shard_and_uneven_real_sizes():
    x, y = torch.randn(2, 64), torch.randn(2, 64)
    want = trm.token_divergence(x[:, :40], y[:, :40]).kl
    x[:, 40:], y[:, 40:] = float("nan"), INF
    got, _ = sharded(x, y, [32, 16, 16], vocab_sizes=[32, 8, 0])
    torch.testing.assert_close(got.kl, want, rtol=SHARD_RTOL, atol=0)


def test_verdicts_of_a_row_do_not_depend_on_the_split():
    x, y = torch.randn(3, 300), torch.randn(3, 300)
    x[0, 250], y[0, 250] = -300.0, -INF  # support violation whose probability underflows
    x[1, 10] = float("nan")
    y[2] = -INF
    for sizes in ([300], [249, 1, 50], [100, 100, 100]):
        kl = sharded(x, y, sizes)[0].kl
        assert kl[0] == INF and torch.isnan(kl[1:]).all()


def test_masked_rows_are_empty_states():
    x, y = torch.randn(2, 9), torch.randn(2, 9)
    x[0] = float("nan")
    state = trm.divergence_state(x, y, token_mask=torch.tensor([False, True]))
    assert not state[0].any() and state[1].isfinite().all()


@pytest.mark.parametrize(
    "call,message",
    [
        (lambda: trm.divergence_state(torch.zeros(3), torch.zeros(3)), r"must be \[N, V_shard\]"),
        (
            lambda: trm.divergence_state(torch.zeros(1, 3), torch.zeros(1, 3), vocab_start=-1),
            "vocab_start must be >= 0, got -1",
        ),
        (
            lambda: trm.divergence_state(torch.zeros(1, 3), torch.zeros(1, 3), vocab_size=4),
            r"0\.\.3 for this shard, got 4",
        ),
        (lambda: trm.divergence_state_merge(torch.zeros(0, 2, 14)), r"got \[0, 2, 14\]"),
        (lambda: trm.divergence_finish(torch.zeros(2, 13)), r"got \[2, 13\]"),
        (
            lambda: trm.shard_gradient(
                trm.TokenDivergence(),
                torch.zeros(1, 8).double(),
                torch.zeros(1, 3),
                torch.zeros(1, 3),
            ),
            "every field is None",
        ),
        (
            lambda: trm.shard_gradient(
                trm.TokenDivergence(kl=torch.ones(1)),
                torch.zeros(2, 8),
                torch.zeros(1, 3),
                torch.zeros(1, 3),
            ),
            r"statistics must be \[1, 8\], got \[2, 8\]",
        ),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()
