"""Consoles of a VM in the dashboard, as a person uses them: a headless Chromium, as in dashboard.py.

Arguments: the directory for screenshots; `terminal` (a guest with a shell at it) or `screen` (a guest that shows what is
typed, sends it to its serial port, and becomes red at '!'). TAPIO_HTTP is the daemon; the accounts are alice (pool-admin)
and carol (read-only); the VM is called guest. Prints lines `secret TEXT` of what no log may have, and `done` at the end.
"""

import json
import os
import sys
import urllib.request

from dashboard import HTTP, SHOTS, Browser, check, until

# Opens a console by a ticket beside the page; what comes is window.said, and window.other is its socket.
OPEN = """
const [ticket, done] = arguments;
const socket = new WebSocket(`ws://${location.host}/console`, ["binary", `ticket.${ticket}`]);
socket.binaryType = "arraybuffer";
socket.onopen = () => { window.other = socket; window.said = ""; done("open"); };
socket.onmessage = ({ data }) => { window.said += new TextDecoder().decode(data); };
socket.onclose = () => done("refused");
"""
FOCUS = "return document.activeElement.tagName + ' ' + (document.activeElement.getAttribute('aria-label') ?? document.activeElement.textContent)"
ROWS = "return (document.querySelector('.rows')?.innerText ?? '').split('\\n').map((row) => row.trimEnd()).join('\\n')"
SIZE = "return document.querySelector('canvas.screen')?.dataset.size ?? ''"
LIT = """
const canvas = document.querySelector('canvas.screen');
const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
let lit = 0;
for (let at = 0; at < data.length; at += 4) if (data[at] + data[at + 1] + data[at + 2] > 100) lit += 1;
return lit;
"""
MIDDLE = """
const canvas = document.querySelector('canvas.screen');
return [...canvas.getContext('2d').getImageData(canvas.width / 2, canvas.height / 2, 1, 1).data];
"""

# An RFB server that lies, and what the client of the page makes of it: its error, or "still there".
HOSTILE = """
const [done] = arguments;
import('/dashboard/rfb.js').then(async ({ Rfb }) => {
  const be16 = (n) => [n >> 8 & 255, n & 255], be32 = (n) => [n >>> 24, n >>> 16 & 255, n >>> 8 & 255, n & 255];
  const text = (t) => [...t].map((c) => c.charCodeAt(0));
  const hello = (w, h) => [...text('RFB 003.008\\n'), 1, 1, ...be32(0), ...be16(w), ...be16(h), ...Array(16).fill(0), ...be32(2), 104, 105];
  const rect = (x, y, w, h, kind, ...data) => [...be16(x), ...be16(y), ...be16(w), ...be16(h), ...be32(kind), ...data];
  const update = (...rects) => [0, 0, ...be16(rects.length), ...rects.flat()];
  const try_it = async (bytes) => {
    let areas = 0;
    const rfb = new Rfb({ send() {}, painted() { areas += 1; }, resized() {} });
    const ran = rfb.run(() => Promise.resolve()).catch((error) => error.message);
    rfb.push(Uint8Array.from(bytes));
    rfb.end();
    return `${await ran} (${areas}, ${rfb.pixels.length})`;
  };
  const copies = Array(20).fill(rect(0, 0, 64, 64, 1, 0, 0, 0, 0));
  const said = {
    web: await try_it(text('HTTP/1.1 200 OK\\r\\n\\r\\n')),
    password: await try_it([...text('RFB 003.008\\n'), 1, 2]),
    huge: await try_it(hello(65535, 65535)),
    empty: await try_it(hello(0, 10)),
    name: await try_it([...hello(64, 64).slice(0, -6), ...be32(0xffffffff)]),
    outside: await try_it([...hello(64, 64), ...update(rect(60, 0, 5, 1, 0, ...Array(20).fill(0)))]),
    from_outside: await try_it([...hello(64, 64), ...update(rect(0, 0, 4, 4, 1, ...be16(61), ...be16(0)))]),
    unknown: await try_it([...hello(64, 64), ...update(rect(0, 0, 4, 4, 7))]),
    tile: await try_it([...hello(64, 64), ...update(rect(0, 0, 4, 4, 5, 24, 1, 0, 0, 0, 0, 0, 255))]),
    grows: await try_it([...hello(64, 64), ...update(rect(0, 0, 60000, 60000, 0xffffff21))]),
    paints: await try_it([...hello(64, 64), ...update(...copies)]),
    clipboard: await try_it([...hello(64, 64), 3, 0, 0, 0, ...be32(0x7fffffff)]),
    message: await try_it([...hello(64, 64), 9]),
    honest: await try_it([...hello(64, 64), 2, 1, 0, ...be16(0), ...be16(1), 1, 2, 3, 4, 5, 6, 3, 0, 0, 0, ...be32(2), 1, 2,
      ...update(rect(0, 0, 1, 1, 0, 1, 2, 3, 0), rect(0, 0, 32, 32, 0xffffff21), rect(16, 16, 16, 16, 5, 30, 9, 9, 9, 0, 7, 7, 7, 0, 1, 1, 1, 1, 0, 0x11, 0x22))]),
  };
  let seed = 1;
  const random = () => (seed = (seed * 1103515245 + 12345) & 0x7fffffff) >> 16;
  const good = [...hello(64, 64), ...update(rect(0, 0, 32, 32, 5, ...Array(40).fill(30))), ...update(rect(0, 0, 8, 8, 1, 0, 0, 0, 0))];
  let ended = 0;
  for (let round = 0; round < 3000; round += 1) {
    const bytes = [...good, ...Array(200)].map((byte) => byte ?? random() & 255);
    for (let index = 0; index < 1 + round % 4; index += 1) bytes[12 + random() % (bytes.length - 12)] = random() & 255;
    if (/\\(\\d+, \\d+\\)$/.test(await try_it(bytes))) ended += 1;
  }
  said.noise = String(ended);
  done(said);
}).catch((error) => done({ failed: String(error) }));
"""
# Bytes of a guest that are no text: a terminal keeps its shape and its bounds, and answers in its two forms alone.
NOISE = """
const [done] = arguments;
import('/dashboard/vt.js').then(({ COLUMNS, ROWS, Vt }) => {
  let seed = 1, replies = [], bad = '';
  const random = () => (seed = (seed * 1103515245 + 12345) & 0x7fffffff) >> 16 & 255;
  const letters = '[]();?!0123456789ABCDHJKLMPST@XcdfghlmnrsuM78DE';
  const vt = new Vt((text) => replies.push(text));
  const is_good = () => vt.rows.length === ROWS && vt.rows.every((row) => row.length === COLUMNS) && vt.past.length <= 1000
    && vt.x >= 0 && vt.x < COLUMNS && vt.y >= 0 && vt.y < ROWS && vt.numbers.length <= 16 && vt.numbers.every((number) => number <= 9999);
  vt.write(new TextEncoder().encode('\\x1b[999999999;999999999H\\x1b[99999999@\\x1b[99999999L\\x1b[99999999S\\x1b[' + '1;'.repeat(1000) + 'm'));
  if (!is_good()) bad = 'large numbers';
  for (let round = 0; round < 3000 && !bad; round += 1) {
    vt.write(Uint8Array.from({ length: 200 }, () => { const at = random(); return at < 70 ? 27 : at < 160 ? letters.charCodeAt(at % letters.length) : random(); }));
    if (!is_good()) bad = `round ${round}: ${vt.x} ${vt.y} ${vt.rows.length} ${vt.past.length}`;
  }
  vt.write(new TextEncoder().encode('\\x18\\x1b[6n\\x1b[5n\\x1b[c'));
  const other = replies.find((text) => !/^\\x1b\\[(\\d+;\\d+R|0n|\\?6c)$/.test(text));
  done(bad || (other ? `answered ${JSON.stringify(other)}` : replies.length >= 3 ? 'good' : 'never answered'));
}).catch((error) => done(String(error)));
"""
EXPECTED = {
    "web": "does not speak RFB", "password": "asks for a password", "huge": "65535 by 65535 is not shown", "empty": "0 by 10 is not shown",
    "name": "its name has", "outside": "not on the screen (0", "from_outside": "copied rectangle", "unknown": "encoding (7)",
    "tile": "part of a tile", "grows": "60000 by 60000 is not shown", "paints": "paints more than there is to see (16", "clipboard": "its clipboard has",
    "message": "kind 9", "honest": "has gone (2, 1024)", "noise": "3000",
}


def call(method, *params):
    body = json.dumps({"jsonrpc": "2.0", "id": 1, "method": method, "params": params}).encode()
    request = urllib.request.Request(HTTP + "/jsonrpc", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as reply:
        answer = json.loads(reply.read())
    assert "error" not in answer, answer
    return answer["result"]


def ticket(session, console):
    body = f"session_id={session}&uuid={console}".encode()
    with urllib.request.urlopen(HTTP + "/console/ticket", body, timeout=60) as reply:
        found = json.loads(reply.read())["result"]
    print(f"secret {found}", flush=True)
    return found


class Console:
    """A browser at the page of the guest's console."""

    def __init__(self, browser, kind):
        self.browser, self.kind = browser, kind
        browser.window(1280, 850)
        browser.dark(False)
        browser.open(HTTP + "/dashboard/")
        browser.log_in("alice", "correct horse")
        browser.sees("Storage repositories")
        self.session = browser.run("return sessionStorage.getItem('tapio-session')")
        print(f"secret {self.session}", flush=True)
        self.records = {record["protocol"]: record for record in call("console.get_all_records", self.session).values()}
        browser.click("//nav//a[normalize-space(.)='VMs']")
        browser.click("//main//td/a[normalize-space(.)='guest']")
        browser.button("Screen" if kind == "screen" else "Terminal")
        browser.sees("Connected")
        address = browser.run("return location.href")
        assert self.session not in address and "ticket" not in address, address
        assert browser.run("return performance.getEntriesByType('resource').map((e) => e.name).join(' ')").count(self.session) == 0

    def open_beside(self, found):
        return self.browser.ask("POST", "/execute/async", {"script": OPEN, "args": [found]})

    def type(self, text):
        """Types keys as they come from a keyboard; what holds a modifier is text that has one."""
        keys = []
        for letter in text:
            keys += [{"type": "keyDown", "value": letter}, {"type": "keyUp", "value": letter}]
        self.browser.ask("POST", "/actions", {"actions": [{"type": "key", "id": "keyboard", "actions": keys}]})

    def leave(self):
        keys = [{"type": "keyDown", "value": "\ue009"}, {"type": "keyDown", "value": "]"}, {"type": "keyUp", "value": "]"}, {"type": "keyUp", "value": "\ue009"}]
        self.browser.ask("POST", "/actions", {"actions": [{"type": "key", "id": "keyboard", "actions": keys}]})

    def sizes(self, name):
        for size, width, height in (("phone", 390, 844), ("desktop", 1280, 850)):
            self.browser.window(width, height, size == "phone")
            check(self.browser, f"{name} {size}")
            self.browser.shot(f"{name}-{size}")

    def keyboard(self, named):
        """The console has the focus and a name, keeps the tab key, and is left by its own keys."""
        assert named in self.browser.run(FOCUS), self.browser.run(FOCUS)
        self.type("\ue004")
        assert named in self.browser.run(FOCUS), "the guest gets the tab key"
        self.leave()
        until("the focus is out", lambda: self.browser.run(FOCUS).startswith("BUTTON To the top"), lambda: self.browser.run(FOCUS))
        self.browser.run("document.querySelector('.console textarea, .console canvas').focus()")

    def ends(self):
        """A ticket is good once; consoles end with their session, and the page asks for a login."""
        protocol = "rfb" if self.kind == "screen" else "vt100"
        console = self.records[protocol]["uuid"]
        found = ticket(self.session, console)
        assert self.open_beside(found) == "open"
        assert self.open_beside(found) == "refused"
        unused = ticket(self.session, console)
        assert self.browser.run("return window.other.readyState") == 1
        call("session.logout", self.session)
        until("the console beside the page has ended", lambda: self.browser.run("return window.other.readyState") == 3)
        self.browser.sees("Log in")
        assert self.browser.run("return document.querySelector('.console')") is None
        assert self.open_beside(unused) == "refused"

    def reader(self):
        """A read-only account is told why it gets no console."""
        self.browser.log_in("carol", "correct horse")
        self.browser.sees("this needs vm-operator")
        assert self.browser.run("return document.querySelector('.console')") is None
        self.browser.click("//a[normalize-space(.)='The VM with its disks']")
        why = "return document.querySelector(`button[data-key='${arguments[0]}']`)?.title ?? ''"
        console = self.records["vt100"]["uuid"]
        until("a disabled button", lambda: "this needs vm-operator" in self.browser.run(why, console))


def terminal(console):
    browser = console.browser

    def prompt():
        console.type("\ue007")
        return "tapio#" in browser.run(ROWS)

    until("a shell", prompt, lambda: browser.run(ROWS))
    console.type("echo $((6*7))x\ue007")
    until("what was typed, and its answer", lambda: "\n42x" in browser.run(ROWS) and "$((6*7))x" in browser.run(ROWS), lambda: browser.run(ROWS))
    console.type("printf '\\033[1;32mgr''een\\033[0m\\033[7m in''verse\\033[0m \\303\\244\\n'; seq 40\ue007")
    until("colours and letters", lambda: browser.run("return document.querySelector('.ink-2.bold')?.textContent ?? ''") == "green")
    until("lines that have scrolled away", lambda: "green inverse ä" in browser.run("return document.querySelector('.past').textContent + document.querySelector('.rows').textContent"))
    until("the end of the list", lambda: "\n40\n" in browser.run(ROWS))
    until("a log for screen readers", lambda: "40" in browser.run("return [...document.querySelectorAll('[role=log] p')].map((p) => p.textContent)"))
    found = browser.ask("POST", "/execute/async", {"script": NOISE, "args": []})
    assert found == "good", found
    console.keyboard("TEXTAREA Terminal of VM \"guest\"")
    console.sizes("terminal")


def screen(console):
    browser = console.browser
    until("a screen", lambda: browser.run(SIZE) != "")
    assert browser.run("return document.querySelector('canvas.screen').getAttribute('aria-label')").startswith("Screen of VM \"guest\"")
    # What the guest got, by its serial port.
    assert console.open_beside(ticket(console.session, console.records["vt100"]["uuid"])) == "open"
    browser.run("document.querySelector('canvas.screen').focus()")
    said = lambda: browser.run("return window.said")

    def answers():
        console.type("a")
        return "a" in said()

    until("a guest that answers", answers, said)
    lit = browser.run(LIT)
    console.type("Hello, Tapio")
    until("what was typed reaches the guest", lambda: "Hello, Tapio" in said(), said)
    until("what was typed is on the screen", lambda: browser.run(LIT) > lit + 200, lambda: f"{lit} {browser.run(LIT)}")
    canvas = browser.element("//canvas")
    here = lambda x, y: {"type": "pointerMove", "duration": 0, "x": x, "y": y, "origin": {"element-6066-11e4-a52e-4f735466cecf": canvas}}

    def clicks():
        moves = [here(-50, -20), here(40, 30), {"type": "pointerDown", "button": 0}, here(60, 40), {"type": "pointerUp", "button": 0}]
        browser.ask("POST", "/actions", {"actions": [{"type": "pointer", "id": "mouse", "parameters": {"pointerType": "mouse"}, "actions": moves}]})
        return "1" in said()

    until("a button of the pointer", clicks, said)
    console.keyboard("CANVAS Screen of VM \"guest\"")
    console.sizes("screen-text")
    size = browser.run(SIZE)
    # As on a keyboard: with Shift held.
    keys = [{"type": "keyDown", "value": "\ue008"}, {"type": "keyDown", "value": "!"}, {"type": "keyUp", "value": "!"}, {"type": "keyUp", "value": "\ue008"}]
    browser.ask("POST", "/actions", {"actions": [{"type": "key", "id": "keyboard", "actions": keys}]})
    until("another size of the screen", lambda: browser.run(SIZE) not in ("", size), lambda: browser.run(SIZE))
    until("a red screen", lambda: browser.run(MIDDLE)[0] > 100 and browser.run(MIDDLE)[1:3] == [0, 0], lambda: str(browser.run(MIDDLE)))
    console.sizes("screen")
    found = browser.ask("POST", "/execute/async", {"script": HOSTILE, "args": []})
    for name, expected in EXPECTED.items():
        assert expected in found.get(name, ""), (name, found)


def main():
    kind = sys.argv[2]
    os.makedirs(SHOTS, exist_ok=True)
    browser = Browser()
    try:
        try:
            console = Console(browser, kind)
            {"terminal": terminal, "screen": screen}[kind](console)
            console.ends()
            console.reader()
        except BaseException:
            browser.shot("failed-" + kind)
            raise
        said = [entry for entry in browser.ask("POST", "/se/log", {"type": "browser"})
                if "favicon" not in entry["message"] and "WebSocket connection" not in entry["message"] and "getImageData" not in entry["message"]]
        assert said == [], said
    finally:
        browser.end()
    print("done")


if __name__ == "__main__":
    main()
