"""Tasks by name: those of Python code and of other packages, clashes, arguments."""

from importlib import metadata

import pytest

import regard.tasks as tasks
from regard.tasks import Task, TokenTask, create_task, find_task, list_tasks, register_task
from regard.tasks.rendering import RenderedText


class Mine(TokenTask):
    """A task of a test."""

    def __init__(self, width, *, depth=1):
        super().__init__(vocab_size=width, classes=2, length=depth)

    def size(self, split):
        return 1

    def example(self, split, index):
        raise NotImplementedError

    def render(self, example, prediction=None):
        return RenderedText("")


class Everything(Mine):
    def __init__(self, **options):
        super().__init__(3)
        self.options = options


@pytest.fixture(autouse=True)
def own_tasks(monkeypatch):
    """Tasks that a test adds are gone after it."""
    monkeypatch.setattr(tasks, "TASKS", dict(tasks.TASKS))
    tasks._load_entry_points.cache_clear()
    yield
    tasks._load_entry_points.cache_clear()


def test_a_task_by_name():
    register_task("mine", Mine)
    assert find_task("mine") is Mine and "mine" in list_tasks()
    assert create_task("mine", width=7, depth=2).vocab_size == 7
    register_task("mine", Mine)  # the same again
    with pytest.raises(ValueError, match="No task 'mien': did you mean 'mine'"):
        create_task("mien")


def test_clashes_and_what_is_no_task():
    with pytest.raises(
        ValueError, match=r"'lm' is already registered by regard.tasks.language_mod"
    ):
        register_task("lm", Mine)
    with pytest.raises(
        TypeError, match=r"must be a subclass of regard.tasks.Task, not <class 'int"
    ):
        register_task("number", int)
    with pytest.raises(ValueError, match=r"The name of a task has letters.* not 'a:b'"):
        register_task("a:b", Mine)

    class Half(Task):
        pass

    with pytest.raises(TypeError, match="Half does not define example, needs, render, size"):
        register_task("half", Half)


def test_arguments_are_named():
    register_task("mine", Mine)
    with pytest.raises(TypeError, match="needs the arguments width"):
        create_task("mine")
    with pytest.raises(TypeError, match="no argument 'dept': did you mean 'depth'"):
        create_task("mine", width=3, dept=1)
    register_task("everything", Everything)
    assert create_task("everything", a=1).options == {"a": 1}


class Entry:
    def __init__(self, name, found):
        self.name, self.value, self.found = name, f"package:{name}", found

    def load(self):
        if isinstance(self.found, Exception):
            raise self.found
        return self.found


def test_tasks_of_other_packages(monkeypatch):
    entries = [
        Entry("theirs", Mine),
        Entry("broken", ImportError("no such package")),
        Entry("lm", Mine),
    ]
    asked = []
    monkeypatch.setattr(metadata, "entry_points", lambda group: asked.append(group) or entries)
    with pytest.warns(UserWarning, match="Could not load task") as warned:
        assert create_task("theirs", width=5).vocab_size == 5
    assert asked == ["regard.tasks"] and "theirs" in list_tasks()
    messages = [str(each.message) for each in warned]
    assert "Could not load task 'broken' from 'package:broken': no such package" in messages
    assert any("'lm' is already registered" in message for message in messages)
    assert find_task("lm") is not Mine
