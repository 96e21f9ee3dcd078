//! Every request of xenstore, and answers to what our client asks.

use tapio_xenstore::wire::{Access, Permission, Request};

use super::Shelf;

pub(super) fn put_into(shelf: &mut Shelf) {
    let requests = [
        Request::Control { arguments: b"help\0" },
        Request::Directory { path: "/local/domain" },
        Request::Read { path: "device/vbd/51712/state" },
        Request::GetPerms { path: "/" },
        Request::Watch { path: "@releaseDomain", token: b"t", depth: None },
        Request::Watch { path: "/a", token: b"t", depth: Some(1) },
        Request::Unwatch { path: "/a", token: b"t" },
        Request::TransactionStart,
        Request::Write { path: "/a/b", value: b"1\x002" },
        Request::TransactionEnd { commit: true },
        Request::Introduce { domid: 1, gfn: 1 << 33, port: 2 },
        Request::Release { domid: 1 },
        Request::GetDomainPath { domid: 1 },
        Request::Mkdir { path: "/a" },
        Request::Rm { path: "/a" },
        Request::SetPerms { path: "/a", permissions: vec![Permission::new(Access::Both, 5)] },
        Request::IsDomainIntroduced { domid: 1 },
        Request::Resume { domid: 1 },
        Request::SetTarget { domid: 2, target: 1 },
        Request::ResetWatches,
        Request::DirectoryPart { path: "/a", offset: 9 },
        Request::GetFeature { domid: Some(1) },
        Request::SetFeature { domid: 1, value: 0 },
        Request::GetQuota { domid: Some(1), quota: Some("nodes") },
        Request::SetQuota { domid: None, quota: "nodes", value: 100 },
    ];
    let mut stream = Vec::new();
    for (number, request) in requests.iter().enumerate() {
        // Nothing here is longer than a message.
        let _ = request.frame(number as u32, 0, &mut stream);
    }
    shelf.put("xenstore_wire", "requests", [&[14][..], &stream].concat());
    let answers = |payloads: &[&[u8]]| {
        let mut bytes = vec![1];
        for payload in payloads {
            bytes.extend([payload.len() as u8, 0]);
            bytes.extend_from_slice(payload);
        }
        bytes
    };
    let plain: [&[u8]; 14] = [
        b"1",
        b"",
        b"x",
        b"b\0c\0",
        b"n0\0r5\0",
        b"OK\0",
        b"7\0",
        b"name",
        b"/vm/1",
        b"1024",
        b"2048",
        b"8",
        b"2",
        b"/dev/pts/1",
    ];
    shelf.put("xenstore_wire", "answers", answers(&plain));
    shelf.put("xenstore_wire", "refusals", {
        let mut bytes = vec![1];
        for name in [&b"ENOENT\0"[..], b"EACCES\0", b"E2BIG\0", b"EAGAIN\0", b"ENONSENSE\0"] {
            // 16 is an ERROR.
            bytes.extend([name.len() as u8, 16 << 3 | 7]);
            bytes.extend_from_slice(name);
        }
        bytes
    });
    shelf.put("xenstore_wire", "event", [&[1, 5, 15 << 3 | 7][..], b"/a\0t\0"].concat());
}
