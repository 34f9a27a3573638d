"""A machine whose processors, memory and clock stand still, for tests that compare what runs report."""

import time
import types

import psutil


def hold_still(monkeypatch):
    process = types.SimpleNamespace(memory_info=lambda: types.SimpleNamespace(rss=2**30))
    times, now = psutil.cpu_times(), time.time()
    monkeypatch.setattr(psutil, "Process", lambda: process)
    monkeypatch.setattr(psutil, "cpu_times", lambda: times)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: types.SimpleNamespace(percent=25.0))
    monkeypatch.setattr(time, "process_time", lambda: 1.0)
    monkeypatch.setattr(time, "time", lambda: now)
