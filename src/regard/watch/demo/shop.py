"""The shop: its catalogue, its orders, what changes over the weeks, and how it answers."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, NamedTuple

DAY = 86400.0
START = datetime(2026, 9, 7, tzinfo=UTC).timestamp()  # a Monday

CATEGORIES = {  # category: (median price, share of views, words of its names)
    "kitchen": (32.0, 0.16, ("kettle", "pan", "knife", "mug", "toaster", "scale")),
    "garden": (41.0, 0.09, ("hose", "spade", "lantern", "planter", "gloves", "rake")),
    "audio": (89.0, 0.15, ("headphones", "speaker", "microphone", "amplifier", "cable")),
    "bicycle": (55.0, 0.11, ("helmet", "pump", "saddle", "lamp", "lock", "tyre")),
    "books": (17.0, 0.14, ("atlas", "novel", "cookbook", "dictionary", "guide")),
    "toys": (24.0, 0.12, ("puzzle", "blocks", "kite", "train", "doll", "dice")),
    "office": (15.0, 0.10, ("notebook", "pen", "lamp", "folder", "stapler", "chair")),
    "outdoor": (74.0, 0.13, ("tent", "backpack", "bottle", "stove", "jacket", "rope")),
}
ADJECTIVES = ("small", "red", "steel", "light", "classic", "folding", "green", "wooden", "quiet")
SPECIAL_OFFER = "1007"  # in short supply, and wanted
PRODUCTS = 420

RELEASES = (  # day of release, version of the mobile app, what is new in it
    (-30.0, "5.1.0", None),
    (-6.0, "5.2.0", None),
    (5.0, "5.3.0", "recommendations"),
    (11.5, "5.3.1", None),
    (16.0, "5.4.0", "wishlist"),
    (25.0, "5.5.0", "compare"),
)
CAMPAIGNS = ((8.0, 10.0, "AUTUMN15", "outdoor"), (17.5, 19.5, "GARDEN10", "garden"))
INFLATION = 0.004  # of prices, a day


class Campaign(NamedTuple):
    """A voucher that is advertised for some days."""

    first_day: float
    last_day: float
    voucher: str
    category: str


class Product(NamedTuple):
    """A product of the catalogue."""

    id: str
    name: str
    category: str
    price: float
    popularity: float


@dataclass
class Client:
    """What a request carries about who sends it.

    Attributes:
        user: The signed-in user, else the address.
        session: Id of the session; None before a login.
        address: IP address.
        country: Country of the address.
        headers: Headers of the client.
        delay: Seconds that the network adds to an answer, in milliseconds.
    """

    user: str
    session: str | None
    address: str
    country: str
    headers: dict[str, str]
    delay: float = 20.0


class ResponseProfile(NamedTuple):
    """How the shop answers a route: size in bytes and time in milliseconds, both medians."""

    size: float
    milliseconds: float


ANSWERS = {
    ("GET", "products"): ResponseProfile(780.0, 45.0),  # size of one row of a list
    ("GET", "product"): ResponseProfile(2150.0, 18.0),
    ("GET", "reviews"): ResponseProfile(1900.0, 26.0),
    ("GET", "search"): ResponseProfile(780.0, 90.0),
    ("GET", "orders"): ResponseProfile(420.0, 40.0),
    ("GET", "order"): ResponseProfile(1650.0, 24.0),
    ("GET", "invoice"): ResponseProfile(48200.0, 160.0),
    ("POST", "checkout"): ResponseProfile(640.0, 210.0),
    ("POST", "payments"): ResponseProfile(310.0, 620.0),
    ("POST", "login"): ResponseProfile(540.0, 130.0),
    ("GET", "report"): ResponseProfile(26000.0, 1400.0),
}
OTHER_ANSWER = ResponseProfile(380.0, 30.0)


@dataclass
class Shop:
    """The state that all requests share.

    Attributes:
        seed: Seed of the catalogue and of the times of answers.
        drift: Whether releases, campaigns and prices change over the days.
        now: Time of the request that is being made, in seconds since 1970.
    """

    seed: int
    drift: bool = True
    start: float = START
    now: float = START
    next_order: int = 48210
    orders: dict[str, list[int]] = field(default_factory=dict)  # user -> their orders
    totals: dict[int, float] = field(default_factory=dict)  # order -> its amount

    def __post_init__(self) -> None:
        self.rng = random.Random(f"shop {self.seed}")
        self.products = [self._create_product(1000 + i) for i in range(PRODUCTS)]
        self.by_category: dict[str, list[Product]] = {name: [] for name in CATEGORIES}
        for product in self.products:
            self.by_category[product.category].append(product)

    def _create_product(self, number: int) -> Product:
        category = self.rng.choices(list(CATEGORIES), [c[1] for c in CATEGORIES.values()])[0]
        median, _, words = CATEGORIES[category]
        name = f"{self.rng.choice(ADJECTIVES)} {self.rng.choice(words)}"
        price = median * math.exp(self.rng.gauss(0, 0.6))
        popularity = self.rng.paretovariate(1.1)
        return Product(str(number), name, category, price, popularity)

    @property
    def day(self) -> float:
        """Days since the start of the traffic; 0 for ever without drift."""
        return (self.now - self.start) / DAY if self.drift else 0.0

    def price(self, product: Product) -> float:
        """Today's price: it rises slowly, and ends in .49 or .99 below 100."""
        raw = product.price * (1 + INFLATION * self.day)
        return math.floor(raw) + (0.49 if product.popularity < 1.8 else 0.99)

    def campaign(self) -> Campaign | None:
        """The campaign that runs now."""
        running = (Campaign(*each) for each in CAMPAIGNS if each[0] <= self.day < each[1])
        return next(running, None)

    def pick_product(self, rng: random.Random, category: str) -> Product:
        """A product of a category, popular ones more often."""
        products = self.by_category[category]
        return rng.choices(products, [each.popularity for each in products])[0]

    def place_order(self, user: str, amount: float) -> int:
        """Take an order and return its number."""
        self.next_order += self.rng.choice((1, 1, 1, 2, 3))  # other channels sell too
        self.orders.setdefault(user, []).append(self.next_order)
        self.totals[self.next_order] = amount
        return self.next_order

    def request(
        self,
        client: Client,
        method: str,
        path: str,
        *,
        route: str = "",
        query: dict[str, Any] | None = None,
        body: dict[str, Any] | None = None,
        status: int = 200,
        rows: float = 1.0,
    ) -> dict[str, Any]:
        """The event that the gateway logs for a request.

        Args:
            client: Who sends it.
            method: HTTP method.
            path: Path with its ids.
            route: Name of the route in `ANSWERS`.
            query: Parameters of the query string.
            body: Body, with passwords and card numbers removed by the gateway.
            status: Status of the answer.
            rows: How many rows a list in the answer has.
        """
        rng = self.rng
        answer = ANSWERS.get((method, route), OTHER_ANSWER)
        busy = 1 + 0.35 * math.sin((self.now % DAY) / DAY * 2 * math.pi - 2.2)
        milliseconds = answer.milliseconds * (1 + rows / 60) * busy * math.exp(rng.gauss(0, 0.35))
        size = answer.size * rows * math.exp(rng.gauss(0, 0.08)) + 160
        if status >= 400:
            size, milliseconds = 150 + rng.random() * 40, milliseconds * 0.4
        if status < 400 and rng.random() < 0.0015:  # faults of the shop itself
            status, milliseconds = rng.choice((500, 502, 503)), milliseconds * 4
        request: dict[str, Any] = {"method": method, "path": path}
        if query:
            request["query"] = query
        request |= {"user": client.user, "ip": client.address, "country": client.country}
        if client.session is not None:
            request["session"] = client.session
        headers = dict(client.headers)
        if body is not None:
            headers["Content-Type"] = "application/json"
            request["body"] = body
        request["headers"] = headers
        return {
            "time": datetime.fromtimestamp(self.now, UTC).isoformat(timespec="milliseconds"),
            "request_id": f"{rng.getrandbits(64):016x}",
            "request": request,
            "response": {
                "status": status,
                "bytes": round(size),
                "duration_ms": round(milliseconds + client.delay, 1),
            },
        }
