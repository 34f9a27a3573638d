"""The server of `--watch`: it serves one page and its changes on this machine, and ends without a trace."""

import http.client
import json
import os
import re
import signal
import socket
import threading
import urllib.parse

import pytest

import forked
from chainring.cli import main
from chainring.html_report import watch
from report_runs import falling, logged, recorded


class Stream:
    """Listens to the changes after a page."""

    def __init__(self, address, mark, **headers):
        self._connection = connection_to(address)
        self._connection.request("GET", f"/events?{mark}", headers=headers)
        self._answer = self._connection.getresponse()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._answer.close()
        self._connection.close()

    def next(self):
        """The name, the mark and the content of the next event."""
        lines = []
        while True:
            line = self._answer.readline().decode()
            assert line, "the stream has ended"
            if line != "\n":
                lines.append(line.rstrip("\n"))
            elif any(each.startswith("event") for each in lines):
                found = dict(each.split(": ", 1) for each in lines if ": " in each)
                return found["event"], found.get("id"), json.loads(found.get("data", "null"))


def connection_to(address):
    return http.client.HTTPConnection(urllib.parse.urlsplit(address).netloc, timeout=120)


def asked(address, path="/", method="GET", **headers):
    connection = connection_to(address)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer, content.decode()


def mark_of(address):
    _, page = asked(address)
    return json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])["mark"]


@pytest.fixture
def served(tmp_path):
    """Two runs that are served; the address, the function that looks at them, and their directories."""
    outs = [logged(tmp_path / name, falling(5)) for name in ("a", "b")]
    (tmp_path / "secret").write_text("secret")
    with watch(outs, 0) as (address, _, look):
        yield address, look, outs


def append(out, rows, end=""):
    with open(out / "log.jsonl", "a") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows) + end)


def test_rows_that_are_appended_are_sent(served):
    """Of the run that has them alone; one that is being written waits for its end."""
    address, look, (a, _) = served
    with Stream(address, mark_of(address)) as stream:
        append(a, falling(7)[5:], end='{"main/loss"')
        look()
        name, _, change = stream.next()
        assert (name, list(change["runs"])) == ("change", ["0"])
        assert change["runs"]["0"]["logs"][0]["count"] == 7
        assert "runs" in change["parts"]
        append(a, [], end=': 3.5, "iteration": 8}\n')
        look()
        assert stream.next()[2]["runs"]["0"]["logs"][0]["count"] == 8


def test_who_comes_late_or_again_is_sent_what_was_missed(served):
    """By the mark of the page, or that of the last event; a page of an earlier server is told to load again."""
    address, look, (a, b) = served
    mark = mark_of(address)
    append(a, falling(6)[5:])
    look()
    with Stream(address, mark) as stream:
        _, last, change = stream.next()
        assert list(change["runs"]) == ["0"]
    append(b, falling(6)[5:])
    look()
    with Stream(address, mark, **{"Last-Event-ID": last}) as stream:
        assert list(stream.next()[2]["runs"]) == ["1"]
    for unknown in ("", "0", "x-1", f"{mark}x", "../../etc/passwd", "%00"):
        with Stream(address, unknown) as stream:
            assert stream.next()[0] == "reload"


def test_nothing_is_sent_where_nothing_has_changed(served):
    """A file that no part of the page shows changes nothing."""
    address, look, (a, _) = served
    mark = mark_of(address)
    (a / "other.bin").write_bytes(b"x")
    look()
    assert mark_of(address) == mark


def test_a_run_that_is_cut_back_and_grows_again_is_read_from_the_start(served):
    """Also where it has become longer than before between two looks."""
    address, look, (a, _) = served
    with Stream(address, mark_of(address)) as stream:
        logged(a, [{**row, "main/loss": 9.0} for row in falling(30)])
        look()
        assert stream.next()[2]["runs"]["0"]["logs"][0]["count"] == 30
        logged(a, falling(2))
        look()
        assert stream.next()[2]["runs"]["0"]["logs"][0]["count"] == 2


def test_a_run_that_vanishes_or_is_damaged_stays_as_it_was_and_that_is_said(served):
    """Until it can be read again."""
    address, look, (a, _) = served
    with Stream(address, mark_of(address)) as stream:
        a.rename(a.parent / "moved")
        look()
        _, _, change = stream.next()
        assert "there is no directory" in change["trouble"]
        assert change["runs"] == {}
        (a.parent / "moved").rename(a)
        recorded(a, config={"lr": 1})
        (a / "run.json").write_text("{")
        look()
        _, _, change = stream.next()
        assert change["trouble"] == ""
        assert "run.json cannot be read" in change["parts"]["runs"]


def test_where_runs_part_is_looked_up_again(tmp_path):
    """When they have changed."""
    outs = [logged(tmp_path / name, falling(5)) for name in ("a", "b")]
    found = []
    with watch(outs, 0, lambda: found) as (address, _, look):
        from chainring.html_report import Parting

        found.append(Parting(1, 6, "they part in iteration 6"))
        with Stream(address, mark_of(address)) as stream:
            append(outs[1], falling(7)[5:])
            look()
            change = stream.next()[2]
    assert change["partings"] == [{"run": 1, "iteration": 6}]
    assert "they part in iteration 6" in change["parts"]["curves"]


@pytest.mark.parametrize(
    "path",
    ["/a/log.jsonl", "/log.jsonl", "/../secret", "/%2e%2e/secret", "/events/../../secret", "/?x", "/secret", "*"],
)
def test_no_other_path_is_served(served, path):
    """Neither a file of a run nor one beside it."""
    answer, content = asked(served[0], path)
    assert answer.status == 404
    assert "secret" not in content.replace(path, "")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH"])
def test_nothing_but_reading_is_understood(served, method):
    """The server changes nothing."""
    assert asked(served[0], method=method)[0].status == 501


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:{port}", "127.0.0.1", "127.0.0.1:1", "127.0.0.1.evil.example:{port}", ""]
)
def test_who_asks_for_another_host_is_refused(served, host):
    """As a page of another site does whose name was made to lead here."""
    port = served[0].rsplit(":", 1)[1].strip("/")
    for path in ("/", "/events"):
        answer, content = asked(served[0], path, Host=host.format(port=port))
        assert answer.status == 403
        assert "main/loss" not in content


def test_the_page_is_for_this_machine_and_for_no_other_page(served):
    """It listens at the loopback address, may ask its own server alone, and cannot be framed."""
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/", served[0])
    answer, page = asked(served[0])
    assert answer.status == 200
    assert "connect-src 'self'" in page
    assert answer.headers["X-Frame-Options"] == "DENY"
    assert answer.headers["Cache-Control"] == "no-store"
    assert "Access-Control-Allow-Origin" not in answer.headers
    port = served[0].rsplit(":", 1)[1].strip("/")
    assert asked(served[0], Host=f"localhost:{port}")[0].status == 200
    with socket.socket() as other, pytest.raises(OSError, match="refused"):
        other.connect(("127.0.0.2", int(port)))


def test_a_busy_port_is_refused_with_a_remedy(served, tmp_path, capsys):
    """Exit status 2; so are ports that there are none of, and options that do not go together."""
    port = served[0].rsplit(":", 1)[1].strip("/")
    run = str(served[2][0])
    for options, words in {
        ("--watch", "--port", port): f"port {port} of 127.0.0.1 is in use; give another --port, or --port 0",
        ("--watch", "--port", "70000"): "--port is a number from 0 to 65535; got 70000",
        ("--watch", "--out", "x.html"): "--watch writes no file",
        ("--port", "0"): "add --watch",
    }.items():
        assert main(["report", run, *options]) == 2
        assert words in capsys.readouterr().err
    assert main(["report", "--watch", "s3://bucket/run"]) == 2
    assert "without --watch" in capsys.readouterr().err
    assert main(["report", "--watch", str(tmp_path / "nowhere")]) == 2
    assert "there is no directory" in capsys.readouterr().err


def test_no_thread_stays_when_it_ends(tmp_path):
    """Also where one listens, and where one has connected and asks nothing; the port is free again."""
    before = set(threading.enumerate())
    with watch([logged(tmp_path / "a", falling(5))], 0) as (address, _, _look):
        port = int(address.rsplit(":", 1)[1].strip("/"))
        silent = socket.create_connection(("127.0.0.1", port))
        stream = Stream(address, mark_of(address))
    with stream, silent:
        assert stream.next()[0] == "end"
    assert set(threading.enumerate()) <= before
    with watch([tmp_path / "a"], port) as (again, _, _look):
        assert again == address


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_ctrl_c_ends_the_command(tmp_path):
    """Cleanly: who listens is told, nothing is printed, and the run has no file more."""
    out = logged(tmp_path / "a", falling(5))
    with forked.Forked(["-m", "chainring", "report", "--watch", "--port", "0", "--json", out]) as process:
        lines = [process.stdout.readline() for _ in range(3)]
        address = json.loads("".join(lines))["address"]
        with Stream(address, mark_of(address)) as stream:
            append(out, falling(6)[5:])
            assert stream.next()[0] == "change"
            process.send_signal(signal.SIGINT)
            assert stream.next()[0] == "end"
        _, errors = process.communicate(timeout=600)
    assert (process.returncode, errors) == (0, "")
    assert [path.name for path in out.iterdir()] == ["log.jsonl"]
