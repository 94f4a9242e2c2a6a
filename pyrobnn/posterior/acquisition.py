"""Which rows to ask for next: scores of candidates as plain functions of a prediction, one by one or in batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from pyrobnn.core.checks import as_tensor, check_count, check_number, check_type
from pyrobnn.core.seeding import generator
from pyrobnn.model import NET
from pyrobnn.model.gradient import at_each
from pyrobnn.posterior import Posterior
from pyrobnn.posterior.prediction import Prediction


def function(posterior: Posterior, index: int) -> Callable[[Tensor], Tensor]:
    """One posterior draw as a function of x (point, …), in the units of the data, that gradients flow through.

    Args:
        posterior: of a BNN.
        index: of the draw, chains joined.

    Returns:
        x → mean of y (point, out), or logits (point, class).
    """
    chain, draw = divmod(index % (posterior.num_chains * posterior.num_draws), posterior.num_draws)
    single = {name: value[chain, draw][None] for name, value in posterior.draws.items()}
    return lambda x: values(posterior, single, x)[0]


def values(posterior: Posterior, draws: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """Mean of y (draw, point, out), or logits, at x (point, …) by ``draws`` (draw, …) of each site; differentiable."""
    model = posterior.bnn
    network = posterior.network or posterior.bnn.forward
    x = posterior.inputs(x)
    f = at_each(lambda one: network(one, x), {n: v for n, v in draws.items() if n.startswith(NET)})
    y_mean, y_scale = model.units or (0.0, 1.0)
    params = {name: value[None] for name, value in draws.items()}
    return Prediction(
        f[None],
        model.likelihood,
        params,
        y_mean=y_mean,
        y_scale=y_scale,
    ).f[0]


def thompson(
    prediction: Prediction,
    num: int = 1,
    *,
    maximize: bool = True,
    output: int = 0,
    seed: int = 0,
) -> Tensor:
    """Rows where functions drawn from the posterior are best: Thompson sampling.

    Args:
        prediction: at the candidates.
        num: rows, each of another draw while there are enough, no row twice.
        maximize: whether large f is good.
        output: column of f.
        seed: of the draws taken.

    Returns:
        Rows (num,).

    Reference: On the likelihood that one unknown probability exceeds another (Thompson, 1933).
    """
    f = _column(prediction, output) * (1 if maximize else -1)
    order = torch.randperm(len(f), generator=generator(seed))
    return batch(lambda rows: f[order[len(rows) % len(f)]], num)


def expected_improvement(
    prediction: Prediction,
    best: float,
    *,
    maximize: bool = True,
    output: int = 0,
    given: Sequence[int] = (),
) -> Tensor:
    r"""How much better than ``best`` the function is expected to be, :math:`E[\max(f(x) - b, 0)]`, over the draws.

    Args:
        prediction: at the candidates.
        best: the best value so far, in the units of y; of noisy y the best mean at their rows, which no luck has made.
        maximize: whether large f is good.
        output: column of f.
        given: rows asked for already: of the best of these and each candidate together (a batch).

    Returns:
        In the units of y, (point,).

    Reference: Efficient global optimization of expensive black-box functions (Jones et al., 1998).

    Example:
        >>> import pyrobnn as pb
        >>> f = torch.tensor([[[[0.0], [1.0]], [[0.0], [3.0]]]])
        >>> pb.acquire.expected_improvement(pb.Prediction(f, pb.likelihoods.HomoskedasticGaussian(0.1), {}), 2.0)
        tensor([0.0000, 0.5000])
    """
    best = check_number("best", float(best))
    gain = ((1 if maximize else -1) * (_column(prediction, output) - best)).clamp_min(0.0)
    for row in _checked_rows(prediction, given):
        gain = torch.maximum(gain, gain[:, row, None])
    return gain.mean(0)


def bald(
    prediction: Prediction,
    *,
    given: Sequence[int] = (),
    num_draws: int = 256,
    seed: int = 0,
) -> Tensor:
    r"""The information of a target at each candidate about the parameters: BALD, for any likelihood.

    .. math:: I(y; \theta) = E_{\theta, y}[\log p(y \mid x, \theta) - \log \tfrac1S \sum_s p(y \mid x, \theta_s)]

    Args:
        prediction: at the candidates.
        given: rows asked for already: together with these (BatchBALD), so that their information is not counted again.
        num_draws: S, as many evenly spaced draws at most; targets are drawn from each. The score is below log S.
        seed: of the targets.

    Returns:
        In nats, (point,).

    Reference: Bayesian Active Learning for Classification and Preference Learning (Houlsby et al., 2011); BatchBALD
    (Kirsch et al., 2019) https://arxiv.org/abs/1906.08158
    """
    chosen = _checked_rows(prediction, given)
    if prediction.likelihood.targets.classes and not chosen:  # exact, over all draws
        return prediction.epistemic_entropy
    score = torch.zeros(
        prediction.f.shape[2],
        dtype=torch.float64,
        device=prediction.f.device,
    )
    thinned = prediction.thin(num_draws)
    total = thinned.f.shape[0] * thinned.f.shape[1]
    for index, log_p in enumerate(_log_probs(thinned, seed)):
        joint = log_p + log_p[:, chosen].sum(1, keepdim=True)
        score += joint[index] - joint.logsumexp(0)
    score = score / total + torch.tensor(float(total)).log()
    score[chosen] = 0.0  # known already
    return score


def epig(
    prediction: Prediction,
    targets: Prediction,
    *,
    given: Sequence[int] = (),
    num_draws: int = 128,
    seed: int = 0,
) -> Tensor:
    r"""The information of a target at each candidate about targets at the points that matter: EPIG.

    .. math:: E_{x_*}\, I(y; y_*) = E\left[\log \frac{p(y, y_* \mid x, x_*)}{p(y \mid x)\, p(y_* \mid x_*)}\right]

    Args:
        prediction: at the candidates.
        targets: at the points that will be predicted, of the same posterior.
        given: rows asked for already: with these together.
        num_draws: as many evenly spaced draws at most.
        seed: of the simulated targets.

    Returns:
        In nats, (point,), the mean over target points.

    Reference: Prediction-Oriented Bayesian Active Learning (Bickford Smith et al., 2023)
    https://arxiv.org/abs/2304.08151
    """
    chosen = _checked_rows(prediction, given)
    candidates = prediction.thin(num_draws)
    points = targets.thin(num_draws)
    if candidates.f.shape[:2] != points.f.shape[:2]:
        raise ValueError(
            "'prediction' and 'targets' have different draws: predict both with the same posterior"
        )
    num_chains, num_thinned, num_candidates, _ = candidates.f.shape
    score = torch.zeros(
        num_candidates,
        dtype=torch.float64,
        device=candidates.f.device,
    )
    log_probs = zip(
        _log_probs(candidates, seed),
        _log_probs(points, seed + 1),
        strict=True,
    )
    for log_p, log_p_target in log_probs:
        joint = log_p + log_p[:, chosen].sum(1, keepdim=True)
        # weights of the draws, given the simulated value there
        weights_by_candidate = joint.softmax(0)
        weights_by_target = log_p_target.softmax(0)
        ratio = weights_by_candidate.T @ weights_by_target * len(joint)
        score += ratio.clamp_min(1e-300).log().mean(1)
    return score / (num_chains * num_thinned)


def batch(score: Callable[[list[int]], Tensor], num: int) -> Tensor:
    """Rows (num,) chosen one after another, each the best by ``score(rows chosen before)`` (point,)."""
    check_count("num", num)
    rows = list[int]()
    for _ in range(num):
        scores = as_tensor("score", score(rows)).squeeze(-1).clone()
        if scores.dim() != 1 or bool(scores.isnan().any()):
            raise ValueError(
                f"'score' must be a number for each candidate, (point,): got {tuple(scores.shape)}, or NaN"
            )
        if num > len(scores):
            raise ValueError(
                f"'num' is {num}, but there are {len(scores)} candidates: ask for fewer"
            )
        scores[rows] = -torch.inf
        rows.append(int(scores.argmax()))
    return torch.tensor(rows)


def _column(prediction: Prediction, output: int) -> Tensor:
    """One output of f, all draws: (draw, point); ValueError if there is no such output."""
    f = check_type("prediction", prediction, Prediction, "posterior.predict(x)").f.flatten(0, 1)
    if output not in range(-f.shape[-1], f.shape[-1]):
        raise ValueError(f"'output' is {output!r}, but f has {f.shape[-1]} columns, counted from 0")
    return f[..., output]


def _checked_rows(prediction: Prediction, given: Sequence[int]) -> list[int]:
    """Indices of the rows that were asked for already; ValueError unless each is a candidate's."""
    check_type("prediction", prediction, Prediction, "posterior.predict(x)")
    num = prediction.f.shape[2]
    rows = list(dict.fromkeys(int(row) for row in given))
    wrong = [row for row in rows if row not in range(num)]
    if wrong:
        raise ValueError(
            f"'given' has row {wrong[0]}, but there are {num} candidates, counted from 0"
        )
    return rows


def _log_probs(prediction: Prediction, seed: int) -> Iterator[Tensor]:
    """Of targets drawn from each posterior draw in turn, log p under every draw: (draw, point)."""
    simulated = prediction.likelihood.targets.observed(prediction.sample(seed=seed).flatten(0, 1))
    for y in simulated:
        yield prediction.log_prob_draws(y).flatten(0, 1)
