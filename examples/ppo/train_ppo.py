"""Learns to balance a pole with proximal policy optimization: an updater without data, and an environment with state.

    python train_ppo.py --out result

The environment is the cart and pole of Barto, Sutton and Anderson (1983), many of them at once in NumPy. Where each of them
is belongs to the state of the run: the same command again continues a run that was stopped, with the poles as they stood.

Schulman, Wolski, Dhariwal, Radford and Klimov, "Proximal Policy Optimization Algorithms", 2017.
"""

import argparse
import math

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributions import Categorical

import chainring
from chainring import report, training
from chainring.training import UpdateCallbacks, clip_grad_norm, extensions


class CartPoles:
    """Poles on carts, which are pushed to the left (0) or to the right (1); one that falls stands up again.

    Attributes:
        state: of each cart: position, velocity, angle and angular velocity, (count, 4).
        age: steps since each pole stood up.
    """

    def __init__(self, count: int, seed: int) -> None:
        self.random = np.random.Generator(np.random.Philox(seed))
        self.state, self.age = np.zeros((count, 4)), np.zeros(count, np.int64)
        self.stand_up(np.ones(count, bool))

    def stand_up(self, fallen: np.ndarray) -> None:
        self.state[fallen] = self.random.uniform(-0.05, 0.05, (fallen.sum(), 4))
        self.age[fallen] = 0

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, list[int]]:
        """Push for 0.02 seconds; return which poles have fallen, or stood for 500 steps, and how long they stood."""
        speed, angle, turning = self.state.T[1:]
        sine, cosine = np.sin(angle), np.cos(angle)
        force = (np.where(actions == 1, 10.0, -10.0) + 0.05 * turning**2 * sine) / 1.1
        bend = (9.8 * sine - cosine * force) / (0.5 * (4 / 3 - 0.1 * cosine**2 / 1.1))
        push = force - 0.05 * bend * cosine / 1.1
        self.state += 0.02 * np.stack([speed, push, turning, bend], 1)
        self.age += 1
        fallen = (np.abs(self.state[:, 0]) > 2.4) | (np.abs(self.state[:, 2]) > math.radians(12)) | (self.age == 500)
        ages = self.age[fallen].tolist()
        self.stand_up(fallen)
        return fallen, ages

    def serialize(self, serializer) -> None:
        """Save where the poles are, or load it; NumPy's generator is part of it."""
        serializer("state", self.state)
        serializer("age", self.age)
        self.random.bit_generator.state = serializer("random", self.random.bit_generator.state)


class Agent(nn.Module):
    """From observations (batch, 4) to the distribution of actions and the expected return (batch,)."""

    def __init__(self, units: int) -> None:
        super().__init__()
        self.act, self.value = (
            nn.Sequential(nn.Linear(4, units), nn.Tanh(), nn.Linear(units, units), nn.Tanh(), nn.Linear(units, outputs))
            for outputs in (2, 1)
        )
        for layer in (*self.act, *self.value):
            if isinstance(layer, nn.Linear):
                nn.init.orthogonal_(layer.weight, math.sqrt(2))
                nn.init.zeros_(layer.bias)
        self.act[-1].weight.data *= 0.01  # nearly equal chances at first

    def forward(self, observations: Tensor) -> tuple[Categorical, Tensor]:
        return Categorical(logits=self.act(observations)), self.value(observations)[:, 0]


class PPOUpdater(training.StandardUpdater):
    """Plays some steps, then improves on them in several passes of minibatches: one iteration."""

    def __init__(self, agent: Agent, optimizer, poles: CartPoles, steps: int, passes: int, parts: int, **settings) -> None:
        super().__init__(None, optimizer, agent, **settings)
        self.poles, self.steps, self.passes, self.parts = poles, steps, passes, parts

    def update_core(self) -> None:
        played = self.play()
        for _ in range(self.passes):
            for rows in torch.randperm(len(played[0])).chunk(self.parts):
                self.backward(self.loss(*(column[rows] for column in played)))
                self.step()

    @torch.no_grad()
    def play(self) -> list[Tensor]:
        """Return observations, actions, their log probabilities, advantages and returns, each (steps * poles, ...)."""
        agent, device = self.get_model("main"), self.device
        steps, ages = [], []
        for _ in range(self.steps):
            observation = torch.from_numpy(self.poles.state).float().to(device)
            policy, value = agent(observation)
            action = policy.sample()
            fallen, stood = self.poles.step(action.cpu().numpy())
            steps.append((observation, action, policy.log_prob(action), value, torch.from_numpy(fallen).to(value)))
            ages += stood
        if ages:
            report({"length": np.mean(ages)}, agent)
        observations, actions, log_probs, values, fallen = map(torch.stack, zip(*steps, strict=True))
        following = agent(torch.from_numpy(self.poles.state).float().to(device))[1]
        advantages, advantage = torch.zeros_like(values), 0.0
        for t in reversed(range(self.steps)):
            going = 1 - fallen[t]
            error = 1 + 0.99 * going * following - values[t]
            advantages[t] = advantage = error + 0.99 * 0.95 * going * advantage
            following = values[t]
        return [x.flatten(0, 1) for x in (observations, actions, log_probs, advantages, advantages + values)]

    def loss(self, observations: Tensor, actions: Tensor, log_probs: Tensor, advantages: Tensor, returns: Tensor) -> Tensor:
        """Return the clipped loss of the policy, with that of the values and the entropy."""
        with self.autocast():
            policy, values = self.get_model("main")(observations)
            ratio = (policy.log_prob(actions) - log_probs).exp()
            gain = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
            policy_loss = -torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
            value_loss = (values - returns).square().mean() / 2
            entropy = policy.entropy().mean()
        report({"policy": policy_loss, "value": value_loss, "entropy": entropy}, self.get_model("main"))
        return policy_loss + 0.5 * value_loss - 0.01 * entropy

    def serialize(self, serializer) -> None:
        super().serialize(serializer)
        self.poles.serialize(serializer["poles"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", "-g", type=int, default=-1, help="number of the accelerator; negative is the host")
    parser.add_argument("--iteration", "-i", type=int, default=100, help="times to play and improve (default: %(default)s)")
    parser.add_argument("--out", "-o", default="result", help="directory of the results (default: %(default)s)")
    parser.add_argument("--pole", type=int, default=8, help="poles at once (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights, poles and actions (default: %(default)s)")
    parser.add_argument("--step", type=int, default=128, help="steps to play in an iteration (default: %(default)s)")
    parser.add_argument("--unit", "-u", type=int, default=64, help="units of a layer (default: %(default)s)")
    args = parser.parse_args()

    chainring.deterministic(args.seed)
    agent, poles = Agent(args.unit), CartPoles(args.pole, args.seed)
    optimizer = torch.optim.Adam(agent.parameters(), 2.5e-3, eps=1e-5)
    clip = UpdateCallbacks(update_on_start=clip_grad_norm(0.5))
    updater = PPOUpdater(agent, optimizer, poles, args.step, passes=4, parts=4, device=args.device, callbacks=clip)
    trainer = training.Trainer(updater, (args.iteration, "iteration"), out=args.out, config=vars(args))
    every = (10, "iteration")
    trainer.extend(extensions.PolynomialShift("lr", rate=1, max_count=args.iteration))
    trainer.extend(extensions.LogReport(trigger=every))
    trainer.extend(extensions.PrintReport(["iteration", "main/length", "main/value", "main/entropy", "elapsed_time"]))
    trainer.extend(extensions.ProgressBar(update_interval=1))
    trainer.extend(extensions.snapshot(autoload=True, n_retains=2), trigger=every)
    trainer.run()


if __name__ == "__main__":
    main()
