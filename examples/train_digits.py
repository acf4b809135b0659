"""Learn handwritten digits: a complete training script whose process survives changes of the world size.

    python examples/train_digits.py                                  alone
    elastic-agent run --np=2 examples/train_digits.py                under the agent, the same script

Every step takes the same 48 images whatever the number of workers, so the result does not depend on how many workers
there were at any time. What comes before `state.run` is done once in each process, however often its group changes.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import trainer_runtime as tr

GLOBAL_BATCH = 48
TRAINED_ON = 1440
"""Images to learn from, 30 batches; the other 357 are for the accuracy."""


def load_data() -> tuple[Tensor, Tensor]:
    """Return images (1797, 64) in [0, 1] and their digits (1797), in an order that is always the same."""
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    return images[order].to(tr.device()), torch.tensor(digits.target)[order].to(tr.device())


def main() -> None:
    """Train, and print the accuracy on the held-out images."""
    options = parse_options()
    tr.init()
    images, digits = load_data()
    known = TensorDataset(images[:TRAINED_ON], digits[:TRAINED_ON])
    loader = tr.DataLoader(known, global_batch=GLOBAL_BATCH, seed=options.seed)
    time.sleep(options.setup_s)

    torch.manual_seed(options.seed)
    net = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 10))
    model = DistributedDataParallel(net.to(tr.device()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs * loader.steps_per_epoch)

    state = tr.State(model=model, optimizer=optimizer, schedule=schedule, data=loader, accuracy=0.0, save_every=10)

    @state.on_regroup
    def report(_rank: int, world_size: int) -> None:
        say(f"group {state.group}: {world_size} workers, from step {state.step} (epoch {state.epoch})")

    def train() -> None:
        for epoch in state.epochs(options.epochs):
            for shown, wanted in state.steps(loader):
                loss = nn.functional.cross_entropy(model(shown), wanted)
                optimizer.zero_grad()
                (loss * loader.weight).backward()
                optimizer.step()
                schedule.step()
                step, place = state.step + 1, {"group": state.group, "world": tr.world_size()}
                state.commit(loss=loss)  # may return in another group

                if step % 10 == 0:
                    say(f"epoch {epoch}  step {step}  loss {loss.item():.4f}")
                if options.trace and tr.is_main():
                    trace(options.trace, {"step": step, "loss": loss.item(), **place})
                time.sleep(options.step_time_s)
            with tr.phase("evaluation"), torch.no_grad():
                guessed = net(images[TRAINED_ON:]).argmax(dim=1)
            state.accuracy = (guessed == digits[TRAINED_ON:]).float().mean().item()
            say(f"epoch {epoch}  done  accuracy {state.accuracy:.3f}")

    state.run(train)
    if options.out and tr.is_main():
        torch.save(net.state_dict(), options.out)
    say(f"accuracy: {state.accuracy:.3f}")


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Learn handwritten digits.")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--step_time_s", type=float, default=0.0, help="seconds to wait after each step, for demos")
    parser.add_argument("--setup_s", type=float, default=0.0, help="seconds to wait before the training, for demos")
    parser.add_argument("--trace", type=Path, help="append a JSON line for each step to this file")
    parser.add_argument("--out", type=Path, help="write the final weights here")
    return parser.parse_args()


def say(line: str) -> None:
    """Print a line, on rank 0 only."""
    if tr.is_main():
        print(line, flush=True)


def trace(path: Path, done: dict[str, float]) -> None:
    """Append a committed step to the trace; the loss is that of rank 0's share of the batch."""
    with path.open("a") as file:
        file.write(json.dumps({"t": time.time(), **done}) + "\n")


if __name__ == "__main__":
    main()
