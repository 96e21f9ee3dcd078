//! Transfers of disks that another host of the pool has.

use serde_json::{Value, json};
use tapio_fixtures::etcd::Cluster;

use super::rig::{Host, first_host, is_missing, make_sr, vdi};

/// Clients log in at the host that decides; a disk may be at another.
#[test]
fn transfers_are_sent_to_the_host_that_has_the_disk() {
    if is_missing() {
        return;
    }
    let scratch = tempfile::tempdir().unwrap();
    let cluster = Cluster::start(scratch.path(), 1);
    let a = first_host(&cluster, &scratch.path().join("a"));
    a.account("reader", "read-only");
    a.account("worker", "vm-admin");
    let b = Host::new(&scratch.path().join("b"), &[]);
    b.join(&a).unwrap();
    b.until("both hosts are there", || b.count("host") == 2 && a.count("host") == 2);
    let sr = make_sr(&b, &scratch.path().join("files"), false);
    let disk = b.done("VDI.create", vdi(&sr, "far"));
    a.until("its disk is known", || a.call("VDI.get_uuid", json!([disk])).is_ok());
    let uuid = a.done("VDI.get_uuid", json!([disk]));
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let session = text(&a.login_as("worker").unwrap());
    // What is at `place` of the other host.
    let path = |place: Option<String>| {
        let place = place.expect("a place");
        let path = place.strip_prefix(&format!("https://{}", b.address()));
        path.unwrap_or_else(|| panic!("{place} is not at {}", b.address())).to_owned()
    };

    let bytes: Vec<u8> = (0..1_048_576u32).map(|at| (at / 4096 % 251) as u8).collect();
    let task = text(&a.over_network("task.create", &json!([session, "import", ""])).unwrap());
    let import =
        format!("/import_raw_vdi/?session_id={session}&task_id={task}&format=raw&vdi={}", text(&disk));
    let (status, place, _) = a.request("PUT", &import, &bytes);
    assert_eq!(status, 302);
    let place = path(place);
    assert!(!place.contains(&session) && place.contains(&task), "{place}");
    // The name is good for nothing but a transfer, and for one.
    let lent = place.rsplit_once("session_id=").expect("a name").1.to_owned();
    assert_eq!(b.over_network("VDI.get_all", &json!([lent])).unwrap_err()[0], "SESSION_INVALID");
    assert_eq!(b.request("PUT", &place, &bytes).0, 200);
    assert_eq!(b.request("PUT", &place, &bytes).0, 401, "the name was used");
    let status = || text(&a.over_network("task.get_status", &json!([session, task])).unwrap());
    a.until("the task has ended", || status() == "success");

    // By UUID too; with a look before it, as npm's client does it.
    let export = format!("/export_raw_vdi/?session_id={session}&format=raw&vdi={}", text(&uuid));
    let (status, place, _) = a.request("GET", &export, &[]);
    assert_eq!(status, 302);
    let (status, _, sent) = b.request("GET", &path(place), &[]);
    assert_eq!((status, sent.len() >= bytes.len(), sent.starts_with(&bytes)), (200, true, true));
    let look = format!("/import_raw_vdi/?session_id={session}&format=raw&vdi={}", text(&uuid));
    assert_eq!(a.request("PUT", &look, &[]).0, 302);
    let new = format!("/import_raw_vdi/?session_id={session}&format=raw&sr_id={}", text(&sr));
    let (status, place, _) = a.request("PUT", &new, &bytes);
    assert_eq!((status, b.request("PUT", &path(place), &bytes).0), (302, 200));
    assert_eq!(b.done("VDI.get_by_name_label", json!(["Imported VDI"])).as_array().map(Vec::len), Some(1));

    // A role is looked at before a client is sent away, and a task that cannot be done fails.
    let reader = text(&a.login_as("reader").unwrap());
    let refused = format!("/export_raw_vdi/?session_id={reader}&format=raw&vdi={}", text(&disk));
    assert_eq!(a.request("GET", &refused, &[]).0, 403);
    let mut b = b;
    b.kill();
    let task = text(&a.over_network("task.create", &json!([session, "export", ""])).unwrap());
    let (status, _, _) = a.request("GET", &format!("{export}&task_id={task}"), &[]);
    assert!(status >= 400, "{status}");
    let status = || text(&a.over_network("task.get_status", &json!([session, task])).unwrap());
    a.until("the task has failed", || status() == "failure");
}
