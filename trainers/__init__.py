"""Losses, freezing and the Trainer subclasses that carry them.

`__init__.pyi` lists the names, which are imported on first use: freezing alone needs no Trainer, which takes seconds.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
