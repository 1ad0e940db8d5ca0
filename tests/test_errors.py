"""Messages that name what was wrong and what would be right."""

import re

import pytest

import regard
from regard.cli import app
from regard.errors import did_you_mean
from regard.train.settings import parse_settings


def test_a_similar_name_is_suggested_and_an_unrelated_one_is_not():
    assert did_you_mean("windw", ["window", "heads"]) == "did you mean 'window'?"
    with pytest.raises(TypeError, match="local has no argument 'rank': choose from"):
        regard.create("local", dim=64, heads=4, rank=16)


def test_a_wrong_choice_is_named_once():
    with pytest.raises(ValueError, match="bf16") as error:
        parse_settings({"dtype": "bf16"})
    assert str(error.value).count("'bf16'") == 1
    assert str(error.value).startswith("dtype must be one of 'float32', 'bfloat16'")


def test_help_texts_have_no_square_brackets():
    """Rich reads [...] as markup and drops it: defaults belong into show_default."""
    from typer.main import get_command

    group = get_command(app)
    commands = {name: group.get_command(None, name) for name in group.list_commands(None)}
    assert len(commands) >= 16
    found = [
        (name, parameter.name)
        for name, command in commands.items()
        for parameter in command.params
        if re.search(r"\[[a-z0-9]", getattr(parameter, "help", None) or "")
    ]
    assert not found
