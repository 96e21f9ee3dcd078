//! What clients, servers, guests and other processes say.

use tapio_control::command::{self as ask, Command};
use tapio_control::{
    Blkif, Body, Front, Image, ImageSource, List, Message as Tapdisk, MessageKind, NbdGuard, Params,
    Response, Stat, flags,
};
use tapio_front::nbd::client::ClientOptions;
use tapio_front::nbd::wire::{
    EXTENDED_REPLY_MAGIC, OPTION_MAGIC, RequestHeader, SIMPLE_REPLY_MAGIC, STRUCTURED_REPLY_MAGIC, Style,
    chunk, command, command_flag, option, option_reply, put_request,
};
use tapio_front::vhost_user::foreign::{config_payload, id};
use tapio_front::vhost_user::{Header, RegionSpec, protocol};
use tapio_stat::{BUCKETS, PAGE_LEN, ring_text};
use tapio_types::RingState;

use super::Shelf;
use crate::fuzz::guest::{AVAIL_AT, GUEST, GUEST_SECOND};
use crate::fuzz::nbd::{agreeable, reply};
use crate::fuzz::session::FILE_LEN;

pub fn put_into(shelf: &mut Shelf) {
    handshakes(shelf);
    requests(shelf);
    replies(shelf);
    messages(shelf);
    rings(shelf);
    virtio(shelf);
    tapdisk(shelf);
    lines(shelf);
    samples(shelf);
    pages(shelf);
}

// --- NBD ---

fn say(stream: &mut Vec<u8>, option: u32, data: &[u8]) {
    stream.extend_from_slice(&OPTION_MAGIC.to_be_bytes());
    stream.extend_from_slice(&option.to_be_bytes());
    stream.extend_from_slice(&(data.len() as u32).to_be_bytes());
    stream.extend_from_slice(data);
}

fn named(name: &str, rest: &[u8]) -> Vec<u8> {
    [&(name.len() as u32).to_be_bytes()[..], name.as_bytes(), rest].concat()
}

fn handshakes(shelf: &mut Shelf) {
    let opening = || 3u32.to_be_bytes().to_vec();
    let mut put = |name: &str, options: &[(u32, Vec<u8>)]| {
        let mut stream = opening();
        options.iter().for_each(|(option, data)| say(&mut stream, *option, data));
        shelf.put("nbd_handshake", name, stream);
    };
    let contexts = |name: &str, queries: &[&str]| {
        let mut data = named(name, &(queries.len() as u32).to_be_bytes());
        queries.iter().for_each(|query| data.extend(named(query, &[])));
        data
    };
    put("old-way", &[(option::EXPORT_NAME, b"rw".to_vec())]);
    put("go", &[(option::GO, named("rw", &[0, 2, 0, 1, 0, 3]))]);
    put(
        "everything",
        &[
            (option::STRUCTURED_REPLY, Vec::new()),
            (option::LIST, Vec::new()),
            (option::INFO, named("ro", &[0, 3, 0, 1, 0, 2, 0, 3])),
            (option::LIST_META_CONTEXT, contexts("rw", &["base:", "qemu:"])),
            (option::SET_META_CONTEXT, contexts("rw", &["base:allocation"])),
            (option::GO, named("rw", &[0, 0])),
        ],
    );
    put("extended", &[(option::EXTENDED_HEADERS, Vec::new()), (option::GO, named("rw", &[0, 0]))]);
    put(
        "refused",
        &[(option::STARTTLS, Vec::new()), (99, b"?".to_vec()), (option::GO, named("busy", &[0, 0]))],
    );
    put("abort", &[(option::ABORT, Vec::new())]);
    let mut long = opening();
    long.extend_from_slice(&OPTION_MAGIC.to_be_bytes());
    long.extend_from_slice(&option::INFO.to_be_bytes());
    long.extend_from_slice(&(20_000u32).to_be_bytes());
    long.resize(long.len() + 20_000, b'x');
    say(&mut long, option::ABORT, &[]);
    shelf.put("nbd_handshake", "too-long", long);
}

fn requests(shelf: &mut Shelf) {
    for (name, negotiated, style) in [
        ("simple", 0u8, Style::Simple),
        ("structured", 1 | 4 | 16, Style::Structured),
        ("extended", 2 | 4, Style::Extended),
    ] {
        let mut stream = vec![negotiated];
        for (command, flags, offset, len) in [
            (command::READ, 0, 4096, 8192),
            (command::WRITE, command_flag::FUA, 512, 512),
            (command::FLUSH, 0, 0, 0),
            (command::TRIM, 0, 1 << 20, 1 << 20),
            (command::WRITE_ZEROES, command_flag::NO_HOLE, 0, 4096),
            (command::CACHE, 0, 0, 4096),
            (command::BLOCK_STATUS, command_flag::REQ_ONE, 0, 1 << 20),
            (command::DISC, 0, 0, 0),
        ] {
            let payload = command == command::WRITE && style == Style::Extended;
            let flags = if payload { flags | command_flag::PAYLOAD_LEN } else { flags };
            put_request(style, &RequestHeader { flags, command, cookie: 7, offset, len }, &mut stream);
            if command == command::WRITE {
                stream.resize(stream.len() + len as usize, 0xab);
            }
        }
        shelf.put("nbd_requests", name, stream);
    }
    let mut read_only = vec![8];
    let write = RequestHeader { flags: 0, command: command::TRIM, cookie: 1, offset: 0, len: 512 };
    put_request(Style::Simple, &write, &mut read_only);
    shelf.put("nbd_requests", "read-only", read_only);
}

pub(super) fn simple(error: u32, cookie: u64, data: &[u8]) -> Vec<u8> {
    [&SIMPLE_REPLY_MAGIC.to_be_bytes()[..], &error.to_be_bytes(), &cookie.to_be_bytes(), data].concat()
}

pub(super) fn piece(style: Style, done: bool, kind: u16, cookie: u64, payload: &[u8]) -> Vec<u8> {
    let flags = if done { chunk::DONE } else { 0 };
    let head = [&flags.to_be_bytes()[..], &kind.to_be_bytes(), &cookie.to_be_bytes()].concat();
    if style == Style::Extended {
        let (offset, len) = (0u64.to_be_bytes(), (payload.len() as u64).to_be_bytes());
        [&EXTENDED_REPLY_MAGIC.to_be_bytes()[..], &head, &offset, &len, payload].concat()
    } else {
        let len = (payload.len() as u32).to_be_bytes();
        [&STRUCTURED_REPLY_MAGIC.to_be_bytes()[..], &head, &len, payload].concat()
    }
}

fn replies(shelf: &mut Shelf) {
    let target = "nbd_replies";
    let behind = 8u8;
    // The first byte: style, 4 allocation, 8 behind a handshake, 16 list and info, the rest says what is asked first.
    let mut stream = vec![behind];
    stream.extend(simple(0, 1, &[1; 8192]));
    stream.extend(simple(22, 2, &[]));
    shelf.put(target, "simple-read", stream);

    for (name, style, bits) in [("structured", Style::Structured, 1u8), ("extended", Style::Extended, 2)] {
        let data = |at: u64, len: usize| [&at.to_be_bytes()[..], &vec![9; len]].concat();
        let hole = [&8192u64.to_be_bytes()[..], &4096u32.to_be_bytes()].concat();
        let mut stream = vec![bits | 4 | behind];
        stream.extend(piece(style, false, chunk::OFFSET_DATA, 1, &data(4096, 4096)));
        stream.extend(piece(style, true, chunk::OFFSET_HOLE, 1, &hole));
        let extents = [1u32, 4096, 0, 8192, 3].map(u32::to_be_bytes).concat();
        stream.extend(piece(style, true, chunk::BLOCK_STATUS, 2, &extents));
        let error = [&22u32.to_be_bytes()[..], &4u16.to_be_bytes(), b"nope"].concat();
        stream.extend(piece(style, true, chunk::ERROR, 3, &error));
        shelf.put(target, name, stream);

        let mut stream = vec![bits | 4 | behind | 1 << 5];
        let extents =
            [&1u32.to_be_bytes()[..], &1u32.to_be_bytes(), &[0; 6], &[16, 0], &3u64.to_be_bytes()].concat();
        stream.extend(piece(style, true, chunk::BLOCK_STATUS_EXT, 1, &extents));
        stream.extend(piece(style, true, chunk::NONE, 2, &[]));
        shelf.put(target, &format!("{name}-status"), stream);

        // More than was asked for, again and again: a server that wants the client's memory.
        let mut stream = vec![bits | behind | 3 << 5];
        for _ in 0..40 {
            let hole = [&0u64.to_be_bytes()[..], &(64u32 << 20).to_be_bytes()].concat();
            stream.extend(piece(style, false, chunk::OFFSET_HOLE, 1, &hole));
        }
        stream.extend(piece(style, true, chunk::NONE, 1, &[]));
        shelf.put(target, &format!("{name}-flood"), stream);
    }
    for (name, bits, style) in
        [("handshake", 2u8 | 4, Style::Extended), ("handshake-simple", 0, Style::Simple)]
    {
        let options = ClientOptions { export: "disk".into(), style, allocation: bits & 4 != 0 };
        shelf.put(target, name, [&[bits][..], &agreeable(&options)].concat());
    }
    let mut listed = vec![16];
    listed.extend(
        &agreeable(&ClientOptions { export: String::new(), style: Style::Simple, allocation: false })[..18],
    );
    reply(&mut listed, option::LIST, option_reply::SERVER, &named("disk", b"a description"));
    reply(&mut listed, option::LIST, option_reply::ACK, &[]);
    reply(&mut listed, option::INFO, option_reply::ERR_UNKNOWN, b"no such export");
    shelf.put(target, "list", listed);
}

// --- vhost-user and the guest behind it ---

fn message(out: &mut Vec<u8>, request: u32, payload: &[u8]) {
    out.extend_from_slice(&Header::request(request, payload.len() as u32, false).to_bytes());
    out.extend_from_slice(payload);
}

fn pair(a: u32, b: u32) -> Vec<u8> {
    [a.to_ne_bytes(), b.to_ne_bytes()].concat()
}

fn messages(shelf: &mut Shelf) {
    let user = 0x7000_0000u64;
    let region = RegionSpec { guest: 0, len: FILE_LEN, user, offset: 0 };
    let table = |regions: &[RegionSpec]| {
        let mut bytes = pair(regions.len() as u32, 0);
        regions.iter().for_each(|region| bytes.extend(region.to_bytes()));
        bytes
    };
    let all = protocol::MQ
        | protocol::REPLY_ACK
        | protocol::CONFIG
        | protocol::INFLIGHT_SHMFD
        | protocol::CONFIGURE_MEM_SLOTS
        | protocol::RESET_DEVICE
        | protocol::STATUS;
    let number = |value: u64| value.to_ne_bytes();
    let addresses = [
        pair(0, 0),
        number(user).to_vec(),
        number(user + 0x2000).to_vec(),
        number(user + 0x1000).to_vec(),
        vec![0; 8],
    ]
    .concat();
    let mut start = Vec::new();
    message(&mut start, id::GET_FEATURES, &[]);
    message(&mut start, id::SET_FEATURES, &number(1 << 32 | 1 << 30 | 1 << 29 | 1 << 28 | 1 << 9));
    message(&mut start, id::GET_PROTOCOL_FEATURES, &[]);
    message(&mut start, id::SET_PROTOCOL_FEATURES, &number(all));
    message(&mut start, id::SET_OWNER, &[]);
    let mut queue = start.clone();
    message(&mut queue, id::SET_MEM_TABLE, &table(&[region]));
    message(&mut queue, id::SET_VRING_NUM, &pair(0, 16));
    message(&mut queue, id::SET_VRING_BASE, &pair(0, 0));
    message(&mut queue, id::SET_VRING_ADDR, &addresses);
    message(&mut queue, id::SET_VRING_CALL, &number(0));
    message(&mut queue, id::SET_VRING_KICK, &number(0));
    message(&mut queue, id::SET_VRING_ENABLE, &pair(0, 1));
    message(&mut queue, id::GET_VRING_BASE, &pair(0, 0));
    message(&mut queue, id::RESET_DEVICE, &[]);
    shelf.put("vhost_user_message", "queue", queue);

    let mut config = start.clone();
    message(&mut config, id::GET_QUEUE_NUM, &[]);
    message(&mut config, id::GET_CONFIG, &config_payload(0, 0, &[0; 60]));
    message(&mut config, id::SET_CONFIG, &config_payload(32, 0, &[0]));
    message(&mut config, id::GET_CONFIG, &config_payload(250, 0, &[0; 6]));
    message(&mut config, id::SET_STATUS, &number(15));
    message(&mut config, id::GET_STATUS, &[]);
    message(&mut config, id::GET_MAX_MEM_SLOTS, &[]);
    shelf.put("vhost_user_message", "config", config);

    let mut memory = start.clone();
    let second = RegionSpec { guest: FILE_LEN, len: 4096, user: user + FILE_LEN, offset: 8192 };
    for spec in [region, second] {
        message(&mut memory, id::ADD_MEM_REG, &[&[0; 8][..], &spec.to_bytes()].concat());
    }
    message(&mut memory, id::REM_MEM_REG, &[&[0; 8][..], &region.to_bytes()].concat());
    message(&mut memory, id::SET_MEM_TABLE, &table(&[region, second]));
    shelf.put("vhost_user_message", "memory", memory);

    let mut migration = start.clone();
    message(&mut migration, id::SET_PROTOCOL_FEATURES, &number(all | protocol::LOG_SHMFD));
    message(&mut migration, id::SET_MEM_TABLE, &table(&[region]));
    message(&mut migration, id::SET_FEATURES, &number(1 << 34 | 1 << 32));
    message(&mut migration, id::SET_VRING_NUM, &pair(0, 10));
    message(&mut migration, id::SET_VRING_BASE, &pair(0, 0x8003_8003));
    message(&mut migration, id::SET_VRING_ADDR, &addresses);
    message(&mut migration, id::SET_VRING_KICK, &number(0));
    message(&mut migration, id::SET_LOG_BASE, &[number(8192), number(4096)].concat());
    message(&mut migration, id::SET_LOG_FD, &[]);
    message(&mut migration, id::SET_FEATURES, &number(1 << 34 | 1 << 32 | 1 << 26));
    let mut logged = addresses.clone();
    logged[4] = 1;
    message(&mut migration, id::SET_VRING_ADDR, &logged);
    message(&mut migration, id::GET_VRING_BASE, &pair(0, 0));
    shelf.put("vhost_user_message", "migration", migration);

    let mut inflight = start;
    let spec = [&0u64.to_ne_bytes()[..], &[0; 8], &2u16.to_ne_bytes(), &16u16.to_ne_bytes()].concat();
    message(&mut inflight, id::GET_INFLIGHT_FD, &spec);
    let spec =
        [&8192u64.to_ne_bytes()[..], &[0; 8], &2u16.to_ne_bytes(), &16u16.to_ne_bytes(), &[0; 4]].concat();
    message(&mut inflight, id::SET_INFLIGHT_FD, &spec);
    message(&mut inflight, id::SET_MEM_TABLE, &table(&[region]));
    message(&mut inflight, id::SET_VRING_NUM, &pair(1, 16));
    message(&mut inflight, id::SET_VRING_ADDR, &[&pair(1, 0), &addresses[8..]].concat());
    message(&mut inflight, id::SET_VRING_KICK, &number(1));
    shelf.put("vhost_user_message", "inflight", inflight);
}

fn descriptor(at: u64, len: u32, flags: u16, next: u16) -> Vec<u8> {
    [&at.to_le_bytes()[..], &len.to_le_bytes(), &flags.to_le_bytes(), &next.to_le_bytes()].concat()
}

fn request_header(kind: u32, sector: u64) -> Vec<u8> {
    [&kind.to_le_bytes()[..], &[0; 4], &sector.to_le_bytes()].concat()
}

fn rings(shelf: &mut Shelf) {
    const NEXT: u16 = 1;
    const WRITE: u16 = 2;
    const INDIRECT: u16 = 4;
    const DATA: usize = 0x2000;
    let data = GUEST + DATA as u64;
    let mut put = |name: &str, head: [u8; 2], table: &[Vec<u8>], content: &[u8]| {
        let mut memory = vec![0; DATA];
        let table = table.concat();
        memory[..table.len()].copy_from_slice(&table);
        memory[AVAIL_AT + 2] = 1;
        memory.extend_from_slice(content);
        shelf.put("vring", name, [&head[..], &memory].concat());
    };
    let read = [
        descriptor(data, 16, NEXT, 1),
        descriptor(data + 512, 4096, NEXT | WRITE, 2),
        descriptor(data + 16, 1, WRITE, 0),
    ];
    put("read", [4, 0], &read, &request_header(0, 8));
    let write = [
        descriptor(data, 16, NEXT, 1),
        descriptor(data + 512, 512, NEXT, 2),
        descriptor(data + 16, 1, WRITE, 0),
    ];
    put("write", [4, 0], &write, &request_header(1, 8));
    put("circle", [2, 0], &[descriptor(data, 16, NEXT, 1), descriptor(data, 16, NEXT, 0)], &[]);
    let across = [
        descriptor(data, 16, NEXT, 1),
        descriptor(GUEST_SECOND - 256, 512, NEXT | WRITE, 2),
        descriptor(data + 16, 1, WRITE, 0),
    ];
    put("across-regions", [4, 0], &across, &request_header(0, 0));
    let inner = [request_header(0, 1), vec![0; 48], read.concat()].concat();
    put("indirect", [4, 0], &[descriptor(data + 64, 48, INDIRECT, 0)], &inner);
    put("outside", [4, 0], &[descriptor(u64::MAX - 7, 16, NEXT, 1), descriptor(data, 1, WRITE, 0)], &[]);
    let ranges = [
        descriptor(data, 16, NEXT, 1),
        descriptor(data + 16, 32, NEXT, 2),
        descriptor(data + 64, 1, WRITE, 0),
    ];
    let range = [&8u64.to_le_bytes()[..], &16u32.to_le_bytes(), &0u32.to_le_bytes()].concat();
    put("discard", [4, 0], &ranges, &[request_header(11, 0), range.clone(), range].concat());
}

fn virtio(shelf: &mut Shelf) {
    let mut put = |name: &str, readable: &[&[u8]], writable: &[u8]| {
        let mut bytes = vec![readable.len() as u8, writable.len() as u8, 0];
        bytes.extend(readable.iter().map(|piece| piece.len() as u8));
        bytes.extend(writable);
        readable.iter().for_each(|piece| bytes.extend_from_slice(piece));
        shelf.put("virtio_blk", name, bytes);
    };
    let range = |flags: u32| [&8u64.to_le_bytes()[..], &16u32.to_le_bytes(), &flags.to_le_bytes()].concat();
    put("read", &[&request_header(0, 8)], &[128, 128, 1]);
    put("read-with-its-status", &[&request_header(0, 8)], &[129]);
    put("write", &[&request_header(1, 8), &[7; 128]], &[1]);
    put("split-header", &[&request_header(1, 8)[..5], &request_header(1, 8)[5..], &[7; 64]], &[1]);
    put("flush", &[&request_header(4, 0)], &[1]);
    put("identity", &[&request_header(8, 0)], &[20, 1]);
    put("discard", &[&request_header(11, 0), &range(0), &range(0)], &[1]);
    put("write-zeroes", &[&request_header(13, 0), &range(1)], &[1]);
    put("unknown", &[&request_header(77, 0)], &[1]);
}

// --- the control socket ---

fn tapdisk(shelf: &mut Shelf) {
    let mut put = |kind: MessageKind, cookie: u16, body: Body, behind: &[u8]| {
        let bare = if body == Body::None { "bare-" } else { "" };
        let name = format!("{bare}{}", kind.text().replace(' ', "-"));
        let bytes = Tapdisk { kind, cookie, body }.encode().expect("a sound message");
        shelf.put("tapdisk_message", &name, [&bytes[..], behind].concat());
    };
    for kind in MessageKind::ALL {
        put(*kind, 0, Body::None, &[]);
    }
    let params = |flags| Params {
        flags,
        path: "vhd:/a/b.vhd".into(),
        secondary: "nbd:/s".into(),
        ..Params::default()
    };
    let mut log = b"/var/log/x".to_vec();
    log.resize(256, 0);
    let key = [&[32u8][..], &[5; 32]].concat();
    let behind = [log, key].concat();
    let flags = flags::ADD_LOG | flags::OPEN_ENCRYPTED | flags::SECONDARY | flags::RDONLY;
    put(MessageKind::Open, 0, Body::Params(Box::new(params(flags))), &behind);
    put(MessageKind::Resume, 0, Body::Params(Box::new(params(0))), &[]);
    put(MessageKind::OpenRsp, 0, Body::Image(Image { sectors: 8, sector_size: 512, info: 4 }), &[]);
    put(MessageKind::Error, 3, Body::Response(Response { error: 19, message: "no".into() }), &[]);
    let list = List { count: 1, minor: 0, state: 0x2a, path: "vhd:/a".into() };
    put(MessageKind::ListRsp, 0, Body::List(list), &[]);
    put(MessageKind::StatsRsp, 0, Body::Stat(Stat { length: 4, ..Stat::default() }), b"{  }");
    let ring =
        Blkif { domid: 5, devid: 51712, order: 3, pool: "td-xenio-default".into(), ..Blkif::default() };
    put(MessageKind::XenblkifConnect, 0, Body::Blkif(Box::new(ring)), &[]);
}

fn lines(shelf: &mut Shelf) {
    let line = |id: u64, command: &Command| {
        let mut value = serde_json::to_value(command).expect("a command");
        value["id"] = id.into();
        format!("{value}\n")
    };
    let fronts = [
        Front::NbdUnix { path: "/run/d.sock".into(), listener: None, export: "x".into(), read_only: true },
        Front::NbdTcp {
            addr: ([127, 0, 0, 1], 10809).into(),
            tls: None,
            export: String::new(),
            read_only: false,
            guard: Some(NbdGuard { client_time_s: 60 }),
        },
        Front::VhostUser {
            socket: "/run/v.sock".into(),
            listener: Some(0),
            connection: None,
            queues: 2,
            queue_size: 256,
            read_only: false,
        },
    ];
    let minor = 0;
    let leaf = ImageSource::Leaf("vhd:/srv/a.vhd".into());
    let mut commands: Vec<Command> = vec![
        ask::Hello { version: 1 }.into(),
        ask::List {}.into(),
        ask::Stats { minor: Some(0) }.into(),
        ask::Attach { minor: 3 }.into(),
        ask::Grow { minor: 0, len: 1 << 30 }.into(),
        ask::Open {
            timeout_s: Some(9),
            default_nbd: true,
            key: Some(0),
            ..ask::Open::of(minor, leaf.clone())
        }
        .into(),
        ask::Pause { minor }.into(),
        ask::Resume { minor, image: Some(leaf), secondary: None, log: None }.into(),
        ask::DiskInfo { minor: 9 }.into(),
        ask::SetPolling { minor, max_us: 100, idle_percent: 50 }.into(),
        ask::FrontList { minor }.into(),
        ask::FrontFollow { minor, front: 1 }.into(),
        ask::FrontAdmit { minor, front: 1, names: vec![ask::SecretName("/a?b".into())], cut: Vec::new() }
            .into(),
        ask::FrontRemove { minor, front: 1, force: false }.into(),
        ask::Close { minor, force: true }.into(),
        ask::Quit { force: false }.into(),
    ];
    let all: String = commands.iter().zip(1..).map(|(command, id)| line(id, command)).collect();
    shelf.put("own_protocol", "commands", all);
    commands.truncate(1);
    commands.extend(fronts.map(|front| ask::FrontAdd { minor, front, vbd: None }.into()));
    let all: String = commands.iter().zip(1..).map(|(command, id)| line(id, command)).collect();
    shelf.put("own_protocol", "fronts", all);
    let chain = concat!(
        r#"{"id":2,"command":"open","minor":0,"image":{"chain":[{"kind":"vhd","#,
        r#""path":"/a"},{"kind":"raw","path":"/b"}]}}"#
    );
    shelf.put("own_protocol", "chain", format!("{}{chain}\n", line(1, &ask::Hello { version: 1 }.into())));
    let hello = concat!(
        r#"{"id":1,"ok":{"version":1,"features":["fronts"],"program":"tapio-disk","#,
        r#""program_version":"0.1.0","pid":1}}"#
    );
    let list = r#"{"id":2,"ok":[{"minor":0,"state":"running","image":null,"read_only":false,"fronts":[]}]}"#;
    let error =
        r#"{"id":3,"error":{"code":"ENODEV","errno":19,"message":"there is no disk 9","next":"attach"}}"#;
    shelf.put("own_protocol", "answers", format!("{hello}\n{list}\n{error}\n"));
    shelf.put("own_protocol", "deep", format!("{{\"id\":{}\n", "[".repeat(300)));
}

// --- counters ---

fn samples(shelf: &mut Shelf) {
    let file = tapio_cli::foreign::replay_seed();
    // A head of 16 bytes with the layout's number at 8.
    let mut newer = file.clone();
    newer[8] += 1;
    shelf.put("xsiostat_replay", "none", &file[..16]);
    shelf.put("xsiostat_replay", "torn", &file[..file.len() - 5]);
    shelf.put("xsiostat_replay", "newer", newer);
    shelf.put("xsiostat_replay", "two-disks", file);
}

fn pages(shelf: &mut Shelf) {
    let published: Vec<u8> = [1u32, 0]
        .map(u32::to_le_bytes)
        .concat()
        .into_iter()
        .chain((10u64..21).flat_map(u64::to_le_bytes))
        .collect();
    shelf.put("stat_pages", "published", published);
    shelf.put("stat_pages", "statistics", (1u64..=7).flat_map(u64::to_le_bytes).collect::<Vec<u8>>());
    let ring = RingState { size: 32, req_prod: 120, rsp_prod: 118, ..RingState::default() };
    let (text, len) = ring_text(&ring);
    shelf.put("stat_pages", "io_ring", &text[..len]);
    let word = |value: u64| value.to_ne_bytes();
    let mut page: Vec<u8> =
        [*b"TAPIOSTA", word(1), word(PAGE_LEN as u64), word(7), word(0), word(1 << 60), word(128)].concat();
    page.extend([word(2), word(12)].concat());
    page.extend_from_slice(b"vhd:/a/b.vhd");
    // Counts and histograms: numbers that grow, so that no two fields are alike.
    let words = (PAGE_LEN - page.len()) / 8;
    page.resize(page.len().next_multiple_of(8), 0);
    page.extend((0..words as u64).flat_map(|index| (index % (BUCKETS as u64)).to_ne_bytes()));
    page.resize(PAGE_LEN, 0);
    shelf.put("stat_pages", "page", page.clone());
    // A trace of eight events: two requests of one queue, of which the second has no answer yet.
    let mut trace =
        [*b"TAPIOTRC", word(1), word(8), word(7), word(1), word(100), word(50), word(7), word(0), word(1)]
            .concat();
    trace.resize(4096, 0);
    for (stamp, point, aux) in
        [(10, 2, 1), (20, 4, 8), (30, 5, 0), (60, 8, 0), (70, 9, 0), (80, 11, 0), (90, 2, 2), (0, 0, 0)]
    {
        trace.extend([word(stamp), word(point | 1 << 8 | 3 << 16 | aux << 32)].concat());
    }
    shelf.put("stat_pages", "trace", trace);
    shelf.put("stat_pages", "page-of-ones", [&page[..16], &vec![0xff; PAGE_LEN - 16]].concat());
}
