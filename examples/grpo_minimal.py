# SPDX-License-Identifier: Apache-2.0
"""GRPO in one file: a tiny transformer learns to repeat three digits twice, from rewards alone.

The rollout policy is a stale, quantised copy of the trained one, as in asynchronous training with a
low-precision engine. With the mask and without it: reward, acceptance, exact KL(rollout||train) per
step, and a plot. Here both learn; with ``--lag 8`` the mask rejects much and learning is slower.
"""

import argparse
import copy
import time

import torch
from torch import nn

import trm_ext as trm

DIGITS, PROMPT, RESPONSE = 10, 3, 6
PROMPTS, SIBLINGS = 16, 8  # per step: 16 groups of 8 samples


class TinyTransformer(nn.Module):
    """Two causal layers over at most PROMPT + RESPONSE digits."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.token = nn.Embedding(DIGITS, width)
        self.place = nn.Embedding(PROMPT + RESPONSE, width)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, DIGITS)

    def forward(self, digits: torch.Tensor) -> torch.Tensor:
        """``[B, L]`` digits to ``[B, L, DIGITS]`` logits of the next one."""
        causal = nn.Transformer.generate_square_subsequent_mask(digits.shape[1])
        x = self.token(digits) + self.place(torch.arange(digits.shape[1]))
        return self.head(self.layers(x, mask=causal, is_causal=True))


def quantised(model: nn.Module, bits: int) -> nn.Module:
    """A copy whose matrices are rounded to a grid of 2^bits levels per row."""
    engine = copy.deepcopy(model).eval().requires_grad_(False)
    for weight in engine.parameters():
        if weight.dim() == 2:
            step = weight.abs().amax(dim=1, keepdim=True) / (2 ** (bits - 1) - 1)
            weight.copy_((weight / step.clamp(min=1e-8)).round() * step)
    return engine


@torch.no_grad()
def sample(engine: nn.Module, prompts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequences ``[B, PROMPT + RESPONSE]`` and the logits that produced the response."""
    sequence, logits = prompts, []
    for _ in range(RESPONSE):
        logits.append(engine(sequence)[:, -1])
        drawn = torch.multinomial(logits[-1].softmax(-1), 1)
        sequence = torch.cat([sequence, drawn], dim=1)
    return sequence, torch.stack(logits, dim=1)


def train(args: argparse.Namespace, masked: bool) -> dict[str, list[float]]:
    """One run; the loop is all there is to GRPO with a trust-region mask."""
    torch.manual_seed(0)
    model = TinyTransformer()
    optimiser = torch.optim.Adam(model.parameters(), lr=3e-3)
    groups = torch.arange(PROMPTS).repeat_interleave(SIBLINGS)
    history: dict[str, list[float]] = {"reward": [], "accepted": [], "kl": []}
    for step in range(args.steps):
        if step % args.lag == 0:  # the engine receives weights now and then
            engine = quantised(model, args.bits)
        prompts = torch.randint(DIGITS, (PROMPTS, PROMPT)).repeat_interleave(SIBLINGS, dim=0)
        sequences, rollout_logits = sample(engine, prompts)
        response = sequences[:, PROMPT:]
        # Verifiable: the share of positions that repeat the prompt.
        rewards = (response == prompts.repeat(1, 2)).float().mean(dim=1)

        layout = trm.SequenceLayout.from_mask(torch.ones_like(response, dtype=torch.bool))
        train_logits = model(sequences[:, :-1])[:, PROMPT - 1 :]
        outputs = ("kl", "logp_rollout", "logp_train")
        exact = trm.token_divergence(rollout_logits, train_logits, tokens=response, outputs=outputs)
        verdict = trm.verdict(f"max_kl<={args.max_kl}", layout, divergence=exact)
        keep = verdict.keep if masked else None  # rejected siblings leave the baseline too
        advantages = trm.group_advantages(rewards, groups, keep)
        loss, _ = trm.policy_loss(
            exact.logp_train,
            exact.logp_rollout,
            advantages,
            layout,
            estimator="trm" if masked else "token_is",
            verdict=verdict if masked else None,
        )
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()

        found = trm.batch_metrics(layout, verdict=verdict, divergence=exact, sync=True)
        row = (rewards.mean().item(), found["trm/accepted"], found["trm/kl/mean"])
        for values, value in zip(history.values(), row, strict=True):
            values.append(float(value))
        if step % args.every == 0 or step == args.steps - 1:
            name = "TRM  accepted" if masked else "off  would accept"
            print(
                f"step {step:4d}  reward {row[0]:.3f}  KL {row[2]:.2e} "
                f"(max {found['trm/kl/max']:.2e})  {name} {row[1]:.1%}"
            )
    return history


def plot(runs: dict[str, dict[str, list[float]]], path: str) -> None:
    """Reward, acceptance and KL of every run."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(12, 3.2), layout="constrained")
    for name, history in runs.items():
        for axis, (what, values) in zip(axes, history.items(), strict=True):
            axis.plot(values, label=name, linewidth=1)
            axis.set(title=what, xlabel="step", yscale="log" if what == "kl" else "linear")
    axes[0].legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Both runs, one plot."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default, what in (
        ("--steps", 200, "training steps"),
        ("--every", 1, "print every this many steps"),
        ("--lag", 4, "steps between engine updates"),
        ("--bits", 5, "precision of the engine's weights"),
        ("--max-kl", 0.05, "threshold, nats per token"),
        ("--out", "grpo.png", "where the plot goes"),
    ):
        parser.add_argument(name, type=type(default), default=default, help=what)
    args = parser.parse_args()
    start = time.perf_counter()
    runs = {name: train(args, masked) for name, masked in (("TRM", True), ("off", False))}
    plot(runs, args.out)
    for name, history in runs.items():
        last = torch.tensor(history["reward"][-20:]).mean()
        print(f"{name}: mean reward of the last 20 steps {last:.3f}")
    print(f"{time.perf_counter() - start:.0f} s; plot in {args.out}")


if __name__ == "__main__":
    main()
