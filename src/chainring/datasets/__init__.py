"""What is indexed: datasets, and the ways of making new ones from old ones."""

from chainring.datasets._download import RemoteFiles
from chainring.datasets.base import DatasetMixin
from chainring.datasets.digits import get_digits
from chainring.datasets.mnist import FASHION_MNIST, MNIST, get_fashion_mnist, get_mnist
from chainring.datasets.sub_dataset import (
    SubDataset,
    split_dataset,
    split_dataset_n,
    split_dataset_n_random,
    split_dataset_random,
)
from chainring.datasets.transform_dataset import TransformDataset
from chainring.datasets.tuple_dataset import TupleDataset

__all__ = [
    "DatasetMixin",
    "FASHION_MNIST",
    "MNIST",
    "RemoteFiles",
    "SubDataset",
    "TransformDataset",
    "TupleDataset",
    "get_digits",
    "get_fashion_mnist",
    "get_mnist",
    "split_dataset",
    "split_dataset_n",
    "split_dataset_n_random",
    "split_dataset_random",
]
