"""The people and programs that use the shop, each with habits of its own.

Each is a generator of steps: a number is the time at which it goes on, a mapping is an event.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from regard.watch.demo.shop import CATEGORIES, DAY, RELEASES, Client, Product, Shop

Step = float | dict[str, Any]
HOUR = 3600.0

COUNTRIES = {  # country: (share of users, language, hours from UTC, first part of addresses)
    "DE": (0.42, "de-DE,de;q=0.9,en;q=0.6", 2, (84, 91, 217)),
    "AT": (0.09, "de-AT,de;q=0.9", 2, (62, 80)),
    "CH": (0.10, "de-CH,de;q=0.9,fr;q=0.5", 2, (85, 178)),
    "FR": (0.13, "fr-FR,fr;q=0.9", 2, (81, 90)),
    "NL": (0.08, "nl-NL,nl;q=0.9,en;q=0.7", 2, (77, 86)),
    "PL": (0.07, "pl-PL,pl;q=0.9", 2, (83, 89)),
    "GB": (0.08, "en-GB,en;q=0.9", 1, (82, 94)),
    "US": (0.03, "en-US,en;q=0.9", -5, (24, 73)),
}
CURRENCIES = {"CH": "CHF", "GB": "GBP", "US": "USD", "PL": "PLN"}
BROWSERS = (
    "Mozilla/5.0 (Windows NT 10.0; Win64; x64) AppleWebKit/537.36 Chrome/{} Safari/537.36",
    "Mozilla/5.0 (Macintosh; Intel Mac OS X 10_15_7) AppleWebKit/537.36 Chrome/{} Safari/537.36",
    "Mozilla/5.0 (X11; Linux x86_64; rv:{0}) Gecko/20100101 Firefox/{0}",
    "Mozilla/5.0 (Windows NT 10.0; Win64; x64; rv:{0}) Gecko/20100101 Firefox/{0}",
)
DEVICES = ("iPhone15,2", "iPhone14,5", "iPhone16,1", "SM-S921B", "SM-A546B", "Pixel 8", "Pixel 7a")
FIRST_NAMES = (
    "Anna",
    "Ben",
    "Chloé",
    "David",
    "Emma",
    "Finn",
    "Greta",
    "Hugo",
    "Ida",
    "Jan",
    "Lea",
)
LAST_NAMES = ("Meier", "Kowalski", "Martin", "de Vries", "Brown", "Huber", "Schmidt", "Rossi")
STREETS = ("Lindenweg", "Rue du Lac", "Hauptstraße", "Park Lane", "Dorpsstraat", "Aleja Lipowa")
REVIEWS = (
    "Works well, arrived in two days.",
    "Good value. The colour is a little darker than in the picture.",
    "Broke after a week :(",
    "My daughter loves it!",
    "As described; packaging could be better.",
    "Second one I bought, 5/5 & would buy again",
    "It's fine. Don't expect too much for {} euros.",
)
REASONS = ("damaged", "late", "wrong item", "customer changed mind", "price adjustment")


class Habit(NamedTuple):
    """What one kind of customer does.

    Attributes:
        share: Share of the customers.
        sessions: Sessions a day.
        steps: Mean number of steps of a session.
        peak: Hour of the day with the most sessions, local time.
        weekend: Factor on Saturday and Sunday.
        buys: Probability that a basket is bought at the end of a session.
        actions: Weight of each action.
    """

    share: float
    sessions: float
    steps: float
    peak: float
    weekend: float
    buys: float
    actions: dict[str, float]


HABITS = {
    "browser": Habit(
        share=0.34,
        sessions=0.8,
        steps=11,
        peak=20.5,
        weekend=1.3,
        buys=0.25,
        actions={"listing": 5, "product": 8, "search": 2, "add": 1},
    ),
    "buyer": Habit(
        share=0.26,
        sessions=0.7,
        steps=8,
        peak=19,
        weekend=1.1,
        buys=0.8,
        actions={"search": 4, "product": 5, "add": 3, "orders": 2, "order": 2},
    ),
    "bargain": Habit(
        share=0.16,
        sessions=1.2,
        steps=14,
        peak=12.5,
        weekend=1.0,
        buys=0.4,
        actions={"search": 6, "listing": 6, "product": 5, "add": 3, "voucher": 2},
    ),
    "reader": Habit(
        share=0.12,
        sessions=0.6,
        steps=12,
        peak=22.5,
        weekend=1.2,
        buys=0.3,
        actions={"product": 6, "reviews": 7, "review": 1, "listing": 3, "add": 1},
    ),
    "business": Habit(
        share=0.12,
        sessions=1.1,
        steps=9,
        peak=10.5,
        weekend=0.15,
        buys=0.85,
        actions={"search": 3, "add": 6, "orders": 5, "order": 4, "invoice": 4, "product": 2},
    ),
}


@dataclass
class Person:
    """A customer: who they are, where, with which devices, and what they like."""

    id: str
    seed: int
    habit: Habit
    rng: random.Random
    country: str
    weekly_address_change: float = 0.6
    travels: tuple[float, float, str] | None = None  # first day, last day, country
    session: str | None = None
    basket: list[tuple[Product, int, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        rng = self.rng
        self.pace = math.exp(rng.gauss(0, 0.35))  # of their sessions
        self.name = (rng.choice(FIRST_NAMES), rng.choice(LAST_NAMES))
        self.email = f"{self.name[0]}.{self.name[1]}{rng.randrange(100)}@mail.example"
        self.email = self.email.lower().replace(" ", "").replace("é", "e")
        self.likes = rng.sample(list(CATEGORIES), 3)
        self.app_share = rng.choice((0.0, 0.15, 0.6, 0.95, 1.0))
        self.device = rng.choice(DEVICES)
        self.browser = rng.choice(BROWSERS).format(f"{rng.randrange(138, 143)}.0")
        self.address_id = rng.randrange(20000, 90000)
        self.payment = rng.choice(("card", "card", "paypal", "invoice"))
        self.shipping = rng.choice(("standard", "standard", "express", "pickup"))
        self.page_size = rng.choice((20, 24, 24, 48))
        self.update_delay = rng.expovariate(1 / 2.5)  # days until they install a release
        self.ip = random_address(rng, self.country)

    def client(self, shop: Shop) -> Client:
        """The device, the network and the country of the next session."""
        rng, country, day = self.rng, self.country, shop.day
        if self.travels is not None and self.travels[0] <= day < self.travels[1]:
            country = self.travels[2]
        elif rng.random() < 0.06:
            self.ip = random_address(rng, country)  # the provider gives a new one
        on_app = rng.random() < self.app_share
        away = country != self.country or (on_app and rng.random() < 0.4)
        address = random_address(rng, country) if away else self.ip
        language = COUNTRIES[self.country][1]
        if on_app:
            version = app_version(day - self.update_delay)
            headers = {
                "User-Agent": f"ShopApp/{version} ({self.device})",
                "Accept": "application/json",
                "Accept-Language": language.split(",")[0],
                "X-App-Version": version,
            }
        else:
            headers = {
                "User-Agent": self.browser,
                "Accept": "application/json, text/plain, */*",
                "Accept-Language": language,
                "Origin": "https://shop.example",
            }
        delay = 40.0 if on_app else 15.0
        return Client(self.id, self.session, address, country, headers, delay)


def random_address(rng: random.Random, country: str) -> str:
    """An IP address of a provider in a country."""
    first = rng.choice(COUNTRIES[country][3])
    second = rng.choice((11, 64, 133, 201))
    return f"{first}.{second}.{rng.randrange(256)}.{rng.randrange(1, 255)}"


def app_version(day: float) -> str:
    """The newest version of the app that was out on a day."""
    return [version for release, version, _ in RELEASES if release <= day or release < -20][-1]


def app_features(client: Client) -> set[str]:
    """What the app of a client can do, by its version; nothing for browsers."""
    version = client.headers.get("X-App-Version", "")
    return {new for _, each, new in RELEASES if new is not None and each <= version}


def create_people(count: int, seed: int) -> list[Person]:
    """Customers with their habits: the same for a seed, whatever else is asked for."""
    people = []
    for i in range(count):
        rng = random.Random(f"person {seed} {i}")
        habit = rng.choices(list(HABITS.values()), [each.share for each in HABITS.values()])[0]
        country = rng.choices(list(COUNTRIES), [each[0] for each in COUNTRIES.values()])[0]
        travels = None
        if rng.random() < 0.12:
            first = rng.uniform(0, 28)
            others = [each for each in COUNTRIES if each != country]
            travels = (first, first + rng.uniform(2, 7), rng.choice(others))
        number = 10000 + i * 7 + rng.randrange(7)
        people.append(Person(f"u{number}", seed, habit, rng, country, travels=travels))
    return people


def rhythm(time: float, peak: float, weekend: float, hours_from_utc: float) -> float:
    """How busy a time is, between 0 and 1 (times `weekend`): a day has one broad peak."""
    local = time + hours_from_utc * HOUR
    hour = (local % DAY) / HOUR
    gap = min(abs(hour - peak), 24 - abs(hour - peak))
    on_weekend = int(local // DAY + 3) % 7 >= 5  # 1970 began on a Thursday
    return (0.03 + 0.97 * math.exp(-((gap / 4.2) ** 2))) * (weekend if on_weekend else 1.0)


def next_visit(rng: random.Random, time: float, a_day: float, peak: float, zone: float) -> float:
    """The start of the next visit: a Poisson process that follows the hours, by thinning."""
    highest = a_day / DAY * 3.1  # the mean of `rhythm` over a day is 1 / 3.1
    while True:
        time += rng.expovariate(highest)
        if rng.random() < rhythm(time, peak, 1.0, zone):
            return time


def visit_customer(shop: Shop, person: Person) -> Iterator[Step]:
    """All that a customer does, from session to session."""
    habit, zone = person.habit, COUNTRIES[person.country][2]
    now = shop.start
    while True:
        now = next_visit(person.rng, now, habit.sessions * person.pace * 1.7, habit.peak, zone)
        yield now
        keep = 1.0 if shop.campaign() else 0.6  # a campaign brings more visits
        local_day = int((now + zone * HOUR) // DAY + 3) % 7
        if person.rng.random() < keep * (habit.weekend if local_day >= 5 else 1.0):
            yield from Visit(shop, person, person.client(shop)).run()
        now = max(now, shop.now)


@dataclass
class Visit:
    """One session of a customer."""

    shop: Shop
    person: Person
    client: Client

    def run(self) -> Iterator[Step]:
        """Sign in if needed, look around, and perhaps buy."""
        rng, person = self.person.rng, self.person
        on_app = "X-App-Version" in self.client.headers
        if person.session is None or rng.random() < (0.04 if on_app else 0.5):
            yield from self.sign_in()
        actions = dict(person.habit.actions)
        for feature in app_features(self.client):
            actions[feature] = 1.5
        if rng.random() < 0.06:
            actions["profile"] = 3.0
        for _ in range(1 + int(rng.expovariate(1 / person.habit.steps))):
            action = rng.choices(list(actions), list(actions.values()))[0]
            yield from getattr(self, action)()
            yield self.pause()
        if person.basket and rng.random() < person.habit.buys:
            yield from self.buy()

    def pause(self, median: float = 9.0) -> float:
        """When the person does the next thing."""
        return self.shop.now + median * math.exp(self.person.rng.gauss(0, 0.9))

    def sign_in(self) -> Iterator[Step]:
        """POST login, sometimes with a wrong password first."""
        person, rng = self.person, self.person.rng
        body = {"email": person.email, "password": "[removed]"}
        if rng.random() < 0.5:
            body["remember"] = True  # type: ignore[assignment]
        unknown = Client(**{**vars(self.client), "user": self.client.address, "session": None})
        while rng.random() < 0.08:
            yield self.shop.request(
                unknown, "POST", "/v2/login", route="login", body=body, status=401
            )
            yield self.pause(6)
        yield self.shop.request(unknown, "POST", "/v2/login", route="login", body=body)
        person.session = f"{rng.getrandbits(64):016x}"
        self.client.session = person.session
        yield self.pause(3)

    def category(self) -> str:
        """A category that the person likes, or that a campaign is about."""
        campaign, rng = self.shop.campaign(), self.person.rng
        if campaign is not None and rng.random() < 0.3:
            return campaign.category
        return rng.choice(self.person.likes)

    def listing(self) -> Iterator[Step]:
        rng, size = self.person.rng, self.person.page_size
        page = 1 + int(rng.expovariate(1.1))
        query = {"category": self.category(), "page": page, "limit": size}
        if rng.random() < 0.25:
            query["sort"] = rng.choice(("price", "-price", "rating", "newest"))
        yield self.shop.request(
            self.client, "GET", "/v2/products", route="products", query=query, rows=size
        )

    def product(self) -> Iterator[Step]:
        product = self.shop.pick_product(self.person.rng, self.category())
        status = 404 if self.person.rng.random() < 0.006 else 200
        path = f"/v2/products/{product.id}"
        yield self.shop.request(self.client, "GET", path, route="product", status=status)

    def search(self) -> Iterator[Step]:
        rng, category = self.person.rng, self.category()
        words = rng.choice(CATEGORIES[category][2])
        if rng.random() < 0.35:
            words = self.shop.pick_product(rng, category).name
        query = {"q": words, "limit": self.person.page_size}
        rows = rng.randrange(0, self.person.page_size + 1)
        yield self.shop.request(
            self.client, "GET", "/v2/search", route="search", query=query, rows=rows
        )

    def reviews(self) -> Iterator[Step]:
        product = self.shop.pick_product(self.person.rng, self.category())
        yield self.shop.request(
            self.client, "GET", f"/v2/products/{product.id}/reviews", route="reviews"
        )

    def review(self) -> Iterator[Step]:
        rng = self.person.rng
        product = self.shop.pick_product(rng, self.category())
        text = rng.choice(REVIEWS).format(round(self.shop.price(product)))
        body = {"stars": rng.choice((1, 2, 3, 4, 4, 5, 5, 5)), "text": text}
        path = f"/v2/products/{product.id}/reviews"
        yield self.shop.request(self.client, "POST", path, body=body, status=201)

    def add(self) -> Iterator[Step]:
        rng, person = self.person.rng, self.person
        product = self.shop.pick_product(rng, self.category())
        business = person.habit is HABITS["business"]
        quantity = rng.choice((5, 10, 10, 20, 25) if business else (1, 1, 1, 1, 2, 3))
        body: dict[str, Any] = {"product": product.id, "quantity": quantity}
        if "wishlist" in app_features(self.client):
            body["gift"] = rng.random() < 0.08
        yield self.shop.request(self.client, "POST", "/v2/basket/items", body=body, status=201)
        person.basket.append((product, quantity, f"{rng.getrandbits(32):08x}"))
        yield self.pause(3)
        yield self.shop.request(self.client, "GET", "/v2/basket", rows=len(person.basket))
        if rng.random() < 0.2:
            yield self.pause()
            _, _, item = person.basket.pop(rng.randrange(len(person.basket)))
            yield self.shop.request(self.client, "DELETE", f"/v2/basket/items/{item}", status=204)

    def voucher(self) -> Iterator[Step]:
        campaign, rng = self.shop.campaign(), self.person.rng
        right = campaign is not None and rng.random() < 0.8
        code = campaign.voucher if campaign and right else rng.choice(("WELCOME5", "NEWS10"))
        status = 200 if right or rng.random() < 0.5 else 422
        yield self.shop.request(
            self.client, "POST", "/v2/basket/voucher", body={"code": code}, status=status
        )

    def orders(self) -> Iterator[Step]:
        count = min(10, len(self.shop.orders.get(self.person.id, ())))
        yield self.shop.request(
            self.client, "GET", "/v2/orders", route="orders", query={"limit": 10}, rows=count
        )

    def order(self) -> Iterator[Step]:
        own = self.shop.orders.get(self.person.id)
        if own:
            number = self.person.rng.choice(own[-5:])
            yield self.shop.request(self.client, "GET", f"/v2/orders/{number}", route="order")

    def invoice(self) -> Iterator[Step]:
        own = self.shop.orders.get(self.person.id)
        if own:
            path = f"/v2/orders/{self.person.rng.choice(own[-8:])}/invoice"
            yield self.shop.request(self.client, "GET", path, route="invoice")

    def profile(self) -> Iterator[Step]:
        rng, person, client = self.person.rng, self.person, self.client
        yield self.shop.request(client, "GET", "/v2/users/me")
        yield self.pause(15)
        choice = rng.random()
        if choice < 0.4:
            body: dict[str, Any] = {"first_name": person.name[0], "last_name": person.name[1]}
            if rng.random() < 0.5:
                body["phone"] = f"+49 {rng.randrange(151, 179)} {rng.randrange(10**6, 10**7)}"
            if rng.random() < 0.5:
                body["newsletter"] = rng.random() < 0.5
            yield self.shop.request(client, "PATCH", "/v2/users/me", body=body)
        elif choice < 0.7:
            body = {
                "street": f"{rng.choice(STREETS)} {rng.randrange(1, 120)}",
                "postcode": f"{rng.randrange(10000, 99999)}",
                "country": person.country,
            }
            yield self.shop.request(client, "POST", "/v2/users/me/addresses", body=body, status=201)
        elif choice < 0.9:
            name = f"{rng.getrandbits(40):010x}"
            host = rng.choice(("images.example", "photos.example", "cdn.example"))
            body = {"url": f"https://{host}/u/{name}.jpg"}
            yield self.shop.request(client, "POST", "/v2/users/me/avatar", body=body)

    def recommendations(self) -> Iterator[Step]:
        query = {"for": self.person.id, "limit": 12}
        yield self.shop.request(
            self.client, "GET", "/v2/recommendations", route="products", query=query, rows=12
        )

    def wishlist(self) -> Iterator[Step]:
        product = self.shop.pick_product(self.person.rng, self.category())
        path = f"/v2/wishlist/{product.id}"
        yield self.shop.request(self.client, "PUT", path, status=204)

    def compare(self) -> Iterator[Step]:
        category = self.category()
        chosen = [self.shop.pick_product(self.person.rng, category).id for _ in range(3)]
        yield self.shop.request(self.client, "POST", "/v2/compare", body={"products": chosen})

    def buy(self) -> Iterator[Step]:
        """Check out, pay, confirm, and look at the order: in this order."""
        shop, person, rng, client = self.shop, self.person, self.person.rng, self.client
        amount = sum(shop.price(product) * quantity for product, quantity, _ in person.basket)
        body: dict[str, Any] = {"address": person.address_id, "shipping": person.shipping}
        campaign = shop.campaign()
        if campaign is not None and rng.random() < 0.5:
            body["voucher"] = campaign.voucher
            amount *= 0.9
        order = shop.place_order(person.id, amount)
        yield shop.request(client, "POST", "/v2/checkout", route="checkout", body=body, status=201)
        yield self.pause(20)
        payment = {
            "order": order,
            "method": person.payment,
            "amount": round(amount, 2),
            "currency": CURRENCIES.get(person.country, "EUR"),
        }
        if person.payment != "invoice":
            payment["token"] = f"tok_{rng.getrandbits(48):012x}"
        while rng.random() < 0.04:
            yield shop.request(
                client, "POST", "/v2/payments", route="payments", body=payment, status=402
            )
            yield self.pause(25)
        yield shop.request(client, "POST", "/v2/payments", route="payments", body=payment)
        yield self.pause(4)
        path = f"/v2/orders/{order}"
        yield shop.request(client, "POST", f"{path}/confirm", body={"accept_terms": True})
        person.basket.clear()
        if rng.random() < 0.7:
            yield self.pause(4)
            yield shop.request(client, "GET", path, route="order")


def visit_guests(shop: Shop, seed: int, a_day: float) -> Iterator[Step]:
    """People without an account, who look at products."""
    rng, now = random.Random(f"guests {seed}"), shop.start
    while True:
        now = next_visit(rng, now, a_day, 19.0, 2)
        yield now
        country = rng.choices(list(COUNTRIES), [each[0] for each in COUNTRIES.values()])[0]
        guest = Person("", seed, HABITS["browser"], rng, country)
        client = guest.client(shop)
        client.user = client.address
        visit = Visit(shop, guest, client)
        for _ in range(1 + int(rng.expovariate(1 / 3))):
            yield from rng.choice((visit.listing, visit.product, visit.product, visit.search))()
            yield visit.pause()


def visit_crawler(shop: Shop, seed: int) -> Iterator[Step]:
    """A search engine, which reads some pages of the catalogue each hour, in no order."""
    rng = random.Random(f"crawler {seed}")
    headers = {"User-Agent": "Mozilla/5.0 (compatible; FindBot/2.1)", "Accept": "*/*"}
    client = Client("66.249.66.12", None, "66.249.66.12", "US", headers)
    while True:
        yield shop.now + rng.expovariate(1 / 300)
        product = rng.choice(shop.products)
        yield shop.request(client, "GET", f"/v2/products/{product.id}", route="product")


def monitor(shop: Shop, seed: int) -> Iterator[Step]:
    """The health check of the operator, every five minutes."""
    rng = random.Random(f"monitor {seed}")
    client = Client("10.0.0.5", None, "10.0.0.5", "DE", {"User-Agent": "uptime/1.4"}, 1.0)
    for tick in range(1 << 62):
        yield shop.start + 300.0 * tick + rng.random()
        yield shop.request(client, "GET", "/v2/health")


def visit_partner(shop: Shop, number: int, seed: int) -> Iterator[Step]:
    """A program of a partner: reads the stock, and sends prices at night, with an API key."""
    rng = random.Random(f"partner {seed} {number}")
    agent = rng.choice(
        ("python-requests/2.32.3", "Apache-HttpClient/5.3 (Java/21)", "Go-http-client")
    )
    address = f"52.28.{rng.randrange(256)}.{rng.randrange(1, 255)}"
    headers = {"User-Agent": agent, "Accept": "application/json"}
    headers["X-Api-Key"] = f"key_{rng.getrandbits(48):012x}"
    client = Client(f"partner-{number}", None, address, rng.choice(("DE", "NL")), headers, 8.0)
    interval, limit = rng.choice((600.0, 900.0)), rng.choice((100, 250, 500))
    own = rng.sample(shop.products, 12)
    for tick in range(1 << 62):
        yield shop.start + interval * tick + rng.random() * 5
        query = {"since": int(shop.now - interval), "limit": limit}
        yield shop.request(client, "GET", "/v2/partner/stock", query=query, rows=rng.randrange(40))
        if (shop.now % DAY) // HOUR == 2 + number % 3 and rng.random() < 0.3:
            yield shop.now + 2
            prices = [
                {"sku": each.id, "price": shop.price(each), "stock": rng.randrange(200)}
                for each in rng.sample(own, rng.randrange(2, 9))
            ]
            yield shop.request(client, "PUT", "/v2/partner/prices", body={"prices": prices})
        if rng.random() < 0.02:
            yield shop.now + 1
            body = {"url": f"https://hooks.partner-{number}.example/stock", "events": ["stock"]}
            yield shop.request(client, "POST", "/v2/partner/webhooks", body=body, status=201)


def visit_staff(shop: Shop, number: int, people: Sequence[Person], seed: int) -> Iterator[Step]:
    """Someone who works for the shop: orders, customers and refunds, in office hours."""
    rng = random.Random(f"staff {seed} {number}")
    address = f"10.0.3.{20 + number}"
    headers = {
        "User-Agent": rng.choice(BROWSERS).format(f"{rng.randrange(138, 143)}.0"),
        "Accept": "application/json",
        "Accept-Language": "de-DE,de;q=0.9",
        "Origin": "https://office.shop.example",
    }
    now = shop.start
    while True:
        now = next_visit(rng, max(now, shop.now), 7.0, 13.0, 2)
        yield now
        hour = ((now + 2 * HOUR) % DAY) / HOUR
        if not 7 <= hour < 19 or int((now + 2 * HOUR) // DAY + 3) % 7 >= 5:
            continue
        session = f"{rng.getrandbits(64):016x}"
        client = Client(f"staff-{number}", session, address, "DE", headers, 5.0)
        for _ in range(2 + int(rng.expovariate(1 / 5))):
            recent = shop.next_order - rng.randrange(60)
            person = rng.choice(people)
            action = rng.random()
            if action < 0.4:
                query = {"status": rng.choice(("paid", "open", "returned")), "limit": 50}
                yield shop.request(
                    client, "GET", "/v2/admin/orders", route="orders", query=query, rows=50
                )
            elif action < 0.6:
                body: dict[str, Any] = {"status": rng.choice(("packed", "sent", "returned"))}
                yield shop.request(client, "PATCH", f"/v2/admin/orders/{recent}", body=body)
            elif action < 0.75:
                query = {"email": person.email, "limit": 20}
                yield shop.request(client, "GET", "/v2/admin/users", query=query)
            elif action < 0.88:
                yield shop.request(client, "GET", f"/v2/admin/users/{person.id}")
            elif action < 0.96:
                own = shop.orders.get(person.id)
                if not own:
                    continue
                share = rng.choice((0.1, 0.2, 0.5, 1.0))
                amount = round(shop.totals[own[-1]] * share, 2)
                body = {"order": own[-1], "amount": amount, "reason": rng.choice(REASONS)}
                yield shop.request(client, "POST", "/v2/admin/refunds", body=body, status=201)
            else:
                name = rng.choice(("sales", "stock", "returns"))
                yield shop.request(client, "GET", f"/v2/admin/reports/{name}", route="report")
            yield shop.now + 25 * math.exp(rng.gauss(0, 0.8))


def visit_old_app(shop: Shop, number: int, seed: int) -> Iterator[Step]:
    """A customer with an app so old that it still uses version 1 of the API."""
    rng = random.Random(f"old {seed} {number}")
    headers = {"User-Agent": "ShopApp/3.8.2 (iPhone9,3)", "Accept": "application/json"}
    address, now = random_address(rng, "DE"), shop.start
    client = Client(f"u{9000 + number}", f"{rng.getrandbits(64):016x}", address, "DE", headers)
    while True:
        now = next_visit(rng, max(now, shop.now), 0.7, 18.0, 2)
        yield now
        for _ in range(2 + int(rng.expovariate(1 / 4))):
            product = shop.pick_product(rng, rng.choice(list(CATEGORIES)))
            if rng.random() < 0.3:
                yield shop.request(client, "GET", "/v1/products", query={"page": 1})
            else:
                yield shop.request(client, "GET", f"/v1/products/{product.id}", route="product")
            yield shop.now + 12 * math.exp(rng.gauss(0, 0.8))
