//! Names and texts of Ceph.

use super::Shelf;

pub(super) fn put_into(shelf: &mut Shelf) {
    shelf.put("rbd_names", "plain", "pool/image");
    shelf.put(
        "rbd_names",
        "full",
        "p%20ool/sr/image@snap?conf=/etc/ceph/a%26b.conf&mon_host=[v2:10.0.0.1:3300,v1:10.0.0.1:6789]&user=client.t\
         &keyring=/k&timeout=5",
    );
    shelf.put("rbd_names", "escaped", "pool/a%2fb@%40");
    shelf.put("rbd_names", "list", "one\0two\0\0");
    shelf.put("rbd_names", "owner", "4711 0b6b7a64-8a5c-4f43-9f4b-3d1f2f6f2f6f 4026531836 99 123456");
}
