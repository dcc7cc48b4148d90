"""The methods that make a plan, one file each. A new method is a new file."""

from importlib import import_module
from pkgutil import iter_modules

from ...core.extensions import extensions
from .base import DEFAULT_METHOD as DEFAULT_METHOD
from .base import METHODS as METHODS
from .base import Allocation as Allocation
from .base import AnyPlan as AnyPlan
from .base import LayerPlan as LayerPlan
from .base import Option as Option
from .base import PlanSettings as PlanSettings
from .base import Target as Target
from .base import method_title as method_title
from .base import plan_settings as plan_settings
from .base import read_plan_settings as read_plan_settings

for _file in iter_modules(__path__):
    import_module(f"{__name__}.{_file.name}")
extensions("plan_methods")  # whose classes register themselves
