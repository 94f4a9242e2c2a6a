"""A straight line through a curve: errors of the right size on average, of one sign for long stretches of x."""

import matplotlib.pyplot as plt
import torch
from sklearn.linear_model import LinearRegression

import pyrobnn as pb

data = pb.data.sinusoid(300)
fitted = LinearRegression().fit(data.x[:150], data.y[:150])
line = torch.as_tensor(fitted.predict(data.x))
scale = (data.y - line)[:150].std()
predicted = torch.distributions.Normal(line[150:], scale)
verdict, caught_by = pb.judge(predicted, data.y[150:], x=data.x[150:]), "pattern"
print(verdict)

order = data.x[:, 0].argsort()
x, mean = data.x[order, 0], line[order, 0]
figure, axes = plt.subplots(figsize=(5, 3), layout="constrained")
axes.fill_between(x, mean - 1.64 * scale, mean + 1.64 * scale, color="#1f5f8b", alpha=0.25, lw=0)
axes.plot(x, mean, color="#1f5f8b", label="line and 90 % interval")
axes.scatter(data.x[150:], data.y[150:], s=8, color="#a8792a", label="held-out data")
axes.set(xlabel="x", ylabel="y")
axes.legend(frameon=False, ncols=2, loc="lower center")
figure.savefig("sick_straight_line.png", dpi=220)
