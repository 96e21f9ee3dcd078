//! The statistics of a disk as tapdisk prints them: one line of JSON whose keys, order and spacing are fixed.
//!
//! Separators are `, ` and `: `, brackets are padded with a space, and an empty list is `[  ]`. Names are escaped,
//! which the original leaves out.

use std::fmt::Write;

use crate::room::RoomReport;

/// Driver of an image and its number in tapdisk's table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DriverType {
    /// Raw image.
    Aio,
    /// VHD.
    Vhd,
    /// Memory.
    Ram,
    /// qcow.
    Qcow,
    /// An NBD export.
    Nbd,
    /// An image of Ceph, which tapdisk has no number for.
    Rbd,
}

impl DriverType {
    /// The number.
    pub const fn number(self) -> u32 {
        match self {
            Self::Aio => 0,
            Self::Vhd => 4,
            Self::Ram => 5,
            Self::Qcow => 6,
            Self::Nbd => 15,
            Self::Rbd => 16,
        }
    }

    /// The name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Aio => "aio",
            Self::Vhd => "vhd",
            Self::Ram => "ram",
            Self::Qcow => "qcow",
            Self::Nbd => "nbd",
            Self::Rbd => "rbd",
        }
    }
}

/// One image of a chain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImageStats {
    /// Path.
    pub name: String,
    /// Sectors read and written here.
    pub hits: [u64; 2],
    /// Sectors that failed.
    pub fail: [u64; 2],
    /// Driver.
    pub driver: DriverType,
    /// Requests the driver can hold and holds; raw images only.
    pub requests: Option<[u64; 2]>,
}

/// The ring of a Xen guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct XenbusStats {
    /// Page pool.
    pub pool: String,
    /// Domain.
    pub domid: u32,
    /// Device.
    pub devid: u32,
    /// Requests taken and answered.
    pub reqs: [u64; 2],
    /// Notifications received and sent.
    pub kicks: [u64; 2],
    /// Errors by origin: message, mapping, disk, image.
    pub errors: [u64; 4],
}

/// One disk.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VbdStats {
    /// `type:/path`; `None` when nothing is open.
    pub name: Option<String>,
    /// Sectors read and written.
    pub secs: [u64; 2],
    /// Chain, leaf first.
    pub images: Vec<ImageStats>,
    /// The guest's ring, where one is connected.
    pub xenbus: Option<XenbusStats>,
    /// Writes redirected because the image was full.
    pub enospc_redirects: u64,
    /// The mirror was lost.
    pub mirror_failed: bool,
    /// Requests taken and not yet answered.
    pub outstanding: u64,
    /// The room of a disk on a volume that grows with it; the original has none.
    pub room: Option<RoomReport>,
}

/// Nesting of brackets with the original's spacing.
#[derive(Default)]
struct Text {
    out: String,
    first: bool,
}

impl Text {
    fn item(&mut self) {
        if !self.first {
            self.out.push_str(", ");
        }
        self.first = false;
    }

    fn open(&mut self, bracket: char) {
        self.out.push(bracket);
        self.out.push(' ');
        self.first = true;
    }

    fn close(&mut self, bracket: char) {
        self.out.push(' ');
        self.out.push(bracket);
        self.first = false;
    }

    fn key(&mut self, name: &str) {
        self.item();
        self.string(name);
        self.out.push_str(": ");
    }

    fn string(&mut self, text: &str) {
        self.out.push('"');
        for c in text.chars() {
            match c {
                '"' => self.out.push_str("\\\""),
                '\\' => self.out.push_str("\\\\"),
                c if c.is_control() => {
                    // Writing to a string cannot fail.
                    let _ = write!(self.out, "\\u{:04x}", u32::from(c));
                }
                c => self.out.push(c),
            }
        }
        self.out.push('"');
    }

    fn number(&mut self, name: &str, value: u64) {
        self.key(name);
        let _ = write!(self.out, "{value}");
    }

    fn pair(&mut self, name: &str, values: [u64; 2]) {
        self.key(name);
        self.open('[');
        for value in values {
            self.item();
            let _ = write!(self.out, "{value}");
        }
        self.close(']');
    }
}

/// The line for one disk, without a newline.
pub fn stats_text(stats: &VbdStats) -> String {
    let mut text = Text { first: true, ..Text::default() };
    object(&mut text, stats);
    text.out
}

/// The line for all disks of a process.
pub fn stats_array_text(all: &[VbdStats]) -> String {
    let mut text = Text { first: true, ..Text::default() };
    text.open('[');
    for stats in all {
        text.item();
        object(&mut text, stats);
    }
    text.close(']');
    text.out
}

fn object(text: &mut Text, stats: &VbdStats) {
    text.open('{');
    text.key("name");
    // What the original prints for a disk without an image.
    text.string(stats.name.as_deref().unwrap_or("(null)"));
    text.pair("secs", stats.secs);
    text.key("images");
    text.open('[');
    for image in &stats.images {
        text.item();
        image_object(text, image);
    }
    text.close(']');
    if let Some(ring) = &stats.xenbus {
        text.key("xenbus");
        text.open('{');
        text.key("pool");
        text.string(&ring.pool);
        text.number("domid", ring.domid.into());
        text.number("devid", ring.devid.into());
        text.pair("reqs", ring.reqs);
        text.pair("kicks", ring.kicks);
        text.key("errors");
        text.open('{');
        for (name, value) in ["msg", "map", "vbd", "img"].into_iter().zip(ring.errors) {
            text.number(name, value);
        }
        text.close('}');
        text.close('}');
    }
    text.number("FIXME_enospc_redirect_count", stats.enospc_redirects);
    text.number("nbd_mirror_failed", stats.mirror_failed.into());
    text.number("reqs_outstanding", stats.outstanding);
    text.key("read_caching");
    // Parents are read past the page cache, always.
    text.string("false");
    if let Some(room) = &stats.room {
        text.key("thin");
        text.open('{');
        text.number("volume", room.len);
        text.number("used", room.used);
        text.number("ahead", room.ahead);
        text.number("wanted", room.wanted);
        text.number("enough", room.enough);
        text.number("waiting_ms", room.waiting_ms.unwrap_or(0));
        text.number("grown", room.grown);
        text.close('}');
    }
    text.close('}');
}

fn image_object(text: &mut Text, image: &ImageStats) {
    text.open('{');
    text.key("name");
    text.string(&image.name);
    text.pair("hits", image.hits);
    text.pair("fail", image.fail);
    text.key("driver");
    text.open('{');
    text.number("type", image.driver.number().into());
    text.key("name");
    text.string(image.driver.name());
    text.key("status");
    match image.requests {
        None => text.out.push_str("null"),
        Some([max, pending]) => {
            text.open('{');
            text.key("reqs");
            text.open('{');
            text.number("max", max);
            text.number("pending", pending);
            text.close('}');
            text.close('}');
        }
    }
    text.close('}');
    text.close('}');
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_is_the_published_one() {
        let stats = VbdStats {
            name: Some("vhd:/path".into()),
            secs: [34942, 2320],
            images: vec![ImageStats {
                name: "/path".into(),
                hits: [34942, 2320],
                fail: [0, 0],
                driver: DriverType::Vhd,
                requests: None,
            }],
            xenbus: Some(XenbusStats {
                pool: "td-xenio-default".into(),
                domid: 5,
                devid: 51712,
                reqs: [1, 2],
                kicks: [3, 4],
                errors: [0; 4],
            }),
            ..VbdStats::default()
        };
        let expected = concat!(
            r#"{ "name": "vhd:/path", "secs": [ 34942, 2320 ], "images": [ { "name": "/path", "#,
            r#""hits": [ 34942, 2320 ], "fail": [ 0, 0 ], "driver": { "type": 4, "name": "vhd", "status": null } } ], "#,
            r#""xenbus": { "pool": "td-xenio-default", "domid": 5, "devid": 51712, "reqs": [ 1, 2 ], "#,
            r#""kicks": [ 3, 4 ], "errors": { "msg": 0, "map": 0, "vbd": 0, "img": 0 } }, "#,
            r#""FIXME_enospc_redirect_count": 0, "nbd_mirror_failed": 0, "reqs_outstanding": 0, "#,
            r#""read_caching": "false" }"#,
        );
        assert_eq!(stats_text(&stats), expected);
    }

    #[test]
    fn a_raw_image_has_a_status_and_an_empty_chain_two_spaces() {
        let image = ImageStats {
            name: "/d.raw".into(),
            hits: [0, 0],
            fail: [0, 0],
            driver: DriverType::Aio,
            requests: Some([352, 0]),
        };
        let stats = VbdStats { images: vec![image], ..VbdStats::default() };
        assert!(stats_text(&stats).contains(
            r#""driver": { "type": 0, "name": "aio", "status": { "reqs": { "max": 352, "pending": 0 } } } } ], "FIXME"#
        ));
        let empty = concat!(
            r#"{ "name": "(null)", "secs": [ 0, 0 ], "images": [  ], "FIXME_enospc_redirect_count": 0, "#,
            r#""nbd_mirror_failed": 0, "reqs_outstanding": 0, "read_caching": "false" }"#,
        );
        assert_eq!(stats_text(&VbdStats::default()), empty);
        assert_eq!(stats_array_text(&[]), "[  ]");
        let two = stats_array_text(&[VbdStats::default(), VbdStats::default()]);
        assert_eq!(two, format!("[ {empty}, {empty} ]"));
    }

    #[test]
    fn odd_names_stay_json() {
        let stats = VbdStats { name: Some("vhd:/a\"b\\c\u{7}".into()), ..VbdStats::default() };
        let value: serde_json::Value = serde_json::from_str(&stats_text(&stats)).expect("valid JSON");
        assert_eq!(value["name"], "vhd:/a\"b\\c\u{7}");
    }
}
