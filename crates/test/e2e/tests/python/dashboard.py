"""The dashboard, as a person uses it: a headless Chromium, driven over the WebDriver protocol.

Arguments: the directory for screenshots. TAPIO_HTTP is the daemon; the accounts are alice (pool-admin) and carol
(read-only), with the password "correct horse". Prints `done` at the end.
"""

import base64
import http.client
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time

HTTP = os.environ["TAPIO_HTTP"]
SHOTS = sys.argv[1]
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
WIDE = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"


def check(browser, where):
    """Everything that can be used has a name, and the page is not wider than the window."""
    assert browser.run(UNNAMED) == [], (where, browser.run(UNNAMED))
    assert browser.run("return document.querySelectorAll('h1').length") == 1, where
    assert browser.run("return document.querySelectorAll('[style]').length") == 0, where
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
    browser.click("//nav//a[normalize-space(.)='Findings']")
    browser.button("Check now")
    found = "return [...document.querySelectorAll('main [role=status]')].map((e) => e.textContent).join(' ')"
    until("the check has ended", lambda: "ound at " in browser.run(found))
    assert not browser.run("return document.querySelector('main .error')?.textContent ?? ''"), browser.text()
    check(browser, "findings")


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
        for story in (login, disks, refused, plug, tasks, findings, history, keyboard, looks, reader):
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
