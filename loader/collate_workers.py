"""A user's ``collate_fn``, called in processes of its own.

A batch has samples of all the workers that read, so none of these can collate one; and a worker that read
whole batches would read what the others read, too. So this process hands the samples of each batch on, and as
many processes again as read make the batches. For a batch of 8 x 2048 ids and labels that costs this process
0.8 ms of CPU, whatever the ``collate_fn`` does; to call the smallest one here, with its lists, costs 3.8.

A batch comes back as one pickle, its tensors as numpy arrays: torch would open a file for each tensor, which
takes half as long again.
"""

from __future__ import annotations

import io
import logging
import pickle
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from loader.sample_fields import Collate, Sample, collate_lists
from loader.worker_processes import follow_main_process, iter_with_workers

_NUMPY_TYPES = {torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool, torch.float32, torch.float64}

logger = logging.getLogger(__name__)


class _BatchPickler(pickle.Pickler):
    """Gives the plain tensors of a batch to numpy, which copies them once."""

    def reducer_override(self, item: Any) -> Any:
        is_plain = type(item) is torch.Tensor and item.dtype in _NUMPY_TYPES and item.device.type == "cpu"
        if not is_plain or item.requires_grad or item.layout != torch.strided:
            return NotImplemented
        return torch.from_numpy, (item.numpy(),)


class _Collated(Dataset[Any]):
    """A torch Dataset whose index is the samples of a batch, and whose item is the batch."""

    def __init__(self, collate_fn: Collate, *, has_masks: bool) -> None:
        self._collate_fn = collate_fn
        self._has_masks = has_masks

    def __getitem__(self, samples: list[Sample]) -> bytes:
        target = io.BytesIO()
        batch = collate_lists(self._collate_fn, samples, has_masks=self._has_masks)
        _BatchPickler(target, pickle.HIGHEST_PROTOCOL).dump(batch)
        return target.getvalue()


class _Source(Sampler[Any]):
    """What a torch DataLoader takes for its sampler: the samples of each batch of an epoch."""

    def __init__(self) -> None:
        self.samples: Iterator[list[Sample]] = iter(())

    def __iter__(self) -> Iterator[list[Sample]]:
        return self

    def __next__(self) -> list[Sample]:
        return next(self.samples)


class CollateWorkers:
    """Batches in the order of their samples; ``workers`` are options of torch's DataLoader.

    Up to ``num_workers x prefetch_factor`` batches are ahead of the one that was taken. What ``collate_fn``
    raises is raised where its batch is taken, with the worker's traceback.
    """

    def __init__(self, collate_fn: Collate, *, has_masks: bool = False, **workers: Any) -> None:
        self._source = _Source()
        self._loader: DataLoader[Any] = DataLoader(
            _Collated(collate_fn, has_masks=has_masks),
            sampler=self._source,
            batch_size=None,
            collate_fn=_as_it_is,
            worker_init_fn=follow_main_process,
            **workers,
        )
        self._stream: Any = None

    def batches(self, samples: Iterator[list[Sample]]) -> Iterator[Any]:
        """The batch of each list of samples; ends an earlier iterator of these workers."""
        self._source.samples = samples
        self._stream = iter_with_workers(self._loader)
        try:
            for pickled in self._stream:
                yield pickle.loads(pickled)  # noqa: S301  of our own process
        finally:
            if self._source.samples is samples:
                self._source.samples = iter(())  # else the loader that gives the samples would hold itself

    @property
    def is_broken(self) -> bool:
        """Whether one of the processes ended, as by Ctrl-C."""
        return any(not worker.is_alive() for worker in getattr(self._stream, "_workers", ()))

    def close(self) -> None:
        """End the processes; ``batches`` would start them again."""
        stream, self._stream = self._stream, None
        self._source.samples = iter(())
        self._loader._iterator = None  # noqa: SLF001  torch has no public way to end persistent workers
        if stream is not None:
            stream._shutdown_workers()  # noqa: SLF001


def can_be_sent(collate_fn: Collate, multiprocessing_context: Any) -> bool:
    """Whether worker processes can be given a ``collate_fn``: one that is forked gets anything.

    Says once, at INFO, where it cannot, so that batches are collated in this process.
    """
    context = multiprocessing_context or torch.multiprocessing.get_context()
    method = context if isinstance(context, str) else context.get_start_method()
    if method == "fork":
        return True
    try:
        pickle.dumps(collate_fn)
    except Exception as error:  # whatever its objects raise
        logger.info(
            "collate_fn cannot be pickled (%s), which workers of the method %s need, so this process calls "
            "it; give it a name at the top of a module",
            error,
            method,
        )
        return False
    return True


def _as_it_is(batch: Any) -> Any:
    return batch
