"""daft: distributed actors, futures and tasks. Knows nothing of sharding; useful alone.

    with daft.launch(backend="ray"):
        a, b = daft.spawn(ModelA), daft.spawn(ModelB)
        b.execute(a.execute(x)).get()

Below that, ranks that run programs, which the rest of dtensor stands on:

    with launch_cluster(2) as cluster:
        handle = cluster.load(program)
        results = cluster.run(handle, [{"x": x}, {}]).get()

`ir/program.py` says what a program is, `verification/verifier.py` what is refused,
`cluster/cluster.py` what runs it. Rooms, each of which imports only those before it: `ir`,
`verification`, `run` (one host's part of a program), `cluster` (of ranks), `tasks` (of spawned
actors), `ray` (both, in processes).
"""

# pyright: basic
import lazy_loader  # without types

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
