//! The storage behind TLS of other people's servers.

use std::fs;

use tapio_fixtures::certificates::{keys, make};
use tapio_ring::Storage;

use crate::rig::{Place, Server, has, on_ring, open, pattern, read, write};

fn exercise(target: String) {
    on_ring(|uring| async move {
        let store = open(&uring, &target).await.unwrap();
        let bytes = pattern(1, 5 << 20);
        write(&store, 8192, &bytes).await.unwrap();
        store.flush().await.unwrap();
        assert!(read(&store, 8192, 5 << 20).await.unwrap() == bytes);
    });
}

fn refused(target: String) -> String {
    on_ring(|uring| async move { open(&uring, &target).await.unwrap_err().to_string() })
}

fn secure(place: &Place, user: &str, query: &str) -> String {
    format!("nbds+unix://{user}/?socket={}&{query}", place.socket().display())
}

#[test]
fn nbdkit_with_certificates_and_with_keys() {
    if !has("nbdkit") || !has("openssl") {
        return;
    }
    let place = Place::new();
    make(&place.path(""), true, "DNS:localhost", 30);
    let dir = place.path("").display().to_string();
    let dir = dir.trim_end_matches('/');
    let certificates = format!("--tls-certificates={dir}");
    let server =
        Server::nbdkit(&place, &["--tls=require", &certificates, "--tls-verify-peer", "memory", "32M"]);
    exercise(secure(&place, "", &format!("tls-certificates={dir}&connections=4")));
    let plain = refused(place.target("", ""));
    assert!(plain.contains("requires TLS"), "{plain}");
    let elsewhere = refused(secure(&place, "", &format!("tls-certificates={dir}&tls-hostname=elsewhere")));
    assert!(elsewhere.contains("for another host"), "{elsewhere}");
    server.kill();
    let (right, wrong) = (place.path("right.psk"), place.path("wrong.psk"));
    keys(&right, "alice", "5");
    keys(&wrong, "alice", "6");
    let psk = format!("--tls-psk={}", right.display());
    let server = Server::nbdkit(&place, &["--tls=require", &psk, "memory", "32M"]);
    exercise(secure(&place, "alice@", &format!("tls-psk-file={}&connections=2", right.display())));
    let refusal = refused(secure(&place, "alice@", &format!("tls-psk-file={}", wrong.display())));
    assert!(refusal.contains("TLS"), "{refusal}");
    server.kill();
    let _server = Server::nbdkit(&place, &["memory", "32M"]);
    let none = refused(secure(&place, "", &format!("tls-psk-file={}", right.display())));
    assert!(none.contains("offers no TLS"), "{none}");
}

#[test]
fn qemu_nbd_with_certificates_and_with_keys() {
    if !has("qemu-nbd") || !has("openssl") {
        return;
    }
    let place = Place::new();
    make(&place.path(""), true, "DNS:localhost", 30);
    let dir = place.path("").display().to_string();
    let dir = dir.trim_end_matches('/');
    let image = place.path("disk");
    fs::File::create(&image).unwrap().set_len(32 << 20).unwrap();
    let (socket, image) = (place.socket().display().to_string(), image.display().to_string());
    let common = ["-f", "raw", "-k", &socket, "-t", "-e", "4", "--tls-creds", "tls0", &image];
    let by_certificate = format!("tls-creds-x509,id=tls0,endpoint=server,verify-peer=on,dir={dir}");
    let arguments = [&["--object", &by_certificate][..], &common].concat();
    let server = Server::start(&place, "qemu-nbd", &arguments);
    exercise(secure(&place, "", &format!("tls-certificates={dir}")));
    server.kill();
    let _ = fs::remove_file(place.socket());
    keys(&place.path("keys.psk"), "qemu", "7");
    let by_key = format!("tls-creds-psk,id=tls0,endpoint=server,dir={dir}");
    let _server = Server::start(&place, "qemu-nbd", &[&["--object", &by_key][..], &common].concat());
    exercise(secure(&place, "qemu@", &format!("tls-psk-file={dir}/keys.psk")));
}
