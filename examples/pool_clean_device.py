"""The task after one that leaks gets a clean device, since each task with devices has a process of its own.

With ``max_calls=0`` the process is used again: faster, and what leaks stays.

Prints:
    own processes: [0, 0, 0] left over by the task before
    one process: [0, 1, 2] left over by the task before
"""

import anyaccel as aa


def leak() -> int:
    """Stands for a library that never gives the memory of a device back."""
    import builtins

    leaked = vars(builtins).setdefault("leaked", [])
    leaked.append(bytes(1 << 20))
    return len(leaked) - 1


with aa.Pool("GPU:1", declare={"GPU": 1}) as pool:
    print(f"own processes: {[pool.submit(leak).result() for _ in range(3)]} left over by the task before")
    kept = pool.options(max_calls=0)
    print(f"one process: {[kept.submit(leak).result() for _ in range(3)]} left over by the task before")
