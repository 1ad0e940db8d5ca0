"""Regard: attention and token-mixing mechanisms for PyTorch behind one interface.

    import regard

    mixer = regard.create("bigbird", dim=512, heads=8, length=4096)
    y = mixer(x)                                               # (b, n, d) -> (b, n, d)
    y = regard.attend(q, k, v, pattern=regard.Band(128, 128))  # (b, h, n, e) -> (b, h, n, e)

`regard.list_recipes()` lists the recipes. The public names are declared in `__init__.pyi` and
imported on first use, so `import regard` is cheap and the command line starts without torch.

Shape letters used throughout: b batch, h heads, n queries, m keys, d model width, e head width.
"""

import lazy_loader

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
