//! Accounts that change by the command line while the daemon runs and sessions of them are open.

use tapio_e2e::needs_python_xenapi;
use tapio_e2e::scratch::Scratch;
use tapio_e2e::tools::our;
use tapio_e2e::toolstack::{DaemonOptions, python};

/// Sessions of three accounts over HTTP, and the command that changes accounts. `user("add", ..)` is `tapiod user`.
const COMMON: &str = r#"
import subprocess, threading, xmlrpc.client
url, tapiod, state = sys.argv[1:4]
def user(*args, password=None):
    command = [tapiod, "user", *args, "--config", "/dev/null", "--state-dir", state]
    subprocess.run(command, input=password, text=True, check=True, stdout=subprocess.DEVNULL)
class Client:
    # Of XML-RPC alone: Python's XenAPI logs in again by itself when its session is no more.
    def __init__(self, name, password):
        self.session = self.raw("session.login_with_password", name, password, "1.0", "test")
    def raw(self, method, *params):
        answer = getattr(xmlrpc.client.ServerProxy(url), method)(*params)
        if answer["Status"] != "Success":
            raise XenAPI.Failure(answer["ErrorDescription"])
        return answer["Value"]
    def call(self, method, *params):
        return self.raw(method, self.session, *params)
    def code(self, method, *params):
        try:
            return "works: %r" % (self.call(method, *params),)
        except XenAPI.Failure as failure:
            return failure.details[0]
def wait_for(client):
    # A call that waits, on a thread of its own; what it came to is in the list.
    token = client.call("event.from", ["secret"], "", 0.0)["token"]
    came = []
    thread = threading.Thread(target=lambda: came.append(client.code("event.from", ["secret"], token, 3000.0)))
    thread.start()
    return thread, came
"#;

fn story(program: &str) {
    needs_python_xenapi!(wheel);
    let scratch = Scratch::on_disk();
    let daemon = DaemonOptions::new(&scratch).start();
    for (name, role) in [("alice", "pool-admin"), ("bob", "pool-operator"), ("carol", "read-only")] {
        daemon.add_user(name, role, "correct horse");
    }
    let (tapiod, state) = (our("tapiod").display().to_string(), scratch.join("state").display().to_string());
    let program = format!("{COMMON}\n{program}\nprint('done')\n");
    let finished = python(&wheel, &program, &[&daemon.http, &tapiod, &state]);
    assert_eq!(finished.ok(), "done\n", "{}", daemon.process.log());
    daemon.stop();
}

#[test]
fn a_removed_or_demoted_account_loses_its_sessions_rights_at_once() {
    story(
        r#"
alice, bob = Client("alice", "correct horse"), Client("bob", "correct horse")
pool = alice.call("pool.get_all")[0]
assert alice.call("pool.set_name_label", pool, "hers") == ""
thread, came = wait_for(alice)
user("add", "alice", "--role", "read-only", password="correct horse\n")
# A new password came with the role, so the session is no more.
assert alice.code("pool.set_name_label", pool, "x") == "SESSION_INVALID"
thread.join(60)
assert came == ["SESSION_INVALID"], came
again = Client("alice", "correct horse")
assert again.code("pool.set_name_label", pool, "x") == "RBAC_PERMISSION_DENIED"
assert bob.call("pool.set_name_label", pool, "his") == ""
thread, came = wait_for(bob)
user("remove", "bob")
assert bob.code("pool.get_all") == "SESSION_INVALID"
thread.join(60)
assert came == ["SESSION_INVALID"], came
assert not thread.is_alive()
"#,
    );
}

#[test]
fn a_role_or_a_password_that_changes_counts_at_once() {
    story(
        r#"
alice, bob = Client("alice", "correct horse"), Client("bob", "correct horse")
pool = alice.call("pool.get_all")[0]
accounts = state + "/accounts"
import os
def replace(text):
    # Whole, as an editor does it: the daemon may look at any moment, and an account of half a file is gone.
    with open(accounts + ".mine", "w") as f:
        os.fchmod(f.fileno(), 0o600)
        f.write(text)
    os.rename(accounts + ".mine", accounts)
# The role alone, as an administrator changes it in the file: the session goes on with it.
replace(open(accounts).read().replace("own pool-admin alice", "own read-only alice"))
assert alice.code("pool.set_name_label", pool, "x") == "RBAC_PERMISSION_DENIED"
assert alice.call("pool.get_all") == [pool]
# A password that is changed by its owner ends the owner's other sessions, not that one.
other = Client("bob", "correct horse")
assert bob.call("session.change_password", "correct horse", "battery staple") == ""
assert bob.call("pool.get_all") == [pool]
assert other.code("pool.get_all") == "SESSION_INVALID"
# By the administrator: all of them.
user("passwd", "bob", password="something else\n")
assert bob.code("pool.get_all") == "SESSION_INVALID"
# A file that cannot be read lets no user do anything, and is not the end of a session.
text = open(accounts).read()
replace(text + "nonsense\n")
assert alice.code("pool.get_all") == "INTERNAL_ERROR"
replace(text)
assert alice.call("pool.get_all") == [pool]
"#,
    );
}

#[test]
fn tasks_belong_to_their_accounts() {
    story(
        r#"
alice, bob, carol = (Client(name, "correct horse") for name in ("alice", "bob", "carol"))
theirs, hers = alice.call("task.create", "theirs", ""), carol.call("task.create", "hers", "")
for method in ("task.cancel", "task.destroy"):
    assert carol.code(method, theirs) == "RBAC_PERMISSION_DENIED", carol.code(method, theirs)
assert carol.code("task.set_status", theirs, "success") == "RBAC_PERMISSION_DENIED"
assert alice.call("task.get_status", theirs) == "pending"
# An empty result is a value: clients in JavaScript read nothing where an empty string element stands.
import urllib.request
body = xmlrpc.client.dumps((carol.session, hers), "task.get_result").encode()
answer = urllib.request.urlopen(urllib.request.Request(url, body)).read().decode()
assert "<name>Value</name><value></value>" in answer and "<string>" not in answer, answer
# One's own, by any session of the account and whatever its role.
again = Client("carol", "correct horse")
again.call("task.set_progress", hers, 0.5)
again.call("task.cancel", hers)
again.call("task.destroy", hers)
bob.call("task.destroy", theirs)
assert alice.call("task.get_all") == []
"#,
    );
}

#[test]
fn a_date_that_is_none_harms_only_its_reader() {
    story(
        r#"
alice = Client("alice", "correct horse")
import urllib.request
def sent(method, params):
    date = "<dateTime.iso8601>111T0:0:0</dateTime.iso8601>"
    body = xmlrpc.client.dumps((alice.session, *params), method).replace("<string>DATE</string>", date)
    answer = urllib.request.urlopen(urllib.request.Request(url, body.encode()))
    assert answer.status == 200
    return xmlrpc.client.loads(answer.read())[0][0]
record = {"value": "s", "other_config": {}, "created": "DATE", "snapshot_time": "DATE"}
made = sent("secret.create", [record])
assert made["Status"] == "Success", made
wrong = sent("message.get_since", ["DATE"])
assert wrong["ErrorDescription"][0] == "FIELD_TYPE_ERROR", wrong
try:
    xmlrpc.client.loads(urllib.request.urlopen(urllib.request.Request(url, b"<methodCall>")).read())
    assert False
except xmlrpc.client.Fault as fault:
    assert fault.faultCode == -32700 and "no XML-RPC call" in fault.faultString, fault
"#,
    );
}
