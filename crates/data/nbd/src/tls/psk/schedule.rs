//! The key schedule of TLS 1.3 with SHA-256 (RFC 8446 section 7.1).

use ring::{digest, hmac};

/// Bytes of a hash, and of every secret here.
pub const HASH_LEN: usize = 32;

/// A secret. Never printed.
#[derive(Clone)]
pub struct Secret([u8; HASH_LEN]);

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Secret(..)")
    }
}

/// HKDF-Extract.
fn extract(salt: &[u8], input: &[u8]) -> Secret {
    Secret(mac(salt, input))
}

fn mac(key: &[u8], data: &[u8]) -> [u8; HASH_LEN] {
    let tag = hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, key), data);
    let mut out = [0; HASH_LEN];
    out.copy_from_slice(tag.as_ref());
    out
}

/// The hash of nothing.
pub fn empty_hash() -> digest::Digest {
    digest::digest(&digest::SHA256, &[])
}

impl Secret {
    /// HKDF-Expand-Label, for up to one hash of output.
    pub fn expand<const N: usize>(&self, label: &str, context: &[u8]) -> [u8; N] {
        const { assert!(N <= HASH_LEN) };
        let mut info = Vec::with_capacity(64);
        info.extend_from_slice(&(N as u16).to_be_bytes());
        info.push((6 + label.len()) as u8);
        info.extend_from_slice(b"tls13 ");
        info.extend_from_slice(label.as_bytes());
        info.push(context.len() as u8);
        info.extend_from_slice(context);
        // The counter of HKDF-Expand's only block.
        info.push(1);
        let block = mac(&self.0, &info);
        let mut out = [0; N];
        out.copy_from_slice(&block[..N]);
        out
    }

    /// Derive-Secret.
    fn derive(&self, label: &str, transcript: &digest::Digest) -> Self {
        Self(self.expand(label, transcript.as_ref()))
    }

    /// What a Finished message, or a binder, says of a transcript.
    pub fn finished(&self, transcript: &digest::Digest) -> [u8; HASH_LEN] {
        mac(&self.expand::<HASH_LEN>("finished", &[]), transcript.as_ref())
    }

    /// Whether the other side's word on a transcript is right; takes the same time whatever is wrong with it.
    pub fn is_finished(&self, transcript: &digest::Digest, said: &[u8]) -> bool {
        let key = hmac::Key::new(hmac::HMAC_SHA256, &self.expand::<HASH_LEN>("finished", &[]));
        hmac::verify(&key, transcript.as_ref(), said).is_ok()
    }

    /// The next generation of a traffic secret.
    pub fn updated(&self) -> Self {
        Self(self.expand("traffic upd", &[]))
    }
}

/// Where the schedule begins: the shared key.
#[derive(Debug)]
pub struct Early(Secret);

impl Early {
    /// The schedule of this external key.
    pub fn new(key: &[u8]) -> Self {
        Self(extract(&[0; HASH_LEN], key))
    }

    /// What binders are made with.
    pub fn binder_key(&self) -> Secret {
        self.0.derive("ext binder", &empty_hash())
    }

    /// Goes on with the result of the key exchange; `hello` is the transcript up to ServerHello.
    pub fn handshake(&self, shared: &[u8], hello: &digest::Digest) -> Handshake {
        let secret = extract(&self.0.derive("derived", &empty_hash()).0, shared);
        Handshake {
            client: secret.derive("c hs traffic", hello),
            server: secret.derive("s hs traffic", hello),
            secret,
        }
    }
}

/// Secrets of the handshake.
#[derive(Debug)]
pub struct Handshake {
    secret: Secret,
    /// What the client's messages are protected with.
    pub client: Secret,
    /// What the server's messages are protected with.
    pub server: Secret,
}

impl Handshake {
    /// The secrets of client and server for data; `finished` is the transcript up to the server's Finished.
    pub fn application(&self, finished: &digest::Digest) -> (Secret, Secret) {
        let main = extract(&self.secret.derive("derived", &empty_hash()).0, &[0; HASH_LEN]);
        (main.derive("c ap traffic", finished), main.derive("s ap traffic", finished))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hex(text: &str) -> Vec<u8> {
        let digits: Vec<u8> = text.chars().filter_map(|c| c.to_digit(16)).map(|digit| digit as u8).collect();
        digits.chunks(2).map(|pair| pair[0] << 4 | pair[1]).collect()
    }

    /// RFC 8448 section 3: a handshake without a shared key, which is one of 32 zero bytes.
    #[test]
    fn the_published_example_is_reproduced() {
        let early = Early::new(&[0; 32]);
        assert_eq!(
            early.0.0.to_vec(),
            hex("33ad0a1c607ec03b09e6cd9893680ce210adf300aa1f2660e1b22e10f170f92a")
        );
        let derived = early.0.derive("derived", &empty_hash());
        assert_eq!(
            derived.0.to_vec(),
            hex("6f2615a108c702c5678f54fc9dbab69716c076189c48250cebeac3576c3611ba")
        );
        let shared = hex("8bd4054fb55b9d63fdfbacf9f04b9f0d35e6d63f537563efd46272900f89492d");
        let secret = extract(&derived.0, &shared);
        assert_eq!(
            secret.0.to_vec(),
            hex("1dc826e93606aa6fdc0aadc12f741b01046aa6b99f691ed221a9f0ca043fbeac")
        );
        let traffic = Secret(
            hex("b3eddb126e067f35a780b3abf45e2d8f3b1a950738f52e9600746a0e27a55a21").try_into().unwrap(),
        );
        assert_eq!(traffic.expand::<16>("key", &[]).to_vec(), hex("dbfaa693d1762c5b666af5d950258d01"));
        assert_eq!(traffic.expand::<12>("iv", &[]).to_vec(), hex("5bd3c71b836e0b76bb73265f"));
    }
}
