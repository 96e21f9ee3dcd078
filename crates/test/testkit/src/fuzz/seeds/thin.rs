//! Requests, words and replies of XenServer's own `xe`.

use tapio_model::thin;

use super::Shelf;

pub(super) fn put_into(shelf: &mut Shelf) {
    let mut put = |name: &str, bytes: &[u8]| shelf.put("thin_cli", name, bytes);
    put("head", b"POST /cli HTTP/1.0\r\ncontent-length: 52\r\nuser-agent: xe\r\n\r\n");
    put("words", b"username=root\npassword=x\nvdi-create\nsr-uuid=1\nother-config:a=b\nminimal=true\n");
    put("hello", &thin::hello());
    let numbers = |all: &[u32]| all.iter().flat_map(|number| number.to_le_bytes()).collect::<Vec<u8>>();
    put("ok", &numbers(&[10, 5]));
    put("chunk", &numbers(&[11, 7, 1 << 20]));
    put("end", &numbers(&[11, 8]));
}
