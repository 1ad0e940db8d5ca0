"""The events of the shop in order of time: people, programs and attackers take turns."""

from __future__ import annotations

import heapq
import random
from collections.abc import Collection, Iterator
from typing import Any

from regard.errors import check_choice
from regard.watch.demo.attacks import ATTACKS, Label, attack_times
from regard.watch.demo.people import (
    Step,
    create_people,
    monitor,
    visit_crawler,
    visit_customer,
    visit_guests,
    visit_old_app,
    visit_partner,
    visit_staff,
)
from regard.watch.demo.shop import DAY, START, Shop


def generate_traffic(
    days: float,
    users: int = 200,
    seed: int = 0,
    attacks: Collection[str] = tuple(ATTACKS),
    **options: Any,
) -> Iterator[dict[str, Any]]:
    """Events of the shop as JSON objects, without labels; see `generate_labelled_traffic`."""
    for event, _ in generate_labelled_traffic(days, users, seed, attacks, **options):
        yield event


def generate_labelled_traffic(
    days: float,
    users: int = 200,
    seed: int = 0,
    attacks: Collection[str] = tuple(ATTACKS),
    *,
    attacks_from: float = 0.0,
    attacks_a_day: float = 1.0,
    drift: bool = True,
    start: float = START,
) -> Iterator[tuple[dict[str, Any], Label | None]]:
    """Events of the shop in order of time, each with its label: None if it is normal.

    The customers, and all that they do before the first attack, depend on `users` and `seed` alone.

    Args:
        days: How long, in days; may be `math.inf` without attacks.
        users: Number of customers. About 16 events a day for each, and about 800 of other clients.
        seed: Seed of everything.
        attacks: Kinds of attacks, keys of `ATTACKS`.
        attacks_from: Day on which the attacks begin.
        attacks_a_day: Incidents a day of each kind; there is at least one of each kind.
        drift: Whether app releases, new endpoints, campaigns and prices change the traffic.
        start: First moment, in seconds since 1970.
    """
    for kind in attacks:
        check_choice("attack", kind, ATTACKS)
    if not days > 0:
        raise ValueError(f"days must be positive, not {days}.")
    if users < 1:
        raise ValueError(f"users must be at least 1, not {users}.")
    if attacks and not 0 <= attacks_from < days:
        raise ValueError(f"attacks_from must be between 0 and {days} days, not {attacks_from}.")
    shop = Shop(seed, drift, start, start)
    people = create_people(users, seed)
    normal: list[Iterator[Step]] = [visit_customer(shop, person) for person in people]
    normal += [visit_staff(shop, i, people, seed) for i in range(2 + users // 100)]
    normal += [visit_partner(shop, i, seed) for i in range(2 + users // 150)]
    normal += [visit_old_app(shop, i, seed) for i in range(1 + users // 60)]
    normal += [visit_guests(shop, seed, users / 4), visit_crawler(shop, seed), monitor(shop, seed)]

    # (time, number of the process, its steps, its label): numbers break ties
    waiting: list[tuple[float, int, Iterator[Step], Label | None]]
    waiting = [(start, i, steps, None) for i, steps in enumerate(normal)]
    for kind in attacks:
        rng = random.Random(f"{kind} {seed}")
        first, last = start + attacks_from * DAY, start + days * DAY
        for time in attack_times(rng, first, last, attacks_a_day):
            number = len(waiting)
            planted = Label(kind, number - len(normal))
            steps = ATTACKS[kind].steps(shop, random.Random(f"{kind} {seed} {number}"), people)
            waiting.append((time, number, steps, planted))
    heapq.heapify(waiting)

    end = start + days * DAY
    while waiting and waiting[0][0] < end:
        shop.now, number, steps, label = waiting[0]
        for step in steps:
            if isinstance(step, dict):
                yield step, label
            else:
                heapq.heapreplace(waiting, (max(step, shop.now), number, steps, label))
                break
        else:
            heapq.heappop(waiting)
