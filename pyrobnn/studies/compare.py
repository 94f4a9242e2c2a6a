"""The main job: one data set, one model, several methods, each as a DataTree on disk as soon as it is finished."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from xarray import DataTree

from pyrobnn.core.ahead import done_ahead
from pyrobnn.core.checks import Refused, check_count, check_number
from pyrobnn.core.groups import OBSERVED_DATA
from pyrobnn.core.workers import executor_of, outcomes
from pyrobnn.data import Dataset
from pyrobnn.diagnostics.verdict import said
from pyrobnn.inference.fitting.checkpoints import fingerprint
from pyrobnn.inference.method import Method
from pyrobnn.model import BNN
from pyrobnn.posterior import Posterior
from pyrobnn.posterior.storage import attach, check_writable, read, write_atomically
from pyrobnn.studies.study import Study

#: name → method and the arguments of its ``fit``
Prepared = Mapping[str, tuple[Method, dict[str, Any]]]


def run_study(
    study: Study,
    prepared: Prepared,
    out: Path,
    *,
    device: str | None = None,
    seed: int = 0,
    progress: bool = True,
    announce: Callable[[str], None] = lambda text: None,
    attributes: Mapping[str, Mapping[str, str]] | None = None,
    resume: bool = False,
    refine: float | None = None,
    workers: Executor | int | None = None,
) -> Iterator[tuple[str, DataTree | Exception]]:
    """Fit one method after the other; yield name and DataTree once it is written to ``out/<name>.nc``.

    A method that refuses or fails is announced, yields its exception and is skipped: the others go on. What is no
    refusal leaves its traceback in ``out/<name>.error.txt``. After a fit that was interrupted the iteration ends; one
    that can go on (``checkpoint`` of ``fit``) leaves ``out/<name>.checkpoint``.

    Args:
        study: data and model.
        prepared: name → configuration and arguments of its ``fit``.
        out: the folder.
        device, seed, progress: of every ``fit``.
        announce: called with what happens, in a sentence.
        attributes: name → more attributes of its tree; ``"config"`` says what its numbers rest on.
        resume: take what ``out`` holds of the same ``"config"`` and data, finished, and go on from checkpoints.
        refine: seconds, at most, that :meth:`pyrobnn.Posterior.refine` may take to bring each method that makes no
            chains to the posterior: a run of its own, under the method's name and ``_refined``.
        workers: a number of processes, or an executor, that run the methods side by side, without bars; one that dies
            loses its own method alone.

    Raises:
        ValueError: a bad seed, seconds that are not positive, or a folder that cannot be written to; before any fit.
    """
    check_count("seed", seed, minimum=0)
    if refine is not None:
        check_number("refine", refine, above=0)
    check_writable(out)
    marks = _marks(study, prepared, attributes or {})
    finished = _finished_before(out, marks) if resume else {}
    for name, tree in finished.items():
        announce(f"{name}: finished before, taken from {out / name}.nc")
        yield name, tree
    shared_arguments = {
        "seed": seed,
        "device": device,
        "progress": progress and workers is None,
    }
    run = _MethodRun(study, prepared, out, shared_arguments, marks, resume, refine)
    names = [name for name in prepared if name not in finished]
    if workers is not None:
        yield from _run_on(workers, run, names, announce)
        return
    with done_ahead(run.first_steps(names[1:])) as ahead:
        for name in names:
            ahead.wait_for(name)
            for run_name, result in run.results(name, announce):
                yield run_name, result
                if run_name == name and isinstance(result, DataTree) and _is_interrupted(result):
                    return


class _Stepped(Exception):
    """A fit has taken its first step."""


def _stop(step: int, metrics: Mapping[str, Any]) -> None:
    raise _Stepped


@dataclasses.dataclass(frozen=True, eq=False)
class _FirstStep:
    """A fit up to its first step, by when its machine code lies in the folder of torch's compiler."""

    method: Method
    model: BNN
    x: Tensor
    y: Tensor
    arguments: dict[str, Any]
    num_threads: int

    def __call__(self) -> None:
        # code is of so many threads
        torch.set_num_threads(self.num_threads)
        with contextlib.suppress(_Stepped):
            self.method.fit(
                self.model,
                self.x,
                self.y,
                callbacks=[_stop],
                **self.arguments,
            )


@dataclasses.dataclass(frozen=True, eq=False)
class _MethodRun:
    """The run of a method of a study; arguments of :func:`run_study`, and those that every ``fit`` has."""

    study: Study
    prepared: Prepared
    out: Path
    shared_arguments: dict[str, Any]
    marks: Mapping[str, Mapping[str, str]]
    resume: bool
    refine: float | None

    def __call__(self, name: str) -> tuple[list[tuple[str, DataTree | Exception]], list[str]]:
        """The results of a method, and what is to be announced of it."""
        texts: list[str] = []
        return list(self.results(name, texts.append)), texts

    def first_steps(self, names: Sequence[str]) -> dict[str, Callable[[], None]]:
        """The first steps of these methods, for a process that compiles ahead: of those that may compile, on a CPU."""
        steps: dict[str, Callable[[], None]] = {}
        if torch.device(self.shared_arguments["device"] or "cpu").type != "cpu":
            return steps
        for name in names:
            method, arguments = self.prepared[name]
            if getattr(method, "compile", False) is False:
                continue
            arguments = self.shared_arguments | arguments | {"progress": False}
            steps[name] = _FirstStep(
                method,
                self.study.model,
                self.study.train.x,
                self.study.train.y,
                arguments,
                torch.get_num_threads(),
            )
        return steps

    def results(
        self, name: str, announce: Callable[[str], None]
    ) -> Iterator[tuple[str, DataTree | Exception]]:
        """Name and tree, or why there is none, of a method, and of its draws once refined."""
        study = self.study
        out = self.out
        method, arguments = self.prepared[name]
        announce(
            f"{name}: {type(method).__name__} on {study.train.num_data} points of {study.train.name}"
        )
        try:
            checkpoint = _checkpoint(method, out / f"{name}.checkpoint", self.resume)
            posterior = _fitted(
                name, method, study, announce, self.shared_arguments | arguments | checkpoint
            )
            tree = to_tree(posterior, study, name)
            tree.attrs.update(self.marks[name])
            write_atomically(tree, out / f"{name}.nc")
        except Exception as error:
            _announce_failure(name, error, out, announce)
            yield name, error
            return
        interrupted = posterior.meta["interrupted"]
        if checkpoint and not interrupted:
            checkpoint["checkpoint"].unlink(missing_ok=True)
        yield name, tree
        if self.refine is None or interrupted or posterior.meta["kind"] == "chains":
            return
        announce(f"{name}{REFINED}: for {self.refine:g} seconds at most")
        refined = _refined(
            posterior,
            study,
            out / f"{name}{REFINED}.nc",
            self.refine,
            self.shared_arguments["seed"],
            self.marks[name],
            announce,
        )
        yield name + REFINED, refined


def _run_on(
    workers: Executor | int,
    run: _MethodRun,
    names: Sequence[str],
    announce: Callable[[str], None],
) -> Iterator[tuple[str, DataTree | Exception]]:
    """The results of all methods, side by side on the workers, in their order."""
    with executor_of(workers) as executor:
        for name, outcome in outcomes(executor, run, names):
            if isinstance(outcome, Exception):
                _announce_failure(name, outcome, run.out, announce)
                yield name, outcome
                continue
            results, texts = outcome
            for text in texts:
                announce(text)
            yield from results


def _is_interrupted(tree: DataTree) -> bool:
    return bool(json.loads(tree.attrs["meta"])["interrupted"])


#: behind the name of a method whose draws have been brought to the posterior
REFINED = "_refined"


def _refined(
    posterior: Posterior,
    study: Study,
    path: Path,
    seconds: float,
    seed: int,
    marks: Mapping[str, str],
    announce: Callable[[str], None],
) -> DataTree | Exception:
    """The tree, written to ``path``, of a posterior that is brought to its model's, or why there is none."""
    try:
        tree = _refined_tree(
            posterior,
            study,
            path.stem,
            seconds,
            seed,
        )
        tree.attrs.update(marks)
        write_atomically(tree, path)
    except Exception as error:
        _announce_failure(path.stem, error, path.parent, announce)
        return error
    return tree


def _refined_tree(
    posterior: Posterior,
    study: Study,
    name: str,
    seconds: float,
    seed: int,
) -> DataTree:
    """The tree of a posterior that has been refined; its seconds are those of the fit and of the refinement."""
    with warnings.catch_warnings(action="ignore", category=UserWarning):
        refined = posterior.refine(
            seconds,
            x=study.train.x,
            y=study.train.y,
            seed=seed,
        )
    timings = dict(refined.meta["timings"])
    timings["refine"] = timings["fit"]
    timings["fit"] += posterior.meta["timings"]["fit"]
    refined = dataclasses.replace(refined, meta=refined.meta | {"timings": timings})
    return to_tree(refined, study, name)


def _marks(
    study: Study,
    names: Iterable[str],
    attributes: Mapping[str, Mapping[str, str]],
) -> dict[str, dict[str, str]]:
    """Name → the attributes of its tree by which a later run knows what its numbers rest on."""
    digest = {"data_digest": fingerprint({}, {"x": study.train.x, "y": study.train.y})}
    return {name: digest | dict(attributes.get(name, {})) for name in names}


def _finished_before(out: Path, marks: Mapping[str, Mapping[str, str]]) -> dict[str, DataTree]:
    """The trees of the methods that an earlier run has finished."""
    trees = {name: _finished(out / f"{name}.nc", marks[name]) for name in marks}
    return {name: tree for name, tree in trees.items() if tree is not None}


def _finished(file: Path, marks: Mapping[str, str]) -> DataTree | None:
    """What an earlier run has written of a method, if it is of the same configuration and data, and whole."""
    try:
        tree = read(file)
    except (OSError, ValueError):
        return None
    same = all(tree.attrs.get(mark) == marks.get(mark) for mark in ("config", "data_digest"))
    whole = not json.loads(tree.attrs.get("meta", "{}")).get("interrupted", True)
    return tree if same and whole else None


def _announce_failure(
    name: str,
    error: Exception,
    out: Path,
    announce: Callable[[str], None],
) -> None:
    """Say that a method is skipped; what is no refusal leaves its traceback."""
    if isinstance(error, Refused):
        announce(f"{name} is skipped: {error}")
        return
    file = out / f"{name}.error.txt"
    announce(f"{name} failed and is skipped: {said(error)} ({file.name} has the traceback)")
    file.write_text("".join(traceback.format_exception(error)), encoding="utf-8")


def _checkpoint(method: Method, path: Path, resume: bool) -> dict[str, Path]:
    """The argument of ``fit`` with which a method that can be gone on with is; an old file does not start a new run."""
    # Pyro's own sampler writes none
    if "checkpoint" not in method.uses or getattr(method, "engine", "") == "pyro":
        return {}
    if not resume:
        path.unlink(missing_ok=True)
    return {"checkpoint": path}


def _fitted(
    name: str,
    method: Method,
    study: Study,
    announce: Callable[[str], None],
    arguments: dict[str, Any],
) -> Posterior:
    """The posterior; whatever the fit warned of is announced."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        posterior = method.fit(
            study.model,
            study.train.x,
            study.train.y,
            **arguments,
        )
    chosen = [posterior.meta["chosen"]] if "chosen" in posterior.meta else []
    for text in dict.fromkeys([*chosen, *(str(warning.message) for warning in caught)]):
        announce(f"{name}: {text}")
    return posterior


def to_tree(posterior: Posterior, study: Study, label: str) -> DataTree:
    """The DataTree of one method with the held-out points, and with how long prediction took."""
    started = time.perf_counter()
    posterior.predict(study.test.x)
    timings = posterior.meta["timings"] | {"predict": time.perf_counter() - started}
    posterior = dataclasses.replace(posterior, meta=posterior.meta | {"timings": timings})
    train = study.train
    test = (study.test.x, study.test.y)
    f = study.train.true_function
    tree = posterior.to_datatree(
        train.x,
        train.y,
        test=test,
        true_function=f,
        label=label,
    )
    coords = name_coordinates(train, study.settings["num_outputs"])
    for group in tree.children.values():
        present = {dim: labels for dim, labels in coords.items() if dim in group.dims}
        group.dataset = group.to_dataset().assign_coords(present)
    if OBSERVED_DATA in tree.children and study.train.target_unit:
        tree[OBSERVED_DATA]["y"].attrs["units"] = study.train.target_unit
    tree.attrs["data"] = study.train.name
    tree.attrs["target"] = study.train.target_name
    tree.attrs["study"] = json.dumps(study.settings)
    return attach(posterior, tree)


def name_coordinates(dataset: Dataset, num_outputs: int) -> dict[str, list[str]]:
    """The data set's names of features, outputs and classes, as coordinates of a tree."""
    coords: dict[str, list[str]] = {}
    if dataset.feature_names and dataset.x.ndim == 2:
        coords["feature"] = list(dataset.feature_names)
    target = dataset.target_name
    if dataset.task == "regression" and num_outputs == 1:
        coords["output"] = [target]
    elif dataset.task == "regression":
        coords["output"] = [f"{target}[{output}]" for output in range(num_outputs)]
    elif dataset.class_names:
        coords["class"] = list(dataset.class_names)
    return coords
