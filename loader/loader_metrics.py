"""What a loader has delivered, and what it cost its consumer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(kw_only=True)
class LoaderMetrics:
    """Counts since the loader was made, or since ``reset``; of this rank alone. 2 us a batch."""

    num_batches: int = 0
    num_tokens: int = 0  # without padding
    num_padding: int = 0
    num_cut_tokens: int = 0  # left out behind max_length; counted when their run arrives
    wait_s: float = 0.0  # the consumer waited for workers; without workers: read and decoded itself

    @property
    def padding_share(self) -> float:
        """Padding of all that was delivered, 0 to 1."""
        return self.num_padding / max(self.num_tokens + self.num_padding, 1)

    def reset(self) -> None:
        """Count from 0 again, as for each logging interval."""
        self.__init__()  # type: ignore[misc]
