//! Records: pieces of the stream, in the clear at first, then protected (RFC 8446 section 5).

use ring::aead::{self, Aad, LessSafeKey, Nonce, UnboundKey};

use super::schedule::Secret;
use super::{Alert, Failure};

/// Kinds of content.
pub mod content {
    /// Only there to please boxes in the middle.
    pub const CHANGE_CIPHER_SPEC: u8 = 20;
    /// What is wrong, or the end.
    pub const ALERT: u8 = 21;
    /// Messages of the handshake.
    pub const HANDSHAKE: u8 = 22;
    /// Data, and everything that is protected.
    pub const APPLICATION_DATA: u8 = 23;
}

/// The most data in a record.
pub const RECORD_LEN_MAX: usize = 1 << 14;
/// The most that protection may add.
const EXPANSION_MAX: usize = 256;
/// Bytes of a record's header.
const HEADER_LEN: usize = 5;
/// Records that one key may protect: below the bound of RFC 8446 section 5.5 for AES-GCM.
const RECORDS_MAX: u64 = 1 << 23;

/// A cipher suite with SHA-256.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Suite {
    /// TLS_AES_128_GCM_SHA256.
    Aes128,
    /// TLS_CHACHA20_POLY1305_SHA256.
    ChaCha,
}

impl Suite {
    /// In the order of preference.
    pub const ALL: [Self; 2] = [Self::Aes128, Self::ChaCha];

    /// The number on the wire.
    pub const fn number(self) -> u16 {
        match self {
            Self::Aes128 => 0x1301,
            Self::ChaCha => 0x1303,
        }
    }
}

/// The protection of one direction.
#[derive(Debug)]
pub struct Protection {
    suite: Suite,
    secret: Secret,
    key: LessSafeKey,
    iv: [u8; 12],
    records: u64,
}

impl Protection {
    /// The keys that follow from a traffic secret.
    pub fn new(suite: Suite, secret: Secret) -> Result<Self, Failure> {
        let key = match suite {
            Suite::Aes128 => UnboundKey::new(&aead::AES_128_GCM, &secret.expand::<16>("key", &[])),
            Suite::ChaCha => UnboundKey::new(&aead::CHACHA20_POLY1305, &secret.expand::<32>("key", &[])),
        };
        let key = LessSafeKey::new(key.map_err(|_| Failure::ours(Alert::INTERNAL_ERROR, "no key"))?);
        let iv = secret.expand("iv", &[]);
        Ok(Self { suite, secret, key, iv, records: 0 })
    }

    /// The same with the next keys.
    pub fn updated(&self) -> Result<Self, Failure> {
        Self::new(self.suite, self.secret.updated())
    }

    /// Whether it is time for the next keys.
    pub const fn is_worn(&self) -> bool {
        self.records >= RECORDS_MAX
    }

    /// The secret itself, for Finished.
    pub const fn secret(&self) -> &Secret {
        &self.secret
    }

    fn nonce(&mut self) -> Nonce {
        let mut bytes = self.iv;
        for (byte, number) in bytes[4..].iter_mut().zip(self.records.to_be_bytes()) {
            *byte ^= number;
        }
        self.records += 1;
        Nonce::assume_unique_for_key(bytes)
    }

    /// Appends one protected record with up to [`RECORD_LEN_MAX`] bytes.
    fn seal(&mut self, kind: u8, data: &[u8], wire: &mut Vec<u8>) -> Result<(), Failure> {
        let len = data.len() + 1 + self.key.algorithm().tag_len();
        let header = header(content::APPLICATION_DATA, len);
        let nonce = self.nonce();
        let start = wire.len();
        wire.extend_from_slice(&header);
        wire.extend_from_slice(data);
        wire.push(kind);
        let inside = &mut wire[start + HEADER_LEN..];
        let tag = self.key.seal_in_place_separate_tag(nonce, Aad::from(header), inside);
        let tag = tag.map_err(|_| Failure::ours(Alert::INTERNAL_ERROR, "cannot encrypt"))?;
        wire.extend_from_slice(tag.as_ref());
        Ok(())
    }

    /// Opens a protected record in place; gives what kind it is and how long.
    fn open(&mut self, header: [u8; HEADER_LEN], body: &mut [u8]) -> Result<(u8, usize), Failure> {
        let nonce = self.nonce();
        let plain = self.key.open_in_place(nonce, Aad::from(header), body);
        let plain = plain.map_err(|_| {
            Failure::ours(
                Alert::BAD_RECORD_MAC,
                "a record is not what the other side has sent, or the keys differ",
            )
        })?;
        // Zeroes behind the kind are padding.
        let end = plain.iter().rposition(|byte| *byte != 0);
        let end = end.ok_or_else(|| Failure::ours(Alert::UNEXPECTED_MESSAGE, "a record without a kind"))?;
        if end > RECORD_LEN_MAX {
            return Err(Failure::ours(Alert::RECORD_OVERFLOW, "a record is too long"));
        }
        Ok((plain[end], end))
    }
}

fn header(kind: u8, len: usize) -> [u8; HEADER_LEN] {
    let len = (len as u16).to_be_bytes();
    [kind, 3, 3, len[0], len[1]]
}

/// Appends `data` as records, protected if there is protection.
pub fn put(
    protection: Option<&mut Protection>,
    kind: u8,
    data: &[u8],
    wire: &mut Vec<u8>,
) -> Result<(), Failure> {
    match protection {
        Some(protection) => {
            for piece in data.chunks(RECORD_LEN_MAX) {
                protection.seal(kind, piece, wire)?;
            }
        }
        None => {
            for piece in data.chunks(RECORD_LEN_MAX) {
                wire.extend_from_slice(&header(kind, piece.len()));
                wire.extend_from_slice(piece);
            }
        }
    }
    Ok(())
}

/// What has been received and is not a whole record yet.
#[derive(Debug, Default)]
pub struct Input {
    bytes: Vec<u8>,
    start: usize,
}

impl Input {
    /// More bytes of the stream.
    pub fn add(&mut self, bytes: &[u8]) {
        if self.start == self.bytes.len() {
            self.bytes.clear();
            self.start = 0;
        } else if self.start > RECORD_LEN_MAX {
            self.bytes.drain(..self.start);
            self.start = 0;
        }
        self.bytes.extend_from_slice(bytes);
    }

    /// The next record, opened if there is protection: its kind and content. `None` while it is not whole yet.
    pub fn next(&mut self, protection: Option<&mut Protection>) -> Result<Option<(u8, &[u8])>, Failure> {
        let Some((header, _)) = self.bytes[self.start..].split_first_chunk::<HEADER_LEN>() else {
            return Ok(None);
        };
        let header = *header;
        let len = usize::from(u16::from_be_bytes([header[3], header[4]]));
        if header[1] != 3 || !(content::CHANGE_CIPHER_SPEC..=content::APPLICATION_DATA).contains(&header[0]) {
            return Err(Failure::ours(Alert::UNEXPECTED_MESSAGE, "this is not TLS"));
        }
        if len > RECORD_LEN_MAX + EXPANSION_MAX {
            return Err(Failure::ours(Alert::RECORD_OVERFLOW, "a record is too long"));
        }
        let from = self.start + HEADER_LEN;
        if self.bytes.len() < from + len {
            return Ok(None);
        }
        self.start = from + len;
        let body = &mut self.bytes[from..from + len];
        match protection {
            Some(protection) if header[0] == content::APPLICATION_DATA => {
                let (kind, len) = protection.open(header, body)?;
                Ok(Some((kind, &body[..len])))
            }
            // An alert in the clear is from a peer that has no keys yet; any other record must be protected.
            Some(_) if !matches!(header[0], content::CHANGE_CIPHER_SPEC | content::ALERT) => {
                Err(Failure::ours(Alert::UNEXPECTED_MESSAGE, "a record without protection"))
            }
            None if header[0] == content::APPLICATION_DATA || len > RECORD_LEN_MAX => {
                Err(Failure::ours(Alert::UNEXPECTED_MESSAGE, "a protected record before there are keys"))
            }
            _ => Ok(Some((header[0], body))),
        }
    }
}
