//! The names that a SCSI disk gives itself: pages 0x83 and 0x80 of its vital product data (SPC-4, 7.8.6 and 7.8.15).
//!
//! The SCSIid is the one that udev's `scsi_id` prints and XenServer's storage manager records: the best designator
//! of page 0x83 with the digit of its type in front, or what page 0x80 has. Pages are foreign bytes.

/// Bytes of a page's head, and of a designator's.
const HEAD_LEN: usize = 4;
/// Bytes of the vendor and of the model in an INQUIRY.
const VENDOR_LEN: usize = 8;
const MODEL_LEN: usize = 16;

const VENDOR_SPECIFIC: u8 = 0;
const T10_VENDOR: u8 = 1;
const EUI_64: u8 = 2;
const NAA: u8 = 3;

const BINARY: u8 = 1;
const ASCII: u8 = 2;

/// Types in order of preference; for NAA, the format that its first four bits must name.
const PREFERRED: &[(u8, Option<u8>)] = &[
    (NAA, Some(6)),
    (NAA, Some(5)),
    (NAA, None),
    (EUI_64, None),
    (T10_VENDOR, None),
    (VENDOR_SPECIFIC, None),
];

/// One designator of page 0x83.
struct Designator<'a> {
    code_set: u8,
    kind: u8,
    /// 0: of the logical unit itself, not of its port or target.
    association: u8,
    bytes: &'a [u8],
}

fn designators(page: &[u8]) -> impl Iterator<Item = Designator<'_>> {
    let len = page.get(2..HEAD_LEN).map_or(0, |len| usize::from(len[0]) << 8 | usize::from(len[1]));
    let body = page.get(HEAD_LEN..).unwrap_or_default();
    let mut rest = body.get(..len).unwrap_or(body);
    std::iter::from_fn(move || {
        let (head, tail) = rest.split_first_chunk::<HEAD_LEN>()?;
        let bytes = tail.get(..usize::from(head[3]))?;
        rest = &tail[bytes.len()..];
        Some(Designator {
            code_set: head[0] & 0xf,
            kind: head[1] & 0xf,
            association: head[1] >> 4 & 3,
            bytes,
        })
    })
}

/// What the pages of a disk say of it, and its INQUIRY.
#[derive(Clone, Copy, Debug, Default)]
pub struct Pages<'a> {
    /// Page 0x83, with its head.
    pub designators: &'a [u8],
    /// Page 0x80, with its head.
    pub serial: &'a [u8],
    /// As the kernel shows it, without its padding.
    pub vendor: &'a str,
    /// The same.
    pub model: &'a str,
}

impl Pages<'_> {
    /// The SCSIid; none where the disk gives itself no name that can be used as one.
    pub fn scsi_id(&self) -> Option<String> {
        let mut all: Vec<Designator<'_>> = designators(self.designators).collect();
        all.retain(|each| each.association == 0 && !each.bytes.is_empty());
        let best = PREFERRED.iter().find_map(|(kind, format)| {
            [BINARY, ASCII].into_iter().find_map(|code_set| {
                all.iter().find(|each| {
                    each.kind == *kind
                        && each.code_set == code_set
                        && format.is_none_or(|format| each.bytes[0] >> 4 == format)
                })
            })
        });
        let mut id = match best {
            Some(best) => {
                let mut id = best.kind.to_string();
                if best.kind == VENDOR_SPECIFIC {
                    id.push_str(&self.padded()?);
                }
                match best.code_set {
                    BINARY => id.extend(best.bytes.iter().map(|byte| format!("{byte:02x}"))),
                    _ => id.push_str(&text(best.bytes)),
                }
                id
            }
            None => format!("S{}{}", self.padded()?, text(page_80(self.serial)?)),
        };
        id = id.split_whitespace().collect::<Vec<_>>().join("_");
        is_scsi_id(&id).then_some(id)
    }

    /// The serial number, without blanks.
    pub fn serial(&self) -> String {
        let found = page_80(self.serial).map(text).unwrap_or_default();
        found.chars().filter(|letter| letter.is_ascii_graphic()).collect()
    }

    fn padded(&self) -> Option<String> {
        let fits =
            !self.vendor.is_empty() && self.vendor.len() <= VENDOR_LEN && self.model.len() <= MODEL_LEN;
        fits.then(|| format!("{:VENDOR_LEN$}{:MODEL_LEN$}", self.vendor, self.model))
    }
}

fn page_80(page: &[u8]) -> Option<&[u8]> {
    let body = page.get(HEAD_LEN..)?;
    let body = body.get(..usize::from(page[3])).unwrap_or(body);
    (!body.is_empty()).then_some(body)
}

/// Up to the first zero byte.
fn text(bytes: &[u8]) -> String {
    let bytes = bytes.split(|byte| *byte == 0).next().unwrap_or_default();
    String::from_utf8_lossy(bytes).into_owned()
}

/// Whether a text can be a SCSIid: it becomes the name of files, and part of documents and messages.
pub fn is_scsi_id(text: &str) -> bool {
    const LEN_MAX: usize = 255;
    (2..=LEN_MAX).contains(&text.len())
        && !text.starts_with(['.', '-'])
        && text.bytes().all(|byte| byte.is_ascii_graphic() && byte != b'/')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(number: u8, body: &[&[u8]]) -> Vec<u8> {
        let body = body.concat();
        let mut page = vec![0, number, (body.len() >> 8) as u8, body.len() as u8];
        page.extend(body);
        page
    }

    fn designator(code_set: u8, kind: u8, bytes: &[u8]) -> Vec<u8> {
        [&[code_set, kind, 0, bytes.len() as u8], bytes].concat()
    }

    #[test]
    fn the_id_is_the_one_that_storage_managers_record() {
        let naa = [0x60, 1, 0x40, 0x5a, 0xbc, 0xde, 0xf0, 1, 2, 3, 4, 5, 6, 7, 8, 9];
        let vendor = designator(ASCII, T10_VENDOR, b"LIO-ORG disk one:1\0\0");
        let port = designator(BINARY, NAA | 0x10, &[0x50; 8]);
        let short = designator(BINARY, NAA, &[0x50, 1, 2, 3, 4, 5, 6, 7]);
        let all = page(0x83, &[&vendor, &port, &short, &designator(BINARY, NAA, &naa)]);
        let pages = Pages { designators: &all, vendor: "LIO-ORG", model: "disk", ..Pages::default() };
        assert_eq!(pages.scsi_id().as_deref(), Some("36001405abcdef0010203040506070809"));
        let some = page(0x83, &[&vendor, &port, &short]);
        assert_eq!(Pages { designators: &some, ..pages }.scsi_id().as_deref(), Some("35001020304050607"));
        let some = page(0x83, &[&vendor, &port]);
        assert_eq!(Pages { designators: &some, ..pages }.scsi_id().as_deref(), Some("1LIO-ORG_disk_one:1"));
        let some = page(0x83, &[&designator(ASCII, VENDOR_SPECIFIC, b"abc")]);
        assert_eq!(Pages { designators: &some, ..pages }.scsi_id().as_deref(), Some("0LIO-ORG_disk_abc"));
    }

    #[test]
    fn a_disk_without_designators_has_its_serial_number() {
        let serial = page(0x80, &[b" 12 34\0"]);
        let pages = Pages { serial: &serial, vendor: "ACME", model: "M", ..Pages::default() };
        assert_eq!(pages.scsi_id().as_deref(), Some("SACME_M_12_34"));
        assert_eq!(pages.serial(), "1234");
        assert_eq!(Pages::default().scsi_id(), None);
        // Cut off inside of its only designator.
        let cut = [0, 0x83, 0, 20, BINARY, NAA, 0, 16, 0x60];
        assert_eq!(Pages { designators: &cut, ..Pages::default() }.scsi_id(), None);
    }

    #[test]
    fn an_id_is_no_path() {
        assert!(is_scsi_id("36001405abc"));
        for bad in ["", "3", "3/../x", "..", "3 a", "3\n", "-x", &"3".repeat(256)] {
            assert!(!is_scsi_id(bad), "{bad}");
        }
    }
}
