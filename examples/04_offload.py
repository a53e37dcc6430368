"""A reinforcement-learning loop that frees device memory for generation: offload, generate, onload, train.

In turns a bf16 policy answers prompts and is trained on its rewards. While it answers, optimizer states and gradients
are not needed; while another model scores the answers, the policy's weights are not needed either. They are moved to
host memory, which is allocated the first time and reused, and come back with the same bits: the losses are those of the
same loop without offloading.

    python examples/04_offload.py
"""

import pathlib
import sys

import torch
from torch import Tensor, nn
from tqdm import tqdm

sys.path.insert(
    0, str(pathlib.Path(__file__).absolute().parents[1])
)  # the repository's root; not needed when installed
import torch_ext

ROUNDS, STEPS, PROMPTS, ANSWERS, WIDTH = 6, 4, 512, 16, 512
DEVICE = torch.device("cpu")  # stands in for a GPU: offload releases memory there in the same way


def prompts(seed: int) -> Tensor:
    return torch.randn(PROMPTS, ANSWERS, generator=torch.Generator().manual_seed(seed)).bfloat16().to(DEVICE)


def used(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """MB of device memory that weights, gradients and states take."""
    if DEVICE.type == "cuda":
        return torch.cuda.memory_allocated(DEVICE) / 1e6
    tensors = [*model.parameters(), *(p.grad for p in model.parameters() if p.grad is not None)]
    tensors += [t for p in model.parameters() for t in optimizer.state[p].values()]
    return sum({t.untyped_storage(): t.untyped_storage().nbytes() for t in tensors}.values()) / 1e6


def loop(offloads: bool) -> tuple[list[float], list[float]]:
    """Returns the loss of every step, and the mean reward of every round."""
    torch.manual_seed(0)
    layers = [nn.Linear(ANSWERS, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, ANSWERS)]
    policy = nn.Sequential(*layers).bfloat16().to(DEVICE)
    optimizer = torch_ext.AdamW(policy.parameters(), lr=1e-3, policy=torch_ext.load_policy(policy))
    losses, rewards, memory = [], [], []

    def note() -> None:
        memory.append(used(policy, optimizer))

    for turn in tqdm(range(ROUNDS), "with offload" if offloads else "everything on the device"):
        note()
        if offloads:
            torch_ext.offload(policy, optimizer, params=False)  # gradients and states; the weights generate
        note()
        x = prompts(turn)
        with torch.no_grad():
            probabilities = policy(x).float().softmax(1)
        answers = torch.multinomial(probabilities, 1, generator=torch.Generator(DEVICE).manual_seed(turn))[:, 0]

        if offloads:
            torch_ext.offload(policy, optimizer)  # the weights as well
        note()
        reward = (answers == x.argmax(1)).float()  # here a reward model would use the device

        torch_ext.onload(policy, optimizer)
        note()
        advantage = reward - reward.mean()
        for _ in range(STEPS):
            chosen = policy(x).float().log_softmax(1).gather(1, answers[:, None])[:, 0]
            loss = -(advantage * chosen).mean()
            optimizer.zero_grad()
            loss.backward()
            torch_ext.clip_grad_norm_(optimizer, 1.0)
            optimizer.step()
            losses.append(loss.item())
        rewards.append(reward.mean().item())
    if offloads:
        stages = ("trained", "generates", "is scored", "trains")
        print(
            "MB of the device, last round:",
            ", ".join(f"{s} {mb:.2f}" for s, mb in zip(stages, memory[-4:], strict=True)),
        )
        assert memory[-4] == memory[-1] > 2 * memory[-3] > 18 * memory[-2]
    return losses, rewards


def main() -> None:
    with_offload, rewards = loop(True)
    without, _ = loop(False)
    print("mean reward of each round:", ", ".join(f"{reward:.2f}" for reward in rewards))
    assert rewards[-1] > 2 * rewards[0], "the policy no longer learns"
    assert with_offload == without, "offload and onload changed something"
    print(f"the {len(without)} losses are those of the loop that keeps everything on the device")


if __name__ == "__main__":
    main()
