"""The run loop: the one place where steps are taken, and the only stateful thing in training."""

import collections
import concurrent.futures
import contextlib
import os
import pathlib
import signal
import threading
from collections.abc import Callable, Generator, Mapping
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jaxtyping import PyTree

from icmljax.training import mesh as mesh_lib
from icmljax.training.checkpoint import Checkpoints
from icmljax.training.metrics import MetricWriter

_PROFILE_AFTER, _PROFILE_STEPS = 9, 6  # steps 10 to 15: compilation and warm-up are over
_BATCHES_AHEAD = 2


class Preempted(Exception):
    """SIGTERM or SIGINT came; everything is saved, and the run can be resumed."""


@runtime_checkable
class Batches(Protocol):
    """What the loop needs of a data iterator; `icmljax.data.batches.BatchIterator` is one."""

    def __next__(self) -> Any:
        """The next batch, rows of this process."""

    def state(self) -> dict[str, Any]:
        """Where the iterator stands, as JSON data."""

    def restore(self, state: dict[str, Any]) -> None:
        """Goes to where it stood."""


def run(
    state: PyTree,
    train_step: Callable[[PyTree, PyTree], tuple[PyTree, dict[str, Any]]],
    batches: Batches,
    *,
    num_steps: int,
    directory: str | os.PathLike,
    identity: Mapping[str, str],
    mesh: jax.sharding.Mesh | None = None,
    evaluate: Callable[[PyTree], Mapping[str, Any]] | None = None,
    log_every: int = 10,
    eval_every: int = 0,
    checkpoint_every: int = 0,
    keep: int = 2,
    best_metric: str | None = None,
    resume: bool = False,
    stop_on_nonfinite: bool = True,
    progress: bool = True,
    description: str = "",
    profile_dir: str | os.PathLike | None = None,
    items_per_step: int | None = None,
) -> tuple[PyTree, dict[str, Any]]:
    """Trains until step ``num_steps``; logs, evaluates, saves; resumes bit-exactly.

    The device is waited for only when something is logged, evaluated or saved; up to then the loss
    of every step stays on the device, and is looked at there in one go.

    Args:
      state: the initial `TrainState` (or a vmapped population of them) placed on its devices; when
        resuming it says which shapes, dtypes and shardings to restore. It may be donated.
      train_step: ``(state, batch) -> (state, metrics)``, jitted; ``metrics["loss"]`` and the others
        are scalars, or 1-D with one entry per member of a population.
      batches: the data iterator; it is run ahead of the steps in a background thread.
      num_steps: the step to stop at, counted from the very start, resumed or not.
      directory: gets ``checkpoints/``, ``metrics.jsonl`` and TensorBoard event files.
      identity: what a checkpoint must agree in to be resumed, for example experiment and arm.
      mesh: where batches go (sharded over "data"); None is the default device.
      evaluate: ``state -> metrics``; their names must differ from those of the training metrics.
      log_every: steps between rows of training metrics; 0 is only at the end. Steps due for an
        evaluation are logged too.
      eval_every: steps between evaluations; 0 is only at the end.
      checkpoint_every: steps between checkpoints; 0 is only at the end and when preempted.
      keep: how many of the latest checkpoints stay.
      best_metric: name of an evaluation metric (lower is better); the best checkpoint stays as
        well. Every step of ``checkpoint_every`` is then evaluated.
      resume: continue from the latest whole checkpoint, or start when there is none.
      stop_on_nonfinite: stop at a loss that is not finite (in any member of a population) and save
        no parameters that are not.
      progress: a progress bar on stderr (process 0).
      description: its label.
      profile_dir: a `jax.profiler` trace of steps 10 to 15 after the start goes there.
      items_per_step: for the progress bar to show items (tokens, images) per second.

    Returns:
      The final state and the metrics of the last evaluation.

    Raises:
      Preempted: a signal came; everything is saved.
      FloatingPointError: the loss is not finite; names the first bad step.
      FileExistsError: there is a run in the directory and ``resume`` is False.
      ValueError: the checkpoint does not fit, or an argument is wrong.
    """
    _validate(num_steps, evaluate, best_metric, log_every, eval_every, checkpoint_every)
    directory = pathlib.Path(directory)

    with contextlib.ExitStack() as stack:  # closes in reverse order, whatever happens
        preempted = stack.enter_context(_preemption())
        checkpoints = Checkpoints(
            directory / "checkpoints", identity=identity, keep=keep, best_metric=best_metric
        )
        stack.callback(checkpoints.close)
        state, start = _start(state, batches, checkpoints, resume)
        if start >= num_steps:
            return state, dict(evaluate(state)) if evaluate else {}

        writer = stack.enter_context(MetricWriter(directory, resume_step=start if resume else None))
        stream = _prefetch(batches, num_steps - start, mesh)
        stack.callback(stream.close)
        bar = stack.enter_context(_progress_bar(progress, description, start, num_steps))
        profiling = stack.enter_context(contextlib.ExitStack())
        profiled = _profiled_steps(start, num_steps) if profile_dir else range(0)
        losses: list[tuple[int, Any]] = []  # of the steps since they were looked at, on the device

        for step in range(start + 1, num_steps + 1):
            batch, data_state = next(stream)
            if step == profiled.start:
                jax.block_until_ready(state)
                profiling.enter_context(jax.profiler.trace(str(profile_dir)))

            state, metrics = train_step(state, batch)
            losses.append((step, metrics["loss"]))

            if step + 1 == profiled.stop:
                jax.block_until_ready(state)
                profiling.close()

            last = step == num_steps
            save = last or _due(step, checkpoint_every)
            look = last or _due(step, eval_every) or (save and best_metric is not None)
            evaluation = {}
            if look or _due(step, log_every):
                losses = _checked(losses, stop_on_nonfinite)
                if evaluate is not None and look:
                    evaluation = dict(evaluate(state))
                writer.write(step, _merged(metrics, evaluation))
                _show(bar, metrics["loss"], items_per_step)

            stop = preempted(step)
            if save or stop:
                losses = _checked(losses, stop_on_nonfinite)
                if stop_on_nonfinite:
                    _check_parameters(state.params, step)
                writer.flush()  # what a checkpoint has seen must be on disk before it
                checkpoints.save(step, state, data_state, evaluation)
            bar.update()
            if stop:
                raise Preempted(f"stopped by a signal after step {step} of {num_steps}; saved")

    return state, evaluation


def _validate(num_steps: int, evaluate: Any, best_metric: str | None, *intervals: int) -> None:
    if num_steps < 1:
        raise ValueError(f"num_steps must be at least 1, got {num_steps}")
    if min(intervals) < 0:
        raise ValueError(
            "log_every, eval_every and checkpoint_every must not be negative, got "
            f"{', '.join(map(str, intervals))}"
        )
    if best_metric is not None and evaluate is None:
        raise ValueError(f"best_metric {best_metric!r} needs an evaluate function")


def _start(
    state: PyTree, batches: Batches, checkpoints: Checkpoints, resume: bool
) -> tuple[PyTree, int]:
    """The state to start from and the number of steps it has taken."""
    if not resume and checkpoints.latest_step() is not None:
        raise FileExistsError(
            f"{checkpoints.directory} holds the checkpoints of a run (step "
            f"{checkpoints.latest_step()}); resume it, or choose another directory"
        )
    restored = checkpoints.restore(state) if resume else None
    if restored is not None:
        state, data_state, step = restored
        batches.restore(data_state)
        return state, step
    # What is restored is never weakly typed: a new state neither, so that both take equal steps.
    state = jax.tree.map(_strongly_typed, state)
    return state, int(np.ravel(jax.device_get(state.step))[0])  # a population goes in step


def _strongly_typed(leaf: jax.Array) -> jax.Array:
    weak = getattr(leaf, "weak_type", False)
    return jax.lax.convert_element_type(leaf, leaf.dtype) if weak else leaf


def _prefetch(
    batches: Batches, count: int, mesh: jax.sharding.Mesh | None
) -> Generator[tuple[PyTree, dict[str, Any]], None, None]:
    """Yields (batch on its devices, state of the iterator after it), made in another thread.

    An error in there is raised here, when the batch that it hit is asked for.
    """

    def fetch() -> tuple[PyTree, dict[str, Any]]:
        try:
            batch = next(batches)
        except StopIteration:
            raise ValueError("the batches ended before the last step") from None
        placed = jax.device_put(batch) if mesh is None else mesh_lib.put_batch(batch, mesh)
        return placed, batches.state()

    worker = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="batches")
    try:
        ahead = collections.deque(worker.submit(fetch) for _ in range(min(_BATCHES_AHEAD, count)))
        for remaining in range(count, 0, -1):
            ready = ahead.popleft().result()
            if remaining > _BATCHES_AHEAD:  # never more than will be used
                ahead.append(worker.submit(fetch))
            yield ready
    finally:
        worker.shutdown(cancel_futures=True)


@contextlib.contextmanager
def _preemption() -> Generator[Callable[[int], bool], None, None]:
    """Turns SIGTERM and SIGINT into a question that the loop asks after every step.

    With one process a handler notes the signal; a second Ctrl-C interrupts as usual. With several
    the coordination service of `jax.distributed` has its own SIGTERM handler and finds the step at
    which all of them stop.
    """
    received = False
    several = jax.process_count() > 1
    before: dict[int, Any] = {}

    def reset(number: int) -> None:
        # None stands for a handler that was not installed from Python and cannot be put back.
        signal.signal(number, before[number] or signal.SIG_DFL)

    def note(number: int, frame: Any) -> None:
        nonlocal received
        received = True
        reset(number)
        if several:
            os.kill(os.getpid(), signal.SIGTERM)

    if threading.current_thread() is threading.main_thread():  # only there it is allowed
        for caught in [signal.SIGINT] if several else [signal.SIGINT, signal.SIGTERM]:
            before[caught] = signal.signal(caught, note)
    try:
        yield multihost_utils.reached_preemption_sync_point if several else lambda step: received
    finally:
        for number in before:
            reset(number)
    if received and not several:
        raise Preempted("stopped by a signal after the last step; saved")


def _checked(losses: list[tuple[int, Any]], stop_on_nonfinite: bool) -> list[tuple[int, Any]]:
    """Waits for the device and looks at the losses; returns the empty list to go on with."""
    for step, loss in jax.device_get(losses) if stop_on_nonfinite else []:
        bad = np.flatnonzero(~np.isfinite(loss))
        if bad.size:
            members = f" in members {bad.tolist()} of the population" if np.ndim(loss) else ""
            raise FloatingPointError(
                f"the loss is {np.ravel(loss)[bad[0]]} at step {step}{members}; the checkpoint "
                "before it is kept. Lower the learning rate, or look for the cause with debug_nans"
            )
    return []


def _check_parameters(params: PyTree, step: int) -> None:
    """A finite loss belongs to the parameters before the step: those after it may be ruined."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    for (path, _), finite in zip(leaves, jax.device_get(_finite(params)), strict=True):
        if not finite:
            raise FloatingPointError(
                f"params{jax.tree_util.keystr(path)} is not finite after step {step}, though the "
                "loss still was; the checkpoint before it is kept. Lower the learning rate, or "
                "look for the cause with debug_nans"
            )


@jax.jit
def _finite(params: PyTree) -> list[jax.Array]:
    return [jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(params)]


def _merged(metrics: Mapping[str, Any], evaluation: Mapping[str, Any]) -> dict[str, Any]:
    both = sorted(metrics.keys() & evaluation.keys())
    if both:
        raise ValueError(f"evaluate returns names that the training metrics have already: {both}")
    return {**jax.device_get(dict(metrics)), **evaluation}


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _profiled_steps(start: int, num_steps: int) -> range:
    """Steps 10 to 15 after the start; the last ones of a shorter run."""
    first = max(start + 1, min(start + 1 + _PROFILE_AFTER, num_steps + 1 - _PROFILE_STEPS))
    return range(first, min(first + _PROFILE_STEPS, num_steps + 1))


def _progress_bar(progress: bool, description: str, start: int, num_steps: int) -> Any:
    try:
        from tqdm import tqdm
    except ImportError as error:
        raise ImportError(
            "the progress bar needs tqdm: pip install 'icmljax[experiments]'"
        ) from error
    return tqdm(
        desc=description or None,
        initial=start,
        total=num_steps,
        unit="step",
        dynamic_ncols=True,
        disable=not progress or jax.process_index() != 0,
    )


def _show(bar: Any, loss: Any, items_per_step: int | None) -> None:
    if bar.disable:
        return
    shown = {"loss": f"{float(np.mean(loss)):.4g}"}
    timing = bar.format_dict
    rate = timing["rate"] or (timing["n"] - timing["initial"]) / max(timing["elapsed"], 1e-9)
    if items_per_step:
        shown["items/s"] = f"{rate * items_per_step:.3g}"
    bar.set_postfix(shown, refresh=False)
