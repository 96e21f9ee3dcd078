"""`tapio top` in a terminal, beside a disk whose every request is known: top.py URI PID NAME COMMAND...

URI is the disk's, PID that of the storage below it, which can be stopped; NAME is the end of its row, and there is
another disk that does nothing, which comes before it by name. COMMAND starts `tapio top` with an interval of a second.
Prints `done` at the end.
"""

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import nbd

URI, STORAGE, NAME = sys.argv[1], int(sys.argv[2]), sys.argv[3]
LIMIT = 60  # seconds for a state to come about
WRITES, LEN, READS = 2000, 4096, 20
COLUMNS = "read write read_mib write_mib mean p99 fly wait queued image kernel completing".split()


class Terminal:
    """A terminal with `tapio top` in it, read frame by frame."""

    def __init__(self, command):
        self.main, self.side = pty.openpty()
        self.resize(24)
        self.before = termios.tcgetattr(self.side)
        self.top = subprocess.Popen(command, stdin=self.side, stdout=self.side, stderr=self.side)
        self.bytes = b""
        self.seen = b""

    def resize(self, rows):
        fcntl.ioctl(self.side, termios.TIOCSWINSZ, struct.pack("HHHH", rows, 200, 0, 0))

    def read(self):
        assert select.select([self.main], [], [], LIMIT)[0], f"silent after {self.bytes[-500:]}"
        piece = os.read(self.main, 65536)
        self.bytes += piece
        self.seen += piece

    def frame(self):
        """The next frame: its lines."""
        while b"\x1b[K\x1b[J" not in self.bytes:
            self.read()
        text, _, self.bytes = self.bytes.partition(b"\x1b[K\x1b[J")
        # The terminal puts a return of its own before the end of a line.
        return re.split("\x1b\\[K\r+\n", text.rpartition(b"\x1b[H")[2].decode())

    def until(self, what, state):
        """The first frame of which this is true."""
        for _ in range(4 * LIMIT):
            lines = self.frame()
            if state(lines):
                return lines
        raise AssertionError(f"no {what}; the last frame is {lines}")

    def key(self, key):
        os.write(self.main, key)


def figures_of(line):
    # A time is two words: its number and its unit.
    words = re.sub(r"(\d) (ns|us|ms|s)\b", r"\1\2", line).split()
    return dict(zip(COLUMNS, words[1:]))


def row(lines, end):
    """Figures of the row that ends so."""
    return next((figures_of(line) for line in lines[3:] if line.endswith(end)), None)


def samples(terminal):
    """One frame of each sample, which is drawn several times."""
    last = None
    while True:
        lines = terminal.frame()
        if lines[2:] != last:
            last = lines[2:]
            yield lines


def amounts(terminal, disk):
    """A known number of writes is in the figures, in whichever intervals they were answered; times are in units."""
    terminal.until("row of the disk", lambda lines: row(lines, NAME))
    for number in range(WRITES):
        disk.pwrite(b"x" * LEN, number * LEN)
    total, slack, shown, idle = 0.0, 1.0, 0, 0
    for lines in samples(terminal):
        figures = row(lines, NAME)
        seconds = float(re.search(r"disks, ([0-9.]+) s", lines[0])[1])
        rate = float(figures["write"])
        if rate == 0 and total >= WRITES - slack:
            break
        if rate == 0:
            # Before the first, and where the disk or the one that writes had no turn.
            idle += 1
            assert idle < LIMIT, (total, slack)
            continue
        shown += 1
        total += rate * seconds
        # The rate is printed as a whole number, the interval with one decimal.
        slack += 0.5 * seconds + rate * 0.06
        assert abs(float(figures["write_mib"]) - rate * LEN / (1 << 20)) <= 0.06 + LEN / (1 << 20), figures
        assert figures["read"] == "0" and figures["read_mib"] == "0.0", figures
        assert re.fullmatch(r"[0-9.]+(ns|us|ms|s)", figures["mean"]), figures
        assert re.fullmatch(r"[0-9.]+(ns|us|ms|s)", figures["p99"]), figures
        # The other disk does nothing.
        assert figures_of(lines[2])["write"] == figures["write"], lines
    assert shown > 0 and abs(total - WRITES) <= slack, (total, slack)


def state_of(stat):
    return stat.read_text().rpartition(") ")[2][0]


def standing_still(terminal, disk):
    """The storage does not answer: what is in flight is known to the last request."""
    os.kill(STORAGE, signal.SIGSTOP)
    # Its threads stop one after the other, and one that still runs would answer.
    while not all(state_of(stat) == "T" for stat in Path(f"/proc/{STORAGE}/task").glob("*/stat")):
        time.sleep(0.001)
    buffers = [nbd.Buffer(LEN) for _ in range(READS)]
    cookies = [disk.aio_pread(buffer, number * LEN) for number, buffer in enumerate(buffers)]
    is_held = lambda lines: (row(lines, NAME) or {}).get("fly") == str(READS)
    lines = terminal.until("requests in flight", is_held)
    assert row(lines, NAME)["read"] == "0" and lines[2].split()[0] == "total", lines
    assert figures_of(lines[2])["fly"] == str(READS), lines
    keys(terminal)
    # What is paused stays as it is, though the requests are answered.
    terminal.key(b"p")
    terminal.until("the word that it is paused", lambda lines: lines[0].endswith(", paused"))
    os.kill(STORAGE, signal.SIGCONT)
    while not all(disk.aio_command_completed(cookie) for cookie in cookies):
        disk.poll(-1)
        cookies = [cookie for cookie in cookies if not disk.aio_command_completed(cookie)]
    for _ in range(6):
        assert is_held(terminal.frame())
    terminal.key(b" ")
    terminal.until("an end of the pause", lambda lines: not lines[0].endswith(", paused"))
    terminal.until("an end of all requests", lambda lines: row(lines, NAME)["fly"] == "0")


def keys(terminal):
    """Each key sorts by its column; another key does nothing."""
    words = {b"r": "read", b"w": "write", b"t": "throughput", b"l": "latency", b"n": "name", b"i": "queue"}
    for key, word in words.items():
        terminal.key(key)
        lines = terminal.until(f"order by {word}", lambda lines: lines[0].endswith(f", by {word}"))
        first = lines[3].endswith(NAME)
        if word in ("name", "queue"):
            assert first == (word == "queue"), (word, lines)
    terminal.key(b"x")
    for _ in range(3):
        assert terminal.frame()[0].endswith(", by queue")


def end(terminal):
    """Three rows are enough for it, and the terminal is as it was."""
    terminal.resize(3)
    terminal.top.send_signal(signal.SIGWINCH)
    lines = terminal.until("a small frame", lambda lines: len(lines) == 3)
    assert re.fullmatch(r"\d more", lines[2]), lines
    terminal.key(b"q")
    while b"\x1b[?1049l" not in terminal.seen:
        terminal.read()
    assert terminal.top.wait(LIMIT) == 0
    assert termios.tcgetattr(terminal.side) == terminal.before
    # The other screen was left, and the cursor shown; nothing had a colour.
    assert terminal.seen.count(b"\x1b[?1049h") == terminal.seen.count(b"\x1b[?1049l") == 1
    assert terminal.seen.rfind(b"\x1b[?25h") > terminal.seen.rfind(b"\x1b[?25l")
    assert not re.search(rb"\x1b\[[0-9;]*m", terminal.seen)


def main():
    disk = nbd.NBD()
    disk.connect_uri(URI)
    terminal = Terminal(sys.argv[4:])
    try:
        amounts(terminal, disk)
        standing_still(terminal, disk)
        end(terminal)
    finally:
        os.kill(STORAGE, signal.SIGCONT)
        if terminal.top.poll() is None:
            terminal.top.kill()
    print("done")


main()
