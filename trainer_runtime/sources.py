"""Where the items of an epoch come from, and how they are brought back to their position after a restart.

There are three kinds of sources. A `tr.DataLoader` begins after the committed samples. An object in State has restored
its own position. From any other source the committed items are drawn again and dropped. A wrapper (`tqdm`, `enumerate`,
torch's loader) hides the kind of its source, so a source in State would be restored and then skipped ahead as well.
`State.steps(wrapped, source=stream)` names the source; if it is not named, that is detected before anything is saved.
"""

from __future__ import annotations

import io
import sys
from collections import deque
from contextlib import ExitStack, contextmanager
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar, cast

import torch

from trainer_runtime.checkpoint import warn
from trainer_runtime.dist import is_main
from trainer_runtime.parts import is_stateful_loader
from trainer_runtime.position import ENOUGH_ITEMS
from trainer_runtime.values import is_equal, read_state

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from trainer_runtime.contents import Contents
    from trainer_runtime.data import DataLoader
    from trainer_runtime.position import Position
    from trainer_runtime.values import Stateful

Item = TypeVar("Item")

_END: Any = object()

_NOTHING_YIELDED = b""
"""Fingerprint of a loader of torchdata that has yielded nothing."""

_MOST_INDICES = 64
"""Most indices in an item whose text is noted."""


class Sources:
    """The loaders and streams of a State, and the items of its steps.

    Args:
        contents: the objects and values that State saves.
        pos: the position of the training.
    """

    def __init__(self, contents: Contents, pos: Position) -> None:
        self._contents = contents
        self._pos = pos
        self._loaders = [each for each in contents.of_type(object) if is_own_loader(each)]
        self._fault = ""
        self._moves = 0
        """How often this process has entered another group."""
        self._is_movable = True
        """The items that are drawn now are known in any world."""
        self._has_warned_of_body = False
        self._has_warned_of_no_commit = False
        self._at_body: dict[str, bytes | None] = {}
        """What tells whether a stream was drawn from, as the first body of this process began."""
        self._resumed_items = 0
        """Items of the epoch that were committed when `steps` began."""
        self._at_commit: dict[str, Any] | None = None
        """The state at the first commit of this process, until the next item is drawn."""

    def begin_body(self) -> None:
        """Note where the loaders are as the body of an epoch begins; if the epoch is resumed, return them to there."""
        for loader in self._loaders:
            loader.begin_body(is_resumed=self._pos.items > 0)
        # A resumed loader of torchdata says how much it has yielded only once it has an iterator.
        self._at_body = self._fingerprints() if self._pos.due == self._pos.items == 0 else {}
        forget_drawn()

    @property
    def can_move(self) -> bool:
        """Whether the items can be drawn on by the same objects in another group."""
        return not self.obstacle()

    def obstacle(self) -> str:
        """Return why the items cannot be drawn on by the same objects in another group; empty: they can."""
        if not self._is_movable:
            return "state.steps() was given neither a tr.DataLoader nor range(n)"
        if any(each is not self._pos.loader for each in under_way()):
            return "another tr.DataLoader is iterated beside the one of state.steps()"
        return ""

    def on_move(self) -> None:
        """Begin another iterator, after what is committed: this process has entered another group."""
        self._moves += 1
        self._at_commit = None

    def draw(self, items: Iterable[Item], source: object) -> Iterator[Item]:
        """Yield the items of this epoch that are not committed yet, and count them.

        The iterator is replaced by another one when this process enters another group.

        Args:
            items: the argument of `State.steps`.
            source: the source of the items, if the caller named it, else None.

        Raises:
            ValueError: State does not save `source`.
        """
        named = self._require_saved(items if source is None else source, is_named=source is not None)
        self._is_movable = (is_own_loader(named) and items is named) or _is_plain_range(items)
        before = self._fingerprints() if self._pos.due == 0 else {}
        self._resumed_items = self._pos.items
        self._end_body(items, named, before)
        moves = self._moves
        yield from self._draw_in_group(items, named, before)
        while self._moves != moves:
            moves = self._moves
            yield from self._draw_in_group(items, named, {}, has_moved=True)

    def _draw_in_group(
        self, items: Iterable[Item], named: object | None, before: dict[str, bytes | None], *, has_moved: bool = False
    ) -> Iterator[Item]:
        pos, epoch, moves = self._pos, self._pos.epoch, self._moves
        places = {loader: loader.state_dict() for loader in self._loaders} if named is None and pos.items else {}
        if is_own_loader(named):
            pos.loader = named
            beginning = _begun_within({named: epoch}, pos.samples)
        else:  # the items may come from one of these loaders through a wrapper
            # One that a chain begins late counts its own epochs: there the saved number holds.
            own = {each: place["epoch"] for each, place in places.items() if place["samples"]}
            beginning = _begun_within({each: own.get(each, epoch) for each in self._loaders}, 0)
        with beginning as begun:
            self._match_workers(items)
            iterator = iter(items)
            if named is None and pos.items:
                own_place = {each: place for each, place in places.items() if place["samples"]}
                _drop(iterator, pos, type(items).__name__, own_place if pos.is_resized else {})
                _warn_of_other_place(places)
            if pos.items:
                self._return_to_committed(has_moved=has_moved)
            pos.drawn = pos.items
            item = next(iterator, _END)
        pos.beside = tuple(each for each in self._loaders if each is not named and each not in begun)
        if item is not _END:
            self._fault = self._find_fault(before, named, items)
        while item is not _END:
            pos.drawn += 1
            pos.item = _name_of(item)
            yield item
            if self._moves != moves:
                return
            if self._at_commit is not None:
                self._check_after_commit(self._at_commit)
            item = next(iterator, _END)
        pos.is_drawn_out = True
        if pos.drawn and not pos.items and not self._has_warned_of_no_commit:
            self._has_warned_of_no_commit = True
            if is_main():
                warn(
                    f"{pos.drawn} items were drawn from state.steps(), and none was committed: call state.commit() "
                    "after each step of the optimizer, or nothing is saved and a restart begins anew"
                )

    def _match_workers(self, items: object) -> None:
        """Let a torch loader with persistent workers draw what it drew as the items of this epoch began before.

        Such a loader draws a seed for its workers when it starts them, before its order, and not again. In a later
        epoch than the first a new process would draw that seed too, and then another order.
        """
        if not _keeps_workers(items):
            return
        pos = self._pos
        have_begun = getattr(items, "_iterator", None) is not None
        if pos.had_workers and not have_begun:
            with self._contents.parts.same_random_states():
                iter(items)  # starts the workers
        pos.had_workers, pos.has_workers = pos.had_workers or have_begun, True

    def _end_body(self, items: object, named: object | None, streams: dict[str, bytes | None]) -> None:
        """Note which loaders the body has drawn from; print a line, once, where a restart would draw other batches."""
        others = [each for each in self._loaders if each is not named]
        for loader in others:
            loader.end_body(is_resumed=self._pos.items > 0)
        if self._has_warned_of_body or not is_main():
            return
        warning = self._warning_of_body(items, others)
        if not warning and named is None and _is_list(items):
            warning = self._warning_of_streams(streams)
        if warning:
            self._has_warned_of_body = True
            warn(warning)

    def _warning_of_streams(self, now: dict[str, bytes | None]) -> str:
        """Return what to print about streams that the body has taken the items of a list from; empty: nothing."""
        for name, was in self._at_body.items():
            if None not in {was, now.get(name)} and now[name] not in {was, _NOTHING_YIELDED}:
                return (
                    f"items of State's {name!r} were taken in the body of an epoch, and state.steps() was given a "
                    "list: after a restart within the epoch, the body takes the items that come next instead of these. "
                    "Give the stream itself to state.steps()"
                )
        return ""

    def _warning_of_body(self, items: object, others: list[DataLoader]) -> str:
        """Return what to print about the batches that the body has drawn before its steps; empty: nothing.

        Args:
            items: the argument of `State.steps`.
            others: the loaders in State that are not the source of the items by name.
        """
        kind, is_list = type(items).__name__, _is_list(items)
        if self._pos.items:
            if (
                is_list
                and self._pos.is_resized
                and any(each.returns_in_body and each.varies_with_world for each in others)
            ):
                return (
                    f"state.steps() was given a {kind}, and the number of ranks has changed: an item has another "
                    "number of samples now, so some are repeated or left out. Give the loader itself to state.steps()"
                )
            return ""
        drawn = drawn_from()
        for loader in drawn.intersection(others):
            if loader.is_within_epoch:
                return (
                    f"batches of the DataLoader of {type(loader.dataset).__name__} were taken before state.steps() by "
                    "an iterator that is still in use: after a restart the epoch's body would take the batches that "
                    "come next, and its steps would leave them out. Take batches within the loop over state.steps()"
                )
        for loader in drawn if is_list else ():
            if loader.is_shuffled and not self._contents.holds(loader):
                return (
                    f"state.steps() was given a {kind}, made after batches were taken from a DataLoader of "
                    f"{type(loader.dataset).__name__} that State does not save: after a restart that loader begins "
                    "with the order of epoch 0 again. Give it to State if the items come from it"
                )
        return ""

    def check(self) -> None:
        """Check that every source that is drawn from will continue at its position after a restart.

        Raises:
            RuntimeError: something would be repeated or left out; the message says what to do.
        """
        if self._fault:
            raise RuntimeError(self._fault)
        for loader in under_way():
            if loader is not self._pos.loader and loader not in self._loaders:
                raise RuntimeError(
                    f"a DataLoader of {type(loader.dataset).__name__} is being drawn from, and State does not save it: "
                    "after a restart it would begin anew; give it to State"
                )

    def note_commit(self) -> None:
        """Note the state at a commit, to see whether the script still changes it before it draws the next item."""
        self._warn_of_items_left_out_twice()
        if self._pos.drawn:
            self._at_commit = {**self._contents.copy_light(), **self._contents.versions()}

    def _warn_of_items_left_out_twice(self) -> None:
        """Print a line if a resumed process has passed over as many items as were committed, before its first commit.

        That is what `if i < state.step: continue` does, which is right only if the items begin anew.
        """
        done, taken = self._resumed_items, self._pos.drawn - self._resumed_items
        is_suspect = done >= ENOUGH_ITEMS and taken == done + 1
        if not self._pos.drawn:
            is_suspect = any(loader.has_passed_over_as_many_as_committed for loader in self._loaders)
        if is_suspect and is_main():
            warn(
                "before the first commit after a restart, as many items were taken as this epoch had committed, and "
                "one more. State continues after the committed items by itself: a script that passes over items by "
                "state.step or by a count of its own leaves out others. Remove that from the script"
            )

    def note_save(self) -> None:
        """Note that what was changed since the last commit is saved."""
        self._at_commit = None

    def _check_after_commit(self, noted: dict[str, Any]) -> None:
        """Print a line where the script changes the state between a commit and the next item."""
        self._at_commit = None
        now = {**self._contents.read_light(), **self._contents.versions()}
        changed = [name for name, was in noted.items() if not is_equal(was, now[name])]
        if changed and is_main():
            warn(
                f"State's {', '.join(changed)} changed between commit() and the next item: a restart at that commit "
                "leaves the change out, because the code after it does not run again. Change it before commit(), or "
                "call state.save() after it"
            )

    def check_closed(self) -> None:
        """Check that the beginning of the next epoch is known for each loader that is drawn from beside `steps`.

        Raises:
            RuntimeError: a loader is within an epoch, in an iterator of the script's own.
        """
        for loader in self._loaders:
            if loader is not self._pos.loader and loader.is_within_epoch and not loader.is_endless:
                raise RuntimeError(
                    f"save() closes this epoch, but an iterator of the DataLoader of {type(loader.dataset).__name__} "
                    "is within an epoch: it is unknown whether the next epoch continues there or begins anew. Draw "
                    "from loader.endless() to continue, or delete the iterator (del) before save() to begin anew"
                )

    def _return_to_committed(self, *, has_moved: bool) -> None:
        """Undo what was done to the state since the commit that was restored.

        Args:
            has_moved: it was done by the code after `commit`, in which this process has entered another group; else by
                the epoch's body, which has begun again.
        """
        changed = ", ".join(self._contents.return_to_committed())
        if changed and has_moved and is_main():
            warn(
                f"State's {changed} changed between commit() and the next item, as the group changed: the change is "
                "left out, because that code runs only on nodes that stay. Change it before commit()"
            )
        elif changed and is_main():
            warn(
                f"the body of epoch {self._pos.epoch} changed State's {changed} before state.steps(), as it had done "
                "before the restart; the committed state is kept"
            )
        self._contents.parts.restore_random_states()

    def _require_saved(self, source: object, *, is_named: bool) -> object | None:
        """Return the source if it resumes by itself, else None."""
        if self._contents.holds(source) or (is_own_loader(source) and not is_named):
            return source
        if is_named:
            raise ValueError(
                f"wanted a source that State saves, got a {type(source).__name__} that it does not; give it to State, "
                "as tr.PerRank(...) if it differs from rank to rank, or leave source out"
            )
        return None

    def _fingerprints(self) -> dict[str, bytes | None]:
        return {name: _fingerprint(thing) for name, thing in self._contents.streams().items()}

    def _find_fault(self, before: dict[str, bytes | None], named: object | None, items: object) -> str:
        """Return an error message about the source of the first item; empty if nothing is wrong."""
        if is_own_loader(named) and _is_list(items):
            return (
                f"state.steps() was given a {type(items).__name__} and source=: after a restart the committed items "
                "would come again. source= is for what draws from it item by item; leave it out"
            )
        streams, after = self._contents.streams(), self._fingerprints() if before else {}
        moved = [name for name, value in after.items() if None not in {value, before[name]} and value != before[name]]
        if named is None and moved:
            return (
                f"state.steps() was given a {type(items).__name__} whose items come from State's {moved[0]!r}: after a "
                "restart that would continue by itself, and committed items would be dropped from it as well. Write "
                f"state.steps(..., source=<what State has as {moved[0]!r}>)"
            )
        still = [name for name, value in after.items() if value is not None and value == before[name]]
        if any(streams[name] is named for name in still):
            return (
                f"an item was drawn from State's {still[0]!r}, and its state_dict() is the same as before: after a "
                "restart it would yield that item again. Count an item before it is yielded"
            )
        return ""


def _keeps_workers(items: object) -> TypeGuard[Any]:
    """Return whether this is a torch loader whose worker processes outlive an epoch."""
    return isinstance(items, torch.utils.data.DataLoader) and items.persistent_workers and items.num_workers > 0


def _is_list(items: object) -> bool:
    """Return whether the items were all made before `State.steps`."""
    return isinstance(items, list | tuple | deque)


def _is_plain_range(items: object) -> bool:
    """Return whether these are the numbers from 0 on, which do not depend on a rank."""
    return isinstance(items, range) and items.start == 0 and items.step == 1


def _drop(iterator: Iterator[object], pos: Position, kind: str, places: dict[DataLoader, dict[str, Any]]) -> None:
    """Draw and drop the committed items.

    Args:
        iterator: the items.
        pos: the position, whose number of items becomes that of this world.
        kind: name of the items' type, for messages.
        places: in a world of another size, where an item has another number of samples: the saved positions of the
            loaders that the items may come from. If one does, items are dropped until it has arrived there.
    """
    dropped, last = 0, None
    while not _have_all_dropped(places, dropped, pos.items):
        last = next(iterator, _END)
        if last is _END:
            break
        dropped += 1
    if _have_begun(places):
        pos.items = dropped
    if not is_main():
        return
    if dropped < pos.items:
        warn(
            f"state.steps() was given a {kind} of {dropped} items in an epoch of which {pos.items} are committed, so "
            "the epoch ends here: the source has become shorter, or its length depends on the number of ranks, which a "
            "tr.DataLoader allows"
        )
    elif "" not in (name := _name_of(last), pos.item) and name != pos.item:
        warn(
            f"item {pos.items} of epoch {pos.epoch} was {pos.item} when it was committed, and is {name} now: the "
            "source has another order than before the restart, so some items are left out and others come twice. Let "
            "the order depend only on a seed and the epoch"
        )


def _have_begun(places: dict[DataLoader, dict[str, Any]]) -> bool:
    """Return whether the items come from one of these loaders."""
    return any(loader.is_within_epoch for loader in places)


def _have_all_dropped(places: dict[DataLoader, dict[str, Any]], dropped: int, items: int) -> bool:
    """Return whether the loaders have yielded the last batch of their last committed step; else count the items."""
    if not _have_begun(places):
        return dropped == items
    begun = [(loader, place["samples"]) for loader, place in places.items() if loader.is_within_epoch]
    return all(loader.samples >= samples and loader.ends_step for loader, samples in begun)


def _name_of(item: object) -> str:
    """Return a text that tells a plain item, an index for instance, from others; empty for any other item."""
    if type(item) in {int, str}:
        return f"{item!r:.64}"
    if isinstance(item, list | tuple) and len(item) <= _MOST_INDICES and all(type(each) is int for each in item):
        return repr(item)
    return ""


def _warn_of_other_place(places: dict[DataLoader, dict[str, Any]]) -> None:
    """Print a line where a loader behind a wrapper is not at its saved position, as in a world of another size."""
    for loader, place in places.items():
        epoch, samples = place["epoch"], place["samples"]
        if loader.is_within_epoch and loader.state_dict()["epoch"] == epoch and loader.samples != samples and is_main():
            what = "left out" if loader.samples > samples else "repeated"
            warn(
                f"the DataLoader of {type(loader.dataset).__name__} is at sample {loader.samples} of epoch {epoch}, "
                f"{samples} were committed: the samples between are {what}. An item has another number of "
                "samples in this world, or an iterator outlives the epoch. Give the loader itself to state.steps()"
            )


def is_own_loader(thing: object) -> TypeGuard[DataLoader]:
    """Return whether `thing` is a `tr.DataLoader`."""
    module = sys.modules.get("trainer_runtime.data")  # not imported: nothing can be one
    return module is not None and isinstance(thing, module.DataLoader)


def drawn_from() -> set[DataLoader]:
    """Return the `tr.DataLoader`s of this process that have yielded a batch since `forget_drawn`."""
    module = sys.modules.get("trainer_runtime.data")
    return set() if module is None else cast("set[DataLoader]", set(module.DataLoader.drawn_from))


def forget_drawn() -> None:
    """Let `drawn_from` return only loaders that yield a batch from now on."""
    module = sys.modules.get("trainer_runtime.data")
    if module is not None:
        module.DataLoader.drawn_from.clear()


def under_way() -> list[DataLoader]:
    """Return the `tr.DataLoader`s of this process that are within an epoch."""
    module = sys.modules.get("trainer_runtime.data")
    return [] if module is None else cast("list[DataLoader]", list(module.DataLoader.under_way))


@contextmanager
def _begun_within(epochs: dict[DataLoader, int], done: int) -> Iterator[list[DataLoader]]:
    """Make the loaders that begin within the block begin after `done` samples of their epoch; others are unchanged.

    Yields:
        A list that contains, at the end, the loaders that began.
    """
    begun: list[DataLoader] = []
    with ExitStack() as stack:
        for loader, epoch in epochs.items():
            stack.enter_context(loader.beginning_at(epoch, done, begun))
        yield begun


def _fingerprint(stream: Stateful) -> bytes | None:
    """Return a value that changes as items are drawn; None if there is none.

    For torchdata's loader it is not its state: reading that before the first item creates another iterator.
    """
    if is_stateful_loader(stream):
        iterator = getattr(stream, "_iterator", None)
        number = getattr(iterator, "_num_yielded", 0)
        return f"{id(iterator)} {number}".encode() if number else _NOTHING_YIELDED
    packet = io.BytesIO()
    try:
        torch.save(read_state(stream), packet)
    except Exception:  # noqa: BLE001 - a script's own object may raise anything; the first commit reports it
        return None
    return blake2b(packet.getvalue(), digest_size=16).digest()
