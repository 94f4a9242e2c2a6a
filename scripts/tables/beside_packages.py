"""``BNNRegressor()`` at its defaults beside CatBoost and XGBoost."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from tables.held_out_split import split
from tables.scores_of_predictions import pinball_scores, scores

if TYPE_CHECKING:
    from catboost import CatBoostRegressor
    from pandas import DataFrame
    from xgboost import XGBRegressor

    from pyrobnn import BNNRegressor
    from tables.held_out_split import Split


def boosting(spec: str) -> list[dict[str, Any]]:
    """``BNNRegressor()`` and CatBoost on 2,000 held-out rows; the CRPS is twice the mean pinball loss at 40 levels."""
    import numpy as np
    from scipy.stats import norm

    from pyrobnn.estimators import BNNRegressor

    data = split(spec)
    levels = np.array([0.05, 0.95, *(np.arange(40) + 0.5) / 40])
    x_test = data.x_test[:2000]
    y_test = data.y_test[:2000]
    rows = []
    for model in (BNNRegressor(random_state=0), catboost(data.x)):
        cpu = time.process_time()
        model.fit(data.x, data.y)
        cpu = time.process_time() - cpu
        mean = model.predict(x_test)
        if not isinstance(model, BNNRegressor):
            mean, var = mean.T
            quantiles = norm(mean[:, None], np.sqrt(var)[:, None]).ppf(levels)
        else:
            quantiles = model.predict_quantiles(x_test, tuple(levels))
        row = {
            "table": data.name,
            "method": type(model).__name__,
            "rows": len(data.x),
            "cpu": cpu,
        }
        row |= pinball_scores(y_test, mean, quantiles, levels)
        rows.append(row | {"reason": getattr(model, "method_reason_", "")})
    return rows


def small(spec: str, max_seconds: float | None) -> list[dict[str, Any]]:
    """``BNNRegressor()`` on ``FILE:TARGET``, y in standard units; without a limit also CatBoost and XGBoost."""
    from xgboost import XGBRegressor

    from pyrobnn import BNNRegressor

    data = split(spec, standard=True)
    models = [
        BNNRegressor(random_state=0, max_seconds=max_seconds),
        catboost(data.x),
        XGBRegressor(n_jobs=1),
    ]
    rows = []
    for model in models[: 1 if max_seconds else 3]:
        wall = time.perf_counter()
        cpu = time.process_time()
        model.fit(data.x, data.y)
        spent = {"seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - cpu}
        row = {
            "table": data.name,
            "method": type(model).__name__,
            "rows": len(data.x),
            "max_seconds": max_seconds,
        }
        rows.append(row | spent | _scores_of_model(model, data))
    return rows


def _scores_of_model(
    model: BNNRegressor | CatBoostRegressor | XGBRegressor, data: Split
) -> dict[str, Any]:
    """Scores on the held-out rows, of XGBoost, which predicts a mean alone, its error."""
    import numpy as np
    import torch
    from xgboost import XGBRegressor

    from pyrobnn import BNNRegressor

    if isinstance(model, BNNRegressor):
        x_test = torch.tensor(data.x_test.to_numpy(), dtype=torch.float32)
        reason = {"reason": model.method_reason_}
        return reason | scores(model.posterior_.predict(x_test), data.y_test)
    if isinstance(model, XGBRegressor):
        error = data.y_test - model.predict(data.x_test)
        return {"rmse": float(np.sqrt(np.mean(error**2)))}
    mean, var = torch.tensor(model.predict(data.x_test)).unsqueeze(-1).unbind(1)
    normal = torch.distributions.Normal(mean, var.sqrt())
    prediction = SimpleNamespace(
        mean=mean,
        var=var,
        log_prob=normal.log_prob,
    )
    return scores(prediction, data.y_test)


def catboost(x: DataFrame) -> CatBoostRegressor:
    """CatBoost with a normal's mean and variance, at its defaults."""
    from catboost import CatBoostRegressor

    options = {
        "loss_function": "RMSEWithUncertainty",
        "random_seed": 0,
        "thread_count": 1,
        "verbose": 0,
    }
    options |= {
        "cat_features": list(x.select_dtypes(exclude="number")),
        "allow_writing_files": False,
    }
    return CatBoostRegressor(**options)
