//! Clients as they are: Python's `XenAPI`, JSON-RPC by Python's standard library, curl, openssl.

use std::process::Command;

use serde_json::json;
use tapio_e2e::process::run;
use tapio_e2e::scratch::Scratch;
use tapio_e2e::toolstack::{DaemonOptions, python};
use tapio_e2e::{needs, needs_python_xenapi};

/// What every client does first, and what Xen Orchestra goes by, whichever way it comes in.
const ROUND: &str = r#"
def round(s):
    assert s.API_version == "2.21", s.API_version
    pools = s.xenapi.pool.get_all_records()
    assert len(pools) == 1, pools
    hosts = s.xenapi.host.get_all_records()
    assert list(pools.values())[0]["master"] in hosts
    batch = getattr(s.xenapi.event, "from")(["*"], "", 1.0)
    assert all(isinstance(n, int) for n in batch["valid_ref_counts"].values()), batch["valid_ref_counts"]
    assert {e["operation"] for e in batch["events"]} == {"add"}
    assert list(pools)[0] in [e["ref"] for e in batch["events"] if e["class"] == "pool"]
    began = time.time()
    again = getattr(s.xenapi.event, "from")(["vdi"], batch["token"], 0.5)
    assert again["events"] == [] and 0.4 < time.time() - began < 20, again
    token = s.xenapi.event.inject("pool", list(pools)[0])
    s.xenapi.pool.set_name_label(list(pools)[0], "näme <&> \t\n")
    assert s.xenapi.pool.get_name_label(list(pools)[0]) == "näme <&> \t\n"
    seen = getattr(s.xenapi.event, "from")(["pool"], token, 20.0)["events"]
    assert [e["snapshot"]["name_label"] for e in seen] == ["näme <&> \t\n"], seen
    try:
        s.xenapi.VDI.get_record("OpaqueRef:nothing")
        assert False
    except XenAPI.Failure as failure:
        assert failure.details == ["HANDLE_INVALID", "VDI", "OpaqueRef:nothing"], failure.details
    try:
        s.xenapi.no.such()
        assert False
    except XenAPI.Failure as failure:
        assert failure.details[0] == "MESSAGE_METHOD_UNKNOWN", failure.details
"#;

#[test]
fn pythons_client_over_every_transport() {
    needs_python_xenapi!(wheel);
    let scratch = Scratch::on_disk();
    let daemon = DaemonOptions::new(&scratch).tls().start();
    daemon.add_user("alice", "pool-operator", "correct horse");
    let program = format!(
        "{ROUND}
local = XenAPI.Session('http://' + sys.argv[3].replace('/', '_') + '/', transport=XenAPI.UDSTransport())
local.login_with_password('root', '', '1.0', 'test')
round(local)
for url in sys.argv[1:3]:
    s = XenAPI.Session(url, ignore_ssl=True)
    try:
        s.login_with_password('alice', 'wrong horse', '1.0', 'test')
        assert False
    except XenAPI.Failure as failure:
        assert failure.details[:2] == ['SESSION_AUTHENTICATION_FAILED', 'alice'], failure.details
    s.login_with_password('alice', 'correct horse', '1.0', 'test')
    round(s)
    # Ended behind the client's back: told that its session is no more, it logs in again by itself.
    old = s._session
    s.session.logout(old)
    assert len(s.xenapi.pool.get_all()) == 1 and s._session != old
    s.xenapi.session.logout()
print('done')
"
    );
    let https = daemon.https.clone().expect("HTTPS is served");
    let socket = daemon.socket.display().to_string();
    assert_eq!(python(&wheel, &program, &[&daemon.http, &https, &socket]).ok(), "done\n");
    daemon.stop();
}

/// A VM from a template, with disks: made, started, plugged, snapshot, unplugged, ended, removed.
const LIFE: &str = r#"
def life(call, wait):
    pool = call("pool.get_all")[0]
    sr = call("pool.get_default_SR", pool)
    template = call("VM.get_by_name_label", "Simulated guest")[0]
    vm = call("VM.clone", template, "of a client")
    call("VM.provision", vm)
    call("VM.start", vm, False, False)
    assert call("VM.get_power_state", vm) == "Running"
    def disk(number):
        vdi = call("VDI.create", {"name_label": "d%d" % number, "name_description": "", "SR": sr, "virtual_size": SIZE,
            "type": "user", "sharable": False, "read_only": False, "other_config": {"of": "test"}, "sm_config": {}, "tags": ["t"]})
        vbd = call("VBD.create", {"VM": vm, "VDI": vdi, "userdevice": str(number), "bootable": False, "mode": "RW",
            "type": "Disk", "empty": False, "other_config": {}, "qos_algorithm_type": "", "qos_algorithm_params": {}})
        return vdi, vbd
    disks = [disk(number) for number in range(3)]
    tasks = [call("Async.VBD.plug", vbd) for _, vbd in disks]
    for task in tasks:
        assert wait(task) == ("success", ""), call("task.get_record", task)
    for vdi, vbd in disks:
        assert call("VBD.get_currently_attached", vbd) is True
    task = call("Async.VDI.snapshot", disks[0][0], {})
    status, result = wait(task)
    assert status == "success" and result.startswith("<value>OpaqueRef:"), (status, result)
    snapshot = result[len("<value>"):-len("</value>")]
    assert call("VDI.get_snapshot_of", snapshot) == disks[0][0]
    task = call("Async.VDI.destroy", disks[1][0])
    assert wait(task)[0] == "failure"
    assert call("task.get_error_info", task)[0] == "VDI_IN_USE", call("task.get_error_info", task)
    for vdi, vbd in disks:
        call("VBD.unplug", vbd)
        call("VBD.destroy", vbd)
        call("VDI.destroy", vdi)
    call("VDI.destroy", snapshot)
    call("VM.hard_shutdown", vm)
    call("VM.destroy", vm)
    assert vm not in call("VM.get_all") and not set(call("VDI.get_all")) & {vdi for vdi, _ in disks}
def waiter(call):
    def wait(task):
        until = time.time() + 60
        while call("task.get_status", task) == "pending":
            assert time.time() < until
            time.sleep(0.02)
        return call("task.get_status", task), call("task.get_result", task)
    return wait
"#;

#[test]
fn a_vm_and_its_disks_live_and_end_by_xml_rpc() {
    needs_python_xenapi!(wheel);
    let scratch = Scratch::on_disk();
    let daemon = DaemonOptions::new(&scratch).default_sr().start();
    let program = format!(
        "{LIFE}
SIZE = str(64 << 20)
s = XenAPI.Session('http://' + sys.argv[1].replace('/', '_') + '/', transport=XenAPI.UDSTransport())
s.login_with_password('root', '', '1.0', 'test')
def call(name, *args):
    return s.xenapi_request(name, args)
life(call, waiter(call))
print('done')
"
    );
    let socket = daemon.socket.display().to_string();
    assert_eq!(python(&wheel, &program, &[&socket]).ok(), "done\n");
    daemon.stop();
}

#[test]
fn a_vm_and_its_disks_live_and_end_by_json_rpc() {
    needs!("python3");
    let scratch = Scratch::on_disk();
    let daemon = DaemonOptions::new(&scratch).default_sr().start();
    daemon.add_user("alice", "pool-operator", "correct horse");
    let program = format!(
        "import json, sys, time, urllib.request
{LIFE}
SIZE = 64 << 20
def ask(name, params):
    body = json.dumps(dict(jsonrpc='2.0', id=1, method=name, params=params)).encode()
    with urllib.request.urlopen(urllib.request.Request(sys.argv[1] + '/jsonrpc', body), timeout=60) as answer:
        read = json.load(answer)
    assert 'error' not in read, (name, read)
    return read['result']
session = ask('session.login_with_password', ['alice', 'correct horse'])
def call(name, *args):
    return ask(name, [session, *args])
life(call, waiter(call))
print('done')
"
    );
    assert_eq!(run(Command::new("python3").args(["-c", &program, &daemon.http])).ok(), "done\n");
    daemon.stop();
}

#[test]
fn json_rpc_by_pythons_own_library() {
    needs!("python3");
    let scratch = Scratch::on_disk();
    let daemon = DaemonOptions::new(&scratch).start();
    daemon.add_user("carol", "read-only", "correct horse");
    let program = r#"
import json, sys, http.client, urllib.parse
connection = http.client.HTTPConnection(urllib.parse.urlparse(sys.argv[1]).netloc, timeout=60)
def ask(path, body):
    connection.request("POST", path, json.dumps(body), {"Accept": "application/json", "Content-Type": "application/json"})
    answer = connection.getresponse()
    assert answer.status == 200 and answer.headers["Content-Type"] == "application/json", (answer.status, answer.headers)
    return json.loads(answer.read())
one = ask("/jsonrpc", {"method": "session.login_with_password", "params": ["carol", "correct horse"], "id": 0})
assert one["error"] is None and one["id"] == 0, one
session = one["result"]
two = ask("/jsonrpc", {"jsonrpc": "2.0", "method": "pool.get_all_records", "params": [session], "id": "x"})
assert len(two["result"]) == 1 and two["id"] == "x" and "error" not in two
pool, record = list(two["result"].items())[0]
assert isinstance(record["ha_host_failures_to_tolerate"], int) and record["ha_enabled"] is False
batch = ask("/jsonrpc", [
    {"jsonrpc": "2.0", "method": "host.get_all", "params": [session], "id": 1},
    {"jsonrpc": "2.0", "method": "pool.set_name_label", "params": [session, pool, "x"], "id": 2},
    {"jsonrpc": "2.0", "method": "system.listMethods", "params": [], "id": 3},
])
assert [b["id"] for b in batch] == [1, 2, 3]
assert len(batch[0]["result"]) == 1
assert batch[1]["error"]["code"] == 1 and batch[1]["error"]["message"] == "RBAC_PERMISSION_DENIED", batch[1]
assert "VDI.get_all_records" in batch[2]["result"] and "Async.VDI.destroy" in batch[2]["result"]
counted = ask("/json", {"jsonrpc": "2.0", "method": "event.from", "params": [session, ["pool"], "", 1], "id": 4})["result"]
assert counted["events"][0]["class"] == "pool" and isinstance(counted["valid_ref_counts"]["pool"], int)
print("done")
"#;
    assert_eq!(run(Command::new("python3").args(["-c", program, &daemon.http])).ok(), "done\n");
    daemon.stop();
}

#[test]
fn curl_keeps_its_connection_and_waits_with_its_body() {
    needs!("curl");
    let scratch = Scratch::on_disk();
    let daemon = DaemonOptions::new(&scratch).tls().start();
    let body = scratch.join("body");
    let call = json!({"jsonrpc": "2.0", "id": 1, "method": "system.listMethods", "params": [], "pad": "p".repeat(2 << 20)});
    std::fs::write(&body, call.to_string()).expect("written");
    let data = format!("@{}", body.display());
    let url = format!("{}/jsonrpc", daemon.https.as_deref().expect("HTTPS is served"));
    let mut command = Command::new("curl");
    command.args([
        "-sSk",
        "--max-time",
        "60",
        "-H",
        "Expect: 100-continue",
        "-w",
        "\n%{http_code} %{num_connects}\n",
    ]);
    command.args(["--data-binary", &data, &url, &url]);
    let said = run(&mut command).ok();
    let codes: Vec<&str> = said.lines().filter(|line| line.len() == 5).collect();
    assert_eq!(codes, ["200 1", "200 0"], "one connection for both");
    let page = run(Command::new("curl").args(["-sS", &daemon.http])).ok();
    assert!(page.contains("XenAPI"), "{page}");
    daemon.stop();
}
