"""Leaves of JSON objects: paths and values as two flat lists.

    {"user": "anna", "items": [{"price": 3}, {"price": 4}]}

    user           "anna"
    items[].price  3
    items[].price  4

Paths are bounded: indices of arrays are not in them, keys that are ids become classes such as
`{id}`, and very long keys become `{other}`. Texts that hold more than one value are taken apart:
JSON inside strings, query strings of URLs, form bodies and cookies.

Objects of the same keys and types share a plan, so that the leaves of an event are moved by whole
objects instead of one by one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple
from urllib.parse import unquote_plus

import orjson

from regard.watch.event import Signal, Value
from regard.watch.events.duplicates import count_keys
from regard.watch.events.ids import ID, OTHER, id_class

MAX_KEY = 64  # characters of a key in a path
MAX_NODES = 100_000  # of the cache of paths, which starts anew when it is full
MAX_EMBEDDED = 3  # levels of JSON inside strings of JSON
MAX_PARAMETERS = 256  # of one query string, form or cookie

PLAIN_KEY = re.compile(r"[\w@$:/#&+*~^ -]+(\.[\w@$:/#&+*~^ -]+)*")
PARAMETER = r"[\w.~%+\[\]$-]{1,128}"
FORM = re.compile(rf"{PARAMETER}=[^&\s]*(&{PARAMETER}(=[^&\s]*)?)*")

INTEGER = re.compile(r"-?(0|[1-9]\d{0,17})", re.ASCII)
REQUEST_LINE = re.compile(r"([A-Z]{3,16}) (\S+) (HTTP/\d(?:\.\d)?)")

# How strings are taken apart, by the last part of their key in lower case without - and _.
ROLES = {
    "url": "url uri href link path requesturi requesturl requestpath fullpath rawpath referer "
    "referrer httpreferer httpreferrer original full target location",
    "form": "body requestbody responsebody postdata payload text content form query querystring "
    "args params",
    "cookie": "cookie cookies httpcookie",
    "request_line": "request requestline",
}
ROLE_OF_KEY = {key: role for role, keys in ROLES.items() for key in keys.split()}


class Plan(NamedTuple):
    """What to do with the values of an object that has certain keys, of certain types.

    Attributes:
        keys: Number of its keys.
        paths: Paths of the scalars that are copied.
        pick: Takes their values from the list of all values; None: all are copied.
        others: Index, function and node of each other value.
    """

    keys: int
    paths: list[str]
    pick: Callable[[list[Any]], Sequence[Any]] | None
    others: list[tuple[int, Callable[[Any, PathNode, int], None], PathNode]]


class PathNode:
    """A path with its children and plans: a node of the tree of all paths seen so far."""

    __slots__ = ("children", "element", "path", "plans", "role")

    def __init__(self, path: str, role: str = "") -> None:
        self.path = path
        self.role = role
        self.children: dict[str, PathNode] = {}
        self.plans: dict[tuple[object, ...], Plan] = {}
        self.element: PathNode | None = None


class Leaves(NamedTuple):
    """Leaves of one object, and signals of what was left out or is odd."""

    paths: list[str]
    values: list[Value]
    signals: list[Signal]


class Flattener:
    """Makes leaves of objects.

    Args:
        max_depth: Deepest nesting. What lies deeper becomes one leaf, `{...}` or `[...]`.
        max_leaves: Most leaves; the rest is left out.
        max_string: Longest string in characters; longer ones are cut.
        ignore: Paths that are left out, with all beneath them.
    """

    def __init__(
        self, max_depth: int, max_leaves: int, max_string: int, ignore: Sequence[str] = ()
    ) -> None:
        self.max_depth = max_depth
        self.max_leaves = max_leaves
        self.max_string = max_string
        self.ignore = frozenset(ignore)
        self._start_tree()

    def flatten(
        self, content: dict[str, Any], has_json: bool, has_long: bool
    ) -> tuple[Leaves, int]:
        """The leaves of an object, and the number of keys in it and beneath it.

        Args:
            content: The object.
            has_json: Whether strings of it may be JSON objects or arrays.
            has_long: Whether strings of it may be longer than `max_string`.
        """
        if self.nodes > MAX_NODES:
            self._start_tree()
        self.paths: list[str] = []
        self.values: list[Value] = []
        self.signals: list[Signal] = []
        self.keys = 0
        self.decoded_json = False
        self.add_object(content, self.root, 0)
        keys = self.keys
        if has_json or self.decoded_json:
            self.parse_embedded_json()
        if has_long:
            self.cut_strings()
        if len(self.paths) > self.max_leaves:
            self.signals.append(Signal("too_many_leaves", self.paths[self.max_leaves]))
            del self.paths[self.max_leaves :], self.values[self.max_leaves :]
        return Leaves(self.paths, self.values, self.signals), keys

    def _start_tree(self) -> None:
        self.root = PathNode("")
        self.nodes = 0
        self.embedded: dict[str, PathNode] = {}

    # ------------------------------------------------------------------------ objects and arrays
    def add_object(self, content: dict[str, Any], node: PathNode, depth: int) -> None:
        """Add the leaves of an object at a node."""
        if not content:
            self.add_leaf(None, node, depth)
            return
        shape = (*content, *map(type, content.values()))
        plan = node.plans.get(shape)
        if plan is None:
            plan = self.make_plan(content, node, depth)
            node.plans[shape] = plan
        self.keys += plan.keys
        self.paths += plan.paths
        if plan.pick is None:
            self.values += content.values()
            return
        values = list(content.values())
        self.values += plan.pick(values)
        for index, add, child in plan.others:
            add(values[index], child, depth + 1)

    def add_array(self, items: list[Any], node: PathNode, depth: int) -> None:
        """Add the leaves of an array at a node. An empty one is one leaf, None."""
        if node.element is None:
            node.element = self.make_node(f"{node.path}[]", node.role)
        node = node.element
        if not items:
            self.add_leaf(None, node, depth)
        elif node.role or not {dict, list}.isdisjoint(map(type, items)):
            for item in items:
                self.adder(item, node, depth)(item, node, depth + 1)
        elif node.path not in self.ignore:
            self.paths += [node.path] * len(items)
            self.values += items

    def add_leaf(self, value: Value, node: PathNode, depth: int) -> None:
        """Add one leaf."""
        self.paths.append(node.path)
        self.values.append(value)

    def add_part(self, value: Value, node: PathNode) -> None:
        """Add one of the values of a text, unless its path is ignored."""
        if node.path not in self.ignore:
            self.paths.append(node.path)
            self.values.append(value)

    def add_deep(self, value: Any, node: PathNode, depth: int) -> None:
        """Add what is nested too deep as one leaf."""
        self.keys += count_parsed_keys(value)
        self.paths.append(node.path)
        self.values.append("{...}" if isinstance(value, dict) else "[...]")
        self.signals.append(Signal("too_deep", node.path))

    def skip(self, value: Any, node: PathNode, depth: int) -> None:
        """Add nothing for a path that is ignored, but count its keys."""
        self.keys += count_parsed_keys(value)

    def adder(self, value: Any, node: PathNode, depth: int) -> Callable[[Any, PathNode, int], None]:
        """The method that adds a value of this type at this node."""
        if node.path in self.ignore:
            return self.skip
        if isinstance(value, dict | list):
            if depth + 1 >= self.max_depth:
                return self.add_deep
            return self.add_object if isinstance(value, dict) else self.add_array
        if isinstance(value, str) and node.role:
            return {
                "url": self.add_url,
                "form": self.add_form,
                "cookie": self.add_cookie,
                "request_line": self.add_request_line,
            }[node.role]
        return self.add_leaf

    def make_plan(self, content: dict[str, Any], node: PathNode, depth: int) -> Plan:
        """The plan for objects with the keys and types of `content` at a node."""
        paths, copied, others = [], [], []
        for index, (key, value) in enumerate(content.items()):
            child = self.child(node, key)
            add = self.adder(value, child, depth)
            if add == self.add_leaf:
                paths.append(child.path)
                copied.append(index)
            else:
                others.append((index, add, child))
        self.nodes += len(content)
        pick = pick_values(copied) if others else None
        return Plan(len(content), paths, pick, others)

    def child(self, node: PathNode, key: str) -> PathNode:
        """The node of a key: that of its class, if it is an id."""
        child = node.children.get(key)
        if child is not None:
            return child
        name = OTHER if len(key) > MAX_KEY else id_class(key) or key
        child = node.children.get(name)
        if child is None:
            shown = name if name != key or PLAIN_KEY.fullmatch(key) else orjson.dumps(key).decode()
            path = f"{node.path}.{shown}" if node.path else shown
            child = node.children[name] = self.make_node(path, role_of(key))
        return child

    def path(self, keys: Sequence[str | None]) -> str:
        """The path of keys, where None is an element of an array."""
        node = self.root
        for key in keys:
            node = PathNode(f"{node.path}[]") if key is None else self.child(node, key)
        return node.path

    def make_node(self, path: str, role: str) -> PathNode:
        """A node of the tree, which counts against `MAX_NODES`."""
        self.nodes += 1
        return PathNode(path, role)

    # ------------------------------------------------------------------- texts with several values
    def add_url(self, url: str, node: PathNode, depth: int) -> None:
        """Add a URL: its path at the node, and its host, query and ids beneath it."""
        absolute = "://" in url[:16]
        if not absolute and not url.startswith("/"):
            self.add_leaf(url, node, depth)
            return
        rest, _, fragment = url.partition("#")
        path, _, query = rest.partition("?")
        if absolute:
            host, slash, path = path.partition("://")[2].partition("/")
            path = slash + path
            self.add_part(host, self.child(node, "host"))
        self.add_leaf(path, node, depth)
        ids = [segment for segment in path.split("/")[:MAX_PARAMETERS] if id_class(segment) == ID]
        if ids:
            child = self.child(node, "ids")
            items = [as_integer(segment) for segment in ids]
            self.adder(items, child, depth)(items, child, depth)
        if query:
            self.add_parameters(query.split("&"), self.child(node, "query"))
        if fragment:
            self.add_part(fragment, self.child(node, "fragment"))

    def add_form(self, text: str, node: PathNode, depth: int) -> None:
        """Add the fields of a form or of a query string, or any other text as one leaf."""
        if FORM.fullmatch(text):
            self.add_parameters(text.split("&"), node)
        else:
            self.add_leaf(text, node, depth)

    def add_cookie(self, text: str, node: PathNode, depth: int) -> None:
        """Add the cookies of a header."""
        if "=" in text:
            self.add_parameters(text.split(";"), node)
        else:
            self.add_leaf(text, node, depth)

    def add_request_line(self, text: str, node: PathNode, depth: int) -> None:
        """Add the method, the URL and the protocol of `GET /orders HTTP/1.1`."""
        match = REQUEST_LINE.fullmatch(text)
        if match is None:
            self.add_leaf(text, node, depth)
            return
        method, url, protocol = match.groups()
        child = self.child(node, "url")
        self.add_part(method, self.child(node, "method"))
        self.adder(url, child, depth)(url, child, depth)
        self.add_part(protocol, self.child(node, "protocol"))

    def add_parameters(self, parameters: list[str], node: PathNode) -> None:
        """Add the leaves of `name=value` texts, with signals for equal names and for too many."""
        if node.path in self.ignore:
            return
        if len(parameters) > MAX_PARAMETERS:
            self.signals.append(Signal("too_many_parameters", node.path))
        names: set[str | int] = set()
        for parameter in parameters[:MAX_PARAMETERS]:
            name, _, text = parameter.strip().partition("=")
            name, value = unquote_plus(name), as_integer(unquote_plus(text))
            child = self.child(node, name)
            if name in names:
                self.signals.append(Signal("duplicate_parameter", child.path))
            names.add(name)
            if isinstance(value, str) and value[:1] in ("{", "["):
                self.decoded_json = True
            self.add_part(value, child)

    def parse_embedded_json(self) -> None:
        """Replace strings that are JSON objects or arrays by their leaves."""
        start = 0
        for _ in range(MAX_EMBEDDED):
            end = len(self.values)
            parsed = [
                (index, content)
                for index in range(start, end)
                if (content := parse_container(self.values[index]))
            ]
            if not parsed:
                return
            for index, content in parsed:
                path, text, keys = self.paths[index], self.values[index], self.keys
                node = self.embedded.get(path)
                if node is None:
                    node = self.embedded[path] = self.make_node(path, "")
                self.adder(content, node, 0)(content, node, 0)
                if count_keys(str(text).encode()) != self.keys - keys:
                    self.signals.append(Signal("duplicate_key", path))
            for index, _ in reversed(parsed):
                del self.paths[index], self.values[index]
            start = end - len(parsed)

    def cut_strings(self) -> None:
        """Cut strings that are too long."""
        for index, value in enumerate(self.values):
            if isinstance(value, str) and len(value) > self.max_string:
                self.values[index] = value[: self.max_string]
                self.signals.append(Signal("truncated_value", self.paths[index]))


def pick_values(indices: list[int]) -> Callable[[list[Any]], Sequence[Any]]:
    """A function that takes the values at some indices from a list."""
    if len(indices) == 1:
        return lambda values: values[indices[0] : indices[0] + 1]
    return itemgetter(*indices) if indices else lambda values: ()


def role_of(key: str) -> str:
    """How strings with this key are taken apart; "" if they are not."""
    name = key.rpartition(".")[2].lower().replace("-", "").replace("_", "")
    return ROLE_OF_KEY.get(name, "")


def as_integer(text: str) -> str | int:
    """The integer that a parameter says; other texts as they are, such as 007."""
    return int(text) if INTEGER.fullmatch(text) else text


def parse_container(value: object) -> dict[str, Any] | list[Any] | None:
    """The object or array that a string is the JSON of, or None."""
    if not isinstance(value, str) or value[:1] not in ("{", "["):
        return None
    try:
        content: dict[str, Any] | list[Any] = orjson.loads(value)
    except orjson.JSONDecodeError:
        return None
    return content


def count_parsed_keys(value: Any) -> int:
    """Number of keys in all objects of a parsed JSON value."""
    keys, values = 0, [value]
    while values:
        value = values.pop()
        if isinstance(value, dict):
            keys += len(value)
            values.extend(value.values())
        elif isinstance(value, list):
            values.extend(value)
    return keys
