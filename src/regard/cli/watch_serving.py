"""The commands `regard watch serve` and `demo`."""

from __future__ import annotations

import os
import threading
from contextlib import closing, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from regard.cli.output import console, echo, print_json, progress_bar, user_errors
from regard.cli.renamed import Command

if TYPE_CHECKING:
    from regard.watch.demo.run import DemoResult, ShopDemo
    from regard.watch.serve import Server

TOKEN_VARIABLE = "REGARD_WATCH_TOKEN"
PORT = 8787
PACKAGES = ("fastapi", "uvicorn", "prometheus_client", "orjson", "sklearn", "river")


def add_commands(watch: typer.Typer) -> None:
    """Add the commands of this file to `regard watch`."""
    for command in (serve, demo):
        watch.command(command.__name__, cls=Command)(command)


def serve(
    state: Annotated[
        Path, typer.Option(help="State folder of `regard watch follow`, whose alerts are shown.")
    ] = Path("state"),
    model: Annotated[
        Path | None,
        typer.Option(help="Model of `regard watch learn`, for POST /v1/score and the graph."),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0: a free one.")] = PORT,
    allowed_host: Annotated[
        list[str],
        typer.Option(help="Name by which clients call the server, beside localhost; repeatable."),
    ] = [],  # noqa: B006
    token_file: Annotated[
        Path | None,
        typer.Option(
            help=f"File with the token that clients must know; else ${TOKEN_VARIABLE}.",
            show_default="a new one at each start",
        ),
    ] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="Certificate, to serve by HTTPS.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Key of the certificate.")] = None,
    secret_file: Annotated[
        Path | None, typer.Option(help="File with the key of a model with hashed values.")
    ] = None,
    show_values: Annotated[
        bool, typer.Option("--show-values", help="Show sensitive values instead of masking them.")
    ] = False,
) -> None:
    """Show alerts on a page, take judgements, and score events by HTTP.

    Everything but /health needs the token. The page loads nothing from other servers.

    Example: regard watch serve --state state --model shop.watch
    """
    with user_errors():
        check_packages()
        from regard.cli.watch_running import read_secret
        from regard.watch.detector import Detector
        from regard.watch.follow.state_folder import prepare_folder
        from regard.watch.follow.store import WatchStore
        from regard.watch.page.access import create_token
        from regard.watch.serve import Server, Watch, create_app

        if (tls_cert is None) != (tls_key is None):
            raise ValueError("Give both --tls-cert and --tls-key, or neither.")
        token = read_secret(token_file) or os.environ.get(TOKEN_VARIABLE) or create_token()
        detector = None
        if model is not None:
            secret = read_secret(secret_file)
            detector = Detector.load(model, secret=b"" if secret is None else secret.encode())
            prepare_folder(state)
        store = WatchStore(state, create=model is not None)
        with closing(store):
            watch = Watch(store, detector, show_values=show_values)
            names = (*allowed_host, host)
            app = create_app(watch, token, hosts=names, secure=tls_cert is not None)
            server = Server(app, host=host, port=port, certificate=tls_cert, key=tls_key)
            local = host in ("127.0.0.1", "::1", "localhost")
            if not local and tls_cert is None:
                echo(
                    f"warning: {host} is not localhost, and without --tls-cert alerts and the "
                    "token are sent unencrypted.",
                    err=True,
                )
            echo(f"page: {server.url}/sign-in#{token}")
            server.run()


def check_packages() -> None:
    """Raise ImportError if a package that the server or the demo needs is not installed."""
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        raise ImportError(
            f"This command needs the package {missing[0]}: pip install 'regard[watch]'"
        )


def demo(
    out: Annotated[Path, typer.Option(help="Folder for traffic, model and alerts.")] = Path(
        "watch-demo"
    ),
    users: Annotated[int, typer.Option(min=1, help="Customers of the shop.")] = 200,
    learn_days: Annotated[
        float, typer.Option(min=0.1, help="Days of normal traffic to learn from.")
    ] = 14.0,
    days: Annotated[
        float, typer.Option(min=0.1, help="Days of traffic with attacks to follow.")
    ] = 3.0,
    seconds: Annotated[
        float, typer.Option(min=0.1, help="Seconds in which those days pass.")
    ] = 60.0,
    alerts_per_day: Annotated[
        float, typer.Option(min=0.001, help="Alerts a day that someone can judge.")
    ] = 20.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the traffic.")] = 0,
    page: Annotated[
        bool, typer.Option("--page/--no-page", help="Serve the page while and after following.")
    ] = True,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the page.")] = 0,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Learn the traffic of a small shop, follow it with attacks, and say which were found.

    The shop has customers with habits, staff, partners, new releases of its app, campaigns, and
    attacks of the kinds of the OWASP API Security Top 10. Days pass within a minute.

    Example: regard watch demo --seconds 30
    """
    with user_errors():
        check_packages()
        from regard.watch.demo.run import DemoPlan, ShopDemo

        plan = DemoPlan(out, users, learn_days, days, seconds, alerts_per_day, seed)
        shop = ShopDemo(plan)
        learn_shop(shop)
        server = start_page(shop, port) if page else None
        stopped = False
        try:
            follow_shop(shop)
        except KeyboardInterrupt:
            stopped = True
        result = shop.result()
        if json:
            print_json(result.to_json())
        else:
            show_result(result)
        if server is not None:
            if not stopped:
                echo(f"The page stays open until Ctrl-C: {server[1]}", err=True)
                with suppress(KeyboardInterrupt):
                    threading.Event().wait()
            server[0].stop()


def learn_shop(shop: ShopDemo) -> None:
    """Learn, with a bar; print what was learned."""
    plan = shop.plan
    echo(
        f"Learning {plan.learn_days:g} days of normal traffic of a shop with {plan.users:,} "
        "customers.",
        err=True,
    )
    with progress_bar(visible=True) as bar:
        task = bar.add_task("make traffic", total=None)

        def on_progress(stage: str, done: int, total: int) -> None:
            bar.update(task, description=stage, completed=done, total=total or None)

        learned = shop.learn(on_progress)
    report = learned.report
    echo(
        f"Learned {report.events:,} events of {report.entities:,} entities at {report.endpoints} "
        f"endpoints, with {report.leaves:.0f} values each. Model: {shop.model}",
        err=True,
    )


def start_page(shop: ShopDemo, port: int) -> tuple[Server, str]:
    """Serve the page in the background; returns the server and the address to open."""
    from regard.watch.detector import Detector
    from regard.watch.follow.store import WatchStore
    from regard.watch.page.access import create_token
    from regard.watch.serve import Server, Watch, create_app

    token = create_token()
    watch = Watch(WatchStore(shop.state), Detector.load(shop.model))
    server = Server(create_app(watch, token), port=port)
    server.start()
    address = f"{server.url}/sign-in#{token}"
    echo(f"Open the page to see the alerts come in: {address}", err=True)
    return server, address


def follow_shop(shop: ShopDemo) -> None:
    """Follow the other days, with a bar."""
    plan = shop.plan
    echo(
        f"Following {plan.days:g} days with attacks in {plan.seconds:g} seconds, with at most "
        f"about {plan.alerts_per_day:g} alerts a day.",
        err=True,
    )
    with progress_bar(visible=True) as bar:
        task = bar.add_task("follow", total=plan.days)

        def on_tick(day: float, events: int, alerts: int) -> None:
            text = f"day {day:.1f}: {events:,} events, {alerts} alerts"
            bar.update(task, description=text, completed=day)

        shop.follow(on_tick)


def show_result(result: DemoResult) -> None:
    """Print what was found and what was missed."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", show_edge=False)
    for name in ("attack", "found", "first seen as"):
        table.add_column(name, overflow="fold")
    for kind in result.kinds:
        if kind.incidents:
            table.add_row(kind.owasp, f"{kind.found} of {kind.incidents}", kind.seen_as or "missed")
    console().print(table)
    found = sum(kind.found for kind in result.kinds)
    incidents = sum(kind.incidents for kind in result.kinds)
    days = max(result.days, 1e-9)
    echo(
        f"{found} of {incidents} incidents were found. {result.alerts} alerts in {days:.1f} days "
        f"({result.alerts / days:.0f} a day; about {result.alerts_per_day:g} were asked for), "
        f"{result.false_alerts} of them about normal events; {result.shapes} new shapes of "
        f"requests, {result.false_shapes} of them normal."
    )
