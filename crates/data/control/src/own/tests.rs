use std::collections::BTreeSet;

use proptest::prelude::*;
use tapio_stat::VbdId;
use tapio_types::{DeviceHow, TransferSizes};

use super::*;
use crate::command::{self, Command, DiskCommand};
use crate::{DiskReport, DiskReports, Front, ImageSource, MirrorCopy, NbdGuard, VbdState};

#[test]
fn commands_read_as_documented() {
    let read = |line: &str| parse_request(line.as_bytes()).expect(line);
    assert_eq!(
        read(r#"{"id":1,"command":"hello","version":1}"#),
        Request { id: 1, command: command::Hello { version: 1 }.into() }
    );
    let chain = read(
        r#"{"command":"open","minor":3,"image":{"chain":[{"kind":"vhd","path":"/a"},{"kind":"raw","path":"/b"}]}}"#,
    );
    let Command::Open(command::Open { image: ImageSource::Chain(layers), read_only: false, .. }) =
        chain.command
    else {
        panic!("{chain:?}");
    };
    assert_eq!(layers.len(), 2);
    let front =
        read(r#"{"id":2,"command":"front-add","minor":0,"front":{"kind":"vhost-user","socket":"/v"}}"#);
    let Command::FrontAdd(command::FrontAdd { front: Front::VhostUser { queues, queue_size, .. }, .. }) =
        front.command
    else {
        panic!("{front:?}");
    };
    assert_eq!((queues, queue_size), (1, 1024));
    assert_eq!(
        read(r#"{"id":7,"command":"set-polling","minor":1,"max_us":50,"idle_percent":30}"#).command,
        command::SetPolling { minor: 1, max_us: 50, idle_percent: 30 }.into()
    );
    let named_before = r#"{"command":"mirror-start","minor":0,"target":{"leaf":"aio:/b"},"patience_ms":7}"#;
    let command = read(named_before).command;
    assert!(
        matches!(command, Command::MirrorStart(command::MirrorStart { timeout_ms: 7, .. })),
        "{command:?}"
    );
}

#[test]
fn what_is_not_understood_keeps_its_number() {
    for (line, id) in [
        (r#"{"id":5,"command":"fly"}"#, 5),
        (r#"{"id":6,"command":"pause"}"#, 6),
        (r#"{"id":7,"command":"pause","minor":1,"mnior":2}"#, 7),
        (r#"{"id":8,"command":"pause","minor":70000}"#, 8),
        (r#"{"id":-1,"command":"list"}"#, 0),
        ("[]", 0),
        ("{", 0),
        ("", 0),
        (
            r#"{"id":9,"command":"front-add","minor":0,"front":{"kind":"nbd-unix","path":"/x","exprot":"y"}}"#,
            9,
        ),
    ] {
        let (found, error) = parse_request(line.as_bytes()).expect_err(line);
        assert_eq!((found, error.errno), (id, Errno::EPROTO), "{line}");
    }
}

#[test]
fn every_command_survives_the_wire() {
    let front = Front::NbdUnix { path: "/s".into(), listener: Some(0), export: "e".into(), read_only: true };
    let vhost = Front::VhostUser {
        socket: "/v".into(),
        listener: None,
        connection: Some(0),
        queues: 4,
        queue_size: 128,
        read_only: false,
    };
    let tcp = Front::NbdTcp {
        addr: "[::1]:10809".parse().expect("address"),
        tls: None,
        export: String::new(),
        read_only: false,
        guard: Some(NbdGuard { client_time_s: 60 }),
    };
    let block = Front::Block { how: DeviceHow::FuseFile, device: None, read_only: true, owner: Some((7, 8)) };
    let image = ImageSource::Leaf("vhd:/a.vhd".into());
    let layer = |text: &str| tapio_types::parse_type_and_path(text).expect("an image");
    let commands: Vec<Command> = vec![
        command::FrontAdd { minor: 1, front: block, vbd: None }.into(),
        command::Hello { version: 1 }.into(),
        command::List {}.into(),
        command::Stats { minor: None }.into(),
        command::Stats { minor: Some(3) }.into(),
        command::Attach { minor: 1 }.into(),
        command::Detach { minor: 1 }.into(),
        command::Grow { minor: 3, len: 20 << 30 }.into(),
        command::LookForRoom { minor: 3 }.into(),
        command::Shorten { minor: 3, from: 64 << 20, to: 16 << 20 }.into(),
        command::Open {
            minor: 1,
            image: image.clone(),
            read_only: true,
            timeout_s: Some(9),
            default_nbd: true,
            secondary: Some("nbd:/s".into()),
            standby: true,
            log: Some("/a.cbtlog".into()),
            key: None,
            key_file: Some("/keys/a".into()),
            sector_size: Some(4096),
            pool: Some("sr:704".parse().expect("a pool")),
            share: Some("weight=300".parse().expect("a share")),
        }
        .into(),
        command::MirrorStart {
            minor: 1,
            target: image.clone(),
            copy: MirrorCopy::Leaf,
            rate: 5,
            timeout_ms: 100,
        }
        .into(),
        command::MirrorStatus { minor: 1 }.into(),
        command::MirrorResume { minor: 1 }.into(),
        command::MirrorRate { minor: 1, rate: 7 }.into(),
        command::MirrorPivot { minor: 1 }.into(),
        command::MirrorCancel { minor: 1 }.into(),
        command::Close { minor: 1, force: true }.into(),
        command::Pause { minor: 1 }.into(),
        command::Resume { minor: 1, image: Some(image), secondary: Some("nbd:/s".into()), log: None }.into(),
        command::Resume { minor: 1, image: None, secondary: None, log: Some("/l".into()) }.into(),
        command::DiskInfo { minor: 1 }.into(),
        command::FrontAdd { minor: 1, front, vbd: Some(VbdId { domid: 5, devid: 51712 }) }.into(),
        command::FrontAdd { minor: 1, front: vhost, vbd: None }.into(),
        command::FrontAdd { minor: 1, front: tcp, vbd: None }.into(),
        command::FrontRemove { minor: 1, front: 2, force: false }.into(),
        command::FrontFollow { minor: 1, front: 2 }.into(),
        command::FrontAdmit {
            minor: 1,
            front: 2,
            names: vec![command::SecretName("/a?b".into())],
            cut: Vec::new(),
        }
        .into(),
        command::FrontList { minor: 1 }.into(),
        command::SetPolling { minor: 1, max_us: 10, idle_percent: 20 }.into(),
        command::Snapshot { minor: 1, leaf: "/d/new.vhd".into(), stall_ms: 10 }.into(),
        command::SwapLeaf::of(1, vec![layer("vhd:/d/a.vhd"), layer("vhd:/d/base.vhd")]).into(),
        command::SwapLeaf {
            log: Some("/d/a.cbtlog".into()),
            ..command::SwapLeaf::of(1, vec![layer("vhd:/d/a.vhd"), layer("vhd:/d/base.vhd")])
        }
        .into(),
        command::SwapLeaf::of(1, vec!["vhd:/d/new.vhd", "vhd:/d/old.vhd"].into_iter().map(layer).collect())
            .into(),
        command::Commit { minor: 1, image: "/d/old.vhd".into(), rate: 7, force: true }.into(),
        command::JobList { minor: 1 }.into(),
        command::JobCancel { minor: 1, job: 2 }.into(),
        command::JobRate { minor: 1, job: 2, rate: 3 }.into(),
        command::SetLimits { minor: 1, limits: "iops=5,burst=2s".parse().expect("limits") }.into(),
        command::SetLimits { minor: 1, limits: Default::default() }.into(),
        command::SetShare { minor: 1, weight: 300, latency_us: 2000 }.into(),
        command::SetTransfers { minor: 1, sizes: TransferSizes { split: 65_536, merge: 4096 } }.into(),
        command::Limits { minor: 1 }.into(),
        command::TraceStart { minor: 1, events: 4096 }.into(),
        command::TraceStop { minor: 1, forget: true }.into(),
        command::Quit { force: false }.into(),
    ];
    let mut words = BTreeSet::new();
    for command in commands {
        let line = serde_json::to_string(&command).expect("writable");
        assert_eq!(parse_request(line.as_bytes()).expect(&line).command, command);
        assert!(command.check(1).is_ok(), "{line}");
        words.insert(
            serde_json::to_value(&command).expect("writable")["command"].to_string().replace('"', ""),
        );
    }
    // Clients say these, whatever the structures are called.
    let said = "attach close commit detach disk-info front-add front-admit front-follow front-list \
                front-remove grow hello job-cancel job-list job-rate limits list look-for-room mirror-cancel \
                mirror-pivot mirror-rate mirror-resume mirror-start mirror-status open pause quit resume \
                set-limits set-polling set-share set-transfers shorten snapshot stats swap-leaf trace-start trace-stop";
    assert_eq!(words.into_iter().collect::<Vec<_>>().join(" "), said);
    assert_eq!(said.split(' ').count(), Command::COUNT, "a command is not tried here");
}

#[test]
fn answers_are_read_as_they_are_written() {
    let done = serde_json::to_value(command::Done {}).expect("writable");
    assert_eq!(done, serde_json::json!({}));
    let stats = tapio_stat::DiskStats::private(&tapio_stat::DiskName::of_this_process(3)).expect("counters");
    let report = DiskReport {
        minor: 3,
        state: VbdState::Running,
        counters: Some(stats.view().snapshot()),
        in_flight: 1,
        stuck: 0,
        dropped: 2,
        requests: Vec::new(),
        images: Vec::new(),
        beside: vec!["a log".into()],
        blkif: Vec::new(),
        room: None,
    };
    for reports in [DiskReports::One(Box::new(report.clone())), DiskReports::All(vec![report])] {
        let text = serde_json::to_string(&reports).expect("writable");
        assert_eq!(serde_json::from_str::<DiskReports>(&text).expect(&text), reports);
    }
    // What other versions say more or less is no reason to refuse their answer.
    let other =
        r#"{"minor":3,"state":"running","counters":null,"in_flight":0,"stuck":0,"images":[],"more":1}"#;
    assert!(matches!(serde_json::from_str(other), Ok(DiskReports::One(_))));
}

#[test]
fn impossible_requests_are_refused() {
    let unix = |path: &str, export: &str| Front::NbdUnix {
        path: path.into(),
        listener: None,
        export: export.into(),
        read_only: false,
    };
    assert!(unix("/s", "").check(0).is_ok());
    assert!(unix(&format!("/{}", "x".repeat(106)), "").check(0).is_ok());
    for bad in
        [unix("s", ""), unix("/a\nb", ""), unix(&format!("/{}", "x".repeat(107)), ""), unix("/s", "a\0b")]
    {
        assert_eq!(bad.check(0).expect_err("refused").errno, Errno::EINVAL, "{bad:?}");
    }
    let vhost = |queues, queue_size| Front::VhostUser {
        socket: "/v".into(),
        listener: None,
        connection: None,
        queues,
        queue_size,
        read_only: false,
    };
    assert!(vhost(64, 1024).check(0).is_ok());
    for bad in [vhost(0, 256), vhost(65, 256), vhost(1, 0), vhost(1, 100), vhost(1, 2048)] {
        assert!(bad.check(0).is_err(), "{bad:?}");
    }
    let named =
        Front::NbdUnix { path: "/s".into(), listener: Some(1), export: String::new(), read_only: false };
    assert!(named.check(1).is_err() && named.check(2).is_ok());
    for bad in ["vhd:", "vhd", "vmdk:/x", "vhd:relative", "vhd:/a\u{7}"] {
        assert!(ImageSource::Leaf(bad.into()).check().is_err(), "{bad}");
    }
    assert!(ImageSource::Chain(vec![]).check().is_err());
    assert!(command::Snapshot { minor: 0, leaf: "new.vhd".into(), stall_ms: 1 }.check(0).is_err());
    assert!(command::SetPolling { minor: 0, max_us: 0, idle_percent: 101 }.check(0).is_err());
    let too_much = tapio_types::IoLimits { iops: u64::MAX, ..Default::default() };
    assert!(command::SetLimits { minor: 0, limits: too_much }.check(0).is_err());
    for bad in [r#"{"name":"../x"}"#, r#"{"name":"sr","pages":0}"#, r#"{"name":"sr","pages":65536}"#] {
        let line = format!(r#"{{"command":"open","minor":1,"image":{{"leaf":"vhd:/a"}},"pool":{bad}}}"#);
        let request = parse_request(line.as_bytes()).expect(bad);
        assert_eq!(request.command.check(0).expect_err(bad).errno, Errno::EINVAL);
    }
}

proptest! {
    /// Nothing that a client sends makes the parser panic.
    #[test]
    fn any_line_is_a_request_or_an_error(line in prop::collection::vec(any::<u8>(), 0..300)) {
        let _ = parse_request(&line);
    }

    #[test]
    fn near_misses_are_handled(minor in any::<i64>(), command in "[a-z-]{0,12}", extra in "[a-z_\"{}:,]{0,20}") {
        let line = format!("{{\"id\":1,\"command\":\"{command}\",\"minor\":{minor}{extra}}}");
        if let Ok(request) = parse_request(line.as_bytes()) {
            let _ = request.command.check(0);
        }
    }
}

#[test]
fn deep_nesting_does_not_exhaust_the_stack() {
    let line = "[".repeat(LINE_LEN_MAX);
    assert_eq!(parse_request(line.as_bytes()).expect_err("too deep").1.errno, Errno::EPROTO);
}

#[test]
fn a_device_is_asked_for_by_kind_and_named_in_the_answer() {
    let ask = br#"{"id":1,"command":"front-add","minor":0,"front":{"kind":"block","how":"auto"}}"#;
    let Ok(Request { command: Command::FrontAdd(command::FrontAdd { front, .. }), .. }) = parse_request(ask)
    else {
        panic!("not understood");
    };
    assert_eq!(front, Front::Block { how: DeviceHow::Auto, device: None, read_only: false, owner: None });
    assert_eq!((front.kind(), front.address().as_str(), front.check(0)), ("block", "device:auto", Ok(())));
    let made = Front::Block {
        how: DeviceHow::Fuse,
        device: Some("/dev/loop3".into()),
        read_only: false,
        owner: None,
    };
    assert_eq!(made.address(), "/dev/loop3");
    assert_eq!(made.check(0).expect_err("names are not chosen by the asker").errno, Errno::EINVAL);
}
