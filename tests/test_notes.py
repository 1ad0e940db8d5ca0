"""The channel by which costs and statistics reach a training loop."""

import threading

import torch

from regard.notes import noted, tell


def test_nobody_listens():
    """Fails if a value is computed for nobody."""
    tell("span", lambda: 1 / 0)


def test_costs_add_up_and_facts_are_detached():
    x = torch.ones(3, requires_grad=True)
    with noted() as notes:
        tell("span", lambda: x.sum() * 2, is_cost=True)
        tell("span", lambda: x.sum(), is_cost=True)
        tell("load", lambda: x * 3)
    assert notes.names() == ["span", "load"]
    assert [v.item() for v in notes.all("span")] == [6, 3]
    notes.cost().backward()
    assert x.grad.tolist() == [3, 3, 3]
    assert not notes.all("load")[0].requires_grad
    assert notes.all("nothing") == []


def test_the_innermost_listener_hears_and_an_error_closes_it():
    with noted() as outer:
        try:
            with noted() as inner:
                tell("a", lambda: torch.ones(()))
                raise KeyError
        except KeyError:
            pass
        tell("b", lambda: torch.ones(()))
    assert (inner.names(), outer.names()) == (["a"], ["b"])
    assert outer.cost() == 0


def test_threads_do_not_hear_each_other():
    with noted() as notes:
        other = threading.Thread(target=tell, args=("a", lambda: torch.ones(())))
        other.start()
        other.join()
    assert notes.names() == []
