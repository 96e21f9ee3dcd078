"""Requests that are huge, malformed, slow or many: storms.py json DIR PART... The daemon ends what is late after 5 s.

A part makes its storm as `alice` of this address, sees that root on the UNIX socket is answered in its middle, and how
the storm ends.
"""

import json
import os
import socket
import ssl
import time
import urllib.parse

from clients import LIMIT, MIB, tell, wait

HEAD = "POST {} HTTP/1.1\r\nHost: h\r\nContent-Length: {}\r\n\r\n"


def plain():
    url = urllib.parse.urlsplit(os.environ["TAPIO_HTTP"])
    return socket.create_connection((url.hostname, url.port), timeout=LIMIT)


def secret(handshake=True):
    url = urllib.parse.urlsplit(os.environ["TAPIO_HTTPS"])
    stream = socket.create_connection((url.hostname, url.port), timeout=LIMIT)
    return ssl._create_unverified_context().wrap_socket(stream) if handshake else stream


def ask(body, path="/jsonrpc", stream=None):
    """One request: its status and the body of its answer."""
    stream = stream or plain()
    body = body if isinstance(body, bytes) else body.encode()
    head = f"POST {path} HTTP/1.0\r\nHost: h\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    try:
        stream.sendall(head + body)
    except (BrokenPipeError, ConnectionResetError):
        # It was refused before all of it was read: the answer is there.
        pass
    answer = b""
    while piece := stream.recv(1 << 16):
        answer += piece
    stream.close()
    head, _, rest = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), rest


def others_are_answered(times=5):
    """Root on the UNIX socket; the median of the times that it took."""
    took = []
    for _ in range(times):
        began = time.monotonic()
        stream = socket.socket(socket.AF_UNIX)
        stream.settimeout(LIMIT)
        stream.connect(os.environ["TAPIO_SOCKET"])
        status, said = ask(json.dumps({"jsonrpc": "2.0", "id": 1, "method": "system.listMethods", "params": []}), stream=stream)
        assert status == 200 and b"VDI.create" in said
        took.append(time.monotonic() - began)
    return sorted(took)[times // 2]


def others_are_as_fast(quiet):
    """No answer waits for what the storm does: the median is that of a quiet daemon, but for what this host adds."""
    took = others_are_answered(21)
    assert took < 10 * quiet + 0.1, (took, quiet)


def ends(stream):
    """The daemon closes it, with or without a word; answers the status."""
    try:
        said = b""
        while piece := stream.recv(4096):
            said += piece
    except (ConnectionResetError, ssl.SSLError):
        pass
    stream.close()
    return said.split(b" ")[1].decode() if b" " in said else ""


def idle(call):
    """A thousand connections that do nothing, or not enough, to both doors."""
    quiet = others_are_answered(21)
    silent = [plain() for _ in range(450)] + [secret(handshake=False) for _ in range(350)]
    begun = []
    for make in (plain, secret):
        for number in range(50):
            stream = make()
            stream.sendall(b"POST / HT" if number % 2 else HEAD.format("/", 4000000).encode() + b"<methodCall>")
            begun.append((number % 2, stream))
    assert len(silent) + len(begun) == 900
    one_byte = [plain() for _ in range(100)]
    for stream in one_byte:
        stream.sendall(b"P")
    others_are_as_fast(quiet)
    assert len(call("pool.get_all")) == 1, "an account of the same address is answered, too"
    # A byte now and then does not keep a head open.
    for _ in range(3):
        time.sleep(0.5)
        for stream in one_byte:
            try:
                stream.sendall(b"x")
            except OSError:
                pass
    for is_head, stream in begun:
        assert ends(stream) in (("", "408") if is_head else ("408",)), is_head
    for stream in one_byte + silent:
        assert ends(stream) in ("", "408", "400"), stream
    others_are_answered()


def malformed(call):
    """Texts that nest, lengthen and multiply: each is refused, or answered, and nothing else."""
    def nested(levels):
        return '{"jsonrpc":"2.0","id":1,"method":"pool.get_all","params":' + "[" * levels + "]" * levels + "}"

    for levels in (33, 10_000, 1_000_000):
        status, said = ask(nested(levels))
        assert status == 200 and b"-32700" in said, (levels, status, said[:200])
    arrays = "<value><array><data>" * 40_000
    status, said = ask("<methodCall><methodName>x</methodName><params><param>" + arrays, path="/")
    assert status == 200 and b"<fault>" in said, said[:200]
    # Entities: none is made longer, and none reads a file.
    for entity in ('<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;&a;&a;&a;">', '<!ENTITY b SYSTEM "file:///etc/passwd">'):
        body = f"<?xml version='1.0'?><!DOCTYPE x [{entity}]><methodCall><methodName>&b;</methodName></methodCall>"
        status, said = ask(body, path="/")
        assert status in (200, 400) and b"<fault>" in said and b"root:" not in said, said[:200]
    # As many values as a call may have, and more; names and texts of megabytes.
    status, said = ask('{"jsonrpc":"2.0","id":1,"method":"x","params":[' + "1," * 200_000 + "1]}")
    assert status == 200 and b"-32700" in said, said[:200]
    long = "n" * (3 * MIB)
    assert call("VDI.get_by_name_label", long) == []
    status, said = ask(json.dumps({"jsonrpc": "2.0", "id": 1, "method": long, "params": []}))
    assert status == 200 and b"MESSAGE_METHOD_UNKNOWN" in said and len(said) < 4096, (status, len(said))
    status, _ = ask(json.dumps({"jsonrpc": "2.0", "id": 1, "method": "x", "params": ["n" * (5 * MIB)]}))
    assert status == 413, status
    for number in ("1e999", "-1e999", "9" * 400, "0." + "0" * 100_000 + "1"):
        status, said = ask('{"jsonrpc":"2.0","id":1,"method":"pool.get_all","params":[%s]}' % number)
        assert status == 200 and b"error" in said and len(said) < 4096, (number[:9], said[:200])
    for text in (b"\xff\xfe" * 1000, b"\0" * 1000, b"{" * 1000, b'"\\ud800"', b""):
        status, said = ask(text)
        assert status in (200, 400) and (b"error" in said or b"fault" in said or status == 400), (text[:9], status, said[:99])
    # Batches: an empty one, one of many calls, one whose answers together are too long.
    status, said = ask("[]")
    assert status == 200 and b"-32600" in said, said
    one = {"jsonrpc": "2.0", "id": 1, "method": "pool.get_all", "params": [call.reference]}
    answers = json.loads(ask(json.dumps([one] * 2000))[1])
    answers = answers if isinstance(answers, list) else [answers]
    assert len(answers) in (1, 2000), len(answers)
    names = {"jsonrpc": "2.0", "id": 1, "method": "system.listMethods", "params": []}
    status, said = ask(json.dumps([names] * 2000))
    assert len(said) < 20 * MIB and b"error" in said, (status, len(said))
    others_are_answered()


def deaf(call):
    """Listeners that wait, and never read what they are told."""
    quiet = others_are_answered(21)
    pool = call("pool.get_all")[0]
    token = call("event.from", ["*"], "", 0.0)["token"]
    listeners = []
    for _ in range(300):
        body = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "event.from", "params": [call.reference, ["*"], token, 60]})
        stream = plain()
        stream.sendall((HEAD.format("/jsonrpc", len(body)) + body).encode())
        listeners.append(stream)
    for number in range(100):
        call("pool.set_name_label", pool, f"{number} " + "x" * 10_000)
    others_are_as_fast(quiet)
    assert call("pool.get_name_label", pool).startswith("99 ")
    call("pool.set_name_label", pool, "")
    # Each was told once, and can still read that.
    for stream in listeners:
        assert stream.recv(12) == b"HTTP/1.1 200", "an answer begins"
        stream.close()


def sessions(call):
    """More logins than an account may have sessions: the oldest end, and other accounts keep theirs."""
    url = os.environ["TAPIO_SOCKET"]
    login = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "session.login_with_password", "params": ["root", ""]})
    stream = socket.socket(socket.AF_UNIX)
    stream.settimeout(LIMIT)
    stream.connect(url)
    refs = []
    file = stream.makefile("rb")
    for _ in range(700):
        stream.sendall((HEAD.format("/jsonrpc", len(login)) + login).encode())
        length = 0
        while (line := file.readline().strip()) != b"":
            if line.lower().startswith(b"content-length:"):
                length = int(line.split(b":")[1])
        refs.append(json.loads(file.read(length))["result"])
    def code(ref):
        body = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "pool.get_all", "params": [ref]})
        return json.loads(ask(body)[1]).get("error", {}).get("message", "")
    assert [code(refs[number]) for number in (0, 199, 201, 699)] == ["SESSION_INVALID"] * 2 + [""] * 2
    assert len(call("pool.get_all")) == 1, "the session of another account goes on"
    body = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "session.logout_subject_identifier", "params": [refs[699], "root"]})
    assert ask(body)[0] == 200
    for ref in refs[200:]:
        ask(json.dumps({"jsonrpc": "2.0", "id": 1, "method": "session.logout", "params": [ref]}))


tell(globals())
