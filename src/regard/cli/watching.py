"""The commands `regard watch learn`, `score` and `explain`."""

from __future__ import annotations

import json as json_module
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from regard.cli import watch_serving
from regard.cli.output import console, echo, print_json, user_errors
from regard.cli.renamed import Command
from regard.cli.watch_running import add_commands, read_secret, show_time
from regard.console import escape_controls

if TYPE_CHECKING:
    from regard.watch.detector import Detector, ScoredEvent
    from regard.watch.event import Event
    from regard.watch.events import DeadLetters
    from regard.watch.events.formats.format import Format
    from regard.watch.learning import LearnReport

watch = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="Learn what is normal in API traffic and logs, and say which key and value is not.\n\n"
    "Example: regard watch learn traffic.jsonl --entity user --endpoint 'method path' -o my.watch",
)

MODEL, ALERTS, STATE = Path("model.watch"), Path("alerts.jsonl"), Path("state")
BATCH = 1_024
MANY_LEAVES = 60  # of an explained event that are shown
BAR = 20  # columns of the longest bar
FAILED = 1  # exit code of --fail-on-alert

ModelOption = Annotated[Path, typer.Option(help="Model of `regard watch learn`.")]
FormatOption = Annotated[
    str | None,
    typer.Option(
        help="Format of the events: auto, jsonl, cloudtrail, har, otlp, ocsf, zeek, ecs, envoy, "
        "access."
    ),
]
SecretOption = Annotated[
    Path | None,
    typer.Option(help="File with a key: strings are hashed with it before they are counted."),
]
DeadLettersOption = Annotated[
    Path | None, typer.Option(help="File for lines that are no events, with the reason.")
]
ShowValuesOption = Annotated[
    bool, typer.Option("--show-values", help="Print passwords, tokens and the like as they are.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
AlertsPerDayOption = Annotated[
    float | None,
    typer.Option(min=0.001, help="Alerts per day that someone can read.", show_default="20"),
]
VolumeOption = Annotated[
    float | None,
    typer.Option(min=1, help="Events per day.", show_default="measured by the events' clocks"),
]


@watch.command(cls=Command)
def learn(
    sources: Annotated[
        list[str],
        typer.Argument(help="Files or folders of normal traffic, plain or compressed; -: stdin."),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder of the model.")] = MODEL,
    entity: Annotated[
        str, typer.Option(help="Who acts: path of a field, such as request.user.")
    ] = "",
    endpoint: Annotated[
        str, typer.Option(help="What is called: paths of fields, such as 'method path'.")
    ] = "",
    time: Annotated[str, typer.Option(help="Path of the events' own clock.")] = "",
    tenant: Annotated[
        str, typer.Option(help="Path of the tenant: each has vocabularies of its own.")
    ] = "",
    format: FormatOption = None,
    ignore: Annotated[
        list[str], typer.Option(help="Path to leave out with all beneath it; can be repeated.")
    ] = [],  # noqa: B006
    levels: Annotated[
        str | None,
        typer.Option(
            help="Levels, comma-separated: leaf, sequence, path, series, user.", show_default="all"
        ),
    ] = None,
    mixer: Annotated[
        str | None,
        typer.Option(help="Also train networks with this recipe; they stay if they help."),
    ] = None,
    order: Annotated[int, typer.Option(min=1, max=8, help="Longest context of sequences.")] = 3,
    alerts_per_day: AlertsPerDayOption = None,
    volume_per_day: VolumeOption = None,
    max_events: Annotated[
        int, typer.Option(min=1, help="Most events to learn from: the newest.")
    ] = 300_000,
    secret_file: SecretOption = None,
    dead_letters: DeadLettersOption = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of samples and networks.")] = 0,
    json: JsonOption = False,
) -> None:
    """Learn what is normal, and check on the newest events what that is worth.

    Example: regard watch learn traffic.jsonl --entity user --endpoint 'method path' -o my.watch
    """
    with user_errors():
        from regard.output_folders import check_output_folder
        from regard.watch.events import DeadLetters
        from regard.watch.learning import learn_detector
        from regard.watch.model_files import MANIFEST
        from regard.watch.settings import LEVELS, WatchSettings

        check_output_folder(out, "model of regard watch", MANIFEST)
        secret = read_secret(secret_file)
        chosen = LEVELS if levels is None else tuple(levels.replace(",", " ").split())
        settings = WatchSettings(
            entity=entity,
            endpoint=endpoint,
            time=time,
            tenant=tenant,
            format=format or "auto",
            ignore=tuple(ignore),
            levels=chosen,
            mixer=mixer,
            order=order,
            alerts_per_day=20.0 if alerts_per_day is None else alerts_per_day,
            volume_per_day=volume_per_day,
            max_events=max_events,
            hash_values=secret is not None,
            seed=seed,
        )
        letters = DeadLetters(dead_letters)
        formats: set[str] = set()
        with Stages() as stages:
            learned = learn_detector(
                read_sources(sources, settings, letters, formats, quiet=json),
                settings,
                stages.update,
                b"" if secret is None else secret.encode(),
            )
        if len(formats) == 1:  # the first records of a stream must not decide it again
            known = learned.detector.settings
            learned.detector.settings = known.model_copy(update={"format": formats.pop()})
        learned.detector.save(out)
        report_dead_letters(letters, dead_letters)
    if json:
        print_json({"model": str(out), **learned.report.to_json()})
    else:
        print_report(learned.report)
        echo(f"\nThe model is in {out}. Next: regard watch score NEW_EVENTS --model {out}")


@watch.command(cls=Command)
def score(
    sources: Annotated[
        list[str], typer.Argument(help="Files or folders of events; -: standard input.")
    ],
    model: ModelOption = MODEL,
    alerts_per_day: AlertsPerDayOption = None,
    volume_per_day: VolumeOption = None,
    top: Annotated[
        int, typer.Option(min=0, help="Also show the most unusual events, alerts or not.")
    ] = 0,
    adapt: Annotated[
        bool,
        typer.Option(
            "--adapt", help="Learn from normal events on the way; the model file is not changed."
        ),
    ] = False,
    output: Annotated[
        list[str],
        typer.Option(
            help="Where alerts go: jsonl:FILE, ecs:FILE, ocsf:FILE, webhook:URL; can be repeated.",
            show_default=str(ALERTS),
        ),
    ] = [],  # noqa: B006
    format: FormatOption = None,
    secret_file: SecretOption = None,
    dead_letters: DeadLettersOption = None,
    fail_on_alert: Annotated[
        bool, typer.Option("--fail-on-alert", help="Exit with code 1 if there are alerts.")
    ] = False,
    show_values: ShowValuesOption = False,
    json: JsonOption = False,
) -> None:
    """Score events, and explain the alerts among them.

    Example: regard watch score new.jsonl --model my.watch --alerts-per-day 20
    """
    with user_errors(), ExitStack() as stack:
        from regard.watch.events import DeadLetters
        from regard.watch.outputs import create_output, mask_alert

        detector = load_detector(model, secret_file)
        detector.change_budget(alerts_per_day, volume_per_day)
        settings = detector.settings
        if format is not None:
            settings = settings.model_copy(update={"format": format})
        letters = DeadLetters(dead_letters)
        if not output:
            ALERTS.unlink(missing_ok=True)  # the alerts of an earlier run
        outputs = [
            stack.enter_context(closing(create_output(spec)))
            for spec in output or [f"jsonl:{ALERTS}"]
        ]
        statuses: Counter[str] = Counter()
        alerts: list[dict[str, Any]] = []
        unusual: list[dict[str, Any]] = []
        events = read_sources(sources, settings, letters, quiet=json)
        stages = stack.enter_context(Stages())
        for scored in score_batches(detector, events, adapt):
            statuses.update(each.status for each in scored)
            found = [each for each in scored if each.status in ("alert", "shadow")]
            new = [detector.alert(each).to_json() for each in found]
            shown = [each if show_values else mask_alert(each) for each in new]
            alerts += shown
            for each in outputs:
                each.send(shown)
            if top:
                unusual += [
                    alert if show_values else mask_alert(alert)
                    for alert in (
                        detector.alert(each).to_json()
                        for each in sorted(scored, key=lambda each: each.p)[:top]
                    )
                ]
                unusual = sorted(unusual, key=lambda each: each["p"])[:top]
            stages.update("score", statuses.total(), 0)
        stages.stop()
        report_dead_letters(letters, dead_letters)
        if not statuses:
            raise ValueError(f"There are no events in {', '.join(sources)}.")
    if json:
        result = {"events": statuses.total(), "statuses": dict(statuses), "alerts": alerts}
        print_json({**result, "most_unusual": unusual} if top else result)
    else:
        print_alerts(alerts, unusual, statuses, detector)
        if alerts and not output:
            echo(f"The alerts are in {ALERTS}. Next: regard watch explain {alerts[0]['id']}")
    if fail_on_alert and statuses["alert"]:
        raise typer.Exit(FAILED)


@watch.command(cls=Command)
def explain(
    alert: Annotated[
        str,
        typer.Argument(help="Id of an alert, or the beginning of it; or FILE:LINE of an event."),
    ],
    alerts: Annotated[Path, typer.Option(help="Alerts of `regard watch score`.")] = ALERTS,
    state: Annotated[Path, typer.Option(help="State folder of `regard watch follow`.")] = STATE,
    model: Annotated[
        Path, typer.Option(help="Model that explains an event given as FILE:LINE.")
    ] = MODEL,
    secret_file: SecretOption = None,
    show_values: ShowValuesOption = False,
    json: JsonOption = False,
) -> None:
    """Explain an alert: what is unusual, what was expected, and what would be normal.

    Example: regard watch explain 3f0a

    An event that was no alert is explained by its place in a file, with --model:

    Example: regard watch explain traffic.jsonl:17 --model my.watch
    """
    with user_errors():
        from regard.watch.outputs import mask_alert

        file, colon, line = alert.rpartition(":")
        if colon and line.isdigit():
            detector = load_detector(model, secret_file)
            found = explain_line(detector, file, alert)
        else:
            found = find_alert(alert, alerts, state)
        content = found if show_values else mask_alert(found)
    if json:
        print_json(content)
    else:
        print_alert(content)


add_commands(watch)
watch_serving.add_commands(watch)


def load_detector(model: Path, secret_file: Path | None) -> Detector:
    """The model in a folder."""
    from regard.watch.detector import Detector

    secret = read_secret(secret_file)
    return Detector.load(model, secret=b"" if secret is None else secret.encode())


def read_sources(
    sources: list[str],
    settings: Any,
    letters: DeadLetters,
    formats: set[str] | None = None,
    *,
    quiet: bool,
) -> Iterator[Event]:
    """The events of files, one file after the other; the formats that are found are added to
    `formats`."""
    from regard.watch.events import read_events

    def note_format(source: str, found: Format) -> None:
        if formats is not None:
            formats.add(found.name)
        if not quiet:
            echo(f"{source}: the format is {found.name} ({found.title}).", err=True)

    for source in sources:
        if source != "-" and "://" not in source and not Path(source).exists():
            raise ValueError(f"There is no file {source}.")
        yield from read_events(
            source,
            settings,
            dead_letters=letters,
            on_format=partial(note_format, source),
        )


def score_batches(
    detector: Detector, events: Iterator[Event], adapt: bool
) -> Iterator[list[ScoredEvent]]:
    """Scored events in batches; the budget counts in any case."""
    states: dict[tuple[str, str], dict[str, Any]] | None = None
    batch: list[Event] = []

    def score_batch() -> list[ScoredEvent]:
        nonlocal states
        if states is None:
            states = detector.initial_states(batch[0].time)
        scored = detector.score(batch, states)
        if adapt:
            detector.update(scored)
        else:
            detector.count_alerts(scored)
        return scored

    for event in events:
        batch.append(event)
        if len(batch) == BATCH:
            yield score_batch()
            batch = []
    if batch:
        yield score_batch()


def find_alert(id: str, alerts: Path, state: Path) -> dict[str, Any]:
    """The alert with an id, or with the beginning of one, from a file or a state folder."""
    found: dict[str, dict[str, Any]] = {}
    looked = []
    if alerts.is_file():
        looked.append(str(alerts))
        with alerts.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                try:
                    content = json_module.loads(line)
                    if str(content["id"]).startswith(id):
                        found[content["id"]] = content
                except (ValueError, KeyError, TypeError):
                    raise ValueError(
                        f"{alerts}:{number} is no alert of `regard watch score` (jsonl)."
                    ) from None
    if state.is_dir():
        from regard.watch.follow.store import WatchStore

        looked.append(str(state))
        with closing(WatchStore(state)) as store:
            try:
                content = store.alert(store.resolve_alert(id)).content
                found[content["id"]] = content
            except ValueError:
                if not found:
                    raise
    if not looked:
        raise ValueError(f"There is no {alerts} and no folder {state}: give --alerts or --state.")
    if not found:
        raise ValueError(f"There is no alert {id} in {' or '.join(looked)}.")
    if len(found) > 1:
        raise ValueError(f"{len(found)} alerts begin with {id}: {', '.join(sorted(found)[:5])} ...")
    return next(iter(found.values()))


def explain_line(detector: Detector, file: str, source: str) -> dict[str, Any]:
    """The alert of the event of a line, given the lines before it."""
    from regard.watch.events import DeadLetters

    number = int(source.rpartition(":")[2])
    names = {source, f"{Path(file).name}:{number}", f"{Path(file).resolve()}:{number}"}
    letters = DeadLetters()
    events = read_sources([file], detector.settings, letters, quiet=True)
    for scored in score_batches(detector, events, adapt=False):
        for each in scored:
            if each.event.source in names:
                return detector.alert(each).to_json()
    raise ValueError(
        f"There is no event {source}: {file} has fewer lines, or that one is no event."
    )


class Stages:
    """Progress of stages on stderr, with the time that is left where the total is known."""

    def __init__(self) -> None:
        self.stack = ExitStack()
        self.last = 0.0

    def __enter__(self) -> Stages:
        from regard.progress import progress_bar

        self.bar = self.stack.enter_context(progress_bar())
        return self

    def update(self, stage: str, done: int, total: int) -> None:
        """Show how far a stage is; a total of 0 is unknown."""
        now = monotonic()
        if now - self.last < 0.1 and done != total:
            return
        self.last = now
        text = f"{stage} {done:,}" + (f" of {total:,}" if total else "")
        self.bar.update(done, text, total=total or None, stage=stage)  # type: ignore[arg-type]

    def stop(self) -> None:
        """Remove the bar."""
        self.bar.stop()

    def __exit__(self, *error: object) -> None:
        self.stack.close()


def report_dead_letters(letters: DeadLetters, path: Path | None) -> None:
    """Say how many lines were no events, and why."""
    letters.flush()
    if not letters.total:
        return
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in letters.counts.most_common(5))
    where = f"they are in {path}" if path else "keep them with --dead-letters FILE"
    echo(f"warning: {letters.total:,} lines are no events ({reasons}); {where}.", err=True)


def print_report(report: LearnReport) -> None:
    """What was learned, as two tables and notes."""
    facts = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    entities = f"{report.entities:,}"
    if report.without_entity:
        entities += f"; {report.without_entity:.1%} of the events have none"
    for name, value in (
        ("events", f"{report.events:,}, {report.leaves:.0f} leaves on average"),
        ("endpoints", f"{report.endpoints:,}, {report.new_endpoints:,} too new to alert on"),
        ("entities", entities),
        ("volume", f"{report.volume_per_day:,.0f} events a day"),
        ("an alert is", f"p <= {report.threshold:.2g}"),
    ):
        facts.add_row(Text(name, style="bold"), value)
    console().print(facts)
    rates = Table(title=f"Share of {report.held_out:,} held-out events", title_justify="left")
    rates.add_column("")
    for name in report.held_out_rates:
        rates.add_column(f"p <= {name}", justify="right")
    rates.add_row("expected", *(f"{float(name):.2%}" for name in report.held_out_rates))
    rates.add_row("all levels", *(f"{rate:.2%}" for rate in report.held_out_rates.values()))
    for level, facts_of_level in report.levels.items():
        shares = facts_of_level["held_out_rates"].values()
        rates.add_row(level, *(f"{share:.2%}" for share in shares))
    console().print(rates)
    print_self_test(report.self_test)
    for level, facts_of_level in report.levels.items():
        if "network" in facts_of_level:
            echo(f"{level}: {facts_of_level['network']}")
        for line in facts_of_level.get("metric", ()):
            echo(line)
    for note in report.notes:
        echo(f"note: {note}")


def print_self_test(results: dict[str, dict[str, Any]]) -> None:
    """What was found of planted edits, by level."""
    if not results:
        return
    table = Table(
        title="Edits planted into held-out events: share found with 1 % false alarms",
        title_justify="left",
    )
    levels = list(next(iter(results.values()))["by_level"])
    for name in ("", "edits", "found", *levels, "leaf named first"):
        table.add_column(name, justify="right" if name else "left")
    for kind, result in results.items():
        hit = result["hit_at_1"]
        table.add_row(
            kind.replace("_", " "),
            str(result["edits"]),
            f"{result['found']:.0%}",
            *(f"{result['by_level'][level]:.0%}" for level in levels),
            "" if hit is None else f"{hit:.0%}",
        )
    console().print(table)


def print_alerts(
    alerts: list[dict[str, Any]],
    unusual: list[dict[str, Any]],
    statuses: Counter[str],
    detector: Detector,
) -> None:
    """Alerts as a table, one line each."""
    budget = detector.budget
    if alerts:
        console().print(alert_table(alerts))
    if unusual:
        console().print(alert_table(unusual, title="Most unusual events"))
    counted = ", ".join(f"{count:,} {status}" for status, count in statuses.most_common())
    echo(f"{statuses.total():,} events: {counted}")
    echo(
        f"{budget.settings.alerts_per_day:g} alerts a day of {budget.volume:,.0f} events: an alert "
        f"is p <= {budget.threshold:.2g}"
    )
    if statuses["learning"] > statuses.total() / 2:
        echo(
            "note: most of the events are of endpoints that the model hardly knows; learn from "
            "more traffic, or check --endpoint."
        )


def alert_table(alerts: list[dict[str, Any]], title: str | None = None) -> Table:
    """One line for each alert."""
    table = Table(title=title, title_justify="left")
    for name in ("id", "time", "p", "who", "endpoint", "what"):
        table.add_column(name, justify="right" if name == "p" else "left", overflow="fold")
    for alert in alerts:
        mark = "~" if alert["extrapolated"] else ""
        first = alert["findings"][0]["text"] if alert["findings"] else alert["kind"]
        style = "" if alert["status"] == "alert" else "dim"
        table.add_row(
            alert["id"][:8],
            show_time(alert["time"]),
            f"{mark}{alert['p']:.1e}",
            alert["entity"],
            alert["endpoint"],
            first if alert["status"] == "alert" else f"({alert['status']}) {first}",
            style=style,
        )
    return table


def print_alert(alert: dict[str, Any]) -> None:
    """An alert, explained."""
    extrapolated = ", by a fitted tail" if alert["extrapolated"] else ""
    echo(f"{alert['status']} {alert['id']}: {alert['endpoint']}")
    if alert["entity"]:
        echo(f"  who    {alert['entity']}")
    echo(f"  when   {show_time(alert['time'])}")
    echo(f"  where  {alert['source']}")
    echo(
        f"  p      {alert['p']:.2g}{extrapolated}; {alert['baseline']:,} normal events, "
        f"model {alert['model']}"
    )
    echo("\nFindings")
    for i, finding in enumerate(alert["findings"], 1):
        echo(
            f"  {i}. {finding['text']}\n     {finding['kind']} at "
            f"{finding['path'] or '(the event)'}; {finding['bits']:.1f} bits, "
            f"p = {finding['p']:.1e}, level {finding['level']}"
        )
        for source, weight in finding["context"]:
            echo(f"     after {source} ({weight:.2g})")
    if alert["what_if"]:
        echo("\nWhat if")
        for each in alert["what_if"]:
            echo(
                f"  {each['path']} = {shorten(each['value'])}: p {each['p_before']:.1e} -> "
                f"{each['p_after']:.1e}"
            )
    if alert["leaves"]:
        print_leaves(alert)


def print_leaves(alert: dict[str, Any]) -> None:
    """The leaves of an event with their bits, beside the nearest normal event."""
    normal = alert["nearest_normal"]
    table = Table(title="Leaves", title_justify="left")
    for name in ("bits", "", "path", "value", "nearest normal event"):
        table.add_column(name, justify="right" if name == "bits" else "left", overflow="fold")
    most = max(max(each["bits"] for each in alert["leaves"]), 1.0)
    leaves = alert["leaves"]
    if len(leaves) > MANY_LEAVES:
        leaves = sorted(leaves, key=lambda each: -each["bits"])[:MANY_LEAVES]
    for leaf in leaves:
        other = normal.get(leaf["path"])
        same = other == leaf["value"] or (isinstance(other, list) and leaf["value"] in other)
        shown = "same" if same else shorten(other) if leaf["path"] in normal else "not there"
        table.add_row(
            f"{leaf['bits']:.1f}",
            "█" * round(BAR * leaf["bits"] / most),
            leaf["path"],
            shorten(leaf["value"]),
            shown if normal else "",
        )
    for path, value in normal.items():
        if path not in {each["path"] for each in alert["leaves"]}:
            table.add_row("", "", path, "not there", shorten(value))
    console().print(table)


def shorten(value: Any, length: int = 100) -> str:
    """A value as JSON, cut if it is long."""
    text = escape_controls(json_module.dumps(value, ensure_ascii=False))
    return text if len(text) <= length else f"{text[:length]}…"
