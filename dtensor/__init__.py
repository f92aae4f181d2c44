"""dtensor: write a model once, for one device, and place it anywhere.

    mesh = dt.Mesh(tp=2)
    model = dt.parallelize(MLP(), mesh, {"up.weight": dict(tp=dt.Row()), ...})
    step = dt.train_step(model, loss_fn, torch.optim.AdamW(model.parameters()))
    print(step.plan(x, y))                   # every collective and its price, before anything runs
    with dt.launch(mesh, backend="ray"):
        loss = step(x, y)

__init__.pyi lists the public names, each of which is imported at its first use.
"""

import sys

import lazy_loader

from dtensor.provider import provide
from dtensor.torch_bound import warn_of_torch

warn_of_torch()
provide(
    profile_step="dtensor.api.launch.profiling:profiled",
    program_device="dtensor.api.store.session:program_device",
    save_plan="dtensor.api.launch.plan_page:save_plan",
)
del provide, warn_of_torch

__version__ = "0.1.0"
_import, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> object:
    if name in __all__:
        return _import(name)
    text = f"module 'dtensor' has no attribute '{name}'"
    raise AttributeError(text, name=name, obj=sys.modules[__name__])  # "Did you mean: ..."
