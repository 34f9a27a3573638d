"""Loaders of Grain, litData, MosaicML Streaming and Megatron Energon, resumed by their own states."""

import io
import itertools
import logging
import tarfile
import warnings

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from chainring import serializers
from chainring.iterators import LoaderIterator

with warnings.catch_warnings(action="ignore"):
    logging.disable(logging.WARNING)
    grain = pytest.importorskip("grain", reason="make libraries installs them", exc_type=ImportError)
    litdata = pytest.importorskip("litdata", exc_type=ImportError)
    streaming = pytest.importorskip("streaming", exc_type=ImportError)
    energon = pytest.importorskip("megatron.energon", exc_type=ImportError)
    from litdata.streaming.cache import Cache
    from megatron.energon.flavors import BaseWebdatasetFactory
    from streaming.base.util import clean_stale_shared_memory

    logging.disable(logging.NOTSET)

pytestmark = pytest.mark.filterwarnings("ignore", "error:iterator 'main' fetches")  # their own; and what is not exact
SIZE, BATCH = 22, 4


def numbers():
    return grain.MapDataset.range(SIZE).seed(3).shuffle()


FEW = grain.ReadOptions(num_threads=2, prefetch_buffer_size=4)  # by default they read 500 rows ahead in 16 threads


def grain_in_threads():
    return LoaderIterator(numbers().repeat().to_iter_dataset(FEW).batch(BATCH), epoch_length=3)


def grain_mixture():
    small = grain.MapDataset.range(100, 105).repeat()
    mixture = grain.MapDataset.mix([numbers().repeat(), small], weights=[0.7, 0.3])
    return LoaderIterator(mixture.to_iter_dataset(FEW).batch(BATCH), epoch_length=3)


def grain_loader():
    """Whose state is bytes."""
    source = grain.sources.RangeDataSource(0, SIZE, 1)
    sampler = grain.samplers.IndexSampler(SIZE, shuffle=True, seed=3, num_epochs=None)
    loader = grain.DataLoader(data_source=source, sampler=sampler, operations=[grain.transforms.Batch(BATCH)])
    return LoaderIterator(loader, epoch_length=3)


GRAIN = {
    "a dataset": lambda: LoaderIterator(numbers().batch(BATCH)),
    "a pass": lambda: LoaderIterator(numbers().to_iter_dataset().batch(BATCH)),
    "an iterator": lambda: LoaderIterator(iter(numbers().repeat().to_iter_dataset(FEW).batch(BATCH)), epoch_length=3),
    "threads": grain_in_threads,
    "a mixture": grain_mixture,
    "a loader": grain_loader,
}


def taken(iterator, count):
    return [[np.asarray(leaf).tolist() for leaf in tree_leaves(next(iterator).columns)] for _ in range(count)]


def begun(make):
    torch.manual_seed(0)
    return make()


def assert_resumes(make, path, cuts=(1, 2, 5, 6, 7), count=9, put_back=True):
    """Also after a snapshot in the middle of an epoch, with its last batch, and in the next; then rehearsed."""
    with begun(make) as iterator:
        whole = taken(iterator, count)
    with begun(make) as iterator:
        for done, cut in itertools.pairwise((0, *cuts)):
            assert taken(iterator, cut - done) == whole[done:cut]
            serializers.save(path / f"{cut}", iterator)
        assert taken(iterator, count - cut) == whole[cut:]
    for cut in cuts:
        with begun(make) as iterator:
            serializers.load(path / f"{cut}", iterator)
            assert taken(iterator, count - cut) == whole[cut:]
    if put_back:
        with begun(make) as iterator:
            state = iterator.state_dict()
            taken(iterator, 2)
            serializers.load(path / f"{cuts[0]}", iterator)
            taken(iterator, 1)  # and no more of a pass that was taken up
            iterator.load_state_dict(state)
            assert taken(iterator, count) == whole


@pytest.mark.parametrize("make", GRAIN.values(), ids=GRAIN)
def test_grain_goes_on_where_its_iterator_was(tmp_path, make):
    """By get_state and set_state; nothing is fetched again."""
    assert_resumes(make, tmp_path)


@pytest.mark.parametrize("workers", [0, 2])
def test_litdata_goes_on_where_its_loader_was(tmp_path, workers):
    """Into the next epoch too, with which it begins at once; nothing is fetched again."""
    (tmp_path / "data").mkdir()
    cache = Cache(str(tmp_path / "data"), chunk_size=BATCH)
    for index in range(SIZE):
        cache[index] = {"x": index}
    cache.done()
    cache.merge()

    def make():
        data = litdata.StreamingDataset(str(tmp_path / "data"), shuffle=True, seed=3)
        return LoaderIterator(litdata.StreamingDataLoader(data, batch_size=BATCH, num_workers=workers))

    assert_resumes(make, tmp_path)


@pytest.fixture
def shards(tmp_path):
    with streaming.MDSWriter(out=str(tmp_path / "shards"), columns={"x": "int"}, size_limit=200) as writer:
        for index in range(SIZE):
            writer.write({"x": index})

    def make():
        clean_stale_shared_memory()
        local, settings = str(tmp_path / "shards"), {"shuffle": True, "shuffle_seed": 3, "num_canonical_nodes": 1}
        return streaming.StreamingDataset(local=local, batch_size=BATCH, **settings)

    return make


@pytest.mark.parametrize("workers", [0, 2])
def test_streaming_goes_on_where_its_loader_was(tmp_path, shards, workers):
    """Into the next epoch too, before which it has an empty pass; nothing is fetched again."""
    make = lambda: LoaderIterator(streaming.StreamingDataLoader(shards(), batch_size=BATCH, num_workers=workers))  # noqa: E731
    assert_resumes(make, tmp_path)


def test_a_dataset_of_streaming_without_its_loader_is_warned_about(shards):
    """Each epoch of a resumed run would be the first."""
    with pytest.warns(UserWarning, match=r"counted by a streaming\.StreamingDataLoader alone"):
        LoaderIterator(DataLoader(shards(), BATCH))


class Numbers(energon.DefaultTaskEncoder):
    def batch(self, samples):
        return {"x": torch.tensor([int(sample.text) for sample in samples])}

    def encode_batch(self, batch):
        return batch


@pytest.mark.parametrize("workers", [0, 2])
def test_energon_goes_on_where_its_loader_was(tmp_path, workers):
    """By save_state_rank, with the generators of its workers; it cannot be put back once it was used."""
    data = tmp_path / "data"
    data.mkdir()
    for shard in range(3):
        with tarfile.open(data / f"s-{shard}.tar", "w") as archive:
            for index in range(8 * shard, 8 * shard + 8):
                entry = tarfile.TarInfo(f"{index:04d}.txt")
                entry.size = len(text := str(index).encode())
                archive.addfile(entry, io.BytesIO(text))
    BaseWebdatasetFactory.prepare_dataset(str(data), ["s-{0..2}.tar"], split_parts_ratio=[("train", 1.0)], workers=1)
    kind = "sample_type:\n  __module__: megatron.energon\n  __class__: TextSample\nfield_map:\n  text: txt\n"
    (data / ".nv-meta" / "dataset.yaml").write_text(kind)

    def make():
        config = energon.WorkerConfig(rank=0, world_size=1, num_workers=workers, seed_offset=0)
        settings = {"batch_size": BATCH, "shuffle_buffer_size": 8, "max_samples_per_sequence": 4}
        dataset = energon.get_train_dataset(str(data), worker_config=config, task_encoder=Numbers(), **settings)
        return LoaderIterator(energon.get_savable_loader(dataset), epoch_length=3)

    assert_resumes(make, tmp_path, cuts=(2, 6), put_back=False)
