"""What torch cannot do with a net, as a sentence with the remedy in the place of its own message and Pyro's dump."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import nn

from pyrobnn.core.checks import Refused
from pyrobnn.model import BNN
from pyrobnn.model.bnn import words_looked_up
from pyrobnn.model.density import Program

#: where Pyro's list of the sites and their shapes begins, in an error that a program has raised
_DUMP = re.compile(r"\n\s*Trace Shapes:")
#: what Pyro says of a plate of another size than the values or the distribution of a site inside
_PLATE = re.compile(
    r"Shape mismatch inside plate\('(?P<plate>.+)'\) at site (?P<site>.+) dim (?P<dim>-\d+), "
    r"(?P<rows>\d+) vs (?P<length>\d+)"
)


def _any_net(net: nn.Module) -> bool:
    return True


def _recurs(net: nn.Module) -> bool:
    return any(isinstance(module, nn.RNNBase) for module in net.modules())


def _renormalises(net: nn.Module) -> bool:
    embeddings = (nn.Embedding, nn.EmbeddingBag)
    return any(
        isinstance(module, embeddings) and module.max_norm is not None for module in net.modules()
    )


@dataclass(frozen=True)
class Known:
    """A known error of torch: ``pattern`` in its message, of a net that ``concerns``; in words ``sentence``."""

    pattern: str
    sentence: str
    concerns: Callable[[nn.Module], bool] = _any_net


KNOWN = (
    Known(
        r"saved tensor hooks",
        "the net uses torch.utils.checkpoint, which torch's functional derivatives do not support: call the layers "
        "directly; a smaller batch_size saves memory too",
    ),
    Known(
        r"setup_context|autograd\.Function",
        "the net uses an autograd.Function that torch's functional derivatives cannot follow (torch.utils.checkpoint "
        "with use_reentrant=True is one): give it setup_context and generate_vmap_rule = True, or write it with "
        "operations of torch",
    ),
    Known(
        r"in[- ]?place|is a view|modified inplace",
        "the net has an nn.Embedding with max_norm, which rewrites its weights in every pass: leave max_norm out, or "
        "scale the vectors in forward, e * (max_norm / e.norm(dim=-1, keepdim=True)).clamp(max=1)",
        _renormalises,
    ),
    Known(
        r"data pointer|doesn't have storage|aten::(gru|lstm|rnn_\w+)\.data",
        "the net packs sequences (pack_padded_sequence), which torch's functional derivatives cannot follow: give the "
        "recurrent layer the padded tensor, and take the output at each row's last step with gather",
        _recurs,
    ),
    Known(
        r"data pointer|doesn't have storage|call numpy\(\)|__array__|to a numpy array",
        "the forward of the net leaves torch (NumPy, or another library's arrays), so it has no derivatives and "
        "cannot run for many points at once: compute with operations of torch",
    ),
    Known(
        r"requires_grad_\(\)",
        "the forward of the net takes a gradient by autograd (x.requires_grad_(), torch.autograd.grad), which cannot "
        "lie inside torch's functional derivatives: take it by torch.func.grad, jacrev or vjp",
    ),
    Known(
        r"accessing `?data`? under",
        "the forward of the net reads or writes .data of a tensor, which torch's functional derivatives cannot follow: "
        "take the tensor itself, or tensor.detach()",
    ),
    Known(
        r"more than 1 value per channel",
        "a batch of one row has no batch statistics for the net's batch-norm layers: choose a batch_size that leaves "
        "no single row (drop_last=True of a DataLoader), or call net.eval() before building the BNN",
    ),
    Known(
        r"not implemented for 'BFloat16'|unsupported ScalarType BFloat16",
        "the net is in bfloat16, for which torch lacks an operation of this fit: net.float(), with torch.autocast in "
        "its forward where that is faster, or a method without matrices, such as MAP, DeepEnsemble or SWAG",
    ),
)


@contextlib.contextmanager
def explained(model: BNN | Program) -> Iterator[None]:
    """Inside, an error of torch's about a net is raised as a sentence: Refused where it is known.

    Raises:
        Refused: with the remedy.
        ValueError: a plate of a program has another size than a site inside, or the net looks up a number that is not
            there; with the remedy.
        RuntimeError: another error of torch's while the net runs, without Pyro's list of sites.
    """
    try:
        yield
    except (RuntimeError, ValueError, IndexError) as error:
        message = str(error)
        if isinstance(model, BNN) and "index out of range" in message:
            raise ValueError(
                f"the net looks up a number in 'x' that its embedding has not{words_looked_up(model.net)}"
            ) from error
        mismatch = _PLATE.search(message)
        # a refusal that quotes Pyro says more: which guide, at how many rows
        if mismatch is not None and not isinstance(error, Refused):
            raise ValueError(_plate_of_another_size(mismatch)) from error
        if not isinstance(model, BNN):
            raise
        for known in KNOWN:
            if re.search(known.pattern, message) and known.concerns(model.net):
                raise Refused(known.sentence) from error
        begin = _DUMP.search(message)
        if begin is None or type(error) is not RuntimeError:
            raise
        raise RuntimeError(
            f"torch cannot run the net in this fit: {message[: begin.start()].strip()}"
        ) from error


def _plate_of_another_size(mismatch: re.Match[str]) -> str:
    """The sentence in the place of Pyro's about a plate and a site inside."""
    plate = mismatch["plate"]
    return (
        f"shape mismatch: the plate {plate!r} has {mismatch['rows']} rows, and the site {mismatch['site']!r} inside "
        f"has {mismatch['length']} along dimension {mismatch['dim']}: give the plate the size of the data, as by "
        f"pyro.plate({plate!r}, len(x)), or another dim, or draw vectors inside by .to_event(1)"
    )
