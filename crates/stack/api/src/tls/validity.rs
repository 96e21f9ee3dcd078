//! When a certificate begins and ends: a look into its DER (RFC 5280, section 4.1), because an expired certificate is
//! the commonest reason for which clients refuse one.

use tapio_model::datetime;

/// Seconds since 1970.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Span {
    pub(super) not_before: i64,
    pub(super) not_after: i64,
}

const SEQUENCE: u8 = 0x30;
const UTC_TIME: u8 = 0x17;
const GENERALIZED_TIME: u8 = 0x18;
/// The version, where it is not the first.
const VERSION: u8 = 0xa0;

/// One element off the front: its tag and content.
fn element<'a>(bytes: &mut &'a [u8]) -> Option<(u8, &'a [u8])> {
    let (&tag, rest) = bytes.split_first()?;
    let (&first, mut rest) = rest.split_first()?;
    let len = if first < 0x80 {
        usize::from(first)
    } else {
        let count = usize::from(first & 0x7f);
        if !(1..=4).contains(&count) {
            return None;
        }
        let (digits, after) = rest.split_at_checked(count)?;
        rest = after;
        digits.iter().fold(0, |len, digit| len << 8 | usize::from(*digit))
    };
    let (content, after) = rest.split_at_checked(len)?;
    *bytes = after;
    Some((tag, content))
}

fn sequence<'a>(bytes: &mut &'a [u8]) -> Option<&'a [u8]> {
    element(bytes).filter(|(tag, _)| *tag == SEQUENCE).map(|(_, content)| content)
}

fn time(bytes: &mut &[u8]) -> Option<i64> {
    let (tag, content) = element(bytes)?;
    let text = std::str::from_utf8(content).ok()?.strip_suffix('Z')?;
    if !text.is_ascii() {
        return None;
    }
    let year_len = match tag {
        UTC_TIME => 2,
        GENERALIZED_TIME => 4,
        _ => return None,
    };
    let (year, rest) = text.split_at_checked(year_len)?;
    let (day, clock) = rest.split_at_checked(4)?;
    // Two digits are 1950 to 2049.
    let century = match tag {
        UTC_TIME if year < "50" => "20",
        UTC_TIME => "19",
        _ => "",
    };
    datetime::parse(&format!("{century}{year}{day}T{clock}Z"))
}

/// The dates of a certificate; none where it is none.
pub(super) fn of(mut certificate: &[u8]) -> Option<Span> {
    let mut outer = sequence(&mut certificate)?;
    let mut inner = sequence(&mut outer)?;
    if inner.first() == Some(&VERSION) {
        element(&mut inner)?;
    }
    // Serial number, algorithm, issuer.
    for _ in 0..3 {
        element(&mut inner)?;
    }
    let mut dates = sequence(&mut inner)?;
    Some(Span { not_before: time(&mut dates)?, not_after: time(&mut dates)? })
}
