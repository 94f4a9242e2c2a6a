"""Data sets: seeded generators with a known truth, loaders of real data, splitting and standardisation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyrobnn.data.bundled import breast_cancer, diabetes, digits, fashion_mnist, load, mnist, names
from pyrobnn.data.dataset import Dataset, Standardizer, train_test_split
from pyrobnn.data.synthetic import clusters, cubic_clusters, gap, polynomial, sine, sinusoid, sinx3, study
from pyrobnn.data.uci_sets import uci, uci_all, uci_num_hidden, uci_splits
from pyrobnn.lazy import late_names

if TYPE_CHECKING:
    from pyrobnn.data.table import from_csv, from_frame
else:  # pandas and scikit-learn read tables, and nothing else here
    __getattr__, __dir__ = late_names(
        __name__, {"from_csv": "pyrobnn.data.table", "from_frame": "pyrobnn.data.table"}
    )

__all__ = [
    "Dataset",
    "Standardizer",
    "breast_cancer",
    "clusters",
    "cubic_clusters",
    "diabetes",
    "digits",
    "fashion_mnist",
    "from_csv",
    "from_frame",
    "gap",
    "load",
    "mnist",
    "names",
    "polynomial",
    "sine",
    "sinusoid",
    "sinx3",
    "study",
    "train_test_split",
    "uci",
    "uci_all",
    "uci_num_hidden",
    "uci_splits",
]
