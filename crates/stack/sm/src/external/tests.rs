//! Plugins as scripts of the shell: what they print, and what becomes of it.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use tapio_types::{Access, ApiError, ImageKind};
use uuid::Uuid;

use super::discovery::{Discovery, Places};
use super::script::{OUTPUT_MAX, Said, Script, run};
use super::*;
use crate::traits::{Config, Ctx, LiveDisk, NewSr, NewVdi, Sr};
use crate::worker::is_unfinished;

/// What anything here may take on a busy host.
const LIMIT: Duration = Duration::from_secs(60);

#[derive(Default)]
struct Nobody {
    is_cancelled: AtomicBool,
}

impl Ctx for Nobody {
    fn is_cancelled(&self) -> bool {
        self.is_cancelled.load(Ordering::Relaxed)
    }
    fn progress(&self, _: f64) {}
    fn live(&self, _: Uuid) -> Option<Box<dyn LiveDisk>> {
        None
    }
    fn step(&self, _: &'static str) {}
}

fn put(path: &Path, text: &str) {
    fs::create_dir_all(path.parent().expect("below a directory")).expect("made");
    // Written beside it: a program that is being written cannot be run.
    let fresh = path.with_extension("fresh");
    fs::write(&fresh, format!("#!/bin/sh\n{text}\n")).expect("written");
    fs::set_permissions(&fresh, fs::Permissions::from_mode(0o755)).expect("its mode");
    fs::rename(&fresh, path).expect("named");
}

fn said(text: &str, input: &str, limit: Duration) -> Result<Said, ApiError> {
    let dir = tempfile::tempdir().expect("a directory");
    let program = dir.path().join("it");
    put(&program, text);
    let input = input.as_bytes();
    run(
        &Nobody::default(),
        &Script { program: &program, doing: "it", arguments: &[], environment: &[], input, limit },
    )
}

#[test]
fn a_program_is_fed_and_heard() {
    let long = "x".repeat(1 << 20);
    let heard = said("cat; echo to the log >&2; exit 3", &long, LIMIT).expect("it ends");
    assert_eq!((heard.status.code(), heard.stdout.len()), (Some(3), 1 << 20));
    assert_eq!((heard.end(), heard.last_words()), ("ended with status 3".into(), "to the log".into()));
    // One that does not read, or leaves something behind that holds its output, is heard all the same.
    assert!(said("exit 0", &long, LIMIT).expect("it ends").status.success());
    let began = Instant::now();
    assert_eq!(said("sleep 50 & echo done", "", LIMIT).expect("it ends").stdout, b"done\n");
    assert!(began.elapsed() < Duration::from_secs(40), "{:?}", began.elapsed());
    let dirty = said("printf 'a\\033[31mb' >&2", "", LIMIT).expect("it ends");
    assert_eq!(dirty.stderr, "a?[31mb");
}

#[test]
fn a_program_without_end_is_ended() {
    let late = said("echo no array >&2; sleep 50", "", Duration::from_millis(300)).expect_err("too long");
    assert!(is_unfinished(&late) && late.params[1].contains("no array"), "{late}");
    let flood =
        said(&format!("head -c {} /dev/zero; sleep 50", OUTPUT_MAX + 1), "", LIMIT).expect_err("too much");
    assert!(flood.params[1].contains("16 MiB"), "{flood}");
    let dir = tempfile::tempdir().expect("a directory");
    let program = dir.path().join("it");
    put(&program, "sleep 50");
    let ctx = Nobody { is_cancelled: AtomicBool::new(true) };
    let script =
        Script { program: &program, doing: "it", arguments: &[], environment: &[], input: &[], limit: LIMIT };
    assert_eq!(run(&ctx, &script).expect_err("cancelled").code, "TASK_CANCELLED");
}

#[test]
fn a_name_of_a_type_is_no_path() {
    for name in ["ext", "org.xen.x", "lvm-iscsi_2+a"] {
        assert!(is_type(name), "{name}");
    }
    for name in ["", "../x", "a/b", ".hidden", "a b", "ä", &"x".repeat(65)] {
        assert!(!is_type(name), "{name}");
    }
}

fn places(root: &Path) -> Places {
    Places {
        scripts: Some(root.join("scripts")),
        programs: Some(root.join("programs")),
        run_dir: root.join("run"),
        socket: None,
        limit: LIMIT,
    }
}

fn types(discovery: &mut Discovery) -> Option<Vec<&'static str>> {
    discovery.look().map(|found| found.iter().map(|driver| driver.info().sr_type).collect())
}

#[test]
fn plugins_come_change_and_go() {
    let root = tempfile::tempdir().expect("a directory");
    let mut discovery = Discovery::new(places(root.path()));
    assert_eq!(types(&mut discovery), None, "there is not even a directory");
    let query = root.path().join("scripts/volume/org.a/Plugin.Query");
    put(
        &query,
        r#"echo '{"plugin":"a","required_api_version":"5.0","vendor":"V","features":["VDI_DESTROY","X/2"]}'"#,
    );
    put(&root.path().join("scripts/volume/org.a/SR.ls"), "echo '[]'");
    put(
        &root.path().join("scripts/volume/old/Plugin.Query"),
        r#"echo '{"plugin":"o","required_api_version":"3.0"}'"#,
    );
    put(&root.path().join("programs/BSR"), "echo 'no XML-RPC'");
    put(&root.path().join("programs/helper.py"), "exit 1");
    let found = discovery.look().expect("one is new");
    let [driver] = &found[..] else { panic!("one speaks the protocol") };
    let capabilities = driver.info().capabilities;
    assert!(
        ["VDI_DELETE", "SR_SCAN", "VDI_ATTACH"].iter().all(|one| capabilities.contains(one)),
        "{capabilities:?}"
    );
    assert!(!capabilities.contains(&"SR_CREATE"), "there is no such script");
    assert_eq!(driver.origin().map(|origin| origin.vendor.as_str()), Some("V"));
    // A worker makes the same of its key.
    let same = of_key(&driver.key()).expect("a plugin's key");
    assert_eq!((same.info().sr_type, same.key()), ("a", driver.key()));
    assert!(of_key("ext").is_none() && of_key("plugin {}").is_none());
    assert_eq!(types(&mut discovery), None, "nothing has changed");
    put(&query, r#"echo '{"plugin":"b","required_api_version":"5.0"}'"#);
    assert_eq!(types(&mut discovery), Some(vec!["b"]));
    put(&query, "sleep 0; exit 1");
    assert_eq!(types(&mut discovery), Some(vec![]), "it does not say what it is any more");
    put(&query, r#"echo '{"plugin":"b","required_api_version":"5.0"}'"#);
    assert_eq!(types(&mut discovery), Some(vec!["b"]));
    fs::remove_dir_all(root.path().join("scripts/volume/org.a")).expect("removed");
    assert_eq!(types(&mut discovery), Some(vec![]));
}

/// A volume plugin of the shell with one volume, whose data need no plugin.
fn attached(root: &Path, more: &[(&str, &str)]) -> Box<dyn Sr> {
    let put_script = |method: &str, text: &str| put(&root.join("scripts/volume/v").join(method), text);
    let volume = format!(
        r#"{{"key":"k","name":"n","virtual_size":1048576,"uri":["odd:///x","raw+file://{}/k"],"keys":{{}}}}"#,
        root.display()
    );
    put_script("Plugin.Query", r#"echo '{"plugin":"v","required_api_version":"5.0"}'"#);
    put_script("SR.create", r#"echo '{"location":"x","made":"yes","n":1}'"#);
    put_script("SR.attach", r#"grep -q sr_uuid && echo '"handle"'"#);
    put_script("SR.stat", r#"echo '{"free_space":1,"total_space":3,"health":["Healthy",""]}'"#);
    put_script("SR.ls", &format!("echo '[{volume},{volume}]'"));
    put_script("Volume.create", &format!("echo '{volume}'"));
    put_script("Volume.stat", &format!("echo '{volume}'"));
    put_script("Volume.destroy", "echo null");
    more.iter().for_each(|(method, text)| put_script(method, text));
    fs::write(root.join("k"), vec![0; 1 << 20]).expect("written");
    let driver = Discovery::new(places(root)).look().expect("found").remove(0);
    let new = NewSr { config: Config::from([("location".into(), "x".into())]), ..NewSr::default() };
    let config =
        driver.make(&Nobody::default(), Uuid::from_u128(1), &new).expect("made").expect("another one");
    assert_eq!(config.get("made").map(String::as_str), Some("yes"));
    driver.attach(&Nobody::default(), Uuid::from_u128(1), &config).expect("attached")
}

#[test]
fn volumes_are_vdis() {
    let root = tempfile::tempdir().expect("a directory");
    let (sr, ctx) = (attached(root.path(), &[]), Nobody::default());
    assert_eq!(sr.stat(&ctx).expect("sizes").physical_utilisation, 2);
    let found = sr.scan(&ctx).expect("listed");
    let [info] = &found[..] else { panic!("each UUID once: {found:?}") };
    assert_eq!((info.location.as_str(), info.virtual_size), ("k", 1 << 20));
    let with = sr.activate(&ctx, info.uuid, Access::ReadWrite).expect("opened");
    assert_eq!(
        (with.chain.layers[0].kind, &with.chain.layers[0].path),
        (ImageKind::Raw, &root.path().join("k"))
    );
    sr.deactivate(&ctx, info.uuid).expect("closed");
    let new = NewVdi {
        uuid: Uuid::from_u128(9),
        virtual_size: 1 << 20,
        sm_config: Config::new(),
        name_label: "n".into(),
        name_description: String::new(),
    };
    // Without notes it has the UUID that every scan makes of its key.
    assert_eq!(sr.create(&ctx, &new).expect("made").uuid, info.uuid);
    let too_small = sr.create(&ctx, &NewVdi { virtual_size: 2 << 20, ..new }).expect_err("too small");
    assert!(too_small.params[1].contains("1048576 bytes of 2097152"), "{too_small}");
    let missing = sr.resize(&ctx, info.uuid, 2 << 20).expect_err("no such script");
    assert_eq!(missing.code, "SR_BACKEND_FAILURE_38");
    assert!(missing.params[1].contains("Volume.resize"), "{missing}");
    assert_eq!(sr.vdi(&ctx, Uuid::from_u128(5)).expect_err("unknown").code, "VDI_MISSING");
}

#[test]
fn what_a_script_must_not_answer_is_refused() {
    let root = tempfile::tempdir().expect("a directory");
    let bad = [
        ("SR.ls", "echo '{\"no\": \"list\"}'"),
        ("SR.stat", "echo '{\"health\":[\"Unreachable\",\"gone\"]}'"),
    ];
    let (sr, ctx) = (attached(root.path(), &bad), Nobody::default());
    let odd = sr.scan(&ctx).expect_err("no list");
    assert!(
        odd.params[1].contains("no JSON of the published shape") && odd.params[1].contains("SR.ls"),
        "{odd}"
    );
    let ill = sr.stat(&ctx).expect_err("unreachable");
    assert!(ill.params[1].contains("Unreachable gone"), "{ill}");
}
