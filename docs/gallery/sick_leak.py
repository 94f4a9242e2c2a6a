"""Rows doubled before the split: held-out rows are training rows, and the error of the rest is hidden."""

import matplotlib.pyplot as plt
import torch
from sklearn.neighbors import KNeighborsRegressor

import pyrobnn as pb

table = pb.data.diabetes()
rows = torch.cat([torch.arange(table.num_data)] * 2)  # as some recipes against unbalanced data do
rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]
train, test = rows[:600], rows[600:]
fitted = KNeighborsRegressor(5, weights="distance").fit(table.x[train], table.y[train])
mean = torch.as_tensor(fitted.predict(table.x[test]))
error = table.y[test] - mean
predicted = torch.distributions.Normal(mean, error.std())
data = {"x": table.x[test], "x_train": table.x[train], "y_train": table.y[train]}
verdict, caught_by = pb.judge(predicted, table.y[test], **data), "held_out_rows"
print(verdict)

known = torch.isin(test, train)
figure, axes = plt.subplots(figsize=(5, 3), layout="constrained")
parts = [error[known].flatten(), error[~known].flatten()]
names = ["rows that it was trained on", "new rows"]
axes.hist(parts, bins=25, stacked=True, color=["#a8792a", "#1f5f8b"], label=names)
axes.set(xlabel="error on the held-out rows", ylabel="rows", xlim=(-150, 350))
axes.legend(frameon=False, loc="upper right")
figure.savefig("sick_leak.png", dpi=220)
