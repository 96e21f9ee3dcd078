//! Lines of logs.

use super::Shelf;

pub(super) fn put_into(shelf: &mut Shelf) {
    for (name, text) in [
        (
            "plain",
            "2026-11-25T09:54:30Z INFO tapiod: VDI 0d8f3a52-6f0c-4f0e-9a53-2f7a1f0a9d11 of OpaqueRef:NULL\n",
        ),
        ("announced", "password: a\nsecret=b\nAuthorization: Basic c\n\"token\": \"d\"\npassphrase:\n  e\n"),
        ("url", "GET /export?uuid=a&session_id=b HTTP/1.1\nnbd://me:c@h:10809/d?e=f\n%3Fsession_id%3Dg\n"),
        ("pem", "-----BEGIN PRIVATE KEY-----\nabc\n-----END PRIVATE KEY-----\n-----BEGIN X-----\n"),
        (
            "xml",
            "<member><name>pwd</name><value><string>a</string></value></member>&lt;value&gt;b&lt;/value&gt;\n",
        ),
        ("quotes", "{\\\"key\\\": \\\"a\\\\\\\"b\\\"} 'key': 'c' key=\"d\n"),
        (
            "tokens",
            "eyJhbGciOiJIUzI1NiJ9.dBjftJeZ4CVPmB92K27uhbUJU1p1r /a/9f86d081884c7d659a2feaa0c55ad015/b %41%42%43\n",
        ),
        (
            "known",
            "Pl4nted-known-value UGw0bnRlZC1rbm93bi12YWx1ZQ== OpaqueRef:9a1b2c3d-0000-4111-8222-333344445555\n",
        ),
        ("binary", "LUKS\u{0}\u{1}\u{fffd}\n"),
    ] {
        shelf.put("bugreport_text", name, text);
    }
}
