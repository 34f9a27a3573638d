"""Datasets and converters."""

import io
import zipfile

import numpy as np
from either import DatasetMixin, concat_examples, datasets, to_list

RANGE = list(range(11))


def _plain(value):
    return {key: _plain(item) for key, item in value.items()} if isinstance(value, dict) else np.asarray(value).tolist()


def containers():
    """`TupleDataset`, `DictDataset`, `TransformDataset`, `SubDataset`: an index and a slice."""
    a, b = np.arange(5), np.array(list("vwxyz"))
    made = [
        datasets.TupleDataset(a, b), datasets.DictDataset(a=a, b=b),
        datasets.TransformDataset(a, lambda x: x**2), datasets.SubDataset(a, 1, 4),
        datasets.SubDataset(a, 0, 3, [4, 2, 0, 1, 3]),
    ]  # fmt: skip
    picked = [[dataset[0], dataset[len(dataset) - 1], *dataset[1:3]] for dataset in made]
    return [[_plain(value) for value in values] for values in picked]


def concatenated():
    """`ConcatenatedDataset`: the examples of one after those of the other."""
    dataset = datasets.ConcatenatedDataset(["a", "b"], ["c"], ["d", "e"])
    return [len(dataset), [dataset[i] for i in range(5)], dataset[1:4]]


def own():
    """A `DatasetMixin` of one's own."""

    class Squares(DatasetMixin):
        def __len__(self):
            return 6

        def get_example(self, i):
            return i * i

    dataset = Squares()
    return [dataset[2], dataset[1:6:2], dataset[::-1], dataset[[0, 3]], dataset[np.array([5, 1])]]


def splits():
    """`split_dataset` and `get_cross_validation_datasets`; `split_dataset_n` where n divides the number."""
    order = [3, 1, 4, 0, 2, 9, 5, 6, 8, 7, 10]
    parts = [
        datasets.split_dataset(RANGE, 4),
        datasets.split_dataset(RANGE, 4, order),
        datasets.split_dataset_n(RANGE[:9], 3),
    ]
    parts += datasets.get_cross_validation_datasets(RANGE, 3)
    parts += datasets.get_cross_validation_datasets(RANGE, 4, order)
    return [[list(part[:]) for part in split] for split in parts]


def random_splits():
    """`split_dataset_random(seed)`: each example in one part, the same with the same seed."""
    first, second = datasets.split_dataset_random(RANGE, 4, seed=3)
    again, _ = datasets.split_dataset_random(RANGE, 4, seed=3)
    return [len(first), sorted([*first[:], *second[:]]), list(first[:]) == list(again[:])]


def images():
    """`ImageDataset` and `LabeledImageDataset`: channels first, float32; and labels."""
    from PIL import Image

    pixels = np.random.RandomState(0).randint(0, 256, (4, 5, 3), np.uint8)
    Image.fromarray(pixels).save("rgb.png")
    Image.fromarray(pixels[:, :, 0]).save("grey.png")
    with open("pairs.txt", "w") as file:
        file.write("rgb.png 3\ngrey.png 1\n")
    plain, labeled = datasets.ImageDataset(["rgb.png", "grey.png"]), datasets.LabeledImageDataset("pairs.txt")
    arrays = [plain[0], plain[1], labeled[0][0], labeled[1][0]]
    labels = [int(labeled[i][1]) for i in range(2)]
    return [labels, [[str(array.dtype), list(array.shape), array.tolist()] for array in arrays]]


def zipped_images():
    """`ZippedImageDataset` and `LabeledZippedImageDataset`: the images of an archive, and those that a file labels."""
    from PIL import Image

    with zipfile.ZipFile("images.zip", "w") as archive:
        for name in ("a.png", "b.png"):
            buffer = io.BytesIO()
            Image.fromarray(np.random.RandomState(ord(name[0])).randint(0, 256, (3, 2, 3), np.uint8)).save(buffer, "png")
            archive.writestr(name, buffer.getvalue())
    with open("pairs.txt", "w") as file:
        file.write("b.png 4\na.png 2\n")
    plain, labeled = datasets.ZippedImageDataset("images.zip"), datasets.LabeledZippedImageDataset("images.zip", "pairs.txt")
    arrays = [plain[0], plain[1], labeled[0][0], labeled[1][0]]
    return [[int(labeled[i][1]) for i in range(2)], [[str(array.dtype), array.tolist()] for array in arrays]]


def text():
    """`TextDataset`: one file or two side by side; without the end of the line, which Chainer leaves on."""
    for name, lines in (("a", "one\ntwo\n\nfour\n"), ("b", "eins\nzwei\ndrei\nvier\n")):
        with open(name, "w") as file:
            file.write(lines)
    single, double = datasets.TextDataset("a"), datasets.TextDataset(["a", "b"])
    kept = datasets.TextDataset(["a", "b"], filter_func=lambda a, b: "o" in a)
    lines = [single[0], single[3], *double[1], *kept[2], len(kept)]
    return [line.rstrip("\n") if isinstance(line, str) else line for line in lines]


def concatenate():
    """`concat_examples` of arrays, tuples and mappings, with padding."""
    arrays = [np.array([1, 2], np.float32), np.array([3, 4], np.float32)]
    x, t = concat_examples([(array, np.int32(i)) for i, array in enumerate(arrays)])
    by_name = concat_examples([{"x": array} for array in arrays])
    padded = concat_examples([np.arange(3), np.arange(5)], padding=-1)
    return [to_list(x), to_list(t), to_list(by_name["x"]), to_list(padded), to_list(concat_examples(arrays))]
