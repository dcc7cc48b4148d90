"""Losses, freezing and the Trainer subclasses that carry them.

`__init__.pyi` lists the names. They are imported on first use: freezing alone needs no Trainer, whose import takes
seconds.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
