"""Strategies that Lightning has, with what a recipe knows about them filled in.

It leaves out which layer goes into which shard: `lightning_mixprec.sharding`, called in
`DiffusionModule.configure_model`.
"""

from __future__ import annotations

from datetime import timedelta

from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.constants import default_pg_timeout


class FSDP2(ModelParallelStrategy):
    """Fully sharded data parallelism over all processes, however many there are.

    Lightning's own default shards over nodes alone and expects tensor parallelism inside of them. A checkpoint is one
    file, assembled on rank 0, so that runs on any number of processes and `recipes.sample` can read it.

    Args:
        process_group_backend: By default nccl on GPUs and gloo on CPUs.
        timeout: Of collectives.
    """

    def __init__(
        self, process_group_backend: str | None = None, timeout: timedelta | None = default_pg_timeout
    ) -> None:
        super().__init__(
            tensor_parallel_size=1,
            save_distributed_checkpoint=False,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )

    def setup_environment(self) -> None:
        """Count the processes, then set up as Lightning does."""
        self._data_parallel_size = self.num_nodes * self.num_processes
        super().setup_environment()
