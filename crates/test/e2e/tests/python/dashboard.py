"""The dashboard, as a person uses it: a headless Chromium, driven over the WebDriver protocol.

Arguments: the directory for screenshots, and that of the default SR. TAPIO_HTTP is the daemon; the accounts are alice
(pool-admin) and carol (read-only), with the password "correct horse". A VM `busy` runs and reads and writes 64 KiB at a
time. Prints `done` at the end.
"""

import base64
import http.client
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time

HTTP = os.environ["TAPIO_HTTP"]
SHOTS, SR = sys.argv[1:3]
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
LIMIT = 60  # seconds for a state to come about


class Browser:
    """A session of chromedriver."""

    def __init__(self):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.profile = tempfile.mkdtemp(prefix="tapio-browser-")
        self.driver = subprocess.Popen(["chromedriver", f"--port={self.port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.path = ""
        until("chromedriver", self.is_ready)
        arguments = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
                     f"--user-data-dir={self.profile}", "--no-first-run", "--disable-background-networking"]
        wanted = {"goog:chromeOptions": {"args": arguments}, "goog:loggingPrefs": {"browser": "ALL"}}
        answer = self.ask("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self.path = "/session/" + answer["sessionId"]

    def is_ready(self):
        try:
            return self.ask("GET", "/status")["ready"]
        except OSError:
            return False

    def ask(self, method, path, body=None):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        text = json.dumps(body if body is not None else {}) if method == "POST" else None
        connection.request(method, self.path + path, text, {"content-type": "application/json"})
        value = json.loads(connection.getresponse().read())["value"]
        if isinstance(value, dict) and "error" in value:
            raise AssertionError(f"{path} {body}: {value['message']}")
        return value

    def end(self):
        try:
            if self.path:
                self.ask("DELETE", "")
        finally:
            self.driver.terminate()
            self.driver.wait(30)
            shutil.rmtree(self.profile, ignore_errors=True)

    def open(self, url):
        self.ask("POST", "/url", {"url": url})

    def run(self, script, *arguments):
        return self.ask("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def devtools(self, command, **params):
        return self.ask("POST", "/goog/cdp/execute", {"cmd": command, "params": params})

    def window(self, width, height, phone=False):
        self.devtools("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)

    def dark(self, on):
        self.devtools("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark" if on else "light"}])

    def shot(self, name):
        time.sleep(0.3)  # a redraw that is due; nothing is judged by it
        with open(os.path.join(SHOTS, name + ".png"), "wb") as file:
            file.write(base64.b64decode(self.ask("GET", "/screenshot")))

    def text(self):
        return self.run("return document.body.innerText")

    def sees(self, text):
        until(f"{text!r} on the page", lambda: text in self.text(), lambda: self.text()[-1500:])

    def element(self, xpath):
        found = self.ask("POST", "/elements", {"using": "xpath", "value": xpath})
        return found[0][ELEMENT] if found else None

    def click(self, xpath):
        """Clicks when it is there; what is redrawn meanwhile is looked up again."""
        def try_it():
            element = self.element(xpath)
            if element is None:
                return False
            try:
                self.ask("POST", f"/element/{element}/click")
                return True
            except AssertionError as error:
                if "stale" in str(error) or "intercepted" in str(error) or "not interactable" in str(error):
                    return False
                raise
        until(xpath, try_it, lambda: self.text()[-1500:])

    def button(self, text):
        # One that cannot be used yet is redrawn when what it waits for has come.
        self.click(f"//button[normalize-space(.)='{text}' and not(@aria-disabled)]")

    def in_dialog(self, text):
        self.click(f"//dialog//button[@type='submit' and normalize-space(.)='{text}']")

    def type(self, name, text):
        element = until(name, lambda: self.element(f"//*[@name='{name}']"))
        self.ask("POST", f"/element/{element}/clear")
        self.ask("POST", f"/element/{element}/value", {"text": text})

    def log_in(self, name, password):
        self.type("account", name)
        self.type("password", password)
        self.button("Log in")


def until(what, state, tell=lambda: ""):
    deadline = time.monotonic() + LIMIT
    while time.monotonic() < deadline:
        found = state()
        if found:
            return found
        time.sleep(0.05)
    raise AssertionError(f"no {what} within {LIMIT} s; {tell()}")


UNNAMED = """
return [...document.querySelectorAll('a[href], button, input, select, [role=img], [role=region], svg[role]')].filter((node) => {
  const label = node.getAttribute('aria-label') || node.textContent.trim() || node.closest('label')?.textContent.trim();
  return !label;
}).map((node) => node.outerHTML.slice(0, 200));
"""
# Words beside an axis that begin outside of their picture.
CLIPPED = """
const words = [...document.querySelectorAll('svg.chart text')];
return words.filter((text) => text.getBBox().x < 0).map((text) => text.textContent);
"""
WIDE = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"


def check(browser, where):
    """Everything that can be used has a name, and the page is not wider than the window."""
    assert browser.run(UNNAMED) == [], (where, browser.run(UNNAMED))
    assert browser.run("return document.querySelectorAll('h1').length") == 1, where
    assert browser.run("return document.querySelectorAll('[style]').length") == 0, where
    assert browser.run(CLIPPED) == [], (where, browser.run(CLIPPED))
    assert browser.run(WIDE) <= 0, (where, "wider than the window", browser.run(WIDE))


def login(browser):
    browser.window(1280, 850)
    browser.dark(False)
    browser.open(HTTP + "/")
    browser.sees("Log in")
    assert browser.run("return location.pathname") == "/dashboard/"
    browser.shot("login")
    check(browser, "login")
    browser.log_in("alice", "wrong")
    browser.sees("The account name or the password is wrong")
    browser.sees("Next:")
    browser.log_in("alice", "correct horse")
    browser.sees("Storage repositories")
    browser.sees("alice (pool-admin)")
    address = browser.run("return location.href")
    assert "OpaqueRef" not in address and "session" not in address, address


def disks(browser):
    browser.click("//nav//a[normalize-space(.)='Storage']")
    browser.click("//main//td/a")
    browser.button("New disk")
    browser.type("name", "first <b>disk</b>")
    browser.type("size", "0.25")
    browser.in_dialog("Create")
    browser.sees("Done: Create disk first <b>disk</b>")
    browser.click("//main//td/a[contains(., 'first')]")
    browser.sees("256 MiB")
    browser.button("Snapshot")
    browser.sees("Done: Snapshot of first")
    browser.button("Clone")
    browser.sees("Done: Clone of first")
    browser.button("Grow")
    browser.type("size", "0.5")
    browser.in_dialog("Grow")
    browser.sees("512 MiB")
    until("a chain with a base copy", lambda: browser.run("return document.querySelectorAll('.node.base').length") >= 1)
    until("a snapshot in it", lambda: browser.run("return document.querySelectorAll('.node.snap').length") >= 1)
    browser.shot("disk")
    check(browser, "disk")


def refused(browser):
    """A disk cannot be made smaller: object, cause and next step are said in the dialog."""
    browser.button("Grow")
    browser.type("size", "0.1")
    browser.in_dialog("Grow")
    browser.sees("That did not work")
    browser.sees("Next:")
    browser.shot("error")
    browser.click("//div[@id='notices']//div[contains(@class, 'bad')]//button")


def plug(browser):
    browser.button("Plug into a VM")
    browser.click("//dialog//option[contains(., 'guest')]")
    browser.in_dialog("Plug")
    browser.sees("The disk belongs to the VM now")
    browser.sees("not plugged")


# Bars of progress that come, and the values that they have.
BARS = """
window.bars = [];
const seen = (bar) => bar && window.bars.push([bar.getAttribute('aria-label'), bar.getAttribute('value')]);
new MutationObserver((changes) => changes.forEach((change) => {
  change.addedNodes.forEach((node) => seen(node.querySelector?.('progress')));
  if (change.type === 'attributes') seen(change.target);
})).observe(document.getElementById('notices'), { childList: true, subtree: true, attributeFilter: ['value'] });
"""


def revert(browser):
    """A VM goes back to a snapshot: its disk has the size that it had; progress is shown meanwhile."""
    browser.click("//nav//a[normalize-space(.)='VMs']")
    browser.click("//main//td/a[contains(., 'guest')]")
    browser.button("Snapshot")
    browser.type("name", "kept state")
    browser.in_dialog("Snapshot")
    browser.sees("Done: Snapshot kept state")
    browser.click("//main//td/a[contains(., 'first')]")
    browser.button("Grow")
    browser.type("size", "0.75")
    browser.in_dialog("Grow")
    browser.sees("768 MiB")
    browser.click("//main//td/a[contains(., 'guest')]")
    link = "return [...document.querySelectorAll('main td a')].find((a) => a.textContent.includes('first'))?.href ?? ''"
    before = until("the link to the disk", lambda: browser.run(link))
    browser.run(BARS)
    browser.click("//tr[contains(., 'kept state')]//button[normalize-space(.)='Go back to it']")
    browser.sees("What the disks hold now is lost")
    browser.shot("revert")
    browser.in_dialog("Go back")
    browser.sees("Done: Go back to kept state")
    bars = browser.run("return window.bars")
    name = "Progress: Go back to kept state"
    assert bars and all(bar[0] == name for bar in bars), bars
    assert any(0 <= float(bar[1] or -1) <= 1 for bar in bars), bars
    # The disk is another one.
    until("the link to it", lambda: browser.run(link) not in ("", before))
    browser.click("//main//td/a[contains(., 'first')]")
    browser.sees("512 MiB")
    assert "768 MiB" not in browser.text(), browser.text()


HEAT = """
return [...document.querySelectorAll('rect.heat')].filter((rect) => rect.getAttribute('fill-opacity') > 0
  && rect.width.baseVal.value > 0 && rect.height.baseVal.value > 0 && rect.y.baseVal.value >= 0).length;
"""
LABEL = """
return document.querySelector(`svg[role=img][aria-label^='${arguments[0]}']`)?.getAttribute('aria-label') ?? '';
"""
# How far the newest point of each curve is above the axis.
HEIGHTS = """
return [...document.querySelectorAll('polyline.curve')].map((line) =>
  Number(line.closest('svg').querySelector('line.axis').getAttribute('y1')) - line.points[line.points.length - 1].y);
"""
# The text of the row of a table that has these words.
ROW = """
const rows = [...document.querySelectorAll('main tbody tr')];
return rows.find((row) => row.textContent.includes(arguments[0]))?.innerText ?? '';
"""


def measured(browser):
    """A disk under load: rates, a heat map of latencies, a queue for each layer; at two sizes of the window."""
    browser.run("location.hash = '#/performance'")
    for size, width, height in (("desktop", 1280, 850), ("phone", 390, 844)):
        browser.window(width, height, size == "phone")
        until("latencies", lambda: browser.run(HEAT) >= 2, lambda: browser.text()[-1500:])
        says = lambda title: browser.run(LABEL, title)
        words = "most requests now take up to"
        until("their words", lambda: words in says("Latency"), lambda: says("Latency"))
        for title, names in (("Requests a second", ("reads", "writes")), ("Throughput", ("read", "written"))):
            until(title, lambda: min(values(says(title), *names)) > 0, lambda: says(title))
        layers = ("front end", "image layer", "kernel and storage", "answering")
        queues = lambda: values(says("Average queue size by layer"), *layers)
        until("queues", lambda: min(queues()) >= 0 and max(queues()) > 0, lambda: says("Average queue size by layer"))
        # The curves leave the ground, within the picture.
        curves = lambda: browser.run(HEIGHTS)
        until("curves above the axis", lambda: sum(height > 1 for height in curves()) >= 5, lambda: curves())
        row = lambda: browser.run(ROW, "busy")
        until("the row of the disk", lambda: "KiB/s" in row() or "MiB/s" in row(), row)
        check(browser, f"under load {size}")
        browser.run("window.scrollTo(0, 0)")
        browser.shot(f"load-{size}")
    browser.window(1280, 850)
    browser.click("//select[@id='chosen']/option[contains(., 'busy')]")
    until("latencies of one disk", lambda: browser.run(HEAT) >= 2, lambda: browser.text()[-1500:])


def values(label, *names):
    """Numbers that a chart's words have behind these names."""
    parts = (re.match(r"(.+?) ([0-9.]+)", part) for part in label.partition(": ")[2].split(", "))
    found = {part[1]: float(part[2]) for part in parts if part}
    return [found.get(name, -1) for name in names]


def tasks(browser):
    browser.click("//nav//a[starts-with(normalize-space(.), 'Tasks')]")
    browser.sees("a task to cancel")
    browser.shot("tasks")
    check(browser, "tasks")
    browser.click("//tr[contains(., 'a task to cancel')]//button[normalize-space(.)='Cancel']")
    until("the task is cancelled", lambda: any(word in browser.run(
        "return [...document.querySelectorAll('tr')].find((row) => row.textContent.includes('a task to cancel')).textContent")
        for word in ("cancelled", "cancelling")))
    browser.click("//td/a[contains(., 'VM.clone') or contains(., 'snapshot')]")
    browser.sees("Steps")
    until("steps as bars", lambda: browser.run("return document.querySelectorAll('.work').length") > 0 or "no steps" in browser.text())
    browser.shot("task")


def findings(browser):
    """What the doctor finds is listed, with what it means and the next step; and is gone when the cause is."""
    left = os.path.join(SR, ".vhd-4194999-1.partial")
    with open(left, "w", encoding="ascii") as file:
        file.write("half")
    found = "return [...document.querySelectorAll('main [role=status]')].map((e) => e.textContent).join(' ')"
    row = lambda: browser.run(ROW, "4194999")

    def checked(is_found):
        browser.button("Check now")
        until("the check has ended", lambda: "ound at " in browser.run(found) and bool(row()) == is_found)
        assert not browser.run("return document.querySelector('main .error')?.textContent ?? ''"), browser.text()
        check(browser, "findings")

    browser.click("//nav//a[normalize-space(.)='Findings']")
    checked(True)
    said = row()
    assert browser.run("return document.querySelector('main table').innerText.match(/4194999/g).length") == 1, "listed once"
    means = "A file takes space whose process ended before it was whole."
    for word in ("warning", means, "Scan the SR", '"tapio doctor --repair" does this by SR.scan'):
        assert word in said, (word, said)
    assert browser.run("return document.querySelectorAll('main .badge.warn').length") >= 1
    for size, width, height in (("desktop", 1280, 850), ("phone", 390, 844)):
        browser.window(width, height, size == "phone")
        check(browser, f"findings {size}")
        browser.shot(f"found-{size}")
    browser.window(1280, 850)
    os.remove(left)
    checked(False)


def history(browser):
    """Curves of what the host did, in another range too; an SR and a VM have theirs."""
    browser.run("location.hash = '#/'")
    curves = "return document.querySelectorAll('.history polyline').length"
    until("curves of the host", lambda: browser.run(curves) >= 3, lambda: browser.text()[-1500:])
    assert browser.run("return document.querySelectorAll('.history .chart').length") == 4
    browser.click("//select[@name='range']/option[normalize-space(.)='2 hours']")
    browser.sees("2 hours ago")
    browser.click("//select[@name='range']/option[normalize-space(.)='10 minutes']")
    browser.sees("10 minutes ago")
    browser.run("document.querySelector('.history').scrollIntoView()")
    browser.shot("history")
    check(browser, "history")
    browser.click("//nav//a[normalize-space(.)='Storage']")
    browser.click("//main//td/a")
    until("room of the SR", lambda: browser.run(curves) >= 1)
    browser.click("//nav//a[normalize-space(.)='VMs']")
    browser.click("//main//td/a[contains(., 'guest')]")
    browser.sees("disks are measured while they are plugged")


def keyboard(browser):
    """From the top, the tab key reaches the skip link, then the header, the navigation and the actions, in this order."""
    browser.run("location.hash = '#/storage'")
    browser.sees("Storage")
    browser.run("document.activeElement.blur(); document.body.tabIndex = -1; document.body.focus(); document.body.removeAttribute('tabindex')")
    reached = []
    for _ in range(8):
        for kind in ("rawKeyDown", "keyUp"):
            browser.devtools("Input.dispatchKeyEvent", type=kind, key="Tab", code="Tab", windowsVirtualKeyCode=9)
        reached.append(browser.run("return document.activeElement.textContent.trim()"))
    assert reached[:4] == ["Skip to the contents", "Tapio", "Log out", "Overview"], reached
    assert "Performance" in reached, reached


def looks(browser):
    for name in ("", "storage", "vms", "performance", "tasks", "findings"):
        browser.run("location.hash = arguments[0]", "#/" + name)
        until("a title", lambda: browser.run("return document.querySelector('h1')?.textContent ?? ''") not in ("", "Loading"))
        for size, width, height in (("desktop", 1280, 850), ("phone", 390, 844)):
            browser.window(width, height, size == "phone")
            check(browser, f"{name} {size}")
            browser.shot(f"{name or 'overview'}-{size}")
    browser.run("location.hash = '#/performance'")
    browser.window(1280, 850)
    browser.dark(True)
    ground = browser.run("return getComputedStyle(document.body).backgroundColor")
    assert sum(int(part) for part in ground[4:-1].split(",")) < 150, ground
    browser.shot("performance-dark")
    browser.run("location.hash = '#/storage'")
    browser.shot("storage-dark")
    browser.dark(False)


def reader(browser):
    """A read-only account sees actions, disabled, with the reason."""
    browser.button("Log out")
    browser.sees("Account")
    browser.log_in("carol", "correct horse")
    browser.sees("carol (read-only)")
    browser.click("//nav//a[normalize-space(.)='Storage']")
    browser.click("//main//td/a")
    until("a disabled button", lambda: browser.run("return document.querySelector('button[aria-disabled=true]')?.title ?? ''").startswith("Your role is read-only"))
    browser.click("//button[contains(., 'New disk')]")
    browser.sees("this needs vm-admin")
    browser.shot("read-only")


def main():
    os.makedirs(SHOTS, exist_ok=True)
    browser = Browser()
    try:
        stories = (login, measured, disks, refused, plug, revert, tasks, findings, history, keyboard, looks, reader)
        for story in stories:
            print(story.__name__, flush=True)
            try:
                story(browser)
            except BaseException:
                browser.shot("failed")
                raise
        said = [entry for entry in browser.ask("POST", "/se/log", {"type": "browser"}) if "favicon" not in entry["message"]]
        assert said == [], said
    finally:
        browser.end()
    print("done")


if __name__ == "__main__":
    main()
