"""Where a worker's memory is while it sleeps: the host's in a file, a device's in pinned memory of the host.

How is in `_system/pages.py` and `offload.py`. What goes and comes is found, and noted, on the lane; it may be copied
elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import attrs

from colocate._system import shared_spill
from colocate._system.mappings import Mapping
from colocate._system.pages import Spill, Written
from colocate.worker.memory_site import Worker
from colocate.worker.moves import Coming, Going
from colocate.worker.offload import Offload, Offloading


class SwapSpace:
    """Takes memory and brings it back.

    Attributes:
        offload: How a device's goes.
    """

    def __init__(self, site: Worker, share: Callable[[], int]) -> None:
        """Args: site: The worker. share: Tells how much of the host's free memory is its own."""
        self._site = site
        self._files: Spill | None = None
        self.offload = Offload(site.boot.device, share)

    def files(self) -> Spill:
        """The file, which is made when it is first needed.

        Raises:
            ValueError: There is no place for one.
        """
        if self._files is None:
            self._files = (shared_spill.take if self._site.in_process else Spill.somewhere)(self._site.spill_dir)
        return self._files

    @property
    def owns(self) -> Callable[[Mapping], bool] | None:
        """Tells whether a mapping is of the file; None before there is one."""
        return None if self._files is None else self._files.owns

    @property
    def pinned(self) -> int:
        """Bytes of the process's own memory that a device copies from and to as its own sleeps and wakes."""
        return self.offload.pinned

    def copy_out(self, going: Going, gives_back: bool = True, again: bool = True) -> Copied:
        """Copy memory to where it goes.

        Args:
            going: The memory.
            gives_back: Whether other processes get that of a device, too.
            again: Whether the copies may serve again when it goes the next time, also those of what trains.

        Raises:
            OSError: There is no room where it would go.
            MemoryError: Nor there.
            ValueError: It can't be put away here.
        """
        written = self.files().write(going.areas) if going.areas else None
        try:
            if going.emptying.areas:
                going.emptying.check(0 if written is None else len(written))
            offloading = self.offload.write(going.storages, going.empty_storages, () if again else going.trained)
        except BaseException:
            if written is not None:
                written.drop()
            raise
        return Copied(self, going, written, offloading, gives_back)

    def forget(self, going: Going) -> None:
        """Free the room on the disk of what was emptied."""
        if going.emptying.areas and self._files is not None:
            with suppress(OSError):  # the room is free later, then
                self._files.forget(going.emptying.areas)

    def bring_back(self, coming: Coming, writes: bool) -> None:
        """Have it be in memory.

        Args:
            coming: What comes, which is held.
            writes: Whether the role is about to train; else its memory is put away again at no cost.

        Raises:
            OSError: It can't be read.
            MemoryError: The device hasn't that much.
        """
        self.offload.bring_back(coming.storages)
        try:
            if self._files is not None:  # else no page has gone there
                self._files.bring_back(coming.areas, coming.written() if writes else ())
        except OSError:
            self.put_back(coming)
            raise

    def put_back(self, coming: Coming) -> None:
        """It has just come, some of it at least, and sleeps still.

        Raises:
            OSError: There is no room where it was.
        """
        self.offload.undo(coming.storages)
        if self._files is not None:
            self._files.write(coming.areas).put_away()

    def have_come(self, coming: Coming, writes: bool) -> None:
        """It is in memory for good: copies that will be out of date the next time aren't kept.

        Args:
            coming: What has come.
            writes: Whether the role is about to train.
        """
        emptied = coming.emptied & coming.storages
        self.offload.let_go(coming.trained | emptied if writes else emptied)

    def close(self) -> None:
        """The worker ends."""
        if self._files is not None:
            if self._site.in_process:
                shared_spill.give_back(self._files)
            else:
                self._files.close()
            self._files = None
        self.offload.close()


@attrs.frozen(eq=False)
class Copied:
    """Memory that was copied to where it goes, and is here, too."""

    _space: SwapSpace
    _going: Going
    _written: Written | None
    _offloading: Offloading
    _gives_back: bool

    def end(self) -> int:
        """Have it be there only. The bytes that have gone. Where that fails, what hasn't gone is dropped."""
        try:
            if self._written is not None:
                self._written.put_away()
            self._going.emptying.empty()
            self._going.are_rewritten()
            self._space.forget(self._going)
            return self._going.size - self._offloading.put_away(self._gives_back)
        except BaseException:
            self.drop()
            raise

    def drop(self) -> None:
        """It stays, and takes no room where it would have gone."""
        if self._written is not None:
            self._written.drop()
