"""Errors of a trainer's calls, which all ranks raise alike."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch.distributed as dist

from ..comm import Call, Run
from ..training.arguments import raise_problem
from .messages.format import Refusal, RefusalKind
from .messages.refusals import StepRefusedError, error_of_refusals


def agree(
    run: Run,
    fields: Sequence[tuple[str, str]],
    problem: str | TypeError | None,
    call: Call = Call.ARGUMENTS,
) -> None:
    """Raise a problem of any rank on all, or that their fields differ; alone as it is."""
    if dist.is_initialized():
        run.agree(fields, problem, call)
    else:
        raise_problem(problem)


class CallErrors:
    """What the calls of a trainer raise: that the pipeline has failed, or what was refused."""

    def __init__(self, nonfinite: str) -> None:
        self._skips_non_finite = nonfinite == "skip"
        self._failure: str | None = None
        self._raised: set[str] = set()  # refusals, since the pipeline was empty

    def check_health(self) -> None:
        """Raise a RuntimeError if a call has failed, with microbatches in flight."""
        if self._failure is not None:
            raise RuntimeError(
                "the pipeline has failed; create a new PipelineTrainer, and load into it what "
                f"rescue_state_dict() of this one returns: {self._failure}"
            )

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Keep an error that is raised inside, but no refusal of a step."""
        try:
            yield
        except StepRefusedError as refused:
            refusal = refused.refusal
            raise error_of_refusals([refusal]) from refusal.cause
        except BaseException as error:  # an interrupt also leaves microbatches in flight
            self._failure = str(error) or type(error).__name__
            raise

    def raise_refusals(self, refusals: Sequence[Refusal], *, is_empty: bool) -> None:
        """Raise what stages have been refused in this call, with the pipeline in order."""
        refusals = [refusal for refusal in refusals if refusal.kind is not RefusalKind.EMPTY]
        if self._skips_non_finite:
            refusals = [each for each in refusals if each.kind is not RefusalKind.NOT_FINITE]
        refusals = [each for each in refusals if each.text not in self._raised]
        self._raised.update(each.text for each in refusals)
        if is_empty:
            self._raised.clear()
        if refusals:
            raise error_of_refusals(refusals) from refusals[0].cause
