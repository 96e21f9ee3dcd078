//! Messages of the handshake, as far as shared keys need them (RFC 8446 section 4).

use ring::agreement::{self, Algorithm};

use super::record::Suite;
use super::{Alert, Failure};

/// Kinds of messages.
pub mod kind {
    pub const CLIENT_HELLO: u8 = 1;
    pub const SERVER_HELLO: u8 = 2;
    pub const NEW_SESSION_TICKET: u8 = 4;
    pub const ENCRYPTED_EXTENSIONS: u8 = 8;
    pub const FINISHED: u8 = 20;
    pub const KEY_UPDATE: u8 = 24;
}

mod extension {
    pub const SUPPORTED_GROUPS: u16 = 10;
    pub const PRE_SHARED_KEY: u16 = 41;
    pub const SUPPORTED_VERSIONS: u16 = 43;
    pub const PSK_KEY_EXCHANGE_MODES: u16 = 45;
    pub const KEY_SHARE: u16 = 51;
}

/// TLS 1.3 in the extension that names it, and the version that stands in the field for older peers.
const VERSION: u16 = 0x0304;
const LEGACY_VERSION: u16 = 0x0303;
/// The shared key comes with a key exchange of its own.
const MODE_PSK_DHE: u8 = 1;
/// Identities that are looked at.
const IDENTITIES_MAX: usize = 16;
/// The random of a ServerHello that asks for another ClientHello.
const RETRY: [u8; 32] = [
    0xcf, 0x21, 0xad, 0x74, 0xe5, 0x9a, 0x61, 0x11, 0xbe, 0x1d, 0x8c, 0x02, 0x1e, 0x65, 0xb8, 0x91, 0xc2,
    0xa2, 0x11, 0x16, 0x7a, 0xbb, 0x8c, 0x5e, 0x07, 0x9e, 0x09, 0xe2, 0xc8, 0xa8, 0x33, 0x9c,
];

/// A group of the key exchange.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Group {
    /// x25519.
    X25519,
    /// secp256r1.
    P256,
}

impl Group {
    /// In the order of preference.
    pub const ALL: [Self; 2] = [Self::X25519, Self::P256];

    const fn number(self) -> u16 {
        match self {
            Self::X25519 => 0x001d,
            Self::P256 => 0x0017,
        }
    }

    /// How it is done.
    pub const fn algorithm(self) -> &'static Algorithm {
        match self {
            Self::X25519 => &agreement::X25519,
            Self::P256 => &agreement::ECDH_P256,
        }
    }
}

/// Reads numbers and vectors off the front of a message.
#[derive(Clone, Copy, Debug)]
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn bytes(&mut self, len: usize) -> Result<&'a [u8], Failure> {
        let (head, rest) = self.0.split_at_checked(len).ok_or_else(malformed)?;
        self.0 = rest;
        Ok(head)
    }

    fn u8(&mut self) -> Result<u8, Failure> {
        Ok(self.bytes(1)?[0])
    }

    fn u16(&mut self) -> Result<u16, Failure> {
        let bytes = self.bytes(2)?;
        Ok(u16::from_be_bytes([bytes[0], bytes[1]]))
    }

    fn vector8(&mut self) -> Result<Self, Failure> {
        let len = self.u8()?;
        Ok(Self(self.bytes(usize::from(len))?))
    }

    fn vector16(&mut self) -> Result<Self, Failure> {
        let len = self.u16()?;
        Ok(Self(self.bytes(usize::from(len))?))
    }

    fn end(&self) -> Result<(), Failure> {
        if self.0.is_empty() { Ok(()) } else { Err(malformed()) }
    }
}

fn malformed() -> Failure {
    Failure::ours(Alert::DECODE_ERROR, "a message that is not well formed")
}

fn refuse<T>(alert: Alert, why: &'static str) -> Result<T, Failure> {
    Err(Failure::ours(alert, why))
}

/// Puts a length before what `fill` appends.
fn counted(out: &mut Vec<u8>, width: usize, fill: impl FnOnce(&mut Vec<u8>)) {
    let start = out.len();
    out.extend_from_slice(&[0; 3][..width]);
    fill(out);
    let len = (out.len() - start - width).to_be_bytes();
    out[start..start + width].copy_from_slice(&len[8 - width..]);
}

/// A message with its header.
pub fn message(kind: u8, fill: impl FnOnce(&mut Vec<u8>)) -> Vec<u8> {
    let mut out = vec![kind];
    counted(&mut out, 3, fill);
    out
}

fn put_u16(out: &mut Vec<u8>, value: u16) {
    out.extend_from_slice(&value.to_be_bytes());
}

/// What a server reads from a ClientHello.
#[derive(Debug)]
pub struct ClientHello<'a> {
    /// Repeated in the answer.
    pub session_id: &'a [u8],
    /// The best of ours that it offers.
    pub suite: Suite,
    /// The key exchange it began with, and its half.
    pub share: (Group, &'a [u8]),
    /// Names of keys and what proves them, in the client's order.
    pub offers: Vec<(&'a [u8], &'a [u8])>,
    /// Bytes of the message, its header included, before the proofs: what they prove.
    pub truncated_len: usize,
}

impl<'a> ClientHello<'a> {
    /// Reads the body of a message.
    pub fn parse(body: &'a [u8]) -> Result<Self, Failure> {
        let mut reader = Reader(body);
        reader.u16()?;
        reader.bytes(32)?;
        let session_id = reader.vector8()?.0;
        if session_id.len() > 32 {
            return Err(malformed());
        }
        let mut suites = reader.vector16()?;
        let mut offered = Vec::new();
        while !suites.0.is_empty() {
            offered.push(suites.u16()?);
        }
        reader.vector8()?;
        let suite = Suite::ALL.into_iter().find(|suite| offered.contains(&suite.number()));
        let mut extensions = reader.vector16()?;
        reader.end()?;
        let (mut version, mut share, mut mode, mut keys) = (false, None, false, None);
        while !extensions.0.is_empty() {
            let (number, mut data) = (extensions.u16()?, extensions.vector16()?);
            match number {
                extension::SUPPORTED_VERSIONS => {
                    let mut list = data.vector8()?;
                    while !list.0.is_empty() {
                        version |= list.u16()? == VERSION;
                    }
                }
                extension::KEY_SHARE => share = best_share(data.vector16()?)?,
                extension::PSK_KEY_EXCHANGE_MODES => mode = data.vector8()?.0.contains(&MODE_PSK_DHE),
                // By its definition the last one.
                extension::PRE_SHARED_KEY if extensions.0.is_empty() => keys = Some(data),
                extension::PRE_SHARED_KEY => {
                    return refuse(Alert::ILLEGAL_PARAMETER, "the key is not offered last");
                }
                _ => {}
            }
        }
        if !version {
            return refuse(Alert::PROTOCOL_VERSION, "the client does not speak TLS 1.3");
        }
        let Some(mut keys) = keys else {
            return refuse(Alert::HANDSHAKE_FAILURE, "the client offers no pre-shared key");
        };
        if !mode {
            return refuse(
                Alert::HANDSHAKE_FAILURE,
                "the client wants the key alone, without a key exchange",
            );
        }
        let Some(suite) = suite else {
            return refuse(Alert::HANDSHAKE_FAILURE, "the client offers no cipher suite with SHA-256");
        };
        let Some(share) = share else {
            return refuse(
                Alert::HANDSHAKE_FAILURE,
                "the client begins no key exchange by x25519 or secp256r1",
            );
        };
        let mut identities = keys.vector16()?;
        let proofs_len = keys.0.len();
        let mut proofs = keys.vector16()?;
        keys.end()?;
        let mut offers = Vec::new();
        while !identities.0.is_empty() && offers.len() < IDENTITIES_MAX {
            let name = identities.vector16()?.0;
            // Its age, which is for tickets.
            identities.bytes(4)?;
            offers.push((name, proofs.vector8()?.0));
        }
        // The proofs stand at the end of the message, behind its header of four bytes.
        Ok(Self { session_id, suite, share, offers, truncated_len: 4 + body.len() - proofs_len })
    }
}

fn best_share(mut shares: Reader<'_>) -> Result<Option<(Group, &[u8])>, Failure> {
    let mut best = None;
    while !shares.0.is_empty() {
        let (number, key) = (shares.u16()?, shares.vector16()?.0);
        for group in Group::ALL {
            if group.number() == number && best.is_none_or(|(other, _)| other == Group::P256) {
                best = Some((group, key));
            }
        }
    }
    Ok(best)
}

/// The server's answer.
pub fn server_hello(random: [u8; 32], hello: &ClientHello<'_>, key: &[u8], selected: u16) -> Vec<u8> {
    message(kind::SERVER_HELLO, |out| {
        put_u16(out, LEGACY_VERSION);
        out.extend_from_slice(&random);
        counted(out, 1, |out| out.extend_from_slice(hello.session_id));
        put_u16(out, hello.suite.number());
        out.push(0);
        counted(out, 2, |out| {
            put_u16(out, extension::SUPPORTED_VERSIONS);
            counted(out, 2, |out| put_u16(out, VERSION));
            put_u16(out, extension::KEY_SHARE);
            counted(out, 2, |out| {
                put_u16(out, hello.share.0.number());
                counted(out, 2, |out| out.extend_from_slice(key));
            });
            put_u16(out, extension::PRE_SHARED_KEY);
            counted(out, 2, |out| put_u16(out, selected));
        });
    })
}

/// The client's beginning, with zeroes where the proof is to be written: its last 32 bytes.
pub fn client_hello(random: [u8; 32], shares: &[(Group, &[u8])], user: &[u8]) -> Vec<u8> {
    message(kind::CLIENT_HELLO, |out| {
        put_u16(out, LEGACY_VERSION);
        out.extend_from_slice(&random);
        out.push(0);
        counted(out, 2, |out| Suite::ALL.iter().for_each(|suite| put_u16(out, suite.number())));
        out.extend_from_slice(&[1, 0]);
        counted(out, 2, |out| {
            put_u16(out, extension::SUPPORTED_GROUPS);
            counted(out, 2, |out| {
                counted(out, 2, |out| shares.iter().for_each(|(group, _)| put_u16(out, group.number())));
            });
            put_u16(out, extension::SUPPORTED_VERSIONS);
            counted(out, 2, |out| counted(out, 1, |out| put_u16(out, VERSION)));
            put_u16(out, extension::PSK_KEY_EXCHANGE_MODES);
            counted(out, 2, |out| counted(out, 1, |out| out.push(MODE_PSK_DHE)));
            put_u16(out, extension::KEY_SHARE);
            counted(out, 2, |out| {
                counted(out, 2, |out| {
                    for (group, key) in shares {
                        put_u16(out, group.number());
                        counted(out, 2, |out| out.extend_from_slice(key));
                    }
                });
            });
            put_u16(out, extension::PRE_SHARED_KEY);
            counted(out, 2, |out| {
                counted(out, 2, |out| {
                    counted(out, 2, |out| out.extend_from_slice(user));
                    out.extend_from_slice(&[0; 4]);
                });
                counted(out, 2, |out| counted(out, 1, |out| out.extend_from_slice(&[0; 32])));
            });
        });
    })
}

/// Bytes at the end of a ClientHello of ours that its proof does not cover: the proof, with its two lengths.
pub const PROOFS_LEN: usize = 35;

/// What a client reads from a ServerHello.
#[derive(Debug)]
pub struct ServerHello<'a> {
    /// Of the ones offered.
    pub suite: Suite,
    /// The key exchange, and the server's half.
    pub share: (Group, &'a [u8]),
}

impl<'a> ServerHello<'a> {
    /// Reads the body of a message.
    pub fn parse(body: &'a [u8]) -> Result<Self, Failure> {
        let mut reader = Reader(body);
        reader.u16()?;
        if reader.bytes(32)? == RETRY {
            return refuse(
                Alert::HANDSHAKE_FAILURE,
                "the server wants a key exchange other than x25519 or secp256r1",
            );
        }
        reader.vector8()?;
        let number = reader.u16()?;
        reader.u8()?;
        let mut extensions = reader.vector16()?;
        reader.end()?;
        let (mut version, mut share, mut selected) = (None, None, None);
        while !extensions.0.is_empty() {
            let (number, mut data) = (extensions.u16()?, extensions.vector16()?);
            match number {
                extension::SUPPORTED_VERSIONS => version = Some(data.u16()?),
                extension::KEY_SHARE => {
                    let number = data.u16()?;
                    let group = Group::ALL.into_iter().find(|group| group.number() == number);
                    share = group.zip(Some(data.vector16()?.0));
                }
                extension::PRE_SHARED_KEY => selected = Some(data.u16()?),
                _ => return refuse(Alert::UNSUPPORTED_EXTENSION, "the server answers what it was not asked"),
            }
        }
        if version != Some(VERSION) {
            return refuse(Alert::PROTOCOL_VERSION, "the server does not speak TLS 1.3");
        }
        if selected != Some(0) {
            return refuse(Alert::HANDSHAKE_FAILURE, "the server does not take the pre-shared key");
        }
        let suite = Suite::ALL.into_iter().find(|suite| suite.number() == number);
        match (suite, share) {
            (Some(suite), Some(share)) => Ok(Self { suite, share }),
            _ => refuse(Alert::ILLEGAL_PARAMETER, "the server chose what it was not offered"),
        }
    }
}
