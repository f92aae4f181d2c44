"""daft: distributed actors, futures and tasks; and ranks that run programs, used by dtensor.

    with daft.launch(backend="ray"):
        a, b = daft.spawn(ModelA), daft.spawn(ModelB)
        b.execute(a.execute(x)).get()
    with launch_cluster(2) as cluster:
        handle = cluster.load(program)
        results = cluster.run(handle, [{"x": x}, {}]).get()

Packages, each of which imports only earlier ones: `ir` (programs), `verification`, `run` (one
host's part of a program), `cluster` (of ranks), `tasks` (of spawned actors), `ray` (processes).
"""

# pyright: basic
import lazy_loader  # without types

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
