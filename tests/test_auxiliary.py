"""The channel by which costs and statistics reach a training loop."""

import threading

import torch

from regard.auxiliary import collect_aux, record_aux


def test_nobody_listens():
    """Fails if a value is computed for nobody."""
    record_aux("span", lambda: 1 / 0)


def test_costs_add_up_and_facts_are_detached():
    x = torch.ones(3, requires_grad=True)
    with collect_aux() as notes:
        record_aux("span", lambda: x.sum() * 2, is_loss=True)
        record_aux("span", lambda: x.sum(), is_loss=True)
        record_aux("load", lambda: x * 3)
    assert notes.names() == ["span", "load"]
    assert [v.item() for v in notes.all("span")] == [6, 3]
    notes.loss().backward()
    assert x.grad.tolist() == [3, 3, 3]
    assert not notes.all("load")[0].requires_grad
    assert notes.all("nothing") == []


def test_the_innermost_listener_hears_and_an_error_closes_it():
    with collect_aux() as outer:
        try:
            with collect_aux() as inner:
                record_aux("a", lambda: torch.ones(()))
                raise KeyError
        except KeyError:
            pass
        record_aux("b", lambda: torch.ones(()))
    assert (inner.names(), outer.names()) == (["a"], ["b"])
    assert outer.loss() == 0


def test_threads_do_not_hear_each_other():
    with collect_aux() as notes:
        other = threading.Thread(target=record_aux, args=("a", lambda: torch.ones(())))
        other.start()
        other.join()
    assert notes.names() == []
