use super::*;
use crate::db::sealed;

const POOL: &str = "11111111-1111-4111-8111-111111111111";
const HOST: &str = "22222222-2222-4222-8222-222222222222";

fn dump() -> Vec<u8> {
    let text = format!(
        r#"{{"tapio_database":1,"version":"0.1.0","date":"20260101T12:00:00Z","pool":"{POOL}","hosts":["{HOST}"]}}
{{"class":"pool","uuid":"{POOL}","fields":{{"uuid":"{POOL}","master":"OpaqueRef:{HOST}"}}}}
{{"class":"host","uuid":"{HOST}","fields":{{"uuid":"{HOST}","hostname":"a","name_label":"a"}}}}
"#
    );
    sealed(text.as_bytes())
}

fn archive() -> HostArchive {
    let files = vec![(SETTINGS, b"log-level = info\n".to_vec()), (ACCOUNTS, vec![7; 700])];
    let dump = Dump::parse(&dump()).expect("a dump");
    HostArchive::new(HOST.parse().expect("a UUID"), dump, files)
}

#[test]
fn an_archive_is_read_as_it_was_written() {
    let written = archive().bytes().expect("short");
    let read = HostArchive::parse(&written).expect("whole");
    assert_eq!((read.host.as_str(), &read.files), (HOST, &archive().files));
    assert_eq!(read.dump.text(), archive().dump.text());
    assert_eq!(read.bytes().expect("short"), written);
}

#[test]
fn what_is_cut_off_or_changed_is_refused_or_changes_nothing() {
    let written = archive().bytes().expect("short");
    // Two blocks of zeros are the end, and one is enough.
    for end in (0..written.len() - 512).step_by(61) {
        let why = HostArchive::parse(&written[..end]).expect_err("cut off");
        assert!(!why.is_empty(), "{end}");
    }
    for at in (0..written.len()).step_by(23) {
        let mut other = written.clone();
        other[at] ^= 1 << (at % 8);
        // The padding of a member means nothing.
        if let Ok(read) = HostArchive::parse(&other) {
            assert_eq!(read.bytes().expect("short"), written, "byte {at}");
        }
    }
}

#[test]
fn what_does_not_belong_there_is_named() {
    let dump = dump();
    let database: (&str, &[u8]) = (DATABASE, &dump);
    let settings: (&str, &[u8]) = (SETTINGS, b"a");
    let refused = |members: &[(&str, &[u8])], why: &str| {
        let said = HostArchive::parse(&sealed_host(HOST, members)).expect_err(why);
        assert!(said.contains(why), "{said}");
    };
    refused(&[], "does not have database.tapio");
    refused(&[settings], "does not have database.tapio");
    refused(&[settings, database], "'database.tapio' does not belong there");
    refused(&[database, settings, settings], "'tapiod.conf' does not belong there");
    refused(&[database, ("../../etc/passwd", b"x")], "'../../etc/passwd' does not belong there");
    refused(
        &[database, (CERTIFICATE, &vec![0; (256 << 10) + 1])],
        "server.pem is longer than the 262144 bytes",
    );
    refused(&[(DATABASE, b"{}")], "database.tapio: it is cut off");
    let other = HostArchive::parse(&sealed_host(POOL, &[database])).expect_err("another host");
    assert!(other.contains("does not have its host"), "{other}");
    let mut more = sealed_host(HOST, &[database]);
    let end = more.len() - 1024;
    more.splice(end..end, sealed_host(HOST, &[])[..512].iter().copied());
    assert!(HostArchive::parse(&more).is_err(), "a member that the manifest does not name");
    let mut behind = sealed_host(HOST, &[database]);
    behind.push(1);
    assert!(HostArchive::parse(&behind).expect_err("more").contains("behind its end"));
    let said = HostArchive::parse(&dump).expect_err("a dump");
    assert!(said.contains("tar") || said.contains("first member") || said.contains("cut off"), "{said}");
}
