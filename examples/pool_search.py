"""A search over parameters: one function on all devices, progress on standard error, the CPU where there is no device.

Prints:
    best: lr=0.1 with loss 0.0100
"""

import anyaccel as aa


def train(lr: float) -> float:
    """Stands for hours on a device; ``aa.current().cpu`` says when there is none."""
    return (lr - 0.2) ** 2


rates = [1.0, 0.1, 0.5, 0.01]
# Two devices, whatever this machine has; leave ``declare`` out to use its own.
with aa.Pool("GPU:1,else=cpu", declare={"GPU": 2}, timeout=3600) as pool:
    losses = list(pool.map(train, rates, progress=True))

best = min(range(len(rates)), key=losses.__getitem__)
print(f"best: lr={rates[best]} with loss {losses[best]:.4f}")
