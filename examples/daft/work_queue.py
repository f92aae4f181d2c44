"""A work queue whose results decide what is done next: who is free gets the next task.

Where workers take from one queue and put into it what they find, they stand still when it is full
and all want to put; and nobody knows when it is empty for good. Here the queue is a list of the
controller's, which waits for whichever task ends first, and is done when nothing is under way.

    python -m examples.daft.run work_queue --backend ray
"""

from dtensor import daft


class Crawler:
    def links(self, page: int) -> tuple[int, list[int]]:
        """Of a web of 200 pages."""
        return page, [(3 * page + 1) % 200, (page * page + 7) % 200]


def run() -> list[int]:
    free = [daft.spawn(Crawler) for _ in range(3)]
    seen, queue = {0}, [0]
    busy: dict[daft.TaskFuture, daft.ActorHandle] = {}
    while queue or busy:
        while queue and free:
            crawler = free.pop()
            busy[crawler.links(queue.pop())] = crawler
        (done,), _ = daft.wait(list(busy))
        free.append(busy.pop(done))
        _, found = done.get()
        queue += sorted(set(found) - seen)
        seen.update(found)
    return sorted(seen)
