"""Python programs in processes of their own, forked from one that has imported what most of them import.

For a test that is about what a process does, and not about how it starts. `Forked` and `run` take what ``python`` takes on
its command line; the program is ``__main__``, its interpreter ends as any does, but for modules that it takes apart, and it
has nothing of the tests' process.
"""

import atexit
import concurrent.futures
import contextlib
import functools
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import types
import warnings

PRELOADED = ("torch._dynamo", "chainring.training.extensions", "chainring.parallel", "sklearn.datasets")
LONGEST = 1 << 20  # bytes of a request
START = subprocess.Popen


class Forked:
    """A program that runs: the part of `subprocess.Popen` that tests use.

    Args:
        arguments: what follows ``python`` on a command line: ``-c`` and a program, ``-m`` and a module, or a script.
        env: the environment; by default that of the tests.
        stdin: an open file; by default there is nothing to read.
        stdout: an open file; by default a pipe, from which ``stdout`` reads.
        stderr: the same.
        start_new_session: the process leads a group and a session.
    """

    def __init__(self, arguments, *, env=None, stdin=None, stdout=None, stderr=None, start_new_session=False):
        given, ours, theirs = [stdin, stdout, stderr], {}, []
        for number, file in enumerate(given):
            if file is None:
                ends = os.pipe()
                here, there = ends if number else reversed(ends)
                ours[number] = open(here, "r" if number else "w", newline="")  # noqa: SIM115 - until the process has ended
                given[number] = there
                theirs.append(there)
        self.stdin, self.stdout, self.stderr = ours.get(0), ours.get(1), ours.get(2)
        self.args, self.returncode = arguments, None
        given = [os.open(os.devnull, os.O_RDWR) if file == subprocess.DEVNULL else file for file in given]
        theirs += [file for file, asked in zip(given, [stdin, stdout, stderr], strict=True) if asked == subprocess.DEVNULL]
        answers, end = socket.socketpair()
        environment = dict(os.environ if env is None else env)
        asked = [[os.fspath(each) for each in arguments], environment, os.getcwd(), start_new_session]
        files = [file if isinstance(file, int) else file.fileno() for file in given]
        with answers, end:
            self._answers = answers.makefile("rb", buffering=0)
            socket.send_fds(_server(), [json.dumps(asked).encode()], [end.fileno(), *files])
        for file in theirs:
            os.close(file)
        self.pid = int(self._answers.readline())

    def poll(self):
        """The exit code, if it has ended."""
        if self.returncode is None and select.select([self._answers], [], [], 0)[0]:
            self.returncode = int(self._answers.readline())
            self._answers.close()
        return self.returncode

    def wait(self, timeout=600):
        """The exit code, when it has ended; after that many seconds it is killed."""
        killing = threading.Timer(timeout, self.kill)
        killing.start()
        try:
            if self.returncode is None:
                self.returncode = int(self._answers.readline())
                self._answers.close()
        finally:
            killing.cancel()
            killing.join()
        return self.returncode

    def communicate(self, timeout=600):
        """What it has written until its end; after that many seconds it is killed."""
        killing = threading.Timer(timeout, self.kill)
        killing.start()
        try:
            self.stdin.close()
            errors = []
            reading = threading.Thread(target=lambda: errors.append(self.stderr.read()))
            reading.start()
            out = self.stdout.read()
            reading.join()
        finally:
            killing.cancel()
            killing.join()
        self.wait(timeout)
        return out, errors[0]

    def send_signal(self, number):
        """Nothing is sent to a process that is known to have ended."""
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self):
        """Ends it at once."""
        self.send_signal(signal.SIGKILL)

    def __enter__(self):
        return self

    def __exit__(self, error_class, *_):
        if error_class is not None:
            self.kill()
        if self.stdin is not None:
            self.stdin.close()
        self.wait()
        for file in (self.stdout, self.stderr, self._answers):
            if file is not None:
                file.close()


def run(arguments, *, env=None, timeout=600):
    """Runs a program to its end: what `subprocess.run` returns with ``capture_output=True, text=True``."""
    with Forked(arguments, env=env) as process:
        out, err = process.communicate(timeout)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def started(number, start):
    """What ``start`` returns for each rank, when it is done, of the environment by which the ranks find each other.

    It is that which torchrun gives them; what is returned are futures.
    """
    from ports import free_port

    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(number)}
    with concurrent.futures.ThreadPoolExecutor(number) as at_once:
        return [at_once.submit(start, {**meeting, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(number)]


def popen(command, **settings):
    """Starts a program as `subprocess.Popen` does, in whose place it is; ``python`` is forked."""
    return Forked(command[1:], **settings) if command[0] == sys.executable else START(command, **settings)


@functools.cache
def _server():
    """The process that forks, which ends with that of the tests."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LONGEST)
    with theirs:
        program = (
            "import atexit, runpy, sys; del sys.path[0]; last = []; atexit.register(lambda: [end() for end in last]); "
            f"runpy.run_path({__file__!r}, {{'LAST': last}}, '__main__')"
        )
        command = [sys.executable, "-c", program, str(theirs.fileno())]
        process = START(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True)
    atexit.register(process.wait)
    atexit.register(ours.close)
    return ours


def _serve(requests):
    """Returns in a fork that is to become a program, with what was asked; ends when nobody can ask any more."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # of which none becomes a zombie
    while True:
        text, files, *_ = socket.recv_fds(requests, LONGEST, 4)
        if not text:
            sys.exit()
        with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
            pid = os.fork()  # a thread that scikit-learn has started is not in the fork
        if pid == 0:
            requests.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            answers = socket.socket(fileno=files[0])
            if _tell_what_becomes_of_a_fork(answers, files[1:]) is None:
                answers.close()
                return json.loads(text), files[1:]
        for file in files:
            os.close(file)


def _tell_what_becomes_of_a_fork(answers, files):
    """Returns in the fork; the process that has forked tells its id and its exit code, and ends."""
    if (pid := os.fork()) == 0:
        return
    for file in files:
        os.close(file)
    answers.sendall(b"%d\n" % pid)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    try:
        answers.sendall(b"%d\n" % code)
    finally:
        os._exit(0)


def _become(asked, files):
    """Gives the process what was asked for: its session, files, environment and directory; returns the arguments."""
    arguments, environment, directory, leads = asked
    if leads:
        os.setsid()
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        buffering = 1 if number == 2 or os.isatty(number) else -1
        setattr(sys, name, open(number, "w" if number else "r", buffering, closefd=False))  # noqa: SIM115 - for all its life
        setattr(sys, f"__{name}__", getattr(sys, name))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.modules["numpy"].random.seed()  # the others begin anew by themselves
    sys.modules["torch"].set_num_threads(1)  # of which several programs run at once
    sys.path[:0] = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path and path not in sys.path]
    return arguments


def _main():
    """The server, and in its forks the programs."""
    sys.modules["triton"] = None  # of builds for CUDA, which says at the end of a process what it has not freed
    for name in PRELOADED:
        importlib.import_module(name)
    gc.freeze()  # no program goes through all of that when it ends
    asked, files = _serve(socket.socket(fileno=int(sys.argv[1])))
    main, code = types.ModuleType("__main__"), 1
    try:
        _run(main, _become(asked, files))
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        raise
    except KeyboardInterrupt:
        code = None  # by which the interpreter ends as one that SIGINT has ended
        raise
    finally:
        if code is not None:
            LAST.append(functools.partial(_end, main, code))  # noqa: F821 - the functions that this process calls last


def _run(main, arguments):
    """Runs a program by what follows ``python`` on a command line, in a module that is to be ``__main__``."""
    first, *rest = arguments
    if first == "-m":
        sys.argv = rest
        sys.path.insert(0, os.getcwd())
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        return
    if first == "-c":
        sys.argv, folder, program, name = ["-c", *rest[1:]], "", rest[0], "<string>"
    else:
        sys.argv, folder, name = [first, *rest], os.path.dirname(os.path.abspath(first)), first
        with open(first, encoding="utf-8") as file:
            program = file.read()
        main.__file__ = name
    sys.path.insert(0, folder)
    sys.modules["__main__"] = main
    exec(compile(program, name, "exec"), vars(main))


def _end(main, code):
    """Ends the process after all else that its interpreter does at its end, but for taking modules apart.

    What the program has made is deleted; what it has imported stays, which would take a third of a second.
    """
    sys.last_value = sys.last_traceback = None  # in which the frames of an error are
    vars(main).clear()
    gc.collect()
    with contextlib.suppress(OSError):  # with which the interpreter ends as it does
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _main()
