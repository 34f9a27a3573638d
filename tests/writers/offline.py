"""What W&B writes without a network, read back: records in the log format of LevelDB, each a message of its protocol."""

import json
import struct

_HEAD, _BLOCK = 7, 32768  # bytes of the head of the file and of each piece; pieces do not cross blocks
_WHOLE, _LAST = 1, 4  # kinds of pieces that end a record


def folders(out, place="wandb"):
    """The folders of the starts, in their order. W&B's process writes the last of a run when it is let go."""
    import wandb

    wandb.teardown()
    return sorted((out / place).glob("offline-run-*"))


def read(folder):
    """The run's id, its config, and its rows."""
    (path,) = folder.glob("run-*.wandb")
    records = list(_records(path.read_bytes()))
    runs = [record.run for record in records if record.WhichOneof("record_type") == "run"]
    rows = [_values(record.history.item) for record in records if record.WhichOneof("record_type") == "history"]
    return runs[0].run_id if runs else None, _values(runs[0].config.update) if runs else None, rows


def _values(items):
    return {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items}


def _records(data):
    from wandb.proto import wandb_internal_pb2

    at, record = _HEAD, b""
    while at + _HEAD <= len(data):
        left = _BLOCK - at % _BLOCK
        if left >= _HEAD:
            _, size, kind = struct.unpack_from("<IHB", data, at)
            record += data[at + _HEAD : at + _HEAD + size]
            if kind in (_WHOLE, _LAST):
                yield wandb_internal_pb2.Record.FromString(record)
                record = b""
        at += left if left < _HEAD else _HEAD + size
