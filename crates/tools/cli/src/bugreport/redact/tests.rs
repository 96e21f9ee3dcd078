use std::collections::BTreeSet;

use base64::Engine;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};

use super::*;

/// No value of a record has this: only a word or its form can give it away.
const UNKNOWN: &str = "plAnt3d";
const UUID: &str = "0d8f3a52-6f0c-4f0e-9a53-2f7a1f0a9d11";

fn without(line: &str) -> String {
    Redactor::default().text(line)
}

#[test]
fn every_form_in_which_a_line_gives_a_secret_away_is_known() {
    let forms = [
        "password: plAnt3d",
        "password : plAnt3d plAnt3d",
        "\"password\": \"plAnt3d\"",
        r#"{\"password\": \"a\\\"plAnt3d\"}"#,
        r#"{"a": "{\"cifspassword\":\"x plAnt3d\"}"}"#,
        "'password': 'plAnt3d, plAnt3d'",
        "passwd=plAnt3d",
        "PASSPHRASE=plAnt3d",
        "pass-phrase is plAnt3d",
        "rw,username=plAnt3d,password=a,plAnt3d,vers=3",
        "secret=plAnt3d",
        "client_secret => plAnt3d",
        "apiToken=plAnt3d",
        "token plAnt3d",
        "Authorization: Basic plAnt3d",
        "authorization=Bearer plAnt3d",
        "\"authorization\": \"Digest username=plAnt3d, response=plAnt3d\"",
        "Proxy-Authorization: Negotiate plAnt3d",
        "got a header Basic plAnt3d",
        "Cookie: session_id=plAnt3d; other=plAnt3d",
        "set-cookie: a=plAnt3d",
        "X-Auth-Key: plAnt3d",
        "X-Api-Key: plAnt3d",
        "node.session.auth.password = plAnt3d",
        "node.session.auth.username = plAnt3d",
        "node.session.auth.username_in=plAnt3d",
        "discovery.sendtargets.auth.password_in = plAnt3d",
        "chapuser=plAnt3d chappassword=plAnt3d",
        "CHAP plAnt3d plAnt3d",
        "incoming_chapuser: plAnt3d",
        "device-config:chappassword=plAnt3d",
        "psk = plAnt3d plAnt3d",
        "tls-psk: client:plAnt3d",
        "<password>plAnt3d</password>",
        "<member><name>pwd</name><value><string>plAnt3d</string></value></member>",
        "<param><value><string>plAnt3d</string></value></param>",
        "<value>plAnt3d</value>",
        "&lt;string&gt;plAnt3d&lt;/string&gt;",
        "<string>&amp;plAnt3d</string>",
        r#"{"method": "session.login_with_password", "params": ["root", "plAnt3d"]}"#,
        "session.slave_login(plAnt3d)",
        "secret.create plAnt3d",
        "xe -u root -pw plAnt3d vm-list",
        "xe sr-create device-config:cifspassword=plAnt3d",
        "curl --user-data plAnt3d",
        "luks-key plAnt3d",
        "encryption_key=plAnt3d",
        "key: plAnt3d",
        "\"key\": \"plAnt3d\"",
        "nonce=plAnt3d",
        "https://me:plAnt3d@host/disk",
        "nbd://plAnt3d@host:10809/disk",
        "https:%2F%2Fme:plAnt3d@host",
        r"https:\/\/me:plAnt3d@host\/disk",
        "GET /export?uuid=a&session_id=plAnt3d HTTP/1.1",
        "GET /export?session_id=plAnt3d&uuid=a",
        "nbd://host/disk?x=plAnt3d",
        "/export%3Fsession_id%3DplAnt3d",
        "password:\n  plAnt3d\n",
        "password: |\n\n  plAnt3d\n",
        "  <password>\n    plAnt3d\n  </password>",
        "-----BEGIN PRIVATE KEY-----\nplAnt3d\n-----END PRIVATE KEY-----\n",
        "-----BEGIN RSA PRIVATE KEY-----\\nplAnt3d\\n-----END RSA PRIVATE KEY-----",
        "-----BEGIN CERTIFICATE-----\nplAnt3d and no end\n",
        "LUKS\u{0}\u{1}plAnt3d",
        "#cloud-config user-data: plAnt3d",
        "cloud-init: plAnt3d",
        "ssh_key plAnt3d",
        "account: \"password\": \"plAnt3d\"",
        "GET /a?x=password: plAnt3d",
    ];
    for form in forms {
        assert!(form.contains(UNKNOWN), "{form}");
        let left = without(form);
        assert!(!left.contains(UNKNOWN), "{form}: {left}");
        // Upper case is the same word.
        if form.is_ascii() && !form.contains("-----") {
            let left = without(&form.to_ascii_uppercase());
            assert!(!left.contains(&UNKNOWN.to_ascii_uppercase()), "{form}: {left}");
        }
    }
}

#[test]
fn what_looks_drawn_by_chance_is_left_out() {
    for token in [
        "c2VjcmV0LXZhbHVlLXBsYW50ZWQ=",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.dBjftJeZ4CVPmB92K27uhbUJU1p1r",
        "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
        "AKIAIOSFODNN7EXAMPLE4Q2",
        "ghp_16C7e42F292c6912E7710c838347Ae178B4a",
        "client1:4e8f1c0b7a6d5e3f2a1b",
        "correct%20h0rse%21b4tt3ry%2Bst4ple",
    ] {
        let left = without(&format!("got {token} from a peer\n"));
        assert!(left.ends_with("from a peer\n") && left.starts_with("got "), "{left}");
        for piece in token.split(['.', ':']).filter(|piece| piece.len() > 12) {
            assert!(!left.contains(piece), "{left}");
        }
    }
}

#[test]
fn references_and_uuids_of_no_record_become_numbers() {
    let mut redactor = Redactor::default();
    redactor.keep_uuid(UUID);
    let other = "9a1b2c3d-0000-4111-8222-333344445555";
    let text = format!(
        "VDI {UUID} OpaqueRef:{UUID} OpaqueRef:NULL\nby OpaqueRef:{other}\n{} OpaqueRef%3A{other}\nOpaqueRef:short\n",
        other.to_uppercase()
    );
    assert_eq!(
        redactor.text(&text),
        format!(
            "VDI {UUID} OpaqueRef:{UUID} OpaqueRef:NULL\nby (unknown 1)\n(unknown 1) (unknown 1)\n(unknown 2)\n"
        )
    );
}

/// Lines as our programs write them lose nothing.
#[test]
fn what_support_reads_stays() {
    let mut redactor = Redactor::default();
    redactor.keep_uuid(UUID);
    for line in [
        "2026-11-25T09:54:30.123456Z  INFO tapiod::daemon: serving on https://0.0.0.0:443",
        "2026-11-25T09:54:30.123456Z  WARN tapio_core::storage::collect: SR_BACKEND_FAILURE_181: no room in /srv",
        "tapio-tapback: 5,51712: connected to disk 3 of process 4711 (vhost-user)",
        "tapio-disk[12345]: disk 7: /srv/disks/0d8f3a52-6f0c-4f0e-9a53-2f7a1f0a9d11.vhd: ENOSPC",
        "Nov 25 09:54:30 host-17.example.org tapiod[123]: steps of VM.start took 1234567.891 ms",
        "  4096 /run/sr-mount/0d8f3a52-6f0c-4f0e-9a53-2f7a1f0a9d11/0d8f3a52-6f0c-4f0e-9a53-2f7a1f0a9d11.vhd",
        "tapio_vbd_seconds_bucket{vbd=\"0d8f3a52-6f0c-4f0e-9a53-2f7a1f0a9d11\",le=\"0.000131072\"} 1844674407370955",
        "( 704, 704 ): 704 of 704 pages are in use, 11 disks wait for some",
        "/dev/nvme0n1p3 / ext4 rw relatime errors=remount-ro",
        "Linux version 6.12.0-18-amd64 (gcc-14 (Debian 14.2.0-19) 14.2.0)",
    ] {
        assert_eq!(redactor.text(line), line);
    }
    assert_eq!(
        without("GET /export?uuid=a&session_id=x HTTP/1.1"),
        "GET /export?uuid=a&session_id=(left out) HTTP/1.1"
    );
    assert_eq!(without("at https://me:abc@host/d"), "at https://(left out)@host/d");
    assert_eq!(without("wrong password for alice\nkept\n"), "wrong password(left out)\nkept\n");
}

/// Every usual writing of a value that a record had.
#[test]
fn a_known_value_is_found_in_every_writing() {
    let value = "Pl4nt \"it\" <&'n é/+%\\ x";
    let value_of_bytes = value.as_bytes();
    let known = Known::new([value].into_iter(), &BTreeSet::new());
    let xml = value.replace('&', "&amp;").replace('<', "&lt;");
    let full = xml.replace('"', "&quot;").replace('\'', "&apos;");
    let number = xml.replace('"', "&quot;").replace('\'', "&#39;");
    let json = serde_json::to_string(value).unwrap();
    let twice = serde_json::to_string(&json).unwrap();
    let url: String = value_of_bytes.iter().map(|byte| format!("%{byte:02X}")).collect();
    let component =
        percent_encoding::utf8_percent_encode(value, percent_encoding::NON_ALPHANUMERIC).to_string();
    let hex: String = value_of_bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    let mut forms = vec![
        value.to_owned(),
        xml,
        full,
        number,
        json.clone(),
        twice,
        json.replace('é', "\\u00e9"),
        component.to_lowercase().replace("pl4nt", "Pl4nt"),
        component.replace("%20", "+"),
        component,
        hex.clone(),
        hex.to_uppercase(),
    ];
    for before in ["", "a", "ab", "abc", "root:"] {
        for after in ["", "x", "yz"] {
            let text = format!("{before}{value}{after}");
            forms.push(STANDARD.encode(&text));
            forms.push(URL_SAFE_NO_PAD.encode(&text));
        }
    }
    for form in forms {
        let left = known.without(&format!("a {form} b"));
        assert!(left.contains(LEFT_OUT) && left.len() < 40 + LEFT_OUT.len(), "{form}: {left}");
        assert!(!left.contains("nt ") && !left.contains("Pl4nt"), "{form}: {left}");
    }
    // All bytes as escapes: no writing of ours, and left out as a token.
    assert!(!without(&format!("a {url} b")).contains("%50%6C"));
}

#[test]
fn words_are_looked_for_nowhere() {
    let own = BTreeSet::from(["Backup-Store 1".to_owned()]);
    let values =
        ["true", "password", "admin", "iscsi", "hunter", "12345678", "10.0.0.1:3260", "Backup-Store 1"];
    let known = Known::new(values.into_iter(), &own);
    for value in values {
        let line = format!("a line with {value} in it");
        assert_eq!(known.without(&line), line);
    }
    let known = Known::new(["S3cretStuff"].into_iter(), &BTreeSet::new());
    assert_eq!(
        known.without("aS3cretStuffs S3cretStuff"),
        "aS3cretStuffs (left out)",
        "a token, and no part of one"
    );
}

#[test]
fn many_values_are_found_in_a_long_text() {
    let values: Vec<String> = (0..500).map(|number| format!("Planted-{number}-value")).collect();
    let known = Known::new(values.iter().map(String::as_str), &BTreeSet::new());
    let text: String = values.iter().map(|value| format!("saw {value}\n")).collect();
    assert!(!known.without(&text.repeat(20)).contains("Planted"));
}
