"""Datasets, and functions that combine and split them."""

from chainring.datasets.base import DatasetMixin
from chainring.datasets.classification import (
    CIFAR10,
    CIFAR100,
    FASHION_MNIST,
    MNIST,
    RemoteFiles,
    get_cifar10,
    get_cifar100,
    get_digits,
    get_fashion_mnist,
    get_mnist,
)
from chainring.datasets.combined import (
    ConcatenatedDataset,
    DictDataset,
    SubDataset,
    TransformDataset,
    TupleDataset,
    get_cross_validation_datasets,
    get_cross_validation_datasets_random,
    split_dataset,
    split_dataset_n,
    split_dataset_n_random,
    split_dataset_random,
)
from chainring.datasets.files import (
    ImageDataset,
    LabeledImageDataset,
    LabeledZippedImageDataset,
    TextDataset,
    ZippedImageDataset,
)

__all__ = [
    "CIFAR10", "CIFAR100", "ConcatenatedDataset", "DatasetMixin", "DictDataset", "FASHION_MNIST", "ImageDataset",
    "LabeledImageDataset", "LabeledZippedImageDataset", "MNIST", "RemoteFiles", "SubDataset", "TextDataset",
    "TransformDataset", "TupleDataset", "ZippedImageDataset", "get_cifar10", "get_cifar100",
    "get_cross_validation_datasets", "get_cross_validation_datasets_random", "get_digits", "get_fashion_mnist",
    "get_mnist", "split_dataset", "split_dataset_n", "split_dataset_n_random", "split_dataset_random",
]  # fmt: skip
