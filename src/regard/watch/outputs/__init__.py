"""Outputs of alerts: files and webhooks, as plain JSON, Elastic Common Schema or OCSF."""

from __future__ import annotations

from regard.errors import check_choice
from regard.watch.outputs.delivery import Deliveries
from regard.watch.outputs.documents import FORMATS, to_ecs, to_ocsf
from regard.watch.outputs.files import FileOutput
from regard.watch.outputs.masking import mask_alert, mask_value
from regard.watch.outputs.output import Output, OutputError
from regard.watch.outputs.webhook import WebhookOutput

__all__ = [
    "FORMATS",
    "Deliveries",
    "FileOutput",
    "Output",
    "OutputError",
    "WebhookOutput",
    "create_output",
    "mask_alert",
    "mask_value",
    "to_ecs",
    "to_ocsf",
]

WEBHOOK = "webhook"


def create_output(spec: str, *, webhook_secret: str | None = None) -> Output:
    """The output that a text describes.

    Args:
        spec: "jsonl:FILE", "ecs:FILE", "ocsf:FILE" ("-" is standard output), "webhook:URL",
            "webhook+ecs:URL" or "webhook+ocsf:URL". A file name alone is "jsonl:FILE".
        webhook_secret: Key that signs webhooks; see `WebhookOutput`.

    Example:
        >>> create_output("ocsf:-").name
        'ocsf:-'
    """
    kind, colon, target = spec.partition(":")
    if not colon or "/" in kind or "." in kind:
        kind, target = "jsonl", spec
    if not target:
        raise ValueError(f"Output {spec!r} names no file or URL.")
    if kind in ("http", "https"):
        raise ValueError(f"Write webhook:{spec} to send alerts to this URL.")
    known = (*FORMATS, WEBHOOK, *(f"{WEBHOOK}+{name}" for name in FORMATS))
    check_choice("output", kind, known)
    if kind.startswith(WEBHOOK):
        format = kind.removeprefix(WEBHOOK).removeprefix("+") or "jsonl"
        return WebhookOutput(target, format, secret=webhook_secret)
    return FileOutput(target, kind)
