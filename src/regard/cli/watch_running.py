"""The commands `regard watch follow`, `mute`, `label`, `accept`, `drift` and `bench`."""

from __future__ import annotations

import datetime
import re
import signal
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from regard.cli.output import console, echo, print_json, user_errors
from regard.cli.parsing import parse_duration
from regard.cli.renamed import Command
from regard.errors import check_choice, check_positive

if TYPE_CHECKING:
    from types import FrameType

    from regard.watch.follow.store import WatchStore

StateOption = Annotated[Path, typer.Option(help="State folder of `regard watch follow`.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
METRICS_PORT = "9464"  # registered for Prometheus exporters
NEVER = "never"


def add_commands(watch: typer.Typer) -> None:
    """Add the commands of this file to `regard watch`."""
    for command in (follow, mute, label, accept, drift, bench):
        watch.command(command.__name__, cls=Command)(command)


def follow(
    source: Annotated[
        str,
        typer.Argument(
            help="redis://host/stream?group=NAME, nats://host/subject, kafka://host/topic, a file "
            "or folder that grows, or - for standard input."
        ),
    ],
    model: Annotated[Path, typer.Option(help="Model of `regard watch learn`.")],
    state: StateOption = Path("state"),
    output: Annotated[
        list[str],
        typer.Option(
            help="Where alerts go, several times if you like: jsonl:FILE, ecs:FILE, ocsf:FILE "
            "(- is standard output), webhook:URL. They are in the state folder in any case."
        ),
    ] = [],  # noqa: B006
    webhook_secret_file: Annotated[
        Path | None, typer.Option(help="File with the key that signs webhooks.")
    ] = None,
    secret_file: Annotated[
        Path | None, typer.Option(help="File with the key of a model with hashed values.")
    ] = None,
    show_values: Annotated[
        bool, typer.Option("--show-values", help="Send sensitive values to the outputs too.")
    ] = False,
    replay: Annotated[
        str | None,
        typer.Option(
            help="First score again what came in the last 2h, 30m ...; the states of entities "
            "begin anew."
        ),
    ] = None,
    share: Annotated[
        str,
        typer.Option(
            help="This process's share of the entities, such as 1/2 and 2/2 for two processes. "
            "Each needs its own --state, and its own group at the broker."
        ),
    ] = "1/1",
    until_end: Annotated[
        bool, typer.Option("--until-end", help="Stop at the end of a file instead of waiting.")
    ] = False,
    batch_size: Annotated[int, typer.Option(min=1, help="Most records scored together.")] = 512,
    entities: Annotated[
        int, typer.Option(min=1, help="Entities in memory; the others are in the state folder.")
    ] = 20_000,
    commit_every: Annotated[
        str, typer.Option(help="Longest time until records are committed and acknowledged.")
    ] = "1s",
    save_every: Annotated[
        str, typer.Option(help="Time between two saves of what the model learns.")
    ] = "5m",
    adopt_after: Annotated[
        int,
        typer.Option(
            min=0, help="Accept a new shape of requests when so many entities use it; 0: never."
        ),
    ] = 0,
    learn: Annotated[
        bool, typer.Option("--learn/--no-learn", help="Let the model learn from normal events.")
    ] = True,
    new_model: Annotated[
        bool,
        typer.Option(
            "--new-model",
            help="Use a state folder with another model: alerts, mutes and labels stay, and the "
            "states of entities begin anew.",
        ),
    ] = False,
    metrics_port: Annotated[
        str, typer.Option(help="Port of /metrics, /health and /ready, or none.")
    ] = METRICS_PORT,
    metrics_host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
) -> None:
    """Score events as they arrive, and keep alerts until they are delivered.

    It runs until SIGTERM or Ctrl-C, and goes on where it was. Every record is acknowledged after
    its alerts are on the disk, so none is lost if the process is killed.

    Example: regard watch follow redis://localhost/requests --model shop.watch
    """
    with user_errors(), source_errors():
        from regard.folder_lock import lock_folder
        from regard.watch.follow.follower import Follower, FollowSettings
        from regard.watch.follow.metrics import serve_metrics
        from regard.watch.follow.state_folder import (
            POSITIONS_FOLDER,
            begin_replay,
            load_detector,
            name_consumer,
            prepare_folder,
        )
        from regard.watch.outputs import create_output
        from regard.watch.sources import open_source

        settings = FollowSettings(
            batch_size=batch_size,
            queue_size=4 * batch_size,
            commit_seconds=parse_duration(commit_every),
            model_seconds=parse_duration(save_every),
            entities_in_memory=entities,
            adopt_entities=adopt_after,
            share=parse_share(share),
            show_values=show_values,
            learn=learn,
        )
        port = parse_port(metrics_port)
        outputs = [
            create_output(each, webhook_secret=read_secret(webhook_secret_file)) for each in output
        ]
        seconds = None if replay is None else parse_duration(replay)
        prepare_folder(state)
        with lock_folder(state):
            secret = read_secret(secret_file)
            detector = load_detector(
                model,
                state,
                secret=b"" if secret is None else secret.encode(),
                new_model=new_model,
                report=report_line,
            )
            if seconds is not None:
                begin_replay(state)
            follower = Follower(
                detector,
                lambda: open_source(
                    name_consumer(source, state),
                    settings=detector.settings,
                    follow=not until_end,
                    state=state / POSITIONS_FOLDER,
                    replay=seconds,
                ),
                state,
                settings,
                outputs=outputs,
                report=report_line,
            )
            if port is not None:
                server = serve_metrics(metrics_host, port, follower.metrics, follower.health)
                host, bound = str(server.server_address[0]), server.server_address[1]
                report_line(f"metrics at http://{host}:{bound}/metrics")

            def stop(number: int, frame: FrameType | None) -> None:
                follower.stopping.set()
                for each in (signal.SIGTERM, signal.SIGINT):
                    signal.signal(each, signal.SIG_DFL)  # the second one ends the process at once

            for each in (signal.SIGTERM, signal.SIGINT):
                signal.signal(each, stop)
            follower.run()
            report_line(
                f"stopped: {follower.events:,} events, {follower.alerts:,} alerts, "
                f"{follower.dead_letters.total:,} dead letters"
            )


@contextmanager
def source_errors() -> Iterator[None]:
    """Report a source that cannot be opened as one line."""
    from regard.watch.sources import SourceError

    try:
        yield
    except SourceError as error:
        raise ValueError(str(error)) from None


def report_line(line: str) -> None:
    """Print a line about what the process does, with the time."""
    now = datetime.datetime.now(datetime.UTC)
    echo(f"{now:%Y-%m-%dT%H:%M:%SZ} {line}", err=True)


def mute(
    alert: Annotated[
        str | None, typer.Argument(help="Mute what was found first in this alert.")
    ] = None,
    state: StateOption = Path("state"),
    endpoint: Annotated[
        str, typer.Option(help="Endpoint, or a pattern such as 'GET /orders/*'.")
    ] = "",
    path: Annotated[
        str, typer.Option(help="Path of a leaf, or a pattern such as 'request.headers.*'.")
    ] = "",
    value_class: Annotated[
        str,
        typer.Option(
            help="Class of values as they are written: a/0.0 for ShopApp/5.2. With an alert: "
            "'same' for the class of its value."
        ),
    ] = "",
    tenant: Annotated[str, typer.Option(help="Tenant; all if not given.")] = "",
    duration: Annotated[
        str, typer.Option("--for", help="How long: 12h, 30d, or never for no end.")
    ] = "30d",
    reason: Annotated[str, typer.Option(help="Why, for those who read it later.")] = "",
    delete: Annotated[
        int | None, typer.Option(help="Delete the mute with this number instead.")
    ] = None,
    list_mutes: Annotated[bool, typer.Option("--list", help="List the mutes instead.")] = False,
    json: JsonOption = False,
) -> None:
    """Do not report findings of a kind any more, for some time.

    An alert is muted if all of its findings are. Muted alerts are kept, and teach the model.

    Example: regard watch mute 3f9a0c --value-class same --for 30d --reason 'new app version'
    """
    with user_errors(), open_store(state) as store:
        from regard.watch.follow.store import Mute
        from regard.watch.users.mutes import value_class as class_of

        if list_mutes:
            show_mutes(store, json)
            return
        if delete is not None:
            store.delete_mute(delete)
            echo(f"Deleted mute {delete}.")
            return
        if alert is not None:
            content = store.alert(alert).content
            if not content["findings"]:
                raise ValueError(f"Alert {content['id']} has no findings: give --endpoint.")
            first = content["findings"][0]
            endpoint, path = endpoint or content["endpoint"], path or first["path"]
            tenant = tenant or content["tenant"]
            if value_class == "same":
                value_class = class_of(first["observed"])
        now = time.time()
        seconds = parse_days(duration)
        expires = None if seconds is None else now + seconds
        number = store.add_mute(
            Mute(tenant, endpoint, path, value_class, reason, created=now, expires=expires)
        )
        if json:
            print_json({"id": number})
        else:
            echo(f"Mute {number}: {describe_mute(store.mutes()[-1])}.")


def label(
    alert: Annotated[str, typer.Argument(help="Id of an alert, or how it begins.")],
    label: Annotated[str, typer.Argument(help="attack, normal, or none to remove the label.")],
    state: StateOption = Path("state"),
    note: Annotated[str, typer.Option(help="What you found.")] = "",
) -> None:
    """Say what an alert was; labels re-rank all alerts once there are three of each kind.

    Example: regard watch label 3f9a0c normal --note 'load test'
    """
    with user_errors(), open_store(state) as store:
        from regard.watch.follow.feedback import rank_alerts
        from regard.watch.follow.store import LABELS

        check_choice("label", label, [*LABELS, "none"])
        id = store.set_label(alert, "" if label == "none" else label, note)
        ranking = rank_alerts(store)
        echo(f"Alert {id}: {label}. {ranking.describe()}")


def accept(
    id: Annotated[str, typer.Argument(help="Id of an alert or of a new shape, or how it begins.")],
    state: StateOption = Path("state"),
) -> None:
    """Accept an alert or a new shape of requests as normal: `follow` learns it.

    Example: regard watch accept 77c1d2
    """
    with user_errors(), open_store(state) as store:
        if any(shape.id.startswith(id) for shape in store.shapes()):
            echo(f"Accepted shape {store.accept_shape(id)}.")
        else:
            echo(f"Accepted alert {store.accept_alert(id)}.")


def drift(state: StateOption = Path("state"), json: JsonOption = False) -> None:
    """List what has changed: endpoints that drifted, new shapes of requests, users that moved.

    Example: regard watch drift --state state
    """
    with user_errors(), open_store(state) as store:
        from regard.watch.users.shapes import describe_shape

        shapes = store.shapes("new")
        drifts = store.drifts(limit=100)
        moved = [place for place in store.clusters() if place.cluster != place.home]
        if json:
            print_json(
                {
                    "drifts": [each._asdict() for each in drifts],
                    "shapes": [vars(shape) for shape in shapes],
                    "moved": [place._asdict() for place in moved],
                }
            )
            return
        to = console()
        table = new_table("time", "endpoint", "bits before", "bits after", "events")
        for each in drifts:
            table.add_row(
                show_time(each.time),
                each.endpoint,
                f"{each.before:.2f}",
                f"{each.after:.2f}",
                f"{each.events:,}",
            )
        echo(f"{len(drifts)} drifts of the surprise of an endpoint (ADWIN)")
        to.print(table)
        table = new_table("id", "shape", "events", "entities", "first seen", "last seen")
        for shape in shapes:
            table.add_row(
                shape.id,
                describe_shape(shape),
                f"{shape.events:,}",
                f"{shape.entities:,}",
                show_time(shape.first_seen),
                show_time(shape.last_seen),
            )
        echo(f"{len(shapes)} new shapes of requests: accept one with regard watch accept ID")
        to.print(table)
        echo(f"{len(moved)} entities are in another cluster than usual")
        table = new_table("entity", "usual cluster", "cluster now", "last event")
        for place in moved[:50]:
            table.add_row(place.entity, str(place.home), str(place.cluster), show_time(place.time))
        to.print(table)


def bench(
    model: Annotated[Path, typer.Option(help="Model of `regard watch learn`.")],
    data: Annotated[str, typer.Argument(help="Events to score: a file, or a folder.")],
    events: Annotated[int, typer.Option(min=100, help="Events to measure with.")] = 20_000,
    batch_size: Annotated[int, typer.Option(min=1, help="Events scored together.")] = 512,
    secret_file: Annotated[
        Path | None, typer.Option(help="File with the key of a model with hashed values.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Measure how many events a second one core can parse, score, learn and store.

    Example: regard watch bench traffic.jsonl --model shop.watch
    """
    with user_errors():
        from regard.watch.detector import Detector
        from regard.watch.follow.bench import measure_stages

        secret = read_secret(secret_file)
        detector = Detector.load(model, secret=b"" if secret is None else secret.encode())
        result = measure_stages(detector, data, events=events, batch_size=batch_size)
    if json:
        print_json(result.to_json())
        return
    table = new_table("stage", "µs of CPU per event", "events/s per core")
    for stage, seconds in result.seconds.items():
        table.add_row(stage, f"{seconds * 1e6:,.1f}", f"{1 / seconds:,.0f}")
    table.add_row("all", f"{result.total * 1e6:,.1f}", f"{1 / result.total:,.0f}")
    console().print(table)
    memory = "" if result.peak_mb is None else f" Peak memory {result.peak_mb:,.0f} MB."
    echo(
        f"{result.events:,} events with {result.leaves:.1f} leaves on average, in batches of "
        f"{batch_size}; {result.alerts:,} alerts. A batch takes {result.p50_ms:.1f} ms (median), "
        f"{result.p99_ms:.1f} ms (99th percentile).{memory}"
    )


def open_store(folder: Path) -> closing[WatchStore]:
    """The store of a state folder, closed at the end of the block."""
    from regard.watch.follow.store import WatchStore

    return closing(WatchStore(folder))


def show_mutes(store: WatchStore, json: bool) -> None:
    """Print all mutes."""
    mutes = store.mutes()
    if json:
        print_json([each._asdict() for each in mutes])
        return
    table = new_table("number", "mute", "alerts", "reason")
    for each in mutes:
        table.add_row(str(each.id), describe_mute(each), f"{each.alerts:,}", each.reason)
    console().print(table)


def describe_mute(mute: Any) -> str:
    """A mute in words."""
    parts = [
        f"{name} {value}"
        for name, value in (
            ("tenant", mute.tenant),
            ("endpoint", mute.endpoint),
            ("path", mute.path),
            ("values", mute.value_class),
        )
        if value
    ]
    until = "for good" if mute.expires is None else f"until {show_time(mute.expires)}"
    return f"{', '.join(parts)}, {until}"


def new_table(*columns: str) -> Table:
    """A plain table."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", show_edge=False)
    for name in columns:
        table.add_column(name, overflow="fold")
    return table


def show_time(seconds: float) -> str:
    """A time in UTC, to the minute."""
    try:
        return f"{datetime.datetime.fromtimestamp(seconds, datetime.UTC):%Y-%m-%d %H:%M}"
    except (OverflowError, ValueError, OSError):
        return str(seconds)  # an event with a clock beyond the calendar


def parse_days(text: str) -> float | None:
    """Seconds of a duration such as 30d or 12h; None for "never"."""
    if text == NEVER:
        return None
    if found := re.fullmatch(r"(\d+(?:\.\d+)?)d", text.strip()):
        seconds = float(found[1]) * 86_400
        check_positive("--for", seconds)
        return seconds
    try:
        return parse_duration(text)
    except ValueError:
        raise ValueError(
            f"--for takes a duration such as 12h or 30d, or never, not {text!r}."
        ) from None


def parse_share(text: str) -> tuple[int, int]:
    """(number from 0, processes) of "1/2"."""
    found = re.fullmatch(r"(\d+)/(\d+)", text.strip())
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        raise ValueError(
            f"--share is the number of this process and of all: 1/2 or 2/2, not {text!r}."
        )
    return int(found[1]) - 1, int(found[2])


def parse_port(text: str) -> int | None:
    """A port, 0 for a free one; None for "none"."""
    if text == "none":
        return None
    if not text.isdigit() or int(text) > 65_535:
        raise ValueError(f"--metrics-port is a number up to 65535, or none, not {text!r}.")
    return int(text)


def read_secret(path: Path | None) -> str | None:
    """The key in a file; None if there is no file."""
    if path is None:
        return None
    try:
        secret = path.read_text(encoding="utf-8").strip()
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8: a secret is a line of text.") from None
    if not secret:
        raise ValueError(f"{path} is empty: write a secret into it (openssl rand -hex 32).")
    return secret
