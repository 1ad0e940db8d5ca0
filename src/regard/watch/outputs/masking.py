"""Masking of sensitive values in alerts: passwords, tokens, card numbers, addresses.

A value is masked if the name of its key says that it is sensitive, or if it looks like a secret
wherever it is. Paths, kinds, lengths and probabilities stay, so an alert can still be understood.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from typing import Any

WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")  # of camelCase, snake_case and Header-Case

# A key is sensitive if it contains one of these words, or one of these pairs of words in a row.
SENSITIVE_WORDS = {
    "apikey",
    "auth",
    "authorization",
    "birthdate",
    "birthday",
    "cookie",
    "credential",
    "credentials",
    "csrf",
    "cvc",
    "cvv",
    "email",
    "iban",
    "jwt",
    "mail",
    "mobile",
    "msisdn",
    "otp",
    "pan",
    "passphrase",
    "passport",
    "passwd",
    "password",
    "phone",
    "pin",
    "postcode",
    "pwd",
    "secret",
    "session",
    "sessionid",
    "sid",
    "signature",
    "ssn",
    "street",
    "surname",
    "telephone",
    "token",
    "username",
    "xsrf",
    "zip",
}
SENSITIVE_PAIRS = {
    ("access", "key"),
    ("account", "number"),
    ("api", "key"),
    ("birth", "date"),
    ("card", "number"),
    ("credit", "card"),
    ("first", "name"),
    ("full", "name"),
    ("last", "name"),
    ("private", "key"),
    ("signing", "key"),
    ("tax", "id"),
    ("user", "name"),
}

# Their time is linear in the length of the value: none starts within a run of what it reads.
SECRET_VALUES = (
    ("token", re.compile(r"(?<![\w-])eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*")),  # JSON Web Token
    ("token", re.compile(r"(?i)\b(?:bearer|basic)\s+[\w.~+/=-]{8,}")),
    ("key", re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----")),
    ("key", re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b")),  # AWS
    ("key", re.compile(r"\b(?:gh[pousr]_|xox[abprs]-|sk_live_|whsec_)[\w-]{10,}")),
    ("email", re.compile(r"(?<![\w.+-])[\w.+-]++@[\w-]+(?:\.[\w-]+)+")),
    ("iban", re.compile(r"\b[A-Z]{2}\d{2}(?: ?[A-Z0-9]{4}){3,7}(?: ?[A-Z0-9]{1,3})?\b")),
)
CARD = re.compile(r"(?<![\d.])(?:\d[ -]?){12,18}\d(?![\d.])")


def is_sensitive_path(path: str) -> bool:
    """Whether the name of the key at the end of a path, or one above it, says that its values are
    sensitive: "request.body.card_number", "headers.Set-Cookie", "session.id".

    Example:
        >>> is_sensitive_path("request.headers.Authorization"), is_sensitive_path("items[].id")
        (True, False)
    """
    words = [word.lower() for word in WORD.findall(path)]
    if not SENSITIVE_WORDS.isdisjoint(words):
        return True
    return any(pair in SENSITIVE_PAIRS for pair in itertools.pairwise(words))


def secret_kind(value: object) -> str | None:
    """What secret a value looks like, wherever it is: "token", "key", "card", "email" or "iban"."""
    if isinstance(value, bool) or not isinstance(value, str | int):
        return None
    text = str(value)
    if isinstance(value, str):
        for kind, pattern in SECRET_VALUES:
            if pattern.search(text):
                return kind
    found = CARD.search(text)
    return "card" if found and passes_luhn(re.sub(r"\D", "", found[0])) else None


def passes_luhn(digits: str) -> bool:
    """Whether the last digit is the check digit of the others (ISO/IEC 7812)."""
    doubled = (int(digit) * (2 if i % 2 else 1) for i, digit in enumerate(reversed(digits)))
    return sum(value - 9 if value > 9 else value for value in doubled) % 10 == 0


def mask_value(value: Any, path: str = "") -> Any:
    """A value, or what stands for it if it is sensitive: "[masked: 12 characters]".

    Booleans and null are never masked. A list or an object is masked value by value.
    """
    if isinstance(value, Mapping):
        return {key: mask_value(each, f"{path}.{key}") for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [mask_value(each, path) for each in value]
    if value is None or isinstance(value, bool) or is_mask(value):
        return value
    kind = secret_kind(value)
    if kind is None and not is_sensitive_path(path):
        return value
    what = f"{len(value):,} characters" if isinstance(value, str) else "a number"
    return f"[masked: {kind}, {what}]" if kind else f"[masked: {what}]"


def is_mask(value: object) -> bool:
    """Whether a value stands for one that was masked."""
    return isinstance(value, str) and value.startswith("[masked: ") and value.endswith("]")


def mask_alert(content: Mapping[str, Any]) -> dict[str, Any]:
    """An alert (`Alert.to_json`) with its sensitive values masked; one that is masked already is
    unchanged.

    Who acted, the endpoint and the source are kept: without them nobody could act on the alert.
    """
    masked = dict(content)
    masked["findings"] = [_mask_finding(finding) for finding in content["findings"]]
    masked["nearest_normal"] = {
        path: mask_value(value, path) for path, value in content["nearest_normal"].items()
    }
    for name in ("what_if", "leaves"):
        masked[name] = [
            {**entry, "value": mask_value(entry["value"], entry["path"])} for entry in content[name]
        ]
    return masked


def _mask_finding(finding: Mapping[str, Any]) -> dict[str, Any]:
    """A finding with its values masked. Its sentence may quote them, so it is replaced then."""
    path = finding["path"]
    observed = mask_value(finding["observed"], path)
    expected = [[mask_value(value, path), share] for value, share in finding["expected"]]
    masked = {**finding, "observed": observed, "expected": expected}
    unchanged = observed == finding["observed"] and all(
        value == old for (value, _), (old, _) in zip(expected, finding["expected"], strict=True)
    )
    if not unchanged:
        masked["text"] = f"Unusual {finding['kind'].replace('_', ' ')} at {path}; values masked."
    elif secret_kind(finding["text"]):
        masked["text"] = f"Unusual {finding['kind'].replace('_', ' ')} at {path}."
    return masked
