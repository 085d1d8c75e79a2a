# SPDX-License-Identifier: Apache-2.0
"""How kernels run: the same bits again, in graphs, on streams, without waiting, on any device."""

import pytest
import torch

import trm_ext as trm
from tests.gpu.rows import check_kl, gradients, pair
from trm_ext.outputs import OUTPUTS, VALUES


def everything(x, y, tokens):
    """Values, diagnostics and both gradients of one call."""
    x, y = x.detach().requires_grad_(), y.detach().requires_grad_()
    found = trm.token_divergence(x, y, tokens=tokens, outputs=VALUES)
    total = sum(getattr(found, name).sum() for name in VALUES)
    found_gradients = torch.autograd.grad(total, (x, y))
    with torch.no_grad():
        values = trm.token_divergence(x, y, tokens=tokens, outputs=OUTPUTS)
    return (*(getattr(values, name) for name in OUTPUTS), *found_gradients)


@pytest.mark.parametrize("dtypes", ("bf16", "fp32", "fp64"))
def test_reruns_are_equal_to_the_bit(device, dtypes):
    for rows in (3, device.pick(1000, 30)):
        x, y = pair(device, rows, device.pick(50257, 1021), dtypes)
        tokens = torch.arange(rows, device=device.name)
        first = everything(x, y, tokens)
        for _ in range(5):
            assert all(map(torch.equal, everything(x, y, tokens), first))


@pytest.mark.parametrize("dtypes", ("bf16", "fp32"))
@pytest.mark.parametrize("vocab", (151936, 32001))
def test_a_row_does_not_depend_on_how_many_there_are(device, vocab, dtypes):
    """Around the border below which a row is split over blocks."""
    vocab = device.pick(vocab, vocab // 100)
    many = 2 * device.multiprocessors + 5
    x, y = pair(device, many, vocab, dtypes)
    tokens = torch.arange(many, device=device.name)
    together = everything(x, y, tokens)
    for rows in (1, 2, 7, 2 * device.multiprocessors - 1, 2 * device.multiprocessors, many):
        some = everything(x[:rows], y[:rows], tokens[:rows])
        assert all(torch.equal(a, b[:rows]) for a, b in zip(some, together, strict=True)), rows


@pytest.mark.parametrize("rows", (3, 1000))
def test_a_graph_replays_what_the_call_gives(device, rows):
    rows = device.pick(rows, min(rows, 30))
    vocab = device.pick(32000, 257)
    x, y = pair(device, rows, vocab)
    tokens = torch.zeros(rows, dtype=torch.int64, device=device.name)
    layout = trm.SequenceLayout.from_lengths(torch.tensor([1, rows - 1], device=device.name))

    def call():
        kl = trm.token_divergence(x, y).kl
        found = trm.max_kl_verdict(kl, layout, max_kl=0.02)
        return (*everything(x, y, tokens), kl, found.keep, found.max_kl, found.position)

    graph = device.capture(call)
    for scale in (1.0, 0.5, 2.0):
        new_x, new_y = (z * scale for z in pair(device, rows, vocab))
        x.copy_(new_x)
        y.copy_(new_y)
        graph.replay()
        device.synchronize()
        got = [result.clone() for result in graph.results]
        assert all(map(torch.equal, got, call())), scale
        check_kl(got[0][:3], x[:3], y[:3])


@pytest.mark.parametrize("rows", (2, 400))
def test_two_streams_do_not_disturb_each_other(device, rows):
    """Few rows share a workspace among blocks: each stream needs its own."""
    rows = device.pick(rows, min(rows, 20))
    pairs = [pair(device, rows + i, device.pick(151936, 1021)) for i in range(2)]
    tokens = [torch.zeros(len(x), dtype=torch.int64, device=device.name) for x, _ in pairs]
    calls = [
        lambda x=x, y=y, t=t: everything(x, y, t) for (x, y), t in zip(pairs, tokens, strict=True)
    ]
    want = [call() for call in calls]
    for _ in range(device.pick(10, 1)):
        for got, expected in zip(device.run_on_streams(calls), want, strict=True):
            assert all(map(torch.equal, got, expected))


def test_nothing_waits_for_the_device(device):
    x, y = pair(device, 8, device.pick(32000, 257))
    layout = trm.SequenceLayout.from_lengths(torch.tensor([3, 5], device=device.name))
    tokens = torch.arange(8, device=device.name)
    mask = torch.ones(8, dtype=torch.bool, device=device.name)
    temperature = torch.full((8,), 0.7, dtype=torch.float64, device=device.name)
    leaf = y.detach().requires_grad_()

    def all_of_it():
        everything(x, y, tokens)
        found = trm.token_divergence(x, leaf, token_mask=mask, train_temperature=temperature)
        trm.max_kl_verdict(found.kl.detach(), layout, max_kl=0.02)
        trm.verdict("max_kl<=0.02", layout, divergence={"kl": found.kl.detach()})
        trm.trust_region_mask(x, y, layout, max_kl=0.02, rollout_temperature=0.7)
        found.kl.sum().backward()
        states = torch.stack([trm.divergence_state(x, y), trm.divergence_state(x, y)])
        trm.divergence_finish(trm.divergence_state_merge(states))

    all_of_it()  # what is loaded or initialised on first use may wait
    with device.forbidding_sync():
        all_of_it()
    assert bool(leaf.grad.isfinite().all())


def test_memory_is_the_results_and_little_more(device):
    rows, vocab = device.pick((512, 151936), (8, 1021))
    x, y = pair(device, rows, vocab)
    logits = x.numel() * x.element_size()
    forward = device.peak_growth(lambda: trm.token_divergence(x, y).kl)
    weight = torch.ones(rows, device=device.name)
    both = device.peak_growth(lambda: gradients(x, y, weight, (False, True))[1])
    if forward is None or both is None:
        return
    # 8 float64 statistics per row and small outputs; few rows: 32 states of 14 float64 each.
    assert forward <= rows * (64 + 32 * 14 * 8 + 64) + 2**20
    assert both <= logits + rows * (64 + 32 * 14 * 8 + 128) + 2**21


@pytest.mark.gpu
def test_the_current_device_does_not_matter():
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs two CUDA devices, there are {torch.cuda.device_count()}")
    x, y = (torch.randn(5, 1021, device="cuda:1") for _ in range(2))
    with torch.cuda.device(0):
        got = trm.token_divergence(x, y).kl
        found = gradients(x, y, torch.ones(5, device="cuda:1"))
        assert torch.cuda.current_device() == 0
    assert got.device.index == 1 and all(g.device.index == 1 for g in found)
    check_kl(got, x, y)
    with torch.cuda.device(1):
        assert torch.equal(got, trm.token_divergence(x, y).kl)


def test_logits_on_two_devices_are_refused(device):
    x, y = pair(device, 2, 33)
    other = "meta" if not device.real else "cpu"
    with pytest.raises(ValueError, match="device"):
        trm.token_divergence(x, y.to(other))


def test_compiled_whole_with_a_masked_row(device):
    x, y = pair(device, 4, 257, "fp32")
    mask = torch.tensor([True, False, True, True], device=device.name)

    def loss(x, y):
        return trm.token_divergence(x, y, token_mask=mask).kl.mul(2).sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    results = []
    for function in (loss, compiled):
        leaf = y.detach().requires_grad_()
        value = function(x, leaf)
        results.append((value.detach(), *torch.autograd.grad(value, leaf)))
    assert all(map(torch.equal, *results))
