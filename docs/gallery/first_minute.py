"""The picture of the first minute: data with a gap, the mean of an estimator, and its 90 % interval."""

import json
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

import pyrobnn as pb

data = pb.data.gap(num_data=100)
X, y = data.x.numpy(), data.y.numpy().ravel()
model = pb.BNNRegressor(random_state=0, compile=False).fit(X, y)
grid = np.linspace(-4, 4, 200)[:, None]
low, high = model.predict_interval(grid).T

figure, axes = plt.subplots(figsize=(6.2, 2.8), layout="constrained")
axes.fill_between(grid[:, 0], low, high, color="#1f5f8b", alpha=0.25, lw=0, label="90 % interval")
axes.plot(grid[:, 0], model.predict(grid), color="#1f5f8b", label="mean")
axes.scatter(X[:, 0], y, s=8, color="#a8792a", label="data")
axes.set(xlabel="x", ylabel="y", xlim=(-4, 4), ylim=(-6, 5))
axes.legend(frameon=False, ncols=3, loc="upper left")
figure.savefig("first_minute.png", dpi=200)

# the numbers behind the picture: a test fits again and compares
numbers = {"x": grid[::20, 0], "mean": model.predict(grid)[::20], "low": low[::20], "high": high[::20]}
numbers = {name: np.round(values, 3).tolist() for name, values in numbers.items()}
numbers["method"] = type(model.method_).__name__
Path("first_minute.json").write_text(json.dumps(numbers) + "\n", encoding="utf-8")
print(numbers["method"], model.method_reason_)
