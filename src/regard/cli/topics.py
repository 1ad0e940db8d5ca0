"""The command `regard topics`."""

from __future__ import annotations

from json import dumps
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from regard.cli.device_options import DeviceOption, check_device
from regard.cli.output import console, echo, print_json, user_errors
from regard.cli.plugins import PluginOption
from regard.errors import check_choice
from regard.json_files import write_json
from regard.output_folders import check_output_folder
from regard.plugins import load_plugins
from regard.report.bundle import plots_available
from regard.tasks.files import open_text
from regard.topics import (
    BASELINES,
    TopicModel,
    TopicScores,
    fit_baseline,
    load_embedder,
    read_documents,
    score_topics,
)
from regard.topics.page import (
    INSTALL,
    PROJECTIONS,
    TopicReport,
    project,
    render_page,
    score_rows,
    write_png,
)

OUT = Path("topics")
RESULT, PAGE, PICTURE, DOCUMENTS = "topics.json", "topics.html", "map.png", "documents.jsonl"
OURS = "embeddings"


def topics(
    source: Annotated[
        str,
        typer.Argument(
            help="What embeds the documents: the folder of a run of mlm, lm or classify, or a "
            "Hugging Face encoder (a folder, a package or a name on the Hub)."
        ),
    ],
    data: Annotated[
        str, typer.Option(help="Rows (CSV, JSON, Parquet, hf:name), or a text file of lines.")
    ],
    text: Annotated[str, typer.Option(help="Column of the text, in rows.")] = "text",
    label: Annotated[
        str | None, typer.Option(help="Column of labels to compare the topics with.")
    ] = None,
    topics: Annotated[
        int | None,
        typer.Option(
            min=2, help="Number of topics.", show_default="2 to 20, the largest silhouette"
        ),
    ] = None,
    clustering: Annotated[
        str, typer.Option(help="kmeans, or hdbscan, which finds the number of topics.")
    ] = "kmeans",
    words: Annotated[int, typer.Option(min=2, help="Words of each topic.")] = 10,
    stop_words: Annotated[
        str, typer.Option(help="Words to leave out: english, none, or a file with one per line.")
    ] = "english",
    min_df: Annotated[
        int | None,
        typer.Option(
            min=1, help="Documents that a word must be in.", show_default="0.5 %, at least 2"
        ),
    ] = None,
    max_df: Annotated[
        float, typer.Option(help="Leave out words that are in more than this share of documents.")
    ] = 0.5,
    reduce_frequent_words: Annotated[
        bool,
        typer.Option(
            "--reduce-frequent-words",
            help="Weight words by the square root of their share of a topic, as in BERTopic.",
        ),
    ] = False,
    projection: Annotated[
        str, typer.Option(help="How the map places documents: tsne or pca.")
    ] = "tsne",
    baselines: Annotated[
        bool, typer.Option("--baselines/--no-baselines", help="Also fit LDA, NMF and TF-IDF.")
    ] = True,
    encoding: Annotated[str, typer.Option(help="Encoding of the files.")] = "utf-8",
    seed: Annotated[int, typer.Option(min=0, help="Seed of the clustering and the map.")] = 0,
    batch_size: Annotated[int, typer.Option(min=1, help="Documents per batch.")] = 32,
    device: DeviceOption = "auto",
    plugin: PluginOption = [],  # noqa: B006
    out: Annotated[Path, typer.Option(help="Folder for the page, the map and the results.")] = OUT,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Find the topics of documents from the embeddings of a pretrained encoder.

    Example: regard topics runs/masked --data news.jsonl --topics 5 --out topics
    """

    with user_errors():
        check_output_folder(out, "result of regard topics", RESULT)
        check_choice("projection", projection, PROJECTIONS)
        load_plugins(plugin)
        model = TopicModel(
            topics,
            clustering=clustering,
            top_n_words=words,
            stop_words=_read_stop_words(stop_words, encoding),
            min_df=min_df,
            max_df=max_df,
            reduce_frequent_words=reduce_frequent_words,
            random_state=seed,
        )
        documents = read_documents(data, text=text, label=label, encoding=encoding)
        for note in documents.notes:
            echo(f"warning: {note}", err=True)
        model.check_documents(documents.texts)
        embed = load_embedder(
            source,
            device=check_device(device, "float32"),
            plugins=plugin,
            batch_size=batch_size,
        )
        assigned = model.fit_transform(documents.texts, embed(documents.texts))
        counts, count = model.word_counts_, len(model.topic_words_)
        scores = {OURS: score_topics(model.topic_words_, assigned, counts.texts, documents.labels)}
        for name in BASELINES if baselines else ():
            found = fit_baseline(name, counts, count, top_n_words=words, random_state=seed)
            scores[name] = score_topics(found.words, found.labels, counts.texts, documents.labels)
        report = TopicReport(
            title=f"{len(documents.texts):,} documents of {data}, embedded by {source}",
            documents=documents.texts,
            labels=documents.labels,
            assigned=assigned,
            words=model.topic_words_,
            places=project(model.vectors_, projection, random_state=seed),
            projection=projection,
            scores=scores,
            notes=documents.notes,
        )
        result = {
            "source": source,
            "data": data,
            "documents": len(documents.texts),
            "clustering": clustering,
            "silhouettes": {str(k): value for k, value in model.silhouettes_.items()},
            "topics": [
                {
                    "topic": number,
                    "documents": int((assigned == number).sum()),
                    "words": dict(zip(each, model.topic_weights_[number], strict=True)),
                }
                for number, each in enumerate(model.topic_words_)
            ],
            "scores": {name: _score_values(each) for name, each in scores.items()},
        }
        _write(out, report, result)
    if json:
        print_json({"folder": str(out), **result})
    else:
        _print(report, model, out)


def _read_stop_words(name: str, encoding: str) -> str | list[str] | None:
    """The value of --stop-words for `TopicModel`."""
    if name == "english":
        return name
    if name == "none":
        return None
    if not Path(name).is_file():
        raise ValueError(f"--stop-words is english, none or a file, not {name!r}.")
    with open_text(Path(name), encoding) as file:
        return file.read().split()


def _score_values(scores: TopicScores) -> dict[str, float | None]:
    """The scores of a model as JSON; what has no value is null."""
    values = {
        "npmi": scores.npmi,
        "diversity": scores.diversity,
        "unassigned": scores.unassigned,
        **scores.agreement,
    }
    return {name: value if value == value else None for name, value in values.items()}


def _write(out: Path, report: TopicReport, result: dict[str, Any]) -> None:
    """Write the result, the topic of each document, the page and the map."""
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / RESULT, result)
    with (out / DOCUMENTS).open("w", encoding="utf-8") as file:
        for i, text in enumerate(report.documents):
            row = {
                "topic": int(report.assigned[i]),
                "x": float(report.places[i, 0]),
                "y": float(report.places[i, 1]),
                **({} if report.labels is None else {"label": report.labels[i]}),
                "text": text,
            }
            file.write(f"{dumps(row)}\n")
    (out / PAGE).write_text(render_page(report), encoding="utf-8")
    if plots_available():
        write_png(report, out / PICTURE)
    else:
        echo(f"note: {INSTALL}", err=True)


def _print(report: TopicReport, model: TopicModel, out: Path) -> None:
    """Print the topics and the scores."""
    if model.silhouettes_:
        best = max(model.silhouettes_.items(), key=lambda each: each[1])
        echo(f"{len(report.words)} topics, chosen by the silhouette ({best[1]:.3f})\n")
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", show_edge=False)
    table.add_column("topic", justify="right")
    table.add_column("documents", justify="right")
    table.add_column("words")
    for number, words in enumerate(report.words):
        size = int((report.assigned == number).sum())
        table.add_row(str(number), f"{size:,}", ", ".join(words))
    to = console()
    to.print(table)
    if unassigned := int((report.assigned < 0).sum()):
        echo(f"{unassigned:,} documents are in no topic")
    echo()
    header, *rows = score_rows(report.scores)
    scores = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", show_edge=False)
    for i, name in enumerate(header):
        scores.add_column(name, justify="right" if i else "left")
    for row in rows:
        scores.add_row(*row)
    to.print(scores)
    files = [PAGE, *([PICTURE] if plots_available() else []), RESULT, DOCUMENTS]
    echo(f"\nsaved to {out}: {', '.join(files)}")
