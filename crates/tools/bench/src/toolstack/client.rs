//! A client of XenAPI that costs little: it keeps its connection, and a call that is repeated is put into words once.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use rustls::{ClientConfig, RootCertStore};
use serde::Serialize;
use serde_json::{Value, json};

/// What one call may take: a start of 255 disks, one at a time.
const CALL_MAX: Duration = Duration::from_secs(900);
/// Longest answer, in bytes.
const ANSWER_LEN_MAX: usize = 1 << 30;
/// Longest line of an answer's head, and most lines.
const LINE_LEN_MAX: u64 = 16 << 10;
const LINES_MAX: usize = 100;

/// How calls are put into words.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Encoding {
    /// JSON-RPC 2.0.
    Json,
    /// XML-RPC.
    Xml,
}

/// Where the daemon is reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Transport {
    /// Its UNIX socket.
    Unix,
    /// TLS on loopback.
    Https,
}

trait Wire: Read + Write + Send {}
impl<T: Read + Write + Send> Wire for T {}

/// One connection.
pub struct Client {
    stream: BufReader<Box<dyn Wire>>,
    encoding: Encoding,
    session: String,
    answer: Vec<u8>,
}

impl std::fmt::Debug for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Client").field("encoding", &self.encoding).finish_non_exhaustive()
    }
}

fn lost(error: impl std::fmt::Display) -> String {
    format!("the connection to tapiod was lost: {error}")
}

/// A configuration that trusts one certificate.
fn trusting(certificate: &Path) -> Result<Arc<ClientConfig>, String> {
    let unreadable = |error: &dyn std::fmt::Display| format!("{}: {error}", certificate.display());
    let mut roots = RootCertStore::empty();
    let certificate = CertificateDer::from_pem_file(certificate).map_err(|error| unreadable(&error))?;
    roots.add(certificate).map_err(|error| unreadable(&error))?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder =
        ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions().map_err(lost)?;
    Ok(Arc::new(builder.with_root_certificates(roots).with_no_client_auth()))
}

impl Client {
    /// Over the UNIX socket; `session` is empty before the login.
    pub fn unix(socket: &Path, encoding: Encoding, session: &str) -> Result<Self, String> {
        let stream = UnixStream::connect(socket).map_err(lost)?;
        stream.set_read_timeout(Some(CALL_MAX)).map_err(lost)?;
        Ok(Self::on(Box::new(stream), encoding, session))
    }

    /// Over TLS; `certificate` is the file that the daemon made for itself.
    pub fn https(
        address: &str,
        certificate: &Path,
        encoding: Encoding,
        session: &str,
    ) -> Result<Self, String> {
        let stream = TcpStream::connect(address).map_err(lost)?;
        stream.set_nodelay(true).map_err(lost)?;
        stream.set_read_timeout(Some(CALL_MAX)).map_err(lost)?;
        let name = rustls::pki_types::ServerName::try_from("localhost").map_err(lost)?;
        let tls = rustls::ClientConnection::new(trusting(certificate)?, name).map_err(lost)?;
        Ok(Self::on(Box::new(rustls::StreamOwned::new(tls, stream)), encoding, session))
    }

    fn on(stream: Box<dyn Wire>, encoding: Encoding, session: &str) -> Self {
        Self {
            stream: BufReader::with_capacity(64 << 10, stream),
            encoding,
            session: session.into(),
            answer: Vec::new(),
        }
    }

    /// Logs in as the local superuser; answers the session.
    pub fn login(&mut self) -> Result<String, String> {
        let body = json!({"jsonrpc": "2.0", "id": 0, "method": "session.login_with_password", "params": ["root", ""]});
        let session =
            self.json("session.login_with_password", &request(Encoding::Json, &body.to_string()))?;
        self.session = session.as_str().ok_or("the login gave no session")?.to_owned();
        Ok(self.session.clone())
    }

    /// Calls a message in JSON, with the session before its parameters.
    pub fn call(&mut self, method: &str, params: &[Value]) -> Result<Value, String> {
        let mut all = vec![Value::from(self.session.as_str())];
        all.extend_from_slice(params);
        let body = json!({"jsonrpc": "2.0", "id": 0, "method": method, "params": all});
        self.json(method, &request(Encoding::Json, &body.to_string()))
    }

    /// As [`Self::call`], for what answers a text.
    pub fn text(&mut self, method: &str, params: &[Value]) -> Result<String, String> {
        let value = self.call(method, params)?;
        value
            .as_str()
            .map(str::to_owned)
            .ok_or_else(|| format!("{method} answered {value} instead of a text"))
    }

    fn json(&mut self, method: &str, request: &[u8]) -> Result<Value, String> {
        self.exchange(request)?;
        let mut answer: Value = serde_json::from_slice(&self.answer)
            .map_err(|error| format!("{method}: not understood: {error}"))?;
        match answer.get("error") {
            None | Some(Value::Null) => Ok(answer["result"].take()),
            Some(error) => Err(format!("{method}: {error}")),
        }
    }

    /// A call with texts as parameters, in the words of this connection.
    pub fn prepare(&self, method: &str, params: &[&str]) -> Vec<u8> {
        let all = std::iter::once(self.session.as_str()).chain(params.iter().copied());
        let body = match self.encoding {
            Encoding::Json => {
                let params: Vec<&str> = all.collect();
                json!({"jsonrpc": "2.0", "id": 0, "method": method, "params": params}).to_string()
            }
            Encoding::Xml => {
                // References and names of ours hold nothing that XML would want escaped.
                let params: String = all
                    .map(|text| format!("<param><value><string>{text}</string></value></param>"))
                    .collect();
                format!(
                    "<?xml version=\"1.0\"?><methodCall><methodName>{method}</methodName><params>{params}</params>\
                     </methodCall>"
                )
            }
        };
        request(self.encoding, &body)
    }

    /// Sends what was prepared; answers the length of a successful answer, in bytes.
    pub fn send(&mut self, request: &[u8]) -> Result<usize, String> {
        self.exchange(request)?;
        let success: &[u8] = match self.encoding {
            Encoding::Json => b"\"result\"",
            Encoding::Xml => b"Success",
        };
        if self.answer.windows(success.len()).any(|part| part == success) {
            return Ok(self.answer.len());
        }
        let start = &self.answer[..self.answer.len().min(300)];
        Err(format!("tapiod answered {}", String::from_utf8_lossy(start)))
    }

    fn exchange(&mut self, request: &[u8]) -> Result<(), String> {
        let wire = self.stream.get_mut();
        wire.write_all(request).and_then(|()| wire.flush()).map_err(lost)?;
        self.answer.clear();
        let mut len = None;
        let mut is_chunked = false;
        for at in 0..LINES_MAX {
            let line = self.line()?;
            if at == 0 && line.split(' ').nth(1) != Some("200") {
                return Err(format!("tapiod answered '{line}'"));
            }
            let (name, value) = line.split_once(':').unwrap_or((&line, ""));
            match name.to_ascii_lowercase().as_str() {
                "" => break,
                "content-length" => len = value.trim().parse::<usize>().ok(),
                "transfer-encoding" => is_chunked = value.contains("chunked"),
                _ => {}
            }
        }
        if !is_chunked {
            return self.take(len.ok_or("tapiod's answer has no length")?);
        }
        loop {
            let line = self.line()?;
            let size = line.split(';').next().unwrap_or_default().trim();
            let size = usize::from_str_radix(size, 16).map_err(lost)?;
            self.take(size)?;
            self.line()?;
            if size == 0 {
                return Ok(());
            }
        }
    }

    /// Takes so many bytes of the answer.
    fn take(&mut self, len: usize) -> Result<(), String> {
        let before = self.answer.len();
        let whole = before.checked_add(len).filter(|whole| *whole <= ANSWER_LEN_MAX);
        self.answer.resize(whole.ok_or_else(|| format!("an answer of {len} bytes is too long"))?, 0);
        self.stream.read_exact(&mut self.answer[before..]).map_err(lost)
    }

    fn line(&mut self) -> Result<String, String> {
        let mut bytes = Vec::new();
        (&mut self.stream).take(LINE_LEN_MAX).read_until(b'\n', &mut bytes).map_err(lost)?;
        if bytes.pop() != Some(b'\n') {
            return Err(lost("it ended in the middle of an answer"));
        }
        Ok(String::from_utf8_lossy(&bytes).trim_end().to_owned())
    }
}

/// A whole request.
fn request(encoding: Encoding, body: &str) -> Vec<u8> {
    let (path, kind) = match encoding {
        Encoding::Json => ("/jsonrpc", "application/json"),
        Encoding::Xml => ("/", "text/xml"),
    };
    format!(
        "POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    )
    .into_bytes()
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;

    /// Takes everything and answers what it was told to.
    struct Canned(io::Cursor<Vec<u8>>);

    impl Read for Canned {
        fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
            self.0.read(into)
        }
    }

    impl Write for Canned {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn answered(text: &str, encoding: Encoding) -> Client {
        Client::on(Box::new(Canned(io::Cursor::new(text.as_bytes().to_vec()))), encoding, "s")
    }

    #[test]
    fn answers_of_known_and_unknown_length_are_read() {
        let body = r#"{"result":"x","id":0}"#;
        let whole = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{body}", body.len());
        assert_eq!(answered(&whole, Encoding::Json).call("a.b", &[]), Ok(json!("x")));
        let parts = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n6\r\n{\"resu\r\nb\r\nlt\":\"y\"   }\r\n0\r\n\r\n";
        assert_eq!(answered(parts, Encoding::Json).call("a.b", &[]), Ok(json!("y")));
    }

    #[test]
    fn failures_are_told() {
        let body = r#"{"error":{"code":1,"message":"HANDLE_INVALID"}}"#;
        let whole = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{body}", body.len());
        assert!(answered(&whole, Encoding::Json).call("a.b", &[]).unwrap_err().contains("HANDLE_INVALID"));
        assert!(answered(&whole, Encoding::Json).send(b"x").unwrap_err().contains("HANDLE_INVALID"));
        for broken in
            ["", "HTTP/1.1 500 no\r\n\r\n", "HTTP/1.1 200 OK\r\n\r\n", "HTTP/1.1 200 OK\r\nContent-Le"]
        {
            assert!(answered(broken, Encoding::Xml).send(b"x").is_err(), "{broken}");
        }
        let huge = "HTTP/1.1 200 OK\r\nContent-Length: 18446744073709551615\r\n\r\n";
        assert!(answered(huge, Encoding::Xml).send(b"x").unwrap_err().contains("too long"));
    }
}
