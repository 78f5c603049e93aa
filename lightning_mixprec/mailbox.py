"""A few numbers on their way from the device to the host, while both go on working.

Why it exists: whether a step has to be skipped is known to the device first. Reading it there and then makes the host
wait for the end of backward with nothing queued behind it, and the device then waits for the host. Sent off before the
update is queued and read behind it, the answer costs the device no time: while the host waits, it has the update to do.

What it leaves out: what the numbers mean (:mod:`lightning_mixprec.ledger`).
"""

from __future__ import annotations

import torch
from torch import Tensor


class Mailbox:
    """Holds the last numbers that were sent.

    Example:
        >>> mailbox = Mailbox()
        >>> mailbox.send(torch.tensor([0.0, 1.0]))
        >>> mailbox.receive()
        [0.0, 1.0]
    """

    def __init__(self) -> None:
        self._page = torch.empty(0)  # on the host
        self._arrival: torch.cuda.Event | None = None  # None: it is there

    def send(self, values: Tensor) -> None:
        """Send ``values``, fp32 [n] on any device; does not wait."""
        if values.device.type != "cuda":
            self._page, self._arrival = values.to("cpu"), None
            return
        if self._page.shape != values.shape or not self._page.is_pinned():
            self._page = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        self._page.copy_(values, non_blocking=True)
        self._arrival = torch.cuda.Event()
        self._arrival.record(torch.cuda.current_stream(values.device))

    def receive(self) -> list[float]:
        """What was sent, once it has arrived. Waits for that alone, not for what was queued since."""
        if self._arrival is not None:
            self._arrival.synchronize()
        return self._page.numpy().tolist()
