"""A posterior in one file that torch alone, or ONNX Runtime, reads: what it predicts, and what it says of itself."""

from __future__ import annotations

import contextlib
import inspect
import io
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.export import Dim, ExportedProgram

from pyrobnn.core.checks import Refused, check_type
from pyrobnn.core.files import written_whole
from pyrobnn.core.positions import evenly_spaced
from pyrobnn.core.private_trace import trace_rows
from pyrobnn.model import BNN
from pyrobnn.model.gradient import reverse_only
from pyrobnn.model.log_terms import without_validation
from pyrobnn.posterior import exported_reader
from pyrobnn.posterior.prediction import Prediction
from pyrobnn.posterior.predictive_program import EVALUATIONS, PredictiveProgram
from pyrobnn.posterior.ranges import InputRange, made_up_inputs

FORMAT = "pyrobnn-export"
FORMAT_VERSION = 1
#: what the file says of itself, by name: ``about`` has other entries
ENTRIES = (
    "format",
    "format_version",
    "method",
    "likelihood",
    "num_data",
    "input",
    "outputs",
    "quantile_levels",
    "thinning",
    "units",
    "ranges",
    "warnings",
    "versions",
    "verdict",
)
#: rows at which the thinned draws are compared with all of them
NUM_PROBES = 200
#: what a file that holds float32 may be off, in units of the prediction's own size
TOLERANCE = 1e-3


class Exportable(Protocol):
    """What of a posterior is asked here."""

    @property
    def bnn(self) -> BNN: ...
    @property
    def network(self) -> Callable[[Mapping[str, Tensor], Tensor], Tensor] | None: ...
    @property
    def meta(self) -> dict[str, Any]: ...
    @property
    def draws(self) -> dict[str, Tensor]: ...
    @property
    def num_chains(self) -> int: ...
    @property
    def num_draws(self) -> int: ...
    def stacked(self) -> dict[str, Tensor]: ...
    def predict(self, x: Tensor) -> Prediction: ...


@dataclass(frozen=True, eq=False)
class Contents:
    """What is written.

    Attributes:
        posterior, thinned: with all draws, and with those that the file holds.
        levels: of the quantiles.
        input_range: of the training data, None where it is not known.
        x: training inputs (N, …), None where they are not known.
        about: JSON-able entries that the file says beside its own: the verdict, names.
    """

    posterior: Exportable
    thinned: Exportable
    levels: tuple[float, ...]
    input_range: InputRange | None
    x: Tensor | None
    about: Mapping[str, Any]


def check_format(path: Path) -> None:
    """ValueError of an ending that says no format; ImportError where what writes it is not installed."""
    if path.suffix not in (".pt2", ".onnx"):
        raise ValueError(
            f"'path' must end in .pt2 (for torch) or .onnx (for ONNX Runtime), got {str(path)!r}"
        )
    missing = [name for name in ("onnx", "onnxscript") if find_spec(name) is None]
    if path.suffix == ".onnx" and missing:
        raise ImportError(
            f"{' and '.join(missing)} must be installed to write ONNX: pip install 'pyrobnn[onnx]'"
        )


def checked_about(about: Mapping[str, Any] | None) -> dict[str, Any]:
    """The user's entries.

    Raises:
        TypeError: not a mapping.
        ValueError: one has the name of an entry of the file's own, or is nothing that JSON has.
    """
    entries = {} if about is None else dict(check_type("about", about, Mapping, "a mapping"))
    taken = [repr(name) for name in ENTRIES if name in entries]
    if taken:
        raise ValueError(
            f"'about' has the entries {', '.join(taken)}, which the file says of itself: choose other names"
        )
    try:
        json.dumps(entries)
    except (TypeError, ValueError) as error:
        raise ValueError(f"'about' must be what JSON can say ({error})") from error
    return entries


def write(contents: Contents, path: Path) -> None:
    """Write the file; nothing stands at ``path`` before it is whole.

    Raises:
        ValueError: nothing can be written there.
        Refused: torch cannot export the net, or what it exports predicts otherwise.
    """
    with written_whole(path) as beside:
        x = probes(contents)
        program = _program(contents, onnx=path.suffix == ".onnx")
        exported, outputs = _exported(program, x)
        deviation = _deviation(outputs, contents.thinned.predict(x), contents.levels)
        if not deviation <= TOLERANCE:
            raise Refused(
                f"the exported program is off by {deviation:.2g} of its predictions: keep this model with "
                "posterior.save and load it with pyrobnn.Posterior.load"
            )
        meta = _meta(contents, x, outputs)
        if path.suffix == ".onnx":
            _write_onnx(exported, meta, beside)
        else:
            _write_pt2(exported, meta, beside)


def probes(contents: Contents) -> Tensor:
    """Inputs at which predictions are compared: training inputs, else values drawn from between their ends.

    Without either they are normal, in the units of the model.
    """
    if contents.x is not None:
        count = min(NUM_PROBES, len(contents.x))
        rows = evenly_spaced(len(contents.x), max(count, 2))
        return contents.x.detach().cpu()[rows]
    shape = (NUM_PROBES, *contents.posterior.meta["input_shape"])
    generator = torch.Generator().manual_seed(0)
    shares = torch.rand(shape, generator=generator, dtype=torch.float64)
    return made_up_inputs(contents.posterior.bnn, contents.input_range, shares)


def _program(contents: Contents, onnx: bool) -> PredictiveProgram:
    """The program of the thinned draws; for ONNX Runtime, which has the function erf in float32 alone, in float32."""
    thinned = contents.thinned
    bnn = thinned.bnn.to(torch.device("cpu"))
    return PredictiveProgram(
        bnn,
        thinned.stacked(),
        network=thinned.network,
        levels=contents.levels,
        input_range=contents.input_range,
        wide=torch.float32 if onnx else torch.float64,
        # the function of a linearised network holds tensors of its own type
        narrow=torch.float32 if onnx and thinned.network is None else None,
    )


def _exported(
    program: PredictiveProgram, x: Tensor
) -> tuple[ExportedProgram, Mapping[str, Tensor]]:
    """The program as torch traces it for any number of rows, and what it returns at ``x``.

    Raises:
        Refused: torch cannot trace the net, or cannot run what it has traced.
    """
    program.eval()
    for evaluation in EVALUATIONS:
        program.evaluation = evaluation
        try:
            exported = _traced(program, torch.zeros_like(x))
            return exported, exported.module()(x)
        # torch's tracer, and what it has made, raise errors of many kinds
        except Exception as error:
            failure = error
        # the ways of evaluation differ only where draws of the net do
        if not program.draws_vary:
            break
    reason = str(failure).strip().partition("\n")[0] or type(failure).__name__
    if "Constraints violated" in reason:
        reason = (
            "its forward holds the number of rows as one of Python's, as len(x) is: take x.shape[0]"
        )
    raise Refused(
        f"torch.export cannot trace this net ({reason}): keep the model with posterior.save and load it with "
        "pyrobnn.Posterior.load"
    ) from failure


def _traced(program: PredictiveProgram, x: Tensor) -> ExportedProgram:
    """The program without the lines of code it was traced from."""
    with without_validation(), reverse_only(), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # torch.export alone cannot trace vmap of derivatives
        graph = trace_rows(program, x)
        graph.graph.eliminate_dead_code()
        graph.recompile()
        _own_constants(graph)
        exported = torch.export.export(
            graph,
            (x,),
            dynamic_shapes=({0: Dim.DYNAMIC},),
            strict=False,
        )
    for node in exported.graph.nodes:
        node.meta.pop("stack_trace", None)
    return exported


def _own_constants(graph: torch.fx.GraphModule) -> None:
    """Constants without the rest of the storage that they are views of: a file would hold all of it."""
    names = {node.target for node in graph.graph.nodes if node.op == "get_attr"}
    for name in names:
        value = getattr(graph, name, None)
        if isinstance(value, Tensor):
            # a weight that no draw moves is a parameter, in whose place torch takes no tensor
            delattr(graph, name)
            graph.register_buffer(name, value.detach().contiguous().clone())


def _deviation(
    outputs: Mapping[str, Tensor], prediction: Prediction, levels: tuple[float, ...]
) -> float:
    """The largest difference from a prediction by the same draws, in units of the predictive sd, or of probability."""
    if prediction.likelihood.targets.classes:
        return float((outputs["probs"] - prediction.probs.cpu()).abs().max())
    # exact moments are not those of draws
    prediction = prediction.thin(prediction.standard_f.shape[0] * prediction.standard_f.shape[1])
    sd = prediction.var.sqrt().cpu()
    unit = sd.where(sd.isfinite() & (sd > 0), torch.ones_like(sd))
    unit = torch.maximum(unit, prediction.mean.cpu().abs() * 1e-3)
    differences = [outputs["mean"] - prediction.mean.cpu(), (outputs["sd"] - sd).nan_to_num(0.0)]
    return float(torch.stack([(difference / unit).abs().max() for difference in differences]).max())


def _thinning(contents: Contents, x: Tensor) -> dict[str, Any]:
    """What the predictions lose by the draws that are left out, at probes."""
    total = contents.posterior.num_chains * contents.posterior.num_draws
    used = contents.thinned.num_chains * contents.thinned.num_draws
    record: dict[str, Any] = {"draws": used, "of": total, "rows": len(x)}
    prediction = contents.posterior.predict(x)
    # `thin` to as many: the moments of these draws, as the file has them, in place of exact ones
    thinned = contents.thinned.predict(x).thin(used)
    if prediction.likelihood.targets.classes:
        difference = (thinned.probs - prediction.probs).abs().max()
        return record | {"largest_change_of_a_probability": float(difference)}
    sd = prediction.var.sqrt()
    shift = ((thinned.mean - prediction.mean) / sd).abs().nan_to_num(0.0).max()
    ratio = (thinned.var.sqrt() / sd).nan_to_num(1.0)
    change = (ratio - 1).abs().max()
    return record | {
        "largest_shift_of_the_mean_in_sd": float(shift),
        "largest_relative_change_of_the_sd": float(change),
    }


def _meta(contents: Contents, x: Tensor, outputs: Mapping[str, Tensor]) -> dict[str, Any]:
    """What the file says of itself, JSON-able; no row of data is in it."""
    posterior = contents.posterior
    bnn = posterior.bnn
    has_quantiles = "quantiles" in outputs
    units = {}
    if bnn.standardizer is not None:
        names = ("x_mean", "x_scale", "y_mean", "y_scale")
        units = {name: getattr(bnn.standardizer, name).tolist() for name in names}
    versions = posterior.meta.get("versions", {})
    return {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "method": posterior.meta.get("method"),
        "likelihood": bnn.likelihood.task,
        "num_data": posterior.meta.get("num_data"),
        "input": {
            "shape": ["rows", *x.shape[1:]],
            "dtype": str(x.dtype).removeprefix("torch."),
        },
        "outputs": {name: ["rows", *value.shape[1:]] for name, value in outputs.items()},
        "quantile_levels": list(contents.levels) if has_quantiles else [],
        "thinning": _thinning(contents, x),
        "units": units,
        "ranges": None if contents.input_range is None else contents.input_range.state(),
        "warnings": posterior.meta.get("warnings", []),
        "versions": dict(versions) | {"torch": torch.__version__},
        **contents.about,
    }


def _write_pt2(exported: ExportedProgram, meta: Mapping[str, Any], path: Path) -> None:
    extra = {"pyrobnn.json": json.dumps(meta, ensure_ascii=False, indent=1)}
    calls = _calls(exported)
    if calls is not None:
        extra |= {
            "program.json": json.dumps(calls),
            "reader.py": inspect.getsource(exported_reader),
        }
    # the example of the trace holds zeros, no rows
    buffer = io.BytesIO()
    torch.export.save(exported, buffer, extra_files=extra)
    path.write_bytes(buffer.getbuffer())


def _calls(exported: ExportedProgram) -> dict[str, Any] | None:
    """The program as the reader takes it: tensors, and calls of operators with the values that none needs afterwards.

    None where it is made of more than that: loops, say.
    """
    signature = exported.graph_signature
    targets = {
        **signature.inputs_to_parameters,
        **signature.inputs_to_buffers,
        **signature.inputs_to_lifted_tensor_constants,
    }
    values = {**exported.state_dict, **exported.constants}
    nodes = [node for node in exported.graph.nodes if not _is_check(node)]
    last_use = _last_uses(nodes)
    tensors = {}
    calls = []
    for node in nodes:
        if node.op == "placeholder" and node.name in targets:
            name = targets[node.name]
            tensors[node.name] = (name, str(values[name].dtype).removeprefix("torch."))
        elif node.op == "call_function":
            target = _target(node.target)
            if target is None:
                return None
            options = {name: _encoded(value) for name, value in node.kwargs.items()}
            calls.append((node.name, target, _encoded(node.args), options, last_use[node.name]))
        elif node.op == "get_attr":
            return None
    names = exported.call_spec.out_spec.context
    outputs = dict(zip(names, signature.user_outputs, strict=True))
    return {
        "tensors": tensors,
        "calls": calls,
        "input": signature.user_inputs[0],
        "outputs": outputs,
    }


def _last_uses(nodes: Sequence[torch.fx.Node]) -> dict[str, list[str]]:
    """For each node the names of those that nothing after it needs."""
    needed: set[str] = set()
    last_use: dict[str, list[str]] = {}
    for node in reversed(nodes):
        inputs = [used.name for used in node.all_input_nodes]
        last_use[node.name] = [name for name in inputs if name not in needed]
        needed |= set(inputs)
    return last_use


def _is_check(node: torch.fx.Node) -> bool:
    return node.op == "call_function" and not node.users


def _target(function: Any) -> str | None:
    """How the reader finds an operator; None of what it doesn't have."""
    namespace = getattr(function, "namespace", None)
    if namespace is not None:  # of torch: "aten.add.Tensor"
        return str(function) if namespace == "aten" else None
    if getattr(function, "__module__", "") != "_operator":
        return None
    name = function.__name__
    return f"operator.{name}" if name in exported_reader.ARITHMETIC else None


def _encoded(value: Any) -> Any:
    """An argument of a call as JSON: nodes and constants of torch as {kind: name}."""
    if isinstance(value, torch.fx.Node):
        return {"node": value.name}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_encoded(item) for item in value]
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
        return {"torch": str(value).removeprefix("torch.")}
    return value


def _write_onnx(exported: ExportedProgram, meta: Mapping[str, Any], path: Path) -> None:
    """Raises Refused where ONNX lacks an operator."""
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            written = torch.onnx.export(exported, (), input_names=["x"], verbose=False)
    except torch.onnx.errors.OnnxExporterError as error:
        reason = str(error.__cause__ or error).strip().partition("\n")[0]
        raise Refused(
            f"ONNX cannot hold this net ({reason}): write a .pt2 file, which torch reads"
        ) from error
    program = cast(Any, written)
    model = program.model
    for number, node in enumerate(model.graph.all_nodes()):
        # the lines of code that it came from
        node.metadata_props.clear()
        for place, value in enumerate(node.outputs):
            value.name = f"value_{number}_{place}"
    for name, value in zip(meta["outputs"], model.graph.outputs, strict=True):
        value.name = name
    model.metadata_props["pyrobnn"] = json.dumps(meta, ensure_ascii=False)
    program.save(path, external_data=False)
