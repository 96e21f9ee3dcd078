//! `GET /metrics` by a plain HTTP client.

use tapio_e2e::needs_python_xenapi;
use tapio_e2e::scratch::Scratch;
use tapio_e2e::toolstack::{DaemonOptions, python};

const STORY: &str = r##"
import base64, http.client, socket
url, path = sys.argv[1:3]
class Local(http.client.HTTPConnection):
    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(path)
def get(query="", connection=None, **headers):
    connection = connection or http.client.HTTPConnection(url.split("//")[1])
    connection.request("GET", "/metrics" + query, headers={k.capitalize(): v for k, v in headers.items()})
    answer = connection.getresponse()
    return answer.status, answer.getheader("content-type"), answer.read().decode()
def account(name, password):
    return "Basic " + base64.b64encode(f"{name}:{password}".encode()).decode()
# Root of this host needs no password; others over the network do, and every role may read.
status, kind, text = get(connection=Local("localhost"))
assert (status, kind) == (200, "text/plain; version=0.0.4; charset=utf-8"), (status, kind)
assert "\ntapio_tasks{status=\"pending\"} 0\n" in text and "# TYPE tapio_vbd_latency_seconds histogram\n" in text, text
status, kind, text = get()
assert status == 401 and "SESSION_INVALID" in text, (status, text)
assert get(authorization=account("carol", "wrong"))[0] == 401
assert get("?session_id=OpaqueRef:nothing")[0] == 401
assert get(authorization=account("carol", "correct horse"))[0] == 200
session = XenAPI.Session(url)
session.login_with_password("carol", "correct horse", "1.0", "test")
reference = session._session
assert get("?session_id=" + reference)[0] == 200
assert get(cookie="session_id=" + reference)[0] == 200
# A session that came with the request goes on, one that was made for it has ended.
assert len(session.xenapi.pool.get_all()) == 1
print("done")
"##;

#[test]
fn figures_for_accounts_that_may_read_them() {
    needs_python_xenapi!(wheel);
    let scratch = Scratch::on_disk();
    let daemon = DaemonOptions::new(&scratch).start();
    daemon.add_user("carol", "read-only", "correct horse");
    let socket = daemon.socket.display().to_string();
    let finished = python(&wheel, STORY, &[&daemon.http, &socket]);
    assert_eq!(finished.ok(), "done\n", "{}", daemon.process.log());
    daemon.stop();
}
