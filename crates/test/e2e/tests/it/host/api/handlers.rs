//! Each handler of HTTP in a session of each role: refused exactly where its least role says so. Calls are held to the
//! table by `every_message_is_allowed_or_refused_as_the_table_says`.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use tapio_e2e::scratch::Scratch;
use tapio_e2e::toolstack::{Daemon, DaemonOptions};

const PASSWORD: &str = "a long password";

/// The least first.
const ROLES: [&str; 6] =
    ["read-only", "vm-operator", "vm-admin", "vm-power-admin", "pool-operator", "pool-admin"];

/// Nothing has this reference: what may be asked for is not found.
const NOTHING: &str = "OpaqueRef:6a0e7a5c-0000-4000-8000-000000000000";

/// A sector of a disk.
const SECTOR: &str = "a sector";

/// Method, path with its query, body, least role; and the status where the role is enough.
const HANDLERS: &[(&str, &str, &str, &str, &[u16])] = &[
    ("GET", "/", "", "read-only", &[303]),
    ("GET", "/dashboard/", "", "read-only", &[200]),
    ("GET", "/metrics", "", "read-only", &[200]),
    ("GET", "/rrd_updates?start=0", "", "read-only", &[200]),
    ("GET", "/host_rrd", "", "read-only", &[200]),
    ("GET", "/vm_rrd?uuid=NOTHING", "", "read-only", &[400, 404]),
    ("GET", "/sr_rrd?uuid=NOTHING", "", "read-only", &[400, 404]),
    ("CONNECT", "/console?ref=NOTHING", "", "vm-operator", &[400, 404]),
    ("GET", "/export_raw_vdi?vdi=NOTHING", "", "vm-admin", &[400, 404]),
    ("GET", "/export_raw_vdi/?vdi=NOTHING&format=vhd", "", "vm-admin", &[400, 404]),
    ("PUT", "/import_raw_vdi?vdi=NOTHING", SECTOR, "vm-admin", &[400, 404]),
    ("PUT", "/import_raw_vdi?sr_id=NOTHING", SECTOR, "vm-admin", &[400, 404]),
    ("PUT", "/import_raw_vdi?vdi=NOTHING", "", "vm-admin", &[400, 404]),
    ("GET", "/export?ref=NOTHING", "", "vm-admin", &[400, 404]),
    ("PUT", "/import?sr_id=NOTHING", SECTOR, "vm-admin", &[400, 404]),
    ("GET", "/export_metadata?uuid=NOTHING", "", "vm-admin", &[400, 404]),
    // An archive is accepted before it is read; its task says how that ends.
    ("PUT", "/import_metadata", SECTOR, "vm-admin", &[200]),
    ("GET", "/pool/xmldbdump", "", "pool-admin", &[200]),
    ("PUT", "/pool/xmldbdump?dry_run=true", SECTOR, "pool-admin", &[400]),
    ("GET", "/host_backup", "", "pool-admin", &[200]),
    ("PUT", "/host_restore?dry_run=true", SECTOR, "pool-admin", &[400]),
    ("POST", "/console/ticket", "session_id=SESSION&ref=NOTHING", "vm-operator", &[400, 404]),
];

/// Answers that need no account: they hold nothing of this host's objects.
const OPEN: [&str; 2] = ["/", "/dashboard/"];

fn ask(daemon: &Daemon, head: &str, body: &str) -> u16 {
    let mut stream = TcpStream::connect(daemon.http.trim_start_matches("http://")).expect("connected");
    stream.set_read_timeout(Some(Duration::from_secs(60))).expect("a timeout");
    let len = body.len();
    let text = format!("{head} HTTP/1.0\r\nHost: h\r\nContent-Length: {len}\r\n\r\n{body}");
    stream.write_all(text.as_bytes()).expect("sent");
    let mut said = Vec::new();
    let _ = stream.read_to_end(&mut said);
    let said = String::from_utf8_lossy(&said);
    said.split(' ').nth(1).and_then(|word| word.parse().ok()).unwrap_or_else(|| panic!("{head}: {said}"))
}

fn rank(role: &str) -> usize {
    ROLES.iter().position(|known| *known == role).expect("a role")
}

#[test]
fn every_handler_is_allowed_or_refused_by_role() {
    let scratch = Scratch::on_disk();
    let daemon = DaemonOptions::new(&scratch).start();
    for role in ROLES {
        daemon.add_user(role, role, PASSWORD);
    }
    for (method, path, body, least, allowed) in HANDLERS {
        let head = |session: &str| {
            let path = path.replace("NOTHING", NOTHING);
            let query = if path.contains('?') { "&" } else { "?" };
            format!("{method} {path}{query}session_id={session}")
        };
        let body = |session: &str| match *body {
            SECTOR => "x".repeat(512),
            body => body.replace("NOTHING", NOTHING).replace("SESSION", session),
        };
        for role in ROLES {
            let session = daemon.login_as(role, PASSWORD);
            let asked = || ask(&daemon, &head(&session.reference), &body(&session.reference));
            let status = asked();
            if rank(role) < rank(least) {
                assert_eq!(status, 403, "{method} {path} as {role}");
            } else {
                assert!(allowed.contains(&status), "{method} {path} as {role}: {status}");
            }
            session.call("session.logout", &[]);
            let status = asked();
            let expected = if OPEN.contains(path) { allowed[0] } else { 401 };
            assert_eq!(status, expected, "{method} {path} in a session that is over");
        }
    }
    // XenServer's handlers that are not here are not there, whoever asks.
    let session = daemon.login_as("pool-admin", PASSWORD);
    for path in ["/blob", "/audit_log", "/remotecmd"] {
        let status = ask(&daemon, &format!("GET {path}?session_id={}", session.reference), "");
        assert_eq!(status, 404, "{path}");
    }
    daemon.stop();
}
