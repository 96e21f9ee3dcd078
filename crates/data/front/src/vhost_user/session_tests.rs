//! The control side against a data side that only takes notes.

use std::cell::RefCell;
use std::os::fd::OwnedFd;

use tapio_block::Geometry;

use super::super::event::eventfd;
use super::super::memory::tests::memfd;
use super::super::message::{Message, RegionSpec};
use super::*;

#[derive(Debug, Default)]
struct Notes {
    log: RefCell<Vec<String>>,
    base: u32,
    refuse: Option<RingError>,
}

impl Notes {
    fn note(&self, line: String) {
        self.log.borrow_mut().push(line);
    }
}

impl DataSide for Notes {
    fn geometry(&self) -> Result<Geometry, Gone> {
        Ok(Geometry {
            len: 1 << 20,
            logical_block_len: 512,
            physical_block_len: 4096,
            read_only: false,
            transfer_max: 1 << 20,
        })
    }
    fn start(&self, setup: QueueSetup, _kick: Kick) -> Result<Result<(), RingError>, Gone> {
        self.note(format!(
            "start {} size {} base {} enabled {}",
            setup.index, setup.size, setup.base, setup.enabled
        ));
        Ok(self.refuse.map_or(Ok(()), Err))
    }
    fn stop(&self, index: usize) -> Result<Option<u32>, Gone> {
        self.note(format!("stop {index}"));
        Ok(Some(self.base))
    }
    fn set_memory(&self, memory: Arc<GuestMemory>, drain: bool) -> Result<(), Gone> {
        self.note(format!("memory {} drain {drain}", memory.region_count()));
        Ok(())
    }
    fn set_enabled(&self, index: usize, enabled: bool) -> Result<(), Gone> {
        self.note(format!("enable {index} {enabled}"));
        Ok(())
    }
    fn set_call(&self, index: usize, call: Option<Arc<Notifier>>) -> Result<(), Gone> {
        self.note(format!("call {index} {}", call.is_some()));
        Ok(())
    }
    fn set_err(&self, index: usize, err: Option<Arc<Notifier>>) -> Result<(), Gone> {
        self.note(format!("err {index} {}", err.is_some()));
        Ok(())
    }
    fn set_kick(&self, index: usize, _kick: Kick) -> Result<(), Gone> {
        self.note(format!("kick {index}"));
        Ok(())
    }
    fn set_writeback(&self, writeback: bool) -> Result<(), Gone> {
        self.note(format!("writeback {writeback}"));
        Ok(())
    }
    fn set_logging(&self, index: usize, logging: Option<Logging>) -> Result<(), Gone> {
        let logging = logging.map(|logging| (logging.ring, logging.desc));
        self.note(format!("log {index} {logging:?}"));
        Ok(())
    }
}

fn session() -> Session<Notes> {
    let config = SessionConfig { queues: 2, queue_size_max: 256, read_only: false, serial: [0; 20] };
    Session::new(Notes { base: 9, ..Notes::default() }, config)
}

fn event() -> Vec<OwnedFd> {
    vec![eventfd().unwrap()]
}

fn obey(session: &mut Session<Notes>, message: Message) -> Option<Reply> {
    session.handle(message, Vec::new()).unwrap()
}

fn number(reply: Option<Reply>) -> u64 {
    u64::from_ne_bytes(reply.unwrap().payload.try_into().unwrap())
}

const ADDRESSES: RingAddresses = RingAddresses { flags: 0, desc: 0, used: 0x2000, avail: 0x1000, log: 0 };

fn start(session: &mut Session<Notes>, index: u8) {
    let queue = u32::from(index);
    obey(session, Message::SetVringNum { index: queue, size: 128 });
    obey(session, Message::SetVringBase { index: queue, base: 3 });
    obey(session, Message::SetVringAddr { index: queue, addresses: ADDRESSES });
    session.handle(Message::SetVringKick { index, has_fd: true }, event()).unwrap();
}

fn log(session: &Session<Notes>) -> Vec<String> {
    session.data().log.take()
}

#[test]
fn a_queue_starts_with_its_kick_and_stops_with_the_question_for_its_index() {
    let mut session = session();
    start(&mut session, 1);
    assert_eq!(log(&session), ["start 1 size 128 base 3 enabled true"]);
    assert_eq!(session.running(), 1);
    let reply = obey(&mut session, Message::GetVringBase { index: 1 }).unwrap();
    assert_eq!(reply.payload, [1u32.to_ne_bytes(), 9u32.to_ne_bytes()].concat());
    assert_eq!(log(&session), ["stop 1"]);
    // Asked again, the answer is the same, and nothing is stopped twice.
    let again = obey(&mut session, Message::GetVringBase { index: 1 }).unwrap();
    assert_eq!(again.payload, reply.payload);
    assert!(log(&session).is_empty());
}

#[test]
fn with_protocol_features_a_queue_waits_to_be_enabled() {
    let mut session = session();
    obey(&mut session, Message::SetFeatures(feature::PROTOCOL_FEATURES | feature::VERSION_1));
    start(&mut session, 0);
    obey(&mut session, Message::SetVringEnable { index: 0, enable: true });
    assert_eq!(log(&session), ["writeback false", "start 0 size 128 base 3 enabled false", "enable 0 true"]);
}

#[test]
fn only_what_was_offered_can_be_set() {
    let mut session = session();
    let offered = number(obey(&mut session, Message::GetFeatures));
    assert_ne!(offered & feature::MQ, 0);
    session.handle(Message::SetFeatures(offered), Vec::new()).unwrap();
    let error = session.handle(Message::SetFeatures(offered | 1 << 40), Vec::new()).unwrap_err();
    assert!(matches!(error, Refusal::Features { .. }));
    let offered = number(obey(&mut session, Message::GetProtocolFeatures));
    session.handle(Message::SetProtocolFeatures(offered), Vec::new()).unwrap();
    assert!(session.acknowledges());
    assert!(session.handle(Message::SetProtocolFeatures(1 << 8), Vec::new()).is_err());
    assert!(session.handle(Message::SetLogBase { len: 0, offset: 0 }, event()).is_err());
}

#[test]
fn queues_that_do_not_exist_and_sizes_that_cannot_be_are_refused() {
    let mut session = session();
    for index in [2, 255, u32::MAX] {
        assert!(session.handle(Message::SetVringNum { index, size: 16 }, Vec::new()).is_err());
        assert!(session.handle(Message::GetVringBase { index }, Vec::new()).is_err());
        assert!(session.handle(Message::SetVringEnable { index, enable: true }, Vec::new()).is_err());
    }
    assert!(session.handle(Message::SetVringKick { index: 2, has_fd: true }, event()).is_err());
    for size in [0, 3, 512, 65536, u32::MAX] {
        assert!(session.handle(Message::SetVringNum { index: 0, size }, Vec::new()).is_err());
    }
    assert!(session.handle(Message::SetVringBase { index: 0, base: 65536 }, Vec::new()).is_err());
}

#[test]
fn a_running_queue_keeps_its_shape() {
    let mut session = session();
    start(&mut session, 0);
    assert!(session.handle(Message::SetVringNum { index: 0, size: 64 }, Vec::new()).is_err());
    assert!(session.handle(Message::SetVringBase { index: 0, base: 0 }, Vec::new()).is_err());
    let moved = RingAddresses { desc: 0x4000, ..ADDRESSES };
    assert!(session.handle(Message::SetVringAddr { index: 0, addresses: moved }, Vec::new()).is_err());
    let logged = RingAddresses { flags: 1, log: 77, ..ADDRESSES };
    obey(&mut session, Message::SetVringAddr { index: 0, addresses: logged });
    log(&session);
    session.handle(Message::SetVringCall { index: 0, has_fd: true }, event()).unwrap();
    session.handle(Message::SetVringKick { index: 0, has_fd: true }, event()).unwrap();
    session.handle(Message::SetVringErr { index: 0, has_fd: false }, Vec::new()).unwrap();
    assert_eq!(log(&session), ["call 0 true", "kick 0", "err 0 false"]);
    let packed = Message::SetFeatures(feature::RING_PACKED);
    assert!(session.handle(packed, Vec::new()).is_err(), "nor does a ring change its kind");
}

#[test]
fn a_queue_that_cannot_start_is_not_running() {
    let mut session = session();
    session.data.refuse = Some(RingError::Outside("used ring"));
    obey(&mut session, Message::SetVringNum { index: 0, size: 128 });
    obey(&mut session, Message::SetVringAddr { index: 0, addresses: ADDRESSES });
    let error = session.handle(Message::SetVringKick { index: 0, has_fd: true }, event()).unwrap_err();
    assert_eq!(error.to_string(), "queue 0: the used ring lies outside guest memory");
    assert_eq!(session.running(), 0);
}

#[test]
fn queues_without_a_kick_or_with_a_file_for_one_are_refused() {
    let mut session = session();
    assert!(session.handle(Message::SetVringKick { index: 0, has_fd: false }, Vec::new()).is_err());
    let file = vec![tempfile::tempfile().unwrap().into()];
    assert!(session.handle(Message::SetVringKick { index: 0, has_fd: true }, file).is_err());
}

#[test]
fn memory_is_exchanged_under_running_queues_and_drained_only_when_it_shrinks() {
    let mut session = session();
    let region = |guest| RegionSpec { guest, len: 0x1000, user: guest, offset: 0 };
    let offered = number(obey(&mut session, Message::GetProtocolFeatures));
    let add = |session: &mut Session<Notes>, guest| {
        session.handle(Message::AddMemReg(region(guest)), vec![memfd(0x1000)]).map(drop)
    };
    assert!(add(&mut session, 0).is_err(), "not negotiated yet");
    obey(&mut session, Message::SetProtocolFeatures(offered));
    let table = Message::SetMemTable(vec![region(0), region(0x1000)]);
    session.handle(table.clone(), vec![memfd(0x1000), memfd(0x1000)]).unwrap();
    start(&mut session, 0);
    log(&session);
    add(&mut session, 0x5000).unwrap();
    assert!(add(&mut session, 0x5fff).is_err(), "overlaps");
    obey(&mut session, Message::RemMemReg(region(0)));
    assert!(session.handle(Message::RemMemReg(region(0)), Vec::new()).is_err());
    session.handle(table, vec![memfd(0x1000), memfd(0x1000)]).unwrap();
    assert_eq!(log(&session), ["memory 3 drain false", "memory 2 drain true", "memory 2 drain true"]);
}

#[test]
fn the_write_cache_follows_the_byte_or_else_the_flush_feature() {
    let mut session = session();
    let byte = |session: &mut Session<Notes>, bytes: &[u8]| {
        session
            .handle(Message::SetConfig { offset: 32, flags: 0, bytes: bytes.to_vec() }, Vec::new())
            .map(drop)
    };
    assert!(byte(&mut session, &[0]).is_err(), "not negotiated");
    obey(&mut session, Message::SetFeatures(feature::FLUSH));
    obey(&mut session, Message::SetFeatures(feature::CONFIG_WCE | feature::FLUSH));
    byte(&mut session, &[0]).unwrap();
    byte(&mut session, &[1]).unwrap();
    assert!(byte(&mut session, &[2]).is_err());
    assert!(byte(&mut session, &[0, 0]).is_err());
    assert!(session.handle(Message::SetConfig { offset: 0, flags: 0, bytes: vec![0] }, Vec::new()).is_err());
    obey(&mut session, Message::SetFeatures(0));
    assert_eq!(
        log(&session),
        ["writeback true", "writeback true", "writeback false", "writeback true", "writeback false"]
    );
}

#[test]
fn the_configuration_space_is_as_long_as_asked_for() {
    let mut session = session();
    let reply = obey(&mut session, Message::GetConfig { offset: 0, len: 96, flags: 0 }).unwrap();
    assert_eq!(reply.payload.len(), 12 + 96);
    assert_eq!(reply.payload[12..20], 2048u64.to_le_bytes());
    let reply = obey(&mut session, Message::GetConfig { offset: 34, len: 2, flags: 0 }).unwrap();
    assert_eq!(reply.payload[12..], 2u16.to_le_bytes());
}

#[test]
fn a_reset_stops_everything() {
    let mut session = session();
    start(&mut session, 0);
    start(&mut session, 1);
    log(&session);
    obey(&mut session, Message::SetStatus(15));
    assert_eq!(number(obey(&mut session, Message::GetStatus)), 15);
    obey(&mut session, Message::ResetDevice);
    assert_eq!(log(&session), ["stop 0", "stop 1", "writeback false"]);
    assert_eq!((session.running(), number(obey(&mut session, Message::GetStatus))), (0, 0));
    // A front end that asks too late is answered all the same.
    let reply = obey(&mut session, Message::GetVringBase { index: 1 }).unwrap();
    assert_eq!(reply.payload[4..], 9u32.to_ne_bytes());
}

#[test]
fn the_inflight_region_is_made_and_taken_back() {
    let mut session = session();
    let spec = InflightSpec { len: 0, offset: 0, queues: 2, queue_size: 128 };
    assert!(session.handle(Message::GetInflightFd(spec), Vec::new()).is_err(), "not negotiated");
    let offered = number(obey(&mut session, Message::GetProtocolFeatures));
    obey(&mut session, Message::SetProtocolFeatures(offered));
    for (queues, queue_size) in [(0, 128), (3, 128), (2, 100), (2, 512)] {
        let spec = InflightSpec { queues, queue_size, ..spec };
        assert!(session.handle(Message::GetInflightFd(spec), Vec::new()).is_err());
    }
    let reply = obey(&mut session, Message::GetInflightFd(spec)).unwrap();
    let len = u64::from_ne_bytes(*reply.payload.first_chunk().unwrap());
    let file = reply.fd.unwrap();
    let small = InflightSpec { len: 16, ..spec };
    assert!(session.handle(Message::SetInflightFd(small), vec![file.try_clone().unwrap()]).is_err());
    let beyond = InflightSpec { len: 1 << 40, offset: 1 << 30, ..spec };
    assert!(session.handle(Message::SetInflightFd(beyond), vec![file.try_clone().unwrap()]).is_err());
    session.handle(Message::SetInflightFd(InflightSpec { len, ..spec }), vec![file]).unwrap();
}

#[test]
fn a_packed_queue_has_two_places_and_any_size() {
    let mut session = session();
    let base = 0x8003_0003;
    assert!(session.handle(Message::SetVringBase { index: 0, base }, Vec::new()).is_err());
    obey(&mut session, Message::SetFeatures(feature::RING_PACKED | feature::VERSION_1));
    obey(&mut session, Message::SetVringNum { index: 0, size: 100 });
    obey(&mut session, Message::SetVringBase { index: 0, base });
    obey(&mut session, Message::SetVringAddr { index: 0, addresses: ADDRESSES });
    session.handle(Message::SetVringKick { index: 0, has_fd: true }, event()).unwrap();
    assert_eq!(log(&session)[1..], [format!("start 0 size 100 base {base} enabled true")]);
    assert!(session.handle(Message::SetVringNum { index: 1, size: 0 }, Vec::new()).is_err());
}

#[test]
fn a_migration_switches_the_log_on_and_off_under_running_queues() {
    let mut session = session();
    let offered = number(obey(&mut session, Message::GetProtocolFeatures));
    let base = |len| Message::SetLogBase { len, offset: 0 };
    assert!(session.handle(base(4096), vec![memfd(4096)]).is_err(), "not negotiated");
    obey(&mut session, Message::SetProtocolFeatures(offered));
    let region = RegionSpec { guest: 0x8000_0000, len: 0x10000, user: 0x1_0000, offset: 0 };
    session.handle(Message::SetMemTable(vec![region]), vec![memfd(0x10000)]).unwrap();
    start(&mut session, 0);
    let error = session.handle(base(0x1_0001), vec![memfd(0x1_0001)]).unwrap_err();
    assert!(error.to_string().contains("needs 65538"), "{error}");
    log(&session);
    let reply = session.handle(base(0x1_0002), vec![memfd(0x1_0002)]).unwrap();
    assert_eq!(number(reply), 0, "the front end waits for this");
    obey(&mut session, Message::SetFeatures(feature::LOG_ALL | feature::FLUSH));
    let logged = |flags| {
        let addresses = RingAddresses { flags, log: 0x8000_2000, ..ADDRESSES };
        Message::SetVringAddr { index: 0, addresses }
    };
    obey(&mut session, logged(1));
    obey(&mut session, Message::SetFeatures(feature::FLUSH));
    obey(&mut session, logged(0));
    let want = [
        "log 0 None",
        "writeback true",
        "log 0 Some((None, None))",
        "log 0 Some((Some(2147491840), None))",
        "writeback true",
        "log 0 None",
        "log 0 None",
    ];
    assert_eq!(log(&session), want);
}
