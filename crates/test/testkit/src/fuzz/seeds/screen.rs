//! Viewers of screens, and pictures.

use super::Shelf;

pub(super) fn put_into(shelf: &mut Shelf) {
    let hello = b"RFB 003.008\n\x01\x01";
    let ask = [3, 1, 0, 0, 0, 0, 0, 70, 0, 40];
    let mut put = |name: &str, piece: u8, parts: &[&[u8]]| {
        shelf.put("rfb_viewer", name, [&[piece][..], &parts.concat()].concat());
    };
    let encodings: Vec<u8> = [5_i32, 1, 0, -223, -258].iter().flat_map(|one| one.to_be_bytes()).collect();
    let encodings = [&[2, 0, 0, 5][..], &encodings].concat();
    let format = [0, 0, 0, 0, 16, 16, 1, 1, 0, 31, 0, 63, 0, 31, 11, 5, 0, 0, 0, 0];
    let keys = [4, 1, 0, 0, 0, 0, 0, 65, 4, 0, 0, 0, 0, 0, 0, 65];
    let pointer = [5, 1, 0, 9, 0, 9, 5, 0, 0, 60, 0, 30];
    put("old", 0, &[b"RFB 003.003\n\x01", &ask, &keys]);
    put("format", 4, &[hello, &format, &ask, &ask, &pointer]);
    put("encodings", 2, &[hello, &encodings, &ask, &keys, &ask, &pointer, &ask, &ask, &ask, &ask, &ask]);
    put("codes", 1, &[hello, &encodings, &ask, &ask, &[255, 0, 0, 1, 0, 0, 0, 97, 0, 0, 0, 30], &ask]);
    put("clipboard", 200, &[hello, &[6, 0, 0, 0, 0, 0, 0, 3, 1, 2, 3], &keys]);
    put("web", 200, &[b"GET / HTTP/1.1\r\n\r\n"]);
    let pixels: Vec<u8> = (0..40 * 20 * 3).map(|at| (at / 50) as u8).collect();
    shelf.put("screen_picture", "small", [&b"P6\n40 20\n255\n"[..], &pixels].concat());
    shelf.put("screen_picture", "large", &b"P6\n3840 2160\n255\n"[..]);
    shelf.put("screen_picture", "huge", &b"P6\n65535 65535\n255\n"[..]);
    shelf.put("screen_picture", "deep", &b"P6\n1 1\n65535\n000000"[..]);
}
