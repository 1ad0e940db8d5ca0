"""Labels of a store: train the head, and re-rank all alerts."""

from __future__ import annotations

from typing import NamedTuple

from regard.watch.follow.store import AlertQuery, WatchStore
from regard.watch.users.ranking import MIN_LABELS, RankingHead, priority, train_ranking

RANKING_FACT = "ranking"
PORTION = 1000


class Ranking(NamedTuple):
    """What the labels have taught.

    Attributes:
        head: The head; None while there are too few labels.
        attacks: Alerts labelled "attack".
        normals: Alerts labelled "normal".
        alerts: Alerts whose priority was set.
    """

    head: RankingHead | None
    attacks: int
    normals: int
    alerts: int

    def describe(self) -> str:
        """The ranking in a sentence."""
        labels = f"{self.attacks} labelled attack and {self.normals} normal"
        if self.head is None:
            return f"{labels}: alerts are ranked by p until there are {MIN_LABELS} of each."
        return (
            f"{labels}: {self.alerts:,} alerts ranked again; cross-validated accuracy "
            f"{self.head.accuracy:.0%} (chance is 50 %)."
        )


def rank_alerts(store: WatchStore) -> Ranking:
    """Train the head on the labels of a store, keep it for `follow`, and set all priorities."""
    labelled = store.labelled_alerts()
    labels = [entry.label for entry in labelled]
    head = train_ranking([entry.content for entry in labelled], labels)
    ranked = 0
    with store.transaction():
        store.set_fact(RANKING_FACT, None if head is None else head._asdict())
        while True:
            query = AlertQuery(statuses=None, order="time", limit=PORTION, offset=ranked)
            entries = store.alerts(query)
            if not entries:
                break
            store.set_priorities(
                {entry.content["id"]: priority(entry.content, head) for entry in entries}
            )
            ranked += len(entries)
    return Ranking(head, labels.count("attack"), labels.count("normal"), ranked)
