"""Objects of a run in a store are removed, replaced or damaged: it is noticed, said, and an older snapshot is continued."""

from collections import Counter

from attempts import newest_of, started_at
from bench import Row

from chainring.serializers._store import CorruptError, open_store
from tries import WrongEndError

CONTINUED = 3  # one in so many damaged runs is continued; all are verified


def flip(content, others, draw):
    content = bytearray(content)
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    return bytes(content)


def cut(content, others, draw):
    return content[: draw.randrange(len(content))]


def lengthen(content, others, draw):
    return content + draw.randbytes(draw.randint(1, 5000))


def zero(content, others, draw):
    start = draw.choice([place for place, byte in enumerate(content) if byte])
    length = min(draw.randint(1, 4096), len(content) - start)
    return content[:start] + bytes(length) + content[start + length :]


def replace(content, others, draw):
    return draw.choice([other for other in others if other != content])


def remove(content, others, draw):
    return None


DAMAGES = [flip, cut, lengthen, zero, replace, remove]


def at_random(bench, number, draw, place):
    """Damages an object of a snapshot; in one of three tries of the newest, or of all, and continues the run."""
    from objects import check

    url = bench.objects.interrupted(place)
    found, damage = check(url), DAMAGES[number % len(DAMAGES)]
    try:
        if (number + number // len(DAMAGES)) % CONTINUED == 0:  # so that each damage has its turn
            return _continue(bench.objects, draw, place, url, damage, found)
        _damage(url, draw.choice(sorted(found)), damage, draw)
        return Counter({"damages": 1, damage.__name__: 1})
    finally:
        bench.objects.clear(url)


def _damage(url, name, damage, draw):
    """Damages an object of a snapshot, which is then known to be damaged; returns its key."""
    store = open_store(url)
    bucket = store.files.bucket
    keys = [entry.key for entry in bucket.list(f"{name}/")]
    key = draw.choice(keys)
    # One of the same snapshot, or the one of that name of another.
    others = [bucket.get(each.key).content for each in bucket.list() if each.key in keys or _last(each.key) == _last(key)]
    content = damage(bucket.get(key).content, others, draw)
    if content is None:
        bucket.delete([key])
    else:
        bucket.put(key, content)
    try:
        open_store(url).snapshot(name).verify()
    except CorruptError:
        return key
    raise WrongEndError(f"{damage.__name__} of {key} was not noticed")


def _last(key):
    return key.rpartition("/")[2]


def _continue(objects, draw, place, url, damage, found):
    snapshots = sorted((name for name in found if name.startswith("snapshot")), key=found.__getitem__, reverse=True)
    counts = Counter({"damages": 1, damage.__name__: 1, "continued": 1})
    key = _damage(url, snapshots[0], damage, draw)
    if draw.random() < 0.3:
        keys = [key, *(_damage(url, name, draw.choice(DAMAGES), draw) for name in snapshots[1:])]
        if any(open_store(url).snapshot(name).exists() for name in snapshots):
            _check_refusal(objects, place, url, keys)
            return counts + Counter({"all damaged": 1})
        return counts  # none is there any more, and the run begins anew
    output = objects.complete(place, url, may_warn=True)
    if f"snapshot {snapshots[0]!r} is skipped" not in output and not _is_gone(key, damage):
        raise WrongEndError(f"{damage.__name__} of {key}: no warning names it: {output[-2000:]}")
    if started_at(url) != newest_of({name: found[name] for name in snapshots[1:]}):
        raise WrongEndError(f"{damage.__name__} of {key}: the run went on from {started_at(url)}")
    left = [entry.key for entry in open_store(url).files.bucket.list("abandoned/")]
    if not _is_gone(key, damage) and not any(f"/{snapshots[0]}/" in each for each in left):
        raise WrongEndError(f"{damage.__name__} of {key}: what was left of {snapshots[0]} is gone")
    return counts


def _is_gone(key, damage):
    """Whether the whole snapshot is gone, of which nothing can tell that it was there."""
    return damage is remove and _last(key) == "manifest.json"


def _check_refusal(objects, place, url, keys):
    """Where none is sound the run does not start, and leaves what is there alone."""
    before = _contents(url)
    with objects.attempt(place, url, may_warn=True) as attempt:
        attempt.wait_for()
        if attempt.code != 1 or "none of the snapshots" not in attempt.output:
            raise WrongEndError(f"{keys} damaged, and the run ended with code {attempt.code}: {attempt.output[-2000:]}")
    if _contents(url) != before:
        raise WrongEndError(f"it has changed {url}: {before.keys() ^ _contents(url).keys()}")


def _contents(url):
    """The bytes of the snapshots that have a manifest, and of what lies beside them, by key."""
    store = open_store(url)
    entries = store.files.bucket.list()
    there = {entry.key.removesuffix("/manifest.json") for entry in entries if entry.key.endswith("/manifest.json")}
    kept = [entry for entry in entries if "/" not in entry.key or entry.key.partition("/")[0] in there]
    return {entry.key: store.files.bucket.get(entry.key).content for entry in kept if not entry.key.startswith(".")}


def besides(bench, number, draw, place):
    """Damages what lies beside the snapshots: the run goes on, and says what it has lost, or refuses and says what to do."""
    objects = bench.objects
    url = objects.interrupted(place)
    name = ["log.jsonl", "log", "run.json", "best", ".lease"][number % 5]
    damage = draw.choice(DAMAGES)
    bucket = open_store(url).files.bucket
    others = [bucket.get(entry.key).content for entry in bucket.list() if "/" not in entry.key]
    content = damage(bucket.get(name).content, others, draw)
    if content is None:
        bucket.delete([name])
    else:
        bucket.put(name, content)
    with objects.attempt(place, url, may_warn=True) as attempt:
        attempt.wait_for()
        ended, output = attempt.messages.get("ended"), attempt.output
    counts = Counter({"damages": 1, name: 1})
    if ended is None:
        if name not in ("best", ".lease") or f"{url}/{name}" not in output:
            raise WrongEndError(f"{damage.__name__} of {name}: the run ended with code {attempt.code}: {output[-3000:]}")
        counts["refused"] += 1
    else:
        has_said = "the log continues without its earlier rows" in output
        objects.compare(ended[0], besides=("log", "log.jsonl", "log file") if name == "log.jsonl" and has_said else ())
        counts["said so"] += has_said
    objects.clear(url)
    return counts


ROWS = [
    Row(
        "remotedamage", "objects of snapshots in a store removed, replaced, cut, lengthened, bits flipped, zeros",
        "noticed, said, an older one continued; none sound: refused", "damages", 600, at_random,
    ),
    Row(
        "remotebesides", "the same over log, log.jsonl, run.json, the link and the lease there",
        "parameters exact; the log too, or a warning that it begins anew; or refused with the name", "damages", 150,
        besides,
    ),
]  # fmt: skip
