"""A client of the thin CLI protocol, written from its description: argv[1] is tcp:HOST:PORT, tls:HOST:PORT or unix:PATH,
the rest are the words. Prints what it is told to, and ends with the status that it is told."""
import os
import socket
import ssl
import struct
import sys

PREFIX = b"XenSource thin CLI protocol"


def connect(where):
    kind, rest = where.split(":", 1)
    if kind == "unix":
        stream = socket.socket(socket.AF_UNIX)
        stream.connect(rest)
        return stream
    host, port = rest.rsplit(":", 1)
    stream = socket.create_connection((host, int(port)))
    if kind == "tls":
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        stream = context.wrap_socket(stream)
    return stream


def exactly(stream, count):
    data = b""
    while len(data) < count:
        piece = stream.recv(count - len(data))
        if not piece:
            sys.exit(f"the server went away after {data!r}")
        data += piece
    return data


def number(stream):
    return struct.unpack("<I", exactly(stream, 4))[0]


class Reader:
    def __init__(self, data):
        self.data = data

    def number(self):
        value, self.data = struct.unpack("<I", self.data[:4])[0], self.data[4:]
        return value

    def text(self):
        count = self.number()
        value, self.data = self.data[:count], self.data[count:]
        return value.decode()


def send(stream, *numbers):
    stream.sendall(struct.pack(f"<I{len(numbers)}I", 4 * len(numbers), *numbers))


def load(stream, path):
    try:
        data = open(path, "rb").read()
    except OSError:
        return send(stream, 10, 6)
    send(stream, 10, 5)
    send(stream, 11, 7, len(data))
    stream.sendall(data)
    send(stream, 11, 8)


def fetch(stream, where, path, url):
    source = connect(where)
    source.sendall(f"GET {url} HTTP/1.0\r\n\r\n".encode())
    data = b""
    while piece := source.recv(65536):
        data += piece
    head, body = data.split(b"\r\n\r\n", 1)
    if b" 200 " not in head.split(b"\r\n")[0]:
        return send(stream, 10, 6)
    # A sign of life, as of a long copy.
    send(stream, 10, 18)
    with open(path, "xb") as file:
        file.write(body)
    send(stream, 10, 5)


def put(stream, where, path, url):
    try:
        data = open(path, "rb").read()
    except OSError:
        sys.stderr.write(f"Operation failed. Error: file '{path}' does not exist\n")
        return send(stream, 10, 6)
    target = connect(where)
    target.sendall(f"PUT {url} HTTP/1.0\r\nContent-length: {len(data)}\r\n\r\n".encode())
    # Not a byte before the answer.
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        head += exactly(target, 1)
    if b" 200 " not in head.split(b"\r\n")[0]:
        return send(stream, 10, 6)
    target.sendall(data)
    target.close()
    send(stream, 10, 5)


def main():
    where, words = sys.argv[1], sys.argv[2:]
    stream = connect(where)
    body = "\n".join(words).encode()
    stream.sendall(b"POST /cli HTTP/1.0\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
    assert exactly(stream, len(PREFIX)) == PREFIX
    assert (number(stream), number(stream)) == (0, 2)
    stream.sendall(PREFIX + struct.pack("<II", 0, 2))
    while True:
        message = Reader(exactly(stream, number(stream)))
        assert message.number() == 9
        command = message.number()
        if command == 0:
            print(message.text(), flush=True)
        elif command == 16:
            sys.stderr.write(message.text())
        elif command == 1:
            load(stream, message.text())
        elif command == 12:
            path = message.text()
            fetch(stream, where, path, message.text())
        elif command == 13:
            path = message.text()
            put(stream, where, path, message.text())
        elif command == 4:
            sys.exit(message.number())
        else:
            sys.exit(f"an unknown command {command}")


main()
