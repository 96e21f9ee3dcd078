//! A TLS session of either kind, as bytes in and bytes out.

use std::io::{ErrorKind, Read, Write};

use super::psk;

/// How much data is taken out of the library at a time.
const PIECE_LEN: usize = 16 << 10;

/// One side of a connection.
pub enum Session {
    /// With certificates.
    Certificates(Box<rustls::Connection>),
    /// With a pre-shared key.
    Psk(Box<psk::Session>),
}

impl std::fmt::Debug for Session {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Certificates(_) => "Certificates(..)",
            Self::Psk(_) => "Psk(..)",
        })
    }
}

/// What receiving brought.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Heard {
    /// The session goes on.
    More,
    /// The other side has said its last.
    End,
}

impl Session {
    /// Whether data may flow.
    pub fn is_open(&self) -> bool {
        match self {
            Self::Certificates(session) => !session.is_handshaking(),
            Self::Psk(session) => session.is_open(),
        }
    }

    /// Takes bytes of the stream: data goes to `plain`, what is to be sent in return to `wire`, also when this fails.
    ///
    /// # Errors
    /// A sentence on what is wrong with the other side, or what it says is wrong with us.
    pub fn receive(
        &mut self,
        bytes: &[u8],
        plain: &mut Vec<u8>,
        wire: &mut Vec<u8>,
    ) -> Result<Heard, String> {
        match self {
            Self::Psk(session) => {
                session.receive(bytes, plain, wire).map_err(|failure| failure.why)?;
                Ok(if session.is_closed() { Heard::End } else { Heard::More })
            }
            Self::Certificates(session) => {
                let heard = hear(session, bytes, plain);
                flush(session, wire);
                heard
            }
        }
    }

    /// Protects data.
    ///
    /// # Errors
    /// A sentence on why not.
    pub fn send(&mut self, data: &[u8], wire: &mut Vec<u8>) -> Result<(), String> {
        match self {
            Self::Psk(session) => session.send(data, wire).map_err(|failure| failure.why),
            Self::Certificates(session) => {
                let mut left = data;
                while !left.is_empty() {
                    let taken = session.writer().write(left).map_err(|error| error.to_string())?;
                    flush(session, wire);
                    left = &left[taken..];
                }
                Ok(())
            }
        }
    }

    /// What is to be said without being asked: a client's beginning, an end.
    pub fn flush(&mut self, wire: &mut Vec<u8>) {
        if let Self::Certificates(session) = self {
            flush(session, wire);
        }
    }

    /// Sends the closing alert.
    pub fn close(&mut self, wire: &mut Vec<u8>) {
        match self {
            Self::Psk(session) => session.close(wire),
            Self::Certificates(session) => {
                session.send_close_notify();
                flush(session, wire);
            }
        }
    }
}

fn flush(session: &mut rustls::Connection, wire: &mut Vec<u8>) {
    while session.wants_write() {
        // Writing to memory does not fail.
        if session.write_tls(wire).is_err() {
            return;
        }
    }
}

fn hear(session: &mut rustls::Connection, bytes: &[u8], plain: &mut Vec<u8>) -> Result<Heard, String> {
    let mut left = bytes;
    while !left.is_empty() {
        session.read_tls(&mut left).map_err(|error| error.to_string())?;
        session.process_new_packets().map_err(|error| explain(&error))?;
        loop {
            let start = plain.len();
            plain.resize(start + PIECE_LEN, 0);
            let read = session.reader().read(&mut plain[start..]);
            plain.truncate(start + read.as_ref().map_or(0, |len| *len));
            match read {
                Ok(0) => return Ok(Heard::End),
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) => return Err(error.to_string()),
            }
        }
    }
    Ok(Heard::More)
}

/// The library's errors, with what to look at.
fn explain(error: &rustls::Error) -> String {
    use rustls::{AlertDescription as Alert, CertificateError as Certificate, Error};
    let hint = match error {
        Error::InvalidCertificate(Certificate::Expired | Certificate::ExpiredContext { .. }) => {
            "its certificate has expired"
        }
        Error::InvalidCertificate(Certificate::NotValidYet | Certificate::NotValidYetContext { .. }) => {
            "its certificate is not valid yet"
        }
        Error::InvalidCertificate(Certificate::UnknownIssuer | Certificate::BadSignature) => {
            "its certificate was not signed by the authority in ca-cert.pem"
        }
        Error::InvalidCertificate(
            Certificate::NotValidForName | Certificate::NotValidForNameContext { .. },
        ) => "its certificate is for another host: name the right one with tls-hostname",
        Error::NoCertificatesPresented => "it has no certificate, and one is required",
        Error::AlertReceived(Alert::CertificateRequired) => {
            "the other side requires a certificate, and there is no client-cert.pem"
        }
        Error::AlertReceived(Alert::UnknownCA) => {
            "the other side does not know the authority that signed our certificate"
        }
        Error::AlertReceived(Alert::CertificateExpired) => {
            "the other side says that our certificate has expired"
        }
        Error::AlertReceived(Alert::HandshakeFailure) => {
            "the other side found no common way: it may want a pre-shared key instead of certificates"
        }
        _ => return error.to_string(),
    };
    format!("{hint} ({error})")
}
