use super::*;

fn values(pairs: &[(&str, &str)]) -> Values {
    Values::new(
        pairs.iter().map(|(name, _)| (*name).to_owned()).collect(),
        pairs.iter().map(|(_, value)| Some(value.as_bytes().to_vec())).collect(),
    )
}

const ID: VbdId = VbdId { domid: 5, devid: 51712 };
const OFFERED: Offered = Offered { queues: 4, order: 3, split: true };

fn complete() -> Vec<(&'static str, &'static str)> {
    vec![
        ("frontend", "/local/domain/5/device/vbd/51712"),
        ("frontend-id", "5"),
        ("state", "1"),
        ("online", "1"),
        ("mode", "w"),
        ("physical-device-path", "/run/blktap-control/nbd77.3"),
    ]
}

fn with(name: &str, value: &'static str) -> Vec<(String, &'static str)> {
    let mut pairs: Vec<(String, &'static str)> = complete()
        .into_iter()
        .filter(|(other, _)| *other != name)
        .map(|(name, value)| (name.to_owned(), value))
        .collect();
    pairs.push((name.to_owned(), value));
    pairs
}

fn read_back(pairs: &[(String, &'static str)]) -> Result<Option<Back>, Fault> {
    let pairs: Vec<(&str, &str)> = pairs.iter().map(|(name, value)| (name.as_str(), *value)).collect();
    Back::read(ID, &values(&pairs))
}

#[test]
fn a_complete_device_is_understood() {
    let back = Back::read(ID, &values(&complete())).unwrap().unwrap();
    assert_eq!(back.frontend, "/local/domain/5/device/vbd/51712");
    assert_eq!((back.state, back.online, back.writable), (XenbusState::Initialising, true, Some(true)));
    assert_eq!((back.wanted.pid, back.wanted.minor), (Some(77), Some(3)));
    assert!(back.discard && !back.cdrom && back.polling.is_none() && back.odd.is_none());
}

#[test]
fn what_is_not_complete_is_waited_for() {
    for missing in ["frontend", "frontend-id", "state"] {
        let pairs: Vec<_> = complete().into_iter().filter(|(name, _)| *name != missing).collect();
        assert_eq!(Back::read(ID, &values(&pairs)), Ok(None), "{missing}");
    }
    let pairs: Vec<_> = complete().into_iter().filter(|(name, _)| *name != "mode").collect();
    assert_eq!(Back::read(ID, &values(&pairs)).unwrap().unwrap().writable, None);
}

#[test]
fn absurd_values_of_the_back_end_are_faults() {
    for (name, value) in [
        ("frontend", "/local/domain/0/device/vbd/51712"),
        ("frontend", "/local/domain/6/device/vbd/51712"),
        ("frontend", "/local/domain/5/device/vbd/51728"),
        ("frontend", "/local/domain/5/device/vbd/51712/x"),
        ("frontend", "/local/domain/5/../6/device/vbd/51712"),
        ("frontend", "/local/domain/05/device/vbd/51712"),
        ("frontend", ""),
        ("frontend", "device/vbd/51712"),
        ("frontend-id", "0"),
        ("frontend-id", "-5"),
        ("frontend-id", "99999999999999999999"),
        ("state", "12"),
        ("state", "connected"),
        ("mode", "x"),
    ] {
        let fault = read_back(&with(name, value)).expect_err(value);
        assert_eq!(fault.errno, libc::EINVAL);
        assert!(fault.text.contains(name), "{name}={value}: {fault}");
    }
}

#[test]
fn odd_polling_is_said_and_not_done() {
    for value in ["1000001", "fast", "-1"] {
        let back = read_back(&with("polling-duration", value)).unwrap().unwrap();
        assert_eq!(back.polling, None);
        assert!(back.odd.unwrap().contains("polling"), "{value}");
    }
    let back = read_back(&with("polling-duration", "8000")).unwrap().unwrap();
    assert_eq!(back.polling, Some(Polling { max_us: 8000, idle_percent: 0 }));
}

#[test]
fn a_ring_of_one_page_has_two_spellings() {
    for name in ["ring-ref", "ring-ref0"] {
        let front = values(&[(name, "8"), ("event-channel", "11"), ("protocol", "x86_64-abi")]);
        let form = Form::read(&front, OFFERED).unwrap();
        assert_eq!(form.protocol, BlkifProtocol::X86_64);
        assert!(form.more().is_empty(), "{:?}", form.more());
        let queues = form.queues(&front).unwrap();
        assert_eq!((queues[0].ring.as_slice(), queues[0].port), (&[8][..], 11));
    }
    let front = values(&[("ring-ref", "8"), ("event-channel", "11")]);
    assert_eq!(Form::read(&front, OFFERED).unwrap().protocol, BlkifProtocol::X86_32);
}

#[test]
fn rings_of_many_pages_and_queues_are_numbered() {
    let mut pairs =
        vec![("ring-page-order", "1"), ("multi-queue-num-queues", "2"), ("feature-persistent", "1")];
    let form = Form::read(&values(&pairs), OFFERED).unwrap();
    assert!(form.persistent);
    let names = form.more();
    assert_eq!(
        names,
        [
            "queue-0/ring-ref0",
            "queue-0/ring-ref1",
            "queue-0/event-channel",
            "queue-1/ring-ref0",
            "queue-1/ring-ref1",
            "queue-1/event-channel"
        ]
    );
    for (name, value) in names.iter().zip(["1", "2", "3", "4", "5", "6"]) {
        pairs.push((name, value));
    }
    let queues = form.queues(&values(&pairs)).unwrap();
    assert_eq!((queues[1].ring.as_slice(), queues[1].port), (&[4, 5][..], 6));
    let pairs = [("num-ring-pages", "4"), ("event-channel", "1")];
    assert_eq!(Form::read(&values(&pairs), OFFERED).unwrap().more().len(), 3, "ring-ref0 is read already");
}

#[test]
fn rings_of_responses_are_read_where_both_sides_want_them() {
    let pairs = [
        (split::FEATURE, "1"),
        ("ring-ref", "8"),
        ("event-channel", "3"),
        (split::RESPONSE_ORDER, "1"),
        ("tapio-response-ring-ref0", "20"),
        ("tapio-response-ring-ref1", "21"),
    ];
    let form = Form::read(&values(&pairs), OFFERED).unwrap();
    assert!(form.more().contains(&"tapio-response-ring-ref1".to_owned()));
    assert_eq!(form.queues(&values(&pairs)).unwrap()[0].responses, [20, 21]);
    let form = Form::read(&values(&pairs), Offered { split: false, ..OFFERED }).unwrap();
    assert!(form.queues(&values(&pairs)).unwrap()[0].responses.is_empty());
}

#[test]
fn absurd_values_of_a_guest_are_faults() {
    let read = |pairs: &[(&str, &str)]| {
        let values = values(pairs);
        Form::read(&values, OFFERED).and_then(|form| form.queues(&values))
    };
    let base = [("ring-ref", "8"), ("event-channel", "11")];
    for (name, value) in [
        ("protocol", "arm-abi"),
        ("protocol", ""),
        ("multi-queue-num-queues", "0"),
        ("multi-queue-num-queues", "5"),
        ("multi-queue-num-queues", "4294967295"),
        ("ring-page-order", "4"),
        ("ring-page-order", "31"),
        ("ring-page-order", "64"),
        ("ring-page-order", "-1"),
        ("num-ring-pages", "3"),
        ("num-ring-pages", "0"),
        ("num-ring-pages", "16"),
        ("ring-ref", "x"),
        ("ring-ref", "4294967296"),
        ("event-channel", ""),
        ("event-channel", "1 2"),
    ] {
        let mut pairs: Vec<_> = base.iter().copied().filter(|(other, _)| *other != name).collect();
        pairs.push((name, value));
        assert!(read(&pairs).is_err(), "{name}={value}");
    }
    assert_eq!(read(&[("ring-ref", "8")]).unwrap_err().errno, libc::ENOENT);
    assert_eq!(read(&[("event-channel", "8")]).unwrap_err().errno, libc::ENOENT);
    assert!(read(&base).is_ok());
    let long = "\u{1b}[31m".repeat(100);
    let fault = read(&[("protocol", &long), ("ring-ref", "8")]).unwrap_err();
    assert!(fault.text.len() < 300 && !fault.text.contains('\u{1b}'), "{fault}");
}
