//! What is refused, and by whom: before anything is sent, and before a password is.

use serde_json::json;

use super::Site;

#[test]
fn a_motion_that_cannot_be_is_refused_and_changes_nothing() {
    let (one, two) = (Site::new(), Site::new());
    let guest = one.small("web", 3);
    let refused = |more: &[&str], why: &str| {
        let said = one.migrate(&two, &guest.uuid, more).fails();
        assert!(said.contains(why), "'{said}' does not say '{why}'");
        one.is_whole(&guest);
        two.is_empty();
    };
    // Another host than the one that was named gets no password.
    let print = "sha256:0000000000000000000000000000000000000000000000000000000000000000";
    refused(&[&format!("remote-fingerprint={print}")], "nothing was sent");
    let session = two.world.daemon().login();
    let host = session.call("host.get_all", &[])[0].clone();
    let right = session.text("host.get_fingerprint", std::slice::from_ref(&host));
    refused(&[&format!("remote-fingerprint={right}"), "destination-sr-uuid=none"], "none");
    refused(&["rate=0"], "rate");
    // A disabled host takes no VM.
    session.call("host.disable", std::slice::from_ref(&host));
    refused(&[], "No VM may start");
    session.call("host.enable", &[host]);
    // A disk that is tracked, or that another VM has.
    let vdi = one.vdi_at(&guest.uuid, "0");
    one.value(&["vdi-enable-cbt", &format!("uuid={vdi}")]);
    refused(&[], "Changed blocks of the disk are tracked");
    one.value(&["vdi-disable-cbt", &format!("uuid={vdi}")]);
    let other = one.vm("other");
    let vbd = one.attach(&other, &vdi, "0");
    refused(&[], "is one of VM other too");
    one.value(&["vbd-destroy", &format!("uuid={vbd}")]);

    // By the API: maps that lack something, and a receiver that is none.
    let here = one.world.daemon().login();
    let vm = here.text("VM.get_by_uuid", &[json!(guest.uuid)]);
    let host = session.call("host.get_all", &[])[0].clone();
    let dest = session.call("host.migrate_receive", &[host, json!("OpaqueRef:NULL"), json!({})]);
    let assert = |dest: &serde_json::Value, vdis: serde_json::Value| {
        here.fails(
            "VM.assert_can_migrate",
            &[json!(vm), dest.clone(), json!(true), vdis, json!({}), json!({})],
        )
    };
    assert_eq!(assert(&dest, json!({}))[0], "VDI_NOT_IN_MAP");
    let vdi = here.text("VDI.get_by_uuid", &[json!(vdi)]);
    assert_eq!(assert(&json!({ "host": "OpaqueRef:other" }), json!({}))[0], "INVALID_VALUE");
    let mut without = dest.clone();
    without["certificate"] = json!("00");
    let sr = session.call("SR.get_by_uuid", &[json!(two.sr())]);
    let map = json!({ (vdi.as_str()): sr });
    let failed = here.fails(
        "VM.assert_can_migrate",
        &[json!(vm), without, json!(true), map.clone(), json!({}), json!({ "timeout": "1" })],
    );
    assert_eq!(failed[0], "CANNOT_CONTACT_HOST", "{failed:?}");
    here.call("VM.assert_can_migrate", &[json!(vm), dest.clone(), json!(true), map, json!({}), json!({})]);

    // The secret of a motion opens that motion alone, and a session for it does nothing else.
    let (id, secret) = dest["session_id"].as_str().expect("a text").split_once('/').expect("two parts");
    let login = |user: &str, secret: &str| {
        let words = [json!(user), json!(secret)];
        let mut all = words.to_vec();
        all.extend([json!("1.0"), json!("test")]);
        json!({"jsonrpc": "2.0", "id": 1, "method": "session.login_with_password", "params": all}).to_string()
    };
    let post = |body: &str| {
        let (_, text) = tapio_e2e::toolstack::post(&two.world.daemon().socket, "/jsonrpc", body);
        serde_json::from_str::<serde_json::Value>(&text).expect("JSON")
    };
    let wrong = post(&login(&format!("motion/{id}"), "0000"));
    assert_eq!(wrong["error"]["message"], "SESSION_AUTHENTICATION_FAILED", "{wrong}");
    let opened = post(&login(&format!("motion/{id}"), secret))["result"].clone();
    let call = |method: &str, params: serde_json::Value| {
        post(&json!({"jsonrpc": "2.0", "id": 1, "method": method, "params": params}).to_string())
    };
    let denied = call("VM.get_all", json!([opened]));
    assert_eq!(denied["error"]["message"], "RBAC_PERMISSION_DENIED", "{denied}");
    let ended = call("host.receive_motion", json!([opened, id, "abort", {}]));
    assert_eq!(ended["result"], json!({}), "{ended}");
    two.is_over();
    one.is_whole(&guest);
    one.finish();
    two.finish();
}

#[test]
fn disks_of_a_vm_change_their_sr_on_one_host() {
    let one = Site::new();
    let guest = one.small("web", 9);
    let snapshot = one.value(&["vm-snapshot", &format!("uuid={}", guest.uuid), "new-name-label=s"]);
    let place = format!("device-config:location={}", one.world.scratch.join("far").display());
    let far = one.value(&["sr-create", "name-label=far", "type=file", &place]);
    one.value(&["vm-migrate", &format!("uuid={}", guest.uuid), &format!("destination-sr-uuid={far}")]);
    for vm in [&guest.uuid, &snapshot] {
        let vdi = one.vdi_at(vm, "0");
        assert_eq!(one.param("vdi", &vdi, "sr-uuid"), far);
        assert!(one.read(&vdi) == guest.holds["0"]);
    }
    assert!(one.images().is_empty(), "nothing is left: {:?}", one.images());
    let said = one.xe(&[
        "vm-migrate",
        &format!("uuid={}", guest.uuid),
        &format!("destination-sr-uuid={far}"),
        "copy=true",
    ]);
    assert!(said.fails().contains("VM.copy"));
    one.finish();
}
