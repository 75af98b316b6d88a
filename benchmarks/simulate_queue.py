"""Compare orders of service in virtual time, with the rules of the queue: ``anyaccel.policy``.

    python benchmarks/simulate_queue.py [--devices 8] [--requests 2000] [--swf FILE]

Without a file, arrivals are made up: three users, one of whom submits sweeps; short, long and wide requests; nine in
ten say how long they take at most, which is up to three times what they take. ``--swf`` reads a log in the Standard
Workload Format (https://www.cs.huji.ac.il/labs/parallel/workload/swf.html): processors are taken for devices, scaled
so that the machine of the log is ours (``MaxProcs`` of its header, else the largest request), and the requested time
for the limit. ``benchmarks/made-up.swf`` is a small one, made up as well; what a public one gives is in the README.
"""

from __future__ import annotations

import argparse
import heapq
import random
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from anyaccel.backfill import may_pass
from anyaccel.model import Value, replace
from anyaccel.policy import Holding, Need, Policy, Usage, Waiting

HOUR = 3600.0
WEEK = 168 * HOUR
SWEEPS, SINGLE, SEVERAL, SAYS = 0.15, 0.7, 0.93, 0.9
"""Of what is made up: shares of sweeps among one user's requests, of small and wider ones, and of those with a time."""
FIELDS = 12


class Job(Value):
    """A request of a log."""

    number: int
    arrives: float
    devices: int
    lasts: float
    says: float | None
    user: int


def made_up(number: int, devices: int, seed: int = 7) -> list[Job]:
    """Invented requests, at about nine tenths of what the machine can do."""
    draw, now, jobs = random.Random(seed), 0.0, []
    while len(jobs) < number:
        now += draw.expovariate(1 / 1100)
        user = draw.choice([1, 2, 2, 3])
        kind = draw.random()
        if user == 1 and kind < SWEEPS:
            shape = [(1, draw.uniform(300, 1200))] * draw.randint(8, 32)
        elif kind < SINGLE:
            shape = [(1, draw.expovariate(1 / 2400))]
        elif kind < SEVERAL:
            shape = [(draw.choice([2, 2, 4]), draw.expovariate(1 / 7200))]
        else:
            shape = [(devices, draw.expovariate(1 / 3600))]
        for count, seconds in shape:
            lasts = min(max(30.0, seconds), 24 * HOUR)
            says = lasts * draw.uniform(1, 3) if draw.random() < SAYS else None
            jobs.append(Job(number=len(jobs), arrives=now, devices=count, lasts=lasts, says=says, user=user))
    return jobs[:number]


def read_swf(path: Path, devices: int) -> list[Job]:
    """Read a log in the Standard Workload Format; what has no time or no processors is left out."""
    rows, most = [], 0.0
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        fields = line.split()
        if line.startswith("; MaxProcs:") and fields[-1].isdecimal():
            most = float(fields[-1])
        if not fields or line.lstrip().startswith(";"):
            continue
        if len(fields) < FIELDS:
            raise SystemExit(f"{path}: a line of the Standard Workload Format has 18 fields (got {len(fields)})")
        submit, run, used, asked, limit, user = (float(fields[at]) for at in (1, 3, 4, 7, 8, 11))
        processors = asked if asked > 0 else used
        if run > 0 and processors > 0:
            rows.append((submit, run, processors, limit, int(user)))
    if not rows:
        raise SystemExit(f"{path}: no line of the Standard Workload Format has a run time and processors")
    most = max(most, *(row[2] for row in rows))
    return [
        Job(
            number=number,
            arrives=submit,
            devices=max(1, round(processors * devices / most)),
            lasts=run,
            says=max(limit, run) if limit > 0 else None,
            user=max(1, user),
        )
        for number, (submit, run, processors, limit, user) in enumerate(sorted(rows))
    ]


def simulate(jobs: Iterable[Job], devices: int, rules: Policy) -> list[tuple[Job, float]]:
    """Serve requests in virtual time; returns each with how long it waited."""
    names = frozenset(range(devices))
    coming = sorted(jobs, key=lambda job: (job.arrives, job.number))[::-1]
    waiting: dict[int, tuple[Job, Waiting]] = {}
    running: list[tuple[float, int, list[Holding]]] = []
    free, now = set(names), 0.0
    waited = []
    while coming or waiting:
        now = min([job.arrives for job in coming[-1:]] + [end for end, _, _ in running[:1]])
        while running and running[0][0] <= now:
            ended = heapq.heappop(running)
            free.update(int(str(each.device)) for each in ended[2])
            rules = with_ended(rules, ended[2], ended[0])
        while coming and coming[-1].arrives <= now:
            job = coming.pop()
            needs = (Need(count=job.devices, units=10_000, among=names),)
            waiting[job.number] = (
                job,
                Waiting(
                    key=job.number, number=job.number, since=job.arrives, user=job.user, seconds=job.says, needs=needs
                ),
            )
        for job, passes in served(waiting, running, free, rules, now):
            given = [free.pop() for _ in range(job.devices)]
            until = None if job.says is None else now + job.says
            passed = now if passes else None
            held = [Holding(device=each, user=job.user, since=now, until=until, passed=passed) for each in given]
            heapq.heappush(running, (now + job.lasts, job.number, held))
            del waiting[job.number]
            waited.append((job, now - job.arrives))
    return waited


def with_ended(rules: Policy, held: list[Holding], now: float) -> Policy:
    """Return the rules with the usage of a request that ends now, if they count use over time."""
    user, since = held[0].user, held[0].since
    if rules.half_life is None or user is None or since is None:
        return rules
    usage = rules.past.get(user, Usage()).with_lease(len(held), now - since, now, rules.half_life)
    return replace(rules, past={**rules.past, user: usage})


def served(
    waiting: dict[int, tuple[Job, Waiting]],
    running: list[tuple[float, int, list[Holding]]],
    free: set[int],
    rules: Policy,
    now: float,
) -> Iterable[tuple[Job, bool]]:
    """Who starts now, one after the other; each is to be served before the next is asked for."""
    while free and waiting:
        held = [each for _, _, own in running for each in own]
        order = rules.order([each for _, each in waiting.values()], held, now)
        found = None
        for position, each in enumerate(order):
            job = waiting[each.number][0]
            # Who may not pass the first may not pass all, and that is quickly told.
            ahead = (order[:1], order[:position]) if position else ()
            if job.devices <= len(free) and all(may_pass(rules, each, those, held, now) for those in ahead):
                found = job, position > 0
                break
        if found is None:
            return
        yield found


ORDERS: dict[str, Callable[[], Policy]] = {
    "plain order": Policy,
    "backfill": Policy,
    "backfill, bound 10 min": lambda: Policy(backfill=600.0),
    "fair shares": lambda: Policy(fair_shares=True, patience=24 * HOUR),
    "fair shares, half-life 7 d": lambda: Policy(fair_shares=True, half_life=WEEK, patience=24 * HOUR),
    "fair shares, backfill, 10 min": lambda: Policy(fair_shares=True, patience=24 * HOUR, backfill=600.0),
    "half-life 7 d, backfill, 10 min": lambda: Policy(
        fair_shares=True, half_life=WEEK, patience=24 * HOUR, backfill=600.0
    ),
}


def main() -> int:
    """Print a table."""
    parser = argparse.ArgumentParser(description="Compare orders of service in virtual time.")
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--swf", type=Path)
    args = parser.parse_args()
    jobs = read_swf(args.swf, args.devices) if args.swf else made_up(args.requests, args.devices)
    print(f"{len(jobs)} requests, {args.devices} devices{f', {args.swf}' if args.swf else ', made up'}")
    print(f"{'order':32}{'mean wait':>12}{'longest':>12}{'mean, worst user':>20}{'mean, light users':>20}")
    light = light_users(jobs)
    for name, policy in ORDERS.items():
        plain = "backfill" not in name
        todo = [Job(**{**_fields(job), "says": None}) for job in jobs] if plain else jobs
        waits = simulate(todo, args.devices, policy())
        users: dict[int, list[float]] = {}
        for job, wait in waits:
            users.setdefault(job.user, []).append(wait)
        mean = sum(wait for _, wait in waits) / len(waits)
        worst = max(sum(each) / len(each) for each in users.values())
        longest = max(wait for _, wait in waits)
        few = [wait for user in light for wait in users[user]]
        print(
            f"{name:32}{mean / 60:>8.1f} min{longest / 60:>8.1f} min{worst / 60:>16.1f} min"
            f"{sum(few) / len(few) / 60:>16.1f} min"
        )
    return 0


def light_users(jobs: list[Job]) -> set[int]:
    """All users but the one whose requests take most device-hours."""
    hours: dict[int, float] = {}
    for job in jobs:
        hours[job.user] = hours.get(job.user, 0.0) + job.devices * job.lasts
    heaviest = max(hours, key=lambda user: hours[user])
    return set(hours) - {heaviest} or {heaviest}


def _fields(job: Job) -> dict[str, object]:
    return {name: getattr(job, name) for name in ("number", "arrives", "devices", "lasts", "says", "user")}


if __name__ == "__main__":
    sys.exit(main())
