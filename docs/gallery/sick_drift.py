"""A sensor that drifts: by temperature nothing is wrong, in the order of the rows neighbours agree."""

import matplotlib.pyplot as plt
import torch
from sklearn.linear_model import LinearRegression

import pyrobnn as pb

generator = torch.Generator().manual_seed(0)
temperature = 10 + 15 * torch.rand(400, 1, generator=generator)
drift = 0.03 * torch.randn(400, 1, generator=generator).cumsum(0)
voltage = 0.2 * temperature + drift + 0.2 * torch.randn(400, 1, generator=generator)
fitted = LinearRegression().fit(temperature[::2], voltage[::2])
error = voltage - torch.as_tensor(fitted.predict(temperature))
predicted = torch.distributions.Normal((voltage - error)[1::2], error[::2].std())
verdict, caught_by = pb.judge(predicted, voltage[1::2], x=temperature[1::2]), "row_order"
print(verdict)

figure, axes = plt.subplots(figsize=(5, 3), layout="constrained")
axes.axhline(0, color="#1f5f8b", label="prediction")
axes.plot(range(1, 400, 2), error[1::2], ".", ms=4, color="#a8792a", label="error")
axes.set(xlabel="row, in the order of time", ylabel="voltage, observed minus predicted")
axes.legend(frameon=False)
figure.savefig("sick_drift.png", dpi=220)
