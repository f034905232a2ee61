"""Engines that share experts take a version together: staged by each, proven over all, live at one step or nowhere.

Engine 0 leads: it alone follows the run, and proposes what to take, a *round*. Every engine stages it by itself, tells
the others what its ranks would change, and proves the sum. Then it is *armed*. Where the engines meet (see
compat.lockstep) each says for which round it is armed. Only if all say the same one, each commits there and then; they
tell each other whether it worked, and otherwise undo it in the same place. No forward pass runs in between on any
engine, and nobody is paused. Whoever is late or at fault leaves the others with the weights they had.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from typing import Any, Protocol, TypeVar

from delta_sync.errors import ConflictError, DeltaSyncError, IntegrityError, SyncTimeoutError
from delta_sync.plan import Plan
from vllm_delta_plugin.group import PeerError
from vllm_delta_plugin.mailbox import Mailbox
from vllm_delta_plugin.main_thread import EngineBroken, MainThread, Stopped
from vllm_delta_plugin.proof import Sums
from vllm_delta_plugin.ranks import Reply, kind_of

T = TypeVar("T")
_FIRST_POLL, _LONGEST_POLL = 0.002, 0.05  # seconds
_ATTACH = 600.0  # seconds in which all engines must have attached, once one has
_WAKE = 0.02  # seconds between two attempts to make an idle group meet
_KEPT_ANSWERS = 1000  # to operators' commands, for other engines to read


class Steps(Protocol):
    """Where engines meet; see compat.lockstep.Lockstep."""

    engine: int
    engines: int
    store: Any

    @property
    def step(self) -> tuple[int, int]:
        """Busy period and forward pass."""

    def meet_at(self, function: Callable[[], None]) -> None:
        """Call it at every meeting."""

    def highest(self, values: Sequence[int]) -> list[int]:
        """Each value's maximum over all engines."""

    def wake(self) -> None:
        """Make an idle group meet."""


@dataclass(frozen=True)
class Proposal:
    """What engine 0 wants all to take: a version, its manifest, and the kind of way there (see Plan.start)."""

    round: int
    version: int
    manifest: str
    start: str
    anchor: tuple[int, int] | None  # version and epoch of the one to begin at
    folds: bool
    seconds: float  # until this round is given up
    keeps_refusal: bool  # a newer version stays refused
    newest: int | None  # version that engine 0 has seen, and may not want


@dataclass
class _Armed:
    round: int
    function: Callable[[], Any]
    future: Future[Any]


class ExpertGroup:
    """One engine's side; ``meet`` and ``agree`` run on the engine's thread, the rest on the coordinator's."""

    can_load = False

    def __init__(self, steps: Steps, stop: threading.Event, seconds: float) -> None:
        self._steps, self._stop, self._seconds = steps, stop, seconds
        self.engine, self.engines = steps.engine, steps.engines
        self._box = Mailbox(steps.store)
        self._ranks: list[int] = []  # of each engine
        self._round, self._deadline = 0, 0.0
        self._base: str | None = None
        self._told = False  # the others know, or find by themselves, that this engine won't take this round's version
        self._armed: _Armed | None = None
        self._asked = False
        self._commits = 0  # of rounds, the same on all engines: news of damage counts until the next one only
        self._damages = [0] * self.engines  # read so far, or written
        self._orders: deque[str] = deque()  # whose answers are not burnt yet
        self._heard: dict[str, int] = {}  # of each topic, how many times engine 0 has said something
        self._missing: list[int] = []
        self._committed_at: tuple[int, int] | None = None
        self.keeps_refusal: Callable[[], bool] = lambda: False
        self.newest: Callable[[], int | None] = lambda: None
        steps.meet_at(self.meet)

    @property
    def leads(self) -> bool:
        """Whether this engine decides what is taken."""
        return self.engine == 0

    def shown(self) -> Mapping[str, Any]:
        """See Group. ``step``: busy period and forward pass after which the last commit fell."""
        group = {"engine": self.engine, "engines": self.engines, "round": self._round, "waiting_for": self._missing}
        return {"group": {**group, "step": self._committed_at}}

    # -- start ---------------------------------------------------------------------------------

    def share(self, replies: Sequence[Reply]) -> list[Reply]:
        """See Group."""
        told = [{**r, "regions": _plain(r["regions"])} for r in replies]
        self._box.post(f"attach/{self.engine}", told)
        self._deadline = time.monotonic() + _ATTACH
        each = self._gather("attach", "the weights of each engine")
        self._ranks = [len(told) for told in each]
        return [reply for told in each for reply in told]

    def own(self, sums: Sequence[Sums]) -> Sequence[Sums]:
        """See Group."""
        return sums[self._slice(self.engine)]

    def with_own(self, sums: Sequence[Sums], found: Sequence[Sums]) -> Sequence[Sums]:
        """See Group."""
        return self._with(sums, self.engine, found)

    def _with(self, sums: Sequence[Sums], engine: int, found: Sequence[Sums]) -> Sequence[Sums]:
        whole = list(sums)
        whole[self._slice(engine)] = found
        return whole

    def _slice(self, engine: int) -> slice:
        start = sum(self._ranks[:engine])
        return slice(start, start + self._ranks[engine])

    # -- a round -------------------------------------------------------------------------------

    def open(self, plan: Plan, base: str | None) -> None:
        """See Group; on engine 0 this is the proposal."""
        self._base = base
        if not self.leads:
            return
        # One more than the others know of, and not than here: an earlier try may have failed half way.
        self._begin(self._box.count("round") + 1, self._seconds)
        target, folds = plan.target, any(not hasattr(step, "parent") for step in plan.deltas)
        anchor = None if plan.anchor is None else (plan.anchor.version, plan.anchor.epoch)
        place = (self._round, target.version, target.sha256, plan.start, anchor, folds)
        proposal = Proposal(*place, self._seconds, self.keeps_refusal(), self.newest())
        self._box.post(f"{self._round}/proposal", asdict(proposal))
        self._box.count("round", 1)
        self._tidy(self._round - 2)

    def proposed(self) -> Proposal | None:
        """Of other engines than 0: the newest proposal, once."""
        newest = self._box.count("round")
        if newest <= self._round:
            return None
        letter = self._box.read(f"{newest}/proposal")
        if letter is None:
            return None
        proposal = Proposal(**{**letter, "anchor": letter["anchor"] and tuple(letter["anchor"])})
        self._begin(proposal.round, proposal.seconds)
        return proposal

    def exchange(self, parts: Sequence[Sums] | None) -> Sequence[Sums]:
        """See Group. ConflictError if engines do not stand at the same weights, or differ in what there is to do."""
        told = None if parts is None else [_plain(sums) for sums in parts]
        self._post("ready", {"base": self._base, "parts": told})
        each = self._gather(f"{self._round}/ready", "every engine to have staged the version")
        for engine, answer in enumerate(each):
            if answer["base"] != self._base or (answer["parts"] is None) != (parts is None):
                raise ConflictError(
                    f"engine {engine}", expected=f"live weights {self._base} as here", got=answer["base"],
                    remedy="it is tried again",
                )  # fmt: skip
        return [sums for answer in each for sums in answer["parts"] or ()]

    def fail(self, error: Exception) -> None:
        """See Group."""
        if self._told or isinstance(error, PeerError | ConflictError):  # a conflict is seen by each
            return
        self._told = True
        kind, key = kind_of(error), getattr(error, "object_key", None)
        self._post("failed", {"kind": kind, "error": str(error), "object": key})

    def check(self) -> None:
        """See Group."""
        for engine in set(range(self.engines)) - {self.engine}:
            if (letter := self._box.read(f"{self._round}/failed/{engine}")) is not None:
                raise PeerError(engine, str(letter["kind"]), str(letter["error"]), letter["object"])
        if self._superseded():
            raise self._late("no newer round", "one")

    def commit(self, main: MainThread, function: Callable[[], T]) -> T:
        """See Group."""
        armed = _Armed(self._round, function, Future())
        main.run(lambda: self._arm(armed))
        try:
            self._wait_committed(main, armed)
        except (Stopped, EngineBroken):
            raise
        except Exception as error:  # whatever stood in the way, what is armed would be committed all the same
            if main.run(lambda: self._disarm(armed)):
                self.fail(error)  # not before: it could be committed still
                raise
        finally:
            self._missing = []
        result: T = armed.future.result()
        return result

    def _wait_committed(self, main: MainThread, armed: _Armed) -> None:
        """Return once it has run; SyncTimeoutError when this round is given up."""
        self._post("armed", True)
        deadline = time.monotonic() + self._seconds
        while not self._done(armed.future):
            if self._stop.is_set():
                raise Stopped
            self.check()
            self._missing = [e for e in range(self.engines) if not self._box.has(f"{self._round}/armed/{e}")]
            if time.monotonic() > deadline:
                got = f"engines {self._missing} are not" if self._missing else "no step at which all were"
                raise self._late("every engine to be ready to commit", got)
            if self.leads and not self._missing:
                main.run(self._steps.wake)

    def meet(self) -> None:
        """On the engine's thread, at the same step on all engines: commit if all are armed for the same round."""
        mine = self._armed.round if self._armed else 0
        high, low = self._steps.highest([mine, -mine])
        armed = self._armed
        if armed is None or not mine == high == -low:
            return
        self._armed, self._asked = None, False
        try:
            result = armed.function()
        except EngineBroken as error:
            armed.future.set_exception(error)
            raise
        except Exception as error:  # noqa: BLE001  # handed to the coordinator's thread
            if not self._asked:
                self.agree(False)  # the others wait for it
            armed.future.set_exception(error)
        else:
            self._committed_at, self._commits = self._steps.step, self._commits + 1
            armed.future.set_result(result)

    def agree(self, ok: bool) -> int | None:
        """See Group. EngineBroken if an engine is gone: then nobody knows what the others serve."""
        self._asked = True
        try:
            [failed] = self._steps.highest([0 if ok else self.engine + 1])
        except RuntimeError as error:
            raise EngineBroken(f"delta sync: another engine is gone, half way through a commit: {error}") from error
        return failed - 1 if failed else None

    # -- damage --------------------------------------------------------------------------------

    def report_damage(self, found: Sequence[Sums], error: DeltaSyncError, copies_differ: bool) -> bool:
        """See Group."""
        number = self._damages[self.engine] = self._damages[self.engine] + 1
        letter = {"commits": self._commits, "found": [_plain(sums) for sums in found], "error": str(error)}
        letter["copies_differ"] = copies_differ
        self._box.post(f"damage/{self.engine}/{number}", letter)
        self._box.count(f"damage/{self.engine}", 1)
        return True

    def damage(self, sums: Sequence[Sums]) -> tuple[Sequence[Sums], IntegrityError, bool] | None:
        """See Group. Not of what a commit healed before it was heard of here: it left nothing of what was damaged."""
        for engine in set(range(self.engines)) - {self.engine}:
            for number in range(self._damages[engine] + 1, self._box.count(f"damage/{engine}") + 1):
                letter = self._box.read(f"damage/{engine}/{number}")
                self._damages[engine] = number
                if letter["commits"] == self._commits:
                    error = IntegrityError(f"engine {engine}: {letter['error']}")
                    return self._with(sums, engine, letter["found"]), error, letter["copies_differ"]
        return None

    # -- what engine 0 decides -----------------------------------------------------------------

    def hold(self, version: int | None) -> None:
        """See Group."""
        self._say("hold", {"version": version})

    def refuse(self, refusal: Mapping[str, Any] | None) -> None:
        """See Group."""
        self._say("refusal", {"refusal": refusal})

    def _say(self, topic: str, letter: Mapping[str, Any]) -> None:
        if not self.leads:
            return
        number = self._box.count(topic) + 1  # as in open
        self._box.post(f"{topic}/{number}", letter)
        self._box.count(topic, 1)
        self._box.burn(f"{topic}/{number - 2}")

    def held(self) -> Mapping[str, Any] | None:
        """Of the others: the newest ``version`` that is held, once."""
        return self._hear("hold")

    def refused(self) -> Mapping[str, Any] | None:
        """Of the others: the newest ``refusal``, once."""
        return self._hear("refusal")

    def _hear(self, topic: str) -> Mapping[str, Any] | None:
        newest = self._box.count(topic)
        is_new = newest > self._heard.get(topic, 0)
        letter: Mapping[str, Any] | None = self._box.read(f"{topic}/{newest}") if is_new else None
        if letter is not None:
            self._heard[topic] = newest
        return letter

    def post_when_done(self, future: Future[dict[str, Any]], order: str) -> None:
        """Of engine 0: let the others know how an operator's command, which each of them got too, is answered."""

        def post(done: Future[dict[str, Any]]) -> None:
            answer = done.result()
            self._box.post(f"answer/{order}", {name: answer[name] for name in ("ok", "code", "error")})
            self._orders.append(order)
            if len(self._orders) > _KEPT_ANSWERS:
                self._box.burn(f"answer/{self._orders.popleft()}")

        future.add_done_callback(post)

    def answer(self, order: str) -> Mapping[str, Any] | None:
        """Of the others: the same for the command of this id, once it is there."""
        answer: Mapping[str, Any] | None = self._box.read(f"answer/{order}")
        return answer

    # ------------------------------------------------------------------------------------------

    def _begin(self, number: int, seconds: float) -> None:
        self._round, self._seconds = number, seconds
        self._deadline, self._told = time.monotonic() + seconds, False

    def _post(self, topic: str, letter: Any) -> None:
        if not self._superseded():  # else nobody would read or burn it
            self._box.post(f"{self._round}/{topic}/{self.engine}", letter)

    def _gather(self, topic: str, what: str) -> list[Any]:
        """Every engine's letter of this topic; see ``check`` for what ends it."""
        letters: dict[int, Any] = {}
        pause = _FIRST_POLL
        try:
            while True:
                for engine in set(range(self.engines)) - set(letters):
                    if (letter := self._box.read(f"{topic}/{engine}")) is not None:
                        letters[engine] = letter
                self._missing = sorted(set(range(self.engines)) - set(letters))
                if not self._missing:
                    return [letters[engine] for engine in range(self.engines)]
                if self._stop.is_set():
                    raise Stopped
                self.check()
                if time.monotonic() > self._deadline:
                    raise self._late(what, f"no answer from engines {self._missing}")
                time.sleep(pause)
                pause = min(_LONGEST_POLL, pause * 1.5)
        finally:
            self._missing = []

    def _late(self, what: str, got: str) -> SyncTimeoutError:
        self._told = True  # everybody has a clock
        what_of = f"version in round {self._round} of {self.engines} engines that share experts"
        remedy = "look at those engines' status and log; the old version is served meanwhile"
        return SyncTimeoutError(what_of, expected=f"{what} within {self._seconds:g} s", got=got, remedy=remedy)

    def _superseded(self) -> bool:
        return not self.leads and self._round > 0 and self._box.count("round") > self._round

    def _done(self, future: Future[Any]) -> bool:
        try:
            future.exception(timeout=_WAKE)
        except TimeoutError:
            return False
        return True

    def _arm(self, armed: _Armed) -> None:
        self._armed = armed

    def _disarm(self, armed: _Armed) -> bool:
        """False if it has run; on the engine's thread, so that nothing happens meanwhile."""
        if armed.future.done():
            return False
        self._armed = None
        return True

    def _tidy(self, number: int) -> None:
        if number < 1:
            return
        self._box.burn(f"{number}/proposal")
        for engine in range(self.engines):
            for topic in ("ready", "armed", "failed"):
                self._box.burn(f"{number}/{topic}/{engine}")


def _plain(sums: Sums) -> dict[str, int]:
    return {key: int(value) for key, value in sums.items()}
