"""One version's weights, rebuilt from a bucket and proven by digest: what a replica does, without an engine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from delta_sync.anchor_files import Tensor, iter_anchor_tensors
from delta_sync.bitmap import Bits
from delta_sync.checkpoint import Checkpoint
from delta_sync.cli.report import many, warn
from delta_sync.context_file import CODECS, decode_against
from delta_sync.delta import apply
from delta_sync.delta_file import DeltaHeader
from delta_sync.digest import digest, state_digest, tensor_key
from delta_sync.dtypes import DType, dtype
from delta_sync.errors import ChainError, DeltaSyncError, FormatError, IntegrityError, NotFoundError
from delta_sync.ledger import AnchorRef, Ledger
from delta_sync.limits import DEFAULT_LIMITS
from delta_sync.manifest import FoldRecord, Manifest, ObjectRef, TensorState
from delta_sync.plan import Plan, Position, Step
from delta_sync.planner import build_plan, downwards
from delta_sync.tensor_delta import TensorDelta

Deltas = list[TensorDelta]
_DAMAGE = (FormatError, IntegrityError, NotFoundError)
_NO_ANCHOR = (
    "`delta-sync materialize --base CKPT`, with the model that the run began with, needs no anchor; "
    "a trainer attaches one in so many versions (anchor_every, 50)"
)
_NO_OTHER = f"no older anchor leads there, so attach a new one; {_NO_ANCHOR}"


def read_delta(
    ledger: Ledger, step: Step, ref: ObjectRef, before: Weights | None = None
) -> tuple[bytes, DeltaHeader, Deltas]:
    """One object of a version or a fold, whose size, sha256, header and tensors are those that its record promises.

    Its bytes, and what they decode to; IntegrityError, FormatError or NotFoundError; ChainError where it decodes only
    against the weights ``before`` and there are none.
    """
    data = ledger.read_object(ref)
    with naming(ref.key):
        header, deltas = decode_against(data, no_base if before is None else before.base, ledger.limits)
    for what in ("run", "version", "base_version"):
        _expect(f"{what} in the header of {ref.key}", getattr(step, what), getattr(header, what))
    _check_codec(step.codec, header.codec, ref.key)
    for delta in deltas:
        state = step.tensors.get(delta.name)
        promised = None if state is None else (state.dtype, state.shape)
        _expect(f"tensor {delta.name!r} in {ref.key}", promised, (delta.dtype.name, delta.shape))
    return data, header, deltas


def _check_codec(promised: str | None, got: str, key: str) -> None:
    """A record names the codec that asks most of a reader; an object that is smaller in another one asks less."""
    if promised not in CODECS or got not in CODECS[: CODECS.index(promised) + 1]:
        expected = f"{promised}, or one that asks less of a reader"
        raise IntegrityError(f"codec in the header of {key}", expected=expected, got=got)


@contextmanager
def naming(name: str, remedy: str = "") -> Iterator[None]:
    """Give errors about bytes the name of where these are, and a remedy where there is none."""
    try:
        yield
    except (FormatError, IntegrityError) as error:
        what = error.what if name in error.what else f"{error.what} in {name}"
        raise type(error)(what, expected=error.expected, got=error.got, remedy=error.remedy or remedy) from None


def read_object_file(path: Path) -> bytes:
    """A delta object's bytes from a local file; IntegrityError for more than a reader may be asked to hold."""
    if (count := path.stat().st_size) > DEFAULT_LIMITS.object_bytes:
        expected = f"at most {DEFAULT_LIMITS.object_bytes} bytes"
        raise IntegrityError(f"size of {path}", expected=expected, got=count)
    return path.read_bytes()


def no_base(name: str, kind: DType, shape: tuple[int, ...]) -> Bits:
    """ChainError: a delta coded against the old bits cannot be read alone."""
    got, remedy = "the delta alone", "inspect FILE --base CKPT; of a run name URI@VERSION instead of the file"
    raise ChainError(f"tensor {name!r}", expected="the bits that it changes", got=got, remedy=remedy)


class Weights:
    """Every tensor's bits, and its state as they give it; ``keep`` false holds the states alone."""

    def __init__(self, tensors: Iterable[Tensor], *, keep: bool = True) -> None:
        self.bits: dict[str, Bits] = {}
        self.states: dict[str, TensorState] = {}
        for name, kind, shape, bits in tensors:
            if keep:
                self.bits[name] = bits.copy()
            self.states[name] = TensorState(kind.name, shape, digest(bits, tensor_key(name)))

    def tensors(self) -> Iterable[Tensor]:
        """(name, dtype, shape, bits ``[n]``) of every tensor, by name."""
        for name in sorted(self.bits):
            state = self.states[name]
            yield name, dtype(state.dtype), state.shape, self.bits[name]

    def base(self, name: str, kind: DType, shape: tuple[int, ...]) -> Bits:
        """A copy of a tensor's flat bits, to decode an object against; IntegrityError if it is another tensor."""
        state = self.states.get(name)
        _expect(f"tensor {name!r} before the delta", (kind.name, shape), state and (state.dtype, state.shape))
        return self.bits[name].reshape(-1).copy()

    def change(self, deltas: Deltas, what: str) -> None:
        """Apply deltas whose outcome no manifest promises; IntegrityError where they are for other tensors."""
        for delta in deltas:
            state = self.states.get(delta.name)
            got = state and (state.dtype, state.shape)
            _expect(f"tensor {delta.name!r} that {what} changes", (delta.dtype.name, delta.shape), got)
            apply(delta, self.bits[delta.name])
        for delta in deltas:
            bits = self.bits[delta.name]
            self.states[delta.name] = TensorState(delta.dtype.name, delta.shape, digest(bits, tensor_key(delta.name)))

    def advance(self, step: Step, objects: Iterable[Deltas]) -> None:
        """Apply a version's objects and prove the outcome; IntegrityError, after which the weights are of no use."""
        if isinstance(step, Manifest) and step.kind == "adapter":  # over these weights, which stay as they are
            self.prove(step)
            return
        for deltas in objects:
            for delta in deltas:
                if delta.name not in self.bits:
                    what = f"tensor {delta.name!r} of version {step.version}"
                    raise IntegrityError(what, expected="a tensor of the version before", got="none of that name")
                apply(delta, self.bits[delta.name])
        for name, state in step.tensors.items():
            if name in self.bits:
                self.states[name] = TensorState(state.dtype, state.shape, digest(self.bits[name], tensor_key(name)))
            _expect(f"digest of {name!r} at version {step.version}", state, self.states.get(name))
        self.prove(step)

    def prove(self, step: Step) -> None:
        """IntegrityError unless these are the weights of that version."""
        _expect(f"state digest at version {step.version}", step.state_digest, state_digest(self.states))


def weights_after(ledger: Ledger, plan: Plan, base: Checkpoint | None = None) -> Weights:
    """The weights at the target of a plan that begins at an anchor or at ``base``, proven; else what damage raises."""
    return _advanced(ledger, plan, _begun(ledger, plan, base))


def rebuild(ledger: Ledger, target: Manifest, base: Checkpoint | None = None) -> tuple[Plan, Weights]:
    """A version's weights, proven, and the plan that led to them; raises what ``weights_after`` and no start raise.

    It begins at the nearest anchor or, if that is given, at the version whose weights are ``base``'s. Where a fold is
    damaged or gone it goes over the deltas that the fold was made of, and from an anchor that is to the one before it,
    as replicas do; of such anchors standard error is told.
    """
    start, left_out, use_folds = None, dict[AnchorRef, DeltaSyncError](), True
    if base is not None:
        base, start = _position(ledger, target, base)
    while True:
        plan = _plan(ledger, target, start, use_folds=use_folds, left_out=left_out)
        try:
            weights = _begun(ledger, plan, base)
        except _DAMAGE as error:
            if plan.anchor is None:
                raise
            left_out[AnchorRef(plan.anchor.version, plan.anchor.epoch)] = error
            continue
        try:
            weights = _advanced(ledger, plan, weights)
        except _DAMAGE:
            if not any(isinstance(step, FoldRecord) for step in plan.deltas):
                raise
            use_folds = False
            continue
        plan = replace(plan, damaged=(*left_out.values(), *plan.damaged))
        for damage in plan.damaged:
            warn(f"an anchor is left out: {damage}")
        return plan, weights


def _begun(ledger: Ledger, plan: Plan, base: Checkpoint | None) -> Weights:
    """What a plan begins with; an anchor is the one that its record describes, or IntegrityError."""
    anchor = plan.anchor
    if anchor is None and base is None:
        raise ChainError(f"plan to version {plan.target.version}", expected="an anchor", got="none")
    if anchor is None:
        return Weights(base or ())
    weights = Weights(iter_anchor_tensors(ledger, anchor))
    for name, state in weights.states.items():
        _expect(f"tensor {name!r} of the anchor of version {anchor.version}", anchor.tensors[name], state)
    return weights


def _advanced(ledger: Ledger, plan: Plan, weights: Weights) -> Weights:
    for step in plan.deltas:
        weights.advance(step, [read_delta(ledger, step, ref, weights)[2] for ref in step.objects])
    weights.prove(plan.target)
    return weights


def _position(ledger: Ledger, target: Manifest, base: Checkpoint) -> tuple[Checkpoint, Position]:
    """The version on the way to ``target`` that has these weights, which are those returned; ChainError."""
    damage = list[DeltaSyncError]()
    found = as_version(base, downwards(ledger, target, damage))
    if found is None:
        raise no_version(base, f"that deltas lead from to version {target.version}", damage)
    return found


def as_version(base: Checkpoint, versions: Iterable[Manifest]) -> tuple[Checkpoint, Position] | None:
    """The first of these versions that has the weights of ``base``, and those of its tensors that the run has; None.

    A checkpoint may hold more than is trained, such as a head that repeats the embedding; servers pass over that too.
    """
    states, seen, every = Weights(base, keep=False).states, list[tuple[str, Position]](), set[frozenset[str]]()
    known = state_digest(states)
    for manifest in versions:
        position = Position(manifest.version, manifest.sha256)
        if manifest.state_digest == known:
            return base, position
        seen.append((manifest.state_digest, position))
        if manifest.kind == "origin":  # which lists all tensors
            every.add(frozenset(manifest.tensors))
    for names in every:
        known = state_digest({name: states[name] for name in names}) if names < states.keys() else ""
        for digest_there, position in seen:
            if digest_there == known:
                extra = sorted(states.keys() - names)
                warn(f"{base.path}: {many(len(extra), 'tensor')} left out that the run has not, as {extra[0]!r}")
                return base.only(names), position
    return None


def no_version(base: Checkpoint, which: str, damage: Sequence[DeltaSyncError] = ()) -> ChainError:
    """That no version ``which`` is meant has the weights of ``base``."""
    known = state_digest(Weights(base, keep=False).states)
    return ChainError(
        f"weights of {base.path}",
        expected=f"those of a version {which}",
        got="; ".join([f"state digest {known[:16]}, which none has", *(error.what for error in damage)]),
        remedy="name the model that the run began with, in the type that is served",
    )


def _plan(
    ledger: Ledger,
    target: Manifest,
    start: Position | None,
    *,
    use_folds: bool,
    left_out: Mapping[AnchorRef, DeltaSyncError],
) -> Plan:
    try:
        return build_plan(ledger, target, start, None, use_folds=use_folds, without=left_out.keys())
    except DeltaSyncError as error:
        for damage in left_out.values():  # says more than that there is no other way
            raise type(damage)(damage.what, expected=damage.expected, got=damage.got, remedy=_NO_OTHER) from None
        if not isinstance(error, ChainError):
            raise
        raise ChainError(
            f"version {target.version} of {ledger.store.uri}",
            expected="an anchor (complete weights) at or below it", got=error.got, remedy=_NO_ANCHOR,
        ) from None  # fmt: skip


def _expect(what: str, expected: object, got: object) -> None:
    if got != expected:
        raise IntegrityError(what, expected=expected, got=got, remedy="`delta-sync verify` names what is damaged")
