//! What a client writes for a guest's kernel (`VM.PV_args`).
//!
//! It becomes words of a command line that programs of this host read before the guest's kernel does. The kernel's own
//! reader takes more for white space than a space (tab, newline, and the byte 0xA0, which is a part of many letters in
//! UTF-8), so only printable ASCII is taken: what is looked at here as a word is a word there.

/// Why a VM's arguments (`PV_args`) cannot be used, if they cannot.
pub(crate) fn not_plain(text: &str) -> Option<String> {
    let bad = text.chars().find(|c| !matches!(c, ' '..='~'))?;
    Some(format!("PV_args has the character {bad:?}: printable ASCII is possible, with spaces between words"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_character_but_printable_ascii_is_refused() {
        for code in 0..=0x2ff_u32 {
            let c = char::from_u32(code).expect("none of these is a surrogate");
            let is_plain = (0x20..0x7f).contains(&code);
            assert_eq!(not_plain(&format!("root=/dev/vda{c}quiet")).is_none(), is_plain, "{c:?}");
        }
        assert_eq!(not_plain(""), None);
    }
}
