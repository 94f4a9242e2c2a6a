"""Jobs on the workers of an executor, of which one that dies loses its own job alone."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from threading import BoundedSemaphore, Thread
from typing import ParamSpec, TypeVar, cast

from pyrobnn.core.checks import check_count, check_type

Job = TypeVar("Job")
Outcome = TypeVar("Outcome")
_Arguments = ParamSpec("_Arguments")


class Processes(Executor):
    """Processes of this machine, each of which does one job: one that dies takes no other job along.

    Args:
        num: of processes at a time. They are started afresh, and share the cores that the program may use.
    """

    def __init__(self, num: int) -> None:
        self._free = BoundedSemaphore(num)
        self._threads_each = max(1, num_cores() // num)
        self._waiting: list[Thread] = []

    def submit(
        self,
        fn: Callable[_Arguments, Outcome],
        /,
        *args: _Arguments.args,
        **kwargs: _Arguments.kwargs,
    ) -> Future[Outcome]:
        future: Future[Outcome] = Future()
        call = functools.partial(fn, *args, **kwargs)
        # a daemon: a program that is interrupted does not wait for jobs
        thread = Thread(
            target=self._run,
            args=(future, call),
            daemon=True,
        )
        self._waiting.append(thread)
        thread.start()
        return future

    def _run(self, future: Future[Outcome], call: Callable[[], Outcome]) -> None:
        with self._free:
            if not future.set_running_or_notify_cancel():
                return
            try:
                with ProcessPoolExecutor(
                    1,
                    mp_context=get_context("spawn"),
                    initializer=_begin_worker,
                    initargs=(self._threads_each,),
                ) as process:
                    future.set_result(process.submit(call).result())
            except BaseException as error:  # the caller is to have it
                future.set_exception(error)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        for thread in self._waiting if wait else ():
            thread.join()


def num_cores() -> int:
    """Cores that this program may use; one where the system does not say."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1


def _begin_worker(num_threads: int) -> None:
    import torch

    torch.set_num_threads(num_threads)


def executor_of(workers: Executor | int) -> contextlib.AbstractContextManager[Executor]:
    """The executor; of a number so many processes, which end with the context.

    Raises:
        TypeError, ValueError: naming ``workers``.
    """
    if isinstance(workers, int) and not isinstance(workers, bool):
        check_count("workers", workers)
        return Processes(workers)
    words = (
        "an executor, such as concurrent.futures.ThreadPoolExecutor(4), or a number of processes"
    )
    if not callable(getattr(workers, "submit", None)):
        check_type("workers", workers, Executor, words)
    return contextlib.nullcontext(cast(Executor, workers))


def outcomes(
    executor: Executor,
    function: Callable[[Job], Outcome],
    jobs: Sequence[Job],
) -> Iterator[tuple[Job, Outcome | Exception]]:
    """Each job, in their order, with what the function gives of it, or the error that it ended with."""
    submitted: list[Future[Outcome] | Exception] = []
    for job in jobs:
        try:
            submitted.append(executor.submit(function, job))
        except BrokenExecutor as error:  # by a job before
            submitted.append(error)
    for job, future in zip(jobs, submitted, strict=True):
        if isinstance(future, Exception):
            yield job, future
            continue
        try:
            yield job, future.result()
        except Exception as error:
            yield job, error


def said(error: BaseException) -> str:
    """Why a job was lost, in words."""
    if isinstance(error, BrokenProcessPool):
        return "its process died"
    line = str(error).strip().split("\n")[0]
    return f"{type(error).__name__}: {line}" if line else type(error).__name__
